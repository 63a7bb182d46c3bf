"""Connections as the engine needs them: one schema, one isolation level, one clock, whatever the role's defaults."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, TypeAlias

import psycopg
from attrs import field, frozen
from psycopg import capabilities, pq, sql
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from gendurable.errors import DatabaseUnavailable, InvalidInstance, TransactionMisused

Connection: TypeAlias = psycopg.Connection[Any]

DEFAULT_SCHEMA = "public"
MAX_IDENTIFIER_BYTES = 63
MILLISECOND = timedelta(milliseconds=1)
# How long an answer may be under way once the server has given it.
LONGEST_JOURNEY = 5.0


def check_schema(schema: str | None) -> str:
    """Return the schema's name; InvalidInstance if Postgres would refuse or cut it."""
    name = DEFAULT_SCHEMA if schema is None else schema
    data = name.encode(errors="replace") if isinstance(name, str) else b""
    if not data or b"\0" in data or len(data) > MAX_IDENTIFIER_BYTES or data.decode() != name:
        raise InvalidInstance(f"schema: {schema!r} is no schema name: give 1 to {MAX_IDENTIFIER_BYTES} bytes of text")
    return name


def check_dsn(dsn: str) -> str:
    """Return the DSN; InvalidInstance if libpq would not understand it, without its text, which may hold a password."""
    try:
        conninfo_to_dict(dsn)
    except (psycopg.ProgrammingError, TypeError, AttributeError, ValueError):
        raise InvalidInstance(
            "dsn: not understood: write postgresql://user@host/db or libpq's key=value form (it is not shown here, "
            "since it may hold a password)"
        ) from None
    return dsn


def search_path(schema: str) -> str:
    """Return the search path that finds our tables and nobody else's."""
    return sql.Identifier(schema).as_string(None) + ", pg_temp"


@frozen
class Backend:
    """A session as the server knows it."""

    pid: int
    started: datetime


class EngineConnection(psycopg.Connection[Any]):
    """A connection whose every call has a deadline: one that went silent is closed, whatever swallowed its packets."""

    patience: float = 35.0
    fell_silent: bool = False
    # None where a pooler stands between: the session at its other end is not ours alone.
    backend: Backend | None = None
    # What each transaction must begin with, where it does not hold for the session.
    local: sql.Composed | None = None
    in_commit: bool = False
    # What holds for the session; None where a pooler stands between.
    settings: Mapping[str, str] | None = None
    # Between `lend` and `take_back` a step has the connection, and what it must not do with it is refused.
    _lent: tuple[Any, ...] | None = None
    was_lent: bool = False

    def lend(self) -> None:
        """Give the connection to a step, in a transaction that is not the step's to end."""
        self._lent = self.row_factory, self.cursor_factory, self.prepare_threshold
        self.was_lent = True

    def take_back(self) -> None:
        """Have the connection for the engine again, as the driver had it before; any number of times."""
        if self._lent is not None:
            self.row_factory, self.cursor_factory, self.prepare_threshold = self._lent
            self._adapters = None  # the step's own ones; there is no public way
            self._lent = None

    def commit(self) -> None:
        """Commit, unless the transaction is the engine's."""
        self._refuse_if_lent("commit()")
        super().commit()

    def rollback(self) -> None:
        """Roll back, unless the transaction is the engine's."""
        self._refuse_if_lent("rollback()")
        super().rollback()

    def close(self) -> None:
        """Close the connection, unless a step has it."""
        self._refuse_if_lent("close()")
        super().close()

    def _refuse_if_lent(self, call: str) -> None:
        if self._lent is not None and not self.closed:
            raise TransactionMisused(
                f"ctx.conn.{call}: the transaction is the engine's, which ends it with the step's outcome; return the "
                "outcome or raise, and use savepoints (with ctx.conn.transaction()) for parts"
            )

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Consume a generator of the driver, as every call does; OperationalError once patience is over."""
        patience = self.patience if timeout is None else timeout
        started = monotonic()
        try:
            return super().wait(gen, interval, patience)
        except psycopg.OperationalError as error:
            if timeout is None and monotonic() - started >= patience and not self.closed:
                self.fell_silent = True
                super().close()
                raise psycopg.OperationalError(f"no answer from the server within {patience:g} s") from error
            raise


@frozen
class Database:
    """Where the tables are and how connections to them behave."""

    dsn: str = ""
    schema: str = field(default=DEFAULT_SCHEMA, converter=check_schema)
    prepare: bool = True
    connect_timeout: timedelta = timedelta(seconds=5)
    statement_timeout: timedelta = timedelta(seconds=30)
    # A transaction pooler stands between.
    pooled: bool = False

    def connect(
        self,
        application: str,
        *,
        patience: float | None = None,
        lock_timeout: timedelta | None = None,
        steady: bool = False,
        forgettable: bool = False,
    ) -> EngineConnection:
        """Open a connection that is ready for the engine's statements; `steady`: and for no others.

        `forgettable`: its commits need not wait for the disk. For claims and leases only: should a crash of the server
        undo one, the row is as it was before, and an outcome finds its fence or is stale.

        The server gives up on a statement after `statement_timeout`; should its answer not come, we do a little later,
        or after `patience`.
        """
        check_dsn(self.dsn)
        try:
            conn = EngineConnection.connect(self.dsn, **self.parameters(application))
        except psycopg.OperationalError as error:
            raise DatabaseUnavailable(f"cannot connect to {target(self.dsn)}: {one_line(error)}") from error
        limit = self.statement_timeout.total_seconds()
        conn.patience = patience or limit + min(limit, LONGEST_JOURNEY)
        try:
            self.set_up(conn, lock_timeout=lock_timeout, steady=steady, forgettable=forgettable)
        except psycopg.Error as error:
            conn.close()
            raise DatabaseUnavailable(f"lost {target(self.dsn)} while connecting: {one_line(error)}") from error
        return conn

    def parameters(self, application: str) -> dict[str, Any]:
        """What a connection is opened with, by us or by a pool."""
        prepare_threshold = 5 if self.prepare else None
        others = start_up(self.dsn, application, self.connect_timeout)
        return {"autocommit": True, "prepare_threshold": prepare_threshold, **others}

    def set_up(
        self,
        conn: EngineConnection,
        *,
        lock_timeout: timedelta | None = None,
        steady: bool = False,
        forgettable: bool = False,
    ) -> None:
        """Make a new connection ready for the engine's statements: pin what they rely on.

        Read committed: the recheck after a park must see what was committed since. UTC and ISO dates: times that travel
        as text. The keepalives are the server's, which would keep the locks of a client that vanished for two hours.
        By `set_config`, not start-up options, which poolers refuse. A pooled session is everybody's: there the settings
        are made anew in each transaction and end with it.
        """
        settings = {
            "search_path": search_path(self.schema),
            "default_transaction_isolation": "read committed",
            "TimeZone": "UTC",
            "DateStyle": "ISO",
            "statement_timeout": f"{self.statement_timeout // MILLISECOND}ms",
        }
        if lock_timeout is not None:
            settings["lock_timeout"] = f"{lock_timeout // MILLISECOND}ms"
        if forgettable:
            settings["synchronous_commit"] = "off"
        if self.pooled:
            conn.local = set_config(settings, local=True)
            return
        settings |= {"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"}
        if steady:
            settings |= STEADY_PLANS
        conn.settings = settings
        conn.execute(set_config(settings, local=False))
        found = conn.execute("select pid, backend_start from pg_stat_get_activity(pg_backend_pid())").fetchone()
        if found is not None and found[0] == conn.info.backend_pid:
            conn.backend = Backend(*found)


# For connections that run nothing but the worker's statements: plan each once, by the indexes made for it. Every one of
# them reads a few rows by an index. Estimates that say otherwise are wrong: a table that was empty when it was last
# analyzed, an expression without statistics. And to plan a claim takes longer than to run it.
STEADY_PLANS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}


def set_config(settings: Mapping[str, str], *, local: bool) -> sql.Composed:
    """Return the statement that makes settings, for the session or for the transaction."""
    calls = [
        sql.SQL("set_config({}, {}, {})").format(sql.Literal(name), sql.Literal(value), sql.Literal(local))
        for name, value in settings.items()
    ]
    return sql.SQL("select {}").format(sql.SQL(", ").join(calls))


def connect(dsn: str, *, schema: str | None = None, application: str = "gendurable") -> Connection:
    """Open a connection that is ready for the engine's statements, with the usual settings."""
    return Database(dsn, schema).connect(application)


@contextmanager
def in_schema(conn: Connection, schema: str) -> Iterator[None]:
    """Run statements on a caller's own connection, inside its transaction, with our settings for that long.

    The caller's settings wait in settings of ours, so that they need not travel. After an error the savepoint that
    `transaction()` made takes them all back.
    """
    factory, conn.cursor_factory = conn.cursor_factory, psycopg.Cursor  # theirs may write parameters another way
    run = psycopg.Cursor(conn, row_factory=tuple_row).execute
    try:
        if not conn.autocommit and conn.info.transaction_status == pq.TransactionStatus.IDLE:
            # Begins the caller's transaction: an outermost `transaction()` would commit on its way out.
            run("select 1")
        with conn.transaction():
            run(
                "select set_config('gendurable.search_path', current_setting('search_path'), true),"
                " set_config('gendurable.datestyle', current_setting('DateStyle'), true),"
                " set_config('search_path', %s, true), set_config('DateStyle', 'ISO', true)",
                [search_path(schema)],
            )
            yield
            run(
                "select set_config('search_path', current_setting('gendurable.search_path'), true),"
                " set_config('DateStyle', current_setting('gendurable.datestyle'), true)"
            )
    finally:
        conn.cursor_factory = factory


@contextmanager
def pipeline(conn: Connection) -> Iterator[None]:
    """Send several statements in one round trip, where libpq can."""
    if capabilities.has_pipeline():
        try:
            with conn.pipeline():
                yield
        except BaseException:
            # The server skips what follows an error in a pipeline, preparing statements too, but psycopg goes on
            # believing in them: each later use would fail. Forget them all; the next statement tells the server.
            conn._prepared.clear()  # noqa: SLF001  there is no public way
            raise
    else:
        yield


def set_locally(conn: Connection) -> None:
    """Begin a transaction on a pooled connection with the settings that the engine's statements rely on."""
    if isinstance(conn, EngineConnection) and conn.local is not None:
        conn.execute(conn.local)


@contextmanager
def marked(conn: Connection) -> Iterator[None]:
    """Remember that a transaction is open: in a pipeline the driver does not know before the answers are there."""
    if not isinstance(conn, EngineConnection):
        yield
        return
    conn.in_commit = True
    try:
        yield
    finally:
        conn.in_commit = False


def needs_transaction(conn: Connection) -> bool:
    """Tell whether a statement must not run here without a transaction around it."""
    return (
        isinstance(conn, EngineConnection)
        and conn.local is not None
        and not conn.in_commit
        and conn.info.transaction_status == pq.TransactionStatus.IDLE
    )


@contextmanager
def one_commit(conn: Connection, *, after: Callable[[], object] | None = None) -> Iterator[None]:
    """Run statements in one transaction and, where libpq can, one round trip; `after` follows the commit in it.

    `transaction()` would wait for the answer to its BEGIN; these two travel with the statements between them.
    """
    try:
        with pipeline(conn), marked(conn):
            conn.execute("begin isolation level read committed")
            set_locally(conn)
            yield
            conn.execute("commit")
            if after is not None:
                after()
    except BaseException:
        if conn.info.transaction_status not in (pq.TransactionStatus.IDLE, pq.TransactionStatus.UNKNOWN):
            conn.execute("rollback")
        raise


def target(dsn: str) -> str:
    """Say which server a DSN means, without its password."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return "the database"
    server = f"{parts.get('host', 'the default host')}:{parts.get('port', '5432')}"
    return f"database {parts.get('dbname', 'of the default name')!r} at {server}"


def one_line(error: BaseException) -> str:
    """Fold a driver's message into one line."""
    return re.sub(r"\s+", " ", str(error)).strip()


def start_up(dsn: str, application: str, connect_timeout: timedelta = timedelta(seconds=5)) -> dict[str, Any]:
    """Connection parameters that the DSN leaves open, and the encoding, which it may not choose.

    Keepalives: a peer that vanished is noticed within half a minute, and with it the locks its session holds.
    """
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return {}
    defaults = {
        "connect_timeout": math.ceil(connect_timeout.total_seconds()),
        "application_name": application,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }
    open_to_choice = {key: value for key, value in defaults.items() if key not in given}
    return {**open_to_choice, "client_encoding": "utf8"}  # JSON has no other
