"""How far ahead of its threads a queue claims, and how many keyed claims share a session: by what its steps take."""

from typing import Literal

from gendurable.core.claim import Claim

# What waits here is out of other workers' reach and blind to newer, more urgent rows: keep that short.
SECONDS_AHEAD = 0.2
MOST_AHEAD = 2000
# No claim was taken for so long: it is not what was learned any more.
SECONDS_STALLED = 1.0
# What shares a session starts and is committed one after the other: worth it only for steps that take no time.
SECONDS_TOGETHER = 0.002
MOST_TOGETHER = 32
WEIGHT = 0.05


class Prefetch:
    """Learns how long steps take, and answers how many claims may wait beyond the running ones."""

    def __init__(self, setting: int | Literal["auto"], size: int) -> None:
        """Take the setting and the number of threads."""
        self._fixed = None if setting == "auto" else setting
        self._size = size
        # Of all steps, and of each that runs under a partition key. Lost updates between threads do no harm.
        self._mean: float | None = None
        self._keyed: dict[tuple[str, str], float] = {}

    def learn(self, claim: Claim, seconds: float) -> None:
        """Take note of one step's duration."""
        self._mean = _mean(self._mean, seconds)
        if claim.partition_key is not None:
            step = claim.fsm, claim.step
            self._keyed[step] = _mean(self._keyed.get(step), seconds)

    @property
    def depth(self) -> int:
        """How many claims may wait."""
        if self._fixed is not None:
            return self._fixed
        return _finished(self._size * SECONDS_AHEAD, self._mean, MOST_AHEAD)

    def has_stalled(self, seconds: float) -> bool:
        """Learn that no waiting claim was taken for so long; tell whether they should wait elsewhere.

        How long a step takes is learned when it ends, and steps that take hours may follow thousands of quick ones.
        """
        if self._fixed is not None or seconds < SECONDS_STALLED:
            return False
        self._mean = max(self._mean or 0.0, seconds)
        return True

    def together(self, claim: Claim) -> int:
        """Say how many claims with a partition key, this one among them, a thread may take at a time."""
        return max(1, _finished(SECONDS_TOGETHER, self._keyed.get((claim.fsm, claim.step)), MOST_TOGETHER))


def _mean(mean: float | None, seconds: float) -> float:
    return seconds if mean is None else mean + WEIGHT * (seconds - mean)


def _finished(seconds: float, mean: float | None, most: int) -> int:
    """How many steps are over within that time; none, as long as nothing is known."""
    return 0 if mean is None else min(most, int(seconds / max(mean, 1e-6)))
