"""Executions: the steps that run now, what each is told while it runs, and who may speak for it."""

import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from math import inf
from time import monotonic

from gendurable.core.claim import Claim
from gendurable.core.context import Flag
from gendurable.core.limiters import Limiters
from gendurable.db.lending import StepTransaction
from gendurable.db.rows import Lost
from gendurable.runtime.chunk import Chunk
from gendurable.runtime.known import KnownLimits
from gendurable.runtime.loop import Wires

LONGEST_LOOK = 3600.0
# How long others wait for a step that shares their session.
SECONDS_SHARED = 0.05


class LateEvent:
    """An event that is made when somebody waits for it: most steps never look."""

    # One for all: it is held for an instant, and hardly ever.
    _making = threading.Lock()
    # Of the class, as long as nothing happens: each step has such an event.
    _is_set = False
    _event: threading.Event | None = None

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake whoever waits."""
        with self._making:
            self._is_set = True
            if self._event is not None:
                self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, and tell whether that came about."""
        with self._making:
            if self._is_set:
                return True
            if self._event is None:
                self._event = threading.Event()
        return self._event.wait(timeout)


class Execution:
    """One run of a claimed step. `chunk` is where its outcome goes if it has a partition key and no transaction."""

    # Of the class, where a step has none of it: these are made for every step.
    chunk: Chunk | None = None
    transaction: StepTransaction | None = None
    # The thread that runs it has the last word already.
    is_decided: bool = False
    timeout: timedelta | None = None
    deadline: datetime | None = None
    due: float = inf
    # When others have waited for it long enough.
    relief: float = inf

    def __init__(self, claim: Claim, shutting_down: Flag, limiters: Limiters | None) -> None:
        """Begin to run a claim."""
        self.claim = claim
        self.limiters = limiters
        self.key = (claim.id, claim.fence)
        self.shutting_down = shutting_down
        self.cancelled = LateEvent()


class Executions:
    """The steps that run in this process, by claim.

    Whoever takes an execution out with `end` speaks for it, and nobody else: the thread that ran the step, or the one
    that found that its time was up.
    """

    def __init__(self, shutting_down: Flag, limits: KnownLimits | None = None) -> None:
        """Let every step see when the worker wants to end; judge the limits that it names by those known."""
        self._shutting_down = shutting_down
        self._limits = limits
        self._running: dict[tuple[int, int], Execution] = {}
        self._changed = threading.Condition()
        self._next_look = inf
        self._is_closed = False

    def begin(
        self,
        claim: Claim,
        timeout: timedelta | None = None,
        chunk: Chunk | None = None,
        transaction: StepTransaction | None = None,
    ) -> Execution:
        """Watch a step from now on."""
        limiters = None if self._limits is None else self._limits.current
        execution = Execution(claim, self._shutting_down, limiters)
        if chunk is not None:
            execution.chunk = chunk
            if chunk.is_shared:
                execution.relief = monotonic() + SECONDS_SHARED
        if transaction is not None:
            execution.transaction = transaction
        if timeout is not None:
            execution.timeout = timeout
            execution.deadline = datetime.now(UTC) + timeout
            execution.due = monotonic() + timeout.total_seconds()
        look = min(execution.due, execution.relief)
        if look == inf:
            self._running[execution.key] = execution
            return execution
        with self._changed:
            self._running[execution.key] = execution
            if look < self._next_look:
                self._changed.notify()
        return execution

    def is_running(self, execution: Execution) -> bool:
        """Whether nobody has spoken for it yet."""
        return execution.key in self._running

    def end(self, execution: Execution) -> bool:
        """Watch it no longer; true for the first who says so, and for nobody else."""
        return self._running.pop(execution.key, None) is not None

    def lose(self, lost: Iterable[Lost]) -> list[Claim]:
        """Tell those steps whose claims are lost that their outcome counts no more; return the claims told just now."""
        found = [self._running.get((each.id, each.fence)) for each in lost]
        told = [each for each in found if each is not None and not each.cancelled.is_set()]
        for execution in told:
            execution.cancelled.set()
        return [execution.claim for execution in told]

    def wait_overdue(self) -> list[Execution]:
        """Wait until the time of some, or others' patience with them, is up, and return those; none: no more will come.

        Not a queue of deadlines: what ended long before its own would fill it.
        """
        with self._changed:
            while not self._is_closed:
                running = list(self._running.values())
                now = monotonic()
                if overdue := [each for each in running if each.due <= now or each.relief <= now]:
                    return overdue
                self._next_look = min((min(each.due, each.relief) for each in running), default=inf)
                self._changed.wait(min(self._next_look - now, LONGEST_LOOK))
            return []

    def close(self) -> None:
        """Look for overdue ones no longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class Timekeeper:
    """A thread, without a connection, that ends the executions whose time is up."""

    def __init__(
        self,
        executions: Executions,
        wires: Wires,
        *,
        on_overdue: Callable[[Execution], None],
        on_slow: Callable[[Execution], None],
    ) -> None:
        """Hand each execution that has not ended in time to `on_overdue`, one that holds others up to `on_slow`."""
        self._executions = executions
        self._wires = wires
        self._on_overdue = on_overdue
        self._on_slow = on_slow
        self._thread = threading.Thread(target=self._run, name="timekeeper", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def _run(self) -> None:
        try:
            while overdue := self._executions.wait_overdue():
                for execution in overdue:
                    if execution.due > monotonic():
                        execution.relief = inf  # once is enough
                        self._on_slow(execution)
                    elif self._executions.end(execution):
                        execution.cancelled.set()
                        self._on_overdue(execution)
        except BaseException as error:  # noqa: BLE001  whatever it is, it must not go unnoticed
            self._wires.died(self._thread.name, error)
