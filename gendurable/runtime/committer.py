"""Committer: group commit. Outcomes that wait together are written in one transaction; a lone one does not wait."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic

import psycopg
from attrs import evolve, frozen

from gendurable.core.claim import Claim
from gendurable.core.duration import ZERO
from gendurable.core.transition import Advance, CarryOn, Repeat, SpawnChildren, Transition, carried_on
from gendurable.db.faults import is_locked, is_passing
from gendurable.events import BatchCommitted, OutcomeDeferred, OutcomeStale, StepCommitted
from gendurable.runtime.committing import Settled, settle
from gendurable.runtime.loop import Loop, Wires, jittered
from gendurable.runtime.session import Session

# Past a few hundred rows a larger batch saves nothing more and only lets the others wait.
BATCH = 500
BATCH_BYTES = 16 * 1024 * 1024
IDLE = 5.0
FIRST_DEFERRAL, LONGEST_DEFERRAL = 0.25, 5.0


@frozen
class Performed:
    """A claim whose step has run, and what is to become of its row."""

    claim: Claim
    change: Transition
    seconds: float
    tries: int = 0
    answer_lost: bool = False


# Told of claims that are held no longer, and of the queues in which rows became due.
OnSettled = Callable[[Sequence[Claim], frozenset[str]], None]


# Told of claims that go on at another step, each with the claim that it has become.
OnCarried = Callable[[Sequence[tuple[Claim, Claim]]], None]


class Committer(Loop):
    """Writes what was performed, in the order it came, as large a batch as gathered during the last commit.

    Nobody waits for it: a thread hands its outcome over and takes the next claim. A commit whose answer was lost is
    repeated under the same fence, so that it counts once. A batch in which somebody has locked a row is halved until
    that outcome is alone, and put aside; one such try a round, so that the others need not wait for many of them.
    """

    def __init__(self, session: Session, wires: Wires, on_settled: OnSettled, on_carried: OnCarried) -> None:
        """Report what was settled to `on_settled`, and a claim that goes on as another one to `on_carried`."""
        super().__init__("committer", session, wires)
        self._on_settled = on_settled
        self._on_carried = on_carried
        self._waiting: deque[Performed] = deque()
        self._halves: deque[list[Performed]] = deque()
        self._deferred: list[tuple[float, int, Performed]] = []
        self._order = count()

    def submit(self, performed: Performed) -> None:
        """Have an outcome written soon."""
        self._waiting.append(performed)
        self.wake()

    def run_once(self) -> float:
        """Write one batch, and before it one of those that met a lock."""
        if self._halves:
            self._write(self._halves.popleft())
        elif self._deferred and self._deferred[0][0] <= monotonic():
            self._write([heapq.heappop(self._deferred)[2]])
        if batch := self._gather():
            self._write(batch)
        if self._waiting or self._halves:
            return 0
        return max(self._deferred[0][0] - monotonic(), 0) if self._deferred else IDLE

    def _gather(self) -> list[Performed]:
        batch: list[Performed] = []
        room = BATCH_BYTES
        while self._waiting and len(batch) < BATCH and room > 0:
            batch.append(self._waiting.popleft())
            room -= _size(batch[-1].change)
        return batch

    def _write(self, batch: list[Performed]) -> None:
        started = monotonic()
        try:
            settled = settle(self._session.conn, [performed.change for performed in batch])
        except psycopg.Error as error:
            if not is_locked(error):
                self._put_back(batch, error)
                raise
            self._set_aside(batch)
            return
        except Exception as error:
            self._put_back(batch, error)
            raise
        seconds = monotonic() - started
        report(batch, settled, self._emit)
        self._emit(BatchCommitted(len(batch), seconds))
        settled_claims, carried = self._told_apart(batch, settled)
        self._on_settled(settled_claims, settled.woken | wakes(batch))
        if carried:
            self._on_carried(carried)

    def _told_apart(self, batch: list[Performed], settled: Settled) -> tuple[list[Claim], list[tuple[Claim, Claim]]]:
        """Return the claims that are held no longer, and those that go on, each with its successor."""
        going_on = {change.id: change for change in settled.written if isinstance(change, CarryOn)}
        ended: list[Claim] = []
        carried: list[tuple[Claim, Claim]] = []
        for performed in batch:
            change = going_on.get(performed.claim.id) if going_on else None
            if change is not None and change is performed.change:
                carried.append((performed.claim, carried_on(performed.claim, change)))
            else:
                ended.append(performed.claim)
        return ended, carried

    def _put_back(self, batch: list[Performed], error: Exception) -> None:
        if is_passing(error):
            self._waiting.extendleft(evolve(performed, answer_lost=True) for performed in reversed(batch))

    def _set_aside(self, batch: list[Performed]) -> None:
        if len(batch) > 1:
            middle = len(batch) // 2
            self._halves += batch[:middle], batch[middle:]
            return
        [performed] = batch
        pause = jittered(min(FIRST_DEFERRAL * 2**performed.tries, LONGEST_DEFERRAL))
        later = evolve(performed, tries=min(performed.tries + 1, 10))
        heapq.heappush(self._deferred, (monotonic() + pause, next(self._order), later))
        self._emit(OutcomeDeferred(performed.claim.id, performed.claim.fsm, performed.claim.step))


def report(batch: Sequence[Performed], settled: Settled, emit: Callable[[StepCommitted | OutcomeStale], None]) -> None:
    """Say what became of each outcome."""
    written = {(change.id, change.fence): change for change in settled.written}
    for performed in batch:
        claim = performed.claim
        change = written.get((claim.id, claim.fence))
        if change is None:
            emit(
                OutcomeStale(claim.id, claim.queue, claim.fsm, claim.step, performed.change.kind, performed.answer_lost)
            )
        else:
            emit(
                StepCommitted(
                    id=claim.id,
                    queue=claim.queue,
                    fsm=claim.fsm,
                    fsm_version=claim.fsm_version,
                    step=claim.step,
                    outcome=change.kind,
                    attempt=claim.attempt,
                    seconds=performed.seconds,
                    error=change.error,
                )
            )


def wakes(batch: Sequence[Performed]) -> frozenset[str]:
    """Return the queues in which these outcomes make rows due at once: their own, and those of new children."""
    queues: set[str] = set()
    for performed in batch:
        match performed.change:
            case Advance(delay=delay) | Repeat(delay=delay):
                if delay == ZERO:
                    queues.add(performed.claim.queue)
            case SpawnChildren(children=children):
                queues.add(performed.claim.queue)
                queues.update(child.queue for child in children)
            case _:
                pass
    return frozenset(queues)


def _size(change: Transition) -> int:
    match change:
        case SpawnChildren(state=state, children=children):
            return len(state) + sum(len(child.state) for child in children)
        case Advance(state=state) | CarryOn(state=state) | Repeat(state=state):
            return len(state)
        case _:
            return 0
