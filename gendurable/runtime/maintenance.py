"""Maintenance: leases, deadlines, schedules, limits, and old rows where retention is asked for; one connection."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from time import monotonic

from attrs import frozen

from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.events import AwaitsTimedOut, DeadlineExceeded, GarbageCollected, LeaseReaped
from gendurable.runtime.known import KnownLimits
from gendurable.runtime.loop import Loop, Wires, jittered
from gendurable.runtime.scheduling import Scheduler
from gendurable.runtime.session import Session
from gendurable.runtime.sweeping import collect_garbage, end_late, keep_promises, reap_expired, wake_overdue

# How soon a limit that another worker has published is known here, in seconds.
LIMITS_REFRESH = 5.0


@frozen(kw_only=True)
class MaintenanceSettings:
    """How often each chore is done; `reap` None leaves it to other workers, `retention` None keeps rows for ever."""

    worker: str
    lease: timedelta
    sweep: float
    reap: float | None
    grace: float
    retention: timedelta | None
    gc_interval: float
    gc_batch: int


class Maintenance(Loop):
    """Deadlines and schedules at every round; leases and retention when their time has come."""

    def __init__(
        self,
        settings: MaintenanceSettings,
        session: Session,
        wires: Wires,
        *,
        limits: KnownLimits,
        on_due: Callable[[frozenset[str]], None],
        also: Callable[[], None],
        scheduler: Scheduler,
    ) -> None:
        """Keep `limits` up to date; tell `on_due` the queues in which rows became due; do `also` at every round."""
        super().__init__("maintenance", session, wires)
        self._settings = settings
        self._on_due = on_due
        self._also = also
        self._scheduler = scheduler
        self._limits = limits
        self._next_refresh = monotonic()
        self._next_reap = monotonic()
        self._next_gc = monotonic() + jittered(settings.gc_interval)
        self._collecting: Iterator[int] | None = None

    def run_once(self) -> float:
        """Do the chores whose time has come."""
        if not self.is_available:
            # After an outage every lease may have run out, also those of workers that live: let them beat first.
            self._next_reap = monotonic() + self._settings.grace
            self._collecting = None  # it knows a connection that is gone
        self._also()
        conn = self._session.conn
        if monotonic() >= self._next_refresh:
            self._limits.refresh(conn)
            self._next_refresh = monotonic() + jittered(LIMITS_REFRESH)
        due = self._expire() | self._scheduler.run_once(conn)
        reap = self._settings.reap
        if reap is not None and monotonic() >= self._next_reap:
            due |= self._reap()
            if self._limits.current:
                due |= set(keep_promises(conn))
            self._next_reap = monotonic() + jittered(reap)
        if due:
            self._on_due(frozenset(due))
        # At most one sweep's time, jitter included: so soon a deadline fires.
        return 0 if self._collect(conn) else jittered(0.95 * self._settings.sweep, 0.05)

    def _collect(self, conn: Connection) -> bool:
        """Delete one batch of old rows, if it is time; true if more may follow.

        No more than that in a round: the backlog of years must not keep deadlines and leases waiting.
        """
        retention = self._settings.retention
        if self._collecting is None and retention is not None and monotonic() >= self._next_gc:
            self._collecting = collect_garbage(conn, older_than=retention, batch=self._settings.gc_batch)
        if self._collecting is None:
            return False
        deleted = next(self._collecting, 0)
        if deleted:
            self._emit(GarbageCollected(deleted))
            return True
        self._collecting = None
        self._next_gc = monotonic() + jittered(self._settings.gc_interval)
        return False

    def _expire(self) -> set[str]:
        conn = self._session.conn
        passed = store.deadlines_passed(conn).one()
        due: set[str] = set()
        if passed is not None and passed.instances:  # first: else they would be woken only to be ended
            late, woken = end_late(conn)
            for row in late:
                self._emit(DeadlineExceeded(row.id, row.queue, row.fsm, row.step, row.deadline))
            due |= woken
        if passed is not None and passed.awaits and (overdue := wake_overdue(conn)):
            self._emit(AwaitsTimedOut(len(overdue)))
            due |= {row.queue for row in overdue}
        return due

    def _reap(self) -> set[str]:
        reaped = reap_expired(self._session.conn, worker=self._settings.worker, lease=self._settings.lease)
        for row in reaped:
            self._emit(LeaseReaped(row.id, row.queue, row.fsm, row.step, row.crashes, row.spent))
        return {row.queue for row in reaped if not row.spent}
