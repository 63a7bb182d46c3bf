"""Handles: one instance to hold on to, and waiting that needs no poll where the end is written in this process."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from orders import Checkout, Order
from support import until

from gendurable import Client, Context, Handle, Instance, Job, Stop
from gendurable.config import Config
from gendurable.core.registry import Registry
from gendurable.core.status import Status
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.errors import (
    DatabaseUnavailable,
    InstanceCancelled,
    InstanceFailed,
    InstanceNotFound,
    InvalidInstance,
    NoTarget,
    WaitTimeout,
)
from gendurable.service.worker import Worker
from gendurable.testing import Harness

SOON = 20.0
MakeHarness = Callable[..., Harness]


class Asks(Job[dict[str, Any]], name="asks"):
    """Has another instance run, and waits for it within its step."""

    client: Client

    def perform(self, ctx: Context[dict[str, Any]]) -> dict[str, Any] | Stop:
        if ctx.state.get("fails"):
            return Stop("as it was told")
        if ctx.state.get("asks"):
            inner = self.client.insert(Asks.new({}, partition_key=ctx.state.get("key")), handle=True)
            return {"inner": inner.result(SOON)}
        return {"answer": 42}


@pytest.fixture
def worker(dsn: str) -> Iterator[Worker]:
    """A worker in this process."""
    died = threading.Event()
    config = Config(dsn=dsn, poll=timedelta(milliseconds=50), max_poll=timedelta(milliseconds=50))
    running = Worker("here/1", config, Registry([Asks]), emit=lambda _: None, on_death=died.set)
    running.prepare()
    running.start()
    yield running
    assert running.drain() == 0
    assert not died.is_set()


def ended(client: Client, harness: MakeHarness, order: Order) -> Handle:
    handle = client.insert(Checkout.new(order), handle=True)
    handle.signal("paid")
    harness(Checkout).drain()
    return handle


# What a handle is.


def test_insert_returns_an_id_or_a_handle(client: Client):
    id = client.insert(Checkout.new())
    handle = client.insert(Checkout.new(), handle=True)
    assert isinstance(id, int)
    assert isinstance(handle, Handle)
    assert handle == client.handle(handle.id) != client.handle(id)
    assert repr(handle) == f"Handle(id={handle.id})"
    assert len({handle, client.handle(handle.id)}) == 1


def test_a_handle_gets_and_signals_its_instance(client: Client, harness: MakeHarness):
    handle = client.insert(Checkout.new(Order(7)), handle=True)
    assert handle.get().status == Status.RUNNABLE
    assert handle.signal("paid", {"amount": 1}, dedup_key="e").duplicate is False
    assert handle.signal("paid", dedup_key="e").duplicate is True
    harness(Checkout).drain()
    assert (handle.get().status, handle.result()) == (Status.DONE, {"number": 7})
    with pytest.raises(NoTarget):
        handle.signal("paid")


def test_a_handle_inside_a_transaction_is_good_once_that_is_committed(client: Client, dsn: str):
    with psycopg.connect(dsn) as conn:
        handle = client.insert(Checkout.new(), conn=conn, handle=True)
        with pytest.raises(InstanceNotFound):
            handle.get()
    assert handle.get().id == handle.id


@pytest.mark.parametrize("id", [0, -1, "1", True, None])
def test_what_is_no_id_gets_no_handle(client: Client, id: Any):
    with pytest.raises(InvalidInstance, match="id: "):
        client.handle(id)


# Results.


def test_the_result_of_what_failed_is_a_typed_error(client: Client, harness: MakeHarness):
    handle = ended(client, harness, Order(0))
    with pytest.raises(InstanceFailed, match=f"instance {handle.id} ended failed: no number") as raised:
        handle.result(SOON)
    assert isinstance(raised.value.instance, Instance)
    assert raised.value.instance.last_error == "no number"


def test_the_result_of_what_was_cancelled_is_a_typed_error(client: Client):
    handle = client.insert(Checkout.new(), handle=True)
    assert handle.cancel(reason="no longer wanted") is True
    assert handle.cancel() is False
    with pytest.raises(InstanceCancelled, match=f"instance {handle.id} was cancelled: no longer wanted") as raised:
        handle.result(SOON)
    assert raised.value.instance.status == Status.CANCELLED


def test_a_result_that_is_not_there_in_time_is_a_typed_error(client: Client):
    handle = client.insert(Checkout.new(), handle=True)
    for ask in (handle.result, handle.wait):
        with pytest.raises(WaitTimeout, match=r"still runnable after 0\.05 s") as raised:
            ask(0.05)
        assert raised.value.instance == handle.get()


# Waiting.


def test_to_wait_until_parked_ends_when_it_waits_or_has_ended(client: Client, harness: MakeHarness):
    durable = harness(Checkout)
    handle = client.insert(Checkout.new(Order(7)), handle=True)
    with pytest.raises(WaitTimeout):
        handle.wait(0, until="parked")
    durable.drain()
    assert handle.wait(SOON, until="parked").status == Status.AWAITING_SIGNAL
    with pytest.raises(WaitTimeout):
        handle.wait(0.05)
    handle.signal("paid")
    durable.drain()
    assert handle.wait(SOON, until="parked").status == Status.DONE


def test_one_can_wait_only_for_what_there_is(client: Client):
    with pytest.raises(InvalidInstance, match=r"until: 'asleep' is unknown: give 'terminal' or 'parked'"):
        client.handle(1).wait(until="asleep")  # type: ignore[arg-type]


def test_many_threads_share_one_query(client: Client, harness: MakeHarness, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[int]] = []
    real = store.get_statuses

    def counted(conn: Connection, *, ids: list[int]) -> Any:
        asked.append(ids)
        return real(conn, ids=ids)

    monkeypatch.setattr(store, "get_statuses", counted)
    durable = harness(Checkout)
    handles = [client.insert(Checkout.new(Order(7)), handle=True) for _ in range(30)]
    durable.drain()
    with ThreadPoolExecutor(30) as pool:
        results = [pool.submit(handle.result, SOON) for handle in handles]
        until(lambda: asked and len(asked[-1]) == 30, "one query for all")
        for handle in handles:
            handle.signal("paid")
        durable.drain()
        assert [result.result(SOON) for result in results] == [{"number": 7}] * 30


def test_a_client_that_is_closed_lets_nobody_wait(dsn: str):
    client = Client(dsn)
    handles = [client.insert(Checkout.new(), handle=True) for _ in range(5)]
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(handle.wait) for handle in handles]
        until(lambda: len(client._hub._waiters) == 5, "five that wait")
        client.close()
        assert {type(each.exception(SOON)) for each in waiting} == {DatabaseUnavailable}
    assert not [thread.name for thread in threading.enumerate() if "gendurable client" in thread.name]


# In the process of the worker.


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not told would wait for minutes."""
    monkeypatch.setattr("gendurable.waiting.FIRST_LOOK", 1000.0)
    monkeypatch.setattr("gendurable.waiting.LONGEST_PAUSE", 1000.0)


@pytest.mark.usefixtures("no_polls", "worker")
@pytest.mark.parametrize("key", [None, "k"])
def test_what_a_worker_here_ends_is_reported_without_a_poll(client: Client, key: str | None):
    Asks.client = client
    outer = client.insert(Asks.new({"asks": True, "key": key}), handle=True)
    assert outer.result(SOON) == {"inner": {"answer": 42}}
    with pytest.raises(InstanceFailed, match="as it was told"):
        client.insert(Asks.new({"fails": True}), handle=True).result(SOON)


@pytest.mark.usefixtures("no_polls")
def test_what_is_cancelled_here_is_reported_without_a_poll(client: Client):
    handle = client.insert(Checkout.new(), handle=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handle.result, SOON)
        until(lambda: client._hub._waiters, "somebody who waits")
        handle.cancel()
        assert isinstance(waiting.exception(SOON), InstanceCancelled)
