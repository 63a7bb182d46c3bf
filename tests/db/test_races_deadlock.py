"""Statements that meet on the same rows and keys wait in one order, or not at all."""

from datetime import timedelta
from typing import Any

import pytest
from races import (
    LEASE,
    OUTCOMES,
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
    reap,
    repeats,
    signal,
    spawns,
    statuses,
    uncommitted,
    written,
)
from support import Background, expire, hold, row

from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import commit, insert_instances

HOUR = timedelta(hours=1)


def keyed(keys: str) -> list[Any]:
    return [new(unique_key=key, queue="other") for key in keys]


def keys(conn: Connection) -> list[str]:
    found = conn.execute("select unique_guard from gen_durable where unique_guard is not null order by 1").fetchall()
    return [key.decode() for (key,) in found]


# 2.1-4: new unique keys.


def test_two_inserts_with_the_same_new_keys_in_opposite_orders_do_not_deadlock(
    new_conn: NewConn, background: Background
):
    holder, first, second = new_conn(), new_conn(), new_conn()
    with uncommitted(holder):
        insert(holder, unique_key="m")
        tries = [
            background.start_blocked(first, insert_instances, first, keyed("amz")),
            background.start_blocked(second, insert_instances, second, keyed("zma")),
        ]
    assert sorted(len(each.result()) for each in tries) == [0, 3]
    assert keys(holder) == ["a", "m", "z"]


def test_inserts_in_the_callers_order_deadlock(new_conn: NewConn, background: Background):
    holder, first, second = new_conn(), new_conn(), new_conn()
    unordered = ("order by n.unique_key nulls first, n.place", "order by n.place")
    with uncommitted(holder):
        insert(holder, unique_key="m")
        tries = [
            background.start_blocked(each, changed(lambda c, text=text: store.insert(c, keyed(text)), unordered), each)
            for each, text in ((first, "amz"), (second, "zma"))
        ]
    assert errors(*tries) == ["DeadlockDetected"]


def test_an_insert_of_several_statements_keeps_the_order_of_keys_across_them(
    new_conn: NewConn, background: Background, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gendurable.db.operations.INSERT_BYTES", 1)
    holder, first, second = new_conn(), new_conn(), new_conn()
    with uncommitted(holder):
        insert(holder, unique_key="m")
        tries = [
            background.start_blocked(first, insert_instances, first, keyed("amz")),
            background.start_blocked(second, insert_instances, second, keyed("zma")),
        ]
    assert sorted(len(each.result()) for each in tries) == [0, 3]


def test_two_spawns_with_the_same_new_keys_in_opposite_orders_do_not_deadlock(
    new_conn: NewConn, background: Background
):
    conn, holder, first, second = new_conn(), new_conn(), new_conn(), new_conn()
    insert(conn), insert(conn)
    one, two = claim(conn)
    with uncommitted(holder):
        insert(holder, unique_key="m")
        tries = [
            background.start_blocked(first, commit, first, [spawns(one, *keyed("amz"))]),
            background.start_blocked(second, commit, second, [spawns(two, *keyed("zma"))]),
        ]
    assert errors(*tries) == []
    assert sorted(len(family(conn, parent.id)) for parent in (one, two)) == [0, 3]
    assert sorted(statuses(conn, [one.id, two.id])) == ["awaiting_children", "runnable"]


def test_spawns_of_one_batch_are_ordered_by_key_across_their_parents(new_conn: NewConn, background: Background):
    conn, holder, first, second = new_conn(), new_conn(), new_conn(), new_conn()
    for _ in range(4):
        insert(conn)
    a, b, c, d = claim(conn)
    with uncommitted(holder):
        insert(holder, unique_key="m")
        tries = [
            background.start_blocked(first, commit, first, [spawns(a, *keyed("a")), spawns(b, *keyed("mz"))]),
            background.start_blocked(second, commit, second, [spawns(c, *keyed("z")), spawns(d, *keyed("ma"))]),
        ]
    assert errors(*tries) == []
    assert keys(conn) == ["a", "m", "z"]


def test_a_spawn_and_an_insert_with_the_same_new_keys_do_not_deadlock(new_conn: NewConn, background: Background):
    conn, holder, client = new_conn(), new_conn(), new_conn()
    parent = claim_one(conn)
    with uncommitted(holder):
        insert(holder, unique_key="m")
        tries = [
            background.start_blocked(conn, commit, conn, [spawns(parent, *keyed("zma"))]),
            background.start_blocked(client, insert_instances, client, keyed("amz")),
        ]
    assert errors(*tries) == []
    assert keys(conn) == ["a", "m", "z"]


def commit_that_changes_rows_first(conn: Connection, occupant: Claim, parent: Claim) -> None:
    with conn.transaction():
        store.lock_claims(conn, [occupant, parent])
        store.advance(conn, [goes_on(occupant)])
        store.spawn(conn, [spawns(parent, *keyed("0a"))])


def occupant_and_parent(conn: Connection) -> tuple[Claim, Claim]:
    insert(conn, unique_key="b")
    insert(conn)
    occupant, parent = claim(conn)
    return occupant, parent


def test_an_insert_that_meets_a_key_of_the_batch_does_not_deadlock_with_its_children(
    new_conn: NewConn, background: Background
):
    # The insert has taken key a and then looks at key b, whose holder is in the batch; the batch wants a.
    conn, holder, client = new_conn(), new_conn(), new_conn()
    occupant, parent = occupant_and_parent(conn)
    with uncommitted(holder):
        insert(holder, unique_key="0")
        batch = background.start_blocked(conn, commit, conn, [goes_on(occupant), spawns(parent, *keyed("0a"))])
        inserted = background.start(insert_instances, client, keyed("ab"))
        assert len(inserted.result(timeout=20)) == 1, "b is occupied, and that is plain to see"
    assert errors(batch) == []
    assert len(family(conn, parent.id)) == 1


def test_a_batch_that_changes_rows_before_it_spawns_deadlocks_with_that_insert(
    new_conn: NewConn, background: Background
):
    conn, holder, client = new_conn(), new_conn(), new_conn()
    occupant, parent = occupant_and_parent(conn)
    with uncommitted(holder):
        insert(holder, unique_key="0")
        batch = background.start_blocked(conn, commit_that_changes_rows_first, conn, occupant, parent)
        inserted = background.start_blocked(client, insert_instances, client, keyed("ab"))
    assert errors(batch, inserted) == ["DeadlockDetected"]


# 2.1-17: batches of outcomes.


def test_one_batch_committed_twice_at_once_in_opposite_orders_does_not_deadlock(
    new_conn: NewConn, background: Background
):
    conn, holder, first, second = new_conn(), new_conn(), new_conn(), new_conn()
    ids = [insert(conn) for _ in OUTCOMES]
    batch = [OUTCOMES[kind](claimed) for kind, claimed in zip(OUTCOMES, claim(conn), strict=True)]
    with hold(holder, ids[2]):
        tries = [
            background.start_blocked(first, commit, first, batch),
            background.start_blocked(second, commit, second, batch[::-1]),
        ]
    assert [written(each.result()) for each in tries] == [set(ids), set()]


def test_outcomes_that_are_locked_kind_by_kind_deadlock(new_conn: NewConn, background: Background):
    conn, first, second = new_conn(), new_conn(), new_conn()
    insert(conn), insert(conn)
    one, two = claim(conn)
    with uncommitted(first), uncommitted(second):
        store.advance(first, [goes_on(one)])
        store.advance(second, [goes_on(two)])
        tries = [background.start_blocked(first, store.repeat, first, [repeats(two)])]
        tries.append(background.start(store.repeat, second, [repeats(one)]))
        assert errors(*tries) == ["DeadlockDetected"]


def two_families(conn: Connection) -> tuple[list[int], list[Claim]]:
    """Two parents of two children each; the children's claims, by parent and place."""
    insert(conn), insert(conn)
    parents = claim(conn)
    commit(conn, [spawns(parent, new(), new()) for parent in parents])
    children = sorted(claim(conn), key=lambda child: (child.parent_id, child.id))
    return [parent.id for parent in parents], children


def test_children_of_two_parents_that_end_in_opposite_orders_do_not_deadlock(new_conn: NewConn, background: Background):
    conn, holder, first, second = new_conn(), new_conn(), new_conn(), new_conn()
    parents, (a1, a2, b1, b2) = two_families(conn)
    with hold(holder, parents[0]):
        tries = [
            background.start_blocked(first, commit, first, [is_done(a1), is_done(b1)]),
            background.start_blocked(second, commit, second, [is_done(b2), is_done(a2)]),
        ]
    assert errors(*tries) == []
    assert statuses(conn, parents) == ["runnable", "runnable"]


def test_parents_that_are_locked_in_no_order_deadlock(new_conn: NewConn, background: Background):
    conn, holder, first, second = new_conn(), new_conn(), new_conn(), new_conn()
    parents, (a1, a2, b1, b2) = two_families(conn)
    backwards = changed(lambda c: store.finish(c, [is_done(b2), is_done(a2)]), ("order by p.id", "order by p.id desc"))
    with hold(holder, parents[0]):
        tries = [
            background.start_blocked(first, commit, first, [is_done(a1), is_done(b1)]),
            background.start_blocked(second, backwards, second),
        ]
    assert errors(*tries) == ["DeadlockDetected"]


def test_a_batch_and_signals_to_its_rows_do_not_deadlock(new_conn: NewConn, background: Background):
    conn, holder, first, second = new_conn(), new_conn(), new_conn(), new_conn()
    ids = [insert(conn) for _ in range(3)]
    claims = claim(conn)
    with hold(holder, ids[1]):
        tries = [
            background.start_blocked(conn, commit, conn, [goes_on(claimed) for claimed in claims[::-1]]),
            background.start_blocked(first, signal, first, ids[0]),
            background.start_blocked(second, signal, second, ids[1]),
        ]
    assert errors(*tries) == []
    assert statuses(conn, ids) == ["runnable"] * 3


def test_a_signal_to_a_parent_and_the_ends_of_its_children_do_not_deadlock(new_conn: NewConn, background: Background):
    conn, holder, first, sender = new_conn(), new_conn(), new_conn(), new_conn()
    parents, (a1, a2, b1, b2) = two_families(conn)
    with hold(holder, parents[1]):
        tries = [
            background.start_blocked(first, commit, first, [is_done(child) for child in (b1, a1, b2, a2)]),
            background.start_blocked(sender, signal, sender, parents[0]),
        ]
    assert errors(*tries) == []
    assert statuses(conn, parents) == ["runnable", "runnable"]


def test_a_claim_and_a_batch_never_wait_for_each_other(conn: Connection, new_conn: NewConn):
    worker = new_conn()
    busy = claim_one(conn)
    free = insert(conn)
    conn.execute("begin")
    store.lock_claims(conn, [busy])
    store.advance(conn, [goes_on(busy)])
    assert [claimed.id for claimed in claim(worker)] == [free]
    conn.execute("commit")


# 2.1-5: maintenance.


def three_expired(conn: Connection) -> list[Claim]:
    """Three claims whose leases ran out in the order opposite to their ids."""
    for _ in range(3):
        insert(conn)
    claims = claim(conn)
    for claimed in claims:
        conn.execute(
            "update gen_durable set lease_expires_at = now() - %s where id = %s",
            [claimed.id * timedelta(seconds=1), claimed.id],
        )
    return claims


def test_heartbeat_and_reaper_meet_without_waiting(new_conn: NewConn):
    conn, holder = new_conn(), new_conn()
    claims = three_expired(conn)
    with hold(holder, claims[1].id):
        conn.execute("set lock_timeout = '200ms'")  # to wait would be an error
        assert store.extend_leases(conn, claims, lease=LEASE).all() == [claims[0].id, claims[2].id]
        expire(conn, claims[0].id, claims[2].id)
        assert sorted(reap(conn)) == [claims[0].id, claims[2].id]


def test_heartbeat_and_reaper_that_wait_deadlock(new_conn: NewConn, background: Background):
    conn, holder, beat, reaper = new_conn(), new_conn(), new_conn(), new_conn()
    claims = three_expired(conn)
    waits = (" skip locked", "")
    beating = changed(lambda c: store.extend_leases(c, claims, lease=LEASE), waits)
    reaping = changed(lambda c: store.reap(c, worker="r", limit=10, lease=LEASE), waits)
    with hold(holder, claims[1].id):
        tries = [
            background.start_blocked(beat, beating, beat),
            background.start_blocked(reaper, reaping, reaper),
        ]
    assert errors(*tries) == ["DeadlockDetected"]


def test_reaper_and_batch_meet_without_waiting(new_conn: NewConn, background: Background):
    conn, holder, worker = new_conn(), new_conn(), new_conn()
    claims = three_expired(conn)
    with hold(holder, claims[1].id):
        batch = background.start_blocked(worker, commit, worker, [goes_on(claimed) for claimed in claims])
        conn.execute("set lock_timeout = '200ms'")
        assert reap(conn) == [claims[2].id], "the first is locked by the batch, the second by somebody"
    assert written(batch.result()) == {claims[0].id, claims[1].id}


def test_a_batch_given_back_and_committed_at_once_does_not_deadlock(new_conn: NewConn, background: Background):
    conn, holder, worker = new_conn(), new_conn(), new_conn()
    ids = [insert(conn) for _ in range(3)]
    claims = claim(conn)
    with hold(holder, ids[1]):
        batch = background.start_blocked(worker, commit, worker, [goes_on(claimed) for claimed in claims])
        given = background.start_blocked(conn, lambda: store.release(conn, claims[::-1]).all())
    assert written(batch.result()) == set(ids)
    assert given.result() == []


# Deletion.


def old_families(conn: Connection) -> tuple[list[int], list[int]]:
    """Two parents that ended long ago, and one child of each."""
    insert(conn), insert(conn)
    parents = claim(conn)
    commit(conn, [spawns(parent, new()) for parent in parents])
    children = sorted(claim(conn), key=lambda child: child.parent_id)
    commit(conn, [is_done(child) for child in children])
    commit(conn, [is_done(parent) for parent in claim(conn)])
    return [parent.id for parent in parents], [child.id for child in children]


def test_two_collectors_at_once_never_wait_for_each_other(conn: Connection, new_conn: NewConn):
    other = new_conn()
    parents, children = old_families(conn)
    other.execute("set lock_timeout = '200ms'")
    with uncommitted(conn):
        conn.execute("select from gen_durable where id = any(%s) for update", [[parents[0], children[1]]])
        gone = store.gc(other, older_than=-HOUR, after=0, limit=10).all()
        assert gone == [children[0]], "a parent stays until its children have gone"


def test_collectors_that_delete_parents_before_their_children_deadlock(
    conn: Connection, new_conn: NewConn, background: Background
):
    other = new_conn()
    parents, children = old_families(conn)
    naive = "delete from gen_durable where id = any(%s)"
    with uncommitted(conn), uncommitted(other):
        conn.execute("select from gen_durable where id = any(%s) for update", [[parents[0], children[1]]])
        other.execute("select from gen_durable where id = any(%s) for update", [[parents[1], children[0]]])
        tries = [
            background.start_blocked(conn, conn.execute, naive, [[parents[0], children[1]]]),
            background.start(other.execute, naive, [[parents[1], children[0]]]),
        ]
        assert errors(*tries) == ["DeadlockDetected"]


def test_a_collector_and_the_end_of_a_child_never_wait_for_each_other(conn: Connection, new_conn: NewConn):
    # A child that runs again after its parent has ended.
    worker = new_conn()
    parents, children = old_families(conn)
    conn.execute("update gen_durable set status = 'runnable' where id = %s", [children[0]])
    [revived] = claim(conn)
    conn.execute("set lock_timeout = '200ms'")
    worker.execute("begin")
    store.lock_claims(worker, [revived])
    store.finish(worker, [is_done(revived)])
    assert store.gc(conn, older_than=-HOUR, after=0, limit=10).all() == [children[1]]
    worker.execute("commit")
    assert row(conn, children[0])["parent_id"] == parents[0]
