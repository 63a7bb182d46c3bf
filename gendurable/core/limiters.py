"""Names of rate and concurrency limits as rows carry them: "stripe", or "stripe:acme" for the tenant acme."""

import re
from typing import TypeAlias

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
