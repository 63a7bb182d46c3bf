"""Migrations: `sql/migrations/NNNN_name.up.sql` and `.down.sql`, each in one transaction, one runner at a time.

The version stands in the comment on the table `gen_durable`.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import psycopg
from attrs import frozen
from psycopg import sql

from gendurable.db.connection import Connection, Database, check_schema, connect, one_line, search_path, target
from gendurable.db.statements import folder
from gendurable.errors import (
    DatabaseUnavailable,
    GenDurableError,
    MigrationBlocked,
    MigrationError,
    SchemaMissing,
    SchemaTooNew,
)

# Our own key space for advisory locks: the first of two 32-bit numbers ("gend" in ASCII).
LOCK_CLASS = 0x67656E64
TABLES = ("gen_durable", "signals", "workers", "limiters", "buckets", "paused_queues", "schedules")
# A change of a large table takes its time, and so does waiting for somebody else's.
LONGEST_MIGRATION = timedelta(hours=6)


@frozen
class Migration:
    """One numbered change of the schema, forward and back."""

    version: int
    name: str
    up: Path
    down: Path


@frozen
class MigrationStatus:
    """Which version a database has, and which this package brings."""

    installed: int
    newest: int

    @property
    def pending(self) -> int:
        """How many migrations are still to run."""
        return max(self.newest - self.installed, 0)


# Given the version that is installed: what to run next, if anything.
Chooser: TypeAlias = Callable[[int], Migration | None]


def migrations() -> list[Migration]:
    """Return all migrations in order."""
    found = [
        Migration(
            int(path.name[:4]), path.name.removesuffix(".up.sql"), path, path.with_suffix("").with_suffix(".down.sql")
        )
        for path in sorted((folder() / "migrations").glob("[0-9][0-9][0-9][0-9]_*.up.sql"))
    ]
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise MigrationError("the migration files are not numbered 1, 2, 3, …; this installation is damaged")
    return found


def up(
    dsn: str, *, schema: str | None = None, to: int | None = None, lock_timeout: timedelta | None = None
) -> list[str]:
    """Bring a schema to version `to` (default: the newest); return the names of the migrations that ran.

    With `lock_timeout`, MigrationBlocked if a lock is not free within that time.
    """
    steps = migrations()
    target = _check_target(to, steps, default=len(steps))
    return _run(dsn, schema, lambda version: steps[version] if version < target else None, lock_timeout, forward=True)


def down(
    dsn: str, *, schema: str | None = None, to: int | None = None, lock_timeout: timedelta | None = None
) -> list[str]:
    """Take a schema back to version `to` (default: nothing left); return the names of what was undone."""
    steps = migrations()
    target = _check_target(to, steps, default=0)
    return _run(
        dsn, schema, lambda version: steps[version - 1] if version > target else None, lock_timeout, forward=False
    )


def script(schema: str, first: int, last: int, *, grants: str | None = None) -> str:
    """Return the SQL that takes a schema from one version to another, for DBAs who run it themselves.

    `grants` names a role that a worker may run as: it gets what the engine needs, and no more.
    """
    steps = migrations()
    name = sql.Identifier(check_schema(schema)).as_string(None)
    parts = [f"-- gendurable: schema {name}, version {first} to {last}", "begin;"]
    if first < last:
        parts.append(f"create schema if not exists {name};")
    parts.append(f"set local search_path to {search_path(schema)};")
    chosen = steps[first:last] if first < last else reversed(steps[last:first])
    parts += [(step.up if first < last else step.down).read_text().rstrip() for step in chosen]
    if last:
        parts.append(f"comment on table gen_durable is '{last}';")
    if grants is not None:
        role = sql.Identifier(grants).as_string(None)
        parts += [
            f"grant usage on schema {name} to {role};",
            f"grant select, insert, update, delete on {', '.join(TABLES)} to {role};",
        ]
    return "\n\n".join([*parts, "commit;"])


def status(dsn: str, *, schema: str | None = None) -> MigrationStatus:
    """Say which version is installed and which is the newest."""
    with connect(dsn, schema=schema) as conn:
        return MigrationStatus(installed_version(conn, check_schema(schema)), len(migrations()))


def check_current(conn: Connection, schema: str) -> None:
    """Refuse a schema that is missing, too old or too new for this package."""
    installed, newest = installed_version(conn, schema), len(migrations())
    if installed < newest:
        have = f"has schema version {installed}" if installed else "has no gendurable tables"
        raise SchemaMissing(f"schema {schema!r} {have}, and version {newest} is needed: run `gendurable migrate up`")
    _refuse_newer(installed, newest, schema)


def installed_version(conn: Connection, schema: str) -> int:
    """Read the version from the table's comment; 0 if there is no table."""
    row = conn.execute(
        "select obj_description(c.oid, 'pg_class') from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = %s and c.relname = 'gen_durable' and c.relkind in ('r', 'p')",
        [schema],
    ).fetchone()
    if row is None:
        return 0
    if not re.fullmatch(r"[0-9]{1,9}", row[0] or ""):
        raise MigrationError(
            f"table gen_durable in schema {schema!r} carries the comment {row[0]!r} instead of a version: "
            "it is not ours, or its comment was changed; use another schema, or put the number back"
        )
    return int(row[0])


def _run(dsn: str, schema: str | None, choose: Chooser, lock_timeout: timedelta | None, *, forward: bool) -> list[str]:
    name = check_schema(schema)
    done: list[str] = []

    def choose_undone(version: int) -> Migration | None:
        # One that comes up again was undone meanwhile by somebody who goes the other way: let him, or it has no end.
        migration = choose(version)
        return None if migration is None or migration.name in done else migration

    # A pooler may give each transaction another session, which knows nothing of statements prepared in this one.
    database = Database(dsn, name, prepare=False, statement_timeout=LONGEST_MIGRATION)
    with database.connect("gendurable migrate", lock_timeout=lock_timeout) as conn:
        try:
            while migration := _run_one(conn, name, choose_undone, forward=forward):
                done.append(migration.name)
        except psycopg.Error as error:
            raise _failure(conn, dsn, name, error) from error
    return done


def _failure(conn: Connection, dsn: str, schema: str, error: psycopg.Error) -> GenDurableError:
    if conn.closed:
        return DatabaseUnavailable(
            f"lost the connection to {target(dsn)} while migrating: {one_line(error)}; a migration takes effect whole "
            "or not at all, so run it again"
        )
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return MigrationBlocked(
            f"schema {schema!r} is in use, by another migration or a long transaction: nothing was changed, "
            f"try again later or wait longer ({one_line(error)})"
        )
    remedy = "remove the cause and run it again"
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        remedy = "have the schema made by its database's owner, and migrate as a role that may create in it"
    return MigrationError(f"a migration of schema {schema!r} failed and was rolled back: {one_line(error)}; {remedy}")


def _run_one(conn: Connection, schema: str, choose: Chooser, *, forward: bool) -> Migration | None:
    with conn.transaction():
        # Whoever else migrates this schema waits here, and then finds the work done.
        conn.execute("select pg_advisory_xact_lock(%s, hashtext(%s))", [LOCK_CLASS, schema])
        installed = installed_version(conn, schema)
        _refuse_newer(installed, len(migrations()), schema)
        migration = choose(installed)
        if migration is None:
            return None
        if forward:
            _ensure_schema(conn, schema)
        conn.execute("select set_config('search_path', %s, true)", [search_path(schema)])
        conn.execute((migration.up if forward else migration.down).read_bytes())
        version = migration.version if forward else migration.version - 1
        if version:
            conn.execute(sql.SQL("comment on table gen_durable is {}").format(sql.Literal(str(version))))
        return migration


def _ensure_schema(conn: Connection, schema: str) -> None:
    # Only where it is missing: a role that may not create schemas can still use one made for it.
    if conn.execute("select 1 from pg_namespace where nspname = %s", [schema]).fetchone() is None:
        conn.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))


def _check_target(to: int | None, steps: list[Migration], *, default: int) -> int:
    if to is None:
        return default
    if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to <= len(steps):
        raise MigrationError(f"there is no schema version {to!r}: give a number from 0 to {len(steps)}")
    return to


def _refuse_newer(installed: int, newest: int, schema: str) -> None:
    if installed > newest:
        raise SchemaTooNew(
            f"schema {schema!r} has version {installed}, and this gendurable knows only up to {newest}: "
            "install the newer gendurable that migrated it"
        )
