"""Runner: one claim on one thread, from the context to an outcome that is on its way into the database."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep

import psycopg
from attrs import frozen

from gendurable.core.claim import Claim
from gendurable.core.registry import Machine
from gendurable.core.transition import keep_claim
from gendurable.current import CurrentStep, in_step
from gendurable.db import store
from gendurable.db.connection import Connection, EngineConnection, one_line
from gendurable.db.faults import is_locked, is_passing, is_read_only
from gendurable.db.operations import give_back, take_keys
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

# Performed steps of several keys wait no longer than this for others that share their session.
SECONDS_UNCOMMITTED = 0.01


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

    def run(self, claims: Sequence[Claim]) -> None:
        """Run a claim, or several of different partition keys one after the other; never raises."""
        try:
            if claims[0].partition_key is None:
                self._run_plain(claims[0])
            else:
                self._run_keyed(claims)
        except BaseException as error:  # noqa: BLE001  a bug of ours must not cost the thread; the reaper has the rows
            for claim in claims:
                self._crashed(claim, error)

    def _run_plain(self, claim: Claim) -> None:
        performed = self._perform(claim)
        if performed is not None:
            self.submit(performed)

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

    def _run_keyed(self, claims: Sequence[Claim]) -> None:
        conn, held = self._locked(claims)
        if conn is None:
            return
        unsettled = {claim.id: claim for claim in held}
        try:
            while unsettled:
                self._run_some(conn, unsettled)
        except psycopg.Error as error:
            # Without this session nothing of them may be written, and no sibling starts before the rows are reaped.
            for claim in unsettled.values():
                self.emit(LockLost(claim.id, claim.queue, claim.fsm, claim.step, one_line(error)))
            self.on_settled([*unsettled.values()], frozenset())
        finally:
            self.locks.release(conn, clean=not unsettled)

    def _run_some(self, conn: Connection, unsettled: dict[int, Claim]) -> None:
        """Run claims whose keys this session holds, commit what they came to and let go.

        All of them, unless they take longer than expected: then what has been performed does not wait for the rest.
        """
        enough = monotonic() + SECONDS_UNCOMMITTED
        performed: list[Performed] = []
        crashed: list[Claim] = []
        for claim in unsettled.values():
            one = self._perform(claim)
            if one is not None:
                performed.append(one)
            else:
                crashed.append(claim)
            if monotonic() > enough or self.stopping.is_set():
                break
        if crashed:
            self._let_go(conn, crashed, unsettled)
        if performed:
            self._commit_keyed(conn, performed, unsettled)
        if unsettled and self.stopping.is_set():
            unstarted = [*unsettled.values()]
            self._let_go(conn, unstarted, unsettled)
            for claim in unstarted:
                self.on_unstarted(claim)

    def _let_go(self, conn: Connection, claims: Sequence[Claim], unsettled: dict[int, Claim]) -> None:
        store.unlock_partitions(conn, keys=_keys(claims)).all()
        for claim in claims:
            del unsettled[claim.id]

    def _locked(self, claims: Sequence[Claim]) -> tuple[EngineConnection | None, Sequence[Claim]]:
        """Return a connection, and the claims whose keys' locks it holds; None if all were given back instead."""
        failures = 0
        while True:
            conn: EngineConnection | None = None
            try:
                conn = self.locks.acquire(self.stopping)
                if conn is None:
                    for claim in claims:
                        self.on_unstarted(claim)
                    return None, ()
                held = take_keys(conn, claims)
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

    def _commit_keyed(self, conn: Connection, performed: list[Performed], unsettled: dict[int, Claim]) -> None:
        """Write outcomes and let go of their keys; tries again only as long as the session, and so the locks, live."""
        batches = deque([performed])
        failures = 0
        while batches:
            batch = batches.popleft()
            claims = [each.claim for each in batch]
            started = monotonic()
            try:
                settled = settle(conn, [each.change for each in batch], unlock=_keys(claims))
            except psycopg.Error as error:
                if conn.closed or is_read_only(error) or not is_passing(error):
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
                del unsettled[claim.id]
            self.on_settled(claims, settled.woken | wakes(batch))


def _keys(claims: Sequence[Claim]) -> list[str]:
    return [claim.partition_key for claim in claims if claim.partition_key is not None]
