"""A worker as a service: what it tells systemd, probes and Prometheus, and several processes under one supervisor."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
from machines import Gated, Noop, Scene
from prometheus_client.parser import text_string_to_metric_families
from proxy import Proxy
from stage import Stage
from support import is_running, until
from workers import WorkerProcess, worker

from gendurable import Client
from gendurable.db.connection import Connection
from gendurable.observability.metrics import METRICS

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
    impatient = {"statement_timeout": "1s"}
    with Proxy(own_dsn) as proxy, worker(proxy.dsn, "--http", address(port), environment=impatient) as running:
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
        for link in proxy.links:
            link.swallow()
        until(answers(port, "/readyz", 503), "a worker that gets no answers")
        assert ask(port, "/livez") == (200, "ok\n")
        until(answers(port, "/readyz", 200), "a worker that is ready once more")
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


def value(port: int, name: str, **labels: str) -> float | None:
    """Read one number off the page of metrics."""
    families = text_string_to_metric_families(ask(port, "/metrics")[1])
    samples = (each for family in families for each in family.samples)
    return next((each.value for each in samples if each.name == name and labels.items() <= each.labels.items()), None)


def test_metrics_tell_what_a_real_worker_does_and_what_the_database_holds(
    own_dsn: str, own_conn: Connection, port: int, stage: Stage
):
    own_conn.execute("insert into gen_durable (fsm, fsm_version, step) values ('stranger', 7, 'start')")
    with Client(own_dsn) as client, worker(own_dsn, "--queues", "default=4", "--http", address(port)):
        client.insert(Gated.new(Scene(str(stage.folder), gate="g"), partition_key="k"))
        for id in client.insert_many(Noop.new({}) for _ in range(3)):
            client.wait(id, timeout=20)
        stage.wait_for("entered")
        families = {family.name for family in text_string_to_metric_families(ask(port, "/metrics")[1])}
        assert families == {metric.name.removesuffix("_total") for metric in METRICS}
        noop = {"queue": "default", "fsm": "noop", "step": "perform"}
        until(lambda: value(port, "gendurable_steps_total", **noop, outcome="done") == 3, "three steps on the page")
        assert value(port, "gendurable_step_duration_seconds_count", **noop) == 3
        assert value(port, "gendurable_claims_total", queue="default") == 4
        assert value(port, "gendurable_worker_slots", queue="default") == 4
        assert value(port, "gendurable_worker_busy", queue="default") == 1
        assert value(port, "gendurable_pool_connections", pool="locks", state="used") == 1
        assert value(port, "gendurable_build_info") == 1
        unserved = {"fsm": "stranger", "version": "7"}
        until(lambda: value(port, "gendurable_unserved_instances", **unserved) == 1, "a sample of the database")


def test_a_sample_that_gets_no_answer_does_not_hold_up_the_end(own_dsn: str, port: int):
    with Proxy(own_dsn) as proxy:
        fault = proxy.swallow_at("count_instances")
        with worker(proxy.dsn, "--http", address(port)) as leaving:
            leaving.started()
            fault.wait()
            leaving.signal(signal.SIGTERM)
            assert leaving.wait(15) == 0


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
    assert two.wait_for("process_ended", pid=lost)["code"] == -signal.SIGKILL


def test_a_process_that_hangs_starves_the_watchdog(two: WorkerProcess, own_conn: Connection, manager: Manager):
    hanging = min(alive(own_conn))
    os.kill(hanging, signal.SIGSTOP)
    try:
        while manager.hear(within=SILENCE):
            pass
    finally:
        os.kill(hanging, signal.SIGCONT)
    manager.wait_for("WATCHDOG=1")


def test_no_process_outlives_its_supervisor_but_for_its_drain(
    two: WorkerProcess, own_conn: Connection, own_dsn: str, stage: Stage
):
    pids = alive(own_conn)
    with Client(own_dsn) as client:
        id = client.insert(Gated.new(Scene(str(stage.folder), gate="g")))
        stage.wait_for("entered")
        two.signal(signal.SIGKILL)
        two.wait()
        until(lambda: len(two.events("drain_started")) == 2, "both draining")
        stage.open("g")
        assert client.wait(id, timeout=20).result == {"by": 0}
    until(lambda: not any(map(is_running, pids)), "the end of both")


def test_a_process_that_is_replaced_during_an_outage_is_no_reason_to_give_up(own_dsn: str, own_conn: Connection):
    with Proxy(own_dsn) as proxy, worker(proxy.dsn, "--processes", "2") as supervisor:
        until(lambda: len(supervisor.events("worker_started")) == 2, "two workers")
        until(lambda: len(alive(own_conn)) == 2, "two workers that beat")
        proxy.refuse()
        proxy.cut()
        os.kill(min(alive(own_conn)), signal.SIGKILL)
        # The next one finds no database when it starts, and the one after it neither.
        until(lambda: len(supervisor.events("process_ended", code=5)) >= 2, "two vain tries")
        assert supervisor.process.poll() is None
        proxy.accept()
        until(lambda: len(supervisor.events("worker_started")) == 3, "another one in its place")
        supervisor.signal(signal.SIGTERM)
        assert supervisor.wait() == 0


@pytest.mark.timeout(300)  # a dozen processes, one after the other
def test_several_processes_may_be_told_to_go_at_any_moment_of_their_start(own_dsn: str):
    begun = time.monotonic()
    with worker(own_dsn, "--processes", "2") as measured:
        until(lambda: len(measured.events("worker_started")) == 2, "two workers")
        start_up = time.monotonic() - begun
        measured.signal(signal.SIGTERM)
        assert measured.wait() == 0
    moments = 8
    codes = set()
    for moment in range(moments):
        with worker(own_dsn, "--processes", "2") as leaving:
            time.sleep(1.2 * start_up * moment / moments)  # not to wait for anything: the moment is what is tested
            leaving.signal(signal.SIGTERM)
            codes.add(leaving.wait())
            assert "Traceback" not in leaving.log
    assert codes <= {0, -signal.SIGTERM}
    assert 0 in codes


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
