"""How far ahead of its threads a queue claims: a number, or as much as it finishes in a fraction of a second."""

from typing import Literal

# What waits here is out of other workers' reach and blind to newer, more urgent rows: keep that short.
SECONDS_AHEAD = 0.2
MOST = 2000
WEIGHT = 0.05


class Prefetch:
    """Learns how long steps take, and answers how many claims may wait beyond the running ones."""

    def __init__(self, setting: int | Literal["auto"], size: int) -> None:
        """Take the setting and the number of threads."""
        self._fixed = None if setting == "auto" else setting
        self._size = size
        self._mean: float | None = None

    def learn(self, seconds: float) -> None:
        """Take note of one step's duration."""
        if self._fixed is None:
            # Lost updates between threads do no harm: it is an average.
            self._mean = seconds if self._mean is None else self._mean + WEIGHT * (seconds - self._mean)

    @property
    def depth(self) -> int:
        """How many claims may wait."""
        if self._fixed is not None:
            return self._fixed
        if self._mean is None:
            return 0
        return min(MOST, int(self._size * SECONDS_AHEAD / max(self._mean, 1e-6)))
