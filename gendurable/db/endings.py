"""End instances from outside, wherever they stand: cancelled, or past their deadline."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from attrs import frozen

from gendurable.core.duration import ZERO
from gendurable.core.limits import error_text, show
from gendurable.core.status import LIVE, Status
from gendurable.core.transition import Finish
from gendurable.db import store
from gendurable.db.connection import Connection, one_commit
from gendurable.db.rows import Ended, Held, Overdue
from gendurable.errors import InvalidInstance, NoTarget
from gendurable.notices import BOARD

NO_REASON = "cancelled"


@frozen
class Level:
    """What became of instances of one generation that were to be cancelled.

    `before`: those that had been cancelled already, or are compensating. `missed`: those whose rows somebody held, or
    that do not exist.
    """

    cancelled: frozenset[int]
    before: frozenset[int]
    missed: frozenset[int]
    children: tuple[int, ...]


def check_reason(given: object) -> str:
    """Return why something is cancelled, as text that can be stored."""
    if given is None:
        return NO_REASON
    if not isinstance(given, str) or not given.strip():
        raise InvalidInstance(f"reason: {show(given)} is no text that says why: give one, or leave it out")
    return error_text(given)


def cancel_level(
    conn: Connection, ids: Sequence[int], reason: str, *, waits: bool = True, ahead: timedelta = ZERO
) -> Level:
    """Cancel those that live, in the caller's transaction, which must not hold the row of any parent of theirs.

    One whose machine has `on_cancel` does not end, but runs that next; a second time it is left in peace.

    The children of all of them come back, for the next transaction: a child that ends holds its own row and waits for
    its parent's, so whoever holds a parent must not wait for its children.
    """
    lock = store.lock_instances if waits else store.lock_free_instances
    found = lock(conn, ids=ids).all()
    alive = [row for row in found if row.status in LIVE and not row.is_cancelling]
    taken = [row for row in alive if not row.on_cancel]
    if taken:
        store.seize(conn, ids=[row.id for row in taken], reason=reason)
        store.finish(conn, [_ending(row, Status.CANCELLED, reason) for row in taken], ahead=ahead)
    if len(taken) < len(alive):
        store.compensate(conn, ids=[row.id for row in alive if row.on_cancel], reason=reason, ahead=ahead)
    return Level(
        cancelled=frozenset(row.id for row in alive),
        before=frozenset(
            row.id for row in found if row.status == Status.CANCELLED or (row.status in LIVE and row.is_cancelling)
        ),
        missed=frozenset(ids) - {row.id for row in found},
        children=tuple(store.find_children(conn, ids=ids)),
    )


def cancel_instance(id: int, run: Callable[[Sequence[int]], Level], *, cascade: bool) -> bool:  # noqa: A002  the column's name
    """Cancel an instance and, with `cascade`, all below it; `run` does one generation in a transaction of its own.

    True if it was this call that cancelled it, False if it had been already; NoTarget if it has ended otherwise.
    From the top downwards: a parent that is cancelled can spawn no more, so no child is missed. Should it be cut short,
    the next call goes on from there.
    """
    level = run([id])
    BOARD.post(level.cancelled)
    if id not in level.cancelled | level.before:
        raise NoTarget(id)
    is_ours = id in level.cancelled
    while cascade and level.children:
        level = run(level.children)
        BOARD.post(level.cancelled)
    return is_ours


def cancel_now(
    conn: Connection,
    id: int,  # noqa: A002  the column's name
    reason: str,
    *,
    cascade: bool,
    ahead: timedelta = ZERO,
) -> bool:
    """Cancel an instance on a connection of our own."""

    def run(ids: Sequence[int]) -> Level:
        with one_commit(conn):
            return cancel_level(conn, ids, reason, ahead=ahead)

    return cancel_instance(id, run, cascade=cascade)


def cancel_idle(conn: Connection, ids: Sequence[int], reason: str, *, ahead: timedelta = ZERO) -> bool:
    """Cancel instances and all below them without waiting for anybody; false if somebody held a row of theirs."""
    while ids:
        with one_commit(conn):
            level = cancel_level(conn, ids, reason, waits=False, ahead=ahead)
        BOARD.post(level.cancelled)
        if level.missed:
            return False
        ids = level.children
    return True


def end_overdue(conn: Connection, overdue: Sequence[Overdue], *, ahead: timedelta = ZERO) -> list[Ended]:
    """End instances `failed` because their deadline has passed, in one transaction, all but those that somebody holds.

    Locks must not be waited for: there may be parents among them, and their children.
    """
    with one_commit(conn):
        found = store.lock_free_instances(conn, ids=[row.id for row in overdue]).all()
        # One that was ended and retried since has no deadline any more.
        taken = [row for row in found if row.status in LIVE and row.deadline is not None]
        if not taken:
            return []
        store.seize(conn, ids=[row.id for row in taken], reason=None)
        endings = [_ending(row, Status.FAILED, f"DeadlineExceeded: it was to end by {row.deadline}") for row in taken]
        ended = store.finish(conn, endings, ahead=ahead)
    return ended.all()


def _ending(row: Held, status: Status, reason: str) -> Finish:
    return Finish(row.id, row.fence + 1, status, None, reason)  # the fence that `seize` gives it
