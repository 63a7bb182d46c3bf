"""Machines that do nothing but exist, so that everything measured is the engine's own."""

import time

from attrs import frozen

from gendurable import FSM, Await, Context, Done, Job, Next, Outcome, Spawn, step


class Noop(Job[dict[str, int]], name="bench.noop"):
    """One step that does nothing."""

    def perform(self, ctx: Context[dict[str, int]]) -> None:
        """Do nothing."""


class Chain(FSM[dict[str, int]], name="bench.chain"):
    """Five steps in a row."""

    @step
    def start(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:  # noqa: ARG002
        """The first."""
        return Next(self.second)

    @step
    def second(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:  # noqa: ARG002
        """The second."""
        return Next(self.third)

    @step
    def third(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:  # noqa: ARG002
        """The third."""
        return Next(self.fourth)

    @step
    def fourth(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:  # noqa: ARG002
        """The fourth."""
        return Next(self.fifth)

    @step
    def fifth(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:  # noqa: ARG002
        """The last."""
        return Done()


class InlineChain(Chain, name="bench.inline_chain", inline=True):
    """The same five steps on one claim."""


@frozen
class Width:
    """How many children."""

    children: int


class FanOut(FSM[Width], name="bench.fan_out"):
    """Spawns children and waits for all of them."""

    @step
    def start(self, ctx: Context[Width]) -> Outcome[Width]:
        """Spawn them; when is known from their own birth."""
        return Spawn([Noop.new({}) for _ in range(ctx.state.children)], then=self.join)

    @step
    def join(self, ctx: Context[Width]) -> Outcome[Width]:
        """All have ended."""
        return Done({"joined": len(ctx.joined)})


class Parked(FSM[dict[str, int]], name="bench.parked"):
    """Waits for one signal."""

    @step
    def start(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:  # noqa: ARG002
        """Park."""
        return Await("go", then=self.finish)

    @step
    def finish(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:  # noqa: ARG002
        """End."""
        return Done()


class Clocked(Job[dict[str, int]], name="bench.clocked"):
    """Says when it started."""

    def perform(self, ctx: Context[dict[str, int]]) -> dict[str, float]:  # noqa: ARG002
        """Return the time."""
        return {"started": time.time()}
