"""`gendurable doctor`: whether the server, the role and the sizes will do."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import click

from gendurable.cli.database import database, reading
from gendurable.cli.failures import CommandFailed
from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command, takes, worker_options
from gendurable.cli.output import emit, table

if TYPE_CHECKING:
    from gendurable.config import Config
    from gendurable.db.connection import Connection
    from gendurable.db.rows import Examination

OLDEST_MAJOR = 14
# Beyond this the ages that commands show are wrong; the engine itself goes by the server's clock alone.
CLOCK_SKEW = timedelta(seconds=5)
# Beside its pollers a worker process keeps: committer, heartbeat, maintenance, spare.
OTHER_CONNECTIONS = 4


class Check(NamedTuple):
    """One thing that was looked at. `ok` is False for a finding."""

    check: str
    ok: bool
    message: str


@click.command(cls=Command)
@takes(worker_options)
@pass_invocation
def doctor(invocation: Invocation, /) -> None:
    """Check server, role, pooler and sizes.

    Leaves with 1 if there is a finding.
    """
    from gendurable.db import store
    from gendurable.db.migrate import installed_version

    config = invocation.config
    with reading(config) as conn:
        found = store.examine(conn).one()
        version = installed_version(conn, config.schema)
    if found is None:
        raise CommandFailed("the server answered nothing; ask again")
    checks = [Check("schema", True, f"{config.schema} has version {version}"), *_judge(config, found)]
    checks += _judge_sessions(config)
    if invocation.json:
        emit({"checks": [each._asdict() for each in checks]})
    else:
        rows = [(each.check, "ok" if each.ok else "finding", each.message) for each in checks]
        table(["check", "verdict", "what"], rows, whole=["check", "verdict"], wrapped=True)
    findings = [each for each in checks if not each.ok]
    if findings:
        raise CommandFailed(f"{len(findings)} to mend: {', '.join(each.check for each in findings)}")


def _judge(config: "Config", found: "Examination") -> Iterator[Check]:
    fits = found.major >= OLDEST_MAJOR
    yield Check("server", fits, f"PostgreSQL {found.version}" + ("" if fits else f"; use {OLDEST_MAJOR} or newer"))
    yield Check("primary", not found.standby, "a standby; connect to the primary" if found.standby else "takes writes")
    off = [name for name in ("fsync", "synchronous_commit") if not getattr(found, name)]
    yield Check(
        "durability", not off, f"{', '.join(off)} off: a commit may be forgotten" if off else "commits are kept"
    )
    rights = "; ".join(found.missing_rights)
    remedy = f"role {found.role} lacks {rights}; see `gendurable migrate sql --grants {found.role}`"
    yield Check("rights", not rights, remedy if rights else f"role {found.role} may do what a worker does")
    skew = abs(found.clock - datetime.now(UTC))
    yield Check("clock", skew <= CLOCK_SKEW, f"{skew.total_seconds():.1f} s away from the server's")
    lazy = ", ".join(found.never_vacuumed)
    yield Check(
        "autovacuum", not lazy, f"off for {lazy}: switch it on" if lazy else "on for the tables that change most"
    )
    yield _judge_connections(config, found)


def _judge_connections(config: "Config", found: "Examination") -> Check:
    each = len(config.queues) + OTHER_CONNECTIONS
    needed = config.processes * (each + config.lock_connection_limit)
    formula = (
        f"a worker needs up to {needed} = {config.processes} x ({len(config.queues)} for queues + {OTHER_CONNECTIONS} "
        f"+ {config.lock_connection_limit} for partition keys and transactions), the server has {found.connections}"
    )
    fits = needed <= found.connections
    return Check(
        "connections", fits, formula if fits else f"{formula}: raise max_connections or lower lock_connections"
    )


def _judge_sessions(config: "Config") -> Iterator[Check]:
    from attrs import evolve

    from gendurable.runtime.partitions import check_session_locks

    where = database(config)
    direct = evolve(where, dsn=config.lock_dsn or where.dsn)
    trouble = check_session_locks(lambda: direct.connect("gendurable doctor"))
    yield Check(
        "partition locks",
        trouble is None,
        f"{trouble}: name a direct connection as lock_dsn" if trouble else "session locks hold",
    )
    if config.prepare:
        pooled = _changes_sessions(lambda: where.connect("gendurable doctor"))
        yield Check(
            "prepared statements",
            not pooled,
            "a pooler stands between: set prepare = false" if pooled else "the server keeps one session a connection",
        )


def _changes_sessions(connect: "Callable[[], Connection]") -> bool:
    """Tell whether each transaction may meet another session, as behind a transaction pooler."""
    with closing(connect()) as first, closing(connect()) as second:
        pids = {conn.execute("select pg_backend_pid()").fetchone() for conn in (first, second) for _ in range(3)}
        return len(pids) != 2  # noqa: PLR2004  two connections
