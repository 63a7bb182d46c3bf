"""Chunk: claims whose partition keys one session holds; whoever has the chunk runs them, one after the other."""

import threading
from collections import deque

from gendurable.core.claim import Claim
from gendurable.db.connection import EngineConnection
from gendurable.runtime.committer import Performed


class Chunk:
    """A session, the claims by id that it holds keys for, and what has come of those that ran.

    `lock` is held while something is done in the session: beside the thread that has the chunk there may be another one
    that relieves it of what need not wait for its step.
    """

    def __init__(self, conn: EngineConnection, unsettled: dict[int, Claim]) -> None:
        """Nothing has begun yet."""
        self.conn = conn
        self.lock = threading.Lock()
        self.unsettled = unsettled
        self._unstarted = deque(unsettled.values())
        self._performed: list[Performed] = []
        self._crashed: list[Claim] = []

    @property
    def is_shared(self) -> bool:
        """Whether anything waits for the claim that runs now."""
        return bool(self._unstarted or self._performed or self._crashed)

    def start(self) -> Claim | None:
        """Return the next claim to run; it is not unstarted any more."""
        with self.lock:
            return self._unstarted.popleft() if self._unstarted else None

    def add(self, claim: Claim, performed: Performed | None) -> None:
        """Keep what a claim has come to; None: nothing, it crashed."""
        with self.lock:
            if performed is None:
                self._crashed.append(claim)
            else:
                self._performed.append(performed)

    def take(self) -> tuple[list[Performed], list[Claim]]:
        """Return what was performed and what crashed since the last time; under the lock."""
        taken = self._performed, self._crashed
        self._performed, self._crashed = [], []
        return taken

    def recall(self) -> list[Claim]:
        """Return what has not begun, which will then not be begun here; under the lock."""
        unstarted = [*self._unstarted]
        self._unstarted.clear()
        return unstarted
