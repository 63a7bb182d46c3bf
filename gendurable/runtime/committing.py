"""Write outcomes so that one the database refuses does not take its neighbours with it."""

from collections.abc import Sequence
from datetime import timedelta

import psycopg
from attrs import frozen

from gendurable.core.duration import ZERO
from gendurable.core.limits import error_text
from gendurable.core.status import Status
from gendurable.core.transition import Finish, Transition
from gendurable.db.connection import Connection, one_line
from gendurable.db.faults import is_refusal
from gendurable.db.operations import commit


@frozen
class Settled:
    """The transitions that were written, and the queues of others that became runnable by them."""

    written: tuple[Transition, ...] = ()
    woken: frozenset[str] = frozenset()

    def __add__(self, other: "Settled") -> "Settled":
        return Settled(self.written + other.written, self.woken | other.woken)


def settle(
    conn: Connection, changes: Sequence[Transition], *, unlock: str | None = None, ahead: timedelta = ZERO
) -> Settled:
    """Commit a batch; what was written is not quite what was given if one was refused.

    A refused batch is split until the culprit is alone; that one ends `failed` with the database's words.
    `unlock` is a partition key whose lock this session lets go of after the commit.
    """
    if not changes:
        return Settled()
    try:
        committed = commit(conn, changes, unlock=unlock, ahead=ahead)
    except psycopg.Error as error:
        if not is_refusal(error):
            raise
        if len(changes) > 1:
            middle = len(changes) // 2
            return settle(conn, changes[:middle], ahead=ahead) + settle(
                conn, changes[middle:], unlock=unlock, ahead=ahead
            )
        committed = commit(conn, [_ending(changes[0], error)], unlock=unlock, ahead=ahead)
    return Settled(committed.written, committed.woken)


def _ending(change: Transition, error: psycopg.Error) -> Finish:
    reason = error_text(f"Unstorable: the database refused the outcome: {one_line(error)}")
    return Finish(change.id, change.fence, Status.FAILED, None, reason)
