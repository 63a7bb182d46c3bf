import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import psycopg
import pytest
from click.testing import CliRunner, Result
from commandline import Cli, CliJson, Out

from gendurable.cli import main
from gendurable.core.limits import DEFAULT_LIMITS, apply_limits

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def quiet_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty current folder, no setting in the environment, and the machines of these tests importable."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("GENDURABLE_", "PG")) or name == "DATABASE_URL":
            monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(HERE)
    before = attrs.evolve(DEFAULT_LIMITS)
    yield
    apply_limits(before)


@pytest.fixture
def bare_cli() -> Cli:
    """Run the command line in this process, with no database configured."""

    def run(*arguments: object, **others: Any) -> Result:
        return CliRunner().invoke(main, [str(each) for each in arguments], **others)

    return run


@pytest.fixture
def cli(dsn: str, bare_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run the command line in this process, on an empty database."""
    monkeypatch.setenv("GENDURABLE_DSN", dsn)
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("truncate workers")
    return bare_cli


@pytest.fixture
def out(cli: Cli) -> Out:
    """Run a command that must succeed, and return what it printed."""

    def run(*arguments: object, **others: Any) -> str:
        result = cli(*arguments, **others)
        assert result.exit_code == 0, result.stderr
        assert result.stderr == ""
        return result.stdout

    return run


@pytest.fixture
def out_json(out: Out) -> CliJson:
    """Run a command that must succeed with --json, and return the document."""
    return lambda *arguments, **others: json.loads(out(*arguments, "--json", **others))
