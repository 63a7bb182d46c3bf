"""Limits through the Harness: a clock that can be advanced makes tokens come."""

from collections.abc import Iterator
from typing import Any

import pytest

from gendurable import FSM, Context, Done, Job, Next, Outcome, Retry, Spawn, step
from gendurable.core.status import Status
from gendurable.errors import InvalidInstance
from gendurable.testing import Harness

RATES = {"stripe": {"allowed": 2, "period": "1m"}}
PLACES = {"db": {"limit": 1}}


class Call(Job[dict[str, Any]], name="call"):
    def perform(self, ctx: Context[dict[str, Any]]) -> dict[str, Any]:
        return {}


class Payout(FSM[dict[str, Any]], name="payout"):
    """Goes on under whatever limits its state names; fails once there, if it is to."""

    @step
    def start(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        limits = {name: tuple(value) if isinstance(value, list) else value for name, value in ctx.state["next"].items()}
        return Next(self.pay, **limits)

    @step
    def pay(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        if ctx.attempt < ctx.state.get("retries", 0):
            return Retry()
        return Next(self.end)

    @step
    def end(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        return Done()


class Parent(FSM[dict[str, Any]], name="parent"):
    @step
    def start(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        return Spawn([Call.new(rate_limit=ctx.state["limit"]) for _ in range(3)], then=self.end)

    @step
    def end(self, ctx: Context[dict[str, Any]]) -> Outcome[dict[str, Any]]:
        return Done({"children": len(ctx.joined)})


@pytest.fixture
def durable(dsn: str) -> Iterator[Harness]:
    with Harness(dsn, [Call, Payout, Parent], rate_limits=RATES, concurrency_limits=PLACES) as durable:
        yield durable


def payout(**state: Any) -> Any:
    return Payout.new({"next": {}, **state})


def test_what_the_bucket_holds_runs_at_once_and_the_rest_as_tokens_come(durable: Harness):
    ids = durable.insert_many([Call.new(rate_limit="stripe") for _ in range(5)])
    assert durable.drain() == {"done": 2}
    assert durable.drain() == {}
    durable.advance(29)
    assert durable.drain() == {}
    durable.advance(2)
    assert durable.drain() == {"done": 1}
    durable.advance(60)
    assert durable.drain() == {"done": 2}
    assert {durable.get(id).status for id in ids} == {Status.DONE}


def test_a_transition_puts_the_next_step_under_a_limit_and_the_one_after_is_free(durable: Harness):
    ids = durable.insert_many([payout(next={"rate_limit": ["stripe", "acme"], "weight": 2}) for _ in range(2)])
    assert durable.drain() == {"next": 3, "done": 1}
    waiting = next(durable.get(id) for id in ids if durable.get(id).status is Status.RUNNABLE)
    assert (waiting.rate_limit, waiting.weight, waiting.throttled) == ("stripe:acme", 2, True)
    durable.advance(61)
    assert durable.drain() == {"next": 1, "done": 1}
    assert {durable.get(id).rate_limit for id in ids} == {None}


def test_each_execution_takes_its_tokens_retries_too(durable: Harness):
    id = durable.insert(payout(next={"rate_limit": "stripe"}, retries=3))
    assert durable.drain() == {"next": 1, "retry": 2}
    assert durable.get(id).rate_limit == "stripe"
    durable.advance(31)
    assert durable.drain() == {"retry": 1}
    durable.advance(31)
    assert durable.drain() == {"next": 1, "done": 1}


def test_a_concurrency_limit_is_no_obstacle_to_one_after_the_other(durable: Harness):
    durable.insert_many([payout(next={"concurrency_limit": "db"}) for _ in range(5)])
    assert durable.drain() == {"next": 10, "done": 5}


def test_children_are_under_limits_too(durable: Harness):
    id = durable.insert(Parent.new({"limit": "stripe"}))
    assert durable.drain() == {"spawn": 1, "done": 2}
    durable.advance(60)
    assert durable.drain() == {"done": 2}
    assert durable.get(id).result == {"children": 3}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"rate_limit": "strip"}, "rate_limit: there is no limit 'strip': the known ones are stripe; define it as"),
        ({"rate_limit": ["strip", "acme"]}, "there is no limit 'strip'"),
        ({"concurrency_limit": "stripe"}, "concurrency_limit: there is no limit 'stripe': the known ones are db"),
        ({"rate_limit": "stripe", "weight": 3}, "weight: 3 is more than rate limit 'stripe' ever holds, 2"),
        ({"rate_limit": "stripe", "weight": 0}, "weight: 0 is no number of tokens"),
        ({"rate_limit": "a b"}, "rate_limit: 'a b' is no limit's name"),
        ({"rate_limit": 7}, "rate_limit: 7 is neither the name of a limit nor a pair"),
    ],
)
def test_a_step_that_names_a_limit_in_vain_has_a_bad_outcome(durable: Harness, limits: dict[str, Any], words: str):
    id = durable.insert(payout(next=limits))
    assert durable.drain() == {"stop": 1}
    found = durable.get(id)
    assert found.last_error is not None
    assert found.last_error.startswith("BadOutcome: ")
    assert words in found.last_error


def test_a_child_under_a_limit_that_is_not_known_is_a_bad_outcome_and_is_not_born(durable: Harness):
    id = durable.insert(Parent.new({"limit": "nobody"}))
    assert durable.drain() == {"stop": 1}
    assert "Spawn child 0: rate_limit: there is no limit 'nobody'" in (durable.get(id).last_error or "")


def test_without_any_limit_naming_one_is_a_bad_outcome(dsn: str):
    with Harness(dsn, [Payout]) as durable:
        id = durable.insert(payout(next={"rate_limit": "stripe"}))
        assert durable.drain() == {"stop": 1}
        assert "none is known; define it as [rate_limits.stripe]" in (durable.get(id).last_error or "")


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"rate_limits": {"s": {"allowed": 1}}}, "rate_limits: s.period is missing"),
        ({"concurrency_limits": {"s": {"limit": 0}}}, "concurrency_limits: s.limit: 0 is out of range"),
    ],
)
def test_limits_that_can_be_none_are_refused(dsn: str, limits: dict[str, Any], words: str):
    with pytest.raises(InvalidInstance, match=words):
        Harness(dsn, [Call], **limits)
