"""Paused queues: nothing is claimed from them, and a pause and a claim that meet come one after the other."""

from collections.abc import Callable
from typing import Any

import pytest
from races import GATE, LEASE, MACHINES, NewConn, changed, claim, goes_on, insert, is_done, shut_gate, statuses, written
from scripted import Scripted
from support import Background

from gendurable import Done
from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import commit, pause, resume
from gendurable.errors import NotPaused
from gendurable.testing import Harness

CLAIM: dict[str, Any] = {"machines": MACHINES, "worker": "a", "limit": 100, "lease": LEASE}
Claiming = Callable[[Connection, str], list[Claim]]


@pytest.fixture(params=["claim", "claim_plain"])
def take(request: pytest.FixtureRequest) -> Claiming:
    """Both statements that claim."""
    statement = getattr(store, request.param)
    return lambda conn, queue: statement(conn, queue=queue, **CLAIM).all()


def test_nothing_is_claimed_from_a_paused_queue_until_it_is_resumed(conn: Connection, take: Claiming):
    id, elsewhere = insert(conn), insert(conn, queue="other")
    assert pause(conn, "q")
    assert not pause(conn, "q"), "it was already"
    assert take(conn, "q") == []
    assert [each.id for each in take(conn, "other")] == [elsewhere]
    resume(conn, "q")
    assert [each.id for each in take(conn, "q")] == [id]
    with pytest.raises(NotPaused, match="'q' is not paused"):
        resume(conn, "q")


def test_keyed_rows_of_a_paused_queue_are_left_alone_and_so_are_their_siblings(conn: Connection):
    for _ in range(3):
        insert(conn, partition_key="k")
    pause(conn, "q")
    assert claim(conn) == []


def test_what_was_claimed_goes_on_and_what_it_leads_to_waits(conn: Connection):
    ids = [insert(conn), insert(conn)]
    first, second = claim(conn)
    pause(conn, "q")
    assert written(commit(conn, [goes_on(first), is_done(second)])) == set(ids)
    assert statuses(conn, ids) == ["runnable", "done"]
    assert claim(conn) == []


def test_only_what_could_run_counts_as_work(conn: Connection):
    def has_work() -> bool | None:
        return store.has_work(conn, queues=["q", "other"], machines=MACHINES, keyed=True).one()

    insert(conn)
    insert(conn, partition_key="k")
    pause(conn, "q")
    assert has_work() is False, "a worker until idle would wait for ever"
    insert(conn, queue="other")
    assert has_work() is True
    [running] = claim(conn, queue="other")
    pause(conn, "other")
    assert has_work() is True, "what runs in a paused queue is still work"
    commit(conn, [is_done(running)])
    assert has_work() is False


def test_a_drain_leaves_paused_queues_out(harness: Callable[..., Harness]):
    durable = harness(Scripted(start=Done()))
    durable.insert(Scripted.new({}, queue="slow"))
    durable.insert(Scripted.new({}))
    assert durable.pause("slow")
    assert durable.drain() == {"done": 1}
    assert durable.drain("slow") == {}
    durable.resume("slow")
    assert durable.drain() == {"done": 1}


# A pause against a claim.


def test_a_pause_that_is_not_committed_holds_nobody_up(new_conn: NewConn, take: Claiming):
    pausing, claiming = new_conn(), new_conn()
    early = insert(claiming)
    pausing.execute("begin")
    pause(pausing, "q")
    assert [each.id for each in take(claiming, "q")] == [early]
    late = insert(claiming)
    pausing.execute("commit")
    assert take(claiming, "q") == []
    assert statuses(claiming, [early, late]) == ["executing", "runnable"]


def test_a_claim_under_way_is_whole_and_the_last_one(new_conn: NewConn, background: Background):
    holder, claiming, other = new_conn(), new_conn(), new_conn()
    ids = [insert(other), insert(other)]
    under_way = changed(
        lambda conn: store.claim_plain(conn, queue="q", **CLAIM), ("and g.queue =", f"and {GATE} and g.queue =")
    )
    with shut_gate(holder):
        future = background.start_blocked(claiming, under_way, claiming)
        pause(other, "q")
        assert claim(other) == [], "one that begins after the pause finds nothing"
    claimed = future.result(timeout=20)
    assert [row[0] for row in claimed] == ids, "one that began before it takes what it saw"
    assert claim(other) == []


def test_to_ask_first_and_then_claim_would_claim_from_a_paused_queue(new_conn: NewConn):
    asking, pausing = new_conn(), new_conn()
    insert(asking)
    naive = changed(
        lambda conn: store.claim_plain(conn, queue="q", **CLAIM),
        ("and not exists (select from paused_queues p where p.queue = %(queue)s)", ""),
    )
    assert store.is_paused(asking, queue="q").one() is None
    pause(pausing, "q")
    assert claim(asking) == []
    assert len(naive(asking)) == 1
