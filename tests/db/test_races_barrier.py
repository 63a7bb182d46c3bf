"""The barrier counts each child of its round once: siblings at once, commits repeated, rounds, crashes, lost races."""

from datetime import timedelta
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
    repeats,
    signal,
    snapshot,
    spawns,
    statuses,
    stops,
    uncommitted,
    written,
)
from support import Background, expire, hold, inbox, row

from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import commit
from gendurable.runtime.sweeping import reap_expired


def parent_of(conn: Connection, count: int, **about: Any) -> tuple[int, list[Claim]]:
    """A parent that waits for `count` children, and the claims of these."""
    parent = claim_one(conn)
    commit(conn, [spawns(parent, *[new() for _ in range(count)], **about)])
    children = claim(conn)
    assert len(children) == count
    return parent.id, children


def barrier(conn: Connection, parent: int) -> tuple[str, int]:
    found = row(conn, parent)
    return found["status"], found["children_pending"]


def run_again(conn: Connection, id: int) -> Claim:
    """Bring an ended child back to life behind its parent's back, and claim it."""
    conn.execute("update gen_durable set status = 'runnable', eligible_at = now() where id = %s", [id])
    [claimed] = [each for each in claim(conn) if each.id == id]
    return claimed


# Siblings.


@pytest.mark.parametrize("end", [is_done, stops])
def test_siblings_that_end_at_once_are_both_counted(new_conn: NewConn, background: Background, end):
    conn, first, second, holder = new_conn(), new_conn(), new_conn(), new_conn()
    parent, children = parent_of(conn, 2)
    with hold(holder, parent):
        ends = [
            background.start_blocked(each, commit, each, [end(child)])
            for each, child in zip((first, second), children, strict=True)
        ]
    assert [each.result().woken for each in ends] == [set(), {"q"}], "the last one opens the barrier, nobody else"
    assert barrier(conn, parent) == ("runnable", 0)


def test_a_count_read_before_the_lock_loses_a_sibling(new_conn: NewConn, background: Background):
    conn, first, second, holder = new_conn(), new_conn(), new_conn(), new_conn()
    parent, children = parent_of(conn, 2)
    with hold(holder, parent):
        ends = []
        for each, child in zip((first, second), children, strict=True):
            naive = changed(
                lambda c, child=child: store.finish(c, [is_done(child)]),
                ("  order by p.id\n  for no key update of p\n", ""),
            )
            ends.append(background.start_blocked(each, naive, each))
    assert errors(*ends) == []
    assert barrier(conn, parent) == ("awaiting_children", 1), "both have ended, and the parent waits for ever"


def test_siblings_of_one_batch_are_counted_together(conn: Connection):
    parent, children = parent_of(conn, 5)
    commit(conn, [is_done(children[0]), stops(children[1]), goes_on(children[2])])
    assert barrier(conn, parent) == ("awaiting_children", 3)
    [third] = claim(conn)
    commit(conn, [is_done(child) for child in (third, *children[3:])])
    assert barrier(conn, parent) == ("runnable", 0)


def test_batches_of_siblings_that_cross_are_counted_exactly(new_conn: NewConn, background: Background):
    conn, holder = new_conn(), new_conn()
    conns = [new_conn() for _ in range(3)]
    parent, children = parent_of(conn, 9)
    with hold(holder, parent):
        ends = [
            background.start_blocked(each, commit, each, [is_done(child) for child in children[place::3]])
            for place, each in enumerate(conns)
        ]
        assert barrier(conn, parent) == ("awaiting_children", 9)
    assert errors(*ends) == []
    assert barrier(conn, parent) == ("runnable", 0)


def test_children_of_several_parents_in_one_batch_are_counted_each_at_its_own(conn: Connection):
    parents = [claim_one(conn) for _ in range(3)]
    commit(conn, [spawns(parent, *[new() for _ in range(place + 1)]) for place, parent in enumerate(parents)])
    children = claim(conn)
    first_of = {child.parent_id: child for child in reversed(children)}
    commit(conn, [is_done(child) for child in first_of.values()])
    assert [barrier(conn, parent.id) for parent in parents] == [
        ("runnable", 0),
        ("awaiting_children", 1),
        ("awaiting_children", 2),
    ]


def test_a_child_and_its_parents_sibling_in_one_batch_do_not_confuse_each_other(conn: Connection):
    # A batch that ends a grandchild together with an uncle.
    root, (one, uncle) = parent_of(conn, 2)
    commit(conn, [spawns(one, new())])
    [grandchild] = claim(conn)
    commit(conn, [is_done(grandchild), is_done(uncle)])
    assert barrier(conn, one.id) == ("runnable", 0)
    assert barrier(conn, root) == ("awaiting_children", 1)


# Commits that are repeated.


def test_a_batch_of_ends_committed_twice_counts_once(conn: Connection):
    parent, children = parent_of(conn, 3)
    batch = [is_done(child) for child in children[:2]]
    for _ in range(2):
        commit(conn, batch)
    assert barrier(conn, parent) == ("awaiting_children", 1)


def test_a_spawn_committed_twice_makes_its_children_once(conn: Connection):
    claimed = claim_one(conn)
    batch = [spawns(claimed, new(), new())]
    for _ in range(2):
        commit(conn, batch)
    assert barrier(conn, claimed.id) == ("awaiting_children", 2)
    assert len(family(conn, claimed.id)) == 2


def test_an_end_that_joins_by_a_second_look_at_the_table_counts_twice(conn: Connection):
    # 2.1-2: the rider must hang on the guarded update's own rows.
    parent, children = parent_of(conn, 3)
    naive = changed(
        lambda c: store.finish(c, [is_done(children[0])]),
        ("  from ended\n  where parent_id", "  from gen_durable\n  where id = any (%(ids)s) and parent_id"),
    )
    for _ in range(2):
        naive(conn)
    assert barrier(conn, parent) == ("awaiting_children", 1), "two children are still running"


def test_a_child_that_tries_again_is_counted_when_it_ends(conn: Connection):
    parent, (child,) = parent_of(conn, 1)
    for _ in range(3):
        commit(conn, [repeats(child)])
        assert barrier(conn, parent) == ("awaiting_children", 1)
        [child] = claim(conn)
    commit(conn, [parks(child)])
    signal(conn, child.id)
    [child] = claim(conn)
    commit(conn, [stops(child)])
    assert barrier(conn, parent) == ("runnable", 0)


# Barriers that do not wait for all.


def test_children_that_fail_at_once_open_the_barrier_once(new_conn: NewConn, background: Background):
    conn, first, second, holder = new_conn(), new_conn(), new_conn(), new_conn()
    parent, children = parent_of(conn, 3, fail_fast=True)
    with hold(holder, parent):
        ends = [
            background.start_blocked(each, commit, each, [stops(child)])
            for each, child in zip((first, second), children, strict=False)
        ]
    assert sorted(len(each.result().woken) for each in ends) == [0, 1], "one opens it, the other comes too late"
    assert barrier(conn, parent) == ("runnable", 0)


def test_a_child_that_fails_while_its_parent_is_claimed_leaves_the_claim_alone(
    conn: Connection, new_conn: NewConn, background: Background
):
    first, second = new_conn(), new_conn()
    parent, children = parent_of(conn, 3, fail_fast=True)
    first.execute("begin")
    store.finish(first, [stops(children[0])])
    end = background.start_blocked(second, commit, second, [stops(children[1])])
    [released] = store.claim(first, queue="q", machines=["f@1"], worker="b", limit=1, lease=LEASE).all()
    first.execute("commit")
    assert (released.id, written(end.result())) == (parent, {children[1].id})
    assert barrier(conn, parent) == ("executing", 0)


def test_without_a_second_look_at_the_parent_a_late_failure_takes_its_claim_away(
    conn: Connection, new_conn: NewConn, background: Background
):
    first, second = new_conn(), new_conn()
    parent, children = parent_of(conn, 3, fail_fast=True)
    first.execute("begin")
    store.finish(first, [stops(children[0])])
    naive = changed(lambda c: store.finish(c, [stops(children[1])]), ("  where p.status = 'awaiting_children'\n", ""))
    end = background.start_blocked(second, naive, second)
    store.claim(first, queue="q", machines=["f@1"], worker="b", limit=1, lease=LEASE)
    first.execute("commit")
    assert errors(end) == []
    assert barrier(conn, parent) == ("runnable", 0), "claimed, and to be claimed again"


def test_a_barrier_whose_time_is_over_is_left_to_the_child_that_is_just_ending(
    conn: Connection, new_conn: NewConn, background: Background
):
    last, late = new_conn(), new_conn()
    parent, (first, second) = parent_of(conn, 2, timeout=timedelta(hours=1))
    commit(conn, [is_done(first)])
    last.execute("begin")
    store.finish(last, [is_done(second)])
    assert store.expire_awaits(late, limit=10, ahead=timedelta(hours=2)).all() == []
    last.execute("commit")
    assert barrier(conn, parent) == ("runnable", 0)
    assert store.expire_awaits(late, limit=10, ahead=timedelta(hours=2)).all() == [], "in time after all"


def test_a_child_that_ends_while_the_barrier_times_out_joins_nobody(
    conn: Connection, new_conn: NewConn, background: Background
):
    sweeper, late = new_conn(), new_conn()
    parent, children = parent_of(conn, 2, timeout=timedelta(hours=1), fail_fast=True)
    sweeper.execute("begin")
    [woken] = store.expire_awaits(sweeper, limit=10, ahead=timedelta(hours=2)).all()
    end = background.start_blocked(late, commit, late, [stops(children[0])])
    sweeper.execute("commit")
    assert (woken.id, end.result().woken) == (parent, set())
    assert barrier(conn, parent) == ("runnable", 0)
    assert not row(conn, parent)["fail_fast"], "nobody is cancelled because of a timeout"


# Rounds.


def test_each_round_has_a_barrier_of_its_own(conn: Connection):
    parent, children = parent_of(conn, 2)
    commit(conn, [is_done(child) for child in children])
    [again] = claim(conn)
    assert again.join_round == 1
    commit(conn, [spawns(again, new(), new(), new())])
    assert barrier(conn, parent) == ("awaiting_children", 3)
    assert row(conn, parent)["join_round"] == 2
    for child in claim(conn):
        commit(conn, [is_done(child)])
    assert barrier(conn, parent) == ("runnable", 0)
    [last] = claim(conn)
    assert [child.round for child in last.children] == [1, 1, 2, 2, 2]


def test_a_child_of_an_earlier_round_does_not_open_a_later_barrier(conn: Connection):
    parent, children = parent_of(conn, 1)
    commit(conn, [is_done(children[0])])
    [again] = claim(conn)
    commit(conn, [spawns(again, new())])
    revived = run_again(conn, children[0].id)
    commit(conn, [is_done(revived)])
    assert barrier(conn, parent) == ("awaiting_children", 1)


def test_without_the_round_a_child_of_an_earlier_one_opens_the_later_barrier(conn: Connection):
    parent, children = parent_of(conn, 1)
    commit(conn, [is_done(children[0])])
    [again] = claim(conn)
    commit(conn, [spawns(again, new())])
    revived = run_again(conn, children[0].id)
    naive = changed(lambda c: store.finish(c, [is_done(revived)]), (" and arrived.child_round = p.join_round", ""))
    naive(conn)
    assert barrier(conn, parent) == ("runnable", 0)


def test_an_end_that_waited_while_its_parent_was_released_counts_no_more(
    conn: Connection, new_conn: NewConn, background: Background
):
    # The lock comes with a newer version of the parent, which waits no longer: it must be judged again.
    last, late = new_conn(), new_conn()
    parent, (first, second) = parent_of(conn, 2)
    commit(conn, [is_done(first)])
    revived = run_again(conn, first.id)
    last.execute("begin")
    store.finish(last, [is_done(second)])
    end = background.start_blocked(late, commit, late, [is_done(revived)])
    last.execute("commit")
    assert written(end.result()) == {first.id}
    assert barrier(conn, parent) == ("runnable", 0)


def test_an_end_that_waited_while_its_parent_began_a_new_round_counts_no_more(
    conn: Connection, new_conn: NewConn, background: Background
):
    last, late = new_conn(), new_conn()
    parent, (first, second) = parent_of(conn, 2)
    commit(conn, [is_done(first)])
    revived = run_again(conn, first.id)
    last.execute("begin")
    store.finish(last, [is_done(second)])
    [again] = claim(last)
    store.spawn(last, [spawns(again, new())])
    end = background.start_blocked(late, commit, late, [is_done(revived)])
    last.execute("commit")
    assert written(end.result()) == {first.id}
    assert barrier(conn, parent) == ("awaiting_children", 1)


# Children that come into being.


def test_no_child_can_run_before_its_parent_waits_for_it(conn: Connection, new_conn: NewConn):
    other = new_conn()
    parent = claim_one(conn)
    with uncommitted(conn):
        store.spawn(conn, [spawns(parent, new())])
        assert claim(other) == []


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_child_whose_key_was_being_taken_is_counted_only_if_it_came_into_being(
    conn: Connection, new_conn: NewConn, background: Background, is_taken: bool
):
    rival = new_conn()
    parent = claim_one(conn)
    rival.execute("begin")
    insert(rival, unique_key="k", queue="elsewhere")
    spawned = background.start_blocked(conn, commit, conn, [spawns(parent, new(unique_key="k"), new())])
    rival.execute("commit" if is_taken else "rollback")
    assert written(spawned.result()) == {parent.id}
    assert barrier(conn, parent.id) == ("awaiting_children", 1 if is_taken else 2)
    assert len(family(conn, parent.id)) == (1 if is_taken else 2)


def test_a_barrier_for_children_whose_keys_are_all_taken_is_open_at_once(
    conn: Connection, new_conn: NewConn, background: Background
):
    rival = new_conn()
    parent = claim_one(conn)
    rival.execute("begin")
    insert(rival, unique_key="k", queue="elsewhere")
    spawned = background.start_blocked(conn, commit, conn, [spawns(parent, new(unique_key="k"))])
    rival.execute("commit")
    assert written(spawned.result()) == {parent.id}
    assert barrier(conn, parent.id) == ("runnable", 0)


# 2.3-9: children whose worker dies again and again.


def test_a_child_whose_crash_budget_is_spent_joins_its_parent_and_loses_its_inbox(conn: Connection):
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new(max_crashes=2))])
    [child] = family(conn, parent.id)
    signal(conn, child)
    for _ in range(2):
        claim(conn)
        expire(conn, child)
        reap_expired(conn, worker="reaper", lease=LEASE)
    assert statuses(conn, [child]) == ["failed"]
    assert inbox(conn, child) == []
    assert barrier(conn, parent.id) == ("runnable", 0)


def test_a_reaper_that_dies_before_it_ends_a_spent_child_costs_no_join_and_makes_no_second(conn: Connection):
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new(max_crashes=1), new())])
    child, other = family(conn, parent.id)
    claim(conn)
    expire(conn, child)
    [found] = store.reap(conn, worker="dying", limit=10, lease=LEASE).all()
    assert (found.id, found.spent) == (child, True)
    assert statuses(conn, [child]) == ["executing"], "a claim of the reaper, under a lease like any other"
    assert reap_expired(conn, worker="reaper", lease=LEASE) == []
    expire(conn, child)
    [found] = reap_expired(conn, worker="reaper", lease=LEASE)
    assert (found.id, found.spent) == (child, True)
    assert barrier(conn, parent.id) == ("awaiting_children", 1)
    before = snapshot(conn)
    assert reap_expired(conn, worker="reaper", lease=LEASE) == []
    assert snapshot(conn) == before
    assert statuses(conn, [child, other]) == ["failed", "executing"]


# Parents that vanish.


def test_a_child_whose_parent_is_deleted_while_it_ends_ends_all_the_same(
    conn: Connection, new_conn: NewConn, background: Background
):
    deleter = new_conn()
    parent, (child,) = parent_of(conn, 1)
    deleter.execute("begin")
    deleter.execute("delete from gen_durable where id = %s", [parent])
    end = background.start_blocked(conn, commit, conn, [is_done(child)])
    deleter.execute("commit")
    assert written(end.result()) == {child.id}
    assert statuses(conn, [parent, child.id]) == ["gone", "done"]


def test_a_deletion_of_the_parent_that_waited_for_its_child_finds_it_ended(
    conn: Connection, new_conn: NewConn, background: Background
):
    deleter = new_conn()
    parent, (child,) = parent_of(conn, 1)
    conn.execute("begin")
    store.finish(conn, [is_done(child)])
    deleted = background.start_blocked(deleter, deleter.execute, "delete from gen_durable where id = %s", [parent])
    conn.execute("commit")
    assert deleted.result().rowcount == 1
    assert statuses(conn, [parent, child.id]) == ["gone", "done"]
    assert row(conn, child.id)["parent_id"] is None
