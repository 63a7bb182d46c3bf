"""What a new instance may be, and what becomes of it."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from orders import Checkout, Order
from support import row

from gendurable import Client, Status
from gendurable.core.status import LIVE
from gendurable.db.connection import Connection
from gendurable.errors import DuplicateInstance, GenDurableError, InvalidInstance, InvalidState


def count(conn: Connection) -> int:
    found = conn.execute("select count(*) from gen_durable").fetchone()
    assert found is not None
    return int(found[0])


def due_in(conn: Connection, id: int) -> timedelta:
    """How long after its insertion the row is due, by the database's clock."""
    stored = row(conn, id)
    due: timedelta = stored["eligible_at"] - stored["inserted_at"]
    return due


# One.


def test_a_new_instance_is_a_runnable_row_due_now(client: Client, conn: Connection):
    id = client.insert(Checkout.new(Order(42)))
    assert type(id) is int
    stored = row(conn, id)
    del stored["inserted_at"], stored["updated_at"], stored["eligible_at"]
    assert stored == {
        "id": id,
        "fsm": "checkout",
        "fsm_version": 1,
        "step": "start",
        "status": "runnable",
        "state": {"number": 42, "note": ""},
        "result": None,
        "queue": "checkouts",
        "priority": 0,
        "partition_key": None,
        "attempt": 0,
        "crashes": 0,
        "max_crashes": 20,
        "last_error": None,
        "locked_by": None,
        "lease_expires_at": None,
        "fence": 0,
        "awaits": None,
        "await_deadline": None,
        "children_pending": 0,
        "spawn_round": 0,
        "join_round": None,
        "parent_id": None,
        "child_round": None,
        "child_index": None,
        "unique_key": None,
        "unique_scope": "{}",
        "unique_guard": None,
        "rate_limit": None,
        "weight": 1,
        "throttled": False,
        "concurrency_limit": None,
        "deadline": None,
        "retry": None,
        "on_cancel": False,
        "cancelling": False,
        "cancel_reason": None,
        "cancel_round": None,
        "fail_fast": False,
    }
    # The column's default is the transaction's time, the due time the statement's.
    assert timedelta(0) <= due_in(conn, id) < timedelta(seconds=30)


def test_everything_that_new_takes_is_stored(client: Client, conn: Connection):
    due = datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    id = client.insert(
        Checkout.new(
            {"number": 7},
            step=Checkout.ship,
            queue="slow lane",
            priority=-5,
            partition_key="customer:7",
            unique_key="order:7",
            eligible_at=due,
        )
    )
    stored = row(conn, id)
    assert stored["state"] == {"number": 7, "note": ""}
    assert (stored["step"], stored["queue"], stored["priority"]) == ("ship", "slow lane", -5)
    assert (stored["partition_key"], stored["unique_key"], stored["unique_guard"]) == (
        "customer:7",
        b"order:7",
        b"order:7",
    )
    assert stored["eligible_at"] == due


def test_the_version_of_a_machine_is_stored(client: Client, conn: Connection):
    # 2.2-2
    class Second(Checkout, name="checkout", version=2):
        pass

    assert row(conn, client.insert(Second.new()))["fsm_version"] == 2


@pytest.mark.parametrize("new", [None, Checkout, Order(1), {"fsm": "checkout"}, "checkout", [Checkout.new()], 5])
def test_only_what_new_made_is_inserted(client: Client, conn: Connection, new: Any):
    with pytest.raises(InvalidInstance, match=r"Machine\.new"):
        client.insert(new)
    with pytest.raises(InvalidInstance, match=r"Machine\.new"):
        client.insert_many([Checkout.new(), new])
    assert count(conn) == 0


# What `new` refuses: nothing is written, since there is nothing to write yet.


@pytest.mark.parametrize(
    ("state", "field"),
    [
        ({"number": "x"}, "state.number"),
        ({"nummer": 1}, "state.nummer"),
        ([], "state"),
        ("text", "state"),
        (5, "state"),
        (object(), "state"),
        ({"number": True}, "state.number"),
        (Order("x"), "state.number"),  # type: ignore[arg-type]
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_its_field(state: Any, field: str):
    with pytest.raises(InvalidState, match=rf"^{field}: "):
        Checkout.new(state)


@pytest.mark.parametrize("note", ["a\0b", "\ud800", "x" * (1024 * 1024)])
def test_a_state_that_cannot_be_stored_is_refused(note: str):
    with pytest.raises(InvalidState, match=r"^state"):
        Checkout.new(Order(1, note))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", "nowhere"),
        ("step", ""),
        ("step", 5),
        *[("queue", value) for value in ("", "x" * 256, "ü" * 128, "a\nb", "a\0b", "\ud800", 5, b"q", True)],
        *[("priority", value) for value in (-32769, 32768, True, 1.0, "1", None, 10**30)],
        *[("partition_key", value) for value in ("", "x" * 1025, "ü" * 513, "a\0b", "\ud800", 5, b"k", True)],
        *[("unique_key", value) for value in ("", b"", "x" * 1025, b"x" * 1025, "a\0b", "\ud800", 5, True, ["k"])],
        *[
            (field, value)
            for field in ("eligible_at", "schedule_at")
            for value in (datetime(2030, 1, 1), "2030-01-01", 5, True, datetime(2030, 1, 1, tzinfo=UTC).date())  # noqa: DTZ001
        ],
        ("eligible_at", datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))),
        ("schedule_at", datetime.min.replace(tzinfo=timezone(timedelta(hours=12)))),
        *[
            ("schedule_in", value)
            for value in (-1, timedelta(seconds=-1), float("nan"), float("inf"), True, "5s", 10**400, 1e18)
        ],
        *[
            ("unique_scope", value)
            for value in (
                "runnable",
                ["runnable"],
                ["runnable", "executing"],
                ["done"],
                ["executing", "awaiting_signal", "awaiting_children"],
                ["runnable", "executing", "awaiting_signal", "done", "failed"],
                ["nonsense"],
                [5],
                5,
            )
        ],
    ],
)
def test_a_parameter_out_of_range_is_refused_by_its_name(field: str, value: Any):
    with pytest.raises(InvalidInstance, match=f"^{field}: "):
        Checkout.new(Order(1), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("priority", value) for value in (-32768, 32767, 0)],
        *[("queue", value) for value in ("q", "x" * 255, "ü" * 127, "with space", "%s; drop table gen_durable --")],
        *[("partition_key", value) for value in ("k", "x" * 1024, "ü" * 512, "line\nbreak", "%s", "1")],
    ],
)
def test_values_at_the_edge_are_stored_as_given(client: Client, conn: Connection, field: str, value: Any):
    assert row(conn, client.insert(Checkout.new(**{field: value})))[field] == value


# When.


def test_relative_times_are_counted_by_the_database(client: Client, conn: Connection):
    # 2.3-10
    for delay in (90, 90.0, timedelta(seconds=90)):
        due = due_in(conn, client.insert(Checkout.new(schedule_in=delay)))
        assert timedelta(seconds=90) <= due < timedelta(seconds=120)


def test_a_delay_may_be_far_longer_than_a_month(client: Client, conn: Connection):
    # 2.2-4: an integer of milliseconds ends after 24.8 days.
    due = due_in(conn, client.insert(Checkout.new(schedule_in=timedelta(days=36_500))))
    assert timedelta(days=36_500) <= due < timedelta(days=36_501)


def test_an_exact_time_wins_over_a_scheduled_one_and_that_over_a_relative_one(client: Client, conn: Connection):
    exact, scheduled = datetime(2031, 1, 1, tzinfo=UTC), datetime(2032, 1, 1, tzinfo=UTC)
    all_three = client.insert(Checkout.new(eligible_at=exact, schedule_at=scheduled, schedule_in=60))
    assert row(conn, all_three)["eligible_at"] == exact
    two = client.insert(Checkout.new(schedule_at=scheduled, schedule_in=60))
    assert row(conn, two)["eligible_at"] == scheduled


def test_what_loses_is_checked_all_the_same():
    with pytest.raises(InvalidInstance, match=r"^schedule_in: "):
        Checkout.new(eligible_at=datetime(2031, 1, 1, tzinfo=UTC), schedule_in=-1)


@pytest.mark.parametrize("due", [datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)])
def test_times_at_the_edge_can_be_read_back(client: Client, due: datetime):
    assert client.get(client.insert(Checkout.new(eligible_at=due))).eligible_at == due


# Uniqueness.


@pytest.mark.parametrize("key", ["order:42", b"order:42", "schlüssel", b"\0\xff binary", "k" * 1024])
def test_a_key_is_occupied_while_its_instance_lives(client: Client, conn: Connection, key: str | bytes):
    id = client.insert(Checkout.new(unique_key=key))
    stored = key if isinstance(key, bytes) else key.encode()
    assert row(conn, id)["unique_key"] == stored
    with pytest.raises(DuplicateInstance) as raised:
        client.insert(Checkout.new(unique_key=key))
    assert (raised.value.occupant, raised.value.unique_key) == (id, stored)
    assert f"instance {id}" in str(raised.value)
    assert isinstance(raised.value, GenDurableError)
    assert count(conn) == 1


def test_text_and_bytes_of_the_same_key_are_one_key(client: Client):
    client.insert(Checkout.new(unique_key="ü"))
    with pytest.raises(DuplicateInstance):
        client.insert(Checkout.new(unique_key="ü".encode()))


@pytest.mark.parametrize("status", [*sorted(LIVE), "done", "failed"])
def test_by_default_a_key_is_free_again_once_its_instance_has_ended(client: Client, conn: Connection, status: str):
    id = client.insert(Checkout.new(unique_key="k"))
    conn.execute("update gen_durable set status = %s::durable_status where id = %s", [status, id])
    if status in LIVE:
        with pytest.raises(DuplicateInstance):
            client.insert(Checkout.new(unique_key="k"))
    else:
        assert client.insert(Checkout.new(unique_key="k")) != id


def test_a_scope_may_include_the_terminal_statuses(client: Client, conn: Connection):
    scope = [*LIVE, Status.DONE]
    id = client.insert(Checkout.new(unique_key="k", unique_scope=scope))
    conn.execute("update gen_durable set status = 'done'")
    with pytest.raises(DuplicateInstance) as raised:
        client.insert(Checkout.new(unique_key="k"))
    assert raised.value.occupant == id
    conn.execute("update gen_durable set status = 'failed'")
    client.insert(Checkout.new(unique_key="k"))


def test_an_empty_scope_makes_the_key_a_mere_label(client: Client, conn: Connection):
    for _ in range(2):
        client.insert(Checkout.new(unique_key="k", unique_scope=[]))
    assert conn.execute("select count(*), count(unique_guard) from gen_durable").fetchone() == (2, 0)


def test_a_key_is_one_for_all_machines_and_queues(client: Client):
    class Other(Checkout, name="other"):
        pass

    client.insert(Checkout.new(unique_key="k"))
    with pytest.raises(DuplicateInstance):
        client.insert(Other.new(unique_key="k", queue="elsewhere"))


def test_of_many_that_insert_one_key_at_once_exactly_one_wins(client: Client, conn: Connection):
    def attempt(_: int) -> int:
        try:
            return client.insert(Checkout.new(unique_key="contested"))
        except DuplicateInstance as error:
            return -(error.occupant or 0)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(attempt, range(40)))
    (won,) = (id for id in answers if id > 0)
    assert set(answers) == {won, -won}, "every other was told who won"
    assert count(conn) == 1


# Many.


def test_any_number_is_inserted_at_once(client: Client, conn: Connection):
    # 2.1-8: beyond 65 535 parameters, and beyond as many rows.
    ids = client.insert_many(Checkout.new(Order(n)) for n in range(10_000))
    assert len(set(ids)) == count(conn) == 10_000
    ids = client.insert_many([Checkout.new()] * 66_000)
    assert len(set(ids)) == 66_000


def test_more_than_one_statement_can_carry_is_still_all_or_nothing(
    client: Client, conn: Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gendurable.db.operations.INSERT_BYTES", 50)
    ids = client.insert_many([Checkout.new(Order(n), unique_key=f"k{n}") for n in range(20)])
    assert len(set(ids)) == count(conn) == 20
    conn.execute("alter table gen_durable add constraint no_thirteen check (state ->> 'number' <> '13')  not valid")
    try:
        with pytest.raises(GenDurableError):
            client.insert_many([Checkout.new(Order(n)) for n in range(5, 20)])
    finally:
        conn.execute("alter table gen_durable drop constraint no_thirteen")
    assert count(conn) == 20


def test_no_instances_at_all_are_inserted_too(client: Client, conn: Connection):
    assert client.insert_many([]) == []
    assert client.insert_many(iter(())) == []
    assert count(conn) == 0


def test_occupied_keys_and_twins_are_skipped(client: Client, conn: Connection):
    taken = client.insert(Checkout.new(Order(0), unique_key="taken"))
    ids = client.insert_many(
        [
            Checkout.new(Order(1), unique_key="free"),
            Checkout.new(Order(2), unique_key="taken"),
            Checkout.new(Order(3), unique_key="free"),
            Checkout.new(Order(4)),
            Checkout.new(Order(5)),
        ]
    )
    assert len(ids) == 3
    assert taken not in ids
    numbers = conn.execute("select (state ->> 'number')::int from gen_durable order by 1").fetchall()
    assert [number for (number,) in numbers] in ([0, 1, 4, 5], [0, 3, 4, 5])


def test_an_error_in_the_caller_s_generator_writes_nothing(client: Client, conn: Connection):
    def instances():
        yield Checkout.new()
        raise KeyError("no more")

    with pytest.raises(KeyError):
        client.insert_many(instances())
    assert count(conn) == 0


@pytest.mark.parametrize("instances", [None, 5, Checkout.new(), Checkout])
def test_what_is_no_collection_is_refused(client: Client, conn: Connection, instances: Any):
    with pytest.raises(InvalidInstance, match="collection"):
        client.insert_many(instances)
    assert count(conn) == 0


def test_one_value_may_be_inserted_many_times(client: Client):
    new = Checkout.new(Order(1))
    assert len({client.insert(new), client.insert(new), *client.insert_many([new, new])}) == 4


def test_a_client_may_be_shared_between_threads(client: Client, conn: Connection):
    with ThreadPoolExecutor(16) as threads:
        ids = list(threads.map(lambda n: client.insert(Checkout.new(Order(n))), range(100)))
    assert len(set(ids)) == count(conn) == 100
