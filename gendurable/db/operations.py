"""What takes more than one statement: claim with inbox and children, commit a batch, insert, send a signal."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any

import psycopg
from attrs import frozen

from gendurable.core.claim import Claim, StoredChild
from gendurable.core.duration import ZERO
from gendurable.core.instance import Instance, NewInstance
from gendurable.core.limits import DEFAULT_LIMITS, check_id, check_name, show
from gendurable.core.outgoing import Outgoing, outgoing
from gendurable.core.status import LIVE, Status
from gendurable.core.transition import Advance, CarryOn, Finish, GiveBack, Park, Repeat, SpawnChildren, Transition
from gendurable.db import store
from gendurable.db.connection import Connection, one_commit, pipeline, set_locally
from gendurable.db.endings import cancel_idle
from gendurable.db.faults import is_locked
from gendurable.db.limiting import check_limits
from gendurable.db.rows import Delivery, Ended, FoundLimited, Tokens, Woken
from gendurable.errors import (
    DuplicateInstance,
    InboxFull,
    InstanceNotFound,
    InvalidInstance,
    NoTarget,
    NotPaused,
    NotRetryable,
)
from gendurable.notices import BOARD

# A statement's parameters must fit into one protocol message (1 GB) and the server's memory; far below both.
INSERT_BYTES = 64 * 1024 * 1024
# What a row costs besides its state: a statement must also end well before its timeout.
ROW_BYTES = 4096
# How many limited instances are looked at together: those that are throttled must be put off quickly, even if many are.
LIMITED_WINDOW = 500


def claim_batch(
    conn: Connection,
    *,
    queue: str,
    machines: Sequence[str],
    worker: str,
    limit: int,
    lease: timedelta,
    keyed: bool = True,
    avoid: Sequence[str] = (),
    beyond: str = "",
    ahead: timedelta = ZERO,
) -> list[Claim]:
    """Claim due instances and load what their steps will see. Nothing due: one statement; no signals: still one.

    Instances with a partition key only if `keyed`.
    """
    which: dict[str, Any] = {
        "queue": queue,
        "machines": machines,
        "worker": worker,
        "limit": limit,
        "lease": lease,
        "ahead": ahead,
    }
    claims = (
        store.claim(conn, **which, avoid=avoid, beyond=beyond) if keyed else store.claim_plain(conn, **which)
    ).all()
    return _loaded(conn, claims, ahead)


@frozen
class LimitedLook:
    """A look for instances with limits: what was claimed, and what became of the tokens asked for.

    `more`: the next look may find more at once. `contended`: others held some of the buckets, but not for long.
    `blocked`: some are due whose limits are used up. `next_token`: in so many seconds the next of those that wait for
    tokens is due.
    """

    claims: list[Claim]
    tokens: list[Tokens]
    more: bool = False
    contended: bool = False
    blocked: bool = False
    next_token: float | None = None


def claim_limited(
    conn: Connection,
    *,
    queue: str,
    machines: Sequence[str],
    worker: str,
    limit: int,
    lease: timedelta,
    keyed: bool = True,
    avoid: Sequence[str] = (),
    ahead: timedelta = ZERO,
) -> LimitedLook:
    """Claim due instances that have limits. None due: one statement.

    Their buckets are held in a transaction of one round trip: a client that is stopped in the midst holds up nobody.
    """
    rows = store.find_limited(
        conn,
        queue=queue,
        machines=machines,
        limit=limit,
        window=LIMITED_WINDOW,
        keyed=keyed,
        avoid=avoid,
        ahead=ahead,
    ).all()
    due, next_token = rows[0].due, rows[0].next_token
    found = [row for row in rows if row.id is not None]
    room = sum(bool(row.in_turn) for row in found)
    if not room:  # the others are due before these, or all are blocked
        return LimitedLook([], [], blocked=due > 0, next_token=next_token)
    if missing := _buckets_of(row for row in found if not row.has_buckets):
        store.open_buckets(conn, missing).all()
    ids, buckets = [row.id for row in found if row.id is not None], _buckets_of(found)
    with one_commit(conn):
        held = store.hold_buckets(conn, buckets, ahead=ahead)
        claimed = store.claim_limited(conn, ids, buckets, worker=worker, limit=room, lease=lease, ahead=ahead)
        counted = store.count_tokens(conn, ids)
    claims, tokens = claimed.all(), counted.all()
    throttled = any(each.throttled for each in tokens)
    return LimitedLook(
        _loaded(conn, claims, ahead),
        tokens,
        more=throttled or (bool(claims) and due >= LIMITED_WINDOW),
        contended=len(held.all()) < len(buckets),
        blocked=len(claims) < due,
        next_token=next_token,
    )


def _buckets_of(found: Iterable[FoundLimited]) -> list[store.Bucket]:
    buckets: set[store.Bucket] = set()
    for row in found:
        if row.rate_limit is not None:
            buckets.add(("rate", row.rate_limit))
        if row.concurrency_limit is not None:
            buckets.add(("concurrency", row.concurrency_limit))
    return sorted(buckets)


def _loaded(conn: Connection, claims: list[Claim], ahead: timedelta) -> list[Claim]:
    """Return claims with what their steps will see of inbox and children."""
    signalled = [claim.id for claim in claims if claim.has_signals]
    parents = [claim.id for claim in claims if claim.spawn_round]
    if not signalled and not parents:
        return claims
    try:
        with pipeline(conn):
            signals = store.load_signals(conn, ids=signalled) if signalled else ()
            children = store.load_children(conn, ids=parents) if parents else ()
        inboxes = {id_: tuple(rows) for id_, rows in groupby(signals, attrgetter("target_id"))}
        families = {id_: tuple(rows) for id_, rows in groupby(children, attrgetter("parent_id"))}
        if any(claim.fail_fast for claim in claims):
            claims = _fail_fast(conn, claims, families, ahead)
    except psycopg.Error:
        # Nobody will run these: give them back rather than leave them to their lease.
        if not conn.closed:
            store.release(conn, claims)
        raise
    return [claim._replace(inbox=inboxes.get(claim.id, ()), children=families.get(claim.id, ())) for claim in claims]


def _fail_fast(
    conn: Connection, claims: list[Claim], families: dict[int, tuple[StoredChild, ...]], ahead: timedelta
) -> list[Claim]:
    """Cancel who is left of a round that was to fail fast, now that its barrier is open and before the step runs.

    Done anew at each claim of that step: a worker that died half-way is succeeded by the next. A claim for which it
    cannot be done now, because somebody holds a row, goes back; the others are returned.
    """
    waiting: list[Claim] = []
    for claim in claims:
        reason = f"instance {claim.id} fails fast, and another of its children has not ended well"
        left = [
            child.id
            for child in families.get(claim.id, ())
            if claim.fail_fast
            and child.round == claim.join_round
            and (child.status in LIVE or (child.status == Status.CANCELLED and child.last_error == reason))
        ]
        if not left:
            continue
        if cancel_idle(conn, left, reason, ahead=ahead):
            families[claim.id] = tuple(store.load_children(conn, ids=[claim.id]))
        else:
            waiting.append(claim)
    if waiting:
        store.release(conn, waiting)
    return [claim for claim in claims if claim not in waiting]


def give_back(conn: Connection, claims: Sequence[Claim]) -> list[int]:
    """Hand back claims whose step never started; one whose row somebody holds too long is left to its lease."""
    try:
        return store.release(conn, claims).all()
    except psycopg.Error as error:
        if not is_locked(error):
            raise
    if len(claims) == 1:
        return []
    return [id_ for claim in claims for id_ in give_back(conn, [claim])]


def take_keys(conn: Connection, claims: Sequence[Claim]) -> list[Claim]:
    """Take claims' partition keys, all different, for this session; return those whose siblings do not and may not run.

    Of the keys of the others nothing is held.
    """
    keys = [claim.partition_key or "" for claim in claims]
    with pipeline(conn):
        locked = store.lock_partitions(conn, keys=keys)
        # A statement of its own, for a snapshot that is newer than the locks.
        siblings = store.find_siblings(conn, keys=keys, ids=[claim.id for claim in claims])
    held, busy = set(locked), set(siblings)
    if refused := held & busy:
        store.unlock_partitions(conn, keys=sorted(refused))
    return [claim for claim in claims if claim.partition_key in held - busy]


@frozen
class Committed:
    """What became of a batch: the outcomes that were written, and the queues of others that became runnable by it."""

    written: tuple[Transition, ...]
    woken: frozenset[str]


def commit(
    conn: Connection, changes: Sequence[Transition], *, unlock: Sequence[str] = (), ahead: timedelta = ZERO
) -> Committed:
    """Write a batch of outcomes in one transaction; those whose fence no longer holds are stale and change nothing.

    `unlock` are partition keys whose locks this session holds: let go in the same round trip, after the commit.

    However many outcomes and kinds: at most one statement per kind, one for the locks and one for the
    recheck.
    """
    # A worker that lost a claim and claimed the row anew may bring an outcome of each: only the newer can hold.
    newest = {change.id: change for change in sorted(changes, key=attrgetter("fence"))}
    # By id, so that rows are locked in one order, whoever else has an outcome for some of them.
    kinds: dict[type, list[Any]] = {}
    for id_ in sorted(newest):
        kinds.setdefault(type(newest[id_]), []).append(newest[id_])
    with one_commit(conn, after=(lambda: store.unlock_partitions(conn, keys=unlock)) if unlock else None):
        answers = _write(conn, kinds, ahead)
    post(newest.values())
    return _committed([change for change in changes if newest[change.id] is change], answers)


def write_step(
    conn: Connection, change: Transition, signals: Sequence[Outgoing], *, ahead: timedelta = ZERO
) -> Committed:
    """Write one outcome, and deliver signals with it, in a transaction that the caller has begun and will end.

    NoTarget or InboxFull if a signal cannot be delivered; nothing of it must be committed then, nor if the outcome was
    not written.
    """
    with pipeline(conn):
        # Our own row and those of the targets in one order, as a batch of outcomes locks its rows.
        for id_ in sorted({signal.id for signal in signals} | {change.id}) if signals else ():
            if id_ == change.id:
                store.lock_claims(conn, [change])
            else:
                store.lock_target(conn, id=id_)
        deliveries = [(signal.id, _deliver(conn, signal, ahead)) for signal in signals]
        answers = _write(conn, {type(change): [change]}, ahead)
    committed = _committed([change], answers)
    if committed.written:
        for id_, answer in deliveries:
            delivered(id_, answer)
    return committed


def post(changes: Iterable[Transition]) -> None:
    """Let those of this process who wait for instances know that these may have got where they wait for."""
    if BOARD:
        BOARD.post([change.id for change in changes if isinstance(change, Finish | Park | SpawnChildren)])


def _committed(changes: Sequence[Transition], answers: list[store.Rows[Any]]) -> Committed:
    rows = [row for answer in answers for row in answer]
    written = {row.id if isinstance(row, Ended) else row for row in rows if not isinstance(row, Woken)}
    woken = {row.queue if isinstance(row, Woken) else row.wakes for row in rows if isinstance(row, Woken | Ended)}
    return Committed(
        tuple(change for change in changes if change.id in written),
        frozenset(queue for queue in woken if queue is not None),
    )


def _write(conn: Connection, kinds: Mapping[type, list[Any]], ahead: timedelta) -> list[store.Rows[Any]]:
    answers: list[store.Rows[Any]] = []
    if len(kinds) > 1 or Finish in kinds:
        # One kind is written in the order of its ids; several need the locks of all of them first. So does an end:
        # should it have to wait for a signal on its way in, it must look into the inbox after that, to take it along.
        store.lock_claims(conn, [change for changes in kinds.values() for change in changes])
    # Spawns first, while our rows are locked but unchanged: an insert that finds the key of a changed row waits
    # for our commit, and a new child may have to wait for that insert.
    if spawns := kinds.get(SpawnChildren):
        answers.append(store.spawn(conn, spawns, ahead=ahead))
    if advances := kinds.get(Advance):
        answers.append(store.advance(conn, advances, ahead=ahead))
    if carried := kinds.get(CarryOn):
        answers.append(store.carry_on(conn, carried))
    if repeats := kinds.get(Repeat):
        answers.append(store.repeat(conn, repeats, ahead=ahead))
    if parks := kinds.get(Park):
        answers += store.park(conn, parks, ahead=ahead), store.recheck_parked(conn, parks, ahead=ahead)
    if interrupted := kinds.get(GiveBack):
        answers.append(store.release(conn, interrupted, started=True))
    # Ends last: they lock parents, and whoever holds a parent then waits for nothing but another parent.
    if ends := kinds.get(Finish):
        answers.append(store.finish(conn, ends, ahead=ahead))
    return answers


def insert_instance(conn: Connection, new: NewInstance, *, ahead: timedelta = ZERO) -> int:
    """Insert one instance; DuplicateInstance if its unique key is occupied."""
    check_limits(conn, [_check_new(new)])
    inserted = store.insert(conn, [new], ahead=ahead).one()
    if inserted is not None:
        return inserted
    key = new.unique_key or b""
    raise DuplicateInstance(key, store.find_occupant(conn, unique_key=key).one())


def insert_instances(conn: Connection, instances: Iterable[NewInstance], *, ahead: timedelta = ZERO) -> list[int]:
    """Insert many instances, all or none; one whose unique key is occupied is skipped."""
    checked = check_instances(instances)
    check_limits(conn, checked)
    chunks = _chunks(checked)
    if len(chunks) == 1:
        return store.insert(conn, chunks[0], ahead=ahead).all()
    with conn.transaction():  # the caller's own may be open: then this is a savepoint
        set_locally(conn)
        return [id_ for chunk in chunks for id_ in store.insert(conn, chunk, ahead=ahead)]


def send_signal(
    conn: Connection,
    id: int,  # noqa: A002  the column's name
    name: str,
    payload: Any,
    dedup_key: str | None,
    *,
    ahead: timedelta = ZERO,
) -> store.Rows[Delivery]:
    """Store a signal. The caller provides the transaction, and has `delivered` judge the answer after it."""
    signal = outgoing(id, name, payload, dedup_key)
    store.lock_target(conn, id=id)
    return _deliver(conn, signal, ahead)


def _deliver(conn: Connection, signal: Outgoing, ahead: timedelta) -> store.Rows[Delivery]:
    return store.deliver(
        conn,
        id=signal.id,
        name=signal.name,
        payload=signal.encoded,
        dedup_key=signal.dedup_key,
        inbox_limit=DEFAULT_LIMITS.inbox,
        ahead=ahead,
    )


def delivered(id: int, answer: store.Rows[Delivery]) -> Delivery:  # noqa: A002  the column's name
    """Return what became of a signal; NoTarget or InboxFull if it was not stored."""
    delivery = answer.one()
    if delivery is None or not delivery.found:
        raise NoTarget(id)
    if delivery.id is None:
        raise InboxFull(id, DEFAULT_LIMITS.inbox)
    return delivery


def retry_instance(conn: Connection, id: int, *, ahead: timedelta = ZERO) -> None:  # noqa: A002  the column's name
    """Let a failed or cancelled instance run again; NotRetryable, InstanceNotFound, or DuplicateInstance."""
    try:
        if store.retry(conn, id=check_id(id), ahead=ahead).one() is not None:
            return
    except psycopg.errors.UniqueViolation:
        key = read_instance(conn, id).unique_key or b""
        raise DuplicateInstance(key, store.find_occupant(conn, unique_key=key).one()) from None
    status = store.get_status(conn, id=id).one()
    raise InstanceNotFound(id) if status is None else NotRetryable(id, status)


def pause(conn: Connection, queue: str) -> bool:
    """Pause a queue; false if it was paused already."""
    return store.pause_queue(conn, queue=check_name("queue", queue)).one() is not None


def resume(conn: Connection, queue: str) -> None:
    """Resume a queue; NotPaused."""
    if store.resume_queue(conn, queue=check_name("queue", queue)).one() is None:
        raise NotPaused(queue)


def read_instance(conn: Connection, id: int) -> Instance:  # noqa: A002  the column's name
    """Read one instance; InstanceNotFound if there is none."""
    found = store.get_instance(conn, id=check_id(id)).one()
    if found is None:
        raise InstanceNotFound(id)
    return found.decoded()


def check_instances(given: object) -> list[NewInstance]:
    """Return a collection of new instances as a list, or refuse it."""
    if not isinstance(given, Iterable):
        raise InvalidInstance(f"instances: {show(given)} is no collection: give a list of Machine.new(...) values")
    return [_check_new(new) for new in given]


def _check_new(new: object) -> NewInstance:
    if not isinstance(new, NewInstance):
        raise InvalidInstance(f"{show(new)} is no new instance: give what Machine.new(...) returns")
    return new


def _chunks(instances: list[NewInstance]) -> list[list[NewInstance]]:
    """Cut into statements of bearable size; almost always one. By unique key, as within a statement."""
    chunks: list[list[NewInstance]] = []
    room = 0
    for new in sorted(instances, key=lambda new: new.unique_key or b""):
        size = len(new.state) + ROW_BYTES
        if not chunks or size > room:
            chunks.append([])
            room = INSERT_BYTES
        chunks[-1].append(new)
        room -= size
    return chunks
