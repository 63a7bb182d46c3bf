"""Everything at once: workers that die, senders, sweepers and collectors on the same few rows, until all have ended."""

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import psycopg
from races import LEASE, NewConn, claim, goes_on, insert, is_done, new, parks, repeats, signal, spawns, stops
from support import Background, until

from gendurable.core.claim import Claim
from gendurable.core.transition import Transition
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import insert_instances
from gendurable.errors import NoTarget
from gendurable.runtime.committing import settle
from gendurable.runtime.sweeping import collect_garbage, reap_expired, wake_overdue

ROOTS = 60
KEYS = [f"key {number}" for number in range(6)]


class Soak:
    """Loops over one database that stop when told, and the errors they met."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.errors: list[str] = []

    def loop(self, work: Callable[[Connection, random.Random], None], conn: Connection, seed: int) -> None:
        dice = random.Random(seed)
        while not self.stopping.is_set():
            try:
                work(conn, dice)
            except psycopg.Error as error:
                self.errors.append(f"{work.__name__}: {type(error).__name__}: {error}")

    def work(self, conn: Connection, dice: random.Random) -> None:
        claims = claim(conn, f"w{dice.random()}", limit=dice.randint(1, 8))
        if dice.random() < 0.1:  # died
            expire = "update gen_durable set lease_expires_at = now() - interval '1 s' where id = %s and fence = %s"
            for claimed in claims:
                conn.execute(expire, [claimed.id, claimed.fence])
            return
        store.extend_leases(conn, claims, lease=LEASE)
        batch = [self.outcome(claimed, dice) for claimed in claims]
        dice.shuffle(batch)
        settle(conn, batch)
        if dice.random() < 0.1:  # the answer was lost
            assert settle(conn, batch).written == ()

    def outcome(self, claimed: Claim, dice: random.Random) -> Transition:
        if claimed.parent_id is None:
            return self.of_a_root(claimed, dice)
        roll = dice.random()
        if claimed.step == "one" and roll < 0.4:
            return parks(claimed, '["go", "on"]', timedelta(milliseconds=dice.randint(1, 300)))
        if roll < 0.6:
            return repeats(claimed)
        return stops(claimed) if roll < 0.7 else is_done(claimed)

    def of_a_root(self, claimed: Claim, dice: random.Random) -> Transition:
        if claimed.join_round is not None:
            joined = [child for child in claimed.children if child.round == claimed.join_round]
            assert all(child.status in ("done", "failed") for child in joined), "the barrier opened early"
        if claimed.spawn_round >= 2:
            return is_done(claimed)
        if claimed.step == "one" and dice.random() < 0.3:
            return goes_on(claimed, "one")
        children = [
            new(unique_key=dice.choice(KEYS) if dice.random() < 0.3 else None, partition_key=dice.choice([None, *KEYS]))
            for _ in range(dice.randint(0, 4))
        ]
        return spawns(claimed, *children)

    def send(self, conn: Connection, dice: random.Random) -> None:
        alive = conn.execute("select id from gen_durable where status not in ('done', 'failed')").fetchall()
        for (id,) in dice.sample(alive, min(5, len(alive))):
            with suppress(NoTarget):
                signal(conn, id, dice.choice(["go", "on", "other"]), dice.choice([None, "a", "b"]))

    def insert(self, conn: Connection, dice: random.Random) -> None:
        keys = dice.sample(KEYS, 3)
        fleeting = [new(unique_key=key, queue="fleeting") for key in keys]
        insert_instances(conn, fleeting)
        self.stopping.wait(0.005)
        settle(conn, [is_done(claimed) for claimed in claim(conn, queue="fleeting", limit=2)])

    def sweep(self, conn: Connection, dice: random.Random) -> None:
        reap_expired(conn, worker="reaper", lease=LEASE)
        wake_overdue(conn)

    def collect(self, conn: Connection, dice: random.Random) -> None:
        for _ in collect_garbage(conn, older_than=timedelta(0), batch=dice.randint(1, 20)):
            pass


def test_all_that_happens_at_once_ends_without_an_error_and_without_a_straggler(
    new_conn: NewConn, background: Background
):
    conn, soak = new_conn(), Soak()
    for _ in range(ROOTS):
        insert(conn, max_crashes=None)
    works = [soak.work, soak.work, soak.work, soak.send, soak.insert, soak.sweep, soak.collect]
    loops = [background.start(soak.loop, work, new_conn(), seed) for seed, work in enumerate(works)]
    try:
        unfinished = "select count(*) from gen_durable where status not in ('done', 'failed') and queue = 'q'"
        until(lambda: any(loop.done() for loop in loops) or conn.execute(unfinished).fetchone() == (0,), "the end", 100)
    finally:
        soak.stopping.set()
    for loop in loops:
        loop.result(timeout=60)
    assert soak.errors == []
    left = (
        "select count(*) from signals s join gen_durable g on g.id = s.target_id where g.status in ('done', 'failed')"
    )
    assert conn.execute(left).fetchone() == (0,)
