"""Real worker processes for end-to-end tests: started by the command that operators type, watched through their log."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import until

HERE = Path(__file__).parent
# Quick enough for tests, slow enough that a busy machine does not lose leases by accident.
QUICK = {"lease": "3s", "heartbeat": "500ms", "reap": "500ms", "poll": "200ms", "max-poll": "500ms"}


class WorkerProcess:
    """One `gendurable worker`; its log is JSON lines on stderr, kept in a file."""

    def __init__(
        self,
        dsn: str,
        *flags: str,
        fsms: str = "machines",
        settings: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start it; `flags` as on the command line, settings that differ from QUICK, those that have no flag."""
        merged = QUICK | (settings or {})
        options = [part for key, value in merged.items() for part in (f"--{key}", value)]
        self._log = tempfile.NamedTemporaryFile(prefix="worker", suffix=".log", delete=False)  # noqa: SIM115
        ours = {f"GENDURABLE_{key.upper()}": value for key, value in {"dsn": dsn, **(environment or {})}.items()}
        others = {key: value for key, value in os.environ.items() if not key.startswith(("GENDURABLE_", "PG"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gendurable", "worker", "--fsms", fsms, "--log-format", "json", *options, *flags],
            cwd=HERE,
            env=others | ours | {"PYTHONPATH": str(HERE.parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def events(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        """Return what it logged under this name, with these values."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]
        return [line for line in lines if line["event"] == name and fields.items() <= line.items()]

    def wait_for(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait until it logs an event, and return the first."""

        def seen() -> dict[str, Any] | None:
            found = self.events(name, **fields)
            assert found or self.process.poll() is None, f"it exited {self.process.returncode}:\n{self.log}"
            return found[0] if found else None

        found = until(seen, f"{name} {fields} in the log")
        assert found is not None
        return found

    def let_poll(self, times: int = 3) -> None:
        """Wait until it has looked for work so many times more; it must log at level debug."""
        seen = len(self.events("claimed"))
        until(lambda: len(self.events("claimed")) >= seen + times, f"{times} more polls")

    def started(self) -> "WorkerProcess":
        """Wait until it polls, and return it."""
        self.wait_for("worker_started")
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        """Wait for its end and return the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {timeout} s:\n{self.log}") from None

    def kill(self) -> None:
        """End it as a crash would, stopped or not."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


@contextmanager
def worker(dsn: str, *flags: str, **settings: Any) -> Iterator[WorkerProcess]:
    """Run a worker for the length of a block; it is killed at the end if it still lives."""
    running = WorkerProcess(dsn, *flags, **settings)
    try:
        yield running
    except BaseException:
        print(f"the log of worker {running.pid}, exit code {running.process.poll()}:\n{running.log}")  # noqa: T201
        raise
    finally:
        running.kill()
        Path(running._log.name).unlink()
