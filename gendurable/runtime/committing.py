"""Write outcomes so that one the database refuses does not take its neighbours with it."""

from collections.abc import Sequence
from datetime import timedelta

import psycopg

from gendurable.core.duration import ZERO
from gendurable.core.limits import error_text
from gendurable.core.status import Status
from gendurable.core.transition import Finish, Transition
from gendurable.db.connection import Connection, one_line
from gendurable.db.operations import commit

# SQLSTATE classes that blame the values: data exception, integrity violation, program limit exceeded.
_REFUSALS = ("22", "23", "54")


def settle(conn: Connection, changes: Sequence[Transition], *, ahead: timedelta = ZERO) -> list[Transition]:
    """Commit a batch; return the transitions that were written, which are not quite those given if one was refused.

    A refused batch is split until the culprit is alone; that one ends `failed` with the database's words.
    """
    if not changes:
        return []
    try:
        written = commit(conn, changes, ahead=ahead)
    except psycopg.Error as error:
        if not is_refusal(error):
            raise
        if len(changes) > 1:
            middle = len(changes) // 2
            return settle(conn, changes[:middle], ahead=ahead) + settle(conn, changes[middle:], ahead=ahead)
        ending = _ending(changes[0], error)
        return [ending] if commit(conn, [ending], ahead=ahead) else []
    return [change for change in changes if change.id in written]


def is_refusal(error: psycopg.Error) -> bool:
    """Tell whether the database blames the values: trying again cannot help. A DataError of psycopg has no SQLSTATE."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.DataError)
    return error.sqlstate.startswith(_REFUSALS)


def _ending(change: Transition, error: psycopg.Error) -> Finish:
    reason = error_text(f"Unstorable: the database refused the outcome: {one_line(error)}")
    return Finish(change.id, change.fence, Status.FAILED, None, reason)
