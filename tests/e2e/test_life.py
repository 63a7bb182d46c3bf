"""An instance's life under a real worker: outcomes, signals, uniqueness, keys, children."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
from machines import Collector, Gated, Parent, Player, Scene, Stepwise, Waiter
from stage import Stage
from support import inbox, row, until
from workers import WorkerProcess, worker

from gendurable import Client, Instance
from gendurable.db.connection import Connection

HOUR = timedelta(hours=1)


@pytest.fixture(scope="module", autouse=True)
def serving(migrated_database: str) -> Iterator[WorkerProcess]:
    """One worker for all tests here: each has its own rows and its own stage."""
    with worker(migrated_database, "--queues", "default=6,children=3") as running:
        yield running.started()


@pytest.fixture
def play(client: Client, stage: Stage) -> Callable[..., Instance]:
    """Have a player play an outcome, and return its row once it has settled in the given status."""

    def played(outcome: str, status: str, attempt: int = 0) -> Instance:
        id = client.insert(Player.new(Scene(str(stage.folder), play=outcome)))

        def settled() -> Instance | None:
            now = client.get(id)
            return now if (now.status, now.attempt) == (status, attempt) and now.fence > 0 else None

        return until(settled, f"{outcome} settled as {status}")

    return played


def is_free(instance: Instance) -> bool:
    return instance.locked_by is None and instance.lease_expires_at is None


def is_about(moment: datetime | None, expected: datetime) -> bool:
    return moment is not None and abs(moment - expected) < timedelta(seconds=1)


def test_next_leaves_the_row_runnable_at_the_other_step_when_its_delay_is_over(play: Callable[..., Instance]):
    instance = play("next", "runnable")

    assert (instance.step, instance.attempt, instance.state["by"]) == ("later", 0, 0)
    assert is_about(instance.eligible_at, instance.updated_at + HOUR)
    assert is_free(instance)


def test_retry_leaves_the_row_runnable_at_the_same_step_with_one_more_attempt(play: Callable[..., Instance]):
    instance = play("retry", "runnable", attempt=1)

    assert (instance.step, instance.state["by"]) == ("start", 0)
    assert is_about(instance.eligible_at, instance.updated_at + HOUR)
    assert is_free(instance)


@pytest.mark.parametrize(("outcome", "by"), [("again", 0), ("snooze", None)])
def test_again_and_snooze_leave_the_row_runnable_at_the_same_step_with_no_attempt_spent(
    play: Callable[..., Instance], serving: WorkerProcess, outcome: str, by: int | None
):
    failed, again = serving.events("step_failed"), serving.events("step_committed", outcome="again")
    instance = play(outcome, "runnable")

    assert (instance.step, instance.state["by"], instance.last_error) == ("start", by, None)
    assert is_about(instance.eligible_at, instance.updated_at + HOUR)
    assert is_free(instance)
    until(lambda: len(serving.events("step_committed", outcome="again")) > len(again), "a line about it")
    assert serving.events("step_failed") == failed, "to put a step off is no failure of it"


def test_await_parks_the_row_at_the_step_that_follows(play: Callable[..., Instance]):
    instance = play("await", "awaiting_signal")

    assert (instance.step, instance.awaits, instance.state["by"]) == ("later", ["a", "b"], 0)
    assert is_about(instance.await_deadline, instance.updated_at + HOUR)
    assert is_free(instance)


def test_spawn_parks_the_row_on_the_barrier_and_inserts_the_children(play: Callable[..., Instance], conn: Connection):
    instance = play("spawn", "awaiting_children")

    assert (instance.step, instance.children_pending, instance.state["by"]) == ("later", 2, 0)
    assert is_free(instance)
    children = conn.execute("select status, attempt from gen_durable where parent_id = %s", [instance.id]).fetchall()
    assert children == [("runnable", 0), ("runnable", 0)]


def test_done_ends_the_instance_with_its_result_and_the_state_it_had(play: Callable[..., Instance]):
    instance = play("done", "done")

    assert (instance.result, instance.state["by"]) == ({"by": 0}, None)
    assert is_free(instance)


def test_stop_ends_the_instance_with_its_reason(play: Callable[..., Instance]):
    instance = play("stop", "failed")

    assert (instance.last_error, instance.result) == ("as the test wished", None)
    assert is_free(instance)


def test_an_exception_goes_to_the_handler_whose_outcome_counts(
    play: Callable[..., Instance], stage: Stage, serving: WorkerProcess
):
    instance = play("raise", "failed", attempt=1)

    assert instance.last_error == "ValueError: attempt 1"
    assert [note["attempt"] for note in stage.notes("handled")] == [0, 1]
    failed = serving.wait_for("step_failed", id=instance.id, attempt=1)
    assert (failed["kind"], failed["error"]) == ("exception", "ValueError: attempt 1")


def test_what_a_step_committed_is_what_the_next_one_sees(client: Client, stage: Stage):
    id = client.insert(Stepwise.new(Scene(str(stage.folder))))

    assert client.wait(id, timeout=20).result == {"by": 0}
    assert [note["step"] for note in stage.notes("entered", id=id)] == ["start", "finish"]


def test_a_signal_wakes_whoever_waits_for_it_and_is_gone_afterwards(client: Client, conn: Connection, stage: Stage):
    id = client.insert(Waiter.new(Scene(str(stage.folder))))
    until(lambda: row(conn, id)["status"] == "awaiting_signal", "the waiter parked")

    assert client.signal(id, "elsewhere").woke is False
    assert client.signal(id, "go", {"amount": 7}, dedup_key="once").woke is True
    assert client.wait(id, timeout=20).result == {"got": [{"amount": 7}]}
    assert inbox(conn, id) == []
    assert len(stage.notes("went", id=id)) == 1


def test_signals_that_come_before_the_await_are_not_lost_and_duplicates_count_once(client: Client, stage: Stage):
    id = client.insert(Waiter.new(Scene(str(stage.folder), gate="await")))
    until(lambda: client.get(id).status == "executing", "the waiter running")

    client.signal(id, "go", 1, dedup_key="one")
    assert client.signal(id, "go", 1, dedup_key="one").duplicate is True
    client.signal(id, "go", 2, dedup_key="two")
    stage.open("await")

    assert client.wait(id, timeout=20).result == {"got": [1, 2]}


def test_a_pack_of_signals_is_gathered_without_spinning(client: Client, conn: Connection, stage: Stage):
    id = client.insert(Collector.new(Scene(str(stage.folder))))

    def is_parked_after(claims: int) -> bool:
        now = row(conn, id)
        return now["status"] == "awaiting_signal" and now["fence"] == claims

    until(lambda: is_parked_after(1), "the collector parked")
    client.signal(id, "a")
    until(lambda: is_parked_after(2), "the collector parked with a")
    client.signal(id, "b")
    until(lambda: is_parked_after(3), "the collector parked with a and b")
    client.signal(id, "c")

    assert client.wait(id, timeout=20).result == {"names": ["a", "b", "c"]}
    assert [note["names"] for note in stage.notes("looked")] == [["a"], ["a", "b"], ["a", "b", "c"]]


def test_a_unique_key_admits_one_of_many_who_insert_at_once(client: Client, stage: Stage):
    news = [Gated.new(Scene(str(stage.folder), gate="on"), unique_key=f"key {n}") for n in range(20)]

    with ThreadPoolExecutor(8) as threads:
        batches = list(threads.map(lambda place: client.insert_many(news[place:] + news[:place]), range(8)))
    ids = sorted(id for batch in batches for id in batch)
    assert len(ids) == len(set(ids)) == 20

    stage.open("on")
    for id in ids:
        assert client.wait(id, timeout=20).status == "done"
    assert len(client.insert_many(news)) == 20, "the keys are free again once their instances have ended"


def test_rows_of_one_key_run_one_after_the_other_in_order(client: Client, stage: Stage):
    ids = [client.insert(Gated.new(Scene(str(stage.folder)), partition_key="customer 7")) for _ in range(12)]

    for id in ids:
        assert client.wait(id, timeout=20).status == "done"
    expected = [(what, id) for id in ids for what in ("entered", "left")]
    assert [(note["what"], note["id"]) for note in stage.notes()] == expected


def test_rows_of_different_keys_run_side_by_side(client: Client, stage: Stage):
    ids = [client.insert(Gated.new(Scene(str(stage.folder), gate="on"), partition_key=f"key {n}")) for n in range(4)]

    stage.wait_for("entered", 4)
    assert stage.notes("left") == []
    stage.open("on")
    for id in ids:
        assert client.wait(id, timeout=20).attempt == 0


def test_a_parent_goes_on_once_all_its_children_have_ended(client: Client, conn: Connection, stage: Stage):
    id = client.insert(Parent.new(Scene(str(stage.folder), gate="child ", count=3, queue="children")))
    stage.wait_for("entered", 3)

    stage.open("child 2", "child 0")
    until(lambda: row(conn, id)["children_pending"] == 1, "two children joined")
    assert row(conn, id)["status"] == "awaiting_children"
    stage.open("child 1")

    assert client.wait(id, timeout=20).result == {"children": [{"by": 0}] * 3}
    assert [note["what"] for note in stage.notes()] == ["entered"] * 3 + ["left"] * 3 + ["joined"]
