"""Rate and concurrency limits: what defines one, and its name as rows carry it.

A row says "stripe", or "stripe:acme" for the tenant acme, who has a share of his own.
"""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeAlias

from attrs import Factory, frozen

from gendurable.core.limits import check_key, show
from gendurable.errors import InvalidInstance

# A limit's name, or its name and a tenant who has a share of his own.
LimitName: TypeAlias = str | tuple[str, str]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Between name and tenant; no name may contain it.
SEPARATOR = ":"


def check_limit(field: str, value: object) -> str:
    """Return the key of a limit, as a row carries it; InvalidInstance if there can be no such limit."""
    match value:
        case str(name):
            return check_limit_name(field, name)
        case (str(name), str(tenant)):
            return check_key(field, check_limit_name(field, name) + SEPARATOR + check_key(f"{field} tenant", tenant))
        case _:
            raise InvalidInstance(
                f"{field}: {show(value)} is neither the name of a limit nor a pair of name and tenant, both text"
            )


def check_limit_name(field: str, name: str) -> str:
    """Return a limit's name; InvalidInstance if it can be none."""
    if not _NAME.fullmatch(name):
        raise InvalidInstance(
            f"{field}: {show(name)} is no limit's name: give 1 to 64 letters, digits, dots, dashes or underscores "
            f"(a tenant goes beside it: {field}=(name, tenant))"
        )
    return name


def limit_name(key: str) -> str:
    """Return the name of the limit that a row's key means."""
    return key.partition(SEPARATOR)[0]


def check_weight(value: object) -> int:
    """Return how many tokens an execution takes; InvalidInstance if it is no such number."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InvalidInstance(f"weight: {show(value)} is no number of tokens: give a whole number from 1")
    return value


@frozen
class RateLimit:
    """So many tokens per period; a bucket holds `burst` of them at most."""

    allowed: int
    period: timedelta
    burst: int


@frozen
class Limiters:
    """The limits that are known, by their names."""

    rates: Mapping[str, RateLimit] = Factory(dict)
    places: Mapping[str, int] = Factory(dict)

    def __bool__(self) -> bool:
        return bool(self.rates or self.places)

    def check(self, rate_limit: str | None, weight: int, concurrency_limit: str | None) -> None:
        """Refuse what no claim could ever serve, by InvalidInstance: a limit that is not known, or too much weight."""
        if rate_limit is not None:
            rate = self.rates.get(limit_name(rate_limit))
            if rate is None:
                raise InvalidInstance(_unknown("rate_limit", rate_limit, "rate_limits", self.rates))
            if weight > rate.burst:
                raise InvalidInstance(
                    f"weight: {weight} is more than rate limit {limit_name(rate_limit)!r} ever holds, {rate.burst}: "
                    "lower the weight or raise its burst"
                )
        if concurrency_limit is not None and limit_name(concurrency_limit) not in self.places:
            raise InvalidInstance(_unknown("concurrency_limit", concurrency_limit, "concurrency_limits", self.places))


def _unknown(field: str, key: str, table: str, known: Mapping[str, object]) -> str:
    name = limit_name(key)
    names = f"the known ones are {', '.join(sorted(known))}" if known else "none is known"
    return f"{field}: there is no limit {name!r}: {names}; define it as [{table}.{name}] in the workers' configuration"
