"""Machines to play with: a checkout that awaits its payment, a step whose worker dies, and accounts in turn."""

import os
import signal
import time
from datetime import timedelta

from attrs import evolve, frozen

from gendurable import FSM, Await, Context, Done, Job, Outcome, Spawn, Stop, step


@frozen
class Order:
    """What a checkout remembers between its steps."""

    number: int
    paid: int = 0


@frozen
class Parcel:
    """One of the parcels of an order."""

    order: int
    part: int


class Ship(Job[Parcel], name="demo.ship", queue="checkout"):
    """Books one parcel."""

    def perform(self, ctx: Context[Parcel]) -> dict[str, str]:
        """Return the tracking number."""
        return {"tracking": f"T-{ctx.state.order}-{ctx.state.part}"}


class Checkout(FSM[Order], name="demo.checkout", queue="checkout"):
    """Waits for a payment, ships three parcels at once, and ends when all are on their way."""

    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:  # noqa: ARG002  nothing to look at yet
        """Park until somebody says that the payment arrived, three days at most."""
        return Await("payment_confirmed", then=self.ship, timeout=timedelta(days=3))

    @step
    def ship(self, ctx: Context[Order]) -> Outcome[Order]:
        """Fan out: one child for each parcel; the row waits for all of them."""
        if not ctx.awaited:
            return Stop("the payment never arrived")
        paid = evolve(ctx.state, paid=ctx.awaited[0].payload["amount"])
        parcels = [Ship.new(Parcel(paid.number, part)) for part in (1, 2, 3)]
        return Spawn(parcels, then=self.finish, state=paid)

    @step
    def finish(self, ctx: Context[Order]) -> Outcome[Order]:
        """All children have ended, and their results are here."""
        tracking = [child.result["tracking"] for child in ctx.joined]
        return Done({"order": ctx.state.number, "paid": ctx.state.paid, "tracking": tracking})


class Fragile(FSM[dict[str, int]], name="demo.fragile"):
    """A step that takes its whole worker down with it, once."""

    @step
    def start(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:
        """Die as a power cut would have it; the second time, do the work."""
        if ctx.attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return Done({"executions": ctx.attempt + 1})


@frozen
class Booking:
    """A booking on one account."""

    account: str
    number: int


class Book(Job[Booking], name="demo.book", queue="accounts"):
    """Takes its time; bookings of one account take turns, those of different accounts do not."""

    def perform(self, ctx: Context[Booking]) -> dict[str, object]:
        """Say when it began and ended."""
        began = time.time()
        time.sleep(0.15)
        return {"account": ctx.state.account, "number": ctx.state.number, "began": began, "ended": time.time()}
