"""What the answers of statements are read into, where core has no word for it."""

from datetime import datetime, timedelta

from attrs import frozen


@frozen
class Delivery:
    """What became of a signal. `id` is its own, or that of the signal it duplicates."""

    found: bool
    id: int | None
    duplicate: bool
    woke: bool


@frozen
class Reaped:
    """A claim that was taken away. If `spent`, the row is now our claim and must be ended."""

    id: int
    fence: int
    queue: str
    fsm: str
    step: str
    crashes: int
    spent: bool


@frozen
class Lost:
    """A claim that holds no longer."""

    id: int
    fence: int


@frozen
class Woken:
    """A parked instance that became runnable."""

    id: int
    queue: str


@frozen
class Ended:
    """An instance that ended; `wakes` is the queue of the parent whose barrier that opened, if it did."""

    id: int
    wakes: str | None


@frozen
class Held:
    """An instance whose row we hold, to end it from outside."""

    id: int
    fence: int
    status: str
    deadline: str | None
    on_cancel: bool
    is_cancelling: bool


@frozen
class DeadlinesPassed:
    """Whether some await, and whether some instance, is overdue."""

    awaits: bool
    instances: bool


@frozen
class Overdue:
    """An instance that lives past its deadline."""

    id: int
    queue: str
    fsm: str
    step: str
    deadline: str


@frozen
class ServerFacts:
    """What a worker wants to know of its server."""

    version: str
    fsync: bool
    synchronous_commit: bool
    standby: bool


@frozen
class ScheduleRow:
    """How far a schedule has come, and what time it is."""

    name: str
    last_tick: datetime
    now: datetime


@frozen
class Standing:
    """Where an instance stands."""

    id: int
    status: str


@frozen
class Count:
    """How many instances of a queue have a status."""

    queue: str
    status: str
    count: int


@frozen
class Due:
    """How many instances of a queue are due, and for how long the oldest has been."""

    queue: str
    due: int
    oldest_due_seconds: float


@frozen
class Unserved:
    """How many instances of a machine are due that no live worker has."""

    fsm: str
    fsm_version: int
    count: int


@frozen
class WorkerRow:
    """A worker process that is alive, as its row says."""

    id: str
    name: str
    host: str
    pid: int
    queues: dict[str, int]
    machines: list[str]
    started_at: datetime
    beat_at: datetime
    expires_at: datetime


@frozen
class Examination:
    """What is to be known of a server before its health is judged."""

    version: str
    major: int
    standby: bool
    fsync: bool
    synchronous_commit: bool
    role: str
    missing_rights: list[str]
    clock: datetime
    never_vacuumed: list[str]
    connections: int


@frozen
class LimiterRow:
    """A limit that was published."""

    kind: str
    name: str
    allowed: int
    period: timedelta | None
    burst: int | None


@frozen
class FoundLimited:
    """A limited instance that is due; without an id, only what is to be said of them all.

    `due` is how many were seen, `next_token` in how many seconds the next of those that wait for tokens is due.
    """

    due: int
    next_token: float | None
    id: int | None
    rate_limit: str | None
    concurrency_limit: str | None
    in_turn: bool | None
    has_buckets: bool | None


@frozen
class Tokens:
    """What became of the tokens of one rate limit that were asked for."""

    name: str
    granted: int
    throttled: int
