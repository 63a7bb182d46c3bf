"""Executions: the steps that run now, what each is told while it runs, and who may speak for it."""

import threading
from collections.abc import Iterable
from datetime import datetime

from attrs import Factory, define

from gendurable.core.claim import Claim
from gendurable.core.context import Flag
from gendurable.db.rows import Lost


class LateEvent:
    """An event that is made when somebody waits for it: most steps never look."""

    __slots__ = ("_event", "_is_set")
    # One for all: it is held for an instant, and hardly ever.
    _making = threading.Lock()

    def __init__(self) -> None:
        """Begin unset."""
        self._is_set = False
        self._event: threading.Event | None = None

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


@define(eq=False)
class Execution:
    """One run of a claimed step."""

    claim: Claim
    shutting_down: Flag
    cancelled: LateEvent = Factory(LateEvent)
    deadline: datetime | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Names the claim."""
        return self.claim.id, self.claim.fence


class Executions:
    """The steps that run in this process, by claim."""

    def __init__(self, shutting_down: Flag) -> None:
        """Let every step see when the worker wants to end."""
        self._shutting_down = shutting_down
        self._running: dict[tuple[int, int], Execution] = {}

    def begin(self, claim: Claim) -> Execution:
        """Watch a step from now on."""
        execution = Execution(claim, self._shutting_down)
        self._running[claim.id, claim.fence] = execution
        return execution

    def end(self, execution: Execution) -> None:
        """Watch it no longer."""
        del self._running[execution.key]

    def lose(self, lost: Iterable[Lost]) -> list[Claim]:
        """Tell those steps whose claims are lost that their outcome counts no more; return the claims told just now."""
        found = [self._running.get((each.id, each.fence)) for each in lost]
        told = [each for each in found if each is not None and not each.cancelled.is_set()]
        for execution in told:
            execution.cancelled.set()
        return [execution.claim for execution in told]
