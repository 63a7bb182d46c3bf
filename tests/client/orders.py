"""The machines that the client's tests make instances of."""

from attrs import frozen

from gendurable import FSM, Await, Context, Done, Outcome, Stop, step


@frozen
class Order:
    number: int = 0
    note: str = ""


class Checkout(FSM[Order], name="checkout", queue="checkouts"):
    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        return Await("paid", then=self.ship)

    @step
    def ship(self, ctx: Context[Order]) -> Outcome[Order]:
        return Done({"number": ctx.state.number}) if ctx.state.number else Stop("no number")
