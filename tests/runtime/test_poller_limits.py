"""How often a poller looks for rows with limits, and what lets it look again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from math import inf
from typing import Any

import pytest
from limited import limited, never_again, per_second
from races import LEASE, MACHINES, insert, new
from support import until
from wire import wire_of

from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection, Database
from gendurable.db.operations import insert_instances
from gendurable.events import Claimed, Event, TokensCounted
from gendurable.runtime.inflight import Inflight
from gendurable.runtime.loop import Wires
from gendurable.runtime.poller import Poller, PollSettings
from gendurable.runtime.prefetch import Prefetch
from gendurable.runtime.session import Session
from gendurable.runtime.slots import Slots

SIZE = 5


@pytest.fixture
def session(dsn: str) -> Iterator[Session]:
    with closing(Session(lambda: Database(dsn).connect("gendurable poller", steady=True))) as session:
        yield session


@pytest.fixture
def said() -> list[Event]:
    return []


@pytest.fixture
def poller(session: Session, said: list[Event]) -> Iterator[Callable[..., Poller]]:
    """A poller that is not started: the test makes its rounds. Its steps wait until the end."""
    over = threading.Event()

    def run(_: Any) -> bool:
        return not over.wait(60)

    def make(*, has_limits: bool = True) -> Poller:
        settings = PollSettings(
            queue="q",
            worker="w",
            machines=MACHINES,
            lease=LEASE,
            poll=1,
            max_poll=5,
            min_demand=1,
            keyed=True,
            has_limits=lambda: has_limits,
        )
        slots = Slots("q", SIZE, run, lambda _: 1)
        prefetch = Prefetch(0, SIZE)
        return Poller(
            settings, session, Wires(said.append, lambda: None), slots=slots, prefetch=prefetch, inflight=Inflight()
        )

    yield make
    over.set()


def held(poller: Poller) -> list[Claim]:
    return poller._inflight.all()


def statements(session: Session, round: Callable[[], float]) -> int:
    with wire_of(session.conn) as wire:
        round()
    return wire.statements


def test_where_no_limit_is_known_nobody_looks_for_rows_that_have_one(
    conn: Connection, session: Session, poller: Callable[..., Poller]
):
    unaware = poller(has_limits=False)
    assert statements(session, unaware.run_once) == 1
    insert_instances(conn, [new() for _ in range(SIZE)])
    assert statements(session, unaware.run_once) == 1
    assert len(held(unaware)) == SIZE


def test_where_one_is_known_looking_for_them_is_one_statement_more(
    conn: Connection, session: Session, poller: Callable[..., Poller]
):
    limited(conn, rates={"r": per_second(1)})
    assert statements(session, poller().run_once) == 2


def test_a_backlog_without_limits_is_worked_off_without_looking_for_others_each_time(
    conn: Connection, session: Session, poller: Callable[..., Poller]
):
    limited(conn, rates={"r": per_second(1)})
    busy = poller()
    insert_instances(conn, [new() for _ in range(4 * SIZE)])
    before = busy._look_for_limited
    assert busy.run_once() == 0, "there may be more"
    assert busy._look_for_limited > before
    busy._look_for_pause = busy._look_for_limited = inf  # as if no time passed
    busy._inflight.remove(held(busy))
    assert statements(session, busy.run_once) == 1
    busy._look_for_limited = 0  # a moment later
    busy._inflight.remove(held(busy))
    assert statements(session, busy.run_once) == 2


def test_rows_with_limits_and_rows_without_share_the_room(
    conn: Connection, poller: Callable[..., Poller], said: list[Event]
):
    limited(conn, rates={"r": never_again(2)})
    insert_instances(conn, [new(rate_limit="r") for _ in range(4)])
    insert_instances(conn, [new() for _ in range(4)])
    mine = poller()
    assert mine.run_once() == 0
    assert [claimed.limited for claimed in held(mine)] == [True, True, False, False, False]
    assert [event.count for event in said if isinstance(event, Claimed)] == [2, 3]
    assert [event for event in said if isinstance(event, TokensCounted)] == [TokensCounted("r", 4, 2, 2)]


def test_it_does_not_sleep_past_the_next_token(conn: Connection, poller: Callable[..., Poller]):
    limited(conn, rates={"r": per_second(2, burst=1)})
    insert_instances(conn, [new(rate_limit="r") for _ in range(2)])
    mine = poller()
    while mine.run_once() == 0:
        pass
    mine._pause = 5
    assert 0 < mine.run_once() <= 0.5
    conn.execute("update gen_durable set eligible_at = now() + interval '1 hour' where status = 'runnable'")
    mine._pause = 5
    assert mine.run_once() > 1


def test_a_place_that_is_freed_wakes_a_poller_that_saw_rows_wait_for_one(
    conn: Connection, poller: Callable[..., Poller]
):
    limited(conn, places={"g": 1})
    insert_instances(conn, [new(concurrency_limit="g") for _ in range(2)])
    mine = poller()
    mine.run_once()
    mine.run_once()
    assert len(held(mine)) == 1
    mine._bell.clear()
    mine.slot_freed()
    assert mine._bell.is_set()
    idle = poller()
    conn.execute("delete from gen_durable")
    idle.run_once()
    idle._bell.clear()
    idle.slot_freed()
    assert not idle._bell.is_set(), "it has nothing to wait for"


def test_whoever_finds_a_bucket_held_looks_again_soon(
    conn: Connection, new_conn: Callable[[], Connection], poller: Callable[..., Poller]
):
    limited(conn, rates={"r": per_second(9)})
    insert(conn, rate_limit="r")
    conn.execute("insert into buckets (kind, key, tokens) values ('rate', 'r', 9)")
    other = new_conn()
    other.execute("begin")
    other.execute("select from buckets for no key update")
    mine = poller()
    mine._pause = 5
    assert mine.run_once() < 0.1
    other.execute("rollback")
    mine.run_once()
    assert len(held(mine)) == 1


def test_a_window_of_throttled_rows_is_followed_by_the_next_at_once(conn: Connection, poller: Callable[..., Poller]):
    limited(conn, rates={"r": never_again(1)})
    insert_instances(conn, [new(rate_limit="r") for _ in range(1200)])
    mine = poller()
    rounds = 0
    while mine.run_once() == 0:
        rounds += 1
        assert rounds < 10
    assert conn.execute("select count(*) from gen_durable where throttled").fetchone() == (1199,)
    assert until(lambda: len(held(mine)) == 1)


def test_work_that_only_waits_for_tokens_keeps_a_worker_from_being_idle(conn: Connection):
    def has_work() -> bool | None:
        return store.has_work(conn, queues=["q"], machines=MACHINES, keyed=True).one()

    insert(conn, rate_limit="nobody")
    assert not has_work(), "nobody may ever define that limit"
    limited(conn, rates={"r": never_again(1)})
    waiting = insert(conn, rate_limit="r")
    assert has_work()
    later = timedelta(hours=1)
    conn.execute("update gen_durable set throttled = true, eligible_at = now() + %s where id = %s", [later, waiting])
    assert has_work()
    conn.execute("update gen_durable set status = 'done' where id = %s", [waiting])
    assert not has_work()
