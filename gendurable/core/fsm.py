"""Machines: a class whose methods are steps, checked when the class is made."""

import inspect
from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NoReturn,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
)

from attrs import evolve, field, frozen

from gendurable.core.codec import StateCheck, StateCodec
from gendurable.core.context import Context
from gendurable.core.duration import ZERO, Duration, to_timedelta
from gendurable.core.instance import NewInstance, new_instance
from gendurable.core.limiters import LimitName
from gendurable.core.limits import check_name, show
from gendurable.core.outcomes import Again, Done, Interrupted, Outcome, Retry, Stop
from gendurable.core.policy import HOPELESS, RetryPolicy
from gendurable.core.target import StepRef, Target
from gendurable.errors import BadOutcome, DefinitionError, InvalidInstance

S = TypeVar("S")
M = TypeVar("M")

JOB_STEP = "perform"
# An optional method: the machine's own word on a state.
VALIDATE = "validate"
ON_CANCEL = "on_cancel"

# What `@step` decorates.
_Function: TypeAlias = Callable[[M, Context[S]], Outcome[S]]


class Step(StepRef[S], Generic[M, S]):
    """A step as its class sees it: `Checkout.ship`. Still callable, with a machine and a context."""

    def __init__(
        self,
        function: _Function[M, S],
        *,
        retry: RetryPolicy | None = None,
        timeout: timedelta | None = None,
        transactional: bool = False,
    ) -> None:
        """Wrap a method."""
        self.transactional = transactional
        self.function = function
        self.retry = retry
        self.timeout = timeout
        self.name = function.__name__
        self.owner = None
        self.__doc__ = function.__doc__
        # attrs rebuilds slotted classes, and looks here for the cell that `super()` in the method reads its class from.
        self.__closure__ = getattr(function, "__closure__", None)

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner
        self.name = name

    @overload
    def __get__(self, machine: None, owner: type) -> "Step[M, S]": ...
    @overload
    def __get__(self, machine: object, owner: type) -> "BoundStep[S]": ...
    def __get__(self, machine: object, owner: type) -> "Step[M, S] | BoundStep[S]":
        """Read from a machine, a step is bound to it, as a method is."""
        return self if machine is None else BoundStep(self, machine)

    def __call__(self, machine: M, ctx: Context[S]) -> Outcome[S]:
        """Run the step, as a method called through its class."""
        return self.function(machine, ctx)


class BoundStep(StepRef[S]):
    """A step as a machine sees it: `self.ship`. Still callable, with a context."""

    def __init__(self, step: Step[Any, S], machine: object) -> None:
        """Bind a step to the machine it was read from."""
        self.name = step.name
        self.owner = step.owner
        self._function = step.function
        self._machine = machine

    def __call__(self, ctx: Context[S]) -> Outcome[S]:
        """Run the step."""
        return self._function(self._machine, ctx)


@overload
def step(function: _Function[M, S], /) -> Step[M, S]: ...
@overload
def step(
    *, retry: RetryPolicy | None = None, timeout: Duration | None = None, transactional: bool = False
) -> Callable[[_Function[M, S]], Step[M, S]]: ...
def step(function: Any = None, /, **options: Any) -> Any:
    """Make a method a step of its machine; the method's name is the step's name.

    Bare, or with what holds for this step alone: `@step(retry=RetryPolicy(...), timeout=30)`. After `timeout` an
    execution counts no more, and `handle` is asked with a StepTimeout. A `transactional` step has `ctx.conn`, and what
    it writes there is committed together with its outcome.
    """
    return partial(_step, **options) if function is None else _step(function, **options)


def _step(
    function: _Function[M, S],
    *,
    retry: RetryPolicy | None = None,
    timeout: Duration | None = None,
    transactional: bool = False,
) -> Step[M, S]:
    if not callable(function):
        raise DefinitionError(f"@step decorates a method, not {function!r}")
    return Step(
        function,
        retry=_check_policy(retry),
        timeout=_check_timeout(timeout),
        transactional=_check_truth("transactional", transactional),
    )


def _check_policy(value: object) -> RetryPolicy | None:
    if value is None or isinstance(value, RetryPolicy):
        return value
    raise DefinitionError(f"retry={show(value)} is no policy; give RetryPolicy(max_attempts=…, base=…)")


def _check_timeout(value: object) -> timedelta | None:
    if value is None:
        return None
    try:
        timeout = to_timedelta(value)
    except ValueError as error:
        raise DefinitionError(f"timeout: {error}") from None
    if timeout <= ZERO:
        raise DefinitionError(f"timeout={show(value)} leaves no time at all; give more than zero, or leave it out")
    return timeout


def _check_truth(what: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise DefinitionError(f"{what}={show(value)}: give True or False")


@frozen
class Definition:
    """What a concrete machine class says about itself."""

    name: str
    version: int
    queue: str
    initial: str
    max_crashes: int | None
    inline: bool
    retry: RetryPolicy | None
    validates: bool
    on_cancel: bool
    steps: Mapping[str, Step[Any, Any]]
    codec: StateCodec[Any] = field(eq=False)

    def policy(self, step: str) -> RetryPolicy | None:
        """Return what retries a step: its own policy, else the machine's."""
        return self.steps[step].retry or self.retry

    def resolve(self, target: object, machine: type) -> str:
        """Return the step's name; BadOutcome if the machine has no such step."""
        if isinstance(target, StepRef):
            # A base's step means the override, if the machine has one; another machine's step is refused.
            if target.name in self.steps and target.owner and issubclass(machine, target.owner):
                return target.name
        elif isinstance(target, str) and target in self.steps:
            return target
        raise BadOutcome(f"{self.name} has no step {show(target)}; its steps are {', '.join(self.steps)}")


class _Body(dict[str, Any]):
    """The namespace of a class body; notices a step that would silently replace another one."""

    def __init__(self, class_name: str) -> None:
        super().__init__()
        self.class_name = class_name

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, Step) and isinstance(self.get(key), Step):
            raise DefinitionError(f"{self.class_name} defines the step {key!r} twice; rename one of them")
        super().__setitem__(key, value)


if TYPE_CHECKING:
    # Checkers compare class keywords with __init_subclass__ only under a metaclass they know.
    _MachineMeta = ABCMeta
else:

    class _MachineMeta(ABCMeta):
        """Only there to see the class body while it is written; derived from ABCMeta so that machines may be ABCs."""

        @classmethod
        def __prepare__(cls, name: str, bases: tuple[type, ...], /, **_: Any) -> _Body:
            return _Body(name)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _marked_steps(cls: type) -> dict[str, Step[Any, Any]]:
    """Return the steps of a class and its bases, an override in the place of what it overrides."""
    names: dict[str, Step[Any, Any]] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            if isinstance(value, Step):
                names[attribute] = value
            else:
                names.pop(attribute, None)
    return names


def refuse(cls: type, why: str) -> NoReturn:
    """Raise DefinitionError, naming the class."""
    raise DefinitionError(f"{cls.__module__}.{cls.__qualname__} {why}")


def check_function(cls: type, name: str, function: Callable[..., object]) -> None:
    """Refuse a method whose call would run nothing."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in kinds):
        refuse(cls, f"has {name!r} as a coroutine or generator, which the engine would not run; make it a plain method")


@frozen
class _Keywords:
    """Class keywords; what a class leaves out it takes from its bases."""

    queue: str = "default"
    initial: str = "start"
    max_crashes: int | None = 20
    max_attempts: int = 20
    state: type | None = None
    inline: bool = False
    retry: RetryPolicy | None = None
    timeout: Duration | None = None
    transactional: bool = False


INHERITED: Any = object()


class FSM(Generic[S], metaclass=_MachineMeta):
    """A machine: subclass it, name the state class, mark methods with `@step`.

    One object serves every thread: keep collaborators on `self`, and what must survive in `ctx.state`.
    """

    _definition: ClassVar[Definition | None] = None
    _keywords: ClassVar[_Keywords] = _Keywords()

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        version: int = 1,
        queue: str = INHERITED,
        initial: str = INHERITED,
        state: type = INHERITED,
        max_crashes: int | None = INHERITED,
        inline: bool = INHERITED,
        retry: RetryPolicy | None = INHERITED,
        **others: Any,
    ) -> None:
        """Check the class and keep its definition."""
        super().__init_subclass__(**others)
        if "_definition" in cls.__dict__:
            return  # attrs rebuilds a slotted class, this time without keywords: what the first call made holds
        cls._take_keywords(
            queue=queue, initial=initial, state=state, max_crashes=max_crashes, inline=inline, retry=retry
        )
        steps = cls._find_steps()
        cls._definition = _define(cls, name=name, version=version, steps=steps) if steps else None
        if name is not None and not steps:
            refuse(cls, f"has no steps, so the name {name!r} names nothing; add steps or drop the name")

    @classmethod
    def _take_keywords(cls, **given: Any) -> None:
        cls._keywords = evolve(cls._keywords, **{key: value for key, value in given.items() if value is not INHERITED})

    @classmethod
    def _find_steps(cls) -> dict[str, Step[Any, Any]]:
        if hasattr(cls, JOB_STEP):
            refuse(cls, "defines perform, which makes it a job: derive it from Job, or use @step")
        steps = _marked_steps(cls)
        if hidden := [name for name in steps if hasattr(FSM, name)]:
            refuse(cls, f"has a step {hidden[0]!r}, which would hide FSM.{hidden[0]}; rename it")
        for name, marked in steps.items():
            check_function(cls, name, marked.function)
        return steps

    @classmethod
    def _made_step(cls, function: _Function[Any, Any]) -> Step[Any, Any]:
        """Return a step that nobody decorated: what a decorator would say, the class's keywords say."""
        given = cls._keywords
        try:
            return Step(
                function,
                timeout=_check_timeout(given.timeout),
                transactional=_check_truth("transactional", given.transactional),
            )
        except DefinitionError as error:
            refuse(cls, f"is not well formed: {error}")

    @classmethod
    def _stored_class(cls) -> type:
        """What the column `state` holds."""
        return state_class(cls, FSM)

    @classmethod
    def _check_state(cls, state: Any) -> object:
        return cast("Any", cls).validate(state)

    if TYPE_CHECKING:  # a machine that has none ends at once when it is cancelled

        def on_cancel(self, ctx: Context[S]) -> Outcome[S] | None:
            """Compensate for what was done, once the instance is cancelled; None or `Done`: it ends `cancelled`."""
            raise NotImplementedError

    def handle(self, error: Exception, ctx: Context[S]) -> Outcome[S]:
        """Decide what follows an error of a step. Unless overridden: what the retry policy says, or the end."""
        if ctx.retry is None or not ctx.retry.retries(error, ctx.attempt):
            return Stop(error)
        return Retry(delay=ctx.retry.delay(ctx.attempt, ctx.id))

    @classmethod
    def new(
        cls,
        state: S | Mapping[str, Any] | None = None,
        *,
        step: Target[S] | None = None,
        queue: str | None = None,
        priority: int = 0,
        partition_key: str | None = None,
        unique_key: bytes | str | None = None,
        unique_scope: Collection[str] | None = None,
        eligible_at: datetime | None = None,
        schedule_at: datetime | None = None,
        schedule_in: Duration | None = None,
        rate_limit: LimitName | None = None,
        weight: int = 1,
        concurrency_limit: LimitName | None = None,
        deadline: datetime | Duration | None = None,
        retry: RetryPolicy | None = None,
    ) -> NewInstance:
        """Describe a new instance: a value for `insert`, `insert_many` or `Spawn`, checked here and now."""
        mine = definition(cls)
        try:
            first = mine.initial if step is None else mine.resolve(step, cls)
        except BadOutcome as error:
            raise InvalidInstance(f"step: {error}") from None
        return new_instance(
            fsm=mine.name,
            fsm_version=mine.version,
            step=first,
            state=mine.codec.parse(state, check=state_check(cls)),
            queue=mine.queue if queue is None else queue,
            max_crashes=mine.max_crashes,
            on_cancel=mine.on_cancel,
            priority=priority,
            partition_key=partition_key,
            unique_key=unique_key,
            unique_scope=unique_scope,
            eligible_at=eligible_at,
            schedule_at=schedule_at,
            schedule_in=schedule_in,
            rate_limit=rate_limit,
            weight=weight,
            concurrency_limit=concurrency_limit,
            deadline=deadline,
            retry=retry,
        )


class Job(FSM[S]):
    """A machine of one step, `perform`, that is retried until it succeeds or `max_attempts` executions are spent.

    A retry policy takes the place of `max_attempts` and `backoff`.
    """

    def __init_subclass__(
        cls,
        *,
        max_attempts: int = INHERITED,
        retry: RetryPolicy | None = INHERITED,
        timeout: Duration | None = INHERITED,
        transactional: bool = INHERITED,
        **others: Any,
    ) -> None:
        """Check the class and keep its definition."""
        if max_attempts is not INHERITED:
            if isinstance(retry, RetryPolicy):
                refuse(cls, "has both max_attempts and retry; give the number to the policy alone")
            retry = None
        cls._take_keywords(max_attempts=max_attempts, timeout=timeout, transactional=transactional)
        super().__init_subclass__(retry=retry, **others)

    @classmethod
    def _find_steps(cls) -> dict[str, Step[Any, Any]]:
        if marked := _marked_steps(cls):
            refuse(cls, f"is a job, but marks {', '.join(marked)} with @step; derive it from FSM, or drop @step")
        limit = cls._keywords.max_attempts
        if not _is_count(limit):
            refuse(cls, f"has max_attempts={show(limit)}; give a whole number from 1")
        if not hasattr(cls, JOB_STEP):
            return {}
        check_function(cls, JOB_STEP, cls.perform)
        return {JOB_STEP: cls._made_step(_perform)}

    if TYPE_CHECKING:  # a job that has no `perform` is an abstract base

        def perform(self, ctx: Context[S]) -> "Mapping[str, Any] | Stop | Retry[S] | Again[S] | Interrupted | None":
            """Do the work. None or a mapping: done; an exception: tried again; `Stop`: failed at once."""
            raise NotImplementedError

    def backoff(self, attempt: int) -> float:
        """Seconds to wait before the next execution."""
        return min(2.0 ** min(attempt, 9), 300.0)

    def handle(self, error: Exception, ctx: Context[S]) -> Outcome[S]:
        """Try again after `backoff`, unless the executions are spent or a repetition could not help."""
        if ctx.retry is not None:
            return super().handle(error, ctx)
        if isinstance(error, HOPELESS) or ctx.attempt + 1 >= self._keywords.max_attempts:
            return Stop(error)
        return Retry(delay=self.backoff(ctx.attempt))


def _perform(job: Job[Any], ctx: Context[Any]) -> Outcome[Any]:
    """Run a job's one step: what `perform` returned, as an outcome."""
    value: object = job.perform(ctx)
    if value is None:
        return Done({})
    if isinstance(value, Mapping):
        return Done(value)
    if isinstance(value, Stop | Retry | Again | Interrupted):
        return value
    return Stop(f"perform returned {show(value)}; a job returns None, a mapping, Stop, Retry, Again or Interrupted")


def definition(machine: type[FSM[Any]]) -> Definition:
    """Return a concrete machine's definition; DefinitionError for an abstract base."""
    if machine._definition is None:  # noqa: SLF001  the module's own
        raise DefinitionError(f"{machine.__qualname__} defines no steps: it is a base for machines, not one itself")
    return machine._definition  # noqa: SLF001  the module's own


def state_check(machine: type[FSM[Any]]) -> StateCheck | None:
    """Return what a machine has to say about its states, if it has `validate`."""
    return machine._check_state if definition(machine).validates else None  # noqa: SLF001  the module's own


def _find_validate(cls: type[FSM[Any]]) -> bool:
    """Whether a class has `validate`; as a plain method it is made to do without a machine, as there is none yet."""
    found = inspect.getattr_static(cls, VALIDATE, None)
    if found is None or isinstance(found, Step):
        return False
    if inspect.isfunction(found):
        setattr(cls, VALIDATE, staticmethod(found) if _takes_one(found) else classmethod(found))
    hook = getattr(cls, VALIDATE)
    if not callable(hook) or not _takes_one(hook):
        refuse(cls, f"has {VALIDATE!r}, which is no check of states: make it a method that takes the state alone")
    check_function(cls, VALIDATE, hook)
    return True


def _find_on_cancel(cls: type[FSM[Any]]) -> bool:
    hook = getattr(cls, ON_CANCEL, None)
    if hook is None:
        return False
    if not callable(hook) or isinstance(hook, Step):
        refuse(
            cls, f"has {ON_CANCEL!r}, which is no plain method: it runs when an instance is cancelled, not as a step"
        )
    check_function(cls, ON_CANCEL, hook)
    return True


def _takes_one(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):  # the latter for a method without any parameter
        return False
    return True


def _define(cls: type[FSM[Any]], *, name: str | None, version: int, steps: dict[str, Step[Any, Any]]) -> Definition:
    keywords = cls._keywords
    initial = JOB_STEP if issubclass(cls, Job) else keywords.initial
    if not isinstance(initial, str) or initial not in steps:
        refuse(cls, f"starts at {show(initial)}, which is no step; its steps are {', '.join(steps)} (set initial=)")
    if not _is_count(version):
        refuse(cls, f"has version={show(version)}; give a whole number from 1")
    budget = keywords.max_crashes
    if budget is not None and not _is_count(budget):
        refuse(cls, f"has max_crashes={show(budget)}; give a whole number from 1, or None for no limit")
    if not isinstance(keywords.inline, bool):
        refuse(cls, f"has inline={show(keywords.inline)}; give True or False")
    try:
        retry = _check_policy(keywords.retry)
        fsm = check_name("name", f"{cls.__module__}.{cls.__qualname__}" if name is None else name)
        queue = check_name("queue", keywords.queue)
        for step_name in steps:
            check_name("step", step_name)
        codec: StateCodec[Any] = StateCodec(cls._stored_class())
    except (InvalidInstance, DefinitionError) as error:
        refuse(cls, f"is not well formed: {error}")
    return Definition(
        name=fsm,
        version=version,
        queue=queue,
        initial=initial,
        max_crashes=budget,
        inline=keywords.inline,
        retry=retry,
        validates=_find_validate(cls),
        on_cancel=_find_on_cancel(cls),
        steps=MappingProxyType(steps),
        codec=codec,
    )


def state_class(cls: type[FSM[Any]], root: type[FSM[Any]]) -> type:
    """The generic argument for `root`, else `state=`, else a nested class `State`, else plain dict."""
    argument = _generic_argument(cls, root)
    if argument is not None and argument is not Any and not isinstance(argument, TypeVar):
        return cast("type", argument)
    if (keyword := cls._keywords.state) is not None:
        return keyword
    nested = getattr(cls, "State", None)
    return nested if isinstance(nested, type) else dict


def _generic_argument(cls: type, root: type) -> object:
    """What the one parameter of `root` stands for in `cls`: a class, a TypeVar of `cls` itself, or None."""
    for base in vars(cls).get("__orig_bases__", cls.__bases__):
        origin = get_origin(base) or base
        if not (isinstance(origin, type) and issubclass(origin, root)):
            continue
        arguments = get_args(base)
        parameters: tuple[object, ...] = getattr(origin, "__parameters__", ())
        inner = parameters[0] if origin is root else _generic_argument(origin, root)
        if isinstance(inner, TypeVar):
            inner = arguments[parameters.index(inner)] if arguments and inner in parameters else None
        if inner is not None:
            return inner
    return None
