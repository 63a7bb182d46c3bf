"""Limits as operators meet them: in a configuration file, kept by several real workers, healed after their deaths."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from machines import Gated, Noop, Scene
from stage import Stage
from support import row, until
from workers import worker

from gendurable import Client
from gendurable.core.instance import NewInstance
from gendurable.db.connection import Connection
from gendurable.errors import InvalidInstance

CONFIG = """
[rate_limits.api]
allowed = 20
period = "1s"
burst = 5

[rate_limits.rare]
allowed = 1
period = "10m"

[concurrency_limits.db]
limit = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> list[str]:
    """The flags that name a configuration file with limits."""
    file = tmp_path / "gendurable.toml"
    file.write_text(CONFIG)
    return ["--config", str(file)]


def gated(stage: Stage, gate: str, **about: Any) -> NewInstance:
    return Gated.new(Scene(str(stage.folder), gate=gate), **about)


def count(conn: Connection, status: str) -> int:
    found = conn.execute("select count(*) from gen_durable where status::text = %s", [status]).fetchone()
    assert found is not None
    return found[0]


def test_two_workers_keep_a_rate_between_them_and_use_it_up(
    dsn: str, client: Client, conn: Connection, config: list[str]
):
    with worker(dsn, "--log-level", "debug", *config) as one, worker(dsn, "--log-level", "debug", *config) as two:
        one.started(), two.started()
        client.insert_many([Noop.new(rate_limit="api") for _ in range(45)])
        started = time.monotonic()
        until(lambda: count(conn, "done") == 45, "all of them done")
        seconds = time.monotonic() - started
        granted = sum(event["granted"] for each in (one, two) for event in each.events("tokens_counted", limit="api"))
    assert granted == 45
    assert seconds >= 40 / 20 - 0.3, "faster than allowed"
    assert seconds < 40 / 20 + 8, "slower than allowed"


def test_a_promised_row_starts_at_its_instant_though_the_worker_sleeps_long(
    dsn: str, client: Client, conn: Connection, config: list[str]
):
    sleepy = {"poll": "20s", "max-poll": "20s"}
    with worker(dsn, *config, settings=sleepy) as only:
        only.started()
        ids = client.insert_many([Noop.new(rate_limit="api") for _ in range(12)])
        assert [client.wait(id, timeout=15).status for id in ids] == ["done"] * 12


def test_unrelated_work_behind_ten_thousand_throttled_rows_starts_at_once(
    dsn: str, client: Client, conn: Connection, config: list[str]
):
    with worker(dsn, *config) as only:
        only.started()
        client.insert_many([Noop.new(rate_limit="rare") for _ in range(10_000)])
        until(lambda: count(conn, "done") == 1, "one token was there")
        for new in (Noop.new(), Noop.new(rate_limit="api"), Noop.new(concurrency_limit="db"), Noop.new(priority=9)):
            started = time.monotonic()
            client.wait(client.insert(new), timeout=10)
            assert time.monotonic() - started < 5


def test_a_concurrency_limit_holds_across_workers_and_queues(
    dsn: str, client: Client, conn: Connection, stage: Stage, config: list[str]
):
    queues = ["--queues", "default=5,other=5"]
    with worker(dsn, *config, *queues) as one, worker(dsn, *config, *queues) as two:
        one.started(), two.started()
        ids = [
            client.insert(gated(stage, str(n), queue=("default", "other")[n % 2], concurrency_limit="db"))
            for n in range(8)
        ]
        tenants = [client.insert(gated(stage, "tenant", concurrency_limit=("db", f"t{n}"))) for n in range(3)]
        for id in tenants:
            stage.wait_for("entered", id=id)
        for n in range(8):
            entered = until(lambda n=n: len(stage.notes("entered")) == 3 + min(n + 2, 8), "the next two, no more")
            assert entered
            assert count(conn, "executing") <= 5
            first = next(id for id in ids if not stage.notes("left", id=id) and stage.notes("entered", id=id))
            stage.open(str(ids.index(first)))
            stage.wait_for("left", id=first)
        stage.open("tenant")
        until(lambda: count(conn, "done") == 11, "all done")


def test_a_worker_killed_in_the_midst_leaves_no_place_and_no_token_behind(
    dsn: str, client: Client, conn: Connection, stage: Stage, config: list[str]
):
    with worker(dsn, *config) as doomed:
        doomed.started()
        ids = [client.insert(gated(stage, "g", concurrency_limit="db", rate_limit="api")) for _ in range(6)]
        stage.wait_for("entered", count=2)
        doomed.kill()
        assert count(conn, "executing") == 2
        stage.open("g")
        with worker(dsn, *config) as heir:
            heir.started()
            assert [client.wait(id, timeout=30).status for id in ids] == ["done"] * 6
    assert len(stage.notes("entered")) == 8, "the two that were cut off ran again"


def test_a_drained_worker_gives_back_the_tokens_of_what_it_had_not_begun(
    dsn: str, client: Client, conn: Connection, stage: Stage, config: list[str]
):
    with worker(dsn, *config, "--queues", "default=1", settings={"prefetch": "4"}) as first:
        first.started()
        client.insert_many([gated(stage, "g", rate_limit=("api", "x")) for _ in range(5)])
        stage.wait_for("entered")
        until(lambda: count(conn, "executing") == 5, "four wait for the thread")
        first.process.terminate()
        first.wait_for("drain_started", released=4)
        stage.open("g")
        assert first.wait() == 0
    assert count(conn, "runnable") == 4
    [(tokens,)] = conn.execute("select tokens from buckets where key = 'api:x'").fetchall()
    assert tokens >= 4
    assert all(
        throttled for (throttled,) in conn.execute("select throttled from gen_durable where status = 'runnable'")
    )


def test_limits_are_published_by_workers_and_by_migrate_and_judged_by_clients(
    own_dsn: str, own_conn: Connection, config: list[str]
):
    with Client(own_dsn) as client:
        client.insert(Noop.new(rate_limit="whatever"))  # nothing to judge by, yet
        command = [sys.executable, "-m", "gendurable", "migrate", "up", "--dsn", own_dsn, *config]
        subprocess.run(command, check=True, capture_output=True)
        with pytest.raises(InvalidInstance, match="the known ones are api, rare"):
            client.insert(Noop.new(rate_limit="apy"))
        with pytest.raises(InvalidInstance, match="ever holds, 5"):
            client.insert(Noop.new(rate_limit="api", weight=6))
        shown = subprocess.run(
            [sys.executable, "-m", "gendurable", "config", "show", "--json", *config], check=True, capture_output=True
        )
    limits = json.loads(shown.stdout)["concurrency_limits"]
    assert limits["value"] == {"db": {"limit": 2}}
    assert own_conn.execute("select count(*) from limiters").fetchone() == (3,)


def test_a_worker_learns_of_limits_that_another_publishes(
    dsn: str, client: Client, conn: Connection, config: list[str]
):
    with worker(dsn) as unaware:
        unaware.started()
        id = client.insert(Noop.new(rate_limit="api"))
        with worker(dsn, "--queues", "elsewhere=1", *config) as other:
            other.started()
            assert client.wait(id, timeout=15).status == "done"
    assert row(conn, id)["throttled"] is False
