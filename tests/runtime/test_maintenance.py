"""The chores of one loop: none keeps the others waiting."""

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from races import LEASE, claim_one, insert, statuses
from support import expire

from gendurable.db.connection import Connection, Database
from gendurable.events import Event, GarbageCollected
from gendurable.runtime.known import KnownLimits
from gendurable.runtime.loop import Wires
from gendurable.runtime.maintenance import Maintenance, MaintenanceSettings
from gendurable.runtime.scheduling import Scheduler
from gendurable.runtime.session import Session

SETTINGS = MaintenanceSettings(
    worker="reaper",
    lease=LEASE,
    sweep=1,
    reap=0.001,
    grace=0,
    retention=timedelta(days=1),
    gc_interval=0.001,
    gc_batch=2,
)


@pytest.fixture
def said() -> list[Event]:
    return []


@pytest.fixture
def maintenance(dsn: str, said: list[Event]) -> Iterator[Maintenance]:
    with closing(Session(lambda: Database(dsn).connect("gendurable maintenance"))) as session:
        wires = Wires(said.append, lambda: None)
        scheduler = Scheduler([], said.append)
        yield Maintenance(
            SETTINGS,
            session,
            wires,
            limits=KnownLimits(),
            on_due=lambda _: None,
            also=lambda: None,
            scheduler=scheduler,
        )


def collected(said: list[Event]) -> list[int]:
    return [event.count for event in said if isinstance(event, GarbageCollected)]


def test_a_backlog_of_old_rows_keeps_neither_deadlines_nor_leases_waiting(
    conn: Connection, maintenance: Maintenance, said: list[Event]
):
    for _ in range(6):
        insert(conn)
    conn.execute("update gen_durable set status = 'done', updated_at = now() - interval '1 year'")
    assert maintenance.run_once() == 0
    assert collected(said) == [2]

    crashed = claim_one(conn)
    expire(conn, crashed.id)
    parked = insert(conn)
    query = """update gen_durable set status = 'awaiting_signal', awaits = '{go}', await_deadline = now()
               where id = %s"""
    conn.execute(query, [parked])
    assert maintenance.run_once() == 0
    assert statuses(conn, [crashed.id, parked]) == ["runnable", "runnable"]
    assert collected(said) == [2, 2]

    while maintenance.run_once() == 0:
        pass
    assert collected(said) == [2, 2, 2]


def test_a_collection_that_lost_its_connection_begins_again(
    conn: Connection, maintenance: Maintenance, said: list[Event]
):
    for _ in range(4):
        insert(conn)
    conn.execute("update gen_durable set status = 'done', updated_at = now() - interval '1 year'")
    assert maintenance._round() == 0
    conn.execute("select pg_terminate_backend(%s)", [maintenance._session.conn.info.backend_pid])
    assert maintenance._round() > 0
    assert not maintenance.is_available
    while sum(collected(said)) < 4:
        maintenance._round()
    assert maintenance.is_available
