"""Rules, dashboard and adapter speak of metrics that there are, by labels that these have."""

import importlib.util
import json
import re
from typing import get_args

import pytest
from deployment import DEPLOY, documents, manifest, run
from prometheus_client import CollectorRegistry

from gendurable import events
from gendurable.core import transition
from gendurable.observability.metrics import METRICS, Metrics, Sample

RULES = DEPLOY / "prometheus/rules.yml"
LABELS = {metric.name: set(metric.labels) for metric in METRICS}
HISTOGRAMS = {metric.name for metric in METRICS if metric.type == "histogram"}
# What Prometheus adds to every series, and what it knows of a target by itself.
ADDED = {"job", "instance"}
NOT_OURS = {"up"}
SUFFIXES = ("_bucket", "_sum", "_count")


def alerts() -> dict[str, dict[str, str]]:
    return {rule["alert"]: rule for group in documents(RULES)[0]["groups"] for rule in group["rules"]}


def dashboard_queries() -> list[tuple[str, str]]:
    panels = json.loads((DEPLOY / "grafana/gendurable.json").read_text())["panels"]
    return [(target["expr"], target["legendFormat"]) for panel in panels for target in panel.get("targets", ())]


def metric_of(name: str) -> str:
    """Return the metric that a series belongs to: histograms have three kinds."""
    base = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
    return base if base in HISTOGRAMS else name


def metrics_in(expression: str) -> set[str]:
    return {metric_of(name) for name in re.findall(r"\bgendurable_[a-z_]+|\bup(?={)", expression)}


def labels_in(expression: str) -> set[str]:
    grouped = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    matched = re.findall(r"([a-z_]+)\s*=~?", " ".join(re.findall(r"{([^}]*)}", expression)))
    return {label.strip() for group in grouped for label in group.split(",")} | set(matched)


def check(expression: str, shown: str = "") -> None:
    """Fail unless the expression names our metrics, and labels that one of them has."""
    names = metrics_in(expression)
    assert names, expression
    assert names <= set(LABELS) | NOT_OURS, expression
    known = set().union(*(LABELS.get(name, set()) for name in names)) | ADDED
    known |= {"le"} if "_bucket" in expression else set()
    assert labels_in(expression) <= known, expression
    # What a legend or a message shows must have survived the outermost aggregation.
    outermost = re.search(r"\bby \(([^)]*)\)", expression)
    left = known if outermost is None else set(outermost[1].split(", "))
    assert set(re.findall(r"{{\s*(?:\$labels\.)?([a-z_]+)\s*}}", shown)) <= left, (expression, shown)


@pytest.mark.parametrize("name", alerts())
def test_an_alert_goes_by_metrics_and_labels_that_there_are(name):
    rule = alerts()[name]
    check(rule["expr"], " ".join(rule["annotations"].values()))


@pytest.mark.parametrize(("expression", "legend"), dashboard_queries())
def test_a_picture_shows_metrics_by_labels_that_there_are(expression, legend):
    check(expression.replace("$__rate_interval", "5m"), legend)


def test_the_check_itself_knows_a_metric_from_a_misspelt_one():
    check("sum by (queue) (gendurable_claims_total) > 0", "{{queue}}")
    bad = {
        "sum by (queue) (gendurable_claim_total) > 0": "",
        "sum by (fsm) (gendurable_claims_total) > 0": "",
        'gendurable_claims_total{step="ship"} > 0': "",
        "sum by (job) (gendurable_claims_total) > 0": "{{queue}}",
        "gendurable_claims_total_bucket > 0": "",
    }
    for expression, shown in bad.items():
        with pytest.raises(AssertionError):
            check(expression, shown)


def test_the_dashboard_shows_every_metric():
    assert set().union(*(metrics_in(expression) for expression, _ in dashboard_queries())) == set(LABELS)


def test_the_dashboard_is_what_its_script_makes_today():
    path = DEPLOY / "grafana/make_dashboard.py"
    spec = importlib.util.spec_from_file_location("make_dashboard", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.OUTPUT.read_text() == script.text(), f"run it again: {path}"


def test_pictures_do_not_lie_on_each_other_and_have_names_of_their_own():
    panels = json.loads((DEPLOY / "grafana/gendurable.json").read_text())["panels"]
    taken = [
        (place["x"] + dx, place["y"] + dy)
        for place in (panel["gridPos"] for panel in panels)
        for dx in range(place["w"])
        for dy in range(place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)


def test_values_of_labels_that_rules_ask_for_are_ones_that_there_are():
    kinds = {each.kind for each in get_args(transition.Transition) if isinstance(each.kind, str)} | {"done", "stop"}
    everything = " ".join([rule["expr"] for rule in alerts().values()] + [query for query, _ in dashboard_queries()])
    asked = {part for value in re.findall(r'outcome=~?"([^"]*)"', everything) for part in value.split("|")}
    assert asked
    assert asked <= kinds
    assert set(re.findall(r'state=~?"([^"]*)"', everything)) == {"waiting"}


def test_every_alert_has_a_rule_test_in_which_it_fires():
    tests = documents(RULES.with_name("rules_test.yml"))[0]["tests"]
    expected = [
        sample["labels"] for test in tests for each in test["promql_expr_test"] for sample in each["exp_samples"]
    ]
    fired = {name for labels in expected for name in re.findall(r'alertname="(\w+)"', labels)}
    assert fired == set(alerts())


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    for name, rule in alerts().items():
        assert name.startswith("Gendurable")
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}


def test_promtool_accepts_rules_and_scrape_configuration():
    checked = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert checked.returncode == 0, checked.stdout
    checked = run("promtool", "check", "config", DEPLOY / "prometheus/scrape.yml")
    assert checked.returncode == 0, checked.stdout


def test_the_rules_pass_their_tests():
    tested = run("promtool", "test", "rules", "rules_test.yml", cwd=RULES.parent)
    assert tested.returncode == 0, tested.stdout


def test_a_rule_that_never_fires_would_be_seen(tmp_path):
    (tmp_path / "rules.yml").write_text(RULES.read_text().replace("> 300", "> 300000"))
    (tmp_path / "rules_test.yml").write_text(RULES.with_name("rules_test.yml").read_text())
    tested = run("promtool", "test", "rules", "rules_test.yml", cwd=tmp_path)
    assert tested.returncode != 0
    assert "GendurableQueueLagging" in tested.stdout


def test_promtool_accepts_the_page_that_workers_serve():
    metrics = Metrics(CollectorRegistry())
    metrics(events.StepCommitted(7, "default", "checkout", 1, "ship", "next", 0, 0.02))
    metrics(events.WorkerStarted("w-1", {"default": 10}, ("checkout@1",), "18.1", 3))
    metrics.sample(Sample(due={"default": 3}))
    checked = run("promtool", "check", "metrics", given=metrics.render().decode())
    assert (checked.returncode, checked.stdout) == (0, "")


def test_the_adapter_hands_out_the_metric_that_the_autoscaler_asks_for():
    (rule,) = documents(DEPLOY / "prometheus/adapter.yml")[0]["externalRules"]
    (asked,) = manifest("HorizontalPodAutoscaler", "gendurable-worker")["spec"]["metrics"]
    metric = asked["external"]["metric"]
    assert metric["name"] == rule["seriesQuery"]
    check(rule["metricsQuery"].replace("<<.LabelMatchers>>", ""))
    assert set(metric["selector"]["matchLabels"]) <= LABELS[metric["name"]]
