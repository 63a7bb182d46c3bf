"""What a step may return. Plain values: they compare, print and match; the engine judges them on return."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from attrs import field, frozen

from gendurable.core.duration import Duration
from gendurable.core.instance import NewInstance
from gendurable.core.limiters import LimitName
from gendurable.core.target import Target

if TYPE_CHECKING:
    from gendurable.core.fsm import FSM

S = TypeVar("S")


@frozen
class Next(Generic[S]):
    """Go on at another step, after `delay`.

    Each execution of that step takes `weight` tokens of `rate_limit` and counts towards `concurrency_limit`: the name
    of a limit, or a pair of name and tenant.
    """

    to: Target[S]
    state: S | None = None
    delay: Duration = field(default=0, kw_only=True)
    rate_limit: LimitName | None = field(default=None, kw_only=True)
    weight: int = field(default=1, kw_only=True)
    concurrency_limit: LimitName | None = field(default=None, kw_only=True)


@frozen
class Retry(Generic[S]):
    """Run the same step again after `delay`; counts as another attempt."""

    state: S | None = None
    delay: Duration = field(default=0, kw_only=True)


@frozen
class Again(Generic[S]):
    """Run the same step again after `delay`, without counting it as another attempt: for polling."""

    state: S | None = None
    delay: Duration = field(default=0, kw_only=True)


@frozen
class Await(Generic[S]):
    """Wait for a signal of one of these names, then go on at `then`; after `timeout` go on without one."""

    names: str | Iterable[str]
    then: Target[S]
    state: S | None = None
    timeout: Duration | None = field(default=None, kw_only=True)


@frozen
class Spawn(Generic[S]):
    """Start children, wait until all have ended, then go on at `then`; after `timeout` go on without the others.

    `on_failure="fail_fast"`: the first child that does not end well is enough, and the others are cancelled.
    """

    children: "Iterable[NewInstance | type[FSM[Any]]]"
    then: Target[S]
    state: S | None = None
    timeout: Duration | None = field(default=None, kw_only=True)
    on_failure: Literal["collect", "fail_fast"] = field(default="collect", kw_only=True)


@frozen
class Done:
    """End well. The result is a mapping, or an instance of an attrs or dataclass class."""

    result: Mapping[str, Any] | object = field(factory=dict)


@frozen
class Stop:
    """End `failed`, with a text or an exception as the reason."""

    reason: str | BaseException


@frozen
class Interrupted:
    """Give the row back as it was, for another worker to run the step: only while `ctx.shutting_down` is set."""


Outcome: TypeAlias = Next[S] | Retry[S] | Again[S] | Await[S] | Spawn[S] | Done | Stop | Interrupted
