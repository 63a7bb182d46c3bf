"""Every example of the task engine that we also carry, as machines: names and outputs are those of its page.

Where a task there returns a text, the job here returns {"output": text}: a result is an object.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen, validators

from gendurable import Context, Job, RetryPolicy
from gendurable.tasks import Children, ParentTask, sequence

State = dict[str, Any]
Result = Mapping[str, Any]


@frozen
class Named:
    name: str


# Usage: a file is uploaded, its title and summary are made in parallel.


@frozen
class File:
    filePath: str  # noqa: N815  the names of the examples


@frozen
class Upload:
    filePath: str  # noqa: N815
    uploadUrl: str  # noqa: N815


class ExtractFileTitle(Job[File], name="extractFileTitle", timeout=30):
    def perform(self, ctx: Context[File]) -> Result:
        return {"title": "File Title"}


class SummarizeFile(Job[File], name="summarizeFile", timeout=30):
    @staticmethod
    def validate(state: File) -> None:
        if not state.filePath.endswith(".txt"):
            raise ValueError("Invalid file path")

    def perform(self, ctx: Context[File]) -> Result:
        return {"summary": "File summary"}


class UploadFile(ParentTask[Upload], name="uploadFile", timeout=60):
    def run(self, ctx: Context[Upload]) -> Children:
        path = ctx.state.filePath
        return Children(
            {"filePath": path, "uploadUrl": ctx.state.uploadUrl, "fileSize": 100},
            [ExtractFileTitle.new(File(path)), SummarizeFile.new(File(path))],
        )

    def finalize(self, ctx: Context[Upload], output: Any, results: Sequence[Any]) -> Result:
        return {**output, **results[0], **results[1]}


# Simple tasks.


class SimpleSync(Job[Named], name="simple.sync"):
    def perform(self, ctx: Context[Named]) -> Result:
        return {"output": f"Hello, {ctx.state.name}!"}


class SimpleAsync(Job[Named], name="simple.async"):
    """A thread may simply wait."""

    def perform(self, ctx: Context[Named]) -> Result:
        time.sleep(0.001)
        return {"output": f"Hello, {ctx.state.name}!"}


# Validated input: by a function, and by a schema.


class Validated(Job[State], name="validated"):
    @staticmethod
    def validate(state: State) -> State:
        if state["name"] != "world":
            raise ValueError("Invalid input")
        return state

    def perform(self, ctx: Context[State]) -> Result:
        return {"output": f"Hello, {ctx.state['name']}!"}


class ValidatedBySchema(Job[Named], name="validated.schema"):
    def perform(self, ctx: Context[Named]) -> Result:
        return {"output": f"Hello, {ctx.state.name}!"}


# Retries.


class Retried(Job[Named], name="retried", retry=RetryPolicy(max_attempts=5, base=0.1, factor=1.5, cap=1)):
    def __init__(self) -> None:
        self.total_attempts = 0

    def perform(self, ctx: Context[Named]) -> Result:
        self.total_attempts += 1
        if ctx.attempt < 2:
            raise RuntimeError("Failed")
        return {"totalAttempts": self.total_attempts, "output": f"Hello, {ctx.state.name}!"}


# The context of a run.


class InContext(Job[State], name="context"):
    def perform(self, ctx: Context[State]) -> Result:
        return {"taskId": ctx.fsm, "executionId": ctx.id, "attempt": ctx.attempt, "prevError": ctx.last_error}


# A parent with parallel children, and with a combined output.


class ParallelA(Job[Named], name="parallel.a"):
    def perform(self, ctx: Context[Named]) -> Result:
        return {"output": f"Hello from task A, {ctx.state.name}!"}


class ParallelB(Job[Named], name="parallel.b"):
    def perform(self, ctx: Context[Named]) -> Result:
        return {"output": f"Hello from task B, {ctx.state.name}!"}


class Parallel(ParentTask[Named], name="parallel"):
    def run(self, ctx: Context[Named]) -> Children:
        children = [ParallelA.new(ctx.state), ParallelB.new(ctx.state)]
        return Children(f"Hello from parent task, {ctx.state.name}!", children)


class Combined(Parallel, name="combined"):
    def finalize(self, ctx: Context[Named], output: Any, results: Sequence[Any]) -> Result:
        return {
            "parentOutput": output,
            "taskAOutput": results[0]["output"],
            "taskBOutput": results[1]["output"],
        }


# Sequential tasks.


class SequentialA(Job[State], name="sequential.a"):
    def perform(self, ctx: Context[State]) -> Result:
        return {"name": ctx.state["name"], "taskAOutput": f"Hello from task A, {ctx.state['name']}!"}


class SequentialB(Job[State], name="sequential.b"):
    def perform(self, ctx: Context[State]) -> Result:
        return {**ctx.state, "taskBOutput": f"Hello from task B, {ctx.state['name']}!"}


class SequentialC(Job[State], name="sequential.c"):
    def perform(self, ctx: Context[State]) -> Result:
        return {
            "taskAOutput": ctx.state["taskAOutput"],
            "taskBOutput": ctx.state["taskBOutput"],
            "taskCOutput": f"Hello from task C, {ctx.state['name']}!",
        }


Sequential = sequence("sequential", SequentialA, SequentialB, SequentialC)


# The same by hand: finalize returns children in its turn.


class ManualC(Job[Named], name="manual.c"):
    def perform(self, ctx: Context[Named]) -> Result:
        return {"output": f"Hello from task C, {ctx.state.name}!"}


class ManualB(ParentTask[Named], name="manual.b"):
    def run(self, ctx: Context[Named]) -> Children:
        return Children(f"Hello from task B, {ctx.state.name}!")

    def finalize(self, ctx: Context[Named], output: Any, results: Sequence[Any]) -> Children | Result:
        if not results:
            return Children(output, [ManualC.new(ctx.state)])
        return {"taskBOutput": output, "taskCOutput": results[0]["output"]}


class ManualA(ParentTask[Named], name="manual.a"):
    def run(self, ctx: Context[Named]) -> Children:
        return Children(f"Hello from task A, {ctx.state.name}!")

    def finalize(self, ctx: Context[Named], output: Any, results: Sequence[Any]) -> Children | Result:
        if not results:
            return Children(output, [ManualB.new(ctx.state)])
        return {"taskAOutput": output, **results[0]}


# Parents with parallel children, one after the other.


class Greeting(Job[State], name="greeting"):
    """One of many children that differ in their name only."""

    def perform(self, ctx: Context[State]) -> Result:
        return {"output": f"Hello from task {ctx.state['task']}, {ctx.state['name']}!"}


def greetings(name: str, *tasks: str) -> list[Any]:
    return [Greeting.new({"task": task, "name": name}) for task in tasks]


class ParentA(ParentTask[Named], name="parents.a"):
    def run(self, ctx: Context[Named]) -> Children:
        return Children(f"Hello from task A, {ctx.state.name}!", greetings(ctx.state.name, "A1", "A2"))

    def finalize(self, ctx: Context[Named], output: Any, results: Sequence[Any]) -> Result:
        return {
            "name": ctx.state.name,
            "taskAOutput": output,
            "taskA1Output": results[0]["output"],
            "taskA2Output": results[1]["output"],
        }


class ParentB(ParentTask[State], name="parents.b"):
    def run(self, ctx: Context[State]) -> Children:
        earlier = {key: value for key, value in ctx.state.items() if key != "name"}
        name = ctx.state["name"]
        return Children({**earlier, "taskBOutput": f"Hello from task B, {name}!"}, greetings(name, "B1", "B2"))

    def finalize(self, ctx: Context[State], output: Any, results: Sequence[Any]) -> Result:
        return {**output, "taskB1Output": results[0]["output"], "taskB2Output": results[1]["output"]}


Parents = sequence("parents", ParentA, ParentB)


# A tree.


class TreeB1(Job[Named], name="tree.b1"):
    def perform(self, ctx: Context[Named]) -> Result:
        return {"name": ctx.state.name, "taskB1Output": f"Hello from task B1, {ctx.state.name}!"}


class TreeB2(Job[State], name="tree.b2"):
    def perform(self, ctx: Context[State]) -> Result:
        return {**ctx.state, "taskB2Output": f"Hello from task B2, {ctx.state['name']}!"}


class TreeB3(Job[State], name="tree.b3"):
    def perform(self, ctx: Context[State]) -> Result:
        return {
            "taskB1Output": ctx.state["taskB1Output"],
            "taskB2Output": ctx.state["taskB2Output"],
            "taskB3Output": f"Hello from task B3, {ctx.state['name']}!",
        }


TreeB = sequence("tree.b", TreeB1, TreeB2, TreeB3)


class TreeA(ParentTask[Named], name="tree.a"):
    def run(self, ctx: Context[Named]) -> Children:
        return Children(f"Hello from task A, {ctx.state.name}!", greetings(ctx.state.name, "A1", "A2", "A3"))

    def finalize(self, ctx: Context[Named], output: Any, results: Sequence[Any]) -> Result:
        return {
            "taskAOutput": output,
            "taskA1Output": results[0]["output"],
            "taskA2Output": results[1]["output"],
            "taskA3Output": results[2]["output"],
        }


class Tree(ParentTask[Named], name="tree"):
    def run(self, ctx: Context[Named]) -> Children:
        return Children(f"Hello from root task, {ctx.state.name}!", [TreeA.new(ctx.state), TreeB.new(ctx.state)])

    def finalize(self, ctx: Context[Named], output: Any, results: Sequence[Any]) -> Result:
        return {"rootOutput": output, **results[0], **results[1]}


# Recursion.


@frozen
class Index:
    index: int = field(validator=validators.ge(0))


class Recursive(ParentTask[Index], name="recursive"):
    def run(self, ctx: Context[Index]) -> Children:
        index = ctx.state.index
        return Children(None, [] if index >= 9 else [Recursive.new(Index(index + 1))])

    def finalize(self, ctx: Context[Index], output: Any, results: Sequence[Any]) -> Result:
        return {"count": 1 + sum(result["count"] for result in results)}


# Polling: as there, by a chain of children, each of which sleeps before it runs. (`Again` does it in one row.)

POLL = 0.1


@frozen
class Polled:
    prevCount: int = field(validator=validators.ge(0))  # noqa: N815
    path: str = ""


class Polling(ParentTask[Polled], name="polling"):
    """The value is there once its file is."""

    def run(self, ctx: Context[Polled]) -> Children:
        path = Path(ctx.state.path)
        if path.exists():
            return Children({"isDone": True, "value": int(path.read_text())})
        later = Polling.new(Polled(ctx.state.prevCount + 1, ctx.state.path), schedule_in=POLL)
        return Children({"isDone": False, "value": None}, [later])

    def finalize(self, ctx: Context[Polled], output: Any, results: Sequence[Any]) -> Result:
        if output["isDone"]:
            return {"count": ctx.state.prevCount + 1, "value": output["value"]}
        return dict(results[0])


def after(seconds: float, path: Path, value: int) -> None:
    """Have the value come about in a while; whole at once, whoever looks."""

    def write() -> None:
        new = path.with_suffix(".new")
        new.write_text(str(value))
        new.replace(path)

    threading.Timer(seconds, write).start()


# Input and output of each, as the page states them.

HELLO = {"output": "Hello, world!"}
ABC = {f"task{each}Output": f"Hello from task {each}, world!" for each in "ABC"}

STATED: dict[str, tuple[Any, State, State]] = {
    "usage": (
        UploadFile,
        {"filePath": "file.txt", "uploadUrl": "https://example.com/upload"},
        {
            "filePath": "file.txt",
            "uploadUrl": "https://example.com/upload",
            "fileSize": 100,
            "title": "File Title",
            "summary": "File summary",
        },
    ),
    "simple sync": (SimpleSync, {"name": "world"}, HELLO),
    "simple async": (SimpleAsync, {"name": "world"}, HELLO),
    "validate input": (Validated, {"name": "world"}, HELLO),
    "validate input with schema": (ValidatedBySchema, {"name": "world"}, HELLO),
    "retries": (Retried, {"name": "world"}, {"totalAttempts": 3, **HELLO}),
    "parallel children": (
        Parallel,
        {"name": "world"},
        {
            "output": "Hello from parent task, world!",
            "children_outputs": [
                {"output": "Hello from task A, world!"},
                {"output": "Hello from task B, world!"},
            ],
        },
    ),
    "combined output": (
        Combined,
        {"name": "world"},
        {
            "parentOutput": "Hello from parent task, world!",
            "taskAOutput": "Hello from task A, world!",
            "taskBOutput": "Hello from task B, world!",
        },
    ),
    "sequential": (Sequential, {"name": "world"}, ABC),
    "sequential by hand": (ManualA, {"name": "world"}, ABC),
    "parents in sequence": (
        Parents,
        {"name": "world"},
        {f"task{each}Output": f"Hello from task {each}, world!" for each in ("A", "A1", "A2", "B", "B1", "B2")},
    ),
    "tree": (
        Tree,
        {"name": "world"},
        {
            "rootOutput": "Hello from root task, world!",
            **{
                f"task{each}Output": f"Hello from task {each}, world!"
                for each in ("A", "A1", "A2", "A3", "B1", "B2", "B3")
            },
        },
    ),
    "recursive": (Recursive, {"index": 0}, {"count": 10}),
}
