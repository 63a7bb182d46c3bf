"""Runner: one claim on one thread, from the context to an outcome that is on its way into the database."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic, sleep

import psycopg
from attrs import evolve, frozen

from gendurable.core.claim import Claim
from gendurable.core.duration import ZERO
from gendurable.core.registry import Machine
from gendurable.core.transition import keep_claim
from gendurable.current import CurrentStep, in_step
from gendurable.db import store
from gendurable.db.connection import Connection, EngineConnection, one_line
from gendurable.db.faults import is_locked, is_passing, is_read_only
from gendurable.db.lending import SessionLost, StepTransaction, lend
from gendurable.db.operations import Committed, give_back, take_keys
from gendurable.errors import describe
from gendurable.events import (
    BatchCommitted,
    DatabaseUnavailable,
    Listener,
    LockLost,
    OutcomeLate,
    PartitionContended,
    StepCrashed,
    StepFailed,
    TransactionLost,
)
from gendurable.runtime.chunk import Chunk
from gendurable.runtime.committer import OnSettled, Performed, report, wakes
from gendurable.runtime.committing import Settled, settle
from gendurable.runtime.executions import Execution, Executions
from gendurable.runtime.executor import Report, execute, is_transactional, time_out, timeout_of
from gendurable.runtime.loop import FIRST_SETBACK, LONGEST_SETBACK, jittered
from gendurable.runtime.partitions import LockConnections

# Performed steps of several keys wait no longer than this for others that share their session.
SECONDS_UNCOMMITTED = 0.01


class Superseded(BaseException):  # no Exception, so that it passes through where a step's errors are caught
    """Another thread has answered for the execution."""


@frozen(kw_only=True)
class Runner:
    """Runs claims. The outcome of a plain one is handed to the committer; a keyed one never leaves its session."""

    machines: Mapping[tuple[str, int], Machine]
    locks: LockConnections
    executions: Executions
    emit: Listener
    submit: Callable[[Performed], None]
    on_settled: OnSettled
    on_contended: Callable[[Claim], None]
    on_unstarted: Callable[[Claim], None]
    learn: Callable[[Claim, float], None]
    stopping: threading.Event
    # Whether there are transactional steps at all.
    transactional: bool = False

    def is_transactional(self, claim: Claim) -> bool:
        """Tell whether a claim's step runs in a transaction; such a one shares its session with no other."""
        return self.transactional and is_transactional(claim, self.machines[claim.fsm, claim.fsm_version])

    def run(self, claims: Sequence[Claim]) -> bool:
        """Run a claim, or several of different partition keys one after the other; never raises.

        True: a step took too long, and another thread has the slot and all that was left to do.
        """
        try:
            if self.is_transactional(claims[0]):
                self._run_transactional(claims[0])
            elif claims[0].partition_key is None:
                self._run_plain(claims[0])
            else:
                self._run_keyed(claims)
        except Superseded:
            return True
        except BaseException as error:  # noqa: BLE001  a bug of ours must not cost the thread; the reaper has the rows
            for claim in claims:
                self._crashed(claim, error)
        return False

    def time_out(self, execution: Execution) -> bool:
        """Answer for a step that took too long, and go on in its thread's place; never raises. True: as for `run`."""
        claim, chunk = execution.claim, execution.chunk
        try:
            if execution.transaction is not None:
                self.locks.give_up(execution.transaction.conn)
            performed = self._answer_timeout(execution)
            if chunk is not None:
                chunk.add(claim, performed)
                self._run_chunk(chunk)
            elif performed is not None:
                self.submit(performed)
        except Superseded:
            return True
        except BaseException as error:  # noqa: BLE001  as above
            for each in [claim] if chunk is None else [*chunk.unsettled.values()]:
                self._crashed(each, error)
        return False

    def _run_plain(self, claim: Claim) -> None:
        performed = self._perform(claim)
        if performed is not None:
            self.submit(performed)

    def _perform(self, claim: Claim, chunk: Chunk | None = None) -> Performed | None:
        """Run the step; None if it crashed. Superseded if another thread has answered for it meanwhile."""
        started = monotonic()
        machine = self.machines[claim.fsm, claim.fsm_version]
        step = CurrentStep(claim.id, claim.fsm, claim.step)
        execution = self.executions.begin(claim, timeout_of(claim, machine), chunk)
        try:
            change = in_step(step, execute, claim, machine, self._reporter(claim), execution)
        except BaseException as error:  # noqa: BLE001  SystemExit and its like: a crash, as a dead process would be
            if not self.executions.end(execution):
                raise self._superseded(claim, "crash", started) from None
            self._crashed(claim, error)
            return None
        if not self.executions.end(execution):
            raise self._superseded(claim, change.kind, started)
        seconds = monotonic() - started
        self.learn(claim, seconds)
        return Performed(claim, keep_claim(claim, change, machine), seconds)

    def _superseded(self, claim: Claim, outcome: str, started: float) -> Superseded:
        self.emit(OutcomeLate(claim.id, claim.queue, claim.fsm, claim.step, outcome, monotonic() - started))
        return Superseded()

    def _answer_timeout(self, execution: Execution) -> Performed | None:
        claim, timeout = execution.claim, execution.timeout or ZERO
        machine = self.machines[claim.fsm, claim.fsm_version]
        step = CurrentStep(claim.id, claim.fsm, claim.step)
        self.learn(claim, timeout.total_seconds())
        try:
            change = in_step(step, time_out, claim, machine, timeout, self._reporter(claim), execution.limiters)
        except BaseException as error:  # noqa: BLE001  the handler's SystemExit
            self._crashed(claim, error)
            return None
        return Performed(claim, keep_claim(claim, change, machine), timeout.total_seconds())

    def _reporter(self, claim: Claim) -> Report:
        def report_failure(kind: str, error: Exception) -> None:
            self.emit(StepFailed(claim.id, claim.queue, claim.fsm, claim.step, claim.attempt, kind, describe(error)))

        return report_failure

    def _crashed(self, claim: Claim, error: BaseException) -> None:
        self.emit(StepCrashed(claim.id, claim.queue, claim.fsm, claim.step, describe(error)))
        # Out of the heartbeat's sight, so that the lease runs out and the reaper returns the row.
        self.on_settled([claim], frozenset())

    # Transactional steps: what the step writes and what becomes of its row, in one transaction.

    def _run_transactional(self, claim: Claim) -> None:
        conn, _ = self._locked([claim], _lend)
        if conn is None:
            return
        started = monotonic()
        machine = self.machines[claim.fsm, claim.fsm_version]
        transaction = StepTransaction(conn, claim)
        execution = self.executions.begin(claim, timeout_of(claim, machine), None, transaction)
        transaction.before_commit = partial(self._decide, execution)
        step = CurrentStep(claim.id, claim.fsm, claim.step)
        outcome = "crash"
        try:
            change = in_step(step, execute, claim, machine, self._reporter(claim), execution)
            outcome = change.kind
            self._decide(execution)
        except BaseException as error:  # noqa: BLE001  a crash, or nobody's to decide any more
            conn.take_back()
            if not self._may_decide(execution):
                conn.close()  # the other thread has done without it
                raise self._superseded(claim, outcome, started) from None
            self.locks.release(conn, clean=False)
            self._fell(claim, error)
            return
        seconds = monotonic() - started - transaction.seconds
        self.learn(claim, seconds)
        performed = Performed(claim, change, seconds)
        if transaction.committed is not None:
            self._sealed(conn, performed, transaction.committed, transaction.seconds)
        elif claim.partition_key is not None:
            chunk = Chunk(conn, {claim.id: claim})
            chunk.start()
            chunk.add(claim, performed)
            self._run_chunk(chunk)
        else:
            self.locks.release(conn, clean=True)
            self.submit(evolve(performed, change=keep_claim(claim, change, machine)))

    def _may_decide(self, execution: Execution) -> bool:
        """Tell whether what becomes of an execution is ours to say, once and for all."""
        if not execution.is_decided and self.executions.end(execution):
            execution.is_decided = True
        return execution.is_decided

    def _decide(self, execution: Execution) -> None:
        if not self._may_decide(execution):
            raise Superseded

    def _fell(self, claim: Claim, error: BaseException) -> None:
        """Leave a claim to the reaper whose transaction has ended without an outcome."""
        if not isinstance(error, SessionLost):
            self._crashed(claim, error)
            return
        self.emit(TransactionLost(claim.id, claim.queue, claim.fsm, claim.step, str(error)))
        self.on_settled([claim], frozenset())

    def _sealed(self, conn: EngineConnection, performed: Performed, committed: Committed, seconds: float) -> None:
        """Tell what was committed, once the partition key is free again: a sibling may be claimed at once."""
        self.locks.release(conn, clean=True)
        report([performed], Settled(committed.written, committed.woken), self.emit)
        self.emit(BatchCommitted(1, seconds))
        self.on_settled([performed.claim], committed.woken | wakes([performed]))

    # Partitioned steps: lock, step, commit and unlock, all in one session.

    def _run_keyed(self, claims: Sequence[Claim]) -> None:
        conn, held = self._locked(claims, take_keys)
        if conn is not None:
            self._run_chunk(Chunk(conn, {claim.id: claim for claim in held}))

    def _run_chunk(self, chunk: Chunk) -> None:
        try:
            self._settle_some(chunk)
            while chunk.unsettled:
                self._perform_some(chunk)
                self._settle_some(chunk)
        except Superseded:
            raise  # all of it is the other thread's by now
        except psycopg.Error as error:
            self._lose([*chunk.unsettled.values()], error)
            self.locks.release(chunk.conn, clean=False)
        except BaseException:
            self.locks.release(chunk.conn, clean=False)
            raise
        else:
            self.locks.release(chunk.conn, clean=True)

    def _perform_some(self, chunk: Chunk) -> None:
        """Run claims whose keys this session holds: all of them, unless they take longer than expected.

        Then what has been performed does not wait for the rest.
        """
        enough = monotonic() + SECONDS_UNCOMMITTED
        while (claim := chunk.start()) is not None:
            chunk.add(claim, self._perform(claim, chunk))
            if monotonic() > enough or self.stopping.is_set():
                break

    def _settle_some(self, chunk: Chunk) -> None:
        """Commit what was performed, and let go."""
        with chunk.lock:
            self._settle_performed(chunk)
            if self.stopping.is_set():
                self._hand_back(chunk)

    def relieve(self, execution: Execution) -> None:
        """A step that shares its session takes its time: do what need not wait for it, in another thread.

        What was performed before it is committed, and what has not begun goes to other threads.
        """
        chunk = execution.chunk
        if chunk is None:
            return
        with chunk.lock:
            if not self.executions.is_running(execution):
                return  # it has ended after all, and its thread goes on with the rest
            try:
                self._settle_performed(chunk)
                self._hand_back(chunk)
            except psycopg.Error as error:
                # The step itself runs on: what it has come to, its own thread will see.
                lost = [claim for claim in chunk.unsettled.values() if claim is not execution.claim]
                for claim in lost:
                    del chunk.unsettled[claim.id]
                chunk.recall()
                self._lose(lost, error)

    def _settle_performed(self, chunk: Chunk) -> None:
        performed, crashed = chunk.take()
        if crashed:
            self._let_go(chunk, crashed)
        if performed:
            self._commit_keyed(chunk, performed)

    def _hand_back(self, chunk: Chunk) -> None:
        if unstarted := chunk.recall():
            self._let_go(chunk, unstarted)
            for claim in unstarted:
                self.on_unstarted(claim)

    def _lose(self, claims: Sequence[Claim], error: psycopg.Error) -> None:
        """Without their session nothing of them may be written, and no sibling starts before the rows are reaped."""
        for claim in claims:
            self.emit(LockLost(claim.id, claim.queue, claim.fsm, claim.step, one_line(error)))
        self.on_settled(claims, frozenset())

    def _let_go(self, chunk: Chunk, claims: Sequence[Claim]) -> None:
        store.unlock_partitions(chunk.conn, keys=_keys(claims)).all()
        for claim in claims:
            del chunk.unsettled[claim.id]

    def _locked(
        self, claims: Sequence[Claim], take: Callable[[EngineConnection, Sequence[Claim]], Sequence[Claim]]
    ) -> tuple[EngineConnection | None, Sequence[Claim]]:
        """Return a connection, and the claims that `take` could prepare it for; None if all were given back instead."""
        failures = 0
        while True:
            conn: EngineConnection | None = None
            try:
                conn = self.locks.acquire(self.stopping)
                if conn is None:
                    for claim in claims:
                        self.on_unstarted(claim)
                    return None, ()
                held = take(conn, claims)
                if len(held) < len(claims):
                    self._bounce(conn, [claim for claim in claims if claim not in held])
            except Exception as error:
                if conn is not None:
                    self.locks.release(conn, clean=False)
                    self.locks.close_idle(0)  # what broke this one broke them all, more likely than not
                if not is_passing(error):
                    raise
                pause = jittered(min(FIRST_SETBACK * 2 ** min(failures, 10), LONGEST_SETBACK))
                failures += 1
                self.emit(DatabaseUnavailable("locks", one_line(error), pause))
                self.stopping.wait(pause)
            else:
                if held:
                    return conn, held
                self.locks.release(conn, clean=True)
                return None, ()

    def _bounce(self, conn: Connection, claims: Sequence[Claim]) -> None:
        """Give claims back untouched: their keys' locks are held, by whoever and for whatever reason."""
        for claim in claims:
            self.on_contended(claim)
        give_back(conn, claims)
        for claim in claims:
            self.emit(PartitionContended(claim.id, claim.queue, claim.fsm))
        self.on_settled(claims, frozenset())

    def _commit_keyed(self, chunk: Chunk, performed: list[Performed]) -> None:
        """Write outcomes and let go of their keys; tries again only as long as the session, and so the locks, live."""
        batches = deque([performed])
        failures = 0
        while batches:
            batch = batches.popleft()
            claims = [each.claim for each in batch]
            started = monotonic()
            try:
                settled = settle(chunk.conn, [each.change for each in batch], unlock=_keys(claims))
            except psycopg.Error as error:
                if chunk.conn.closed or is_read_only(error) or not is_passing(error):
                    raise
                if len(batch) > 1 and is_locked(error):
                    # Somebody holds one of the rows: the others need not wait for it.
                    batches.extend([each] for each in batch)
                    continue
                batches.append(batch)
                sleep(jittered(min(FIRST_SETBACK * 2 ** min(failures, 10), LONGEST_SETBACK)))
                failures += 1
                continue
            seconds = monotonic() - started
            report(batch, settled, self.emit)
            self.emit(BatchCommitted(len(batch), seconds))
            for claim in claims:
                del chunk.unsettled[claim.id]
            self.on_settled(claims, settled.woken | wakes(batch))


def _lend(conn: EngineConnection, claims: Sequence[Claim]) -> Sequence[Claim]:
    """Begin a transaction for a claim, under its partition key's lock if it has one."""
    held = claims if claims[0].partition_key is None else take_keys(conn, claims)
    if held:
        lend(conn, held[0])
    return held


def _keys(claims: Sequence[Claim]) -> list[str]:
    return [claim.partition_key for claim in claims if claim.partition_key is not None]
