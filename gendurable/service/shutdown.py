"""Shutdown: the first SIGTERM, SIGINT or SIGHUP asks the process to end, the second one ends it at once."""

import os
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType


def asked() -> list[signal.Signals]:
    """Return the signals that ask a process to end; a terminal that is closed sends SIGHUP, which nohup ignores."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]


class Shutdown:
    """Listens to the kernel's signals; "signals" elsewhere in gendurable are messages to instances.

    Until `serve` is called nothing has been claimed, and a signal simply ends the process. That may be caught on its
    way by whatever is being imported: `is_asked` tells all the same.
    """

    def __init__(self) -> None:
        """Take the signals over, as early as possible: loading takes its time."""
        # Called before the second signal ends it all.
        self.on_leave: Callable[[], None] = lambda: None
        self.is_asked = False
        self._serving = False
        # A pipe and no threading.Event: a handler that runs in the middle of Event.wait would wait for a lock that
        # its own thread holds.
        self._heard, self._bell = os.pipe()
        for number in asked():
            signal.signal(number, self._on_signal)

    def serve(self) -> None:
        """From now on the first signal only asks."""
        self._serving = True

    def ask(self) -> None:
        """End the process as a first signal would."""
        if not self.is_asked:
            self.is_asked = True
            os.write(self._bell, b".")

    def wait(self, timeout: float) -> bool:
        """Wait until asked, and tell whether that came about."""
        if not self.is_asked:
            select.select([self._heard], [], [], timeout)
        return self.is_asked

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.is_asked:
            if number == signal.SIGHUP:  # of a terminal that is closed both the shell and the kernel tell us
                return
            self.on_leave()
            os._exit(128 + number)  # without a last flush: whoever should read it may be what we hang on
        self.ask()
        if not self._serving:
            raise SystemExit(0)


def leave(code: int) -> None:
    """End the process now, whatever its threads do: a thread cannot be killed, and its lease covers its claim."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, RuntimeError, ValueError):  # closed, in the middle of a write, or nobody reads any more
            continue
    os._exit(code)
