"""Cancel against everything that may happen to a row at that moment, and trees cancelled while they grow and end."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from races import (
    LEASE,
    NewConn,
    changed,
    claim,
    claim_one,
    errors,
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
    stops,
    written,
)
from support import Background, expire, hold, inbox, row

from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.endings import cancel_level, cancel_now
from gendurable.db.operations import claim_batch, commit
from gendurable.errors import NoTarget


def cancel(conn: Connection, id: int, *, cascade: bool = False) -> bool:
    return cancel_now(conn, id, "no longer wanted", cascade=cascade)


def cancel_uncommitted(conn: Connection, *ids: int) -> list[int]:
    """Begin a transaction and cancel in it; return the children."""
    conn.execute("begin")
    return list(cancel_level(conn, ids, "no longer wanted").children)


def tree(conn: Connection, *, fail_fast: bool = False) -> tuple[int, list[Claim], list[int]]:
    """A parent that waits for two children, of which the first waits for two of its own: parent, claims, grandchildren."""
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new(), new(), fail_fast=fail_fast)])
    first, second = claim(conn)
    commit(conn, [spawns(first, new(), new())])
    return parent.id, [first, second], family(conn, first.id)


# One instance.


def test_a_step_that_commits_first_ends_the_instance_and_leaves_nothing_to_cancel(
    conn: Connection, new_conn: NewConn, background: Background
):
    step, canceller = new_conn(), new_conn()
    claimed = claim_one(conn)
    step.execute("begin")
    store.finish(step, [is_done(claimed)])
    cancelled = background.start_blocked(canceller, cancel, canceller, claimed.id)
    step.execute("commit")
    with pytest.raises(NoTarget):
        cancelled.result()
    assert statuses(conn, [claimed.id]) == ["done"]


@pytest.mark.parametrize("outcome", [goes_on, parks, is_done, stops, lambda claimed: spawns(claimed, new())])
def test_a_step_that_comes_second_changes_nothing(
    conn: Connection, new_conn: NewConn, background: Background, outcome: Callable[[Claim], Any]
):
    step, canceller = new_conn(), new_conn()
    claimed = claim_one(conn)
    cancel_uncommitted(canceller, claimed.id)
    late = background.start_blocked(step, commit, step, [outcome(claimed)])
    canceller.execute("commit")
    assert written(late.result()) == set()
    found = row(conn, claimed.id)
    assert (found["status"], found["last_error"]) == ("cancelled", "no longer wanted")
    assert family(conn, claimed.id) == []
    assert store.extend_leases(conn, [claimed], lease=LEASE).all() == [], "the heartbeat learns of it"


@pytest.mark.parametrize("outcome", [goes_on, parks, lambda claimed: spawns(claimed, new())])
def test_an_instance_that_was_just_moving_is_cancelled_where_it_arrives(
    conn: Connection, new_conn: NewConn, background: Background, outcome: Callable[[Claim], Any]
):
    holder, step, canceller = new_conn(), new_conn(), new_conn()
    claimed = claim_one(conn)
    with hold(holder, claimed.id):
        moved = background.start_blocked(step, commit, step, [outcome(claimed)])
        cancelled = background.start_blocked(canceller, cancel, canceller, claimed.id)
    assert (written(moved.result()), cancelled.result()) == ({claimed.id}, True)
    found = row(conn, claimed.id)
    assert (found["status"], found["children_pending"], found["awaits"]) == ("cancelled", 0, None)


def test_a_lock_that_asks_for_the_status_loses_an_instance_that_is_just_parking(
    conn: Connection, new_conn: NewConn, background: Background
):
    step, canceller = new_conn(), new_conn()
    claimed = claim_one(conn)
    step.execute("begin")
    store.park(step, [parks(claimed)])
    naive = changed(
        lambda c: store.lock_instances(c, ids=[claimed.id]),
        ("where g.id = any", "where g.status = 'executing' and g.id = any"),
    )
    found = background.start_blocked(canceller, naive, canceller)
    step.execute("commit")
    assert found.result() == [], "it lives, and cannot be cancelled"


def test_a_signal_on_its_way_in_goes_down_with_the_instance(
    conn: Connection, new_conn: NewConn, background: Background
):
    sender, canceller = new_conn(), new_conn()
    id = insert(conn)
    sender.execute("begin")
    store.lock_target(sender, id=id)
    store.deliver(sender, id=id, name="go", payload="{}", dedup_key=None, inbox_limit=10)
    cancelled = background.start_blocked(canceller, cancel, canceller, id)
    sender.execute("commit")
    assert cancelled.result()
    assert inbox(conn, id) == []
    with pytest.raises(NoTarget):
        signal(conn, id)


def test_of_two_who_cancel_at_once_one_did_it(conn: Connection, new_conn: NewConn, background: Background):
    holder, first, second = new_conn(), new_conn(), new_conn()
    id = insert(conn)
    with hold(holder, id):
        tries = [background.start_blocked(each, cancel, each, id) for each in (first, second)]
    assert sorted(each.result() for each in tries) == [False, True]


def test_a_claim_passes_by_what_is_being_cancelled(conn: Connection, new_conn: NewConn):
    canceller = new_conn()
    id = insert(conn)
    cancel_uncommitted(canceller, id)
    assert claim(conn) == []
    canceller.execute("commit")
    assert claim(conn) == []


def test_the_next_of_a_partition_key_can_be_claimed_once_the_running_one_is_cancelled(conn: Connection):
    running = claim_one(conn, partition_key="k")
    waiting = insert(conn, partition_key="k")
    assert claim(conn) == []
    assert cancel(conn, running.id)
    assert [each.id for each in claim(conn)] == [waiting]


# Compensation.


@pytest.mark.parametrize("outcome", [goes_on, parks, is_done, stops, lambda claimed: spawns(claimed, new())])
def test_a_step_that_comes_after_the_cancel_cannot_undo_the_hook(
    conn: Connection, new_conn: NewConn, background: Background, outcome: Callable[[Claim], Any]
):
    step, canceller = new_conn(), new_conn()
    claimed = claim_one(conn, on_cancel=True)
    cancel_uncommitted(canceller, claimed.id)
    late = background.start_blocked(step, commit, step, [outcome(claimed)])
    canceller.execute("commit")
    assert written(late.result()) == set()
    [hooked] = claim(conn)
    assert (hooked.id, hooked.cancelling, hooked.cancel_reason) == (claimed.id, True, "no longer wanted")


def test_of_two_who_cancel_at_once_one_starts_the_hook(conn: Connection, new_conn: NewConn, background: Background):
    holder, first, second = new_conn(), new_conn(), new_conn()
    id = insert(conn, on_cancel=True)
    with hold(holder, id):
        tries = [background.start_blocked(each, cancel, each, id) for each in (first, second)]
    assert sorted(each.result() for each in tries) == [False, True]
    assert row(conn, id)["fence"] == 1


def test_a_cascade_does_not_mistake_what_the_hook_spawns_for_what_was_there_before(
    conn: Connection, new_conn: NewConn, background: Background
):
    # The hook runs as soon as the cancel has committed, while the cascade is still on its way down.
    holder, canceller = new_conn(), new_conn()
    parent = claim_one(conn, on_cancel=True)
    commit(conn, [spawns(parent, new(queue="elsewhere"))])
    [before] = family(conn, parent.id)
    with hold(holder, before):
        cancelled = background.start_blocked(canceller, lambda: cancel(canceller, parent.id, cascade=True))
        [hooked] = claim(conn)
        commit(conn, [spawns(hooked, new())])
    assert cancelled.result()
    assert statuses(conn, family(conn, parent.id)) == ["cancelled", "runnable"]
    assert cancel(conn, parent.id, cascade=True) is False
    assert statuses(conn, family(conn, parent.id)) == ["cancelled", "runnable"]


def test_a_signal_to_one_that_is_just_being_cancelled_is_there_for_the_hook(
    conn: Connection, new_conn: NewConn, background: Background
):
    sender, canceller = new_conn(), new_conn()
    parked = claim_one(conn, on_cancel=True)
    commit(conn, [parks(parked)])
    cancel_uncommitted(canceller, parked.id)
    sent = background.start_blocked(sender, signal, sender, parked.id)
    canceller.execute("commit")
    assert sent.result().woke is False
    [hooked] = claim(conn)
    assert [each.name for each in hooked.inbox] == ["go"]


# Parents and children.


def test_a_cancelled_child_and_a_sibling_that_ends_at_once_are_both_counted(
    conn: Connection, new_conn: NewConn, background: Background
):
    holder, step, canceller = new_conn(), new_conn(), new_conn()
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new(), new())])
    first, second = claim(conn)
    with hold(holder, parent.id):
        ended = background.start_blocked(step, commit, step, [is_done(first)])
        cancelled = background.start_blocked(canceller, cancel, canceller, second.id)
    assert errors(ended, cancelled) == []
    found = row(conn, parent.id)
    assert (found["status"], found["children_pending"]) == ("runnable", 0)


def test_a_child_that_ends_while_its_parent_is_cancelled_joins_nobody_and_waits_for_no_ring(
    conn: Connection, new_conn: NewConn, background: Background
):
    step, canceller = new_conn(), new_conn()
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new())])
    [child] = claim(conn)
    children = cancel_uncommitted(canceller, parent.id)
    ended = background.start_blocked(step, commit, step, [is_done(child)])
    canceller.execute("commit")
    assert (children, written(ended.result())) == ([child.id], {child.id})
    assert not cancel(conn, parent.id, cascade=True)
    assert statuses(conn, [parent.id, child.id]) == ["cancelled", "done"]


def test_a_parent_whose_last_child_is_just_ending_is_cancelled_after_that(
    conn: Connection, new_conn: NewConn, background: Background
):
    step, canceller = new_conn(), new_conn()
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new())])
    [child] = claim(conn)
    step.execute("begin")
    store.finish(step, [is_done(child)])
    cancelled = background.start_blocked(canceller, lambda: cancel(canceller, parent.id, cascade=True))
    step.execute("commit")
    assert cancelled.result()
    assert statuses(conn, [parent.id, child.id]) == ["cancelled", "done"]


def test_a_cascade_in_one_transaction_deadlocks_with_a_child_that_ends(
    conn: Connection, new_conn: NewConn, background: Background
):
    step, canceller = new_conn(), new_conn()
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new())])
    [child] = claim(conn)
    children = cancel_uncommitted(canceller, parent.id)
    ended = background.start_blocked(step, commit, step, [is_done(child)])
    naive = background.start(cancel_level, canceller, children, "no longer wanted")
    assert errors(ended, naive) == ["DeadlockDetected"]


def test_a_cascade_takes_the_whole_tree_and_nothing_beside_it(conn: Connection):
    root, children, grandchildren = tree(conn)
    stranger, orphan = insert(conn), children[0].id
    commit(conn, [is_done(children[1])])
    conn.execute("update gen_durable set status = 'done', result = '{}' where id = %s", [orphan])
    assert cancel(conn, root, cascade=True)
    assert statuses(conn, [root, orphan, children[1].id, stranger]) == ["cancelled", "done", "done", "runnable"]
    assert statuses(conn, grandchildren) == ["cancelled"] * 2, "also below one that has ended"


def test_a_cascade_waits_for_a_spawn_under_way_and_misses_no_child(
    conn: Connection, new_conn: NewConn, background: Background
):
    step, canceller = new_conn(), new_conn()
    parent = claim_one(conn)
    step.execute("begin")
    store.spawn(step, [spawns(parent, new(), new())])
    cancelled = background.start_blocked(canceller, lambda: cancel(canceller, parent.id, cascade=True))
    step.execute("commit")
    assert cancelled.result()
    assert statuses(conn, family(conn, parent.id)) == ["cancelled"] * 2


def test_a_cascade_that_looks_for_children_before_it_holds_the_parent_misses_some(
    conn: Connection, new_conn: NewConn, background: Background
):
    step, canceller = new_conn(), new_conn()
    parent = claim_one(conn)

    def naive() -> Sequence[int]:
        children = store.find_children(canceller, ids=[parent.id]).all()
        cancel(canceller, parent.id)
        return children

    step.execute("begin")
    store.spawn(step, [spawns(parent, new())])
    cancelled = background.start_blocked(canceller, naive)
    step.execute("commit")
    assert cancelled.result() == []
    assert statuses(conn, family(conn, parent.id)) == ["runnable"], "it would live on"


def test_a_cascade_that_was_cut_short_is_completed_by_the_next(conn: Connection):
    root, children, grandchildren = tree(conn)
    cancel(conn, root)
    assert statuses(conn, [child.id for child in children]) == ["awaiting_children", "executing"]
    assert cancel(conn, root, cascade=True) is False
    assert statuses(conn, [*(child.id for child in children), *grandchildren]) == ["cancelled"] * 4
    before = snapshot(conn)
    assert cancel(conn, root, cascade=True) is False
    assert snapshot(conn) == before


def test_two_cascades_into_one_tree_do_not_deadlock(conn: Connection, new_conn: NewConn, background: Background):
    holder, first, second = new_conn(), new_conn(), new_conn()
    root, children, grandchildren = tree(conn)
    with hold(holder, grandchildren[0]):
        tries = [
            background.start_blocked(first, lambda: cancel(first, root, cascade=True)),
            background.start_blocked(second, lambda: cancel(second, children[0].id, cascade=True)),
        ]
    assert [each.result() for each in tries] == [True, False]
    assert statuses(conn, [root, *(child.id for child in children), *grandchildren]) == ["cancelled"] * 5


# Failing fast.


def released(conn: Connection) -> list[Claim]:
    return claim_batch(conn, queue="q", machines=["f@1"], worker="b", limit=1, lease=LEASE)


def test_whoever_claims_a_parent_that_fails_fast_first_cancels_what_is_left(conn: Connection):
    parent, (first, second), grandchildren = tree(conn, fail_fast=True)
    commit(conn, [stops(second)])
    conn.execute("update gen_durable set priority = -1 where id = %s", [parent])
    [claimed] = released(conn)
    assert claimed.id == parent
    assert [child.status for child in claimed.children] == ["cancelled", "failed"]
    assert statuses(conn, [first.id, *grandchildren]) == ["cancelled"] * 3
    assert "fails fast" in row(conn, first.id)["last_error"]
    assert written(commit(conn, [goes_on(claimed)])) == {parent}


def test_a_worker_that_died_on_the_way_down_is_succeeded_by_the_next(conn: Connection, monkeypatch: pytest.MonkeyPatch):
    parent, (first, second), grandchildren = tree(conn, fail_fast=True)
    commit(conn, [stops(second)])
    conn.execute("update gen_durable set priority = -1 where id = %s", [parent])
    with monkeypatch.context() as dying:
        dying.setattr(
            "gendurable.db.operations.cancel_idle", lambda conn, ids, reason, **_: one_level(conn, ids, reason)
        )
        with pytest.raises(SystemExit):
            released(conn)
    assert statuses(conn, [first.id, *grandchildren]) == ["cancelled", "runnable", "runnable"]
    expire(conn, parent)
    assert reap(conn) == [parent]
    [claimed] = released(conn)
    assert claimed.id == parent
    assert statuses(conn, grandchildren) == ["cancelled"] * 2


def one_level(conn: Connection, ids: Sequence[int], reason: str) -> bool:
    with conn.transaction():
        cancel_level(conn, ids, reason)
    raise SystemExit


def test_the_children_of_one_whom_somebody_else_cancelled_are_left_alone(conn: Connection):
    parent, (first, _), grandchildren = tree(conn, fail_fast=True)
    conn.execute("update gen_durable set priority = -1 where id = %s", [parent])
    cancel(conn, first.id)
    [claimed] = released(conn)
    assert [child.status for child in claimed.children] == ["cancelled", "cancelled"]
    assert statuses(conn, grandchildren) == ["runnable"] * 2, "who cancelled it wanted no cascade"


def test_a_claim_does_not_wait_for_a_child_that_somebody_holds_but_goes_back(conn: Connection, new_conn: NewConn):
    holder = new_conn()
    parent, (first, second), _ = tree(conn, fail_fast=True)
    commit(conn, [stops(second)])
    conn.execute("update gen_durable set priority = -1 where id = %s", [parent])
    with hold(holder, first.id):
        assert released(conn) == []
        found = row(conn, parent)
        assert (found["status"], found["locked_by"], found["attempt"]) == ("runnable", None, 0)
    [claimed] = released(conn)
    assert [child.status for child in claimed.children] == ["cancelled", "failed"]


def test_a_child_that_is_just_spawning_takes_its_children_with_it(conn: Connection, new_conn: NewConn):
    step = new_conn()
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new(), new(), fail_fast=True)])
    first, second = claim(conn)
    step.execute("begin")
    store.spawn(step, [spawns(first, new())])
    commit(conn, [stops(second)])
    assert released(conn) == []
    step.execute("commit")
    conn.execute("update gen_durable set priority = -1 where id = %s", [parent.id])
    [claimed] = released(conn)
    assert claimed.id == parent.id
    assert statuses(conn, [first.id, *family(conn, first.id)]) == ["cancelled"] * 2


def test_a_child_that_is_just_ending_well_is_not_cancelled(conn: Connection, new_conn: NewConn):
    step = new_conn()
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new(), new(), fail_fast=True)])
    first, second = claim(conn)
    commit(conn, [stops(second)])
    step.execute("begin")
    store.finish(step, [is_done(first)])
    assert released(conn) == []
    step.execute("commit")
    [claimed] = released(conn)
    assert [child.status for child in claimed.children] == ["done", "failed"]


def test_nobody_is_cancelled_if_the_round_was_not_to_fail_fast(conn: Connection):
    parent, (first, second), _ = tree(conn)
    commit(conn, [stops(second)])
    assert statuses(conn, [parent, first.id]) == ["awaiting_children", "awaiting_children"]
