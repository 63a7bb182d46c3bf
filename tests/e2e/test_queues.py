"""What a worker takes from its queues, when, how much at once, and what it leaves alone."""

import signal
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest
from machines import Gated, Noop, Relay, Scene, Stepwise, Waiter
from stage import Stage
from support import row, until
from workers import worker

from gendurable import Client, Context, Job, migrate
from gendurable.db.connection import Connection

LONG = {"lease": "60s", "heartbeat": "20s"}


class Stranger(Job[dict[str, Any]], name="stranger"):
    """Known to this test alone, not to the workers."""

    def perform(self, ctx: Context[dict[str, Any]]) -> None: ...


class NoopOfTomorrow(Job[dict[str, Any]], name="noop", version=2):
    """A version that the workers do not have yet."""

    def perform(self, ctx: Context[dict[str, Any]]) -> None: ...


@pytest.fixture
def scene(stage: Stage) -> Callable[..., Scene]:
    return lambda gate="", **more: Scene(str(stage.folder), gate=gate, **more)


def count(conn: Connection, status: str) -> int:
    found = conn.execute("select count(*) from gen_durable where status::text = %s", [status]).fetchone()
    assert found is not None
    return int(found[0])


def logged_at(event: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(event["ts"])


# Which rows.


def test_two_workers_share_a_queue(dsn: str, client: Client, stage: Stage, scene):
    with worker(dsn, "--queues", "default=2") as one, worker(dsn, "--queues", "default=2") as other:
        client.insert_many(Gated.new(scene("on")) for _ in range(4))
        entered = stage.wait_for("entered", 4)
        assert Counter(note["pid"] for note in entered) == {one.pid: 2, other.pid: 2}
        stage.open("on")
        stage.wait_for("left", 4)


def test_the_most_urgent_rows_run_first_and_equal_ones_in_their_order(dsn: str, client: Client, stage: Stage, scene):
    client.insert(Gated.new(scene("first"), priority=-100))
    with worker(dsn, "--queues", "default=1") as only:
        stage.wait_for("entered")
        ids = [(priority, client.insert(Gated.new(scene(), priority=priority))) for priority in (5, 0, -5, 0, 5, -5)]
        stage.open("first")
        stage.wait_for("left", 7)
        assert only.process.poll() is None
    ran = [note["id"] for note in stage.notes("entered")][1:]
    assert ran == [id for _, id in sorted(ids)]


def test_a_row_waits_for_its_time(dsn: str, client: Client, conn: Connection, stage: Stage, scene):
    soon = client.insert(Gated.new(scene(), schedule_in=1.5))
    later = client.insert(Gated.new(scene(), schedule_in=3600))
    with worker(dsn):
        [entered] = stage.wait_for("entered")
    assert entered["id"] == soon
    # Steps take the machine's time, rows the database's: the same clock here, read a moment apart.
    assert entered["time"] > row(conn, soon)["eligible_at"].timestamp() - 0.01
    assert (row(conn, later)["status"], row(conn, later)["fence"]) == ("runnable", 0)


def test_rows_of_other_queues_machines_and_versions_are_left_as_they_are(dsn: str, client: Client, conn: Connection):
    mine = client.insert(Noop.new())
    others = client.insert_many([Noop.new(queue="elsewhere"), Stranger.new(), NoopOfTomorrow.new()])
    before = [row(conn, id) for id in others]
    with worker(dsn, "--until-idle") as only:
        assert only.wait() == 0
    assert row(conn, mine)["status"] == "done"
    assert [row(conn, id) for id in others] == before
    assert {(each["status"], each["attempt"], each["fence"]) for each in before} == {("runnable", 0, 0)}


# When.


def test_throughput_does_not_hang_on_the_poll_interval(dsn: str, client: Client, conn: Connection):
    client.insert_many(Noop.new() for _ in range(1000))
    with worker(dsn, "--until-idle", settings={"poll": "1s", "max-poll": "5s"}) as only:
        only.started()
        assert only.wait(60) == 0
        seconds = (
            logged_at(only.wait_for("drain_finished")) - logged_at(only.wait_for("worker_started"))
        ).total_seconds()
    assert count(conn, "done") == 1000
    assert seconds < 30, "ten rows for each poll would have taken a hundred seconds"


def test_what_a_commit_here_makes_due_here_does_not_wait_for_a_poll(dsn: str, client: Client, stage: Stage, scene):
    id = client.insert(Relay.new(scene("on", queue="children")))
    slow = {"poll": "60s", "max-poll": "60s"}
    with worker(dsn, "--queues", "default=2,children=2", "--log-level", "debug", settings=slow) as only:
        stage.wait_for("entered")
        # Each empty look doubles the rest: after nine of them the next one is at least 3.8 seconds away.
        for queue in ("default", "children"):
            until(lambda queue=queue: len(only.events("claimed", queue=queue, count=0)) >= 9, f"{queue} at rest")
        stage.open("on")
        client.wait(id, timeout=20)
        start, end = (
            only.events("step_committed", id=id, step="start"),
            only.wait_for("step_committed", id=id, step="last"),
        )
        assert (logged_at(end) - logged_at(start[0])).total_seconds() < 3


def test_an_await_ends_at_its_deadline_however_rarely_leases_are_reaped(dsn: str, client: Client, stage: Stage, scene):
    id = client.insert(Waiter.new(scene(timeout=1)))
    with worker(dsn, settings={"reap": "1h"}):
        ended = client.wait(id, timeout=20)
    assert ended.result == {"got": []}
    [went] = stage.notes("went")
    assert 0 <= went["time"] - ended.eligible_at.timestamp() < 5


def test_a_lone_outcome_is_written_at_once(dsn: str, client: Client, conn: Connection, stage: Stage, scene):
    id = client.insert(Gated.new(scene("on")))
    with worker(dsn):
        stage.wait_for("entered")
        stage.open("on")
        client.wait(id, timeout=20)
    [left] = stage.notes("left")
    assert row(conn, id)["updated_at"].timestamp() - left["time"] < 2


# How much.


def test_what_is_claimed_never_exceeds_threads_and_prefetch(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene
):
    for place in range(20):
        client.insert(Gated.new(scene(f"gate {place}")))
    with worker(dsn, "--queues", "default=3", "--prefetch", "4"):
        until(lambda: count(conn, "executing") == 7, "three running and four waiting")
        for done in range(1, 14):
            stage.open(f"gate {done - 1}")
            until(lambda done=done: count(conn, "done") == done and count(conn, "executing") >= 7, "its place taken")
            assert count(conn, "executing") == 7
        assert len(stage.wait_for("entered", 16)) == 16


def test_an_automatic_prefetch_grows_when_steps_are_short(dsn: str, client: Client):
    client.insert_many(Noop.new() for _ in range(500))
    flags = ("--until-idle", "--queues", "default=2", "--log-level", "debug", "--prefetch", "auto")
    with worker(dsn, *flags) as only:
        assert only.wait() == 0
        claims = [event["count"] for event in only.events("claimed")]
    assert claims[0] == 2, "nothing was known yet"
    assert max(claims) > 20


def test_what_was_claimed_ahead_goes_back_when_steps_take_longer_than_expected(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene
):
    client.insert_many(Noop.new(priority=-1) for _ in range(300))  # so quick that much may be claimed ahead
    long = client.insert_many(Gated.new(scene("on")) for _ in range(2))
    behind = client.insert_many(Noop.new(priority=1) for _ in range(50))
    with worker(dsn, "--queues", "default=2", "--prefetch", "auto", settings=LONG):
        stage.wait_for("entered", 2)
        until(lambda: count(conn, "executing") == 2, "those behind given back")
        with worker(dsn, "--queues", "default=1", "--until-idle", settings=LONG):
            for id in behind:
                assert client.wait(id, timeout=20).attempt == 0
            stage.open("on")
            for id in long:
                assert client.wait(id, timeout=20).fence == 1


def test_a_minimal_demand_that_cannot_be_met_does_not_starve_the_queue(dsn: str, client: Client, stage: Stage, scene):
    hours = client.insert(Gated.new(scene("on"), priority=-1))
    others = client.insert_many(Noop.new() for _ in range(5))
    with worker(dsn, "--queues", "default=2", "--min-demand", "100"):
        for id in others:
            assert client.wait(id, timeout=20).status == "done"
        assert client.get(hours).status == "executing"
        stage.open("on")
        assert client.wait(hours, timeout=20).attempt == 0


def test_outcomes_that_wait_together_share_a_commit(fresh_database: str):
    migrate.up(fresh_database)
    with Client(fresh_database) as client, psycopg.connect(fresh_database, autocommit=True) as conn:
        client.insert_many(Noop.new() for _ in range(1000))
        before = transactions(conn)
        with worker(fresh_database, "--until-idle", "--prefetch", "100") as only:
            assert only.wait() == 0
        # A session's counts are complete once it has ended.
        query = "select count(*) from pg_stat_activity where datname = current_database() and application_name like %s"
        until(lambda: conn.execute(query, ["gendurable poller%"]).fetchone() == (0,), "its sessions gone")
        assert count(conn, "done") == 1000
        assert transactions(conn) - before < 600


def transactions(conn: Connection) -> int:
    found = conn.execute("select xact_commit from pg_stat_database where datname = current_database()").fetchone()
    assert found is not None
    return int(found[0])


# Leases.


def test_the_heartbeat_keeps_running_and_waiting_rows_past_their_lease(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene
):
    ids = client.insert_many(Gated.new(scene("on")) for _ in range(4))
    with worker(dsn, "--queues", "default=1", "--prefetch", "3"):
        until(lambda: count(conn, "executing") == 4, "all four claimed")
        first = {id: row(conn, id)["lease_expires_at"] for id in ids}
        over = (
            "select now() > %s + interval '1 second' from gen_durable where lease_expires_at > %s + interval '1 second'"
        )
        until(
            lambda: conn.execute(over, [max(first.values())] * 2).fetchall() == [(True,)] * 4,
            "the first leases long over and all four prolonged",
        )
        stage.open("on")
        for id in ids:
            assert client.wait(id, timeout=20).status == "done"
    assert {(row(conn, id)["fence"], row(conn, id)["attempt"]) for id in ids} == {(1, 0)}


def test_a_worker_takes_back_what_its_dead_predecessor_held_and_nobody_else(dsn: str, client: Client, conn: Connection):
    holders = {"node_1/7-dead": 10, "node_1/7-alive": 55, "nodex1/7-alive": 10, "node_11/7-alive": 10}
    ids = [client.insert(Noop.new()) for _ in holders]
    for id, (holder, seconds) in zip(ids, holders.items(), strict=True):
        conn.execute(
            "update gen_durable set status = 'executing', fence = 1, locked_by = %s,"
            " lease_expires_at = now() + make_interval(secs => %s) where id = %s",
            [holder, seconds, id],
        )
    before = [row(conn, id) for id in ids[1:]]
    with worker(dsn, settings=LONG | {"name": "node_1", "reap": "1h"}) as heir:
        assert heir.wait_for("claims_reclaimed")["count"] == 1
        taken = client.wait(ids[0], timeout=20)
    assert (taken.status, taken.attempt, taken.fence) == ("done", 0, 3)
    assert [row(conn, id) for id in ids[1:]] == before


# A worker's coming and going.


def test_a_worker_may_start_while_somebody_builds_an_index(own_dsn: str, own_conn: Connection):
    with Client(own_dsn) as client, psycopg.connect(own_dsn) as builder:
        id = client.insert(Noop.new())
        builder.execute("lock table gen_durable in share mode")
        with worker(own_dsn) as running:
            running.started()
            builder.rollback()
            assert client.wait(id, timeout=20).attempt == 0


def test_a_worker_shows_in_the_table_of_workers_and_a_second_of_its_name_beside_it(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene
):
    def alive() -> dict[int, tuple[str, dict[str, int]]]:
        query = "select pid, name, queues from workers where name = 'twin' and expires_at > now()"
        return {pid: (name, queues) for pid, name, queues in conn.execute(query)}

    id = client.insert(Gated.new(scene("on")))
    settings = LONG | {"name": "twin"}
    with worker(dsn, settings=settings) as first:
        stage.wait_for("entered")
        with worker(dsn, "--queues", "default=2", settings=settings) as second:
            until(lambda: alive().keys() == {first.pid, second.pid}, "two workers of one name")
            assert alive()[second.pid] == ("twin", {"default": 2})
            second.signal(signal.SIGTERM)
            assert second.wait() == 0
        assert alive().keys() == {first.pid}
        stage.open("on")
        assert client.wait(id, timeout=20).fence == 1, "its running step was not taken from it"
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    assert alive() == {}


def test_until_idle_waits_neither_for_the_future_nor_for_signals(dsn: str, client: Client, conn: Connection, scene):
    later = client.insert(Noop.new(schedule_in=3600))
    parked = client.insert(Waiter.new(scene()))
    with worker(dsn, "--until-idle") as only:
        assert only.wait() == 0
    assert (row(conn, later)["status"], row(conn, parked)["status"]) == ("runnable", "awaiting_signal")


def test_until_idle_waits_for_what_runs_elsewhere(dsn: str, client: Client, conn: Connection, stage: Stage, scene):
    id = client.insert(Stepwise.new(scene("on")))
    with worker(dsn, settings={"name": "elsewhere"}) as other:
        stage.wait_for("entered")
        with worker(dsn, "--until-idle") as only:
            only.started()
            query = (
                "select query_start from pg_stat_activity where application_name = 'gendurable spare' and query like %s"
            )
            seen: set[Any] = set()
            until(lambda: seen.update(conn.execute(query, ["%has_work%"]).fetchall()) or len(seen) >= 5, "five looks")
            assert only.process.poll() is None
            stage.open("on")
            assert only.wait() == 0
        assert client.get(id).status == "done"
        assert other.process.poll() is None


def test_a_worker_without_a_database_or_a_schema_exits_with_5_and_one_line(fresh_database: str):
    for dsn, remedy in (("host=/nowhere dbname=shop", "shop"), (fresh_database, "gendurable migrate up")):
        with worker(dsn) as hopeless:
            assert hopeless.wait() == 5
            lines = hopeless.log.splitlines()
        assert len(lines) == 1
        assert remedy in lines[0]


# Paused queues.


def test_a_paused_queue_is_left_alone_by_workers_that_run_and_that_start(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene
):
    flags = ["--queues", "default=2,other=2", "--log-level", "debug"]
    with worker(dsn, *flags) as first:
        first.started()
        assert client.pause("default")
        first.let_poll()  # a claim that was under way may still have been before the pause
        waiting = client.insert_many(Gated.new(scene()) for _ in range(3))
        client.wait(client.insert(Gated.new(scene(), queue="other")), timeout=20)
        first.let_poll()
    with worker(dsn, *flags) as second:
        second.started().let_poll(6)
        assert [(row(conn, id)["status"], row(conn, id)["fence"]) for id in waiting] == [("runnable", 0)] * 3
        client.resume("default")
        for id in waiting:
            client.wait(id, timeout=20)


def test_what_was_claimed_ahead_of_a_pause_is_given_back(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene
):
    ids = [client.insert(Gated.new(scene("on"))) for _ in range(4)]
    with worker(dsn, "--queues", "default=1", "--prefetch", "10", settings=LONG):
        stage.wait_for("entered")
        until(lambda: count(conn, "executing") == 4, "all claimed")
        client.pause("default")
        until(lambda: count(conn, "runnable") == 3, "given back what was not begun")
        assert [row(conn, id)["attempt"] for id in ids] == [0, 0, 0, 0]
        stage.open("on")
        assert client.wait(ids[0], timeout=20).status == "done", "what had begun goes on"
        assert len(stage.notes("entered")) == 1
        client.resume("default")
        for id in ids:
            client.wait(id, timeout=20)
    assert len(stage.notes("entered")) == 4


def test_a_worker_until_idle_does_not_wait_for_a_paused_queue(dsn: str, client: Client, conn: Connection):
    client.pause("default")
    client.insert(Noop.new())
    with worker(dsn, "--until-idle") as only:
        assert only.wait() == 0
    assert count(conn, "runnable") == 1
