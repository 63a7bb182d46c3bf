import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from gendurable.service.notify import Systemd


@pytest.fixture(params=["path", "abstract"])
def manager(request) -> Iterator[tuple[str, socket.socket]]:
    """The socket of a service manager: its address as it stands in the environment, and its end of it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours, tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/notify" if request.param == "path" else f"@gendurable-{uuid4().hex}"
        ours.bind(address if request.param == "path" else "\0" + address[1:])
        ours.settimeout(20)
        yield address, ours


def heard(manager: socket.socket) -> list[str]:
    return manager.recv(10_000).decode().split("\n")


def test_each_message_is_one_datagram_of_assignments(manager):
    address, ours = manager
    systemd = Systemd({"NOTIFY_SOCKET": address})
    systemd.ready("serving default")
    assert heard(ours) == ["READY=1", "STATUS=serving default"]
    systemd.status("3 of 10 slots busy")
    assert heard(ours) == ["STATUS=3 of 10 slots busy"]
    systemd.watchdog()
    assert heard(ours) == ["WATCHDOG=1"]
    systemd.stopping("draining", within=7.5)
    assert heard(ours) == ["STOPPING=1", "STATUS=draining", "EXTEND_TIMEOUT_USEC=7500000"]


def test_a_status_cannot_bring_in_other_assignments(manager):
    address, ours = manager
    Systemd({"NOTIFY_SOCKET": address}).status("queue a\nREADY=1\r\nb")
    assert heard(ours) == ["STATUS=queue a READY=1 b"]


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "/nowhere/notify"}, {"NOTIFY_SOCKET": "vsock:2:1234"}]
)
def test_without_a_manager_that_listens_nothing_happens(environ):
    systemd = Systemd(environ)
    systemd.ready("serving")
    systemd.watchdog()
    systemd.stopping("draining", within=1)


def test_a_manager_that_does_not_read_cannot_hold_us_up(monkeypatch):
    monkeypatch.setattr("gendurable.service.notify.PATIENCE", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf, tempfile.TemporaryDirectory() as folder:
        deaf.bind(f"{folder}/notify")
        backlog = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
        systemd = Systemd({"NOTIFY_SOCKET": f"{folder}/notify"})
        for _ in range(backlog + 5):
            systemd.watchdog()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getppid())}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_for_the_process_it_names(environ, seconds):
    assert Systemd(environ).watchdog_seconds == seconds
