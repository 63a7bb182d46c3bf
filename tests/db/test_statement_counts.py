"""How many statements and round trips each operation takes, however large its batch: read from the wire itself."""

import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import pytest
from attrs import evolve
from wire import wire_of

from gendurable import FSM, Await, Context, Done, Next, Outcome, Retry, Spawn, Stop, step
from gendurable.core.claim import Claim
from gendurable.core.status import Status
from gendurable.core.transition import Transition, keep_claim, transition
from gendurable.db import store
from gendurable.db.connection import Connection, one_commit
from gendurable.db.operations import claim_batch, commit, delivered, insert_instances, send_signal
from gendurable.runtime.committing import settle
from gendurable.runtime.sweeping import reap_expired, wake_overdue
from gendurable.testing import Harness

LEASE = timedelta(minutes=1)
SIZES = (1, 10, 100)


class Counted(FSM[dict], name="counted", inline=True):
    """Goes through every outcome, as its state says."""

    @step
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        if ctx.attempt < ctx.state["n"] % 3:
            return Retry()
        return Await("go", then=self.fan_out) if ctx.state["n"] % 2 else Next(self.fan_out)

    @step
    def fan_out(self, ctx: Context[dict]) -> Outcome[dict]:
        return Spawn([Leaf.new({"n": n}) for n in range(ctx.state["n"] % 4)], then=self.end)

    @step
    def end(self, ctx: Context[dict]) -> Outcome[dict]:
        return Done({"n": ctx.state["n"]})


class Leaf(FSM[dict], name="leaf"):
    @step
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        return Stop("enough") if ctx.state["n"] else Done()


COUNTED = Counted()
OUTCOMES: dict[str, Callable[[], Outcome[dict]]] = {
    "next": lambda: Next("end", delay=1),
    "next, inline": lambda: Next("end"),
    "retry": Retry,
    "await": lambda: Await("go", then="end"),
    "spawn": lambda: Spawn([Leaf.new({"n": 1}), Leaf.new({"n": 2})], then="end"),
    "done": Done,
    "stop": lambda: Stop("enough"),
}


def insert(conn: Connection, count: int, **more: object) -> list[int]:
    return insert_instances(conn, [Counted.new({"n": n}, **more) for n in range(count)])


def claim(conn: Connection, limit: int = 100) -> list[Claim]:
    machines = ["counted@1", "leaf@1"]
    return claim_batch(conn, queue="default", machines=machines, worker="w", limit=limit, lease=LEASE)


def outcome(claim: Claim, kind: str) -> Transition:
    change = transition(claim, OUTCOMES[kind](), json.loads(claim.state), COUNTED)
    return keep_claim(claim, change, COUNTED)


def signal(conn: Connection, id: int, name: str) -> None:
    with one_commit(conn):
        answer = send_signal(conn, id, name, {}, None)
    delivered(id, answer)


# Claiming.


def test_a_claim_that_finds_nothing_is_one_statement(conn: Connection):
    with wire_of(conn) as wire:
        assert claim(conn) == []
    assert (wire.statements, wire.round_trips) == (1, 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_claim_of_instances_without_inbox_and_children_is_one_statement(conn: Connection, size: int):
    insert(conn, size)
    with wire_of(conn) as wire:
        assert len(claim(conn)) == size
    assert (wire.statements, wire.round_trips) == (1, 1)


@pytest.mark.parametrize("size", SIZES)
def test_a_claim_of_instances_with_inbox_and_children_is_three_statements_in_two_round_trips(
    conn: Connection, size: int
):
    for id in insert(conn, size):
        signal(conn, id, "go")
    commit(conn, [outcome(claim, "spawn") for claim in claim(conn)])
    while leaves := [leaf for leaf in claim(conn) if leaf.fsm == "leaf"]:
        commit(conn, [transition(leaf, Done(), {}, Leaf()) for leaf in leaves])
    conn.execute(
        "update gen_durable set status = 'runnable', locked_by = null, lease_expires_at = null where status = 'executing'"
    )
    with wire_of(conn) as wire:
        claims = claim(conn)
    assert len(claims) == size
    assert all(len(each.inbox) == 1 and len(each.children) == 2 for each in claims)
    assert (wire.statements, wire.round_trips) == (3, 2)


# Outcomes.


@pytest.mark.parametrize("kind", OUTCOMES)
def test_outcomes_of_one_kind_take_as_many_statements_as_one_outcome_and_one_round_trip(conn: Connection, kind: str):
    taken = set()
    for size in SIZES:
        insert(conn, size)
        changes = [outcome(claim, kind) for claim in claim(conn, size)]
        assert len(changes) == size
        with wire_of(conn) as wire:
            assert len(commit(conn, changes).written) == size
        assert wire.round_trips == 1
        taken.add(wire.statements)
        conn.execute("truncate gen_durable, signals")
    assert len(taken) == 1, f"the number of statements depends on the number of outcomes: {taken}"
    assert taken.pop() <= 4, "begin, locks or recheck, the outcomes, commit"


@pytest.mark.parametrize("size", [10, 100])
def test_a_mixed_batch_takes_a_statement_for_each_kind_and_one_round_trip(conn: Connection, size: int):
    insert(conn, size)
    kinds = list(OUTCOMES)
    changes = [outcome(claim, kinds[place % len(kinds)]) for place, claim in enumerate(claim(conn))]
    with wire_of(conn) as wire:
        assert len(commit(conn, changes).written) == size
    statements_of_kinds = len(kinds) - 1  # both ends are written by one
    assert wire.statements == statements_of_kinds + len(["begin", "locks", "recheck", "commit"])
    assert wire.round_trips == 1


def test_an_outcome_and_the_end_of_its_partition_lock_share_a_round_trip(conn: Connection):
    insert(conn, 1, partition_key="k")
    [claimed] = claim(conn)
    store.lock_partitions(conn, keys=["k"])
    with wire_of(conn) as wire:
        commit(conn, [outcome(claimed, "next")], unlock=["k"])
    assert wire.round_trips == 1


def test_a_refused_outcome_costs_its_neighbours_a_few_round_trips_however_many_they_are(conn: Connection):
    insert(conn, 64)
    changes = [outcome(claim, "retry") for claim in claim(conn)]
    changes[20] = evolve(changes[20], state='"\\u0000"')
    with wire_of(conn) as wire:
        assert len(settle(conn, changes).written) == 64
    # Halved six times: at each turn a batch that is refused, its rollback, and a batch that is not.
    assert wire.round_trips <= 6 * 3 + 3


# Clients.


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_any_number_of_instances_is_inserted_by_one_statement(conn: Connection, size: int):
    with wire_of(conn) as wire:
        assert len(insert(conn, size)) == size
    assert (wire.statements, wire.round_trips) == (1, 1)


def test_a_signal_is_one_round_trip(conn: Connection):
    [id] = insert(conn, 1)
    with wire_of(conn) as wire:
        signal(conn, id, "go")
    assert wire.statements == len(["begin", "lock_target", "deliver", "commit"])
    assert wire.round_trips == 1


# Keeping order.


@pytest.mark.parametrize("size", SIZES)
def test_a_heartbeat_and_a_release_are_one_statement_each(conn: Connection, size: int):
    insert(conn, size)
    claims = claim(conn)
    for call in (lambda: store.extend_leases(conn, claims, lease=LEASE), lambda: store.release(conn, claims)):
        with wire_of(conn) as wire:
            assert len(call().all()) == size
        assert (wire.statements, wire.round_trips) == (1, 1)


def test_maintenance_that_finds_nothing_is_one_statement_each(conn: Connection):
    insert(conn, 3)
    claim(conn)
    for call in (lambda: reap_expired(conn, worker="r", lease=LEASE), lambda: wake_overdue(conn)):
        with wire_of(conn) as wire:
            assert call() == []
        assert (wire.statements, wire.round_trips) == (1, 1)


# Preparing.


def prepared(conn: Connection) -> list[str]:
    rows = conn.execute("select statement from pg_prepared_statements order by statement", prepare=False).fetchall()
    return [text for (text,) in rows]


def run_many(durable: Harness, count: int) -> int:
    """Run a batch of instances of every kind to their end; return how many outcomes that took."""
    ids = durable.insert_many(Counted.new({"n": n}) for n in range(count))
    tally = Counter(durable.drain(max_steps=100_000))
    for id in ids:
        if durable.get(id).status is Status.AWAITING_SIGNAL:
            durable.signal(id, "go")
    tally += Counter(durable.drain(max_steps=100_000))
    assert {durable.get(id).status for id in ids} == {Status.DONE}
    return tally.total()


def test_the_number_of_prepared_statements_does_not_grow_with_the_work(
    harness: Callable[..., Harness], conn: Connection
):
    # PITFALLS 2.1-19, I#4: text that varies would be planned anew each time, and fill the session's memory.
    durable = harness(Counted, Leaf)
    steps = sum(run_many(durable, size) for size in (1, 2, 3, 4, 5, 6, 8, 10, 12))
    settled = prepared(durable._conn)
    assert {text.split(":")[0] for text in settled} >= {
        f"-- {name}" for name in ("claim", "advance", "finish", "spawn")
    }
    while steps < 1000:
        steps += run_many(durable, 34)
    assert prepared(durable._conn) == settled


def test_ids_of_another_size_make_new_types_only_of_single_ids(harness: Callable[..., Harness], conn: Connection):
    durable = harness(Counted, Leaf)
    sizes = (1, 2, 3, 4, 5, 6, 8, 10, 12)
    assert sum(run_many(durable, size) for size in sizes)
    settled = Counter(prepared(durable._conn))
    # By another connection, since this makes a connection forget what it has prepared.
    conn.execute("alter table gen_durable alter id restart with 3000000000")
    assert sum(run_many(durable, size) for size in sizes)
    more = Counter(prepared(durable._conn)) - settled
    assert {text.split(":")[0] for text in more} <= {"-- lock_target", "-- deliver", "-- get_instance"}
    assert set(more.values()) == {1}


def test_after_a_batch_that_failed_every_statement_can_still_be_run(conn: Connection):
    # The server skips what follows the error, preparing included; psycopg must not believe that it was done.
    for _ in range(12):
        insert(conn, 4)
        claims = claim(conn)
        assert len(claims) == 4
        bad = evolve(outcome(claims[0], "next"), state='"\\u0000"')
        changes = [
            bad,
            *(outcome(each, kind) for each, kind in zip(claims[1:], ("retry", "await", "done"), strict=True)),
        ]
        assert len(settle(conn, changes).written) == 4
        conn.execute("truncate gen_durable, signals")
