"""Sampling: what the whole database holds, counted now and then for the metrics."""

from collections.abc import Callable

import psycopg

from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.errors import DatabaseUnavailable
from gendurable.observability.metrics import Sample
from gendurable.runtime.loop import Loop, Wires
from gendurable.runtime.session import Session

SAMPLE_SECONDS = 15.0


class Sampler(Loop):
    """Counts in a thread of its own: a large table takes its time, and nobody else has any to wait for it."""

    def __init__(self, session: Session, wires: Wires, take: Callable[[Sample | None], None]) -> None:
        """Hand each sample to `take`; None when the database could not be asked."""
        super().__init__("sampler", session, wires)
        self._take = take

    def run_once(self) -> float:
        """Take one sample."""
        try:
            self._take(_sample(self._session.conn))
        except (psycopg.Error, DatabaseUnavailable) as error:
            # A worker does its work without being counted.
            self._session.drop_if_broken(error)
            self._take(None)
        return SAMPLE_SECONDS


def _sample(conn: Connection) -> Sample:
    due = store.count_due(conn).all()
    return Sample(
        instances={(row.queue, row.status): row.count for row in store.count_instances(conn)},
        due={row.queue: row.due for row in due},
        oldest_due_age={row.queue: row.oldest_due_seconds for row in due},
        paused=store.list_paused(conn).all(),
        unserved={(row.fsm, row.fsm_version): row.count for row in store.count_unserved(conn)},
    )
