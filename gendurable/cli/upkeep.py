"""Commands that keep a deployment in order: pause, resume, gc and health."""

import sys
from contextlib import nullcontext
from datetime import timedelta

import click

from gendurable.cli.database import reading, writing
from gendurable.cli.failures import CommandFailed
from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command, setting, takes
from gendurable.cli.output import echo, emit, note
from gendurable.cli.parameters import Duration, Name

DEFAULT_PROBE = "127.0.0.1:9464"
# A busy worker takes its time over an answer.
PROBE_SECONDS = 5


@click.command(cls=Command)
@click.argument("queue", type=Name())
@pass_invocation
def pause(invocation: Invocation, /, queue: str) -> None:
    """Let workers claim nothing more from QUEUE.

    What they have begun goes on. Stored in the database: it holds for every worker, also after a restart.
    """
    from gendurable.db import store
    from gendurable.db.operations import pause as pause_queue

    with writing(invocation.config) as conn:
        pause_queue(conn, queue)
        workers = store.list_workers(conn).all()
    if workers and not any(queue in worker.queues for worker in workers):
        note("no live worker serves this queue: is its name right?")
    if invocation.json:
        emit({"queue": queue, "paused": True})


@click.command(cls=Command)
@click.argument("queue", type=Name())
@pass_invocation
def resume(invocation: Invocation, /, queue: str) -> None:
    """Let workers claim from a paused QUEUE again."""
    from gendurable.db.operations import resume as resume_queue

    with writing(invocation.config) as conn:
        resume_queue(conn, queue)
    if invocation.json:
        emit({"queue": queue, "paused": False})


def _batch() -> list[click.Option]:
    return [setting("--batch", "How many rows one transaction deletes.", name="gc_batch", metavar="N")]


@click.command(cls=Command)
@click.option("--older-than", type=Duration(), required=True, help="Only what ended longer ago than this.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@takes(_batch)
@pass_invocation
def gc(invocation: Invocation, /, older_than: timedelta, dry_run: bool) -> None:
    """Delete instances that ended long ago.

    A child stays while its parent lives, and a parent while it has children.
    """
    from gendurable.db import store
    from gendurable.runtime.sweeping import collect_garbage

    config = invocation.config
    if dry_run:
        with reading(config) as conn:
            count = store.count_old(conn, older_than=older_than).one() or 0
        emit({"would_delete": count}) if invocation.json else echo(f"would delete {count}")
        return
    deleted = 0
    with writing(config) as conn:
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        expected = (store.count_old(conn, older_than=older_than).one() or 0) if on_terminal else 0
        with (
            click.progressbar(length=expected, label="deleting", file=sys.stderr) if expected else nullcontext() as bar
        ):
            for count in collect_garbage(conn, older_than=older_than, batch=config.gc_batch):
                deleted += count
                if bar is not None:
                    bar.update(count)
    emit({"deleted": deleted}) if invocation.json else echo(f"deleted {deleted}")


@click.command(cls=Command)
@click.option("--url", help="What to ask; else /readyz where --http or the configuration says, or on 127.0.0.1:9464.")
@takes(lambda: [setting("--http", "The worker's address.", metavar="HOST:PORT")])
@pass_invocation
def health(invocation: Invocation, /, url: str | None) -> None:
    """Ask a worker whether it is well.

    Prints ok, or leaves with 1: for containers and exec probes.
    """
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, build_opener

    asked = url or f"http://{invocation.config.http or DEFAULT_PROBE}/readyz"
    if not asked.startswith(("http://", "https://")):
        raise click.UsageError(f"{asked!r} is no URL: write http://127.0.0.1:9464/readyz")
    try:
        # A probe asks its own machine: whatever proxy the environment names is not meant for it.
        with build_opener(ProxyHandler({})).open(asked, timeout=PROBE_SECONDS):
            pass
    except HTTPError as error:
        with error:
            said = error.read(1000).decode(errors="replace").strip()
        raise CommandFailed(f"not healthy: {asked} answers {error.code}: {said}") from error
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise CommandFailed(
            f"not healthy: {asked} does not answer: {reason}; is the worker run with --http?"
        ) from error
    emit({"healthy": True}) if invocation.json else echo("ok")
