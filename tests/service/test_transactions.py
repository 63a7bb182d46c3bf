"""Transactional steps in a worker: under locks, lost sessions, timeouts and cancels nothing is half done or done twice."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import frozen
from inprocess import working
from pooler import Choice, Pooler
from support import hold, inbox, is_blocked, row, until

from gendurable import FSM, Client, Context, Done, Job, Outcome, Retry, Stop, step
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.errors import StepTimeout
from gendurable.events import (
    LockLost,
    OutcomeLate,
    OutcomeStale,
    StepCommitted,
    StepCrashed,
    StepFailed,
    ThreadAbandoned,
    TransactionLost,
)

NewConn = Callable[[], Connection]
State = dict[str, Any]
KEYS = pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])


class Writer(FSM[State], name="writer"):
    """Writes a line in its transaction and then waits for the test, in its first execution."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.entered = threading.Semaphore(0)
        self.pids: list[int] = []
        self.errors: list[Exception] = []
        self.tells: dict[int, int] = {}

    @step(transactional=True)
    def start(self, ctx: Context[State]) -> Outcome[State]:
        ctx.conn.execute("insert into lines (id, attempt) values (%s, %s)", [ctx.id, ctx.attempt])
        self.pids.append(ctx.conn.info.backend_pid)
        if ctx.id in self.tells:
            ctx.signal(self.tells[ctx.id], "hello")
        self.entered.release()
        if not ctx.attempt:
            assert self.go_on.wait(60)
        return Done({"by": ctx.attempt})

    def handle(self, error: Exception, ctx: Context[State]) -> Outcome[State]:
        self.errors.append(error)
        return Stop(error)


@pytest.fixture
def writer() -> Iterator[Writer]:
    machine = Writer()
    yield machine
    machine.go_on.set()


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as client:
        yield client


@pytest.fixture(autouse=True)
def _lines(conn: Connection) -> Iterator[None]:
    conn.execute("create table lines (id bigint not null, attempt int not null)")
    yield
    conn.execute("drop table lines")


def lines(conn: Connection) -> list[tuple[int, int]]:
    return conn.execute("select id, attempt from lines order by id, attempt").fetchall()


def end_session(conn: Connection, pid: int) -> None:
    conn.execute("select pg_terminate_backend(%s)", [pid])


@KEYS
def test_it_is_committed_once_and_its_connection_kept(
    dsn: str, client: Client, conn: Connection, writer: Writer, key: str | None
):
    writer.go_on.set()
    with working(dsn, writer, queues="default=1") as running:
        ids = client.insert_many([Writer.new({}, partition_key=key) for _ in range(3)])
        for id in ids:
            assert client.wait(id, timeout=20).result == {"by": 0}
        assert len(set(writer.pids)) == 1
        until(lambda: running.worker._locks.used == 0, "the connection back")
    assert lines(conn) == [(id, 0) for id in ids]
    assert len(running.events(StepCommitted)) == 3


def test_a_keyed_one_works_in_the_very_session_that_holds_its_key(
    dsn: str, client: Client, conn: Connection, new_conn: NewConn, writer: Writer
):
    with working(dsn, writer):
        id = client.insert(Writer.new({}, partition_key="k"))
        assert writer.entered.acquire(timeout=20)
        query = "select pid from pg_locks where locktype = 'advisory' and granted and database = (select oid from pg_database where datname = current_database())"
        assert conn.execute(query).fetchall() == [(writer.pids[0],)]
        other = new_conn()
        assert store.lock_partitions(other, keys=["k"]).all() == []
        writer.go_on.set()
        assert client.wait(id, timeout=20).status == "done"
        until(lambda: store.lock_partitions(other, keys=["k"]).all(), "the key free")


@KEYS
def test_a_row_that_somebody_holds_is_waited_for_and_the_transaction_kept(
    dsn: str, client: Client, new_conn: NewConn, writer: Writer, key: str | None
):
    conn = new_conn()
    with working(dsn, writer) as running:
        id = client.insert(Writer.new({}, partition_key=key))
        assert writer.entered.acquire(timeout=20)
        with hold(new_conn(), id):
            writer.go_on.set()
            until(lambda: is_blocked(conn, writer.pids[0]), "the outcome waiting")
            # Past the engine's lock timeout: it must have let go of the row and asked for it again.
            until(lambda: not is_blocked(conn, writer.pids[0]), "the first try over")
            until(lambda: is_blocked(conn, writer.pids[0]), "the second try")
            assert lines(conn) == []
        assert client.wait(id, timeout=20).status == "done"
    assert lines(conn) == [(id, 0)]
    assert (writer.errors, running.events(StepFailed)) == ([], [])


@KEYS
def test_a_session_lost_in_the_middle_leaves_nothing_and_the_step_runs_again(
    dsn: str, client: Client, conn: Connection, writer: Writer, key: str | None
):
    with working(dsn, writer) as running:
        id = client.insert(Writer.new({}, partition_key=key))
        assert writer.entered.acquire(timeout=20)
        end_session(conn, writer.pids[0])
        writer.go_on.set()
        assert client.wait(id, timeout=20).result == {"by": 1}
        assert [event.id for event in running.events(TransactionLost)] == [id]
        assert running.events(LockLost) == []
    assert lines(conn) == [(id, 1)]
    assert writer.errors == [], "nobody's mistake"


@KEYS
def test_a_session_lost_at_the_very_commit_leaves_all_or_nothing(
    dsn: str, client: Client, new_conn: NewConn, writer: Writer, key: str | None
):
    conn = new_conn()
    # A check at the commit waits for a lock that the test holds: the outcome is written, nothing is committed yet.
    conn.execute("""
        create function linger() returns trigger language plpgsql as
        $$ begin perform pg_advisory_xact_lock_shared(725); return null; end $$;
        create constraint trigger linger after insert on lines deferrable initially deferred
        for each row execute function linger()
    """)
    gatekeeper = new_conn()
    gatekeeper.execute("select pg_advisory_lock(725)")
    writer.go_on.set()
    try:
        with working(dsn, writer) as running:
            id = client.insert(Writer.new({}, partition_key=key))
            until(lambda: writer.pids and is_blocked(conn, writer.pids[0]), "the commit under way")
            end_session(conn, writer.pids[0])
            running.wait_for(TransactionLost)
            gatekeeper.execute("select pg_advisory_unlock(725)")
            assert client.wait(id, timeout=20).result == {"by": 1}
    finally:
        conn.execute("drop function linger cascade")
    assert lines(conn) == [(id, 1)]
    assert writer.errors == []


@KEYS
def test_a_claim_that_was_lost_meanwhile_takes_the_writes_along(
    dsn: str, client: Client, conn: Connection, writer: Writer, key: str | None
):
    with working(dsn, writer) as running:
        id = client.insert(Writer.new({}, partition_key=key))
        assert writer.entered.acquire(timeout=20)
        assert client.cancel(id)
        writer.go_on.set()
        [stale] = running.wait_for(OutcomeStale)
        assert stale.id == id
        until(lambda: running.worker._locks.used == 0, "the connection back")
    assert (lines(conn), row(conn, id)["status"]) == ([], "cancelled")


def test_two_that_signal_each_other_do_not_wait_in_a_ring(dsn: str, client: Client, conn: Connection, writer: Writer):
    with working(dsn, writer, queues="default=2") as running:
        first, second = client.insert_many([Writer.new({}, schedule_in=0.5), Writer.new({}, schedule_in=0.5)])
        writer.tells = {first: second, second: first}
        for _ in range(2):
            assert writer.entered.acquire(timeout=20)
        writer.go_on.set()
        ends = [client.wait(id, timeout=20) for id in (first, second)]
        # Whoever is second finds the other one ended: that is no target any more, and its own mistake.
        assert sorted(str(end.status) for end in ends) == ["done", "failed"]
        assert "NoTarget" in str(writer.errors)
        until(lambda: running.worker._locks.used == 0, "the connections back")
    [(written, _)] = lines(conn)
    assert written in (first, second)


class Hanging(FSM[State], name="hanging"):
    """Locks a line and hangs, in its first execution; others write theirs."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked: list[Exception] = []

    @step(transactional=True, timeout=0.3)
    def start(self, ctx: Context[State]) -> Outcome[State]:
        ctx.conn.execute("insert into lines (id, attempt) values (%s, %s)", [ctx.id, ctx.attempt])
        ctx.conn.execute("lock table lines in exclusive mode")
        if not ctx.attempt:
            assert self.go_on.wait(60)
        return Done({"by": ctx.attempt})

    def handle(self, error: Exception, ctx: Context[State]) -> Outcome[State]:
        self.asked.append(error)
        return Retry()


@KEYS
def test_one_that_takes_too_long_loses_its_session_and_the_next_try_has_all_it_needs(
    dsn: str, client: Client, conn: Connection, key: str | None
):
    hanging = Hanging()
    with working(dsn, hanging, queues="default=1", lock_connections=1) as running:
        id = client.insert(Hanging.new({}, partition_key=key))
        # The same key, the same table lock, and the only connection there may be: all were the hanging one's.
        assert client.wait(id, timeout=20).result == {"by": 1}
        assert len(running.events(ThreadAbandoned)) == 1
        assert [type(error) for error in hanging.asked] == [StepTimeout]
        hanging.go_on.set()
        [late] = running.wait_for(OutcomeLate)
        assert late.id == id
        until(lambda: running.worker._locks.used == 0, "the connection back")
        assert running.worker.pollers["default"].slots.abandoned == 0
    assert lines(conn) == [(id, 1)]
    assert running.events(TransactionLost) == []


class Querying(Job[State], name="querying", transactional=True, timeout=0.3, max_attempts=1):
    def perform(self, ctx: Context[State]) -> None:
        ctx.conn.execute("select pg_sleep(60)")


def test_a_statement_that_hangs_is_ended_with_its_session(dsn: str, client: Client):
    with working(dsn, Querying) as running:
        id = client.insert(Querying.new({}))
        assert client.wait(id, timeout=20).status == "failed"
        running.wait_for(OutcomeLate)
        until(lambda: running.worker.pollers["default"].slots.abandoned == 0, "the thread back")


def test_behind_a_transaction_pooler_it_is_one_commit_as_well(
    dsn: str, client: Client, conn: Connection, writer: Writer
):
    writer.go_on.set()
    waiting = client.insert(Writer.new({}, queue="elsewhere"))
    with Pooler(dsn, Choice.NEXT) as pooler, working(pooler.dsn, writer, prepare=False):
        ids = client.insert_many([Writer.new({}, schedule_in=0.5) for _ in range(5)])
        writer.tells = dict.fromkeys(ids, waiting)
        for id in ids:
            assert client.wait(id, timeout=20).status == "done"
    assert lines(conn) == [(id, 0) for id in ids]
    assert inbox(conn, waiting) == ["hello"] * 5


@frozen
class Numbered:
    n: int


class Strict(Job[Numbered], name="strict", transactional=True):
    def perform(self, ctx: Context[Numbered]) -> None: ...


@KEYS
def test_a_row_that_cannot_be_read_leaves_no_transaction_open(
    dsn: str, client: Client, conn: Connection, key: str | None
):
    with working(dsn, Strict, queues="default=1", lock_connections=1) as running:
        spoilt, sound = client.insert_many(
            [Strict.new({"n": 1}, partition_key=key, schedule_in=60), Strict.new({"n": 2}, partition_key=key)]
        )
        assert client.wait(sound, timeout=20).status == "done"
        conn.execute("update gen_durable set state = '{}', eligible_at = now() where id = %s", [spoilt])
        ended = client.wait(spoilt, timeout=20)
        assert (ended.status, "missing" in str(ended.last_error)) == ("failed", True)
        until(lambda: running.worker._locks.used == 0, "the connection back")
        [(_, kept)] = running.worker._locks._idle
        assert kept.info.transaction_status.name == "IDLE"
        assert client.wait(client.insert(Strict.new({"n": 3}, partition_key=key)), timeout=20).status == "done"


class Failing(Job[State], name="failing", transactional=True, max_attempts=1):
    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def perform(self, ctx: Context[State]) -> None:
        self.entered.set()
        assert self.go_on.wait(60)
        raise ValueError("no")


@KEYS
def test_one_that_fails_while_its_worker_drains_is_answered_for_by_its_handler(
    dsn: str, client: Client, key: str | None
):
    failing = Failing()
    with working(dsn, failing, drain_timeout="20s") as running:
        id = client.insert(Failing.new({}, partition_key=key))
        assert failing.entered.wait(20)
        draining = threading.Thread(target=running.worker.drain)
        draining.start()
        until(running.worker._stopping.is_set, "the drain under way")
        failing.go_on.set()
        draining.join()
    assert (client.get(id).status, client.get(id).last_error) == ("failed", "ValueError: no")
    assert running.events(StepCrashed) == []
