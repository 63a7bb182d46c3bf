"""Machines that the command line's tests load by name."""

from typing import Any

from attrs import frozen

from gendurable import FSM, Await, Context, Done, Job, Outcome, Spawn, Stop, step


@frozen
class Order:
    number: int
    paid: int = 0


class Checkout(FSM[Order], name="checkout", queue="tills"):
    """Waits for a payment, packs, and ends."""

    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        return Await("paid", then=self.pack)

    @step
    def pack(self, ctx: Context[Order]) -> Outcome[Order]:
        return Spawn([Pack.new({"part": 0}), Pack.new({"part": 1, "fails": True})], then=self.finish)

    @step
    def finish(self, ctx: Context[Order]) -> Outcome[Order]:
        return Done({"packed": [child.status for child in ctx.joined]})


class NewCheckout(FSM[Order], name="checkout", version=2):
    """What came after it."""

    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        return Done({"number": ctx.state.number})


class Pack(Job[dict[str, Any]], name="pack"):
    """Packs one part, or fails to."""

    @staticmethod
    def validate(state: dict[str, Any]) -> None:
        if state.get("part", 0) < 0:
            raise ValueError("parts count from zero")

    def perform(self, ctx: Context[dict[str, Any]]) -> Stop | None:
        return Stop("out of \x1b[31mpaper\nand string") if ctx.state.get("fails") else None
