"""`validate`: a machine's own word on its states, where they are given, where children are born, and at each load."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve, frozen
from support import row

from gendurable import FSM, Context, Done, Job, Next, Outcome, Retry, Spawn, step
from gendurable.core.fsm import definition
from gendurable.db.connection import Connection
from gendurable.errors import DefinitionError, InvalidState
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]
State = dict[str, Any]


@frozen
class Order:
    number: int
    lines: tuple[str, ...] = ()


class Base(FSM[Order]):
    most = 3

    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        return Done({"number": ctx.state.number, "lines": ctx.state.lines})


def judge(order: Order, most: int = 3) -> Order | None:
    if order.number < 0:
        raise ValueError("orders count from zero")
    return evolve(order, lines=tuple(sorted(order.lines))) if len(order.lines) <= most else None


class AsStatic(Base, name="static"):
    @staticmethod
    def validate(state: Order) -> Order | None:
        return judge(state)


class AsClass(Base, name="class"):
    @classmethod
    def validate(cls, state: Order) -> Order | None:
        return judge(state, cls.most)


class AsMethod(Base, name="method"):
    def validate(self, state: Order) -> Order | None:
        return judge(state, self.most)


class AsFunction(Base, name="function"):
    def validate(state: Order) -> Order | None:  # type: ignore[misc]  # noqa: N805  some will write it
        return judge(state)


class Inherited(AsMethod, name="inherited", version=2): ...


class Mixin:
    def validate(self, state: Order) -> Order | None:
        return judge(state)


class Mixed(Mixin, Base, name="mixed"): ...


@frozen
class Slotted(AsClass, name="slotted"):
    collaborator: str = "x"

    @classmethod
    def validate(cls, state: Order) -> Order | None:
        return super().validate(state)


FORMS = [AsStatic, AsClass, AsMethod, AsFunction, Inherited, Mixed, Slotted]


@pytest.mark.parametrize("machine", FORMS)
def test_a_hook_in_any_form_judges_what_is_given_and_what_is_loaded(
    machine: type[FSM[Order]], harness: MakeHarness, conn: Connection
):
    with pytest.raises(InvalidState, match=r"^state: refused by validate: ValueError: orders count from zero$"):
        machine.new(Order(-1))
    durable = harness(machine)
    id = durable.insert(machine.new(Order(1, ("b", "a"))))
    assert row(conn, id)["state"] == {"number": 1, "lines": ["a", "b"]}
    conn.execute("""update gen_durable set state = '{"number": 2, "lines": ["d", "c"]}' where id = %s""", [id])
    bad = durable.insert(machine.new({"number": 5}))
    conn.execute("""update gen_durable set state = '{"number": -5}' where id = %s""", [bad])
    assert durable.drain() == {"done": 1, "stop": 1}
    assert durable.get(id).result == {"number": 2, "lines": ["c", "d"]}
    assert durable.get(bad).last_error == "InvalidState: state: refused by validate: ValueError: orders count from zero"


@pytest.mark.parametrize("machine", [AsClass, AsMethod])
def test_a_hook_that_returns_nothing_leaves_the_state_as_it_is(machine: type[FSM[Order]]):
    assert machine.new(Order(1, ("b", "a", "d", "c"))).state == '{"number":1,"lines":["b","a","d","c"]}'


def test_a_machine_without_a_hook_has_none():
    assert not definition(Base).validates


def test_a_step_may_be_named_validate(harness: MakeHarness):
    class Steps(FSM[State], name="steps", initial="validate"):
        @step
        def validate(self, ctx: Context[State]) -> Outcome[State]:
            return Done({"ok": True})

    durable = harness(Steps)
    id = durable.insert(Steps.new())
    durable.drain()
    assert durable.get(id).result == {"ok": True}


def test_a_hook_may_be_left_to_subclasses():
    class Contract(FSM[State], ABC):
        @classmethod
        @abstractmethod
        def validate(cls, state: State) -> None: ...

    class Kept(Contract, name="kept"):
        @classmethod
        def validate(cls, state: State) -> None:
            raise KeyError("no")

        @step
        def start(self, ctx: Context[State]) -> Outcome[State]:
            return Done()

    with pytest.raises(InvalidState, match="KeyError: 'no'"):
        Kept.new()


@pytest.mark.parametrize("hook", [5, True, lambda: None, lambda self, state, more: None, staticmethod(lambda: None)])
def test_what_cannot_judge_a_state_is_refused_when_the_class_is_made(hook: Any):
    with pytest.raises(DefinitionError, match=r"Culprit has 'validate', which is no check of states"):

        class Culprit(Base):
            validate = hook


def test_a_coroutine_judges_nothing():
    with pytest.raises(DefinitionError, match="'validate' as a coroutine"):

        class Culprit(Base):
            @classmethod
            async def validate(cls, state: Order) -> None: ...


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (5, "expected .*Order or a mapping, got 5"),
        (False, "expected .*Order or a mapping, got False"),
        ({"number": "many"}, "number"),
        ({"number": 1, "nmuber": 2}, "nmuber"),
        (Order("many"), "number"),  # type: ignore[arg-type]
    ],
)
def test_what_a_hook_returns_must_be_a_state(answer: Any, complaint: str):
    class Culprit(Base, name="culprit"):
        @staticmethod
        def validate(state: Order) -> Any:
            return answer

    with pytest.raises(InvalidState, match=complaint):
        Culprit.new(Order(1))


def test_a_hook_may_return_a_mapping(harness: MakeHarness):
    class Mapped(Base, name="mapped"):
        @staticmethod
        def validate(state: Order) -> State:
            return {"number": state.number % 10, "lines": ["x"]}

    durable = harness(Mapped)
    id = durable.insert(Mapped.new(Order(12)))
    durable.drain()
    assert durable.get(id).result == {"number": 2, "lines": ["x"]}


def test_an_invalid_state_that_a_hook_raises_stands_as_it_is():
    class Precise(Base, name="precise"):
        @staticmethod
        def validate(state: Order) -> None:
            raise InvalidState("number: this one is cursed")

    with pytest.raises(InvalidState, match=r"^number: this one is cursed$"):
        Precise.new(Order(13))


# Children, and what a handler sees.


class Parent(FSM[State], name="parent"):
    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return Spawn([AsStatic.new({"number": number}) for number in ctx.state["numbers"]], then=self.join)

    @step
    def join(self, ctx: Context[State]) -> Outcome[State]:
        return Done({"born": len(ctx.joined)})


def test_a_child_that_is_refused_is_an_error_of_its_parents_step_and_no_sibling_is_born(
    harness: MakeHarness, conn: Connection
):
    durable = harness(Parent, AsStatic)
    id = durable.insert(Parent.new({"numbers": [1, -1]}))
    assert durable.drain() == {"stop": 1}
    assert str(durable.get(id).last_error).startswith("InvalidState: state: refused by validate")
    assert conn.execute("select count(*) from gen_durable").fetchone() == (1,)


def test_a_bare_class_whose_default_state_is_refused_is_a_bad_outcome(harness: MakeHarness):
    class Picky(Job[State], name="picky"):
        @staticmethod
        def validate(state: State) -> None:
            raise ValueError("never")

        def perform(self, ctx: Context[State]) -> None: ...

    class Spawner(FSM[State], name="spawner"):
        @step
        def start(self, ctx: Context[State]) -> Outcome[State]:
            return Spawn([Picky], then=self.start)

    durable = harness(Spawner, Picky)
    id = durable.insert(Spawner.new())
    durable.drain()
    assert durable.get(id).last_error == ("BadOutcome: Spawn child 0: state: refused by validate: ValueError: never")


def test_each_step_is_given_a_state_that_was_judged(harness: MakeHarness):
    class Counting(FSM[State], name="counting"):
        @staticmethod
        def validate(state: State) -> None:
            if state["n"] > 2:
                raise ValueError("too far")

        @step
        def start(self, ctx: Context[State]) -> Outcome[State]:
            return Next(self.start, {"n": ctx.state["n"] + 1})

    durable = harness(Counting)
    id = durable.insert(Counting.new({"n": 0}))
    assert durable.drain() == {"next": 3, "stop": 1}
    assert (durable.get(id).status, durable.get(id).state) == ("failed", {"n": 3})
    assert durable.get(id).last_error == "InvalidState: state: refused by validate: ValueError: too far"


def test_the_handler_sees_the_state_as_it_was_judged(harness: MakeHarness):
    class Handling(FSM[State], name="handling"):
        @staticmethod
        def validate(state: State) -> State:
            return {"n": state["n"], "judged": True}

        @step
        def start(self, ctx: Context[State]) -> Outcome[State]:
            raise OSError("disk")

        def handle(self, error: Exception, ctx: Context[State]) -> Outcome[State]:
            return Done(ctx.state) if ctx.attempt else Retry()

    durable = harness(Handling)
    id = durable.insert(Handling.new({"n": 1}))
    durable.drain()
    assert durable.get(id).result == {"n": 1, "judged": True}
