"""Supervise several worker processes, for more than one core: started, watched, restarted and ended together."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from attrs import define

from gendurable.config import Config
from gendurable.events import Listener, ProcessEnded
from gendurable.observability.logs import Logs
from gendurable.service.notify import Systemd
from gendurable.service.run import SUPERVISOR
from gendurable.service.shutdown import Shutdown

TICK = 0.2
FIRST_RESTART, LONGEST_RESTART = 1.0, 30.0
# A child that lived this long had started well: what ended it is a new misfortune.
SETTLED = 60.0
# Bad configuration, unreachable or unmigrated database: a child that ends so and was never ready will not do better.
HOPELESS = (2, 5)
# Beyond its drain, how long a child may take to leave before it is killed.
LEAVING = 30.0


def supervise(config: Config, argv: Sequence[str], shutdown: Shutdown, *, until_idle: bool = False) -> int:
    """Run `config.processes` workers with the command line `argv`; return the exit code.

    Each child gets the whole command line, with what is its own added at the end, where it counts.
    """
    with tempfile.TemporaryDirectory(prefix="gendurable-") as folder:
        mailbox = _Mailbox(Path(folder))
        children = [_Child(_command(config, argv, index), mailbox.address(index)) for index in range(config.processes)]
        logs = Logs(log_format=config.log_format, log_level=config.log_level)
        supervisor = _Supervisor(config, children, mailbox, emit=logs, until_idle=until_idle)
        # The second signal leaves no time for a drain: the children go as the supervisor does.
        shutdown.on_leave = supervisor.kill
        shutdown.serve()
        try:
            return supervisor.run(shutdown)
        finally:
            supervisor.kill()
            mailbox.close()


def _command(config: Config, argv: Sequence[str], index: int) -> list[str]:
    own = ["--processes", "1"]
    if config.http_address is not None:
        host, port = config.http_address
        # One address cannot serve several processes: each has the next port.
        own += ["--http", f"{f'[{host}]' if ':' in host else host}:{port + index if port else 0}"]
    return [sys.executable, "-m", "gendurable", *argv, *own]


class _Mailbox:
    """Hears what the children tell systemd: each has a socket here, named for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sockets: dict[str, socket.socket] = {}

    def address(self, index: int) -> str:
        path = str(self._folder / str(index))
        self._sockets[path] = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sockets[path].setblocking(False)
        self._sockets[path].bind(path)
        return path

    def read(self, address: str) -> list[str]:
        lines: list[str] = []
        while True:
            try:
                lines += self._sockets[address].recv(65_536).decode(errors="replace").splitlines()
            except OSError:  # nothing more
                return lines

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()


@define
class _Child:
    """One worker process and how it has fared."""

    command: list[str]
    address: str
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float = 0.0
    was_ready: bool = False
    is_finished: bool = False
    heard: float = 0.0

    def start(self) -> None:
        environment = os.environ | {SUPERVISOR: str(os.getpid()), "NOTIFY_SOCKET": self.address}
        environment.pop("WATCHDOG_PID", None)
        self.started = self.heard = monotonic()
        # A session of its own: a terminal's Ctrl-C must reach the children once, from the supervisor.
        self.process = subprocess.Popen(self.command, env=environment, start_new_session=True)  # noqa: S603

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class _Supervisor:
    """A child that dies is started again after a growing pause; a signal is passed on, and all leave together."""

    def __init__(
        self, config: Config, children: list[_Child], mailbox: _Mailbox, *, emit: Listener, until_idle: bool
    ) -> None:
        self._config = config
        self._children = children
        self._mailbox = mailbox
        self._emit = emit
        self._until_idle = until_idle
        self._systemd = Systemd()
        self._was_ready = False

    def run(self, shutdown: Shutdown) -> int:
        for child in self._children:
            child.start()
        while not shutdown.wait(TICK):
            for child in self._children:
                self._listen(child)
                code = self._tend(child)
                if code is not None:
                    self._end()
                    return code
            if all(child.is_finished for child in self._children):
                return 0
            self._tell_systemd()
        return self._end()

    def kill(self) -> None:
        for child in self._children:
            if child.process is not None and child.is_running:
                child.process.kill()

    def _listen(self, child: _Child) -> None:
        for line in self._mailbox.read(child.address):
            if line in {
                "READY=1",
                "WATCHDOG=1",
            }:  # a status is no sign of life: loops that are stuck may still have one
                child.heard = monotonic()
            child.was_ready = child.was_ready or line == "READY=1"

    def _tend(self, child: _Child) -> int | None:
        """Look after one child; returns an exit code if there is no point in going on."""
        if child.is_finished or child.is_running or child.process is None:
            return None
        code = child.process.returncode
        if code in HOPELESS and not child.was_ready:
            return int(code)
        if self._until_idle and code == 0:
            child.is_finished = True
            return None
        now = monotonic()
        if not child.restart_at:
            lived = now - child.started
            child.failures = 1 if lived >= SETTLED else child.failures + 1
            pause = min(FIRST_RESTART * 2 ** (child.failures - 1), LONGEST_RESTART)
            child.restart_at = now + pause
            self._emit(ProcessEnded(child.process.pid, code, pause))
        elif now >= child.restart_at:
            child.restart_at = 0.0
            child.start()
        return None

    def _tell_systemd(self) -> None:
        if not self._was_ready and all(child.was_ready for child in self._children):
            self._was_ready = True
            self._systemd.ready(f"{len(self._children)} worker processes")
        patience = self._systemd.watchdog_seconds
        if patience is not None and all(
            child.is_finished or monotonic() - child.heard < patience for child in self._children
        ):
            self._systemd.watchdog()

    def _end(self) -> int:
        """Have every child drain, and wait for them."""
        patience = self._config.drain_timeout.total_seconds() + LEAVING
        self._systemd.stopping("draining", within=patience)
        running = [child.process for child in self._children if child.process is not None and child.is_running]
        for process in running:
            process.terminate()
        deadline = monotonic() + patience
        codes = []
        for process in running:
            try:
                codes.append(process.wait(max(deadline - monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        # One that was told before it could listen has died of it, with nothing begun.
        return 0 if all(code in (0, -signal.SIGTERM) for code in codes) else 1
