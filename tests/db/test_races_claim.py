"""The claim: each row to one worker, keys in order, nobody starved, and what it alone cannot promise."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from races import (
    GATE,
    LEASE,
    MACHINES,
    NewConn,
    changed,
    claim,
    claim_one,
    goes_on,
    insert,
    is_done,
    new,
    reap,
    repeats,
    shut_gate,
    signal,
    spawns,
    statuses,
    uncommitted,
)
from support import Background, expire, hold, row

from gendurable import FSM, Context, Done, Outcome, step
from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import commit, take_keys
from gendurable.db.statements import statement
from gendurable.testing import Harness

PAST = datetime(2020, 1, 1, tzinfo=UTC)


def ids(claims: list[Any]) -> list[int]:
    return [claimed.id for claimed in claims]


def raw(c: Any, limit: int = 10, worker: str = "b") -> Any:
    return store.claim(c, queue="q", machines=MACHINES, worker=worker, limit=limit, lease=LEASE)


def raw_plain(c: Any, limit: int = 10, worker: str = "b") -> Any:
    return store.claim_plain(c, queue="q", machines=MACHINES, worker=worker, limit=limit, lease=LEASE)


# The claim without the rule that only the head of a key is taken, and without the one that a busy key is left alone.
NO_HEADS = ("select distinct on (near.partition_key) near.id", "select near.id")
NO_BUSY = ("busy.status = 'executing'", "busy.status = 'failed'")
PAUSED = (
    "where g.status = 'runnable'\n    and g.partition_key is null",
    f"where {GATE}\n    and g.status = 'runnable'\n    and g.partition_key is null",
)
PAUSED_AT_KEYS = (
    "where g.status = 'runnable'\n    and g.partition_key is not null\n    and not exists",
    f"where {GATE}\n    and g.status = 'runnable'\n    and g.partition_key is not null\n    and not exists",
)


# Each row once.


def test_two_claims_at_once_share_the_rows(conn: Connection, new_conn: NewConn):
    other = new_conn()
    all_ids = [insert(conn) for _ in range(10)]
    with uncommitted(other):
        mine = ids(claim(other, "b", limit=4))
        assert mine == all_ids[:4]
        assert ids(claim(conn, limit=100)) == all_ids[4:], "the rest, without waiting"


def test_many_claims_at_once_give_each_row_to_one_worker(new_conn: NewConn, background: Background):
    conn = new_conn()
    all_ids = store.insert(conn, [new() for _ in range(300)]).all()

    def work(worker: str, own: Connection) -> list[int]:
        mine: list[int] = []
        while claims := claim(own, worker, limit=7):
            mine += ids(claims)
        return mine

    shares = [background.start(work, f"w{number}", new_conn()) for number in range(4)]
    assert sorted(id for share in shares for id in share.result(timeout=60)) == sorted(all_ids)
    assert {fence for (fence,) in conn.execute("select fence from gen_durable")} == {1}


def test_a_row_that_changed_after_the_claim_began_is_judged_as_it_is_now(new_conn: NewConn, background: Background):
    conn, worker, gatekeeper = new_conn(), new_conn(), new_conn()
    done, later, later_known, kept = (insert(conn) for _ in range(4))
    paused = changed(raw, PAUSED)
    with shut_gate(gatekeeper):
        claiming = background.start_blocked(worker, paused, worker)
        commit(conn, [is_done(claimed) for claimed in claim(conn, limit=1)])
        conn.execute("update gen_durable set eligible_at = now() + interval '1 hour' where id = %s", [later])
        conn.execute("update gen_durable set fsm_version = 2 where id = %s", [later_known])
        signal(conn, kept)
    assert [found[0] for found in claiming.result()] == [kept]
    assert statuses(conn, [done, later, later_known, kept]) == ["done", "runnable", "runnable", "executing"]


def test_a_row_that_was_updated_after_the_claim_began_is_claimed_in_its_new_version(
    new_conn: NewConn, background: Background
):
    # 2.3-8: joined by its place in the table, the row would be locked and then not found.
    conn, worker, gatekeeper = new_conn(), new_conn(), new_conn()
    id = insert(conn)
    by_place = (
        ("select g.id\n  from", "select g.id, g.ctid\n  from"),
        ("where g.id = due.id", "where g.ctid = due.ctid"),
    )
    for changes, found in ((by_place, []), ((), [id])):
        paused = changed(raw_plain, PAUSED, *changes)
        with shut_gate(gatekeeper):
            claiming = background.start_blocked(worker, paused, worker)
            conn.execute("""update gen_durable set state = '{"is": "new"}' where id = %s""", [id])
        assert [claimed[0] for claimed in claiming.result()] == found
    assert row(conn, id)["state"] == {"is": "new"}


def test_a_signal_on_its_way_in_does_not_hide_its_target(conn: Connection, new_conn: NewConn):
    # 2.1-14: the foreign key's lock and the claim's must be compatible.
    sender = new_conn()
    id = insert(conn)
    with uncommitted(sender):
        sender.execute("insert into signals (target_id, name) values (%s, 'go')", [id])
        stronger = changed(raw, ("for no key update of g", "for update of g"))
        assert stronger(conn) == []
        assert ids(claim(conn)) == [id]


def test_heartbeat_reaper_and_deadline_pass_by_a_signal_on_its_way_in(conn: Connection, new_conn: NewConn):
    sender = new_conn()
    claimed = claim_one(conn)
    with uncommitted(sender):
        sender.execute("insert into signals (target_id, name) values (%s, 'go')", [claimed.id])
        assert store.extend_leases(conn, [claimed], lease=LEASE).all() == [claimed.id]
        expire(conn, claimed.id)
        assert reap(conn) == [claimed.id]


# Which rows.


def test_rows_of_machines_and_versions_that_the_worker_does_not_have_stay_untouched(conn: Connection):
    # 2.3-12: a row that is claimed only to be given back would block its key and cost an attempt.
    strangers = [insert(conn, fsm="g"), insert(conn, fsm_version=2), insert(conn, fsm="f@1")]
    before = [row(conn, id) for id in strangers]
    mine = insert(conn)
    assert ids(claim(conn)) == [mine]
    assert claim(conn) == []
    assert [row(conn, id) for id in strangers] == before


def test_a_machine_that_the_worker_does_not_have_does_not_hold_up_its_key(conn: Connection):
    insert(conn, fsm="g", partition_key="k")
    mine = insert(conn, partition_key="k")
    assert ids(claim(conn)) == [mine]


def test_rows_of_other_queues_and_rows_due_later_stay(conn: Connection):
    insert(conn, queue="other")
    insert(conn, schedule_in=60)
    due = insert(conn)
    assert ids(claim(conn)) == [due]


def test_rows_come_by_priority_then_by_time_then_by_id(conn: Connection):
    late = insert(conn)
    early = insert(conn, eligible_at=PAST)
    twins = sorted(store.insert(conn, [new(eligible_at=PAST + timedelta(days=1)) for _ in range(3)]))
    urgent = insert(conn, priority=-1)
    patient = insert(conn, priority=1, eligible_at=PAST)
    order = [urgent, early, *twins, late, patient]
    assert ids(claim(conn, limit=2)) == order[:2]
    assert ids(claim(conn)) == order[2:]


def test_a_claim_that_finds_nothing_leaves_nothing_that_could_run(conn: Connection):
    # 2.1-18
    for number in range(20):
        insert(conn, partition_key=f"k{number % 3}" if number % 2 else None)
    claims = []
    while batch := claim(conn, limit=3):
        claims += batch
    free = """
        select count(*) from gen_durable g
        where status = 'runnable' and eligible_at <= now() and (partition_key is null or partition_key not in
          (select partition_key from gen_durable where status = 'executing' and partition_key is not null))
    """
    assert conn.execute(free).fetchone() == (0,)
    assert len(claims) == 10 + 3


# Keys.


def test_a_batch_takes_one_row_of_each_key(conn: Connection):
    # 2.2-6
    a = [insert(conn, partition_key="a") for _ in range(3)]
    b = [insert(conn, partition_key="b") for _ in range(3)]
    free = [insert(conn) for _ in range(3)]
    assert ids(claim(conn)) == [a[0], b[0], *free]
    assert claim(conn) == []


def test_a_key_that_looks_like_another_rows_id_is_no_sibling_of_it(conn: Connection):
    # 2.1-13
    keyless = insert(conn)
    keyed = insert(conn, partition_key=str(keyless))
    assert ids(claim(conn)) == [keyless, keyed]


def test_a_key_is_busy_until_its_row_has_left_execution(conn: Connection):
    first, second = (insert(conn, partition_key="k") for _ in range(2))
    [claimed] = claim(conn)
    assert claimed.id == first
    assert claim(conn) == []
    commit(conn, [is_done(claimed)])
    assert ids(claim(conn)) == [second]


def test_a_key_stays_busy_when_its_worker_died_until_the_row_is_reaped(conn: Connection):
    first, second = (insert(conn, partition_key="k") for _ in range(2))
    claim(conn)
    expire(conn, first)
    assert claim(conn) == [], "an expired lease alone frees nothing"
    assert reap(conn) == [first]
    assert ids(claim(conn)) == [first], "a reaped row keeps its place"
    assert second not in ids(claim(conn))


def test_a_key_is_busy_across_queues(conn: Connection):
    insert(conn, partition_key="k", queue="other")
    insert(conn, partition_key="k")
    assert len(claim(conn)) == 1
    assert claim(conn, queue="other") == []


def test_rows_of_a_busy_key_do_not_crowd_out_the_others(conn: Connection):
    # 2.1-12
    store.insert(conn, [new(partition_key="k") for _ in range(200)])
    free = insert(conn)
    assert len(claim(conn, limit=1)) == 1
    assert ids(claim(conn, limit=2)) == [free]
    assert claim(conn, limit=2) == []


def test_rows_of_a_free_key_do_not_crowd_out_the_others(conn: Connection):
    # 2.1-12
    siblings = store.insert(conn, [new(partition_key="k") for _ in range(200)]).all()
    free = insert(conn)
    assert ids(claim(conn, limit=2)) == [min(siblings), free]


def behind_a_window_of_blocked_siblings(conn: Connection) -> tuple[int, int]:
    """Two rows that could run, of the keys k and l, and a key in front of them that is busy and has many siblings.

    Beside them, more urgent than they are, what must not be taken for the head of k.
    """
    store.insert(conn, [new(partition_key="busy", priority=-2) for _ in range(60)])
    assert len(claim(conn, limit=1)) == 1
    insert(conn, partition_key="k", priority=-1, fsm="g")
    insert(conn, partition_key="k", priority=-1, queue="other")
    insert(conn, partition_key="k", priority=-1, schedule_in=60)
    insert(conn, partition_key="k", priority=1)
    return insert(conn, partition_key="k"), insert(conn, partition_key="l")


def test_far_behind_a_busy_key_the_same_rules_hold(conn: Connection):
    # Two rows are looked for in a window of 54, which the busy key fills: the claim goes from key to key from there on.
    of_k, of_l = behind_a_window_of_blocked_siblings(conn)
    assert ids(claim(conn, limit=2)) == [of_k, of_l]
    assert claim(conn, limit=2) == []


@pytest.mark.parametrize(
    ("beyond", "order"), [("", "abcd"), ("a", "bcda"), ("b", "cdab"), ("bb", "cdab"), ("d", "abcd"), ("zz", "abcd")]
)
def test_far_behind_a_busy_key_the_others_are_taken_in_turn_from_any_of_them_on(
    conn: Connection, beyond: str, order: str
):
    store.insert(conn, [new(partition_key="busy", priority=-2) for _ in range(60)])
    assert len(claim(conn, limit=1)) == 1
    for key in "dbca":
        insert(conn, partition_key=key)
    asked = {"queue": "q", "machines": MACHINES, "worker": "a", "lease": LEASE, "beyond": beyond}
    for limit in (1, 2, 3, 4):
        with uncommitted(conn):
            taken = [claimed.partition_key for claimed in store.claim(conn, **asked, limit=limit)]
            assert sorted(taken) == sorted(order[:limit])


def test_far_behind_a_busy_key_avoided_keys_are_left_alone_too(conn: Connection):
    _, of_l = behind_a_window_of_blocked_siblings(conn)
    asked = {"queue": "q", "machines": MACHINES, "worker": "a", "limit": 2, "lease": LEASE}
    assert ids(store.claim(conn, **asked, avoid=["k"]).all()) == [of_l]


def test_without_its_rules_a_claim_takes_siblings_and_starves_the_rest(conn: Connection):
    store.insert(conn, [new(partition_key="k") for _ in range(20)])
    free = insert(conn)
    naive = changed(lambda c: raw(c, limit=5), NO_HEADS, NO_BUSY)
    found = [claimed[0] for claimed in naive(conn)]
    assert len(found) == 5
    assert free not in found


def test_within_a_key_the_order_is_priority_then_time_then_id(conn: Connection):
    # 2.3-6
    twins = sorted(store.insert(conn, [new(partition_key="k") for _ in range(3)]))
    early = insert(conn, partition_key="k", eligible_at=PAST)
    patient = insert(conn, partition_key="k", eligible_at=PAST, priority=1)
    urgent = insert(conn, partition_key="k", priority=-1)
    order = []
    while claims := claim(conn):
        order += ids(claims)
        commit(conn, [is_done(claimed) for claimed in claims])
    assert order == [urgent, early, *twins, patient]


def test_the_head_of_a_key_is_not_overtaken_while_somebody_holds_its_row(conn: Connection, new_conn: NewConn):
    # 2.3-6: for example a signal that is being delivered
    holder = new_conn()
    head, second = (insert(conn, partition_key="k") for _ in range(2))
    free = insert(conn)
    with hold(holder, head):
        with uncommitted(conn):
            overtaking = changed(raw, NO_HEADS)
            assert second in [claimed[0] for claimed in overtaking(conn)]
        assert ids(claim(conn)) == [free]
    assert ids(claim(conn)) == [head]


def test_the_head_of_a_key_is_not_overtaken_while_another_claims_it(conn: Connection, new_conn: NewConn):
    # 2.2-7: two claims of one row each
    other = new_conn()
    head, second = (insert(conn, partition_key="k") for _ in range(2))
    with uncommitted(other):
        assert ids(claim(other, "b", limit=1)) == [head]
        with uncommitted(conn):
            naive = changed(lambda c: raw(c, limit=1), NO_HEADS)
            assert [claimed[0] for claimed in naive(conn)] == [second], "two rows of one key would run"
        assert claim(conn, limit=1) == []


def test_the_head_of_a_key_is_not_overtaken_when_it_was_claimed_after_the_claim_began(
    new_conn: NewConn, background: Background
):
    conn, worker, gatekeeper = new_conn(), new_conn(), new_conn()
    head, second = (insert(conn, partition_key="k") for _ in range(2))
    paused = changed(raw, PAUSED_AT_KEYS)
    with shut_gate(gatekeeper):
        claiming = background.start_blocked(worker, paused, worker)
        assert ids(claim(conn)) == [head]
    assert claiming.result() == []
    assert statuses(conn, [head, second]) == ["executing", "runnable"]


def test_the_head_of_a_key_that_has_come_and_gone_meanwhile_is_followed_by_the_next_claim(
    new_conn: NewConn, background: Background
):
    conn, worker, gatekeeper = new_conn(), new_conn(), new_conn()
    insert(conn, partition_key="k")
    second = insert(conn, partition_key="k")
    paused = changed(raw, PAUSED_AT_KEYS)
    with shut_gate(gatekeeper):
        claiming = background.start_blocked(worker, paused, worker)
        commit(conn, [is_done(claimed) for claimed in claim(conn)])
    assert claiming.result() == [], "to the claim's snapshot the head is still there"
    assert ids(claim(conn)) == [second]


def test_a_head_that_tries_again_later_lets_its_siblings_pass(conn: Connection):
    # Order is by the time at which a row may run, and this one may not yet.
    insert(conn, partition_key="k")
    second = insert(conn, partition_key="k")
    [claimed] = claim(conn)
    commit(conn, [repeats(claimed, timedelta(hours=1))])
    assert ids(claim(conn)) == [second]


def test_keys_that_the_worker_avoids_are_left_alone_and_others_not(conn: Connection):
    insert(conn, partition_key="k")
    other, free = insert(conn, partition_key="l"), insert(conn)
    asked = {"queue": "q", "machines": MACHINES, "worker": "a", "limit": 10, "lease": LEASE}
    with uncommitted(conn):
        assert ids(store.claim(conn, **asked, avoid=["k"]).all()) == [other, free]
    assert ids(store.claim_plain(conn, **asked).all()) == [free]


# 2.2-7: what the claim alone cannot promise, since it looks at rows and locks rows, not keys. A worker therefore takes
# the key's advisory lock before it starts the step, looks for a sibling, and gives the claim back if it may not start.


def executing(conn: Connection, key: str) -> int:
    query = "select count(*) from gen_durable where status = 'executing' and partition_key = %s"
    [(count,)] = conn.execute(query, [key]).fetchall()
    return count


def claimed_by_two_queues(conn: Connection, other: Connection) -> tuple[Claim, Claim]:
    insert(conn, partition_key="k")
    insert(conn, partition_key="k", queue="other")
    other.execute("begin")
    [first], [second] = claim(other, "b", queue="other"), claim(conn)
    other.execute("commit")
    return first, second


def claimed_by_two_kinds_of_worker(conn: Connection, other: Connection) -> tuple[Claim, Claim]:
    insert(conn, partition_key="k")
    insert(conn, partition_key="k", fsm="g")
    other.execute("begin")
    [first], [second] = claim(other, "b", machines=["g@1"]), claim(conn)
    other.execute("commit")
    return first, second


def claimed_past_a_newcomer(conn: Connection, other: Connection) -> tuple[Claim, Claim]:
    insert(conn, partition_key="k")
    other.execute("begin")
    [first] = claim(other, "b")
    insert(conn, partition_key="k", priority=-1)
    [second] = claim(conn)
    other.execute("commit")
    return first, second


RACES = [claimed_by_two_queues, claimed_by_two_kinds_of_worker, claimed_past_a_newcomer]


@pytest.mark.parametrize("race", RACES)
def test_two_rows_of_a_key_can_be_claimed_at_once_and_neither_starts_beside_the_other(
    conn: Connection, new_conn: NewConn, race: Callable[[Connection, Connection], tuple[Claim, Claim]]
):
    other = new_conn()
    first, second = race(conn, other)
    assert executing(conn, "k") == 2
    assert not take_keys(conn, [first]), "the other may be running"
    store.release(conn, [first])
    assert take_keys(other, [second])
    assert not take_keys(conn, [first])
    assert claim(conn) == claim(conn, queue="other") == [], "and there is no third one"


def test_a_key_whose_session_was_killed_is_not_taken_before_its_row_is_reaped(conn: Connection, new_conn: NewConn):
    # 2.3-7: the server drops the lock at once; the step may go on running.
    running, waiting = claimed_past_a_newcomer(conn, new_conn())
    session, other = new_conn(), new_conn()
    store.lock_partitions(session, keys=["k"])
    assert not take_keys(other, [waiting])
    conn.execute("select pg_terminate_backend(%s, 20000)", [session.info.backend_pid])
    assert not take_keys(other, [waiting]), "the lock is free, but the claim stands"
    expire(conn, running.id)
    reap(conn)
    assert take_keys(other, [waiting])


def test_of_several_keys_only_those_that_are_free_are_taken_and_of_the_others_none_is_held(
    conn: Connection, new_conn: NewConn
):
    session, other = new_conn(), new_conn()
    _, crossed = claimed_past_a_newcomer(conn, new_conn())
    free, locked = insert(conn, partition_key="free"), insert(conn, partition_key="locked")
    waiting = {claimed.id: claimed for claimed in claim(conn)}
    store.lock_partitions(other, keys=["locked"])
    assert take_keys(session, [crossed, waiting[free], waiting[locked]]) == [waiting[free]]
    assert store.lock_partitions(new_conn(), keys=["free", "k", "locked"]).all() == ["k"]


def test_a_row_given_back_and_claimed_by_its_old_snapshot_can_join_a_sibling(new_conn: NewConn, background: Background):
    conn, worker, gatekeeper = new_conn(), new_conn(), new_conn()
    first = insert(conn, partition_key="k")
    paused = changed(raw, PAUSED_AT_KEYS)
    with shut_gate(gatekeeper):
        claiming = background.start_blocked(worker, paused, worker)
        store.release(conn, claim(conn))
        insert(conn, partition_key="k", priority=-1)
        claim(conn)
    assert [claimed[0] for claimed in claiming.result()] == [first]
    assert executing(conn, "k") == 2


def test_keys_whose_32_bit_hashes_collide_have_locks_of_their_own(conn: Connection, new_conn: NewConn):
    # 2.1-9
    other = new_conn()
    [(same,)] = conn.execute("select hashtext('order:30910') = hashtext('order:249340')").fetchall()
    assert same, "the example has lost its point"
    assert store.lock_partitions(conn, keys=["order:30910"]).all() == ["order:30910"]
    assert store.lock_partitions(other, keys=["order:249340"]).all() == ["order:249340"]


# What comes with a claim.


class Picky(FSM[dict], name="picky"):
    @step
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        return Done({"n": ctx.state["n"], "children": len(ctx.children), "signals": len(ctx.inbox)})


POISON = {
    "a state of another shape": "update gen_durable set state = '[1]' where id = %s",
    "a state with a missing field": "update gen_durable set state = '{}' where id = %s",
    "a step that is no more": "update gen_durable set step = 'renamed' where id = %s",
    "a step without a name": "update gen_durable set step = '' where id = %s",
    "a number beyond all bounds": "update gen_durable set state = '{\"n\": 1e1000}' where id = %s",
    "a signal from the year 20000": (
        "insert into signals (target_id, name, inserted_at) values (%s, 'go', '20000-01-01')"
    ),
    "a signal from before Christ": (
        "insert into signals (target_id, name, inserted_at) values (%s, 'go', '0044-03-15 BC')"
    ),
    "a signal from eternity": "insert into signals (target_id, name, inserted_at) values (%s, 'go', '-infinity')",
}


@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_row_in_a_batch_of_ten_leaves_nine_unharmed(
    harness: Callable[..., Harness], conn: Connection, poison: str
):
    durable = harness(Picky)
    all_ids = [durable.insert(Picky.new({"n": number})) for number in range(10)]
    bad = all_ids[4]
    conn.execute(POISON[poison], [bad])
    durable.drain()
    expected = ["done"] * 10
    expected[4] = "failed"
    assert statuses(conn, all_ids) == expected
    assert row(conn, bad)["last_error"]
    assert row(conn, bad)["attempt"] == 0


def reborn_claims(conn: Connection, all_ids: list[int]) -> list[Claim]:
    """Take every claim away and claim all anew."""
    expire(conn, *all_ids)
    reap(conn)
    found = {claimed.id: claimed for claimed in claim(conn)}
    return [found[id] for id in all_ids]


def test_signals_and_children_come_each_with_their_own_claim(conn: Connection):
    parents = [insert(conn) for _ in range(3)]
    claims = claim(conn)
    commit(conn, [spawns(claims[0], new(), new()), spawns(claims[1]), goes_on(claims[2])])
    children = [claimed for claimed in claim(conn) if claimed.parent_id is not None]
    commit(conn, [is_done(child) for child in children])
    for number, parent in enumerate(parents):
        signal(conn, parent, f"to {number}")
    reborn = reborn_claims(conn, parents)
    assert [len(claimed.children) for claimed in reborn] == [2, 0, 0]
    assert [[each.name for each in claimed.inbox] for claimed in reborn] == [["to 0"], ["to 1"], ["to 2"]]


def test_claims_whose_inboxes_cannot_be_loaded_go_back_at_once(conn: Connection, monkeypatch: pytest.MonkeyPatch):
    id = insert(conn)
    signal(conn, id)
    broken = {"load_signals": b"select 1 / 0"}
    monkeypatch.setattr(store, "statement", lambda name: broken.get(name) or statement(name))
    with pytest.raises(psycopg.errors.DivisionByZero):
        claim(conn)
    assert (row(conn, id)["status"], row(conn, id)["attempt"]) == ("runnable", 0)
