"""Slots: the threads of one queue, and the claims that wait for one of them."""

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from gendurable.core.claim import Claim


class Slots:
    """Runs claims on `size` threads, the most urgent first.

    A thread that is done takes what waits next without being handed it, and a thread that starts sees to it that the
    next one does if more is waiting: tiny steps are through before a second thread is awake, and long ones have all
    the threads within a millisecond.

    Claims with a partition key may be taken several at a time, `together` says how many: they share the cost of their
    locks and their commit. `run` must not raise.
    """

    def __init__(
        self, queue: str, size: int, run: Callable[[Sequence[Claim]], None], together: Callable[[Claim], int]
    ) -> None:
        """Set up the threads; each starts when first needed."""
        self.size = size
        self._run = run
        self._together = together
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=f"step {queue}")
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, int, Claim]] = []
        self._order = count()
        self._busy = 0
        self._starting = False
        self._closed = False

    def offer(self, claims: Iterable[Claim]) -> None:
        """Run these as threads come free."""
        with self._lock:
            for claim in claims:
                heapq.heappush(self._waiting, (claim.priority, next(self._order), claim))
            self._start_another()

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

    def _start_another(self) -> None:
        """Start one more thread if it has something to do; under the lock, so that the pool is not closed meanwhile."""
        if self._waiting and self._busy < self.size and not self._starting and not self._closed:
            self._starting = True
            self._busy += 1
            self._pool.submit(self._work)

    def _work(self) -> None:
        with self._lock:
            self._starting = False
        while claims := self._take():
            self._run(claims)

    def _take(self) -> list[Claim]:
        with self._lock:
            if self._closed or not self._waiting:
                self._busy -= 1
                return []
            claim = heapq.heappop(self._waiting)[2]
            claims = [claim] if claim.partition_key is None else self._with_others(claim)
            self._start_another()
            return claims

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
