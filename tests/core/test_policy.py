"""Retry policies as values: what they refuse, when they retry, how long they wait."""

from datetime import timedelta
from typing import Any

import pytest

from gendurable import FSM, Context, Done, Fatal, Job, Outcome, Retry, RetryPolicy, Stop, step
from gendurable.core.fsm import definition
from gendurable.core.policy import read_policy
from gendurable.errors import BadOutcome, DefinitionError, InvalidInstance, InvalidPolicy, UndecodableRow, Unstorable
from gendurable.testing import context

HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_attempts", value) for value in (0, -1, True, 2.0, "5", None, 2**31, HUGE)),
        *((name, value) for name in ("base", "cap") for value in (-1, True, "1s", None, float("nan"), HUGE)),
        *(("factor", value) for value in (0.9, 0, -2, True, "2", None, float("nan"), float("inf"))),
        *(("jitter", value) for value in (-0.1, 1.1, True, "0", None, float("nan"))),
        *((name, value) for name in ("retry_on", "stop_on") for value in (5, [int], ["ValueError"], [OSError()], None)),
        ("stop_on", BaseException),
        ("retry_on", [ValueError, KeyboardInterrupt]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any):
    with pytest.raises(InvalidPolicy, match=f"^{name}: .+(give|at most)"):
        RetryPolicy(**{name: value})


def test_a_cap_below_the_base_is_refused():
    with pytest.raises(InvalidPolicy, match=r"^cap: 0:00:05 is shorter than base"):
        RetryPolicy(base=10, cap=5)


def test_a_policy_is_a_value_whichever_way_its_durations_and_errors_were_given():
    given = RetryPolicy(5, timedelta(milliseconds=100), 1.5, 1, 0, [OSError], ValueError)
    assert given == RetryPolicy(5, 0.1, 1.5, timedelta(seconds=1), 0.0, (OSError,), (ValueError,))
    assert len({given, RetryPolicy(5, 0.1, 1.5, 1, 0, OSError, [ValueError])}) == 1


def test_delays_grow_by_the_factor_up_to_the_cap():
    policy = RetryPolicy(base=0.1, factor=1.5, cap=1)
    delays = [policy.delay(attempt, 1).total_seconds() for attempt in range(8)]
    assert delays == pytest.approx([0.1, 0.15, 0.225, 0.3375, 0.50625, 0.759375, 1, 1], abs=1e-6)


@pytest.mark.parametrize("attempt", [1_000, 10**6, 2**31])
def test_delays_never_overflow(attempt: int):
    assert RetryPolicy().delay(attempt, 1) == timedelta(minutes=5)
    assert RetryPolicy(base=0).delay(attempt, 1) == timedelta(0)
    assert RetryPolicy(factor=1).delay(attempt, 1) == timedelta(seconds=1)


def test_jitter_takes_away_up_to_its_share_and_says_the_same_when_asked_again():
    policy = RetryPolicy(base=100, jitter=0.2)
    delays = [policy.delay(0, id).total_seconds() for id in range(1, 501)]
    assert delays == [policy.delay(0, id).total_seconds() for id in range(1, 501)]
    assert min(delays) >= 80
    assert max(delays) <= 100
    # Spread evenly over ids that follow each other, not in a lump.
    assert all(30 <= sum(low <= delay < low + 2 for delay in delays) <= 75 for low in range(80, 100, 2))
    assert len({RetryPolicy(base=100, factor=1, jitter=1).delay(attempt, 7) for attempt in range(50)}) == 50


@pytest.mark.parametrize(
    ("policy", "error", "attempt", "again"),
    [
        (RetryPolicy(3), OSError(), 0, True),
        (RetryPolicy(3), OSError(), 1, True),
        (RetryPolicy(3), OSError(), 2, False),
        (RetryPolicy(1), OSError(), 0, False),
        (RetryPolicy(retry_on=OSError), ConnectionResetError(), 0, True),
        (RetryPolicy(retry_on=OSError), ValueError(), 0, False),
        (RetryPolicy(stop_on=OSError), ConnectionResetError(), 0, False),
        (RetryPolicy(stop_on=OSError), ValueError(), 0, True),
        (RetryPolicy(retry_on=[OSError], stop_on=[PermissionError]), PermissionError(), 0, False),
        (RetryPolicy(retry_on=[]), ValueError(), 0, False),
        (RetryPolicy(), Fatal("x"), 0, False),
        (RetryPolicy(retry_on=Fatal), Fatal("x"), 0, False),
        (RetryPolicy(), BadOutcome("x"), 0, False),
        (RetryPolicy(), Unstorable("x"), 0, False),
    ],
)
def test_what_is_retried(policy: RetryPolicy, error: Exception, attempt: int, again: bool):
    assert policy.retries(error, attempt) is again


# Where a policy may stand.


class Patient(FSM[dict[str, Any]], name="patient", retry=RetryPolicy(7)):
    @step
    def start(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        return Done()

    @step(retry=RetryPolicy(2))
    def hasty(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        """In a hurry."""
        return Done()

    @step()
    def plain(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        return Done()


class Heir(Patient, name="heir"):
    @step(retry=RetryPolicy(4))
    def start(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        return Done()

    @step
    def hasty(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        return Done()


class Disinherited(Patient, name="disinherited", retry=None): ...


def policies(machine: type[FSM[Any]]) -> list[int | None]:
    found = [definition(machine).policy(name) for name in definition(machine).steps]
    return [policy and policy.max_attempts for policy in found]


def test_a_steps_policy_wins_over_the_machines():
    assert policies(Patient) == [7, 2, 7]


def test_the_machines_policy_is_inherited_and_a_steps_goes_with_the_step():
    assert policies(Heir) == [4, 7, 7]
    assert policies(Disinherited) == [None, 2, None]


def test_a_step_with_options_is_a_step_like_any_other():
    assert Patient.hasty == Patient().hasty == "hasty"
    assert Patient().hasty(context({})) == Done()
    assert Patient.hasty.__doc__ == "In a hurry."


@pytest.mark.parametrize("value", [3, "always", RetryPolicy, {"max_attempts": 3}])
def test_what_is_no_policy_is_refused(value: Any):
    with pytest.raises(DefinitionError, match=r"Culprit.*retry=.+is no policy; give RetryPolicy"):

        class Culprit(FSM[dict[str, Any]], retry=value):
            @step
            def start(self, ctx): ...

    with pytest.raises(DefinitionError, match=r"retry=.+is no policy"):
        step(retry=value)(lambda self, ctx: Done())
    with pytest.raises(InvalidInstance, match=r"retry: .+is no policy"):
        Patient.new(retry=value)


def test_an_option_nobody_knows_is_refused():
    with pytest.raises(TypeError, match="rerty"):
        step(rerty=RetryPolicy())(lambda self, ctx: Done())  # type: ignore[call-overload]


def test_a_job_counts_by_its_policy_or_by_max_attempts_but_not_by_both():
    with pytest.raises(DefinitionError, match="Culprit has both max_attempts and retry"):

        class Culprit(Job[dict[str, Any]], max_attempts=3, retry=RetryPolicy(3)):
            def perform(self, ctx): ...

    class Base(Job[dict[str, Any]], retry=RetryPolicy(3)):
        def perform(self, ctx): ...

    class Counting(Base, max_attempts=5): ...

    assert policies(Base) == [3]
    assert policies(Counting) == [None]


# The default handler.


def test_the_handler_follows_the_policy_of_the_context():
    policy = RetryPolicy(2, base=10)
    error = OSError("disk")
    assert Patient().handle(error, context({}, retry=policy)) == Retry(delay=timedelta(seconds=10))
    assert Patient().handle(error, context({}, retry=policy, attempt=1)) == Stop(error)
    assert Patient().handle(error, context({})) == Stop(error)


class Mail(Job[dict[str, Any]], name="mail", max_attempts=3):
    def perform(self, ctx: Context[dict[str, Any]]) -> None: ...

    def backoff(self, attempt: int) -> float:
        return 99.0


def test_a_policy_takes_the_place_of_a_jobs_attempts_and_backoff():
    error = OSError("disk")
    assert Mail().handle(error, context({})) == Retry(delay=99.0)
    assert Mail().handle(error, context({}, attempt=2)) == Stop(error)
    patient = RetryPolicy(5, base=1)
    assert Mail().handle(error, context({}, attempt=3, retry=patient)) == Retry(delay=timedelta(seconds=8))
    assert Mail().handle(error, context({}, attempt=4, retry=patient)) == Stop(error)


def test_what_is_fatal_ends_a_job_at_once():
    error = Fatal("no such account")
    assert Mail().handle(error, context({})) == Stop(error)


# With one instance.


def test_an_instance_carries_the_numbers_and_keeps_the_filters_of_its_machine():
    own = RetryPolicy(2, base=9, retry_on=OSError, stop_on=PermissionError)
    given = RetryPolicy(8, 0.25, 3, 60, 0.5)
    stored = Patient.new(retry=given).retry
    assert stored is not None
    assert read_policy(stored, None) == given
    assert read_policy(stored, own) == RetryPolicy(8, 0.25, 3, 60, 0.5, OSError, PermissionError)
    assert Patient.new().retry is None


@pytest.mark.parametrize("filters", [{"retry_on": OSError}, {"stop_on": OSError}, {"retry_on": ()}])
def test_filters_cannot_be_given_to_one_instance(filters: dict[str, Any]):
    with pytest.raises(InvalidInstance, match="retry: retry_on and stop_on cannot be stored"):
        Patient.new(retry=RetryPolicy(3, **filters))


def test_a_row_that_was_edited_may_name_some_of_the_numbers():
    assert read_policy('{"max_attempts": 9}', RetryPolicy(2, base=7)) == RetryPolicy(9, base=7)


@pytest.mark.parametrize("text", ["[]", "5", '{"max_attempts": 0}', '{"attempts": 3}', '{"base": "1s"}', "nonsense"])
def test_a_row_that_holds_no_policy_cannot_be_read(text: str):
    with pytest.raises(UndecodableRow, match="retry"):
        read_policy(text, None)
