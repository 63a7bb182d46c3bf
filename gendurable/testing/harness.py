"""Harness: the engine without threads or sleeping, over a real Postgres, with a clock that tests can advance."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

from attrs import evolve

from gendurable.core.claim import Claim
from gendurable.core.context import Fixed
from gendurable.core.duration import ZERO, Duration, to_timedelta
from gendurable.core.instance import Instance, NewInstance
from gendurable.core.limiters import Limiters
from gendurable.core.limits import check_id, check_name, show
from gendurable.core.registry import Machine, Registry, Source
from gendurable.core.transition import Transition
from gendurable.db import migrate, store
from gendurable.db.connection import Database, one_commit
from gendurable.db.endings import cancel_now, check_reason
from gendurable.db.lending import StepTransaction, lend, tidy
from gendurable.db.limiting import publish
from gendurable.db.operations import (
    Committed,
    claim_batch,
    claim_limited,
    delivered,
    insert_instance,
    insert_instances,
    pause,
    read_instance,
    resume,
    send_signal,
)
from gendurable.db.rows import Delivery
from gendurable.errors import InvalidInstance, RunawayError, StepTimeout
from gendurable.readers import Reader
from gendurable.runtime.committing import settle
from gendurable.runtime.executor import Calm, execute, is_transactional, time_out, timeout_of
from gendurable.runtime.known import KnownLimits
from gendurable.runtime.sweeping import end_late, keep_promises, reap_expired, wake_overdue
from gendurable.tables import read_concurrency_limits, read_rate_limits

BATCH = 100
LEASE = timedelta(seconds=60)
WORKER = "harness"
# A step's own, as a dead worker would be. Whatever else is no Exception comes from the test, such as pytest.fail().
CRASHES = (SystemExit, KeyboardInterrupt, GeneratorExit)
EMPTY: Mapping[str, Any] = {}


class Harness:
    """Runs machines to quiescence through the worker's own claim, execute and commit code.

    Its clock is the database's plus what was advanced. The schema is migrated when the harness is made. A step that
    lets the clock run beyond its timeout is answered for when it returns.
    """

    def __init__(
        self,
        dsn: str,
        fsms: "Source | Iterable[Source]" = (),
        schema: str | None = None,
        *,
        rate_limits: Mapping[str, Mapping[str, Any]] = EMPTY,
        concurrency_limits: Mapping[str, Mapping[str, Any]] = EMPTY,
    ) -> None:
        """Connect, migrate, and gather machines from classes, instances, registries or dotted paths.

        Limits are given and published as those of a configuration file: `{"stripe": {"allowed": 5, "period": "1m"}}`.
        """
        self.registry = Registry(fsms)
        limiters = Limiters(
            _read("rate_limits", read_rate_limits, rate_limits),
            _read("concurrency_limits", read_concurrency_limits, concurrency_limits),
        )
        migrate.up(dsn, schema=schema)
        self._conn = Database(dsn, schema).connect("gendurable harness")
        self._ahead = ZERO
        publish(self._conn, limiters)
        self._limits = KnownLimits()

    def insert(self, new: NewInstance) -> int:
        """Insert an instance and return its id."""
        return insert_instance(self._conn, new, ahead=self._ahead)

    def insert_many(self, instances: Iterable[NewInstance]) -> list[int]:
        """Insert many instances and return the ids of those inserted."""
        return insert_instances(self._conn, instances, ahead=self._ahead)

    def signal(self, id: int, name: str, payload: Any = EMPTY, *, dedup_key: str | None = None) -> Delivery:  # noqa: A002
        """Send a signal to an instance."""
        with one_commit(self._conn):
            answer = send_signal(self._conn, id, name, payload, dedup_key, ahead=self._ahead)
        return delivered(id, answer)

    def cancel(self, id: int, *, reason: str | None = None, cascade: bool = False) -> bool:  # noqa: A002
        """Cancel an instance; true if it was this call that did."""
        return cancel_now(self._conn, check_id(id), check_reason(reason), cascade=cascade, ahead=self._ahead)

    def get(self, id: int) -> Instance:  # noqa: A002  the column's name
        """Return an instance."""
        return read_instance(self._conn, id)

    def pause(self, queue: str) -> bool:
        """Let `drain` run nothing of a queue; false if it was paused already."""
        return pause(self._conn, queue)

    def resume(self, queue: str) -> None:
        """Let a paused queue run again."""
        resume(self._conn, queue)

    def advance(self, by: Duration) -> None:
        """Let the clock run ahead; what became due runs in the next `drain`."""
        try:
            step = to_timedelta(by)
        except ValueError as error:
            raise InvalidInstance(f"by: {error}") from None
        if step < ZERO:
            raise InvalidInstance(f"by: the clock runs forward only, not by {by!r}")
        self._ahead += step

    def drain(self, queue: str | None = None, max_steps: int = 1000, *, shutting_down: bool = False) -> dict[str, int]:
        """Run everything due, deadlines and expired leases included, until nothing is.

        Returns how many outcomes of each kind were committed; a step that ended in SystemExit or its like counts as
        "crash" and leaves its row to its lease, as a dead worker would. RunawayError if more is due after `max_steps`.

        With `shutting_down` as in a worker that was just told to end: what is due now runs once, with
        `ctx.shutting_down` set, and nothing after it.
        """
        if queue is not None:
            check_name("queue", queue)
        if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0:
            raise InvalidInstance(f"max_steps: {show(max_steps)} is no number of steps: give zero or more")
        tally: Counter[str] = Counter()
        self._limits.refresh(self._conn)
        if shutting_down:
            due = [claim for batch in iter(lambda: self._claim(queue, BATCH), []) for claim in batch]
            self._run(due, tally, shutting_down=True)
            return dict(tally)
        left = max_steps
        while claims := self._claim(queue, limit=min(BATCH, left) or 1):
            if not left:
                store.release(self._conn, claims)
                raise RunawayError(
                    f"drained {max_steps} steps and instance {claims[0].id} ({claims[0].fsm}, step "
                    f"{claims[0].step!r}) is still due: does it loop? Otherwise give a higher max_steps"
                )
            left -= len(claims)
            self._run(claims, tally)
        return dict(tally)

    def _claim(self, queue: str | None, limit: int) -> list[Claim]:
        reap_expired(self._conn, worker=WORKER, lease=LEASE, ahead=self._ahead)
        end_late(self._conn, ahead=self._ahead)
        wake_overdue(self._conn, ahead=self._ahead)
        if self._limits.current:
            keep_promises(self._conn, ahead=self._ahead)
        queues = [queue] if queue is not None else store.due_queues(self._conn, ahead=self._ahead).all()
        for name in queues:
            which: dict[str, Any] = {
                "queue": name,
                "machines": self.registry.capabilities,
                "worker": WORKER,
                "limit": limit,
                "lease": LEASE,
                "ahead": self._ahead,
            }
            claims = self._claim_limited(which) or claim_batch(self._conn, **which)
            if claims:
                return claims
        return []

    def _claim_limited(self, which: dict[str, Any]) -> list[Claim]:
        if not self._limits.current:
            return []
        look = claim_limited(self._conn, **which)
        while look.more and not look.claims:
            look = claim_limited(self._conn, **which)
        return look.claims

    def _run(self, claims: list[Claim], tally: Counter[str], *, shutting_down: bool = False) -> None:
        changes: list[Transition] = []
        for claim in claims:
            machine = self.registry.get(claim.fsm, claim.fsm_version)
            assert machine is not None, "the claim asks for our machines only"  # noqa: S101
            try:
                result = self._execute(claim, machine, Fixed(shutting_down))
            except CRASHES:
                tally["crash"] += 1
                continue
            if isinstance(result, Committed):
                tally.update(change.kind for change in result.written)
            else:
                changes.append(result)
        tally.update(change.kind for change in settle(self._conn, changes, ahead=self._ahead).written)

    def _execute(self, claim: Claim, machine: Machine, shutting_down: Fixed) -> Transition | Committed:
        """Run a step; one that took longer than it may, by our clock, has run in vain."""
        timeout = timeout_of(claim, machine)
        deadline = None if timeout is None else self._now() + timeout
        run = Calm(deadline, shutting_down=shutting_down, limiters=self._limits.current)
        if is_transactional(claim, machine):
            return self._execute_within(claim, machine, run)
        change = execute(claim, machine, run=run)
        if timeout is None or self._in_time(run):
            return change
        return time_out(claim, machine, timeout, limiters=run.limiters)

    def _execute_within(self, claim: Claim, machine: Machine, run: Calm) -> Transition | Committed:
        conn = self._conn
        lend(conn, claim)
        transaction = StepTransaction(conn, claim, ahead=self._ahead)

        def refuse_if_late() -> None:
            if not self._in_time(run):
                raise StepTimeout(claim.step, (timeout_of(claim, machine) or ZERO).total_seconds())

        transaction.before_commit = refuse_if_late
        try:
            change = execute(claim, machine, run=evolve(run, transaction=transaction))
        except BaseException:
            transaction.undo()
            raise
        finally:
            tidy(conn)
        return change if transaction.committed is None else transaction.committed

    def _in_time(self, run: Calm) -> bool:
        return run.deadline is None or self._now() < run.deadline

    def _now(self) -> datetime:
        return datetime.now(UTC) + self._ahead

    def close(self) -> None:
        """Close the connection."""
        self._conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read(what: str, read: Reader, given: object) -> Any:
    try:
        return read(given)
    except ValueError as error:
        raise InvalidInstance(f"{what}: {error}") from None
