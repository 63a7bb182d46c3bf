"""A batch that the database refuses is split until the culprit is alone; its neighbours are written."""

from collections.abc import Iterator

import psycopg
import pytest
from attrs import evolve
from races import (
    NewConn,
    claim,
    claim_one,
    family,
    goes_on,
    insert,
    is_done,
    new,
    parks,
    repeats,
    signal,
    spawns,
    statuses,
    stops,
)
from support import Background, hold, inbox, row

from gendurable.core.claim import Claim
from gendurable.core.transition import Transition
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import commit
from gendurable.runtime.committing import settle

BROKEN = "{"
NUL = '{"a": "\\u0000"}'
SURROGATE = '{"a": "\\ud800"}'


def claims_of(conn: Connection, count: int) -> list[Claim]:
    for _ in range(count):
        insert(conn)
    return claim(conn)


POISONED = {
    "next with broken JSON": lambda claimed: evolve(goes_on(claimed), state=BROKEN),
    "next with a NUL": lambda claimed: evolve(goes_on(claimed), state=NUL),
    "next with a lone surrogate": lambda claimed: evolve(goes_on(claimed), state=SURROGATE),
    "next to a step with a NUL": lambda claimed: evolve(goes_on(claimed), step="a\0b"),
    "retry with a NUL": lambda claimed: evolve(repeats(claimed), state=NUL),
    "retry with an error that has a NUL": lambda claimed: evolve(repeats(claimed), error="a\0b"),
    "await with broken names": lambda claimed: parks(claimed, BROKEN),
    "await with names that are no list": lambda claimed: parks(claimed, '"go"'),
    "spawn with a child of broken state": lambda claimed: spawns(claimed, new(), evolve(new(), state=BROKEN)),
    "spawn with a child of no status": lambda claimed: spawns(claimed, evolve(new(), unique_scope=frozenset(["x"]))),
    "spawn with a child of unknown urgency": lambda claimed: spawns(claimed, evolve(new(), priority=2**40)),
    "done with a NUL": lambda claimed: evolve(is_done(claimed), result=NUL),
}


@pytest.mark.parametrize("poison", POISONED)
def test_one_poisoned_outcome_ends_failed_and_its_neighbours_are_written(conn: Connection, poison: str):
    # 2.1-17, 2.4-1
    a, bad, b, c, d = claims_of(conn, 5)
    signal(conn, bad.id)
    batch = [goes_on(a), POISONED[poison](bad), is_done(b), spawns(c, new()), parks(d)]
    settled = settle(conn, batch)
    assert [change.id for change in settled.written] == [a.id, bad.id, b.id, c.id, d.id]
    assert statuses(conn, [a.id, bad.id, b.id, c.id, d.id]) == [
        "runnable",
        "failed",
        "done",
        "awaiting_children",
        "awaiting_signal",
    ]
    assert row(conn, bad.id)["last_error"].startswith("Unstorable: the database refused the outcome: ")
    assert inbox(conn, bad.id) == []
    assert family(conn, bad.id) == []


def test_without_splitting_one_poisoned_outcome_stops_its_neighbours(conn: Connection):
    good, bad = claims_of(conn, 2)
    with pytest.raises(psycopg.DataError):
        commit(conn, [goes_on(good), evolve(goes_on(bad), state=BROKEN)])
    assert statuses(conn, [good.id, bad.id]) == ["executing", "executing"]


@pytest.fixture(params=["P0001", "44000"])
def refusing(conn: Connection, request: pytest.FixtureRequest) -> Iterator[None]:
    """Somebody's own trigger, which lets no instance of odd id be done."""
    conn.execute(f"""
        create function refuse() returns trigger language plpgsql as $$
        begin
          raise exception 'not with us' using errcode = '{request.param}';
        end $$;
        create trigger refuse before update on gen_durable
          for each row when (new.id % 2 = 1 and new.status = 'done') execute function refuse();
    """)
    yield
    conn.execute("drop function refuse cascade")


@pytest.mark.usefixtures("refusing")
def test_outcomes_that_somebodys_trigger_refuses_fail_alone(conn: Connection):
    claims = claims_of(conn, 4)
    settle(conn, [is_done(claimed) for claimed in claims])
    for claimed in claims:
        found = row(conn, claimed.id)
        assert found["status"] == ("failed" if claimed.id % 2 else "done")
        assert (found["last_error"] or "not with us").endswith("not with us")


@pytest.mark.parametrize("places", [{0}, {6}, {2, 3}, {0, 3, 6}, set(range(7))])
def test_any_number_of_poisoned_outcomes_anywhere_in_a_batch_are_found(conn: Connection, places: set[int]):
    claims = claims_of(conn, 7)
    batch: list[Transition] = [
        evolve(goes_on(claimed), state=NUL) if place in places else goes_on(claimed)
        for place, claimed in enumerate(claims)
    ]
    settle(conn, batch)
    assert statuses(conn, [claimed.id for claimed in claims]) == [
        "failed" if place in places else "runnable" for place in range(7)
    ]


def test_a_poisoned_outcome_of_a_child_still_joins_the_parent(conn: Connection):
    parent = claim_one(conn)
    commit(conn, [spawns(parent, new())])
    [child] = claim(conn)
    settled = settle(conn, [evolve(is_done(child), result=NUL)])
    assert settled.woken == {"q"}
    assert statuses(conn, [parent.id, child.id]) == ["runnable", "failed"]


def test_a_poisoned_outcome_that_is_stale_changes_nothing(conn: Connection):
    [claimed] = claims_of(conn, 1)
    store.release(conn, [claimed])
    assert settle(conn, [evolve(goes_on(claimed), state=NUL)]).written == ()
    assert statuses(conn, [claimed.id]) == ["runnable"]


@pytest.fixture
def forbidden(conn: Connection) -> Iterator[Claim]:
    """A claim of an instance that the database, for reasons of its own, lets neither go on nor end."""
    claimed = claim_one(conn, partition_key="k")
    conn.execute(
        f"alter table gen_durable add constraint forbids check (id <> {claimed.id} or status in ('runnable', 'executing'))"
    )
    yield claimed
    conn.execute("alter table gen_durable drop constraint forbids")


def test_an_outcome_that_cannot_even_be_ended_is_left_to_its_lease_and_its_neighbours_are_written(
    conn: Connection, forbidden: Claim
):
    neighbours = claims_of(conn, 2)
    settled = settle(conn, [is_done(neighbours[0]), is_done(forbidden), is_done(neighbours[1])])
    assert [change.id for change in settled.written] == [claimed.id for claimed in neighbours]
    assert statuses(conn, [forbidden.id]) == ["executing"]


def test_the_lock_of_a_key_is_let_go_with_the_outcome(conn: Connection, new_conn: NewConn):
    other = new_conn()
    claimed = claim_one(conn, partition_key="k")
    assert store.lock_partitions(conn, keys=["k"]).one()
    assert not store.lock_partitions(other, keys=["k"]).one()
    settle(conn, [evolve(goes_on(claimed), state=NUL)], unlock=["k"])
    assert store.lock_partitions(other, keys=["k"]).one()


def test_the_lock_of_a_key_is_let_go_even_if_the_outcome_cannot_be_written(
    conn: Connection, new_conn: NewConn, forbidden: Claim
):
    other = new_conn()
    assert store.lock_partitions(conn, keys=["k"]).one()
    assert settle(conn, [is_done(forbidden)], unlock=["k"]).written == ()
    assert store.lock_partitions(other, keys=["k"]).one()


def test_an_error_that_is_nobodys_fault_is_raised_and_nothing_is_lost(conn: Connection, new_conn: NewConn):
    holder = new_conn()
    claims = claims_of(conn, 3)
    conn.execute("set lock_timeout = '50ms'")
    batch = [goes_on(claimed) for claimed in claims]
    with hold(holder, claims[1].id), pytest.raises(psycopg.errors.LockNotAvailable):
        settle(conn, batch)
    assert statuses(conn, [claimed.id for claimed in claims]) == ["executing"] * 3
    assert len(settle(conn, batch).written) == 3


def test_a_deadlock_with_a_clients_own_transaction_is_survived_by_trying_again(
    conn: Connection, new_conn: NewConn, background: Background
):
    # Nobody can order the locks of other people's transactions.
    client = new_conn()
    one, two = claims_of(conn, 2)
    conn.execute("set deadlock_timeout = '100ms'")  # the batch notices first, and gives way
    client.execute("set deadlock_timeout = '60s'")
    client.execute("begin")
    store.lock_target(client, id=two.id)
    batch = background.start_blocked(conn, settle, conn, [stops(one), stops(two)])
    sent = background.start(store.lock_target, client, id=one.id)
    assert type(batch.exception(timeout=60)) is psycopg.errors.DeadlockDetected
    assert sent.result(timeout=60).all() == [one.id]
    client.execute("commit")
    assert len(settle(conn, [stops(one), stops(two)]).written) == 2
