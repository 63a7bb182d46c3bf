"""What a step is given."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from attrs import field, frozen

from gendurable.core.outgoing import Outgoing, outgoing
from gendurable.core.policy import RetryPolicy
from gendurable.core.status import Status
from gendurable.errors import NotTransactional

if TYPE_CHECKING:
    import psycopg

S = TypeVar("S")

EMPTY: Mapping[str, Any] = {}


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


class Transaction(Protocol):
    """What a transactional step works in."""

    @property
    def conn(self) -> "psycopg.Connection[Any]":
        """The connection that the transaction is open on."""

    @property
    def sent(self) -> Sequence[Outgoing]:
        """The signals sent so far."""

    def send(self, signal: Outgoing) -> None:
        """Have a signal delivered with the outcome."""


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
    _transaction: Transaction | None = field(default=None, repr=False, eq=False)

    @property
    def conn(self) -> "psycopg.Connection[Any]":
        """A connection inside the transaction that the outcome will be committed in; only in transactional steps."""
        return self._lent("ctx.conn").conn

    def signal(
        self,
        id: int,  # noqa: A002  the column's name
        name: str,
        payload: Any = EMPTY,
        *,
        dedup_key: str | None = None,
    ) -> None:
        """Send a signal to an instance, delivered if and when the outcome is committed; only in transactional steps."""
        self._lent("ctx.signal").send(outgoing(id, name, payload, dedup_key))

    @property
    def sent(self) -> Sequence[Outgoing]:
        """The signals that this step has sent so far."""
        return () if self._transaction is None else tuple(self._transaction.sent)

    def _lent(self, what: str) -> Transaction:
        if self._transaction is None:
            raise NotTransactional(self.step, what)
        return self._transaction
