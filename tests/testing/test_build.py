"""The values that unit tests are made of."""

import threading
from datetime import UTC, datetime

import attrs
import pytest
from scripted import Scripted, State

from gendurable import Await, Child, Context, Done, Next, Outcome, Signal, Status, step
from gendurable.core.fsm import FSM
from gendurable.testing import child, context, signal


@attrs.frozen
class Order:
    number: int
    paid: int = 0


class Checkout(FSM[Order], name="checkout"):
    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        return Await("paid", then=self.ship)

    @step
    def ship(self, ctx: Context[Order]) -> Outcome[Order]:
        return Next(self.count, attrs.evolve(ctx.state, paid=ctx.awaited[0].payload["amount"]))

    @step
    def count(self, ctx: Context[Order]) -> Outcome[Order]:
        return Done({"mails": len(ctx.joined), "attempt": ctx.attempt})


def test_a_step_is_called_with_a_context_and_its_outcome_compared():
    checkout = Checkout()
    assert checkout.start(context(Order(42))) == Await("paid", checkout.ship)
    outcome = checkout.ship(context(Order(42), awaited=[signal("paid", {"amount": 100})]))
    assert outcome == Next(checkout.count, Order(42, paid=100))
    assert outcome == Next("count", Order(42, paid=100))
    assert Checkout.count(checkout, context(Order(42), children=[child(), child()], attempt=3)) == Done(
        {"mails": 2, "attempt": 3}
    )


def test_a_context_has_a_value_for_everything():
    ctx = context({"n": 1})
    assert ctx == Context(id=1, fsm="test", fsm_version=1, step="start", attempt=0, state={"n": 1})
    assert (ctx.awaited, ctx.inbox, ctx.children, ctx.joined) == ((), (), (), ())
    assert (ctx.parent_id, ctx.last_error) == (None, None)


def test_everything_in_a_context_can_be_said():
    ctx = context(
        None, id=7, fsm="shop", fsm_version=3, step="ship", attempt=4, parent_id=5, last_error="OSError: disk"
    )
    assert (ctx.id, ctx.fsm, ctx.fsm_version, ctx.step, ctx.attempt, ctx.parent_id, ctx.last_error) == (
        *(7, "shop", 3, "ship", 4, 5),
        "OSError: disk",
    )


def test_what_a_worker_may_say_while_a_step_runs_can_be_said_too():
    at = datetime(2024, 1, 1, tzinfo=UTC)
    calm = context(None)
    assert (calm.deadline, calm.cancelled.is_set(), calm.shutting_down.is_set(), calm.cancel_reason) == (
        *(None, False, False),
        None,
    )
    assert calm.cancelled.wait() is False, "nobody could ever set it"
    told = context(None, deadline=at, cancelled=True, shutting_down=True, cancel_reason="changed my mind")
    assert (told.deadline, told.cancelled.is_set(), told.shutting_down.wait(), told.cancel_reason) == (
        *(at, True, True),
        "changed my mind",
    )
    stop = threading.Event()
    ctx = context(None, cancelled=stop)
    assert not ctx.cancelled.is_set()
    stop.set()
    assert ctx.cancelled.is_set()


def test_what_is_awaited_is_in_the_inbox_too():
    paid, noise = signal("paid"), signal("noise")
    assert context(None, awaited=[paid], inbox=[noise]).inbox == (paid, noise)
    assert context(None, awaited=[paid], inbox=[noise, paid]).inbox == (paid, noise)
    assert context(None, inbox=[noise]).awaited == ()


def test_signals_have_ids_of_their_own_and_an_empty_payload():
    first, second = signal("a"), signal("a")
    assert first.id != second.id
    assert (first.name, first.payload, first.dedup_key) == ("a", {}, None)
    assert first.inserted_at.tzinfo is not None
    first.payload["spoilt"] = True
    assert signal("a").payload == {}


def test_everything_in_a_signal_can_be_said():
    at = datetime(2024, 1, 1, tzinfo=UTC)
    assert signal("a", [1], id=9, dedup_key="k", inserted_at=at) == Signal(9, "a", [1], "k", at)
    assert signal("a", None).payload is None


def test_children_have_ids_of_their_own_and_ended_well():
    one, other = child(), child(status="failed", last_error="withered", index=1)
    assert one.id != other.id
    assert (one.status, one.state, one.result, one.round, one.index) == (Status.DONE, {}, None, 1, 0)
    assert (other.status, other.last_error) == (Status.FAILED, "withered")
    assert child(id=3, fsm="mail", state={"n": 1}, result={"m": 2}, round=2) == Child(
        3, "mail", Status.DONE, {"n": 1}, {"m": 2}, None, 2, 0
    )
    with pytest.raises(ValueError, match="nonsense"):
        child(status="nonsense")


def test_the_last_round_of_children_is_joined_unless_said_otherwise():
    first, second, third = child(round=1), child(round=2, index=0), child(round=2, index=1)
    assert context(None, children=[first, second, third]).joined == (second, third)
    assert context(None, children=(each for each in [first, second])).joined == (second,)
    assert context(None, children=[first], joined=[]).joined == ()


def test_a_context_cannot_be_changed_but_its_state_may_be_mutable():
    ctx: Context[State] = context({"n": 1})
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ctx.attempt = 1  # type: ignore[misc]
    ctx.state["n"] = 2
    assert Scripted(start=lambda ctx: Done(ctx.state)).start(ctx) == Done({"n": 2})
