"""What systemd wants to hear from a service of `Type=notify`; silence where it did not ask."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

MICROSECONDS = 1_000_000
PATIENCE = 1.0


class Systemd:
    """Sends assignments to the socket that systemd named. Never raises: a service must run without it too."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Read what systemd put into the environment."""
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_seconds = _watchdog_seconds(environ)

    def ready(self, status: str) -> None:
        """The start is over."""
        self._send("READY=1", _status(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(_status(text))

    def stopping(self, status: str, *, within: float) -> None:
        """The end begins, and may take so many seconds from now."""
        self._send("STOPPING=1", _status(status), f"EXTEND_TIMEOUT_USEC={int(within * MICROSECONDS)}")

    def watchdog(self) -> None:
        """Say that we are alive; to be sent a few times in `watchdog_seconds`, and only while it is true."""
        self._send("WATCHDOG=1")

    def _send(self, *assignments: str) -> None:
        if self._address.startswith(("/", "@")):
            # A leading @ means the abstract name space, which sockets write as a zero byte.
            address = self._address.replace("@", "\0", 1) if self._address.startswith("@") else self._address
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(PATIENCE)
                sender.sendto("\n".join(assignments).encode(errors="replace"), address)


def _status(text: str) -> str:
    # A line break would begin another assignment.
    return "STATUS=" + " ".join(text.split())


def _watchdog_seconds(environ: Mapping[str, str]) -> float | None:
    """Return within how long systemd wants to hear from this very process, or None if it does not."""
    interval = environ.get("WATCHDOG_USEC", "")
    if not interval.isdecimal() or int(interval) == 0:
        return None
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(interval) / MICROSECONDS
