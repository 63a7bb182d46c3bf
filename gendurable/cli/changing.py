"""Commands that change instances, those named or all that match: retry, cancel."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gendurable.cli.database import writing
from gendurable.cli.failures import CommandFailed, judge
from gendurable.cli.filters import Filters, filter_options
from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command, takes
from gendurable.cli.output import confirm, echo, emit
from gendurable.cli.parameters import InstanceId

if TYPE_CHECKING:
    from gendurable.db.connection import Connection

LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")
PAGE = 1000


class Change(NamedTuple):
    """What is done to each instance.

    `apply` says whether it changed anything. `check` tells beforehand whether it would, by the status; both raise
    for an instance that cannot be changed so.
    """

    verb: str
    participle: str
    question: str
    nothing: str
    apply: Callable[["Connection", int], bool]
    check: Callable[[int, str | None], bool]


@click.command(cls=Command)
@click.argument("ids", type=InstanceId(), nargs=-1, metavar="[ID…]")
@takes(filter_options)
@click.option("--dry-run", is_flag=True, help="Only print which ones would run again.")
@click.option("--yes", is_flag=True, help="Do not ask when filters choose.")
@pass_invocation
def retry(invocation: Invocation, /, ids: Sequence[int], dry_run: bool, yes: bool, **given: Any) -> None:
    """Let failed instances run again.

    They begin at the step that failed: all failed ones that match the filters, or those named by id, which may also be
    cancelled ones.
    """
    change = Change(
        verb="retry",
        participle="retried",
        question="Run {} failed instances again?",
        nothing="no failed instance matches; see `gendurable list --status failed`",
        apply=_retry,
        check=_would_retry,
    )
    _change(invocation, change, ids, Filters(**given), ["failed"], dry_run=dry_run, yes=yes)


@click.command(cls=Command)
@click.argument("ids", type=InstanceId(), nargs=-1, metavar="[ID…]")
@click.option("--status", type=click.Choice(LIVE), help="Only with this status.")
@takes(filter_options)
@click.option("--reason", help="Why; it becomes the instance's last_error.")
@click.option("--cascade", is_flag=True, help="Their children too, and so on downwards.")
@click.option("--dry-run", is_flag=True, help="Only print which ones would be cancelled.")
@click.option("--yes", is_flag=True, help="Do not ask when filters choose.")
@pass_invocation
def cancel(
    invocation: Invocation,
    /,
    ids: Sequence[int],
    *,
    reason: str | None,
    cascade: bool,
    dry_run: bool,
    yes: bool,
    **given: Any,
) -> None:
    """End instances as cancelled, wherever they stand.

    Those named by id, or all live ones that match the filters. One that was cancelled before is left as it is.
    """
    from gendurable.db.endings import check_reason

    change = Change(
        verb="cancel",
        participle="cancelled",
        question="Cancel {} instances?",
        nothing="no live instance matches; see `gendurable list`",
        apply=partial(_cancel, check_reason(reason), cascade),
        check=_would_cancel,
    )
    _change(invocation, change, ids, Filters(**given), LIVE, dry_run=dry_run, yes=yes)


def _change(
    invocation: Invocation,
    change: Change,
    ids: Sequence[int],
    filters: Filters,
    statuses: Sequence[str],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    if bool(ids) == bool(filters):
        raise click.UsageError("Name the instances by id, or choose them by filters: one of the two")
    with writing(invocation.config) as conn:
        chosen = list(dict.fromkeys(ids)) or list(_chosen(conn, filters, statuses))
        if not chosen:
            raise CommandFailed(change.nothing, 3)
        if not ids and not yes and not dry_run:
            confirm(change.question.format(len(chosen)))
        done, refused = _each(conn, change, chosen, dry_run=dry_run)
    if invocation.json:
        emit({f"would_{change.verb}" if dry_run else change.participle: done})
    else:
        for id_ in done:
            echo(str(id_))
    if refused:
        first, others = refused[0], len(refused) - 1
        failure = judge(first)
        more = f" (and {others} more were left as they are)" if others else ""
        raise CommandFailed(f"{failure.message}{more}", failure.code)


def _chosen(conn: "Connection", filters: Filters, statuses: Sequence[str]) -> Iterator[int]:
    from gendurable.db import store

    after = 0
    which = {**filters.parameters, "statuses": [filters.status] if filters.status else statuses}
    while page := store.list_ids(conn, **which, after=after, limit=PAGE).all():
        yield from page
        after = page[-1]


def _each(
    conn: "Connection", change: Change, ids: Sequence[int], *, dry_run: bool
) -> tuple[list[int], list[Exception]]:
    """Change one by one: an instance that cannot be changed must not keep the others from it."""
    from gendurable.db import store
    from gendurable.errors import DuplicateInstance, InstanceNotFound, NoTarget, NotRetryable

    done: list[int] = []
    refused: list[Exception] = []
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    with click.progressbar(ids, label=change.verb, file=sys.stderr) if on_terminal else nullcontext(ids) as each:
        for id_ in each:
            try:
                if change.check(id_, store.get_status(conn, id=id_).one()) if dry_run else change.apply(conn, id_):
                    done.append(id_)
            except (DuplicateInstance, InstanceNotFound, NoTarget, NotRetryable) as error:
                refused.append(error)
    return done, refused


def _retry(conn: "Connection", id_: int) -> bool:
    from gendurable.db.operations import retry_instance

    retry_instance(conn, id_)
    return True


def _would_retry(id_: int, status: str | None) -> bool:
    from gendurable.errors import InstanceNotFound, NotRetryable

    if status is None:
        raise InstanceNotFound(id_)
    if status not in {"failed", "cancelled"}:
        raise NotRetryable(id_, status)
    return True


def _cancel(reason: str, cascade: bool, conn: "Connection", id_: int) -> bool:
    from gendurable.db.endings import cancel_now

    return cancel_now(conn, id_, reason, cascade=cascade)


def _would_cancel(id_: int, status: str | None) -> bool:
    from gendurable.errors import NoTarget

    if status not in {*LIVE, "cancelled"}:
        raise NoTarget(id_)
    return status != "cancelled"
