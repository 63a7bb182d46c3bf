"""Notices: what this very process writes, it need not poll for. A commit posts, whoever waits here looks at once.

A notice is no answer, only a reason to look: ids are those of any database, and the look finds out.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class NoticeBoard:
    """Who is waiting for which instances; false when nobody is, so that posting costs nothing then."""

    def __init__(self) -> None:
        """Nobody is waiting yet."""
        self._lock = threading.Lock()
        self._readers: dict[int, list[Callable[[], None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._readers)

    @contextmanager
    def watching(self, id: int, tell: Callable[[], None]) -> Iterator[None]:  # noqa: A002  the column's name
        """Have `tell` called, from any thread, whenever something is posted about an instance."""
        with self._lock:
            self._readers.setdefault(id, []).append(tell)
        try:
            yield
        finally:
            with self._lock:
                self._readers[id].remove(tell)
                if not self._readers[id]:
                    del self._readers[id]

    def post(self, ids: Iterable[int]) -> None:
        """Say that these have ended or parked."""
        with self._lock:
            told = [tell for id_ in ids for tell in self._readers.get(id_, ())]
        for tell in told:
            tell()


# One for the process: whoever waits need not know who writes.
BOARD = NoticeBoard()
