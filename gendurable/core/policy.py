"""Retry policies: how often a failed step runs again, and after how long."""

import json
from collections.abc import Iterable
from datetime import timedelta
from hashlib import blake2b
from math import inf, isfinite

from attrs import asdict, evolve, field, filters, frozen

from gendurable.core.codec import decode_value
from gendurable.core.duration import ZERO, Duration, to_timedelta
from gendurable.core.limits import show
from gendurable.errors import BadOutcome, Fatal, InvalidInstance, InvalidPolicy, UndecodableRow, Unstorable

MOST_ATTEMPTS = 2**31 - 1
# Whatever the policy says: the same code would do the same again, or has said itself that it would.
HOPELESS = (Fatal, BadOutcome, Unstorable)


def _count(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_ATTEMPTS:
        raise InvalidPolicy(f"max_attempts: {show(value)} is no number of executions: give a whole number from 1")
    return value


def _wait(name: str, value: object) -> timedelta:
    try:
        wait = to_timedelta(value)
    except ValueError as error:
        raise InvalidPolicy(f"{name}: {error}") from None
    if wait < ZERO:
        raise InvalidPolicy(f"{name}: {show(value)} lies in the past; give zero or more")
    return wait


def _base(value: Duration) -> timedelta:
    return _wait("base", value)


def _cap(value: Duration) -> timedelta:
    return _wait("cap", value)


def _factor(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value >= 1 and isfinite(value)):
        raise InvalidPolicy(f"factor: {show(value)} is no growth from delay to delay: give a number from 1")
    return float(value)


def _jitter(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidPolicy(f"jitter: {show(value)} is no share of the delay: give a number from 0 to 1")
    return float(value)


def _errors(name: str, value: object) -> tuple[type[Exception], ...]:
    given = tuple(value) if isinstance(value, Iterable) else (value,)
    for each in given:
        if not (isinstance(each, type) and issubclass(each, Exception)):
            raise InvalidPolicy(f"{name}: {show(each)} is no class of exceptions: give such as ValueError")
    return given


def _retry_on(value: type[Exception] | Iterable[type[Exception]]) -> tuple[type[Exception], ...]:
    return _errors("retry_on", value)


def _stop_on(value: type[Exception] | Iterable[type[Exception]]) -> tuple[type[Exception], ...]:
    return _errors("stop_on", value)


@frozen
class RetryPolicy:
    """What follows an error of a step: again after base * factor**attempt, at most `cap`; or the end.

    `max_attempts` counts executions, not retries. `jitter` is the share of each delay that is left to chance.
    An error that is not of `retry_on`, or is of `stop_on`, ends the instance at once.
    """

    max_attempts: int = field(default=20, converter=_count)
    base: timedelta = field(default=timedelta(seconds=1), converter=_base)
    factor: float = field(default=2.0, converter=_factor)
    cap: timedelta = field(default=timedelta(minutes=5), converter=_cap)
    jitter: float = field(default=0.0, converter=_jitter)
    retry_on: tuple[type[Exception], ...] = field(default=(Exception,), converter=_retry_on)
    stop_on: tuple[type[Exception], ...] = field(default=(), converter=_stop_on)

    def __attrs_post_init__(self) -> None:
        if self.cap < self.base:
            raise InvalidPolicy(f"cap: {self.cap} is shorter than base, which is {self.base}; give a cap from there on")

    def retries(self, error: Exception, attempt: int) -> bool:
        """Whether the step runs again after this error; `attempt` is that of the execution that failed."""
        return (
            attempt + 1 < self.max_attempts
            and isinstance(error, self.retry_on)
            and not isinstance(error, (*self.stop_on, *HOPELESS))
        )

    def delay(self, attempt: int, id: int) -> timedelta:  # noqa: A002  the column's name
        """How long to wait after an attempt. Chance is drawn from id and attempt: asked again, it says the same."""
        try:
            growth = self.factor**attempt
        except OverflowError:
            growth = inf
        longest = min(self.base.total_seconds() * growth, self.cap.total_seconds()) if self.base else 0.0
        return timedelta(seconds=longest * (1 - self.jitter * _chance(id, attempt)))

    def stored(self) -> str:
        """Return the numbers as a row carries them; InvalidInstance if there is more to the policy than numbers."""
        if (self.retry_on, self.stop_on) != ((Exception,), ()):
            raise InvalidInstance(
                "retry: retry_on and stop_on cannot be stored with an instance, only numbers; name them on the class "
                "or the step, whose filters an instance keeps"
            )
        numbers = asdict(self, filter=filters.exclude("retry_on", "stop_on"))
        return json.dumps({name: _plain(value) for name, value in numbers.items()})


def _plain(value: float | timedelta) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else value


def _chance(id: int, attempt: int) -> float:  # noqa: A002  the column's name
    digest = blake2b(f"{id} {attempt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32


def read_policy(stored: str, own: RetryPolicy | None) -> RetryPolicy:
    """Return the policy of one instance: the numbers of its row, the rest from its step's or machine's own."""
    numbers = decode_value(stored, what="retry")
    try:
        return evolve(own or RetryPolicy(), **numbers)
    except (InvalidPolicy, TypeError) as error:
        raise UndecodableRow(f"the column retry holds {show(numbers)}, which is no retry policy: {error}") from None
