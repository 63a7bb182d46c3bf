"""Connections of commands: one, short-lived, to a database that is known to be migrated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gendurable.config import Config
    from gendurable.db.connection import Connection, Database


def database(config: "Config") -> "Database":
    """Return where the tables are, as configured."""
    import logging

    from gendurable.db.connection import Database

    # What the driver has to say about a broken connection we say ourselves, in one line.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    return Database(
        config.dsn,
        config.schema,
        prepare=config.prepare,
        connect_timeout=config.connect_timeout,
        statement_timeout=config.statement_timeout,
        pooled=not config.prepare,
    )


@contextmanager
def reading(config: "Config") -> Iterator["Connection"]:
    """Open a connection; DatabaseUnavailable or SchemaMissing if there is nothing to talk to."""
    import psycopg

    from gendurable.db.connection import one_line, target
    from gendurable.db.migrate import check_current
    from gendurable.errors import DatabaseUnavailable

    where = database(config)
    with where.connect("gendurable cli") as conn:
        try:
            check_current(conn, where.schema)
            yield conn
        except psycopg.OperationalError as error:
            if conn.closed:
                raise DatabaseUnavailable(f"lost the connection to {target(where.dsn)}: {one_line(error)}") from error
            raise


@contextmanager
def writing(config: "Config") -> Iterator["Connection"]:
    """Open a connection to write on; OutcomeUnknown if it is lost meanwhile."""
    import psycopg

    from gendurable.db.connection import one_line
    from gendurable.errors import OutcomeUnknown

    with reading(config) as conn:
        try:
            yield conn
        except psycopg.OperationalError as error:
            if conn.closed:
                raise OutcomeUnknown(
                    f"the connection was lost, so it may or may not have been written: look before you repeat it; "
                    f"{one_line(error)}"
                ) from error
            raise
