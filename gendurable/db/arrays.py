"""Lists as the text of Postgres arrays: batches travel so, and the driver's own way costs ten times as much."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")


def integers(values: Iterable[int | None]) -> str:
    """Write integers as an array; None is null."""
    return "{" + ",".join(["null" if value is None else str(value) for value in values]) + "}"


def texts(values: Iterable[str | None]) -> str:
    """Write texts as an array; None is null. Quoted, so that nothing in them counts as syntax."""
    return "{" + ",".join(["null" if value is None else _quoted(value) for value in values]) + "}"


def binaries(values: Iterable[bytes | None]) -> str:
    """Write bytes as an array, in hexadecimal; None is null. How the driver writes them is up to a server setting."""
    return "{" + ",".join(["null" if value is None else f'"\\\\x{value.hex()}"' for value in values]) + "}"


def intervals(values: Iterable[timedelta | None]) -> str:
    """Write durations as an array, in hours: a day has as many of them in every time zone. None is null."""
    return "{" + ",".join(["null" if value is None else _hours(value) for value in values]) + "}"


def sparse(write: Callable[[list[Any]], T], values: list[Any]) -> T:
    """Write an array that is mostly nulls: an empty one if it is nothing else."""
    return write(values if any(value is not None for value in values) else [])


def _hours(value: timedelta) -> str:
    if not value:
        return "0"
    # Of seconds alone Postgres 14 takes no more than 68 years.
    minutes, seconds = divmod(value.seconds, 60)
    return f"{value.days * 24 + minutes // 60}:{minutes % 60:02}:{seconds:02}.{value.microseconds:06}"


def _quoted(text: str) -> str:
    if "\\" in text:
        text = text.replace("\\", "\\\\")
    if '"' in text:
        text = text.replace('"', '\\"')
    return f'"{text}"'
