"""Parent tasks and sequences: what they may return, whose results they see, and how they fail."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import pytest
from attrs import frozen
from support import row

from gendurable import FSM, Again, Context, Done, Job, Outcome, Registry, Retry, RetryPolicy, Stop, step
from gendurable.core.fsm import definition
from gendurable.db.connection import Connection
from gendurable.errors import DefinitionError, InvalidState
from gendurable.tasks import Children, ParentTask, Progress, sequence
from gendurable.testing import Harness, context

MakeHarness = Callable[..., Harness]
State = dict[str, Any]
Result = Mapping[str, Any]


class Leaf(Job[State], name="leaf", max_attempts=1):
    """Gives back what it was given, or fails with it."""

    def perform(self, ctx: Context[State]) -> Result:
        if "error" in ctx.state:
            raise ValueError(ctx.state["error"])
        return ctx.state


def leaves(*states: State) -> list[Any]:
    return [Leaf.new(state) for state in states]


class Family(ParentTask[State], name="family"):
    """Returns what it was told to; remembers what it was shown."""

    def __init__(self, *words: Any, final: Any = None) -> None:
        self.words = list(words)
        self.final = final
        self.shown: list[tuple[Any, list[str]]] = []

    def run(self, ctx: Context[State]) -> Any:
        word = self.words.pop(0)
        return word(ctx) if callable(word) and not isinstance(word, type) else word

    def finalize(self, ctx: Context[State], output: Any, results: Sequence[Any]) -> Any:
        self.shown.append((output, [child.status for child in ctx.joined]))
        if self.final is None:
            return super().finalize(ctx, output, results)
        return self.final(ctx, output, results)


def run(harness: MakeHarness, task: Family, given: State | None = None) -> Any:
    durable = harness(task, Leaf)
    id = durable.insert(Family.new(given))
    durable.drain()
    return durable.get(id)


# What run and finalize are shown.


def test_both_are_shown_the_input_as_their_state_and_results_in_order(harness: MakeHarness):
    seen: list[Any] = []

    def start(ctx: Context[State]) -> Children:
        seen.append(ctx.state)
        return Children(["any", "JSON"], leaves({"n": 0}, {"n": 1}, {"n": 2}))

    def final(ctx: Context[State], output: Any, results: Sequence[Any]) -> Result:
        seen.append((ctx.state, output, list(results), len(results), results[-1], results[:2]))
        return {"sum": sum(result["n"] for result in results)}

    ended = run(harness, Family(start, final=final), {"for": "me"})
    assert ended.result == {"sum": 3}
    three = [{"n": 0}, {"n": 1}, {"n": 2}]
    assert seen == [{"for": "me"}, ({"for": "me"}, ["any", "JSON"], three, 3, three[2], three[:2])]


def test_the_row_shows_input_and_output(harness: MakeHarness, conn: Connection):
    durable = harness(Family(Children("half", [Leaf.new({}, schedule_in=60)])), Leaf)
    id = durable.insert(Family.new({"n": 1}))
    durable.drain()
    stored = row(conn, id)
    assert (stored["status"], stored["step"]) == ("awaiting_children", "finalize")
    assert stored["state"] == {"input": {"n": 1}, "output": "half", "children": 1}


def test_a_task_is_tested_without_an_engine():
    family = Family(Children("x", [Leaf.new({"n": 1})]), final=lambda ctx, output, results: {output: results[0]["n"]})
    assert family.run(context({})) == Children("x", (Leaf.new({"n": 1}),))
    assert family.finalize(context({}), "x", [{"n": 7}]) == {"x": 7}


@pytest.mark.parametrize(("word", "output"), [(None, None), ({"a": 1}, {"a": 1}), (Children(), None), (Children(5), 5)])
def test_a_parent_may_have_no_children(harness: MakeHarness, word: Any, output: Any):
    assert run(harness, Family(word)).result == {"output": output, "children_outputs": []}


def test_children_may_be_bare_classes_and_any_machine(harness: MakeHarness):
    ended = run(harness, Family(Children(None, [Leaf, Family.new(), Leaf.new({"n": 1})]), Children("inner")))
    inner = {"output": "inner", "children_outputs": []}
    assert ended.result == {"output": None, "children_outputs": [{}, inner, {"n": 1}]}


def test_finalize_may_return_children_again_and_again(harness: MakeHarness):
    def final(ctx: Context[State], output: int, results: Sequence[Any]) -> Any:
        return Children(output + 1, leaves({"n": output})) if output < 5 else {"last": results[0]["n"]}

    family = Family(Children(0), final=final)
    assert run(harness, family).result == {"last": 4}
    assert family.shown == [(0, []), *((output, ["done"]) for output in range(1, 6))]


@pytest.mark.parametrize("value", [5, "text", [], Done({}), Children, object()])
@pytest.mark.parametrize("where", ["run", "finalize"])
def test_anything_else_is_a_bad_outcome(harness: MakeHarness, where: str, value: Any):
    family = Family(value) if where == "run" else Family(None, final=lambda *_: value)
    ended = run(harness, family)
    assert ended.status == "failed"
    assert ended.last_error.startswith(f"BadOutcome: {where} returned ")


def test_what_cannot_be_stored_is_named(harness: MakeHarness):
    assert run(harness, Family(Children({"x": float("nan")}))).last_error.startswith("Unstorable: state.output.x: nan")


def test_a_bad_child_or_option_is_a_bad_outcome(harness: MakeHarness):
    assert run(harness, Family(Children(None, [5]))).last_error.startswith("BadOutcome: Spawn child 0")  # type: ignore[list-item]
    wrong: Any = "panic"
    assert "panic" in run(harness, Family(Children(None, leaves({}), on_failure=wrong))).last_error


def test_stop_retry_and_again_mean_what_they_always_do(harness: MakeHarness):
    assert run(harness, Family(Stop("enough"))).last_error == "enough"
    family = Family(Again({"n": 2}), Retry(), lambda ctx: Children([ctx.state, ctx.attempt]))
    assert run(harness, family, {"n": 1}).result == {"output": [{"n": 2}, 1], "children_outputs": []}


def test_finalize_that_is_repeated_is_shown_the_same_again(harness: MakeHarness):
    words = [Retry(), Again(), Again({"n": 2}), None]

    def final(ctx: Context[State], output: Any, results: Sequence[Any]) -> Any:
        return words.pop(0) or {"state": ctx.state, "output": output, "results": list(results)}

    ended = run(harness, Family(Children("kept", leaves({"leaf": 1})), final=final), {"n": 1})
    assert ended.result == {"state": {"n": 2}, "output": "kept", "results": [{"leaf": 1}]}


# Children that fail.


def test_without_finalize_a_failed_child_fails_its_parent_by_name_once_all_have_ended(
    harness: MakeHarness, conn: Connection
):
    ended = run(harness, Family(Children(1, leaves({"n": 0}, {"error": "one"}, {"error": "two"}, {"n": 3}))))
    ((culprit,),) = conn.execute("select id from gen_durable where child_index = 1").fetchall()
    assert ended.status == "failed"
    assert ended.last_error == f"ChildFailed: child 1 (leaf, instance {culprit}) is failed: ValueError: one"
    statuses = conn.execute("select status::text from gen_durable where parent_id is not null order by id").fetchall()
    assert statuses == [("done",), ("failed",), ("failed",), ("done",)]


def test_finalize_may_look_first_and_go_on_with_what_there_is(harness: MakeHarness):
    def final(ctx: Context[State], output: Any, results: Sequence[Any]) -> Result:
        well = [child.index for child in ctx.joined if child.status == "done"]
        return {"well": [results[place] for place in well], "of": len(results)}

    ended = run(harness, Family(Children(None, leaves({"n": 0}, {"error": "x"}, {"n": 2})), final=final))
    assert ended.result == {"well": [{"n": 0}, {"n": 2}], "of": 3}


def test_no_policy_tries_to_finalize_again_what_has_failed(harness: MakeHarness):
    class Stubborn(Family, name="stubborn", retry=RetryPolicy(9, base=0)): ...

    durable = harness(Stubborn(Children(None, leaves({"error": "x"}))), Leaf)
    id = durable.insert(Stubborn.new())
    assert durable.drain() == {"spawn": 1, "stop": 2}
    assert str(durable.get(id).last_error).startswith("ChildFailed: child 0 (leaf")


def test_fail_fast_cancels_the_rest_and_names_the_culprit(harness: MakeHarness, conn: Connection):
    slow = Leaf.new({}, schedule_in=3600)
    ended = run(harness, Family(Children(None, [slow, *leaves({"error": "x"}), slow], on_failure="fail_fast")))
    assert ended.status == "failed"
    assert ended.last_error.startswith("ChildFailed: child 1 (leaf, instance ")
    assert ended.last_error.endswith("is failed: ValueError: x")
    statuses = conn.execute("select status::text from gen_durable where parent_id is not null order by id").fetchall()
    assert statuses == [("cancelled",), ("failed",), ("cancelled",)]


def test_after_a_timeout_the_unfinished_are_seen_and_missed_only_if_asked_for(harness: MakeHarness):
    def final(ctx: Context[State], output: Any, results: Sequence[Any]) -> Any:
        asked = results[:1] if output else list(results)
        return {"asked": asked, "statuses": [child.status for child in ctx.joined]}

    for output in (True, False):
        durable = harness(
            Family(Children(output, [Leaf, Leaf.new({}, schedule_in=3600)], timeout=60), final=final), Leaf
        )
        id = durable.insert(Family.new())
        durable.drain()
        durable.advance(60)
        durable.drain()
        if output:
            assert durable.get(id).result == {"asked": [{}], "statuses": ["done", "runnable"]}
        else:
            assert str(durable.get(id).last_error).endswith("is runnable")


def test_a_child_that_was_never_born_keeps_its_place(harness: MakeHarness):
    durable = harness(Leaf)
    durable.insert(Leaf.new({}, unique_key="taken", schedule_in=3600))
    children = [Leaf.new({}, unique_key="taken"), Leaf.new({"n": 1})]
    asked = Family(Children(None, children), final=lambda ctx, output, results: results[1])
    assert run(harness, asked).result == {"n": 1}
    assert run(harness, Family(Children(None, children))).last_error == (
        "ChildFailed: child 0 was not born: its unique key was occupied"
    )


# Errors of the task itself.


def test_an_error_goes_to_the_handler_with_the_progress(harness: MakeHarness):
    class Handled(Family, name="handled"):
        def handle(self, error: Exception, ctx: Context[Progress[State]]) -> Outcome[Progress[State]]:
            return Done({"error": str(error), "input": ctx.state.input, "output": ctx.state.output, "step": ctx.step})

    def broken(*_: Any) -> Any:
        raise OSError("disk")

    for task, output, where in (
        (Handled(broken), None, "run"),
        (Handled(Children("half"), final=broken), "half", "finalize"),
    ):
        durable = harness(task)
        id = durable.insert(Handled.new({"n": 1}))
        durable.drain()
        assert durable.get(id).result == {"error": "disk", "input": {"n": 1}, "output": output, "step": where}


def test_a_policy_retries_run_and_finalize(harness: MakeHarness):
    class Flaky(ParentTask[State], name="flaky", retry=RetryPolicy(2, base=0)):
        def run(self, ctx: Context[State]) -> Children:
            if not ctx.attempt:
                raise OSError("run")
            return Children(ctx.last_error)

        def finalize(self, ctx: Context[State], output: Any, results: Sequence[Any]) -> Result:
            if not ctx.attempt:
                raise OSError("finalize")
            return {"errors": [output, ctx.last_error]}

    durable = harness(Flaky)
    id = durable.insert(Flaky.new())
    assert durable.drain() == {"retry": 2, "spawn": 1, "done": 1}
    assert durable.get(id).result == {"errors": ["OSError: run", "OSError: finalize"]}


# Definitions.


@frozen
class Order:
    number: int


class Note(TypedDict):
    text: str


class Typed(ParentTask[Order], name="typed", version=2, queue="slow"):
    def run(self, ctx: Context[Order]) -> Children:
        return Children(ctx.state.number + 1)


class OfDicts(ParentTask[Note], name="notes"):
    def run(self, ctx: Context[Note]) -> Children:
        return Children(ctx.state["text"])


class Nested(ParentTask[Any], name="nested"):
    @frozen
    class State:
        number: int = 4

    def run(self, ctx: Context[Any]) -> Children:
        return Children(ctx.state.number)


class Heir(Typed, name="heir"): ...


@frozen
class WithCollaborator(ParentTask[Order], name="collaborator"):
    more: int = 10

    def run(self, ctx: Context[Order]) -> Children:
        return Children(ctx.state.number + self.more)


@pytest.mark.parametrize(
    ("machine", "given", "output"),
    [
        (Typed, Order(1), 2),
        (Typed, {"number": 1}, 2),
        (OfDicts, {"text": "hi"}, "hi"),
        (Nested, None, 4),
        (Heir, Order(7), 8),
        (WithCollaborator, Order(1), 11),
    ],
)
def test_the_input_is_of_the_class_that_the_task_names(harness: MakeHarness, machine: Any, given: Any, output: Any):
    durable = harness(machine)
    id = durable.insert(machine.new(given))
    durable.drain()
    assert durable.get(id).result == {"output": output, "children_outputs": []}


@pytest.mark.parametrize(
    ("given", "complaint"), [({"number": "x"}, "number"), ({"nmuber": 1}, "nmuber"), (5, "5"), (None, "number")]
)
def test_input_that_does_not_fit_is_refused(given: Any, complaint: str):
    with pytest.raises(InvalidState, match=complaint):
        Typed.new(given)


def test_new_takes_what_every_machine_takes():
    new = Typed.new(Order(1), priority=3, partition_key="k", unique_key="u", retry=RetryPolicy(2))
    assert (new.fsm, new.fsm_version, new.queue, new.step, new.priority) == ("typed", 2, "slow", "run", 3)


def test_validate_judges_the_input(harness: MakeHarness, conn: Connection):
    class Judged(Typed, name="judged"):
        @classmethod
        def validate(cls, state: Order) -> Order | None:
            if state.number < 0:
                raise ValueError("below zero")
            return Order(state.number % 100)

    with pytest.raises(InvalidState, match="refused by validate: ValueError: below zero"):
        Judged.new(Order(-1))
    durable = harness(Judged)
    id, bad = durable.insert(Judged.new(Order(205))), durable.insert(Judged.new(Order(1)))
    assert row(conn, id)["state"]["input"] == {"number": 5}
    conn.execute("""update gen_durable set state = '{"input": {"number": -1}}' where id = %s""", [bad])
    durable.drain()
    assert durable.get(id).result == {"output": 6, "children_outputs": []}
    assert durable.get(bad).last_error == "InvalidState: state: refused by validate: ValueError: below zero"


def test_a_base_without_run_is_no_machine():
    class Base(ParentTask[State], queue="slow"): ...

    class Concrete(Base, name="concrete"):
        def run(self, ctx: Context[State]) -> None: ...

    for base in (ParentTask, Base):
        with pytest.raises(DefinitionError, match="defines no steps"):
            definition(base)
    assert definition(Concrete).queue == "slow"


def test_a_task_that_makes_no_sense_is_refused_by_its_name():
    with pytest.raises(DefinitionError, match="Culprit is a parent task, but marks extra with @step"):

        class Culprit(ParentTask[State]):
            def run(self, ctx: Context[State]) -> None: ...

            @step
            def extra(self, ctx: Context[Progress[State]]) -> Outcome[Progress[State]]:
                return Done()

    with pytest.raises(DefinitionError, match="Culprit has 'run' as a coroutine"):

        class Culprit(ParentTask[State]):  # type: ignore[no-redef]
            async def run(self, ctx: Context[State]) -> None: ...  # type: ignore[override]

    with pytest.raises(DefinitionError, match="Culprit has 'finalize' as a coroutine"):

        class Culprit(ParentTask[State]):  # type: ignore[no-redef]
            def run(self, ctx: Context[State]) -> None: ...

            async def finalize(self, ctx: Any, output: Any, results: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(DefinitionError, match="Culprit defines perform"):

        class Culprit(ParentTask[State]):  # type: ignore[no-redef]
            def perform(self, ctx: Any) -> None: ...


def test_a_timeout_holds_for_run_and_for_finalize(harness: MakeHarness):
    class Timed(Typed, name="timed", timeout=30): ...

    class Late(Timed, name="late"): ...

    for machine in (Timed, Late):
        assert {step.timeout for step in definition(machine).steps.values()} == {timedelta(seconds=30)}
    assert {step.timeout for step in definition(Typed).steps.values()} == {None}
    with pytest.raises(DefinitionError, match="Culprit is not well formed: timeout"):

        class Culprit(Typed, timeout=0): ...


# Sequences.


class Add(Job[Order], name="add", max_attempts=1):
    def perform(self, ctx: Context[Order]) -> Result:
        if ctx.state.number == 13:
            raise ValueError("bad luck")
        return {"number": ctx.state.number + 1}


class Double(FSM[Order], name="double"):
    @step
    def start(self, ctx: Context[Order]) -> Outcome[Order]:
        return Done(Order(ctx.state.number * 2))


class Loud(Job[State], name="loud"):
    def perform(self, ctx: Context[State]) -> Result:
        return {**ctx.state, "loud": True}


Both = sequence("both", Add, Double)
Deep = sequence("deep", Both, Add, Both)
Single = sequence("single", Add, queue="slow", version=3)
Misfit = sequence("misfit", Loud, Double, retry=RetryPolicy(5, base=0))
PARTS = (Add, Double, Loud, Both, Deep, Single, Misfit)


@pytest.mark.parametrize(("machine", "number"), [(Both, 4), (Deep, 12), (Single, 2)])
def test_the_result_of_one_part_is_the_input_of_the_next(harness: MakeHarness, machine: Any, number: int):
    durable = harness(*PARTS)
    for given in (Order(1), {"number": 1}):
        id = durable.insert(machine.new(given))
        durable.drain()
        assert durable.get(id).result == {"number": number}


def test_a_sequence_goes_on_in_any_process_that_has_it(dsn: str):
    with Harness(dsn, PARTS) as first:
        id = first.insert(Deep.new(Order(1)))
    steps = 0
    while True:
        with Harness(dsn, PARTS) as fresh:  # each knows what the database does, and nothing else
            claims = fresh._claim(None, limit=1)
            if not claims:
                break
            fresh._run(claims, Counter())
            steps += 1
            ended = fresh.get(id)
    assert (ended.status, ended.result) == ("done", {"number": 12})
    assert steps == 15


def test_a_sequence_is_named_and_versioned_by_hand():
    assert (definition(Single).name, definition(Single).version, definition(Single).queue) == ("single", 3, "slow")
    assert definition(sequence("single", Add, Double)).name == "single"


def test_a_sequence_may_stand_in_a_registry_like_any_machine():
    assert Registry([Both, Add, Double]).capabilities == ["both@1", "add@1", "double@1"]


def test_input_that_the_first_part_refuses_is_refused():
    with pytest.raises(InvalidState, match="number"):
        Deep.new({"number": "x"})


def test_a_part_that_fails_fails_the_sequence_by_name(harness: MakeHarness):
    durable = harness(*PARTS)
    id = durable.insert(Both.new(Order(13)))
    durable.drain()
    assert durable.get(id).last_error == (
        f"ChildFailed: child 0 (add, instance {id + 1}) is failed: ValueError: bad luck"
    )


def test_a_result_that_the_next_part_does_not_take_ends_the_sequence_at_once(harness: MakeHarness):
    durable = harness(*PARTS)
    id = durable.insert(Misfit.new({"number": 1}))
    assert durable.drain() == {"spawn": 1, "done": 1, "stop": 1}
    assert str(durable.get(id).last_error).startswith("Fatal: double does not take the result of loud: ")
    assert "loud" in str(durable.get(id).last_error)


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [((), "has no parts"), ((5,), "has the part 5"), ((Add, Add()), "has the part"), ((Add, Job), "defines no steps")],
)
def test_a_sequence_of_nothing_or_of_no_machines_is_refused(parts: Any, complaint: str):
    with pytest.raises(DefinitionError, match=complaint):
        sequence("culprit", *parts)


@pytest.mark.parametrize("keywords", [{"version": 0}, {"queue": ""}, {"retry": 5}, {"max_crashes": "x"}])
def test_the_keywords_of_a_sequence_are_checked(keywords: dict[str, Any]):
    with pytest.raises(DefinitionError, match="culprit"):
        sequence("culprit", Add, **keywords)


def test_a_bad_name_is_refused():
    with pytest.raises(DefinitionError, match="name"):
        sequence("", Add)
