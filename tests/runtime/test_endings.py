"""Instances that are cancelled or overdue, through the harness: what becomes of them, their parents and children."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from scripted import Scripted, raises
from support import inbox, row

from gendurable import Await, Context, Done, Job, Next, Retry, Spawn, Status, Stop
from gendurable.db.connection import Connection
from gendurable.db.operations import retry_instance
from gendurable.errors import InvalidInstance, NoTarget
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]


class Leaf(Job[dict[str, Any]], name="leaf"):
    def perform(self, ctx: Context[dict[str, Any]]) -> dict[str, Any] | Stop:
        return Stop("withered") if ctx.state.get("fails") else {}


STANDING: dict[str, tuple[Any, dict[str, Any]]] = {
    "runnable": (Next("work", delay=3600), {"attempt": 0}),
    "awaiting_signal": (Await("go", "work", timeout=3600), {"awaits": None, "await_deadline": None}),
    "awaiting_children": (Spawn([Leaf.new(schedule_in=3600)], "work", timeout=3600), {"children_pending": 0}),
}


@pytest.mark.parametrize("status", STANDING)
def test_whatever_lives_is_cancelled_at_once(harness: MakeHarness, conn: Connection, status: str):
    play, expected = STANDING[status]
    durable = harness(Scripted(start=play), Leaf)
    id = durable.insert(Scripted.new({"n": 1}, unique_key="k"))
    durable.drain()
    durable.signal(id, "noise")
    before = row(conn, id)
    assert (before["status"], durable.cancel(id, reason="no longer wanted")) == (status, True)
    found = row(conn, id)
    expected |= {"status": "cancelled", "step": "work", "state": {"n": 1}, "result": None, "await_deadline": None}
    expected |= {"last_error": "no longer wanted", "cancel_reason": "no longer wanted", "cancelling": False}
    assert {name: found[name] for name in expected} == expected
    assert found["fence"] > before["fence"]
    assert (inbox(conn, id), found["unique_guard"]) == ([], None)
    assert durable.cancel(id, reason="again") is False
    assert row(conn, id) == found
    durable.advance(7200)
    assert durable.drain() == ({"done": 1} if status == "awaiting_children" else {}), "its child lives on"


@pytest.mark.parametrize("end", [Done(), Stop("enough")])
def test_what_has_ended_otherwise_is_no_target(harness: MakeHarness, conn: Connection, end: Any):
    durable = harness(Scripted(start=end))
    id = durable.insert(Scripted.new())
    durable.drain()
    before = row(conn, id)
    for absent in (id, id + 1):
        with pytest.raises(NoTarget, match=f"instance {absent} has ended or does not exist; nothing was changed"):
            durable.cancel(absent, cascade=True)
    assert row(conn, id) == before


@pytest.mark.parametrize("reason", ["", "  ", 7, b"x"])
def test_a_reason_that_says_nothing_is_refused(harness: MakeHarness, conn: Connection, reason: Any):
    durable = harness(Scripted(start=Done()))
    id = durable.insert(Scripted.new())
    with pytest.raises(InvalidInstance, match=r"reason: .* is no text that says why"):
        durable.cancel(id, reason=reason)
    assert row(conn, id)["status"] == "runnable"


def test_without_a_reason_there_is_one_all_the_same(harness: MakeHarness):
    durable = harness(Scripted(start=Done()))
    id = durable.insert(Scripted.new())
    durable.cancel(id)
    assert durable.get(id).last_error == "cancelled"


def test_a_reason_may_hold_what_a_column_cannot(harness: MakeHarness):
    durable = harness(Scripted(start=Done()))
    id = durable.insert(Scripted.new())
    durable.cancel(id, reason="a\0b" + "x" * 100_000)
    assert durable.get(id).last_error.startswith("a\\x00bxxx")


def test_a_parent_counts_a_cancelled_child_and_sees_why(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=Spawn([Leaf.new(schedule_in=3600), Leaf], "work"), work=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    [child] = conn.execute("select id from gen_durable where status = 'runnable'").fetchone()
    assert durable.cancel(child, reason="too late")
    assert durable.drain() == {"done": 1}
    assert [(c.status, c.last_error) for c in machine.seen[-1].joined] == [
        (Status.CANCELLED, "too late"),
        (Status.DONE, None),
    ]
    assert durable.get(id).status == "done"


def test_a_cascade_cancels_the_children_too(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Spawn([Leaf.new(schedule_in=3600)] * 3, "work")), Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    assert durable.cancel(id, reason="no longer wanted", cascade=True)
    found = conn.execute("select status::text, last_error, count(*) from gen_durable group by 1, 2").fetchall()
    assert found == [("cancelled", "no longer wanted", 4)]


# Compensation.


class Payment(Scripted, name="payment"):
    """Gives back what it took, as the test says."""

    def __init__(self, *, hook: Any, **plays: Any) -> None:
        super().__init__(**plays)
        self._hook = hook
        self.compensated: list[Context[Any]] = []

    def on_cancel(self, ctx: Context[Any]) -> Any:
        self.compensated.append(ctx)
        play = self._hook.pop(0) if isinstance(self._hook, list) else self._hook
        return play(ctx) if callable(play) else play


@pytest.mark.parametrize("status", STANDING)
def test_a_machine_with_a_hook_runs_it_instead_of_the_step(harness: MakeHarness, conn: Connection, status: str):
    play, _ = STANDING[status]
    machine = Payment(start=play, hook=Done({"refunded": 7}))
    durable = harness(machine, Leaf)
    id = durable.insert(Payment.new({"n": 1}))
    durable.drain()
    durable.signal(id, "go" if status != "awaiting_signal" else "noise")
    before = row(conn, id)
    assert before["on_cancel"]
    assert durable.cancel(id, reason="no longer wanted") is True
    found = row(conn, id)
    expected = {"status": "runnable", "step": "work", "cancelling": True, "cancel_reason": "no longer wanted"}
    expected |= {"attempt": 0, "awaits": None, "await_deadline": None, "children_pending": 0}
    assert {name: found[name] for name in expected} == expected
    assert found["fence"] > before["fence"]
    assert durable.cancel(id, reason="again") is False
    assert durable.drain() == {"cancel": 1}
    [ctx] = machine.compensated
    assert (ctx.step, ctx.state, ctx.cancel_reason) == ("work", {"n": 1}, "no longer wanted")
    assert (len(ctx.inbox), len(ctx.awaited)) == (1, 0)
    assert len(ctx.joined) == (status == "awaiting_children")
    ended = durable.get(id)
    assert (ended.status, ended.result, ended.last_error) == ("cancelled", {"refunded": 7}, "no longer wanted")
    assert (ended.cancelling, inbox(conn, id)) == (False, [])
    assert durable.cancel(id) is False


def test_a_hook_that_returns_nothing_ends_the_instance_cancelled(harness: MakeHarness):
    durable = harness(Payment(start=Await("go", "work"), hook=None))
    id = durable.insert(Payment.new())
    durable.cancel(id)
    assert durable.drain() == {"cancel": 1}
    assert (durable.get(id).status, durable.get(id).last_error) == ("cancelled", "cancelled")


def test_a_hook_may_take_several_steps(harness: MakeHarness, conn: Connection):
    machine = Payment(
        start=Await("go", "work"),
        hook=Next("work", {"undo": 1}),
        work=Await("refunded", "finish"),
        finish=lambda ctx: Done({"why": ctx.cancel_reason}),
    )
    durable = harness(machine)
    id = durable.insert(Payment.new())
    durable.drain()
    durable.cancel(id, reason="no longer wanted")
    assert durable.drain() == {"next": 1, "await": 1}
    assert row(conn, id)["cancelling"] is False
    assert durable.cancel(id) is False, "it compensates"
    durable.signal(id, "refunded")
    assert durable.drain() == {"cancel": 1}
    assert durable.get(id).result == {"why": "no longer wanted"}


def test_a_hook_that_fails_is_asked_again_if_its_handler_says_so(harness: MakeHarness, conn: Connection):
    machine = Payment(
        start=Await("go", "work"), hook=[raises(ValueError("no")), Done()], handle=lambda *_: Retry(delay=60)
    )
    durable = harness(machine)
    id = durable.insert(Payment.new())
    durable.drain()
    durable.cancel(id)
    assert durable.drain() == {"retry": 1}
    found = row(conn, id)
    assert (found["cancelling"], found["attempt"], found["last_error"]) == (True, 1, "ValueError: no")
    durable.advance(60)
    assert durable.drain() == {"cancel": 1}
    assert [ctx.attempt for ctx in machine.compensated] == [0, 1]


@pytest.mark.parametrize(
    ("hook", "error"),
    [(Stop("cannot be undone"), "cannot be undone"), (7, "BadOutcome: on_cancel returned 7; it must return Next")],
)
def test_a_hook_that_gives_up_ends_the_instance_failed(harness: MakeHarness, hook: Any, error: str):
    durable = harness(Payment(start=Await("go", "work"), hook=hook))
    id = durable.insert(Payment.new())
    durable.cancel(id)
    assert durable.drain() == {"stop": 1}
    assert durable.get(id).status == "failed"
    assert durable.get(id).last_error.startswith(error)
    with pytest.raises(NoTarget):
        durable.cancel(id)


def test_a_crash_inside_a_hook_runs_the_hook_again(harness: MakeHarness):
    machine = Payment(start=Await("go", "work"), hook=[raises(SystemExit()), Done()])
    durable = harness(machine)
    id = durable.insert(Payment.new())
    durable.cancel(id)
    assert durable.drain() == {"crash": 1}
    durable.advance(60)
    assert durable.drain() == {"cancel": 1}
    assert durable.get(id).status == "cancelled"


def test_a_retried_instance_has_forgotten_that_it_was_cancelled(harness: MakeHarness, conn: Connection):
    machine = Payment(start=[Await("go", "work")], work=Done({"well": True}), hook=Done({"refunded": 7}))
    durable = harness(machine)
    id = durable.insert(Payment.new())
    durable.drain()
    durable.cancel(id)
    durable.drain()
    retry_instance(conn, id)
    assert durable.drain() == {"done": 1}
    assert (durable.get(id).status, durable.get(id).result) == ("done", {"well": True})


def test_a_hook_that_the_code_has_lost_is_missed_by_nobody(harness: MakeHarness):
    durable = harness(Payment(start=Done(), hook=Done()))
    id = durable.insert(Payment.new())
    durable.cancel(id)
    without = type("Payment", (Scripted,), {}, name="payment")
    assert harness(without(start=Done())).drain() == {"cancel": 1}
    assert durable.get(id).status == "cancelled"


def test_an_inline_machine_goes_on_compensating_on_a_claim_of_its_own(harness: MakeHarness):
    class Quick(Payment, name="quick", inline=True):
        pass

    durable = harness(Quick(start=Await("go", "work"), hook=Next("work"), work=Next("finish"), finish=Done()))
    id = durable.insert(Quick.new())
    durable.cancel(id)
    assert durable.drain() == {"next": 2, "cancel": 1}
    assert durable.get(id).status == "cancelled"


def test_a_cascade_leaves_the_children_of_the_compensation_alone(harness: MakeHarness, conn: Connection):
    machine = Payment(
        start=Spawn([Leaf.new({"n": 1}, schedule_in=3600)], "work"),
        hook=Spawn([Leaf.new({"n": 2}, schedule_in=3600)], "finish"),
        finish=lambda ctx: Done({"joined": [child.status for child in ctx.joined]}),
    )
    durable = harness(machine, Leaf)
    id = durable.insert(Payment.new())
    durable.drain()
    assert durable.cancel(id, cascade=True)
    assert durable.drain() == {"spawn": 1}
    assert durable.cancel(id, cascade=True) is False
    query = "select state->>'n', status::text from gen_durable where parent_id = %s order by id"
    assert conn.execute(query, [id]).fetchall() == [("1", "cancelled"), ("2", "runnable")]
    durable.advance(3600)
    assert durable.drain() == {"done": 1, "cancel": 1}
    assert durable.get(id).result == {"joined": ["done"]}


def test_a_parent_waits_for_a_child_that_compensates(harness: MakeHarness, conn: Connection):
    child = Payment(start=Await("go", "work"), hook=Next("work", delay=60), work=Done())
    machine = Scripted(start=Spawn([Payment], "work"), work=Done())
    durable = harness(machine, child)
    id = durable.insert(Scripted.new())
    durable.drain()
    [born] = conn.execute("select id from gen_durable where parent_id = %s", [id]).fetchone()
    durable.cancel(born)
    assert durable.drain() == {"next": 1}
    assert durable.get(id).status == "awaiting_children"
    durable.advance(60)
    assert durable.drain() == {"cancel": 1, "done": 1}


def test_the_deadline_ends_a_compensation_too(harness: MakeHarness):
    durable = harness(Payment(start=Await("go", "work"), hook=Await("never", "work")))
    id = durable.insert(Payment.new(deadline=60))
    durable.cancel(id)
    durable.drain()
    durable.advance(60)
    durable.drain()
    assert durable.get(id).status == "failed"


# Deadlines.


@pytest.mark.parametrize("status", STANDING)
def test_an_instance_ends_at_its_deadline_wherever_it_stands(harness: MakeHarness, conn: Connection, status: str):
    play, _ = STANDING[status]
    durable = harness(Scripted(start=play), Leaf)
    id = durable.insert(Scripted.new(deadline=600))
    durable.drain()
    assert (row(conn, id)["status"], durable.get(id).deadline) == (status, row(conn, id)["deadline"])
    durable.signal(id, "noise")
    durable.advance(599)
    assert durable.drain() == {}
    durable.advance(1)
    assert durable.drain() == {}
    found = durable.get(id)
    assert (found.status, found.step, found.await_deadline) == ("failed", "work", None)
    assert (
        found.last_error
        == f"DeadlineExceeded: it was to end by {found.deadline:%Y-%m-%d %H:%M:%S.%f}".rstrip("0") + "+00"
    )
    assert inbox(conn, id) == []


def test_an_instant_may_be_given_as_the_deadline(harness: MakeHarness):
    durable = harness(Scripted(start=Done()))
    id = durable.insert(Scripted.new(deadline=datetime(2000, 1, 1, tzinfo=UTC)))
    assert durable.drain() == {}
    assert durable.get(id).last_error == "DeadlineExceeded: it was to end by 2000-01-01 00:00:00+00"


def test_a_deadline_outlives_every_transition(harness: MakeHarness):
    start = [Retry(), Next("work"), Done()]
    durable = harness(Scripted(start=start, work=Await("go", "finish"), finish=Spawn([Leaf], "start")), Leaf)
    id = durable.insert(Scripted.new(deadline=600))
    deadline = durable.get(id).deadline
    assert durable.drain() == {"retry": 1, "next": 1, "await": 1}
    assert durable.get(id).deadline == deadline
    durable.signal(id, "go")
    assert durable.drain() == {"spawn": 1, "done": 2}
    assert durable.get(id).deadline == deadline


def test_a_parent_is_released_by_the_deadline_of_its_child(harness: MakeHarness):
    machine = Scripted(start=Spawn([Leaf.new(schedule_in=3600, deadline=60)], "work"), work=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.advance(60)
    assert durable.drain() == {"done": 1}
    assert (durable.get(id).status, machine.seen[-1].joined[0].status) == ("done", "failed")


def test_an_await_that_ends_with_the_instance_is_not_woken(harness: MakeHarness):
    durable = harness(Scripted(start=Await("go", "work", timeout=60), work=Done()))
    id = durable.insert(Scripted.new(deadline=60))
    durable.drain()
    durable.advance(60)
    assert durable.drain() == {}
    assert durable.get(id).status == "failed"


def test_one_that_is_retried_after_its_deadline_has_none(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Stop("no"), work=Done()))
    late, early = durable.insert(Scripted.new(deadline=60)), durable.insert(Scripted.new(deadline=600))
    durable.drain()
    durable.advance(60)
    for id in (late, early):
        retry_instance(conn, id, ahead=timedelta(seconds=60))
    assert (durable.get(late).deadline, durable.get(early).deadline is None) == (None, False)


def test_a_round_that_fails_fast_cancels_the_rest_before_its_parent_goes_on(harness: MakeHarness):
    children = [Leaf.new(schedule_in=3600), Leaf.new({"fails": True}), Leaf.new(schedule_in=7200)]
    machine = Scripted(start=Spawn(children, "work", on_failure="fail_fast"), work=Done())
    durable = harness(machine, Leaf)
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"spawn": 1, "stop": 1, "done": 1}
    assert [child.status for child in machine.seen[-1].joined] == ["cancelled", "failed", "cancelled"]
    assert f"instance {id} fails fast" in machine.seen[-1].joined[0].last_error
    durable.advance(7200)
    assert durable.drain() == {}
