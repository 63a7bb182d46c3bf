import sys
from pathlib import Path

import pytest
from deployment import UNITS, run, unit

SERVICES = ("gendurable-worker@.service", "gendurable-gc.service")
INSTALLED = "/opt/gendurable/venv/bin/gendurable"
# It counts in tenths: an exposure of 2.5.
THRESHOLD = 25


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with the program where it is on this machine: systemd looks whether it can be executed."""
    ours = Path(sys.executable).with_name("gendurable")
    for path in UNITS.glob("gendurable-*"):
        (tmp_path / path.name).write_text(path.read_text().replace(INSTALLED, str(ours)))
    return tmp_path


def test_systemd_has_nothing_to_say_about_the_units(units):
    checked = run("systemd-analyze", "verify", "--man=no", *sorted(units.iterdir()))
    assert (checked.returncode, checked.stdout) == (0, "")


def test_systemd_would_have_said_something_about_a_misspelt_directive(units):
    worker = units / SERVICES[0]
    worker.write_text(worker.read_text().replace("WatchdogSec=", "WatchdogSecs="))
    assert "WatchdogSecs" in run("systemd-analyze", "verify", "--man=no", worker).stdout


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_exposes_next_to_nothing(units, name):
    judged = run("systemd-analyze", "security", "--offline=yes", f"--threshold={THRESHOLD}", "--no-pager", units / name)
    assert judged.returncode == 0, judged.stdout


def test_the_worker_tells_systemd_when_it_is_ready_and_that_it_lives():
    worker = unit(SERVICES[0])
    assert worker["Type"] == ["notify"]
    assert worker["NotifyAccess"] == ["main"]
    assert int(worker["WatchdogSec"][0]) > 3  # the worker feeds it once a second
    assert worker["KillMode"] == ["mixed"]


def test_both_services_are_fenced_in_alike():
    ours = {"Type", "ExecStart", "Description", "Wants", "After", "EnvironmentFile", "TimeoutStartSec"}
    only_workers = {"Environment", "NotifyAccess", "WatchdogSec", "KillMode", "KillSignal", "TimeoutStopSec"}
    only_workers |= {"Restart", "RestartSec", "RestartPreventExitStatus", "StartLimitIntervalSec", "StateDirectory"}
    only_gc = {"MemoryDenyWriteExecute"}  # it loads nobody's code
    worker, gc = unit(SERVICES[0]), unit(SERVICES[1])
    assert set(worker) - ours - only_workers - {"WantedBy"} == set(gc) - ours - only_gc
    for key in set(gc) - ours - only_gc:
        assert worker[key] == gc[key], key


def test_the_timer_starts_the_service_of_its_name():
    assert (UNITS / "gendurable-gc.timer").with_suffix(".service").exists()
    assert unit("gendurable-gc.timer")["WantedBy"] == ["timers.target"]
