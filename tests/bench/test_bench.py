"""`gendurable bench`: every scenario that is quick enough runs for real; what it prints, and what it leaves behind."""

import json
import subprocess
import sys
from typing import Any

import pytest

from gendurable.bench.figures import HEADINGS, Figure, percentile, rows
from gendurable.cli.bench import NAMES
from gendurable.db.connection import Connection

FIGURES = {
    "limit": ["limit: bare loop, batches of 500", "limit: bare loop, batches of 10"],
    "chains": ["chains of 5 steps", "chains of 5 inline steps"],
    "inserts": ["insert in bulk", "insert one by one"],
    "fan-out": ["fan-out of 50 and join"],
    "signals": ["50 parked, signalled one by one"],
    "keyed": ["keyed jobs, 100 partition keys"],
}


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gendurable", "bench", "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def measured(dsn: str, *names: str) -> dict[str, Any]:
    done = bench("--dsn", dsn, "--json", *names)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", FIGURES)
def test_a_scenario_measures_what_it_says(dsn: str, name: str):
    document = measured(dsn, name)
    assert [figure["scenario"] for figure in document["figures"]] == FIGURES[name]
    assert {"cores", "python", "server_version", "fsync", "synchronous_commit"} <= set(document["machine"])
    for figure in document["figures"]:
        assert figure["rate"] == pytest.approx(figure["amount"] / figure["seconds"])
        assert figure["rate"] > 0
        assert name == "limit" or figure["ratio"] > 0


def test_what_a_step_costs_is_told_in_processor_time_transactions_and_log(dsn: str):
    [figure, _] = measured(dsn, "chains")["figures"]
    assert figure["worker_cpu"] > 0
    assert 0 < figure["transactions"] < 1, "many steps share a claim and a commit"
    assert figure["wal_bytes"] > 100


def test_nothing_is_left_behind_and_the_figures_can_be_written_to_a_file(dsn: str, conn: Connection, tmp_path):
    output = tmp_path / "figures.json"
    done = bench("--dsn", dsn, "--output", str(output), "limit")
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["figures"][0]["unit"] == "rows"
    assert "limit: bare loop, batches of 500" in done.stdout
    assert "bench: limit" in done.stderr
    assert conn.execute("select count(*) from pg_namespace where nspname like 'gendurable_bench%'").fetchone() == (0,)


def test_an_unknown_scenario_is_refused_with_those_there_are():
    done = bench("warp")
    assert done.returncode == 2
    assert "'noops'" in done.stderr


def test_the_command_names_every_scenario():
    from gendurable.bench.scenarios import SCENARIOS

    assert tuple(SCENARIOS) == NAMES


def test_a_figure_is_a_row_under_the_headings():
    [line] = rows([Figure(scenario="s", amount=1000, seconds=2.0, ratio=0.5, p50=0.001, p95=0.002, p99=0.003)])
    assert len(line) == len(HEADINGS)
    assert line[:3] == ("s", "500 steps", "0.50")
    assert "1.0/2.0/3.0" in line


def test_percentiles_of_few_values():
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 3.0]
