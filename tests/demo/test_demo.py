"""The README's first command: what it shows happens, and it ends well and soon."""

import os
import re
import subprocess
import sys
import time

import pytest


@pytest.fixture(scope="module")
def story() -> str:
    """What `make demo` prints."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("GENDURABLE_", "PG"))}
    began = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-m", "gendurable.demo"],
        env=others,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (told.returncode, told.stderr) == (0, ""), told.stdout + told.stderr
    assert time.monotonic() - began < 60
    return told.stdout


def chapter(story: str, number: int) -> str:
    return story.split(f"\n{number}. ")[1].split(f"\n{number + 1}. ", maxsplit=1)[0]


def test_a_checkout_waits_for_its_payment_fans_out_joins_and_ends(story: str):
    told = chapter(story, 1)
    assert "status=awaiting_signal step=ship awaits=payment_confirmed" in told
    committed = re.findall(r"^ +instance (\d+) +demo\.(\w+) +(\w+) +-> (\w+)$", told, re.MULTILINE)
    steps = [(machine, step, outcome) for _, machine, step, outcome in committed]
    assert steps == [
        ("checkout", "start", "await"),
        ("checkout", "ship", "spawn"),
        *[("ship", "perform", "done")] * 3,
        ("checkout", "finish", "done"),
    ]
    assert 'done: {"paid": 100, "order": 42, "tracking": ["T-42-1", "T-42-2", "T-42-3"]}' in told


def test_a_step_whose_worker_was_killed_is_run_again_by_another(story: str):
    told = chapter(story, 2)
    assert "the worker is gone (exit -9); the row still says executing" in told
    assert "the lease is over: it runs again" in told
    assert 'done at the second execution: {"executions": 2}' in told


def test_bookings_of_one_account_take_turns_and_accounts_run_side_by_side(story: str):
    bars = re.findall(r"^  (\w+) +(\d)  ( *)(#+)$", chapter(story, 3), re.MULTILINE)
    spans = {(who, int(number)): (len(before), len(before) + len(bar)) for who, number, before, bar in bars}
    assert len(spans) == 9
    for who in ("anna", "ben", "cleo"):
        for number in (1, 2):
            assert spans[who, number][1] <= spans[who, number + 1][0] + 1, "a bar is rounded to whole letters"
    first = [spans[who, 1] for who in ("anna", "ben", "cleo")]
    assert max(start for start, _ in first) < min(end for _, end in first)


def test_no_line_is_too_long_for_a_terminal_of_80_columns(story: str):
    assert [line for line in story.splitlines() if len(line) > 80] == []
