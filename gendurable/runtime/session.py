"""Session: the one connection that a loop keeps, opened when it is needed and replaced when it is lost."""

from collections.abc import Callable

from psycopg import pq

from gendurable.db import store
from gendurable.db.connection import Connection, EngineConnection
from gendurable.db.faults import is_read_only


class Session:
    """Keeps one connection for one thread."""

    def __init__(self, connect: Callable[[], EngineConnection]) -> None:
        """Remember how to connect; nothing is opened yet."""
        self._connect = connect
        self._conn: EngineConnection | None = None
        self._lost: EngineConnection | None = None

    @property
    def conn(self) -> EngineConnection:
        """The connection, a new one if there is none or it was lost."""
        if self._conn is None or self._conn.closed:
            self._conn = self._connect()
        if self._lost is not None:
            end_silent(self._conn, self._lost)
            self._lost = None
        return self._conn

    def drop_if_broken(self, error: Exception) -> None:
        """After an error: keep the connection only if it is certain to be fit for the next statement."""
        if self._conn is None:
            return
        if is_read_only(error) or self._conn.info.transaction_status is not pq.TransactionStatus.IDLE:
            self._lost = self._conn
            self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None


def end_silent(conn: Connection, lost: EngineConnection) -> None:
    """If a connection was given up because no answer came, have the server give it up as well, with all its locks."""
    if lost.fell_silent and lost.backend is not None:
        store.end_session(conn, pid=lost.backend.pid, started=lost.backend.started).all()
