"""`gendurable migrate`: bring the schema forward and back, and show DBAs what would run."""

from datetime import timedelta
from typing import TYPE_CHECKING

import click

from gendurable.cli.failures import NO_DATABASE, CommandFailed
from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Group
from gendurable.cli.output import confirm, echo, emit, facts
from gendurable.cli.parameters import Duration, Role

if TYPE_CHECKING:
    from gendurable.config import Config


@click.group(cls=Group)
def migrate() -> None:
    """Create, upgrade, remove or show the schema."""


_to = click.option("--to", type=click.IntRange(min=0), metavar="N", help="The version to stop at.")
_lock_timeout = click.option(
    "--lock-timeout", type=Duration(positive=True), help="Give up when a lock is not free within this time."
)


@migrate.command()
@_to
@_lock_timeout
@click.option("--dry-run", is_flag=True, help="Only name what would run.")
@pass_invocation
def up(invocation: Invocation, /, to: int | None, lock_timeout: timedelta | None, dry_run: bool) -> None:
    """Bring the schema to the newest version."""
    from gendurable.db import migrate as db

    config = invocation.config
    target = _check_version(to)
    if dry_run:
        installed = db.status(config.dsn, schema=config.schema).installed
        names = [step.name for step in db.migrations() if installed < step.version <= target]
    else:
        names = db.up(config.dsn, schema=config.schema, to=to, lock_timeout=lock_timeout)
        if config.limiters and target == len(db.migrations()):
            _publish(config)
    if invocation.json:
        emit({"applied": [] if dry_run else names, "pending": names if dry_run else []})
    elif names:
        for name in names:
            echo(f"{'would apply' if dry_run else 'applied'} {name}")
    else:
        echo("nothing to do: the schema has that version")


@migrate.command()
@_to
@_lock_timeout
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_invocation
def down(invocation: Invocation, /, to: int | None, lock_timeout: timedelta | None, yes: bool) -> None:
    """Take the schema back; without --to, everything is removed."""
    from gendurable.db import migrate as db

    config = invocation.config
    _check_version(to)
    if not yes:
        what = f"back to version {to}" if to else "away with every table and row"
        confirm(f"Take schema {config.schema!r} {what}?")
    names = db.down(config.dsn, schema=config.schema, to=to, lock_timeout=lock_timeout)
    if invocation.json:
        emit({"undone": names})
    else:
        for name in names:
            echo(f"undid {name}")
        if not names:
            echo("nothing to do: the schema has that version")


@migrate.command()
@click.option("--check", is_flag=True, help="Leave with 5 unless the schema has the version this program needs.")
@pass_invocation
def status(invocation: Invocation, /, check: bool) -> None:
    """Show which version is installed, and which is the newest."""
    from gendurable.db import migrate as db

    config = invocation.config
    found = db.status(config.dsn, schema=config.schema)
    shown = {"schema": config.schema, "installed": found.installed, "newest": found.newest, "pending": found.pending}
    if invocation.json:
        emit(shown)
    else:
        facts(shown)
    if check and found.installed != found.newest:
        remedy = "run `gendurable migrate up`" if found.pending else "install a newer gendurable"
        raise CommandFailed(f"schema {config.schema!r} has version {found.installed}: {remedy}", NO_DATABASE)


@migrate.command()
@_to
@click.option("--from", "start", type=click.IntRange(min=0), metavar="N", help="The version to begin at.")
@click.option("--down", "backwards", is_flag=True, help="Print the way back.")
@click.option("--grants", type=Role(), help="Also print what a worker's role must be granted.")
@pass_invocation
def sql(invocation: Invocation, /, to: int | None, start: int | None, backwards: bool, grants: str | None) -> None:
    """Print the SQL that would run, without connecting."""
    from gendurable.db import migrate as db

    newest = len(db.migrations())
    first = _check_version(start, newest if backwards else 0)
    last = _check_version(to, 0 if backwards else newest)
    if (first < last) if backwards else (first > last):
        raise click.UsageError(f"There is no way from version {first} to {last} in that direction")
    echo(db.script(invocation.config.schema, first, last, grants=grants))


def _publish(config: "Config") -> None:
    """Make the limits of the configuration known, so that clients are told of a misspelt one before a worker runs."""
    from gendurable.cli.database import database
    from gendurable.db.limiting import publish

    with database(config).connect("gendurable cli") as conn:
        publish(conn, config.limiters)


def _check_version(given: int | None, default: int | None = None) -> int:
    from gendurable.db.migrate import migrations

    newest = len(migrations())
    if given is not None and given > newest:
        raise click.UsageError(f"There is no schema version {given}: give a number from 0 to {newest}")
    return given if given is not None else newest if default is None else default
