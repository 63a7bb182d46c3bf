"""What tests of races at the SQL layer share: instances, claims and outcomes in a word, and statements changed or paused."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import psycopg

from gendurable.core.claim import Claim
from gendurable.core.duration import ZERO
from gendurable.core.instance import NewInstance, new_instance
from gendurable.core.status import Status
from gendurable.core.transition import Advance, Finish, Park, Repeat, SpawnChildren, Transition
from gendurable.db import store
from gendurable.db.connection import Connection, one_commit
from gendurable.db.operations import Committed, claim_batch, delivered, send_signal
from gendurable.db.rows import Delivery

LEASE = timedelta(minutes=1)
MACHINES = ("f@1",)

NewConn: TypeAlias = Callable[[], Connection]


# Instances and claims.


def new(**about: Any) -> NewInstance:
    """An instance of the machine `f` in the queue `q`."""
    defaults: dict[str, Any] = {"fsm": "f", "fsm_version": 1, "step": "one", "state": "{}", "queue": "q"}
    return new_instance(**{**defaults, "max_crashes": 3, **about})


def insert(conn: Connection, **about: Any) -> int:
    """Insert one instance."""
    [id] = store.insert(conn, [new(**about)]).all()
    return id


def claim(
    conn: Connection, worker: str = "a", *, limit: int = 100, queue: str = "q", machines: Sequence[str] = MACHINES
) -> list[Claim]:
    """Claim what is due."""
    return claim_batch(conn, queue=queue, machines=machines, worker=worker, limit=limit, lease=LEASE)


def claim_one(conn: Connection, worker: str = "a", **about: Any) -> Claim:
    """Insert one instance and claim it; nothing else may be due."""
    id = insert(conn, **about)
    [claimed] = claim(conn, worker)
    assert claimed.id == id
    return claimed


def reap(conn: Connection, limit: int = 100) -> list[int]:
    """Take expired claims away."""
    return [row.id for row in store.reap(conn, worker="reaper", limit=limit, lease=LEASE)]


def signal(conn: Connection, id: int, name: str = "go", dedup_key: str | None = None) -> Delivery:
    """Send a signal as a client does."""
    with one_commit(conn):
        answer = send_signal(conn, id, name, {}, dedup_key)
    return delivered(id, answer)


def statuses(conn: Connection, ids: Sequence[int]) -> list[str]:
    """Read where instances stand, in the order given; a missing one is "gone"."""
    found = dict(conn.execute("select id, status::text from gen_durable where id = any(%s)", [list(ids)]).fetchall())
    return [found.get(id, "gone") for id in ids]


def family(conn: Connection, parent: int) -> list[int]:
    """Read the ids of an instance's children."""
    query = "select id from gen_durable where parent_id = %s order by child_round, child_index"
    return [id for (id,) in conn.execute(query, [parent])]


def snapshot(conn: Connection) -> tuple[list[Any], list[Any]]:
    """Read both tables as they stand, to see that something changed nothing."""
    instances = conn.execute("select * from gen_durable order by id").fetchall()
    return instances, conn.execute("select * from signals order by id").fetchall()


# Outcomes.


def shown(claimed: Claim) -> tuple[int, ...]:
    return tuple(each.id for each in claimed.awaited)


def goes_on(claimed: Claim, step: str = "two", delay: timedelta = ZERO) -> Advance:
    return Advance(claimed.id, claimed.fence, step, '{"by": "next"}', delay, shown(claimed))


def repeats(claimed: Claim, delay: timedelta = ZERO, attempts: int = 1) -> Repeat:
    return Repeat(claimed.id, claimed.fence, '{"by": "retry"}', delay, attempts)


def parks(claimed: Claim, names: str = '["go"]', timeout: timedelta | None = None) -> Park:
    return Park(claimed.id, claimed.fence, "two", '{"by": "await"}', names, timeout, shown(claimed))


def spawns(claimed: Claim, *children: NewInstance, **about: Any) -> SpawnChildren:
    return SpawnChildren(claimed.id, claimed.fence, "two", '{"by": "spawn"}', children, shown(claimed), **about)


def is_done(claimed: Claim) -> Finish:
    return Finish(claimed.id, claimed.fence, Status.DONE, '{"by": "done"}', None)


def stops(claimed: Claim) -> Finish:
    return Finish(claimed.id, claimed.fence, Status.FAILED, None, "it was stopped")


OUTCOMES: dict[str, Callable[[Claim], Transition]] = {
    "next": goes_on,
    "retry": repeats,
    "await": parks,
    "spawn": lambda claimed: spawns(claimed, new(), new()),
    "done": is_done,
    "stop": stops,
}


def written(committed: Committed) -> set[int]:
    """The ids of what a commit wrote."""
    return {change.id for change in committed.written}


# Statements, changed or paused.


class _Recorder:
    """Stands in for a connection and its cursor, and remembers what they were asked to run."""

    def __init__(self) -> None:
        self.ran: list[tuple[bytes, dict[str, Any]]] = []

    def cursor(self, **_: Any) -> "_Recorder":
        return self

    def execute(self, query: bytes, parameters: dict[str, Any]) -> "_Recorder":
        self.ran.append((query, parameters))
        return self


Changed: TypeAlias = Callable[[Connection], list[tuple[Any, ...]]]


def changed(call: Callable[[Any], Any], *changes: tuple[str, str]) -> Changed:
    """The statement that `call` runs, with parts of its text replaced, as a function of the connection.

    To pause it, or to show what happens without the part: a naive variant that stays as near to the real text as it
    can be, and breaks loudly when that text moves on.
    """
    recorder = _Recorder()
    call(recorder)
    [(query, parameters)] = recorder.ran
    text = query.decode()
    for old, new_text in changes:
        assert old in text, f"{old!r} stands no longer in {text.splitlines()[0]}"
        text = text.replace(old, new_text)
    return lambda conn: conn.execute(text, parameters).fetchall()


# A condition that is always true, once whoever has shut the gate has opened it again.
GATE = "pg_advisory_xact_lock_shared(724)::text is not null"


@contextmanager
def shut_gate(conn: Connection) -> Iterator[None]:
    """Keep statements that have GATE among their conditions waiting, their snapshot taken, their rows not yet locked."""
    conn.execute("select pg_advisory_lock(724)")
    try:
        yield
    finally:
        conn.execute("select pg_advisory_unlock(724)")


@contextmanager
def uncommitted(conn: Connection) -> Iterator[None]:
    """Run statements in a transaction that is rolled back in the end."""
    conn.execute("begin")
    try:
        yield
    finally:
        conn.execute("rollback")


def errors(*futures: "Future[Any]") -> list[str]:
    """Wait for calls and name the database errors among their ends."""
    ends = [future.exception(timeout=60) for future in futures]
    assert all(end is None or isinstance(end, psycopg.Error) for end in ends), ends
    return [type(end).__name__ for end in ends if end is not None]
