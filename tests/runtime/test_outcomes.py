"""Every row of the outcome table, through the harness, judged by what Postgres holds afterwards."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import attrs
import pytest
from scripted import Scripted, State, raises
from support import inbox, row

from gendurable import (
    FSM,
    Again,
    Await,
    Context,
    Done,
    Job,
    NewInstance,
    Next,
    Outcome,
    Retry,
    RetryPolicy,
    Snooze,
    Spawn,
    Status,
    Stop,
    step,
)
from gendurable.db.connection import Connection
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]
SECOND = timedelta(seconds=1)

FREE = {"locked_by": None, "lease_expires_at": None}
UNPARKED = {"awaits": None, "await_deadline": None}


def columns(conn: Connection, id: int, expected: dict[str, Any]) -> dict[str, Any]:
    """The columns that `expected` names, as they are stored."""
    stored = row(conn, id)
    return {name: stored[name] for name in expected}


def assert_row(conn: Connection, id: int, **expected: Any) -> None:
    assert columns(conn, id, expected) == expected


def due_in(conn: Connection, id: int) -> timedelta:
    """How long after the commit the row is due; both times were taken by the same statement."""
    stored = row(conn, id)
    due: timedelta = stored["eligible_at"] - stored["updated_at"]
    return due


def one_step(durable: Harness) -> dict[str, int]:
    """Run what is due now once, not what comes of it."""
    tally: Counter[str] = Counter()
    durable._run(durable._claim(None, 100), tally)
    return dict(tally)


# Next.


def test_next_makes_the_row_runnable_at_the_target_with_attempt_zero(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=[Retry(), Next("work", {"n": 2})]))
    id = durable.insert(Scripted.new({"n": 1}))
    assert one_step(durable) == {"retry": 1}
    assert one_step(durable) == {"next": 1}
    assert_row(
        conn,
        id,
        **FREE,
        **UNPARKED,
        status="runnable",
        step="work",
        state={"n": 2},
        attempt=0,
        crashes=0,
        result=None,
        last_error=None,
        join_round=None,
        children_pending=0,
    )
    assert due_in(conn, id) == timedelta(0)


@pytest.mark.parametrize("delay", [90, 90.0, timedelta(seconds=90), 0.25, timedelta(days=36_500)])
def test_next_is_due_after_its_delay(harness: MakeHarness, conn: Connection, delay: Any):
    length = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
    durable = harness(Scripted(start=Next("work", delay=delay), work=Done()))
    id = durable.insert(Scripted.new())
    assert one_step(durable) == {"next": 1}
    assert due_in(conn, id) == length
    durable.advance(length)
    assert durable.drain() == {"done": 1}


def test_next_does_not_run_before_its_delay_is_over(harness: MakeHarness):
    durable = harness(Scripted(start=Next("work", delay=3600), work=Done()))
    durable.insert(Scripted.new())
    assert durable.drain() == {"next": 1}
    durable.advance(3000)
    assert durable.drain() == {}
    durable.advance(600)
    assert durable.drain() == {"done": 1}


def test_next_consumes_the_signals_it_was_shown_and_no_others(harness: MakeHarness, conn: Connection):
    # 2.1-3, seed §5: by id, never by name; a signal of the same name that came during the step survives.
    def work(ctx: Context[State]) -> Outcome[State]:
        durable.signal(ctx.id, "paid", {"n": "late"})
        return Next("finish")

    durable = harness(Scripted(start=Await("paid", "work"), work=work, finish=Await("other", "work")))
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "ignored")
    durable.signal(id, "paid", {"n": "early"})
    assert durable.drain() == {"next": 1, "await": 1}
    assert inbox(conn, id) == ["ignored", "paid"]
    payloads = conn.execute("select payload ->> 'n' from signals where name = 'paid'").fetchall()
    assert payloads == [("late",)]


def test_next_forgets_what_was_awaited(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Await("go", "work", timeout=60), work=Next("finish"), finish=Done())
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "go")
    assert one_step(durable) == {"next": 1}
    assert_row(conn, id, **UNPARKED, status="runnable")
    durable.signal(id, "go")
    durable.drain()
    assert machine.seen[-1].awaited == ()
    assert [signal.name for signal in machine.seen[-1].inbox] == ["go"]


def test_next_does_not_touch_the_inbox_of_another_instance(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Await("go", "work"), work=Next("finish"), finish=Await("never", "work")))
    moving, waiting = durable.insert_many([Scripted.new(), Scripted.new()])
    durable.drain()
    durable.signal(waiting, "noise")
    durable.signal(moving, "go")
    durable.drain()
    assert (inbox(conn, moving), inbox(conn, waiting)) == ([], ["noise"])


def test_a_state_that_is_left_out_is_the_one_of_the_context(harness: MakeHarness, conn: Connection):
    def start(ctx: Context[State]) -> Outcome[State]:
        ctx.state["seen"] = True  # mutating it in place counts, since the step succeeds
        return Next("work")

    durable = harness(Scripted(start=start, work=Done({"n": 1})))
    id = durable.insert(Scripted.new({"n": 1}))
    durable.drain()
    assert_row(conn, id, state={"n": 1, "seen": True})


@pytest.mark.parametrize("to", ["work", Scripted.work, Scripted().work])
def test_a_target_is_a_name_or_a_step_read_from_class_or_machine(harness: MakeHarness, to: Any):
    durable = harness(Scripted(start=Next(to), work=Done()))
    durable.insert(Scripted.new())
    assert durable.drain() == {"next": 1, "done": 1}


# Retry.


def test_retry_runs_the_same_step_again_and_counts_it(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=[Retry({"n": 2}, delay=60), Done()])
    durable = harness(machine)
    id = durable.insert(Scripted.new({"n": 1}))
    assert durable.drain() == {"retry": 1}
    assert_row(
        conn, id, **FREE, **UNPARKED, status="runnable", step="start", state={"n": 2}, attempt=1, last_error=None
    )
    assert due_in(conn, id) == timedelta(minutes=1)
    durable.advance(60)
    assert durable.drain() == {"done": 1}
    assert [(ctx.attempt, ctx.state) for ctx in machine.seen] == [(0, {"n": 1}), (1, {"n": 2})]


def test_retry_keeps_what_was_awaited_and_shows_it_again(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Await(["paid", "void"], "work", timeout=60), work=[Retry(), Retry(), Done()])
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "paid", {"amount": 7})
    assert one_step(durable) == {"retry": 1}
    assert_row(conn, id, status="runnable", step="work", attempt=1, awaits=["paid", "void"], await_deadline=None)
    assert inbox(conn, id) == ["paid"]
    assert durable.drain() == {"retry": 1, "done": 1}
    assert [[s.payload for s in ctx.awaited] for ctx in machine.seen[1:]] == [[{"amount": 7}]] * 3
    assert [ctx.attempt for ctx in machine.seen[1:]] == [0, 1, 2]


def test_retry_keeps_the_children_that_the_step_was_released_by(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Spawn([Leaf.new()], "work"), work=[Retry(), Done()])
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    assert [len(ctx.joined) for ctx in machine.seen] == [0, 1, 1]
    assert_row(conn, id, status="done")


def test_a_retry_without_an_error_of_its_own_keeps_the_one_that_stands(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=[raises(ValueError("first")), Retry(), Done()], handle=lambda *_: Retry())
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    one_step(durable)
    one_step(durable)
    assert_row(conn, id, last_error="ValueError: first", attempt=2)
    durable.drain()
    assert [ctx.last_error for ctx in machine.seen] == [None, "ValueError: first", "ValueError: first"]
    assert_row(conn, id, status="done", last_error=None)


# Again and Snooze.


@pytest.mark.parametrize("play", [Again({"n": 2}, delay=60), raises(Snooze(60))], ids=["Again", "Snooze"])
def test_again_runs_the_same_step_without_spending_an_attempt(harness: MakeHarness, conn: Connection, play: Any):
    machine = Scripted(start=[raises(OSError("disk")), play, play, Done()], handle=lambda *_: Retry())
    durable = harness(machine)
    id = durable.insert(Scripted.new({"n": 1}))
    assert durable.drain() == {"retry": 1, "again": 1}
    n = 2 if isinstance(play, Again) else 1
    assert_row(
        conn, id, **FREE, **UNPARKED, status="runnable", step="start", state={"n": n}, attempt=1,
        last_error="OSError: disk",
    )  # fmt: skip
    assert due_in(conn, id) == timedelta(minutes=1)
    durable.advance(60)
    assert durable.drain() == {"again": 1}
    durable.advance(60)
    assert durable.drain() == {"done": 1}
    assert [(ctx.attempt, ctx.state["n"]) for ctx in machine.seen] == [(0, 1), (1, 1), (1, n), (1, n)]
    assert len(machine.handled) == 1, "Snooze is no error"


@pytest.mark.parametrize("play", [Again(), raises(Snooze(0))], ids=["Again", "Snooze"])
def test_again_keeps_what_was_awaited_and_the_children_and_shows_them_again(
    harness: MakeHarness, conn: Connection, play: Any
):
    machine = Scripted(start=Spawn([Leaf.new()], "work"), work=[play, Await("paid", "finish")], finish=[play, Done()])
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    assert [len(ctx.joined) for ctx in machine.seen] == [0, 1, 1]
    durable.signal(id, "paid", {"amount": 7})
    assert one_step(durable) == {"again": 1}
    assert_row(conn, id, status="runnable", step="finish", attempt=0, awaits=["paid"], await_deadline=None)
    assert inbox(conn, id) == ["paid"]
    durable.drain()
    assert [[s.payload for s in ctx.awaited] for ctx in machine.seen[3:]] == [[{"amount": 7}]] * 2


def test_again_forgets_crashes(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=[raises(SystemExit()), Again(delay=60)]))
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.advance(61)
    assert durable.drain() == {"again": 1}
    assert_row(conn, id, attempt=1, crashes=0)


def test_a_snooze_forgets_what_the_step_did_to_its_state(harness: MakeHarness, conn: Connection):
    def spoil(ctx: Context[State]) -> Any:
        ctx.state["spoilt"] = True
        raise Snooze(timedelta(hours=1))

    durable = harness(Scripted(start=spoil))
    id = durable.insert(Scripted.new({"n": 1}))
    assert durable.drain() == {"again": 1}
    assert_row(conn, id, state={"n": 1}, last_error=None)
    assert due_in(conn, id) == timedelta(hours=1)


@pytest.mark.parametrize("delay", [-1, "5", None, True, float("nan"), 1e18])
def test_a_snooze_of_no_length_is_an_error_of_the_step(harness: MakeHarness, delay: Any):
    machine = Scripted(start=raises(Snooze(delay)))
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    assert str(durable.get(id).last_error).startswith("BadOutcome: delay")
    assert len(machine.handled) == 1


def test_a_handler_that_raises_snooze_has_failed(harness: MakeHarness):
    durable = harness(Scripted(start=raises(OSError("disk")), handle=raises(Snooze(5))))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    assert durable.get(id).last_error == "Snooze: 5"


def test_a_loop_and_a_poll_leave_one_row_however_long_they_go_on(harness: MakeHarness, conn: Connection):
    def go_round(ctx: Context[State]) -> Any:
        lap = {"n": ctx.state["n"] + 1}
        if lap["n"] == 300:
            return Done(lap)
        return Next("start", lap, delay=60) if lap["n"] % 2 else Again(lap, delay=60)

    durable = harness(Scripted(start=go_round))
    id = durable.insert(Scripted.new({"n": 0}))
    for _ in range(299):
        assert durable.drain() in ({"next": 1}, {"again": 1})
        durable.advance(60)
    assert durable.drain() == {"done": 1}
    assert durable.get(id).result == {"n": 300}
    assert conn.execute("select count(*), sum(attempt) from gen_durable").fetchone() == (1, 0)


def test_a_job_polls(harness: MakeHarness):
    class Poll(Job[dict[str, Any]], name="poll", max_attempts=1):
        def perform(self, ctx: Context[dict[str, Any]]) -> "Again[dict[str, Any]] | dict[str, Any]":
            looks = ctx.state["looks"] + 1
            if looks == 2:
                ctx.state["looks"] = looks
                return Again(delay=5)
            return {"looks": looks} if looks == 4 else Again({"looks": looks})

    durable = harness(Poll)
    id = durable.insert(Poll.new({"looks": 0}))
    assert durable.drain() == {"again": 2}
    durable.advance(5)
    assert durable.drain() == {"again": 1, "done": 1}
    assert durable.get(id).result == {"looks": 4}


# Await.


def test_await_parks_the_row_at_the_step_to_come(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Await(["a", "b", "a"], "work", {"n": 2}, timeout=60)))
    id = durable.insert(Scripted.new({"n": 1}))
    assert durable.drain() == {"await": 1}
    assert_row(
        conn,
        id,
        **FREE,
        status="awaiting_signal",
        step="work",
        state={"n": 2},
        attempt=0,
        crashes=0,
        awaits=["a", "b"],
        join_round=None,
        last_error=None,
    )
    stored = row(conn, id)
    assert stored["await_deadline"] - stored["updated_at"] == timedelta(minutes=1)


def test_await_without_a_timeout_has_no_deadline(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Await("a", "work")))
    id = durable.insert(Scripted.new())
    durable.drain()
    assert_row(conn, id, status="awaiting_signal", awaits=["a"], await_deadline=None)
    durable.advance(timedelta(days=3650))
    assert durable.drain() == {}


def test_await_after_a_retry_starts_to_count_anew(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=[Retry(), Await("a", "work")]))
    id = durable.insert(Scripted.new())
    durable.drain()
    assert_row(conn, id, status="awaiting_signal", attempt=0)


def test_any_of_the_awaited_names_wakes_and_no_other_does(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Await({"a", "b"}, "work", timeout=60), work=Done())
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    assert durable.signal(id, "c").woke is False
    assert durable.drain() == {}
    assert durable.signal(id, "b", {"n": 1}).woke is True
    assert_row(conn, id, status="runnable", step="work", await_deadline=None)
    assert durable.drain() == {"done": 1}
    ctx = machine.seen[-1]
    assert [(s.name, s.payload) for s in ctx.awaited] == [("b", {"n": 1})]
    assert [s.name for s in ctx.inbox] == ["c", "b"]


def test_all_signals_of_the_awaited_names_are_shown_oldest_first(harness: MakeHarness):
    machine = Scripted(start=Await(["a", "b"], "work"), work=Done())
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    for number, name in enumerate(["b", "x", "a", "b"]):
        durable.signal(id, name, number)
    durable.drain()
    assert [(s.name, s.payload) for s in machine.seen[-1].awaited] == [("b", 0), ("a", 2), ("b", 3)]


def test_await_goes_on_at_once_if_its_signal_is_already_there(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Await("early", "work", timeout=60), work=Next("finish"), finish=Await("never", "work"))
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.signal(id, "early", {"n": 1})
    assert one_step(durable) == {"await": 1}
    assert_row(conn, id, **FREE, status="runnable", step="work", awaits=["early"], await_deadline=None)
    assert inbox(conn, id) == ["early"], "the park itself consumes nothing"
    assert durable.drain() == {"next": 1, "await": 1}
    assert inbox(conn, id) == []


def test_a_signal_that_arrives_while_the_step_runs_wakes_the_await_that_it_returns(harness: MakeHarness):
    def start(ctx: Context[State]) -> Outcome[State]:
        assert durable.signal(ctx.id, "go").woke is False
        return Await("go", "work")

    durable = harness(Scripted(start=start, work=Done()))
    durable.insert(Scripted.new())
    assert durable.drain() == {"await": 1, "done": 1}


def test_a_pack_is_gathered_without_spinning(harness: MakeHarness, conn: Connection):
    # 2.1-3: what the parking step was shown does not wake it again.
    def work(ctx: Context[State]) -> Outcome[State]:
        if {s.name for s in ctx.awaited} == {"a", "b", "c"}:
            return Next("finish")
        return Await(["a", "b", "c"], "work")

    machine = Scripted(start=Await(["a", "b", "c"], "work"), work=work, finish=Done())
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "a")
    assert durable.drain() == {"await": 1}
    assert durable.drain() == {}
    assert_row(conn, id, status="awaiting_signal", attempt=0)
    durable.signal(id, "b")
    assert durable.drain() == {"await": 1}
    assert inbox(conn, id) == ["a", "b"]
    durable.signal(id, "c")
    assert durable.drain() == {"next": 1, "done": 1}
    assert inbox(conn, id) == []


def test_a_second_signal_of_a_shown_name_wakes_the_pack(harness: MakeHarness):
    def work(ctx: Context[State]) -> Outcome[State]:
        return Done({"n": len(ctx.awaited)}) if len(ctx.awaited) == 2 else Await("a", "work")

    durable = harness(Scripted(start=Await("a", "work"), work=work))
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "a")
    assert durable.drain() == {"await": 1}
    durable.signal(id, "a")
    assert durable.drain() == {"done": 1}
    assert durable.get(id).result == {"n": 2}


def test_a_signal_of_another_name_that_was_in_the_inbox_still_wakes_a_new_await(harness: MakeHarness):
    # Only what `awaited` held counts as shown: the step may have had no reason to look at the rest of the inbox.
    durable = harness(Scripted(start=Await("a", "work"), work=Await(["a", "b"], "finish"), finish=Done()))
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "b")
    durable.signal(id, "a")
    assert durable.drain() == {"await": 1, "done": 1}


def test_after_its_timeout_an_await_goes_on_with_nothing_awaited(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Await("never", "work", timeout=timedelta(days=3)), work=Done({"late": True}))
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "something else")
    durable.advance(timedelta(days=3) - SECOND * 60)
    assert durable.drain() == {}
    durable.advance(SECOND * 60)
    assert durable.drain() == {"done": 1}
    assert machine.seen[-1].awaited == ()
    assert [s.name for s in machine.seen[-1].inbox] == ["something else"]
    assert_row(conn, id, **UNPARKED, status="done", result={"late": True})


def test_a_timeout_shows_the_part_of_a_pack_that_is_there(harness: MakeHarness):
    machine = Scripted(
        start=Await(["a", "b"], "work", timeout=60), work=[Await(["a", "b"], "work", timeout=60), Done()]
    )
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "a")
    assert durable.drain() == {"await": 1}
    durable.advance(60)
    assert durable.drain() == {"done": 1}
    assert [s.name for s in machine.seen[-1].awaited] == ["a"]


def test_a_timed_out_await_that_is_retried_still_has_nothing_awaited(harness: MakeHarness):
    machine = Scripted(start=Await("a", "work", timeout=60), work=[Retry(), Done()])
    durable = harness(machine)
    durable.insert(Scripted.new())
    durable.drain()
    durable.advance(60)
    assert durable.drain() == {"retry": 1, "done": 1}
    assert [ctx.awaited for ctx in machine.seen] == [(), (), ()]


@pytest.mark.parametrize(
    "names", [["a", "b"], ("a", "b"), (name for name in "ab"), {"a": 1, "b": 2}, dict.fromkeys("ab").keys()]
)
def test_any_collection_of_names_will_do(harness: MakeHarness, conn: Connection, names: Any):
    durable = harness(Scripted(start=Await(names, "work")))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"await": 1}
    assert_row(conn, id, awaits=["a", "b"])


@pytest.mark.parametrize("name", ["ü ✓", "with space", "x" * 255, "{a,b}", "'; drop table signals; --", '"', "null"])
def test_a_name_may_be_any_printable_text(harness: MakeHarness, conn: Connection, name: str):
    durable = harness(Scripted(start=Await([name, "other"], "work"), work=Done()))
    id = durable.insert(Scripted.new())
    durable.drain()
    assert_row(conn, id, awaits=[name, "other"])
    assert durable.signal(id, name).woke is True
    assert durable.drain() == {"done": 1}


def test_signals_in_front_of_an_await_by_another_name_stay_in_the_inbox(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Await("b", "work")))
    id = durable.insert(Scripted.new())
    durable.signal(id, "a")
    assert durable.drain() == {"await": 1}
    assert_row(conn, id, status="awaiting_signal")
    assert inbox(conn, id) == ["a"]


# Spawn.


class Leaf(Job[dict[str, Any]], name="leaf", queue="leaves"):
    def perform(self, ctx: Context[dict[str, Any]]) -> dict[str, Any] | Stop:
        return Stop("withered") if ctx.state.get("fails") else {"n": ctx.state.get("n")}


def test_spawn_parks_the_parent_and_inserts_the_children_in_one_commit(harness: MakeHarness, conn: Connection):
    children = [Leaf.new({"n": 1}, priority=3, schedule_in=60), Leaf.new({"n": 2}, queue="other"), Leaf]
    durable = harness(Scripted(start=Spawn(children, "work", {"s": 2})), Leaf)
    id = durable.insert(Scripted.new({"s": 1}))
    assert one_step(durable) == {"spawn": 1}
    assert_row(
        conn,
        id,
        **FREE,
        **UNPARKED,
        status="awaiting_children",
        step="work",
        state={"s": 2},
        attempt=0,
        children_pending=3,
        spawn_round=1,
        join_round=1,
        last_error=None,
    )
    born = conn.execute(
        "select fsm, step, status::text, state, queue, priority, parent_id, child_round, child_index,"
        " eligible_at - inserted_at from gen_durable where parent_id is not null order by child_index"
    ).fetchall()
    assert [child[:-1] for child in born] == [
        ("leaf", "perform", "runnable", {"n": 1}, "leaves", 3, id, 1, 0),
        ("leaf", "perform", "runnable", {"n": 2}, "other", 0, id, 1, 1),
        ("leaf", "perform", "runnable", {}, "leaves", 0, id, 1, 2),
    ]
    assert born[0][-1] >= timedelta(seconds=60)


class Second(FSM[State], name="second", version=2, max_crashes=7):
    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return Done()

    @step
    def middle(self, ctx: Context[State]) -> Outcome[State]:
        return Done()


def test_a_child_is_stored_as_if_it_had_been_inserted(harness: MakeHarness, conn: Connection):
    # 2.2-2: its version too
    def new(key: str) -> NewInstance:
        return Second.new(
            {"n": 1},
            step="middle",
            queue="seconds",
            priority=3,
            partition_key="p",
            unique_key=key,
            unique_scope=list(Status),
            eligible_at=datetime(2100, 1, 1, tzinfo=UTC),
            deadline=datetime(2101, 1, 1, tzinfo=UTC),
            retry=RetryPolicy(max_attempts=3),
        )

    durable = harness(Scripted(start=Spawn([new("child")], "work")), Second)
    parent, inserted = durable.insert(Scripted.new()), durable.insert(new("inserted"))
    durable.drain()
    ((child,),) = conn.execute("select id from gen_durable where parent_id = %s", [parent]).fetchall()
    their_own = {
        "id",
        "unique_key",
        "unique_guard",
        "parent_id",
        "child_round",
        "child_index",
        "inserted_at",
        "updated_at",
    }
    as_inserted, as_child = ({**row(conn, id), **dict.fromkeys(their_own)} for id in (inserted, child))
    assert as_child == as_inserted
    assert (as_child["fsm_version"], as_child["partition_key"], as_child["max_crashes"]) == (2, "p", 7)
    assert row(conn, child)["unique_guard"] == b"child"


def test_the_parent_goes_on_once_every_child_has_ended_well_or_not(harness: MakeHarness, conn: Connection):
    children = [Leaf.new({"n": 1}), Leaf.new({"fails": True}), Leaf.new({"n": 3}, schedule_in=60)]
    machine = Scripted(start=Spawn(children, "work"), work=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"spawn": 1, "done": 1, "stop": 1}
    assert_row(conn, id, status="awaiting_children", children_pending=1)
    durable.advance(60)
    assert durable.drain() == {"done": 2}
    assert_row(conn, id, status="done", children_pending=0, join_round=None)
    joined = machine.seen[-1].joined
    assert [(c.fsm, c.status, c.state, c.result, c.last_error, c.round, c.index) for c in joined] == [
        ("leaf", Status.DONE, {"n": 1}, {"n": 1}, None, 1, 0),
        ("leaf", Status.FAILED, {"fails": True}, None, "withered", 1, 1),
        ("leaf", Status.DONE, {"n": 3}, {"n": 3}, None, 1, 2),
    ]
    assert [c.id for c in joined] == [
        id_ for (id_,) in conn.execute("select id from gen_durable where parent_id = %s order by child_index", [id])
    ]
    assert machine.seen[-1].children == joined


def test_children_come_in_the_order_given_whatever_their_keys_and_ends(harness: MakeHarness):
    children = [
        Leaf.new({"n": 0}, unique_key="z", schedule_in=3),
        Leaf.new({"n": 1}),
        Leaf.new({"n": 2}, unique_key="a", priority=9),
        Leaf.new({"n": 3}, unique_key="m", priority=-9),
    ]
    machine = Scripted(start=Spawn(children, "work"), work=Done())
    durable = harness(machine, Leaf)
    durable.insert(Scripted.new())
    durable.advance(3)
    durable.drain()
    durable.advance(3)
    durable.drain()
    assert [child.state["n"] for child in machine.seen[-1].joined] == [0, 1, 2, 3]


def test_each_round_joins_its_own_children_and_children_are_all(harness: MakeHarness, conn: Connection):
    machine = Scripted(
        start=Spawn([Leaf.new({"n": 1}), Leaf.new({"n": 2})], "work"),
        work=Spawn([Leaf.new({"n": 3})], "finish"),
        finish=[Next("finish"), Done()],
    )
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    seen = [([c.state["n"] for c in ctx.joined], [c.state["n"] for c in ctx.children]) for ctx in machine.seen]
    assert seen == [([], []), ([1, 2], [1, 2]), ([3], [1, 2, 3]), ([], [1, 2, 3])]
    assert [(c.round, c.index) for c in machine.seen[-1].children] == [(1, 0), (1, 1), (2, 0)]
    assert_row(conn, id, status="done", spawn_round=2)


def test_an_await_between_leaves_the_children_but_nobody_joined(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Spawn([Leaf], "work"), work=Await("go", "finish"), finish=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    assert_row(conn, id, status="awaiting_signal", join_round=None)
    durable.signal(id, "go")
    durable.drain()
    assert [(len(ctx.joined), len(ctx.children)) for ctx in machine.seen] == [(0, 0), (1, 1), (0, 1)]


def test_spawning_nobody_goes_on_at_once(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Spawn([], "work"), work=Done())
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    assert one_step(durable) == {"spawn": 1}
    assert_row(conn, id, **FREE, status="runnable", step="work", children_pending=0, spawn_round=1)
    assert durable.drain() == {"done": 1}
    assert machine.seen[-1].joined == ()


def test_a_child_whose_unique_key_is_occupied_is_dropped_and_not_waited_for(harness: MakeHarness, conn: Connection):
    children = [Leaf.new({"n": 1}, unique_key="taken"), Leaf.new({"n": 2}), Leaf.new({"n": 3}, unique_key="twin")]
    machine = Scripted(start=Spawn([*children, Leaf.new({"n": 4}, unique_key="twin")], "work"), work=Done())
    durable = harness(machine, Leaf)
    durable.insert(Leaf.new(unique_key="taken", schedule_in=3600))
    id = durable.insert(Scripted.new())
    one_step(durable)
    assert_row(conn, id, status="awaiting_children", children_pending=2)
    durable.drain()
    assert [child.state["n"] for child in machine.seen[-1].joined] == [2, 3]


def test_if_every_child_is_dropped_the_parent_goes_on_at_once(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Spawn([Leaf.new(unique_key="taken")], "work"), work=Done())
    durable = harness(machine, Leaf)
    durable.insert(Leaf.new(unique_key="taken", schedule_in=3600))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"spawn": 1, "done": 1}
    assert_row(conn, id, status="done")


def test_a_spawn_that_times_out_goes_on_and_shows_who_is_not_ready(harness: MakeHarness, conn: Connection):
    children = [Leaf.new({"n": 1}), Leaf.new({"n": 2}, schedule_in=3600)]
    machine = Scripted(start=Spawn(children, "work", timeout=60), work=Next("finish"), finish=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"spawn": 1, "done": 1}
    stored = row(conn, id)
    assert stored["await_deadline"] - stored["eligible_at"] == 60 * SECOND
    durable.advance(60)
    assert durable.drain() == {"next": 1, "done": 1}
    assert [child.status for child in machine.seen[-2].joined] == [Status.DONE, Status.RUNNABLE]
    assert_row(conn, id, **UNPARKED, status="done", children_pending=0)
    durable.advance(3600)
    assert durable.drain() == {"done": 1}, "a late child ends like any other, and joins nobody"


def test_a_barrier_that_opens_in_time_has_no_deadline_left(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Spawn([Leaf, Leaf], "work", timeout=60), work=Retry(delay=3600)), Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    assert_row(conn, id, **UNPARKED, status="runnable", step="work")
    durable.advance(120)
    assert durable.drain() == {}


def test_the_first_child_that_fails_opens_a_barrier_that_is_to_fail_fast(harness: MakeHarness, conn: Connection):
    children = [Leaf.new({"n": 1}), Leaf.new({"n": 2}, schedule_in=3600), Leaf.new({"fails": True})]
    machine = Scripted(start=Spawn(children, "work", timeout=60, on_failure="fail_fast"), work=Next("finish"))
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    one_step(durable)
    assert_row(conn, id, status="awaiting_children", fail_fast=True)
    one_step(durable)
    assert_row(conn, id, **UNPARKED, status="runnable", fail_fast=True, children_pending=0)
    one_step(durable)
    assert [child.status for child in machine.seen[-1].joined][::2] == [Status.DONE, Status.FAILED]
    assert_row(conn, id, step="finish", fail_fast=False)


def test_a_barrier_that_is_to_fail_fast_waits_for_all_if_none_fails(harness: MakeHarness, conn: Connection):
    children = [Leaf.new({"n": 1}), Leaf.new({"n": 2}, schedule_in=3600)]
    machine = Scripted(start=Spawn(children, "work", on_failure="fail_fast"), work=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    assert_row(conn, id, status="awaiting_children", children_pending=1)
    durable.advance(3600)
    durable.drain()
    assert_row(conn, id, status="done", fail_fast=False)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"timeout": 0}, "BadOutcome: timeout 0 is not positive"),
        ({"timeout": "soon"}, "BadOutcome: timeout: 'soon' is no duration"),
        ({"on_failure": "panic"}, "BadOutcome: Spawn on_failure 'panic' is unknown"),
        ({"on_failure": ["collect"]}, "BadOutcome: Spawn on_failure ['collect'] is unknown"),
    ],
)
def test_a_spawn_with_an_impossible_wish_is_refused(harness: MakeHarness, conn: Connection, given: Any, complaint: str):
    durable = harness(Scripted(start=Spawn([Leaf], "work", **given)), Leaf)
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    assert row(conn, id)["last_error"].startswith(complaint)
    assert conn.execute("select count(*) from gen_durable").fetchone() == (1,)


def test_spawn_consumes_the_signals_it_was_shown_and_no_others(harness: MakeHarness, conn: Connection):
    def work(ctx: Context[State]) -> Outcome[State]:
        durable.signal(ctx.id, "go", "late")
        return Spawn([Leaf.new(schedule_in=60)], "finish")

    durable = harness(Scripted(start=Await("go", "work"), work=work), Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "go", "early")
    durable.signal(id, "noise")
    durable.drain()
    stored = conn.execute("select name, payload from signals where target_id = %s order by id", [id]).fetchall()
    assert stored == [("noise", {}), ("go", "late")]
    assert_row(conn, id, status="awaiting_children", **UNPARKED)


def test_a_signal_does_not_open_a_barrier_but_is_there_when_it_opens(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Await("go", "work"), work=Spawn([Leaf.new(schedule_in=60)], "finish"), finish=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    durable.signal(id, "go")
    durable.drain()
    assert durable.signal(id, "go").woke is False
    assert durable.drain() == {}
    assert_row(conn, id, status="awaiting_children")
    durable.advance(60)
    durable.drain()
    assert (machine.seen[-1].awaited, [s.name for s in machine.seen[-1].inbox]) == ((), ["go"])


class Tree(FSM[dict[str, int]], name="tree"):
    @step
    def start(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:
        depth = ctx.state["depth"]
        return Spawn([Tree.new({"depth": depth - 1})] * 2 if depth else [], self.count)

    @step
    def count(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:
        return Done({"nodes": 1 + sum(child.result["nodes"] for child in ctx.joined)})


def test_barriers_nest(harness: MakeHarness):
    durable = harness(Tree)
    id = durable.insert(Tree.new({"depth": 3}))
    assert durable.drain() == {"spawn": 15, "done": 15}
    assert durable.get(id).result == {"nodes": 15}


def test_ten_thousand_children_are_spawned_and_joined(harness: MakeHarness, conn: Connection):
    # 2.1-8: one array per column, however many rows.
    machine = Scripted(start=Spawn((Leaf.new({"n": n}) for n in range(10_000)), "work"), work=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    assert durable.drain(max_steps=20_000) == {"spawn": 1, "done": 10_001}
    assert_row(conn, id, status="done", children_pending=0)
    assert [child.state["n"] for child in machine.seen[-1].joined] == list(range(10_000))


def test_a_parent_that_stopped_does_not_mind_its_children(harness: MakeHarness, conn: Connection):
    # The child outlives a parent that left its barrier by an operator's hand; it ends without a join.
    durable = harness(Scripted(start=Spawn([Leaf.new(schedule_in=60)], "work")), Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    conn.execute("update gen_durable set status = 'failed' where id = %s", [id])
    durable.advance(60)
    assert durable.drain() == {"done": 1}
    assert_row(conn, id, status="failed", children_pending=1)


# Done.


@attrs.frozen
class Receipt:
    paid: Decimal
    on: date


class Colour(Enum):
    RED = "red"


def test_done_ends_the_instance_and_empties_its_inbox(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Await("go", "work"), work=Done({"paid": 7})))
    id = durable.insert(Scripted.new({"n": 1}))
    durable.drain()
    durable.signal(id, "noise")
    durable.signal(id, "go")
    assert durable.drain() == {"done": 1}
    assert_row(
        conn,
        id,
        **FREE,
        **UNPARKED,
        status="done",
        step="work",
        state={"n": 1},
        result={"paid": 7},
        attempt=0,
        last_error=None,
        join_round=None,
    )
    assert inbox(conn, id) == []


def test_done_leaves_the_stored_state_alone_even_if_the_step_mutated_its_copy(harness: MakeHarness, conn: Connection):
    def start(ctx: Context[State]) -> Outcome[State]:
        ctx.state["n"] = 99
        return Done()

    durable = harness(Scripted(start=start))
    id = durable.insert(Scripted.new({"n": 1}))
    durable.drain()
    assert_row(conn, id, status="done", state={"n": 1}, result={})


@pytest.mark.parametrize(
    ("result", "stored"),
    [
        ({}, {}),
        ({"a": [1, 2.5, None, True, {"b": "ü"}]}, {"a": [1, 2.5, None, True, {"b": "ü"}]}),
        (Receipt(Decimal("7.10"), date(2024, 2, 29)), {"paid": "7.10", "on": "2024-02-29"}),
        (
            {"at": datetime(2024, 1, 2, 3, tzinfo=UTC), "u": UUID(int=5), "c": Colour.RED, "b": b"\0\xff", "t": (1, 2)},
            {
                "at": "2024-01-02T03:00:00+00:00",
                "u": "00000000-0000-0000-0000-000000000005",
                "c": "red",
                "b": "AP8=",
                "t": [1, 2],
            },
        ),
        ({"s": {3, 1, 2}, "big": 2**70}, {"s": [1, 2, 3], "big": 2**70}),
    ],
)
def test_a_result_is_a_mapping_or_a_record(harness: MakeHarness, result: Any, stored: Any):
    durable = harness(Scripted(start=Done(result)))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"done": 1}
    assert durable.get(id).result == stored


# Stop.


def test_stop_ends_the_instance_failed_and_empties_its_inbox(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Await("go", "work"), work=[Retry(), Stop("payment never arrived")]))
    id = durable.insert(Scripted.new({"n": 1}))
    durable.drain()
    durable.signal(id, "noise")
    durable.signal(id, "go")
    assert durable.drain() == {"retry": 1, "stop": 1}
    assert_row(
        conn,
        id,
        **FREE,
        **UNPARKED,
        status="failed",
        step="work",
        state={"n": 1},
        result=None,
        attempt=1,
        last_error="payment never arrived",
    )
    assert inbox(conn, id) == []


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (ValueError("wrong"), "ValueError: wrong"),
        (KeyError("k"), "KeyError: 'k'"),
        (ValueError(), "ValueError"),
        (SystemExit(3), "SystemExit: 3"),
        (None, "None"),
        (42, "42"),
    ],
)
def test_a_reason_is_stored_as_text(harness: MakeHarness, conn: Connection, reason: Any, text: str):
    durable = harness(Scripted(start=Stop(reason)))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", last_error=text, attempt=0)


def test_ended_instances_are_never_run_again(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=[Done(), Stop("no")]))
    ids = durable.insert_many([Scripted.new(), Scripted.new()])
    assert durable.drain() == {"done": 1, "stop": 1}
    before = [row(conn, id) for id in ids]
    durable.advance(timedelta(days=365))
    assert durable.drain() == {}
    assert [row(conn, id) for id in ids] == before


# States of a class of their own.


@attrs.frozen
class Line:
    sku: str
    price: Decimal


@attrs.frozen
class Basket:
    owner: UUID
    lines: tuple[Line, ...] = ()
    opened: datetime | None = None


class Shopping(FSM[Basket], name="shopping"):
    def __init__(self, *plays: Any) -> None:
        self.plays = list(plays)
        self.seen: list[Basket] = []

    @step
    def start(self, ctx: Context[Basket]) -> Outcome[Basket]:
        self.seen.append(ctx.state)
        play = self.plays.pop(0)
        outcome: Outcome[Basket] = play(self, ctx) if callable(play) else play
        return outcome


def test_a_step_is_given_the_state_that_the_one_before_returned(harness: MakeHarness, conn: Connection):
    empty = Basket(UUID(int=7))
    full = Basket(UUID(int=7), (Line("x", Decimal("1.10")),), datetime(2024, 2, 29, 12, tzinfo=UTC))
    machine = Shopping(lambda self, _: Next(self.start, full), Await("go", "start"), Retry(empty), Done(full))
    durable = harness(machine)
    id = durable.insert(Shopping.new(empty))
    durable.drain()
    durable.signal(id, "go")
    durable.drain()
    assert machine.seen == [empty, full, full, empty]
    assert_row(
        conn,
        id,
        status="done",
        state={"owner": str(UUID(int=7)), "lines": [], "opened": None},
        result={
            "owner": str(UUID(int=7)),
            "lines": [{"sku": "x", "price": "1.10"}],
            "opened": "2024-02-29T12:00:00+00:00",
        },
    )


@pytest.mark.parametrize("state", [{"owner": str(UUID(int=7))}, Line("x", Decimal(1)), "text", Basket])
def test_a_state_of_another_class_is_an_error_of_the_step(harness: MakeHarness, conn: Connection, state: Any):
    durable = harness(Shopping(Next("start", state)))
    id = durable.insert(Shopping.new(Basket(UUID(int=7))))
    assert durable.drain() == {"stop": 1}
    assert row(conn, id)["last_error"].startswith("BadOutcome: state: expected ")


# 2.1-7: every document is a JSON object in the column, never a string that holds one.


def test_what_is_stored_is_json_and_not_text_about_json(harness: MakeHarness, conn: Connection):
    children = [Leaf.new({"n": 1})]
    machine = Scripted(
        start=Next("work", {"n": 2}),
        work=Await("go", "finish", {"n": 3}),
        finish=[Retry({"n": 4}), Spawn(children, "finish", {"n": 5}), Done({"n": 6})],
    )
    durable = harness(machine, Leaf)
    (id,) = durable.insert_many([Scripted.new({"n": 1})])
    other = durable.insert(Scripted.new({"n": 1}, schedule_in=3600))
    durable.signal(other, "note", {"n": 0})

    def kinds() -> tuple[Any, ...]:
        found = conn.execute(
            "select jsonb_typeof(state), state ->> 'n', jsonb_typeof(result), result ->> 'n' from gen_durable"
            " where id = %s",
            [id],
        ).fetchone()
        assert found is not None
        return found

    assert kinds() == ("object", "1", None, None)
    one_step(durable)
    assert kinds() == ("object", "2", None, None)
    one_step(durable)
    assert kinds() == ("object", "3", None, None)
    durable.signal(id, "go")
    one_step(durable)
    assert kinds() == ("object", "4", None, None)
    one_step(durable)
    assert kinds() == ("object", "5", None, None)
    durable.drain()
    assert kinds() == ("object", "5", "object", "6")
    assert conn.execute("select jsonb_typeof(payload), payload ->> 'n' from signals").fetchall() == [("object", "0")]
    assert conn.execute(
        "select jsonb_typeof(state), state ->> 'n', jsonb_typeof(result), result ->> 'n' from gen_durable"
        " where parent_id = %s",
        [id],
    ).fetchall() == [("object", "1", "object", "1")]
