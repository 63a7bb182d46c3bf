"""Cancelling as a client does."""

from typing import Any

import psycopg
import pytest
from orders import Checkout, Order
from psycopg_pool import ConnectionPool
from support import row

from gendurable import Client
from gendurable.db.connection import Connection
from gendurable.errors import InvalidInstance, NoTarget


@pytest.fixture
def order(client: Client) -> int:
    return client.insert(Checkout.new(Order(7)))


def test_an_instance_is_cancelled_once(client: Client, order: int):
    assert client.cancel(order, reason="no longer wanted") is True
    assert client.cancel(order) is False
    instance = client.wait(order, timeout=5)
    assert (instance.status, instance.last_error, instance.result) == ("cancelled", "no longer wanted", None)
    with pytest.raises(NoTarget):
        client.cancel(order + 1)


def test_in_the_callers_transaction_it_is_cancelled_with_the_commit(
    client: Client, conn: Connection, dsn: str, order: int
):
    with psycopg.connect(dsn) as mine:
        assert client.cancel(order, conn=mine)
        assert row(conn, order)["status"] == "runnable"
        mine.rollback()
        assert row(conn, order)["status"] == "runnable"
        assert client.cancel(order, conn=mine)
    assert row(conn, order)["status"] == "cancelled"


def test_a_cascade_needs_transactions_of_its_own(client: Client, conn: Connection, order: int):
    with pytest.raises(InvalidInstance, match="conn: a cascade takes a transaction for each generation"):
        client.cancel(order, cascade=True, conn=conn)
    assert row(conn, order)["status"] == "runnable"


def family(conn: Connection, order: int) -> list[str]:
    """Give the order a child and a grandchild, as a Spawn would."""
    for parent in (order, order + 1):
        conn.execute(
            "insert into gen_durable (fsm, step, parent_id, child_round, child_index) values ('f', 's', %s, 1, 0)",
            [parent],
        )
        conn.execute("update gen_durable set spawn_round = 1 where id = %s", [parent])
    return ["cancelled"] * 3


def test_a_cascade_on_connections_of_our_own(client: Client, conn: Connection, order: int):
    expected = family(conn, order)
    assert client.cancel(order, cascade=True)
    assert [status for (status,) in conn.execute("select status::text from gen_durable")] == expected


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_cascade_on_a_borrowed_pool(conn: Connection, dsn: str, order: int, autocommit: bool):
    expected = family(conn, order)
    kwargs: dict[str, Any] = {"autocommit": autocommit}
    with ConnectionPool(dsn, min_size=1, max_size=1, kwargs=kwargs) as pool:
        assert Client(pool=pool).cancel(order, cascade=True)
    assert [status for (status,) in conn.execute("select status::text from gen_durable")] == expected


@pytest.mark.parametrize("id", [0, -1, True, "1", None, 2**63])
def test_an_impossible_id_is_refused(client: Client, id: Any):
    with pytest.raises(InvalidInstance, match="is no instance id"):
        client.cancel(id)
