"""Session: the one connection that a loop keeps, opened when it is needed and replaced when it is lost."""

from collections.abc import Callable

from psycopg import pq

from gendurable.db.connection import Connection


class Session:
    """Keeps one connection for one thread."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """Remember how to connect; nothing is opened yet."""
        self._connect = connect
        self._conn: Connection | None = None

    @property
    def conn(self) -> Connection:
        """The connection, a new one if there is none or it was lost."""
        if self._conn is None or self._conn.closed:
            self._conn = self._connect()
        return self._conn

    def drop_if_broken(self) -> None:
        """After an error: keep the connection only if it is certain to be fit for the next statement."""
        if self._conn is not None and self._conn.info.transaction_status is not pq.TransactionStatus.IDLE:
            self.close()

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None
