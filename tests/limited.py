"""What tests of limits share: limits in a word, looks for limited instances, and what their buckets hold."""

from datetime import timedelta
from typing import Any

from races import LEASE, MACHINES

from gendurable.core.claim import Claim
from gendurable.core.limiters import Limiters, RateLimit
from gendurable.db.connection import Connection
from gendurable.db.limiting import publish
from gendurable.db.operations import LimitedLook, claim_limited


def limited(
    conn: Connection, *, rates: dict[str, RateLimit] | None = None, places: dict[str, int] | None = None
) -> None:
    publish(conn, Limiters(rates or {}, places or {}))


def per_second(allowed: int, burst: int | None = None) -> RateLimit:
    return RateLimit(allowed, timedelta(seconds=1), burst or allowed)


def never_again(burst: int) -> RateLimit:
    """A bucket that holds so many tokens and gets next to none."""
    return RateLimit(1, timedelta(days=366), burst)


def look(conn: Connection, worker: str = "a", *, limit: int = 100, queue: str = "q", **about: Any) -> LimitedLook:
    return claim_limited(conn, queue=queue, machines=MACHINES, worker=worker, limit=limit, lease=LEASE, **about)


def look_on(conn: Connection, worker: str = "a", **about: Any) -> list[Claim]:
    """Look until a look finds no more, as a worker does."""
    claims: list[Claim] = []
    while True:
        found = look(conn, worker, **about)
        claims += found.claims
        if not found.more:
            return claims


def ids(claims: list[Claim]) -> list[int]:
    return [claimed.id for claimed in claims]


def tokens(conn: Connection, key: str = "r") -> float:
    found = conn.execute("select tokens from buckets where kind = 'rate' and key = %s", [key]).fetchone()
    assert found is not None
    return round(found[0], 3)
