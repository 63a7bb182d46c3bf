"""Numbers for Prometheus: a listener that counts events, and gauges that read the worker's memory when scraped."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.metadata import version as package_version
from platform import python_version
from time import monotonic
from typing import Any, Literal, TypeAlias

from attrs import Factory, frozen
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gendurable import events
from gendurable.events import Event

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

MetricType: TypeAlias = Literal["counter", "gauge", "histogram"]

_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STATEMENT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_SIZE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


@frozen
class Description:
    """One metric as operators see it. Ids, keys and signal names are never labels: they have no bound."""

    name: str
    type: MetricType
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


METRICS = (
    Description(
        "gendurable_steps_total", "counter", ("queue", "fsm", "step", "outcome"), "Outcomes of steps, committed."
    ),
    Description(
        "gendurable_step_errors_total",
        "counter",
        ("queue", "fsm", "step", "kind"),
        "Steps that raised, returned no outcome, took too long, or whose handler failed.",
    ),
    Description(
        "gendurable_step_duration_seconds",
        "histogram",
        ("queue", "fsm", "step"),
        "Time spent in the code of a step, without claim and commit.",
        _STEP_BUCKETS,
    ),
    Description(
        "gendurable_commit_duration_seconds", "histogram", (), "Time taken by one group commit.", _STATEMENT_BUCKETS
    ),
    Description("gendurable_commit_batch_size", "histogram", (), "Outcomes written by one commit.", _SIZE_BUCKETS),
    Description(
        "gendurable_start_delay_seconds",
        "histogram",
        ("queue",),
        "Time from an instance being due to its claim.",
        _STEP_BUCKETS,
    ),
    Description("gendurable_claims_total", "counter", ("queue",), "Instances claimed."),
    Description("gendurable_empty_polls_total", "counter", ("queue",), "Polls that found nothing to claim."),
    Description(
        "gendurable_claim_duration_seconds",
        "histogram",
        ("queue",),
        "Time taken by one claim statement.",
        _STATEMENT_BUCKETS,
    ),
    Description(
        "gendurable_rate_limit_wanted_total", "counter", ("limit",), "Tokens of a rate limit that claims asked for."
    ),
    Description(
        "gendurable_rate_limit_granted_total", "counter", ("limit",), "Tokens of a rate limit taken by claims."
    ),
    Description(
        "gendurable_rate_limit_throttled_total",
        "counter",
        ("limit",),
        "Tokens of a rate limit that were asked for and not there yet.",
    ),
    Description(
        "gendurable_stale_outcomes_total",
        "counter",
        ("queue", "fsm"),
        "Outcomes dropped because the claim had been lost meanwhile.",
    ),
    Description(
        "gendurable_late_outcomes_total",
        "counter",
        ("queue", "fsm"),
        "Outcomes dropped because their step had taken longer than it may.",
    ),
    Description(
        "gendurable_partition_contended_total",
        "counter",
        ("queue",),
        "Claims given back untouched because their partition key was locked.",
    ),
    Description("gendurable_reaped_total", "counter", ("queue",), "Expired claims taken away from their workers."),
    Description("gendurable_await_timeouts_total", "counter", (), "Parked instances woken by their deadline."),
    Description(
        "gendurable_deadlines_exceeded_total", "counter", ("queue",), "Instances ended because of their deadline."
    ),
    Description("gendurable_schedule_ticks_total", "counter", ("schedule",), "Instances inserted by schedules."),
    Description("gendurable_gc_deleted_total", "counter", (), "Ended instances deleted by retention."),
    Description("gendurable_heartbeat_lag_seconds", "gauge", (), "Time since the last heartbeat that succeeded."),
    Description("gendurable_worker_slots", "gauge", ("queue",), "Steps that this worker can run at once."),
    Description("gendurable_worker_busy", "gauge", ("queue",), "Steps that this worker is running."),
    Description(
        "gendurable_abandoned_threads", "gauge", ("queue",), "Threads in steps that took longer than they may."
    ),
    Description("gendurable_worker_buffered", "gauge", ("queue",), "Claimed instances that wait for a slot."),
    Description("gendurable_draining", "gauge", (), "1 while the worker finishes what it runs and claims no more."),
    Description(
        "gendurable_database_up", "gauge", ("pool",), "1 if the last use of these connections reached the database."
    ),
    Description(
        "gendurable_pool_connections", "gauge", ("pool", "state"), "Connections of a pool: idle, used, waiting."
    ),
    Description("gendurable_instances", "gauge", ("queue", "status"), "Instances in the whole database, sampled."),
    Description("gendurable_due_instances", "gauge", ("queue",), "Instances that are due and not claimed, sampled."),
    Description(
        "gendurable_oldest_due_age_seconds", "gauge", ("queue",), "How long the oldest due instance waits, sampled."
    ),
    Description("gendurable_queue_paused", "gauge", ("queue",), "1 while the queue is paused, sampled."),
    Description(
        "gendurable_unserved_instances",
        "gauge",
        ("fsm", "version"),
        "Due instances of a machine that no live worker has, sampled.",
    ),
    Description(
        "gendurable_build_info",
        "gauge",
        ("version", "python", "postgres", "schema_version"),
        "Always 1; the labels tell what runs here.",
    ),
)

_DESCRIPTIONS = {description.name: description for description in METRICS}


@frozen(kw_only=True)
class Sample:
    """What the whole database held at one moment."""

    instances: Mapping[tuple[str, str], int] = Factory(dict)
    due: Mapping[str, int] = Factory(dict)
    oldest_due_age: Mapping[str, float] = Factory(dict)
    paused: Collection[str] = ()
    unserved: Mapping[tuple[str, int], int] = Factory(dict)


class Metrics:
    """A listener that keeps the table above up to date. What is no event, the worker says where to read or hands in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register every metric of the table, and nothing else."""
        self._registry = registry
        make = _Maker(registry)
        self._steps = make.counter("gendurable_steps_total")
        self._step_errors = make.counter("gendurable_step_errors_total")
        self._step_duration = make.histogram("gendurable_step_duration_seconds")
        self._commit_duration = make.histogram("gendurable_commit_duration_seconds")
        self._batch_size = make.histogram("gendurable_commit_batch_size")
        self._start_delay = make.histogram("gendurable_start_delay_seconds")
        self._claims = make.counter("gendurable_claims_total")
        self._empty_polls = make.counter("gendurable_empty_polls_total")
        self._claim_duration = make.histogram("gendurable_claim_duration_seconds")
        self._tokens = {
            what: make.counter(f"gendurable_rate_limit_{what}_total") for what in ("wanted", "granted", "throttled")
        }
        self._stale = make.counter("gendurable_stale_outcomes_total")
        self._late = make.counter("gendurable_late_outcomes_total")
        self._contended = make.counter("gendurable_partition_contended_total")
        self._reaped = make.counter("gendurable_reaped_total")
        self._await_timeouts = make.counter("gendurable_await_timeouts_total")
        self._deadlines_exceeded = make.counter("gendurable_deadlines_exceeded_total")
        self._ticks = make.counter("gendurable_schedule_ticks_total")
        self._gc_deleted = make.counter("gendurable_gc_deleted_total")
        self._heartbeat_lag = make.gauge("gendurable_heartbeat_lag_seconds")
        self._slots = make.gauge("gendurable_worker_slots")
        self._busy = make.gauge("gendurable_worker_busy")
        self._abandoned = make.gauge("gendurable_abandoned_threads")
        self._buffered = make.gauge("gendurable_worker_buffered")
        self._draining = make.gauge("gendurable_draining")
        self._database_up = make.gauge("gendurable_database_up")
        self._pool_connections = make.gauge("gendurable_pool_connections")
        self._build_info = make.gauge("gendurable_build_info")
        self._sampled = _Sampled()
        registry.register(self._sampled)
        self._last_beat = monotonic()
        self._heartbeat_lag.set_function(lambda: monotonic() - self._last_beat)
        # Finding a child among its siblings takes a lock; the hot path looks it up here.
        self._of_step: dict[tuple[str, str, str, str], tuple[Counter, Histogram]] = {}
        self._count: dict[type[Event], Callable[[Any], None]] = {
            events.StepCommitted: self._step_committed,
            events.StepFailed: lambda e: self._step_errors.labels(e.queue, e.fsm, e.step, e.kind).inc(),
            events.BatchCommitted: self._batch_committed,
            events.Claimed: self._claimed,
            events.TokensCounted: self._tokens_counted,
            events.OutcomeStale: lambda e: self._stale.labels(e.queue, e.fsm).inc(),
            events.OutcomeLate: lambda e: self._late.labels(e.queue, e.fsm).inc(),
            events.PartitionContended: lambda e: self._contended.labels(e.queue).inc(),
            events.LeaseReaped: lambda e: self._reaped.labels(e.queue).inc(),
            events.AwaitsTimedOut: lambda e: self._await_timeouts.inc(e.count),
            events.DeadlineExceeded: lambda e: self._deadlines_exceeded.labels(e.queue).inc(),
            events.ScheduleTicked: lambda e: self._ticks.labels(e.schedule).inc(e.count),
            events.GarbageCollected: lambda e: self._gc_deleted.inc(e.count),
            events.HeartbeatSent: self._heartbeat_sent,
            events.DatabaseUnavailable: lambda e: self._database_up.labels(e.pool).set(0),
            events.DatabaseAvailable: lambda e: self._database_up.labels(e.pool).set(1),
            events.WorkerStarted: self._worker_started,
            events.DrainStarted: lambda _: self._draining.set(1),
            events.DrainFinished: lambda _: self._draining.set(0),
        }

    def __call__(self, event: Event) -> None:
        """Count the event."""
        count = self._count.get(type(event))
        if count is not None:
            count(event)

    def watch_queue(
        self,
        queue: str,
        *,
        slots: int,
        busy: Callable[[], int],
        buffered: Callable[[], int],
        abandoned: Callable[[], int],
    ) -> None:
        """Serve a queue: its sizes are read at each scrape, and its counters begin at zero rather than not at all."""
        self._slots.labels(queue).set(slots)
        self._busy.labels(queue).set_function(busy)
        self._buffered.labels(queue).set_function(buffered)
        self._abandoned.labels(queue).set_function(abandoned)
        for counter in (self._claims, self._empty_polls, self._contended, self._reaped, self._deadlines_exceeded):
            counter.labels(queue)
        self._sampled.queues.append(queue)

    def watch_pool(
        self, pool: str, *, idle: Callable[[], int], used: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        """Read the sizes of a pool of connections at each scrape."""
        for state, size in {"idle": idle, "used": used, "waiting": waiting}.items():
            self._pool_connections.labels(pool, state).set_function(size)

    def watch_databases(self, pools: Iterable[str]) -> None:
        """Take these for up until an event says otherwise."""
        for pool in pools:
            self._database_up.labels(pool).set(1)

    def sample(self, sample: Sample | None) -> None:
        """Show what the database holds; None when it could not be asked, since old numbers would pass for new ones."""
        self._sampled.sample = sample

    def render(self) -> bytes:
        """Return the page that Prometheus reads."""
        return generate_latest(_WithoutCreated(self._registry))

    def _step_committed(self, event: events.StepCommitted) -> None:
        key = (event.queue, event.fsm, event.step, event.outcome)
        found = self._of_step.get(key)
        if found is None:
            found = self._steps.labels(*key), self._step_duration.labels(*key[:3])
            self._of_step[key] = found
        steps, duration = found
        steps.inc()
        duration.observe(event.seconds)

    def _batch_committed(self, event: events.BatchCommitted) -> None:
        self._commit_duration.observe(event.seconds)
        self._batch_size.observe(event.size)

    def _claimed(self, event: events.Claimed) -> None:
        self._claim_duration.labels(event.queue).observe(event.seconds)
        if not event.count:
            self._empty_polls.labels(event.queue).inc()
            return
        self._claims.labels(event.queue).inc(event.count)
        start_delay = self._start_delay.labels(event.queue)
        for delay in event.delays:
            start_delay.observe(delay)

    def _tokens_counted(self, event: events.TokensCounted) -> None:
        for what, counter in self._tokens.items():
            counter.labels(event.limit).inc(getattr(event, what))

    def _heartbeat_sent(self, _event: events.HeartbeatSent) -> None:
        self._last_beat = monotonic()

    def _worker_started(self, event: events.WorkerStarted) -> None:
        ours = package_version("gendurable"), python_version()
        self._build_info.labels(*ours, event.server_version, event.schema_version).set(1)


class _Maker:
    """Makes metrics as the table describes them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str) -> Counter:
        made = _DESCRIPTIONS[name]
        return Counter(name, made.help, made.labels, registry=self._registry)

    def gauge(self, name: str) -> Gauge:
        made = _DESCRIPTIONS[name]
        return Gauge(name, made.help, made.labels, registry=self._registry)

    def histogram(self, name: str) -> Histogram:
        made = _DESCRIPTIONS[name]
        return Histogram(name, made.help, made.labels, buckets=made.buckets, registry=self._registry)


class _Sampled(Collector):
    """Gauges that change all at once: a scrape sees one sample or the next, never a mixture."""

    def __init__(self) -> None:
        self.sample: Sample | None = None
        self.queues: list[str] = []

    def describe(self) -> Iterable[Metric]:
        return self._families(None)

    def collect(self) -> Iterable[Metric]:
        return self._families(self.sample)

    def _families(self, sample: Sample | None) -> Iterator[Metric]:
        shown = Sample() if sample is None else sample
        # A served queue without due rows says zero, which an autoscaler takes for an answer; no series it would not.
        none = {} if sample is None else dict.fromkeys(self.queues, 0)
        yield _family("gendurable_instances", shown.instances)
        yield _family("gendurable_due_instances", {(queue,): n for queue, n in (none | {**shown.due}).items()})
        ages = (none | {**shown.oldest_due_age}).items()
        yield _family("gendurable_oldest_due_age_seconds", {(queue,): age for queue, age in ages})
        paused = (none | dict.fromkeys(shown.paused, 1)).items()
        yield _family("gendurable_queue_paused", {(queue,): is_paused for queue, is_paused in paused})
        yield _family("gendurable_unserved_instances", shown.unserved)


def _family(name: str, values: Mapping[tuple[Any, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, _DESCRIPTIONS[name].help, labels=_DESCRIPTIONS[name].labels)
    for labels, value in values.items():
        family.add_metric([str(label) for label in labels], value)
    return family


class _WithoutCreated(Collector):
    """Leaves the times out at which series began.

    In the text format each would be a metric of its own. The library's switch against them is one for the whole process
    and so for the users' metrics too.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            shown = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            shown.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
            yield shown
