"""Client: insert, signal, get and wait, for processes that run no worker."""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from gendurable.core.duration import Duration, to_timedelta
from gendurable.core.instance import Instance, NewInstance
from gendurable.core.status import TERMINAL
from gendurable.db import store
from gendurable.db.connection import (
    Connection,
    check_schema,
    configure,
    in_schema,
    one_commit,
    one_line,
    start_up,
    target,
)
from gendurable.db.operations import (
    check_id,
    delivered,
    insert_instance,
    insert_instances,
    read_instance,
    send_signal,
)
from gendurable.db.rows import Delivery
from gendurable.errors import (
    DatabaseUnavailable,
    InstanceNotFound,
    InvalidInstance,
    OutcomeUnknown,
    SchemaMissing,
    WaitTimeout,
)

EMPTY: Mapping[str, Any] = {}
FIRST_LOOK, LONGEST_PAUSE = 0.01, 0.5


class Client:
    """Creates instances and talks to them; safe to share between threads.

    Give a DSN (else libpq's own variables count) or a psycopg pool of your own. Connections open when first used.
    """

    def __init__(
        self, dsn: str | None = None, *, pool: "ConnectionPool[Any] | None" = None, schema: str | None = None
    ) -> None:
        """Remember where the database is; nothing is opened yet."""
        if dsn is not None and pool is not None:
            raise InvalidInstance("give the client a dsn or a pool, not both")
        self._schema = check_schema(schema)
        self._borrowed = pool
        self._dsn = dsn or _conninfo(pool)
        self._pool = _own_pool(dsn or "", self._schema)

    def insert(self, new: NewInstance, *, conn: Connection | None = None) -> int:
        """Insert an instance and return its id; DuplicateInstance if its unique key is occupied.

        With `conn`, inside that connection's transaction: it comes into being with the caller's commit.
        """
        with self._writing(conn) as connection:
            return insert_instance(connection, new)

    def insert_many(self, instances: Iterable[NewInstance], *, conn: Connection | None = None) -> list[int]:
        """Insert any number of instances at once and return the ids of those inserted, in no particular order.

        An instance whose unique key is occupied is skipped.
        """
        with self._writing(conn) as connection:
            return insert_instances(connection, instances)

    def signal(
        self,
        id: int,  # noqa: A002  the column's name
        name: str,
        payload: Any = EMPTY,
        *,
        dedup_key: str | None = None,
        conn: Connection | None = None,
    ) -> Delivery:
        """Send a signal to an instance; NoTarget if it has ended or does not exist.

        A second signal with the same `dedup_key`, while the first is unread, is a success that changes nothing.
        With `conn`, the instance's row stays locked until the caller's transaction ends: keep that short.
        """
        with self._writing(conn) as connection:
            if conn is None and self._borrowed is None:
                with one_commit(connection):
                    answer = send_signal(connection, id, name, payload, dedup_key)
            else:
                answer = send_signal(connection, id, name, payload, dedup_key)
            return delivered(id, answer)

    def get(self, id: int, *, conn: Connection | None = None) -> Instance:  # noqa: A002  the column's name
        """Return an instance; InstanceNotFound."""
        with self._reading(conn) as connection:
            return read_instance(connection, id)

    def wait(self, id: int, *, timeout: Duration | None = None) -> Instance:  # noqa: A002  the column's name
        """Return the instance once it has ended; WaitTimeout if it does not within `timeout`."""
        limit = None if timeout is None else _check_timeout(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        pause = FIRST_LOOK
        while True:
            with self._reading(None) as connection:
                status = store.get_status(connection, id=check_id(id)).one()
                if status is None:
                    raise InstanceNotFound(id)
                if status in TERMINAL:
                    return read_instance(connection, id)
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise WaitTimeout(id, status, limit or 0.0)
            time.sleep(pause if left is None else min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        """Close the client's own connections."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _writing(self, conn: Connection | None) -> Iterator[Connection]:
        used: Connection | None = None
        try:
            with self._connection(conn) as used:
                yield used
        except psycopg.OperationalError as error:
            # Out here, since a borrowed connection commits on its way back to its pool.
            if conn is None and used is not None and used.closed:
                raise OutcomeUnknown(
                    "the connection was lost while the write was under way, so it may or may not have been "
                    "committed: look before you repeat it (a unique or dedup key makes repeating safe); "
                    f"{one_line(error)}"
                ) from error
            raise

    @contextmanager
    def _reading(self, conn: Connection | None) -> Iterator[Connection]:
        used: Connection | None = None
        try:
            with self._connection(conn) as used:
                yield used
        except psycopg.OperationalError as error:
            if conn is None and used is not None and used.closed:
                raise self._unavailable(error) from error
            raise

    @contextmanager
    def _connection(self, conn: Connection | None) -> Iterator[Connection]:
        """A connection with our search path: the caller's, a borrowed one, or one of our own."""
        if conn is not None and not isinstance(conn, psycopg.Connection):
            raise InvalidInstance(f"conn: {type(conn).__name__} is no psycopg.Connection (an async one will not do)")
        try:
            if conn is not None:
                with in_schema(conn, self._schema):
                    yield conn
            elif self._borrowed is not None:
                with self._borrowed.connection() as borrowed, in_schema(borrowed, self._schema):
                    yield borrowed
            else:
                self._pool.open()
                with self._pool.connection() as own:
                    yield own
        except PoolClosed as error:
            raise DatabaseUnavailable(f"this client's connections are closed: make a new one ({error})") from error
        except PoolTimeout as error:
            raise self._unavailable(error) from error
        except psycopg.errors.UndefinedTable as error:
            raise SchemaMissing(
                f"schema {self._schema!r} has no gendurable tables: run `gendurable migrate up` ({one_line(error)})"
            ) from error

    def _unavailable(self, error: BaseException) -> DatabaseUnavailable:
        return DatabaseUnavailable(f"cannot reach {target(self._dsn)}: {one_line(error)}; is the server running?")


def _own_pool(dsn: str, schema: str) -> "ConnectionPool[Any]":
    return ConnectionPool(
        dsn,
        kwargs={"autocommit": True, **start_up(dsn, "gendurable client")},
        min_size=0,
        max_size=10,
        open=False,
        timeout=5,
        name="gendurable client",
        configure=lambda conn: configure(conn, schema),
        check=ConnectionPool.check_connection,
    )


def _conninfo(pool: "ConnectionPool[Any] | None") -> str:
    """Where a borrowed pool connects to, for messages; a pool may also compute that for each connection."""
    return pool.conninfo if pool is not None and isinstance(pool.conninfo, str) else ""


def _check_timeout(value: Duration) -> float:
    try:
        seconds = to_timedelta(value).total_seconds()
    except ValueError as error:
        raise InvalidInstance(f"timeout: {error}") from None
    if seconds < 0:
        raise InvalidInstance(f"timeout: {value!r} is negative")
    return seconds
