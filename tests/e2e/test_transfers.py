"""Transfers between accounts while workers are killed: the sum never changes, and no transfer is made twice."""

import signal
from collections import Counter

import pytest
from facts import done, terminate, until_done
from machines import Order, Scene, Transfer, Waiter
from support import until
from workers import worker

from gendurable import Client
from gendurable.db.connection import Connection

ACCOUNTS, TRANSFERS, KILLS, BALANCE = 6, 120, 4, 1000
# Leases run out soon, so that what a killed worker held is done by the next.
SETTINGS = {"lease": "1500ms", "heartbeat": "400ms", "reap": "300ms"}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
def test_the_sum_never_changes_and_no_transfer_is_made_twice(own_dsn: str, own_conn: Connection, keyed: bool):
    own_conn.execute("create table accounts (id int primary key, balance int not null)")
    own_conn.execute("create table transfers (id bigint not null)")
    own_conn.execute("create table receipts (id bigint not null)")
    own_conn.execute("insert into accounts select id, %s from generate_series(1, %s) id", [BALANCE, ACCOUNTS])
    with Client(own_dsn) as client:
        auditor = client.insert(Waiter.new(Scene("nowhere"), queue="audit"))
        orders = [
            Order(1 + number % ACCOUNTS, 1 + (number * 5 + 2) % ACCOUNTS, 1 + number % 7, auditor)
            for number in range(TRANSFERS)
        ]
        ids = client.insert_many(
            Transfer.new(order, partition_key=f"account:{order.payer}" if keyed else None) for order in orders
        )

    for kill in range(KILLS):
        with worker(own_dsn, "--queues", "default=4", settings={**SETTINGS, "name": f"victim-{kill}"}) as victim:
            before = done(own_conn, ids)
            until(lambda before=before: done(own_conn, ids) >= before + TRANSFERS // 8, "some transfers made")
            if kill % 2:
                terminate(own_conn)  # first its sessions, in the middle of whatever they do
            victim.signal(signal.SIGKILL)
            victim.wait()
        check_sum(own_conn)
    with worker(own_dsn, "--queues", "default=4", settings={**SETTINGS, "name": "last"}):
        until_done(own_conn, ids, deadline=60)

    check_sum(own_conn)
    for table in ("transfers", "receipts"):
        assert [id for (id,) in own_conn.execute(f"select id from {table} order by id")] == sorted(ids)
    told = own_conn.execute("select (payload->>'by')::bigint from signals where target_id = %s", [auditor]).fetchall()
    assert sorted(id for (id,) in told) == sorted(ids)
    assert dict(own_conn.execute("select id, balance from accounts").fetchall()) == expected(orders)


def check_sum(conn: Connection) -> None:
    assert conn.execute("select sum(balance) from accounts").fetchone() == (ACCOUNTS * BALANCE,)


def expected(orders: list[Order]) -> dict[int, int]:
    balances = Counter(dict.fromkeys(range(1, ACCOUNTS + 1), BALANCE))
    for order in orders:
        balances[order.payer] -= order.amount
        balances[order.payee] += order.amount
    return dict(balances)
