"""A Postgres server of one test's own, to be stopped, killed and started again."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from support import until

from gendurable import embedded


class OwnServer:
    """Runs from the start; as durable as one can be that does not fear for the machine's power."""

    def __init__(self, server: embedded.Server) -> None:
        self._server = server
        self.dsn = server.dsn
        with psycopg.connect(server.dsn) as conn:
            [(folder,)] = conn.execute("select current_setting('data_directory')").fetchall()
        self._data = Path(folder)

    def stop(self) -> None:
        """Stop as an operator does: sessions are ended, everything is written."""
        assert self._pg_ctl("-m", "fast", "stop")

    def kill(self) -> None:
        """End it as a crash does, and its sessions with it."""
        pid_file = self._data / "postmaster.pid"
        os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)
        pid_file.unlink()  # where nobody reaps the dead, the next server would take it for alive

    def start(self) -> None:
        """Start it again, with the same settings; sessions of a killed one may take a moment to be gone."""
        until(lambda: self._pg_ctl("restart"), "the server's start")

    def _pg_ctl(self, *arguments: str) -> bool:
        # "restart", since that remembers the settings, and starts a server that does not run as well.
        command = [self._server.binaries / "pg_ctl", "-D", self._data, "-w", "-l", "again.log", *arguments]
        return embedded._run(command, embedded._account(), cwd=self._data)[0] == 0


@contextmanager
def own_server() -> Iterator[OwnServer]:
    with embedded.start_temporary(settings={"synchronous_commit": "on"}) as server:
        yield OwnServer(server)
