"""Scheduling: a tick of a schedule becomes an instance, once, however many workers see it."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from attrs import evolve, frozen

from gendurable.core.duration import ZERO
from gendurable.core.fsm import definition
from gendurable.core.instance import NewInstance
from gendurable.core.registry import Registry
from gendurable.core.schedules import Round, Schedule, due
from gendurable.db import store
from gendurable.db.connection import Connection, set_locally
from gendurable.errors import ConfigError, InvalidInstance
from gendurable.events import Listener, ScheduleTicked


@frozen
class Planned:
    """A schedule, and what each of its ticks inserts."""

    schedule: Schedule
    new: NewInstance


def plan(schedules: Iterable[Schedule], registry: Registry) -> list[Planned]:
    """Find the machines of schedules and check their states; ConfigError."""
    return [Planned(each, _new(each, registry)) for each in schedules]


def _new(schedule: Schedule, registry: Registry) -> NewInstance:
    where = f"schedules.{schedule.name}"
    machine = registry.find(schedule.fsm, schedule.version)
    if machine is None:
        wanted = schedule.fsm if schedule.version is None else f"{schedule.fsm} version {schedule.version}"
        raise ConfigError(
            f"{where}.fsm: no machine {wanted!r} is loaded; there are {', '.join(registry.capabilities)}: correct it, "
            "or add its module to fsms"
        )
    cls = type(machine)
    try:
        return cls.new(schedule.state, queue=schedule.queue, priority=schedule.priority)
    except InvalidInstance as error:
        raise ConfigError(f"{where}.state: {definition(cls).name} refuses it: {error}") from None


class Scheduler:
    """Makes the ticks of schedules whose time has come; asks the database nothing before that."""

    def __init__(self, planned: Iterable[Planned], emit: Listener) -> None:
        """Look at these schedules; what the database knows of them is read by the first round."""
        self._planned = {each.schedule.name: each for each in planned}
        self._emit = emit
        self._next: dict[str, datetime] = {}
        # How far the database's clock is ahead of ours.
        self._offset = ZERO

    def run_once(self, conn: Connection) -> set[str]:
        """Make what is due; return the queues in which instances were inserted."""
        if len(self._next) < len(self._planned):
            self._begin(conn)
        now = datetime.now(UTC) + self._offset
        queues: set[str] = set()
        for name in [name for name, tick in self._next.items() if tick <= now]:
            planned = self._planned[name]
            made = make_ticks(conn, planned)
            if made is None:
                self._refresh(conn)  # somebody else has made it or is at it, or our clock is ahead
                continue
            self._next[name] = _next_tick(planned.schedule, made.newest)
            missed = None if made.missed is None else made.missed.isoformat()
            self._emit(ScheduleTicked(name, planned.new.fsm, made.newest.isoformat(), len(made.made), missed))
            if made.made:
                queues.add(planned.new.queue)
        return queues

    def _begin(self, conn: Connection) -> None:
        """A schedule that is seen for the first time begins now: it has missed nothing."""
        store.open_schedules(conn, names=sorted(self._planned))
        self._refresh(conn)

    def _refresh(self, conn: Connection) -> None:
        rows = store.list_schedules(conn).all()
        ours = [row for row in rows if row.name in self._planned]
        self._next = {row.name: _next_tick(self._planned[row.name].schedule, row.last_tick) for row in ours}
        for row in ours:
            self._offset = row.now - datetime.now(UTC)


def _next_tick(schedule: Schedule, last: datetime) -> datetime:
    return next(schedule.ticks(last), datetime.max.replace(tzinfo=UTC))


def make_ticks(conn: Connection, planned: Planned, *, ahead: timedelta = ZERO) -> Round | None:
    """Insert the instances of a schedule's due ticks; None if there are none, or somebody else is just at it.

    The row of the schedule is locked, and what it says then is what counts: a tick that another worker has made stands
    there. It moves on in the transaction that inserts: a worker that dies in between leaves both or none.
    """
    name = planned.schedule.name
    with conn.transaction():
        set_locally(conn)
        row = store.lock_schedule(conn, name=name, ahead=ahead).one()
        made = None if row is None else due(planned.schedule, row.last_tick, row.now)
        if made is None:
            return None
        if made.made:
            store.insert(conn, [evolve(planned.new, eligible_at=tick) for tick in made.made], ahead=ahead)
        store.advance_schedule(conn, name=name, tick=made.newest)
    return made
