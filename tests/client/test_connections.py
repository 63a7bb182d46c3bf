"""Where a client's statements run: its own connections, a borrowed pool, the caller's transaction."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from orders import Checkout, Order
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.rows import class_row, dict_row, namedtuple_row, scalar_row
from psycopg.sql import SQL, Identifier
from psycopg_pool import AsyncConnectionPool, ConnectionPool, NullConnectionPool
from scripted import Scripted
from support import inbox, row, until

from gendurable import Client, Next, Retry, Spawn, Stop, migrate
from gendurable.db.connection import Connection
from gendurable.errors import (
    DatabaseRefused,
    DatabaseUnavailable,
    DuplicateInstance,
    GenDurableError,
    InstanceNotFound,
    InvalidInstance,
    NoTarget,
    SchemaMissing,
)
from gendurable.testing import Harness

Open = Callable[..., psycopg.Connection[Any]]


@pytest.fixture
def open_conn(dsn: str) -> Iterator[Open]:
    """Open connections as an application would, with psycopg's own defaults."""
    with ExitStack() as stack:

        def open_one(**options: Any) -> psycopg.Connection[Any]:
            conn: psycopg.Connection[Any] = psycopg.connect(dsn, **options)
            stack.callback(conn.close)
            return conn

        yield open_one


def count(conn: Connection) -> int:
    found = conn.execute("select count(*) from gen_durable").fetchone()
    assert found is not None
    return int(found[0])


def sessions(conn: Connection, application: str) -> int:
    found = conn.execute(
        "select count(*) from pg_stat_activity where application_name = %s and datname = current_database()",
        [application],
    ).fetchone()
    assert found is not None
    return int(found[0])


# The caller's own transaction.


def test_an_insert_comes_into_being_with_the_caller_s_commit(client: Client, conn: Connection, open_conn: Open):
    mine = open_conn()
    id = client.insert(Checkout.new(), conn=mine)
    ids = client.insert_many([Checkout.new()] * 3, conn=mine)
    assert count(conn) == 0
    assert client.get(id, conn=mine).id == id
    mine.commit()
    assert count(conn) == 1 + len(ids) == 4


def test_an_insert_is_undone_by_the_caller_s_rollback(client: Client, conn: Connection, open_conn: Open):
    # Also as the very first thing in the transaction: a block of ours must not become the outermost, and commit.
    mine = open_conn()
    id = client.insert(Checkout.new(), conn=mine)
    client.signal(id, "note", conn=mine)
    assert mine.info.transaction_status == pq.TransactionStatus.INTRANS
    mine.rollback()
    assert count(conn) == 0
    with pytest.raises(InstanceNotFound):
        client.get(id)


def test_reading_alone_leaves_the_caller_s_transaction_open_too(client: Client, open_conn: Open):
    id = client.insert(Checkout.new())
    mine = open_conn()
    client.get(id, conn=mine)
    assert mine.info.transaction_status == pq.TransactionStatus.INTRANS


def test_a_signal_is_sent_with_the_caller_s_commit(client: Client, conn: Connection, open_conn: Open):
    id = client.insert(Checkout.new())
    conn.execute("update gen_durable set status = 'awaiting_signal', awaits = '{paid}'")
    mine = open_conn()
    assert client.signal(id, "paid", conn=mine).woke is True
    assert (row(conn, id)["status"], inbox(conn, id)) == ("awaiting_signal", [])
    mine.commit()
    assert (row(conn, id)["status"], inbox(conn, id)) == ("runnable", ["paid"])


def test_inside_a_block_of_the_caller_the_block_decides(client: Client, conn: Connection, open_conn: Open):
    for options in ({}, {"autocommit": True}):
        mine = open_conn(**options)
        with pytest.raises(ZeroDivisionError), mine.transaction():
            client.insert(Checkout.new(), conn=mine)
            raise ZeroDivisionError
        assert count(conn) == 0
        with mine.transaction():
            client.insert(Checkout.new(), conn=mine)
            with pytest.raises(ZeroDivisionError), mine.transaction():
                client.insert(Checkout.new(), conn=mine)
                raise ZeroDivisionError
        assert count(conn) == 1
        conn.execute("truncate gen_durable cascade")


def test_on_an_autocommit_connection_an_insert_is_committed_at_once(client: Client, conn: Connection, open_conn: Open):
    mine = open_conn(autocommit=True)
    id = client.insert(Checkout.new(), conn=mine)
    client.signal(id, "note", conn=mine)
    assert mine.info.transaction_status == pq.TransactionStatus.IDLE
    assert (count(conn), inbox(conn, id)) == (1, ["note"])


def test_a_transaction_begun_by_hand_is_respected(client: Client, conn: Connection, open_conn: Open):
    mine = open_conn(autocommit=True)
    mine.execute("begin")
    client.insert(Checkout.new(), conn=mine)
    mine.execute("rollback")
    assert count(conn) == 0


@pytest.mark.parametrize("autocommit", [False, True])
def test_a_call_that_fails_leaves_the_caller_s_transaction_usable(
    client: Client, conn: Connection, open_conn: Open, autocommit: bool
):
    taken = client.insert(Checkout.new(unique_key="taken"))
    mine = open_conn(autocommit=autocommit)
    mine.execute("create temp table mine (n int)")
    mine.execute("insert into mine values (1)")
    with pytest.raises(DuplicateInstance) as raised:
        client.insert(Checkout.new(unique_key="taken"), conn=mine)
    assert raised.value.occupant == taken
    with pytest.raises(NoTarget):
        client.signal(10**9, "x", conn=mine)
    with pytest.raises(InstanceNotFound):
        client.get(10**9, conn=mine)
    with pytest.raises(InvalidInstance):
        client.signal(taken, "", conn=mine)
    with pytest.raises(InvalidInstance):
        client.insert_many([None], conn=mine)  # type: ignore[list-item]
    with pytest.raises(SchemaMissing), Client(schema="nowhere") as lost:
        lost.insert(Checkout.new(), conn=mine)
    client.insert(Checkout.new(), conn=mine)
    assert mine.execute("select n from mine").fetchall() == [(1,)]
    mine.commit()
    assert count(conn) == 2


def test_the_caller_s_settings_are_as_they_were(client: Client, open_conn: Open):
    mine = open_conn()
    shown = "select current_setting('search_path'), current_setting('DateStyle'), current_setting('TimeZone')"
    for change in (
        'set search_path = pg_catalog, "$user"',
        "set local search_path = ''",
        "set DateStyle = 'SQL, DMY'",
        "set TimeZone = 'Asia/Kolkata'",
    ):
        mine.execute(change)  # type: ignore[arg-type]
        before = mine.execute(shown).fetchone()
        id = client.insert(Checkout.new(unique_key=change), conn=mine)
        with pytest.raises(DuplicateInstance):
            client.insert(Checkout.new(unique_key=change), conn=mine)
        found = client.get(id, conn=mine)
        assert found.inserted_at.utcoffset() is not None
        client.signal(id, "note", conn=mine)
        assert mine.execute(shown).fetchone() == before
    mine.commit()
    assert mine.execute("show search_path").fetchone() == ('pg_catalog, "$user"',)


@pytest.mark.parametrize("setting", ["standard_conforming_strings = off", "bytea_output = escape"])
def test_a_unique_key_is_stored_verbatim_whatever_the_caller_s_settings(client: Client, open_conn: Open, setting: str):
    mine = open_conn()
    mine.execute(f"set {setting}")  # type: ignore[arg-type]
    key = bytes(range(256))
    id = client.insert(Checkout.new(unique_key=key), conn=mine)
    assert client.get(id, conn=mine).unique_key == key
    mine.commit()
    with pytest.raises(DuplicateInstance) as raised:
        client.insert(Checkout.new(unique_key=key))
    assert raised.value.occupant == id


def test_what_the_caller_has_in_its_path_is_not_mistaken_for_ours(client: Client, conn: Connection, open_conn: Open):
    mine = open_conn()
    mine.execute("create temp table gen_durable (n int)")
    mine.execute("create temp table signals (n int)")
    id = client.insert(Checkout.new(), conn=mine)
    client.signal(id, "note", conn=mine)
    mine.commit()
    assert (count(conn), inbox(conn, id)) == (1, ["note"])


@pytest.mark.parametrize("factory", [dict_row, namedtuple_row, scalar_row, class_row(Order)])
def test_the_caller_s_row_factory_is_neither_used_nor_changed(client: Client, open_conn: Open, factory: Any):
    mine = open_conn(row_factory=factory)
    id = client.insert(Checkout.new(), conn=mine)
    assert client.signal(id, "note", conn=mine).found is True
    assert client.get(id, conn=mine).id == id
    assert mine.row_factory is factory


@pytest.mark.parametrize("factory", [psycopg.RawCursor, psycopg.ClientCursor, psycopg.RawServerCursor])
def test_the_caller_s_cursor_factory_is_neither_used_nor_changed(client: Client, open_conn: Open, factory: Any):
    mine = open_conn()
    mine.cursor_factory = factory
    id = client.insert(Checkout.new(unique_key="k"), conn=mine)
    with pytest.raises(DuplicateInstance):
        client.insert(Checkout.new(unique_key="k"), conn=mine)
    assert client.get(id, conn=mine).id == id
    assert mine.cursor_factory is factory


def test_a_caller_may_be_in_a_pipeline(client: Client, conn: Connection, open_conn: Open):
    mine = open_conn()
    with mine.pipeline():
        id = client.insert(Checkout.new(), conn=mine)
        client.signal(id, "note", conn=mine)
    mine.commit()
    assert (count(conn), inbox(conn, id)) == (1, ["note"])


def test_a_serializable_transaction_will_do(client: Client, conn: Connection, open_conn: Open):
    mine = open_conn()
    mine.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    id = client.insert(Checkout.new(), conn=mine)
    client.signal(id, "note", conn=mine)
    mine.commit()
    assert inbox(conn, id) == ["note"]


@pytest.mark.parametrize("conn", ["dbname=x", 5, object()])
def test_what_is_no_connection_is_refused(client: Client, conn: Any):
    with pytest.raises(InvalidInstance, match=r"^conn: "):
        client.insert(Checkout.new(), conn=conn)
    with pytest.raises(InvalidInstance, match=r"^conn: "):
        client.get(1, conn=conn)


def test_a_closed_connection_is_refused(client: Client, open_conn: Open):
    mine = open_conn()
    mine.close()
    with pytest.raises(InvalidInstance, match=r"^conn: "):
        client.signal(1, "x", conn=mine)


def test_a_failed_transaction_is_refused_and_told_apart_from_ours(client: Client, conn: Connection, open_conn: Open):
    mine = open_conn()
    with pytest.raises(psycopg.errors.DivisionByZero):
        mine.execute("select 1 / 0")
    for call in (lambda: client.insert(Checkout.new(), conn=mine), lambda: client.get(1, conn=mine)):
        with pytest.raises(InvalidInstance, match=r"^conn: .* roll it back"):
            call()
    mine.rollback()
    client.insert(Checkout.new(), conn=mine)
    mine.commit()
    assert count(conn) == 1


@pytest.mark.parametrize("encoding", ["latin1", "sql_ascii"])
def test_a_connection_that_cannot_carry_every_text_is_refused(
    client: Client, conn: Connection, open_conn: Open, encoding: str
):
    mine = open_conn(client_encoding=encoding)
    with pytest.raises(InvalidInstance, match=r"^conn: .* client_encoding='utf8'"):
        client.insert(Checkout.new(Order(1, "表")), conn=mine)
    assert count(conn) == 0


# A pool of the caller's.


@pytest.mark.parametrize("autocommit", [False, True])
@pytest.mark.parametrize("kind", [ConnectionPool, NullConnectionPool])
def test_a_borrowed_pool_is_used_and_given_back_as_it_was(dsn: str, conn: Connection, kind: Any, autocommit: bool):
    options = {"autocommit": autocommit, "row_factory": dict_row, "options": "-c search_path=pg_catalog"}
    with kind(dsn, kwargs=options, min_size=0, max_size=1) as pool:
        with Client(pool=pool) as client:
            id = client.insert(Checkout.new(Order(7), unique_key="k"))
            with pytest.raises(DuplicateInstance):
                client.insert(Checkout.new(unique_key="k"))
            assert client.signal(id, "note").found is True
            assert len(client.insert_many([Checkout.new()] * 2)) == 2
            assert client.get(id).state["number"] == 7
            with pytest.raises(NoTarget):
                client.signal(10**9, "x")
        with pool.connection() as mine:  # the client's end is not the pool's
            assert mine.execute("show search_path").fetchone() == {"search_path": "pg_catalog"}
    assert (count(conn), inbox(conn, id)) == (3, ["note"])


def test_a_borrowed_pool_that_is_not_open_is_named(dsn: str):
    pool = ConnectionPool(dsn, open=False)
    with pytest.raises(DatabaseUnavailable, match="not open"), Client(pool=pool) as client:
        client.insert(Checkout.new())


def test_a_borrowed_pool_that_is_exhausted_is_named(dsn: str):
    with (
        ConnectionPool(dsn, min_size=1, max_size=1, timeout=0.05) as pool,
        pool.connection(timeout=30),
        pytest.raises(DatabaseUnavailable, match="no connection to give"),
    ):
        Client(pool=pool).insert(Checkout.new())


@pytest.mark.parametrize("pool", ["dbname=x", object(), 5])
def test_what_is_no_pool_is_refused(pool: Any):
    with pytest.raises(InvalidInstance, match=r"^pool: "):
        Client(pool=pool)


def test_an_async_pool_is_refused(dsn: str):
    with pytest.raises(InvalidInstance, match=r"^pool: "):
        Client(pool=AsyncConnectionPool(dsn, open=False))  # type: ignore[arg-type]


def test_a_dsn_and_a_pool_are_one_too_many(dsn: str):
    with pytest.raises(InvalidInstance, match="not both"):
        Client(dsn, pool=ConnectionPool(dsn, open=False))


# Its own connections.


def test_a_dsn_of_another_encoding_carries_every_text_all_the_same(dsn: str):
    with Client(make_conninfo(dsn, client_encoding="latin1")) as client:
        assert client.get(client.insert(Checkout.new(Order(1, "表")))).state["note"] == "表"


def test_a_client_that_was_never_used_has_no_connection(dsn: str, conn: Connection):
    with Client(make_conninfo(dsn, application_name="idle client")):
        assert sessions(conn, "idle client") == 0


def test_closing_a_client_closes_its_connections(dsn: str, conn: Connection):
    with Client(make_conninfo(dsn, application_name="passing client")) as client:
        client.insert(Checkout.new())
        assert sessions(conn, "passing client") >= 1
    until(lambda: sessions(conn, "passing client") == 0, "the client's sessions being over")


@pytest.mark.parametrize("used", [False, True])
def test_a_closed_client_says_so(dsn: str, conn: Connection, used: bool):
    client = Client(dsn)
    if used:
        client.insert(Checkout.new())
    client.close()
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: client.insert(Checkout.new()),
        lambda: client.insert_many([Checkout.new()]),
        lambda: client.signal(1, "x"),
        lambda: client.get(1),
        lambda: client.wait(1),
    ]
    for call in calls:
        with pytest.raises(DatabaseUnavailable, match="closed"):
            call()
    assert count(conn) == used


def test_a_closed_client_still_works_on_the_caller_s_connection(dsn: str, conn: Connection, open_conn: Open):
    client = Client(dsn)
    client.close()
    client.insert(Checkout.new(), conn=open_conn(autocommit=True))
    assert count(conn) == 1


def test_without_a_dsn_libpq_s_variables_count(dsn: str, conn: Connection, monkeypatch: pytest.MonkeyPatch):
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE", "password": "PGPASSWORD"}
    for part, name in names.items():
        if part in parts:
            monkeypatch.setenv(name, str(parts[part]))
    with Client() as client:
        client.insert(Checkout.new())
    assert count(conn) == 1


def test_a_client_survives_the_death_of_its_idle_connections(client: Client, conn: Connection):
    client.insert(Checkout.new())
    conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'gendurable client' and datname = current_database()"
    )
    client.insert(Checkout.new())
    assert count(conn) == 2


# Servers that are not there, or not ready.


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:s3cret@127.0.0.1:1/shop",
        "host=127.0.0.1 port=1 user=me password=s3cret dbname=shop",
        "host=/nowhere/at/all user=me password=s3cret dbname=shop",
    ],
)
def test_a_server_that_is_not_there_is_named_without_the_password(dsn: str):
    with Client(dsn) as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.insert(Checkout.new()),
            lambda: client.insert_many([Checkout.new()]),
            lambda: client.signal(1, "x"),
            lambda: client.get(1),
            lambda: client.wait(1),
        ]
        for call in calls:
            with pytest.raises(DatabaseUnavailable) as raised:
                call()
            assert "s3cret" not in str(raised.value)
            assert "'shop'" in str(raised.value)


def test_a_wrong_database_says_why(dsn: str):
    with (
        Client(make_conninfo(dsn, dbname="no_such_database")) as client,
        pytest.raises(DatabaseUnavailable, match="does not exist"),
    ):
        client.insert(Checkout.new())


@pytest.mark.parametrize(
    "dsn",
    [
        "garbage s3cret",
        "host=localhost password=my s3cret",
        "postgresql://me:s3cret%zz@host/db",
        "s3cret=yes",
        "\ud800",
        5,
        b"dbname=x",
    ],
)
def test_a_dsn_that_is_not_understood_is_refused_without_its_text(dsn: Any):
    with pytest.raises(InvalidInstance, match=r"^dsn: ") as raised:
        Client(dsn)
    assert "s3cret" not in str(raised.value)


def test_a_database_without_our_tables_says_what_to_run(fresh_database: str):
    with Client(fresh_database) as client:
        calls: list[Callable[[], Any]] = [
            lambda: client.insert(Checkout.new()),
            lambda: client.insert_many([Checkout.new()]),
            lambda: client.signal(1, "x"),
            lambda: client.get(1),
            lambda: client.wait(1),
        ]
        for call in calls:
            with pytest.raises(SchemaMissing, match="gendurable migrate up"):
                call()
        migrate.up(fresh_database)
        assert client.get(client.insert(Checkout.new())).fsm == "checkout", "the same client works once they are there"


@pytest.mark.parametrize("schema", ["shop", "Odd Name", 'quo"ted', "ümlaut", "select", "a" * 63])
def test_a_client_works_in_any_schema_and_in_no_other(fresh_database: str, schema: str):
    migrate.up(fresh_database, schema=schema)
    with Client(fresh_database, schema=schema) as client, Client(fresh_database) as public:
        id = client.insert(Checkout.new())
        client.signal(id, "note")
        assert client.get(id).id == id
        with pytest.raises(SchemaMissing):
            public.get(id)
        with psycopg.connect(fresh_database) as conn:
            assert client.get(id, conn=conn).id == id


@pytest.mark.parametrize("schema", ["", "a" * 64, "ü" * 32, "a\0b", 5])
def test_what_is_no_schema_is_refused(dsn: str, schema: Any):
    with pytest.raises(InvalidInstance, match=r"^schema: "):
        Client(dsn, schema=schema)


# A role that owns nothing.


@pytest.fixture
def clerk(dsn: str, conn: Connection) -> Iterator[tuple[str, SQL]]:
    """A role that may log in, and its name for grants."""
    name = f"clerk_{uuid4().hex[:12]}"
    role = Identifier(name)
    conn.execute(SQL("create role {} login password 'clerk'").format(role))
    conn.execute(SQL("grant usage on schema public to {}").format(role))
    try:
        yield make_conninfo(dsn, user=name, password="clerk"), role  # type: ignore[misc]
    finally:
        conn.execute(SQL("drop owned by {}").format(role))
        conn.execute(SQL("drop role {}").format(role))


def test_rights_to_the_rows_are_all_that_a_client_needs(clerk: tuple[str, Any], conn: Connection):
    dsn, role = clerk
    conn.execute(SQL("grant select, insert, update, delete on gen_durable, signals, paused_queues to {}").format(role))
    with Client(dsn) as client:
        id = client.insert(Checkout.new(Order(7), unique_key="k"))
        with pytest.raises(DuplicateInstance):
            client.insert(Checkout.new(unique_key="k"))
        assert len(client.insert_many([Checkout.new()] * 3)) == 3
        assert client.signal(id, "note").found is True
        assert client.get(id).state["number"] == 7


def test_rights_to_the_rows_are_all_that_the_engine_needs(clerk: tuple[str, Any], conn: Connection):
    dsn, role = clerk
    conn.execute(SQL("grant select, insert, update, delete on all tables in schema public to {}").format(role))
    child = Checkout.new(Order(7))
    parent = Scripted(start=Spawn([child], "work"), work=[Retry(), Next("finish")], finish=Stop("enough"))
    with Harness(dsn, [parent, Checkout]) as durable:
        id = durable.insert(Scripted.new())
        assert durable.drain() == {"spawn": 1, "await": 1}
        ((born,),) = conn.execute("select id from gen_durable where parent_id = %s", [id]).fetchall()
        durable.signal(born, "paid")
        assert durable.drain() == {"done": 1, "retry": 1, "next": 1, "stop": 1}


def test_a_right_that_is_missing_is_named(clerk: tuple[str, Any]):
    with Client(clerk[0]) as client:
        with pytest.raises(DatabaseRefused, match="permission denied") as raised:
            client.insert(Checkout.new())
        assert isinstance(raised.value, GenDurableError)
        with pytest.raises(DatabaseRefused, match="permission denied"):
            client.signal(1, "x")
        with pytest.raises(DatabaseRefused, match="permission denied"):
            client.get(1)


def test_a_database_that_is_read_only_for_now_is_unavailable(dsn: str, conn: Connection):
    with Client(make_conninfo(dsn, options="-c default_transaction_read_only=on")) as client:
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            client.insert(Checkout.new())
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            client.signal(1, "x")
        with pytest.raises(InstanceNotFound):
            client.get(1)
    assert count(conn) == 0
