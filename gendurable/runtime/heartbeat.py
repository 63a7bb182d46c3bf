"""Heartbeat: prolongs the lease of everything this worker holds, and says that the worker lives."""

from collections.abc import Callable, Sequence
from datetime import timedelta

from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.rows import Lost
from gendurable.events import HeartbeatSent
from gendurable.runtime.loop import LONGEST_SETBACK, Loop, Wires
from gendurable.runtime.session import Session


class Heartbeat(Loop):
    """One statement for all leases, however many; a row that somebody has locked is passed over until the next beat.

    If some were not prolonged, a second one tells which of them are lost.
    """

    def __init__(
        self,
        session: Session,
        wires: Wires,
        *,
        every: float,
        lease: timedelta,
        held: Callable[[], list[Claim]],
        on_lost: Callable[[Sequence[Lost]], None],
        beat: Callable[[Connection], object],
    ) -> None:
        """Beat `every` so many seconds for what `held` returns; tell `on_lost` which claims hold no longer."""
        super().__init__("heartbeat", session, wires)
        self._every = every
        self._lease = lease
        self._held = held
        self._on_lost = on_lost
        self._beat = beat

    def run_once(self) -> float:
        """Prolong every lease once."""
        conn = self._session.conn
        held = self._held()
        kept = store.extend_leases(conn, held, lease=self._lease).all() if held else []
        if len(kept) < len(held):
            self._on_lost(store.find_lost(conn, held).all())
        self._beat(conn)
        self._emit(HeartbeatSent(len(held), len(kept)))
        return self._every

    def setback_limit(self) -> float:
        """Try again well before the leases run out."""
        return min(LONGEST_SETBACK, self._every / 2)
