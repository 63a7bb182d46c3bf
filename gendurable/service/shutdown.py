"""Shutdown: the first SIGTERM or SIGINT asks the process to end, the second one ends it at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

ASKED = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Listens to the kernel's signals; "signals" elsewhere in gendurable are messages to instances.

    Until `serve` is called nothing has been claimed, and a signal simply ends the process.
    """

    def __init__(self, on_leave: Callable[[], None] = lambda: None) -> None:
        """Take the signals over, as early as possible; `on_leave` is called before the second signal ends it all."""
        self._on_leave = on_leave
        self._asked = threading.Event()
        self._serving = False
        for number in ASKED:
            signal.signal(number, self._on_signal)

    def serve(self) -> None:
        """From now on the first signal only asks."""
        self._serving = True

    def ask(self) -> None:
        """End the process as a first signal would."""
        self._asked.set()

    @property
    def is_asked(self) -> bool:
        """Whether the process was asked to end."""
        return self._asked.is_set()

    def wait(self, timeout: float) -> bool:
        """Wait until asked, and tell whether that came about."""
        return self._asked.wait(timeout)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._asked.is_set():
            self._on_leave()
            leave(128 + number)
        self._asked.set()
        if not self._serving:
            raise SystemExit(0)


def leave(code: int) -> None:
    """End the process now, whatever its threads do: a thread cannot be killed, and its lease covers its claim."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nobody reads any more
            continue
    os._exit(code)
