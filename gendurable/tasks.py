"""Ready-made machines for trees of tasks: a parent with children and what is made of their results, and sequences."""

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NoReturn, TypeAlias, TypeVar, cast, overload

from attrs import evolve, field, frozen

from gendurable.core.context import Child, Context
from gendurable.core.duration import Duration
from gendurable.core.fsm import FSM, INHERITED, Step, check_function, definition, refuse, state_class
from gendurable.core.instance import NewInstance
from gendurable.core.limits import show
from gendurable.core.outcomes import Again, Done, Interrupted, Outcome, Retry, Spawn, Stop
from gendurable.core.status import Status
from gendurable.errors import BadOutcome, ChildFailed, DefinitionError, Fatal, InvalidInstance

S = TypeVar("S")

RUN = "run"
FINALIZE = "finalize"


def _tuple(children: "Iterable[NewInstance | type[FSM[Any]]]") -> "tuple[NewInstance | type[FSM[Any]], ...]":
    return tuple(children)


@frozen
class Children:
    """What a parent task returns: its own output, any JSON value, and the children to wait for."""

    output: Any = None
    children: tuple[NewInstance | type[FSM[Any]], ...] = field(default=(), converter=_tuple)
    on_failure: Literal["collect", "fail_fast"] = field(default="collect", kw_only=True)
    timeout: Duration | None = field(default=None, kw_only=True)


@frozen
class Progress(Generic[S]):
    """The stored state of a parent task: its input, its output so far, and how many children it waits for."""

    input: S
    output: Any = None
    children: int = 0


# What `run` and `finalize` may also return, as a job may.
_Word: TypeAlias = Mapping[str, Any] | Stop | Retry[S] | Again[S] | Interrupted | None


class ParentTask(FSM[Progress[S]], Generic[S], initial=RUN):
    """A task with children: `run` returns Children, `finalize` makes the result of theirs.

    In both `ctx.state` is the input; in `handle` and `on_cancel` it is a Progress. `finalize` may return Children in
    its turn: it is then called again, with that output and the results of those children.
    """

    def __init_subclass__(cls, *, timeout: Duration | None = INHERITED, **others: Any) -> None:
        """Check the class and keep its definition. `timeout` holds for `run` and for `finalize`."""
        cls._take_keywords(timeout=timeout)
        super().__init_subclass__(**others)

    @classmethod
    def _find_steps(cls) -> dict[str, Step[Any, Any]]:
        if marked := super()._find_steps():
            refuse(
                cls, f"is a parent task, but marks {', '.join(marked)} with @step; derive it from FSM, or drop @step"
            )
        if not hasattr(cls, RUN):
            return {}
        check_function(cls, RUN, cls.run)
        check_function(cls, FINALIZE, cls.finalize)
        return {RUN: cls._made_step(_run), FINALIZE: cls._made_step(_finalize)}

    @classmethod
    def _stored_class(cls) -> type:
        return cast("type", Progress[state_class(cls, ParentTask)])  # type: ignore[misc]

    @classmethod
    def _check_state(cls, state: Progress[Any]) -> object:
        answer = super()._check_state(state.input)
        return None if answer is None else evolve(state, input=answer)

    @classmethod
    def new(cls, state: S | Mapping[str, Any] | None = None, **options: Any) -> NewInstance:  # type: ignore[override]
        """Describe a new instance by its input; the options are those of every machine."""
        return super().new({"input": {} if state is None else state}, **options)

    if TYPE_CHECKING:  # a parent task that has no `run` is an abstract base

        def run(self, ctx: Context[S]) -> "Children | _Word[S]":
            """Do the parent's own part. Children: they follow; a mapping or None: the output, without children."""
            raise NotImplementedError

    def finalize(self, ctx: Context[S], output: Any, results: Sequence[Any]) -> "Children | _Word[S]":  # noqa: ARG002
        """Make the result, once the children have ended; theirs are in the order in which they were given.

        To ask for the result of a child that did not end well raises ChildFailed; `ctx.joined` says how each ended.
        """
        return {"output": output, "children_outputs": list(results)}


class _Results(Sequence[Any]):
    """The children's results by their places; one that is not there is missed only when it is asked for."""

    def __init__(self, children: Sequence[Child], count: int) -> None:
        self._children = {child.index: child for child in children}
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> list[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(self._count)[place]]
        index = range(self._count)[place]
        child = self._children.get(index)
        if child is None:
            raise ChildFailed(f"child {index} was not born: its unique key was occupied")
        return child.result if child.status is Status.DONE else self._miss(child)

    def _miss(self, child: Child) -> NoReturn:
        # If one failed and the others were cancelled for it, that one is the news.
        culprit = next((each for each in self._children.values() if each.status is Status.FAILED), child)
        why = f": {culprit.last_error}" if culprit.last_error else ""
        raise ChildFailed(f"child {culprit.index} ({culprit.fsm}, instance {culprit.id}) is {culprit.status}{why}")


def _run(task: ParentTask[Any], ctx: Context[Any]) -> Outcome[Any]:
    value = task.run(_with_input(ctx))
    return _outcome(ctx, Children(value) if value is None or isinstance(value, Mapping) else value)


def _finalize(task: ParentTask[Any], ctx: Context[Any]) -> Outcome[Any]:
    results = _Results(ctx.joined, ctx.state.children)
    value = task.finalize(_with_input(ctx), ctx.state.output, results)
    return Done(value or {}) if value is None or isinstance(value, Mapping) else _outcome(ctx, value)


def _with_input(ctx: Context[Any]) -> Context[Any]:
    return evolve(ctx, state=ctx.state.input)


def _outcome(ctx: Context[Any], value: object) -> Outcome[Any]:
    match value:
        case Children(output, children):
            progress = Progress(ctx.state.input, output, len(children))
            return Spawn(children, FINALIZE, progress, timeout=value.timeout, on_failure=value.on_failure)
        case Retry(state=None) | Again(state=None) | Stop() | Interrupted():
            return value
        case Retry(state=given) | Again(state=given):
            return evolve(value, state=evolve(ctx.state, input=given))
    raise BadOutcome(
        f"{ctx.step} returned {show(value)}; a parent task returns Children, None, a mapping, Stop, Retry, Again or "
        "Interrupted"
    )


class _Sequence(ParentTask[dict[str, Any]]):
    """Its parts one after the other, each as a child; the output is the place of the part that runs."""

    parts: ClassVar[tuple[type[FSM[Any]], ...]]

    @classmethod
    def new(cls, state: Any = None, **options: Any) -> NewInstance:
        """Describe a new instance by the input of the first part, which judges it here and now."""
        cls.parts[0].new(state)
        return super().new(state, **options)

    def finalize(
        self,
        ctx: Context[dict[str, Any]],  # noqa: ARG002
        output: int,
        results: Sequence[Any],
    ) -> Children | Mapping[str, Any]:
        """Go on to the next part, or end with the result of the last."""
        done, following = output, output + 1
        if following == len(self.parts):
            return cast("Mapping[str, Any]", results[0])
        try:
            return Children(following, [self.parts[following].new(results[0])])
        except InvalidInstance as error:
            names = [definition(self.parts[place]).name for place in (following, done)]
            raise Fatal("{} does not take the result of {}: {}".format(*names, error)) from error


# Not in the base, which has no parts: without `run` it is no machine.
def _start(self: _Sequence, ctx: Context[dict[str, Any]]) -> Children:
    return Children(0, [self.parts[0].new(ctx.state)])


def sequence(name: str, *parts: type[FSM[Any]], **keywords: Any) -> type[ParentTask[Any]]:
    """Make a machine that runs machines one after the other: the result of each is the input of the next.

    The keywords are those of every class of machines. With other parts it is another version: give it `version=`.
    """
    if not parts:
        raise DefinitionError(f"the sequence {name!r} has no parts; give it the machines to run, in their order")
    for part in parts:
        if not (isinstance(part, type) and issubclass(part, FSM)):
            raise DefinitionError(f"the sequence {name!r} has the part {show(part)}; give classes of machines")
        definition(part)
    body = {"__module__": __name__, "parts": parts, RUN: _start}
    return types.new_class(name, (_Sequence,), {"name": name, **keywords}, lambda space: space.update(body))
