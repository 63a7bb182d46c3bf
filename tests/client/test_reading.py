"""Looking at instances, and waiting for their end."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import attrs
import pytest
from orders import Checkout, Order
from psycopg_pool import ConnectionPool
from support import row, until

from gendurable import Client, Instance, Status
from gendurable.db.connection import Connection
from gendurable.db.operations import read_instance, retry_instance
from gendurable.errors import GenDurableError, InstanceNotFound, InvalidInstance, WaitTimeout
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]


def test_an_instance_has_every_column(client: Client, conn: Connection):
    names = conn.execute(
        "select column_name from information_schema.columns where table_name = 'gen_durable'"
    ).fetchall()
    assert {field.name for field in attrs.fields(Instance)} == {name for (name,) in names}
    id = client.insert(Checkout.new(Order(7), unique_key="k", partition_key="p", priority=3))
    found = client.get(id)
    stored = row(conn, id)
    stored["unique_scope"] = ["runnable", "executing", "awaiting_signal", "awaiting_children"]
    seen = attrs.asdict(found)
    assert sorted(seen.pop("unique_scope")) == sorted(stored.pop("unique_scope"))
    assert seen == stored


def test_state_and_result_are_plain_json_values(client: Client, harness: MakeHarness):
    id = client.insert(Checkout.new(Order(7, "ü")))
    before = client.get(id)
    assert (before.state, before.result, before.status) == ({"number": 7, "note": "ü"}, None, Status.RUNNABLE)
    client.signal(id, "paid")
    harness(Checkout).drain()
    after = client.get(id)
    assert (after.result, after.status, after.step) == ({"number": 7}, Status.DONE, "ship")
    assert isinstance(after.status, Status)
    assert isinstance(after.updated_at, datetime)
    assert after.updated_at.utcoffset() == timedelta(0)


def test_a_row_that_no_program_can_read_can_still_be_looked_at(client: Client, conn: Connection):
    id = client.insert(Checkout.new())
    conn.execute("update gen_durable set state = '{\"number\": 1e5000}', last_error = 'why' where id = %s", [id])
    found = client.get(id)
    assert isinstance(found.state, str)
    assert found.last_error == "why"


def test_an_instance_that_does_not_exist_is_not_found(client: Client):
    for look in (client.get, client.wait):
        with pytest.raises(InstanceNotFound) as raised:
            look(123456)
        assert raised.value.id == 123456
        assert isinstance(raised.value, GenDurableError)


def test_waiting_for_what_has_ended_returns_it_at_once(client: Client, harness: MakeHarness):
    done, failed = client.insert(Checkout.new(Order(7))), client.insert(Checkout.new(Order(0)))
    for id in (done, failed):
        client.signal(id, "paid")
    harness(Checkout).drain()
    assert client.wait(done, timeout=0).result == {"number": 7}
    assert client.wait(failed).last_error == "no number"


def test_waiting_ends_when_the_instance_does(client: Client, harness: MakeHarness):
    durable = harness(Checkout)
    id = client.insert(Checkout.new(Order(7)))
    durable.drain()
    answer: list[Instance] = []
    waiting = threading.Thread(target=lambda: answer.append(client.wait(id, timeout=60)))
    waiting.start()
    until(lambda: client._pool.get_stats()["requests_num"] >= 3, "the waiter looking again")
    assert not answer
    client.signal(id, "paid")
    durable.drain()
    waiting.join(timeout=60)
    assert [found.status for found in answer] == [Status.DONE]


def test_waiting_goes_on_if_the_instance_is_retried_just_before_it_is_read(
    client: Client, harness: MakeHarness, conn: Connection, monkeypatch: pytest.MonkeyPatch
):
    id = client.insert(Checkout.new(Order(0)))
    client.signal(id, "paid")
    harness(Checkout).drain()

    def read_after_a_retry(connection: Connection, id: int) -> Instance:
        if row(conn, id)["status"] == "failed":
            retry_instance(conn, id)
        return read_instance(connection, id)

    monkeypatch.setattr("gendurable.client.read_instance", read_after_a_retry)
    with pytest.raises(WaitTimeout):
        client.wait(id, timeout=0.2)


@pytest.mark.parametrize("timeout", [0, 0.0, 0.05, timedelta(milliseconds=20)])
def test_waiting_in_vain_ends_with_the_timeout(client: Client, timeout: Any):
    id = client.insert(Checkout.new())
    with pytest.raises(WaitTimeout) as raised:
        client.wait(id, timeout=timeout)
    assert (raised.value.id, raised.value.status) == (id, "runnable")
    assert isinstance(raised.value, TimeoutError)
    assert client.get(id).status == Status.RUNNABLE, "it goes on"


@pytest.mark.parametrize("timeout", [-1, timedelta(seconds=-1), float("nan"), float("inf"), True, "5s", 10**400])
def test_what_is_no_timeout_is_refused(client: Client, timeout: Any):
    with pytest.raises(InvalidInstance, match=r"^timeout: "):
        client.wait(1, timeout=timeout)


def test_waiting_holds_no_connection_between_two_looks(dsn: str):
    with ConnectionPool(dsn, min_size=1, max_size=1) as pool, Client(pool=pool) as client:
        id = client.insert(Checkout.new())

        def wait(_: int) -> bool:
            with pytest.raises(WaitTimeout):
                client.wait(id, timeout=0.3)
            return True

        with ThreadPoolExecutor(5) as threads:
            assert all(threads.map(wait, range(5)))


def test_an_instance_may_be_deleted_while_somebody_waits_for_it(client: Client, conn: Connection):
    id = client.insert(Checkout.new())
    errors: list[Exception] = []

    def wait() -> None:
        try:
            client.wait(id, timeout=60)
        except InstanceNotFound as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: client._pool.get_stats()["requests_num"] >= 3, "the waiter looking again")
    conn.execute("delete from gen_durable")
    waiting.join(timeout=60)
    assert len(errors) == 1
