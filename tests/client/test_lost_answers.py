"""Writes whose answer was lost: said to be unknown, and never repeated."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from orders import Checkout
from proxy import Proxy
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool
from support import Background, until

from gendurable import Client
from gendurable.client import _is_lost
from gendurable.db.connection import Connection
from gendurable.errors import DatabaseUnavailable, DuplicateInstance, OutcomeUnknown


def count(conn: Connection, table: str = "gen_durable") -> int:
    found = conn.execute(f"select count(*) from {table}").fetchone()  # type: ignore[arg-type]
    assert found is not None
    return int(found[0])


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as between:
        yield between


def blocked_pid(conn: Connection, application: str) -> int | None:
    found = conn.execute(
        "select pid from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'"
        " and datname = current_database()",
        [application],
    ).fetchone()
    return None if found is None else int(found[0])


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("many", [False, True])
def test_a_session_killed_in_the_middle_of_an_insert_leaves_its_outcome_unknown(
    dsn: str, new_conn: Callable[[], Connection], background: Background, own: bool, many: bool
):
    # An uncommitted row holds the unique key, so the insert waits in the server; then its backend is ended.
    holder, conn = new_conn(), new_conn()
    holder.execute("begin")
    Client(dsn).insert(Checkout.new(unique_key="k"), conn=holder)
    address = make_conninfo(dsn, application_name="victim")
    with ConnectionPool(address, min_size=1, max_size=1) as pool, Client(address) as direct:
        client = direct if own else Client(pool=pool)
        new = Checkout.new(unique_key="k")
        insert: Callable[[], Any] = (lambda: client.insert_many([new])) if many else (lambda: client.insert(new))
        answer = background.start(insert)
        pid = until(lambda: blocked_pid(conn, "victim"), "the insert waiting for the key")
        conn.execute("select pg_terminate_backend(%s)", [pid])
        with pytest.raises(OutcomeUnknown, match="may or may not have been committed"):
            answer.result(timeout=60)
        holder.execute("rollback")
        assert count(conn) == 0, "it was not tried again"
        assert insert(), "the client has found itself another connection"
    assert count(conn) == 1


@pytest.mark.parametrize(
    "goodbye", [psycopg.errors.AdminShutdown, psycopg.errors.CrashShutdown, psycopg.errors.ConnectionException]
)
def test_a_server_s_goodbye_counts_although_it_has_not_hung_up_yet(conn: Connection, goodbye: type[psycopg.Error]):
    # Whether the end of the stream was read together with the message is the network's whim.
    assert not conn.closed
    assert _is_lost(conn, goodbye("terminating connection"))
    assert not _is_lost(conn, psycopg.errors.QueryCanceled("canceling statement"))


def test_a_session_killed_in_the_middle_of_a_signal_leaves_its_outcome_unknown(
    dsn: str, conn: Connection, new_conn: Callable[[], Connection], background: Background
):
    holder = new_conn()
    with Client(make_conninfo(dsn, application_name="victim")) as client:
        id = client.insert(Checkout.new())
        holder.execute("begin")
        holder.execute("select from gen_durable where id = %s for update", [id])
        answer = background.start(client.signal, id, "paid")
        pid = until(lambda: blocked_pid(conn, "victim"), "the signal waiting for its target")
        conn.execute("select pg_terminate_backend(%s)", [pid])
        with pytest.raises(OutcomeUnknown):
            answer.result(timeout=60)
        holder.execute("rollback")
        assert count(conn, "signals") == 0
        assert client.signal(id, "paid").found is True
    assert count(conn, "signals") == 1


def test_an_insert_that_was_committed_but_never_answered_is_unknown_and_written_once(proxy: Proxy, conn: Connection):
    with Client(proxy.dsn) as client:
        client.insert(Checkout.new())
        fault = proxy.lose_answer("insert")
        with pytest.raises(OutcomeUnknown):
            client.insert(Checkout.new(unique_key="k"))
        fault.wait()
        assert count(conn) == 2
        with pytest.raises(DuplicateInstance):  # what the message advises: with a key, repeating is safe
            client.insert(Checkout.new(unique_key="k"))
    assert count(conn) == 2


def test_a_signal_that_was_committed_but_never_answered_is_unknown_and_stored_once(proxy: Proxy, conn: Connection):
    with Client(proxy.dsn) as client:
        id = client.insert(Checkout.new())
        fault = proxy.lose_answer("commit")
        with pytest.raises(OutcomeUnknown):
            client.signal(id, "paid", dedup_key="evt")
        fault.wait()
        assert client.signal(id, "paid", dedup_key="evt").duplicate is True
    assert count(conn, "signals") == 1


def test_a_write_that_never_reached_the_server_is_unknown_too(proxy: Proxy, conn: Connection):
    # From here it looks the same.
    with Client(proxy.dsn) as client:
        client.insert(Checkout.new())
        fault = proxy.cut_at("insert")
        with pytest.raises(OutcomeUnknown):
            client.insert(Checkout.new())
        fault.wait()
    assert count(conn) == 1


def test_a_commit_on_the_way_back_to_a_borrowed_pool_is_unknown_too(proxy: Proxy, conn: Connection):
    with ConnectionPool(proxy.dsn, min_size=1, max_size=1) as pool:
        client = Client(pool=pool)
        fault = proxy.lose_answer("commit")
        with pytest.raises(OutcomeUnknown):
            client.insert(Checkout.new())
        fault.wait()
        assert count(conn) == 1


def test_a_read_that_was_lost_is_no_riddle(proxy: Proxy):
    with Client(proxy.dsn) as client:
        id = client.insert(Checkout.new())
        for statement, call in (("get_instance", lambda: client.get(id)), ("get_statuses", lambda: client.wait(id))):
            fault = proxy.lose_answer(statement)
            with pytest.raises(DatabaseUnavailable):
                call()
            fault.wait()


def test_a_server_that_went_away_is_unavailable_and_welcome_back(
    proxy: Proxy, conn: Connection, monkeypatch: pytest.MonkeyPatch
):
    with Client(proxy.dsn) as client:
        id = client.insert(Checkout.new())
        monkeypatch.setattr(client._pool, "timeout", 0.5)
        proxy.refuse()
        proxy.cut()
        with pytest.raises(DatabaseUnavailable, match="cannot connect"):
            client.insert(Checkout.new())
        with pytest.raises(DatabaseUnavailable, match="cannot connect"):
            client.get(id)
        proxy.accept()

        def is_back() -> bool:
            try:
                return client.get(id).id == id
            except DatabaseUnavailable:
                return False

        until(is_back, "the client finding its server again")
    assert count(conn) == 1


def test_a_connection_that_went_silent_is_given_up(proxy: Proxy, conn: Connection, monkeypatch: pytest.MonkeyPatch):
    with Client(proxy.dsn) as client:
        client.insert(Checkout.new())
        proxy.swallow_at("insert")
        with monkeypatch.context() as impatient, pytest.raises(OutcomeUnknown, match="no answer"):
            (idle,) = client._pool._pool
            impatient.setattr(idle, "patience", 2.0)
            client.insert(Checkout.new())
        client.insert(Checkout.new())
    assert count(conn) == 2


def test_a_client_whose_connections_are_all_busy_says_so(
    dsn: str,
    new_conn: Callable[[], Connection],
    conn: Connection,
    background: Background,
    monkeypatch: pytest.MonkeyPatch,
):
    with Client(make_conninfo(dsn, application_name="busy")) as client:
        client.insert(Checkout.new())
        monkeypatch.setattr(client._pool, "_max_size", 1)
        holder = new_conn()
        holder.execute("begin")
        holder.execute("lock table gen_durable in exclusive mode")
        waiting = background.start(client.insert, Checkout.new())
        until(lambda: blocked_pid(conn, "busy"), "the first call being stuck")
        monkeypatch.setattr(client._pool, "timeout", 0.2)
        with pytest.raises(DatabaseUnavailable, match="busy"):
            client.get(1)
        holder.execute("rollback")
        assert waiting.result(timeout=60) > 0
