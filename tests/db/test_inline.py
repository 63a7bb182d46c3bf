"""Inline machines: the next step runs on the claim that is held already, and the fence moves with every step."""

from datetime import timedelta

import pytest
from races import claim, claim_one, goes_on, insert, is_done, reap, repeats, signal
from support import expire, row

from gendurable import FSM, Context, Done, Next, Outcome, step
from gendurable.core.claim import Claim
from gendurable.core.transition import Advance, CarryOn, Transition, carried_on, keep_claim
from gendurable.db.connection import Connection
from gendurable.db.operations import commit
from gendurable.errors import DefinitionError


class Inline(FSM[dict], name="f", inline=True):
    @step
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        return Next(self.two)

    @step
    def two(self, ctx: Context[dict]) -> Outcome[dict]:
        return Done()


def on_to(claimed: Claim, target: str = "two", state: str = "{}", delay: float = 0) -> Transition:
    return Advance(claimed.id, claimed.fence, target, state, timedelta(seconds=delay), ())


def kept(claimed: Claim, **about: object) -> Transition:
    return keep_claim(claimed, on_to(claimed, **about), Inline())  # type: ignore[arg-type]


def test_a_step_goes_on_without_giving_the_claim_up(conn: Connection):
    claimed = claim_one(conn)
    before = row(conn, claimed.id)
    change = kept(claimed, state='{"n": 1}')
    assert isinstance(change, CarryOn)
    assert commit(conn, [change]).written == (change,)
    after = row(conn, claimed.id)
    assert (after["status"], after["step"], after["state"], after["attempt"]) == ("executing", "two", {"n": 1}, 0)
    assert after["fence"] == before["fence"] + 1
    assert (after["locked_by"], after["lease_expires_at"]) == (before["locked_by"], before["lease_expires_at"])
    assert claim(conn, "b") == [], "it is still held"
    successor = carried_on(claimed, change)
    assert (successor.step, successor.state, successor.fence) == ("two", '{"n": 1}', claimed.fence + 1)
    assert commit(conn, [is_done(successor)]).written
    assert row(conn, claimed.id)["status"] == "done"


def test_a_repetition_of_the_commit_changes_nothing(conn: Connection):
    # The answer was lost and the old session lives on: its commit must not take the row back.
    claimed = claim_one(conn)
    change = kept(claimed)
    commit(conn, [change])
    successor = carried_on(claimed, change)
    further = keep_claim(successor, on_to(successor, "three", '{"n": 2}'), Inline())
    commit(conn, [further])
    assert commit(conn, [change]).written == ()
    assert row(conn, claimed.id)["step"] == "three"


def test_an_outcome_of_an_earlier_step_is_stale(conn: Connection):
    claimed = claim_one(conn)
    commit(conn, [kept(claimed)])
    assert commit(conn, [is_done(claimed)]).written == ()
    assert commit(conn, [goes_on(claimed)]).written == ()
    assert row(conn, claimed.id)["status"] == "executing"


def test_a_worker_that_lost_its_lease_cannot_go_on(conn: Connection):
    claimed = claim_one(conn)
    change = kept(claimed)
    expire(conn, claimed.id)
    assert reap(conn) == [claimed.id]
    assert commit(conn, [change]).written == ()
    assert (row(conn, claimed.id)["status"], row(conn, claimed.id)["step"]) == ("runnable", "one")


def test_a_death_between_two_steps_is_a_crash_of_the_second(conn: Connection):
    claimed = claim_one(conn)
    commit(conn, [kept(claimed)])
    expire(conn, claimed.id)
    reap(conn)
    [again] = claim(conn, "b")
    assert (again.step, again.attempt) == ("two", 1)


def test_the_next_step_starts_to_count_anew(conn: Connection):
    id = insert(conn)
    commit(conn, [repeats(each) for each in claim(conn)])
    claim(conn)
    expire(conn, id)
    reap(conn)
    [claimed] = claim(conn)
    before = row(conn, id)
    assert (before["attempt"], before["crashes"]) == (2, 1)
    change = kept(claimed)
    commit(conn, [change])
    after = row(conn, id)
    assert (after["attempt"], after["crashes"]) == (0, 0)
    assert carried_on(claimed, change).attempt == 0


def test_a_step_with_a_delay_queues_again(conn: Connection):
    assert isinstance(kept(claim_one(conn), delay=1), Advance)


def test_a_row_with_signals_queues_again_so_that_its_next_step_sees_them(conn: Connection):
    id = insert(conn)
    signal(conn, id)
    [claimed] = claim(conn)
    assert isinstance(kept(claimed), Advance)


def test_a_row_with_a_partition_key_queues_again(conn: Connection):
    assert isinstance(kept(claim_one(conn, partition_key="k")), Advance)


def test_a_machine_that_is_not_inline_queues_again(conn: Connection):
    class Plain(Inline, name="plain", inline=False):
        pass

    claimed = claim_one(conn)
    assert isinstance(keep_claim(claimed, on_to(claimed), Plain()), Advance)


def test_after_some_steps_it_queues_again_so_that_others_get_their_turn(conn: Connection):
    claimed = claim_one(conn)
    steps = 0
    while isinstance(change := keep_claim(claimed, on_to(claimed), Inline()), CarryOn):
        claimed = carried_on(claimed, change)
        steps += 1
    assert 5 <= steps <= 100


def test_inline_is_true_or_false():
    with pytest.raises(DefinitionError, match="inline=1"):

        class Wrong(Inline, name="wrong", inline=1):  # type: ignore[arg-type]
            pass
