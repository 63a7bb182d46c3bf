"""Schedules: at which instants a cron expression ticks in its time zone, and which of them get an instance."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias
from zoneinfo import ZoneInfo

from attrs import frozen
from cronsim import CronSim, CronSimError

from gendurable.core.limits import show

CatchUp: TypeAlias = Literal["skip", "latest", "all"]
CATCH_UPS: tuple[CatchUp, ...] = ("skip", "latest", "all")

FIELDS = 5
# A tick is missed when nobody was there to make it for so long: longer than a worker takes to be replaced.
ON_TIME = timedelta(minutes=1)
# However long nobody was there, no more instances come of it than this.
MOST = 1000

FIRST_WINDOW, GROWTH = timedelta(hours=1), 8


@frozen(kw_only=True)
class Schedule:
    """What is inserted at every tick of a cron expression."""

    name: str
    cron: str
    timezone: str
    fsm: str
    version: int | None = None
    state: Mapping[str, Any]
    queue: str | None = None
    priority: int = 0
    catch_up: CatchUp = "skip"

    def ticks(self, after: datetime) -> Iterator[datetime]:
        """Yield the instants after `after` at which it ticks, in UTC.

        As cron does it: a time of day that a change of clocks leaves out comes at the next there is, one that it
        brings twice comes the first time; what is given by the minute or the hour goes by elapsed time.
        """
        for tick in CronSim(self.cron, after.astimezone(ZoneInfo(self.timezone))):
            instant = tick.astimezone(UTC)
            # In the second of two equal hours cron's own arithmetic begins with ticks of the first.
            if instant > after:
                yield instant

    def newest(self, after: datetime, until: datetime, most: int) -> list[datetime]:
        """Return the ticks after the one instant and up to the other, only the newest `most` of them.

        From behind, since there may be millions: windows that grow until they hold enough.
        """
        window = FIRST_WINDOW
        while True:
            start = max(after, until - window)
            found = []
            for tick in self.ticks(start):
                if tick > until:
                    break
                found.append(tick)
            if len(found) >= most or start == after:
                return found[-most:]
            window *= GROWTH


@frozen
class Round:
    """What one look at a schedule led to: the ticks to be made, the first that was left out, the newest that passed."""

    made: tuple[datetime, ...]
    missed: datetime | None
    newest: datetime


def due(schedule: Schedule, last: datetime, now: datetime) -> Round | None:
    """Say which ticks after `last` are to be made now; None if there was none."""
    newest = schedule.newest(last, now, 1)
    if not newest:
        return None
    match schedule.catch_up:
        case "skip":
            made = schedule.newest(max(last, now - ON_TIME), now, MOST)
        case "latest":
            made = newest
        case "all":
            made = schedule.newest(last, now, MOST)
    first = next(schedule.ticks(last))
    return Round(tuple(made), None if first in made else first, newest[0])


def check_cron(text: str) -> str:
    """Return a cron expression; ValueError says what is wrong with it."""
    if len(text.split()) != FIELDS:
        raise ValueError(f"{show(text)} has not five fields: write minute hour day month weekday, such as 0 3 * * *")
    try:
        comes = next(CronSim(text, datetime(2000, 1, 1, tzinfo=UTC)), None)
    except CronSimError as error:
        field = str(error).removeprefix("Bad ")
        raise ValueError(f"{show(text)} has a bad {field}: correct it, such as 0 3 * * *") from None
    if comes is None:
        raise ValueError(f"{show(text)} never comes: give a day that there is")
    return text


def check_timezone(text: str) -> str:
    """Return the name of a time zone; ValueError if this machine has none of that name."""
    try:
        ZoneInfo(text)
    except (ValueError, OSError, LookupError):  # what it raises depends on how the name is wrong
        raise ValueError(f"{show(text)} is no time zone here: write one such as Europe/Berlin, or UTC") from None
    return text
