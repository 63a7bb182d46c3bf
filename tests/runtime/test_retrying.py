"""Retry policies at work: the default handler, through claims and commits, by the clock of the database."""

from collections.abc import Callable
from typing import Any

import pytest
from support import row

from gendurable import FSM, Context, Done, Fatal, Job, Next, Outcome, Retry, RetryPolicy, Spawn, step
from gendurable.db.connection import Connection
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]
State = dict[str, Any]


class Flaky(FSM[State], name="flaky", retry=RetryPolicy(3, base=10, stop_on=PermissionError)):
    """Each step raises what it was given, once for each execution, and goes on when nothing is left."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.seen: list[Context[State]] = []

    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return self._run(ctx, Next(self.hasty))

    @step(retry=RetryPolicy(2, base=1, factor=1))
    def hasty(self, ctx: Context[State]) -> Outcome[State]:
        return self._run(ctx, Done({"attempt": ctx.attempt}))

    def _run(self, ctx: Context[State], outcome: Outcome[State]) -> Outcome[State]:
        self.seen.append(ctx)
        if self.errors:
            raise self.errors.pop(0)
        return outcome


class FlakyJob(Job[State], name="flaky_job", retry=RetryPolicy(4, base=2)):
    def perform(self, ctx: Context[State]) -> State:
        if ctx.attempt < ctx.state["failures"]:
            raise OSError(f"attempt {ctx.attempt}")
        return {"attempt": ctx.attempt, "last_error": ctx.last_error}


def test_a_failed_step_runs_again_after_each_delay_of_its_policy(harness: MakeHarness, conn: Connection):
    machine = Flaky(OSError("one"), OSError("two"))
    durable = harness(machine)
    id = durable.insert(Flaky.new())
    assert durable.drain() == {"retry": 1}
    assert (row(conn, id)["attempt"], row(conn, id)["last_error"]) == (1, "OSError: one")
    durable.advance(9.5)
    assert durable.drain() == {}
    durable.advance(0.5)
    assert durable.drain() == {"retry": 1}
    durable.advance(20)
    assert durable.drain() == {"next": 1, "done": 1}
    assert [(ctx.attempt, ctx.last_error) for ctx in machine.seen] == [
        (0, None),
        (1, "OSError: one"),
        (2, "OSError: two"),
        (0, None),
    ]


def test_the_last_execution_that_fails_ends_the_instance(harness: MakeHarness):
    durable = harness(Flaky(*(OSError(str(number)) for number in range(3))))
    id = durable.insert(Flaky.new())
    for _ in range(3):
        durable.drain()
        durable.advance(100)
    assert (durable.get(id).status, durable.get(id).last_error) == ("failed", "OSError: 2")


def test_a_steps_own_policy_counts_for_it_alone(harness: MakeHarness):
    machine = Flaky(OSError("a"), OSError("b"))
    durable = harness(machine)
    id = durable.insert(Flaky.new(step=Flaky.hasty))
    assert durable.drain() == {"retry": 1}
    durable.advance(1)
    assert durable.drain() == {"stop": 1}
    assert durable.get(id).last_error == "OSError: b"
    assert [ctx.retry and ctx.retry.max_attempts for ctx in machine.seen] == [2, 2]


@pytest.mark.parametrize("error", [PermissionError("keys"), Fatal("no such account")])
def test_what_no_repetition_helps_ends_at_once(harness: MakeHarness, error: Exception):
    durable = harness(Flaky(error))
    id = durable.insert(Flaky.new())
    assert durable.drain() == {"stop": 1}
    assert durable.get(id).last_error == f"{type(error).__name__}: {error}"


def test_a_policy_of_one_instance_wins_over_machine_and_step_and_keeps_their_filters(
    harness: MakeHarness, conn: Connection
):
    machine = Flaky(OSError("1"), OSError("2"), OSError("3"), PermissionError("keys"))
    durable = harness(machine)
    id = durable.insert(Flaky.new(retry=RetryPolicy(9, base=1, factor=1)))
    for _ in range(3):
        assert durable.drain() == {"retry": 1}
        durable.advance(1)
    assert durable.drain() == {"stop": 1}
    assert row(conn, id)["last_error"] == "PermissionError: keys"
    assert durable.get(id).retry == {"max_attempts": 9, "base": 1, "factor": 1, "cap": 300, "jitter": 0}

    machine.errors = [OSError("1"), OSError("2")]
    hasty = durable.insert(Flaky.new(step="hasty", retry=RetryPolicy(3, base=0)))
    assert durable.drain() == {"retry": 2, "done": 1}
    assert durable.get(hasty).result == {"attempt": 2}


def test_children_carry_their_own_policies(harness: MakeHarness):
    class Parent(FSM[State], name="parent"):
        @step
        def start(self, ctx: Context[State]) -> Outcome[State]:
            patient = FlakyJob.new({"failures": 4}, retry=RetryPolicy(9, base=0))
            return Spawn([FlakyJob.new({"failures": 4}, retry=RetryPolicy(1)), patient], then=self.join)

        @step
        def join(self, ctx: Context[State]) -> Outcome[State]:
            return Done({"ends": [child.status for child in ctx.joined]})

    durable = harness(Parent, FlakyJob)
    id = durable.insert(Parent.new())
    durable.drain()
    assert durable.get(id).result == {"ends": ["failed", "done"]}


def test_a_job_with_a_policy(harness: MakeHarness):
    durable = harness(FlakyJob)
    lucky, unlucky = durable.insert(FlakyJob.new({"failures": 3})), durable.insert(FlakyJob.new({"failures": 4}))
    for delay in (2, 4, 8):
        assert durable.drain() == {"retry": 2}
        durable.advance(delay)
    assert durable.drain() == {"done": 1, "stop": 1}
    assert durable.get(lucky).result == {"attempt": 3, "last_error": "OSError: attempt 2"}
    assert durable.get(unlucky).last_error == "OSError: attempt 3"


def test_a_handler_of_ones_own_sees_the_policy_and_may_fall_back_to_it(harness: MakeHarness):
    class Own(Flaky, name="own"):
        def handle(self, error: Exception, ctx: Context[State]) -> Outcome[State]:
            assert ctx.retry == RetryPolicy(3, base=10, stop_on=PermissionError)
            return Done({"spared": True}) if isinstance(error, Fatal) else super().handle(error, ctx)

    durable = harness(Own(OSError("disk"), Fatal("x")))
    id = durable.insert(Own.new())
    assert durable.drain() == {"retry": 1}
    durable.advance(10)
    assert durable.drain() == {"done": 1}
    assert durable.get(id).result == {"spared": True}


def test_a_row_whose_policy_cannot_be_read_ends_typed_and_hurts_no_neighbour(harness: MakeHarness, conn: Connection):
    durable = harness(FlakyJob)
    broken, sound = durable.insert_many([FlakyJob.new({"failures": 0}) for _ in range(2)])
    conn.execute("update gen_durable set retry = '{\"max_attempts\": -1}' where id = %s", [broken])
    assert durable.drain() == {"stop": 1, "done": 1}
    assert str(durable.get(broken).last_error).startswith("UndecodableRow: the column retry holds {'max_attempts': -1}")
    assert durable.get(sound).status == "done"


def test_a_crash_counts_as_an_execution(harness: MakeHarness):
    class Crashing(FSM[State], name="crashing", retry=RetryPolicy(3, base=0)):
        @step
        def start(self, ctx: Context[State]) -> Outcome[State]:
            if not ctx.attempt:
                raise SystemExit
            raise OSError(f"attempt {ctx.attempt}")

    durable = harness(Crashing)
    id = durable.insert(Crashing.new())
    assert durable.drain() == {"crash": 1}
    durable.advance(61)
    assert durable.drain() == {"retry": 1, "stop": 1}
    assert durable.get(id).last_error == "OSError: attempt 2"


def test_retry_as_an_outcome_is_free_of_any_policy(harness: MakeHarness):
    class Free(FSM[State], name="free", retry=RetryPolicy(1)):
        @step
        def start(self, ctx: Context[State]) -> Outcome[State]:
            return Retry() if ctx.attempt < 5 else Done()

    durable = harness(Free)
    durable.insert(Free.new())
    assert durable.drain() == {"retry": 5, "done": 1}
