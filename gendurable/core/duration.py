"""Durations as people give them: a timedelta or a number of seconds."""

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
