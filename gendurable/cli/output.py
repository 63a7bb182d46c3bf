"""What people and programs read on stdout: tables, ages, JSON. Nothing from a row reaches a terminal unescaped."""

import json
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import click

_GAP = "  "
_CUT = "…"
_NARROWEST = 6


def echo(text: str = "") -> None:
    """Print one line of data."""
    click.echo(text)


def note(text: str) -> None:
    """Print one line for people, beside the data."""
    click.echo(text, err=True)


def on_terminal() -> bool:
    """Tell whether a person reads stdout."""
    return sys.stdout is not None and sys.stdout.isatty()


def printable(value: Any) -> str:
    """Return text that cannot move a cursor, start a line or hide: whatever is not printable, escaped."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def confirm(question: str) -> None:
    """Ask a person; a program must have said --yes."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError(f"{question} There is nobody to ask: add --yes")
    click.confirm(question, abort=True, err=True)


# JSON.

# The rest of the control characters, which JSON itself lets through, may still steer a terminal.
_STEERING = re.compile("[\x7f-\x9f]")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a document that every program reads, in whatever encoding stdout has."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    text = json.dumps(value, default=_plain, ensure_ascii=encoding != "utf8", indent=indent)
    return _STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def emit(document: Any) -> None:
    """Print a JSON document: indented for a person, in one line for a program."""
    echo(to_json(document, indent=2 if on_terminal() else None))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return key_text(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def key_text(key: bytes) -> str:
    """Return a unique key as text where it is text, else as Postgres writes bytes."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return rf"\x{key.hex()}"


# Times.


def ago(instant: datetime | None, now: datetime) -> str:
    """Return how long ago an instant was, or `in 5s`."""
    if instant is None:
        return ""
    age = now - instant
    return f"in {span(-age)}" if age < timedelta(0) else span(age)


def span(duration: timedelta) -> str:
    """Return a duration in its two largest units: `3m12s`."""
    seconds = int(duration.total_seconds())
    days, hours, minutes = seconds // 86_400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{seconds % 60}s" if minutes else f"{seconds}s"


# Tables.

_COLOURS = {"failed": "red", "done": "green", "executing": "cyan", "runnable": "yellow"}


def coloured() -> bool:
    """Tell whether colours are welcome."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
    wrapped: bool = False,
) -> None:
    """Print rows under their headings; cut to the terminal when there is one.

    `right` are columns of numbers, `whole` those that are never cut; `wrapped`: the last one goes on in the next line.
    """
    cells = [[printable("" if value is None else value) for value in row] for row in rows]
    headings = [name.upper() for name in columns]
    widths = [max(map(_width, column)) for column in zip(headings, *cells, strict=True)]
    if on_terminal():
        floors = [
            width if name in (*right, *whole) else max(_NARROWEST, _width(heading))
            for name, heading, width in zip(columns, headings, widths, strict=True)
        ]
        _shrink(widths, floors, shutil.get_terminal_size().columns)
    paint = coloured()
    _print_row(headings, widths, [name in right for name in columns], bold=paint)
    for row in cells:
        first, *others = textwrap.wrap(row[-1], widths[-1]) if wrapped else row[-1:]
        _print_row([*row[:-1], first], widths, [name in right for name in columns], colours=paint)
        for line in others:
            echo(" " * (sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)) + line)


def _print_row(
    cells: Sequence[str],
    widths: Sequence[int],
    to_the_right: Sequence[bool],
    *,
    bold: bool = False,
    colours: bool = False,
) -> None:
    parts = []
    for cell, width, right in zip(cells, widths, to_the_right, strict=True):
        shown = _fit(cell, width)
        padding = " " * (width - _width(shown))
        if bold:
            shown = click.style(shown, bold=True)
        elif colours and cell in _COLOURS:
            shown = click.style(shown, fg=_COLOURS[cell])
        parts.append(padding + shown if right else shown + padding)
    echo(_GAP.join(parts).rstrip())


def _shrink(widths: list[int], floors: Sequence[int], room: int) -> None:
    """Take from the widest columns until the table fits, as far as that goes."""
    while sum(widths) + len(_GAP) * (len(widths) - 1) > room:
        candidates = [place for place, width in enumerate(widths) if width > floors[place]]
        if not candidates:
            return
        widths[max(candidates, key=widths.__getitem__)] -= 1


def _fit(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    kept = ""
    for char in text:
        if _width(kept + char) > width - 1:
            break
        kept += char
    return kept + _CUT


def _width(text: str) -> int:
    """Return how many places text takes: none for combining marks, two for wide letters."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def facts(pairs: Mapping[str, Any]) -> None:
    """Print names and values, one per line."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        heading = f"{name:<{width}}"
        shown = printable("" if value is None else value)
        if coloured():
            heading = click.style(heading, bold=True)
            shown = click.style(shown, fg=_COLOURS[shown]) if shown in _COLOURS else shown
        echo(f"{heading}{_GAP}{shown}".rstrip())
