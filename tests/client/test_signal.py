"""Signals as a client sends them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from orders import Checkout, Order
from support import inbox, row

from gendurable import Client
from gendurable.core.limits import DEFAULT_LIMITS
from gendurable.db.connection import Connection
from gendurable.errors import InboxFull, InvalidInstance, NoTarget, Unstorable
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]
ABSENT = 2**63 - 1


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture
def parked(client: Client, harness: MakeHarness) -> int:
    """An instance that waits for `paid`."""
    id = client.insert(Checkout.new(Order(7)))
    harness(Checkout).drain()
    return id


def test_a_signal_is_stored_and_wakes_who_waits_for_it(client: Client, conn: Connection, parked: int):
    sent = client.signal(parked, "paid", {"amount": 100}, dedup_key="evt-7")
    assert (sent.found, sent.woke, sent.duplicate) == (True, True, False)
    stored = conn.execute("select id, target_id, name, payload, dedup_key from signals").fetchall()
    assert stored == [(sent.id, parked, "paid", {"amount": 100}, "evt-7")]
    assert row(conn, parked)["status"] == "runnable"


def test_a_signal_of_another_name_wakes_nobody(client: Client, conn: Connection, parked: int):
    assert client.signal(parked, "refunded").woke is False
    assert (row(conn, parked)["status"], inbox(conn, parked)) == ("awaiting_signal", ["refunded"])


def test_the_second_signal_finds_its_target_already_awake(client: Client, parked: int):
    assert client.signal(parked, "paid").woke is True
    assert client.signal(parked, "paid").woke is False


def test_a_signal_to_an_instance_that_has_not_run_yet_waits_for_it(client: Client, harness: MakeHarness):
    id = client.insert(Checkout.new(Order(7)))
    assert client.signal(id, "paid").woke is False
    assert harness(Checkout).drain() == {"await": 1, "done": 1}


@pytest.mark.parametrize(
    "payload", [None, True, 0, -1.5, "", "text ü", [], [1, [2]], {}, {"a": {"b": None}}, 2**70, "x" * 1000]
)
def test_a_payload_is_any_json_value(client: Client, conn: Connection, parked: int, payload: Any):
    client.signal(parked, "other", payload)
    assert conn.execute("select payload from signals").fetchone() == (payload,)


def test_a_payload_that_is_left_out_is_an_empty_object(client: Client, conn: Connection, parked: int):
    client.signal(parked, "other")
    assert conn.execute("select jsonb_typeof(payload), payload from signals").fetchone() == ("object", {})


@pytest.mark.parametrize(
    "payload",
    [
        math.nan,
        math.inf,
        {"a": [math.nan]},
        "a\0b",
        "\ud800",
        {"\0": 1},
        {1: 2},
        object(),
        nested(DEFAULT_LIMITS.json_depth + 1),
        nested(100_000),
        "x" * DEFAULT_LIMITS.json_bytes,
        1 << 5000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_payload_that_cannot_be_stored_is_refused_by_its_path(
    client: Client, conn: Connection, parked: int, payload: Any
):
    with pytest.raises(Unstorable, match=r"^payload"):
        client.signal(parked, "paid", payload)
    assert (row(conn, parked)["status"], inbox(conn, parked)) == ("awaiting_signal", [])


def test_a_payload_at_the_limits_is_stored(client: Client, conn: Connection, parked: int):
    client.signal(parked, "deep", nested(DEFAULT_LIMITS.json_depth))
    client.signal(parked, "big", "x" * (DEFAULT_LIMITS.json_bytes - 2))
    assert inbox(conn, parked) == ["deep", "big"]


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", "a\0b", "\ud800", 5, None, b"paid", True])
def test_a_name_out_of_range_is_refused(client: Client, conn: Connection, parked: int, name: Any):
    with pytest.raises(InvalidInstance, match=r"^signal name: "):
        client.signal(parked, name)
    assert inbox(conn, parked) == []


@pytest.mark.parametrize("key", ["", "x" * 1025, "a\0b", "\ud800", 5, b"evt", True])
def test_a_dedup_key_out_of_range_is_refused(client: Client, conn: Connection, parked: int, key: Any):
    with pytest.raises(InvalidInstance, match=r"^dedup_key: "):
        client.signal(parked, "paid", dedup_key=key)
    assert inbox(conn, parked) == []


# Whom a signal reaches.


def test_a_signal_to_what_has_ended_or_never_was_is_refused_and_not_stored(client: Client, harness: MakeHarness):
    # 2.1-20
    done, failed = client.insert(Checkout.new(Order(7))), client.insert(Checkout.new(Order(0)))
    durable = harness(Checkout)
    for id in (done, failed):
        client.signal(id, "paid")
    durable.drain()
    assert [client.get(id).status for id in (done, failed)] == ["done", "failed"]
    for id in (done, failed, ABSENT):
        with pytest.raises(NoTarget) as raised:
            client.signal(id, "paid", dedup_key="k")
        assert raised.value.id == id
        assert str(id) in str(raised.value)
    assert durable._conn.execute("select count(*) from signals").fetchone() == (0,)


@pytest.mark.parametrize("id", [0, -1, 2**63, True, "1", 1.0, None])
def test_what_is_no_id_is_refused(client: Client, id: Any):
    with pytest.raises(InvalidInstance, match=r"^id: "):
        client.signal(id, "paid")
    with pytest.raises(InvalidInstance, match=r"^id: "):
        client.get(id)
    with pytest.raises(InvalidInstance, match=r"^id: "):
        client.wait(id, timeout=0)


# Duplicates.


def test_a_duplicate_is_a_success_that_changes_nothing_and_wakes_nobody(client: Client, conn: Connection, parked: int):
    first = client.signal(parked, "other", {"n": 1}, dedup_key="evt")
    before = row(conn, parked)
    again = client.signal(parked, "other", {"n": 2}, dedup_key="evt")
    assert (again.id, again.duplicate, again.woke, again.found) == (first.id, True, False, True)
    assert conn.execute("select payload from signals").fetchall() == [({"n": 1},)]
    assert row(conn, parked) == before


def test_a_duplicate_under_the_awaited_name_wakes_nobody(client: Client, conn: Connection, parked: int):
    # 2.3-4
    client.signal(parked, "other", dedup_key="evt")
    again = client.signal(parked, "paid", dedup_key="evt")
    assert (again.duplicate, again.woke) == (True, False)
    assert (row(conn, parked)["status"], inbox(conn, parked)) == ("awaiting_signal", ["other"])


def test_a_dedup_key_counts_for_its_own_instance_only(client: Client, conn: Connection, parked: int):
    other = client.insert(Checkout.new())
    assert client.signal(parked, "a", dedup_key="evt").duplicate is False
    assert client.signal(other, "a", dedup_key="evt").duplicate is False


def test_signals_without_a_dedup_key_are_never_duplicates(client: Client, conn: Connection, parked: int):
    assert client.signal(parked, "a", 1).id != client.signal(parked, "a", 1).id
    assert inbox(conn, parked) == ["a", "a"]


def test_a_dedup_key_is_remembered_while_its_signal_is_in_the_inbox(client: Client, conn: Connection, parked: int):
    # 2.3-3, as the contract settles it.
    client.signal(parked, "a", dedup_key="evt")
    conn.execute("delete from signals")
    assert client.signal(parked, "a", dedup_key="evt").duplicate is False


# A full inbox.


def fill(conn: Connection, id: int, signals: int) -> None:
    conn.execute(
        "insert into signals (target_id, name, dedup_key)"
        " select %s, 'noise', 'k' || n from generate_series(1, %s) as n",
        [id, signals],
    )


def test_a_full_inbox_takes_no_more_and_says_so(client: Client, conn: Connection, parked: int):
    fill(conn, parked, DEFAULT_LIMITS.inbox - 1)
    client.signal(parked, "noise")
    with pytest.raises(InboxFull) as raised:
        client.signal(parked, "paid")
    assert (raised.value.id, raised.value.limit) == (parked, DEFAULT_LIMITS.inbox)
    assert conn.execute("select count(*) from signals").fetchone() == (DEFAULT_LIMITS.inbox,)
    assert row(conn, parked)["status"] == "awaiting_signal"


def test_a_duplicate_of_what_a_full_inbox_holds_is_still_a_success(client: Client, conn: Connection, parked: int):
    fill(conn, parked, DEFAULT_LIMITS.inbox)
    assert client.signal(parked, "paid", dedup_key="k1").duplicate is True


def test_a_full_inbox_of_one_does_not_concern_another(client: Client, conn: Connection, parked: int):
    fill(conn, parked, DEFAULT_LIMITS.inbox)
    assert client.signal(client.insert(Checkout.new()), "paid").found is True


def test_all_of_a_full_inbox_is_shown_and_consumed(client: Client, conn: Connection, harness: MakeHarness):
    id = client.insert(Checkout.new(Order(7)))
    conn.execute(
        "insert into signals (target_id, name) select %s, 'paid' from generate_series(1, %s)",
        [id, DEFAULT_LIMITS.inbox],
    )
    assert harness(Checkout).drain() == {"await": 1, "done": 1}
    assert inbox(conn, id) == []
