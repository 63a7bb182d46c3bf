"""A worker as a service: what it tells systemd, probes and Prometheus, and several processes under one supervisor."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest
from machines import Gated, Noop, Scene
from proxy import Proxy
from stage import Stage
from support import is_running, until
from workers import WorkerProcess, worker

from gendurable import Client
from gendurable.db.connection import Connection

# The watchdog is fed three times in this time.
WATCHDOG_SECONDS = 0.6
SILENCE = 3 * WATCHDOG_SECONDS


class Manager:
    """systemd's end of the notifications: hears what a service says."""

    def __init__(self, ours: socket.socket) -> None:
        self._ours = ours

    def hear(self, within: float = 20) -> list[str]:
        """Return the assignments of the next message, or none at all."""
        self._ours.settimeout(within)
        try:
            return self._ours.recv(10_000).decode().split("\n")
        except TimeoutError:
            return []

    def wait_for(self, assignment: str) -> list[list[str]]:
        """Return every message up to one with this assignment."""
        messages = [self.hear()]
        while assignment not in messages[-1]:
            assert messages[-1], f"{assignment} was not heard after {messages}"
            messages.append(self.hear())
        return messages

    def forget(self) -> None:
        """Drop what was said until now."""
        while self.hear(within=0.001):
            pass


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours, tempfile.TemporaryDirectory() as folder:
        ours.bind(f"{folder}/notify")
        monkeypatch.setenv("NOTIFY_SOCKET", f"{folder}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_SECONDS * 1_000_000)))
        yield Manager(ours)


@pytest.fixture
def port() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            number = int(first.getsockname()[1])
            try:
                socket.create_server(("127.0.0.1", number + 1)).close()
            except OSError:
                continue
            return number


def ask(port: int, page: str) -> tuple[int, str]:
    """Ask for a page; nobody there is 0."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        client.request("GET", page)
        answer = client.getresponse()
        return answer.status, answer.read().decode()
    except ConnectionError:
        return 0, ""
    finally:
        client.close()


def answers(port: int, page: str, status: int) -> Callable[[], bool]:
    return lambda: ask(port, page)[0] == status


def address(port: int) -> str:
    return f"127.0.0.1:{port}"


# systemd.


def test_systemd_hears_when_a_worker_is_ready_that_it_lives_and_how_long_it_may_take_to_go(
    own_dsn: str, manager: Manager, stage: Stage
):
    with worker(own_dsn, "--drain-timeout", "7s") as running:
        first = manager.wait_for("READY=1")
        assert first == [["READY=1", "STATUS=serving default"]]
        running.started()
        for _ in range(3):
            manager.wait_for("WATCHDOG=1")
        with Client(own_dsn) as client:
            client.insert(Gated.new(Scene(str(stage.folder), gate="g")))
        manager.wait_for("STATUS=1 of 10 slots busy")
        running.signal(signal.SIGTERM)
        last = manager.wait_for("STOPPING=1")[-1]
        stage.open("g")
        assert running.wait() == 0
    assert last == ["STOPPING=1", "STATUS=draining", "EXTEND_TIMEOUT_USEC=17000000"]


def test_systemd_does_not_hear_of_a_worker_that_cannot_start(fresh_database: str, manager: Manager):
    with worker(fresh_database) as hopeless:
        assert hopeless.wait() == 5
    assert manager.hear(within=0.1) == []


def test_a_long_step_does_not_starve_the_watchdog(own_dsn: str, manager: Manager, stage: Stage):
    with worker(own_dsn, "--queues", "default=1", fsms="impatient,machines:Gated"), Client(own_dsn) as client:
        client.insert(Gated.new(Scene(str(stage.folder), gate="g")))
        stage.wait_for("entered")
        manager.forget()
        # Longer than a loop may take for its round.
        for _ in range(8):
            manager.wait_for("WATCHDOG=1")
        stage.open("g")


def test_the_watchdog_is_fed_only_while_every_loop_turns_and_liveness_says_the_same(
    own_dsn: str, own_conn: Connection, manager: Manager, port: int
):
    with worker(own_dsn, "--http", address(port), fsms="impatient"):
        manager.wait_for("WATCHDOG=1")
        assert ask(port, "/livez") == (200, "ok\n")
        own_conn.execute("begin")
        own_conn.execute("lock table gen_durable")  # the poller waits for it, within its statement's timeout
        until(answers(port, "/livez", 503), "a loop that is stuck")
        assert ask(port, "/livez")[1] == "poller default\n"
        manager.forget()
        assert manager.hear(within=SILENCE) == []
        own_conn.execute("rollback")
        manager.wait_for("WATCHDOG=1")
        until(answers(port, "/livez", 200), "all loops turning again")


# Probes and metrics.


def test_readiness_follows_the_database_and_liveness_does_not(own_dsn: str, port: int):
    with Proxy(own_dsn) as proxy, worker(proxy.dsn, "--http", address(port)) as running:
        until(answers(port, "/readyz", 200), "a worker that is ready")
        assert health(port).stdout == b"ok\n"
        proxy.refuse()
        proxy.cut()
        until(answers(port, "/readyz", 503), "a worker that is not ready")
        assert "the database is out of reach" in ask(port, "/readyz")[1]
        assert ask(port, "/livez") == (200, "ok\n")
        assert health(port).returncode == 1
        proxy.accept()
        until(answers(port, "/readyz", 200), "a worker that is ready again")
        running.signal(signal.SIGTERM)
        assert running.wait() == 0


def health(port: int) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "gendurable", "health", "--http", address(port)]
    return subprocess.run(command, capture_output=True, check=False, timeout=60)


def test_a_worker_that_drains_is_not_ready_and_says_so_in_its_metrics(own_dsn: str, port: int, stage: Stage):
    with worker(own_dsn, "--http", address(port), "--drain-timeout", "60s") as running, Client(own_dsn) as client:
        client.insert(Gated.new(Scene(str(stage.folder), gate="g")))
        stage.wait_for("entered")
        running.signal(signal.SIGTERM)
        until(answers(port, "/readyz", 503), "a worker that drains")
        assert ask(port, "/readyz")[1] == "draining\n"
        assert ask(port, "/livez") == (200, "ok\n")
        assert "\ngendurable_draining 1.0\n" in ask(port, "/metrics")[1]
        stage.open("g")
        assert running.wait() == 0


def test_metrics_count_what_a_real_worker_did(own_dsn: str, port: int):
    with Client(own_dsn) as client:
        ids = client.insert_many(Noop.new({}) for _ in range(3))
        with worker(own_dsn, "--http", address(port)):
            for id in ids:
                client.wait(id, timeout=20)
            labels = 'fsm="noop",outcome="done",queue="default",step="perform"'
            counted = f"gendurable_steps_total{{{labels}}} 3.0"
            sampled = 'gendurable_instances{queue="default",status="done"} 3.0'
            until(lambda: {counted, sampled} <= set(ask(port, "/metrics")[1].splitlines()), "three steps on the page")


# Several processes.


def alive(conn: Connection) -> set[int]:
    """The process ids of workers that beat."""
    return {pid for (pid,) in conn.execute("select pid from workers where expires_at > now()")}


@pytest.fixture
def two(own_dsn: str, own_conn: Connection, manager: Manager, port: int) -> Iterator[WorkerProcess]:
    """A supervisor whose two processes are ready."""
    with worker(own_dsn, "--processes", "2", "--http", address(port)) as supervisor:
        manager.wait_for("READY=1")
        until(lambda: len(alive(own_conn)) == 2, "two workers")
        yield supervisor
        if supervisor.process.poll() is None:
            supervisor.signal(signal.SIGTERM)
            assert supervisor.wait() == 0


def test_several_processes_are_ready_live_and_leave_as_one(
    two: WorkerProcess, own_conn: Connection, manager: Manager, port: int
):
    assert two.pid not in alive(own_conn)
    for page in (port, port + 1):
        assert ask(page, "/readyz") == (200, "ok\n")
    manager.wait_for("WATCHDOG=1")
    two.signal(signal.SIGTERM)
    manager.wait_for("STOPPING=1")
    assert two.wait() == 0
    assert alive(own_conn) == set(), "each has drained and taken its leave"


def test_a_process_that_dies_is_replaced(two: WorkerProcess, own_conn: Connection):
    lost, kept = sorted(alive(own_conn))
    os.kill(lost, signal.SIGKILL)
    until(lambda: len(alive(own_conn) - {lost}) == 2, "another one in its place")
    assert kept in alive(own_conn)
    assert f"worker process {lost} ended with -9; a new one starts in 1 s" in two.log


def test_a_process_that_hangs_starves_the_watchdog(two: WorkerProcess, own_conn: Connection, manager: Manager):
    hanging = min(alive(own_conn))
    os.kill(hanging, signal.SIGSTOP)
    try:
        while manager.hear(within=SILENCE):
            pass
    finally:
        os.kill(hanging, signal.SIGCONT)
    manager.wait_for("WATCHDOG=1")


def test_no_process_outlives_its_supervisor(two: WorkerProcess, own_conn: Connection):
    pids = alive(own_conn)
    two.signal(signal.SIGKILL)
    two.wait()
    until(lambda: not any(map(is_running, pids)), "the end of both")


def test_a_second_signal_takes_the_processes_along(
    two: WorkerProcess, own_conn: Connection, own_dsn: str, stage: Stage
):
    pids = alive(own_conn)
    with Client(own_dsn) as client:
        client.insert(Gated.new(Scene(str(stage.folder), gate="g")))
    stage.wait_for("entered")
    two.signal(signal.SIGTERM)
    two.wait_for("drain_started")
    two.signal(signal.SIGTERM)
    assert two.wait() == 128 + signal.SIGTERM
    until(lambda: not any(map(is_running, pids)), "the end of both")


def test_a_supervisor_whose_processes_cannot_start_leaves_as_they_do(fresh_database: str):
    with worker(fresh_database, "--processes", "2") as hopeless:
        assert hopeless.wait() == 5
        assert "gendurable migrate up" in hopeless.log


def test_several_processes_end_together_when_nothing_is_left_to_do(own_dsn: str):
    with Client(own_dsn) as client:
        ids = client.insert_many(Noop.new({}) for _ in range(20))
        with worker(own_dsn, "--processes", "2", "--until-idle") as supervisor:
            assert supervisor.wait() == 0
        assert {client.get(id).status for id in ids} == {"done"}
