"""What a worker tells its running steps: that it goes, that they are no longer wanted, that their time is up."""

import signal
from collections.abc import Callable

import pytest
from machines import Attentive, Hanging, Scene
from stage import Stage
from support import expire, row, until
from workers import worker

from gendurable import Client
from gendurable.db.connection import Connection
from gendurable.db.store import reap
from gendurable.testing.harness import LEASE

PATIENT = {"lease": "60s", "heartbeat": "20s", "drain-timeout": "60s"}


@pytest.fixture
def scene(stage: Stage) -> Callable[..., Scene]:
    return lambda gate="", **more: Scene(str(stage.folder), gate=gate, **more)


def test_a_step_that_sees_its_worker_go_gives_its_row_back(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene: Callable[..., Scene]
):
    plain, keyed = client.insert_many([Attentive.new(scene()), Attentive.new(scene(), partition_key="k")])
    before = {id: row(conn, id) for id in (plain, keyed)}
    with worker(dsn, settings=PATIENT) as leaving:
        stage.wait_for("entered", 2)
        leaving.signal(signal.SIGTERM)
        assert leaving.wait() == 0
        assert leaving.wait_for("drain_finished")["abandoned"] == 0
        assert len(leaving.events("step_committed", outcome="interrupted")) == 2
    for id in (plain, keyed):
        now = row(conn, id)
        assert (now["status"], now["attempt"], now["locked_by"]) == ("runnable", 0, None)
        assert now["eligible_at"] == before[id]["eligible_at"]
    stage.open("on")
    with worker(dsn, "--until-idle") as second:
        assert second.wait() == 0
    assert [client.get(id).result for id in (plain, keyed)] == [{"by": 0}, {"by": 0}]


def test_a_step_whose_claim_was_taken_away_is_told_within_a_heartbeat(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene: Callable[..., Scene]
):
    taken, kept = client.insert_many([Attentive.new(scene()), Attentive.new(scene())])
    with worker(dsn, "--no-reaper", "--queues", "default=2", settings={"heartbeat": "500ms"}) as running:
        stage.wait_for("entered", 2)
        conn.execute("begin")  # so that the heartbeat cannot prolong the lease in between
        expire(conn, taken)
        assert [each.id for each in reap(conn, worker="reaper", limit=1, lease=LEASE)] == [taken]
        conn.execute("update gen_durable set eligible_at = now() + interval '1 hour' where id = %s", [taken])
        conn.execute("commit")
        [told] = stage.wait_for("cancelled")
        assert told["id"] == taken
        assert running.wait_for("claim_lost")["id"] == taken
        assert running.wait_for("outcome_stale")["id"] == taken
        stage.open("on")
        until(lambda: row(conn, kept)["status"] == "done", "the other one done")
        assert [each["id"] for each in running.events("claim_lost")] == [taken]
    assert row(conn, taken)["status"] == "runnable"


def test_too_many_hanging_steps_end_the_process_for_its_supervisor(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene: Callable[..., Scene]
):
    ids = client.insert_many(Hanging.new(scene("never")) for _ in range(3))
    with worker(dsn, "--queues", "default=3", environment={"max_abandoned": "2"}, settings=PATIENT) as doomed:
        assert doomed.wait() == 1
        [said] = doomed.events("too_many_abandoned")
        assert (said["abandoned"], said["limit"]) == (3, 2)
        assert len(doomed.events("thread_abandoned")) == 3
        assert "Traceback" not in doomed.log
    assert {row(conn, id)["last_error"] for id in ids} == {"StepTimeout: step 'perform' took longer than its 0.5 s"}
    assert {row(conn, id)["status"] for id in ids} == {"failed"}
