"""Ticks of schedules: one instance each, however many workers look at it and wherever one of them dies."""

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from races import GATE, NewConn, changed, shut_gate
from support import Background, until

from gendurable import Context, Job
from gendurable.core.registry import Registry
from gendurable.core.schedules import Schedule
from gendurable.db import store
from gendurable.db.connection import Connection, Database
from gendurable.errors import ConfigError
from gendurable.events import Event, ScheduleTicked
from gendurable.runtime.scheduling import Planned, Scheduler, make_ticks, plan

MINUTE = timedelta(minutes=1)


class Report(Job[dict[str, Any]], name="report", queue="reports"):
    def perform(self, ctx: Context[dict[str, Any]]) -> None: ...


class NewReport(Job[dict[str, int]], name="report", version=2):
    def perform(self, ctx: Context[dict[str, int]]) -> None: ...


REGISTRY = Registry([Report, NewReport])


def schedule(**about: Any) -> Schedule:
    defaults: dict[str, Any] = {"name": "s", "cron": "* * * * *", "timezone": "UTC", "fsm": "report", "version": 1}
    return Schedule(**{**defaults, "state": {"n": 1}, **about})


@pytest.fixture
def planned(conn: Connection) -> Planned:
    """A schedule with one tick that is due."""
    [planned] = plan([schedule()], REGISTRY)
    store.open_schedules(conn, names=["s"])
    set_back(conn, MINUTE)
    return planned


def set_back(conn: Connection, by: timedelta) -> None:
    """Let a schedule have made its newest tick so long ago, in whole minutes."""
    conn.execute("update schedules set last_tick = date_trunc('minute', now()) - %s", [by])


def instances(conn: Connection) -> list[tuple[Any, ...]]:
    return conn.execute("select fsm, fsm_version, queue, state, eligible_at from gen_durable order by id").fetchall()


def last_tick(conn: Connection) -> datetime:
    [(tick,)] = conn.execute("select last_tick from schedules").fetchall()
    return tick


# One worker.


def test_a_tick_becomes_an_instance_that_is_due_since_then(conn: Connection, planned: Planned):
    made = make_ticks(conn, planned)
    assert made is not None
    assert instances(conn) == [("report", 1, "reports", {"n": 1}, tick) for tick in made.made]
    assert last_tick(conn) == made.newest == made.made[-1]
    assert make_ticks(conn, planned) is None


def test_a_schedule_that_is_new_begins_now(conn: Connection):
    emitted: list[Event] = []
    scheduler = Scheduler(plan([schedule()], REGISTRY), emitted.append)
    assert scheduler.run_once(conn) == set()
    assert instances(conn) == []
    assert abs(last_tick(conn) - datetime.now(UTC)) < MINUTE
    assert emitted == []


def test_the_scheduler_makes_what_was_due_before_it_came_and_tells(conn: Connection, planned: Planned):
    emitted: list[Event] = []
    scheduler = Scheduler([planned], emitted.append)
    assert scheduler.run_once(conn) == {"reports"}
    assert scheduler.run_once(conn) == set()
    [event] = emitted
    assert isinstance(event, ScheduleTicked)
    assert (event.schedule, event.fsm, event.count, event.missed) == ("s", "report", 1, None)
    assert event.tick == instances(conn)[0][4].isoformat()


def test_a_schedule_whose_time_has_not_come_costs_no_statement(conn: Connection, monkeypatch: pytest.MonkeyPatch):
    for schedules in ([], [schedule(cron="0 0 1 1 *")]):
        scheduler = Scheduler(plan(schedules, REGISTRY), lambda _: None)
        scheduler.run_once(conn)
        with monkeypatch.context() as patched:
            patched.setattr(store, "_run", lambda *_: pytest.fail("it asked the database"))
            assert scheduler.run_once(conn) == set()


def test_a_schedule_that_somebody_deletes_begins_anew(conn: Connection, planned: Planned):
    scheduler = Scheduler([planned], lambda _: None)
    scheduler.run_once(conn)
    conn.execute("delete from schedules")
    scheduler._next["s"] = datetime.now(UTC) - MINUTE
    for _ in range(2):
        scheduler.run_once(conn)
    assert last_tick(conn) > datetime.now(UTC) - MINUTE


@pytest.mark.parametrize(("catch_up", "count"), [("skip", 1), ("latest", 1), ("all", 10)])
def test_missed_ticks_are_caught_up_with_as_the_schedule_says(conn: Connection, catch_up: str, count: int):
    [planned] = plan([schedule(catch_up=catch_up)], REGISTRY)
    store.open_schedules(conn, names=["s"])
    set_back(conn, 10 * MINUTE)
    made = make_ticks(conn, planned)
    assert made is not None
    assert count <= len(instances(conn)) <= count + 1, "a minute may have passed meanwhile"
    assert (made.missed is None) == (catch_up == "all")
    assert last_tick(conn) == made.newest


def test_a_paused_queue_gets_its_instances_all_the_same(conn: Connection, planned: Planned):
    store.pause_queue(conn, queue="reports")
    assert make_ticks(conn, planned)
    assert len(instances(conn)) == 1


# Two workers and one tick.


def test_a_tick_that_another_worker_is_just_making_is_left_to_it(new_conn: NewConn, planned: Planned):
    one, other = new_conn(), new_conn()
    with one.transaction():
        assert make_ticks(one, planned) is not None
        assert make_ticks(other, planned) is None, "and nobody waits"
    assert make_ticks(other, planned) is None
    assert len(instances(other)) == 1


def test_whoever_looked_before_the_other_committed_finds_the_tick_made(
    new_conn: NewConn, background: Background, planned: Planned
):
    holder, late, other = new_conn(), new_conn(), new_conn()
    gate = ("where name = %(name)s", f"where name = %(name)s and {GATE}")

    def locked(*changes: tuple[str, str]) -> datetime:
        """The tick that a lock reads whose statement began before another worker made it, and ended after."""
        statement = changed(lambda conn: store.lock_schedule(conn, name="s"), gate, *changes)
        with shut_gate(holder):
            future = background.start_blocked(late, statement, late)
            other.execute("update schedules set last_tick = last_tick + interval '1 second'")
        [(_, read, _)] = future.result(timeout=20)
        return read

    assert locked() == last_tick(other)
    assert locked(("for no key update skip locked", "")) < last_tick(other), "unlocked it would be made twice"


def test_many_workers_at_once_make_one_instance(new_conn: NewConn, background: Background, conn: Connection):
    [planned] = plan([schedule(catch_up="latest")], REGISTRY)
    store.open_schedules(conn, names=["s"])
    for _ in range(20):
        conn.execute("truncate gen_durable cascade")
        set_back(conn, 2 * MINUTE)
        before = last_tick(conn)
        futures = [background.start(make_ticks, new_conn(), planned) for _ in range(4)]
        made = [each for future in futures if (each := future.result(timeout=20)) is not None]
        assert len(instances(conn)) == len(made) <= (last_tick(conn) - before) / MINUTE
        assert made


def test_a_worker_that_dies_between_the_two_leaves_neither(dsn: str, conn: Connection, planned: Planned):
    before = last_tick(conn)
    with closing(Database(dsn).connect("dies")) as dying:
        pid = dying.info.backend_pid
        with pytest.raises(psycopg.OperationalError), dying.transaction():
            assert make_ticks(dying, planned) is not None
            conn.execute("select pg_terminate_backend(%s)", [pid])
            until(lambda: not conn.execute("select from pg_stat_activity where pid = %s", [pid]).fetchall(), "its end")
            dying.execute("select 1")
    assert (instances(conn), last_tick(conn)) == ([], before)
    assert make_ticks(conn, planned) is not None
    assert len(instances(conn)) == 1


# What is no schedule for these machines.


def test_without_a_version_the_newest_machine_is_meant():
    [planned] = plan([schedule(version=None, queue="q", priority=7)], REGISTRY)
    assert (planned.new.fsm_version, planned.new.queue, planned.new.priority) == (2, "q", 7)


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        (
            {"fsm": "repotr"},
            r"schedules\.s\.fsm: no machine 'repotr version 1' is loaded; there are report@1, report@2",
        ),
        ({"version": 3}, r"schedules\.s\.fsm: no machine 'report version 3' is loaded"),
        ({"version": 2, "state": {"n": "many"}}, r"schedules\.s\.state: report refuses it: .*n"),
    ],
)
def test_a_schedule_that_the_machines_do_not_bear_out_is_refused(about: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        plan([schedule(**about)], REGISTRY)
