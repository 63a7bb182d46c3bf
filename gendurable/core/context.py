"""What a step is given."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

from attrs import frozen

from gendurable.core.policy import RetryPolicy
from gendurable.core.status import Status

S = TypeVar("S")


@frozen
class Signal:
    """A durable message in an instance's inbox."""

    id: int
    name: str
    payload: Any
    dedup_key: str | None
    inserted_at: datetime


@frozen
class Child:
    """A child as it stood when the step's claim was made."""

    id: int
    fsm: str
    status: Status
    state: Any
    result: Any
    last_error: str | None
    round: int
    index: int


class Flag(Protocol):
    """Something that may come true while a step runs; a `threading.Event` is one."""

    def is_set(self) -> bool:
        """Whether it is true now."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, so many seconds at most, and tell whether it is true."""


@frozen
class Fixed:
    """A flag that never changes, and therefore never waits."""

    value: bool

    def is_set(self) -> bool:
        """Whether it is true."""
        return self.value

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002  there is nothing to wait for
        """Tell whether it is true, at once."""
        return self.value


NEVER = Fixed(value=False)


@frozen
class Context(Generic[S]):
    """What a step knows about its instance.

    `awaited` are the signals that the step waited for, `inbox` all of them. `children` are all children,
    `joined` those of the Spawn that this step was released from. In `handle` these four are empty.
    `retry` is the policy in force: the instance's own, else the step's, else the machine's.

    A thread cannot be stopped from outside, so a long step looks for itself: until `deadline` its outcome counts;
    `cancelled` says that it counts no more; `shutting_down`, that the worker wants to end.
    """

    id: int
    fsm: str
    fsm_version: int
    step: str
    attempt: int
    state: S
    awaited: Sequence[Signal] = ()
    inbox: Sequence[Signal] = ()
    children: Sequence[Child] = ()
    joined: Sequence[Child] = ()
    parent_id: int | None = None
    last_error: str | None = None
    retry: RetryPolicy | None = None
    deadline: datetime | None = None
    cancelled: Flag = NEVER
    shutting_down: Flag = NEVER
    cancel_reason: str | None = None
