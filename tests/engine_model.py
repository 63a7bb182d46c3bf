"""The engine as a model in Python: every row and every inbox as they should be, operation by operation.

Model time counts whole hours: a test moves it by hand, so the seconds that a run really takes decide nothing.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from attrs import Factory, define, frozen

from gendurable.core.claim import Fenced
from gendurable.core.instance import NewInstance
from gendurable.core.status import TERMINAL, Status
from gendurable.core.transition import Advance, CarryOn, Finish, Park, Repeat, SpawnChildren, Transition

HOUR = timedelta(hours=1)


@define
class Time:
    """An instant: the model's hour, and the exact value once it was seen, which then must not move."""

    hour: int
    seen: datetime | None = None


@define
class Row:
    """What the model believes about one instance."""

    id: int
    fsm: str
    step: str
    state: dict[str, Any]
    queue: str
    priority: int
    partition_key: str | None
    unique_key: bytes | None
    unique_scope: frozenset[Status]
    max_crashes: int | None
    eligible_at: Time
    parent_id: int | None = None
    child_round: int | None = None
    child_index: int | None = None
    status: Status = Status.RUNNABLE
    result: dict[str, Any] | None = None
    attempt: int = 0
    crashes: int = 0
    last_error: str | None = None
    locked_by: str | None = None
    lease_expires_at: Time | None = None
    fence: int = 0
    awaits: list[str] | None = None
    await_deadline: Time | None = None
    children_pending: int = 0
    spawn_round: int = 0
    join_round: int | None = None
    fail_fast: bool = False
    on_cancel: bool = False
    cancelling: bool = False
    cancel_reason: str | None = None
    cancel_round: int | None = None
    deadline: Time | None = None
    is_old: bool = False

    @property
    def has_ended(self) -> bool:
        return self.status in TERMINAL

    def occupies(self, key: bytes | None) -> bool:
        return key is not None and self.unique_key == key and self.status in self.unique_scope

    def wake(self, at: Time) -> None:
        self.status = Status.RUNNABLE
        self.eligible_at = at
        self.await_deadline = None

    def let_go(self, status: Status) -> None:
        self.status = status
        self.locked_by = self.lease_expires_at = None

    def go_to(self, change: Advance | Park | SpawnChildren, status: Status) -> None:
        """What all outcomes that lead to another step have in common."""
        self.let_go(status)
        self.step, self.state = change.step, json.loads(change.state)
        self.attempt = self.crashes = 0
        self.last_error = change.error
        self.awaits = self.await_deadline = self.join_round = None
        self.fail_fast = self.cancelling = False


TIMES = ("eligible_at", "lease_expires_at", "await_deadline", "deadline")
COLUMNS = [name for name in Row.__annotations__ if name not in (*TIMES, "is_old")]


@frozen
class Sent:
    """An accepted signal."""

    id: int
    target_id: int
    name: str
    dedup_key: str | None


@frozen
class Birth:
    """A child that a commit must have brought; its id is the database's to give."""

    new: NewInstance
    parent_id: int
    child_round: int
    child_index: int


@define
class Model:
    """Every row and every inbox, as they should be. `start` is hour zero by the database's clock."""

    start: datetime
    hour: int = 0
    rows: dict[int, Row] = Factory(dict)
    signals: dict[int, Sent] = Factory(dict)
    # The queues of instances that a commit made runnable by way of others.
    woken: set[str] = Factory(set)

    def having(self, status: Status) -> list[Row]:
        return [row for row in self.rows.values() if row.status is status]

    def in_hours(self, count: float) -> Time:
        return Time(self.hour + round(count))

    def inbox(self, id: int) -> list[int]:
        return sorted(signal.id for signal in self.signals.values() if signal.target_id == id)

    def children(self, id: int) -> list[Row]:
        mine = [row for row in self.rows.values() if row.parent_id == id]
        return sorted(mine, key=lambda row: (row.child_round, row.child_index))

    def holds(self, claim: Fenced) -> bool:
        row = self.rows.get(claim.id)
        return row is not None and row.status is Status.EXECUTING and row.fence == claim.fence

    def take_woken(self) -> set[str]:
        woken, self.woken = self.woken, set()
        return woken

    # Clients.

    def is_refused(self, new: NewInstance) -> bool:
        return bool(new.unique_scope) and any(row.occupies(new.unique_key) for row in self.rows.values())

    def add(self, id: int, new: NewInstance) -> Row:
        if new.eligible_at is None:
            eligible_at = self.in_hours(new.delay / HOUR)
        else:
            eligible_at = Time(round((new.eligible_at - self.start) / HOUR), new.eligible_at)
        same = (
            "fsm",
            "step",
            "queue",
            "priority",
            "partition_key",
            "unique_key",
            "unique_scope",
            "max_crashes",
            "on_cancel",
        )
        row = Row(
            id=id,
            state=json.loads(new.state),
            eligible_at=eligible_at,
            **{name: getattr(new, name) for name in same},
        )
        if new.deadline is not None:
            row.deadline = self.in_hours(new.deadline / HOUR)
        self.rows[id] = row
        return row

    def add_child(self, id: int, birth: Birth) -> None:
        row = self.add(id, birth.new)
        row.parent_id, row.child_round, row.child_index = birth.parent_id, birth.child_round, birth.child_index

    def twin(self, id: int, dedup_key: str | None) -> int | None:
        """Return the signal in an inbox that another with this key would duplicate."""
        held = [signal for signal in self.inbox(id) if self.signals[signal].dedup_key == dedup_key]
        return held[0] if held and dedup_key is not None else None

    def deliver(self, sent: Sent) -> bool:
        """Put a signal into an inbox; true if that wakes its target."""
        self.signals[sent.id] = sent
        row = self.rows[sent.target_id]
        wakes = row.status is Status.AWAITING_SIGNAL and sent.name in row.awaits
        if wakes:
            row.wake(self.in_hours(0))
        return wakes

    def is_key_taken(self, row: Row) -> bool:
        """Could this row not come back to life, because another holds its key by now?"""
        others = [other for other in self.rows.values() if other is not row]
        return Status.RUNNABLE in row.unique_scope and any(other.occupies(row.unique_key) for other in others)

    def retry(self, row: Row) -> None:
        row.wake(self.in_hours(0))
        row.result = None
        row.attempt = row.crashes = 0
        row.cancel_reason = row.cancel_round = None
        if row.deadline and row.deadline.hour <= self.hour:
            row.deadline = None
        row.is_old = False
        if parent := self._barrier_of(row):
            parent.children_pending += 1

    def cancel(self, rows: Sequence[Row], reason: str, *, cascade: bool) -> list[Row]:
        """Cancel those that live and, with `cascade`, what lives below any of them; return those that this changed."""
        changed = []
        while rows:
            for row in rows:
                if not row.has_ended and row.cancel_reason is None:
                    self._cancel(row, reason)
                    changed.append(row)
            rows = [child for row in rows for child in self._cancelled_with(row)] if cascade else []
        return changed

    def _cancel(self, row: Row, reason: str) -> None:
        row.fence += 1
        row.cancel_reason = reason
        if not row.on_cancel:
            self._finish(row, Finish(row.id, row.fence, Status.CANCELLED, None, reason))
            return
        row.let_go(Status.RUNNABLE)
        row.wake(self.in_hours(0))
        row.cancelling, row.cancel_round, row.awaits = True, row.spawn_round, None
        row.attempt = row.crashes = row.children_pending = 0
        row.fail_fast = False

    def _cancelled_with(self, row: Row) -> list[Row]:
        """Its children, but for those that compensate for its end."""
        last = row.spawn_round if row.cancel_round is None else row.cancel_round
        return [child for child in self.children(row.id) if child.child_round <= last]

    # Workers.

    def claimable(self, queue: str, machines: Sequence[str]) -> list[Row]:
        """Those due, most urgent first; of each key at most the first, and none while one of it executes."""
        taken = {row.partition_key for row in self.having(Status.EXECUTING)} - {None}
        due = [
            row
            for row in self.having(Status.RUNNABLE)
            if row.queue == queue and row.eligible_at.hour <= self.hour and f"{row.fsm}@1" in machines
        ]
        chosen = []
        for row in sorted(due, key=lambda row: (row.priority, row.eligible_at.seen, row.id)):
            if row.partition_key not in taken:
                chosen.append(row)
                taken |= {row.partition_key} - {None}
        return chosen

    def claim(self, row: Row, worker: str, lease: int) -> None:
        row.status = Status.EXECUTING
        row.locked_by = worker
        row.lease_expires_at = self.in_hours(lease)
        row.fence += 1

    def fail_fast(self, row: Row) -> list[Row]:
        """Cancel what is left of the round that a claimed row was released from; return those that this changed."""
        reason = f"instance {row.id} fails fast, and another of its children has not ended well"
        left = [
            child
            for child in self.children(row.id)
            if row.fail_fast
            and child.child_round == row.join_round
            and (not child.has_ended or (child.status is Status.CANCELLED and child.last_error == reason))
        ]
        return self.cancel(left, reason, cascade=True)

    def write(self, changes: Sequence[Transition]) -> list[Birth]:
        """Apply the outcomes whose claim holds, kind by kind as a commit does; return the children it must bring."""
        held = [change for change in changes if self.holds(change)]
        births = self._spawn([change for change in held if isinstance(change, SpawnChildren)])
        for change in held:
            match change:
                case Advance():
                    self._advance(self.rows[change.id], change)
                case CarryOn():
                    self._carry_on(self.rows[change.id], change)
                case Repeat():
                    self._repeat(self.rows[change.id], change)
                case Park():
                    self._park(self.rows[change.id], change)
        for change in held:
            if isinstance(change, Finish):
                self._finish(self.rows[change.id], change)
        return births

    def _advance(self, row: Row, change: Advance) -> None:
        row.go_to(change, Status.RUNNABLE)
        row.eligible_at = self.in_hours(change.delay / HOUR)
        self._consume(change.consumed)

    def _carry_on(self, row: Row, change: CarryOn) -> None:
        row.step, row.state = change.step, json.loads(change.state)
        row.fence += 1
        row.attempt = row.crashes = 0
        row.last_error = change.error
        row.awaits = row.join_round = None

    def _repeat(self, row: Row, change: Repeat) -> None:
        row.let_go(Status.RUNNABLE)
        row.state = json.loads(change.state)
        row.eligible_at = self.in_hours(change.delay / HOUR)
        row.attempt += change.attempts
        row.crashes = 0
        row.last_error = change.error or row.last_error

    def _park(self, row: Row, change: Park) -> None:
        row.go_to(change, Status.AWAITING_SIGNAL)
        row.attempt = change.attempt
        row.awaits = json.loads(change.names)
        row.await_deadline = None if change.timeout is None else self.in_hours(change.timeout / HOUR)
        if any(self.signals[id].name in row.awaits and id not in change.shown for id in self.inbox(row.id)):
            row.wake(self.in_hours(0))
            self.woken.add(row.queue)

    def _spawn(self, changes: list[SpawnChildren]) -> list[Birth]:
        births: list[Birth] = []
        wanted = [(change.id, place, new) for change in changes for place, new in enumerate(change.children)]
        for parent, place, new in sorted(wanted, key=lambda each: (each[2].unique_key or b"", *each[:2])):
            twins = [birth.new for birth in births if new.unique_scope and birth.new.unique_scope]
            if not self.is_refused(new) and (new.unique_key is None or new.unique_key not in map(_unique_key, twins)):
                births.append(Birth(new, parent, self.rows[parent].spawn_round + 1, place))
        for change in changes:
            row = self.rows[change.id]
            born = sum(birth.parent_id == row.id for birth in births)
            row.go_to(change, Status.AWAITING_CHILDREN if born else Status.RUNNABLE)
            row.children_pending = born
            row.fail_fast = change.fail_fast and born > 0
            row.await_deadline = None if change.timeout is None or not born else self.in_hours(change.timeout / HOUR)
            row.spawn_round += 1
            row.join_round = row.spawn_round
            row.eligible_at = self.in_hours(0)
            self._consume(change.consumed)
        return births

    def _finish(self, row: Row, change: Finish) -> None:
        row.let_go(change.status)
        row.result = None if change.result is None else json.loads(change.result)
        row.last_error = change.error
        row.crashes = change.crashes
        row.awaits = row.await_deadline = None
        if change.status is Status.DONE:  # otherwise it may be retried, and joins the same children
            row.join_round = None
        row.children_pending, row.fail_fast, row.cancelling = 0, False, False
        self._consume(self.inbox(row.id))
        if parent := self._barrier_of(row):
            is_too_bad = parent.fail_fast and change.status is not Status.DONE
            parent.children_pending = 0 if is_too_bad else parent.children_pending - 1
            if not parent.children_pending:
                parent.wake(self.in_hours(0))
                self.woken.add(parent.queue)

    def _barrier_of(self, child: Row) -> Row | None:
        """Return the parent, if it waits for the round that this child belongs to."""
        parent = self.rows.get(child.parent_id)
        is_awaited = parent and parent.status is Status.AWAITING_CHILDREN and parent.join_round == child.child_round
        return parent if is_awaited else None

    def _consume(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.signals.pop(id, None)

    # Maintenance.

    def expired(self) -> list[Row]:
        late = [row for row in self.having(Status.EXECUTING) if row.lease_expires_at.hour <= self.hour]
        return sorted(late, key=lambda row: row.lease_expires_at.seen)

    def reap(self, row: Row, worker: str, lease: int) -> bool:
        """Take a claim away; true if the crash budget is spent, so that the reaper holds it now."""
        row.attempt += 1
        row.crashes += 1
        is_spent = row.max_crashes is not None and row.crashes >= row.max_crashes
        if is_spent:
            self.claim(row, worker, lease)
        else:
            row.fence += 1
            row.let_go(Status.RUNNABLE)
        return is_spent

    def overdue(self) -> list[Row]:
        parked = [*self.having(Status.AWAITING_SIGNAL), *self.having(Status.AWAITING_CHILDREN)]
        return [row for row in parked if row.await_deadline and row.await_deadline.hour <= self.hour]

    def late(self) -> list[Row]:
        """Those that live past their deadline."""
        alive = [row for row in self.rows.values() if not row.has_ended]
        return [row for row in alive if row.deadline and row.deadline.hour <= self.hour]

    def end_late(self, rows: Sequence[Row]) -> None:
        """End them in one batch: who is among them joins no other."""
        for row in rows:
            self.claim(row, "sweeper", 0)
        for row in rows:
            reason = f"DeadlineExceeded: it was to end by {row.deadline.seen:%Y-%m-%d %H:%M:%S.%f}".rstrip("0")
            self._finish(row, Finish(row.id, row.fence, Status.FAILED, None, f"{reason}+00"))

    def time_out(self, row: Row) -> None:
        """Wake what has waited long enough; children that still live are no longer waited for."""
        row.wake(row.await_deadline)
        row.children_pending, row.fail_fast = 0, False

    def collectable(self) -> list[int]:
        """The old ones that have neither a living parent, which may still read them, nor children."""
        return [
            id
            for id, row in sorted(self.rows.items())
            if row.is_old and (row.parent_id is None or self.rows[row.parent_id].has_ended) and not self.children(id)
        ]


def _unique_key(new: NewInstance) -> bytes | None:
    return new.unique_key
