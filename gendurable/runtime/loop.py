"""Loop: a named thread that works in rounds, survives a database that goes away, and dies loudly."""

import random
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import monotonic

from attrs import frozen

from gendurable.db.connection import one_line
from gendurable.db.faults import hint, is_passing
from gendurable.errors import describe
from gendurable.events import DatabaseAvailable, DatabaseUnavailable, Listener, LoopDied
from gendurable.runtime.session import Session

FIRST_SETBACK, LONGEST_SETBACK = 0.1, 5.0


def jittered(seconds: float, spread: float = 0.25) -> float:
    """Return about that many seconds: workers that were stopped by one event must not come back in step."""
    return seconds * random.uniform(1 - spread, 1 + spread)  # noqa: S311  no secret depends on it


@frozen
class Wires:
    """Whom a loop tells: what it has to say, and that it died."""

    emit: Listener
    on_death: Callable[[], None]

    def died(self, loop: str, error: BaseException) -> None:
        """Say, from within its `except`, what a loop has died of."""
        self.emit(LoopDied(loop, describe(error), traceback.format_exc()))
        self.on_death()


class Loop(ABC):
    """One round after another: `run_once` does one and says how long to rest; `wake` cuts the rest short.

    A round that meets a passing fault of the database is tried again after a growing, jittered pause. Any other error
    ends the loop, is emitted, and is told to `on_death`: the process must not live on with a part of it dead.
    """

    def __init__(self, name: str, session: Session, wires: Wires) -> None:
        """Name the loop and give it the connection it keeps."""
        self.name = name
        self._session = session
        self._emit = wires.emit
        self._wires = wires
        self._bell = threading.Event()
        self._stopping = False
        self._failures = 0
        self._expected = monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def run_once(self) -> float:
        """Do one round; return how many seconds to rest unless woken."""

    def start(self) -> None:
        """Begin the rounds."""
        self._thread.start()

    def wake(self) -> None:
        """Begin the next round now."""
        self._bell.set()

    def stop(self) -> None:
        """Begin no more rounds; a round under way is finished."""
        self._stopping = True
        self.wake()

    def join(self, timeout: float) -> bool:
        """Wait for the loop to end and tell whether it has."""
        if self._thread.ident is not None:  # one that was never started has ended
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_available(self) -> bool:
        """Whether the last round reached the database."""
        return not self._failures

    def overdue(self) -> float:
        """Seconds since the next round should have begun; negative while there is time."""
        return monotonic() - self._expected

    def setback_limit(self) -> float:
        """Return the longest pause between two tries to reach the database."""
        return LONGEST_SETBACK

    def _run(self) -> None:
        try:
            while True:
                self._bell.clear()
                if self._stopping:  # after clearing the bell: `stop` may have rung it a moment ago
                    break
                rest = self._round()
                self._expected = monotonic() + rest
                if rest > 0:
                    self._bell.wait(rest)
        except BaseException as error:  # noqa: BLE001  whatever it is, it must not go unnoticed
            self._wires.died(self.name, error)
        finally:
            self._session.close()

    def _round(self) -> float:
        try:
            rest = self.run_once()
        except Exception as error:
            if not is_passing(error):
                raise
            return self._set_back(error)
        if self._failures:
            self._failures = 0
            self._emit(DatabaseAvailable(self.name))
        return rest

    def _set_back(self, error: Exception) -> float:
        self._session.drop_if_broken(error)
        self._failures += 1
        pause = jittered(min(FIRST_SETBACK * 2 ** min(self._failures - 1, 10), self.setback_limit()))
        self._emit(DatabaseUnavailable(self.name, one_line(error) + hint(error), pause))
        return pause
