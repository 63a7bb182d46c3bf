"""Run a worker as a process: from the first signal handler to the exit code."""

import sys

from gendurable.config import Config
from gendurable.core.registry import load
from gendurable.errors import ConfigError
from gendurable.events import Event, Listener
from gendurable.observability.logs import Logs
from gendurable.service.shutdown import Shutdown, leave
from gendurable.service.worker import Worker

TICK = 1.0
FIRST_IDLE_CHECK, LONGEST_IDLE_CHECK = 0.02, 0.2


def run_worker(config: Config, *, until_idle: bool = False) -> int:
    """Work until asked to end, until idle if so wanted, or until a loop dies; return the exit code."""
    shutdown = Shutdown()
    if config.switch_interval is not None:
        sys.setswitchinterval(config.switch_interval.total_seconds())
    registry = load(config.fsms)
    if not registry:
        raise ConfigError("fsms: no machines to run; say where they are, as in --fsms shop.machines")
    listeners: list[Listener] = []

    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    worker = Worker(config, registry, emit=emit, on_death=shutdown.ask)
    logs = Logs(worker=worker.id, log_format=config.log_format, log_level=config.log_level)
    listeners.append(logs)
    worker.prepare()
    shutdown.serve()
    if not shutdown.is_asked:
        worker.start()
        _work(worker, shutdown, until_idle=until_idle)
    abandoned = worker.drain()
    code = 1 if worker.has_died else 0
    if abandoned or worker.has_died:
        leave(code)  # threads that still run users' code would hold the process back
    return code


def _work(worker: Worker, shutdown: Shutdown, *, until_idle: bool) -> None:
    pause = FIRST_IDLE_CHECK if until_idle else TICK
    while not shutdown.wait(pause):
        if until_idle:
            if worker.is_idle():
                return
            pause = min(2 * pause, LONGEST_IDLE_CHECK)
