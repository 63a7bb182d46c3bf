"""What many tests need: hold a row, run something in a thread, and wait for facts, never for time."""

import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

from gendurable.db.connection import Connection

T = TypeVar("T")

DEADLINE = 20.0


def until(fact: Callable[[], T], what: str = "the fact", deadline: float = DEADLINE) -> T:
    """Wait until `fact()` is truthy and return it; fail with its name when the deadline passes."""
    give_up = time.monotonic() + deadline
    while not (value := fact()):
        assert time.monotonic() < give_up, f"{what} did not come about within {deadline} s"
        time.sleep(0.005)
    return value


def is_running(pid: int) -> bool:
    """Whether the process works; one that has ended and was not collected by its parent yet does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return not found.stdout.startswith("Z") and bool(found.stdout)


@contextmanager
def hold(conn: Connection, id: int) -> Iterator[None]:
    """Lock one instance's row as a transaction under way would, and let go by rolling back.

    No key update, not update: the foreign-key check of a signal must still get through.
    """
    conn.execute("begin")
    conn.execute("select 1 from gen_durable where id = %s for no key update", [id])
    try:
        yield
    finally:
        conn.execute("rollback")


def is_blocked(observer: Connection, pid: int) -> bool:
    row = observer.execute("select wait_event_type from pg_stat_activity where pid = %s", [pid]).fetchone()
    return row is not None and row[0] == "Lock"


class Background:
    """Runs calls in threads; each on its own connection, whose backend can be seen waiting for a lock."""

    def __init__(self, observer: Connection) -> None:
        self._observer = observer
        self._pool = ThreadPoolExecutor(max_workers=8)

    def start(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> "Future[T]":
        return self._pool.submit(call, *args, **kwargs)

    def start_blocked(self, conn: Connection, call: Callable[..., T], *args: Any, **kwargs: Any) -> "Future[T]":
        """Start a call that works on `conn` and return once the server says that it waits for a lock."""
        pid = conn.info.backend_pid
        future = self.start(call, *args, **kwargs)
        until(lambda: future.done() or is_blocked(self._observer, pid), "the call waiting for a lock")
        assert not future.done(), f"the call did not wait for the lock: {future.exception() or future.result()!r}"
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def row(conn: Connection, id: int) -> dict[str, Any]:
    """Read one instance's row, raw."""
    cursor = conn.cursor(row_factory=psycopg.rows.dict_row)
    found = cursor.execute("select * from gen_durable where id = %s", [id]).fetchone()
    assert found is not None, f"no instance {id}"
    return found


def inbox(conn: Connection, id: int) -> list[str]:
    """Read the names of an instance's signals, oldest first."""
    rows = conn.execute("select name from signals where target_id = %s order by id", [id]).fetchall()
    return [name for (name,) in rows]


def expire(conn: Connection, *ids: int) -> None:
    """Let leases run out, without waiting."""
    conn.execute(
        "update gen_durable set lease_expires_at = now() - interval '1 second' where id = any(%s)", [list(ids)]
    )
