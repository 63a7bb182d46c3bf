"""Run a worker as a process: from the first signal handler to the exit code."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from gendurable.config import Config
from gendurable.core.registry import load
from gendurable.errors import ConfigError
from gendurable.events import Event, Listener
from gendurable.observability.logs import Logs
from gendurable.observability.metrics import Metrics
from gendurable.service.notify import Systemd
from gendurable.service.probes import Probes
from gendurable.service.shutdown import Shutdown, leave
from gendurable.service.worker import Worker

TICK = 1.0
FIRST_IDLE_CHECK, LONGEST_IDLE_CHECK = 0.02, 0.2
# Set by a supervisor for its children: they end when it is gone, even if it was killed.
SUPERVISOR = "GENDURABLE_SUPERVISOR"


def run_worker(config: Config, shutdown: Shutdown, *, until_idle: bool = False) -> int:
    """Work until asked to end, until idle if so wanted, or until a loop dies; return the exit code."""
    if config.switch_interval is not None:
        sys.setswitchinterval(config.switch_interval.total_seconds())
    # A random part: a worker that comes back under its old name and pid must not be taken for the dead one.
    worker_id = f"{config.name}/{os.getpid()}-{secrets.token_hex(4)}"
    logs = Logs(worker=worker_id, log_format=config.log_format, log_level=config.log_level)
    logs.install()
    listeners: list[Listener] = [logs]

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    registry = load(config.fsms)
    if not registry:
        raise ConfigError("fsms: no machines to run; say where they are, as in --fsms shop.machines")
    worker = Worker(worker_id, config, registry, emit=emit, on_death=shutdown.ask)
    systemd = Systemd()
    with _probes(worker, listeners) as metrics:
        worker.prepare()
        shutdown.serve()
        if not shutdown.is_asked:
            worker.start()
            systemd.ready(f"serving {', '.join(config.queues)}")
            if metrics is not None:
                worker.show(metrics)
            try:
                _Duty(worker, shutdown, systemd).work(until_idle=until_idle)
            except Exception as error:  # noqa: BLE001  the loops would go on without anybody to end them
                worker.main_died(error)
        systemd.stopping("draining", within=config.drain_timeout.total_seconds() + 10)
        abandoned = worker.drain()
    code = 1 if worker.has_died else 0
    if abandoned or worker.has_died:
        leave(code)  # threads that still run users' code would hold the process back
    return code


@contextmanager
def _probes(worker: Worker, listeners: list[Listener]) -> Iterator[Metrics | None]:
    """Serve probes and metrics, if asked for."""
    address = worker.config.http_address
    if address is None:
        yield None
        return
    metrics = Metrics(CollectorRegistry())
    listeners.append(metrics)
    probes = Probes(*address, alive=worker.stuck_loops, ready=worker.unready, metrics=metrics.render)
    probes.start()
    try:
        yield metrics
    finally:
        probes.stop()


class _Duty:
    """What the main thread does while the loops work: the watchdog, and looking whether it is time to end."""

    def __init__(self, worker: Worker, shutdown: Shutdown, systemd: Systemd) -> None:
        self._worker = worker
        self._shutdown = shutdown
        self._systemd = systemd
        self._tick = min(TICK, (systemd.watchdog_seconds or TICK * 3) / 3)
        self._load = ""
        supervisor = os.environ.get(SUPERVISOR, "")
        self._supervisor = int(supervisor) if supervisor.isdecimal() else None

    def work(self, *, until_idle: bool) -> None:
        pause = FIRST_IDLE_CHECK if until_idle else self._tick
        while not self._shutdown.wait(pause):
            if until_idle:
                if self._worker.is_idle():
                    return
                pause = min(2 * pause, LONGEST_IDLE_CHECK)
            if self._supervisor is not None and os.getppid() != self._supervisor:
                return
            self._tell_load()
            # Only while every loop turns: a stuck one is what the watchdog is for, a long step is not.
            if self._systemd.watchdog_seconds is not None and not self._worker.stuck_loops():
                self._systemd.watchdog()

    def _tell_load(self) -> None:
        load = self._worker.load
        if load != self._load:
            self._systemd.status(load)
            self._load = load
