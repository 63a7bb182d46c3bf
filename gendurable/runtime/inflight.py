"""Inflight: the claims this worker holds, from the moment it has them until their outcomes are written."""

import threading
from collections import Counter
from collections.abc import Iterable

from gendurable.core.claim import Claim


class Inflight:
    """What is waiting, running or being committed. The heartbeat keeps exactly these leases."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._lock = threading.Lock()
        self._emptied = threading.Condition(self._lock)
        self._claims: dict[tuple[int, int], Claim] = {}
        self._counts: Counter[str] = Counter()

    def add(self, claims: Iterable[Claim]) -> None:
        """Hold these."""
        with self._lock:
            for claim in claims:
                self._claims[claim.id, claim.fence] = claim
                self._counts[claim.queue] += 1

    def remove(self, claims: Iterable[Claim]) -> None:
        """Hold these no longer: written, given back, or left to the reaper."""
        with self._lock:
            for claim in claims:
                if self._claims.pop((claim.id, claim.fence), None) is not None:
                    self._counts[claim.queue] -= 1
            if not self._claims:
                self._emptied.notify_all()

    def replace(self, pairs: Iterable[tuple[Claim, Claim]]) -> None:
        """Hold successors instead: the heartbeat must know the newest fences."""
        with self._lock:
            for claim, successor in pairs:
                del self._claims[claim.id, claim.fence]
                self._claims[successor.id, successor.fence] = successor

    def wait_until_empty(self, timeout: float) -> bool:
        """Wait until nothing is held, and tell whether that came about."""
        with self._lock:
            return self._emptied.wait_for(lambda: not self._claims, timeout)

    def count(self, queue: str) -> int:
        """How many claims of one queue are held."""
        return self._counts[queue]

    def all(self) -> list[Claim]:
        """Everything that is held now."""
        with self._lock:
            return list(self._claims.values())

    def __len__(self) -> int:
        return len(self._claims)
