from collections.abc import Callable

from gendurable import FSM, Context, Done, Next, Outcome, step
from gendurable.testing import Harness


class Two(FSM[dict], name="two"):
    @step
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        return Next(self.finish, {"n": 1})

    @step
    def finish(self, ctx: Context[dict]) -> Outcome[dict]:
        return Done(ctx.state)


def test_two_steps_run_to_the_end(harness: Callable[..., Harness]):
    durable = harness(Two)
    two = durable.insert(Two.new())
    assert durable.drain() == {"next": 1, "done": 1}
    assert durable.get(two).result == {"n": 1}
