"""Runner: one claim on one thread, from the context to an outcome that is on its way into the database."""

import threading
from collections.abc import Callable, Mapping
from time import monotonic, sleep

import psycopg
from attrs import frozen

from gendurable.core.claim import Claim
from gendurable.core.registry import Machine
from gendurable.core.transition import keep_claim
from gendurable.current import CurrentStep, in_step
from gendurable.db import store
from gendurable.db.connection import Connection, EngineConnection, one_line
from gendurable.db.faults import is_passing, is_read_only
from gendurable.db.operations import take_key
from gendurable.errors import describe
from gendurable.events import (
    BatchCommitted,
    DatabaseUnavailable,
    Listener,
    LockLost,
    PartitionContended,
    StepCrashed,
    StepFailed,
)
from gendurable.runtime.committer import OnSettled, Performed, report, wakes
from gendurable.runtime.committing import settle
from gendurable.runtime.executions import Executions
from gendurable.runtime.executor import Report, execute
from gendurable.runtime.loop import FIRST_SETBACK, LONGEST_SETBACK, jittered
from gendurable.runtime.partitions import LockConnections


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

    def run(self, claim: Claim) -> None:
        """Run a claim; never raises."""
        try:
            if claim.partition_key is None:
                performed = self._perform(claim)
                if performed is not None:
                    self.submit(performed)
            else:
                self._run_keyed(claim, claim.partition_key)
        except BaseException as error:  # noqa: BLE001  a bug of ours must not cost the thread; the reaper has the row
            self._crashed(claim, error)

    def _perform(self, claim: Claim) -> Performed | None:
        """Run the step; None if it crashed."""
        started = monotonic()
        step = CurrentStep(claim.id, claim.fsm, claim.step)
        execution = self.executions.begin(claim)
        try:
            machine = self.machines[claim.fsm, claim.fsm_version]
            change = in_step(step, execute, claim, machine, self._reporter(claim), execution)
        except BaseException as error:  # noqa: BLE001  SystemExit and its like: a crash, as a dead process would be
            self._crashed(claim, error)
            return None
        finally:
            self.executions.end(execution)
        seconds = monotonic() - started
        self.learn(claim, seconds)
        return Performed(claim, keep_claim(claim, change, machine), seconds)

    def _reporter(self, claim: Claim) -> Report:
        def report_failure(kind: str, error: Exception) -> None:
            self.emit(StepFailed(claim.id, claim.queue, claim.fsm, claim.step, claim.attempt, kind, describe(error)))

        return report_failure

    def _crashed(self, claim: Claim, error: BaseException) -> None:
        self.emit(StepCrashed(claim.id, claim.queue, claim.fsm, claim.step, describe(error)))
        # Out of the heartbeat's sight, so that the lease runs out and the reaper returns the row.
        self.on_settled([claim], frozenset())

    # Partitioned steps: lock, step, commit and unlock, all in one session.

    def _run_keyed(self, claim: Claim, key: str) -> None:
        conn = self._locked(claim, key)
        if conn is None:
            return
        clean = False
        try:
            performed = self._perform(claim)
            if performed is None:
                clean = bool(store.unlock_partition(conn, key=key).one())
            else:
                clean = self._commit_keyed(conn, performed, key)
        except psycopg.Error as error:
            # Without this session nothing of the step may be written, and no sibling starts before the row is reaped.
            self.emit(LockLost(claim.id, claim.queue, claim.fsm, claim.step, one_line(error)))
            self.on_settled([claim], frozenset())
        finally:
            self.locks.release(conn, clean=clean)

    def _locked(self, claim: Claim, key: str) -> EngineConnection | None:
        """Return a connection that holds the key's lock; None if the claim was given back instead."""
        failures = 0
        while True:
            conn: EngineConnection | None = None
            try:
                conn = self.locks.acquire(self.stopping)
                if conn is None:
                    self.on_unstarted(claim)
                    return None
                if take_key(conn, claim, key):
                    return conn
                self._bounce(conn, claim)
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
                self.locks.release(conn, clean=True)
                return None

    def _bounce(self, conn: Connection, claim: Claim) -> None:
        """Give a claim back untouched: the key's lock is held, by whoever and for whatever reason."""
        self.on_contended(claim)
        store.release(conn, [claim]).all()
        self.emit(PartitionContended(claim.id, claim.queue, claim.fsm))
        self.on_settled([claim], frozenset())

    def _commit_keyed(self, conn: Connection, performed: Performed, key: str) -> bool:
        """Write the outcome and let go of the key; tries again only as long as the session, and so the lock, lives."""
        failures = 0
        while True:
            started = monotonic()
            try:
                settled = settle(conn, [performed.change], unlock=key)
            except psycopg.Error as error:
                if conn.closed or is_read_only(error) or not is_passing(error):
                    raise
                failures += 1
                sleep(jittered(min(FIRST_SETBACK * 2 ** min(failures, 10), LONGEST_SETBACK)))
                continue
            seconds = monotonic() - started
            report([performed], settled, self.emit)
            self.emit(BatchCommitted(1, seconds))
            self.on_settled([performed.claim], settled.woken | wakes([performed]))
            return True
