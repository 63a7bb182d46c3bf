"""Partition keys through real workers: one at a time, in order, whatever happens to processes and sessions."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import psycopg
import pytest
from facts import claims, done, until_done
from machines import Gated, Noop, Quitter, Restless, Scene, Waiter
from pooler import PGBOUNCER, Choice, Pooler, pgbouncer
from stage import Note, Stage
from support import row, until
from workers import WorkerProcess, worker

from gendurable import Client, migrate
from gendurable.core.instance import NewInstance
from gendurable.db import store
from gendurable.db.connection import Connection

DEBUG = ("--log-level", "debug")
# A lease that the reaper takes away soon after a kill.
SHORT = {"lease": "1500ms", "heartbeat": "500ms", "reap": "200ms"}


def gated(stage: Stage, key: str | None, gate: str = "", **about: Any) -> NewInstance:
    return Gated.new(Scene(str(stage.folder), gate=gate), partition_key=key, **about)


def insert(client: Client, *instances: NewInstance) -> list[int]:
    """Insert in this order; the ids tell it."""
    return [client.insert(new) for new in instances]


def locks(conn: Connection) -> int:
    """How many advisory locks are held in this database."""
    query = """select count(*) from pg_locks
               where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())"""
    [(count,)] = conn.execute(query).fetchall()
    return int(count)


def lock_sessions(conn: Connection) -> list[int]:
    query = """select pid from pg_stat_activity
               where application_name = 'gendurable lock' and datname = current_database()"""
    return [pid for (pid,) in conn.execute(query)]


def until_lock_sessions(conn: Connection, count: int) -> list[int]:
    """Wait until there are so many: those of a worker that a test before this one killed may still be on their way out."""
    until(lambda: len(lock_sessions(conn)) == count, f"{count} sessions for locks")
    return lock_sessions(conn)


def kill_session(conn: Connection, pid: int) -> None:
    conn.execute("select pg_terminate_backend(%s)", [pid])
    until(lambda: pid not in lock_sessions(conn), "the end of the session")


def assert_one_at_a_time(notes: Iterable[Note]) -> None:
    """Whoever enters finds nobody inside, except for those whose process was killed there."""
    inside: list[Note] = []
    for note in notes:
        if note["what"] == "entered":
            assert not inside, f"{note} while {inside}"
            inside.append(note)
        elif note["what"] == "left":
            inside = [other for other in inside if other["id"] != note["id"]]
        else:
            inside = [other for other in inside if other["pid"] != note["victim"]]


def order(notes: Iterable[Note]) -> list[int]:
    """The ids in the order in which they were executed; one that was executed again at once counts once."""
    return [id for id, _ in groupby(note["id"] for note in notes if note["what"] == "entered")]


def test_a_key_runs_one_at_a_time_and_in_strict_order_on_two_workers_that_are_killed(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    past = datetime.now(UTC) - timedelta(hours=1)
    place: dict[int, tuple[str, int, int]] = {}
    for key in ("red", "green", "blue"):
        for number in range(8):
            # Neither urgency nor age follows the order of the ids.
            priority, age = (number * 3) % 2, (number * 5) % 4
            gate = "hang" if number == 3 else ""
            new = gated(stage, key, gate, priority=priority, eligible_at=past + timedelta(minutes=age))
            place[client.insert(new)] = (key, priority, age)
    stage.open("hang.1")  # the first execution of those three hangs until its worker is killed, the second does not
    with ExitStack() as stack:
        running: dict[int, WorkerProcess] = {}

        def start() -> None:
            started = stack.enter_context(worker(dsn, "--queues", "default=4", settings=SHORT))
            running[started.pid] = started

        def hanging() -> list[int]:
            left = {note["id"] for note in stage.notes("left")}
            return [n["pid"] for n in stage.notes("entered") if n["id"] not in left and n["pid"] in running]

        start()
        start()
        while True:
            until(lambda: hanging() or done(conn, list(place)) == len(place), "a step that hangs, or the end")
            if done(conn, list(place)) == len(place):
                break
            for pid in set(hanging()):
                running.pop(pid).kill()
                stage.note("killed", victim=pid)
                start()
    assert stage.notes("killed")
    for key in ("red", "green", "blue"):
        notes = [note for note in stage.notes() if note["what"] == "killed" or place[note["id"]][0] == key]
        assert_one_at_a_time(notes)
        mine = [id for id in place if place[id][0] == key]
        assert order(notes) == sorted(mine, key=lambda each: (*place[each][1:], each))


def test_a_step_whose_lock_session_was_killed_commits_nothing_and_no_sibling_starts_before_it_is_reaped(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    first, second, free = insert(client, gated(stage, "k", "g"), gated(stage, "k"), gated(stage, None))
    with worker(dsn, *DEBUG, settings=SHORT) as one, worker(dsn, *DEBUG, settings=SHORT) as other:
        one.started()
        other.started()  # whose check of the locks is over by then
        stage.wait_for("entered", id=first)
        until_done(conn, [free])
        [session] = until_lock_sessions(conn, 1)
        kill_session(conn, session)
        # The key's lock is free now, and the worker does not know: only the row itself keeps the sibling out.
        one.let_poll()
        other.let_poll()
        assert not stage.notes("entered", id=second)
        assert row(conn, first)["status"] == "executing"
        stage.open("g.0")
        until(lambda: one.events("lock_lost", id=first) or other.events("lock_lost", id=first), "lock_lost")
        stage.wait_for("entered", 2, id=first)
        one.let_poll()
        other.let_poll()
        assert not stage.notes("entered", id=second)
        stage.open("g.1")
        until_done(conn, [first, second])
        reaped = one.events("lease_reaped") + other.events("lease_reaped")
    assert [event["id"] for event in reaped] == [first]
    assert row(conn, first)["result"] == {"by": 1}
    assert order(note for note in stage.notes() if note["id"] != free) == [first, second]
    until(lambda: not locks(conn), "no lock left")


def test_a_thousand_rows_of_a_hanging_key_neither_delay_others_nor_are_claimed_in_vain(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    hanging = client.insert_many([gated(stage, "k", "g") for _ in range(1000)])
    with worker(dsn, *DEBUG, "--queues", "default=4") as running:
        stage.wait_for("entered")
        free = client.insert_many([Noop.new() for _ in range(50)])
        until_done(conn, free)
        running.let_poll(5)
        assert done(conn, hanging) == 0
        assert claims(conn, hanging) == 1
        assert claims(conn, free) == 50
        assert len(running.events("partition_contended")) == 0


def test_no_key_waits_for_ever_behind_a_hanging_one_while_others_are_always_due(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    client.insert_many([gated(stage, "hanging", "g") for _ in range(100)])
    with worker(dsn, "--queues", "default=3"):
        stage.wait_for("entered")
        restless = [Restless.new(Scene(str(stage.folder), gate="g"), partition_key=key) for key in "abcde"]
        client.insert_many(restless)
        until_done(conn, insert(client, *(Noop.new(partition_key=key) for key in "dmz")))
        stage.open("g")


def test_different_keys_with_equal_32_bit_hashes_run_side_by_side(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    # Equal as they are, and equal with the schema before them, as the lock's number is made.
    query = """select min(key), max(key)
               from (select 'order:' || n as key from generate_series(1, 400000) as n) as keys
               group by hashtext(%s || key) having count(*) > 1 limit 1"""
    keys = [key for prefix in ("", "public/") for key in conn.execute(query, [prefix]).fetchall()[0]]
    assert len(set(keys)) == 4
    ids = insert(client, *(gated(stage, key, "g") for key in keys))
    with worker(dsn):
        stage.wait_for("entered", 4)
        stage.open("g")
        until_done(conn, ids)


def test_a_row_whose_key_somebody_else_has_locked_bounces_untouched_and_not_often(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    assert store.lock_partitions(conn, keys=["k"]).one()
    first, second, free = insert(client, gated(stage, "k"), gated(stage, "k"), gated(stage, None))
    before = [row(conn, id) for id in (first, second)]
    with worker(dsn, *DEBUG) as running:
        until(lambda: len(running.events("partition_contended")) >= 6, "six bounces")
        times = [datetime.fromisoformat(event["ts"]) for event in running.events("partition_contended")]
        assert times[5] - times[0] > timedelta(seconds=0.3)  # each pause is longer than the one before
        assert {event["id"] for event in running.events("partition_contended")} == {first}
        until_done(conn, [free])
        until(lambda: row(conn, first)["status"] == "runnable", "the row given back")
        after = [row(conn, id) for id in (first, second)]
        kept = ("status", "step", "state", "eligible_at", "attempt", "crashes", "last_error", "locked_by", "priority")
        assert [[each[key] for key in kept] for each in after] == [[each[key] for key in kept] for each in before]
        assert after[1]["fence"] == 0  # nobody overtakes the head of a key
        assert store.unlock_partitions(conn, keys=["k"]).one()
        until_done(conn, [first, second])
        assert claims(conn, [first]) == len(running.events("partition_contended", id=first)) + 1
    assert order(note for note in stage.notes() if note["id"] != free) == [first, second]
    assert all(row(conn, id)["attempt"] == 0 for id in (first, second))


def test_fewer_lock_connections_than_threads_bound_how_many_keyed_steps_run(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    ids = insert(client, *(gated(stage, f"key {number}", "g") for number in range(5)))
    with worker(dsn, *DEBUG, "--queues", "default=6", environment={"lock_connections": "2"}) as running:
        stage.wait_for("entered", 2)
        until(lambda: claims(conn, ids) == 5, "all five claimed")
        running.let_poll()
        assert len(stage.notes("entered")) == 2
        until_lock_sessions(conn, 2)
        stage.open("g")
        until_done(conn, ids)
        assert len(lock_sessions(conn)) <= 2
    assert all(row(conn, id)["attempt"] == 0 for id in ids)


def test_a_keyed_claim_that_still_waits_for_a_connection_goes_back_when_its_worker_is_told_to_stop(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    first, second = insert(client, gated(stage, "one", "g"), gated(stage, "other", "g"))
    settings = {"drain-timeout": "60s"}
    with worker(dsn, settings=settings, environment={"lock_connections": "1"}) as running:
        [entered] = stage.wait_for("entered")
        [waiting] = {first, second} - {entered["id"]}
        until(lambda: row(conn, waiting)["status"] == "executing", "the other one claimed")
        running.signal(signal.SIGTERM)
        until(lambda: row(conn, waiting)["status"] == "runnable", "the claim given back")
        stage.open("g")
        assert running.wait() == 0
    assert row(conn, entered["id"])["status"] == "done"
    assert (row(conn, waiting)["attempt"], len(stage.notes("entered"))) == (0, 1)


@pytest.fixture(params=["last", "next", "pgbouncer"])
def pooled(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Iterator[str]:
    """The database behind a transaction pooler, one of each kind."""
    if request.param != "pgbouncer":
        with Pooler(dsn, Choice(request.param)) as pooler:
            yield pooler.dsn
    elif PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    else:
        with pgbouncer(dsn, tmp_path) as address:
            yield address


def test_behind_a_transaction_pooler_keyed_rows_are_left_alone_and_others_run(
    pooled: str, client: Client, conn: Connection, stage: Stage
):
    keyed, free = insert(client, gated(stage, "k"), gated(stage, None))
    for _ in range(2):  # what the first worker's check leaves in the pooler's sessions must not deceive the second
        with worker(pooled, *DEBUG, environment={"prepare": "false"}) as running:
            running.wait_for("partitions_refused")
            running.started()
            running.let_poll()
    until_done(conn, [free])
    assert (row(conn, keyed)["status"], row(conn, keyed)["fence"]) == ("runnable", 0)
    # Of the check itself a lock may stay in a session of the pooler's, under a key that nobody else has.
    assert store.lock_partitions(conn, keys=["k"]).one()


def test_until_idle_does_not_wait_for_keyed_rows_that_it_cannot_run(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    keyed, free = insert(client, gated(stage, "k"), gated(stage, None))
    with (
        Pooler(dsn, Choice.NEXT) as pooler,
        worker(pooler.dsn, "--until-idle", environment={"prepare": "false"}) as running,
    ):
        assert running.wait() == 0
        assert running.events("partitions_refused")
    assert [row(conn, id)["status"] for id in (keyed, free)] == ["runnable", "done"]


def test_behind_a_transaction_pooler_a_direct_lock_connection_is_all_that_keyed_rows_need(
    dsn: str, pooled: str, client: Client, conn: Connection, stage: Stage
):
    ids = insert(client, *(gated(stage, f"key {number % 3}") for number in range(30)))
    with worker(pooled, environment={"prepare": "false", "lock_dsn": dsn}) as running:
        until_done(conn, ids)
        running.signal(signal.SIGTERM)
        assert running.wait() == 0
        assert not running.events("partitions_refused")
        assert not running.events("database_unavailable")


def test_behind_a_transaction_pooler_each_schema_keeps_to_itself_and_leaves_no_setting_behind(
    dsn: str, conn: Connection, stage: Stage
):
    # A pooled session is everybody's: what one client sets for the session, the next one finds.
    migrate.up(dsn, schema="Other")
    ours = "select current_setting('search_path'), current_setting('lock_timeout'), current_setting('enable_seqscan')"
    with psycopg.connect(dsn) as fresh:
        untouched = fresh.execute(ours).fetchone()
    with (
        Pooler(dsn, Choice.NEXT) as pooler,
        psycopg.connect(pooler.dsn, autocommit=True, prepare_threshold=None) as stranger,
    ):
        here = Client(pooler.dsn, prepare=False)
        there = Client(pooler.dsn, schema="Other", prepare=False)
        with (
            here,
            there,
            worker(pooler.dsn, environment={"prepare": "false"}),
            worker(pooler.dsn, "--schema", "Other", environment={"prepare": "false"}),
        ):
            ids = here.insert_many([gated(stage, None) for _ in range(20)])
            others = there.insert_many([gated(stage, None) for _ in range(20)])
            for id in ids:
                here.wait(id, timeout=20)
            for id in others:
                there.wait(id, timeout=20)
            parked = there.insert(Waiter.new(Scene(str(stage.folder))))
            until(lambda: there.get(parked).status == "awaiting_signal", "parked")
            assert there.signal(parked, "nobody waits for this").found
        seen = {stranger.execute(ours).fetchone() for _ in range(20)}
    assert seen == {untouched}


def test_a_key_is_one_key_in_all_queues(dsn: str, client: Client, conn: Connection, stage: Stage):
    first, second = insert(client, gated(stage, "k", "g", queue="left"), gated(stage, "k", queue="right"))
    with worker(dsn, *DEBUG, "--queues", "left=2") as left:
        stage.wait_for("entered", id=first)
        with worker(dsn, *DEBUG, "--queues", "left=2,right=2") as right:
            right.started()
            right.let_poll(5)
            left.let_poll()
            assert [note["id"] for note in stage.notes("entered")] == [first]
            assert claims(conn, [second]) == 0
            stage.open("g")
            until_done(conn, [first, second])
    assert_one_at_a_time(stage.notes())


def test_a_keyed_outcome_that_the_database_refuses_fails_its_row_and_frees_its_key(
    own_dsn: str, own_conn: Connection, stage: Stage
):
    own_conn.execute("""alter table gen_durable add constraint nothing_odd
                        check (result is null or (result ->> 'by')::int / (id - 1) >= 0)""")
    with Client(own_dsn) as client:
        odd, even = insert(client, gated(stage, "k"), gated(stage, "k"))
    with worker(own_dsn):
        until_done(own_conn, [even])
        until(lambda: not locks(own_conn), "no lock left")
    assert row(own_conn, odd)["status"] == "failed"
    assert "division by zero" in row(own_conn, odd)["last_error"]
    assert order(stage.notes()) == [odd, even]


def test_system_exit_in_a_keyed_step_frees_its_key_and_the_row_is_reaped_before_a_sibling_runs(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    scene = Scene(str(stage.folder), play="SystemExit")
    quitter = client.insert(Quitter.new(scene, partition_key="k"))
    sibling = client.insert(gated(stage, "k"))
    with worker(dsn, settings=SHORT) as running:
        until_done(conn, [quitter, sibling])
        assert [event["id"] for event in running.events("lease_reaped")] == [quitter]
        until(lambda: not locks(conn), "no lock left")
    assert order(stage.notes()) == [quitter, sibling]
    assert (row(conn, quitter)["result"], row(conn, sibling)["attempt"]) == ({"by": 1}, 0)
