"""Writes gendurable.json, the Grafana dashboard: every metric that workers export, and nothing else.

.venv/bin/python deploy/grafana/make_dashboard.py
"""

import json
from pathlib import Path
from typing import Any

from attrs import frozen

from gendurable.observability.metrics import METRICS

OUTPUT = Path(__file__).with_name("gendurable.json")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, PANELS_A_ROW = 8, 8, 3
QUANTILES = (0.5, 0.95, 0.99)
LABELS = {metric.name: metric.labels for metric in METRICS}


@frozen
class Query:
    """One expression and how its series are called."""

    expression: str
    legend: str


@frozen
class Panel:
    """One picture."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    stacked: bool = False
    about: str = ""


# Expressions. A metric that has a queue is shown for the chosen ones; one that there is not is a KeyError here.


def series(name: str, suffix: str = "", **wanted: str) -> str:
    """Return the selector of a metric, as chosen at the top of the dashboard."""
    chosen = {"job": "$job"} | ({"queue": "$queue"} if "queue" in LABELS[name] else {})
    matchers = [f'{label}=~"{value}"' for label, value in {**chosen, **wanted}.items()]
    return f"{name}{suffix}{{{', '.join(matchers)}}}"


def rate(name: str, *by: str, **wanted: str) -> str:
    """Return how often a second something is counted, by these labels."""
    return f"sum by ({', '.join(by)}) (rate({series(name, **wanted)}[$__rate_interval]))"


def quantile(name: str, q: float, *by: str) -> str:
    """Return what all but a part of the observations stay below."""
    buckets = f"sum by ({', '.join(('le', *by))}) (rate({series(name, '_bucket')}[$__rate_interval]))"
    return f"histogram_quantile({q}, {buckets})"


def mean(name: str) -> str:
    """Return the average observation."""
    total, count = (f"sum(rate({series(name, each)}[$__rate_interval]))" for each in ("_sum", "_count"))
    return f"{total} / {count}"


def sampled(name: str, *by: str) -> str:
    """Return a number about the whole database, of which every worker exports the same sample."""
    once = f"max by ({', '.join(LABELS[name])}) ({series(name)})"
    return once if by == LABELS[name] else f"sum by ({', '.join(by)}) ({once})"


def gauge(name: str, *by: str, **wanted: str) -> str:
    """Return the sum over all workers, by these labels."""
    return f"sum by ({', '.join(by)}) ({series(name, **wanted)})"


def quantiles(name: str) -> tuple[Query, ...]:
    """Return the usual quantiles of a histogram, over everything."""
    return tuple(Query(quantile(name, q), f"p{100 * q:g}") for q in QUANTILES)


ROWS: dict[str, list[Panel]] = {
    "Flow": [
        Panel(
            "Steps by outcome", (Query(rate("gendurable_steps_total", "outcome"), "{{outcome}}"),), "ops", stacked=True
        ),
        Panel("Steps by machine", (Query(rate("gendurable_steps_total", "fsm"), "{{fsm}}"),), "ops", stacked=True),
        Panel("Instances by status", (Query(sampled("gendurable_instances", "status"), "{{status}}"),), stacked=True),
        Panel(
            "Due and not claimed",
            (Query(sampled("gendurable_due_instances", "queue"), "{{queue}}"),),
            about="What autoscaling goes by.",
        ),
        Panel("Paused queues", (Query(sampled("gendurable_queue_paused", "queue"), "{{queue}}"),)),
        Panel("Claims", (Query(rate("gendurable_claims_total", "queue"), "{{queue}}"),), "ops"),
        Panel("Polls that found nothing", (Query(rate("gendurable_empty_polls_total", "queue"), "{{queue}}"),), "ops"),
    ],
    "Limits": [
        Panel("Tokens wanted", (Query(rate("gendurable_rate_limit_wanted_total", "limit"), "{{limit}}"),), "ops"),
        Panel("Tokens granted", (Query(rate("gendurable_rate_limit_granted_total", "limit"), "{{limit}}"),), "ops"),
        Panel(
            "Tokens not there yet",
            (Query(rate("gendurable_rate_limit_throttled_total", "limit"), "{{limit}}"),),
            "ops",
            about="Instances that must wait for them.",
        ),
    ],
    "Delay": [
        Panel(
            "Oldest due instance",
            (Query(sampled("gendurable_oldest_due_age_seconds", "queue"), "{{queue}}"),),
            "s",
        ),
        Panel(
            "From due to claimed, p95",
            (Query(quantile("gendurable_start_delay_seconds", 0.95, "queue"), "{{queue}}"),),
            "s",
            about="What users feel of the queue.",
        ),
        Panel(
            "Time in a step's code, p95",
            (Query(quantile("gendurable_step_duration_seconds", 0.95, "fsm", "step"), "{{fsm}} {{step}}"),),
            "s",
        ),
    ],
    "Failures": [
        Panel(
            "Instances that ended failed",
            (Query(rate("gendurable_steps_total", "fsm", outcome="stop"), "{{fsm}}"),),
            "ops",
            stacked=True,
        ),
        Panel(
            "Errors in steps",
            (Query(rate("gendurable_step_errors_total", "fsm", "step", "kind"), "{{fsm}} {{step}} {{kind}}"),),
            "ops",
            stacked=True,
        ),
        Panel(
            "Due instances that no worker has the code for",
            (Query(sampled("gendurable_unserved_instances", "fsm", "version"), "{{fsm}} version {{version}}"),),
        ),
        Panel(
            "Claims taken from their workers",
            (Query(rate("gendurable_reaped_total", "queue"), "{{queue}}"),),
            "ops",
            about="Workers that died or did not send heartbeats; these steps run again.",
        ),
        Panel(
            "Outcomes that came too late",
            (
                Query(rate("gendurable_stale_outcomes_total", "fsm"), "{{fsm}}, claim lost"),
                Query(rate("gendurable_late_outcomes_total", "fsm"), "{{fsm}}, past its timeout"),
            ),
            "ops",
        ),
        Panel(
            "Ticks of schedules", (Query(rate("gendurable_schedule_ticks_total", "schedule"), "{{schedule}}"),), "ops"
        ),
        Panel("Awaits that timed out", (Query(rate("gendurable_await_timeouts_total", "job"), "{{job}}"),), "ops"),
        Panel(
            "Instances past their deadline",
            (Query(rate("gendurable_deadlines_exceeded_total", "queue"), "{{queue}}"),),
            "ops",
            about="Ended failed, whatever they were doing.",
        ),
    ],
    "Workers": [
        Panel(
            "Slots",
            (
                Query(gauge("gendurable_worker_busy", "queue"), "{{queue}} busy"),
                Query(gauge("gendurable_worker_slots", "queue"), "{{queue}} slots"),
                Query(gauge("gendurable_abandoned_threads", "queue"), "{{queue}} abandoned threads"),
            ),
        ),
        Panel("Claimed and waiting for a slot", (Query(gauge("gendurable_worker_buffered", "queue"), "{{queue}}"),)),
        Panel(
            "Claims given back: partition key busy",
            (Query(rate("gendurable_partition_contended_total", "queue"), "{{queue}}"),),
            "ops",
        ),
        Panel(
            "Since the last heartbeat",
            (Query(series("gendurable_heartbeat_lag_seconds"), "{{instance}}"),),
            "s",
            about="At a whole lease the worker loses its claims.",
        ),
        Panel("Draining", (Query(gauge("gendurable_draining", "instance"), "{{instance}}"),), stacked=True),
        Panel(
            "What runs",
            (
                Query(
                    "count by (version, python, postgres, schema_version) (" + series("gendurable_build_info") + ")",
                    "{{version}}, Python {{python}}, Postgres {{postgres}}, schema {{schema_version}}",
                ),
            ),
            stacked=True,
        ),
    ],
    "Database": [
        Panel("A commit", quantiles("gendurable_commit_duration_seconds"), "s"),
        Panel(
            "Outcomes in a commit",
            (Query(mean("gendurable_commit_batch_size"), "mean"), *quantiles("gendurable_commit_batch_size")),
        ),
        Panel(
            "A claim, p95",
            (Query(quantile("gendurable_claim_duration_seconds", 0.95, "queue"), "{{queue}}"),),
            "s",
        ),
        Panel(
            "In reach",
            (Query("min by (instance, pool) (" + series("gendurable_database_up") + ")", "{{instance}} {{pool}}"),),
            about="0 while the last use of a connection failed.",
        ),
        Panel(
            "Connections of pools",
            (Query(gauge("gendurable_pool_connections", "pool", "state"), "{{pool}} {{state}}"),),
            stacked=True,
        ),
        Panel("Old instances deleted", (Query(rate("gendurable_gc_deleted_total", "job"), "{{job}}"),), "ops"),
    ],
}


# The JSON that Grafana wants.


def dashboard() -> dict[str, Any]:
    """Return the whole dashboard."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        for index, panel in enumerate(row):
            line, column = divmod(index, PANELS_A_ROW)
            place = {"x": column * WIDTH, "y": top + 1 + line * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_picture(panel)})
        top += 1 + HEIGHT * -(-len(row) // PANELS_A_ROW)
    return {
        "uid": "gendurable",
        "title": "gendurable",
        "description": "Durable execution on Postgres: flow, delay, failures, workers, database.",
        "tags": ["gendurable"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "",
        "templating": {"list": [_datasource(), *(_choice(name) for name in ("job", "queue"))]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _picture(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking, "showPoints": "never"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _choice(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "label": label.capitalize(),
        "datasource": DATASOURCE,
        "query": {"query": f"label_values(gendurable_worker_slots, {label})", "refId": label},
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(text())
