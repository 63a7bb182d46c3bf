"""Workers that die, stall and are told to go: what they held is done by somebody, and what was committed stays."""

import signal
import time
from collections import Counter
from collections.abc import Callable

import psycopg
import pytest
from machines import Gated, InlineSteps, Killer, Noop, Parent, Quitter, Scene, Stepwise
from proxy import Proxy
from stage import Stage
from support import row, until
from workers import worker

from gendurable import Client, migrate
from gendurable.db.connection import Connection

# Distinct names: a worker of the same name would take its predecessor's claims back before the reaper does.
FIRST, SECOND = {"name": "first", "lease": "2s"}, {"name": "second", "lease": "2s"}
PATIENT = {"lease": "60s", "heartbeat": "20s", "drain-timeout": "60s"}


@pytest.fixture
def scene(stage: Stage) -> Callable[..., Scene]:
    return lambda gate="", **more: Scene(str(stage.folder), gate=gate, **more)


def statuses(conn: Connection) -> dict[int, str]:
    return dict(conn.execute("select id, status::text from gen_durable").fetchall())


def wait_for_status(conn: Connection, id: int, status: str) -> None:
    until(lambda: row(conn, id)["status"] == status, f"instance {id} {status}")


def wait_for_farewell(conn: Connection) -> None:
    """Wait until the server has noticed that its workers are gone: what they sent last is done or was dropped."""
    query = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name in ('gendurable committer', 'gendurable lock', 'gendurable poller default')"
    )
    until(lambda: conn.execute(query).fetchone() == (0,), "the sessions of dead workers gone")


# Killed.


def test_an_inline_machine_commits_each_step_and_goes_on_where_its_worker_was_killed(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    id = client.insert(InlineSteps.new(scene("on")))
    with worker(dsn, settings=FIRST) as first:
        stage.wait_for("third", attempt=0)
        held = row(conn, id)
        assert (held["status"], held["step"], held["state"]["count"]) == ("executing", "third", 2)
        assert held["fence"] == 3, "one claim, and two steps committed on it"
        first.signal(signal.SIGKILL)
        first.wait()
    stage.open("on.1")
    with worker(dsn, settings=SECOND):
        assert client.wait(id, timeout=20).result == {"count": 2, "by": 1}
    assert len(stage.notes("first")) == len(stage.notes("second")) == 1


def test_an_inline_machine_is_given_back_between_two_steps_when_the_worker_goes(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    ids = client.insert_many([InlineSteps.new(scene("on")) for _ in range(3)])
    with worker(dsn, "--queues", "default=1", "--prefetch", "5", settings=PATIENT) as only:
        stage.wait_for("third")
        only.signal(signal.SIGTERM)
        only.wait_for("drain_started")
        stage.open("on")
        assert only.wait() == 0
    assert sorted(Counter(statuses(conn)[id] for id in ids).items()) == [("done", 1), ("runnable", 2)]
    assert {row(conn, id)["attempt"] for id in ids} == {0}


def test_a_step_whose_worker_was_killed_is_run_again_by_another(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    id = client.insert(Stepwise.new(scene("on")))
    with worker(dsn, settings=FIRST) as first:
        stage.wait_for("entered", attempt=0)
        first.signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
    assert row(conn, id)["status"] == "executing"
    stage.open("on.1")

    with worker(dsn, settings=SECOND) as second:
        assert client.wait(id, timeout=20).result == {"by": 1}
        assert second.wait_for("lease_reaped", id=id)["crashes"] == 1
    entered = [(note["step"], note["attempt"]) for note in stage.notes("entered")]
    assert entered == [("start", 0), ("start", 1), ("finish", 0)]


def test_under_load_a_kill_repeats_only_what_was_not_committed(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    ids = client.insert_many(Gated.new(scene()) for _ in range(300))
    with worker(dsn, "--queues", "default=4", settings=FIRST | {"prefetch": "10"}) as first:
        until(lambda: Counter(statuses(conn).values())["done"] >= 40, "forty done")
        first.signal(signal.SIGKILL)
        first.wait()
    wait_for_farewell(conn)
    done = {id for id, status in statuses(conn).items() if status == "done"}
    assert len(done) < len(ids), "the kill came too late to mean anything"

    with worker(dsn, "--until-idle", settings=SECOND) as second:
        assert second.wait() == 0

    assert set(statuses(conn).values()) == {"done"}
    executions = Counter(note["id"] for note in stage.notes("left"))
    assert set(executions) == set(ids)
    assert {executions[id] for id in done} == {1}
    assert max(executions.values()) <= 2


def test_a_step_that_kills_its_process_ends_when_its_budget_is_spent_and_its_neighbours_live(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    killer = client.insert(Killer.new(scene(), priority=1))
    neighbour = client.insert(Gated.new(scene("on")))
    others = client.insert_many(Noop.new(priority=2) for _ in range(20))

    for life in (1, 2):
        with worker(dsn, "--queues", "default=2", settings=FIRST) as doomed:
            assert doomed.wait() == -signal.SIGKILL
        assert len(stage.notes("entered", id=killer)) == life

    stage.open("on")
    with worker(dsn, "--queues", "default=2", settings=SECOND) as survivor:
        for id in (neighbour, *others):
            assert client.wait(id, timeout=20).status == "done"
        ended = client.wait(killer, timeout=20)
        assert survivor.process.poll() is None
    assert (ended.status, ended.crashes) == ("failed", 2)
    assert "2 times" in (ended.last_error or "")
    assert "'start'" in (ended.last_error or "")
    assert len(stage.notes("entered", id=killer)) == 2


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt"])
def test_a_step_that_exits_is_a_crash_of_that_step_and_not_of_the_process(dsn: str, client: Client, stage, scene, kind):
    id = client.insert(Quitter.new(scene(play=kind)))
    with worker(dsn, settings=FIRST) as only:
        assert client.wait(id, timeout=20).result == {"by": 1}
        assert only.wait_for("step_crashed", id=id)["error"].startswith(kind)
        assert only.wait_for("lease_reaped", id=id)["crashes"] == 1
        assert only.process.poll() is None
    assert [(note["attempt"], note["pid"]) for note in stage.notes("entered")] == [(0, only.pid), (1, only.pid)]
    assert stage.notes("handled") == []


# Stalled: stopped past its lease, then let go on.


def test_a_worker_that_stalled_past_its_lease_cannot_undo_what_another_has_done(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    id = client.insert(Stepwise.new(scene("on")))
    with worker(dsn, settings=FIRST) as first:
        stage.wait_for("entered", attempt=0)
        first.signal(signal.SIGSTOP)
        stage.open("on.1")
        with worker(dsn, settings=SECOND):
            finished = client.wait(id, timeout=20)
            before = row(conn, id)
            first.signal(signal.SIGCONT)
            stage.open("on.0")
            first.wait_for("outcome_stale", id=id, step="start")
            assert row(conn, id) == before
            assert finished.result == {"by": 1}
            assert first.events("step_committed", id=id) == []


def test_a_worker_that_stalled_and_claimed_its_own_row_again_does_not_believe_its_older_self(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    id = client.insert(Stepwise.new(scene("on")))
    with worker(dsn, settings=FIRST) as only, worker(dsn, "--queues", "elsewhere=1", settings=SECOND) as reaper:
        stage.wait_for("entered", attempt=0)
        reaper.started()
        only.signal(signal.SIGSTOP)
        reaper.wait_for("lease_reaped", id=id)
        only.signal(signal.SIGCONT)
        stage.wait_for("entered", attempt=1)
        claimed_again = row(conn, id)

        stage.open("on.0")
        only.wait_for("outcome_stale", id=id, step="start")
        now = row(conn, id)
        assert (now["status"], now["fence"], now["state"]) == (
            "executing",
            claimed_again["fence"],
            claimed_again["state"],
        )

        stage.open("on.1")
        assert client.wait(id, timeout=20).result == {"by": 1}
        assert [event["step"] for event in only.events("step_committed", id=id)] == ["start", "finish"]


def test_a_stalled_worker_does_not_open_a_barrier_early(dsn: str, client: Client, conn: Connection, stage, scene):
    parent = client.insert(Parent.new(scene("child ", count=2, queue="children")))
    with worker(dsn, "--queues", "default=1,children=1", settings=FIRST) as first:
        [entered] = stage.wait_for("entered")
        first.signal(signal.SIGSTOP)
        stage.open("child 0.1")
        with worker(dsn, "--queues", "default=1,children=2", settings=SECOND):
            wait_for_status(conn, entered["id"], "done")
            assert row(conn, parent)["children_pending"] == 1
            first.signal(signal.SIGCONT)
            stage.open("child 0.0")
            first.wait_for("outcome_stale", id=entered["id"])
            assert (row(conn, parent)["status"], row(conn, parent)["children_pending"]) == ("awaiting_children", 1)
            stage.open("child 1")
            assert client.wait(parent, timeout=20).result == {"children": [{"by": 1}, {"by": 0}]}
    assert len(stage.notes("joined")) == 1


# Told to go.


def test_a_worker_told_to_go_gives_back_what_it_has_not_started_and_finishes_the_rest(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    ids = client.insert_many(Gated.new(scene("on")) for _ in range(4))
    before = {id: row(conn, id) for id in ids}
    with worker(dsn, "--queues", "default=1", "--prefetch", "5", settings=PATIENT) as leaving:
        [entered] = stage.wait_for("entered")
        until(lambda: set(statuses(conn).values()) == {"executing"}, "all four claimed")
        leaving.signal(signal.SIGTERM)

        buffered = set(ids) - {entered["id"]}
        until(lambda: all(statuses(conn)[id] == "runnable" for id in buffered), "the unstarted ones given back")
        for id in buffered:
            now = row(conn, id)
            assert (now["attempt"], now["crashes"], now["locked_by"]) == (0, 0, None)
            assert now["eligible_at"] == before[id]["eligible_at"]
        assert statuses(conn)[entered["id"]] == "executing"
        started = leaving.wait_for("drain_started")
        assert (started["running"], started["released"]) == (1, 3)

        stage.open("on")
        assert leaving.wait() == 0
        assert leaving.wait_for("drain_finished")["abandoned"] == 0
    assert row(conn, entered["id"])["result"] == {"by": 0}
    assert len(stage.notes("entered")) == 1


def test_a_step_longer_than_the_drain_is_left_to_the_reaper(dsn: str, client: Client, conn: Connection, stage, scene):
    id = client.insert(Gated.new(scene("on")))
    with worker(dsn, "--drain-timeout", "300ms", settings=FIRST) as leaving:
        stage.wait_for("entered")
        leaving.signal(signal.SIGINT)
        assert leaving.wait(15) == 0
        assert leaving.wait_for("drain_finished")["abandoned"] == 1
    assert row(conn, id)["status"] == "executing"
    stage.open("on.1")
    with worker(dsn, settings=SECOND):
        assert client.wait(id, timeout=20).result == {"by": 1}
    assert [note["attempt"] for note in stage.notes("left")] == [1]


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGINT)],
)
def test_a_second_signal_ends_the_worker_at_once(dsn: str, client: Client, stage, scene, signals):
    id = client.insert(Gated.new(scene("on")))
    with worker(dsn, settings=PATIENT) as leaving:
        stage.wait_for("entered")
        leaving.signal(signals[0])
        leaving.wait_for("drain_started")
        leaving.signal(signals[1])
        assert leaving.wait(15) == 128 + signals[1]
        assert "Traceback" not in leaving.log
    assert client.get(id).status == "executing"


@pytest.mark.timeout(300)  # a dozen processes, one after the other
def test_a_worker_may_be_told_to_go_at_any_moment_of_its_start(dsn: str, client: Client, conn: Connection):
    client.insert_many(Noop.new() for _ in range(3000))
    begun = time.monotonic()
    with worker(dsn, "--queues", "default=2", settings=PATIENT) as measured:
        measured.started()
        start_up = time.monotonic() - begun
        measured.signal(signal.SIGTERM)
        assert measured.wait() == 0

    moments = 10
    codes = set()
    for moment in range(moments):
        with worker(dsn, "--queues", "default=2", "--prefetch", "20", settings=PATIENT) as leaving:
            time.sleep(1.3 * start_up * moment / moments)  # not to wait for anything: the moment is what is tested
            leaving.signal(signal.SIGTERM)
            codes.add(leaving.wait())
            assert "Traceback" not in leaving.log
        assert "executing" not in statuses(conn).values()
    assert codes <= {0, -signal.SIGTERM}
    assert 0 in codes


def test_a_connection_that_falls_silent_does_not_hold_up_the_end(
    dsn: str, client: Client, conn: Connection, stage, scene
):
    client.insert_many(Gated.new(scene("on")) for _ in range(2))
    with Proxy(dsn) as proxy:
        fault = proxy.swallow_at("release")
        settings = PATIENT | {"drain-timeout": "500ms"}
        with worker(proxy.dsn, "--queues", "default=1", "--prefetch", "1", settings=settings) as leaving:
            until(lambda: set(statuses(conn).values()) == {"executing"}, "both claimed")
            stage.wait_for("entered")
            leaving.signal(signal.SIGTERM)
            fault.wait()
            assert leaving.wait(15) == 0
            assert leaving.wait_for("drain_started")["released"] == 0


# A part of it dead.


def test_a_loop_that_dies_takes_the_process_down_loudly(fresh_database: str):
    migrate.up(fresh_database)
    with worker(fresh_database) as doomed, psycopg.connect(fresh_database, autocommit=True) as conn:
        doomed.started()
        conn.execute("alter table gen_durable rename to gone")
        assert doomed.wait() == 1
        died = doomed.events("loop_died")
    assert died
    assert 'relation "gen_durable" does not exist' in died[0]["error"]
    assert died[0]["level"] == "critical"


def test_a_worker_that_dies_is_held_back_neither_by_what_it_runs_nor_by_what_it_cannot_give_back(
    own_dsn: str, own_conn: Connection, stage, scene
):
    with Client(own_dsn) as client:
        client.insert_many(Gated.new(scene("never")) for _ in range(3))
    settings = {"drain-timeout": "500ms"}
    with worker(own_dsn, "--queues", "default=1", "--prefetch", "2", settings=settings) as doomed:
        until(lambda: set(statuses(own_conn).values()) == {"executing"}, "all three claimed")
        stage.wait_for("entered")
        own_conn.execute("alter table gen_durable rename to gone")
        assert doomed.wait(20) == 1
        assert doomed.events("loop_died")
        assert doomed.events("drain_finished")
