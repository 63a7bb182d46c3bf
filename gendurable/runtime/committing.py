"""Write outcomes so that one the database refuses does not take its neighbours with it."""

from collections.abc import Sequence
from datetime import timedelta

import psycopg
from attrs import frozen

from gendurable.core.duration import ZERO
from gendurable.core.limits import error_text
from gendurable.core.status import Status
from gendurable.core.transition import Finish, Transition
from gendurable.db import store
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
    conn: Connection, changes: Sequence[Transition], *, unlock: Sequence[str] = (), ahead: timedelta = ZERO
) -> Settled:
    """Commit a batch; what was written is not quite what was given if one was refused.

    A refused batch is split until the culprit is alone; that one ends `failed` with the database's words.
    `unlock` are partition keys whose locks this session lets go of after the last commit.
    """
    if not changes:
        return Settled()
    try:
        committed = commit(conn, changes, unlock=unlock, ahead=ahead)
    except psycopg.Error as error:
        if not is_refusal(error):
            raise
        if len(changes) == 1:
            return _end(conn, changes[0], error, unlock=unlock, ahead=ahead)
        middle = len(changes) // 2
        first = settle(conn, changes[:middle], ahead=ahead)
        return first + settle(conn, changes[middle:], unlock=unlock, ahead=ahead)
    return Settled(committed.written, committed.woken)


def _end(
    conn: Connection, change: Transition, error: psycopg.Error, *, unlock: Sequence[str], ahead: timedelta
) -> Settled:
    # Only the message: the detail of a violated constraint shows the whole row.
    words = error.diag.message_primary or one_line(error)
    reason = error_text(f"Unstorable: the database refused the outcome: {words}")
    ending = Finish(change.id, change.fence, Status.FAILED, None, reason)
    try:
        committed = commit(conn, [ending], unlock=unlock, ahead=ahead)
    except psycopg.Error as second:
        if not is_refusal(second):
            raise
        # Not even that: the row is left to its lease, so that its neighbours can go on.
        if unlock:
            store.unlock_partitions(conn, keys=unlock)
        return Settled()
    return Settled(committed.written, committed.woken)
