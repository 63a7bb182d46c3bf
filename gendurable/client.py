"""Client: insert, signal, cancel, get and wait, for processes that run no worker."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self, overload

import psycopg
from psycopg import pq
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from gendurable.core.duration import Duration, to_timedelta
from gendurable.core.instance import Instance, NewInstance
from gendurable.core.limits import check_id, show
from gendurable.core.status import PARKED, TERMINAL, Status
from gendurable.db import store
from gendurable.db.connection import (
    Connection,
    Database,
    EngineConnection,
    check_dsn,
    check_schema,
    in_schema,
    one_commit,
    one_line,
    target,
)
from gendurable.db.endings import Level, cancel_instance, cancel_level, check_reason
from gendurable.db.faults import hint, is_passing
from gendurable.db.operations import (
    check_instances,
    delivered,
    insert_instance,
    insert_instances,
    pause,
    read_instance,
    resume,
    send_signal,
)
from gendurable.db.rows import Delivery
from gendurable.errors import (
    DatabaseRefused,
    DatabaseUnavailable,
    GenDurableError,
    InvalidInstance,
    OutcomeUnknown,
    SchemaMissing,
    WaitTimeout,
)
from gendurable.handle import EMPTY, Handle, Until
from gendurable.waiting import Hub

APPLICATION = "gendurable client"
PATIENCE_WITH_IDLE = 2.0

# The SQLSTATEs with which a session ends: connection exceptions, shutdown, crash of a neighbour.
_GOODBYES = ("08", "57P01", "57P02", "57P03", "57P05")
# What our statements meet where the tables are not, or not the newest.
_NOT_OURS = (
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedObject,
    psycopg.errors.UndefinedFunction,
)


class Client:
    """Creates instances and talks to them; safe to share between threads.

    Give a DSN (else libpq's own variables count) or a psycopg pool of your own. Connections open when first used.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        pool: "ConnectionPool[Any] | None" = None,
        schema: str | None = None,
        prepare: bool = True,
    ) -> None:
        """Remember where the database is; nothing is opened yet. `prepare=False`: it is behind a transaction pooler."""
        if dsn is not None and pool is not None:
            raise InvalidInstance("give the client a dsn or a pool, not both")
        self._borrowed = None if pool is None else _check_pool(pool)
        self._database = Database(
            check_dsn("" if dsn is None else dsn), check_schema(schema), prepare=prepare, pooled=not prepare
        )
        self._pool = _own_pool(self._database)
        self._opening = threading.Lock()
        self._opened = self._closed = False
        self._hub = Hub(self._statuses)

    @overload
    def insert(self, new: NewInstance, *, conn: Connection | None = None, handle: Literal[False] = False) -> int: ...

    @overload
    def insert(self, new: NewInstance, *, conn: Connection | None = None, handle: Literal[True]) -> Handle: ...

    @overload
    def insert(self, new: NewInstance, *, conn: Connection | None = None, handle: bool) -> int | Handle: ...

    def insert(self, new: NewInstance, *, conn: Connection | None = None, handle: bool = False) -> int | Handle:
        """Insert an instance and return its id, or a handle on it; DuplicateInstance if its unique key is occupied.

        With `conn`, inside that connection's transaction: it comes into being with the caller's commit.
        """
        with self._writing(conn) as connection:
            id_ = insert_instance(connection, new)
        return self.handle(id_) if handle else id_

    def insert_many(self, instances: Iterable[NewInstance], *, conn: Connection | None = None) -> list[int]:
        """Insert any number of instances at once and return the ids of those inserted, in no particular order.

        An instance whose unique key is occupied is skipped.
        """
        checked = check_instances(instances)  # before a connection is taken: the caller's generator may be slow
        with self._writing(conn) as connection:
            return insert_instances(connection, checked)

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
            with self._transaction(conn, connection):
                answer = send_signal(connection, id, name, payload, dedup_key)
            return delivered(id, answer)

    def cancel(
        self,
        id: int,  # noqa: A002  the column's name
        *,
        reason: str | None = None,
        cascade: bool = False,
        conn: Connection | None = None,
    ) -> bool:
        """End an instance `cancelled`, wherever it stands; NoTarget if it has ended otherwise or does not exist.

        True if it was this call that cancelled it, False if it had been already. Its children live on, unless
        `cascade`: then the whole tree is cancelled, generation by generation, each in a transaction of its own.
        With `conn`, the instance's row stays locked until the caller's transaction ends: keep that short.
        """
        why = check_reason(reason)
        if cascade and conn is not None:
            raise InvalidInstance(
                "conn: a cascade takes a transaction for each generation, so it cannot be part of yours; "
                "leave out conn, or cascade"
            )

        def cancel_some(ids: Sequence[int]) -> Level:
            with self._writing(conn) as connection, self._transaction(conn, connection):
                return cancel_level(connection, ids, why)

        return cancel_instance(check_id(id), cancel_some, cascade=cascade)

    def get(self, id: int, *, conn: Connection | None = None) -> Instance:  # noqa: A002  the column's name
        """Return an instance; InstanceNotFound."""
        with self._reading(conn) as connection:
            return read_instance(connection, id)

    def wait(
        self,
        id: int,  # noqa: A002  the column's name
        *,
        timeout: Duration | None = None,
        until: Until = "terminal",
    ) -> Instance:
        """Return the instance once it has ended; WaitTimeout if it does not within `timeout`.

        With `until="parked"` also once it waits for a signal or for children. However many threads wait on one client,
        one query at a time asks for all of them; what this process itself ends is reported without waiting for it.
        """
        limit = None if timeout is None else _check_timeout(timeout)
        wanted = _check_until(until)
        deadline = None if limit is None else monotonic() + limit
        while True:
            in_time = self._hub.wait(check_id(id), wanted, None if deadline is None else deadline - monotonic())
            found = self.get(id)
            # Read whole it may stand elsewhere: somebody retried or woke it in between.
            if found.status in wanted:
                return found
            if not in_time:
                raise WaitTimeout(found, limit or 0.0)

    def handle(self, id: int) -> Handle:  # noqa: A002  the column's name
        """Return a handle on an instance; whether there is one shows when it is used."""
        return Handle(check_id(id), self)

    def pause(self, queue: str) -> bool:
        """Let workers claim nothing more from a queue, until it is resumed; false if it was paused already.

        Stored in the database: it outlives workers. What they have begun goes on.
        """
        with self._writing(None) as connection:
            return pause(connection, queue)

    def resume(self, queue: str) -> None:
        """Let workers claim from a paused queue again; NotPaused."""
        with self._writing(None) as connection:
            resume(connection, queue)

    def close(self) -> None:
        """Close the client's own connections; it can no longer be used, except with `conn`."""
        with self._opening:
            self._closed = True
        self._pool.close()
        self._hub.hurry()  # whoever still waits is told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _statuses(self, ids: Sequence[int]) -> dict[int, str]:
        with self._reading(None) as connection:
            return {row.id: row.status for row in store.get_statuses(connection, ids=ids)}

    def _transaction(self, conn: Connection | None, connection: Connection) -> AbstractContextManager[None]:
        """Several statements at once: on a connection of our own; any other has a transaction open already."""
        return one_commit(connection) if conn is None and self._borrowed is None else nullcontext()

    @contextmanager
    def _writing(self, conn: Connection | None) -> Iterator[Connection]:
        used: Connection | None = None
        try:
            with self._connection(conn) as used:
                yield used
        except psycopg.Error as error:
            # Out here, since a borrowed connection commits on its way back to its pool.
            if conn is not None:
                raise  # the caller's transaction is the caller's to judge
            if used is not None and _is_lost(used, error):
                raise OutcomeUnknown(
                    "the connection was lost while the write was under way, so it may or may not have been "
                    "committed: look before you repeat it (a unique or dedup key makes repeating safe); "
                    f"{one_line(error)}"
                ) from error
            raise self._judged(error) from error

    @contextmanager
    def _reading(self, conn: Connection | None) -> Iterator[Connection]:
        try:
            with self._connection(conn) as used:
                yield used
        except psycopg.Error as error:
            if conn is not None:
                raise
            raise self._judged(error) from error

    @contextmanager
    def _connection(self, conn: Connection | None) -> Iterator[Connection]:
        """A connection with our search path: the caller's, a borrowed one, or one of our own."""
        try:
            if conn is not None:
                with in_schema(_check_conn(conn), self._database.schema):
                    yield conn
            elif self._borrowed is not None:
                with self._borrowed.connection() as borrowed, in_schema(_check_conn(borrowed), self._database.schema):
                    yield borrowed
            else:
                self._open()
                with self._pool.connection() as own:
                    yield own
        except PoolClosed as error:
            raise DatabaseUnavailable(f"the pool is not open ({error}): open it, or make a new client") from error
        except PoolTimeout as error:
            raise self._without_connection(error) from error
        except _NOT_OURS as error:
            raise SchemaMissing(
                f"schema {self._database.schema!r} has no gendurable tables, or old ones: run `gendurable migrate up` "
                f"({one_line(error)})"
            ) from error

    def _open(self) -> None:
        """Open our pool; first see that the server answers, since a pool keeps the reason why not to itself."""
        with self._opening:
            if self._closed:
                raise DatabaseUnavailable("this client is closed: make a new one")
            if not self._opened:
                self._database.connect(APPLICATION).close()
                self._pool.open()
                self._opened = True

    def _without_connection(self, error: PoolTimeout) -> DatabaseUnavailable:
        if self._borrowed is not None:
            return DatabaseUnavailable(f"the pool has no connection to give: {one_line(error)}")
        try:
            self._database.connect(APPLICATION).close()
        except DatabaseUnavailable as reason:
            return reason
        return DatabaseUnavailable(
            f"all {self._pool.max_size} connections of this client were busy for {self._pool.timeout:g} s: "
            "use a larger pool of your own (pool=...), or find out what they wait for"
        )

    def _judged(self, error: psycopg.Error) -> GenDurableError:
        """Say what an error of the database means for whoever called; nothing was written."""
        if is_passing(error):
            where = target(self._database.dsn) if self._borrowed is None else "the database"
            return DatabaseUnavailable(f"{where} cannot do this now: {one_line(error)}; try again{hint(error)}")
        return DatabaseRefused(f"the database refused: {one_line(error)} (SQLSTATE {error.sqlstate})")


def _own_pool(database: Database) -> "ConnectionPool[Any]":
    return ConnectionPool(
        database.dsn,
        connection_class=EngineConnection,
        kwargs=database.parameters(APPLICATION),
        min_size=0,
        max_size=10,
        open=False,
        timeout=5,
        name=APPLICATION,
        configure=database.set_up,
        check=_check_idle,
    )


def _check_idle(conn: EngineConnection) -> None:
    """See that an idle connection still answers, with less patience than the pool has: there is time for another."""
    patience, conn.patience = conn.patience, PATIENCE_WITH_IDLE
    try:
        ConnectionPool.check_connection(conn)
    finally:
        conn.patience = patience


def _check_conn(conn: object) -> Connection:
    if not isinstance(conn, psycopg.Connection):
        raise InvalidInstance(f"conn: {show(conn)} is no psycopg.Connection (an async one will not do)")
    if conn.closed:
        raise InvalidInstance("conn: the connection is closed; give an open one")
    if conn.info.transaction_status == pq.TransactionStatus.INERROR:
        raise InvalidInstance("conn: its transaction has failed, so nothing more can be done in it; roll it back first")
    if conn.info.encoding != "utf-8":
        raise InvalidInstance(f"conn: its encoding is {conn.info.encoding}; connect with client_encoding='utf8'")
    return conn


def _check_pool(pool: object) -> "ConnectionPool[Any]":
    if not isinstance(pool, ConnectionPool):
        raise InvalidInstance(f"pool: {show(pool)} is no psycopg_pool.ConnectionPool (an async one will not do)")
    return pool


def _is_lost(conn: Connection, error: psycopg.Error) -> bool:
    """Tell whether the session broke under its statement; a server that says goodbye is heard before it hangs up."""
    return conn.closed or (error.sqlstate or "").startswith(_GOODBYES)


def _check_until(value: object) -> frozenset[Status]:
    if value == "terminal":
        return TERMINAL
    if value == "parked":
        return TERMINAL | PARKED
    raise InvalidInstance(f"until: {show(value)} is unknown: give 'terminal' or 'parked'")


def _check_timeout(value: Duration) -> float:
    try:
        seconds = to_timedelta(value).total_seconds()
    except ValueError as error:
        raise InvalidInstance(f"timeout: {error}") from None
    if seconds < 0:
        raise InvalidInstance(f"timeout: {value!r} is negative")
    return seconds
