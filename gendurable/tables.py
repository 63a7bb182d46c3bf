"""Tables of tables in the configuration file: `[schedules.nightly]`, `[rate_limits.stripe]`."""

import difflib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from gendurable.core.limiters import RateLimit, check_limit_name
from gendurable.core.limits import show
from gendurable.errors import InvalidInstance
from gendurable.readers import Reader, number, read_name, read_positive

# A bucket counts in floating point, exactly so far, and its columns have 32 bits.
MAX_TOKENS = 1_000_000_000
LONGEST_PERIOD = timedelta(days=366)


def tables(raw: Any, keys: Mapping[str, bool]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables of a table by their names; `keys` are those that each may have, and whether it must."""
    example = " and ".join(f"{key} = …" for key, required in keys.items() if required)
    if not isinstance(raw, Mapping):
        raise ValueError(f"{show(raw)} is no table: write one for each name, and in it {example}")
    for name, given in raw.items():
        read_name(name)
        if not isinstance(given, Mapping):
            raise ValueError(f"{name}: {show(given)} is no table: write {example} in one of that name")
        for key in given:
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(keys)}"
                raise ValueError(f"{name}.{key}: no such setting; {hint}")
        for key, required in keys.items():
            if required and key not in given:
                raise ValueError(f"{name}.{key} is missing: write {example}")
        yield name, given


def inside(name: str, key: str, read: Reader, given: Mapping[str, Any], default: Any = None) -> Any:
    """Read one setting of a table, if it is there."""
    if key not in given:
        return default
    try:
        return read(given[key])
    except ValueError as error:
        raise ValueError(f"{name}.{key}: {error}") from None


def read_rate_limits(raw: Any) -> Mapping[str, RateLimit]:
    """Return rate limits: `allowed` tokens per `period`, and the `burst` that a bucket holds."""
    return MappingProxyType(
        {
            _limit_name(name): _rate_limit(name, given)
            for name, given in tables(raw, {"allowed": True, "period": True, "burst": False})
        }
    )


def read_concurrency_limits(raw: Any) -> Mapping[str, int]:
    """Return concurrency limits: `limit` executions at once."""
    return MappingProxyType(
        {
            _limit_name(name): inside(name, "limit", number(1, MAX_TOKENS), given)
            for name, given in tables(raw, {"limit": True})
        }
    )


def _rate_limit(name: str, given: Mapping[str, Any]) -> RateLimit:
    allowed = inside(name, "allowed", number(1, MAX_TOKENS), given)
    period = inside(name, "period", read_positive, given)
    if period > LONGEST_PERIOD:
        raise ValueError(f"{name}.period: {show(given['period'])} is too long: give at most {LONGEST_PERIOD.days}d")
    return RateLimit(allowed, period, inside(name, "burst", number(1, MAX_TOKENS), given, allowed))


def _limit_name(name: str) -> str:
    try:
        return check_limit_name("name", name)
    except InvalidInstance as error:
        raise ValueError(str(error).removeprefix("name: ").partition(" (a tenant")[0]) from None
