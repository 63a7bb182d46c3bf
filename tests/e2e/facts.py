"""What end-to-end tests ask the database: how far it got, who waits, and what was committed how often."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
from support import until

from gendurable.db.connection import Connection

# The sessions of workers, not those of tests and of the command line.
WORKERS = "application_name ~ '^gendurable (poller|committer|heartbeat|maintenance|lock|spare)'"

# Writes down each change of a status, in the transaction that makes it.
AUDIT = """
create table audit (place bigserial, id bigint, was text, became text, step text, next_step text, fence bigint);

create function write_down() returns trigger language plpgsql as $$
begin
  insert into public.audit (id, was, became, step, next_step, fence)
  values (new.id, old.status, new.status, old.step, new.step, new.fence);
  return null;
end $$;

create trigger write_down after update on gen_durable
  for each row when (old.status <> new.status) execute function write_down();
"""


def done(conn: Connection, ids: Sequence[int]) -> int:
    query = "select count(*) from gen_durable where id = any(%s) and status = 'done'"
    [(count,)] = conn.execute(query, [list(ids)]).fetchall()
    return int(count)


def until_done(conn: Connection, ids: Sequence[int], deadline: float = 30) -> None:
    until(lambda: done(conn, ids) == len(ids), f"all {len(ids)} done", deadline)


def claims(conn: Connection, ids: Sequence[int]) -> int:
    """How many times these were claimed, or taken away again."""
    [(count,)] = conn.execute("select sum(fence) from gen_durable where id = any(%s)", [list(ids)]).fetchall()
    return int(count)


def waiting(conn: Connection, application: str) -> int:
    """How many sessions of this name wait for a lock."""
    query = """select count(*) from pg_stat_activity
               where application_name = %s and datname = current_database() and wait_event_type = 'Lock'"""
    [(count,)] = conn.execute(query, [application]).fetchall()
    return int(count)


def terminate(conn: Connection, which: str = WORKERS) -> int:
    """End sessions on this database; return how many."""
    query = f"""select count(pg_terminate_backend(pid)) from pg_stat_activity
                where datname = current_database() and {which}"""
    [(count,)] = conn.execute(query).fetchall()
    return int(count)


def committed_twice(conn: Connection) -> list[tuple[object, ...]]:
    """Which ends, changes of step and releases of a parent were committed more than once; needs AUDIT.

    For machines that come to each of their steps once.
    """
    query = """select id, was, became, step, next_step, count(*) from audit
               where became in ('done', 'failed') or step <> next_step or was = 'awaiting_children'
               group by id, was, became, step, next_step having count(*) > 1"""
    return conn.execute(query).fetchall()


@contextmanager
def terminating(dsn: str, every: float = 0.15) -> Iterator[list[int]]:
    """End the sessions of all workers on a database again and again; yields how many, each time."""
    ended: list[int] = []
    enough = threading.Event()

    def go_on() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not enough.wait(every):
                ended.append(terminate(conn))

    with ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(go_on)
        try:
            yield ended
        finally:
            enough.set()
            going_on.result()
