"""What the engine has to say, as values. Loops emit them; logs and metrics only listen."""

from collections.abc import Callable
from typing import TypeAlias

from attrs import frozen


@frozen
class StepCommitted:
    """A step's outcome is in the database. `seconds` is the time its own code took."""

    id: int
    queue: str
    fsm: str
    fsm_version: int
    step: str
    outcome: str
    attempt: int
    seconds: float
    error: str | None = None


@frozen
class OutcomeStale:
    """The fence said no: the claim was lost, somebody else redoes the step, this outcome was dropped.

    `answer_lost`: an earlier try to commit it got no answer, so that it may have been this very outcome that won.
    """

    id: int
    queue: str
    fsm: str
    step: str
    outcome: str
    answer_lost: bool = False


@frozen
class ClaimLost:
    """A running step was told that its outcome counts no more: its instance was ended from outside, or reaped."""

    id: int
    queue: str
    fsm: str
    step: str


@frozen
class StepFailed:
    """A step raised, returned something that is no outcome, took too long, or its handler did; `kind` says which."""

    id: int
    queue: str
    fsm: str
    step: str
    attempt: int
    kind: str
    error: str


@frozen
class ThreadAbandoned:
    """A step took longer than it may: its slot went to another thread; `abandoned` threads are left behind by now."""

    id: int
    queue: str
    fsm: str
    step: str
    abandoned: int


@frozen
class TooManyAbandoned:
    """More threads were left behind than `worker.max_abandoned`: the worker drains and ends, to be started anew."""

    abandoned: int
    limit: int


@frozen
class OutcomeLate:
    """A step that had taken too long came back after all: what it returned was dropped."""

    id: int
    queue: str
    fsm: str
    step: str
    outcome: str
    seconds: float


@frozen
class StepCrashed:
    """A step ended without an outcome (SystemExit and its like): the reaper will return its row."""

    id: int
    queue: str
    fsm: str
    step: str
    error: str


@frozen
class Claimed:
    """A poll of one queue that found `count` rows; zero is an empty poll. `delays`: how long each was due."""

    queue: str
    count: int
    seconds: float
    delays: tuple[float, ...] = ()


@frozen
class TokensCounted:
    """A claim asked for `wanted` tokens of a rate limit; it got `granted`, and rows for `throttled` must wait."""

    limit: str
    wanted: int
    granted: int
    throttled: int


@frozen
class BatchCommitted:
    """One group commit; follows the events of what it wrote."""

    size: int
    seconds: float


@frozen
class OutcomeDeferred:
    """An outcome's row, or its parent's, is locked by somebody: the commit of this one is tried again."""

    id: int
    fsm: str
    step: str


@frozen
class PartitionContended:
    """A claimed row's partition key was busy after all: it went back untouched."""

    id: int
    queue: str
    fsm: str


@frozen
class LockLost:
    """The session that held a partition key's lock is gone: the outcome cannot be committed, the reaper takes over."""

    id: int
    queue: str
    fsm: str
    step: str
    error: str


@frozen
class TransactionLost:
    """The session of a transactional step is gone: all was committed, or nothing, and then the reaper takes over."""

    id: int
    queue: str
    fsm: str
    step: str
    error: str


@frozen
class PartitionsRefused:
    """Session locks do not hold on this connection, so rows with a partition key are left to other workers."""

    reason: str


@frozen
class LeaseReaped:
    """An expired claim was taken away from a worker that died or stalled; `ended`: its crash budget is spent."""

    id: int
    queue: str
    fsm: str
    step: str
    crashes: int
    ended: bool


@frozen
class ClaimsReclaimed:
    """Claims that a dead predecessor of this worker left behind went back to their queues."""

    count: int


@frozen
class AwaitsTimedOut:
    """Parked instances whose deadline had passed were woken."""

    count: int


@frozen
class DeadlineExceeded:
    """An instance that lived past its deadline was ended `failed`."""

    id: int
    queue: str
    fsm: str
    step: str
    deadline: str


@frozen
class GarbageCollected:
    """Instances that ended long ago were deleted."""

    count: int


@frozen
class ScheduleTicked:
    """Ticks of a schedule became `count` instances; `tick` is the newest, `missed` the first that was left out."""

    schedule: str
    fsm: str
    tick: str
    count: int
    missed: str | None


@frozen
class HeartbeatSent:
    """The leases of everything held were prolonged: `held` were asked for, `kept` answered."""

    held: int
    kept: int


@frozen
class DatabaseUnavailable:
    """A loop cannot reach the database and tries again. `pool` is the loop's name."""

    pool: str
    error: str
    retry_in: float


@frozen
class DatabaseAvailable:
    """A loop reaches the database again."""

    pool: str


@frozen
class WorkerStarted:
    """The worker has opened its connections, checked the schema and begins to poll."""

    worker: str
    queues: dict[str, int]
    machines: tuple[str, ...]
    server_version: str
    schema_version: int


@frozen
class UnsafeServer:
    """A server setting makes commits forgettable; `setting` is `fsync` or `synchronous_commit`."""

    setting: str


@frozen
class DrainStarted:
    """No more claims; unstarted ones went back, running steps may finish until the timeout."""

    running: int
    released: int
    timeout: float


@frozen
class DrainFinished:
    """The drain is over; `abandoned` steps were still running: what they hold is left to its lease."""

    abandoned: int
    seconds: float


@frozen
class LoopDied:
    """A loop raised what it should not; the process goes down rather than limp on."""

    loop: str
    error: str
    traceback: str


@frozen
class ProcessEnded:
    """A worker process ended that should not have; its supervisor starts another one."""

    pid: int
    code: int
    restart_in: float


Event: TypeAlias = (
    StepCommitted
    | OutcomeStale
    | ClaimLost
    | StepFailed
    | ThreadAbandoned
    | TooManyAbandoned
    | OutcomeLate
    | StepCrashed
    | Claimed
    | TokensCounted
    | BatchCommitted
    | OutcomeDeferred
    | PartitionContended
    | LockLost
    | TransactionLost
    | PartitionsRefused
    | LeaseReaped
    | ClaimsReclaimed
    | AwaitsTimedOut
    | DeadlineExceeded
    | GarbageCollected
    | ScheduleTicked
    | HeartbeatSent
    | DatabaseUnavailable
    | DatabaseAvailable
    | WorkerStarted
    | UnsafeServer
    | DrainStarted
    | DrainFinished
    | LoopDied
    | ProcessEnded
)

# Called from many threads, and on the hot path: must be quick and must not raise.
Listener: TypeAlias = Callable[[Event], None]
