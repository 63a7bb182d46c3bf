"""Arrays that we write as text ourselves are read by the server as what they were."""

from datetime import timedelta
from typing import Any

import pytest

from gendurable.core.duration import LONGEST
from gendurable.db.arrays import binaries, integers, intervals, texts
from gendurable.db.connection import Connection

TEXTS = ["", "a", "null", "NULL", '"', "\\", '\\"', "{}", "{a,b}", ",", " ", "\n\t", "ü✓𝄞", "%s", "\\x41", "'"]
DURATIONS = [
    timedelta(0),
    timedelta(microseconds=1),
    timedelta(seconds=59, microseconds=999_999),
    timedelta(seconds=60),
    timedelta(minutes=59, seconds=59),
    timedelta(hours=23, minutes=59),
    timedelta(days=1),
    timedelta(days=40, hours=3, minutes=2, seconds=1, microseconds=500_000),
    LONGEST,
]


@pytest.mark.parametrize(
    ("write", "kind", "values"),
    [
        (integers, "bigint", [0, 1, -1, 2**63 - 1, None]),
        (texts, "text", [*TEXTS, None]),
        (binaries, "bytea", [bytes(range(256)), b"", b"\\", b"\0", b"'\"{},", None]),
        (intervals, "interval", [*DURATIONS, None]),
    ],
)
def test_what_is_written_is_read(conn: Connection, write: Any, kind: str, values: list[Any]):
    for given in ([], values, [None], *([value] for value in values)):
        assert conn.execute(f"select %s::{kind}[]", [write(given)]).fetchone() == (given,)


def test_a_day_has_twenty_four_hours_in_every_time_zone(conn: Connection):
    conn.execute("set TimeZone = 'Europe/Berlin'")
    query = "select timestamptz '2024-03-30 12:00 UTC' + (%s::interval[])[1] = timestamptz '2024-03-31 12:00 UTC'"
    assert conn.execute(query, [intervals([timedelta(days=1)])]).fetchone() == (True,)


def test_the_longest_duration_is_one_that_every_server_reads():
    # Postgres 14 refuses more than 2**31 seconds, if they are written as seconds.
    assert intervals([LONGEST]) == "{876600:00:00.000000}"
