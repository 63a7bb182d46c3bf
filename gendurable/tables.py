"""Tables of tables in the configuration file: `[schedules.nightly]`."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from gendurable.core.limits import show
from gendurable.readers import Reader, read_name


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
