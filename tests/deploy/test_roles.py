"""The roles of deploy/sql/roles.sql can do their work, and nothing beyond it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from attrs import frozen
from deployment import DEPLOY, manifest
from psycopg.conninfo import make_conninfo
from psycopg.errors import InsufficientPrivilege
from psycopg.sql import SQL, Identifier

from gendurable import Client, migrate
from gendurable.demo.machines import Book, Booking, Checkout, Order, Ship
from gendurable.errors import DatabaseRefused, DuplicateInstance, MigrationError, NoTarget
from gendurable.testing import Harness

SCHEMA = "gendurable"
NAMES = ("owner", "worker", "producer", "observer")


@frozen
class Roles:
    """A database with tables and roles, and how each role reaches it."""

    database: str
    prefix: str

    def dsn(self, role: str) -> str:
        return make_conninfo(self.database, user=f"{self.prefix}_{role}")

    def connect(self, role: str) -> "psycopg.Connection[tuple[object, ...]]":
        return psycopg.connect(self.dsn(role), autocommit=True)

    def client(self, role: str) -> Client:
        return Client(self.dsn(role), schema=SCHEMA)

    def run_file(self) -> None:
        """Run the file with names of our own: roles belong to the whole server, which other tests use too."""
        text = (DEPLOY / "sql/roles.sql").read_text()
        with psycopg.connect(self.database, autocommit=True) as conn:
            conn.execute(re.sub(rf"\bgendurable_({'|'.join(NAMES)})\b", rf"{self.prefix}_\1", text))

    def gendurable(self, role: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        others = {key: value for key, value in os.environ.items() if not key.startswith(("GENDURABLE_", "PG"))}
        return subprocess.run(
            [sys.executable, "-m", "gendurable", *arguments],
            env=others | {"GENDURABLE_DSN": self.dsn(role), "GENDURABLE_SCHEMA": SCHEMA},
            cwd=Path(__file__).parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )


@pytest.fixture
def without_tables(fresh_database: str) -> Iterator[Roles]:
    roles = Roles(fresh_database, f"gendurable_{uuid4().hex[:12]}")
    roles.run_file()
    yield roles
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        for name in NAMES:
            role = Identifier(f"{roles.prefix}_{name}")
            conn.execute(SQL("drop owned by {} cascade").format(role))
            conn.execute(SQL("drop role {}").format(role))


@pytest.fixture
def roles(without_tables: Roles) -> Roles:
    """As an operator gets there: the file, the migration by the owner, the file again."""
    migrate.up(without_tables.dsn("owner"), schema=SCHEMA)
    without_tables.run_file()
    return without_tables


def test_the_owner_migrates_up_and_down_and_the_file_may_be_run_at_any_time(roles):
    roles.run_file()
    assert migrate.status(roles.dsn("owner"), schema=SCHEMA).pending == 0
    migrate.down(roles.dsn("owner"), schema=SCHEMA)
    roles.run_file()
    migrate.up(roles.dsn("owner"), schema=SCHEMA)
    assert migrate.status(roles.dsn("owner"), schema=SCHEMA).pending == 0


def test_a_worker_has_its_rights_on_tables_that_are_made_after_the_file_was_run(without_tables):
    migrate.up(without_tables.dsn("owner"), schema=SCHEMA)
    with Harness(without_tables.dsn("worker"), [Ship], schema=SCHEMA) as harness:
        id = harness.insert(Ship.new({"order": 1, "part": 1}))
        harness.drain()
        assert harness.get(id).status == "done"


def test_a_worker_takes_machines_through_everything_that_can_happen_to_them(roles):
    with Harness(roles.dsn("worker"), [Checkout, Ship, Book], schema=SCHEMA) as harness:
        paid, unpaid = harness.insert_many([Checkout.new(Order(1)), Checkout.new(Order(2))])
        booked = harness.insert(Book.new(Booking("a", 1), partition_key="a", unique_key="booking 1"))
        harness.drain()
        harness.signal(paid, "payment_confirmed", {"amount": 5}, dedup_key="once")
        harness.drain()
        harness.advance(timedelta(days=3))
        harness.drain()
        assert [harness.get(id).status for id in (paid, unpaid, booked)] == ["done", "failed", "done"]


def test_a_real_worker_needs_no_more_than_its_role_has(roles):
    with roles.client("producer") as producer, roles.client("observer") as observer:
        order = producer.insert(Checkout.new(Order(1)))
        bookings = producer.insert_many(
            [Book.new(Booking("a", number), partition_key="account a") for number in (1, 2)]
        )
        arguments = ["worker", "--until-idle", "--fsms", "gendurable.demo.machines", "--http", "127.0.0.1:0"]
        arguments += ["--queues", "checkout=2,accounts=2", "--poll", "100ms", "--log-format", "json"]
        first = roles.gendurable("worker", *arguments)
        assert first.returncode == 0, first.stderr
        producer.signal(order, "payment_confirmed", {"amount": 5})
        second = roles.gendurable("worker", *arguments)
        assert second.returncode == 0, second.stderr
        assert [observer.get(id).status for id in (order, *bookings)] == ["done"] * 3
    assert "permission denied" not in first.stderr + second.stderr


def test_a_worker_tidies_up_and_finds_nothing_wrong_with_its_rights(roles):
    with roles.client("worker") as client:
        client.insert(Checkout.new(Order(1)))
    with Harness(roles.dsn("worker"), [Checkout], schema=SCHEMA) as harness:
        harness.drain()
        harness.advance(timedelta(days=3))
        harness.drain()
    retried = roles.gendurable("worker", "retry", "1")
    assert retried.returncode == 0, retried.stderr
    deleted = roles.gendurable("worker", "gc", "--older-than", "0s")
    assert deleted.returncode == 0, deleted.stderr
    checks = json.loads(roles.gendurable("worker", "doctor", "--json").stdout)["checks"]
    assert {each["ok"] for each in checks if each["check"] in {"rights", "partition locks", "schema"}} == {True}


@pytest.mark.parametrize("role", ["worker", "producer", "observer"])
@pytest.mark.parametrize(
    "change",
    [
        "alter table gendurable.gen_durable add column x int",
        "drop table gendurable.signals",
        "truncate gendurable.workers",
        "create table gendurable.mine (x int)",
        "comment on table gendurable.gen_durable is '0'",
    ],
)
def test_nobody_but_the_owner_changes_tables(roles, role, change):
    with roles.connect(role) as conn, pytest.raises(InsufficientPrivilege):
        conn.execute(change)


def test_nobody_but_the_owner_takes_the_schema_back(roles):
    with pytest.raises(MigrationError):
        migrate.down(roles.dsn("worker"), schema=SCHEMA)


def test_a_producer_inserts_and_signals(roles):
    with roles.client("producer") as producer, Harness(roles.dsn("worker"), [Checkout, Ship], schema=SCHEMA) as harness:
        order = producer.insert(Checkout.new(Order(1), unique_key="order 1", partition_key="customer", schedule_in=0))
        with pytest.raises(DuplicateInstance) as occupied:
            producer.insert(Checkout.new(Order(1), unique_key="order 1"))
        assert occupied.value.occupant == order
        assert producer.insert_many([Checkout.new(Order(2), unique_key="order 1"), Checkout.new(Order(3))])
        harness.drain()
        assert producer.signal(order, "payment_confirmed", {"amount": 5}, dedup_key="once").woke
        assert producer.signal(order, "payment_confirmed", {"amount": 5}, dedup_key="once").duplicate
        harness.drain()
        assert harness.get(order).status == "done"
        with pytest.raises(NoTarget):
            producer.signal(order, "payment_confirmed")


def test_a_producer_inserts_in_a_transaction_of_its_own_application(roles):
    with roles.client("producer") as producer, psycopg.connect(roles.dsn("producer")) as conn:
        order = producer.insert(Checkout.new(Order(1)), conn=conn)
        producer.signal(order, "payment_confirmed", {"amount": 5}, conn=conn)


def test_a_producer_uses_the_command_line(roles):
    inserted = roles.gendurable("producer", "insert", "demo.checkout", '{"number": 1}', "--json")
    assert inserted.returncode == 0, inserted.stderr
    id = str(json.loads(inserted.stdout)["id"])
    signalled = roles.gendurable("producer", "signal", id, "payment_confirmed", '{"amount": 5}')
    assert signalled.returncode == 0, signalled.stderr
    refused = roles.gendurable("producer", "get", id)
    assert refused.returncode == 1
    assert "permission denied" in refused.stderr


def test_a_producer_sees_no_state_no_result_and_no_payload(roles):
    with roles.client("producer") as producer:
        order = producer.insert(Checkout.new(Order(1)))
        producer.signal(order, "payment_confirmed", {"amount": 5})
        with pytest.raises(DatabaseRefused):
            producer.get(order)
    with roles.connect("producer") as conn:
        for secret in (
            "select state from gen_durable",
            "select result from gen_durable",
            "select payload from signals",
        ):
            with pytest.raises(InsufficientPrivilege):
                conn.execute(secret)


@pytest.mark.parametrize(
    "write",
    [
        "delete from gen_durable",
        "update gen_durable set state = '{}'",
        "update gen_durable set result = '{}'",
        "update gen_durable set fence = 0",
        "insert into gen_durable (fsm, step, status) values ('x', 'start', 'done')",
        "insert into gen_durable (fsm, step, parent_id) values ('x', 'start', 1)",
        "delete from signals",
        "update signals set payload = '{}'",
        "select * from workers",
    ],
)
def test_a_producer_writes_nothing_but_new_instances_and_signals(roles, write):
    with roles.connect("producer") as conn, pytest.raises(InsufficientPrivilege):
        conn.execute(write)


def test_an_observer_sees_everything(roles):
    with roles.client("producer") as producer:
        order = producer.insert(Checkout.new(Order(1)))
    for arguments in (["status", "--json"], ["list", "--json"], ["get", str(order), "--json"]):
        shown = roles.gendurable("observer", *arguments)
        assert shown.returncode == 0, shown.stderr
    (trigger,) = manifest("ScaledObject", "gendurable-worker")["spec"]["triggers"]
    with roles.connect("observer") as conn:
        assert conn.execute(trigger["metadata"]["query"]).fetchone() == (0,)  # it is in the queue checkout


@pytest.mark.parametrize("table", ["gen_durable", "signals", "workers"])
def test_an_observer_changes_nothing_and_locks_nothing(roles, table):
    with roles.connect("observer") as conn:
        writes = [f"insert into {table} default values", f"delete from {table}", f"select from {table} for key share"]
        for write in writes:
            with pytest.raises(InsufficientPrivilege):
                conn.execute(write)


def test_behind_a_pooler_a_session_that_nobody_has_set_up_finds_the_tables(roles):
    for role in NAMES:
        with roles.connect(role) as conn:
            assert conn.execute("select to_regclass('gen_durable')::text").fetchone() == ("gen_durable",)


def test_what_the_engine_itself_would_grant_a_worker_is_what_the_file_grants(roles):
    """`migrate sql --grants ROLE` says it too."""
    from gendurable.db.migrate import script

    with psycopg.connect(roles.database, autocommit=True) as conn:
        rights = conn.execute(
            "select table_name, privilege_type from information_schema.role_table_grants where grantee = %s",
            [f"{roles.prefix}_worker"],
        ).fetchall()
    granted = re.search(r"grant ([a-z, ]+) on ([a-z_, ]+) to", script(SCHEMA, 0, 1, grants="someone").split("usage")[1])
    assert granted is not None
    wanted = {(table, right.upper()) for table in granted[2].split(", ") for right in granted[1].split(", ")}
    assert set(rights) == wanted
