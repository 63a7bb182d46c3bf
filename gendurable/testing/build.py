"""Values for unit tests: a context, signals and children, without a database."""

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import field, frozen

from gendurable.core.context import Child, Context, Fixed, Flag, Signal
from gendurable.core.outgoing import Outgoing
from gendurable.core.policy import RetryPolicy
from gendurable.core.status import Status

if TYPE_CHECKING:
    import psycopg

S = TypeVar("S")

_ids = count(1)
_NONE_GIVEN: Any = object()
_BORN = datetime(2000, 1, 1, tzinfo=UTC)


def signal(
    name: str,
    payload: Any = _NONE_GIVEN,
    *,
    id: int | None = None,  # noqa: A002  the field's name
    dedup_key: str | None = None,
    inserted_at: datetime = _BORN,
) -> Signal:
    """Make a signal; its payload defaults to an empty object, its id to the next free one."""
    return Signal(
        next(_ids) if id is None else id, name, {} if payload is _NONE_GIVEN else payload, dedup_key, inserted_at
    )


def child(
    *,
    id: int | None = None,  # noqa: A002  the field's name
    fsm: str = "child",
    status: str = Status.DONE,
    state: Any = None,
    result: Any = None,
    last_error: str | None = None,
    round: int = 1,  # noqa: A002  the field's name
    index: int = 0,
) -> Child:
    """Make a child as its parent sees it."""
    return Child(
        id=next(_ids) if id is None else id,
        fsm=fsm,
        status=Status(status),
        state={} if state is None else state,
        result=result,
        last_error=last_error,
        round=round,
        index=index,
    )


def context(
    state: S,
    *,
    awaited: Iterable[Signal] = (),
    inbox: Iterable[Signal] = (),
    children: Iterable[Child] = (),
    joined: Iterable[Child] | None = None,
    attempt: int = 0,
    id: int = 1,  # noqa: A002  the field's name
    fsm: str = "test",
    fsm_version: int = 1,
    step: str = "start",
    parent_id: int | None = None,
    last_error: str | None = None,
    retry: RetryPolicy | None = None,
    deadline: datetime | None = None,
    cancelled: bool | Flag = False,
    shutting_down: bool | Flag = False,
    cancel_reason: str | None = None,
    conn: "psycopg.Connection[Any] | None" = None,
) -> Context[S]:
    """Make the context that a step is called with.

    What is awaited is in the inbox too; `joined` are the children of the last round unless given. `cancelled` and
    `shutting_down` stay as given; to have one change while the step runs, give a `threading.Event`. With `conn` the
    step is transactional, and what it sends stands in `ctx.sent`.
    """
    waited = tuple(awaited)
    born = tuple(children)
    last = max((each.round for each in born), default=0)
    return Context(
        id=id,
        fsm=fsm,
        fsm_version=fsm_version,
        step=step,
        attempt=attempt,
        state=state,
        awaited=waited,
        inbox=(*waited, *(each for each in inbox if each not in waited)),
        children=born,
        joined=tuple(each for each in born if each.round == last) if joined is None else tuple(joined),
        parent_id=parent_id,
        last_error=last_error,
        retry=retry,
        deadline=deadline,
        cancelled=_flag(cancelled),
        shutting_down=_flag(shutting_down),
        cancel_reason=cancel_reason,
        transaction=None if conn is None else _Lent(conn),
    )


@frozen
class _Lent:
    """A transaction that the test has begun and will end."""

    conn: "psycopg.Connection[Any]"
    sent: list[Outgoing] = field(factory=list)

    def send(self, signal: Outgoing) -> None:
        self.sent.append(signal)


def _flag(given: bool | Flag) -> Flag:
    return Fixed(given) if isinstance(given, bool) else given
