"""Settings, variables, ports and times: each is said in several files, and all must say the same."""

import http.client
import re
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from deployment import (
    BASE,
    DEPLOY,
    UNITS,
    VARIABLES,
    compose,
    documents,
    image_environment,
    last_of,
    manifest,
    pod_specs,
    toml,
    unit,
)

from gendurable import config
from gendurable.cli.failures import NO_DATABASE, USAGE
from gendurable.cli.upkeep import DEFAULT_PROBE, PROBE_SECONDS
from gendurable.core.duration import parse_duration
from gendurable.service.probes import Probes
from gendurable.service.processes import LEAVING

EXAMPLE = UNITS / "example.toml"
MOUNTED = BASE / "gendurable.toml"
PORT = int(DEFAULT_PROBE.rpartition(":")[2])
SECOND = timedelta(seconds=1)


def assignments(path: Path) -> dict[str, str]:
    """Variables that a text sets, commented-out ones included."""
    return dict(re.findall(r"^[;#\s]*([A-Z_]+)=(\S+)", path.read_text(), flags=re.MULTILINE))


def container_environments() -> Iterator[dict[str, str]]:
    for _, pod in pod_specs():
        for container in pod["containers"]:
            yield {each["name"]: each.get("value", "") for each in container["env"]}


def environments() -> dict[str, dict[str, str]]:
    found = {
        "example.env": assignments(UNITS / "example.env"),
        "pgbouncer.ini": assignments(DEPLOY / "pgbouncer/pgbouncer.ini"),
        "Dockerfile": image_environment(),
        "worker unit": dict(each.split("=", 1) for each in unit("gendurable-worker@.service")["Environment"]),
    }
    found |= {f"pod {index}": each for index, each in enumerate(container_environments())}
    return found | {f"compose {name}": service["environment"] for name, service in compose().items()}


@pytest.mark.parametrize("path", [EXAMPLE, MOUNTED], ids=lambda path: path.name)
def test_an_example_of_a_configuration_is_one(path):
    loaded = toml(path)
    assert loaded.fsms
    assert loaded.queues


@pytest.mark.parametrize("path", [EXAMPLE, MOUNTED], ids=lambda path: path.name)
def test_the_machines_of_an_example_can_be_loaded_and_their_queues_are_served(path):
    from gendurable.core.fsm import definition
    from gendurable.core.registry import load

    loaded = toml(path)
    assert {definition(type(machine)).queue for machine in load(loaded.fsms)} <= set(loaded.queues)


@pytest.mark.parametrize("where", environments())
def test_a_variable_that_sounds_like_ours_is_ours_and_its_value_is_good(where):
    ours = {name: value for name, value in environments()[where].items() if name.startswith("GENDURABLE_")}
    assert set(ours) <= VARIABLES
    config.load(cli={}, env={name: value for name, value in ours.items() if "%" not in value})


def test_a_password_stands_in_no_file_that_everybody_reads():
    for path in (EXAMPLE, MOUNTED):
        assert not {"dsn", "lock_dsn"} & set(tomllib.loads(path.read_text()))


def test_what_a_file_is_called_agrees_with_where_it_is_looked_for():
    (folder,) = {mount["mountPath"] for _, pod in pod_specs() for mount in pod["containers"][0]["volumeMounts"]} - {
        "/tmp"
    }
    (path,) = {each["GENDURABLE_CONFIG"] for each in container_environments()}
    assert Path(path) == Path(folder, MOUNTED.name)
    (generator,) = documents(BASE / "kustomization.yaml")[0]["configMapGenerator"]
    assert generator["files"] == [MOUNTED.name]
    names = {
        volume["configMap"]["name"] for _, pod in pod_specs() for volume in pod["volumes"] if "configMap" in volume
    }
    assert names == {generator["name"]}


def test_the_port_of_the_probes_is_one_everywhere():
    (container,) = manifest("Deployment", "gendurable-worker")["spec"]["template"]["spec"]["containers"]
    policy = manifest("NetworkPolicy", "gendurable")["spec"]
    scrape = documents(DEPLOY / "prometheus/scrape.yml")[0]["scrape_configs"][0]["static_configs"][0]["targets"]
    said = {
        "example.toml": [toml(EXAMPLE).http_address[1]],
        "gendurable.toml": [toml(MOUNTED).http_address[1]],
        "image": [int(image_environment()["GENDURABLE_HTTP"].rpartition(":")[2]), int(last_of("EXPOSE"))],
        "compose": [int(port) for port in compose()["worker"]["ports"][0].split(":")[1:]],
        "pod": [port["containerPort"] for port in container["ports"]],
        "service": [port["port"] for port in manifest("Service", "gendurable-worker")["spec"]["ports"]],
        "policy": [port["port"] for rule in policy["ingress"] for port in rule["ports"]],
        "scrape": [int(target.rpartition(":")[2]) for target in scrape],
    }
    assert {name: set(ports) for name, ports in said.items()} == {name: {PORT} for name in said}


def test_named_ports_are_those_of_the_pod():
    (container,) = manifest("Deployment", "gendurable-worker")["spec"]["template"]["spec"]["containers"]
    names = {port["name"] for port in container["ports"]}
    probes = {container[kind]["httpGet"]["port"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    service = {port["targetPort"] for port in manifest("Service", "gendurable-worker")["spec"]["ports"]}
    monitor = {each["port"] for each in manifest("ServiceMonitor", "gendurable-worker")["spec"]["endpoints"]}
    assert probes | service | monitor == names


def test_every_page_that_is_asked_for_is_served():
    (container,) = manifest("Deployment", "gendurable-worker")["spec"]["template"]["spec"]["containers"]
    asked = {container[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    asked |= {each["path"] for each in manifest("ServiceMonitor", "gendurable-worker")["spec"]["endpoints"]}
    served = Probes("127.0.0.1", 0, alive=list, ready=list, metrics=lambda: b"")
    served.start()
    try:
        for path in asked:
            client = http.client.HTTPConnection(served.address, timeout=20)
            client.request("GET", path)
            assert client.getresponse().status == 200, path
            client.close()
    finally:
        served.stop()


# Times.


def test_probes_have_five_seconds_since_a_busy_worker_answers_late():
    (container,) = manifest("Deployment", "gendurable-worker")["spec"]["template"]["spec"]["containers"]
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[kind]["timeoutSeconds"] == PROBE_SECONDS == 5
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"  # the one that an outage leaves alone


def test_the_image_waits_longer_for_health_than_health_waits_for_the_worker():
    timeout = re.search(r"--timeout=(\w+)", last_of("HEALTHCHECK"))
    assert timeout is not None
    assert parse_duration(timeout[1]) > PROBE_SECONDS * SECOND


def test_a_pod_outlives_its_drain_by_fifteen_seconds():
    pod = manifest("Deployment", "gendurable-worker")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] * SECOND == toml(MOUNTED).drain_timeout + 15 * SECOND


def test_a_container_outlives_its_drain_by_fifteen_seconds():
    worker = compose()["worker"]
    drain = parse_duration(worker["environment"]["GENDURABLE_DRAIN_TIMEOUT"])
    assert parse_duration(worker["stop_grace_period"]) == drain + 15 * SECOND


def test_systemd_waits_for_the_drain_and_for_a_supervisor_to_collect_its_processes():
    (stop,) = unit("gendurable-worker@.service")["TimeoutStopSec"]
    assert int(stop) * SECOND == toml(EXAMPLE).drain_timeout + 30 * SECOND
    assert int(stop) * SECOND >= toml(EXAMPLE).drain_timeout + LEAVING * SECOND


def test_systemd_starts_a_worker_again_unless_its_configuration_is_bad():
    worker = unit("gendurable-worker@.service")
    assert worker["Restart"] == ["on-failure"]
    assert worker["RestartPreventExitStatus"] == [str(USAGE)]
    assert NO_DATABASE != USAGE
    assert worker["StartLimitIntervalSec"] == ["0"]  # however long the database is away


def test_an_alert_comes_at_half_a_lease_and_before_a_drain_is_given_up_for_hung():
    rules = {rule["alert"]: rule for rule in documents(DEPLOY / "prometheus/rules.yml")[0]["groups"][0]["rules"]}
    late = float(rules["GendurableHeartbeatLate"]["expr"].rpartition(">")[2])
    for path in (EXAMPLE, MOUNTED):
        assert late * SECOND == toml(path).lease / 2
        assert toml(path).heartbeat < late * SECOND
    overdue = parse_duration(rules["GendurableDrainOverdue"]["for"])
    assert overdue > toml(EXAMPLE).drain_timeout + LEAVING * SECOND
