"""NewInstance: what `Checkout.new(...)` returns, a value and not yet a row; Instance: a row as people read it."""

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

from attrs import evolve, field, frozen

from gendurable.core.codec import decode_readable
from gendurable.core.duration import ZERO, to_timedelta
from gendurable.core.limiters import check_limit, check_weight
from gendurable.core.limits import check_key, check_name, check_unique_key, show
from gendurable.core.policy import RetryPolicy
from gendurable.core.status import LIVE, Status
from gendurable.errors import InvalidInstance

PRIORITIES = range(-(2**15), 2**15)


@frozen
class NewInstance:
    """An instance to be inserted: every value checked, its state encoded."""

    fsm: str
    fsm_version: int
    step: str
    state: str
    queue: str
    priority: int
    partition_key: str | None
    unique_key: bytes | None
    unique_scope: frozenset[Status]
    max_crashes: int | None
    eligible_at: datetime | None
    delay: timedelta
    rate_limit: str | None = None
    weight: int = 1
    concurrency_limit: str | None = None
    # An instant, or how long from the insert on.
    deadline: datetime | timedelta | None = None
    retry: str | None = None
    on_cancel: bool = False


@frozen
class Instance:
    """One row of `gen_durable`, every column; `state`, `result` and `retry` are plain JSON values."""

    id: int
    fsm: str
    fsm_version: int
    step: str
    status: Status = field(converter=Status)
    state: Any
    result: Any
    queue: str
    priority: int
    partition_key: str | None
    eligible_at: datetime
    attempt: int
    crashes: int
    max_crashes: int | None
    last_error: str | None
    locked_by: str | None
    lease_expires_at: datetime | None
    fence: int
    awaits: list[str] | None
    await_deadline: datetime | None
    children_pending: int
    spawn_round: int
    join_round: int | None
    parent_id: int | None
    child_round: int | None
    child_index: int | None
    unique_key: bytes | None
    unique_scope: list[str]
    unique_guard: bytes | None
    rate_limit: str | None
    weight: int
    throttled: bool
    concurrency_limit: str | None
    deadline: datetime | None
    retry: Any
    on_cancel: bool
    cancelling: bool
    cancel_reason: str | None
    cancel_round: int | None
    fail_fast: bool
    inserted_at: datetime
    updated_at: datetime

    def decoded(self) -> "Instance":
        """Return the instance with the JSON text of its columns, as the database room left it, decoded."""
        result = None if self.result is None else decode_readable(self.result)
        retry = None if self.retry is None else decode_readable(self.retry)
        return evolve(self, state=decode_readable(self.state), result=result, retry=retry)


def new_instance(
    *,
    fsm: str,
    fsm_version: int,
    step: str,
    state: str,
    queue: str,
    max_crashes: int | None,
    priority: int = 0,
    partition_key: str | None = None,
    unique_key: bytes | str | None = None,
    unique_scope: Collection[str] | None = None,
    eligible_at: datetime | None = None,
    schedule_at: datetime | None = None,
    schedule_in: object = None,
    rate_limit: object = None,
    weight: object = 1,
    concurrency_limit: object = None,
    deadline: object = None,
    retry: object = None,
    on_cancel: bool = False,
) -> NewInstance:
    """Check what may be said about a new instance; the first that is wrong raises InvalidInstance."""
    if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
        raise InvalidInstance(
            f"priority: {show(priority)} is out of range: give an integer from {PRIORITIES[0]} to {PRIORITIES[-1]}"
        )
    due = None if eligible_at is None else _check_instant("eligible_at", eligible_at)
    scheduled = None if schedule_at is None else _check_instant("schedule_at", schedule_at)
    return NewInstance(
        fsm=check_name("fsm", fsm),
        fsm_version=fsm_version,
        step=check_name("step", step),
        state=state,
        queue=check_name("queue", queue),
        priority=priority,
        partition_key=None if partition_key is None else check_key("partition_key", partition_key),
        unique_key=None if unique_key is None else check_unique_key(unique_key),
        unique_scope=_check_scope(unique_scope, has_key=unique_key is not None),
        max_crashes=max_crashes,
        eligible_at=scheduled if due is None else due,
        delay=ZERO if schedule_in is None else _check_delay(schedule_in),
        rate_limit=None if rate_limit is None else check_limit("rate_limit", rate_limit),
        weight=check_weight(weight),
        concurrency_limit=None if concurrency_limit is None else check_limit("concurrency_limit", concurrency_limit),
        deadline=None if deadline is None else _check_deadline(deadline),
        retry=None if retry is None else _check_retry(retry),
        on_cancel=on_cancel,
    )


def _check_retry(value: object) -> str:
    if not isinstance(value, RetryPolicy):
        raise InvalidInstance(f"retry: {show(value)} is no policy; give RetryPolicy(max_attempts=…, base=…)")
    return value.stored()


def _check_scope(scope: Collection[str] | None, *, has_key: bool) -> frozenset[Status]:
    if scope is None:
        return LIVE if has_key else frozenset()
    if isinstance(scope, str):
        raise InvalidInstance(f"unique_scope: {show(scope)} is a single text: give a collection of statuses")
    try:
        statuses = frozenset(Status(status) for status in scope)
    except (TypeError, ValueError) as error:
        raise InvalidInstance(f"unique_scope: {error}; the statuses are {', '.join(Status)}") from None
    missing = LIVE - statuses
    if statuses and missing:
        # A row that leaves its scope and re-enters it could collide with one inserted meanwhile: the claim, the
        # reaper or the join that moves it would fail, and with it everything in the same batch.
        raise InvalidInstance(
            f"unique_scope: {', '.join(sorted(statuses))} lacks {', '.join(sorted(missing))}; a row that re-enters "
            "its scope could wedge the engine: give no status, or all four live ones (and any terminal ones)"
        )
    return statuses


def _check_instant(field: str, value: object) -> datetime:
    if not isinstance(value, datetime):
        raise InvalidInstance(f"{field}: {show(value)} is no datetime")
    if value.utcoffset() is None:
        raise InvalidInstance(
            f"{field}: {value.isoformat()} has no time zone: give an aware datetime, e.g. datetime.now(UTC)"
        )
    try:
        return value.astimezone(UTC)
    except OverflowError:  # the stored instant could not be read back
        raise InvalidInstance(f"{field}: {value.isoformat()} lies outside the years 1 to 9999 in UTC") from None


def _check_deadline(value: object) -> datetime | timedelta:
    """Return an instant, or a time from the insert on."""
    if isinstance(value, datetime):
        return _check_instant("deadline", value)
    try:
        limit = to_timedelta(value)
    except ValueError as error:
        raise InvalidInstance(f"deadline: {error}; give a duration or an aware datetime") from None
    if limit <= ZERO:
        raise InvalidInstance(f"deadline: {show(value)} is not positive: it could not live at all")
    return limit


def _check_delay(value: object) -> timedelta:
    try:
        delay = to_timedelta(value)
    except ValueError as error:
        raise InvalidInstance(f"schedule_in: {error}") from None
    if delay < ZERO:
        raise InvalidInstance(f"schedule_in: {show(value)} lies in the past: give zero or more")
    return delay
