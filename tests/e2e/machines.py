"""Machines of the end-to-end tests, steered by the test through its stage. Imported by workers and tests alike."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
from attrs import evolve, frozen
from stage import Stage

from gendurable import (
    FSM,
    Again,
    Await,
    Context,
    Done,
    Interrupted,
    Job,
    Next,
    Outcome,
    Retry,
    Snooze,
    Spawn,
    Stop,
    step,
)


@frozen
class Scene:
    """The folder of the test's stage, and what the machine is to do there."""

    stage: str
    gate: str = ""
    play: str = ""
    timeout: float = 3600
    count: int = 0
    queue: str = "default"
    by: int | None = None


def note(what: str, ctx: Context[Scene], **about: Any) -> None:
    Stage(ctx.state.stage).note(what, id=ctx.id, step=ctx.step, attempt=ctx.attempt, **about)


def wait_at_gate(ctx: Context[Scene]) -> None:
    """Wait for the gate `x`, or for `x.1`, which lets only the execution with attempt 1 through."""
    if ctx.state.gate:
        Stage(ctx.state.stage).wait_at(ctx.state.gate, f"{ctx.state.gate}.{ctx.attempt}")


class Noop(Job[dict[str, Any]], name="noop"):
    """Nothing at all."""

    def perform(self, ctx: Context[dict[str, Any]]) -> None: ...


class Gated(Job[Scene], name="gated"):
    """One step that waits at its gate."""

    def perform(self, ctx: Context[Scene]) -> dict[str, Any]:
        note("entered", ctx)
        wait_at_gate(ctx)
        note("left", ctx)
        return {"by": ctx.attempt}


class Restless(FSM[Scene], name="restless"):
    """Always due again, until its gate is open."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        return Done() if (Path(ctx.state.stage) / f"gate {ctx.state.gate}").exists() else Next(self.start)


class Attentive(Job[Scene], name="attentive", max_attempts=3):
    """Waits until it is told something: that its worker goes, or that it is no longer wanted."""

    def perform(self, ctx: Context[Scene]) -> dict[str, Any] | Interrupted:
        note("entered", ctx)
        while not ctx.shutting_down.is_set():
            if ctx.cancelled.wait(0.02):
                note("cancelled", ctx)
                return {"by": "nobody"}
            if (Path(ctx.state.stage) / "gate on").exists():
                return {"by": ctx.attempt}
        note("interrupted", ctx)
        return Interrupted()


class Refunding(Attentive, name="refunding"):
    """Gives back what it took, once it is cancelled."""

    def on_cancel(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("refunded", ctx, reason=ctx.cancel_reason)
        return Done({"refunded": True})


class Hanging(Job[Scene], name="hanging", max_attempts=1, timeout=0.5):
    """Waits at its gate for longer than it may."""

    def perform(self, ctx: Context[Scene]) -> None:
        note("entered", ctx)
        wait_at_gate(ctx)


class Stepwise(FSM[Scene], name="stepwise"):
    """A step that waits at its gate and a second one that tells which execution of the first was believed."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("entered", ctx)
        wait_at_gate(ctx)
        note("left", ctx)
        return Next(self.finish, evolve(ctx.state, by=ctx.attempt))

    @step
    def finish(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("entered", ctx)
        return Done({"by": ctx.state.by})


class Player(FSM[Scene], name="player"):
    """Plays one outcome after its start; `handle` tries an error once more."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        wait_at_gate(ctx)
        changed = evolve(ctx.state, by=ctx.attempt)
        match ctx.state.play:
            case "next":
                return Next(self.later, changed, delay=3600)
            case "retry" | "again" as word:
                return {"retry": Retry, "again": Again}[word](changed, delay=3600)
            case "snooze":
                raise Snooze(3600)
            case "await":
                return Await(["a", "b"], then=self.later, state=changed, timeout=3600)
            case "spawn":
                return Spawn([Noop.new(queue="unserved"), Noop.new(queue="unserved")], then=self.later, state=changed)
            case "done":
                return Done({"by": ctx.attempt})
            case "stop":
                return Stop("as the test wished")
            case _:
                raise ValueError(f"attempt {ctx.attempt}")

    @step
    def later(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("entered", ctx)
        return Done({"by": ctx.state.by})

    def handle(self, error: Exception, ctx: Context[Scene]) -> Outcome[Scene]:
        note("handled", ctx)
        return Retry() if ctx.attempt == 0 else Stop(error)


@frozen
class Order:
    """Money to be moved, and the instance that is told of it."""

    payer: int
    payee: int
    amount: int
    auditor: int


class Transfer(FSM[Order], name="transfer"):
    """Moves money and tells the auditor, in one commit, and writes a receipt in another."""

    @step(transactional=True)
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        order = ctx.state
        for account, change in sorted([(order.payer, -order.amount), (order.payee, order.amount)]):
            ctx.conn.execute("update accounts set balance = balance + %s where id = %s", [change, account])
            time.sleep(0.005)  # so that kills find it between the two
        ctx.conn.execute("insert into transfers (id) values (%s)", [ctx.id])
        ctx.signal(order.auditor, "moved", {"by": ctx.id})
        return Next(self.receipt)

    @step(transactional=True)
    def receipt(self, ctx: Context[Order]) -> Outcome[Order]:
        ctx.conn.execute("insert into receipts (id) values (%s)", [ctx.id])
        return Done()

    def handle(self, error: Exception, ctx: Context[Order]) -> Outcome[Order]:
        return Retry(delay=0.1) if isinstance(error, psycopg.Error) else Stop(error)


class Waiter(FSM[Scene], name="waiter"):
    """Waits for a signal `go`, or until its deadline."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        wait_at_gate(ctx)
        return Await("go", then=self.went, timeout=ctx.state.timeout)

    @step
    def went(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("went", ctx)
        return Done({"got": [each.payload for each in ctx.awaited]})


class Collector(FSM[Scene], name="collector"):
    """Waits until it has an `a`, a `b` and a `c`."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        return Await(["a", "b", "c"], then=self.gather)

    @step
    def gather(self, ctx: Context[Scene]) -> Outcome[Scene]:
        names = sorted(each.name for each in ctx.awaited)
        note("looked", ctx, names=names)
        return Done({"names": names}) if names == ["a", "b", "c"] else Await(["a", "b", "c"], then=self.gather)


class Parent(FSM[Scene], name="parent"):
    """Has `count` children, each with a gate of its own, in the queue it was told."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        gate = ctx.state.gate
        scenes = [evolve(ctx.state, gate=f"{gate}{place}" if gate else "") for place in range(ctx.state.count)]
        return Spawn([Gated.new(scene, queue=ctx.state.queue) for scene in scenes], then=self.joined)

    @step
    def joined(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("joined", ctx, children=[str(child.status) for child in ctx.joined])
        return Done({"children": [child.result for child in ctx.joined]})


class Quitter(FSM[Scene], name="quitter"):
    """Ends its first execution without an outcome, by an exception that is no Exception."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("entered", ctx)
        if ctx.attempt == 0:
            raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[ctx.state.play](3)
        return Done({"by": ctx.attempt})

    def handle(self, error: Exception, ctx: Context[Scene]) -> Outcome[Scene]:
        note("handled", ctx)
        return Stop(error)


class Killer(FSM[Scene], name="killer", max_crashes=2):
    """Kills whoever runs it."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("entered", ctx)
        os.kill(os.getpid(), signal.SIGKILL)
        return Done()


class Relay(FSM[Scene], name="relay"):
    """Makes rows due in every way: a child in another queue, its parent when it has ended, and a next step."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("entered", ctx)
        wait_at_gate(ctx)
        return Spawn([Noop.new(queue=ctx.state.queue)], then=self.joined)

    @step
    def joined(self, ctx: Context[Scene]) -> Outcome[Scene]:
        return Next(self.last)

    @step
    def last(self, ctx: Context[Scene]) -> Outcome[Scene]:
        return Done()


class InlineSteps(FSM[Scene], name="inline_steps", inline=True):
    """Three steps on one claim; the last waits at its gate."""

    @step
    def start(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("first", ctx)
        return Next(self.second, evolve(ctx.state, count=1))

    @step
    def second(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("second", ctx)
        return Next(self.third, evolve(ctx.state, count=2))

    @step
    def third(self, ctx: Context[Scene]) -> Outcome[Scene]:
        note("third", ctx)
        wait_at_gate(ctx)
        return Done({"count": ctx.state.count, "by": ctx.attempt})
