"""Steps that take longer than they may: one answer for each, the slot free again, the late result dropped."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from inprocess import working
from support import hold, row, until

from gendurable import FSM, Client, Context, Done, Job, Outcome, Retry, StepTimeout, Stop, step
from gendurable.core.claim import Claim
from gendurable.db.connection import Connection
from gendurable.events import (
    DrainFinished,
    OutcomeLate,
    OutcomeStale,
    StepCommitted,
    StepFailed,
    ThreadAbandoned,
    TooManyAbandoned,
)
from gendurable.runtime.executions import Executions

TIMEOUT = 0.3
NewConn = Callable[[], Connection]


class Slow(FSM[dict], name="slow"):
    """Its first execution waits for the test, all others end at once; notes what it was told."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.entered = threading.Semaphore(0)
        self.told: list[Context[dict]] = []
        self.handled: list[tuple[Exception, Context[dict]]] = []
        self.result: Any = {"by": "the late one"}

    @step(timeout=TIMEOUT)
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        self.told.append(ctx)
        self.entered.release()
        if ctx.attempt:
            return Done({"by": ctx.attempt})
        assert self.may_end.wait(60)
        return Done(self.result)

    def handle(self, error: Exception, ctx: Context[dict]) -> Outcome[dict]:
        self.handled.append((error, ctx))
        return Retry() if isinstance(error, StepTimeout) else Stop(error)


@pytest.fixture
def slow() -> Iterator[Slow]:
    machine = Slow()
    yield machine
    machine.may_end.set()


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as client:
        yield client


KEYS = pytest.mark.parametrize("key", [None, "k"], ids=["plain", "keyed"])


@KEYS
def test_a_step_that_takes_too_long_is_answered_for_and_its_late_result_dropped(
    dsn: str, client: Client, conn: Connection, slow: Slow, key: str | None
):
    before = datetime.now(UTC)
    with working(dsn, slow, queues="default=1") as running:
        id = client.insert(Slow.new({}, partition_key=key))
        done = client.wait(id, timeout=20)
        assert (done.result, done.attempt) == ({"by": 1}, 1)
        ctx = slow.told[0]
        assert ctx.cancelled.is_set()
        assert not ctx.shutting_down.is_set()
        assert ctx.deadline is not None
        assert timedelta(0) < ctx.deadline - before < timedelta(seconds=20)
        [(error, handled)] = slow.handled
        assert (str(error), handled.attempt, handled.cancelled.is_set()) == (
            *("step 'start' took longer than its 0.3 s", 0),
            False,
        )
        [abandoned] = running.events(ThreadAbandoned)
        assert (abandoned.id, abandoned.abandoned) == (id, 1)
        [failed] = running.events(StepFailed)
        assert (failed.kind, failed.error) == ("timeout", f"StepTimeout: {error}")

        slow.may_end.set()
        [late] = running.wait_for(OutcomeLate)
        assert (late.id, late.outcome) == (id, "done")
        assert late.seconds >= TIMEOUT
        slots = running.worker.pollers["default"].slots
        until(lambda: slots.abandoned == 0, "the late thread gone")
        until(lambda: slots.busy == 0, "the slot free")
    assert [event.outcome for event in running.events(StepCommitted)] == ["retry", "done"]
    assert running.events(OutcomeStale) == []
    assert client.get(id).result == {"by": 1}


class Held(dict[str, Any]):
    """A result that is read only when the test lets it: the step has ended, its outcome is not yet known."""

    def __init__(self, read: threading.Semaphore, may_be_read: threading.Event) -> None:
        super().__init__(by="the late one")
        self._read, self._may_be_read = read, may_be_read

    def items(self) -> Any:
        self._read.release()
        assert self._may_be_read.wait(60)
        return super().items()


@KEYS
def test_a_timeout_wins_over_a_step_that_has_returned_but_whose_outcome_is_not_ready(
    dsn: str, client: Client, slow: Slow, key: str | None
):
    reading, may_be_read = threading.Semaphore(0), threading.Event()
    slow.result = Held(reading, may_be_read)
    slow.may_end.set()
    with working(dsn, slow) as running:
        id = client.insert(Slow.new({}, partition_key=key))
        assert reading.acquire(timeout=20)
        assert client.wait(id, timeout=20).result == {"by": 1}
        may_be_read.set()
        running.wait_for(OutcomeLate)
    assert client.get(id).result == {"by": 1}


@KEYS
def test_an_outcome_that_was_ready_in_time_wins_over_the_timeout_however_long_its_commit_takes(
    dsn: str, client: Client, slow: Slow, new_conn: NewConn, key: str | None
):
    with working(dsn, slow) as running:
        id = client.insert(Slow.new({}, partition_key=key))
        assert slow.entered.acquire(timeout=20)
        with hold(new_conn(), id):
            slow.may_end.set()
            [ctx] = slow.told
            until(lambda: datetime.now(UTC) > ctx.deadline + timedelta(seconds=TIMEOUT), "the timeout well past")
        assert client.wait(id, timeout=20).result == {"by": "the late one"}
    assert slow.handled == []
    assert running.events(ThreadAbandoned) == []
    assert len(slow.told) == 1


def test_of_two_that_would_speak_for_an_execution_exactly_one_may():
    executions = Executions(threading.Event())
    both = threading.Barrier(2)

    def speak(execution: Any) -> bool:
        both.wait()
        return executions.end(execution)

    with ThreadPoolExecutor(2) as pool:
        for fence in range(500):
            execution = executions.begin(claim_of(fence), timeout=timedelta(hours=1))
            assert sorted(pool.map(speak, [execution, execution])) == [False, True]


def claim_of(fence: int) -> Claim:
    rest = {"limited": False, "has_signals": False, "waited": 0.0, "cancelling": False, "fail_fast": False}
    empty = ("partition_key", "awaits", "parent_id", "last_error", "join_round", "retry", "cancel_reason", "deadline")
    about = {"fsm": "f", "fsm_version": 1, "step": "s", "state": "{}", "attempt": 0, "queue": "default", "priority": 0}
    return Claim(id=1, fence=fence, spawn_round=0, **about, **rest, **dict.fromkeys(empty))  # type: ignore[arg-type]


def test_the_slots_of_hanging_steps_go_to_others_and_no_more_run_at_once_than_before(
    dsn: str, client: Client, slow: Slow
):
    counter = Counting()
    with working(dsn, slow, counter, queues="default=2") as running:
        client.insert_many([Slow.new({}, priority=-1) for _ in range(2)])
        running.wait_for(ThreadAbandoned, 2)
        ids = client.insert_many([Counting.new({}) for _ in range(30)])
        for id in ids:
            assert client.wait(id, timeout=20).status == "done"
        assert counter.most == 2
        assert running.worker.pollers["default"].slots.abandoned == 2
        assert running.deaths == []
    [finished] = running.events(DrainFinished)
    assert finished.abandoned == 2


class Counting(Job[dict], name="counting"):
    """Knows how many of it run at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._both = threading.Barrier(2)
        self._now = self.most = 0

    def perform(self, ctx: Context[dict]) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._both.wait(20)  # comes in pairs: two really do run at once
        with self._lock:
            self._now -= 1


def test_too_many_hanging_steps_end_the_worker(dsn: str, client: Client, slow: Slow):
    with working(dsn, slow, queues="default=2", max_abandoned=1) as running:
        client.insert_many([Slow.new({}) for _ in range(2)])
        [event] = running.wait_for(TooManyAbandoned)
        assert (event.abandoned, event.limit) == (2, 1)
        until(lambda: running.deaths, "told to end")
        assert running.worker.has_died


class Hasty(Job[dict], name="hasty", timeout=timedelta(milliseconds=200), max_attempts=1):
    def __init__(self) -> None:
        self.woken = threading.Event()

    def perform(self, ctx: Context[dict]) -> None:
        if ctx.cancelled.wait(60):
            self.woken.set()


def test_a_job_that_looks_at_cancelled_is_left_behind_for_a_moment_only(dsn: str, client: Client):
    hasty = Hasty()
    with working(dsn, hasty) as running:
        id = client.insert(Hasty.new({}))
        ended = client.wait(id, timeout=20)
        assert (ended.status, ended.last_error) == ("failed", "StepTimeout: step 'perform' took longer than its 0.2 s")
        assert hasty.woken.wait(20)
        running.wait_for(OutcomeLate)


def test_a_step_that_is_overdue_while_the_worker_drains_is_still_answered_for(
    dsn: str, client: Client, conn: Connection, slow: Slow
):
    with working(dsn, slow, drain_timeout="20s") as running:
        id = client.insert(Slow.new({}))
        assert slow.entered.acquire(timeout=20)
        draining = threading.Thread(target=running.worker.drain)
        draining.start()
        running.wait_for(StepCommitted)
        draining.join()
        assert (row(conn, id)["status"], row(conn, id)["attempt"]) == ("runnable", 1)
        [finished] = running.events(DrainFinished)
        assert finished.abandoned == 1
        assert finished.seconds < 15
