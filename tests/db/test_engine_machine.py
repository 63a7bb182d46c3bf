"""Hypothesis drives the SQL layer through random lives; a model in Python predicts every row after every rule.

The promises beside the model are checked on what was seen alone, so that an error which SQL and model share still has
to get past them. The default run is derandomized, so that a failure is the change's and not the day's;
GENDURABLE_HYPOTHESIS_PROFILE=thorough searches at random and for long (`make test-slow`).
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import pytest
from attrs import Factory, define, evolve, frozen
from engine_model import COLUMNS, HOUR, TIMES, Model, Row, Sent, Time
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from psycopg.rows import dict_row

from gendurable import FSM, Again, Await, Context, Done, Next, Outcome, Retry, Spawn, Stop, step
from gendurable.core.claim import Claim
from gendurable.core.instance import NewInstance
from gendurable.core.status import LIVE, TERMINAL, Status
from gendurable.core.transition import (
    Advance,
    CarryOn,
    Finish,
    Park,
    SpawnChildren,
    Transition,
    carried_on,
    keep_claim,
    transition,
    with_error,
)
from gendurable.db import store
from gendurable.db.connection import Connection, one_commit
from gendurable.db.endings import cancel_now
from gendurable.db.operations import claim_batch, delivered, insert_instances, retry_instance, send_signal
from gendurable.db.statements import statement
from gendurable.errors import DuplicateInstance, NoTarget, NotRetryable
from gendurable.runtime.committing import Settled, settle
from gendurable.runtime.sweeping import end_late, reap_expired, wake_overdue

THOROUGH = os.environ.get("GENDURABLE_HYPOTHESIS_PROFILE") == "thorough"
USUAL = settings(
    stateful_step_count=40,
    deadline=None,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
SEARCH = (
    settings(USUAL, max_examples=500, stateful_step_count=80)
    if THOROUGH
    else settings(USUAL, max_examples=80, derandomize=True)
)
RUNS = range(8 if THOROUGH else 1)  # several, so that xdist can share out the long search
# To find a planted error, not to explain it.
HUNT = settings(USUAL, max_examples=400, derandomize=True, phases=[Phase.generate])

LEASE = 2
QUEUES = ("left", "right")
STEPS = ("start", "middle", "end")
NAMES = ("a", "b")
KEYS = ("k", "l")
ABSENT = 2**40
CROWD = 6  # more living rows than these would only dilute what happens to each
POISON = '{"n": "\\u0000"}'  # JSON to Python, but no jsonb

StoredRows: TypeAlias = dict[int, dict[str, Any]]


class Frail(FSM[dict], name="frail", max_crashes=2):
    @step
    def start(self, ctx: Context[dict]) -> Outcome[dict]:
        raise NotImplementedError

    @step
    def middle(self, ctx: Context[dict]) -> Outcome[dict]:
        raise NotImplementedError

    @step
    def end(self, ctx: Context[dict]) -> Outcome[dict]:
        raise NotImplementedError


class Tough(Frail, name="tough", max_crashes=None, inline=True):
    def on_cancel(self, ctx: Context[dict]) -> Outcome[dict]:
        raise NotImplementedError


MACHINES: dict[str, FSM[dict]] = {"frail": Frail(), "tough": Tough()}
# The second worker lacks the code of one machine: its claims must pass those rows by.
WORKERS = {"one": ["frail@1", "tough@1"], "two": ["tough@1"], "three": ["frail@1", "tough@1"]}


# What may be drawn.


@frozen
class Description:
    """What a new instance may say about itself; `since_start` counts from the hour at which the run began."""

    fsm: str
    queue: str
    priority: int
    partition_key: str | None
    unique_key: str | None
    unique_scope: frozenset[Status] | None
    delay: timedelta
    since_start: timedelta | None
    deadline: timedelta | None


NOW_OR_LATER = st.sampled_from((0 * HOUR, 0 * HOUR, 0 * HOUR, HOUR))
DESCRIPTIONS = st.builds(
    Description,
    fsm=st.sampled_from(tuple(MACHINES)),
    queue=st.sampled_from((QUEUES[0], *QUEUES)),
    priority=st.sampled_from((0, 0, 1)),
    partition_key=st.sampled_from((None, None, None, *KEYS)),
    unique_key=st.sampled_from((None, None, None, *KEYS)),
    unique_scope=st.sampled_from((None, None, frozenset(), LIVE | {Status.DONE}, frozenset(Status))),
    delay=NOW_OR_LATER,
    since_start=st.sampled_from((None, None, None, None, -HOUR, HOUR)),
    deadline=st.sampled_from((None, None, None, None, HOUR, 3 * HOUR)),
)
STATES = st.one_of(st.none(), st.builds(lambda n: {"n": n}, st.integers(0, 9)))
NEXT = st.builds(Next, st.sampled_from(STEPS), STATES, delay=NOW_OR_LATER)
RETRY = st.sampled_from((Retry, Retry, Again)).flatmap(lambda kind: st.builds(kind, STATES, delay=NOW_OR_LATER))
AWAIT = st.builds(
    Await,
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    st.sampled_from(STEPS),
    STATES,
    timeout=st.sampled_from((None, HOUR, 2 * HOUR)),
)
CHILDREN = st.lists(DESCRIPTIONS.map(lambda child: evolve(child, delay=0 * HOUR, since_start=None)), max_size=3)
SPAWN = st.builds(
    Spawn,
    CHILDREN,
    st.sampled_from(STEPS),
    STATES,
    timeout=st.sampled_from((None, None, HOUR, 2 * HOUR)),
    on_failure=st.sampled_from(("collect", "collect", "fail_fast")),
)
END = st.sampled_from((Done({"ok": True}), Stop("enough")))
ANY = st.one_of(RETRY, NEXT, AWAIT, SPAWN, RETRY, NEXT, AWAIT, SPAWN, END)
# What the outcomes of one batch have in common: batches of one kind find what mixed ones do not.
MOODS = st.sampled_from((ANY, ANY, ANY, ANY, END, AWAIT, SPAWN))


def several(values: Sequence[Any], least: int = 1) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=least, max_size=4, unique_by=identity)


def identity(value: Claim | Transition | Row) -> tuple[int, int]:
    return value.id, value.fence


@define
class History:
    """What was seen and answered, for the promises that do without the model."""

    accepted: dict[int, Sent] = Factory(dict)
    consumed: set[int] = Factory(set)
    written: Counter[tuple[int, int]] = Factory(Counter)
    endings: StoredRows = Factory(dict)
    fences: dict[int, int] = Factory(dict)
    # What a parked instance's last step had been shown: only these signals may lie there unheeded.
    shown: dict[int, frozenset[int]] = Factory(dict)
    collected: set[int] = Factory(set)
    retried: set[int] = Factory(set)
    # Rounds that were not waited for to the end: their time was over, or a child had failed and that was enough.
    impatient: set[tuple[int, int]] = Factory(set)

    def remember(self, change: Transition) -> None:
        self.written[identity(change)] += 1
        if isinstance(change, Advance | SpawnChildren):
            self.consumed.update(change.consumed)
        elif isinstance(change, Park):
            self.shown[change.id] = frozenset(change.shown)
        elif isinstance(change, Finish):
            self.forget(change.id)

    def forget(self, id: int) -> None:
        """An instance has ended: its inbox is gone."""
        self.consumed.update(signal.id for signal in self.accepted.values() if signal.target_id == id)


class EngineMachine(RuleBasedStateMachine):
    """The engine's operations in any order, by three workers, clients, reapers and an impatient clock.

    One rule that draws among moves: rules of their own would all be as frequent as each other, and runs would spend
    most of their steps on what has no effect just now.
    """

    model: Model

    def __init__(self, conn: Connection) -> None:
        super().__init__()
        self.conn = conn
        self.history = History()
        self.claims: list[Claim] = []  # every claim ever made, held or not
        self.batches: list[list[Transition]] = []  # every batch ever committed
        self.serial = 0

    @initialize(described=st.lists(DESCRIPTIONS, min_size=1, max_size=3))
    def start_with_a_few(self, described: list[Description]) -> None:
        self.conn.execute("delete from gen_durable")  # takes the signals with it; cheaper than truncate
        [start] = self.conn.execute("select clock_timestamp()").fetchone()
        self.model = Model(start)
        self.insert_all(described)

    def moves(self) -> dict[str, int]:
        """How likely each move is now."""
        alive = [row for row in self.model.rows.values() if not row.has_ended]
        is_any_parked = any(row.status is Status.AWAITING_SIGNAL for row in alive)
        is_busy, is_any_held = bool(self.busy_queues()), bool(self.held())
        return {
            "insert": 2 if len(alive) < CROWD else 0,
            "signal": 4 if is_any_parked else 1,
            "retry": 1 if self.retryable() else 0,
            "cancel": 3 if any(row.cancelling or row.spawn_round for row in alive) else 1 if self.model.rows else 0,
            "claim": 3 if is_busy else 1,
            "claim_and_commit": 6 if is_busy else 0,
            "commit": 3 if is_any_held else 0,
            "commit_old_and_new_together": 3 if self.lost() else 1 if self.claims else 0,
            "commit_again": 1 if self.batches else 0,
            "commit_what_is_refused": 1 if is_any_held else 0,
            "beat_or_release": 1 if self.claims else 0,
            "lose_a_claim": 2 if is_any_held else 0,
            "let_time_pass": 2,
            "grow_old_and_collect": 1 if len(alive) < len(self.model.rows) else 0,
        }

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        names = [name for name, weight in self.moves().items() for _ in range(weight)]
        getattr(self, data.draw(st.sampled_from(names), label="move"))(data)

    @property
    def ahead(self) -> timedelta:
        return self.model.hour * HOUR

    def held(self) -> list[Claim]:
        return [claim for claim in self.claims if self.model.holds(claim)]

    def lost(self) -> list[Claim]:
        """Claims whose instance executes under a newer one."""
        executing = {row.id for row in self.model.having(Status.EXECUTING)}
        return [claim for claim in self.claims if claim.id in executing and not self.model.holds(claim)]

    def retryable(self) -> list[Row]:
        return [*self.model.having(Status.FAILED), *self.model.having(Status.CANCELLED)]

    def busy_queues(self) -> list[str]:
        return [queue for queue in QUEUES if self.model.claimable(queue, WORKERS["one"])]

    # Clients.

    def insert(self, data: st.DataObject) -> None:
        self.insert_all(data.draw(st.lists(DESCRIPTIONS, min_size=1, max_size=3), label="instances"))

    def insert_all(self, described: list[Description]) -> None:
        wanted = [self.new(each) for each in described]
        answer = insert_instances(self.conn, wanted, ahead=self.ahead)
        stored = self.conn.execute("select (state->>'serial')::int, id from gen_durable where state ? 'serial'")
        ids = dict(stored.fetchall())
        inserted = []
        for new in sorted(wanted, key=lambda new: new.unique_key or b""):
            if not self.model.is_refused(new):
                id = ids[json.loads(new.state)["serial"]]
                self.model.add(id, new)
                inserted.append(id)
        assert sorted(answer) == sorted(inserted)

    def new(self, described: Description) -> NewInstance:
        self.serial += 1
        since = described.since_start
        return type(MACHINES[described.fsm]).new(
            {"serial": self.serial},
            queue=described.queue,
            priority=described.priority,
            partition_key=described.partition_key,
            unique_key=described.unique_key,
            unique_scope=described.unique_scope if described.unique_key else None,
            schedule_in=described.delay,
            eligible_at=None if since is None else self.model.start + since,
            deadline=described.deadline,
        )

    def signal(self, data: st.DataObject) -> None:
        parked = [row.id for row in self.model.having(Status.AWAITING_SIGNAL)]
        id = data.draw(st.sampled_from([*self.model.rows, ABSENT, *(3 * parked)]), label="target")
        name = data.draw(st.sampled_from(NAMES), label="name")
        self.send(id, name, data.draw(st.sampled_from((None, None, None, "once", "twice")), label="dedup_key"))

    def send(self, id: int, name: str, dedup_key: str | None) -> None:
        with one_commit(self.conn):
            answer = send_signal(self.conn, id, name, {}, dedup_key, ahead=self.ahead)
        if id not in self.model.rows or self.model.rows[id].has_ended:
            with pytest.raises(NoTarget):
                delivered(id, answer)
            return
        delivery = delivered(id, answer)
        if twin := self.model.twin(id, dedup_key):
            assert (delivery.id, delivery.duplicate, delivery.woke) == (twin, True, False)
            return
        assert not delivery.duplicate
        sent = Sent(delivery.id, id, name, dedup_key)
        self.history.accepted[sent.id] = sent
        assert delivery.woke == self.model.deliver(sent)

    def cancel(self, data: st.DataObject) -> None:
        parents = [row for row in self.model.rows.values() if row.spawn_round]
        row = data.draw(st.sampled_from([*self.model.rows.values(), *(4 * parents)]), label="instance")
        cascade = data.draw(st.sampled_from((True, True, False)), label="cascade")
        if row.status in {Status.DONE, Status.FAILED}:
            with pytest.raises(NoTarget):
                cancel_now(self.conn, row.id, "enough", cascade=cascade, ahead=self.ahead)
            return
        is_ours = cancel_now(self.conn, row.id, "enough", cascade=cascade, ahead=self.ahead)
        assert is_ours == (not row.has_ended and row.cancel_reason is None)
        self.expect_cut_short(self.model.cancel([row], "enough", cascade=cascade))
        self.model.take_woken()

    def expect_cut_short(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.has_ended:
                self.history.forget(row.id)
            self.history.impatient.add((row.id, row.join_round))

    def retry(self, data: st.DataObject) -> None:
        retryable = self.retryable()
        row = data.draw(st.sampled_from([*(3 * retryable), *self.model.rows.values()]), label="instance")
        if row not in retryable:
            with pytest.raises(NotRetryable):
                retry_instance(self.conn, row.id, ahead=self.ahead)
        elif self.model.is_key_taken(row):
            with pytest.raises(DuplicateInstance):
                retry_instance(self.conn, row.id, ahead=self.ahead)
        else:
            retry_instance(self.conn, row.id, ahead=self.ahead)
            self.model.retry(row)
            self.history.endings.pop(row.id, None)
            self.history.retried.add(row.id)

    # Workers.

    def claim(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from(self.busy_queues() or QUEUES), label="queue")
        worker = data.draw(st.sampled_from(tuple(WORKERS)), label="worker")
        self.claim_as(worker, queue, data.draw(st.integers(1, 5), label="limit"))

    def claim_as(self, worker: str, queue: str, limit: int) -> list[Claim]:
        machines = WORKERS[worker]
        claims = claim_batch(
            self.conn,
            queue=queue,
            machines=machines,
            worker=worker,
            limit=limit,
            lease=LEASE * HOUR,
            ahead=self.ahead,
        )
        expected = self.model.claimable(queue, machines)[:limit]
        assert [claim.id for claim in claims] == [row.id for row in expected]
        for claim, row in zip(claims, expected, strict=True):
            self.model.claim(row, worker, LEASE)
            same = ("fence", "attempt", "awaits", "join_round", "cancelling", "cancel_reason", "fail_fast")
            assert {name: getattr(claim, name) for name in same} == {name: getattr(row, name) for name in same}
            assert [signal.id for signal in claim.inbox] == self.model.inbox(row.id)
            assert [child.id for child in claim.children] == [child.id for child in self.model.children(row.id)]
        for row in expected:
            self.expect_cut_short(self.model.fail_fast(row))
        self.claims += claims
        return claims

    def claim_and_commit(self, data: st.DataObject) -> None:
        queue = data.draw(st.sampled_from(self.busy_queues()), label="queue")
        claims = self.claim_as("one", queue, data.draw(st.sampled_from((1, 2, 5)), label="limit"))
        self.write(self.draw_changes(data, claims))

    def draw_changes(self, data: st.DataObject, claims: list[Claim]) -> list[Transition]:
        mood = data.draw(MOODS, label="mood")
        return [self.draw_change(data, claim, mood) for claim in claims]

    def draw_change(self, data: st.DataObject, claim: Claim, mood: st.SearchStrategy[Any]) -> Transition:
        outcome = data.draw(mood, label=f"outcome of {claim.id}")
        if isinstance(outcome, Spawn):
            outcome = evolve(outcome, children=[self.new(each) for each in outcome.children])
        change = transition(claim, outcome, json.loads(claim.state), MACHINES[claim.fsm])
        if data.draw(st.integers(0, 3), label="handled") == 3:
            change = with_error(claim, change, ValueError("oh"))
        return keep_claim(claim, change, MACHINES[claim.fsm])

    def commit(self, data: st.DataObject) -> None:
        claims = data.draw(several(self.held()), label="claims")
        self.write(self.draw_changes(data, claims))

    def commit_old_and_new_together(self, data: st.DataObject) -> None:
        claims = data.draw(several([*(3 * self.lost()), *self.held()] or self.claims), label="claims")
        self.write(self.draw_changes(data, claims))

    def commit_again(self, data: st.DataObject) -> None:
        """As after an answer that was lost."""
        self.write(data.draw(st.sampled_from(self.batches), label="batch"))

    def write(self, changes: list[Transition]) -> None:
        self.batches.append(changes)
        self.expect(settle(self.conn, changes, ahead=self.ahead), self.expect_settled(changes))

    def expect(self, settled: Settled, expected: list[Transition]) -> None:
        assert sorted(map(identity, settled.written)) == sorted(map(identity, expected))
        assert settled.woken == self.model.take_woken()
        for change in settled.written:
            if isinstance(change, CarryOn):
                [claim] = [claim for claim in self.claims if identity(claim) == identity(change)]
                self.claims.append(carried_on(claim, change))
            if change not in expected:
                assert change.error.startswith("Unstorable"), "only what was refused is not written as it was given"
                self.model.rows[change.id].last_error = change.error

    def commit_what_is_refused(self, data: st.DataObject) -> None:
        changes = self.draw_changes(data, data.draw(several(self.held()), label="claims"))
        place = data.draw(st.integers(0, len(changes) - 1), label="poisoned")
        bad = {"result": POISON} if isinstance(changes[place], Finish) else {"state": POISON}
        changes[place] = evolve(changes[place], **bad)
        self.write(changes)

    def expect_settled(self, changes: Sequence[Transition]) -> list[Transition]:
        """Halve until the refused one is alone, as `settle` does; its neighbours are written in that order."""
        if not any(self.is_refused(change) for change in changes):
            return self.expect_written(changes)
        if len(changes) > 1:
            middle = len(changes) // 2
            return self.expect_settled(changes[:middle]) + self.expect_settled(changes[middle:])
        return self.expect_written([Finish(*identity(changes[0]), Status.FAILED, None, None)])

    def is_refused(self, change: Transition) -> bool:
        is_poisoned = POISON in (getattr(change, "state", None), getattr(change, "result", None))
        return is_poisoned and self.model.holds(change)

    def expect_written(self, changes: Sequence[Transition]) -> list[Transition]:
        """Apply a batch to the model, children included, and return what counts as written."""
        held = [change for change in changes if self.model.holds(change)]
        for change in held:
            self.history.remember(change)
        for birth in self.model.write(changes):
            query = "select id from gen_durable where parent_id = %s and child_round = %s and child_index = %s"
            found = self.conn.execute(query, [birth.parent_id, birth.child_round, birth.child_index]).fetchall()
            assert len(found) == 1, f"{birth} came about {len(found)} times"
            self.model.add_child(found[0][0], birth)
        return held

    def beat_or_release(self, data: st.DataObject) -> None:
        claims = data.draw(several(self.claims, least=0), label="claims")
        keeps = data.draw(st.booleans(), label="keeps")
        if keeps:
            answer = store.extend_leases(self.conn, claims, lease=LEASE * HOUR, ahead=self.ahead)
        else:
            answer = store.release(self.conn, claims)
        held = [self.model.rows[claim.id] for claim in claims if self.model.holds(claim)]
        assert sorted(answer.all()) == sorted(row.id for row in held)
        for row in held:
            if keeps:
                row.lease_expires_at = self.model.in_hours(LEASE)
            else:
                row.let_go(Status.RUNNABLE)

    # Time and maintenance.

    def lose_a_claim(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.held()), label="claim")
        self.in_turn(
            lambda: self.expire(self.model.rows[claim.id]),
            self.reap,
            lambda: self.claim_as("three", claim.queue, limit=5),
        )
        if data.draw(st.booleans(), label="answers late"):
            self.write(self.draw_changes(data, [claim]))

    def let_time_pass(self, data: st.DataObject) -> None:
        self.model.hour += data.draw(st.sampled_from((0, 1, 1, 2, 3)), label="hours")
        reapers = {"none": lambda: None, "dying": lambda: self.reap_and_die(limit=1), "lively": self.reap}
        reap = reapers[data.draw(st.sampled_from(tuple(reapers)), label="reaper")]
        sweeps = (self.end_late, self.wake_overdue) if data.draw(st.booleans(), label="sweeps") else ()
        self.in_turn(reap, *sweeps)

    def in_turn(self, *moves: Callable[[], object]) -> None:
        for move in moves:
            move()
            self.check()

    def expire(self, row: Row) -> None:
        query = "update gen_durable set lease_expires_at = lease_expires_at - %s where id = %s"
        self.conn.execute(query, [100 * HOUR, row.id])
        row.lease_expires_at = Time(row.lease_expires_at.hour - 100)

    def reap(self) -> None:
        reaped = reap_expired(self.conn, worker="reaper", lease=LEASE * HOUR, ahead=self.ahead)
        expired = self.model.expired()
        assert {row.id for row in reaped} == {row.id for row in expired}
        spent = [row for row in expired if self.model.reap(row, "reaper", LEASE)]
        assert {row.id for row in reaped if row.spent} == {row.id for row in spent}
        for row in spent:
            reason = f"the worker died {row.crashes} times in a row in step {row.step!r}; nothing more is tried"
            self.expect_written([Finish(row.id, row.fence, Status.FAILED, None, reason, row.crashes)])
        self.model.take_woken()

    def reap_and_die(self, limit: int) -> None:
        """A reaper that does not come to end what it found spent: those expire again."""
        reaped = store.reap(self.conn, worker="dying", limit=limit, lease=LEASE * HOUR, ahead=self.ahead).all()
        expired = self.model.expired()
        chosen = [row for row in expired if row.id in {row.id for row in reaped}]
        leases = [row.lease_expires_at.seen for row in expired]
        assert [row.lease_expires_at.seen for row in chosen] == leases[:limit], "the oldest first, equals in any order"
        spent = {row.id for row in chosen if self.model.reap(row, "dying", LEASE)}
        assert {row.id for row in reaped if row.spent} == spent

    def end_late(self) -> None:
        ended, woken = end_late(self.conn, ahead=self.ahead)
        late = self.model.late()
        assert {row.id for row in ended} == {row.id for row in late}
        self.model.end_late(sorted(late, key=lambda row: row.id))
        assert woken == self.model.take_woken()
        self.expect_cut_short(late)

    def wake_overdue(self) -> None:
        woken = wake_overdue(self.conn, ahead=self.ahead)
        overdue = self.model.overdue()
        assert {row.id for row in woken} == {row.id for row in overdue}
        for row in overdue:
            if row.status is Status.AWAITING_CHILDREN:
                self.history.impatient.add((row.id, row.join_round))
            self.model.time_out(row)

    def grow_old_and_collect(self, data: st.DataObject) -> None:
        ended = [row for row in self.model.rows.values() if row.has_ended and not row.is_old]
        if ended:
            self.age(data.draw(several(ended), label="instances"))
        limit = data.draw(st.integers(1, 3), label="limit")
        gone = store.gc(self.conn, older_than=HOUR, after=0, limit=limit).all()
        assert sorted(gone) == self.model.collectable()[:limit]
        for id in gone:
            del self.model.rows[id]
        self.history.collected.update(gone)

    def age(self, rows: Iterable[Row]) -> None:
        ids = [row.id for row in rows]
        self.conn.execute("update gen_durable set updated_at = updated_at - %s where id = any(%s)", [2 * HOUR, ids])
        for id in ids:
            self.model.rows[id].is_old = True
            self.history.endings.pop(id)  # its row was changed, by us

    # After each rule.

    @invariant()
    def the_promises_hold_and_all_is_as_predicted(self) -> None:
        self.check()

    def check(self) -> None:
        rows, signals = self.stored_rows(), self.stored_signals()
        check_claims(rows, self.history)
        check_endings(rows, self.history)
        check_signals(rows, signals, self.history)
        check_wake_ups(rows, signals, self.history)
        check_barriers(rows, self.history)
        check_keys(rows)
        self.compare_with_model(rows)
        assert signals == self.model.signals

    def stored_rows(self) -> StoredRows:
        cursor = self.conn.cursor(row_factory=dict_row)
        rows = cursor.execute("select *, unique_scope::text[] as unique_scope from gen_durable").fetchall()
        for row in rows:
            row["status"] = Status(row["status"])
            row["unique_scope"] = frozenset(map(Status, row["unique_scope"]))
        return {row["id"]: row for row in rows}

    def stored_signals(self) -> dict[int, Sent]:
        rows = self.conn.execute("select id, target_id, name, dedup_key from signals").fetchall()
        return {row[0]: Sent(*row) for row in rows}

    def compare_with_model(self, rows: StoredRows) -> None:
        assert rows.keys() == self.model.rows.keys()
        for id, row in self.model.rows.items():
            assert {name: rows[id][name] for name in COLUMNS} == {name: getattr(row, name) for name in COLUMNS}
            for name in TIMES:
                self.compare_time(f"{name} of {id}", rows[id][name], getattr(row, name))

    def compare_time(self, what: str, actual: datetime | None, expected: Time | None) -> None:
        if actual is None or expected is None:
            assert actual is expected, what
            return
        assert round((actual - self.model.start) / HOUR) == expected.hour, what
        assert expected.seen in (None, actual), f"{what} moved"
        expected.seen = actual


# The promises.


def check_claims(rows: StoredRows, history: History) -> None:
    assert all(count == 1 for count in history.written.values()), "two outcomes of one claim were written"
    for id, row in rows.items():
        is_held = row["status"] is Status.EXECUTING
        assert is_held == (row["locked_by"] is not None) == (row["lease_expires_at"] is not None)
        assert row["fence"] >= history.fences.get(id, 0), "a fence went back: an old claim could write again"
        assert row["attempt"] >= row["crashes"], "a crash is an attempt"
        history.fences[id] = row["fence"]


def check_endings(rows: StoredRows, history: History) -> None:
    for id, row in rows.items():
        if row["status"] in TERMINAL:
            assert history.endings.setdefault(id, row) == row, "an ended instance changed"
        else:
            assert id not in history.endings, "an ended instance lives again"
    assert history.endings.keys() <= rows.keys() | history.collected, "an ended instance is gone"


def check_signals(rows: StoredRows, signals: dict[int, Sent], history: History) -> None:
    living = {id for id, row in rows.items() if row["status"] not in TERMINAL}
    expected = {id for id, signal in history.accepted.items() if signal.target_id in living} - history.consumed
    assert signals.keys() == expected, "a signal was lost, or outlived its use"


def check_wake_ups(rows: StoredRows, signals: dict[int, Sent], history: History) -> None:
    for signal in signals.values():
        row = rows[signal.target_id]
        if row["status"] is Status.AWAITING_SIGNAL and signal.name in row["awaits"]:
            assert signal.id in history.shown[row["id"]], "parked beside a signal that it waits for"


def check_barriers(rows: StoredRows, history: History) -> None:
    for id, row in rows.items():
        joined = [
            child for child in rows.values() if (child["parent_id"], child["child_round"]) == (id, row["join_round"])
        ]
        unfinished = {child["id"] for child in joined if child["status"] not in TERMINAL}
        if row["fail_fast"] and any(child["status"] in TERMINAL - {Status.DONE} for child in joined):
            history.impatient.add((id, row["join_round"]))
        if row["status"] is Status.AWAITING_CHILDREN:
            assert unfinished, "a barrier has not opened"
            assert (id, row["join_round"]) not in history.impatient, "a barrier stayed shut after a child failed"
            assert row["children_pending"] == len(unfinished)
        else:
            # A child may fail, be counted, and be retried once its parent has gone on.
            is_early = (id, row["join_round"]) in history.impatient
            assert is_early or unfinished <= history.retried, "a barrier opened too early"
            assert row["children_pending"] == 0


def check_keys(rows: StoredRows) -> None:
    occupied = [row["unique_key"] for row in rows.values() if row["status"] in row["unique_scope"]]
    assert len(occupied) == len(set(occupied)), "two rows hold one unique key"
    busy = [row["partition_key"] for row in rows.values() if row["status"] is Status.EXECUTING]
    keys = [key for key in busy if key is not None]
    assert len(keys) == len(set(keys)), "two rows of one partition key execute"


# The runs.


@pytest.mark.timeout(0 if THOROUGH else 300)
@pytest.mark.parametrize("run", RUNS)
def test_the_engine_does_what_the_model_predicts(conn: Connection, run: int):
    run_state_machine_as_test(lambda: EngineMachine(conn), settings=SEARCH)


# Errors that are easily made, each planted into one statement. A few each day, all of them in the thorough run.
PLANTED = {
    "a stale end is joined": ("finish", "g.fence = t.fence", "true"),
    "a signal that came before the park wakes nobody": ("recheck_parked", "limit 1)", "limit 0)"),
    "a busy partition key is not noticed": ("claim", "busy.status = 'executing'", "busy.status = 'failed'"),
    "a retry starts counting anew": ("repeat", "attempt = g.attempt + t.attempts", "attempt = t.attempts"),
    "gc takes the children of a living parent": ("gc", "in ('done', 'failed', 'cancelled'))", "is not null)"),
    "a failed child does not open a barrier that is to fail fast": ("finish", "p.fail_fast and", "false and"),
    "a cascade passes children by that wait": ("find_children", ", 'awaiting_signal'", ""),
    "a deadline that has passed ends a retried instance at once": ("retry", "g.deadline >", "g.deadline <>"),
    "a hook that has run runs again": ("advance", "cancelling = false", "cancelling = g.cancelling"),
    "a cascade takes the compensation too": ("find_children", "<= p.cancel_round", "is not null"),
    "a stale Next is written": ("advance", "g.fence = t.fence", "true"),
    "two children that end together count once": ("finish", "- arrived.children", "- 1"),
    "a signal that was shown wakes again": ("recheck_parked", "s.id <> all (", "0 <> all ("),
    "a signal that was not shown is consumed": ("advance", "s.id = any (", "0 <> all ("),
    "a signal of any name wakes": ("deliver", "= any (target.awaits)", "is not null"),
    "a claim carried on keeps its number": ("carry_on", "fence = g.fence + 1", "fence = g.fence"),
    "the reaper leaves the fence as it was": ("reap", "fence = g.fence + 1", "fence = g.fence"),
    "a retried child is not counted again": ("retry", "p.children_pending + 1", "p.children_pending"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("error", list(PLANTED)[: None if THOROUGH else 5])
def test_the_machine_finds(conn: Connection, monkeypatch: pytest.MonkeyPatch, error: str):
    name, right, wrong = PLANTED[error]
    text = statement(name).decode()
    assert right in text, f"{name}.sql has changed: plant the error anew"
    broken = text.replace(right, wrong).encode()
    monkeypatch.setattr(store, "statement", lambda asked: broken if asked == name else statement(asked))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(lambda: EngineMachine(conn), settings=HUNT)
