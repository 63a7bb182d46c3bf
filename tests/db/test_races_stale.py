"""Whoever lost a claim changes nothing, whatever it brings and whenever it comes."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from races import (
    LEASE,
    OUTCOMES,
    NewConn,
    changed,
    claim,
    claim_one,
    family,
    goes_on,
    insert,
    is_done,
    new,
    parks,
    reap,
    signal,
    snapshot,
    spawns,
    statuses,
    written,
)
from support import Background, expire, hold, inbox, row

from gendurable.core.claim import Claim
from gendurable.core.transition import Advance, SpawnChildren, Transition
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import Committed, commit
from gendurable.runtime.committing import settle


def lost_to_nobody(conn: Connection, claimed: Claim) -> None:
    expire(conn, claimed.id)
    assert reap(conn) == [claimed.id]


def lost_to_another(conn: Connection, claimed: Claim) -> None:
    lost_to_nobody(conn, claimed)
    assert claimed.id in [again.id for again in claim(conn, "b")]


def lost_to_itself(conn: Connection, claimed: Claim) -> None:
    """2.3-1: the worker was paused, reaped, and claims its own row anew; only the fence tells the two claims apart."""
    lost_to_nobody(conn, claimed)
    assert claimed.id in [again.id for again in claim(conn, "a")]


def given_back(conn: Connection, claimed: Claim) -> None:
    assert store.release(conn, [claimed]).all() == [claimed.id]


def moved_on(conn: Connection, claimed: Claim) -> None:
    assert written(commit(conn, [goes_on(claimed)])) == {claimed.id}


def parked_since(conn: Connection, claimed: Claim) -> None:
    assert written(commit(conn, [parks(claimed, '["never"]')])) == {claimed.id}


def ended_since(conn: Connection, claimed: Claim) -> None:
    assert written(commit(conn, [is_done(claimed)])) == {claimed.id}


LOSSES = [lost_to_nobody, lost_to_another, lost_to_itself, given_back, moved_on, parked_since, ended_since]


def child_in_mid_step(conn: Connection) -> tuple[int, Claim]:
    """A parent that waits for two children, and the claim of the first, woken by a signal that it was shown."""
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new(), new())])
    first, second = claim(conn)
    commit(conn, [parks(first)])
    signal(conn, first.id)
    signal(conn, first.id, "other")
    [claimed] = claim(conn)
    assert claimed.id == first.id
    assert [each.name for each in claimed.awaited] == ["go"]
    store.release(conn, [second])
    return parent.id, claimed


@pytest.mark.parametrize("kind", OUTCOMES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_stale_outcome_changes_neither_row_nor_inbox_nor_parent_nor_children(
    conn: Connection, kind: str, loss: Callable[[Connection, Claim], None]
):
    # 2.1-2, 2.3-1
    _, claimed = child_in_mid_step(conn)
    loss(conn, claimed)
    before = snapshot(conn)
    outcome = commit(conn, [OUTCOMES[kind](claimed)])
    assert outcome == Committed((), frozenset())
    assert snapshot(conn) == before


def test_without_the_fence_a_worker_that_claimed_its_row_anew_rewinds_it(conn: Connection):
    # 2.3-1: the naive guard asks who holds the row, and the answer is the same worker both times.
    id = insert(conn)
    [old] = claim(conn)
    expire(conn, id)
    reap(conn)
    [again] = claim(conn)
    commit(conn, [goes_on(again, "two")])
    [newest] = claim(conn)
    guarded_by_name = changed(
        lambda c: store.advance(c, [goes_on(old, "rewound")]), ("g.fence = t.fence", "g.locked_by = 'a'")
    )
    conn.execute("begin")
    assert guarded_by_name(conn) == [(id,)]
    assert row(conn, id)["step"] == "rewound"
    conn.execute("rollback")
    assert written(commit(conn, [goes_on(old, "rewound")])) == set()
    assert written(commit(conn, [goes_on(newest, "three")])) == {id}
    assert row(conn, id)["step"] == "three"


@pytest.mark.parametrize("is_old_first", [True, False])
def test_of_two_outcomes_of_one_row_in_a_batch_only_the_newer_claims_counts(conn: Connection, is_old_first: bool):
    # 2.3-1: the paused worker's committer gathers both.
    id = insert(conn)
    signal(conn, id, "keep")
    [old] = claim(conn)
    expire(conn, id)
    reap(conn)
    [newest] = claim(conn)
    stale = evolve(goes_on(old, "rewound"), consumed=(old.inbox[0].id,))
    batch: list[Transition] = [stale, goes_on(newest, "three")]
    settled = settle(conn, batch if is_old_first else batch[::-1])
    assert settled.written == (goes_on(newest, "three"),)
    assert row(conn, id)["step"] == "three"
    assert inbox(conn, id) == ["keep"], "the stale outcome's riders count as little as itself"


@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_batch_that_is_committed_twice_counts_once(conn: Connection, kind: str):
    # The answer to the first commit was lost.
    _, claimed = child_in_mid_step(conn)
    batch = [OUTCOMES[kind](claimed)]
    assert written(commit(conn, batch)) == {claimed.id}
    before = snapshot(conn)
    assert written(commit(conn, batch)) == set()
    assert snapshot(conn) == before


@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_batch_that_is_committed_twice_at_once_counts_once(new_conn: NewConn, background: Background, kind: str):
    # The first try is still under way in its abandoned session.
    conn, first, second, holder = new_conn(), new_conn(), new_conn(), new_conn()
    parent, claimed = child_in_mid_step(conn)
    batch = [OUTCOMES[kind](claimed)]
    with hold(holder, claimed.id):
        tries = [background.start_blocked(each, commit, each, batch) for each in (first, second)]
    assert [written(each.result()) for each in tries] == [{claimed.id}, set()]
    ended = kind in ("done", "stop")
    assert row(conn, parent)["children_pending"] == (1 if ended else 2)
    assert len(family(conn, claimed.id)) == (2 if kind == "spawn" else 0)


def test_an_outcome_that_waited_for_the_reaper_is_stale(conn: Connection, new_conn: NewConn, background: Background):
    reaper = new_conn()
    claimed = claim_one(conn)
    expire(conn, claimed.id)
    reaper.execute("begin")
    assert reap(reaper) == [claimed.id]
    late = background.start_blocked(conn, commit, conn, [is_done(claimed)])
    reaper.execute("commit")
    assert written(late.result()) == set()
    assert row(conn, claimed.id)["status"] == "runnable"


@pytest.mark.parametrize("kind", OUTCOMES)
def test_the_reaper_leaves_alone_what_is_just_being_committed(conn: Connection, new_conn: NewConn, kind: str):
    # 2.1-16: it must not free a parent whose children are about to be inserted.
    worker = new_conn()
    claimed = claim_one(conn)
    expire(conn, claimed.id)
    worker.execute("begin")
    store.lock_claims(worker, [claimed])
    assert reap(conn) == []
    worker.execute("rollback")
    assert written(commit(worker, [OUTCOMES[kind](claimed)])) == {claimed.id}, "late, but nobody was faster"
    assert reap(conn) == []


def test_a_stale_spawn_leaves_no_orphans_that_could_open_the_next_barrier(conn: Connection):
    # 2.1-16
    claimed = claim_one(conn)
    lost_to_another(conn, claimed)
    again = claimed._replace(fence=row(conn, claimed.id)["fence"])
    assert written(commit(conn, [spawns(claimed, new(), new())])) == set()
    assert family(conn, claimed.id) == []
    commit(conn, [spawns(again, new())])
    [child] = claim(conn)
    commit(conn, [is_done(child)])
    assert row(conn, claimed.id)["status"] == "runnable"


def test_an_unguarded_spawn_leaves_orphans(conn: Connection):
    claimed = claim_one(conn)
    lost_to_another(conn, claimed)
    unguarded = changed(
        lambda c: store.spawn(c, [spawns(claimed, new(), new())]), ("where g.fence = t.fence and", "where")
    )
    unguarded(conn)
    assert len(family(conn, claimed.id)) == 2


def test_stale_outcomes_in_a_batch_do_not_hold_the_others_up(conn: Connection):
    ids = [insert(conn) for _ in range(6)]
    claims = claim(conn)
    expire(conn, *ids[::2])
    assert sorted(reap(conn)) == ids[::2]
    batch = [OUTCOMES[kind](claimed) for kind, claimed in zip(OUTCOMES, claims, strict=True)]
    assert written(commit(conn, batch)) == set(ids[1::2])
    assert statuses(conn, ids) == ["runnable", "runnable", "runnable", "awaiting_children", "runnable", "failed"]
    assert [row(conn, id)["attempt"] for id in ids] == [1, 1, 1, 0, 1, 0]


def test_a_lost_claim_can_neither_be_prolonged_nor_given_back(conn: Connection):
    # 2.3-7: an unguarded hand-back would free the next worker's claim.
    claimed = claim_one(conn, "a")
    lost_to_another(conn, claimed)
    before = snapshot(conn)
    assert store.extend_leases(conn, [claimed], lease=LEASE).all() == []
    assert store.release(conn, [claimed]).all() == []
    assert snapshot(conn) == before


def test_a_claim_that_was_given_back_is_as_before_but_for_its_number(conn: Connection):
    id = insert(conn, priority=3)
    before = row(conn, id)
    [claimed] = claim(conn)
    store.release(conn, [claimed])
    kept = {"fence", "updated_at"}
    after = row(conn, id)
    assert {key: value for key, value in after.items() if key not in kept} == {
        key: value for key, value in before.items() if key not in kept
    }


def test_riders_of_an_outcome_touch_only_their_own_inbox(conn: Connection):
    # Consumed ids travel as one list for the whole batch.
    ids = [insert(conn) for _ in range(2)]
    for id in ids:
        signal(conn, id)
    mine, other = claim(conn)
    foreign = other.inbox[0].id

    def consuming(change: Any) -> Advance | SpawnChildren:
        return evolve(change, consumed=(foreign,))

    commit(conn, [consuming(goes_on(mine))])
    assert [inbox(conn, id) for id in ids] == [["go"], ["go"]]
