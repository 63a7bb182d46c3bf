"""The examples give the outputs that their page states: through the harness, without waiting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tasks import examples
from tasks.examples import STATED, InContext, Polled, Polling

from gendurable.errors import InvalidState
from gendurable.testing import Harness

MakeHarness = Callable[..., Harness]


def run(durable: Harness, id: int) -> Any:
    """Drain until the instance has ended, however long it sleeps between."""
    for _ in range(100):
        durable.drain()
        instance = durable.get(id)
        if instance.status in ("done", "failed"):
            return instance
        durable.advance(0.1)
    raise AssertionError(f"it is still {instance.status}")


@pytest.mark.parametrize("example", STATED)
def test_an_example_gives_the_output_that_is_stated(harness: MakeHarness, example: str):
    machine, given, stated = STATED[example]
    durable = harness(examples)
    ended = run(durable, durable.insert(machine.new(given)))
    assert (ended.last_error, ended.result) == (None, stated)


def test_the_context_tells_who_runs(harness: MakeHarness):
    durable = harness(examples)
    id = durable.insert(InContext.new())
    assert run(durable, id).result == {"taskId": "context", "executionId": id, "attempt": 0, "prevError": None}


def test_polling_goes_on_until_the_value_is_there(harness: MakeHarness, tmp_path: Path):
    durable = harness(examples)
    path = tmp_path / "value"
    id = durable.insert(Polling.new(Polled(0, str(path)), schedule_in=examples.POLL))
    for _ in range(14):
        durable.advance(examples.POLL)
        assert durable.drain() == {"spawn": 1}
    path.write_text("10")
    durable.advance(examples.POLL)
    durable.drain()
    assert durable.get(id).result == {"count": 15, "value": 10}


@pytest.mark.parametrize(
    ("machine", "given", "complaint"),
    [
        (examples.Validated, {"name": "moon"}, "ValueError: Invalid input"),
        (examples.ValidatedBySchema, {"name": 5}, "name"),
        (examples.SummarizeFile, {"filePath": "file.exe"}, "Invalid file path"),
        (examples.Recursive, {"index": -1}, "index"),
        (examples.Tree, {"nmae": "world"}, "nmae"),
        (examples.Parents, {"nmae": "world"}, "nmae"),
    ],
)
def test_input_that_an_example_refuses_never_becomes_a_row(machine: Any, given: Any, complaint: str):
    with pytest.raises(InvalidState, match=complaint):
        machine.new(given)
