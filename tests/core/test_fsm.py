"""Machines as classes: what is refused when they are made, what they inherit, and what `.new` takes."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, Generic, TypedDict, TypeVar

import pytest
from attrs import define, evolve, field, frozen

from gendurable import FSM, Await, Context, Done, Job, NewInstance, Next, Outcome, Retry, Spawn, Status, Stop, step
from gendurable.core.duration import to_timedelta
from gendurable.core.fsm import Definition, definition
from gendurable.db.connection import Connection
from gendurable.errors import BadOutcome, DefinitionError, InvalidInstance, InvalidState
from gendurable.testing import Harness, context

T = TypeVar("T")
U = TypeVar("U")

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")
NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)


@frozen
class Order:
    number: int
    paid: int = 0


class Checkout(FSM[Order], name="checkout", version=3, queue="tills"):
    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        """Wait for the money."""
        return Await("paid", then=self.ship)

    @step
    def ship(self, ctx: Context[Order]) -> Outcome[Order]:
        return Next(self.finish, evolve(ctx.state, paid=len(ctx.awaited)))

    @step
    def finish(self, ctx: Context[Order]) -> Outcome[Order]:
        return Done({"paid": ctx.state.paid})


class Plain(FSM[dict], name="plain"):
    @step
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        return Done()


class Mail(Job[dict], name="mail"):
    def perform(self, ctx: Context[dict]) -> None: ...


# What is refused when a class is made.


def steps_and_perform():
    class Culprit(FSM[dict]):
        @step
        def start(self, ctx): ...

        def perform(self, ctx): ...


def perform_in_an_fsm():
    class Culprit(FSM[dict]):
        def perform(self, ctx): ...


def a_step_named_perform_in_an_fsm():
    class Culprit(FSM[dict], initial="perform"):
        @step
        def perform(self, ctx): ...


def a_step_in_a_job():
    class Culprit(Job[dict]):
        @step
        def start(self, ctx): ...


def a_step_and_perform_in_a_job():
    class Culprit(Job[dict]):
        @step
        def extra(self, ctx): ...

        def perform(self, ctx): ...


def a_step_inherited_by_a_job():
    class Steps:
        @step
        def extra(self, ctx): ...

    class Culprit(Steps, Job[dict]):
        def perform(self, ctx): ...


def two_steps_of_one_name():
    class Culprit(FSM[dict]):
        @step
        def start(self, ctx): ...

        @step
        def start(self, ctx): ...  # noqa: F811  what this is about


def an_initial_that_is_no_step():
    class Culprit(FSM[dict], initial="begin"):
        @step
        def start(self, ctx): ...


def no_step_named_start():
    class Culprit(FSM[dict]):
        @step
        def begin(self, ctx): ...


def an_initial_that_is_a_plain_method():
    class Culprit(FSM[dict], initial="helper"):
        @step
        def start(self, ctx): ...

        def helper(self, ctx): ...


def a_step_overridden_by_a_plain_method():
    class Culprit(Plain):
        def start(self, ctx): ...

        @step
        def other(self, ctx): ...


def a_step_that_hides_new():
    class Culprit(FSM[dict]):
        @step
        def start(self, ctx): ...

        @step
        def new(self, ctx): ...


def a_step_that_hides_handle():
    class Culprit(FSM[dict]):
        @step
        def start(self, ctx): ...

        @step
        def handle(self, ctx): ...


def a_name_without_steps():
    class Culprit(FSM[dict], name="nothing"): ...


def a_state_class_that_is_no_object():
    class Culprit(FSM[int]):
        @step
        def start(self, ctx): ...


def a_state_keyword_that_is_no_object():
    class Culprit(FSM, state=list):
        @step
        def start(self, ctx): ...


def a_coroutine():
    class Culprit(FSM[dict]):
        @step
        async def start(self, ctx): ...


def a_generator():
    class Culprit(FSM[dict]):
        @step
        def start(self, ctx):
            yield Done()


def a_job_that_is_a_coroutine():
    class Culprit(Job[dict]):
        async def perform(self, ctx): ...


def a_hook_that_is_a_coroutine():
    class Culprit(FSM[dict]):
        @step
        def start(self, ctx): ...
        async def on_cancel(self, ctx): ...


def a_hook_that_is_a_step():
    class Culprit(FSM[dict]):
        @step
        def start(self, ctx): ...
        @step
        def on_cancel(self, ctx): ...


def a_hook_that_is_no_method():
    class Culprit(Job[dict]):
        on_cancel = "undo"

        def perform(self, ctx): ...


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (a_hook_that_is_a_coroutine, "'on_cancel' as a coroutine"),
        (a_hook_that_is_a_step, "'on_cancel', which is no plain method"),
        (a_hook_that_is_no_method, "'on_cancel', which is no plain method"),
        (a_coroutine, "'start' as a coroutine"),
        (a_generator, "'start' as a coroutine or generator"),
        (a_job_that_is_a_coroutine, "'perform' as a coroutine"),
        (steps_and_perform, "perform"),
        (perform_in_an_fsm, "derive it from Job"),
        (a_step_named_perform_in_an_fsm, "derive it from Job"),
        (a_step_in_a_job, "start"),
        (a_step_and_perform_in_a_job, "extra"),
        (a_step_inherited_by_a_job, "extra"),
        (two_steps_of_one_name, "'start' twice"),
        (an_initial_that_is_no_step, "'begin', which is no step; its steps are start"),
        (no_step_named_start, "'start', which is no step; its steps are begin"),
        (an_initial_that_is_a_plain_method, "'helper', which is no step"),
        (a_step_overridden_by_a_plain_method, "'start', which is no step"),
        (a_step_that_hides_new, "'new'"),
        (a_step_that_hides_handle, "'handle'"),
        (a_name_without_steps, "'nothing'"),
        (a_state_class_that_is_no_object, "int cannot be a state class"),
        (a_state_keyword_that_is_no_object, "list cannot be a state class"),
    ],
)
def test_a_class_that_makes_no_sense_is_refused_by_its_name(make: Callable[[], None], complaint: str):
    with pytest.raises(DefinitionError) as refusal:
        make()
    assert "Culprit" in str(refusal.value)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    "keywords",
    [
        {"version": 0},
        {"version": -1},
        {"version": 2**31},
        {"version": 10**5000},
        {"version": True},
        {"version": 1.0},
        {"version": "1"},
        {"version": None},
        {"queue": ""},
        {"queue": None},
        {"queue": "x" * 256},
        {"queue": "a\nb"},
        {"queue": "a\0b"},
        {"queue": "\ud800"},
        {"name": ""},
        {"name": 7},
        {"name": "x" * 256},
        {"name": "a\tb"},
        {"max_crashes": 0},
        {"max_crashes": -1},
        {"max_crashes": True},
        {"max_crashes": 1.5},
        {"max_crashes": "20"},
        {"max_crashes": 2**31},
        {"initial": ""},
        {"initial": None},
        {"initial": ["start"]},
        {"initial": Checkout.start},
    ],
    ids=lambda keywords: (
        "-".join(f"{key}={str(value)[:9]!r}" for key, value in keywords.items() if key != "version")
        or str(type(keywords["version"]).__name__)
    ),
)
def test_a_class_keyword_out_of_range_is_refused_by_name(keywords: dict[str, Any]):
    with pytest.raises(DefinitionError) as refusal:

        class Culprit(FSM[dict], **keywords):
            @step
            def start(self, ctx): ...

    assert "Culprit" in str(refusal.value)
    assert len(str(refusal.value)) < 500
    (keyword,) = keywords
    assert ("starts at" if keyword == "initial" else keyword) in str(refusal.value)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", None, 2**31])
def test_max_attempts_out_of_range_is_refused(limit: Any):
    with pytest.raises(DefinitionError, match="Culprit has max_attempts="):

        class Culprit(Job[dict], max_attempts=limit):
            def perform(self, ctx): ...


def test_a_keyword_nobody_knows_is_refused():
    with pytest.raises(TypeError, match="Culprit"):

        class Culprit(FSM[dict], nmae="typo"):
            @step
            def start(self, ctx): ...


def test_only_a_method_can_be_a_step():
    with pytest.raises(DefinitionError, match="42"):
        step(42)


BAD_TIMEOUTS = [0, -1, timedelta(0), timedelta(-1), "30s", True, float("nan"), 1e18, [30]]


@pytest.mark.parametrize("value", BAD_TIMEOUTS)
def test_a_timeout_that_is_none_is_refused_where_it_is_written(value: Any):
    with pytest.raises(DefinitionError, match=r"^timeout"):
        step(timeout=value)(lambda self, ctx: Done())
    with pytest.raises(DefinitionError, match=r"Culprit.*timeout"):

        class Culprit(Job[dict], timeout=value):
            def perform(self, ctx): ...


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_transactional_is_true_or_false(value: Any):
    with pytest.raises(DefinitionError, match=r"^transactional=.*give True or False"):
        step(transactional=value)(lambda self, ctx: Done())
    with pytest.raises(DefinitionError, match=r"Culprit.*transactional="):

        class Culprit(Job[dict], transactional=value):
            def perform(self, ctx): ...


class Hurried(FSM[dict]):
    @step(timeout=1.5)
    def start(self, ctx): ...

    @step
    def unhurried(self, ctx): ...


class Quick(Job[dict], timeout=timedelta(minutes=1)):
    def perform(self, ctx): ...


class Quicker(Quick):
    """Takes its timeout from its base."""


class AtLeisure(Quick, timeout=None): ...


def test_a_step_knows_how_long_it_may_take():
    assert Hurried.start.timeout == timedelta(seconds=1.5)
    assert Hurried.unhurried.timeout is None
    assert [definition(job).steps["perform"].timeout for job in (Quick, Quicker, AtLeisure)] == [
        *(timedelta(minutes=1), timedelta(minutes=1)),
        None,
    ]


# Abstract bases, and what subclasses take from them.


class Template(FSM[Order], queue="slow", initial="begin", max_crashes=None):
    """No steps: a base."""


class Concrete(Template, name="concrete"):
    @step
    def begin(self, ctx): ...


class Faster(Concrete, name="faster", queue="fast", version=2, max_crashes=3): ...


class RareJob(Job[dict], max_attempts=2, queue="rare"):
    """No perform: a base."""


class Rarest(RareJob):
    def perform(self, ctx): ...


class Patient(Rarest, max_attempts=9): ...


@pytest.mark.parametrize("base", [FSM, Job, Template, RareJob])
def test_a_class_without_steps_is_a_base_and_makes_no_instances(base: type[FSM[Any]]):
    with pytest.raises(DefinitionError, match=f"{base.__name__} defines no steps"):
        base.new({})


def test_keywords_are_inherited_and_can_be_overridden():
    concrete, faster = definition(Concrete), definition(Faster)
    assert (concrete.queue, concrete.initial, concrete.max_crashes, concrete.version) == ("slow", "begin", None, 1)
    assert (faster.queue, faster.initial, faster.max_crashes, faster.version) == ("fast", "begin", 3, 2)


def test_the_defaults_are_those_of_the_contract():
    plain = definition(Plain)
    assert (plain.version, plain.queue, plain.initial, plain.max_crashes) == (1, "default", "start", 20)
    assert Mail._keywords.max_attempts == 20


def test_max_attempts_is_inherited_and_can_be_overridden():
    assert (Rarest._keywords.max_attempts, Patient._keywords.max_attempts) == (2, 9)
    assert definition(Rarest).queue == "rare"


def test_name_and_version_are_not_inherited():
    class Child(Checkout): ...

    assert definition(Child).name == f"{__name__}.test_name_and_version_are_not_inherited.<locals>.Child"
    assert definition(Child).version == 1


def test_the_default_name_is_the_dotted_path():
    assert definition(Rarest).name == f"{__name__}.Rarest"


def test_a_job_has_one_step_named_perform_whatever_initial_says():
    class Sub(Mail, initial="begin"): ...

    assert list(definition(Sub).steps) == ["perform"]
    assert Sub.new().step == "perform"


def test_a_step_of_a_base_can_be_overridden_and_keeps_its_place():
    class Gentle(Checkout):
        @step
        def ship(self, ctx: Context[Order]) -> Outcome[Order]:
            return Done({"gently": True, "as before": super().ship(ctx) == Next("finish", Order(1))})

    assert list(definition(Gentle).steps) == ["start", "ship", "finish"]
    assert Gentle().ship(context(Order(1))) == Done({"gently": True, "as before": True})
    assert definition(Gentle).steps["ship"] is Gentle.ship
    assert definition(Checkout).steps["ship"] is Checkout.ship


def test_steps_come_from_mixins_too():
    class Ending:
        @step
        def finish(self, ctx: Context[dict]) -> Outcome[dict]:
            return Done()

    class Mixed(Ending, FSM[dict]):
        @step
        def start(self, ctx: Context[dict]) -> Outcome[dict]:
            return Next(self.finish)

    assert set(definition(Mixed).steps) == {"start", "finish"}
    assert definition(Mixed).resolve(Ending.finish, Mixed) == "finish"


def test_a_machine_may_be_an_abc():
    class Base(FSM[dict], ABC):
        @step
        def start(self, ctx: Context[dict]) -> Outcome[dict]:
            return Done(self.result())

        @abstractmethod
        def result(self) -> dict: ...

    class Real(Base, name="real"):
        def result(self) -> dict:
            return {"ok": True}

    assert Real().start(context({})) == Done({"ok": True})
    with pytest.raises(TypeError, match="abstract"):
        Base()


# The state class.


class Nested(FSM):
    @frozen
    class State:
        size: int

    @step
    def start(self, ctx): ...


class ByKeyword(FSM, state=Order):
    @step
    def start(self, ctx): ...


class Middle(FSM[T], Generic[T]):
    @step
    def start(self, ctx): ...


class Crossed(Middle[U], Generic[T, U]): ...


class Wide(Crossed[int, Order]): ...


class TypedState(TypedDict):
    size: int


@dataclass
class DataState:
    size: int


def machine(base: Any, **keywords: Any) -> type[FSM[Any]]:
    class Made(base, **keywords):
        @step
        def start(self, ctx): ...

    return Made


@pytest.mark.parametrize(
    ("made", "state"),
    [
        (Checkout, Order),
        (ByKeyword, Order),
        (Nested, Nested.State),
        (Plain, dict),
        (machine(FSM), dict),
        (machine(FSM[Any]), dict),
        (machine(FSM[TypedState]), TypedState),
        (machine(FSM[DataState]), DataState),
        (machine(FSM[dict[str, int]]), dict[str, int]),
        (machine(FSM[Order], state=TypedState), Order),
        (machine(Middle[Order]), Order),
        (machine(Crossed[int, Order]), Order),
        (Wide, Order),
        (machine(Wide), Order),
        (Middle, dict),
        (machine(Checkout), Order),
        (machine(ByKeyword), Order),
        (machine(ByKeyword, state=TypedState), TypedState),
        (machine(Nested), Nested.State),
        (machine(Nested, state=Order), Order),
        (Rarest, dict),
    ],
)
def test_the_state_class_is_the_generic_argument_else_the_keyword_else_the_nested_class_else_dict(
    made: type[FSM[Any]], state: Any
):
    assert definition(made).codec.state_class == state


def test_a_job_takes_its_state_class_the_same_ways():
    class Typed(Job[Order]):
        def perform(self, ctx): ...

    class Keyword(Job, state=Order):
        def perform(self, ctx): ...

    class Inside(Job):
        State = Order

        def perform(self, ctx): ...

    assert [definition(job).codec.state_class for job in (Typed, Keyword, Inside)] == [Order] * 3


def test_a_nested_state_that_is_no_class_is_ignored():
    class Odd(FSM):
        State = "a text"

        @step
        def start(self, ctx): ...

    assert definition(Odd).codec.state_class is dict


# Machines that attrs rebuilds.


@frozen
class Carried(Checkout, name="carried", version=2, queue="boats", initial="ship", max_crashes=7):
    carrier: str
    tags: list[str] = field(factory=list)

    @step
    def ship(self, ctx: Context[Order]) -> Outcome[Order]:
        before = super().ship(ctx)
        return Done({"carrier": self.carrier, "before": before.to.name})


@define
class LoudMail(Job[dict], name="loud", max_attempts=3, queue="mail"):
    volume: int = 11

    def perform(self, ctx: Context[dict]) -> dict:
        return {"volume": self.volume}


@dataclass
class DataMachine(FSM[dict], name="data", version=4):
    carrier: str

    @step
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        return Done({"carrier": self.carrier})


def test_a_slotted_machine_keeps_its_keywords():
    mine = definition(Carried)
    assert (mine.name, mine.version, mine.queue, mine.initial, mine.max_crashes) == ("carried", 2, "boats", "ship", 7)
    assert definition(LoudMail).name == "loud"
    assert LoudMail._keywords.max_attempts == 3
    assert definition(DataMachine).version == 4


def test_the_steps_of_a_slotted_machine_belong_to_the_rebuilt_class():
    assert Carried.ship.owner is Carried
    assert definition(Carried).resolve(Carried.ship, Carried) == "ship"
    assert definition(Carried).resolve(Carried("x").ship, Carried) == "ship"


def test_collaborators_are_constructor_arguments_and_super_works():
    assert Carried("boat").ship(context(Order(1))) == Done({"carrier": "boat", "before": "finish"})


def test_a_slotted_subclass_inherits_and_overrides_keywords():
    @frozen
    class Slower(Carried, name="slower", max_crashes=None):
        days: int = 9

    mine = definition(Slower)
    assert (mine.name, mine.version, mine.queue, mine.initial, mine.max_crashes) == ("slower", 1, "boats", "ship", None)


def test_machines_with_collaborators_run(harness: Callable[..., Harness]):
    durable = harness(Carried("boat"), LoudMail(), DataMachine("cart"))
    ids = [durable.insert(new) for new in (Carried.new(Order(1)), LoudMail.new(), DataMachine.new())]
    assert durable.drain() == {"done": 3}
    assert [durable.get(each).result for each in ids] == [
        {"carrier": "boat", "before": "finish"},
        {"volume": 11},
        {"carrier": "cart"},
    ]


# Steps as values.


def test_a_step_stays_callable_through_the_class_and_through_a_machine():
    ctx = context(Order(1, paid=5))
    machine = Checkout()
    assert machine.finish(ctx) == Checkout.finish(machine, ctx) == Done({"paid": 5})
    assert machine.start(ctx) == Await("paid", then="ship")


def test_a_step_keeps_its_docstring():
    assert Checkout.start.__doc__ == "Wait for the money."


def test_references_to_one_step_are_equal_in_every_spelling():
    bound = Checkout().ship
    assert bound == Checkout.ship == "ship"
    assert "ship" == bound  # noqa: SIM300  the other way round
    assert len({bound, Checkout.ship, "ship"}) == 1
    assert bound != Checkout.start
    assert bound != "start"
    assert bound != 5


def test_outcomes_are_values():
    self = Checkout()
    assert Next(self.ship) == Next("ship") == Next(Checkout.ship)
    assert Next(self.ship, Order(1)) == Next("ship", Order(1), delay=0)
    assert Next("ship") != Next("finish")
    assert Next("ship") != Next("ship", delay=1)
    assert Await("paid", then=self.ship) == Await("paid", "ship", None, timeout=None)
    assert Spawn([Mail], then=self.ship) == Spawn([Mail], "ship")
    assert Retry(delay=2) == Retry(None, delay=2)
    assert Retry() != Retry(delay=2)
    assert Done() == Done({})
    assert Done({"a": 1}) != Done()
    assert Stop("x") == Stop(reason="x")
    assert Done() != Stop("x")


def test_the_attributes_of_outcomes_carry_the_parameter_names():
    following = Next("ship", {"a": 1}, delay=3)
    assert (following.to, following.state, following.delay) == ("ship", {"a": 1}, 3)
    waiting = Await(["x"], "ship", {"a": 1}, timeout=9)
    assert (waiting.names, waiting.then, waiting.state, waiting.timeout) == (["x"], "ship", {"a": 1}, 9)
    spawning = Spawn([Mail], "ship", {"a": 1})
    assert (spawning.children, spawning.then, spawning.state) == ([Mail], "ship", {"a": 1})
    assert (Retry({"a": 1}, delay=3).state, Retry(delay=3).delay) == ({"a": 1}, 3)
    assert (Done({"a": 1}).result, Stop("why").reason) == ({"a": 1}, "why")


@pytest.mark.parametrize("outcome", [Next("a"), Retry(), Await("x", "a"), Spawn([], "a"), Done(), Stop("x")])
def test_outcomes_are_frozen(outcome: Any):
    with pytest.raises(AttributeError):
        outcome.state = {}


class Stranger(FSM[Order], name="stranger"):
    @step
    def ship(self, ctx): ...

    @step
    def start(self, ctx): ...


class Heir(Checkout, name="heir"):
    @step
    def ship(self, ctx): ...

    @step
    def more(self, ctx): ...


def resolved(machine: type[FSM[Any]], target: Any) -> str:
    return definition(machine).resolve(target, machine)


def test_a_target_is_a_reference_or_a_name():
    assert [resolved(Checkout, target) for target in ("ship", Checkout.ship, Checkout().ship)] == ["ship"] * 3


def test_a_reference_to_a_bases_step_means_the_override():
    assert resolved(Heir, Checkout.ship) == resolved(Heir, Heir.ship) == "ship"
    assert resolved(Heir, Checkout.finish) == "finish"


@pytest.mark.parametrize(
    "target",
    [
        Stranger.ship,
        Stranger().ship,
        Heir.ship,
        Heir.more,
        "more",
        "",
        "handle",
        "new",
        None,
        7,
        Checkout,
        len,
        ["ship"],
    ],
    ids=str,
)
def test_anything_else_is_no_target(target: Any):
    with pytest.raises(BadOutcome, match=r"checkout has no step .*; its steps are start, ship, finish"):
        resolved(Checkout, target)


# .new


def test_new_is_a_value():
    assert Checkout.new(Order(1)) == Checkout.new(Order(1)) == Checkout.new({"number": 1})
    assert Checkout.new(Order(1)) != Checkout.new(Order(2))


def test_new_takes_its_defaults_from_the_class():
    assert Checkout.new(Order(42)) == NewInstance(
        fsm="checkout",
        fsm_version=3,
        step="start",
        state='{"number":42,"paid":0}',
        queue="tills",
        priority=0,
        partition_key=None,
        unique_key=None,
        unique_scope=frozenset(),
        max_crashes=20,
        eligible_at=None,
        delay=timedelta(0),
    )


def test_new_takes_every_parameter():
    new = Checkout.new(
        {"number": 42, "paid": 7},
        step=Checkout.finish,
        queue="express",
        priority=-5,
        partition_key="customer:7",
        unique_key="order:42",
        unique_scope=[*LIVE, "done"],
        eligible_at=NOON,
    )
    assert json.loads(new.state) == {"number": 42, "paid": 7}
    assert (new.step, new.queue, new.priority) == ("finish", "express", -5)
    assert (new.partition_key, new.unique_key, new.eligible_at) == ("customer:7", b"order:42", NOON)
    assert new.unique_scope == {*LIVE, Status.DONE}


@pytest.mark.parametrize("target", ["ship", Checkout.ship, Checkout().ship], ids=["name", "class", "machine"])
def test_new_starts_at_any_step(target: Any):
    assert Checkout.new(Order(1), step=target).step == "ship"


@pytest.mark.parametrize(
    ("parameters", "complaint"),
    [
        ({"step": "nope"}, "step: checkout has no step 'nope'; its steps are start, ship, finish"),
        ({"step": ""}, "step:"),
        ({"step": 7}, "step:"),
        ({"step": Stranger.ship}, "step: checkout has no step Stranger.ship"),
        ({"step": Heir.more}, "step:"),
        ({"queue": ""}, "queue:"),
        ({"queue": "x" * 256}, "queue:"),
        ({"queue": 7}, "queue:"),
        ({"queue": "a\nb"}, "queue:"),
        ({"queue": "a\0b"}, "queue:"),
        ({"queue": "\udc80"}, "queue:"),
        ({"priority": 2**15}, "priority:"),
        ({"priority": -(2**15) - 1}, "priority:"),
        ({"priority": 10**5000}, "priority:"),
        ({"priority": True}, "priority:"),
        ({"priority": 1.0}, "priority:"),
        ({"priority": "1"}, "priority:"),
        ({"priority": None}, "priority:"),
        ({"partition_key": ""}, "partition_key:"),
        ({"partition_key": "x" * 1025}, "partition_key:"),
        ({"partition_key": "ü" * 513}, "partition_key:"),
        ({"partition_key": "a\0b"}, "partition_key:"),
        ({"partition_key": "\ud800"}, "partition_key:"),
        ({"partition_key": b"bytes"}, "partition_key:"),
        ({"partition_key": 7}, "partition_key:"),
        ({"unique_key": ""}, "unique_key:"),
        ({"unique_key": b""}, "unique_key:"),
        ({"unique_key": "x" * 1025}, "unique_key:"),
        ({"unique_key": b"x" * 1025}, "unique_key:"),
        ({"unique_key": "a\0b"}, "unique_key:"),
        ({"unique_key": "\ud800"}, "unique_key:"),
        ({"unique_key": 7}, "unique_key:"),
        ({"unique_key": bytearray(b"x")}, "unique_key:"),
        ({"eligible_at": datetime(2030, 1, 1)}, "eligible_at: 2030-01-01T00:00:00 has no time zone"),  # noqa: DTZ001
        ({"schedule_at": datetime(2030, 1, 1)}, "schedule_at: 2030-01-01T00:00:00 has no time zone"),  # noqa: DTZ001
        ({"eligible_at": NOON, "schedule_at": datetime(2030, 1, 1)}, "schedule_at:"),  # noqa: DTZ001
        ({"eligible_at": "2030-01-01"}, "eligible_at:"),
        ({"eligible_at": 1.0}, "eligible_at:"),
        ({"schedule_at": NOON.date()}, "schedule_at:"),
        ({"schedule_at": timedelta(1)}, "schedule_at:"),
        ({"schedule_in": -1}, "schedule_in:"),
        ({"schedule_in": timedelta(microseconds=-1)}, "schedule_in:"),
        ({"schedule_in": float("nan")}, "schedule_in: nan"),
        ({"schedule_in": float("inf")}, "schedule_in: inf"),
        ({"schedule_in": True}, "schedule_in: True"),
        ({"schedule_in": "5s"}, "schedule_in: '5s'"),
        ({"schedule_in": timedelta(days=36_526)}, "schedule_in:"),
        ({"schedule_in": 10**400}, "schedule_in:"),
        ({"schedule_in": 10**5000}, "schedule_in:"),
        ({"schedule_in": NOON}, "schedule_in:"),
        ({"eligible_at": NOON, "schedule_in": -1}, "schedule_in:"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else next(iter(value)),
)
def test_a_parameter_out_of_range_is_refused_by_name(parameters: dict[str, Any], complaint: str):
    with pytest.raises(InvalidInstance) as refusal:
        Checkout.new(Order(1), **parameters)
    assert str(refusal.value).startswith(complaint)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("parameters", "attribute", "value"),
    [
        ({"priority": 2**15 - 1}, "priority", 2**15 - 1),
        ({"priority": -(2**15)}, "priority", -(2**15)),
        ({"queue": "x" * 255}, "queue", "x" * 255),
        ({"partition_key": "x" * 1024}, "partition_key", "x" * 1024),
        ({"unique_key": b"\0\xff"}, "unique_key", b"\0\xff"),
        ({"unique_key": "ü"}, "unique_key", "ü".encode()),
        ({"schedule_in": 0}, "delay", timedelta(0)),
        ({"schedule_in": 1.5}, "delay", timedelta(seconds=1.5)),
        ({"schedule_in": timedelta(days=36_525)}, "delay", timedelta(days=36_525)),
        ({"eligible_at": datetime.max.replace(tzinfo=UTC)}, "eligible_at", datetime.max.replace(tzinfo=UTC)),
        ({"eligible_at": datetime.min.replace(tzinfo=UTC)}, "eligible_at", datetime.min.replace(tzinfo=UTC)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_edges_are_still_taken(
    harness: Callable[..., Harness], parameters: dict[str, Any], attribute: str, value: Any
):
    new = Checkout.new(Order(1), **parameters)
    assert getattr(new, attribute) == value
    durable = harness()
    stored = durable.get(durable.insert(new))
    if attribute != "delay":
        assert getattr(stored, attribute) == value


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        (None, "state.number: missing"),
        ({}, "state.number: missing"),
        ({"number": "1"}, "state.number: expected an integer"),
        ({"number": 1, "payed": 2}, "state.payed: no such field; did you mean 'paid'?"),
        (Order("1"), "state.number: expected an integer"),  # type: ignore[arg-type]
        (Mail, "state: expected"),
        ([1], "state: expected"),
        ("text", "state: expected"),
        (7, "state: expected"),
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused_naming_the_field(state: Any, complaint: str):
    with pytest.raises(InvalidState) as refusal:
        Checkout.new(state)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("value", [float("nan"), object(), "a\0b", "\ud800", {1: 2}])
def test_a_state_that_cannot_be_stored_is_refused_with_the_path(value: Any):
    with pytest.raises(InvalidState, match=r"^state\.deep\[0\]"):
        Plain.new({"deep": [value]})


def test_a_state_left_out_takes_the_defaults():
    class Easy(FSM, state=TypedState):
        @frozen
        class State: ...

        @step
        def start(self, ctx): ...

    @frozen
    class Defaults:
        size: int = 3

    assert machine(FSM[Defaults]).new().state == '{"size":3}'
    assert Plain.new().state == "{}"
    with pytest.raises(InvalidState, match="size"):
        Easy.new()


def test_changing_the_state_after_new_changes_nothing():
    state = {"a": [1]}
    new = Plain.new(state)
    state["a"].append(2)
    assert new.state == '{"a":[1]}'


# unique_scope


def subsets(items: tuple[str, ...]) -> list[list[str]]:
    return [[item for bit, item in enumerate(items) if mask >> bit & 1] for mask in range(2 ** len(items))]


ENDS = ("done", "failed")


@pytest.mark.parametrize("ends", subsets(ENDS), ids=str)
def test_every_superset_of_the_four_live_statuses_is_a_scope(ends: list[str]):
    assert Plain.new(unique_key="k", unique_scope=[*LIVE, *ends]).unique_scope == {*LIVE, *ends}


def test_an_empty_scope_is_taken_and_the_default_with_a_key_is_live():
    assert Plain.new(unique_key="k", unique_scope=()).unique_scope == frozenset()
    assert Plain.new(unique_key="k").unique_scope == set(LIVE)
    assert Plain.new().unique_scope == frozenset()
    assert Plain.new(unique_key="k", unique_scope=[*Status]).unique_scope == {*Status}


HOLED = [(live, ends) for live in subsets(LIVE)[:-1] for ends in subsets(ENDS) if live or ends]


@pytest.mark.parametrize(("live", "ends"), HOLED, ids=str)
def test_every_scope_with_a_hole_is_refused_with_the_reason(live: list[str], ends: list[str]):
    with pytest.raises(InvalidInstance, match=r"unique_scope: .* lacks .* wedge the engine") as refusal:
        Plain.new(unique_key="k", unique_scope=[*live, *ends])
    for missing in set(LIVE) - set(live):
        assert missing in str(refusal.value)


@pytest.mark.parametrize("scope", ["runnable", [*LIVE, "nonsense"], [*LIVE, None], 7, [[]]], ids=str)
def test_a_scope_that_is_no_collection_of_statuses_is_refused(scope: Any):
    with pytest.raises(InvalidInstance, match="unique_scope"):
        Plain.new(unique_key="k", unique_scope=scope)


# When it is due.

LATER = NOON + timedelta(hours=1)


def due(harness: Callable[..., Harness], **when: Any) -> datetime:
    durable = harness()
    return durable.get(durable.insert(Plain.new(**when))).eligible_at


@pytest.mark.parametrize(
    ("when", "at"),
    [
        ({"eligible_at": NOON, "schedule_at": LATER, "schedule_in": 5}, NOON),
        ({"eligible_at": NOON, "schedule_at": LATER}, NOON),
        ({"eligible_at": NOON, "schedule_in": 5}, NOON),
        ({"schedule_at": LATER, "schedule_in": 5}, LATER),
        ({"schedule_at": LATER}, LATER),
        ({"eligible_at": NOON.astimezone(timezone(timedelta(hours=-7)))}, NOON),
    ],
)
def test_eligible_at_comes_before_schedule_at_before_schedule_in(
    harness: Callable[..., Harness], when: dict[str, Any], at: datetime
):
    assert due(harness, **when) == at


@pytest.mark.parametrize("delay", [None, 0, 1.5, timedelta(days=36_525)])
def test_a_relative_time_is_counted_by_the_databases_clock(
    harness: Callable[..., Harness], conn: Connection, delay: Any
):
    ((before,),) = conn.execute("select clock_timestamp()").fetchall()
    eligible_at = due(harness, schedule_in=delay)
    ((after,),) = conn.execute("select clock_timestamp()").fetchall()
    assert before <= eligible_at - to_timedelta(delay or 0) <= after


@pytest.mark.parametrize(
    "instant",
    [
        datetime(9999, 12, 31, 23, 30, tzinfo=timezone(timedelta(hours=-1))),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
    ],
    ids=["9999", "1"],
)
def test_an_instant_that_leaves_the_calendar_in_utc_is_refused(instant: datetime):
    with pytest.raises(InvalidInstance, match=r"schedule_at: .* outside the years 1 to 9999"):
        Plain.new(schedule_at=instant)


def test_a_definition_is_a_value():
    assert isinstance(definition(Checkout), Definition)
    with pytest.raises(TypeError):
        definition(Checkout).steps["extra"] = Checkout.ship  # type: ignore[index]


@pytest.mark.parametrize("attempt", range(12))
def test_a_job_waits_twice_as_long_each_time_up_to_five_minutes(attempt: int):
    assert Mail().backoff(attempt) == min(1 * 2**attempt, 300)


def test_a_backoff_never_overflows():
    assert Mail().backoff(10**9) == 300
