"""Slots: the threads of one queue, and the claims that wait for one of them."""

import heapq
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from gendurable.core.claim import Claim


class Slots:
    """Runs claims on `size` threads, the most urgent first.

    A thread that is done with a claim takes the next one without being handed it: for tiny steps the hand-over would
    cost more than the step. `run` must not raise.
    """

    def __init__(self, queue: str, size: int, run: Callable[[Claim], None]) -> None:
        """Set up the threads; each starts when first needed."""
        self.size = size
        self._run = run
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=f"step {queue}")
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Claim]] = []
        self._order = count()
        self._busy = 0
        self._closed = False

    def offer(self, claims: Iterable[Claim]) -> None:
        """Run these as threads come free."""
        with self._lock:
            for claim in claims:
                heapq.heappush(self._waiting, (claim.priority, next(self._order), claim))
            if self._closed:
                return
            starts = min(len(self._waiting), self.size - self._busy)
            self._busy += starts
        for _ in range(starts):
            self._pool.submit(self._work)

    def close(self) -> list[Claim]:
        """Start nothing more and return the claims that were not started; the next call returns what came later."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False)
        return self.recall()

    def recall(self) -> list[Claim]:
        """Return the claims that were not started; they are no longer ours to run."""
        with self._lock:
            unstarted = [claim for _, _, claim in self._waiting]
            self._waiting.clear()
        return unstarted

    @property
    def busy(self) -> int:
        """How many threads are running a step."""
        return self._busy

    @property
    def waiting(self) -> int:
        """How many claims wait for a thread."""
        return len(self._waiting)

    def _work(self) -> None:
        while (claim := self._take()) is not None:
            self._run(claim)

    def _take(self) -> Claim | None:
        with self._lock:
            if self._closed or not self._waiting:
                self._busy -= 1
                return None
            return heapq.heappop(self._waiting)[2]
