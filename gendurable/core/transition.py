"""Claim x outcome -> transition: the change of the row as data, every value checked and encoded."""

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias

from attrs import evolve, frozen

from gendurable.core import outcomes
from gendurable.core.claim import Claim
from gendurable.core.codec import encode_object
from gendurable.core.duration import ZERO, to_timedelta
from gendurable.core.fsm import FSM, Definition, definition
from gendurable.core.instance import NewInstance
from gendurable.core.limiters import Limiters, check_limit, check_weight
from gendurable.core.limits import check_name, error_text, show
from gendurable.core.status import Status
from gendurable.errors import BadOutcome, GenDurableError, InvalidInstance, InvalidState, Snooze, describe

# Children come into being in one statement, which no server takes beyond a gigabyte: it would hang up on it each time.
SPAWN_CHARACTERS = 128 * 1024 * 1024


@frozen
class Advance:
    """Next: runnable at another step."""

    id: int
    fence: int
    step: str
    state: str
    delay: timedelta
    consumed: tuple[int, ...]
    error: str | None = None
    rate_limit: str | None = None
    weight: int = 1
    concurrency_limit: str | None = None

    kind = "next"


@frozen
class CarryOn:
    """Next of an inline machine: at another step, on the claim that is held already."""

    id: int
    fence: int
    step: str
    state: str
    error: str | None = None

    kind = "next"


@frozen
class Repeat:
    """Retry and Again: runnable at the same step; `attempts` is how many the execution counts for."""

    id: int
    fence: int
    state: str
    delay: timedelta
    attempts: int
    error: str | None = None

    @property
    def kind(self) -> str:
        """The outcome's name."""
        return "retry" if self.attempts else "again"


@frozen
class Park:
    """Await: waiting for a signal; those already `shown` to the step do not wake it."""

    id: int
    fence: int
    step: str
    state: str
    names: str
    timeout: timedelta | None
    shown: tuple[int, ...]
    error: str | None = None
    attempt: int = 0

    kind = "await"


@frozen
class SpawnChildren:
    """Spawn: waiting for children that come into being with this transition."""

    id: int
    fence: int
    step: str
    state: str
    children: tuple[NewInstance, ...]
    consumed: tuple[int, ...]
    timeout: timedelta | None = None
    fail_fast: bool = False
    error: str | None = None

    kind = "spawn"


@frozen
class Finish:
    """Done, Stop or cancelled: ended for good."""

    id: int
    fence: int
    status: Status
    result: str | None
    error: str | None
    crashes: int = 0

    @property
    def kind(self) -> str:
        """The outcome's name."""
        return _ENDINGS[self.status]


_ENDINGS = {Status.DONE: "done", Status.FAILED: "stop", Status.CANCELLED: "cancel"}


@frozen
class GiveBack:
    """Interrupted: runnable as it was before the claim."""

    id: int
    fence: int

    kind = "interrupted"
    error: ClassVar[None] = None


Transition: TypeAlias = Advance | CarryOn | Repeat | Park | SpawnChildren | Finish | GiveBack


def transition(  # noqa: PLR0911  one for each outcome
    claim: Claim, outcome: object, state: object, machine: FSM[Any], limiters: Limiters | None = None
) -> Transition:
    """Turn an outcome of this claim into the row's change; `state` stands in where the outcome has none.

    BadOutcome or Unstorable if the outcome is malformed or cannot be stored. Limits are checked against `limiters`.
    """
    mine = definition(type(machine))

    def target(reference: object) -> str:
        return mine.resolve(reference, type(machine))

    shown = tuple([signal.id for signal in claim.awaited])
    match outcome:
        case outcomes.Next(to=to, state=given, delay=delay):
            change = Advance(claim.id, claim.fence, target(to), _state(mine, given, state), _delay(delay), shown)
            return _limited(change, outcome, limiters)
        case outcomes.Retry(state=given, delay=delay) | outcomes.Again(state=given, delay=delay):
            attempts = 1 if isinstance(outcome, outcomes.Retry) else 0
            return Repeat(claim.id, claim.fence, _state(mine, given, state), _delay(delay), attempts)
        case outcomes.Await(names=names, then=then, state=given, timeout=timeout):
            encoded = json.dumps(_names(names))
            return Park(
                claim.id, claim.fence, target(then), _state(mine, given, state), encoded, _timeout(timeout), shown
            )
        case outcomes.Spawn(children=children, then=then, state=given, timeout=timeout, on_failure=on_failure):
            return SpawnChildren(
                claim.id,
                claim.fence,
                target(then),
                _state(mine, given, state),
                _children(children, limiters),
                shown,
                _timeout(timeout),
                _is_fail_fast(on_failure),
            )
        case outcomes.Done(result):
            # One that was cancelled and has compensated for it has not done what it was made for.
            status = Status.DONE if claim.cancel_reason is None else Status.CANCELLED
            return Finish(claim.id, claim.fence, status, encode_object(result, what="result"), claim.cancel_reason)
        case outcomes.Stop(reason):
            return stop(claim, reason)
        case outcomes.Interrupted():
            return GiveBack(claim.id, claim.fence)
    who = "on_cancel" if claim.cancelling else f"step {claim.step!r}"
    raise BadOutcome(
        f"{who} returned {show(outcome)}; it must return Next, Retry, Again, Await, Spawn, Done, Stop or Interrupted"
    )


# An inline machine shares its thread with rows that may have become more urgent: so many steps, then it queues again.
MOST_CARRIED = 20


def keep_claim(claim: Claim, change: Transition, machine: FSM[Any]) -> Transition:
    """Let an inline machine go on to its next step on the claim it has, where nothing must be looked up for it.

    What a step is shown of inbox and children comes with a claim, and a partition key's lock ends with its step.
    So does what it counts towards a limit.
    """
    if (
        not isinstance(change, Advance)
        or change.delay
        or not definition(type(machine)).inline
        or claim.carried >= MOST_CARRIED
        or claim.has_signals
        or claim.spawn_round
        or claim.partition_key is not None
        or claim.cancelling
        or claim.limited
        or change.rate_limit is not None
        or change.concurrency_limit is not None
    ):
        return change
    return CarryOn(change.id, change.fence, change.step, change.state, change.error)


def carried_on(claim: Claim, change: CarryOn) -> Claim:
    """Return the claim as it stands once `change` is written."""
    return claim._replace(
        fence=claim.fence + 1,
        step=change.step,
        state=change.state,
        attempt=0,
        awaits=None,
        join_round=None,
        last_error=change.error,
        carried=claim.carried + 1,
    )


def stop(claim: Claim, reason: object) -> Finish:
    """End an instance `failed`; always possible, whatever the reason's text holds."""
    return Finish(claim.id, claim.fence, Status.FAILED, None, error_text(describe(reason)))


def snoozed(claim: Claim, snooze: Snooze) -> Repeat:
    """Put a step off that raised Snooze; what it did to its state is forgotten. BadOutcome if its delay is none."""
    return Repeat(claim.id, claim.fence, claim.state, _delay(snooze.delay), 0)


def with_error(claim: Claim, change: Transition, error: BaseException) -> Transition:
    """Record the error that the transition is the answer to."""
    if isinstance(change, Finish | GiveBack):
        return change
    answer = evolve(change, error=error_text(describe(error)))
    if isinstance(answer, Park) and answer.step == claim.step:
        # Waiting to run the failed step again is no progress: starting to count anew would hide a loop.
        return evolve(answer, attempt=claim.attempt)
    return answer


def _state(mine: Definition, given: object, current: object) -> str:
    try:
        return mine.codec.encode(current if given is None else given)
    except InvalidState as error:
        raise BadOutcome(str(error)) from None


def _delay(value: object) -> timedelta:
    delay = _duration("delay", value)
    if delay < ZERO:
        raise BadOutcome(f"delay {show(value)} lies in the past; give zero or more")
    return delay


def _timeout(value: object) -> timedelta | None:
    if value is None:
        return None
    timeout = _duration("timeout", value)
    if timeout <= ZERO:
        raise BadOutcome(f"timeout {show(value)} is not positive; leave it out to wait without end")
    return timeout


def _duration(what: str, value: object) -> timedelta:
    try:
        return to_timedelta(value)
    except ValueError as error:
        raise BadOutcome(f"{what}: {error}") from None


def _names(given: object) -> list[str]:
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Iterable):
        raise BadOutcome(f"Await names {show(given)} are neither a text nor a collection of texts")
    try:
        names = dict.fromkeys(check_name("signal name", name) for name in given)
    except InvalidInstance as error:
        raise BadOutcome(str(error)) from None
    if not names:
        raise BadOutcome("Await has no names; it would wait for nothing")
    return list(names)


def _limited(change: Advance, given: outcomes.Next[Any], limiters: Limiters | None) -> Advance:
    """Add the limits that the next step is under."""
    if given.rate_limit is None and given.concurrency_limit is None and given.weight == 1:
        return change
    try:
        rate = None if given.rate_limit is None else check_limit("rate_limit", given.rate_limit)
        gate = None if given.concurrency_limit is None else check_limit("concurrency_limit", given.concurrency_limit)
        weight = check_weight(given.weight)
        if limiters is not None:
            limiters.check(rate, weight, gate)
    except InvalidInstance as error:
        raise BadOutcome(str(error)) from None
    return evolve(change, rate_limit=rate, weight=weight, concurrency_limit=gate)


def _children(given: object, limiters: Limiters | None) -> tuple[NewInstance, ...]:
    if not isinstance(given, Iterable):
        raise BadOutcome(f"Spawn children {show(given)} are no collection")
    children = tuple(_child(place, child, limiters) for place, child in enumerate(given))
    size = sum(len(child.state) for child in children)
    if size > SPAWN_CHARACTERS:
        raise BadOutcome(
            f"Spawn: the states of {len(children)} children have {size} characters, the limit is {SPAWN_CHARACTERS}; "
            "spawn them in several rounds, or store references to large data"
        )
    return children


def _is_fail_fast(given: object) -> bool:
    if given not in ("collect", "fail_fast"):
        raise BadOutcome(f'Spawn on_failure {show(given)} is unknown; give "collect" or "fail_fast"')
    return given == "fail_fast"


def _child(place: int, child: object, limiters: Limiters | None) -> NewInstance:
    try:
        if isinstance(child, NewInstance):
            if limiters is not None:
                limiters.check(child.rate_limit, child.weight, child.concurrency_limit)
            return child
        if isinstance(child, type) and issubclass(child, FSM):
            return child.new()
    except GenDurableError as error:
        raise BadOutcome(f"Spawn child {place}: {error}") from error
    raise BadOutcome(f"Spawn child {place} is {show(child)}; give Machine.new(...) or a machine class")
