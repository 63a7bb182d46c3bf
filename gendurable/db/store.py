"""One typed function per statement of `sql/statements`, of the same name. Takes a connection, never commits.

Each returns `Rows`, read when asked: inside a pipeline nothing waits for an answer until the pipeline ends.
`ahead` is how far the caller's clock runs ahead of the database's: zero, except where tests advance it.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime, timedelta
from typing import Any, Generic, TypeAlias, TypeVar

import psycopg
from psycopg.rows import args_row, scalar_row

from gendurable.core.claim import Claim, Fenced, StoredChild, StoredSignal
from gendurable.core.duration import ZERO
from gendurable.core.instance import Instance, NewInstance
from gendurable.core.limiters import Limiters
from gendurable.core.transition import Advance, CarryOn, Finish, Park, Repeat, SpawnChildren
from gendurable.db.arrays import binaries, integers, intervals, sparse, texts
from gendurable.db.connection import Connection, needs_transaction, one_commit
from gendurable.db.rows import (
    Count,
    DeadlinesPassed,
    Delivery,
    Due,
    Ended,
    Examination,
    FoundLimited,
    Held,
    LimiterRow,
    Lost,
    Overdue,
    Reaped,
    ScheduleRow,
    ServerFacts,
    Standing,
    Tokens,
    Unserved,
    Woken,
    WorkerRow,
)
from gendurable.db.statements import statement

T = TypeVar("T")

# A limit's kind, "rate" or "concurrency", and the key that rows carry.
Bucket: TypeAlias = tuple[str, str]

# Our own part of the space of advisory locks, which a whole database shares ("gendurab" in ASCII).
LOCK_CLASS = 0x67656E6475726162


class Rows(Generic[T]):
    """The answer to one statement."""

    def __init__(self, cursor: psycopg.Cursor[T]) -> None:
        """Keep the cursor; nothing is read yet."""
        self._cursor = cursor

    def all(self) -> list[T]:
        """Read every row."""
        return self._cursor.fetchall()

    def one(self) -> T | None:
        """Read the first row, if there is one."""
        return self._cursor.fetchone()

    def __iter__(self) -> Iterator[T]:
        return iter(self._cursor)


# Claiming.


def claim(
    conn: Connection,
    *,
    queue: str,
    machines: Sequence[str],
    worker: str,
    limit: int,
    lease: timedelta,
    avoid: Sequence[str] = (),
    beyond: str = "",
    ahead: timedelta = ZERO,
) -> Rows[Claim]:
    """Lease up to `limit` due instances of `queue` that `machines` can run; none whose key is in `avoid`.

    Where it has to go from key to key, it starts `beyond` this one.
    """
    return _rows(
        conn,
        Claim,
        "claim",
        queue=queue,
        machines=list(machines),
        worker=worker,
        limit=limit,
        lease=lease,
        avoid=list(avoid),
        beyond=beyond,
        ahead=ahead,
    )


def claim_plain(
    conn: Connection,
    *,
    queue: str,
    machines: Sequence[str],
    worker: str,
    limit: int,
    lease: timedelta,
    ahead: timedelta = ZERO,
) -> Rows[Claim]:
    """Claim, but only instances without a partition key."""
    return _rows(
        conn,
        Claim,
        "claim_plain",
        queue=queue,
        machines=list(machines),
        worker=worker,
        limit=limit,
        lease=lease,
        ahead=ahead,
    )


def find_limited(
    conn: Connection,
    *,
    queue: str,
    machines: Sequence[str],
    limit: int,
    window: int,
    keyed: bool = True,
    avoid: Sequence[str] = (),
    ahead: timedelta = ZERO,
) -> Rows[FoundLimited]:
    """Look for due instances with limits, `window` of them at most; `limit` is how many there is room for."""
    return _rows(
        conn,
        FoundLimited,
        "find_limited",
        queue=queue,
        machines=list(machines),
        limit=limit,
        window=window,
        keyed=keyed,
        avoid=list(avoid),
        ahead=ahead,
    )


def open_buckets(conn: Connection, buckets: Sequence[Bucket]) -> Rows[str]:
    """Make buckets that are missing."""
    return _scalars(conn, "open_buckets", **_buckets(buckets))


def hold_buckets(conn: Connection, buckets: Sequence[Bucket], *, ahead: timedelta = ZERO) -> Rows[str]:
    """Hold buckets until the transaction ends, as far as nobody else does."""
    return _scalars(conn, "hold_buckets", **_buckets(buckets), ahead=ahead)


def claim_limited(
    conn: Connection,
    ids: Sequence[int],
    buckets: Sequence[Bucket],
    *,
    worker: str,
    limit: int,
    lease: timedelta,
    ahead: timedelta = ZERO,
) -> Rows[Claim]:
    """Lease up to `limit` of these instances, as far as their buckets allow; `hold_buckets` must come before."""
    return _rows(
        conn,
        Claim,
        "claim_limited",
        ids=integers(ids),
        **_buckets(buckets),
        worker=worker,
        limit=limit,
        lease=lease,
        ahead=ahead,
    )


def count_tokens(conn: Connection, ids: Sequence[int]) -> Rows[Tokens]:
    """Say what `claim_limited` did in this transaction, by rate limit."""
    return _rows(conn, Tokens, "count_tokens", ids=integers(ids))


def load_signals(conn: Connection, *, ids: Sequence[int]) -> Rows[StoredSignal]:
    """Read the inboxes of some instances."""
    return _rows(conn, StoredSignal, "load_signals", ids=integers(ids))


def load_children(conn: Connection, *, ids: Sequence[int]) -> Rows[StoredChild]:
    """Read the children of some instances."""
    return _rows(conn, StoredChild, "load_children", ids=integers(ids))


def is_paused(conn: Connection, *, queue: str) -> Rows[bool]:
    """Tell whether a queue is paused: nothing comes back if it is not."""
    return _scalars(conn, "is_paused", queue=queue)


def extend_leases(
    conn: Connection, claims: Sequence[Fenced], *, lease: timedelta, ahead: timedelta = ZERO
) -> Rows[int]:
    """Prolong claims; the ids of those that still hold come back, except rows that somebody has locked."""
    return _scalars(conn, "extend_leases", **_fences(claims), lease=lease, ahead=ahead)


def find_lost(conn: Connection, claims: Sequence[Fenced]) -> Rows[Lost]:
    """Name those of some claims that hold no longer."""
    return _rows(conn, Lost, "find_lost", **_fences(claims))


def release(conn: Connection, claims: Sequence[Fenced], *, started: bool = False) -> Rows[int]:
    """Hand back claims as they were; tokens taken for them too, unless their steps have `started`."""
    return _scalars(conn, "release", **_fences(claims), started=started)


# Outcomes. All of a batch in one transaction that opens with lock_claims.


def lock_claims(conn: Connection, changes: Sequence[Fenced]) -> Rows[int]:
    """Lock the claims that still hold, in id order; a missing id is a stale claim."""
    return _scalars(conn, "lock_claims", **_fences(changes))


def advance(conn: Connection, changes: Sequence[Advance], *, ahead: timedelta = ZERO) -> Rows[int]:
    """Write Next outcomes."""
    return _scalars(
        conn,
        "advance",
        **_fences(changes),
        steps=texts([change.step for change in changes]),
        states=texts([change.state for change in changes]),
        delays=intervals([change.delay for change in changes]),
        errors=texts([change.error for change in changes]),
        consumed=integers([signal for change in changes for signal in change.consumed]),
        **_limits(changes),
        ahead=ahead,
    )


def carry_on(conn: Connection, changes: Sequence[CarryOn]) -> Rows[int]:
    """Write Next outcomes of inline machines, which stay claimed."""
    return _scalars(
        conn,
        "carry_on",
        **_fences(changes),
        steps=texts([change.step for change in changes]),
        states=texts([change.state for change in changes]),
        errors=texts([change.error for change in changes]),
    )


def repeat(conn: Connection, changes: Sequence[Repeat], *, ahead: timedelta = ZERO) -> Rows[int]:
    """Write Retry and Again outcomes."""
    return _scalars(
        conn,
        "repeat",
        **_fences(changes),
        states=texts([change.state for change in changes]),
        delays=intervals([change.delay for change in changes]),
        attempts=integers([change.attempts for change in changes]),
        errors=texts([change.error for change in changes]),
        ahead=ahead,
    )


def park(conn: Connection, changes: Sequence[Park], *, ahead: timedelta = ZERO) -> Rows[int]:
    """Write Await outcomes; `recheck_parked` must follow in the same transaction."""
    return _scalars(
        conn,
        "park",
        **_fences(changes),
        steps=texts([change.step for change in changes]),
        states=texts([change.state for change in changes]),
        names=texts([change.names for change in changes]),
        timeouts=intervals([change.timeout for change in changes]),
        errors=texts([change.error for change in changes]),
        attempts=integers([change.attempt for change in changes]),
        ahead=ahead,
    )


def recheck_parked(conn: Connection, changes: Sequence[Park], *, ahead: timedelta = ZERO) -> Rows[Woken]:
    """Wake those just parked whose signal came in before the park."""
    shown = integers([signal for change in changes for signal in change.shown])
    return _rows(conn, Woken, "recheck_parked", **_fences(changes), shown=shown, ahead=ahead)


def spawn(conn: Connection, changes: Sequence[SpawnChildren], *, ahead: timedelta = ZERO) -> Rows[int]:
    """Write Spawn outcomes: insert the children and park the parents."""
    born = [(change.id, place, child) for change in changes for place, child in enumerate(change.children)]
    columns = _columns([child for _, _, child in born])
    columns["child_steps"] = columns.pop("steps")
    columns["child_states"] = columns.pop("states")
    return _scalars(
        conn,
        "spawn",
        **_fences(changes),
        steps=texts([change.step for change in changes]),
        states=texts([change.state for change in changes]),
        errors=texts([change.error for change in changes]),
        timeouts=sparse(intervals, [change.timeout for change in changes]),
        fail_fasts=sparse(list, [change.fail_fast or None for change in changes]),
        consumed=integers([signal for change in changes for signal in change.consumed]),
        parents=integers([parent for parent, _, _ in born]),
        indexes=integers([place for _, place, _ in born]),
        **columns,
        ahead=ahead,
    )


def finish(conn: Connection, changes: Sequence[Finish], *, ahead: timedelta = ZERO) -> Rows[Ended]:
    """Write Done and Stop outcomes: drop the inbox, join the parent."""
    return _rows(
        conn,
        Ended,
        "finish",
        **_fences(changes),
        statuses=texts([str(change.status) for change in changes]),
        results=texts([change.result for change in changes]),
        errors=texts([change.error for change in changes]),
        crashes=integers([change.crashes for change in changes]),
        ahead=ahead,
    )


# Endings from outside. All in one transaction: the locks, `seize`, and `finish`.


def lock_instances(conn: Connection, *, ids: Sequence[int]) -> Rows[Held]:
    """Hold rows in id order, waiting for whoever has them, and see how each stands."""
    return _rows(conn, Held, "lock_instances", ids=integers(ids))


def lock_free_instances(conn: Connection, *, ids: Sequence[int]) -> Rows[Held]:
    """Hold those rows that nobody else holds, and see how each stands."""
    return _rows(conn, Held, "lock_free_instances", ids=integers(ids))


def seize(conn: Connection, *, ids: Sequence[int], reason: str | None) -> Rows[int]:
    """Take live instances that are locked already, each under its next fence; `reason` if they are cancelled."""
    return _scalars(conn, "seize", ids=integers(ids), reason=reason)


def compensate(conn: Connection, *, ids: Sequence[int], reason: str, ahead: timedelta = ZERO) -> Rows[int]:
    """Cancel live instances that are locked already and have a hook for it, which is to run next."""
    return _scalars(conn, "compensate", ids=integers(ids), reason=reason, ahead=ahead)


def find_children(conn: Connection, *, ids: Sequence[int]) -> Rows[int]:
    """Name the children of instances that are locked already."""
    return _scalars(conn, "find_children", ids=integers(ids))


# Maintenance.


def reap(conn: Connection, *, worker: str, limit: int, lease: timedelta, ahead: timedelta = ZERO) -> Rows[Reaped]:
    """Take expired claims away; those whose crash budget is spent are now claims of `worker`, to be ended."""
    return _rows(conn, Reaped, "reap", worker=worker, limit=limit, lease=lease, ahead=ahead)


def expire_awaits(conn: Connection, *, limit: int, ahead: timedelta = ZERO) -> Rows[Woken]:
    """Wake parked instances whose deadline has passed."""
    return _rows(conn, Woken, "expire_awaits", limit=limit, ahead=ahead)


def deadlines_passed(conn: Connection, *, ahead: timedelta = ZERO) -> Rows[DeadlinesPassed]:
    """Tell whether awaits or instances are overdue."""
    return _rows(conn, DeadlinesPassed, "deadlines_passed", ahead=ahead)


def find_overdue(conn: Connection, *, limit: int, ahead: timedelta = ZERO) -> Rows[Overdue]:
    """Name instances that live past their deadline."""
    return _rows(conn, Overdue, "find_overdue", limit=limit, ahead=ahead)


def hasten_throttled(conn: Connection, *, limit: int, ahead: timedelta = ZERO) -> Rows[str]:
    """Let instances wait for tokens no longer than they must, up to `limit` of each bucket; returns their queues."""
    return _scalars(conn, "hasten_throttled", limit=limit, ahead=ahead)


def drop_buckets(conn: Connection, *, limit: int) -> Rows[str]:
    """Delete buckets that have been full for long."""
    return _scalars(conn, "drop_buckets", limit=limit)


def gc(conn: Connection, *, older_than: timedelta, after: int, limit: int, ahead: timedelta = ZERO) -> Rows[int]:
    """Delete up to `limit` instances above id `after` that ended longer ago than `older_than`."""
    return _scalars(conn, "gc", older_than=older_than, after=after, limit=limit, ahead=ahead)


# Schedules.


def open_schedules(conn: Connection, *, names: Sequence[str]) -> Rows[str]:
    """Remember schedules that are seen for the first time."""
    return _scalars(conn, "open_schedules", names=list(names))


def list_schedules(conn: Connection) -> Rows[ScheduleRow]:
    """Read how far each schedule has come."""
    return _rows(conn, ScheduleRow, "list_schedules")


def lock_schedule(conn: Connection, *, name: str, ahead: timedelta = ZERO) -> Rows[ScheduleRow]:
    """Hold one schedule and read how far it has come; nothing comes back if another worker holds it."""
    return _rows(conn, ScheduleRow, "lock_schedule", name=name, ahead=ahead)


def advance_schedule(conn: Connection, *, name: str, tick: datetime) -> Rows[str]:
    """Write down the newest tick of a schedule that has passed."""
    return _scalars(conn, "advance_schedule", name=name, tick=tick)


# A worker process.


def lock_partitions(conn: Connection, *, keys: Sequence[str]) -> Rows[str]:
    """Take partition keys' locks for this session; those that another session has are missing from the answer."""
    return _scalars(conn, "lock_partitions", keys=list(keys), **{"class": LOCK_CLASS})


def find_siblings(conn: Connection, *, keys: Sequence[str], ids: Sequence[int]) -> Rows[str]:
    """Return the keys of which another instance is executing than the one beside it in `ids`."""
    return _scalars(conn, "find_siblings", keys=list(keys), ids=integers(ids))


def unlock_partitions(conn: Connection, *, keys: Sequence[str]) -> Rows[str]:
    """Let go of partition keys' locks; those that this session did not hold are missing from the answer."""
    return _scalars(conn, "unlock_partitions", keys=list(keys), **{"class": LOCK_CLASS})


def end_session(conn: Connection, *, pid: int, started: datetime) -> Rows[bool]:
    """End the session of that process, if it is still the one that began then."""
    return _scalars(conn, "end_session", pid=pid, started=started)


def reclaim(conn: Connection, *, prefix: str, remaining: timedelta, limit: int) -> Rows[int]:
    """Put back what workers whose id begins with `prefix` hold on leases with less than `remaining` to run.

    With less than a third to run, where the holder's leases are known to be shorter.
    """
    return _scalars(conn, "reclaim", prefix=prefix, remaining=remaining, limit=limit)


def beat(
    conn: Connection,
    *,
    worker: str,
    name: str,
    host: str,
    pid: int,
    queues: str,
    machines: Sequence[str],
    lease: timedelta,
) -> Rows[str]:
    """Say that this worker process lives."""
    return _scalars(
        conn,
        "beat",
        worker=worker,
        name=name,
        host=host,
        pid=pid,
        queues=queues,
        machines=list(machines),
        lease=lease,
    )


def leave(conn: Connection, *, worker: str) -> Rows[str]:
    """Say that this worker process ends."""
    return _scalars(conn, "leave", worker=worker)


def has_work(conn: Connection, *, queues: Sequence[str], machines: Sequence[str], keyed: bool) -> Rows[bool]:
    """Tell whether anything is due or running that these machines could run; with a partition key only if `keyed`."""
    return _scalars(conn, "has_work", queues=list(queues), machines=list(machines), keyed=keyed)


def publish_limiters(conn: Connection, limiters: Limiters) -> Rows[str]:
    """Make limits known; the names of those that are new or changed come back."""
    rates, places = list(limiters.rates.items()), list(limiters.places.items())
    return _scalars(
        conn,
        "publish_limiters",
        kinds=texts(["rate" for _ in rates] + ["concurrency" for _ in places]),
        names=texts([name for name, _ in [*rates, *places]]),
        allowed=integers([rate.allowed for _, rate in rates] + [allowed for _, allowed in places]),
        periods=intervals([rate.period for _, rate in rates]),
        bursts=integers([rate.burst for _, rate in rates]),
    )


def list_limiters(conn: Connection) -> Rows[LimiterRow]:
    """Read the limits that have been published."""
    return _rows(conn, LimiterRow, "list_limiters")


def server_facts(conn: Connection) -> Rows[ServerFacts]:
    """Read what a worker wants to know of its server."""
    return _rows(conn, ServerFacts, "server_facts")


# Clients.


def insert(conn: Connection, instances: Sequence[NewInstance], *, ahead: timedelta = ZERO) -> Rows[int]:
    """Insert instances; one whose unique key is occupied is skipped."""
    return _scalars(conn, "insert", **_columns(instances), ahead=ahead)


def find_occupant(conn: Connection, *, unique_key: bytes) -> Rows[int]:
    """Return the id of the instance that holds a unique key."""
    return _scalars(conn, "find_occupant", unique_key=unique_key)


def lock_target(conn: Connection, *, id: int) -> Rows[int]:  # noqa: A002  the column's name
    """Hold the row that a signal is for; `deliver` must follow in the same transaction."""
    return _scalars(conn, "lock_target", id=id)


def deliver(
    conn: Connection,
    *,
    id: int,  # noqa: A002  the column's name
    name: str,
    payload: str,
    dedup_key: str | None,
    inbox_limit: int,
    ahead: timedelta = ZERO,
) -> Rows[Delivery]:
    """Store a signal and wake its target if it waits for that name."""
    return _rows(
        conn,
        Delivery,
        "deliver",
        id=id,
        name=name,
        payload=payload,
        dedup_key=dedup_key,
        inbox_limit=inbox_limit,
        ahead=ahead,
    )


def retry(conn: Connection, *, id: int, ahead: timedelta = ZERO) -> Rows[int]:  # noqa: A002  the column's name
    """Let a failed or cancelled instance run again; nothing comes back if it is neither."""
    return _scalars(conn, "retry", id=id, ahead=ahead)


def pause_queue(conn: Connection, *, queue: str) -> Rows[bool]:
    """Let no more be claimed from a queue; nothing comes back if it was paused already."""
    return _scalars(conn, "pause_queue", queue=queue)


def resume_queue(conn: Connection, *, queue: str) -> Rows[bool]:
    """Let a queue be claimed from again; nothing comes back if it was not paused."""
    return _scalars(conn, "resume_queue", queue=queue)


# Looking.


def get_instance(conn: Connection, *, id: int) -> Rows[Instance]:  # noqa: A002  the column's name
    """Read one row, every column."""
    return _rows(conn, Instance, "get_instance", id=id)


def get_status(conn: Connection, *, id: int) -> Rows[str]:  # noqa: A002  the column's name
    """Read where one instance stands."""
    return _scalars(conn, "get_status", id=id)


def get_statuses(conn: Connection, *, ids: Sequence[int]) -> Rows[Standing]:
    """Read where instances stand; one that does not exist is left out."""
    return _rows(conn, Standing, "get_statuses", ids=integers(ids))


def list_instances(
    conn: Connection,
    *,
    status: str | None = None,
    fsm: str | None = None,
    queue: str | None = None,
    step: str | None = None,
    parent: int | None = None,
    older_than: timedelta | None = None,
    paths: Sequence[str] = (),
    values: Sequence[str] = (),
    limit: int,
) -> Rows[Instance]:
    """Read the newest rows that match every filter given.

    `paths` are JSON arrays that lead into the state or result, `values` the texts that must be found there.
    """
    return _rows(
        conn,
        Instance,
        "list_instances",
        status=status,
        fsm=fsm,
        queue=queue,
        step=step,
        parent=parent,
        older_than=older_than,
        paths=list(paths),
        values=list(values),
        limit=limit,
    )


def list_ids(
    conn: Connection,
    *,
    statuses: Sequence[str],
    fsm: str | None = None,
    queue: str | None = None,
    step: str | None = None,
    parent: int | None = None,
    older_than: timedelta | None = None,
    paths: Sequence[str] = (),
    values: Sequence[str] = (),
    after: int = 0,
    limit: int,
) -> Rows[int]:
    """Name the rows above id `after` that match every filter given, oldest first."""
    return _scalars(
        conn,
        "list_ids",
        statuses=list(statuses),
        fsm=fsm,
        queue=queue,
        step=step,
        parent=parent,
        older_than=older_than,
        paths=list(paths),
        values=list(values),
        after=after,
        limit=limit,
    )


def count_instances(conn: Connection) -> Rows[Count]:
    """Count instances by queue and status."""
    return _rows(conn, Count, "count_instances")


def count_due(conn: Connection) -> Rows[Due]:
    """Count due instances by queue."""
    return _rows(conn, Due, "count_due")


def count_unserved(conn: Connection) -> Rows[Unserved]:
    """Count due instances of machines that no live worker has."""
    return _rows(conn, Unserved, "count_unserved")


def count_old(conn: Connection, *, older_than: timedelta, ahead: timedelta = ZERO) -> Rows[int]:
    """Count the instances that `gc` would delete."""
    return _scalars(conn, "count_old", older_than=older_than, ahead=ahead)


def list_workers(conn: Connection) -> Rows[WorkerRow]:
    """Read the worker processes that are alive."""
    return _rows(conn, WorkerRow, "list_workers")


def list_paused(conn: Connection) -> Rows[str]:
    """Name the queues that are paused."""
    return _scalars(conn, "list_paused")


def examine(conn: Connection) -> Rows[Examination]:
    """Read what a doctor wants to know."""
    return _rows(conn, Examination, "examine")


def due_queues(conn: Connection, *, ahead: timedelta = ZERO) -> Rows[str]:
    """Name the queues that hold due work."""
    return _scalars(conn, "due_queues", ahead=ahead)


def _rows(conn: Connection, row: type[T], name: str, /, **parameters: Any) -> Rows[T]:
    # A row class and cursor of our own: the connection may be the caller's, with a row factory of theirs.
    return _run(conn, conn.cursor(row_factory=args_row(row)), name, parameters)


def _scalars(conn: Connection, name: str, /, **parameters: Any) -> Rows[Any]:
    return _run(conn, conn.cursor(row_factory=scalar_row), name, parameters)


def _run(conn: Connection, cursor: psycopg.Cursor[T], name: str, parameters: dict[str, Any]) -> Rows[T]:
    with one_commit(conn) if needs_transaction(conn) else nullcontext():
        return Rows(cursor.execute(statement(name), parameters))


def _fences(claims: Sequence[Fenced]) -> dict[str, str]:
    return {"ids": integers([claim.id for claim in claims]), "fences": integers([claim.fence for claim in claims])}


def _buckets(buckets: Sequence[Bucket]) -> dict[str, str]:
    return {"kinds": texts([kind for kind, _ in buckets]), "keys": texts([key for _, key in buckets])}


def _limits(limited: Sequence[NewInstance] | Sequence[Advance]) -> dict[str, str]:
    return {
        "rate_limits": sparse(texts, [each.rate_limit for each in limited]),
        "weights": sparse(integers, [each.weight if each.rate_limit else None for each in limited]),
        "concurrency_limits": sparse(texts, [each.concurrency_limit for each in limited]),
    }


def _columns(instances: Sequence[NewInstance]) -> dict[str, Any]:
    """Turn instances into one array per column: a fixed number of parameters, however many rows."""
    return {
        "fsms": texts([new.fsm for new in instances]),
        "fsm_versions": integers([new.fsm_version for new in instances]),
        "steps": texts([new.step for new in instances]),
        "states": texts([new.state for new in instances]),
        "queues": texts([new.queue for new in instances]),
        "priorities": integers([new.priority for new in instances]),
        "partition_keys": texts([new.partition_key for new in instances]),
        "unique_keys": binaries([new.unique_key for new in instances]),
        "unique_scopes": texts([",".join(sorted(new.unique_scope)) for new in instances]),
        "max_crashes": integers([new.max_crashes for new in instances]),
        "eligible_ats": [new.eligible_at for new in instances],
        "delays": intervals([new.delay for new in instances]),
        **_rare_columns(instances),
    }


def _rare_columns(instances: Sequence[NewInstance]) -> dict[str, Any]:
    """What few instances have; `unnest` fills up an array that is too short with nulls, so none costs nothing."""
    deadlines = [new.deadline for new in instances]
    return {
        **_limits(instances),
        "deadlines": sparse(list, [each if isinstance(each, datetime) else None for each in deadlines]),
        "lifetimes": sparse(intervals, [each if isinstance(each, timedelta) else None for each in deadlines]),
        "retries": sparse(texts, [new.retry for new in instances]),
        "on_cancels": sparse(list, [new.on_cancel or None for new in instances]),
    }
