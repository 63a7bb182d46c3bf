"""Races of limited claims: two who count at once, rows that change hands between two statements, locks in a ring.

Each by lock injection (PITFALLS 2.0), and against a naive variant that loses it.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from limited import ids, limited, look, look_on, never_again, per_second, tokens
from races import (
    GATE,
    LEASE,
    MACHINES,
    NewConn,
    changed,
    claim,
    errors,
    goes_on,
    insert,
    is_done,
    new,
    shut_gate,
    statuses,
    uncommitted,
)
from support import Background, hold, row, until

from gendurable.core.transition import Advance
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import commit, insert_instances

RATE, PLACE = ("rate", "r"), ("concurrency", "g")


def take(c: Any, ids: list[int], *buckets: tuple[str, str], worker: str = "b") -> Any:
    return store.claim_limited(c, ids, list(buckets), worker=worker, limit=10, lease=LEASE)


# Locks its buckets itself: counts by a snapshot that is older than the lock.
ONE_STATEMENT = ("where b.held_by = pg_current_xact_id()", "for no key update of b")


# Two who count.


def test_two_claimers_do_not_count_the_same_place(new_conn: NewConn, background: Background):
    conn, first, second = new_conn(), new_conn(), new_conn()
    limited(conn, places={"g": 1})
    born = insert_instances(conn, [new(concurrency_limit="g") for _ in range(2)])
    store.open_buckets(conn, [PLACE])
    naive = changed(lambda c: take(c, born[1:], PLACE), ONE_STATEMENT)
    first.execute("begin")
    store.hold_buckets(first, [PLACE])
    assert ids(take(first, born[:1], PLACE, worker="a").all()) == born[:1]
    waiting = background.start_blocked(second, naive, second)
    assert look(conn).claims == [], "the real one waits for nobody"
    first.execute("commit")
    assert len(waiting.result()) == 1
    assert statuses(conn, born) == ["executing", "executing"], "two in one place: the naive count was too old"


def test_whoever_finds_a_bucket_held_leaves_it_alone_and_comes_back_soon(new_conn: NewConn):
    conn, other = new_conn(), new_conn()
    limited(conn, rates={"r": never_again(9)}, places={"g": 9})
    insert(conn, rate_limit="r", concurrency_limit="g")
    free = insert(conn, rate_limit=("r", "free"))
    store.open_buckets(conn, [RATE, PLACE])
    for bucket in (RATE, PLACE):
        with uncommitted(other):
            store.hold_buckets(other, [bucket])
            found = look(conn)
            assert found.contended
            assert [claimed.id for claimed in found.claims if claimed.id != free] == []
    assert len(look(conn).claims) == 1


def test_what_was_found_and_then_claimed_by_another_is_not_claimed_twice(new_conn: NewConn):
    conn, other = new_conn(), new_conn()
    limited(conn, rates={"r": never_again(3)}, places={"g": 2})
    born = insert_instances(conn, [new(rate_limit="r", concurrency_limit="g") for _ in range(4)])
    which = {"queue": "q", "machines": MACHINES, "limit": 10, "window": 99}
    found = [each.id for each in store.find_limited(other, **which) if each.id is not None]
    assert found == born[:2]
    assert ids(look(conn).claims) == born[:2]
    with other.transaction():
        store.hold_buckets(other, [RATE, PLACE])
        assert take(other, found, RATE, PLACE).all() == []
        assert take(other, born, RATE, PLACE).all() == [], "no place is left"
    assert tokens(conn) == 1


def test_a_row_that_has_gone_on_to_another_limit_meanwhile_is_left_alone(new_conn: NewConn):
    conn, other = new_conn(), new_conn()
    limited(conn, rates={"r": never_again(3), "other": never_again(3)})
    id = insert(conn, rate_limit="r")
    assert len(store.find_limited(other, queue="q", machines=MACHINES, limit=10, window=99).all()) == 1
    [claimed] = look(conn).claims
    change = goes_on(claimed)
    commit(conn, [Advance(id, change.fence, "x", "{}", change.delay, (), None, "other", 1)])
    with other.transaction():
        store.hold_buckets(other, [RATE])
        assert take(other, [id], RATE).all() == []
    assert ids(look(conn).claims) == [id]
    assert (tokens(conn), tokens(conn, "other")) == (2, 2)


def test_a_claim_of_plain_rows_does_not_take_one_that_got_a_limit_after_it_began(
    new_conn: NewConn, background: Background
):
    conn, worker, gatekeeper = new_conn(), new_conn(), new_conn()
    limited(conn, rates={"r": never_again(3)})
    pause = (
        "where g.status = 'runnable'\n    and g.partition_key is not null\n    and not exists",
        f"where {GATE}\n    and g.status = 'runnable'\n    and g.partition_key is not null\n    and not exists",
    )
    forgetful = (
        "\n    and g.rate_limit is null\n    and g.concurrency_limit is null\n  order by head",
        "\n  order by head",
    )

    def raw(c: Any) -> Any:
        # By a clock that runs ahead, such as one that is set back a moment later: otherwise the row is not yet due to it.
        ahead = timedelta(seconds=5)
        return store.claim(c, queue="q", machines=MACHINES, worker="b", limit=10, lease=LEASE, ahead=ahead)

    for changes, taken in (([pause, forgetful], 1), ([pause], 0)):
        id = insert(conn, partition_key=f"k{taken}")
        paused = changed(raw, *changes)
        with shut_gate(gatekeeper):
            claiming = background.start_blocked(worker, paused, worker)
            [claimed] = claim(conn)
            change = goes_on(claimed)
            commit(conn, [Advance(id, change.fence, "x", "{}", change.delay, (), None, "r", 1)])
        assert len(claiming.result()) == taken, "claimed without a token" if taken else "left to those who count"
        assert row(conn, id)["status"] == ("executing" if taken else "runnable")
        conn.execute("update gen_durable set status = 'done'")


def test_a_place_is_free_only_once_the_outcome_is_committed(new_conn: NewConn, background: Background):
    conn, committer, holder = new_conn(), new_conn(), new_conn()
    limited(conn, places={"g": 1})
    first, second = (insert(conn, concurrency_limit="g") for _ in range(2))
    [claimed] = look(conn).claims
    with hold(holder, first):
        committing = background.start_blocked(committer, commit, committer, [is_done(claimed)])
        assert look(conn).claims == []
    committing.result()
    assert ids(look(conn).claims) == [second]


def test_a_row_that_somebody_holds_is_passed_over_without_waiting(new_conn: NewConn):
    conn, holder = new_conn(), new_conn()
    limited(conn, rates={"r": never_again(9)}, places={"g": 9})
    held, other = (insert(conn, rate_limit="r", concurrency_limit="g") for _ in range(2))
    with hold(holder, held):
        assert ids(look(conn).claims) == [other]
        assert tokens(conn) == 8
    assert ids(look(conn).claims) == [held]


def test_a_bucket_deleted_between_two_statements_costs_one_look(new_conn: NewConn):
    conn, other = new_conn(), new_conn()
    limited(conn, rates={"r": never_again(1)})
    id = insert(conn, rate_limit="r")
    store.open_buckets(conn, [RATE])
    other.execute("delete from buckets")
    with conn.transaction():
        store.hold_buckets(conn, [RATE])
        assert take(conn, [id], RATE).all() == []
    assert ids(look(conn).claims) == [id]


# Rings.


def test_two_looks_with_many_buckets_in_common_wait_for_nobody(new_conn: NewConn, background: Background):
    # PITFALLS 2.1-19, I#2: hold bucket m, two admissions needing a, m, z and z, m, a.
    conn, holder, first, second = (new_conn() for _ in range(4))
    limited(conn, rates={"r": never_again(5)})
    for tenants in ("amz", "zma"):
        insert_instances(conn, [new(rate_limit=("r", tenant)) for tenant in tenants])
    look_on(conn, limit=1)  # makes the buckets
    with uncommitted(holder):
        store.hold_buckets(holder, [("rate", "r:m")])
        looks = [background.start(look, each, str(n)) for n, each in enumerate((first, second))]
        assert errors(*looks) == []
        claimed = [row(conn, each.id)["rate_limit"] for one in looks for each in one.result().claims]
        assert "r:m" not in claimed
    until(lambda: not look_on(conn) or None, "nothing is left")
    assert {found for (found,) in conn.execute("select status::text from gen_durable")} == {"executing"}


def open_in_order(order: str) -> Any:
    return lambda c: store.open_buckets(c, [("rate", f"r:{tenant}") for tenant in order])


@pytest.mark.parametrize("is_naive", [True, False])
def test_two_who_make_the_same_buckets_never_wait_for_each_other_in_a_ring(
    new_conn: NewConn, background: Background, is_naive: bool
):
    conn, holder, first, second = (new_conn() for _ in range(4))
    limited(conn, rates={"r": never_again(5)})
    change = [("order by wanted.kind, wanted.key\n", "")] if is_naive else []
    # Few rows: without an order they are inserted as given.
    conn.execute("set enable_hashjoin = off")
    with uncommitted(holder):
        open_in_order("m")(holder)
        waiting = []
        for each, order in ((first, "amz"), (second, "zma")):
            each.execute("set enable_hashjoin = off; set enable_mergejoin = off")
            call = changed(open_in_order(order), *change)
            waiting.append(background.start_blocked(each, call, each))
    assert errors(*waiting) == (["DeadlockDetected"] if is_naive else [])


def test_claims_handed_back_wait_for_a_bucket_and_not_for_each_other(new_conn: NewConn, background: Background):
    conn, holder, first, second = (new_conn() for _ in range(4))
    limited(conn, rates={"r": never_again(5)})
    insert_instances(conn, [new(rate_limit=("r", tenant)) for tenant in "amzzma"])
    claims = look_on(conn)
    assert len(claims) == 6
    with uncommitted(holder):
        store.hold_buckets(holder, [("rate", "r:m")])
        waiting = [
            background.start_blocked(each, lambda each=each, part=part: store.release(each, part).all())
            for each, part in ((first, claims[:3]), (second, claims[3:]))
        ]
        assert look(conn).claims == []
    assert errors(*waiting) == []
    assert [tokens(conn, f"r:{tenant}") for tenant in "amz"] == [5, 5, 5]


def test_claims_releases_and_promises_go_on_beside_each_other(new_conn: NewConn):
    """Many of each at once: no deadlock, no error, and in the end no token is missing."""
    conn = new_conn()
    limited(conn, rates={"r": never_again(40)}, places={"g": 3})
    insert_instances(
        conn, [new(rate_limit=("r", "abc"[n % 3]), concurrency_limit=("g", "xy"[n % 2])) for n in range(120)]
    )

    def work(own: Connection, name: str) -> None:
        for turn in range(40):
            claims = look(own, name, limit=4).claims
            if turn % 2:
                store.release(own, claims).all()
            else:
                commit(own, [is_done(each) for each in claims])
            store.hasten_throttled(own, limit=100)

    with ThreadPoolExecutor(6) as pool:
        assert errors(*(pool.submit(work, new_conn(), f"w{n}") for n in range(6))) == []
    done = conn.execute("select rate_limit, count(*) from gen_durable where status = 'done' group by 1").fetchall()
    for key, count in done:
        assert tokens(conn, key) == 40 - count, key
    assert sum(count for _, count in done) > 0


def test_a_promise_is_not_moved_under_a_claim(new_conn: NewConn):
    conn, holder = new_conn(), new_conn()
    limited(conn, rates={"r": never_again(1)})
    born = insert_instances(conn, [new(rate_limit="r") for _ in range(4)])
    look_on(conn)
    limited(conn, rates={"r": per_second(1)})
    with hold(holder, born[1]):
        assert len(store.hasten_throttled(conn, limit=99).all()) == 2, "whoever holds it will see to it"
    store.hasten_throttled(conn, limit=99, ahead=timedelta(seconds=5))  # it is the next now
    due = conn.execute("select eligible_at < now() + interval '9 s' from gen_durable where id = any(%s)", [born[1:]])
    assert due.fetchall() == [(True,)] * 3
