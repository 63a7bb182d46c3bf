"""Races between real workers and the command line, forced by a lock that the test holds at the critical moment."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from facts import AUDIT, claims, committed_twice, done, terminating, until_done, waiting
from machines import Noop, Parent, Player, Scene, Waiter
from races import shut_gate, snapshot
from stage import Stage
from support import expire, hold, row, until
from workers import worker

from gendurable import Client
from gendurable.db import store
from gendurable.db.connection import Connection

DEBUG = ("--log-level", "debug")
PLAYS = ("next", "retry", "await", "spawn", "done", "stop")

# The transaction is complete but for its commit, which waits for the gate. Locks may take their time here.
PAUSE = """
create function wait_at_gate() returns trigger language plpgsql set lock_timeout = 0 as $$
begin
  perform pg_advisory_xact_lock_shared(724);
  return null;
end $$;
"""
PAUSE_PARK = """
create constraint trigger pause after update on gen_durable deferrable initially deferred
  for each row when (new.status = 'awaiting_signal') execute function wait_at_gate();
"""
PAUSE_JOIN = """
create constraint trigger pause after update on gen_durable deferrable initially deferred
  for each row when (old.status = 'awaiting_children') execute function wait_at_gate();
"""
PAUSE_DELIVERY = """
create constraint trigger pause after insert on signals deferrable initially deferred
  for each row execute function wait_at_gate();
"""


class Signal:
    """`gendurable signal` under way."""

    def __init__(self, dsn: str, conn: Connection, id: int) -> None:
        self._conn = conn
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gendurable", "signal", str(id), "go", '{"n": 1}', "--json", "--dsn", dsn],
            env={key: value for key, value in os.environ.items() if not key.startswith(("GENDURABLE_", "PG"))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_waiting(self, *, or_over: bool = False) -> None:
        """Wait until it waits for a lock; it must not get through instead, unless the test can live with that."""

        def is_waiting() -> bool:
            if self._process.poll() is not None:
                assert or_over, self._process.communicate()
                return True
            return waiting(self._conn, "gendurable cli") > 0

        until(is_waiting, "the signal waiting for a lock")

    def result(self) -> dict[str, Any]:
        out, err = self._process.communicate(timeout=30)
        assert self._process.returncode == 0, err
        return dict(json.loads(out))


@pytest.fixture
def send() -> Iterator[Callable[[str, Connection, int], Signal]]:
    """Start `gendurable signal` in the background."""
    sent: list[Signal] = []

    def start(dsn: str, conn: Connection, id: int) -> Signal:
        sent.append(Signal(dsn, conn, id))
        return sent[-1]

    yield start
    for signal in sent:
        signal._process.kill()
        signal._process.communicate()


def waiter(client: Client, stage: Stage) -> int:
    return client.insert(Waiter.new(Scene(str(stage.folder), gate="g")))


def until_executing(conn: Connection, id: int) -> None:
    until(lambda: row(conn, id)["status"] == "executing", "the step running")


# The lost wake-up (PITFALLS 2.1-1).


def test_a_signal_sent_between_a_park_and_its_commit_wakes(
    own_dsn: str, own_conn: Connection, stage: Stage, send: Callable[..., Signal]
):
    own_conn.execute(PAUSE + PAUSE_PARK)
    with Client(own_dsn) as client, worker(own_dsn):
        id = waiter(client, stage)
        with shut_gate(own_conn):
            stage.open("g")
            until(lambda: waiting(own_conn, "gendurable committer"), "the park waiting with its commit")
            signal = send(own_dsn, own_conn, id)
            # One that does not wait for the park has seen a running step, and woken nobody.
            signal.until_waiting(or_over=True)
        assert signal.result()["woke"]
        until_done(own_conn, [id])
    assert row(own_conn, id)["result"] == {"got": [{"n": 1}]}


def test_a_step_that_parks_between_a_signal_and_its_commit_is_woken(
    own_dsn: str, own_conn: Connection, stage: Stage, send: Callable[..., Signal]
):
    own_conn.execute(PAUSE + PAUSE_DELIVERY)
    with Client(own_dsn) as client, worker(own_dsn, *DEBUG) as running:
        id = waiter(client, stage)
        until_executing(own_conn, id)
        with shut_gate(own_conn):
            signal = send(own_dsn, own_conn, id)
            signal.until_waiting()
            stage.open("g")
            # A park that does not wait for the signal has not seen it, and nobody will look again.
            until(
                lambda: running.events("outcome_deferred") or row(own_conn, id)["status"] == "awaiting_signal",
                "the park put aside, or wrongly done",
            )
        assert not signal.result()["woke"]
        until_done(own_conn, [id])
    assert row(own_conn, id)["result"] == {"got": [{"n": 1}]}


@pytest.mark.parametrize("first", ["worker", "signal"])
def test_a_worker_and_a_signal_that_both_wait_for_the_row_miss_each_other_in_no_order(
    dsn: str, new_conn: Callable[[], Connection], stage: Stage, send: Callable[..., Signal], first: str
):
    conn = new_conn()
    with Client(dsn) as client, worker(dsn, *DEBUG) as running:
        id = waiter(client, stage)
        until_executing(conn, id)
        with hold(new_conn(), id):
            if first == "worker":
                stage.open("g")
                running.wait_for("outcome_deferred", id=id)
            signal = send(dsn, conn, id)
            signal.until_waiting()
            if first == "signal":
                stage.open("g")
                running.wait_for("outcome_deferred", id=id)
        signal.result()
        until_done(conn, [id])
    assert row(conn, id)["result"] == {"got": [{"n": 1}]}


# The stale outcome (2.1-2).


def test_the_outcome_of_a_worker_that_has_lost_its_lease_changes_nothing_whatever_it_is(
    dsn: str, client: Client, conn: Connection, stage: Stage
):
    scenes = [Scene(str(stage.folder), gate="g", play=play) for play in PLAYS]
    with worker(dsn, "--queues", f"default={len(PLAYS)}", settings={"lease": "60s"}) as stale:
        ids = [client.insert(Player.new(scene)) for scene in scenes]
        until(lambda: claims(conn, ids) == len(PLAYS), "all claimed")
        with conn.transaction():
            expire(conn, *ids)
            reaped = store.reap(conn, worker="reaper", limit=100, lease=timedelta(minutes=1)).all()
        assert len(reaped) == len(PLAYS)
        with worker(dsn, settings={"lease": "60s"}) as other:
            stage.open("g.1")  # for the second executions only
            until(lambda: len(other.events("step_committed")) == len(PLAYS), "all taken over")
        before = snapshot(conn)
        stage.open("g.0")
        until(lambda: len(stale.events("outcome_stale")) == len(PLAYS), "all found stale")
        assert not stale.events("step_committed")
        assert sorted(event["id"] for event in stale.events("outcome_stale")) == ids
    assert snapshot(conn) == before


# The barrier.


def test_children_that_finish_on_two_workers_while_the_parent_is_held_are_counted_once_each(
    dsn: str, client: Client, conn: Connection, new_conn: Callable[[], Connection], stage: Stage
):
    with worker(dsn, *DEBUG, "--queues", "default=3") as one, worker(dsn, *DEBUG, "--queues", "default=3") as other:
        one.started()
        other.started()
        parent = client.insert(Parent.new(Scene(str(stage.folder), gate="c", count=4)))
        entered = stage.wait_for("entered", 4)
        assert {note["pid"] for note in entered} == {one.pid, other.pid}
        children = [note["id"] for note in entered]
        with hold(new_conn(), parent):
            stage.open("c0", "c1", "c2", "c3")
            one.wait_for("outcome_deferred")
            other.wait_for("outcome_deferred")
            until_done(conn, [client.insert(Noop.new())])
            assert done(conn, children) == 0
            assert row(conn, parent)["children_pending"] == 4
        until_done(conn, [parent, *children])
    [joined] = stage.notes("joined")
    assert joined["children"] == ["done"] * 4
    assert row(conn, parent)["children_pending"] == 0


def test_a_child_that_ends_while_another_end_is_being_committed_is_counted_too(
    own_dsn: str, own_conn: Connection, stage: Stage
):
    own_conn.execute(PAUSE + PAUSE_JOIN)
    alone = ("--queues", "default=1")
    with Client(own_dsn) as client, worker(own_dsn, *alone) as one, worker(own_dsn, *alone) as other:
        one.started()
        other.started()
        parent = client.insert(Parent.new(Scene(str(stage.folder), gate="c", count=2)))
        stage.wait_for("entered", 2)
        with shut_gate(own_conn):
            stage.open("c0")
            until(lambda: waiting(own_conn, "gendurable committer") == 1, "the first end waiting with its commit")
            stage.open("c1")
            until(lambda: waiting(own_conn, "gendurable committer") == 2, "the second end waiting for the parent")
        until_done(own_conn, [parent])
    assert row(own_conn, parent)["children_pending"] == 0
    assert len(stage.notes("joined")) == 1


def test_a_fan_in_is_exact_while_every_session_is_terminated_again_and_again(
    own_dsn: str, own_conn: Connection, stage: Stage
):
    own_conn.execute(AUDIT)
    scene = Scene(str(stage.folder), count=40)
    flags = ("--queues", "default=8")
    with Client(own_dsn) as client, worker(own_dsn, *flags) as one, worker(own_dsn, *flags) as other:
        one.started()
        other.started()
        parents: list[int] = []
        with terminating(own_dsn) as ended:
            while len(ended) < 15:
                parents.append(client.insert(Parent.new(scene)))
                until(lambda: len(ended) > len(parents), "the next blow")
        assert sum(ended) > 15
        until_done(own_conn, parents)
        assert one.process.poll() is None
        assert other.process.poll() is None
    for parent in parents:
        assert len(row(own_conn, parent)["result"]["children"]) == 40
        assert row(own_conn, parent)["children_pending"] == 0
    assert all(note["children"] == ["done"] * 40 for note in stage.notes("joined"))
    assert committed_twice(own_conn) == []
