"""Instances that a real worker is running, ended from outside."""

from collections.abc import Iterator

import pytest
from machines import Gated, Refunding, Scene
from stage import Stage
from support import until
from workers import WorkerProcess, worker

from gendurable import Client


@pytest.fixture(scope="module")
def serving(migrated_database: str) -> Iterator[WorkerProcess]:
    with worker(migrated_database, "--queues", "default=6") as running:
        yield running.started()


def test_a_running_step_that_was_cancelled_changes_nothing(serving: WorkerProcess, client: Client, stage: Stage):
    id = client.insert(Gated.new(Scene(str(stage.folder), gate="g")))
    stage.wait_for("entered", id=id)
    assert client.cancel(id, reason="no longer wanted")
    assert client.get(id).status == "cancelled"
    stage.open("g")
    serving.wait_for("outcome_stale", id=id)
    instance = client.wait(id, timeout=20)
    assert (instance.status, instance.last_error, instance.result) == ("cancelled", "no longer wanted", None)


def test_a_running_step_does_not_outlive_the_deadline_of_its_instance(
    serving: WorkerProcess, client: Client, stage: Stage
):
    id = client.insert(Gated.new(Scene(str(stage.folder), gate="g"), deadline=1))
    stage.wait_for("entered", id=id)
    assert serving.wait_for("deadline_exceeded", id=id)["fsm"] == "gated"
    instance = client.wait(id, timeout=20)
    assert instance.status == "failed"
    assert instance.last_error.startswith("DeadlineExceeded: ")
    stage.open("g")
    serving.wait_for("outcome_stale", id=id)
    assert client.get(id) == instance


@pytest.mark.parametrize("key", [None, "k"])
def test_a_running_instance_with_a_hook_is_told_and_compensates(
    serving: WorkerProcess, client: Client, stage: Stage, key: str | None
):
    id = client.insert(Refunding.new(Scene(str(stage.folder)), partition_key=key))
    stage.wait_for("entered", id=id)
    assert client.cancel(id, reason="no longer wanted")
    instance = client.wait(id, timeout=20)
    assert (instance.status, instance.result, instance.last_error) == (
        "cancelled",
        {"refunded": True},
        "no longer wanted",
    )
    stage.wait_for("cancelled", id=id)
    [refunded] = stage.notes("refunded", id=id)
    assert refunded["reason"] == "no longer wanted"
    serving.wait_for("outcome_stale", id=id)
    if key is not None:
        [told] = stage.notes("cancelled", id=id)
        assert told["time"] <= refunded["time"], "one at a time of a key, the hook included"


def test_whoever_waits_hears_of_a_cancelled_instance(serving: WorkerProcess, client: Client, stage: Stage):
    id = client.insert(Gated.new(Scene(str(stage.folder), gate="g"), schedule_in=3600))
    assert client.cancel(id)
    assert until(lambda: client.wait(id, timeout=5).status == "cancelled")
