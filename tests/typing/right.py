"""Uses of the public API that a strict type checker accepts; checked by test_typing.py, never run."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypedDict, assert_type

from attrs import evolve, frozen
from psycopg import Connection

from gendurable import (
    FSM,
    Again,
    Await,
    Children,
    Client,
    Context,
    Done,
    Fatal,
    Handle,
    Instance,
    Interrupted,
    Job,
    NewInstance,
    Next,
    Outcome,
    ParentTask,
    Registry,
    Retry,
    RetryPolicy,
    Signal,
    Snooze,
    Spawn,
    Stop,
    sequence,
    step,
)
from gendurable.tasks import Progress
from gendurable.testing import Harness, context, signal


@frozen
class Order:
    number: int
    paid: int = 0


@frozen
class Mail:
    to: str


class Note(TypedDict):
    text: str


class SendMail(Job[Mail], name="send_mail", max_attempts=5, timeout=30):
    def perform(self, ctx: Context[Mail]) -> None:
        assert_type(ctx.state, Mail)

    def backoff(self, attempt: int) -> float:
        return 2.0 * attempt


class Report(Job[dict[str, Any]], retry=RetryPolicy(max_attempts=3, base=timedelta(seconds=5), retry_on=OSError)):
    def perform(
        self, ctx: Context[dict[str, Any]]
    ) -> dict[str, int] | Stop | Retry[dict[str, Any]] | Again[dict[str, Any]]:
        if not ctx.state:
            return Retry(delay=5) if ctx.attempt else Again(delay=timedelta(seconds=5))
        return {"pages": len(ctx.state)}


@frozen
class Checkout(FSM[Order], name="checkout", version=1, queue="checkout", max_crashes=None):
    carrier: str

    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        return Await("payment_confirmed", then=self.ship, timeout=timedelta(days=3))

    @step
    def ship(self, ctx: Context[Order]) -> Outcome[Order]:
        assert_type(ctx.state, Order)
        assert_type(ctx.awaited[0], Signal)
        if not ctx.awaited:
            return Stop("payment never arrived")
        return Next(self.fan, evolve(ctx.state, paid=ctx.awaited[0].payload["amount"]), delay=1.5, rate_limit="mail")

    @step
    def fan(self, ctx: Context[Order]) -> Outcome[Order]:
        return Spawn(
            [SendMail.new(Mail("a")), SendMail.new({"to": "b"}), Report],
            then=Checkout.finish,
            state=ctx.state,
            timeout=60,
            on_failure="fail_fast",
        )

    @step
    def finish(self, ctx: Context[Order]) -> Done:
        return Done({"paid": ctx.state.paid, "mails": len(ctx.joined)})

    @step(retry=RetryPolicy(5, 0.1, 1.5, 1, jitter=0.5, stop_on=[ValueError, KeyError]), timeout=timedelta(seconds=30))
    def detour(self, ctx: Context[Order]) -> Outcome[Order]:
        assert_type(ctx.retry, RetryPolicy | None)
        if ctx.attempt:
            raise Fatal("no way")
        return Next("finish", rate_limit=("mail", "acme"), weight=2, concurrency_limit=("db", "acme"))

    @step()
    def aside(self, ctx: Context[Order]) -> Outcome[Order]:
        if ctx.last_error:
            raise Snooze(timedelta(minutes=5))
        return Again(ctx.state, delay=0.5) if ctx.attempt else Next(self.detour)

    @step(transactional=True)
    def book(self, ctx: Context[Order]) -> Outcome[Order]:
        assert_type(ctx.conn, Connection[Any])
        ctx.signal(7, "booked", {"paid": ctx.state.paid}, dedup_key="once")
        return Interrupted() if ctx.shutting_down.wait(0.1) or ctx.cancelled.is_set() else Next(self.finish)

    def handle(self, error: Exception, ctx: Context[Order]) -> Outcome[Order]:
        return Retry(delay=1.0 * ctx.attempt) if ctx.attempt < 5 else Stop(error)

    def on_cancel(self, ctx: Context[Order]) -> Outcome[Order] | None:
        return Next(self.finish) if ctx.cancel_reason else None


class Family(ParentTask[Order], name="family", retry=RetryPolicy(3)):
    def run(self, ctx: Context[Order]) -> Children:
        assert_type(ctx.state, Order)
        return Children({"size": 100}, [SendMail.new(Mail("a")), Report], on_failure="fail_fast", timeout=60)

    def finalize(self, ctx: Context[Order], output: Any, results: Sequence[Any]) -> Children | dict[str, Any]:
        assert_type(ctx.state, Order)
        return {**output, "mails": len(results)} if results else Children(output, [SendMail.new({"to": "b"})])

    def handle(self, error: Exception, ctx: Context[Progress[Order]]) -> Outcome[Progress[Order]]:
        assert_type(ctx.state.input, Order)
        return Stop(error)


Steps = sequence("steps", SendMail, Report, Family, version=2)


class Notes(FSM[Note]):
    @step
    def start(self, ctx: Context[Note]) -> Outcome[Note]:
        return Next(self.start, {"text": ctx.state["text"] + "!"})


class Plain(FSM[dict[str, Any]]):
    @step
    def start(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        return Next(self.start, {"n": 1})


def use(client: Client, harness: Harness) -> None:
    new = Checkout.new(Order(42), partition_key="customer:7", unique_key="order:42", schedule_in=5, step=Checkout.ship)
    assert_type(new, NewInstance)
    Report.new({}, retry=RetryPolicy(max_attempts=9))
    assert_type(Family.new(Order(1), priority=3), NewInstance)
    client.insert_many([Family.new({"number": 1}), Steps.new({"to": "a"}), Steps.new(Mail("a"))])
    assert_type(client.insert(new), int)
    assert_type(client.insert_many([new, Notes.new({"text": "hi"})]), list[int])
    client.signal(1, "payment_confirmed", {"amount": 100}, dedup_key="evt-7")
    assert_type(client.get(1), Instance)
    assert_type(client.cancel(1, reason="no longer wanted", cascade=True), bool)
    assert_type(harness.cancel(1), bool)
    assert_type(client.wait(1, timeout=30), Instance)
    handle = client.insert(new, handle=True)
    assert_type(handle, Handle)
    assert_type(client.handle(1).wait(30, until="parked"), Instance)
    handle.signal("payment_confirmed", {"amount": handle.result(timeout=timedelta(seconds=1))["amount"]})
    assert_type(handle.cancel(reason="enough", cascade=True), bool)
    assert_type(client.pause("mail"), bool)
    client.resume("mail")
    assert_type(harness.drain(), dict[str, int])
    checkout = Checkout("DHL")
    assert_type(context(Order(1)), Context[Order])
    assert_type(checkout.ship(context(Order(1), awaited=[signal("payment_confirmed", {"amount": 1})])), Outcome[Order])
    assert_type(Checkout.ship(checkout, context(Order(1))), Outcome[Order])
    Registry([checkout, SendMail, "shop.machines"])
