"""Which step runs here, so that whatever its code logs can be told apart."""

from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import TypeVar, TypeVarTuple

from attrs import frozen

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@frozen
class CurrentStep:
    """The step whose code is being called."""

    id: int
    fsm: str
    step: str


current_step: ContextVar[CurrentStep | None] = ContextVar("gendurable_current_step", default=None)


def in_step(step: CurrentStep, call: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a function while `current_step` is `step`.

    In a copy of the context: what a step binds there itself must not show up in the next one on the same thread.
    """

    def entered() -> T:
        current_step.set(step)
        return call(*args)

    return copy_context().run(entered)
