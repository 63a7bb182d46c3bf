"""Steps that go wrong: every bad outcome, error and crash ends where the contract says, within one drain."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from scripted import Scripted, State, raises
from support import inbox, row

from gendurable import FSM, Again, Await, Context, Done, Job, Next, Outcome, Retry, Spawn, Status, Stop, step
from gendurable.core.limits import DEFAULT_LIMITS
from gendurable.db.connection import Connection
from gendurable.errors import BadOutcome, Unstorable
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]


class Stranger(FSM[State], name="stranger"):
    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return Done()

    @step
    def work(self, ctx: Context[State]) -> Outcome[State]:
        return Done()


@attrs.frozen
class Number:
    n: int


class Needy(Job[Number], name="needy"):
    """Its state has no default: it cannot be spawned as a bare class."""

    def perform(self, ctx: Context[Number]) -> None:
        pass


class Base(FSM[State]):
    """A machine without steps."""


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def circular() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def no_step(ctx: Context[State]) -> Outcome[State]:
    return Done()


BAD_DELAYS = [-1, -0.001, float("nan"), float("inf"), True, "5", None, 10**400, 1e18]
BAD_TIMEOUTS = [0, 0.0, -1, float("nan"), float("inf"), True, False, "5", 10**400]
BAD_TARGETS = ["nowhere", "", None, 5, Stranger.work, Stranger().work, no_step, Scripted, "handle", ["work"]]
BAD_NAMES = ["", [], (), None, 5, [5], [None], ["a", ""], "x" * 256, "a\nb", "a\0b", "\ud800", b"a", [["a"]]]
BAD_CHILDREN = [None, 5, [None], "leaf", [object()], Needy, [Needy], [Base], [FSM], [Done()], Needy.new({"n": 1}), [{}]]
BAD_RESULTS: list[Any] = [None, [], [1], "text", b"bytes", 5, True, object(), {1}, Number]

MALFORMED: dict[str, Any] = {
    **{f"Next delay {value!r:.20}": Next("work", delay=value) for value in BAD_DELAYS},
    **{f"Retry delay {value!r:.20}": Retry(delay=value) for value in BAD_DELAYS},
    **{f"Again delay {value!r:.20}": Again(delay=value) for value in BAD_DELAYS},
    **{f"Next to {value!r}": Next(value) for value in BAD_TARGETS},
    **{f"Await then {value!r}": Await("a", value) for value in BAD_TARGETS},
    **{f"Spawn then {value!r}": Spawn([], value) for value in BAD_TARGETS},
    **{f"Await timeout {value!r:.20}": Await("a", "work", timeout=value) for value in BAD_TIMEOUTS},
    **{f"Await names {value!r:.20}": Await(value, "work") for value in BAD_NAMES},
    **{f"Spawn {value!r:.40}": Spawn(value, "work") for value in BAD_CHILDREN},
    **{f"Done {type(value).__name__}": Done(value) for value in BAD_RESULTS},
    **{f"{kind} state {type(value).__name__}": make(value)
       for value in ([], "text", 5, object())
       for kind, make in {
           "Next": lambda value: Next("work", value),
           "Retry": Retry,
           "Again": Again,
           "Await": lambda value: Await("a", "work", value),
           "Spawn": lambda value: Spawn([], "work", value),
       }.items()},
    **{
        f"returned {value!r:.30}": value
        for value in [None, True, False, 0, 5, "work", "done", {}, {"a": 1}, [], (Done(),), [Done()], Done, Next, Stop]
    },
    "returned an error": ValueError("not raised"),
    "returned a step": Scripted.work,
    "returned an unprintable": Unprintable(),
    "returned another machine": Stranger(),
}  # fmt: skip

BAD_VALUES: dict[str, Callable[[], Any]] = {
    "NaN": lambda: float("nan"),
    "Infinity": lambda: float("-inf"),
    "NUL": lambda: "a\0b",
    "lone surrogate": lambda: "\udc80",
    "NUL in a key": lambda: {"a\0b": 1},
    "lone surrogate in a key": lambda: {"\ud800": 1},
    "integer key": lambda: {1: "one"},
    "None key": lambda: {None: 1},
    "tuple key": lambda: {(1, 2): 1},
    "object": object,
    "unprintable object": Unprintable,
    "function": lambda: no_step,
    "class": lambda: Number,
    "complex": lambda: 1j,
    "generator": lambda: (n for n in range(3)),
    "exception": lambda: ValueError("x"),
    "context value": lambda: memoryview(b"x"),
    "too deep": lambda: nested(DEFAULT_LIMITS.json_depth),
    "far too deep": lambda: nested(100_000),
    "circular": circular,
    "too big": lambda: "x" * DEFAULT_LIMITS.json_bytes,
    "huge integer": lambda: 1 << 20_000,
    "deep inside": lambda: {"a": [{"b": (1, {2, float("inf")})}]},
}

CARRIERS: dict[str, Callable[[Any], Any]] = {
    "Next": lambda state: Next("work", state),
    "Retry": Retry,
    "Again": Again,
    "Await": lambda state: Await("a", "work", state),
    "Spawn": lambda state: Spawn([], "work", state),
    "Done": Done,
}

UNSTORABLE: dict[str, Callable[[], Any]] = {
    f"{carrier} with {name}": lambda make=make, value=value: make({"v": value()})  # type: ignore[misc]
    for carrier, make in CARRIERS.items()
    for name, value in BAD_VALUES.items()
}

BAD: dict[str, tuple[Callable[[], Any], tuple[type[Exception], ...]]] = {
    **{name: (lambda outcome=outcome: outcome, (BadOutcome, Unstorable)) for name, outcome in MALFORMED.items()},
    **{name: (make, (Unstorable,)) for name, make in UNSTORABLE.items()},
}


def assert_row(conn: Connection, id: int, **expected: Any) -> None:
    stored = row(conn, id)
    assert {name: stored[name] for name in expected} == expected


def one_batch(durable: Harness) -> None:
    """Run what is due now once, not what comes of it."""
    durable._run(durable._claim(None, 100), Counter())


def test_every_bad_outcome_is_an_error_of_the_step_and_fails_it_at_once(harness: MakeHarness, conn: Connection):
    # 2.1-6: nothing that a step returns may leave it running until its lease ends. All in one batch: none of them
    # hurts a neighbour either.
    plays = [(lambda _, make=make: make()) for make, _ in BAD.values()]
    machine = Scripted(start=plays)
    durable = harness(machine)
    ids = sorted(durable.insert_many([Scripted.new({"n": 1}) for _ in BAD]))
    assert durable.drain(max_steps=len(BAD)) == {"stop": len(BAD)}
    assert machine._plays["start"] == []
    for (name, (_, kinds)), id, ctx, (error, _) in zip(BAD.items(), ids, machine.seen, machine.handled, strict=True):
        assert ctx.id == id
        assert isinstance(error, kinds), (name, error)
        stored = row(conn, id)
        assert stored["status"] == "failed", name
        assert (stored["step"], stored["state"], stored["attempt"], stored["result"]) == ("start", {"n": 1}, 0, None)
        assert stored["last_error"].startswith(tuple(f"{kind.__name__}: " for kind in kinds)), name
        assert stored["locked_by"] is stored["lease_expires_at"] is None
    assert conn.execute("select count(*) from gen_durable").fetchone() == (len(BAD),), "no child was born"


def test_a_handler_decides_about_every_bad_outcome(harness: MakeHarness, conn: Connection):
    plays = [(lambda _, make=make: make()) for make, _ in BAD.values()]
    machine = Scripted(start=plays, finish=Done({"saved": True}), handle=lambda *_: Next("finish"))
    durable = harness(machine)
    durable.insert_many([Scripted.new() for _ in BAD])
    assert durable.drain(max_steps=2 * len(BAD)) == {"next": len(BAD), "done": len(BAD)}
    assert conn.execute("select distinct status::text, result from gen_durable").fetchall() == [
        ("done", {"saved": True})
    ]
    assert all(isinstance(error, BadOutcome | Unstorable) for error, _ in machine.handled)


def test_a_bad_outcome_of_the_handler_itself_ends_the_instance(harness: MakeHarness, conn: Connection):
    answers = [make for make, _ in BAD.values()]
    machine = Scripted(start=raises(ValueError("first")), handle=lambda *_: answers.pop(0)())
    durable = harness(machine)
    ids = sorted(durable.insert_many([Scripted.new() for _ in BAD]))
    assert durable.drain(max_steps=len(BAD)) == {"stop": len(BAD)}
    assert answers == []
    for (name, (_, kinds)), id in zip(BAD.items(), ids, strict=True):
        stored = row(conn, id)
        assert (stored["status"], stored["attempt"]) == ("failed", 0), name
        assert stored["last_error"].startswith(tuple(f"{kind.__name__}: " for kind in kinds)), name


def test_a_bad_outcome_that_is_always_retried_is_counted(harness: MakeHarness, conn: Connection):
    machine = Scripted(
        start=Done({"v": float("nan")}),
        handle=lambda error, ctx: Retry(delay=1) if ctx.attempt < 3 else Stop(error),
    )
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    for attempt in (1, 2, 3):
        assert durable.drain() == {"retry": 1}
        assert_row(conn, id, status="runnable", attempt=attempt)
        durable.advance(1)
    assert durable.drain() == {"stop": 1}
    assert row(conn, id)["last_error"].startswith("Unstorable: result.v")


def test_an_error_of_a_bad_outcome_names_the_culprit(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=Next("work", {"order": {"lines": [1, float("nan")]}})))
    id = durable.insert(Scripted.new())
    durable.drain()
    assert row(conn, id)["last_error"].startswith("Unstorable: state.order.lines[1]: nan is no JSON number")


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_just_fits_is_stored(harness: MakeHarness, conn: Connection, carrier: str):
    deepest = nested(DEFAULT_LIMITS.json_depth - 1)
    longest = "x" * (DEFAULT_LIMITS.json_bytes - len('{"v":""}'))
    durable = harness(Scripted(start=[CARRIERS[carrier]({"v": value}) for value in (deepest, longest)]))
    ids = durable.insert_many([Scripted.new(), Scripted.new()])
    one_batch(durable)
    column = "result" if carrier == "Done" else "state"
    stored = [row(conn, id)[column] for id in sorted(ids)]
    assert stored == [{"v": deepest}, {"v": longest}]


def test_more_children_than_one_statement_can_carry_are_an_error_of_the_step(
    harness: MakeHarness, conn: Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gendurable.core.transition.SPAWN_CHARACTERS", 100)
    few, many = [Needy.new({"n": n}) for n in range(5)], [Needy.new({"n": n}) for n in range(20)]
    durable = harness(Scripted(start=[Spawn(few, "work"), Spawn(many, "work")]))
    durable.insert_many([Scripted.new(), Scripted.new()])
    assert durable.drain() == {"spawn": 1, "stop": 1}
    assert conn.execute("select count(*) from gen_durable where parent_id is not null").fetchone() == (5,)
    ((error,),) = conn.execute("select last_error from gen_durable where status = 'failed'").fetchall()
    assert error.startswith("BadOutcome: Spawn: the states of 20 children")


# Steps that raise.


def test_an_exception_goes_to_the_handler_which_by_default_stops(harness: MakeHarness, conn: Connection):
    machine = Scripted(start=raises(ValueError("broken")))
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.signal(id, "noise")
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", last_error="ValueError: broken", attempt=0, locked_by=None)
    assert inbox(conn, id) == []


@pytest.mark.parametrize(
    "error", [ValueError("x"), StopIteration(), RecursionError("deep"), MemoryError(), ExceptionGroup("g", [OSError()])]
)
def test_every_exception_reaches_the_handler_as_it_is(harness: MakeHarness, error: Exception):
    machine = Scripted(start=raises(error), handle=lambda *_: Done())
    durable = harness(machine)
    durable.insert(Scripted.new())
    assert durable.drain() == {"done": 1}
    assert machine.handled[0][0] is error


def test_a_step_that_recurses_without_end_is_only_an_error(harness: MakeHarness, conn: Connection):
    def forever(ctx: Context[State]) -> Outcome[State]:
        return forever(ctx)

    durable = harness(Scripted(start=forever))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    assert row(conn, id)["last_error"].startswith("RecursionError")


@pytest.mark.parametrize(
    ("answer", "tally", "expected"),
    [
        (Next("work", {"n": 2}, delay=60), "next", {"status": "runnable", "step": "work", "state": {"n": 2}}),
        (Retry(delay=60), "retry", {"status": "runnable", "step": "start", "attempt": 1, "state": {"n": 1}}),
        (Again(delay=60), "again", {"status": "runnable", "step": "start", "attempt": 0, "state": {"n": 1}}),
        (Await("a", "work"), "await", {"status": "awaiting_signal", "step": "work", "awaits": ["a"], "attempt": 0}),
        (Spawn([Needy.new({"n": 1}, schedule_in=60)], "work"), "spawn", {"status": "awaiting_children"}),
    ],
)
def test_the_error_that_a_handler_answered_stands_in_the_row(
    harness: MakeHarness, conn: Connection, answer: Any, tally: str, expected: dict[str, Any]
):
    durable = harness(Scripted(start=raises(OSError("disk")), handle=lambda *_: answer))
    id = durable.insert(Scripted.new({"n": 1}))
    assert durable.drain() == {tally: 1}
    assert_row(conn, id, **expected, last_error="OSError: disk", locked_by=None, lease_expires_at=None)


def test_a_handler_that_gives_a_result_leaves_no_error(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=raises(OSError("disk")), handle=lambda *_: Done({"partial": True})))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"done": 1}
    assert_row(conn, id, status="done", result={"partial": True}, last_error=None)


def test_progress_clears_the_last_error(harness: MakeHarness, conn: Connection):
    machine = Scripted(
        start=[raises(OSError("disk")), Next("work")], work=Await("never", "work"), handle=lambda *_: Retry()
    )
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"retry": 1, "next": 1, "await": 1}
    assert_row(conn, id, last_error=None, attempt=0)
    assert [ctx.last_error for ctx in machine.seen] == [None, "OSError: disk", None]


def test_the_handler_sees_the_state_as_it_was_stored_and_an_empty_context(harness: MakeHarness, conn: Connection):
    def spoil(ctx: Context[State]) -> Outcome[State]:
        ctx.state["list"].append("spoilt")
        ctx.state["new"] = 1
        raise ValueError("after that")

    def handle(error: Exception, ctx: Context[State]) -> Outcome[State]:
        return Next("finish")

    machine = Scripted(
        start=Spawn([Needy.new({"n": 1})], "work"), work=[Await("go", "work"), spoil], finish=Done(), handle=handle
    )
    durable = harness(machine, Needy)
    id = durable.insert(Scripted.new({"list": [1]}))
    durable.drain()
    durable.signal(id, "go")
    durable.drain()
    ((error, ctx),) = machine.handled
    assert str(error) == "after that"
    assert ctx.state == {"list": [1]}
    assert (ctx.awaited, ctx.inbox, ctx.children, ctx.joined) == ((), (), (), ())
    assert (ctx.id, ctx.fsm, ctx.fsm_version, ctx.step, ctx.attempt) == (id, "scripted", 1, "work", 0)
    assert len(machine.seen[2].awaited) == len(machine.seen[2].children) == 1
    assert_row(conn, id, status="done", state={"list": [1]})


def test_what_a_handler_mutates_and_returns_is_stored(harness: MakeHarness, conn: Connection):
    def handle(error: Exception, ctx: Context[State]) -> Outcome[State]:
        ctx.state["errors"] = [str(error)]
        return Next("finish")

    durable = harness(Scripted(start=raises(OSError("disk")), finish=Done(), handle=handle))
    id = durable.insert(Scripted.new({"n": 1}))
    durable.drain()
    assert_row(conn, id, status="done", state={"n": 1, "errors": ["disk"]})


def test_a_handler_that_raises_ends_the_instance_with_its_own_error(harness: MakeHarness, conn: Connection):
    durable = harness(Scripted(start=raises(ValueError("first")), handle=raises(KeyError("second"))))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", last_error="KeyError: 'second'", attempt=0)


def test_a_handler_that_goes_on_consumes_what_the_failed_step_was_shown(harness: MakeHarness, conn: Connection):
    # The step was woken by these signals, and its outcome is progress, whoever chose it.
    machine = Scripted(
        start=Await("go", "work"),
        work=raises(ValueError("x")),
        finish=Await("never", "work"),
        handle=lambda *_: Next("finish"),
    )
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "noise")
    durable.signal(id, "go")
    durable.drain()
    assert inbox(conn, id) == ["noise"]


def test_a_handler_that_retries_consumes_nothing(harness: MakeHarness, conn: Connection):
    machine = Scripted(
        start=Await("go", "work"), work=[raises(ValueError("x")), Done()], handle=lambda *_: Retry(delay=1)
    )
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "go", 7)
    durable.drain()
    assert inbox(conn, id) == ["go"]
    durable.advance(1)
    durable.drain()
    assert [signal.payload for signal in machine.seen[-1].awaited] == [7]


# 2.3-5: raise, await the same name, be woken by the signal that is still there, raise …


def test_a_handler_that_awaits_again_is_not_woken_by_what_the_failed_step_was_shown(
    harness: MakeHarness, conn: Connection
):
    machine = Scripted(
        start=Await("go", "work"), work=raises(ValueError("bad signal")), handle=lambda *_: Await("go", "work")
    )
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "go")
    assert durable.drain() == {"await": 1}
    assert durable.drain() == {}
    assert_row(conn, id, status="awaiting_signal", step="work", last_error="ValueError: bad signal")
    assert inbox(conn, id) == ["go"]
    durable.signal(id, "go")
    assert durable.drain() == {"await": 1}
    assert len(machine.seen[-1].awaited) == 2


def test_a_handler_that_awaits_a_signal_that_was_never_shown_is_woken_once(harness: MakeHarness):
    # The first step awaited nothing, so it was shown nothing: the signal counts as new, but only once.
    machine = Scripted(start=raises(ValueError("x")), handle=lambda *_: Await("go", "start"))
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.signal(id, "go")
    assert durable.drain() == {"await": 2}


def test_a_handler_that_awaits_the_failed_step_keeps_its_attempt(harness: MakeHarness, conn: Connection):
    def handle(error: Exception, ctx: Context[State]) -> Outcome[State]:
        return Retry() if ctx.attempt < 2 else Await("help", "start", timeout=60)

    durable = harness(Scripted(start=raises(ValueError("x")), handle=handle))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"retry": 2, "await": 1}
    assert_row(conn, id, status="awaiting_signal", attempt=2)
    durable.advance(60)
    assert durable.drain() == {"await": 1}
    assert_row(conn, id, status="awaiting_signal", attempt=2)


def test_a_handler_that_awaits_another_step_starts_it_at_attempt_zero(harness: MakeHarness, conn: Connection):
    def handle(error: Exception, ctx: Context[State]) -> Outcome[State]:
        return Retry() if ctx.attempt < 2 else Await("help", "work")

    durable = harness(Scripted(start=raises(ValueError("x")), handle=handle))
    id = durable.insert(Scripted.new())
    durable.drain()
    assert_row(conn, id, status="awaiting_signal", step="work", attempt=0)


# 2.4-1: what an error says must never keep its instance from ending.


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("message", "stored"),
    [
        ("a\0b", "ValueError: a\\x00b"),
        ("a\ud800b", "ValueError: a\\ud800b"),
        ("bell \x07 escape \x1b[31m", "ValueError: bell \\x07 escape \\x1b[31m"),
        ("two\nlines\tand a tab", "ValueError: two\nlines\tand a tab"),
        ("ünïcödé ✓ 𝄞", "ValueError: ünïcödé ✓ 𝄞"),
        ("%s %(x)s {} $1 '\"\\", "ValueError: %s %(x)s {} $1 '\"\\"),
    ],
)
@pytest.mark.parametrize("way", ["default", "handler stops", "handler raises", "handler retries"])
def test_any_message_can_be_stored(harness: MakeHarness, conn: Connection, message: str, stored: str, way: str):
    error = ValueError(message)
    handle = {
        "default": None,
        "handler stops": lambda error, _: Stop(error),
        "handler raises": raises(error),
        "handler retries": lambda *_: Retry(delay=60),
    }[way]
    durable = harness(Scripted(start=raises(error), handle=handle))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"retry" if way == "handler retries" else "stop": 1}
    assert_row(conn, id, last_error=stored)


@pytest.mark.parametrize("letter", ["x", "ü", "𝄞", "\0", "\ud800", "\x1b"])
@pytest.mark.parametrize("length", [8 * 1024, 100_000])
def test_a_long_message_is_cut_to_size(harness: MakeHarness, conn: Connection, letter: str, length: int):
    durable = harness(Scripted(start=raises(ValueError(letter * length))))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    text = row(conn, id)["last_error"]
    assert text.startswith("ValueError: ")
    assert text.endswith("… (cut)")
    assert DEFAULT_LIMITS.error_bytes - 8 < len(text.encode()) <= DEFAULT_LIMITS.error_bytes


@pytest.mark.parametrize("reason", [Mute(), Unprintable()])
def test_an_error_without_words_still_ends_its_instance(harness: MakeHarness, conn: Connection, reason: Any):
    play = raises(reason) if isinstance(reason, Exception) else Stop(reason)
    durable = harness(Scripted(start=play))
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed")
    assert row(conn, id)["last_error"].startswith(f"{type(reason).__name__}: (its text could not be made")


# Crashes.


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_an_exit_is_a_crash_without_an_outcome_and_without_the_handler(
    harness: MakeHarness, conn: Connection, error: BaseException
):
    # 2.1-15
    machine = Scripted(start=[raises(error), Done({"second": True})])
    durable = harness(machine)
    id = durable.insert(Scripted.new({"n": 1}))
    due = row(conn, id)["eligible_at"]
    assert durable.drain() == {"crash": 1}
    assert_row(conn, id, status="executing", step="start", attempt=0, locked_by="harness", last_error=None)
    assert durable.drain() == {}, "the lease still holds"
    durable.advance(61)
    assert durable.drain() == {"done": 1}
    assert machine.handled == []
    assert [(ctx.attempt, ctx.state) for ctx in machine.seen] == [(0, {"n": 1}), (1, {"n": 1})]
    assert_row(conn, id, status="done", attempt=1, crashes=0, eligible_at=due)


@pytest.mark.parametrize("verdict", [pytest.fail, pytest.skip])
def test_a_verdict_of_the_test_itself_is_no_crash(harness: MakeHarness, verdict: Callable[[str], Any]):
    # As of a stand-in for a collaborator that must not be called: pytest's verdicts are no Exceptions either.
    durable = harness(Scripted(start=lambda _: verdict("not to be called")))
    durable.insert(Scripted.new())
    with pytest.raises(verdict.Exception, match="not to be called"):
        durable.drain()


def test_an_exit_of_the_handler_is_a_crash_too(harness: MakeHarness):
    machine = Scripted(start=[raises(ValueError("x")), Done()], handle=raises(SystemExit(1)))
    durable = harness(machine)
    durable.insert(Scripted.new())
    assert durable.drain() == {"crash": 1}
    durable.advance(61)
    assert durable.drain() == {"done": 1}
    assert machine.seen[-1].attempt == 1


def test_a_crash_does_not_hurt_the_others_of_its_batch(harness: MakeHarness):
    durable = harness(Scripted(start=[Done(), Done(), raises(SystemExit(1)), Done(), Done()]))
    ids = durable.insert_many([Scripted.new() for _ in range(5)])
    assert durable.drain() == {"crash": 1, "done": 4}
    assert sorted(durable.get(id).status for id in ids) == [*["done"] * 4, "executing"]


def test_a_crash_shows_the_next_execution_the_same_signals(harness: MakeHarness):
    machine = Scripted(start=Await("go", "work"), work=[raises(SystemExit(1)), Done()])
    durable = harness(machine)
    id = durable.insert(Scripted.new())
    durable.drain()
    durable.signal(id, "go", 7)
    durable.drain()
    durable.advance(61)
    durable.drain()
    assert [[signal.payload for signal in ctx.awaited] for ctx in machine.seen] == [[], [7], [7]]


class Fragile(Scripted, name="fragile", max_crashes=3):
    pass


def test_a_spent_crash_budget_ends_the_instance_and_joins_its_parent(harness: MakeHarness, conn: Connection):
    parent = Scripted(start=Spawn([Fragile.new()], "work"), work=Done())
    child = Fragile(start=raises(SystemExit(1)))
    durable = harness(parent, child)
    id = durable.insert(Scripted.new())
    assert durable.drain() == {"spawn": 1, "crash": 1}
    durable.advance(61)
    assert durable.drain() == {"crash": 1}
    durable.advance(61)
    assert durable.drain() == {"crash": 1}
    durable.advance(61)
    assert durable.drain() == {"done": 1}
    (ended,) = parent.seen[-1].joined
    assert ended.status == Status.FAILED
    assert "3 times in a row in step 'start'" in str(ended.last_error)
    assert_row(conn, id, status="done")
    assert_row(conn, ended.id, status="failed", crashes=3, locked_by=None, lease_expires_at=None)


def test_any_outcome_restores_the_crash_budget(harness: MakeHarness, conn: Connection):
    boom = raises(SystemExit(1))
    durable = harness(Fragile(start=[boom, boom, Retry(), boom, boom, Done()]))
    id = durable.insert(Fragile.new())
    for _ in range(5):
        durable.drain()
        durable.advance(61)
    assert_row(conn, id, status="done", crashes=0)


# Jobs.


class Task(Job[State], name="task", max_attempts=3):
    def __init__(self, *plays: Any) -> None:
        self.plays = list(plays)
        self.seen: list[Context[State]] = []

    def perform(self, ctx: Context[State]) -> Any:
        self.seen.append(ctx)
        play = self.plays.pop(0)
        return play(ctx) if callable(play) and not isinstance(play, type) else play


@pytest.mark.parametrize(
    ("value", "result"), [(None, {}), ({}, {}), ({"n": 1}, {"n": 1}), (attrs.asdict(Number(3)), {"n": 3})]
)
def test_a_job_that_returns_nothing_or_a_mapping_is_done(
    harness: MakeHarness, conn: Connection, value: Any, result: Any
):
    durable = harness(Task(value))
    id = durable.insert(Task.new())
    assert durable.drain() == {"done": 1}
    assert_row(conn, id, status="done", step="perform", result=result)


def test_a_job_that_returns_stop_fails_at_once(harness: MakeHarness, conn: Connection):
    durable = harness(Task(Stop("no such customer")))
    id = durable.insert(Task.new())
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", last_error="no such customer", attempt=0)


def test_a_job_may_ask_to_be_retried(harness: MakeHarness, conn: Connection):
    # As is: this is no error, so max_attempts does not bound it.
    durable = harness(Task(*[Retry({"n": n}, delay=7) for n in range(5)], None))
    id = durable.insert(Task.new())
    for n in range(5):
        assert durable.drain() == {"retry": 1}
        assert_row(conn, id, status="runnable", attempt=n + 1, state={"n": n})
        durable.advance(7)
    assert durable.drain() == {"done": 1}


@pytest.mark.parametrize(
    "value", [5, True, "done", [], [1], Next("perform"), Done({"n": 1}), Await("a", "perform"), object(), Unprintable()]
)
def test_a_job_that_returns_anything_else_fails_at_once_naming_it(harness: MakeHarness, conn: Connection, value: Any):
    durable = harness(Task(value))
    id = durable.insert(Task.new())
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", attempt=0)
    assert row(conn, id)["last_error"].startswith("perform returned ")


def test_a_job_is_tried_again_after_its_backoff_until_its_executions_are_spent(harness: MakeHarness, conn: Connection):
    task = Task(*[raises(OSError(f"try {n}")) for n in range(3)])
    durable = harness(task)
    id = durable.insert(Task.new())
    for attempt, pause, advanced in ((1, 1, 0), (2, 2, 1)):
        assert durable.drain() == {"retry": 1}
        assert_row(conn, id, status="runnable", attempt=attempt, last_error=f"OSError: try {attempt - 1}")
        stored = row(conn, id)
        assert (stored["eligible_at"] - stored["updated_at"]).total_seconds() == pause + advanced
        durable.advance(pause)
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", attempt=2, last_error="OSError: try 2")
    assert [ctx.attempt for ctx in task.seen] == [0, 1, 2]


def test_a_crash_of_a_job_counts_as_an_execution(harness: MakeHarness, conn: Connection):
    durable = harness(Task(raises(SystemExit(1)), raises(OSError("a")), raises(OSError("b"))))
    id = durable.insert(Task.new())
    durable.drain()
    durable.advance(61)
    assert durable.drain() == {"retry": 1}
    durable.advance(10)
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", attempt=2, last_error="OSError: b")


def test_the_default_backoff_doubles_up_to_five_minutes():
    task = Task()
    assert [task.backoff(n) for n in range(11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert task.backoff(100_000) == 300


class Hasty(Task, name="hasty"):
    def backoff(self, attempt: int) -> Any:
        return self.plays.pop(0)


@pytest.mark.parametrize("pause", [-1, float("nan"), "soon", None, True])
def test_a_bad_backoff_ends_the_job(harness: MakeHarness, conn: Connection, pause: Any):
    durable = harness(Hasty(raises(OSError("disk")), pause))
    id = durable.insert(Hasty.new())
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", attempt=0)
    assert row(conn, id)["last_error"].startswith("BadOutcome: delay")


def test_an_overridden_backoff_is_used(harness: MakeHarness, conn: Connection):
    durable = harness(Hasty(raises(OSError("disk")), 1234.5))
    id = durable.insert(Hasty.new())
    durable.drain()
    stored = row(conn, id)
    assert (stored["eligible_at"] - stored["updated_at"]).total_seconds() == 1234.5


@pytest.mark.parametrize(
    "value", [lambda _: {"v": float("nan")}, lambda _: {1: 2}, lambda _: {"v": object()}, lambda _: Retry(delay=-1)]
)
def test_a_job_is_not_tried_again_for_an_outcome_that_no_repetition_can_mend(
    harness: MakeHarness, conn: Connection, value: Any
):
    durable = harness(Task(value))
    id = durable.insert(Task.new())
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", attempt=0)
    assert row(conn, id)["last_error"].startswith(("Unstorable: ", "BadOutcome: "))


class Once(Task, name="once", max_attempts=1):
    pass


def test_max_attempts_counts_executions_not_retries(harness: MakeHarness, conn: Connection):
    durable = harness(Once(raises(OSError("disk"))))
    id = durable.insert(Once.new())
    assert durable.drain() == {"stop": 1}
    assert_row(conn, id, status="failed", attempt=0)


# What a step knows.


def test_a_step_knows_everything_about_its_instance(harness: MakeHarness, conn: Connection):
    child = Fragile(start=Await("go", "work"), work=[raises(OSError("disk")), Done()], handle=lambda *_: Retry())
    durable = harness(Scripted(start=Spawn([Fragile.new({"n": 1})], "work"), work=Done()), child)
    parent = durable.insert(Scripted.new())
    durable.drain()
    ((id,),) = conn.execute("select id from gen_durable where parent_id is not null").fetchall()
    durable.signal(id, "noise")
    sent = durable.signal(id, "go", {"amount": 7}, dedup_key="evt-1")
    durable.drain()
    first, failed, ctx = child.seen
    assert (first.parent_id, first.attempt, first.last_error, first.step) == (parent, 0, None, "start")
    assert failed.attempt == 0
    assert (ctx.id, ctx.fsm, ctx.fsm_version, ctx.step, ctx.attempt, ctx.state, ctx.parent_id, ctx.last_error) == (
        id,
        "fragile",
        1,
        "work",
        1,
        {"n": 1},
        parent,
        "OSError: disk",
    )
    (signal,) = ctx.awaited
    assert (signal.id, signal.name, signal.payload, signal.dedup_key) == (sent.id, "go", {"amount": 7}, "evt-1")
    assert signal.inserted_at.tzinfo is not None
    assert [other.name for other in ctx.inbox] == ["noise", "go"]
    assert (ctx.children, ctx.joined) == ((), ())


def test_the_contract_s_fields_are_all_there():
    names = {field.name for field in attrs.fields(Context)}
    assert names >= {
        *("id", "fsm", "fsm_version", "step", "attempt", "state", "awaited", "inbox", "children", "joined"),
        *("parent_id", "last_error"),
    }
