"""A machine whose steps do what the test says."""

from collections.abc import Callable
from typing import Any, TypeAlias

from gendurable import FSM, Context, Outcome, step

State: TypeAlias = dict[str, Any]
# An outcome (or whatever else a step may wrongly return), a function that makes it, or a list: one for each execution.
Play: TypeAlias = Any


class Scripted(FSM[State], name="scripted"):
    """Three steps, each doing what it was told; remembers the contexts that steps and handler were given."""

    def __init__(self, *, handle: Callable[..., Any] | None = None, **plays: Play) -> None:
        self._plays = plays
        self._handle = handle
        self.seen: list[Context[State]] = []
        self.handled: list[tuple[Exception, Context[State]]] = []

    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return self._play(ctx)

    @step
    def work(self, ctx: Context[State]) -> Outcome[State]:
        return self._play(ctx)

    @step
    def finish(self, ctx: Context[State]) -> Outcome[State]:
        return self._play(ctx)

    def handle(self, error: Exception, ctx: Context[State]) -> Outcome[State]:
        self.handled.append((error, ctx))
        return super().handle(error, ctx) if self._handle is None else self._handle(error, ctx)

    def _play(self, ctx: Context[State]) -> Any:
        self.seen.append(ctx)
        play = self._plays[ctx.step]
        if isinstance(play, list):
            play = play.pop(0)
        return play(ctx) if callable(play) and not isinstance(play, type) else play


def raises(error: BaseException) -> Callable[..., Any]:
    """A step or handler that raises this."""

    def play(*_: Any) -> Any:
        raise error

    return play
