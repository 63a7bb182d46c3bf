"""Commands that create instances and talk to them: insert, signal, wait."""

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from gendurable.cli.database import reading, writing
from gendurable.cli.failures import CommandFailed
from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command, machine_options, takes
from gendurable.cli.output import echo, emit, to_json
from gendurable.cli.parameters import Duration, InstanceId, Instant, Json, Key, Name

if TYPE_CHECKING:
    from gendurable.config import Config
    from gendurable.core.fsm import FSM
    from gendurable.core.instance import Instance, NewInstance
    from gendurable.db.connection import Connection

# A row that is written by name starts here, as most machines do, with the crash budget that most have.
FIRST_STEP, QUEUE, MAX_CRASHES = "start", "default", 20


@click.command(cls=Command)
@click.argument("fsm", type=Name())
@click.argument("state", type=Json(), required=False, metavar="[STATE_JSON]")
@click.option("--step", type=Name(), help="The step to begin at; else the machine's first.")
@click.option("--queue", type=Name(), help="The queue it runs in; else the machine's.")
@click.option(
    "--priority", type=click.IntRange(-(2**15), 2**15 - 1), default=0, metavar="N", help="Less is more urgent."
)
@click.option("--partition-key", type=Key(), help="Only one instance of a key runs at a time.")
@click.option("--unique-key", type=Key(), help="Refused while another live instance has it.")
@click.option("--in", "delay", type=Duration(), help="Begin after this time.")
@click.option("--at", type=Instant(), help="Begin at this time.")
@click.option("--deadline", type=Duration(), help="End it as failed if it still lives after this time.")
@click.option(
    "--version", type=click.IntRange(1, 2**31 - 1), metavar="N", help="The machine's version; else the newest."
)
@click.option("--wait", is_flag=True, help="Wait until it has ended, and print its result.")
@click.option("--timeout", type=Duration(), help="Do not wait longer than this.")
@takes(machine_options)
@pass_invocation
def insert(
    invocation: Invocation,
    /,
    *,
    fsm: str,
    state: Any,
    delay: timedelta | None,
    at: datetime | None,
    version: int | None,
    wait: bool,
    timeout: timedelta | None,
    **options: Any,
) -> None:
    """Insert an instance of FSM and print its id.

    STATE_JSON is a JSON object, - for stdin, or @FILE. With machines configured (--fsms) their classes check it.
    Without, the row is written by name: version 1 at step start in queue default, unless told otherwise.
    """
    if at is not None and delay is not None:
        raise click.UsageError("--at and --in exclude each other: give one of them")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout needs --wait")
    if _is_given("state") and not isinstance(state, dict):
        raise click.UsageError("STATE_JSON is no JSON object: give one such as '{\"number\": 42}'")
    config = invocation.config
    new = _new_instance(config, fsm, version, state, schedule_at=at, schedule_in=delay, **options)
    from gendurable.db.operations import insert_instance
    from gendurable.errors import WaitTimeout

    with writing(config) as conn:
        id_ = insert_instance(conn, new)
        if not wait:
            emit({"id": id_}) if invocation.json else echo(str(id_))
            return
        if not invocation.json:
            echo(str(id_))
    with reading(config) as conn:
        late = None
        try:
            [found] = _wait_for(conn, [id_], timeout)
        except WaitTimeout as error:
            late, found = error, error.instance
    if invocation.json:
        emit({"id": id_, "status": found.status, "result": found.result, "last_error": found.last_error})
    if late is not None:
        raise late
    _complain_unless_done([found])
    if not invocation.json:
        echo(to_json(found.result))


def _is_given(argument: str) -> bool:
    """Tell an argument that says null from one that is not there."""
    return click.get_current_context().get_parameter_source(argument) is click.core.ParameterSource.COMMANDLINE


def _new_instance(config: "Config", name: str, version: int | None, state: Any, **options: Any) -> "NewInstance":
    """Check a new instance by its class where machines are configured, else take it by name."""
    if config.fsms:
        return _machine(config, name, version).new(state, **options)
    from gendurable.core.codec import encode_value
    from gendurable.core.instance import new_instance

    options["step"] = options["step"] or FIRST_STEP
    options["queue"] = options["queue"] or QUEUE
    text = encode_value(state or {}, what="state")
    return new_instance(fsm=name, fsm_version=version or 1, state=text, max_crashes=MAX_CRASHES, **options)


def _machine(config: "Config", name: str, version: int | None) -> "type[FSM[Any]]":
    from gendurable.core.registry import load

    registry = load(config.fsms)
    machine = registry.find(name, version)
    if machine is None:
        names = ", ".join(f"{each} version {number}" for each, number in sorted(registry.machines))
        raise click.UsageError(f"No FSM {name!r} version {version or 1} is loaded; there are: {names}")
    return type(machine)


@click.command(cls=Command)
@click.argument("id", type=InstanceId())
@click.argument("name", type=Name())
@click.argument("payload", type=Json(), required=False, metavar="[PAYLOAD_JSON]")
@click.option("--dedup-key", type=Key(), help="A second signal with this key, while the first is unread, is dropped.")
@pass_invocation
def signal(invocation: Invocation, /, id: int, name: str, payload: Any, dedup_key: str | None) -> None:  # noqa: A002
    """Send the signal NAME to an instance.

    PAYLOAD_JSON is any JSON value, - for stdin, or @FILE; without it {}.
    """
    from gendurable.core.codec import encode_value
    from gendurable.db.connection import one_commit
    from gendurable.db.operations import delivered, send_signal

    content = payload if _is_given("payload") else {}
    config = invocation.config
    encode_value(content, what="payload")  # refused before a connection is opened
    with writing(config) as conn:
        with one_commit(conn):
            answer = send_signal(conn, id, name, content, dedup_key)
        delivery = delivered(id, answer)
    if invocation.json:
        emit({"id": delivery.id, "woke": delivery.woke, "duplicate": delivery.duplicate})


@click.command(cls=Command)
@click.argument("ids", type=InstanceId(), nargs=-1, required=True, metavar="ID…")
@click.option("--timeout", type=Duration(), help="Do not wait longer than this.")
@pass_invocation
def wait(invocation: Invocation, /, ids: Sequence[int], timeout: timedelta | None) -> None:
    """Wait until instances have ended and print their results."""
    with reading(invocation.config) as conn:
        ended = _wait_for(conn, ids, timeout)
    if invocation.json:
        results = [instance.result for instance in ended]
        emit(results[0] if len(results) == 1 else results)
    else:
        for instance in ended:
            if instance.status == "done":
                echo(to_json(instance.result))
    _complain_unless_done(ended)


def _wait_for(conn: "Connection", ids: Sequence[int], timeout: timedelta | None) -> "list[Instance]":
    from gendurable.core.status import TERMINAL
    from gendurable.db import store
    from gendurable.db.operations import read_instance
    from gendurable.errors import WaitTimeout
    from gendurable.waiting import Hub

    hub = Hub(lambda asked: {row.id: row.status for row in store.get_statuses(conn, ids=asked)})
    deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
    ended = []
    for id_ in ids:
        in_time = hub.wait(id_, TERMINAL, None if deadline is None else deadline - time.monotonic())
        ended.append(read_instance(conn, id_))
        if not in_time and ended[-1].status not in TERMINAL:
            raise WaitTimeout(ended[-1], timeout.total_seconds() if timeout else 0.0)
    return ended


def _complain_unless_done(ended: Sequence["Instance"]) -> None:
    unhappy = [instance for instance in ended if instance.status != "done"]
    if unhappy:
        first, others = unhappy[0], len(unhappy) - 1
        more = f" (and {others} more did not end well)" if others else ""
        raise CommandFailed(f"instance {first.id} ended {first.status}: {first.last_error}{more}")
