"""Slots: the threads of one queue, and the claims that wait for one of them."""

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from queue import SimpleQueue
from time import monotonic

from gendurable.core.claim import Claim


class Slots:
    """Runs claims on `size` threads, the most urgent first.

    A thread that is done takes what waits next without being handed it, and a thread that starts sees to it that the
    next one does if more is waiting: tiny steps are through before a second thread is awake, and long ones have all
    the threads within a millisecond.

    Claims with a partition key may be taken several at a time, `together` says how many: they share the cost of their
    locks and their commit. `run` must not raise, and tells whether another thread has its slot: a step that hangs loses
    it, so that there may be more threads than slots.
    """

    def __init__(
        self, queue: str, size: int, run: Callable[[Sequence[Claim]], bool], together: Callable[[Claim], int]
    ) -> None:
        """Set up the threads; each starts when first needed, and then waits for more."""
        self.size = size
        self._name = f"step {queue}"
        self._run = run
        self._together = together
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Claim]] = []
        self._order = count()
        self._numbers = count()
        self._bell: SimpleQueue[bool] = SimpleQueue()
        self._busy = 0
        self._idle = 0
        self._abandoned = 0
        self._starting = False
        self._closed = False
        self._last_taken = monotonic()

    def offer(self, claims: Iterable[Claim]) -> None:
        """Run these as threads come free."""
        with self._lock:
            if not self._waiting:
                self._last_taken = monotonic()
            for claim in claims:
                heapq.heappush(self._waiting, (claim.priority, next(self._order), claim))
            self._start_another()

    def close(self) -> list[Claim]:
        """Start nothing more and return the claims that were not started; the next call returns what came later."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._bell.put(False)
        return self.recall()

    def recall(self) -> list[Claim]:
        """Return the claims that were not started; they are no longer ours to run."""
        with self._lock:
            unstarted = [claim for _, _, claim in self._waiting]
            self._waiting.clear()
        return unstarted

    def hand_over(self, call: Callable[[], bool]) -> None:
        """Give the slot of a thread that is not coming back to a new one, whose first `run` is `call`."""
        with self._lock:
            self._abandoned += 1
        self._start(call)

    @property
    def busy(self) -> int:
        """How many slots have a thread at work."""
        return self._busy

    @property
    def waiting(self) -> int:
        """How many claims wait for a thread."""
        return len(self._waiting)

    @property
    def still_for(self) -> float:
        """For how many seconds no thread has taken any of the claims that wait."""
        return monotonic() - self._last_taken

    @property
    def abandoned(self) -> int:
        """How many threads have lost their slot and still run."""
        return self._abandoned

    def _start_another(self) -> None:
        """Let one more thread work if it has something to do; to be called under the lock."""
        if self._waiting and self._busy < self.size and not self._starting and not self._closed:
            self._starting = True
            self._busy += 1
            if self._idle:
                self._idle -= 1
                self._bell.put(True)
            else:
                self._start(self._arrive)

    def _start(self, call: Callable[[], bool]) -> None:
        # Daemons: one that hangs must not keep the process from its end.
        name = f"{self._name} {next(self._numbers)}"
        threading.Thread(target=self._work, args=(call,), name=name, daemon=True).start()

    def _work(self, call: Callable[[], bool]) -> None:
        is_superseded = call()
        while not is_superseded and (claims := self._take()):
            is_superseded = self._run(claims)
        if is_superseded:
            with self._lock:
                self._abandoned -= 1

    def _arrive(self) -> bool:
        with self._lock:
            self._starting = False
        return False

    def _take(self) -> list[Claim]:
        """Return what to run next, waiting for it; nothing: there will be no more."""
        while True:
            with self._lock:
                if self._waiting and not self._closed:
                    claim = heapq.heappop(self._waiting)[2]
                    self._last_taken = monotonic()
                    claims = [claim] if claim.partition_key is None else self._with_others(claim)
                    self._start_another()
                    return claims
                self._busy -= 1
                if self._closed:
                    return []
                self._idle += 1
            if not self._bell.get():
                return []
            self._arrive()

    def _with_others(self, claim: Claim) -> list[Claim]:
        """Take as many claims of other partition keys along as may share a session with this one."""
        claims = [claim]
        keys = {claim.partition_key}
        most = self._together(claim)
        while len(claims) < most and self._waiting:
            following = self._waiting[0][2]
            if following.partition_key is None or following.partition_key in keys or self._together(following) == 1:
                break
            heapq.heappop(self._waiting)
            keys.add(following.partition_key)
            claims.append(following)
        return claims
