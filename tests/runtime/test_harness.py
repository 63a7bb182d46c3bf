"""The harness itself: what it drains, in which order, by which clock, and what it leaves alone."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import attrs
import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from scripted import Scripted, State, raises
from support import row

from gendurable import FSM, Await, Context, Done, Job, Next, Outcome, Registry, Retry, Spawn, Status, Stop, step
from gendurable.db.connection import Connection
from gendurable.errors import DatabaseUnavailable, GenDurableError, InvalidInstance, LoadError, NoTarget, RunawayError
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]


class Forever(FSM[State], name="forever"):
    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return Next(self.start, {"n": ctx.state.get("n", 0) + 1})


class Note(Job[State], name="note", queue="notes"):
    def __init__(self) -> None:
        self.order: list[Any] = []

    def perform(self, ctx: Context[State]) -> None:
        self.order.append(ctx.state.get("n"))


@attrs.frozen
class Typed:
    n: int


class Strict(Job[Typed], name="strict"):
    def perform(self, ctx: Context[Typed]) -> dict[str, Any]:
        return {"n": ctx.state.n}


# What a drain runs.


def test_a_drain_tells_how_many_outcomes_of_each_kind_were_committed(harness: MakeHarness):
    machine = Scripted(
        start=[Next("work"), Stop("x"), raises(SystemExit(1))],
        work=[Retry(), Spawn([Note], "finish")],
        finish=[Await("go", "finish", timeout=60), Done()],
    )
    durable = harness(machine, Note)
    assert durable.drain() == {}
    durable.insert_many([Scripted.new() for _ in range(3)])
    assert durable.drain() == {"next": 1, "stop": 1, "crash": 1, "retry": 1, "spawn": 1, "done": 1, "await": 1}
    assert durable.drain() == {}


def test_a_drain_of_one_queue_leaves_the_others_alone(harness: MakeHarness):
    durable = harness(Note)
    here, there = durable.insert(Note.new(queue="here")), durable.insert(Note.new(queue="there"))
    assert durable.drain(queue="here") == {"done": 1}
    assert (durable.get(here).status, durable.get(there).status) == (Status.DONE, Status.RUNNABLE)
    assert durable.drain("nowhere") == {}
    assert durable.drain() == {"done": 1}


@pytest.mark.parametrize("queue", ["", 5, "x" * 256, "a\0b", b"notes"])
def test_a_drain_refuses_what_is_no_queue(harness: MakeHarness, queue: Any):
    with pytest.raises(InvalidInstance, match="queue"):
        harness(Note).drain(queue)


def test_a_drain_runs_by_priority_then_time_then_id(harness: MakeHarness):
    note = Note()
    durable = harness(note)
    born = datetime(2020, 1, 1, tzinfo=UTC)
    durable.insert(Note.new({"n": 3}, priority=1, eligible_at=born))
    durable.insert(Note.new({"n": 1}, priority=-1, eligible_at=born + timedelta(days=1)))
    durable.insert(Note.new({"n": 0}, priority=-1, eligible_at=born))
    durable.insert(Note.new({"n": 2}))
    for n in (4, 5, 6):
        durable.insert(Note.new({"n": n}, priority=2, eligible_at=born))
    durable.drain()
    assert note.order == [0, 1, 2, 3, 4, 5, 6]


def test_rows_of_one_partition_key_run_one_after_the_other(harness: MakeHarness):
    note = Note()
    durable = harness(note)
    durable.insert_many([Note.new({"n": n}, partition_key="customer:7") for n in range(5)])
    assert durable.drain() == {"done": 5}
    assert note.order == [0, 1, 2, 3, 4]


def test_more_instances_than_a_batch_are_drained(harness: MakeHarness):
    durable = harness(Note)
    durable.insert_many([Note.new() for _ in range(250)])
    assert durable.drain() == {"done": 250}


def test_instances_of_machines_that_it_does_not_have_stay_as_they_were(harness: MakeHarness, conn: Connection):
    class Newer(Note, name="note", version=2, queue="notes"):
        pass

    durable = harness(Note)
    unknown, newer = durable.insert(Strict.new({"n": 1})), durable.insert(Newer.new())
    known = durable.insert(Note.new())
    before = [row(conn, unknown), row(conn, newer)]
    assert durable.drain() == {"done": 1}
    assert durable.get(known).status == Status.DONE
    assert [row(conn, unknown), row(conn, newer)] == before
    assert (before[0]["status"], before[0]["attempt"], before[0]["fence"]) == ("runnable", 0, 0)


def test_a_harness_without_machines_drains_nothing(harness: MakeHarness):
    durable = harness()
    durable.insert(Note.new())
    assert durable.drain() == {}


# When a drain gives up.


def test_a_drain_that_does_not_end_is_stopped_and_nothing_is_lost(harness: MakeHarness, conn: Connection):
    durable = harness(Forever)
    id = durable.insert(Forever.new())
    with pytest.raises(RunawayError, match=rf"20 steps and instance {id} \(forever, step 'start'\)"):
        durable.drain(max_steps=20)
    stored = row(conn, id)
    assert (stored["status"], stored["attempt"], stored["locked_by"]) == ("runnable", 0, None)
    assert stored["state"] == {"n": 20}, "exactly so many steps ran, and each was committed"
    with pytest.raises(RunawayError):
        durable.drain(max_steps=5)
    assert row(conn, id)["state"] == {"n": 25}


def test_a_drain_may_take_exactly_as_many_steps_as_it_is_allowed(harness: MakeHarness):
    durable = harness(Note)
    durable.insert_many([Note.new() for _ in range(150)])
    assert durable.drain(max_steps=150) == {"done": 150}


def test_what_a_stopped_drain_did_not_reach_is_still_due(harness: MakeHarness, conn: Connection):
    durable = harness(Note)
    durable.insert_many([Note.new() for _ in range(10)])
    with pytest.raises(RunawayError):
        durable.drain(max_steps=4)
    found = conn.execute(
        "select status::text, count(*), max(attempt) from gen_durable group by 1 order by 1"
    ).fetchall()
    assert found == [("done", 4, 0), ("runnable", 6, 0)]
    assert durable.drain() == {"done": 6}


def test_by_default_a_thousand_steps_are_enough(harness: MakeHarness, conn: Connection):
    durable = harness(Forever)
    id = durable.insert(Forever.new())
    with pytest.raises(RunawayError):
        durable.drain()
    assert row(conn, id)["state"] == {"n": 1000}


def test_no_steps_at_all_may_be_allowed(harness: MakeHarness):
    durable = harness(Note)
    assert durable.drain(max_steps=0) == {}
    durable.insert(Note.new())
    with pytest.raises(RunawayError):
        durable.drain(max_steps=0)
    assert durable.drain(max_steps=1) == {"done": 1}


@pytest.mark.parametrize("steps", [-1, True, 1.5, "10", None])
def test_a_drain_refuses_what_is_no_number_of_steps(harness: MakeHarness, steps: Any):
    with pytest.raises(InvalidInstance, match="max_steps"):
        harness(Note).drain(max_steps=steps)


# The clock.


def test_what_lies_in_the_future_runs_once_the_clock_is_there(harness: MakeHarness):
    durable = harness(Note)
    ids = [durable.insert(Note.new(schedule_in=seconds)) for seconds in (0, 100, 200)]
    assert durable.drain() == {"done": 1}
    durable.advance(100)
    assert durable.drain() == {"done": 1}
    assert [durable.get(id).status for id in ids] == ["done", "done", "runnable"]
    durable.advance(timedelta(seconds=100))
    assert durable.drain() == {"done": 1}


def test_an_absolute_time_is_reached_by_advancing_too(harness: MakeHarness):
    durable = harness(Note)
    durable.insert(Note.new(eligible_at=datetime.now(UTC) + timedelta(days=40)))
    durable.advance(timedelta(days=39))
    assert durable.drain() == {}
    durable.advance(timedelta(days=1))
    assert durable.drain() == {"done": 1}


def test_relative_times_count_from_the_advanced_clock(harness: MakeHarness, conn: Connection):
    durable = harness(Note, Scripted(start=Await("a", "work", timeout=60)))
    durable.advance(timedelta(days=10))
    note, parked = durable.insert(Note.new(schedule_in=60)), durable.insert(Scripted.new())
    durable.drain()
    ((due, deadline),) = conn.execute(
        "select (select eligible_at - inserted_at from gen_durable where id = %s),"
        " (select await_deadline - updated_at from gen_durable where id = %s)",
        [note, parked],
    ).fetchall()
    assert timedelta(days=10, seconds=60) <= due < timedelta(days=10, seconds=90)
    assert deadline == timedelta(days=10, seconds=60)


def test_advancing_in_small_steps_adds_up(harness: MakeHarness):
    durable = harness(Note)
    durable.insert(Note.new(schedule_in=3600))
    for _ in range(36):
        assert durable.drain() == {}
        durable.advance(100)
    assert durable.drain() == {"done": 1}


def test_a_long_backlog_of_deadlines_fires_in_one_drain(harness: MakeHarness):
    durable = harness(Scripted(start=[Await("a", "work", timeout=60)] * 600, work=[Done()] * 600))
    durable.insert_many([Scripted.new() for _ in range(600)])
    assert durable.drain() == {"await": 600}
    durable.advance(60)
    assert durable.drain() == {"done": 600}


@pytest.mark.parametrize("by", [-1, timedelta(seconds=-1), float("nan"), float("inf"), True, None, "1h", 10**400])
def test_the_clock_refuses_to_run_backwards_or_nowhere(harness: MakeHarness, by: Any):
    with pytest.raises(InvalidInstance, match="by: "):
        harness(Note).advance(by)


# Rows that cannot be read.


def poisonous(conn: Connection, id: int, state: str) -> None:
    conn.execute("update gen_durable set state = %s::jsonb where id = %s", [state, id])


def test_a_poisoned_row_in_a_batch_of_ten_leaves_nine_unharmed(harness: MakeHarness, conn: Connection):
    durable = harness(Strict)
    ids = sorted(durable.insert_many([Strict.new({"n": n}) for n in range(10)]))
    poisonous(conn, ids[4], '{"n": "four"}')
    assert durable.drain() == {"done": 9, "stop": 1}
    statuses = [durable.get(id).status for id in ids]
    assert statuses == [*["done"] * 4, "failed", *["done"] * 5]
    stored = row(conn, ids[4])
    assert stored["last_error"].startswith("InvalidState: state.n: expected an integer")
    assert (stored["attempt"], stored["locked_by"], stored["state"]) == (0, None, {"n": "four"})


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ('{"n": "x"}', "InvalidState: state.n"),
        ("{}", "InvalidState: state.n: missing"),
        ("[1]", "InvalidState: state: expected an object"),
        ('"text"', "InvalidState: state: expected an object"),
        ("null", "InvalidState: state: expected an object"),
        ("5", "InvalidState: state: expected an object"),
        ('{"n": 1.5}', "InvalidState: state.n"),
        ('{"n": null}', "InvalidState: state.n"),
        ('{"n": 1e5000}', "UndecodableRow: state"),
        # How deep json reads depends on the version of Python.
        (f'{{"n": {"[" * 5000}{"]" * 5000}}}', ("UndecodableRow: state", "InvalidState: state.n")),
    ],
)
def test_a_state_that_does_not_fit_ends_its_instance_with_a_typed_error(
    harness: MakeHarness, conn: Connection, state: str, error: str | tuple[str, ...]
):
    durable = harness(Strict)
    bad, good = durable.insert(Strict.new({"n": 1})), durable.insert(Strict.new({"n": 2}))
    poisonous(conn, bad, state)
    assert durable.drain() == {"done": 1, "stop": 1}
    assert durable.get(good).result == {"n": 2}
    ended = durable.get(bad)
    assert ended.status == Status.FAILED
    assert str(ended.last_error).startswith(error)
    assert len(str(ended.last_error).encode()) <= 8 * 1024


def test_a_step_that_no_longer_exists_ends_its_instance_with_a_typed_error(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Done()))
    bad, good = durable.insert(Scripted.new()), durable.insert(Scripted.new())
    conn.execute("update gen_durable set step = 'renamed' where id = %s", [bad])
    assert durable.drain() == {"done": 1, "stop": 1}
    assert durable.get(good).status == Status.DONE
    assert durable.get(bad).last_error == ("UndecodableRow: scripted version 1 has no step 'renamed'; was it renamed?")


@pytest.mark.parametrize("column", ["payload = '{\"n\": 1e5000}'", "inserted_at = 'infinity'"])
def test_a_signal_that_cannot_be_read_ends_its_instance_only(harness: MakeHarness, conn: Connection, column: str):
    machine = Scripted(start=[Await("go", "work")] * 3, work=[Done()] * 2)
    durable = harness(machine)
    ids = sorted(durable.insert_many([Scripted.new() for _ in range(3)]))
    durable.drain()
    for id in ids:
        durable.signal(id, "go")
    conn.execute(SQL("update signals set " + column + " where target_id = %s"), [ids[1]])  # type: ignore[arg-type]
    assert durable.drain() == {"done": 2, "stop": 1}
    assert [durable.get(id).status for id in ids] == ["done", "failed", "done"]
    assert str(durable.get(ids[1]).last_error).startswith("UndecodableRow: ")


def test_a_child_that_cannot_be_read_does_not_take_its_parent_along(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Spawn([Strict.new({"n": 1}, schedule_in=60), Strict.new({"n": 2})], "work"), work=Done())
    durable = harness(machine, Strict)
    id = durable.insert(Scripted.new())
    durable.drain()
    conn.execute("update gen_durable set state = '{\"n\": 1e5000}' where child_index = 0")
    durable.advance(60)
    assert durable.drain() == {"stop": 1, "done": 1}
    assert durable.get(id).status == Status.DONE
    bad, good = machine.seen[-1].joined
    assert (bad.status, good.status, good.state) == (Status.FAILED, Status.DONE, {"n": 2})
    assert isinstance(bad.state, str), "the text stands in for what cannot be read"


def test_a_poisoned_child_still_joins_its_parent(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Spawn([Strict.new({"n": 1}, schedule_in=60)], "work"), work=Done())
    durable = harness(machine, Strict)
    durable.insert(Scripted.new())
    durable.drain()
    conn.execute("update gen_durable set state = '{}' where parent_id is not null")
    durable.advance(60)
    assert durable.drain() == {"stop": 1, "done": 1}
    assert str(machine.seen[-1].joined[0].last_error).startswith("InvalidState: state.n")


@pytest.mark.parametrize("due", ["-infinity", "0001-01-01 BC", "4713-01-01 BC"])
def test_a_row_due_since_before_all_time_is_run_like_any_other(harness: MakeHarness, conn: Connection, due: str):
    durable = harness(Note)
    durable.insert_many([Note.new(), Note.new()])
    conn.execute("update gen_durable set eligible_at = %s where id = (select min(id) from gen_durable)", [due])
    assert durable.drain() == {"done": 2}


def test_a_row_that_lacks_what_its_class_has_a_default_for_is_run(harness: MakeHarness, conn: Connection):
    # A field that a newer version of the class brought.
    @attrs.frozen
    class Grown:
        n: int
        extra: str = "default"

    class Growing(Job[Grown], name="growing"):
        def perform(self, ctx: Context[Grown]) -> dict[str, Any]:
            return {"extra": ctx.state.extra}

    durable = harness(Growing)
    id = durable.insert(Growing.new({"n": 1}))
    poisonous(conn, id, '{"n": 1, "gone": true}')
    assert durable.drain() == {"done": 1}
    assert durable.get(id).result == {"extra": "default"}


# Where it works.


def test_a_harness_lives_in_a_schema_of_its_own(fresh_database: str):
    with Harness(fresh_database, [Note], schema='Odd "name" ü') as odd, Harness(fresh_database, [Note]) as plain:
        id = odd.insert(Note.new())
        assert plain.drain() == {}
        assert odd.drain() == {"done": 1}
        assert odd.get(id).status == Status.DONE
        with pytest.raises(GenDurableError):
            plain.get(id)
    with psycopg.connect(fresh_database) as conn:
        found = conn.execute(SQL("select count(*) from {}.gen_durable").format(Identifier('Odd "name" ü'))).fetchone()
        assert found == (1,)


def test_a_harness_migrates_an_empty_database_and_two_may_share_it(fresh_database: str):
    with Harness(fresh_database, [Note]) as one, Harness(fresh_database, [Note]) as other:
        one.insert(Note.new())
        assert other.drain() == {"done": 1}


def test_a_harness_takes_classes_instances_registries_and_paths(dsn: str):
    with Harness(dsn, [Scripted(start=Done()), Note, Registry([Strict])]) as durable:
        assert {type(machine) for machine in durable.registry} == {Scripted, Note, Strict}
    with Harness(dsn, ["scripted"]) as durable:
        assert [type(machine).__name__ for machine in durable.registry] == ["Scripted"]
    for lone in ("scripted:Scripted", Note, Scripted(), Registry([Strict])):
        with Harness(dsn, lone) as durable:
            assert len(durable.registry) == 1


def test_a_harness_refuses_what_is_no_machine_before_it_connects(dsn: str):
    with pytest.raises(LoadError):
        Harness(dsn, ["no.such.module"])
    with pytest.raises(LoadError):
        Harness(dsn, [object()])  # type: ignore[list-item]
    with pytest.raises(LoadError):
        Harness(dsn, 5)  # type: ignore[arg-type]


def test_a_harness_says_that_it_cannot_reach_its_database_without_the_password():
    with pytest.raises(DatabaseUnavailable) as raised:
        Harness("postgresql://me:s3cret@127.0.0.1:1/db", [Note])
    assert "s3cret" not in str(raised.value)
    assert "127.0.0.1:1" in str(raised.value)


def test_the_fixture_durable_is_a_harness_for_the_machines_of_its_module(durable: Harness):
    id = durable.insert(Strict.new({"n": 3}))
    assert durable.drain() == {"done": 1}
    assert durable.get(id).result == {"n": 3}


# What a step may do with the harness while it runs.


def test_a_step_may_use_the_harness_that_runs_it(harness: MakeHarness):
    def start(ctx: Context[State]) -> Outcome[State]:
        durable.insert(Note.new())
        durable.signal(ctx.id, "self")
        assert durable.get(ctx.id).status == Status.EXECUTING
        return Done()

    durable = harness(Scripted(start=start), Note)
    durable.insert(Scripted.new())
    assert durable.drain() == {"done": 2}


def test_signals_to_what_has_ended_are_refused(harness: MakeHarness):
    durable = harness(Note)
    id = durable.insert(Note.new())
    durable.drain()
    with pytest.raises(NoTarget):
        durable.signal(id, "late")
    assert durable.drain() == {}
