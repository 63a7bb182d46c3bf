"""What a step is told while it runs, and what it may answer."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from scripted import Scripted
from support import row, until

from gendurable import Context, Done, Interrupted, Job, Status, Stop
from gendurable.db.connection import Connection
from gendurable.runtime.executions import LateEvent
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]


# Interrupted.


def test_an_interrupted_row_goes_back_as_it_was(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=[Interrupted(), Done()]))
    id = durable.insert(Scripted.new({"n": 1}, priority=3))
    durable.signal(id, "kept")
    before = row(conn, id)
    assert durable.drain(shutting_down=True) == {"interrupted": 1}
    after = row(conn, id)
    assert after.pop("fence") > before.pop("fence")
    assert {**after, "updated_at": None} == {**before, "updated_at": None}
    assert durable.drain() == {"done": 1}


def test_interrupted_by_nobody_is_a_bad_outcome(harness: MakeHarness):
    durable = harness(Scripted(start=Interrupted()))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    assert "Interrupted, but nothing interrupts it" in (durable.get(id).last_error or "")


class Careful(Job[dict], name="careful"):
    def perform(self, ctx: Context[dict]) -> Interrupted | None:
        return Interrupted() if ctx.shutting_down.is_set() else None


def test_a_job_may_be_interrupted(harness: MakeHarness):
    durable = harness(Careful)
    durable.insert_many([Careful.new() for _ in range(150)])
    assert durable.drain(shutting_down=True) == {"interrupted": 150}
    assert durable.drain() == {"done": 150}


def test_a_handler_may_answer_with_interrupted(harness: MakeHarness):
    def handle(_: Exception, ctx: Context[dict]) -> object:
        return Interrupted() if ctx.shutting_down.is_set() else Stop("not now")

    machine = Scripted(start=[ValueError("no outcome"), Done()], handle=handle)
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    assert durable.drain(shutting_down=True) == {"interrupted": 1}
    assert (durable.get(id).attempt, durable.get(id).last_error) == (0, None)


# The deadline of the instance.


def test_a_step_sees_the_deadline_of_its_instance(harness: MakeHarness):
    machine = Scripted(start=Done())
    durable = harness(machine)
    at = datetime.now(UTC) + timedelta(days=1)
    durable.insert(Scripted.new(deadline=at))
    durable.drain()
    [ctx] = machine.seen
    assert ctx.deadline == at


def test_without_one_there_is_none(harness: MakeHarness):
    machine = Scripted(start=Done())
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    assert machine.seen[0].deadline is None
    assert durable.get(id).status is Status.DONE


# An event that is made when somebody waits.


def test_a_late_event_wakes_whoever_waits_and_is_seen_by_who_comes_later():
    event = LateEvent()
    assert (event.is_set(), event.wait(0)) == (False, False)
    woken: list[bool] = []
    waiters = [threading.Thread(target=lambda: woken.append(event.wait(20))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    event.set()
    for waiter in waiters:
        waiter.join()
    assert woken == [True] * 3
    assert event.is_set()
    assert event.wait()


@pytest.mark.parametrize("_", range(20))
def test_a_late_event_is_never_missed(_: int):
    event, ready = LateEvent(), threading.Barrier(2)
    seen: list[bool] = []

    def wait() -> None:
        ready.wait()
        seen.append(event.wait(20))

    waiter = threading.Thread(target=wait)
    waiter.start()
    ready.wait()
    event.set()
    until(lambda: seen, "the waiter woken")
    waiter.join()


# Timeouts, by the clock of the harness.


class Dawdler(Job[dict], name="dawdler", timeout=60, max_attempts=2):
    """Lets the clock run for as long as the test says."""

    def __init__(self) -> None:
        self.durable: Harness | None = None
        self.takes = [61, 59]
        self.deadlines: list[datetime | None] = []

    def perform(self, ctx: Context[dict]) -> dict:
        self.deadlines.append(ctx.deadline)
        assert self.durable is not None
        self.durable.advance(self.takes.pop(0))
        return {"by": ctx.attempt}


def test_in_a_harness_a_step_that_lets_the_clock_run_too_far_has_run_in_vain(harness: MakeHarness):
    dawdler = Dawdler()
    durable = dawdler.durable = harness(dawdler)
    id = durable.insert(Dawdler.new({}))
    assert durable.drain() == {"retry": 1}
    assert durable.get(id).last_error == "StepTimeout: step 'perform' took longer than its 60 s"
    durable.advance(10)
    assert durable.drain() == {"done": 1}
    assert durable.get(id).result == {"by": 1}
    first, second = dawdler.deadlines
    assert first is not None
    assert second is not None
    assert timedelta(seconds=71) <= second - first < timedelta(seconds=100)
