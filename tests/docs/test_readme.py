"""The README is true: its reference parts are what the code has, and its examples run."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from reference import README, renewed

from gendurable import config, migrate
from gendurable.cli.root import Root

TEXT = README.read_text()
BLOCK = re.compile(r"(?:<!-- (\w+)(?:: (\S+))? -->\n)?```(\w+)\n(.*?)```", re.DOTALL)
BLOCKS = [(kind, name, language, code) for kind, name, language, code in BLOCK.findall(TEXT)]


def blocks(kind: str) -> list[tuple[str, str]]:
    return [(name, code) for mark, name, _, code in BLOCKS if mark == kind]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in blocks("file"):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    return tmp_path


def test_the_reference_parts_are_what_the_code_has():
    assert renewed(TEXT) == TEXT, "README.md is out of date: run make reference"


def test_every_python_example_is_run_by_a_test():
    assert {mark for mark, _, language, _ in BLOCKS if language == "python"} == {"file", "run", "pytest"}


def test_the_examples_run(shop: Path, fresh_database: str):
    migrate.up(fresh_database)
    names: dict[str, Any] = {"dsn": fresh_database, "__name__": "readme"}
    for _, code in blocks("run"):
        exec(compile(code, str(README), "exec"), names)
    assert names["instance"].fsm == "checkout"
    names["client"].close()


def test_the_example_of_a_test_passes(shop: Path, server_dsn: str):
    [(_, code)] = blocks("pytest")
    (shop / "test_shop.py").write_text(code)
    (shop / "pytest.ini").write_text("[pytest]\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py"],
        cwd=shop,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(shop), "GENDURABLE_TEST_DSN": server_dsn},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_machine_of_the_first_screen_runs_to_its_end(shop: Path, harness: Any):
    import shop as module

    durable = harness("shop")
    order = durable.insert(module.Checkout.new(module.Order(42)))
    durable.drain()
    durable.signal(order, "payment_confirmed", {"amount": 100})
    assert durable.drain() == {"spawn": 1, "done": 3}
    assert durable.get(order).result == {"paid": 100, "mails": 2}


def shell_lines(of: str) -> list[tuple[str, str]]:
    """The commands of the block that has this one, and what is said behind each."""
    [code] = [code for _, _, language, code in BLOCKS if language == "sh" and of in code]
    return [(line.partition("  #")[0].strip(), line.partition("# ")[2]) for line in code.splitlines()]


def test_the_first_machine_is_run_by_the_commands_beside_it_in_two_terminals(shop: Path, open_folder: Path):
    [(activate, _), (dev, _)] = shell_lines("gendurable dev")
    assert activate == ". .venv/bin/activate"
    others = {name: value for name, value in os.environ.items() if not name.startswith(("GENDURABLE_", "PG"))}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # what activate does
    env = others | {"PATH": programs, "GENDURABLE_HOME": str(open_folder / "home")}
    with subprocess.Popen(shlex.split(dev), cwd=shop, env=env, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        export = next(line for line in first.stderr if "export " in line).partition("export ")[2].strip()

        def second(line: str) -> str:
            typed = ["sh", "-c", f"export {export}; {line}"]
            done = subprocess.run(typed, cwd=shop, env=env, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout

        try:
            insert, signal, wait, get = shell_lines("gendurable insert")
            assert second(insert[0]) == "1\n"
            assert second(signal[0]) == ""
            assert second(wait[0]).strip() == wait[1]
            shown = second(get[0])
        finally:
            first.terminate()
            first.communicate(timeout=60)
    assert first.returncode == 0
    assert re.search(r"^queue +checkout$", shown, re.MULTILINE)
    assert re.search(r"^status +done$", shown, re.MULTILINE)


def test_the_example_of_a_configuration_is_accepted():
    [(_, code)] = blocks("config")
    assert config.load(cli={}, env={}, file=tomllib.loads(code)).config.queues["checkout"] == 5


def test_the_example_of_a_schedule_is_accepted():
    [(_, code)] = blocks("schedules")
    assert config.load(cli={}, env={}, file=tomllib.loads(code)).config.schedules["nightly"].catch_up == "latest"


COMMAND_LINES = [
    line.partition(" #")[0].strip()
    for _, _, language, code in BLOCKS
    if language == "sh"
    for line in code.splitlines()
    if line.startswith("gendurable ")
] + [line for line in re.findall(r"`(gendurable [^`…]+)`", TEXT) if " --" in line]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_every_command_line_shown_is_understood(line: str):
    command: click.Command = Root("gendurable")
    words = shlex.split(line)[1:]
    ctx = click.Context(command, resilient_parsing=True)
    while isinstance(command, click.Group):
        found = command.get_command(ctx, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
    command.make_context("gendurable", words, resilient_parsing=False)


def test_every_make_target_shown_exists():
    targets = set(re.findall(r"^([a-z-]+):", (README.parent / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", TEXT)) <= targets
