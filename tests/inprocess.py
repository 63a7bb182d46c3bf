"""A worker inside the test's own process: its machines and the test share memory, its events can be waited for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from support import until

from gendurable import config
from gendurable.core.registry import Registry, Source
from gendurable.events import Event
from gendurable.service.worker import Worker

E = TypeVar("E", bound=Event)

QUICK = {"lease": "3s", "heartbeat": "500ms", "reap": "500ms", "poll": "100ms", "max_poll": "200ms"}


class InProcess:
    """A worker that has started, and what it said so far."""

    def __init__(self, dsn: str, *machines: Source, **settings: Any) -> None:
        loaded = config.load(cli={"dsn": dsn, "name": "in-process", "queues": "default=2", **QUICK, **settings}, env={})
        self.said: list[Event] = []
        self.deaths: list[None] = []
        self.worker = Worker(
            "in-process/1",
            loaded.config,
            Registry(machines),
            emit=self.said.append,
            on_death=lambda: self.deaths.append(None),
        )

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self.said if isinstance(event, kind)]

    def wait_for(self, kind: type[E], count: int = 1) -> list[E]:
        """Wait until it has said this so many times."""
        return (
            until(
                lambda: found if len(found := self.events(kind)) >= count else None,
                f"{count} x {kind.__name__} in {self.said}",
            )
            or []
        )


@contextmanager
def working(dsn: str, *machines: Source, **settings: Any) -> Iterator[InProcess]:
    """Run a worker for the length of a block."""
    running = InProcess(dsn, *machines, **settings)
    running.worker.prepare()
    running.worker.start()
    try:
        yield running
    finally:
        running.worker.drain()
