"""Mistakes that a strict type checker must catch: each line marked `# error` and no other."""

from attrs import frozen

from gendurable import (
    FSM,
    Again,
    Await,
    Children,
    Client,
    Context,
    Job,
    Next,
    Outcome,
    ParentTask,
    Retry,
    RetryPolicy,
    Snooze,
    Spawn,
    Stop,
    sequence,
    step,
)
from gendurable.testing import context


@frozen
class Order:
    number: int


@frozen
class Mail:
    to: str


class Other(FSM[Mail]):
    @step
    def start(self, ctx: Context[Mail]) -> Outcome[Mail]:
        return Stop("x")


class Checkout(FSM[Order], version="2"):  # error
    def helper(self, ctx: Context[Order]) -> Outcome[Order]:
        return Stop("no step")

    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        return Next(self.ship, Mail("a"))  # error

    @step
    def ship(self, ctx: Context[Order]) -> Outcome[Order]:
        return Next(self.helper)  # error

    @step
    def elsewhere(self, ctx: Context[Order]) -> Outcome[Order]:
        return Next(Other.start)  # error

    @step
    def await_plain(self, ctx: Context[Order]) -> Outcome[Order]:
        return Await("paid", then=self.helper)  # error

    @step
    def missing(self, ctx: Context[Order]) -> Outcome[Order]:
        return Next(self.nowhere)  # error

    @step
    def limited(self, ctx: Context[Order]) -> Outcome[Order]:
        return Next(self.ship, rate_limit=7)  # error

    @step
    def spawn(self, ctx: Context[Order]) -> Outcome[Order]:
        return Spawn([Order(1)], then=self.ship)  # error

    def on_cancel(self, ctx: Context[Order]) -> str:  # error
        return "undone"

    @step
    def panic(self, ctx: Context[Order]) -> Outcome[Order]:
        return Spawn([Send], then=self.ship, on_failure="panic")  # error

    @step
    def retry(self, ctx: Context[Order]) -> Outcome[Order]:
        return Retry(delay="soon")  # error

    @step  # error
    def returns_text(self, ctx: Context[Order]) -> str:
        return "done"

    @step(timeout="30s")  # error
    def hurried(self, ctx: Context[Order]) -> Outcome[Order]:
        return Stop("x")

    @step(transactional="yes")  # error
    def bookish(self, ctx: Context[Order]) -> Outcome[Order]:
        ctx.signal("7", "booked")  # error
        return Stop("x")

    @step(timeout=30)  # error
    def returns_number(self, ctx: Context[Order]) -> int:
        return 1

    @step
    def reads(self, ctx: Context[Order]) -> Outcome[Order]:
        return Stop(ctx.state.to)  # error

    @step
    def again(self, ctx: Context[Order]) -> Outcome[Order]:
        return Again(Mail("a"))  # error

    @step
    def snooze(self, ctx: Context[Order]) -> Outcome[Order]:
        raise Snooze("5s")  # error

    @step(retry=3)  # error
    def patient(self, ctx: Context[Order]) -> Outcome[Order]:
        return Stop("x")

    @step(retry=RetryPolicy(3))  # error
    def patient_text(self, ctx: Context[Order]) -> str:
        return "done"

    @step(retry=RetryPolicy(3))
    def aside(self, ctx: Context[Order]) -> Outcome[Order]:
        return Next(Other.start)  # error


class Family(ParentTask[Order]):
    def run(self, ctx: Context[Mail]) -> Children:  # error
        return Children(None, [Order(1)])  # error

    def finalize(self, ctx: Context[Order], output: object, results: object) -> int:  # error
        return 1


class Impatient(Job[Mail], retry=3):  # error
    pass


class Send(Job[Mail]):
    def perform(self, ctx: Context[Mail]) -> int:  # error
        return 1


def use(client: Client) -> None:
    Checkout.new(Mail("a"))  # error
    Checkout.new(Order(1), priority="high")  # error
    Checkout.new(Order(1), retry=5)  # error
    Family.new(Mail("a"))  # error
    Children(1, on_failure="panic")  # error
    sequence("steps", Order)  # error
    RetryPolicy(base="1s")  # error
    RetryPolicy(retry_on=[int])  # error
    client.insert(Order(1))  # error
    client.signal("1", "paid")  # error
    client.cancel("1")  # error
    client.wait(1, until="asleep")  # error
    client.handle(1).wait(until="done")  # error
    client.insert(Checkout.new(Order(1))).result()  # error
    client.pause(7)  # error
    Checkout().ship(context(Mail("a")))  # error
