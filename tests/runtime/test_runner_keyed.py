"""Partitioned steps that share a session: each under its key's lock, one commit for all, and no one held up by another."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from races import NewConn, claim, insert, statuses
from scripted import Scripted, raises
from support import Background, hold, row, until

from gendurable import Done
from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection, Database
from gendurable.events import (
    BatchCommitted,
    Event,
    LockLost,
    OutcomeLate,
    PartitionContended,
    StepCommitted,
    StepCrashed,
)
from gendurable.runtime.executions import Executions, Timekeeper
from gendurable.runtime.loop import Wires
from gendurable.runtime.partitions import LockConnections
from gendurable.runtime.runner import SECONDS_UNCOMMITTED, Runner
from gendurable.service.worker import LOCK_TIMEOUT


class Told:
    """What a runner says and hands back."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.settled: list[int] = []
        self.unstarted: list[int] = []

    def kinds(self, *kinds: type) -> list[int]:
        return [each.id for each in self.events if isinstance(each, kinds)]  # type: ignore[attr-defined]

    @property
    def batches(self) -> list[int]:
        return [each.size for each in self.events if isinstance(each, BatchCommitted)]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def runner(dsn: str, told: Told) -> Iterator[Callable[..., Runner]]:
    locks = LockConnections(lambda: Database(dsn).connect("lock", lock_timeout=LOCK_TIMEOUT), 1)

    def make(stopping: threading.Event | None = None, **plays: Any) -> Runner:
        return Runner(
            machines={("f", 1): Scripted(**plays)},
            locks=locks,
            executions=Executions(threading.Event()),
            emit=told.events.append,
            submit=lambda _: pytest.fail("a keyed outcome must not leave its session"),
            on_settled=lambda claims, _: told.settled.extend(claim.id for claim in claims),
            on_contended=lambda _: None,
            on_unstarted=lambda claim: told.unstarted.append(claim.id),
            learn=lambda *_: None,
            stopping=stopping or threading.Event(),
        )

    yield make
    locks.close_idle(0)


def keyed(conn: Connection, count: int) -> list[Claim]:
    for number in range(count):
        insert(conn, partition_key=f"k{number}", step="start")
    return claim(conn)


@contextmanager
def all_free(new_conn: NewConn, count: int) -> Iterator[None]:
    """After the block nobody holds any of the keys' locks."""
    yield
    keys = [f"k{number}" for number in range(count)]
    assert store.lock_partitions(new_conn(), keys=keys).all() == keys


def test_they_are_committed_together(conn: Connection, new_conn: NewConn, runner: Callable[..., Runner], told: Told):
    claims = keyed(conn, 5)
    with all_free(new_conn, 5):
        runner(start=Done()).run(claims)
    ids = [claim.id for claim in claims]
    assert statuses(conn, ids) == ["done"] * 5
    assert told.settled == told.kinds(StepCommitted) == ids
    assert told.batches == [5]


def test_each_runs_under_the_lock_of_its_key(conn: Connection, new_conn: NewConn, runner: Callable[..., Runner]):
    other, claims = new_conn(), keyed(conn, 2)
    keys = {claim.id: claim.partition_key for claim in claims}
    runner(start=lambda ctx: Done({"free": store.lock_partitions(other, keys=[keys[ctx.id]]).all()})).run(claims)
    assert [found for (found,) in conn.execute("select result->'free' from gen_durable")] == [[], []]


def test_a_crash_among_them_is_left_to_the_reaper_and_the_others_are_written(
    conn: Connection, new_conn: NewConn, runner: Callable[..., Runner], told: Told
):
    claims = keyed(conn, 3)
    with all_free(new_conn, 3):
        runner(start=[Done(), raises(SystemExit()), Done()]).run(claims)
    assert statuses(conn, [claim.id for claim in claims]) == ["done", "executing", "done"]
    assert told.kinds(StepCrashed) == [claims[1].id]
    assert sorted(told.settled) == [claim.id for claim in claims]


def test_one_whose_key_is_locked_elsewhere_goes_back_and_the_others_run(
    conn: Connection, new_conn: NewConn, runner: Callable[..., Runner], told: Told
):
    claims = keyed(conn, 3)
    store.lock_partitions(new_conn(), keys=["k1"])
    runner(start=Done()).run(claims)
    assert statuses(conn, [claim.id for claim in claims]) == ["done", "runnable", "done"]
    assert told.kinds(PartitionContended) == [claims[1].id]
    assert row(conn, claims[1].id)["attempt"] == 0


def test_a_row_that_somebody_holds_does_not_hold_up_the_others(
    conn: Connection, new_conn: NewConn, background: Background, runner: Callable[..., Runner]
):
    claims = keyed(conn, 3)
    ids = [claim.id for claim in claims]
    with hold(new_conn(), ids[0]):
        running = background.start(runner(start=Done()).run, claims)
        until(lambda: statuses(conn, ids) == ["executing", "done", "done"], "the others being written")
    running.result(20)
    assert statuses(conn, ids) == ["done"] * 3


def test_with_the_session_all_that_is_not_committed_is_lost(
    conn: Connection, new_conn: NewConn, runner: Callable[..., Runner], told: Told
):
    claims = keyed(conn, 3)

    def cut(_: Any) -> Done:
        query = "select pg_terminate_backend(pid, 20000) from pg_stat_activity where application_name = 'lock'"
        conn.execute(query)
        return Done()

    runner(start=[Done(), cut, Done()]).run(claims)
    assert statuses(conn, [claim.id for claim in claims]) == ["executing"] * 3
    assert told.kinds(LockLost) == told.settled == [claim.id for claim in claims]


def test_what_has_been_performed_does_not_wait_for_many_slow_ones(
    conn: Connection, background: Background, runner: Callable[..., Runner], told: Told
):
    claims = keyed(conn, 3)
    go_on = threading.Event()

    def longer_than_expected(_: Any) -> Done:
        threading.Event().wait(2 * SECONDS_UNCOMMITTED)
        return Done()

    def slow(_: Any) -> Done:
        assert go_on.wait(20)
        return Done()

    running = background.start(runner(start=[longer_than_expected, slow, Done()]).run, claims)
    until(lambda: told.settled == [claims[0].id], "the first being committed while the second runs")
    go_on.set()
    running.result(20)
    assert told.settled == [claim.id for claim in claims]


def test_what_has_not_begun_when_the_worker_drains_goes_back(
    conn: Connection, new_conn: NewConn, runner: Callable[..., Runner], told: Told
):
    claims = keyed(conn, 3)
    stopping = threading.Event()

    def told_to_stop(_: Any) -> Done:
        stopping.set()
        return Done()

    with all_free(new_conn, 3):
        runner(stopping, start=[told_to_stop]).run(claims)
    assert told.settled == [claims[0].id]
    assert told.unstarted == [claim.id for claim in claims[1:]]


def test_one_that_takes_too_long_leaves_the_session_and_what_is_left_to_do_to_another_thread(
    conn: Connection, new_conn: NewConn, background: Background, runner: Callable[..., Runner], told: Told
):
    entered, go_on = threading.Event(), threading.Event()
    ran_on: list[int] = []

    def hang(_: Any) -> Done:
        entered.set()
        assert go_on.wait(60)
        return Done({"by": "the late one"})

    def note(_: Any) -> Done:
        ran_on.append(threading.get_ident())
        return Done()

    claims = keyed(conn, 4)
    running = runner(start=[note, hang, note, note])
    with all_free(new_conn, 4):
        hanging = background.start(running.run, claims)
        assert entered.wait(20)
        [execution] = running.executions._running.values()
        assert running.executions.end(execution)
        assert running.time_out(execution) is False, "it is through, and its slot its own"
        assert statuses(conn, [claim.id for claim in claims]) == ["done", "failed", "done", "done"]
        assert ran_on[1:] == [threading.get_ident()] * 2
        assert ran_on[0] != threading.get_ident()
        go_on.set()
        assert hanging.result(timeout=20) is True, "superseded"
    assert told.kinds(OutcomeLate) == [claims[1].id]
    assert sorted(told.settled) == [claim.id for claim in claims]
    assert running.locks.used == 0
    assert running.locks.idle == 1


@contextmanager
def hanging(
    conn: Connection, background: Background, runner: Callable[..., Runner]
) -> Iterator[tuple[Runner, list[Claim]]]:
    """Three claims that share a session; the second hangs for the length of the block, and is then done."""
    entered, go_on = threading.Event(), threading.Event()

    def hang(_: Any) -> Done:
        entered.set()
        assert go_on.wait(60)
        return Done()

    claims = keyed(conn, 3)
    running = runner(start=[Done(), hang, Done()])
    ending = background.start(running.run, claims)
    assert entered.wait(20)
    try:
        yield running, claims
    finally:
        go_on.set()
        assert ending.result(20) is False


def test_one_that_takes_its_time_holds_up_neither_those_before_it_nor_those_behind_it(
    conn: Connection, new_conn: NewConn, background: Background, runner: Callable[..., Runner], told: Told
):
    other = new_conn()
    with hanging(conn, background, runner) as (running, claims):
        first, slow, last = (claim.id for claim in claims)
        [execution] = running.executions._running.values()
        assert told.settled == []
        running.relieve(execution)
        assert statuses(conn, [first, slow, last]) == ["done", "executing", "executing"]
        assert (told.settled, told.unstarted) == ([first], [last])
        assert store.lock_partitions(other, keys=["k0", "k1", "k2"]).all() == ["k0", "k2"]
    assert statuses(conn, [slow, last]) == ["done", "executing"]
    assert store.lock_partitions(other, keys=["k1"]).all() == ["k1"]
    running.relieve(execution)  # too late, and nobody's to do
    assert (told.settled, told.unstarted) == ([first, slow], [last])


def test_what_shares_a_session_with_one_that_takes_its_time_learns_that_it_is_lost(
    conn: Connection, background: Background, runner: Callable[..., Runner], told: Told
):
    with hanging(conn, background, runner) as (running, claims):
        first, slow, last = (claim.id for claim in claims)
        [execution] = running.executions._running.values()
        conn.execute("select pg_terminate_backend(pid, 20000) from pg_stat_activity where application_name = 'lock'")
        running.relieve(execution)
        assert told.kinds(LockLost) == told.settled == [first, last]
    assert told.kinds(LockLost) == told.settled == [first, last, slow]
    assert statuses(conn, [first, slow, last]) == ["executing"] * 3


def test_others_wait_a_moment_for_one_that_shares_their_session_and_no_longer(
    conn: Connection, background: Background, runner: Callable[..., Runner]
):
    slow: list[int] = []
    with hanging(conn, background, runner) as (running, claims):
        wires = Wires(lambda _: None, lambda: None)
        timekeeper = Timekeeper(
            running.executions,
            wires,
            on_overdue=lambda _: pytest.fail("it has no timeout"),
            on_slow=lambda execution: slow.append(execution.claim.id),
        )
        timekeeper.start()
        until(lambda: slow == [claims[1].id], "the slow one noticed")
    running.executions.close()
    assert slow == [claims[1].id]
