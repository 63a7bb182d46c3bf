import re
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from gendurable import events
from gendurable.events import Event
from gendurable.observability.metrics import METRICS, Metrics, Sample

# What operators' dashboards and alerts are built on; to change a line here is to break theirs.
TABLE = """
gendurable_steps_total counter queue fsm step outcome
gendurable_step_errors_total counter queue fsm step kind
gendurable_step_duration_seconds histogram queue fsm step
gendurable_commit_duration_seconds histogram
gendurable_commit_batch_size histogram
gendurable_start_delay_seconds histogram queue
gendurable_claims_total counter queue
gendurable_empty_polls_total counter queue
gendurable_claim_duration_seconds histogram queue
gendurable_rate_limit_wanted_total counter limit
gendurable_rate_limit_granted_total counter limit
gendurable_rate_limit_throttled_total counter limit
gendurable_stale_outcomes_total counter queue fsm
gendurable_late_outcomes_total counter queue fsm
gendurable_partition_contended_total counter queue
gendurable_reaped_total counter queue
gendurable_await_timeouts_total counter
gendurable_deadlines_exceeded_total counter queue
gendurable_schedule_ticks_total counter schedule
gendurable_gc_deleted_total counter
gendurable_heartbeat_lag_seconds gauge
gendurable_worker_slots gauge queue
gendurable_worker_busy gauge queue
gendurable_abandoned_threads gauge queue
gendurable_worker_buffered gauge queue
gendurable_draining gauge
gendurable_database_up gauge pool
gendurable_pool_connections gauge pool state
gendurable_instances gauge queue status
gendurable_due_instances gauge queue
gendurable_oldest_due_age_seconds gauge queue
gendurable_queue_paused gauge queue
gendurable_unserved_instances gauge fsm version
gendurable_build_info gauge version python postgres schema_version
"""

EVENTS: list[Event] = [
    events.StepCommitted(7, "default", "checkout", 1, "ship", "next", 0, 0.02),
    events.OutcomeStale(7, "default", "checkout", "ship", "next"),
    events.ClaimLost(7, "default", "checkout", "ship"),
    events.StepFailed(7, "default", "checkout", "ship", 0, "exception", "ValueError: no"),
    events.ThreadAbandoned(7, "default", "checkout", "ship", 2),
    events.TooManyAbandoned(11, 10),
    events.OutcomeLate(7, "default", "checkout", "ship", "next", 31.0),
    events.StepCrashed(7, "default", "checkout", "ship", "SystemExit"),
    events.Claimed("default", 2, 0.01, (0.5, 1.5)),
    events.Claimed("default", 0, 0.01),
    events.TokensCounted("stripe", 12, 10, 2),
    events.BatchCommitted(3, 0.004),
    events.OutcomeDeferred(7, "checkout", "ship"),
    events.PartitionContended(7, "default", "checkout"),
    events.LockLost(7, "default", "checkout", "ship", "gone"),
    events.TransactionLost(7, "default", "checkout", "ship", "gone"),
    events.PartitionsRefused("pooler"),
    events.LeaseReaped(7, "default", "checkout", "ship", 1, ended=False),
    events.ClaimsReclaimed(4),
    events.AwaitsTimedOut(5),
    events.DeadlineExceeded(7, "default", "checkout", "ship", "2030-01-01 00:00:00+00"),
    events.GarbageCollected(6),
    events.ScheduleTicked("nightly", "report", "2031-01-01T03:00:00+00:00", 1, None),
    events.HeartbeatSent(3, 3),
    events.DatabaseUnavailable("heartbeat", "refused", 0.1),
    events.DatabaseAvailable("committer"),
    events.WorkerStarted("w-1", {"default": 10}, ("checkout/1",), "18.1", 3),
    events.UnsafeServer("fsync"),
    events.DrainStarted(1, 2, 5.0),
    events.DrainFinished(0, 0.5),
    events.LoopDied("committer", "KeyError", "Traceback"),
    events.ProcessEnded(4711, -9, 1.0),
]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


@pytest.fixture
def busy(metrics) -> Metrics:
    """Metrics in which every series of the table exists."""
    for event in EVENTS:
        metrics(event)
    metrics.watch_queue("default", slots=10, busy=lambda: 4, buffered=lambda: 2, abandoned=lambda: 3)
    metrics.watch_pool("locks", idle=lambda: 1, used=lambda: 2, waiting=lambda: 3)
    metrics.watch_databases(["maintenance"])
    metrics.sample(
        Sample(
            instances={("default", "runnable"): 8},
            due={"default": 5},
            oldest_due_age={"default": 2.5},
            paused=["mail"],
            unserved={("checkout", 2): 3},
        )
    )
    return metrics


def page(metrics: Metrics) -> dict[str, Metric]:
    """Read the page as Prometheus would; families under the names of the table."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {f"{family.name}_total" if family.type == "counter" else family.name: family for family in families}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Read one number off the page."""
    for family in page(metrics).values():
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def test_the_metrics_are_those_of_the_table():
    described = [" ".join([metric.name, metric.type, *metric.labels]) for metric in METRICS]
    assert sorted(described) == sorted(TABLE.strip().splitlines())


def test_the_page_holds_the_table_and_nothing_else(busy):
    families = page(busy)
    assert {name: family.type for name, family in families.items()} == {metric.name: metric.type for metric in METRICS}
    for metric in METRICS:
        family = families[metric.name]
        assert family.documentation == metric.help != ""
        assert family.samples, f"{metric.name} has no series"
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)


def test_an_idle_page_names_every_metric_too(metrics):
    assert set(page(metrics)) == {metric.name for metric in METRICS}


def test_names_and_units_follow_the_conventions():
    for metric in METRICS:
        assert re.fullmatch(r"gendurable(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert metric.help.endswith(".")
        assert (metric.buckets != ()) == (metric.type == "histogram")


def test_nothing_without_bounds_is_a_label():
    labels = {label for metric in METRICS for label in metric.labels}
    assert not labels & {"id", "instance", "key", "partition_key", "unique_key", "signal", "worker", "error"}


def test_every_event_is_taken(metrics):
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    for event in EVENTS:
        metrics(event)


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("gendurable_steps_total", {"queue": "default", "fsm": "checkout", "step": "ship", "outcome": "next"}, 1),
        (
            "gendurable_step_errors_total",
            {"queue": "default", "fsm": "checkout", "step": "ship", "kind": "exception"},
            1,
        ),
        ("gendurable_step_duration_seconds_sum", {"queue": "default", "fsm": "checkout", "step": "ship"}, 0.02),
        ("gendurable_commit_duration_seconds_sum", {}, 0.004),
        ("gendurable_commit_batch_size_sum", {}, 3),
        ("gendurable_start_delay_seconds_count", {"queue": "default"}, 2),
        ("gendurable_start_delay_seconds_sum", {"queue": "default"}, 2),
        ("gendurable_claims_total", {"queue": "default"}, 2),
        ("gendurable_empty_polls_total", {"queue": "default"}, 1),
        ("gendurable_claim_duration_seconds_count", {"queue": "default"}, 2),
        ("gendurable_rate_limit_wanted_total", {"limit": "stripe"}, 12),
        ("gendurable_rate_limit_granted_total", {"limit": "stripe"}, 10),
        ("gendurable_rate_limit_throttled_total", {"limit": "stripe"}, 2),
        ("gendurable_stale_outcomes_total", {"queue": "default", "fsm": "checkout"}, 1),
        ("gendurable_late_outcomes_total", {"queue": "default", "fsm": "checkout"}, 1),
        ("gendurable_partition_contended_total", {"queue": "default"}, 1),
        ("gendurable_reaped_total", {"queue": "default"}, 1),
        ("gendurable_await_timeouts_total", {}, 5),
        ("gendurable_deadlines_exceeded_total", {"queue": "default"}, 1),
        ("gendurable_gc_deleted_total", {}, 6),
        ("gendurable_worker_slots", {"queue": "default"}, 10),
        ("gendurable_worker_busy", {"queue": "default"}, 4),
        ("gendurable_worker_buffered", {"queue": "default"}, 2),
        ("gendurable_abandoned_threads", {"queue": "default"}, 3),
        ("gendurable_draining", {}, 0),
        ("gendurable_database_up", {"pool": "heartbeat"}, 0),
        ("gendurable_database_up", {"pool": "committer"}, 1),
        ("gendurable_database_up", {"pool": "maintenance"}, 1),
        ("gendurable_pool_connections", {"pool": "locks", "state": "idle"}, 1),
        ("gendurable_pool_connections", {"pool": "locks", "state": "used"}, 2),
        ("gendurable_pool_connections", {"pool": "locks", "state": "waiting"}, 3),
        ("gendurable_instances", {"queue": "default", "status": "runnable"}, 8),
        ("gendurable_due_instances", {"queue": "default"}, 5),
        ("gendurable_oldest_due_age_seconds", {"queue": "default"}, 2.5),
        ("gendurable_unserved_instances", {"fsm": "checkout", "version": "2"}, 3),
    ],
)
def test_what_happened_is_on_the_page(busy, name, labels, expected):
    assert value(busy, name, **labels) == expected


def test_the_build_is_described_by_labels(busy):
    (sample,) = page(busy)["gendurable_build_info"].samples
    assert sample.value == 1
    assert sample.labels["postgres"] == "18.1"
    assert sample.labels["schema_version"] == "3"


def test_a_drain_shows_while_it_lasts(metrics):
    metrics(events.DrainStarted(1, 0, 5.0))
    assert value(metrics, "gendurable_draining") == 1
    metrics(events.DrainFinished(0, 1.0))
    assert value(metrics, "gendurable_draining") == 0


def test_the_lag_of_the_heartbeat_grows_until_the_next_one(metrics, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("gendurable.observability.metrics.monotonic", lambda: now)
    metrics(events.HeartbeatSent(3, 3))
    now += 12.5
    assert value(metrics, "gendurable_heartbeat_lag_seconds") == 12.5
    metrics(events.HeartbeatSent(0, 0))
    assert value(metrics, "gendurable_heartbeat_lag_seconds") == 0


def test_sizes_are_read_at_the_scrape(metrics):
    size = 1
    metrics.watch_queue("default", slots=10, busy=lambda: size, buffered=lambda: 0, abandoned=lambda: 0)
    assert value(metrics, "gendurable_worker_busy", queue="default") == 1
    size = 7
    assert value(metrics, "gendurable_worker_busy", queue="default") == 7


def test_the_counters_of_a_served_queue_begin_at_zero(metrics):
    metrics.watch_queue("default", slots=10, busy=lambda: 0, buffered=lambda: 0, abandoned=lambda: 0)
    assert value(metrics, "gendurable_claims_total", queue="default") == 0
    assert value(metrics, "gendurable_reaped_total", queue="default") == 0


def test_a_sample_replaces_the_one_before_it_as_a_whole(metrics):
    metrics.sample(Sample(instances={("old", "done"): 1}, due={"old": 1}))
    metrics.sample(Sample(instances={("new", "done"): 2}))
    assert value(metrics, "gendurable_instances", queue="old", status="done") is None
    assert value(metrics, "gendurable_instances", queue="new", status="done") == 2
    assert value(metrics, "gendurable_due_instances", queue="old") is None


def test_a_served_queue_without_due_rows_says_so(metrics):
    metrics.watch_queue("default", slots=10, busy=lambda: 0, buffered=lambda: 0, abandoned=lambda: 0)
    metrics.sample(Sample())
    assert value(metrics, "gendurable_due_instances", queue="default") == 0
    assert value(metrics, "gendurable_oldest_due_age_seconds", queue="default") == 0


def test_without_a_sample_nothing_is_claimed_about_the_database(metrics):
    metrics.watch_queue("default", slots=10, busy=lambda: 0, buffered=lambda: 0, abandoned=lambda: 0)
    metrics.sample(Sample(due={"default": 5}))
    metrics.sample(None)
    assert value(metrics, "gendurable_due_instances", queue="default") is None


def test_labels_may_hold_any_text(metrics):
    name = 'a"b\\c\nd{}é'
    metrics(events.StepCommitted(7, name, name, 1, "ship", "next", 0, 0.1))
    assert value(metrics, "gendurable_steps_total", queue=name, fsm=name, step="ship", outcome="next") == 1


def test_the_times_of_creation_are_left_out_here_and_left_alone_elsewhere(busy):
    theirs = CollectorRegistry()
    prometheus_client.Counter("orders", "Orders.", registry=theirs).inc()
    assert b"_created" not in busy.render()
    assert b"orders_created" in prometheus_client.generate_latest(theirs)


def test_two_workers_in_one_process_count_apart():
    first, second = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    first(events.AwaitsTimedOut(5))
    assert value(second, "gendurable_await_timeouts_total") == 0


def test_threads_do_not_lose_counts(metrics):
    def work(_: int) -> None:
        for _ in range(500):
            metrics(EVENTS[0])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    labels = {"queue": "default", "fsm": "checkout", "step": "ship"}
    assert value(metrics, "gendurable_steps_total", outcome="next", **labels) == 4000
    assert value(metrics, "gendurable_step_duration_seconds_count", **labels) == 4000
