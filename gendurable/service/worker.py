"""Worker: the loops of one process, built from a configuration and a registry; start, idle, drain."""

import json
import os
import platform
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import groupby
from time import monotonic, sleep

import psycopg
from attrs import evolve

from gendurable.config import Config
from gendurable.core.claim import Claim
from gendurable.core.fsm import definition
from gendurable.core.registry import Registry
from gendurable.db import migrate, store
from gendurable.db.connection import Connection, Database, EngineConnection
from gendurable.db.faults import is_passing
from gendurable.db.limiting import publish
from gendurable.db.operations import give_back
from gendurable.db.rows import Lost, ServerFacts
from gendurable.errors import DatabaseUnavailable, GenDurableError, describe
from gendurable.events import (
    ClaimLost,
    ClaimsReclaimed,
    DrainFinished,
    DrainStarted,
    Listener,
    LoopDied,
    PartitionsRefused,
    ThreadAbandoned,
    TooManyAbandoned,
    UnsafeServer,
    WorkerStarted,
)
from gendurable.observability.metrics import Metrics
from gendurable.runtime.committer import Committer
from gendurable.runtime.executions import Execution, Executions, Timekeeper
from gendurable.runtime.heartbeat import Heartbeat
from gendurable.runtime.inflight import Inflight
from gendurable.runtime.known import KnownLimits
from gendurable.runtime.loop import Loop, Wires
from gendurable.runtime.maintenance import Maintenance, MaintenanceSettings
from gendurable.runtime.partitions import LockConnections, check_session_locks
from gendurable.runtime.poller import Poller, PollSettings
from gendurable.runtime.prefetch import Prefetch
from gendurable.runtime.runner import Runner
from gendurable.runtime.scheduling import Scheduler, plan
from gendurable.runtime.session import Session
from gendurable.runtime.slots import Slots
from gendurable.service.sampling import Sampler

# Waiting for a row that somebody has locked holds up every outcome behind it.
LOCK_TIMEOUT = timedelta(milliseconds=250)
# Beyond a call to the database, how long a loop may take for its round before it is stuck.
LONGEST_ROUND = 60.0
# How long a claim under way may delay the return of the others: what goes back before it, it would claim again.
LAST_CLAIM = 0.1
# How long the last calls may take, and the loops to end, once a drain has no time left.
LAST_CALL = 1.0
RECLAIM_BATCH = 10_000
# Counts whole tables now and then, which is no work for plans that go by an index.
SPARE = "spare"


class Worker:
    """Everything one process runs. Connections: one a queue, committer, heartbeat, maintenance, spare, and the locks'.

    The spare connection is the main thread's: checks at the start, and giving claims back at the end. Between them it
    is the sampler's, where there are metrics.
    """

    def __init__(
        self, worker_id: str, config: Config, registry: Registry, *, emit: Listener, on_death: Callable[[], None]
    ) -> None:
        """Take what the loops are built from; nothing is opened or started yet. `on_death`: it must end."""
        self.config = config
        self.id = worker_id
        self.inflight = Inflight()
        self._shutting_down = threading.Event()
        self._limits = KnownLimits()
        self._executions = Executions(self._shutting_down, self._limits)
        self._emit = emit
        self._registry = registry
        self._planned = plan(config.schedules.values(), registry)
        self._stopping = threading.Event()
        self._on_death = on_death
        self.has_died = False
        self._keyed = True
        self._server_version = ""
        self._wires = Wires(emit, self._died)
        self._database = Database(
            config.dsn,
            config.schema,
            prepare=config.prepare,
            connect_timeout=config.connect_timeout,
            statement_timeout=config.statement_timeout,
            pooled=not config.prepare,
        )
        self._locks = LockConnections(self._connect_lock, config.lock_connection_limit)
        self._spare = self._session(SPARE, lock_timeout=LOCK_TIMEOUT)
        self._committer = Committer(
            self._session("committer", lock_timeout=LOCK_TIMEOUT), self._wires, self._settled, self._carried
        )
        self._timekeeper = Timekeeper(self._executions, self._wires, on_overdue=self._overdue, on_slow=self._relieve)
        self._runner = Runner(
            machines=registry.machines,
            locks=self._locks,
            executions=self._executions,
            emit=emit,
            submit=self._committer.submit,
            on_settled=self._settled,
            on_contended=lambda claim: self.pollers[claim.queue].avoid(claim.partition_key or ""),
            # Closed by then: whoever drains finds it there and gives it back.
            on_unstarted=lambda claim: self.pollers[claim.queue].slots.offer([claim]),
            learn=lambda claim, seconds: self.pollers[claim.queue].prefetch.learn(claim, seconds),
            stopping=self._stopping,
            transactional=any(
                step.transactional for machine in registry for step in definition(type(machine)).steps.values()
            ),
        )
        self.pollers: dict[str, Poller] = {}
        self._loops: list[Loop] = []
        self._sampler: Sampler | None = None

    # From start to end.

    def prepare(self) -> None:
        """Check the server and the schema, publish limits, take back what a dead predecessor held; claims nothing yet.

        DatabaseUnavailable, SchemaMissing or SchemaTooNew if the database will not do.
        """
        try:
            conn = self._spare.conn
            migrate.check_current(conn, self._database.schema)
            facts = store.server_facts(conn).one()
            self._keyed = self._check_server(facts)
            publish(conn, self.config.limiters)
            self._limits.refresh(conn)
            reclaimed = self._reclaim(conn)
        except psycopg.Error as error:
            self._spare.close()
            raise DatabaseUnavailable(f"the database failed at the start: {error}") from error
        except GenDurableError:
            self._spare.close()
            raise
        if reclaimed:
            self._emit(ClaimsReclaimed(reclaimed))
        self._build_loops()
        self._server_version = facts.version if facts else ""

    def start(self) -> None:
        """Begin to work."""
        self._emit(
            WorkerStarted(
                self.id,
                dict(self.config.queues),
                tuple(self._registry.capabilities),
                self._server_version,
                len(migrate.migrations()),
            )
        )
        for loop in self._loops:
            loop.start()
        self._timekeeper.start()

    def is_idle(self) -> bool:
        """Whether nothing that this worker could run is due or running, here or elsewhere."""
        if len(self.inflight):
            return False
        queues, machines = list(self.config.queues), self._registry.capabilities
        try:
            return not store.has_work(self._spare.conn, queues=queues, machines=machines, keyed=self._keyed).one()
        except (psycopg.Error, DatabaseUnavailable) as error:
            self._spare.drop_if_broken(error)
            if is_passing(error):
                return False
            raise

    @property
    def is_draining(self) -> bool:
        """Whether the worker wants to end."""
        return self._shutting_down.is_set()

    def stuck_loops(self) -> list[str]:
        """Return the names of loops that have not turned for too long."""
        limit = stuck_after(self.config)
        return [loop.name for loop in self._loops if loop.overdue() > limit]

    def unready(self) -> list[str]:
        """Say why no work should be expected of this worker: nothing means that it is ready."""
        if not self._loops:
            return ["starting"]
        away = [f"{loop.name}: the database is out of reach" for loop in self._loops if not loop.is_available]
        return [*(["draining"] if self.is_draining else []), *away]

    @property
    def load(self) -> str:
        """How many of the slots are busy, for people."""
        slots = [poller.slots for poller in self.pollers.values()]
        return f"{sum(each.busy for each in slots)} of {sum(each.size for each in slots)} slots busy"

    def show(self, metrics: Metrics) -> None:
        """Tell the metrics where to read what is no event, and begin to sample the rest."""
        for queue, poller in self.pollers.items():
            _show_slots(metrics, queue, poller.slots)
        locks = self._locks
        metrics.watch_pool("locks", idle=lambda: locks.idle, used=lambda: locks.used, waiting=lambda: locks.waiting)
        metrics.watch_databases([loop.name for loop in self._loops])
        self._sampler = Sampler(self._spare, self._wires, metrics.sample)
        self._spare = self._session(SPARE, lock_timeout=LOCK_TIMEOUT)
        self._sampler.start()

    def main_died(self, error: Exception) -> None:
        """Take note of an error that the main thread should not have met: as bad, and as loud, as a loop's death."""
        self._emit(LoopDied("main", describe(error), traceback.format_exc()))
        self.has_died = True

    def drain(self) -> int:
        """Claim no more, give back what was not started, wait for the rest; return how many steps still run."""
        started = monotonic()
        deadline = started + self.config.drain_timeout.total_seconds()
        self._shutting_down.set()
        running = sum(poller.slots.busy for poller in self.pollers.values())
        for poller in self.pollers.values():
            poller.stop()
        if self._sampler is not None:
            self._sampler.stop()
        _join(self.pollers.values(), LAST_CLAIM)
        released = self._give_back_unstarted(deadline)
        self._emit(DrainStarted(running, released, self.config.drain_timeout.total_seconds()))
        self._stopping.set()
        while not self._is_empty() and monotonic() < deadline:
            # A claim that was under way when its poller was told to stop.
            self._give_back_unstarted(deadline)
        self._stop_loops()
        self._executions.close()
        abandoned = len(self.inflight) + self._abandoned
        self._emit(DrainFinished(abandoned, monotonic() - started))
        return abandoned

    def _is_empty(self) -> bool:
        """Whether nothing is held; waits a moment for that. First the pollers: what one is just claiming counts."""
        return all(poller.join(0.05) for poller in self.pollers.values()) and self.inflight.wait_until_empty(0.05)

    def _stop_loops(self) -> None:
        for loop in self._loops:
            loop.stop()
        if _join(self._loops, LAST_CALL):  # else no answers come from the database; our row there expires by itself
            with suppress(psycopg.Error, DatabaseUnavailable):
                store.leave(self._hurried(LAST_CALL), worker=self.id)
        self._spare.close()
        self._locks.close_idle(0)

    def _give_back_unstarted(self, deadline: float) -> int:
        unstarted = [claim for poller in self.pollers.values() for claim in poller.slots.close()]
        released: list[int] = []
        while unstarted:
            try:
                released = give_back(self._hurried(deadline - monotonic()), unstarted)
                break
            except (psycopg.Error, DatabaseUnavailable) as error:
                self._spare.drop_if_broken(error)
                if not is_passing(error):
                    self.main_died(error)
                    break
                if monotonic() > deadline:
                    break
                sleep(0.1)
        self.inflight.remove(unstarted)
        return len(released)

    def _hurried(self, seconds: float) -> Connection:
        """Return the spare connection, for calls that must not take longer: a silent one would hold the end up."""
        conn = self._spare.conn
        conn.patience = max(seconds, LAST_CALL)
        return conn

    # What the loops call.

    def _died(self) -> None:
        self.has_died = True
        self._on_death()

    def _settled(self, claims: Sequence[Claim], woken: frozenset[str]) -> None:
        self.inflight.remove(claims)
        # A limit that has a place again may be that of another queue's rows.
        queues = self.pollers if any(claim.limited for claim in claims) else {claim.queue for claim in claims}
        for queue in queues:
            self.pollers[queue].slot_freed()
        self._due(woken)

    def _carried(self, pairs: Sequence[tuple[Claim, Claim]]) -> None:
        self.inflight.replace(pairs)
        for queue, group in groupby(sorted(pairs, key=_queue), _queue):
            self.pollers[queue].slots.offer([successor for _, successor in group])

    def _lost(self, lost: Sequence[Lost]) -> None:
        for claim in self._executions.lose(lost):
            self._emit(ClaimLost(claim.id, claim.queue, claim.fsm, claim.step))

    def _relieve(self, execution: Execution) -> None:
        def relieve() -> None:
            try:
                self._runner.relieve(execution)
            except BaseException as error:  # noqa: BLE001  what it has taken over nobody else would end
                self._wires.died("relief", error)

        threading.Thread(target=relieve, name=f"relief {execution.claim.queue}", daemon=True).start()

    def _overdue(self, execution: Execution) -> None:
        claim = execution.claim
        self.pollers[claim.queue].slots.hand_over(partial(self._runner.time_out, execution))
        abandoned, limit = self._abandoned, self.config.max_abandoned
        self._emit(ThreadAbandoned(claim.id, claim.queue, claim.fsm, claim.step, abandoned))
        if abandoned > limit and not self.has_died:
            self._emit(TooManyAbandoned(abandoned, limit))
            self._died()

    @property
    def _abandoned(self) -> int:
        return sum(poller.slots.abandoned for poller in self.pollers.values())

    def _due(self, queues: frozenset[str]) -> None:
        for queue in queues:
            poller = self.pollers.get(queue)
            if poller is not None:
                poller.row_due()

    def _beat(self, conn: Connection) -> None:
        store.beat(
            conn,
            worker=self.id,
            name=self.config.name,
            host=platform.node(),
            pid=os.getpid(),
            queues=json.dumps(dict(self.config.queues)),
            machines=self._registry.capabilities,
            lease=self.config.lease,
        )

    # How they are built.

    def _build_loops(self) -> None:
        config = self.config
        for queue, size in config.queues.items():
            settings = PollSettings(
                queue=queue,
                worker=self.id,
                machines=self._registry.capabilities,
                lease=config.lease,
                poll=config.poll.total_seconds(),
                max_poll=config.max_poll.total_seconds(),
                min_demand=config.min_demand,
                keyed=self._keyed,
                has_limits=lambda: bool(self._limits.current),
            )
            prefetch = Prefetch(config.prefetch, size)
            self.pollers[queue] = Poller(
                settings,
                self._session(f"poller {queue}", forgettable=True),
                self._wires,
                slots=Slots(queue, size, self._runner.run, partial(self._together, prefetch)),
                prefetch=prefetch,
                inflight=self.inflight,
            )
        every = config.heartbeat.total_seconds()
        heartbeat = Heartbeat(
            # A beat that gets no answer must be given up while the next one still comes in time.
            self._session("heartbeat", patience=max(every, 1.0), forgettable=True),
            self._wires,
            every=every,
            lease=config.lease,
            held=self.inflight.all,
            on_lost=self._lost,
            beat=self._beat,
        )
        maintenance = Maintenance(
            MaintenanceSettings(
                worker=self.id,
                lease=config.lease,
                sweep=min(config.poll, config.reap).total_seconds(),
                reap=config.reap.total_seconds() if config.reaper else None,
                grace=every,
                retention=config.gc_retention,
                gc_interval=config.gc_interval.total_seconds(),
                gc_batch=config.gc_batch,
            ),
            self._session("maintenance", lock_timeout=LOCK_TIMEOUT),
            self._wires,
            limits=self._limits,
            on_due=self._due,
            also=self._locks.close_idle,
            scheduler=Scheduler(self._planned, self._emit),
        )
        self._loops = [*self.pollers.values(), self._committer, heartbeat, maintenance]

    def _together(self, prefetch: Prefetch, claim: Claim) -> int:
        return 1 if self._runner.is_transactional(claim) else prefetch.together(claim)

    def _session(
        self,
        name: str,
        *,
        patience: float | None = None,
        lock_timeout: timedelta | None = None,
        forgettable: bool = False,
    ) -> Session:
        return Session(
            lambda: self._database.connect(
                f"gendurable {name}",
                patience=patience,
                lock_timeout=lock_timeout,
                steady=name != SPARE,
                forgettable=forgettable,
            )
        )

    def _connect_lock(self) -> EngineConnection:
        direct = self.config.lock_dsn
        database = self._database if direct is None else evolve(self._database, dsn=direct, prepare=True, pooled=False)
        return database.connect("gendurable lock", lock_timeout=LOCK_TIMEOUT, steady=True)

    def _check_server(self, facts: ServerFacts | None) -> bool:
        """Say what is unsafe about the server; return whether session locks hold."""
        if facts is not None and not facts.fsync:
            self._emit(UnsafeServer("fsync"))
        if facts is not None and not facts.synchronous_commit:
            self._emit(UnsafeServer("synchronous_commit"))
        reason = check_session_locks(self._connect_lock)
        if reason is not None:
            self._emit(PartitionsRefused(reason))
        return reason is None

    def _reclaim(self, conn: Connection) -> int:
        remaining = self.config.lease - 2 * self.config.heartbeat
        count = 0
        # Not while somebody holds the whole table, for an index say: the leases run out without us.
        with suppress(psycopg.errors.LockNotAvailable):
            while found := store.reclaim(
                conn, prefix=f"{self.config.name}/", remaining=remaining, limit=RECLAIM_BATCH
            ).all():
                count += len(found)
        return count


def _join(loops: Iterable[Loop], seconds: float) -> bool:
    """Wait for loops that were told to stop, all together no longer than that; tell whether all have ended."""
    deadline = monotonic() + seconds
    return all(loop.join(max(deadline - monotonic(), 0)) for loop in loops)


def stuck_after(config: Config) -> float:
    """Return how many seconds a loop may be overdue: one that waits for the database is not stuck."""
    return LONGEST_ROUND + (config.connect_timeout + config.statement_timeout).total_seconds()


def _queue(pair: tuple[Claim, Claim]) -> str:
    return pair[0].queue


def _show_slots(metrics: Metrics, queue: str, slots: Slots) -> None:
    metrics.watch_queue(
        queue,
        slots=slots.size,
        busy=lambda: slots.busy,
        buffered=lambda: slots.waiting,
        abandoned=lambda: slots.abandoned,
    )
