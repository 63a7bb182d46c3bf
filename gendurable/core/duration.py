"""Durations as people give them: a timedelta or a number of seconds in Python, a number with a unit in text."""

import re
from datetime import timedelta

from gendurable.core.limits import show

Duration = timedelta | int | float

ZERO = timedelta(0)

# Beyond this an instant could leave the range of Python's datetime, and the row could not be read back.
LONGEST = timedelta(days=36_525)


def to_timedelta(value: object) -> timedelta:
    """Return `value` as a timedelta; ValueError says why it is none."""
    if isinstance(value, timedelta):
        duration = value
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{show(value)} is no duration: give a timedelta or a number of seconds")
    elif not abs(value) <= LONGEST.total_seconds():  # so asked, NaN and integers beyond any float are refused too
        raise ValueError(f"{show(value)} seconds is no duration: give at most {LONGEST.days} days")
    else:
        duration = timedelta(seconds=value)
    if abs(duration) > LONGEST:
        raise ValueError(f"{show(value)} is too long: give at most {LONGEST.days} days")
    return duration


_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_TEXT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(ms|s|m|h|d)")
_HINT = "write a number with a unit, such as 500ms, 30s, 10m, 2h or 7d"


def parse_duration(text: str) -> timedelta:
    """Return what `500ms`, `30s`, `10m`, `2h` or `7d` means; ValueError says why it is no duration."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{show(text)} is no duration: {_HINT}")
    return to_timedelta(float(match[1]) * _UNITS[match[2]])


def format_duration(duration: timedelta) -> str:
    """Return a duration as `parse_duration` reads it, in the largest unit that leaves a whole number from 2 on."""
    milliseconds = duration / timedelta(milliseconds=1)
    for unit, size in reversed(_UNITS.items()):
        count = milliseconds / (size * 1000)
        if count.is_integer() and (count > 1 or unit == "ms" or (unit == "s" and count == 1)):
            return f"{count:.0f}{unit}"
    return f"{milliseconds:g}ms"
