"""Waiting: however many threads wait for instances, one of them asks for all, in one query."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic

from gendurable.errors import InstanceNotFound
from gendurable.notices import BOARD

FIRST_LOOK, LONGEST_PAUSE = 0.01, 0.5

# Where these instances stand; one that does not exist is left out.
Look = Callable[[Sequence[int]], Mapping[int, str]]


class Hub:
    """Lets threads wait until instances stand where they want them.

    There is no thread of its own, and so none to be left behind: the one that came first asks for all, and hands over
    when it goes. An instance that was just asked for is looked at soon again, one that takes long ever more rarely,
    and one of which this process itself wrote the end at once.
    """

    def __init__(self, look: Look) -> None:
        """Ask by means of `look`, on one thread at a time."""
        self._look = look
        self._lock = threading.Lock()
        self._waiters: dict[_Waiter, None] = {}  # in the order in which they came: the first one leads

    def wait(self, id: int, wanted: Collection[str], seconds: float | None) -> bool:  # noqa: A002  the column's name
        """Wait until the instance has one of these statuses; false if it has not in time. InstanceNotFound."""
        deadline = None if seconds is None else monotonic() + seconds
        waiter = _Waiter(id, wanted)
        # On the board before the first look: what is committed after that look is posted.
        with BOARD.watching(id, lambda: self._hurry([waiter])):
            self._join(waiter)
            try:
                return self._wait(waiter, deadline)
            finally:
                self._leave(waiter)

    def hurry(self) -> None:
        """Look at everything now."""
        with self._lock:
            waiters = list(self._waiters)
        self._hurry(waiters)

    def _wait(self, waiter: "_Waiter", deadline: float | None) -> bool:
        while True:
            waiter.bell.clear()  # before the look: what is rung in from here on must not be slept through
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                return waiter.answered()
            rest = self._ask() if self._leads(waiter) else None
            if waiter.answered():
                return True
            waiter.bell.wait(min((each for each in (rest, left) if each is not None), default=None))

    def _ask(self) -> float:
        """Look at those whose time has come; return how long to rest until the next one's."""
        now = monotonic()
        with self._lock:
            # Those whose time is near come along, so that they stay together.
            batch = [waiter for waiter in self._waiters if waiter.due <= now + waiter.pause / 2]
            for waiter in batch:
                waiter.put_off(now)  # before the look: a notice that comes meanwhile must win
        try:
            found = self._look(sorted({waiter.id for waiter in batch})) if batch else {}
        except Exception as error:  # noqa: BLE001  it is the answer to all who asked
            for waiter in batch:
                waiter.answer(error)
            return 0
        for waiter in batch:
            status = found.get(waiter.id)
            if status is None:
                waiter.answer(InstanceNotFound(waiter.id))
            elif status in waiter.wanted:
                waiter.answer(None)
        with self._lock:
            return max(min((waiter.due for waiter in self._waiters), default=now) - monotonic(), 0)

    def _leads(self, waiter: "_Waiter") -> bool:
        with self._lock:
            return next(iter(self._waiters), None) is waiter

    def _join(self, waiter: "_Waiter") -> None:
        with self._lock:
            self._waiters[waiter] = None
        self._ring_leader()

    def _leave(self, waiter: "_Waiter") -> None:
        with self._lock:
            del self._waiters[waiter]
        self._ring_leader()

    def _hurry(self, waiters: Sequence["_Waiter"]) -> None:
        with self._lock:
            for waiter in waiters:
                waiter.due = 0.0
        self._ring_leader()

    def _ring_leader(self) -> None:
        with self._lock:
            leader = next(iter(self._waiters), None)
        if leader is not None:
            leader.bell.set()


class _Waiter:
    """One thread, what it waits for, and when that is looked at next."""

    def __init__(self, id: int, wanted: Collection[str]) -> None:  # noqa: A002  the column's name
        self.id = id
        self.wanted = wanted
        self.bell = threading.Event()
        self.due = 0.0
        self.pause = FIRST_LOOK / 2
        self._answered = False
        self._error: Exception | None = None

    def put_off(self, now: float) -> None:
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.due = now + self.pause

    def answer(self, error: Exception | None) -> None:
        self._error = error
        self._answered = True
        self.bell.set()

    def answered(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._answered
