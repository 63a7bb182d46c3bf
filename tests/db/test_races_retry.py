"""A failed instance that runs again: what its parent waits for stays exact, whoever else moves meanwhile."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support import Background, hold, row

from gendurable import FSM, Await, Context, Done, Job, Outcome, Spawn, Stop, step
from gendurable.core.status import Status
from gendurable.core.transition import Finish
from gendurable.db.connection import Connection
from gendurable.db.operations import commit, retry_instance
from gendurable.errors import DuplicateInstance, InstanceNotFound, NotRetryable
from gendurable.testing import Harness

State = dict[str, Any]


class Parent(FSM[State], name="parent"):
    """Spawns one child that fails at first and one that waits for a signal; a second round on demand."""

    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        children = [Flaky.new({}), Patient.new({})]
        return Spawn(children, then=self.joined)

    @step
    def joined(self, ctx: Context[State]) -> Outcome[State]:
        statuses = [str(child.status) for child in ctx.joined]
        if ctx.state.get("again"):
            return Spawn([Patient.new({})], then=self.joined, state={"first": statuses})
        return Done({"first": ctx.state.get("first"), "joined": statuses})


class Flaky(Job[State], name="flaky"):
    """Fails until somebody has mended the world."""

    mended = False

    def perform(self, ctx: Context[State]) -> Stop | None:
        return None if Flaky.mended else Stop("broken")


class Patient(FSM[State], name="patient"):
    """Waits."""

    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return Await("go", then=self.finish)

    @step
    def finish(self, ctx: Context[State]) -> Outcome[State]:
        return Done()


class Family:
    """A parent that waits, its child that failed and its child that waits."""

    def __init__(self, harness: Harness, conn: Connection, **state: Any) -> None:
        self._harness = harness
        self._conn = conn
        self.parent = harness.insert(Parent.new(state))
        harness.drain()
        rows = conn.execute("select id from gen_durable where parent_id = %s order by child_index", [self.parent])
        self.failed, self.waiting = (id for (id,) in rows)

    def pending(self) -> int:
        return int(row(self._conn, self.parent)["children_pending"])

    def status(self, id: int) -> str:
        return str(row(self._conn, id)["status"])


@pytest.fixture(autouse=True)
def broken_world() -> None:
    Flaky.mended, Fussy.stumbles = False, True


@pytest.fixture
def machines(harness: Callable[..., Harness]) -> Harness:
    return harness(Parent, Flaky, Patient)


@pytest.fixture
def family(machines: Harness, conn: Connection) -> Family:
    found = Family(machines, conn)
    assert (found.status(found.failed), found.status(found.parent), found.pending()) == (
        "failed",
        "awaiting_children",
        1,
    )
    return found


def test_a_retried_instance_starts_its_step_afresh_and_is_due_at_once(machines: Harness, conn: Connection):
    id = machines.insert(Flaky.new({}))
    machines.drain()
    conn.execute("update gen_durable set attempt = 4, crashes = 3, eligible_at = now() + interval '1 day'")
    retry_instance(conn, id)
    found = row(conn, id)
    assert (found["status"], found["step"], found["attempt"], found["crashes"]) == ("runnable", "perform", 0, 0)
    assert (found["locked_by"], found["lease_expires_at"], found["result"]) == (None, None, None)
    assert conn.execute("select eligible_at <= clock_timestamp() from gen_durable").fetchone() == (True,)
    Flaky.mended = True
    assert machines.drain() == {"done": 1}


def test_a_child_whose_parent_still_waits_for_it_is_counted_again(family: Family, machines: Harness, conn: Connection):
    retry_instance(conn, family.failed)
    assert family.pending() == 2
    machines.signal(family.waiting, "go")
    Flaky.mended = True
    machines.drain()
    assert machines.get(family.parent).result == {"first": None, "joined": ["done", "done"]}


def test_a_child_that_fails_again_is_counted_once_more_and_no_more(family: Family, machines: Harness, conn: Connection):
    for _ in range(3):
        retry_instance(conn, family.failed)
        assert family.pending() == 2
        machines.drain()
        assert (family.pending(), family.status(family.parent)) == (1, "awaiting_children")
    machines.signal(family.waiting, "go")
    machines.drain()
    assert machines.get(family.parent).result == {"first": None, "joined": ["failed", "done"]}


def test_a_child_whose_parent_has_ended_is_not_joined(family: Family, machines: Harness, conn: Connection):
    machines.signal(family.waiting, "go")
    machines.drain()
    ended = row(conn, family.parent)
    Flaky.mended = True
    retry_instance(conn, family.failed)
    machines.drain()
    assert family.status(family.failed) == "done"
    assert row(conn, family.parent) == ended


@pytest.mark.parametrize("status", ["runnable", "executing"])
def test_a_child_whose_parent_was_released_by_it_is_not_counted_again(
    family: Family, machines: Harness, conn: Connection, status: str
):
    # The step that follows the barrier still knows its round.
    machines.signal(family.waiting, "go")
    machines._run(machines._claim(None, 100), Counter())
    if status == "executing":
        machines._claim(None, 100)
    assert family.status(family.parent) == status
    retry_instance(conn, family.failed)
    assert (family.pending(), family.status(family.parent)) == (0, status)


def test_a_child_of_an_earlier_round_is_not_joined_to_a_later_one(machines: Harness, conn: Connection):
    family = Family(machines, conn, again=True)
    machines.signal(family.waiting, "go")
    machines.drain()
    assert (family.status(family.parent), family.pending()) == ("awaiting_children", 1)
    Flaky.mended = True
    retry_instance(conn, family.failed)
    assert family.pending() == 1
    machines.drain()
    assert (family.status(family.parent), family.pending()) == ("awaiting_children", 1)


class Fussy(FSM[State], name="fussy"):
    """Joins its child, and stumbles over it at first."""

    stumbles = True

    @step
    def start(self, ctx: Context[State]) -> Outcome[State]:
        return Spawn([Flaky.new({})], then=self.joined)

    @step
    def joined(self, ctx: Context[State]) -> Outcome[State]:
        if Fussy.stumbles:
            return Stop("stumbled")
        return Done({"joined": [str(child.status) for child in ctx.joined]})


def test_a_step_that_had_joined_children_joins_them_again_when_it_is_retried(harness, conn: Connection):
    durable = harness(Fussy, Flaky)
    id = durable.insert(Fussy.new({}))
    durable.drain()
    assert durable.get(id).last_error == "stumbled"
    Fussy.stumbles = False
    retry_instance(conn, id)
    durable.drain()
    assert durable.get(id).result == {"joined": ["failed"]}


def test_a_retry_that_waited_while_the_last_sibling_opened_the_barrier_is_not_counted(
    family: Family, machines: Harness, conn: Connection, new_conn: Callable[[], Connection], background: Background
):
    """The parent's row is held, the sibling's end waits for it, then the retry does: the sibling comes first."""
    machines.signal(family.waiting, "go")
    holder, retrier = new_conn(), new_conn()
    sibling = machines._conn
    with hold(holder, family.parent):
        drained = background.start_blocked(sibling, machines.drain)
        retried = background.start_blocked(retrier, retry_instance, retrier, family.failed)
    drained.result()
    retried.result()
    machines.drain()
    assert family.status(family.parent) == "done"
    assert row(conn, family.parent)["children_pending"] == 0


def test_a_barrier_stays_shut_for_a_retry_that_came_before_the_last_sibling(
    family: Family, machines: Harness, conn: Connection, new_conn: Callable[[], Connection], background: Background
):
    """As above, the other way round: the sibling must see the count that it waited for."""
    retrier = new_conn()
    retrier.execute("begin")
    retry_instance(retrier, family.failed)
    machines.signal(family.waiting, "go")
    drained = background.start_blocked(machines._conn, machines.drain)
    retrier.execute("commit")
    drained.result()
    # Had it opened early, the parent would have seen a child that had not ended.
    assert machines.get(family.parent).result == {"first": None, "joined": ["failed", "done"]}
    assert row(conn, family.parent)["children_pending"] == 0


def test_two_retries_of_one_child_count_it_once(
    family: Family, conn: Connection, new_conn: Callable[[], Connection], background: Background
):
    first, second = new_conn(), new_conn()
    first.execute("begin")
    retry_instance(first, family.failed)
    waiting = background.start_blocked(second, retry_instance, second, family.failed)
    first.execute("commit")
    with pytest.raises(NotRetryable, match="is runnable, not failed"):
        waiting.result()
    assert family.pending() == 2


@pytest.mark.parametrize("status", ["runnable", "executing", "awaiting_signal", "awaiting_children", "done"])
def test_what_has_not_failed_is_left_as_it_is(machines: Harness, conn: Connection, status: str):
    id = machines.insert(Flaky.new({}))
    conn.execute("update gen_durable set status = %s::durable_status where id = %s", [status, id])
    before = row(conn, id)
    with pytest.raises(NotRetryable, match=f"instance {id} is {status}, not failed"):
        retry_instance(conn, id)
    assert row(conn, id) == before


def test_nobody_cannot_be_retried(conn: Connection):
    with pytest.raises(InstanceNotFound):
        retry_instance(conn, 4711)


def test_a_key_that_somebody_else_took_meanwhile_is_not_taken_back(machines: Harness, conn: Connection):
    old = machines.insert(Flaky.new({}, unique_key="k"))
    machines.drain()
    new = machines.insert(Flaky.new({}, unique_key="k"))
    with pytest.raises(DuplicateInstance) as refused:
        retry_instance(conn, old)
    assert (refused.value.unique_key, refused.value.occupant) == (b"k", new)
    assert row(conn, old)["status"] == "failed"


def test_a_key_that_is_still_free_is_taken_again(machines: Harness, conn: Connection):
    old = machines.insert(Flaky.new({}, unique_key="k"))
    machines.drain()
    retry_instance(conn, old)
    with pytest.raises(DuplicateInstance):
        machines.insert(Flaky.new({}, unique_key="k"))


def test_a_late_outcome_of_the_claim_that_failed_changes_nothing_after_a_retry(machines: Harness, conn: Connection):
    """The fence has not moved, but the row is not executing: the old claim has no say."""
    id = machines.insert(Flaky.new({}))
    machines.drain()
    fence = row(conn, id)["fence"]
    retry_instance(conn, id)
    before = row(conn, id)
    assert commit(conn, [Finish(id, fence, Status.DONE, "{}", None)]).written == ()
    assert row(conn, id) == before
