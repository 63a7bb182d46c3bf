"""Partitions: dedicated connections, whose sessions hold partition keys' locks or have a step's transaction open."""

import secrets
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from time import monotonic

import psycopg

from gendurable.db import store
from gendurable.db.connection import Connection, EngineConnection
from gendurable.db.lending import tidy
from gendurable.errors import DatabaseUnavailable
from gendurable.runtime.session import end_silent

IDLE = 10.0
GLANCE = 0.2
PROBE_KEY = "gendurable: do session locks hold here?"


class LockConnections:
    """At most `size` connections, opened when needed, kept for the next step, closed when idle for a while.

    Never shared: a session may take the same lock twice, so two steps on one connection would not exclude each other.
    """

    def __init__(self, connect: Callable[[], EngineConnection], size: int) -> None:
        """Remember how to connect; nothing is opened yet."""
        self._connect = connect
        self._permits = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._idle: list[tuple[float, EngineConnection]] = []
        self.size = size
        self.used = 0
        self.waiting = 0

    @property
    def idle(self) -> int:
        """How many connections are open and unused."""
        return len(self._idle)

    def acquire(self, give_up: threading.Event) -> EngineConnection | None:
        """Return a connection for one step; waits while all are in use, None if told to give up before there is one.

        Raises if the database is out of reach.
        """
        if not self._permitted(give_up):
            return None
        try:
            conn = self._pop()
            if conn is None:
                conn = self._connect()
        except BaseException:
            self._permits.release()
            raise
        with self._lock:
            self.used += 1
        return conn

    def release(self, conn: EngineConnection, *, clean: bool) -> None:
        """Take a connection back; only a `clean` one, that holds no lock and no transaction, is kept."""
        kept = clean and _is_fit(conn)
        if not kept:
            self._close(conn)
        with self._lock:
            if kept:
                self._idle.append((monotonic(), conn))
            self.used -= 1
        self._permits.release()

    def give_up(self, conn: EngineConnection) -> None:
        """Do without a connection whose step does not end: the server ends its transaction and lets go of its locks.

        The connection itself is left to the step's thread: two must not use it at once.
        """
        with self._lock:
            self.used -= 1
        self._permits.release()
        if conn.backend is not None:
            with suppress(psycopg.Error, DatabaseUnavailable), closing(self._connect()) as other:
                store.end_session(other, pid=conn.backend.pid, started=conn.backend.started).all()

    def close_idle(self, older_than: float = IDLE) -> None:
        """Close connections that nobody has used for a while."""
        limit = monotonic() - older_than
        with self._lock:
            old = [conn for since, conn in self._idle if since <= limit]
            self._idle = [(since, conn) for since, conn in self._idle if since > limit]
        for conn in old:
            conn.close()

    def _close(self, conn: EngineConnection) -> None:
        conn.close()
        if conn.fell_silent:
            # Else the key stays locked until the server misses us.
            with suppress(psycopg.Error, DatabaseUnavailable), closing(self._connect()) as other:
                end_silent(other, conn)

    def _permitted(self, give_up: threading.Event) -> bool:
        with self._lock:
            self.waiting += 1
        try:
            while not give_up.is_set():
                if self._permits.acquire(timeout=GLANCE):
                    return True
            return False
        finally:
            with self._lock:
                self.waiting -= 1

    def _pop(self) -> EngineConnection | None:
        with self._lock:
            return self._idle.pop()[1] if self._idle else None


def _is_fit(conn: EngineConnection) -> bool:
    """Tell whether a connection is as good as new, made so if a step had it."""
    try:
        if conn.was_lent and not conn.closed:
            tidy(conn)
    except psycopg.Error:
        return False
    return not conn.closed


def check_session_locks(connect: Callable[[], Connection]) -> str | None:
    """Say why session locks do not hold on such connections, or None if they do.

    A transaction pooler hands each transaction to any of its sessions: the same lock is then granted to two clients,
    and stays behind when both have left.
    """
    # A key of its own each time: what an earlier probe left in a pooler's session must not answer for this one.
    key = f"{PROBE_KEY} {secrets.token_hex(8)}"
    with closing(connect()) as first, closing(connect()) as second:
        pids = {_backend(first) for _ in range(5)}
        if len(pids) > 1:
            return "the server session changes from one transaction to the next"
        held = store.lock_partitions(first, keys=[key]).one()
        if store.lock_partitions(second, keys=[key]).one():
            store.unlock_partitions(second, keys=[key])
            store.unlock_partitions(first, keys=[key])
            return "two connections were granted the same session lock"
        if not held or not store.unlock_partitions(first, keys=[key]).one():
            return "a session lock was gone in the next transaction"
        return None


def _backend(conn: Connection) -> int:
    row = conn.execute("select pg_backend_pid()").fetchone()
    return int(row[0]) if row else 0
