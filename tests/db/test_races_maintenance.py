"""Leases, crashes, deadlines, deletion and the clock: maintenance passes by what others hold, and takes nothing twice."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from races import (
    GATE,
    LEASE,
    MACHINES,
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
    repeats,
    shut_gate,
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
from gendurable.core.duration import LONGEST
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import commit, give_back
from gendurable.runtime import sweeping
from gendurable.runtime.sweeping import collect_garbage, reap_expired, wake_overdue

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def claimed_and_expired(conn: Connection, count: int, **about: object) -> list[Claim]:
    for _ in range(count):
        insert(conn, **about)
    claims = claim(conn)
    assert len(claims) == count
    expire(conn, *(claimed.id for claimed in claims))
    return claims


def crash(conn: Connection, id: int, times: int = 1) -> None:
    """Claim an instance, let its worker die and be noticed."""
    for _ in range(times):
        assert id in [claimed.id for claimed in claim(conn)]
        expire(conn, id)
        reap_expired(conn, worker="reaper", lease=LEASE)


# The reaper.


def test_the_reaper_passes_by_a_row_that_somebody_holds_and_takes_it_the_next_time(conn: Connection, new_conn: NewConn):
    holder = new_conn()
    ids = [claimed.id for claimed in claimed_and_expired(conn, 3)]
    conn.execute("set lock_timeout = '200ms'")  # to wait would be an error
    with hold(holder, ids[1]):
        assert sorted(reap(conn)) == [ids[0], ids[2]]
        assert reap(conn) == []
    assert reap(conn) == [ids[1]]


def test_the_reaper_takes_no_more_than_its_limit_oldest_lease_first(conn: Connection):
    # 2.1-19: a mass crash must not become one long transaction.
    claims = claimed_and_expired(conn, 5)
    for claimed in claims:
        conn.execute(
            "update gen_durable set lease_expires_at = now() - %s where id = %s",
            [timedelta(seconds=claimed.id), claimed.id],
        )
    assert sorted(reap(conn, limit=2)) == [claims[3].id, claims[4].id]
    assert len(reap(conn, limit=2)) == 2
    assert len(reap(conn, limit=2)) == 1


def test_rows_that_somebody_holds_do_not_use_up_the_reapers_limit(conn: Connection, new_conn: NewConn):
    holder = new_conn()
    claims = claimed_and_expired(conn, 4)
    with uncommitted(holder):
        holder.execute("select from gen_durable where id <= %s for no key update", [claims[1].id])
        assert sorted(reap(conn, limit=2)) == [claims[2].id, claims[3].id]


def test_a_mass_crash_is_reaped_batch_by_batch_to_the_end(conn: Connection, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sweeping, "BATCH", 3)
    claims = claimed_and_expired(conn, 8, max_crashes=None)
    reaped = reap_expired(conn, worker="reaper", lease=LEASE)
    assert sorted(each.id for each in reaped) == [claimed.id for claimed in claims]


def test_two_reapers_at_once_take_each_claim_once(conn: Connection, new_conn: NewConn):
    other = new_conn()
    claims = claimed_and_expired(conn, 4)
    with uncommitted(other):
        assert len(reap(other, limit=2)) == 2
        assert len(reap(conn)) == 2
    assert len(reap(conn)) == 2, "what the other gave up is there again"
    assert [row(conn, claimed.id)["attempt"] for claimed in claims] == [1] * 4


def reap_paused(conn: Connection) -> list[int]:
    paused = changed(
        lambda c: store.reap(c, worker="reaper", limit=10, lease=LEASE),
        ("where g.status = 'executing'", f"where {GATE} and g.status = 'executing'"),
    )
    return [found[0] for found in paused(conn)]


def test_a_claim_that_was_prolonged_after_the_reaper_began_is_kept(new_conn: NewConn, background: Background):
    conn, reaper, gatekeeper = new_conn(), new_conn(), new_conn()
    first, second = claimed_and_expired(conn, 2)
    with shut_gate(gatekeeper):
        reaping = background.start_blocked(reaper, reap_paused, reaper)
        assert store.extend_leases(conn, [first], lease=LEASE).all() == [first.id]
    assert reaping.result() == [second.id]
    assert statuses(conn, [first.id, second.id]) == ["executing", "runnable"]


def test_an_outcome_that_was_committed_after_the_reaper_began_stands(new_conn: NewConn, background: Background):
    conn, reaper, gatekeeper = new_conn(), new_conn(), new_conn()
    first, second = claimed_and_expired(conn, 2)
    with shut_gate(gatekeeper):
        reaping = background.start_blocked(reaper, reap_paused, reaper)
        assert written(commit(conn, [goes_on(first)])) == {first.id}
    assert reaping.result() == [second.id]
    assert row(conn, first.id)["attempt"] == 0


def test_a_row_that_was_reaped_and_claimed_after_the_reaper_began_is_kept(new_conn: NewConn, background: Background):
    conn, reaper, gatekeeper = new_conn(), new_conn(), new_conn()
    [claimed] = claimed_and_expired(conn, 1)
    with shut_gate(gatekeeper):
        reaping = background.start_blocked(reaper, reap_paused, reaper)
        reap(conn)
        [again] = claim(conn, "b")
    assert reaping.result() == []
    assert again.fence == row(conn, claimed.id)["fence"]


def test_a_reaped_row_keeps_its_place_its_inputs_and_its_state(conn: Connection):
    id = insert(conn)
    [claimed] = claim(conn)
    commit(conn, [parks(claimed)])
    signal(conn, id)
    before = row(conn, id)
    claim(conn)
    expire(conn, id)
    reap(conn)
    after = row(conn, id)
    assert (after["attempt"], after["crashes"]) == (1, 1)
    for column in ("step", "state", "eligible_at", "awaits", "status", "locked_by", "lease_expires_at"):
        assert after[column] == before[column], column
    assert inbox(conn, id) == ["go"]


# 2.3-9: the crash budget.


def test_crashes_in_a_row_end_an_instance_and_say_why(conn: Connection):
    id = insert(conn, max_crashes=3)
    crash(conn, id, 2)
    assert (row(conn, id)["status"], row(conn, id)["crashes"]) == ("runnable", 2)
    crash(conn, id)
    found = row(conn, id)
    assert found["status"] == "failed"
    assert found["last_error"] == "the worker died 3 times in a row in step 'one'; nothing more is tried"
    assert (found["crashes"], found["locked_by"], found["lease_expires_at"]) == (3, None, None)


@pytest.mark.parametrize("outcome", [goes_on, repeats, parks, spawns])
def test_an_outcome_between_them_lets_the_count_of_crashes_begin_anew(conn: Connection, outcome):
    id = insert(conn, max_crashes=2)
    crash(conn, id)
    [claimed] = claim(conn)
    commit(conn, [outcome(claimed)])
    signal(conn, id)
    crash(conn, id)
    assert (row(conn, id)["status"], row(conn, id)["crashes"]) == ("runnable", 1)


def test_claims_given_back_and_signals_do_not_touch_the_count_of_crashes(conn: Connection):
    id = insert(conn, max_crashes=2)
    crash(conn, id)
    store.release(conn, claim(conn))
    signal(conn, id)
    crash(conn, id)
    assert row(conn, id)["status"] == "failed"


def test_an_instance_without_a_crash_budget_is_returned_for_ever(conn: Connection):
    id = insert(conn, max_crashes=None)
    crash(conn, id, 30)
    assert (row(conn, id)["status"], row(conn, id)["crashes"]) == ("runnable", 30)


def test_neighbours_of_a_spent_instance_are_returned_as_usual(conn: Connection):
    spent = insert(conn, max_crashes=1)
    others = [insert(conn) for _ in range(3)]
    claim(conn)
    expire(conn, spent, *others)
    assert len(reap_expired(conn, worker="reaper", lease=LEASE)) == 4
    assert statuses(conn, [spent, *others]) == ["failed", "runnable", "runnable", "runnable"]


def test_an_outcome_that_comes_after_the_reaper_took_a_spent_instance_is_stale(conn: Connection):
    claimed = claim_one(conn, max_crashes=1)
    expire(conn, claimed.id)
    assert reap(conn) == [claimed.id]
    assert written(commit(conn, [is_done(claimed)])) == set()
    assert statuses(conn, [claimed.id]) == ["executing"], "the reaper's claim"


@pytest.fixture
def forbidden(conn: Connection) -> Iterator[int]:
    """The id of an instance whose end the database refuses, for reasons of its own."""
    id = insert(conn, max_crashes=1)
    conn.execute(f"alter table gen_durable add constraint forbids check (id <> {id} or status <> 'failed')")
    yield id
    conn.execute("alter table gen_durable drop constraint forbids")


def test_a_spent_instance_that_cannot_be_ended_does_not_keep_others_from_their_end(conn: Connection, forbidden: int):
    other = insert(conn, max_crashes=1)
    claim(conn)
    expire(conn, forbidden, other)
    assert len(reap_expired(conn, worker="reaper", lease=LEASE)) == 2
    assert statuses(conn, [forbidden, other]) == ["executing", "failed"]
    assert reap_expired(conn, worker="reaper", lease=LEASE) == [], "it is tried again when the lease is over"


def test_a_spent_instance_whose_parent_somebody_holds_does_not_keep_others_from_their_end(
    conn: Connection, new_conn: NewConn
):
    holder = new_conn()
    parents = [claim_one(conn) for _ in range(2)]
    commit(conn, [spawns(parent, new(max_crashes=1)) for parent in parents])
    [child], [other] = (family(conn, parent.id) for parent in parents)
    claim(conn)
    expire(conn, child, other)
    conn.execute("set lock_timeout = '50ms'")
    with hold(holder, parents[0].id):
        assert len(reap_expired(conn, worker="reaper", lease=LEASE)) == 2
        assert statuses(conn, [child, other]) == ["executing", "failed"]
    expire(conn, child)
    reap_expired(conn, worker="reaper", lease=LEASE)
    assert statuses(conn, [child, parents[0].id]) == ["failed", "runnable"]


# The heartbeat.


def test_the_heartbeat_passes_by_a_row_that_somebody_holds(conn: Connection, new_conn: NewConn):
    # 2.3-11: a sender's open transaction must not cost the other leases.
    holder = new_conn()
    claims = claimed_and_expired(conn, 3)
    conn.execute("set lock_timeout = '200ms'")
    with hold(holder, claims[1].id):
        kept = store.extend_leases(conn, claims, lease=LEASE).all()
    assert sorted(kept) == [claims[0].id, claims[2].id]
    assert reap(conn) == [claims[1].id]


def test_the_heartbeat_extends_exactly_the_claims_that_hold(conn: Connection):
    claims = claimed_and_expired(conn, 3)
    commit(conn, [goes_on(claims[0])])
    stale = claims[1]._replace(fence=claims[1].fence - 1)
    assert store.extend_leases(conn, [claims[0], stale, claims[2]], lease=LEASE).all() == [claims[2].id]


def test_a_claim_is_lost_when_it_was_reaped_taken_anew_or_ended_but_not_when_its_row_is_held(
    conn: Connection, new_conn: NewConn
):
    holder = new_conn()
    held, ended, reaped, again = claimed_and_expired(conn, 4)
    store.extend_leases(conn, [held, ended], lease=LEASE)
    reap(conn)
    [anew] = claim(conn, limit=1)
    again, reaped = sorted((again, reaped), key=lambda each: each.id != anew.id)
    commit(conn, [is_done(ended)])
    claims = [held, ended, reaped, again, anew]
    with hold(holder, held.id):
        missing = {each.id for each in claims} - set(store.extend_leases(conn, claims, lease=LEASE))
        assert held.id in missing, "to take every missing claim for a lost one would be wrong"
        lost = {(each.id, each.fence) for each in store.find_lost(conn, claims)}
    assert lost == {(each.id, each.fence) for each in (ended, reaped, again)}


def test_a_heartbeat_that_meets_the_reaper_in_its_transaction_leaves_the_row_to_it(conn: Connection, new_conn: NewConn):
    reaper = new_conn()
    first, second = claimed_and_expired(conn, 2)
    expire(conn, first.id)
    store.extend_leases(conn, [second], lease=LEASE)
    with uncommitted(reaper):
        assert reap(reaper) == [first.id]
        assert store.extend_leases(conn, [first, second], lease=LEASE).all() == [second.id]


# 2.1-10: what a dead predecessor left.


def test_only_decayed_claims_of_the_same_name_are_reclaimed(conn: Connection):
    names = ["host%:1:aa", "host%:1:bb", "hostX:1:cc", "host%:12:dd"]
    claims = {name: claim_one(conn, name) for name in names}
    conn.execute("update gen_durable set lease_expires_at = now() + interval '200 ms' where locked_by <> 'host%:1:aa'")
    taken = store.reclaim(conn, prefix="host%:1:", remaining=timedelta(seconds=30), limit=10).all()
    assert taken == [claims["host%:1:bb"].id]
    found = row(conn, taken[0])
    assert (found["status"], found["attempt"], found["locked_by"]) == ("runnable", 0, None)
    assert written(commit(conn, [is_done(claims["host%:1:bb"])])) == set()


def test_the_claims_of_a_worker_whose_leases_are_shorter_than_ours_are_no_older_for_that(conn: Connection):
    short = timedelta(seconds=9)
    about: dict[str, Any] = {"name": "n", "host": "h", "queues": "{}", "machines": [], "lease": short}
    store.beat(conn, worker="n/1-a", pid=1, **about)
    mine = claim_one(conn, "n/1-a")
    for left, taken in ((8, []), (4, []), (2, [mine.id])):
        query = "update gen_durable set lease_expires_at = now() + make_interval(secs => %s) where id = %s"
        conn.execute(query, [left, mine.id])
        assert store.reclaim(conn, prefix="n/", remaining=timedelta(hours=1), limit=10).all() == taken


def test_a_reclaim_passes_by_what_somebody_holds(conn: Connection, new_conn: NewConn):
    holder = new_conn()
    claims = claimed_and_expired(conn, 2)
    conn.execute("set lock_timeout = '200ms'")
    with hold(holder, claims[0].id):
        assert store.reclaim(conn, prefix="a", remaining=LEASE, limit=10).all() == [claims[1].id]


# A sender's open transaction.


def test_other_senders_and_the_outcome_wait_for_a_sender_and_everything_else_goes_on(
    conn: Connection, new_conn: NewConn, background: Background
):
    # 2.3-11
    sender, second, worker = new_conn(), new_conn(), new_conn()
    held, free = insert(conn), insert(conn)
    claims = claim(conn)
    sender.execute("begin")
    store.lock_target(sender, id=held)
    store.deliver(sender, id=held, name="go", payload="{}", dedup_key=None, inbox_limit=10)
    waiting = [
        background.start_blocked(second, signal, second, held),
        background.start_blocked(worker, commit, worker, [is_done(claims[0])]),
    ]
    assert written(commit(conn, [is_done(claims[1])])) == {free}
    assert wake_overdue(conn) == []
    assert reap(conn) == []
    sender.execute("commit")
    assert not waiting[0].result().duplicate
    assert written(waiting[1].result()) == {held}


# 2.2-4, 2.3-10, 2.4-2: time.


def test_delays_timeouts_leases_and_retention_may_be_longer_than_an_int_of_milliseconds(conn: Connection):
    far = timedelta(days=100)
    hours_left = "select extract(epoch from {} - now()) / 3600 from gen_durable where id = %s"

    def left(column: str, id: int) -> float:
        [(hours,)] = conn.execute(hours_left.format(column), [id]).fetchall()
        return round(float(hours))

    later = insert(conn, schedule_in=far)
    assert left("eligible_at", later) == 2400
    for _ in range(3):
        insert(conn)
    claims = store.claim(conn, queue="q", machines=MACHINES, worker="a", limit=9, lease=far).all()
    assert [left("lease_expires_at", claimed.id) for claimed in claims] == [2400] * 3
    store.extend_leases(conn, claims, lease=2 * far)
    assert left("lease_expires_at", claims[0].id) == 4800
    commit(conn, [goes_on(claims[0], delay=far), repeats(claims[1], far), parks(claims[2], timeout=far)])
    assert left("eligible_at", claims[0].id) == 2400
    assert left("eligible_at", claims[1].id) == 2400
    assert left("await_deadline", claims[2].id) == 2400
    assert store.gc(conn, older_than=far, after=0, limit=10).all() == []


def test_the_longest_delay_can_be_stored_and_read_back(conn: Connection):
    id = insert(conn, schedule_in=LONGEST)
    found = store.get_instance(conn, id=id).one()
    assert found is not None
    assert found.eligible_at - found.inserted_at >= LONGEST - HOUR


def test_a_long_transaction_sees_what_became_due_since_it_began(conn: Connection, new_conn: NewConn):
    other = new_conn()
    with uncommitted(conn):
        conn.execute("select now()")
        id = insert(other)
        frozen = changed(
            lambda c: store.claim(c, queue="q", machines=MACHINES, worker="a", limit=9, lease=LEASE),
            ("statement_timestamp()", "now()"),
        )
        assert frozen(conn) == []
        assert [claimed.id for claimed in claim(conn)] == [id]


def test_an_instance_inserted_in_a_long_transaction_is_due_from_its_insertion(conn: Connection):
    with uncommitted(conn):
        [(began,)] = conn.execute("select now()").fetchall()
        id = insert(conn)
        assert row(conn, id)["eligible_at"] > began


def test_statuses_come_as_a_list_of_words(conn: Connection):
    # 2.4-3
    id = insert(conn, unique_key="k")
    found = store.get_instance(conn, id=id).one()
    assert found is not None
    assert sorted(found.unique_scope) == ["awaiting_children", "awaiting_signal", "executing", "runnable"]


# Deletion.


def collect(conn: Connection) -> int:
    return sum(collect_garbage(conn, older_than=timedelta(0)))


def test_what_has_ended_long_ago_is_deleted_and_nothing_else(conn: Connection):
    for _ in range(5):
        insert(conn)
    a, b, c, d, e = claim(conn)
    commit(conn, [is_done(a), stops(b), goes_on(c, delay=DAY), parks(d)])
    conn.execute("update gen_durable set updated_at = now() - interval '2 days'")
    recent = claim_one(conn)
    commit(conn, [is_done(recent)])
    assert sum(collect_garbage(conn, older_than=DAY)) == 2
    assert statuses(conn, [each.id for each in (a, b, c, d, e, recent)]) == [
        "gone",
        "gone",
        "runnable",
        "awaiting_signal",
        "executing",
        "done",
    ]


def test_a_finished_child_stays_as_long_as_its_parent_lives(conn: Connection):
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new(), new())])
    children = family(conn, parent.id)
    commit(conn, [is_done(child) for child in claim(conn)])
    assert collect(conn) == 0
    [again] = claim(conn)
    assert len(again.children) == 2
    commit(conn, [parks(again)])
    assert collect(conn) == 0
    signal(conn, parent.id)
    [again] = claim(conn)
    assert collect(conn) == 0
    commit(conn, [is_done(again)])
    assert collect(conn) == 3
    assert statuses(conn, [parent.id, *children]) == ["gone"] * 3


def test_a_finished_child_stays_while_its_parents_end_is_not_committed(conn: Connection, new_conn: NewConn):
    worker = new_conn()
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new())])
    commit(conn, [is_done(child) for child in claim(conn)])
    [again] = claim(conn)
    with uncommitted(worker):
        store.finish(worker, [is_done(again)])
        assert collect(conn) == 0
    commit(conn, [spawns(again, new())])
    assert collect(conn) == 0
    assert len(family(conn, parent.id)) == 2


def test_a_child_that_ends_while_old_rows_are_collected_is_seen_by_its_parent(
    new_conn: NewConn, background: Background
):
    # Deletion took its snapshot before the child had ended and its parent was released.
    conn, collector, gatekeeper = new_conn(), new_conn(), new_conn()
    old = claim_one(conn)
    commit(conn, [is_done(old)])
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new())])
    [child] = claim(conn)
    paused = changed(
        lambda c: store.gc(c, older_than=-HOUR, after=0, limit=10),
        ("where g.id > %(after)s", f"where {GATE} and g.id > %(after)s"),
    )
    with shut_gate(gatekeeper):
        collecting = background.start_blocked(collector, paused, collector)
        commit(conn, [is_done(child)])
        [again] = claim(conn)
    assert collecting.result() == [(old.id,)]
    assert [each.id for each in again.children] == [child.id]


def test_a_row_that_lives_again_is_not_deleted_by_an_older_look_at_it(new_conn: NewConn, background: Background):
    conn, collector, gatekeeper = new_conn(), new_conn(), new_conn()
    claimed = claim_one(conn)
    commit(conn, [stops(claimed)])
    paused = changed(
        lambda c: store.gc(c, older_than=-HOUR, after=0, limit=10),
        ("where g.id > %(after)s", f"where {GATE} and g.id > %(after)s"),
    )
    with shut_gate(gatekeeper):
        collecting = background.start_blocked(collector, paused, collector)
        assert store.retry(conn, id=claimed.id).all() == [claimed.id]
    assert collecting.result() == []
    assert statuses(conn, [claimed.id]) == ["runnable"]


def test_families_of_any_depth_are_deleted_from_the_leaves(conn: Connection):
    generations = [claim_one(conn)]
    for _ in range(3):
        commit(conn, [spawns(generations[-1], new())])
        generations += claim(conn)
    commit(conn, [is_done(generations[-1])])
    while claims := claim(conn):
        commit(conn, [is_done(claimed) for claimed in claims])
    assert statuses(conn, [each.id for each in generations]) == ["done"] * 4
    assert list(collect_garbage(conn, older_than=timedelta(0))) == [1, 1, 1, 1]
    assert snapshot(conn) == ([], [])


def test_a_parent_stays_until_the_child_that_runs_again_has_ended(conn: Connection):
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new())])
    [child] = claim(conn)
    commit(conn, [stops(child)])
    commit(conn, [is_done(again) for again in claim(conn)])
    store.retry(conn, id=child.id)
    assert collect(conn) == 0
    commit(conn, [is_done(again) for again in claim(conn)])
    assert collect(conn) == 2


def test_rows_that_somebody_holds_are_deleted_the_next_time(conn: Connection, new_conn: NewConn):
    holder = new_conn()
    for _ in range(3):
        insert(conn)
    claims = claim(conn)
    commit(conn, [is_done(claimed) for claimed in claims])
    conn.execute("set lock_timeout = '200ms'")
    with hold(holder, claims[1].id):
        assert collect(conn) == 2
    assert collect(conn) == 1


def test_deletion_goes_on_where_its_last_batch_stopped(conn: Connection):
    for _ in range(7):
        insert(conn)
    commit(conn, [is_done(claimed) for claimed in claim(conn)])
    assert list(collect_garbage(conn, older_than=timedelta(0), batch=3)) == [3, 3, 1]


# Claims that go back.


def test_claims_go_back_although_somebody_holds_one_of_them(conn: Connection, new_conn: NewConn):
    holder = new_conn()
    for _ in range(3):
        insert(conn)
    claims = claim(conn)
    conn.execute("set lock_timeout = '50ms'")
    with hold(holder, claims[1].id):
        assert give_back(conn, claims) == [claims[0].id, claims[2].id]
    assert statuses(conn, [claimed.id for claimed in claims]) == ["runnable", "executing", "runnable"]
    assert give_back(conn, claims) == [claims[1].id]


def test_claims_go_back_after_a_short_wait_for_a_signal(conn: Connection, new_conn: NewConn, background: Background):
    sender = new_conn()
    claimed = claim_one(conn)
    sender.execute("begin")
    store.lock_target(sender, id=claimed.id)
    given = background.start_blocked(conn, give_back, conn, [claimed])
    sender.execute("commit")
    assert given.result() == [claimed.id]
