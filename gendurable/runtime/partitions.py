"""Partitions: dedicated connections, one per running partitioned step, whose sessions hold the keys' locks."""

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import psycopg

from gendurable.db import store
from gendurable.db.connection import Connection

IDLE = 10.0
PROBE_KEY = "gendurable: do session locks hold here?"


class LockConnections:
    """At most `size` connections, opened when needed, kept for the next step, closed when idle for a while.

    Never shared: a session may take the same lock twice, so two steps on one connection would not exclude each other.
    """

    def __init__(self, connect: Callable[[], Connection], size: int) -> None:
        """Remember how to connect; nothing is opened yet."""
        self._connect = connect
        self._permits = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, Connection]] = []
        self.size = size
        self.used = 0
        self.waiting = 0

    @property
    def idle(self) -> int:
        """How many connections are open and unused."""
        return len(self._idle)

    def acquire(self) -> Connection:
        """Return a connection for one step; waits while all are in use. Raises if the database is out of reach."""
        self.waiting += 1
        self._permits.acquire()
        self.waiting -= 1
        try:
            conn = self._pop()
            if conn is None:
                conn = self._connect()
        except BaseException:
            self._permits.release()
            raise
        self.used += 1
        return conn

    def release(self, conn: Connection, *, clean: bool) -> None:
        """Take a connection back; only a `clean` one, that holds no lock and no transaction, is kept."""
        with self._lock:
            if clean and not conn.closed:
                self._idle.append((monotonic(), conn))
            else:
                conn.close()
            self.used -= 1
        self._permits.release()

    def close_idle(self, older_than: float = IDLE) -> None:
        """Close connections that nobody has used for a while."""
        limit = monotonic() - older_than
        with self._lock:
            old = [conn for since, conn in self._idle if since <= limit]
            self._idle = [(since, conn) for since, conn in self._idle if since > limit]
        for conn in old:
            conn.close()

    def _pop(self) -> Connection | None:
        with self._lock:
            return self._idle.pop()[1] if self._idle else None


def check_session_locks(connect: Callable[[], Connection]) -> str | None:
    """Say why session locks do not hold on such connections, or None if they do.

    A transaction pooler hands each transaction to any of its sessions: the same lock is then granted to two clients,
    and stays behind when both have left.
    """
    first = connect()
    try:
        pids = {_backend(first) for _ in range(5)}
        if len(pids) > 1:
            return "the server session changes from one transaction to the next"
        if not store.lock_partition(first, key=PROBE_KEY).one():
            return None  # another worker is probing: the lock holds for it, so it will for us
        second = connect()
        try:
            if store.lock_partition(second, key=PROBE_KEY).one():
                return "two connections were granted the same session lock"
        finally:
            second.close()
        if not store.unlock_partition(first, key=PROBE_KEY).one():
            return "a session lock was gone in the next transaction"
        return None
    finally:
        with suppress(psycopg.Error):
            first.close()


def _backend(conn: Connection) -> int:
    row = conn.execute("select pg_backend_pid()").fetchone()
    return int(row[0]) if row else 0
