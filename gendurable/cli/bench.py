"""`gendurable bench`: how much a server and a worker carry, beside what the bare schema would allow."""

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import click

from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command
from gendurable.cli.output import echo, emit, note, table

if TYPE_CHECKING:
    from gendurable.bench.figures import Figure
    from gendurable.bench.scenarios import Bench
    from gendurable.config import Config

NAMES = (
    "limit", "noops", "chains", "inserts", "fan-out", "signals", "keyed", "latency", "idle", "history", "backlogs",
    "memory",
)  # fmt: skip
QUICK = 0.05
SAFE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "max_wal_size": "4GB"}


@click.command(cls=Command)
@click.argument("scenario", nargs=-1, type=click.Choice(NAMES))
@click.option("--quick", is_flag=True, help="A twentieth of the work: a look, no measurement.")
@click.option("--output", type=click.Path(dir_okay=False, writable=True), help="Write the figures as JSON to a file.")
@pass_invocation
def bench(invocation: Invocation, /, scenario: tuple[str, ...], quick: bool, output: str | None) -> None:
    """Measure this machine and its Postgres.

    All scenarios, or those named. Without a DSN a private Postgres is started on disk, with fsync on. With one,
    everything happens in a throw-away schema of that database. Ratios are to the limit of the same run: a bare loop
    that claims and completes 500 rows at a time on one connection, without an engine.
    """
    from gendurable.bench.figures import HEADINGS, rows

    with _server(invocation) as config, _bench(config, scale=QUICK if quick else 1.0) as run:
        figures = _measure(run, scenario or NAMES)
        machine = _machine(run)
    document = {"machine": machine, "figures": [figure.as_json() for figure in figures]}
    if output is not None:
        Path(output).write_text(json.dumps(document, indent=2) + "\n")
    if invocation.json:
        emit(document)
        return
    echo(", ".join(f"{key} {value}" for key, value in machine.items()))
    echo()
    table(HEADINGS, rows(figures), right=HEADINGS[1:-1])


def _measure(run: "Bench", names: tuple[str, ...]) -> list["Figure"]:
    from gendurable.bench.scenarios import SCENARIOS

    figures: list[Figure] = []
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not on_terminal:
        for name in names:
            note(f"bench: {name}")
            figures += SCENARIOS[name](run)
        return figures
    with click.progressbar(names, file=sys.stderr, item_show_func=lambda name: name or "") as progress:
        for name in progress:
            figures += SCENARIOS[name](run)
    return figures


@contextmanager
def _server(invocation: Invocation) -> Iterator["Config"]:
    from attrs import evolve

    config = invocation.config
    if invocation.loaded.settings["dsn"].source != "default":
        yield config
        return
    from gendurable import embedded

    with embedded.start_temporary(settings=SAFE, in_memory=False) as server:
        yield evolve(config, dsn=server.dsn)


@contextmanager
def _bench(config: "Config", *, scale: float) -> Iterator["Bench"]:
    from gendurable.bench.scenarios import Bench, drop_schema, find_postmaster
    from gendurable.client import Client
    from gendurable.db import migrate
    from gendurable.db.connection import connect

    schema = f"gendurable_bench_{token_hex(4)}"
    migrate.up(config.dsn, schema=schema)
    with (
        connect(config.dsn, schema=schema, application="gendurable bench") as conn,
        Client(config.dsn, schema=schema) as client,
    ):
        conn.execute("set statement_timeout = 0")
        try:
            yield Bench(
                dsn=config.dsn,
                schema=schema,
                conn=conn,
                client=client,
                scale=scale,
                postmaster=find_postmaster(conn),
            )
        finally:
            drop_schema(conn, schema)


def _machine(run: "Bench") -> dict[str, Any]:
    import os

    settings = ("server_version", "fsync", "synchronous_commit", "shared_buffers")
    facts = {name: run.conn.execute(f"show {name}").fetchone()[0] for name in settings}  # type: ignore[index]
    return {"cores": os.cpu_count(), "python": platform.python_version(), **facts}
