"""When schedules tick: across changes of clocks, after nobody was there, and what is no schedule at all."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gendurable.core.schedules import MOST, Round, Schedule, check_cron, check_timezone, due

# Berlin's clocks go from 02:00 to 03:00 on 30 March 2031 (01:00 UTC), and from 03:00 to 02:00 on 26 October (01:00 UTC).
SPRING = datetime(2031, 3, 30, tzinfo=UTC)
AUTUMN = datetime(2031, 10, 26, tzinfo=UTC)
DAY = timedelta(days=1)


def schedule(cron: str, timezone: str = "Europe/Berlin", **about: Any) -> Schedule:
    return Schedule(name="s", cron=cron, timezone=timezone, fsm="f", state={}, **about)


def ticks_of(cron: str, begin: datetime, length: timedelta = DAY, timezone: str = "Europe/Berlin") -> list[str]:
    found = []
    for tick in schedule(cron, timezone).ticks(begin):
        if tick > begin + length:
            return found
        found.append(f"{tick:%d %H:%M}")
    return found


# Changes of clocks. Instants are in UTC.


def test_a_nightly_time_is_the_same_on_the_clock_before_and_after_a_change():
    assert ticks_of("0 4 * * *", SPRING - DAY, 3 * DAY) == ["29 03:00", "30 02:00", "31 02:00"]
    assert ticks_of("0 4 * * *", AUTUMN - DAY, 3 * DAY) == ["25 02:00", "26 03:00", "27 03:00"]


def test_a_time_that_a_night_does_not_have_comes_at_the_next_there_is():
    assert ticks_of("30 2 * * *", SPRING - DAY, 3 * DAY) == ["29 01:30", "30 01:00", "31 00:30"]
    assert ticks_of("0 2,3 * * *", SPRING, timedelta(hours=20)) == ["30 01:00"], "once, though both times fall on it"


def test_a_time_that_a_night_has_twice_comes_once():
    assert ticks_of("30 2 * * *", AUTUMN - DAY, 3 * DAY) == ["25 00:30", "26 00:30", "27 01:30"]


def test_what_goes_by_the_minute_goes_by_elapsed_time():
    assert ticks_of("*/30 * * * *", SPRING, timedelta(hours=2)) == ["30 00:30", "30 01:00", "30 01:30", "30 02:00"]
    assert ticks_of("*/30 * * * *", AUTUMN, timedelta(hours=2)) == ["26 00:30", "26 01:00", "26 01:30", "26 02:00"]


def test_a_tick_of_the_first_of_two_equal_hours_does_not_come_again_in_the_second():
    in_the_second = AUTUMN + timedelta(hours=1, minutes=10)
    assert ticks_of("30 2 * * *", in_the_second, 2 * DAY) == ["27 01:30"]


@pytest.mark.parametrize("cron", ["30 2 * * *", "*/7 * * * *", "0 2,3 * * *", "15 * * * *", "0 0 1 * MON"])
@pytest.mark.parametrize("change", [SPRING, AUTUMN])
def test_ticks_are_the_same_wherever_one_begins_to_look(cron: str, change: datetime):
    begin, end = change - DAY, change + DAY
    every = schedule(cron)
    whole = every.newest(begin, end, 10_000)
    assert whole == sorted(set(whole))
    for minutes in range(0, 2 * 24 * 60, 13):
        start = begin + timedelta(minutes=minutes)
        assert every.newest(start, end, 10_000) == [tick for tick in whole if tick > start]


# After nobody was there.

NOW = datetime(2031, 5, 5, 12, 0, 30, tzinfo=UTC)


def looked(catch_up: str, last: datetime, cron: str = "0 * * * *", now: datetime = NOW) -> Round | None:
    return due(schedule(cron, "UTC", catch_up=catch_up), last, now)


@pytest.mark.parametrize("catch_up", ["skip", "latest", "all"])
def test_a_tick_that_is_on_time_is_made_whatever_the_policy(catch_up: str):
    tick = NOW.replace(second=0)
    assert looked(catch_up, NOW - timedelta(hours=1)) == Round((tick,), None, tick)
    assert looked(catch_up, tick) is None, "made already"
    assert looked(catch_up, NOW - timedelta(minutes=20), now=NOW - timedelta(minutes=1)) is None, "not yet"


def test_what_was_missed_is_left_out_or_made_up_for_as_one_wants():
    last, now = NOW - timedelta(hours=5), NOW - timedelta(minutes=10)
    first, newest = (NOW.replace(second=0) - timedelta(hours=hours) for hours in (4, 1))
    assert looked("skip", last, now=now) == Round((), first, newest)
    assert looked("latest", last, now=now) == Round((newest,), first, newest)
    every = tuple(newest - timedelta(hours=hours) for hours in (3, 2, 1, 0))
    assert looked("all", last, now=now) == Round(every, None, newest)


def test_a_tick_on_time_is_made_although_others_were_missed():
    tick = NOW.replace(second=0)
    assert looked("skip", NOW - timedelta(hours=5)) == Round((tick,), tick - timedelta(hours=4), tick)


def test_years_of_minutes_are_neither_all_made_nor_all_looked_at():
    last = NOW - timedelta(days=3650)
    found = looked("all", last, "* * * * *")
    assert found is not None
    assert len(found.made) == MOST
    assert (found.made[-1], found.missed) == (NOW.replace(second=0), last.replace(second=0) + timedelta(minutes=1))
    assert looked("latest", last, "* * * * *") == Round((found.newest,), found.missed, found.newest)


def test_what_comes_once_in_four_years_is_found():
    leap_day = datetime(2028, 2, 29, tzinfo=UTC)
    assert looked("latest", datetime(2025, 1, 1, tzinfo=UTC), "0 0 29 2 *") == Round((leap_day,), None, leap_day)


# What is no schedule.


@pytest.mark.parametrize(
    ("cron", "complaint"),
    [
        ("", "has not five fields"),
        ("0 3 * *", "has not five fields"),
        ("0 0 3 * * *", "has not five fields"),
        ("@daily", "has not five fields"),
        ("61 3 * * *", "has a bad minute"),
        ("0 25 * * *", "has a bad hour"),
        ("0 3 * * MOON", "has a bad day-of-week"),
        ("0 3 31 2 *", "has a bad day-of-month"),
        ("0 0 */31 * MON#5", "never comes"),
    ],
)
def test_what_is_no_cron_expression_is_refused(cron: str, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        check_cron(cron)


@pytest.mark.parametrize(
    "zone", ["", "Europe/Atlantis", "berlin", "../etc/passwd", "/etc/localtime", "a\0b", "x" * 5000]
)
def test_what_is_no_time_zone_is_refused(zone: str):
    with pytest.raises(ValueError, match="is no time zone here"):
        check_timezone(zone)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York"])
def test_a_time_zone_is_taken(zone: str):
    assert check_timezone(zone) == zone
