"""One holder for each key: inserts at once, holders that come and go, and scopes that would wedge the engine."""

from collections.abc import Callable, Iterator

import psycopg
import pytest
from races import (
    LEASE,
    NewConn,
    claim,
    goes_on,
    insert,
    is_done,
    new,
    parks,
    reap,
    repeats,
    signal,
    spawns,
    statuses,
    stops,
    written,
)
from support import Background, expire

from gendurable import migrate
from gendurable.core.status import LIVE, TERMINAL, Status
from gendurable.db import store
from gendurable.db.connection import Connection, connect
from gendurable.db.operations import commit, insert_instance, insert_instances, retry_instance
from gendurable.errors import DuplicateInstance, InvalidInstance
from gendurable.runtime.sweeping import reap_expired

SAFE = [LIVE | extra for extra in (frozenset(), {Status.DONE}, {Status.FAILED}, TERMINAL)]
HOLED = [
    {"executing"},
    {"runnable"},
    {"runnable", "executing"},
    {"runnable", "executing", "awaiting_signal"},
    {"done"},
    LIVE - {Status.RUNNABLE},
    LIVE - {Status.EXECUTING} | TERMINAL,
]


def add(conn: Connection, key: str = "k", **about: object) -> int | None:
    """Insert an instance with a key; None if the key is occupied."""
    return store.insert(conn, [new(unique_key=key, **about)]).one()


# Inserts.


@pytest.mark.parametrize("is_kept", [True, False])
def test_of_two_inserts_of_one_key_the_second_waits_and_gets_what_is_left(
    conn: Connection, new_conn: NewConn, background: Background, is_kept: bool
):
    other = new_conn()
    other.execute("begin")
    first = add(other)
    second = background.start_blocked(conn, add, conn)
    other.execute("commit" if is_kept else "rollback")
    assert (second.result() is None) == is_kept
    assert len(conn.execute("select from gen_durable").fetchall()) == 1
    assert (store.find_occupant(conn, unique_key=b"k").one() == first) == is_kept


def test_an_occupied_key_is_refused_with_the_name_of_its_holder(conn: Connection):
    holder = insert_instance(conn, new(unique_key="k"))
    with pytest.raises(DuplicateInstance) as caught:
        insert_instance(conn, new(unique_key=b"k"))
    assert str(holder) in str(caught.value)


def test_a_key_that_stands_twice_in_a_batch_is_inserted_once(conn: Connection):
    assert len(insert_instances(conn, [new(unique_key="k"), new(), new(unique_key="k"), new()])) == 3


def test_an_insert_waits_for_the_end_of_the_holder_and_takes_the_key(
    conn: Connection, new_conn: NewConn, background: Background
):
    worker = new_conn()
    add(conn)
    [claimed] = claim(conn)
    worker.execute("begin")
    store.finish(worker, [is_done(claimed)])
    inserted = background.start_blocked(conn, add, conn)
    worker.execute("commit")
    assert inserted.result() is not None


def test_an_insert_waits_for_a_change_of_the_holder_and_is_refused(
    conn: Connection, new_conn: NewConn, background: Background
):
    worker = new_conn()
    add(conn)
    [claimed] = claim(conn)
    worker.execute("begin")
    store.advance(worker, [goes_on(claimed)])
    inserted = background.start_blocked(conn, add, conn)
    worker.execute("commit")
    assert inserted.result() is None


def test_many_inserts_of_one_key_at_once_leave_one_holder(new_conn: NewConn, background: Background):
    conn = new_conn()
    tries = [background.start(add, new_conn()) for _ in range(8)]
    assert sum(each.result(timeout=60) is not None for each in tries) == 1
    assert len(conn.execute("select from gen_durable").fetchall()) == 1


# Scopes.


@pytest.mark.parametrize("scope", SAFE, ids=len)
def test_through_its_whole_life_a_holder_neither_loses_its_key_nor_stumbles_over_it(conn: Connection, scope):
    id = add(conn, unique_scope=scope)
    assert id is not None

    def is_held() -> bool:
        return add(conn, unique_scope=scope) is None

    def act(outcome: Callable) -> None:
        [claimed] = claim(conn)
        assert is_held()
        assert written(commit(conn, [outcome(claimed)])) == {id}

    assert is_held()
    act(goes_on)
    assert is_held()
    act(repeats)
    act(parks)
    assert is_held()
    signal(conn, id)
    act(lambda claimed: spawns(claimed, new(queue="children")))
    assert is_held()
    [child] = claim(conn, queue="children")
    commit(conn, [is_done(child)])
    claim(conn)
    expire(conn, id)
    assert reap(conn) == [id]
    act(is_done)
    assert is_held() == (Status.DONE in scope)


@pytest.mark.parametrize("scope", HOLED, ids=sorted)
def test_a_scope_with_holes_is_refused_before_there_is_a_row(scope):
    # 2.3-2
    with pytest.raises(InvalidInstance, match="unique_scope"):
        new(unique_key="k", unique_scope=scope)


@pytest.mark.parametrize("scope", HOLED, ids=sorted)
def test_a_scope_with_holes_is_refused_by_the_table_too(conn: Connection, scope):
    # Whoever writes rows by hand must not be able to stop the reaper for everybody.
    insert_by_hand = "insert into gen_durable (fsm, step, unique_key, unique_scope) values ('f', 'one', 'k', %s)"
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute(insert_by_hand, [[str(status) for status in scope]])


def test_an_empty_scope_occupies_nothing(conn: Connection):
    assert add(conn, unique_scope=()) is not None
    assert add(conn, unique_scope=()) is not None
    assert len(claim(conn)) == 2


@pytest.fixture
def unguarded(fresh_database: str) -> Iterator[Connection]:
    """A database whose table takes scopes with holes."""
    migrate.up(fresh_database)
    with connect(fresh_database) as conn:
        conn.execute("alter table gen_durable drop constraint gen_durable_scope_without_holes")
        yield conn


def narrow(conn: Connection, id: int | None, scope: str) -> None:
    conn.execute("update gen_durable set unique_scope = %s::durable_status[] where id = %s", [scope, id])


def test_a_scope_with_holes_would_stop_the_reaper_for_everybody(unguarded: Connection):
    conn = unguarded
    bystander, crashed = insert(conn), add(conn)
    narrow(conn, crashed, "{runnable}")
    claim(conn)
    twin = add(conn)
    narrow(conn, twin, "{runnable}")
    expire(conn, bystander, crashed or 0)
    with pytest.raises(psycopg.errors.UniqueViolation):
        reap_expired(conn, worker="reaper", lease=LEASE)
    assert statuses(conn, [bystander]) == ["executing"], "nothing crashed is ever run again"


def test_a_scope_with_holes_would_stop_a_queue(unguarded: Connection):
    conn = unguarded
    insert(conn)
    for _ in range(2):
        narrow(conn, add(conn, unique_scope=()), "{executing}")
    with pytest.raises(psycopg.errors.UniqueViolation):
        claim(conn)


# Back to life.


def test_a_failed_instance_that_runs_again_waits_for_a_rival_of_its_key(
    conn: Connection, new_conn: NewConn, background: Background
):
    rival = new_conn()
    id = add(conn)
    [claimed] = claim(conn)
    commit(conn, [stops(claimed)])
    rival.execute("begin")
    add(rival)
    again = background.start_blocked(conn, retry_instance, conn, id)
    rival.execute("rollback")
    assert again.result() is None
    assert statuses(conn, [id or 0]) == ["runnable"]
