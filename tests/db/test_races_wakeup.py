"""Park, delivery and deadline meet in every order, and no wake-up is lost. Numbers are those of the known pitfalls."""

from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from races import (
    GATE,
    NewConn,
    changed,
    claim,
    claim_one,
    errors,
    goes_on,
    insert,
    is_done,
    parks,
    shown,
    shut_gate,
    signal,
    snapshot,
    stops,
    written,
)
from support import Background, hold, inbox, row, until

from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection, connect, one_commit
from gendurable.db.operations import commit
from gendurable.errors import NoTarget
from gendurable.runtime.sweeping import wake_overdue

HOUR = timedelta(hours=1)


def overdue(conn: Connection, id: int) -> None:
    conn.execute("update gen_durable set await_deadline = now() - interval '1 second' where id = %s", [id])


def parked(conn: Connection, names: str = '["go"]', timeout: timedelta | None = None) -> int:
    """Insert an instance and bring it to wait for a signal."""
    claimed = claim_one(conn)
    commit(conn, [parks(claimed, names, timeout)])
    assert row(conn, claimed.id)["status"] == "awaiting_signal"
    return claimed.id


def deliver_without_lock(conn: Connection, id: int) -> Any:
    """Half of a delivery: nothing makes it wait for a park under way."""
    return store.deliver(conn, id=id, name="go", payload="{}", dedup_key=None, inbox_limit=10).one()


def park_in_one_statement(conn: Connection, claimed: Claim) -> Any:
    """Half of a park: it looks into the inbox with the snapshot of its own beginning."""
    looks = "exists (select from signals s where s.target_id = g.id and s.name = 'go')"
    naive = changed(
        lambda c: store.park(c, [parks(claimed)]),
        (
            "set status = 'awaiting_signal'",
            f"set status = (case when {looks} then 'runnable' else 'awaiting_signal' end)::durable_status",
        ),
    )
    return naive(conn)


# 2.1-1: the wake-up that falls between park and delivery.


def test_a_signal_that_arrives_behind_a_park_wakes_the_instance(new_conn: NewConn, background: Background):
    conn, other, holder = new_conn(), new_conn(), new_conn()
    claimed = claim_one(conn)
    with hold(holder, claimed.id):
        park = background.start_blocked(conn, commit, conn, [parks(claimed)])
        sent = background.start_blocked(other, signal, other, claimed.id)
    assert written(park.result()) == {claimed.id}
    assert sent.result().woke
    assert row(conn, claimed.id)["status"] == "runnable"
    assert inbox(conn, claimed.id) == ["go"]


def test_a_signal_that_arrives_just_before_a_park_wakes_the_instance(new_conn: NewConn, background: Background):
    conn, other, holder = new_conn(), new_conn(), new_conn()
    claimed = claim_one(conn)
    with hold(holder, claimed.id):
        sent = background.start_blocked(other, signal, other, claimed.id)
        park = background.start_blocked(conn, commit, conn, [parks(claimed)])
    assert not sent.result().woke
    assert park.result().woken == {"q"}
    assert row(conn, claimed.id)["status"] == "runnable"
    assert [each.name for each in claim(conn)[0].awaited] == ["go"]


def test_a_park_that_looks_once_loses_the_signal_just_before_it(new_conn: NewConn, background: Background):
    conn, other, holder = new_conn(), new_conn(), new_conn()
    claimed = claim_one(conn)
    with hold(holder, claimed.id):
        sent = background.start_blocked(other, signal, other, claimed.id)
        park = background.start_blocked(conn, park_in_one_statement, conn, claimed)
    assert errors(sent, park) == []
    assert row(conn, claimed.id)["status"] == "awaiting_signal"
    assert inbox(conn, claimed.id) == ["go"]


def test_a_delivery_that_does_not_wait_for_the_row_loses_its_wake_up(conn: Connection, new_conn: NewConn):
    sender = new_conn()
    claimed = claim_one(conn)
    conn.execute("begin")
    store.park(conn, [parks(claimed)])
    assert store.recheck_parked(conn, [parks(claimed)]).all() == []
    assert not deliver_without_lock(sender, claimed.id).woke
    conn.execute("commit")
    assert row(conn, claimed.id)["status"] == "awaiting_signal"
    assert inbox(conn, claimed.id) == ["go"]


def test_a_delivery_waits_for_a_park_that_has_looked_but_not_committed(
    conn: Connection, new_conn: NewConn, background: Background
):
    sender = new_conn()
    claimed = claim_one(conn)
    conn.execute("begin")
    store.lock_claims(conn, [claimed])
    store.park(conn, [parks(claimed)])
    assert store.recheck_parked(conn, [parks(claimed)]).all() == []
    sent = background.start_blocked(sender, signal, sender, claimed.id)
    conn.execute("commit")
    assert sent.result().woke
    assert row(conn, claimed.id)["status"] == "runnable"


def test_a_park_waits_for_a_delivery_that_has_not_committed(
    conn: Connection, new_conn: NewConn, background: Background
):
    sender = new_conn()
    claimed = claim_one(conn)
    sender.execute("begin")
    store.lock_target(sender, id=claimed.id)
    assert not deliver_without_lock(sender, claimed.id).woke
    park = background.start_blocked(conn, commit, conn, [parks(claimed)])
    sender.execute("commit")
    assert park.result().woken == {"q"}
    assert row(conn, claimed.id)["status"] == "runnable"


def test_parks_of_one_batch_are_woken_each_by_its_own_signal(new_conn: NewConn, background: Background):
    conn, other, holder = new_conn(), new_conn(), new_conn()
    ids = [insert(conn) for _ in range(3)]
    claims = claim(conn)
    with hold(holder, ids[1]):
        park = background.start_blocked(conn, commit, conn, [parks(claimed) for claimed in claims])
        before = background.start_blocked(other, signal, other, ids[0])  # its row is locked by the batch already
    assert errors(park, before) == []
    signal(conn, ids[2], "another")
    assert [row(conn, id)["status"] for id in ids] == ["runnable", "awaiting_signal", "awaiting_signal"]


def test_two_senders_wake_an_instance_once_and_both_are_heard(new_conn: NewConn, background: Background):
    conn, first, second, holder = new_conn(), new_conn(), new_conn(), new_conn()
    id = parked(conn)
    with hold(holder, id):
        sent = [background.start_blocked(sender, signal, sender, id) for sender in (first, second)]
    assert [each.result().woke for each in sent] == [True, False]
    assert inbox(conn, id) == ["go", "go"]
    assert len(claim(conn)[0].awaited) == 2


def test_a_sender_whose_transaction_looks_at_the_past_is_refused_rather_than_unheard(
    conn: Connection, new_conn: NewConn
):
    # A client's own transaction may have any isolation level; ours are always read committed.
    sender = new_conn()
    claimed = claim_one(conn)
    sender.execute("begin isolation level repeatable read")
    sender.execute("select from gen_durable")
    commit(conn, [parks(claimed)])
    with pytest.raises(psycopg.errors.SerializationFailure):
        store.lock_target(sender, id=claimed.id)
    sender.execute("rollback")


def test_a_servers_default_does_not_let_the_engine_look_at_the_past(dsn: str):
    # A park's second look must see what was committed since its first.
    strict = make_conninfo(dsn, options="-c default_transaction_isolation=serializable")
    with closing(connect(strict)) as conn:
        assert conn.execute("show transaction_isolation").fetchone() == ("read committed",)
        conn.execute("set default_transaction_isolation = serializable")  # as behind a pooler, where no setting stays
        with one_commit(conn):
            level = conn.execute("show transaction_isolation")
        assert level.fetchone() == ("read committed",)


# 2.1-3: accumulating a pack.


def test_a_pack_is_accumulated_with_one_execution_for_each_signal(conn: Connection):
    id = parked(conn, '["a", "b", "c"]')
    for number, name in enumerate("abc", start=1):
        assert claim(conn) == [], "it runs although nothing came"
        assert signal(conn, id, name).woke
        [claimed] = claim(conn)
        assert len(claimed.awaited) == number
        if number < 3:
            commit(conn, [parks(claimed, '["a", "b", "c"]')])
            assert row(conn, id)["status"] == "awaiting_signal"
    commit(conn, [goes_on(claimed)])
    assert inbox(conn, id) == []


def test_a_recheck_that_counts_signals_already_shown_spins(conn: Connection):
    id = parked(conn, '["a", "b"]')
    signal(conn, id, "a")
    [claimed] = claim(conn)
    again = parks(claimed, '["a", "b"]')
    naive = changed(lambda c: store.recheck_parked(c, [again]), (" and s.id <> all (%(shown)s::bigint[])", ""))
    conn.execute("begin")
    store.park(conn, [again])
    assert naive(conn) == [(id, "q")], "awake again with nothing new"
    conn.execute("rollback")
    assert commit(conn, [again]).woken == set()


def test_a_signal_of_a_name_already_shown_that_came_meanwhile_wakes(conn: Connection):
    id = parked(conn, '["a", "b"]')
    signal(conn, id, "a")
    [claimed] = claim(conn)
    signal(conn, id, "a")
    assert commit(conn, [parks(claimed, '["a", "b"]')]).woken == {"q"}
    assert len(claim(conn)[0].awaited) == 2


# 2.3-3, 2.3-4, 2.3-13: which signal wakes, and which is consumed.


def test_a_duplicate_under_another_name_wakes_nobody(conn: Connection):
    id = insert(conn)
    signal(conn, id, "x", "e1")
    [claimed] = claim(conn)
    commit(conn, [parks(claimed, '["y"]')])
    answer = signal(conn, id, "y", "e1")
    assert answer.duplicate
    assert not answer.woke
    assert row(conn, id)["status"] == "awaiting_signal"
    assert inbox(conn, id) == ["x"]


def test_a_wake_up_that_does_not_hang_on_the_stored_signal_is_fooled_by_the_duplicate(conn: Connection):
    id = parked(conn, '["y"]')
    signal(conn, id, "x", "e1")
    naive = changed(
        lambda c: store.deliver(c, id=id, name="y", payload="{}", dedup_key="e1", inbox_limit=10),
        ("from target\n  cross join stored\n", "from target\n"),
    )
    naive(conn)
    [claimed] = claim(conn)
    assert claimed.awaited == (), "the step cannot tell this from a timeout"


def test_of_two_senders_with_one_dedup_key_one_wakes_and_the_other_is_a_duplicate(
    new_conn: NewConn, background: Background
):
    conn, first, second, holder = new_conn(), new_conn(), new_conn(), new_conn()
    id = parked(conn)
    with hold(holder, id):
        sent = [background.start_blocked(sender, signal, sender, id, "go", "e1") for sender in (first, second)]
    stored, duplicate = (each.result() for each in sent)
    assert (stored.duplicate, stored.woke) == (False, True)
    assert (duplicate.duplicate, duplicate.woke, duplicate.id) == (True, False, stored.id)
    assert inbox(conn, id) == ["go"]


def test_a_dedup_key_is_free_again_once_its_signal_is_consumed(conn: Connection):
    id = parked(conn)
    first = signal(conn, id, dedup_key="e1")
    [claimed] = claim(conn)
    commit(conn, [goes_on(claimed)])
    again = signal(conn, id, dedup_key="e1")
    assert not again.duplicate
    assert again.id != first.id


def test_a_signal_that_the_step_did_not_see_outlives_its_outcome(conn: Connection):
    id = parked(conn)
    seen = signal(conn, id)
    [claimed] = claim(conn)
    unseen = signal(conn, id)
    assert shown(claimed) == (seen.id,)
    commit(conn, [goes_on(claimed)])
    assert [found for (found,) in conn.execute("select id from signals")] == [unseen.id]


# 2.1-20: a target that has ended, or is just ending.


@pytest.mark.parametrize("end", [is_done, stops])
def test_a_signal_to_an_ended_instance_is_refused_and_leaves_nothing(conn: Connection, end: Any):
    claimed = claim_one(conn)
    commit(conn, [end(claimed)])
    before = snapshot(conn)
    with pytest.raises(NoTarget):
        signal(conn, claimed.id)
    assert snapshot(conn) == before


def test_a_signal_to_an_instance_that_never_was_is_refused(conn: Connection):
    with pytest.raises(NoTarget):
        signal(conn, 12345)
    assert snapshot(conn) == ([], [])


def test_a_signal_that_waited_for_the_end_of_its_target_is_refused(
    conn: Connection, new_conn: NewConn, background: Background
):
    sender = new_conn()
    claimed = claim_one(conn)
    conn.execute("begin")
    store.finish(conn, [is_done(claimed)])
    sent = background.start_blocked(sender, signal, sender, claimed.id)
    conn.execute("commit")
    with pytest.raises(NoTarget):
        sent.result()
    assert inbox(conn, claimed.id) == []


def test_an_end_that_waited_for_a_signal_takes_it_along(conn: Connection, new_conn: NewConn, background: Background):
    sender = new_conn()
    claimed = claim_one(conn)
    sender.execute("begin")
    store.lock_target(sender, id=claimed.id)
    deliver_without_lock(sender, claimed.id)
    ended = background.start_blocked(conn, commit, conn, [is_done(claimed)])
    sender.execute("commit")
    assert written(ended.result()) == {claimed.id}
    assert inbox(conn, claimed.id) == []


def test_a_signal_that_waited_for_the_deletion_of_its_target_is_refused(
    conn: Connection, new_conn: NewConn, background: Background
):
    sender = new_conn()
    claimed = claim_one(conn)
    commit(conn, [is_done(claimed)])
    conn.execute("begin")
    assert store.gc(conn, older_than=-HOUR, after=0, limit=10).all()
    sent = background.start_blocked(sender, signal, sender, claimed.id)
    conn.execute("commit")
    with pytest.raises(NoTarget):
        sent.result()


# Deadlines.


def test_a_deadline_does_not_wait_for_a_signal_on_its_way_and_does_not_wake_a_second_time(
    conn: Connection, new_conn: NewConn
):
    sender = new_conn()
    id = parked(conn, timeout=HOUR)
    overdue(conn, id)
    sender.execute("begin")
    store.lock_target(sender, id=id)
    assert deliver_without_lock(sender, id).woke
    assert wake_overdue(conn) == []
    sender.execute("commit")
    assert wake_overdue(conn) == []
    [claimed] = claim(conn)
    assert len(claimed.awaited) == 1


def test_a_signal_that_waited_for_the_deadline_is_seen_by_the_step_it_woke(
    conn: Connection, new_conn: NewConn, background: Background
):
    sender = new_conn()
    id = parked(conn, timeout=HOUR)
    overdue(conn, id)
    conn.execute("begin")
    assert [woken.id for woken in store.expire_awaits(conn, limit=10)] == [id]
    sent = background.start_blocked(sender, signal, sender, id)
    conn.execute("commit")
    assert not sent.result().woke, "the deadline did that"
    [claimed] = claim(conn)
    assert len(claimed.awaited) == 1


def test_a_deadline_that_was_renewed_while_the_sweep_began_does_not_fire(new_conn: NewConn, background: Background):
    conn, sweeper, gatekeeper = new_conn(), new_conn(), new_conn()
    id = parked(conn, timeout=HOUR)
    overdue(conn, id)
    paused = changed(
        lambda c: store.expire_awaits(c, limit=10),
        ("where g.status in (", f"where {GATE} and g.status in ("),
    )
    with shut_gate(gatekeeper):
        sweep = background.start_blocked(sweeper, paused, sweeper)
        signal(conn, id)
        [claimed] = claim(conn)
        commit(conn, [parks(claimed, timeout=HOUR)])
    assert sweep.result() == []
    assert row(conn, id)["status"] == "awaiting_signal"


def test_two_sweeps_at_once_wake_each_instance_once(new_conn: NewConn, background: Background):
    conn, first, second, holder = new_conn(), new_conn(), new_conn(), new_conn()
    ids = [parked(conn, timeout=HOUR) for _ in range(5)]
    for id in ids:
        overdue(conn, id)
    with hold(holder, ids[2]):
        sweeps = [background.start(wake_overdue, sweeper) for sweeper in (first, second)]
        woken = [each.id for sweep in sweeps for each in sweep.result(timeout=20)]
    assert sorted(woken) == [id for id in ids if id != ids[2]]
    assert [each.id for each in wake_overdue(conn)] == [ids[2]]


def test_a_timeout_leaves_the_step_with_what_is_there(conn: Connection):
    id = parked(conn, '["a", "b"]', timeout=HOUR)
    signal(conn, id, "a")
    [claimed] = claim(conn)
    commit(conn, [parks(claimed, '["a", "b"]', timeout=timedelta(milliseconds=1))])
    until(lambda: wake_overdue(conn), "the deadline")
    [claimed] = claim(conn)
    assert [each.name for each in claimed.awaited] == ["a"]
    assert row(conn, id)["await_deadline"] is None
