"""Limits as the database knows them: published by workers, and judged by wherever a limited instance is written."""

from collections.abc import Iterable

from gendurable.core.instance import NewInstance
from gendurable.core.limiters import Limiters, RateLimit
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.rows import LimiterRow


def publish(conn: Connection, limiters: Limiters) -> None:
    """Make limits known to every worker and client of this database; others of the same name are replaced."""
    if limiters:
        store.publish_limiters(conn, limiters).all()


def known_limiters(conn: Connection) -> Limiters:
    """Read the limits that have been published."""
    rows = store.list_limiters(conn).all()
    return Limiters(
        {row.name: _rate(row) for row in rows if row.kind == "rate"},
        {row.name: row.allowed for row in rows if row.kind == "concurrency"},
    )


def check_limits(conn: Connection, instances: Iterable[NewInstance]) -> None:
    """Refuse instances under limits that nobody has defined; asks the database only if some are limited.

    Where nothing was ever published, there is nothing to judge by: whoever inserts may be there before the workers.
    """
    limited = [new for new in instances if new.rate_limit is not None or new.concurrency_limit is not None]
    if not limited:
        return
    if known := known_limiters(conn):
        for new in limited:
            known.check(new.rate_limit, new.weight, new.concurrency_limit)


def _rate(row: LimiterRow) -> RateLimit:
    assert row.period is not None and row.burst is not None, "a constraint of the table"  # noqa: S101, PT018
    return RateLimit(row.allowed, row.period, row.burst)
