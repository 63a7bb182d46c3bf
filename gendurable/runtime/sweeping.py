"""One pass of maintenance: expired leases, overdue awaits and overdue instances, promises of tokens."""

from collections.abc import Iterator
from datetime import timedelta

import psycopg

from gendurable.core.duration import ZERO
from gendurable.core.status import Status
from gendurable.core.transition import Finish
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.endings import end_overdue
from gendurable.db.faults import is_locked, is_refusal
from gendurable.db.operations import commit
from gendurable.db.rows import Ended, Overdue, Reaped, Woken

# Small enough that a mass crash does not become one long transaction.
BATCH = 500
# In one sweep; the next one comes soon.
MOST_OVERDUE = 20 * BATCH


def reap_expired(conn: Connection, *, worker: str, lease: timedelta, ahead: timedelta = ZERO) -> list[Reaped]:
    """Return expired claims to the queue, and end those instances whose crash budget is spent."""
    reaped: list[Reaped] = []
    while batch := store.reap(conn, worker=worker, limit=BATCH, lease=lease, ahead=ahead).all():
        reaped += batch
        for row in batch:
            if row.spent:
                _end(conn, row, ahead)
        if len(batch) < BATCH:
            break
    return reaped


def wake_overdue(conn: Connection, *, ahead: timedelta = ZERO) -> list[Woken]:
    """Wake parked instances whose deadline has passed."""
    woken: list[Woken] = []
    while batch := store.expire_awaits(conn, limit=BATCH, ahead=ahead).all():
        woken += batch
        if len(batch) < BATCH:
            break
    return woken


def end_late(conn: Connection, *, ahead: timedelta = ZERO) -> tuple[list[Overdue], frozenset[str]]:
    """End instances that live past their deadline; return them, and the queues of parents whose barrier that opened.

    One whose row or parent somebody holds is left to the next sweep.
    """
    overdue = store.find_overdue(conn, limit=MOST_OVERDUE, ahead=ahead).all()
    ended = [row for start in range(0, len(overdue), BATCH) for row in _end_late(conn, overdue[start:][:BATCH], ahead)]
    ids = {row.id for row in ended}
    woken = frozenset(row.wakes for row in ended if row.wakes is not None)
    return [row for row in overdue if row.id in ids], woken


def _end_late(conn: Connection, overdue: list[Overdue], ahead: timedelta) -> list[Ended]:
    """End some; those that cannot be ended now are found by halving, and do not keep the others waiting."""
    try:
        return end_overdue(conn, overdue, ahead=ahead)
    except psycopg.Error as error:
        if not (is_locked(error) or is_refusal(error)):
            raise
    if len(overdue) == 1:
        return []
    middle = len(overdue) // 2
    return _end_late(conn, overdue[:middle], ahead) + _end_late(conn, overdue[middle:], ahead)


def keep_promises(conn: Connection, *, ahead: timedelta = ZERO) -> frozenset[str]:
    """Let nobody wait for tokens that are there, and drop buckets without use; return the queues of who may go on."""
    while len(store.drop_buckets(conn, limit=BATCH).all()) == BATCH:
        pass
    return frozenset(store.hasten_throttled(conn, limit=BATCH, ahead=ahead))


def collect_garbage(
    conn: Connection, *, older_than: timedelta, batch: int = BATCH, ahead: timedelta = ZERO
) -> Iterator[int]:
    """Delete instances that ended longer ago than `older_than`; yields how many each batch deleted."""
    is_done = False
    while not is_done:  # parents go a pass later than their children
        is_done, after = True, 0
        while deleted := store.gc(conn, older_than=older_than, after=after, limit=batch, ahead=ahead).all():
            is_done, after = False, max(deleted)
            yield len(deleted)


def _end(conn: Connection, row: Reaped, ahead: timedelta) -> None:
    """End an instance whose crash budget is spent; if that cannot be, it stays our claim and expires again.

    Each alone: a parent that somebody holds, or whatever makes the database refuse, must not keep others waiting.
    """
    reason = f"the worker died {row.crashes} times in a row in step {row.step!r}; nothing more is tried"
    try:
        commit(conn, [Finish(row.id, row.fence, Status.FAILED, None, reason, row.crashes)], ahead=ahead)
    except psycopg.Error as error:
        if not (is_locked(error) or is_refusal(error)):
            raise
