"""Transactional steps: what they write, their outcome, their children and their signals are one commit, or none."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from support import expire, inbox, row

from gendurable import (
    FSM,
    Again,
    Await,
    Context,
    Done,
    Interrupted,
    Job,
    Next,
    Outcome,
    Retry,
    Snooze,
    Spawn,
    Status,
    Stop,
    step,
)
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.errors import InvalidInstance, NotTransactional, TransactionMisused
from gendurable.testing import Harness, context
from gendurable.testing.harness import LEASE

MakeHarness = Callable[..., Harness]
State = dict[str, Any]


class Writer(FSM[State], name="writer"):
    """Writes a line, then does what it was told; its second step is a plain one."""

    def __init__(self, play: Callable[[Context[State]], Any] = lambda _: Done(), handle: Any = None) -> None:
        self._play = play
        self._handle = handle
        self.errors: list[Exception] = []

    @step(transactional=True)
    def start(self, ctx: Context[State]) -> Outcome[State]:
        ctx.conn.execute("insert into lines (id) values (%s)", [ctx.id])
        outcome: Outcome[State] = self._play(ctx)
        return outcome

    @step
    def plain(self, ctx: Context[State]) -> Outcome[State]:
        return Done()

    def handle(self, error: Exception, ctx: Context[State]) -> Outcome[State]:
        self.errors.append(error)
        answer: Outcome[State] = self._handle(error, ctx) if self._handle else Stop(error)
        return answer


class Waiter(FSM[State], name="waiter"):
    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return Await("go", then=self.went)

    @step
    def went(self, ctx: Context[State]) -> Outcome[State]:
        return Done({"got": [each.payload for each in ctx.awaited]})


@pytest.fixture(autouse=True)
def _lines(conn: Connection) -> Iterator[None]:
    conn.execute("create table lines (id bigint not null)")
    yield
    conn.execute("drop table lines")


def lines(conn: Connection) -> list[int]:
    return [id for (id,) in conn.execute("select id from lines order by id")]


def raising(error: BaseException) -> Callable[..., Any]:
    def play(*_: Any) -> Any:
        raise error

    return play


# Together, or not at all.

KINDS: dict[str, Callable[[Context[State]], Any]] = {
    "next": lambda _: Next("plain", delay=60),
    "retry": lambda _: Retry(delay=60),
    "again": lambda _: Again(delay=60),
    "await": lambda _: Await("go", "plain"),
    "spawn": lambda _: Spawn([Waiter.new(schedule_in=60)], "plain"),
    "done": lambda _: Done(),
    "stop": lambda _: Stop("enough"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [None, "k"])
def test_what_a_step_writes_is_committed_with_every_kind_of_outcome(
    harness: MakeHarness, conn: Connection, kind: str, key: str | None
):
    durable = harness(Writer(KINDS[kind]), Waiter)
    id = durable.insert(Writer.new({}, partition_key=key))
    assert durable.drain() == {kind: 1}
    assert lines(conn) == [id]


def test_an_interrupted_step_keeps_what_it_wrote(harness: MakeHarness, conn: Connection):
    durable = harness(Writer(lambda _: Interrupted()))
    id = durable.insert(Writer.new({}))
    assert durable.drain(shutting_down=True) == {"interrupted": 1}
    assert (lines(conn), row(conn, id)["status"]) == ([id], "runnable")


def test_a_step_that_fails_has_written_nothing_and_its_handler_is_heard(harness: MakeHarness, conn: Connection):
    durable = harness(Writer(raising(ValueError("no")), handle=lambda *_: Next("plain")))
    id = durable.insert(Writer.new({}))
    assert durable.drain() == {"next": 1, "done": 1}
    assert (lines(conn), row(conn, id)["status"]) == ([], "done")


@pytest.mark.parametrize("outcome", [None, Next("nowhere"), Done({"x": float("nan")})])
def test_a_bad_outcome_rolls_back_too(harness: MakeHarness, conn: Connection, outcome: Any):
    durable = harness(Writer(lambda _: outcome))
    durable.insert(Writer.new({}))
    assert durable.drain() == {"stop": 1}
    assert lines(conn) == []


def test_a_snoozing_step_has_written_nothing(harness: MakeHarness, conn: Connection):
    durable = harness(Writer(raising(Snooze(60))))
    durable.insert(Writer.new({}))
    assert durable.drain() == {"again": 1}
    assert lines(conn) == []


def test_a_crashed_step_has_written_nothing(harness: MakeHarness, conn: Connection):
    durable = harness(Writer(raising(SystemExit(1))), Waiter)
    durable.insert(Writer.new({}))
    durable.insert(Waiter.new({}))
    assert durable.drain() == {"crash": 1, "await": 1}
    assert lines(conn) == []


def test_a_constraint_that_is_checked_at_the_commit_is_the_steps_error(harness: MakeHarness, conn: Connection):
    conn.execute("alter table lines add unique (id) deferrable initially deferred")

    def twice(ctx: Context[State]) -> Outcome[State]:
        ctx.conn.execute("insert into lines (id) values (%s)", [ctx.id])
        return Done()

    machine = Writer(twice)
    durable = harness(machine)
    id = durable.insert(Writer.new({}))
    assert durable.drain() == {"stop": 1}
    assert isinstance(machine.errors[0], psycopg.errors.UniqueViolation)
    assert (lines(conn), durable.get(id).status) == ([], Status.FAILED)


def test_a_stale_claim_takes_what_the_step_wrote_along(harness: MakeHarness, conn: Connection):
    def reaped(ctx: Context[State]) -> Outcome[State]:
        expire(conn, ctx.id)
        assert store.reap(conn, worker="reaper", limit=1, lease=LEASE).all()
        conn.execute("update gen_durable set eligible_at = now() + interval '1 hour' where id = %s", [ctx.id])
        ctx.signal(waiting, "go")
        return Spawn([Waiter.new({})], "plain")

    durable = harness(Writer(reaped), Waiter)
    waiting = durable.insert(Waiter.new({}))
    durable.drain()
    id = durable.insert(Writer.new({}))
    assert durable.drain() == {}
    assert lines(conn) == []
    assert (row(conn, id)["status"], row(conn, id)["attempt"]) == ("runnable", 1)
    assert inbox(conn, waiting) == []
    assert conn.execute("select count(*) from gen_durable where parent_id is not null").fetchone() == (0,)


def test_a_step_that_lets_the_clock_run_too_far_has_written_nothing(harness: MakeHarness, conn: Connection):
    class Late(Job[State], name="late", timeout=5, max_attempts=1, transactional=True):
        def perform(self, ctx: Context[State]) -> None:
            ctx.conn.execute("insert into lines (id) values (%s)", [ctx.id])
            durable.advance(6)

    durable = harness(Late)
    id = durable.insert(Late.new({}))
    assert durable.drain() == {"stop": 1}
    assert durable.get(id).last_error == "StepTimeout: step 'perform' took longer than its 5 s"
    assert lines(conn) == []


# Signals.


def test_signals_are_delivered_with_the_outcome_and_wake_whoever_waits(harness: MakeHarness, conn: Connection):
    def tell(ctx: Context[State]) -> Outcome[State]:
        for id in reversed(waiting):
            ctx.signal(id, "go", {"from": ctx.id}, dedup_key="once")
        assert [each.id for each in ctx.sent] == list(reversed(waiting))
        assert [inbox(conn, id) for id in waiting] == [[], []]
        return Done()

    durable = harness(Writer(tell), Waiter)
    waiting = durable.insert_many([Waiter.new({}), Waiter.new({})])
    durable.drain()
    id = durable.insert(Writer.new({}))
    assert durable.drain() == {"done": 3}
    assert [durable.get(each).result for each in waiting] == [{"got": [{"from": id}]}] * 2


def test_a_signal_to_oneself_wakes_the_next_step(harness: MakeHarness):
    class Selfish(FSM[State], name="selfish"):
        @step(transactional=True)
        def start(self, ctx: Context[State]) -> Outcome[State]:
            ctx.signal(ctx.id, "go", 1)
            return Await("go", then=self.went)

        @step
        def went(self, ctx: Context[State]) -> Outcome[State]:
            return Done({"got": [each.payload for each in ctx.awaited]})

    durable = harness(Selfish)
    id = durable.insert(Selfish.new({}))
    assert durable.drain() == {"await": 1, "done": 1}
    assert durable.get(id).result == {"got": [1]}


def test_a_signal_to_nobody_is_the_steps_error(harness: MakeHarness, conn: Connection):
    def tell(ctx: Context[State]) -> Outcome[State]:
        ctx.signal(waiting, "go")
        ctx.signal(10**6, "go")
        return Done()

    durable = harness(Writer(tell), Waiter)
    waiting = durable.insert(Waiter.new({}))
    durable.drain()
    id = durable.insert(Writer.new({}))
    assert durable.drain() == {"stop": 1}
    assert "NoTarget: instance 1000000 has ended" in (durable.get(id).last_error or "")
    assert (lines(conn), inbox(conn, waiting)) == ([], [])


@pytest.mark.parametrize(
    "call",
    [("1", "go"), (0, "go"), (True, "go"), (1, ""), (1, "a\0b"), (1, "go", float("nan")), (1, "go", object())],
)
def test_a_signal_that_could_not_be_stored_is_refused_where_it_is_sent(harness: MakeHarness, call: tuple[Any, ...]):
    seen: list[Exception] = []

    def tell(ctx: Context[State]) -> Outcome[State]:
        with pytest.raises(ValueError) as refused:
            ctx.signal(*call)
        seen.append(refused.value)
        assert ctx.sent == ()
        return Done()

    durable = harness(Writer(tell))
    durable.insert(Writer.new({}))
    assert durable.drain() == {"done": 1}
    assert len(seen) == 1


# What is not the step's to do.


def closed_block(ctx: Context[State]) -> None:
    with ctx.conn:
        pass


MISUSES: dict[str, Callable[[Context[State]], Any]] = {
    "commit": lambda ctx: ctx.conn.commit(),
    "rollback": lambda ctx: ctx.conn.rollback(),
    "close": lambda ctx: ctx.conn.close(),
    "as a block": closed_block,
}


@pytest.mark.parametrize("call", MISUSES)
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_step_that_ends_the_transaction_by_a_call_gets_a_clear_error(
    harness: MakeHarness, conn: Connection, call: str, swallowed: bool
):
    def misuse(ctx: Context[State]) -> Outcome[State]:
        try:
            MISUSES[call](ctx)
        except TransactionMisused:
            if not swallowed:
                raise
        return Done()

    durable = harness(Writer(misuse))
    id = durable.insert(Writer.new({}))
    assert durable.drain() == ({"done": 1} if swallowed else {"stop": 1})
    assert lines(conn) == ([id] if swallowed else [])
    if not swallowed:
        assert "the transaction is the engine's" in (durable.get(id).last_error or "")
    other = durable.insert(Writer.new({}))
    durable.drain()
    assert other in [*lines(conn), other], "the connection is as good as before"


@pytest.mark.parametrize("text", ["commit", "rollback", "commit; begin", "rollback; begin", "commit and chain", "end"])
def test_a_step_that_ends_the_transaction_by_a_statement_gets_a_clear_error(
    harness: MakeHarness, conn: Connection, text: str
):
    def misuse(ctx: Context[State]) -> Outcome[State]:
        ctx.conn.execute(text)
        if ctx.conn.info.transaction_status.name == "INTRANS":
            ctx.conn.execute("insert into lines (id) values (-1)")
        return Done()

    durable = harness(Writer(misuse))
    id = durable.insert(Writer.new({}))
    assert durable.drain() == {"stop": 1}
    assert "ended the transaction of ctx.conn with a statement of its own" in (durable.get(id).last_error or "")
    assert -1 not in lines(conn)


def test_a_swallowed_error_that_aborts_the_transaction_gets_a_clear_error(harness: MakeHarness, conn: Connection):
    def swallow(ctx: Context[State]) -> Outcome[State]:
        with pytest.raises(psycopg.errors.DivisionByZero):
            ctx.conn.execute("select 1 / 0")
        return Done()

    durable = harness(Writer(swallow))
    id = durable.insert(Writer.new({}))
    assert durable.drain() == {"stop": 1}
    assert "the transaction is aborted" in (durable.get(id).last_error or "")
    assert lines(conn) == []


def test_what_may_fail_goes_into_a_savepoint(harness: MakeHarness, conn: Connection):
    def careful(ctx: Context[State]) -> Outcome[State]:
        with pytest.raises(psycopg.errors.DivisionByZero), ctx.conn.transaction():
            ctx.conn.execute("insert into lines (id) values (-1)")
            ctx.conn.execute("select 1 / 0")
        with ctx.conn.transaction(), ctx.conn.transaction():
            ctx.conn.execute("insert into lines (id) values (-2)")
        return Done()

    durable = harness(Writer(careful))
    id = durable.insert(Writer.new({}))
    assert durable.drain() == {"done": 1}
    assert lines(conn) == [-2, id]


def test_a_statement_that_is_not_finished_gets_a_clear_error(harness: MakeHarness, conn: Connection):
    kept: list[Any] = []

    def half_read(ctx: Context[State]) -> Outcome[State]:
        rows = ctx.conn.cursor().stream("select generate_series(1, 1000000)")
        next(rows)
        kept.append(rows)
        return Done()

    with Harness(conn.info.dsn, [Writer(half_read)]) as durable:
        id = durable.insert(Writer.new({}))
        with pytest.raises(psycopg.OperationalError):
            durable.drain()  # the harness has but this one connection, and nothing else ends such a statement
    assert row(conn, id)["status"] == "executing"
    assert lines(conn) == []


def test_a_plain_step_and_a_handler_have_no_transaction(harness: MakeHarness):
    class Plain(Job[State], name="plain", max_attempts=1):
        def perform(self, ctx: Context[State]) -> None:
            getattr(ctx, ctx.state["what"])

    def handle(_: Exception, ctx: Context[State]) -> Outcome[State]:
        with pytest.raises(NotTransactional, match=r"ctx.signal: step 'start' has no transaction"):
            ctx.signal(1, "go")
        assert ctx.sent == ()
        return Done()

    durable = harness(Plain, Writer(raising(ValueError()), handle=handle))
    id = durable.insert(Plain.new({"what": "conn"}))
    durable.insert(Writer.new({}))
    assert durable.drain() == {"stop": 1, "done": 1}
    assert "ctx.conn: step 'perform' has no transaction; mark it with @step(transactional=True)" in (
        durable.get(id).last_error or ""
    )


# A session as the role has it.

SETTINGS = ("search_path", "TimeZone", "DateStyle", "lock_timeout", "enable_seqscan", "plan_cache_mode")


def settings(conn: Connection) -> dict[str, str]:
    query = "select name, setting from pg_settings where name = any(%s)"
    return dict(psycopg.Cursor(conn).execute(query, [list(SETTINGS)]).fetchall())


def test_a_step_works_with_the_defaults_of_its_role(harness: MakeHarness, dsn: str):
    found: list[dict[str, str]] = []

    def look(ctx: Context[State]) -> Outcome[State]:
        found.append(settings(ctx.conn))
        return Done()

    durable = harness(Writer(look))
    durable.insert(Writer.new({}))
    assert durable.drain() == {"done": 1}
    with psycopg.connect(dsn) as fresh:
        assert found == [settings(fresh)]


def test_what_a_step_does_to_its_session_does_not_outlive_it(harness: MakeHarness, conn: Connection):
    def spoil(ctx: Context[State]) -> Outcome[State]:
        ctx.conn.execute("set search_path to pg_catalog")
        ctx.conn.execute("set lock_timeout to '7s'")
        ctx.conn.execute("set local statement_timeout to '7s'")
        ctx.conn.execute("create temp table gen_durable (id bigint)")
        ctx.conn.execute("select pg_advisory_lock(99)")
        ctx.conn.execute("declare kept cursor with hold for select 1")
        ctx.conn.row_factory = dict_row
        ctx.conn.cursor_factory = psycopg.ClientCursor
        ctx.conn.adapters.register_loader("int8", psycopg.types.string.TextLoader)
        return Done()

    next_one = other_writer()
    durable = harness(Writer(spoil), next_one)
    before = settings(durable._conn)
    durable.insert(Writer.new({}))
    assert durable.drain() == {"done": 1}
    assert settings(durable._conn) == before
    assert conn.execute("select pg_try_advisory_lock(99)").fetchone() == (True,)
    assert durable._conn.execute("select count(*) from pg_cursors").fetchone() == (0,)
    durable.insert(next_one.new({}))
    assert durable.drain() == {"done": 1}


def other_writer() -> type[FSM[State]]:
    class Other(Job[State], name="other", transactional=True):
        def perform(self, ctx: Context[State]) -> None:
            assert ctx.conn.execute("select 1::bigint").fetchone() == (1,)
            ctx.conn.execute("create temp table gen_durable (id bigint)")

    return Other


def test_a_step_may_play_another_role(harness: MakeHarness, conn: Connection):
    conn.execute("drop role if exists gendurable_tenant")
    conn.execute("create role gendurable_tenant")
    conn.execute("grant insert on lines to gendurable_tenant")
    try:

        def disguised(ctx: Context[State]) -> Outcome[State]:
            ctx.conn.execute("set local role gendurable_tenant")
            ctx.conn.execute("insert into lines (id) values (-1)")
            return Done()

        durable = harness(Writer(disguised))
        id = durable.insert(Writer.new({}))
        assert durable.drain() == {"done": 1}
        assert lines(conn) == [-1, id]
    finally:
        conn.execute("drop owned by gendurable_tenant")
        conn.execute("drop role gendurable_tenant")


def test_the_engine_finds_its_tables_wherever_they_are(fresh_database: str):
    def look(ctx: Context[State]) -> Outcome[State]:
        assert ctx.conn.execute("select to_regclass('gen_durable')").fetchone() == (None,)
        ctx.signal(waiting, "go")
        return Spawn([Waiter.new({}, schedule_in=60)], "plain")

    with psycopg.connect(fresh_database, autocommit=True) as plain:
        plain.execute("create table lines (id bigint)")
    with Harness(fresh_database, [Writer(look), Waiter], schema="elsewhere") as durable:
        waiting = durable.insert(Waiter.new({}))
        durable.drain()
        durable.insert(Writer.new({}))
        assert durable.drain() == {"spawn": 1, "done": 1}


# Without an engine.


def test_a_unit_test_gives_a_connection_and_reads_what_was_sent(conn: Connection):
    def tell(ctx: Context[State]) -> Outcome[State]:
        ctx.signal(7, "paid", {"amount": 1}, dedup_key="k")
        return Done()

    ctx = context({}, id=42, conn=conn)
    assert Writer(tell).start(ctx) == Done()
    assert lines(conn) == [42]
    [sent] = ctx.sent
    assert (sent.id, sent.name, sent.payload, sent.dedup_key) == (7, "paid", {"amount": 1}, "k")
    with pytest.raises(InvalidInstance, match="id"):
        ctx.signal(0, "paid")
