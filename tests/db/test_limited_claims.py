"""Rate and concurrency limits at the SQL layer: what a look claims, what it puts off and until when, and what it costs.

Time is what the look is told (`ahead`), so that tokens come without waiting for them.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from limited import ids, limited, look, look_on, never_again, per_second, tokens
from races import LEASE, MACHINES, NewConn, changed, claim, goes_on, insert, is_done, new, reap, repeats, spawns, stops
from support import expire, row, until
from wire import wire_of

from gendurable.core.limiters import Limiters, RateLimit
from gendurable.core.transition import Advance
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.limiting import known_limiters
from gendurable.db.operations import LIMITED_WINDOW, commit, insert_instances
from gendurable.errors import InvalidInstance

SECOND = timedelta(seconds=1)


def later(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def waits(conn: Connection, ids: list[int]) -> list[float]:
    """In how many seconds from the first each is due."""
    rows = conn.execute("select id, eligible_at from gen_durable where id = any(%s)", [ids]).fetchall()
    due = dict(rows)
    return [round((due[id] - due[ids[0]]).total_seconds(), 2) for id in ids]


# Rate limits.


def test_a_bucket_gives_what_it_holds_and_says_to_the_others_when(conn: Connection):
    limited(conn, rates={"r": per_second(2, burst=3)})
    born = insert_instances(conn, [new(rate_limit="r") for _ in range(7)])
    found = look(conn)
    assert ids(found.claims) == born[:3]
    assert [(each.name, each.granted, each.throttled) for each in found.tokens] == [("r", 3, 4)]
    assert waits(conn, born[3:]) == [0, 0.5, 1.0, 1.5]
    assert all(row(conn, id)["throttled"] for id in born[3:])
    again = look(conn)
    assert again.claims == []
    assert again.next_token == pytest.approx(0.5, abs=0.3)
    for seconds, id in ((0.6, born[3]), (1.1, born[4]), (1.6, born[5]), (2.1, born[6])):
        assert ids(look(conn, ahead=later(seconds)).claims) == [id]


def test_no_row_misses_the_instant_that_it_was_promised(conn: Connection):
    # A third of a token, summed up in floating point, is never quite a token.
    limited(conn, rates={"r": RateLimit(3, timedelta(seconds=0.7), 2)})
    born = insert_instances(conn, [new(rate_limit="r") for _ in range(40)])
    assert len(look_on(conn)) == 2
    bucket = [("rate", "r")]
    for id in born[2:]:
        instant = row(conn, id)["eligible_at"].isoformat()
        at_its_instant = changed(
            lambda c, due=id: store.claim_limited(c, [due], bucket, worker="a", limit=9, lease=LEASE),
            ("statement_timestamp() + %(ahead)s::interval", f"'{instant}'::timestamptz"),
        )
        with conn.transaction():
            store.hold_buckets(conn, bucket)
            assert [claimed[0] for claimed in at_its_instant(conn)] == [id], "not at its instant"


def test_a_bucket_never_holds_more_than_its_burst(conn: Connection):
    limited(conn, rates={"r": per_second(10, burst=3)})
    insert_instances(conn, [new(rate_limit="r") for _ in range(20)])
    assert len(look_on(conn)) == 3
    conn.execute("update gen_durable set throttled = false, eligible_at = now() where status = 'runnable'")
    assert len(look_on(conn, ahead=later(3600))) == 3


def test_weight_is_taken_and_nobody_overtakes_a_row_that_does_not_fit(conn: Connection):
    limited(conn, rates={"r": per_second(10)})
    light, heavy, small = (insert(conn, rate_limit="r", weight=weight) for weight in (4, 8, 1))
    assert ids(look(conn).claims) == [light]
    assert waits(conn, [heavy, small]) == [0, 0.1]
    fresh = insert(conn, rate_limit="r")
    assert look_on(conn) == [], "there are tokens, but they are for the heavy one"
    assert waits(conn, [small, fresh]) == [0, 0.1]
    assert ids(look(conn, ahead=later(0.9)).claims) == [heavy, small, fresh]


def test_a_row_heavier_than_its_bucket_has_become_takes_a_full_one(conn: Connection):
    limited(conn, rates={"r": per_second(100)})
    heavy = insert(conn, rate_limit="r", weight=100)
    behind = insert(conn, rate_limit="r")
    limited(conn, rates={"r": per_second(10)})
    assert ids(look(conn).claims) == [heavy]
    assert look_on(conn) == []
    assert ids(look(conn, ahead=later(0.2)).claims) == [behind]


def test_tenants_have_buckets_of_their_own(conn: Connection):
    limited(conn, rates={"r": per_second(2)})
    for tenant in ("acme", "blue"):
        insert_instances(conn, [new(rate_limit=("r", tenant)) for _ in range(5)])
    insert_instances(conn, [new(rate_limit="r") for _ in range(5)])
    claims = look_on(conn)
    taken = Counter(row(conn, claimed.id)["rate_limit"] for claimed in claims)
    assert taken == {"r:acme": 2, "r:blue": 2, "r": 2}


def test_urgent_rows_get_tokens_first(conn: Connection):
    limited(conn, rates={"r": per_second(2)})
    insert_instances(conn, [new(rate_limit="r") for _ in range(3)])
    urgent = [insert(conn, rate_limit="r", priority=-1) for _ in range(2)]
    assert ids(look(conn).claims) == urgent


def test_tokens_that_find_no_room_wait_for_it(conn: Connection):
    limited(conn, rates={"r": never_again(5)})
    born = insert_instances(conn, [new(rate_limit="r") for _ in range(8)])
    assert ids(look(conn, limit=2).claims) == born[:2]
    assert not any(row(conn, id)["throttled"] for id in born), "the tokens are there: nobody may be put off"
    assert ids(look(conn, limit=2).claims) == born[2:4]
    assert ids(look(conn, limit=2).claims) == born[4:5]
    assert all(row(conn, id)["throttled"] for id in born[5:])


def test_a_deleted_bucket_is_a_full_one(conn: Connection):
    # PITFALLS 2.1-19, I#13: the row that sleeps must still run.
    limited(conn, rates={"r": never_again(1)})
    first, second = (insert(conn, rate_limit="r") for _ in range(2))
    assert ids(look_on(conn)) == [first]
    conn.execute("delete from buckets")
    due = row(conn, second)["eligible_at"] - row(conn, first)["eligible_at"]
    assert due > timedelta(days=29), "a promise is renewed after a month"
    assert ids(look_on(conn, ahead=due)) == [second]


def test_rows_of_a_limit_that_nobody_has_defined_are_left_alone_and_in_nobodys_way(conn: Connection):
    unknown = [new(rate_limit="nobody"), new(concurrency_limit="nobody"), new(rate_limit="g", concurrency_limit="g")]
    insert_instances(conn, unknown * LIMITED_WINDOW)  # before there are any definitions
    limited(conn, rates={"r": per_second(1)}, places={"g": 1})
    known = [insert(conn, rate_limit="r"), insert(conn, concurrency_limit="g")]
    assert sorted(ids(look_on(conn))) == known
    limited(conn, rates={"nobody": per_second(7)})
    assert len(look_on(conn)) == 7


def test_a_bucket_is_made_once_and_dropped_once_it_is_full_again(conn: Connection):
    limited(conn, rates={"r": per_second(1)}, places={"g": 1})
    insert(conn, rate_limit="r", concurrency_limit="g")
    assert len(look_on(conn)) == 1
    assert store.drop_buckets(conn, limit=10).all() == []
    conn.execute("update buckets set refilled_at = now() - interval '2 hours'")
    assert sorted(store.drop_buckets(conn, limit=10)) == ["g", "r"]
    limited(conn, rates={"slow": RateLimit(1, timedelta(days=10), 2)})
    insert(conn, rate_limit="slow")
    assert len(look_on(conn)) == 1
    conn.execute("update buckets set refilled_at = now() - interval '19 days' where key = 'slow'")
    assert store.drop_buckets(conn, limit=10).all() == [], "it would be full in twenty"


# Promises.


def test_a_promise_is_renewed_when_those_in_front_are_gone(conn: Connection):
    limited(conn, rates={"r": per_second(1)})
    born = insert_instances(conn, [new(rate_limit="r") for _ in range(100)])
    look_on(conn)
    conn.execute("delete from gen_durable where id = any(%s)", [born[1:90]])
    assert set(store.hasten_throttled(conn, limit=1000)) == {"q"}
    assert waits(conn, born[90:]) == list(range(10))
    assert ids(look(conn, ahead=later(1.1)).claims) == [born[90]]
    assert store.hasten_throttled(conn, limit=1000, ahead=later(1.1)).all() == []


def test_a_raised_limit_shortens_the_wait_and_a_lowered_one_is_kept(conn: Connection):
    limited(conn, rates={"r": RateLimit(1, timedelta(minutes=1), 1)})
    born = insert_instances(conn, [new(rate_limit="r") for _ in range(12)])
    look_on(conn)
    limited(conn, rates={"r": per_second(1)})
    store.hasten_throttled(conn, limit=1000)
    assert waits(conn, born[1:]) == list(range(11))
    limited(conn, rates={"r": RateLimit(1, timedelta(seconds=10), 1)})
    claimed = [len(look_on(conn, ahead=later(seconds))) for seconds in range(1, 62)]
    assert sum(claimed) == 6
    assert max(claimed) == 1


def test_those_in_front_who_cannot_run_do_not_hold_the_others_up_for_ever(conn: Connection):
    limited(conn, rates={"r": per_second(1, burst=10)})
    insert_instances(conn, [new(rate_limit="r", queue="idle") for _ in range(70)])
    assert len(look_on(conn, queue="idle")) == 10
    mine = insert(conn, rate_limit="r")
    assert look_on(conn) == []
    assert waits(conn, [mine]) == [0]
    for seconds in range(0, 50, 10):  # nobody works on that queue any more
        store.hasten_throttled(conn, limit=1000, ahead=later(seconds))
        if look_on(conn, ahead=later(seconds)):
            return
    pytest.fail("it waits behind rows that nobody runs")


# Concurrency limits.


def test_so_many_run_at_once_and_the_next_when_one_has_ended(conn: Connection):
    limited(conn, places={"g": 2})
    born = insert_instances(conn, [new(concurrency_limit="g") for _ in range(5)])
    found = look(conn)
    assert ids(found.claims) == born[:2]
    assert found.blocked
    assert look(conn).claims == []
    commit(conn, [is_done(found.claims[0])])
    assert ids(look(conn).claims) == born[2:3]


def test_tenants_have_places_of_their_own_and_a_crash_gives_its_place_back(conn: Connection):
    limited(conn, places={"g": 1})
    acme = [insert(conn, concurrency_limit=("g", "acme")) for _ in range(2)]
    blue = insert(conn, concurrency_limit=("g", "blue"))
    assert ids(look_on(conn)) == [acme[0], blue]
    expire(conn, acme[0])
    assert reap(conn) == [acme[0]]
    assert ids(look_on(conn)) == [acme[0]], "it is still the first"


def test_both_limits_on_one_row_take_a_place_first_and_a_token_only_with_it(conn: Connection):
    limited(conn, rates={"r": never_again(3)}, places={"g": 1})
    born = insert_instances(conn, [new(rate_limit="r", concurrency_limit="g") for _ in range(3)])
    done = []
    for _ in range(3):
        [claimed] = look_on(conn)
        done.append(claimed.id)
        commit(conn, [is_done(claimed)])
    assert done == born, "a row without a place has neither spent a token nor been put off"
    assert not conn.execute("select from gen_durable where throttled").fetchall()


def test_a_place_is_not_kept_for_a_row_that_has_no_token(conn: Connection):
    limited(conn, rates={"r": never_again(1)}, places={"g": 1})
    insert(conn, rate_limit="r")
    insert(conn, rate_limit="r", concurrency_limit="g", priority=1)
    free = insert(conn, concurrency_limit="g", priority=2)
    claims = look_on(conn)
    assert free in ids(claims)
    assert len(claims) == 2


# Partition keys.


def test_a_limited_row_with_a_key_runs_only_as_the_head_of_its_key(conn: Connection):
    limited(conn, rates={"r": per_second(9)}, places={"g": 9})
    plain = insert(conn, partition_key="a")
    insert(conn, partition_key="a", rate_limit="r")
    first = insert(conn, partition_key="b", rate_limit="r", concurrency_limit="g")
    behind = insert(conn, partition_key="b")
    assert ids(look_on(conn)) == [first]
    assert ids(claim(conn)) == [plain], "the head of its key, and the one behind a limited head waits"
    assert look_on(conn) == []
    assert row(conn, behind)["status"] == "runnable"


def test_a_worker_without_session_locks_leaves_limited_rows_with_a_key_alone(conn: Connection):
    limited(conn, rates={"r": per_second(9)})
    insert(conn, partition_key="a", rate_limit="r")
    free = insert(conn, rate_limit="r")
    assert ids(look(conn, keyed=False).claims) == [free]


def test_a_key_that_is_avoided_is_left_alone(conn: Connection):
    limited(conn, rates={"r": per_second(9)})
    insert(conn, partition_key="a", rate_limit="r")
    assert look(conn, avoid=["a"]).claims == []
    assert len(look(conn).claims) == 1


# Windows.


def crowd(conn: Connection, **about: Any) -> None:
    insert_instances(conn, [new(**about) for _ in range(2 * LIMITED_WINDOW)])


def test_rows_whose_limit_is_used_up_do_not_fill_the_window(conn: Connection):
    limited(conn, rates={"r": per_second(3)}, places={"g": 1})
    assert len(look_on(conn)) == 0
    crowd(conn, concurrency_limit=("g", "full"))
    crowd(conn, concurrency_limit=("g", "full"), rate_limit="r")
    crowd(conn, partition_key="busy", rate_limit="r")
    first = look_on(conn)
    assert len(first) == 2
    behind = [
        insert(conn, concurrency_limit=("g", "free")),
        insert(conn, rate_limit=("r", "free")),
        insert(conn, rate_limit=("r", "free"), partition_key="free"),
        insert(conn, concurrency_limit=("g", "third"), partition_key="third"),
    ]
    assert sorted(ids(look(conn).claims)) == behind


def test_thousands_of_throttled_rows_are_in_nobodys_way(conn: Connection):
    limited(conn, rates={"r": never_again(1), "other": per_second(5)}, places={"g": 5})
    insert_instances(conn, [new(rate_limit="r") for _ in range(10_000)])
    plain, other = insert(conn), insert(conn, rate_limit="other")
    assert ids(claim(conn)) == [plain]
    claims = look_on(conn)
    assert len(claims) == 2
    assert other in ids(claims)
    later_ones = [insert(conn, rate_limit="other", priority=9), insert(conn, concurrency_limit="g", priority=9)]
    started = time.monotonic()
    assert ids(look(conn).claims) == later_ones
    assert time.monotonic() - started < 3


def test_rows_with_limits_and_rows_without_take_turns_by_urgency(conn: Connection):
    limited(conn, rates={"r": per_second(90)})
    early = [insert(conn) for _ in range(3)]
    insert_instances(conn, [new(rate_limit="r") for _ in range(9)])
    late = [insert(conn) for _ in range(9)]
    first = look(conn, limit=5).claims
    assert len(first) == 2, "three of the five are the others'"
    assert ids(claim(conn, limit=3)) == early
    assert len(look(conn, limit=5).claims) == 5
    assert len(look(conn, limit=5).claims) == 2
    assert look(conn, limit=5).claims == []
    assert ids(claim(conn)) == late


def test_less_urgent_rows_with_limits_wait_behind_a_backlog_without(conn: Connection):
    limited(conn, rates={"r": per_second(90)}, places={"g": 9})
    insert_instances(conn, [new(rate_limit="r", priority=1), new(concurrency_limit="g", priority=1)])
    insert_instances(conn, [new() for _ in range(20)])
    assert look(conn, limit=10).claims == []
    assert len(look(conn, limit=22).claims) == 2


def test_a_paused_queue_gives_no_limited_rows(conn: Connection):
    limited(conn, rates={"r": per_second(1)})
    insert_instances(conn, [new(rate_limit="r") for _ in range(3)])
    look_on(conn)
    conn.execute("insert into paused_queues (queue) values ('q')")
    found = look(conn, ahead=later(1))
    assert (found.claims, found.blocked, found.next_token) == ([], False, None)
    conn.execute("delete from paused_queues")
    assert len(look(conn, ahead=later(1)).claims) == 1


# What a limit lives through.


def test_the_limits_of_a_step_are_kept_by_retry_release_and_reap_and_by_nothing_else(conn: Connection):
    limited(conn, rates={"r": never_again(99)}, places={"g": 9})
    about = {"rate_limit": "r:x", "weight": 7, "concurrency_limit": "g:y"}

    def limits(id: int) -> dict[str, Any]:
        found = row(conn, id)
        return {name: found[name] for name in about}

    id = insert(conn, rate_limit=("r", "x"), weight=7, concurrency_limit=("g", "y"))
    assert limits(id) == about
    for keep in (
        lambda claimed: commit(conn, [repeats(claimed)]),
        lambda claimed: store.release(conn, [claimed]).all(),
        lambda claimed: expire(conn, claimed.id) or reap(conn),
    ):
        [claimed] = look_on(conn)
        assert claimed.limited
        keep(claimed)
        assert limits(id) == about
    [claimed] = look_on(conn)
    commit(conn, [goes_on(claimed)])
    assert limits(id) == {"rate_limit": None, "weight": 1, "concurrency_limit": None}
    [claimed] = claim(conn)
    change = goes_on(claimed)
    commit(conn, [Advance(change.id, change.fence, "x", "{}", change.delay, (), None, "r", 3, "g")])
    assert limits(id) == {"rate_limit": "r", "weight": 3, "concurrency_limit": "g"}
    [claimed] = look_on(conn)
    commit(conn, [spawns(claimed, new(rate_limit="r", weight=2))])
    assert limits(id) == {"rate_limit": None, "weight": 1, "concurrency_limit": None}
    [child] = look_on(conn)
    assert limits(child.id) == {"rate_limit": "r", "weight": 2, "concurrency_limit": None}


def test_a_failed_step_that_is_retried_by_hand_is_under_its_limits_again(conn: Connection):
    limited(conn, rates={"r": never_again(1)})
    id = insert(conn, rate_limit="r")
    [claimed] = look_on(conn)
    commit(conn, [stops(claimed)])
    assert store.retry(conn, id=id).one() == id
    assert claim(conn) == []
    assert look_on(conn) == []
    assert row(conn, id)["throttled"], "its token is spent"


def test_the_tokens_of_a_step_that_never_started_go_back_and_its_turn_stays(conn: Connection):
    limited(conn, rates={"r": never_again(5)})
    born = insert_instances(conn, [new(rate_limit="r", weight=2) for _ in range(4)])
    claims = look_on(conn)
    assert (ids(claims), tokens(conn)) == (born[:2], 1)
    store.release(conn, claims[:1]).all()
    assert tokens(conn) == 3
    assert ids(look_on(conn)) == born[:1], "not behind those that were put off meanwhile"
    store.release(conn, claims[1:], started=True).all()
    assert tokens(conn) == 1, "an interrupted step has used them"


def test_releasing_more_than_a_bucket_holds_fills_it_and_no_more(conn: Connection):
    limited(conn, rates={"r": per_second(3)})
    insert_instances(conn, [new(rate_limit="r") for _ in range(9)])
    claims = look_on(conn)
    store.release(conn, claims).all()
    assert len(look_on(conn, ahead=later(0.9))) == 3


# Judged where they are written.


def test_a_limit_that_nobody_has_defined_is_refused_by_insert(conn: Connection):
    assert insert_instances(conn, [new(rate_limit="early")]), "nothing was published yet: nothing to judge by"
    limited(conn, rates={"stripe": per_second(10), "mail": per_second(1)}, places={"db": 3})
    for about, words in (
        ({"rate_limit": "strip"}, "rate_limit: there is no limit 'strip': the known ones are mail, stripe; define it"),
        ({"rate_limit": ("strip", "acme")}, "there is no limit 'strip'"),
        ({"rate_limit": "db"}, "there is no limit 'db'"),
        ({"concurrency_limit": "stripe"}, "concurrency_limit: there is no limit 'stripe': the known ones are db"),
        ({"rate_limit": "stripe", "weight": 11}, "weight: 11 is more than rate limit 'stripe' ever holds, 10"),
    ):
        with pytest.raises(InvalidInstance) as refused:
            insert_instances(conn, [new(), new(**about)])
        assert words in str(refused.value)
    assert conn.execute("select count(*) from gen_durable").fetchone() == (1,)
    assert len(insert_instances(conn, [new(rate_limit="stripe", weight=10, concurrency_limit=("db", "x"))])) == 1


def test_what_is_published_is_known_and_the_last_to_publish_wins(conn: Connection):
    limited(conn, rates={"r": per_second(1)}, places={"g": 1})
    assert store.publish_limiters(conn, Limiters({"r": per_second(1)}, {"g": 2})).all() == ["g"]
    limited(conn, rates={"r": RateLimit(5, timedelta(minutes=2), 7)})
    assert known_limiters(conn) == Limiters({"r": RateLimit(5, timedelta(minutes=2), 7)}, {"g": 2})


# What it costs.


def test_a_look_that_finds_nothing_is_one_statement(conn: Connection):
    limited(conn, rates={"r": per_second(1)})
    insert(conn)
    with wire_of(conn) as wire:
        assert look(conn).claims == []
    assert (wire.statements, wire.round_trips) == (1, 1)


@pytest.mark.parametrize("size", [1, 10, 100])
def test_a_look_that_claims_takes_two_round_trips_however_much_it_claims(conn: Connection, size: int):
    limited(conn, rates={"r": per_second(1000)}, places={"g": 1000})
    insert(conn, rate_limit="r", concurrency_limit="g")
    with wire_of(conn) as wire:
        assert len(look(conn).claims) == 1
    assert wire.round_trips == len(["find", "open_buckets", "transaction"])
    insert_instances(conn, [new(rate_limit="r", concurrency_limit="g") for _ in range(size)])
    with wire_of(conn) as wire:
        assert len(look(conn).claims) == size
    assert wire.statements == len(["find", "begin", "hold_buckets", "claim_limited", "count_tokens", "commit"])
    assert wire.round_trips == len(["find", "transaction"])


def test_an_insert_asks_for_limits_only_if_it_names_one(conn: Connection):
    limited(conn, rates={"r": per_second(1000)})
    for about, statements in (({}, 1), ({"rate_limit": "r"}, 2)):
        with wire_of(conn) as wire:
            insert_instances(conn, [new(**about) for _ in range(50)])
        assert wire.statements == statements


# Conservation: eight claimers, who do nothing else.


CLAIMERS = 8


@pytest.fixture
def claimers(new_conn: NewConn) -> Callable[[Callable[[Connection, str], None]], None]:
    """Run something in eight threads, each with a connection of its own, until all have returned."""
    conns = [new_conn() for _ in range(CLAIMERS)]

    def run(work: Callable[[Connection, str], None]) -> None:
        failed: list[BaseException] = []

        def guarded(conn: Connection, name: str) -> None:
            try:
                work(conn, name)
            except BaseException as error:  # noqa: BLE001  shown below
                failed.append(error)

        threads = [threading.Thread(target=guarded, args=(each, f"w{n}")) for n, each in enumerate(conns)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed, failed
        assert not any(thread.is_alive() for thread in threads)

    return run


def nothing_left(conn: Connection) -> bool:
    found = conn.execute("select from gen_durable where status = 'runnable' and not throttled limit 1").fetchone()
    return found is None


def test_eight_claimers_take_exactly_what_the_buckets_hold(conn: Connection, claimers: Callable[..., None]):
    # PITFALLS 2.1-19, I#26: rate 0, burst 5, 40 keys x 10 jobs, 8 threads: exactly 5 each.
    limited(conn, rates={"r": never_again(5)})
    insert_instances(conn, [new(rate_limit=("r", f"{n % 40}")) for n in range(400)])

    def work(own: Connection, name: str) -> None:
        until(lambda: look_on(own, name, limit=7) is None or nothing_left(own), "every row claimed or put off")

    claimers(work)
    taken = conn.execute(
        "select rate_limit, count(*) from gen_durable where status = 'executing' group by rate_limit"
    ).fetchall()
    assert dict(taken) == {f"r:{n}": 5 for n in range(40)}


def test_eight_claimers_never_pass_a_rate_and_never_stay_below_it(conn: Connection, claimers: Callable[..., None]):
    allowed, burst = 200, 20
    limited(conn, rates={"r": RateLimit(allowed, SECOND, burst)})
    insert_instances(conn, [new(rate_limit="r") for _ in range(300)])
    lock, grants = threading.Lock(), []
    started = time.monotonic()

    def work(own: Connection, name: str) -> None:
        while len(grants) < 300:
            asked = time.monotonic()
            claims = look_on(own, name, limit=5)
            with lock:
                grants.extend((asked, time.monotonic()) for _ in claims)
            if not claims:
                time.sleep(0.002)

    claimers(work)
    seconds = time.monotonic() - started
    assert seconds < (300 - burst) / allowed + 5, "it stayed below the rate"
    # Of any tokens in a row: granted between the first question and the last answer.
    grants.sort(key=lambda grant: grant[1])
    for size in (30, 100, 300):
        for first in range(0, 300 - size + 1, 10):
            run = grants[first : first + size]
            span = max(end for _, end in run) - min(begin for begin, _ in run)
            assert size <= burst + allowed * span + 1, f"{size} within {span:.3f} s"


def test_eight_claimers_never_pass_a_concurrency_limit_and_never_stay_below_it(
    conn: Connection, claimers: Callable[..., None]
):
    places = 5
    limited(conn, places={"g": places})
    insert_instances(conn, [new(concurrency_limit="g") for _ in range(400)])
    lock, running, peak, done = threading.Lock(), 0, 0, 0

    def work(own: Connection, name: str) -> None:
        nonlocal running, peak, done
        while done < 400:
            claims = look(own, name, limit=3).claims
            with lock:
                running += len(claims)
                peak = max(peak, running)
            if not claims:
                continue
            with lock:
                running -= len(claims)  # before the commit: after it the places are others'
            commit(own, [is_done(claimed) for claimed in claims])
            with lock:
                done += len(claims)

    claimers(work)
    assert peak <= places
    assert done == 400


def test_plain_claims_do_not_see_limited_rows_even_if_they_have_become_so_since(conn: Connection):
    naive = changed(
        lambda c: store.claim(c, queue="q", machines=MACHINES, worker="a", limit=10, lease=LEASE),
        ("\n    and g.rate_limit is null\n    and g.concurrency_limit is null\n  order by head", "\n  order by head"),
    )
    insert(conn, partition_key="k", rate_limit="r")
    assert naive(conn) == []
    assert claim(conn) == []
