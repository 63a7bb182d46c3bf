"""Worker processes under measurement: started by the usual command, their processor time and memory read from /proc."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from gendurable.errors import GenDurableError

PATIENCE = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class BenchFailed(GenDurableError):
    """A worker under measurement did not do what it should."""


@frozen
class Fleet:
    """Running workers."""

    processes: tuple["subprocess.Popen[bytes]", ...]
    logs: tuple[Path, ...]

    def cpu_seconds(self) -> float:
        """Processor time that the workers have used."""
        return sum(cpu_seconds(process.pid) for process in self.processes)

    def memory_bytes(self) -> int:
        """Resident memory of all workers."""
        return sum(int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * _PAGE for process in self.processes)

    def check(self) -> None:
        """Raise if a worker has ended."""
        for process, log in zip(self.processes, self.logs, strict=True):
            if process.poll() is not None:
                lines = log.read_text().splitlines()
                raise BenchFailed(f"a worker ended with {process.returncode}: {lines[-1] if lines else 'no word'}")

    def wait_until_started(self) -> None:
        """Wait until every worker polls."""
        deadline = time.monotonic() + PATIENCE
        while not all(b'"worker_started"' in log.read_bytes() for log in self.logs):
            self.check()
            if time.monotonic() > deadline:
                raise BenchFailed(f"the workers did not start within {PATIENCE:g} s")
            time.sleep(0.002)


@contextmanager
def fleet(dsn: str, schema: str, *, count: int = 1, flags: Sequence[str] = ()) -> Iterator[Fleet]:
    """Run workers for the length of a block."""
    command = [sys.executable, "-m", "gendurable", "worker", "--fsms", "gendurable.bench.machines", "--schema", schema]
    with tempfile.TemporaryDirectory(prefix="gendurable-bench-") as folder:
        logs = tuple(Path(folder) / f"{index}.log" for index in range(count))
        processes = []
        for log in logs:
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(  # noqa: S603  our own command
                        [*command, "--log-format", "json", *flags],
                        env=os.environ | {"GENDURABLE_DSN": dsn},
                        stdin=subprocess.DEVNULL,
                        stderr=output,
                    )
                )
        try:
            yield Fleet(tuple(processes), logs)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(PATIENCE)


def cpu_seconds(pid: int, *, with_children: bool = False) -> float:
    """Processor time of a process, and of those of its children that have ended."""
    # The name in the second field may hold blanks; what follows its closing parenthesis does not.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(value) for value in fields[11 : 15 if with_children else 13]) / _TICKS


def server_cpu_seconds(postmaster: int | None) -> float | None:
    """Processor time of a server on this machine, all its processes together; None if it is not here."""
    if postmaster is None:
        return None
    total = cpu_seconds(postmaster, with_children=True)
    for path in Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split():
        try:
            total += cpu_seconds(int(path))
        except FileNotFoundError:  # ended meanwhile: it counts among those of the parent
            continue
    return total
