"""Connections as the engine needs them: one schema, one isolation level, one clock, whatever the role's defaults."""

import math
import re
from collections.abc import Callable, Iterator
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

from gendurable.errors import DatabaseUnavailable, InvalidInstance

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

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Consume a generator of the driver, as every call does; OperationalError once patience is over."""
        patience = self.patience if timeout is None else timeout
        started = monotonic()
        try:
            return super().wait(gen, interval, patience)
        except psycopg.OperationalError as error:
            if timeout is None and monotonic() - started >= patience and not self.closed:
                self.fell_silent = True
                self.close()
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

    def connect(
        self,
        application: str,
        *,
        patience: float | None = None,
        lock_timeout: timedelta | None = None,
        steady: bool = False,
    ) -> EngineConnection:
        """Open a connection that is ready for the engine's statements; `steady`: and for no others.

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
            self.set_up(conn)
            if lock_timeout is not None:
                conn.execute("select set_config('lock_timeout', %s, false)", [f"{lock_timeout // MILLISECOND}ms"])
            if steady:
                keep_plans_steady(conn)
        except psycopg.Error as error:
            conn.close()
            raise DatabaseUnavailable(f"lost {target(self.dsn)} while connecting: {one_line(error)}") from error
        return conn

    def parameters(self, application: str) -> dict[str, Any]:
        """What a connection is opened with, by us or by a pool."""
        prepare_threshold = 5 if self.prepare else None
        others = start_up(self.dsn, application, self.connect_timeout)
        return {"autocommit": True, "prepare_threshold": prepare_threshold, **others}

    def set_up(self, conn: EngineConnection) -> None:
        """Make a new connection ready for the engine's statements.

        The keepalives are the server's: by default it would keep the locks of a client that vanished for two hours.
        """
        configure(conn, self.schema)
        found = conn.execute(
            "select pid, backend_start, set_config('statement_timeout', %s, false),"
            " set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),"
            " set_config('tcp_keepalives_count', '3', false) from pg_stat_get_activity(pg_backend_pid())",
            [f"{self.statement_timeout // MILLISECOND}ms"],
        ).fetchone()
        if found is not None and found[0] == conn.info.backend_pid:
            conn.backend = Backend(*found[:2])


def connect(dsn: str, *, schema: str | None = None, application: str = "gendurable") -> Connection:
    """Open a connection that is ready for the engine's statements, with the usual settings."""
    return Database(dsn, schema).connect(application)


def configure(conn: Connection, schema: str) -> None:
    """Pin what our statements rely on.

    Read committed: the recheck after a park must see what was committed since. UTC and ISO dates: times that travel
    as text. By `set_config`, not start-up options, which poolers refuse.
    """
    conn.execute(
        "select set_config('search_path', %s, false), set_config('default_transaction_isolation', 'read committed',"
        " false), set_config('TimeZone', 'UTC', false), set_config('DateStyle', 'ISO', false)",
        [search_path(schema)],
    )


def keep_plans_steady(conn: Connection) -> None:
    """For connections that run nothing but the worker's statements: plan each once, by the indexes made for it.

    Every one of them reads a few rows by an index. Estimates that say otherwise are wrong: a table that was empty when
    it was last analyzed, an expression without statistics. And to plan a claim takes longer than to run it.
    """
    off = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "enable_hashjoin", "enable_mergejoin", "jit")
    settings = {"plan_cache_mode": "force_generic_plan", **dict.fromkeys(off, "off")}
    calls = sql.SQL(", ").join(sql.SQL("set_config({}, {}, false)").format(*pair) for pair in settings.items())
    conn.execute(sql.SQL("select {}").format(calls))


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


@contextmanager
def one_commit(conn: Connection, *, after: Callable[[], object] | None = None) -> Iterator[None]:
    """Run statements in one transaction and, where libpq can, one round trip; `after` follows the commit in it.

    `transaction()` would wait for the answer to its BEGIN; these two travel with the statements between them.
    """
    try:
        with pipeline(conn):
            conn.execute("begin")
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
    """Connection parameters that the DSN leaves open.

    Keepalives: a peer that vanished is noticed within half a minute, and with it the locks its session holds.
    """
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        return {}
    defaults = {
        "connect_timeout": math.ceil(connect_timeout.total_seconds()),
        "application_name": application,
        "client_encoding": "utf8",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }
    return {key: value for key, value in defaults.items() if key not in given}
