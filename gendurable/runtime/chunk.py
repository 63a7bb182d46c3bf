"""Chunk: claims whose partition keys one session holds; whoever has the chunk runs them, one after the other."""

from attrs import define, field

from gendurable.core.claim import Claim
from gendurable.db.connection import EngineConnection
from gendurable.runtime.committer import Performed


@define(eq=False)
class Chunk:
    """A session, the claims by id that it holds keys for, and what has come of those that ran."""

    conn: EngineConnection
    unsettled: dict[int, Claim]
    _performed: list[Performed] = field(factory=list, init=False)
    _crashed: list[Claim] = field(factory=list, init=False)

    def add(self, claim: Claim, performed: Performed | None) -> None:
        """Keep what a claim has come to; None: nothing, it crashed."""
        if performed is None:
            self._crashed.append(claim)
        else:
            self._performed.append(performed)

    def take(self) -> tuple[list[Performed], list[Claim]]:
        """Return what was performed and what crashed since the last time."""
        taken = self._performed, self._crashed
        self._performed, self._crashed = [], []
        return taken
