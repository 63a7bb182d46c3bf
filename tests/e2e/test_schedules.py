"""Schedules from the configuration file to the instance, with real workers that are killed on the way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import waiting
from support import until
from workers import WorkerProcess, worker

from gendurable import Client
from gendurable.db.connection import Connection

CONFIG = """
[schedules.minutely]
cron = "* * * * *"
timezone = "Europe/Berlin"
fsm = "noop"
state = {{ by = "schedule" }}
{more}
"""

# The newest tick of the schedule has passed, and nobody has made it.
ONE_DUE = "insert into schedules values ('minutely', date_trunc('minute', now()) - interval '1 minute')"

Start = Callable[..., Any]


@pytest.fixture
def start(dsn: str, tmp_path: Path) -> Start:
    """Start a worker with a schedule that ticks every minute."""

    def start(*flags: str, more: str = "", dsn: str = dsn) -> Any:
        (tmp_path / "schedules.toml").write_text(CONFIG.format(more=more))
        return worker(dsn, "--config", str(tmp_path / "schedules.toml"), *flags)

    return start


@pytest.fixture
def one_due(conn: Connection) -> None:
    conn.execute(ONE_DUE)


def made(conn: Connection) -> list[Any]:
    return [tick for (tick,) in conn.execute("select eligible_at from gen_durable where fsm = 'noop' order by id")]


def is_once_each(conn: Connection) -> bool:
    """Tell whether each tick that has passed since the test began has one instance; a minute may pass meanwhile."""
    ticks = made(conn)
    [(expected,)] = conn.execute("select last_tick from schedules").fetchall()
    assert len(set(ticks)) == len(ticks), "a tick was made twice"
    return bool(ticks) and max(ticks) == expected


@pytest.mark.usefixtures("one_due")
def test_several_workers_make_a_tick_once_and_run_it(start: Start, conn: Connection, client: Client):
    with start("--log-level", "debug") as one, start("--log-level", "debug") as other:
        until(lambda: made(conn), "the tick")
        for each in (one, other):
            each.started().let_poll(6)
        assert is_once_each(conn)
        [id] = conn.execute("select min(id) from gen_durable").fetchone() or (0,)
        assert client.wait(id, timeout=20).state == {"by": "schedule"}
        told = [event for each in (one, other) for event in each.events("schedule_ticked")]
    assert [event["count"] for event in told] == [1] * len(made(conn))
    assert told[0]["schedule"] == "minutely"


# An insert waits for whoever holds the advisory lock 724.
SLOW_INSERT = """
create function wait() returns trigger language plpgsql as $$
begin
  perform pg_advisory_xact_lock_shared(724);
  return new;
end $$;
create trigger wait before insert on gen_durable for each row execute function wait();
"""


def test_a_worker_killed_while_it_makes_a_tick_neither_loses_nor_doubles_it(
    own_dsn: str, own_conn: Connection, start: Start
):
    own_conn.execute(SLOW_INSERT)
    own_conn.execute(ONE_DUE)
    own_conn.execute("select pg_advisory_lock(724)")
    with start(dsn=own_dsn) as dying:
        until(lambda: waiting(own_conn, "gendurable maintenance"), "a worker that has the schedule and waits to insert")
        dying.kill()
    assert made(own_conn) == []
    own_conn.execute("select pg_advisory_unlock(724)")
    with start("--log-level", "debug", dsn=own_dsn) as next_one:
        until(lambda: made(own_conn), "the tick")
        next_one.let_poll(6)
        assert is_once_each(own_conn)


def test_what_was_missed_is_left_to_the_policy(start: Start, conn: Connection):
    conn.execute("insert into schedules (name, last_tick) values ('minutely', now() - interval '10 minutes')")
    with start(more='catch_up = "all"'):
        until(lambda: len(made(conn)) >= 10, "every tick that was missed")
        assert is_once_each(conn)


def test_a_worker_does_not_start_with_a_schedule_that_cannot_be(start: Start):
    for more, complaint in (
        ('catch_up = "never"', "schedules: minutely.catch_up: 'never' is unknown: write skip, latest or all"),
        ("version = 7", "schedules.minutely.fsm: no machine 'noop version 7' is loaded"),
    ):
        with start(more=more) as refused:
            assert isinstance(refused, WorkerProcess)
            assert refused.wait() == 2
            assert complaint in refused.log


def test_the_schedules_of_the_file_are_shown_with_their_ticks(
    dsn: str, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from click.testing import CliRunner

    from gendurable.cli import main

    monkeypatch.chdir(tmp_path)
    run = lambda *words: CliRunner().invoke(main, ["schedules", "--dsn", dsn, *words]).stdout  # noqa: E731
    assert run() == "no schedules: write [schedules.NAME] into the configuration file\n"
    assert json.loads(run("--json")) == []
    (tmp_path / "gendurable.toml").write_text(CONFIG.format(more=""))
    conn.execute("insert into schedules (name, last_tick) values ('gone', '2031-01-01 00:00Z')")
    gone, minutely = json.loads(run("--json"))
    assert (gone["name"], gone["cron"], gone["next_tick"]) == ("gone", None, None)
    assert (minutely["cron"], minutely["timezone"], minutely["fsm"]) == ("* * * * *", "Europe/Berlin", "noop")
    assert minutely["last_tick"] is None
    assert minutely["next_tick"].endswith(":00+00:00")
    text = run()
    assert "NAME" in text.splitlines()[0]
    assert "2031-01-01 00:00:00+00:00" in text
