"""Commands that only read: get, list, status, schedules."""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from gendurable.cli.database import reading
from gendurable.cli.filters import Filters, filter_options
from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command, takes
from gendurable.cli.output import ago, echo, emit, facts, key_text, on_terminal, printable, span, table, to_json
from gendurable.cli.parameters import Duration, InstanceId

if TYPE_CHECKING:
    from gendurable.config import Config
    from gendurable.core.claim import StoredChild, StoredSignal
    from gendurable.core.instance import Instance

STATUSES = ("runnable", "executing", "awaiting_signal", "awaiting_children", "done", "failed", "cancelled")
LISTED, MOST_LISTED = 50, 1_000_000


@click.command(cls=Command)
@click.argument("id", type=InstanceId())
@click.option("--field", metavar="COLUMN", help="Print this column alone.")
@pass_invocation
def get(invocation: Invocation, /, id: int, field: str | None) -> None:  # noqa: A002  the column's name
    """Show one instance with its inbox and children."""
    import attrs

    from gendurable.core.instance import Instance
    from gendurable.db import store
    from gendurable.db.operations import read_instance

    columns = [each.name for each in attrs.fields(Instance)]
    if field is not None and field not in columns:
        raise click.UsageError(f"No column {field!r}; there are: {', '.join(columns)}")
    with reading(invocation.config) as conn:
        instance = read_instance(conn, id)
        signals = store.load_signals(conn, ids=[id]).all()
        children = store.load_children(conn, ids=[id]).all()
    if field is not None:
        value = getattr(instance, field)
        if invocation.json or field in {"state", "result"} or isinstance(value, bool | list | tuple):
            emit(value)
        else:
            echo(printable("" if value is None else key_text(value) if isinstance(value, bytes) else value))
    elif invocation.json:
        emit({**_document(instance), "inbox": list(map(_signal, signals)), "children": list(map(_child, children))})
    else:
        _show_instance(instance, signals, children)


def _show_instance(instance: "Instance", signals: "Sequence[StoredSignal]", children: "Sequence[StoredChild]") -> None:
    now = datetime.now(UTC)
    parent = instance.parent_id and f"{instance.parent_id} (round {instance.child_round}, place {instance.child_index})"
    shown = {
        "id": instance.id,
        "fsm": f"{instance.fsm} version {instance.fsm_version}",
        "status": str(instance.status),
        "step": instance.step,
        "queue": instance.queue,
        "priority": instance.priority,
        "attempt": instance.attempt,
        "crashes": instance.crashes or None,
        "partition_key": instance.partition_key,
        "unique_key": None if instance.unique_key is None else key_text(instance.unique_key),
        "eligible_at": _instant(instance.eligible_at, now) if instance.status == "runnable" else None,
        "locked_by": instance.locked_by,
        "lease_expires_at": _instant(instance.lease_expires_at, now),
        "awaits": ", ".join(instance.awaits or ()),
        "await_deadline": _instant(instance.await_deadline, now),
        "children_pending": instance.children_pending or None,
        "deadline": _instant(instance.deadline, now),
        "cancel_reason": instance.cancel_reason,
        "parent": parent,
        "inserted_at": _instant(instance.inserted_at, now),
        "updated_at": _instant(instance.updated_at, now),
        "state": to_json(instance.state),
        "result": None if instance.result is None else to_json(instance.result),
        "last_error": instance.last_error,
    }
    facts({name: value for name, value in shown.items() if value not in {None, ""}})
    if signals:
        echo()
        inbox = [(each.id, each.name, each.payload, each.dedup_key, each.inserted_at) for each in signals]
        table(["signal", "name", "payload", "dedup_key", "inserted_at"], inbox)
    if children:
        echo()
        family = [
            (each.id, each.fsm, each.status, each.round, each.index, each.last_error or each.result)
            for each in children
        ]
        table(["child", "fsm", "status", "round", "index", "outcome"], family, right=["round", "index"])


def _instant(instant: datetime | None, now: datetime) -> str | None:
    if instant is None:
        return None
    when = ago(instant, now)
    return f"{instant.isoformat(sep=' ', timespec='seconds')} ({when}{'' if when.startswith('in ') else ' ago'})"


def _document(instance: "Instance") -> dict[str, Any]:
    """Return a row as its columns."""
    import attrs

    return attrs.asdict(instance, recurse=False)


def _signal(stored: "StoredSignal") -> dict[str, Any]:
    from gendurable.core.codec import decode_value

    return {
        "id": stored.id,
        "name": stored.name,
        "payload": decode_value(stored.payload, what=f"payload of signal {stored.id}"),
        "dedup_key": stored.dedup_key,
        "inserted_at": stored.inserted_at,
    }


def _child(stored: "StoredChild") -> dict[str, Any]:
    from gendurable.core.codec import decode_value

    return {
        "id": stored.id,
        "fsm": stored.fsm,
        "status": stored.status,
        "state": decode_value(stored.state, what=f"state of child {stored.id}"),
        "result": stored.result and decode_value(stored.result, what=f"result of child {stored.id}"),
        "last_error": stored.last_error,
        "round": stored.round,
        "index": stored.index,
    }


@click.command("list", cls=Command)
@click.option("--status", type=click.Choice(STATUSES), metavar="STATUS", help=f"Only with this: {', '.join(STATUSES)}.")
@takes(filter_options)
@click.option(
    "--limit",
    type=click.IntRange(1, MOST_LISTED),
    default=LISTED,
    show_default=True,
    metavar="N",
    help="At most so many.",
)
@click.option("--jsonl", is_flag=True, help="Print one JSON document a line.")
@pass_invocation
def list_instances(invocation: Invocation, /, status: str | None, limit: int, jsonl: bool, **given: Any) -> None:
    """List instances, newest first."""
    from gendurable.db import store

    filters = Filters(**given)
    with reading(invocation.config) as conn:
        instances = store.list_instances(conn, **filters.parameters, status=status, limit=limit).all()
    if jsonl:
        for each in instances:
            echo(to_json(_document(each.decoded())))
    elif invocation.json:
        emit([_document(each.decoded()) for each in instances])
    else:
        _show_instances(instances)


def _show_instances(instances: "Iterable[Instance]") -> None:
    now = datetime.now(UTC)
    rows = [
        (
            each.id,
            each.fsm if each.fsm_version == 1 else f"{each.fsm}@{each.fsm_version}",
            str(each.status),
            each.step,
            each.queue,
            each.attempt,
            span(max(now - each.updated_at, timedelta(0))),
            each.last_error,
        )
        for each in instances
    ]
    columns = ["id", "fsm", "status", "step", "queue", "attempt", "age", "error"]
    table(columns, rows, right=["id", "attempt", "age"], whole=["status"])


@click.command(cls=Command)
@click.option(
    "--watch",
    type=Duration(positive=True),
    is_flag=False,
    flag_value="2s",
    help="Look again after this time, 2s if none is given.",
)
@pass_invocation
def status(invocation: Invocation, /, watch: timedelta | None) -> None:
    """Show queues, due work and live workers.

    And the due work that no live worker has the code for.
    """
    config = invocation.config

    def show() -> None:
        found = _overview(config)
        if invocation.json:
            echo(to_json(found)) if watch is not None else emit(found)
        else:
            _show_overview(found)

    if watch is None:
        show()
    else:
        _repeat(show, watch)


def _repeat(show: Callable[[], None], every: timedelta) -> None:
    try:
        while True:
            if on_terminal():
                click.clear()
            show()
            time.sleep(every.total_seconds())
    except KeyboardInterrupt:
        return


def _overview(config: "Config") -> dict[str, Any]:
    import attrs

    from gendurable.db import store
    from gendurable.db.migrate import installed_version

    with reading(config) as conn:
        counts = store.count_instances(conn).all()
        due = {each.queue: each for each in store.count_due(conn)}
        workers = [attrs.asdict(each) for each in store.list_workers(conn)]
        unserved = [attrs.asdict(each) for each in store.count_unserved(conn)]
        paused = store.list_paused(conn).all()
        version = installed_version(conn, config.schema)
    names = sorted({*paused, *(each.queue for each in counts)})
    queues: dict[str, dict[str, int]] = {queue: dict.fromkeys(STATUSES, 0) for queue in names}
    for each in counts:
        queues[each.queue][each.status] = each.count
    return {
        "queues": [
            {
                "queue": queue,
                "counts": numbers,
                "due": due[queue].due if queue in due else 0,
                "oldest_due_seconds": due[queue].oldest_due_seconds if queue in due else None,
                "paused": queue in paused,
            }
            for queue, numbers in queues.items()
        ],
        "workers": workers,
        "unserved": unserved,
        "schema_version": version,
    }


def _show_overview(found: dict[str, Any]) -> None:
    if found["queues"]:
        rows = [
            (
                each["queue"],
                *(each["counts"][status] for status in STATUSES),
                each["due"],
                None if each["oldest_due_seconds"] is None else span(timedelta(seconds=each["oldest_due_seconds"])),
            )
            for each in found["queues"]
        ]
        # With queues of twelve letters it fits a terminal of 80.
        headings = ["runnable", "exec", "signal", "child", "done", "failed", "cancel", "due", "oldest"]
        table(["queue", *headings], rows, right=headings)
        if paused := [printable(each["queue"]) for each in found["queues"] if each["paused"]]:
            echo(f"paused: {', '.join(paused)}")
    else:
        echo("no instances yet")
    echo()
    _show_workers(found["workers"])
    if found["unserved"]:
        echo()
        rows = [(each["fsm"], each["fsm_version"], each["count"]) for each in found["unserved"]]
        table(["no worker for", "version", "due"], rows, right=["version", "due"])
    echo()
    echo(f"schema version {found['schema_version']}")


def _show_workers(workers: Sequence[dict[str, Any]]) -> None:
    if not workers:
        echo("no live worker")
        return
    now = datetime.now(UTC)
    rows = [
        (
            each["name"],
            each["host"],
            each["pid"],
            ", ".join(f"{queue}={size}" for queue, size in each["queues"].items()),
            ", ".join(each["machines"]),
            span(max(now - each["started_at"], timedelta(0))),
        )
        for each in workers
    ]
    table(["worker", "host", "pid", "queues", "machines", "up"], rows, right=["pid", "up"])


@click.command(cls=Command)
@pass_invocation
def schedules(invocation: Invocation, /) -> None:
    """Show schedules, their last and their next tick.

    Those of the configuration, and those that only the database remembers.
    """
    from gendurable.db import store

    configured = invocation.config.schedules
    with reading(invocation.config) as conn:
        stored = {row.name: row for row in store.list_schedules(conn)}
    found = []
    for name in sorted({*configured, *stored}):
        schedule, row = configured.get(name), stored.get(name)
        now = datetime.now(UTC) if row is None else row.now
        found.append(
            {
                "name": name,
                "cron": schedule and schedule.cron,
                "timezone": schedule and schedule.timezone,
                "fsm": schedule and schedule.fsm,
                "last_tick": row and row.last_tick,
                "next_tick": schedule and next(schedule.ticks(now), None),
            }
        )
    if invocation.json:
        emit(found)
    elif found:
        table(list(found[0]), [[_in_seconds(value) for value in each.values()] for each in found], whole=["cron"])
    else:
        echo("no schedules: write [schedules.NAME] into the configuration file")


def _in_seconds(value: Any) -> Any:
    return value.isoformat(sep=" ", timespec="seconds") if isinstance(value, datetime) else value
