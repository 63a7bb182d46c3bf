"""`gendurable dev`: a private Postgres, migrated, and a worker on it; nothing to install or configure."""

import os
import shlex
from typing import TYPE_CHECKING

import click

from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command, setting, takes, worker_options
from gendurable.cli.output import note
from gendurable.service.shutdown import Shutdown

if TYPE_CHECKING:
    from gendurable.config import Config
    from gendurable.core.registry import Registry

DEMO = "gendurable.demo.machines"
TRY = """demo.book '{"account": "anna", "number": 1}'"""
QUEUE_SIZE = 10


def _dev_options() -> list[click.Option]:
    home = setting("--home", "The folder that keeps the server's data.", name="embedded_home", metavar="DIR")
    return [*worker_options(), home]


@click.command(cls=Command)
@takes(_dev_options)
@click.option(
    "--port", type=click.IntRange(1, 65_535), metavar="N", help="Also serve this port of 127.0.0.1, to any local user."
)
@click.option("--reset", is_flag=True, help="Begin with empty tables.")
@click.option("--until-idle", is_flag=True, help="End when nothing that could run is due or running.")
@pass_invocation
def dev(invocation: Invocation, /, port: int | None, reset: bool, until_idle: bool) -> int:
    """Run a worker on a private Postgres.

    Starts the server, migrates it, and works: for development, not for production. Without --fsms it runs the demo
    machines; without --queues it serves every queue that the machines name.
    """
    shutdown = Shutdown()
    if "dsn" in invocation.settings:
        raise click.UsageError("dev brings its own server: use `gendurable worker` with --dsn")
    from gendurable import embedded
    from gendurable.db import migrate
    from gendurable.db.connection import connect
    from gendurable.db.limiting import publish

    config = invocation.config
    environ = dict(os.environ)
    if config.embedded_bin is not None:
        environ["GENDURABLE_PG_BIN"] = str(config.embedded_bin)
    plan = _plan(invocation)
    with embedded.start(config.embedded_home, tcp_port=port, environ=environ) as server:
        if reset:
            migrate.down(server.dsn, schema=config.schema)
        migrate.up(server.dsn, schema=config.schema)
        with connect(server.dsn, schema=config.schema) as conn:
            publish(conn, config.limiters)  # here, since processes that begin anew are told by flags alone
        machines = shlex.quote(",".join(plan.fsms))
        note(f"gendurable: in another terminal: export GENDURABLE_DSN='{server.dsn}' GENDURABLE_FSMS={machines}")
        if plan.fsms == (DEMO,):
            note(f"gendurable: and there: gendurable insert {TRY} --wait")
        if port is not None:
            note(f"gendurable: also at {server.tcp_dsn}")
        return _run(plan, server.dsn, shutdown, until_idle=until_idle)


def _plan(invocation: Invocation) -> "Config":
    """Fill in what was not said: the machines, and their queues."""
    from attrs import evolve

    from gendurable.core.registry import load

    config = invocation.config
    config = evolve(config, fsms=config.fsms or (DEMO,))
    machines = load(config.fsms)  # before a server is started for nothing
    if invocation.loaded.settings["queues"].source == "default":
        config = evolve(config, queues=_queues_of(machines))
    return config


def _queues_of(machines: "Registry") -> dict[str, int]:
    from gendurable.core.fsm import definition

    names = {"default", *(definition(type(machine)).queue for machine in machines)}
    return dict.fromkeys(sorted(names), QUEUE_SIZE)


def _run(config: "Config", dsn: str, shutdown: Shutdown, *, until_idle: bool) -> int:
    from attrs import evolve

    from gendurable.service.processes import supervise
    from gendurable.service.run import run_worker

    config = evolve(config, dsn=dsn, lock_dsn=None)
    if config.processes == 1:
        return run_worker(config, shutdown, until_idle=until_idle)
    arguments = _worker_arguments(config) + (["--until-idle"] if until_idle else [])
    return supervise(config, arguments, shutdown, until_idle=until_idle)


def _worker_arguments(config: "Config") -> list[str]:
    """Return the command line of a worker with this configuration, for processes that begin anew."""
    from gendurable.core.duration import format_duration

    times = ("lease", "heartbeat", "poll", "max_poll", "reap", "drain_timeout")
    words = ("dsn", "schema", "prefetch", "min_demand", "processes", "http", "name", "log_level", "log_format")
    given = {name: format_duration(getattr(config, name)) for name in times}
    given |= {name: str(value) for name in words if (value := getattr(config, name)) is not None}
    given["queues"] = ",".join(f"{queue}={size}" for queue, size in config.queues.items())
    given["fsms"] = ",".join(config.fsms)
    return ["worker", *(part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value))]
