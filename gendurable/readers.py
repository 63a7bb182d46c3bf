"""What reads one setting: text from a flag or a variable, or a TOML value.

Each raises ValueError with what is wrong and the remedy.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from gendurable.core.duration import ZERO, parse_duration
from gendurable.core.limits import check_name, show
from gendurable.errors import InvalidInstance

MAX_QUEUE_SIZE = 1000
MAX_PREFETCH = 10_000
MAX_IDENTIFIER_BYTES = 63
MAX_PORT = 65_535

Reader: TypeAlias = Callable[[Any], Any]

# What the system's text becomes in Python where it is not UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_text(raw: Any) -> str:
    """Return text that Postgres and the system can take."""
    if not isinstance(raw, str):
        raise ValueError(f"{show(raw)} is no text: put it in quotes")
    if "\0" in raw:
        raise ValueError("it has a NUL character: leave it out")
    if _SURROGATE.search(raw):
        raise ValueError(f"{show(raw)} is not UTF-8: correct it")
    return raw


def read_dsn(raw: Any) -> str:
    """Return a DSN. Its value is never repeated in a message: it may hold a password."""
    if not isinstance(raw, str) or "\0" in raw:
        raise ValueError("it is no text: write postgresql://user@host/db or libpq's key=value form, in quotes")
    return raw


def read_identifier(raw: Any) -> str:
    """Return the name of a schema."""
    if not 1 <= len(read_text(raw).encode()) <= MAX_IDENTIFIER_BYTES:
        raise ValueError(f"{show(raw)} is no schema name: give 1 to {MAX_IDENTIFIER_BYTES} bytes of text")
    return str(raw)


def read_truth(raw: Any) -> bool:
    """Return true or false."""
    if isinstance(raw, bool):
        return raw
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    try:
        return words[str(raw).lower()]
    except KeyError:
        raise ValueError(f"{show(raw)} is neither true nor false: write one of them") from None


def read_positive(raw: Any) -> timedelta:
    """Return a duration longer than nothing."""
    if isinstance(raw, timedelta):
        duration = raw
    elif isinstance(raw, int | float) and not isinstance(raw, bool):
        raise ValueError(f'{show(raw)} has no unit: write it as text, such as "500ms", "30s", "10m", "2h" or "7d"')
    else:
        duration = parse_duration(read_text(raw))
    if duration <= ZERO:
        raise ValueError(f"{show(raw)} is not longer than nothing: give more")
    return duration


def read_positive_or_off(raw: Any) -> timedelta | None:
    """Return a duration, or None for `off`."""
    return None if raw == "off" else read_positive(raw)


def number(low: int, high: int) -> Reader:
    """Return what reads a whole number within bounds."""

    def read(raw: Any) -> int:
        text = str(raw).strip()
        if not isinstance(raw, int | str) or isinstance(raw, bool) or not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise ValueError(f"{show(raw)} is no whole number: give one from {low} to {high}")
        if not low <= int(text) <= high:
            raise ValueError(f"{text} is out of range: give a number from {low} to {high}")
        return int(text)

    return read


def read_prefetch(raw: Any) -> int | str:
    """Return a number from zero, or `auto`."""
    if raw == "auto":
        return "auto"
    try:
        return int(number(0, MAX_PREFETCH)(raw))
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def one_of(*choices: str) -> Reader:
    """Return what reads one of some words."""

    def read(raw: Any) -> str:
        text = read_text(raw).lower()
        if text not in choices:
            raise ValueError(f"{show(raw)} is unknown: write {', '.join(choices[:-1])} or {choices[-1]}")
        return text

    return read


def read_name(raw: Any) -> str:
    """Return the name of a worker or queue."""
    try:
        return check_name("name", raw)
    except InvalidInstance as error:
        raise ValueError(str(error).removeprefix("name: ")) from None


def read_paths(raw: Any) -> tuple[str, ...]:
    """Return dotted paths; each text may hold several, separated by commas."""
    parts = [raw] if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{show(raw)} is no list of dotted paths: write package.module or package.module:attribute")
    return tuple(dict.fromkeys(path.strip() for part in parts for path in part.split(",") if path.strip()))


def read_queues(raw: Any) -> Mapping[str, int]:
    """Return queues and their sizes, from a table or from `default=10,checkout=5`."""
    pairs = list(raw.items()) if isinstance(raw, Mapping) else list(_queue_pairs(raw))
    if not pairs:
        raise ValueError("no queue is named: write them as default=10,checkout=5")
    sizes: dict[str, int] = {}
    for given, size in pairs:
        queue = read_name(given)
        if queue in sizes:
            raise ValueError(f"queue {show(queue)} is named twice: give it one size")
        try:
            sizes[queue] = number(1, MAX_QUEUE_SIZE)(size)
        except ValueError as error:
            raise ValueError(f"the size of queue {show(queue)}: {error}") from None
    return MappingProxyType(sizes)


def _queue_pairs(raw: Any) -> Iterator[tuple[str, str]]:
    parts = [raw] if isinstance(raw, str) else raw
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{show(raw)} names no queues: write them as default=10,checkout=5")
    for pair in (pair.strip() for part in parts for pair in part.split(",") if pair.strip()):
        queue, equals, size = pair.rpartition("=")
        if not equals:
            raise ValueError(f"{show(pair)} has no size: write {show(f'{pair}=10')}")
        yield queue.strip(), size.strip()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPV6]:PORT`; ValueError says why it is no address."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > MAX_PORT:
        raise ValueError(f"{show(text)} is no address: write HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464")
    return match[1] or match[2], int(match[3])


def read_address(raw: Any) -> str | None:
    """Return `HOST:PORT`, or None for `off`."""
    if raw == "off":
        return None
    parse_address(read_text(raw))
    return str(raw)


def read_path(raw: Any) -> Path:
    """Return a path in the file system; `~` is the home folder."""
    if not read_text(raw).strip():
        raise ValueError(f"{show(raw)} is empty: give a path, or leave the setting out")
    return Path(raw).expanduser()
