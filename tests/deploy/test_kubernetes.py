from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from deployment import BASE, DEPLOY, OVERLAYS, manifest, manifests, pod_specs, run

from gendurable import FSM, Client, Context, Done, Outcome, migrate, step

KUBERNETES = "1.32.0"
OF_OTHERS = {"ScaledObject", "TriggerAuthentication", "ServiceMonitor"}


def build(overlay: str) -> list[dict[str, Any]]:
    """Build an overlay as `kubectl apply -k` would; needs no cluster."""
    built = run("kubectl", "kustomize", DEPLOY / "k8s/overlays" / overlay)
    assert built.returncode == 0, built.stdout
    return list(yaml.safe_load_all(built.stdout))


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def validate(path: Path) -> tuple[int, str]:
    validated = run("kubernetes-validate", "-k", KUBERNETES, "--strict", "--quiet", "--no-warn", path)
    return validated.returncode, validated.stdout


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_builds_and_every_field_of_it_is_known_to_kubernetes(overlay, tmp_path):
    path = tmp_path / "built.yaml"
    path.write_text(yaml.safe_dump_all(build(overlay)))
    assert validate(path) == (0, "")


def test_every_manifest_is_valid_on_its_own_also_those_that_no_overlay_uses(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all([each for each in manifests() if "patch" not in each and not is_patch(each)]))
    assert validate(path) == (0, "")


def is_patch(each: dict[str, Any]) -> bool:
    return each["kind"] == "Deployment" and "selector" not in each["spec"]


def test_a_misspelt_field_would_be_seen(tmp_path):
    deployment = manifest("Deployment", "gendurable-worker")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 75
    path = tmp_path / "misspelt.yaml"
    path.write_text(yaml.safe_dump(deployment))
    code, said = validate(path)
    assert code == 1
    assert "terminationGracePeriod" in said


def test_yamllint_has_nothing_to_say():
    linted = run("yamllint", "--strict", "-c", DEPLOY / ".yamllint.yaml", DEPLOY)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_base_lists_every_manifest_that_lies_in_it():
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in BASE.glob("*.yaml") if path.name != "kustomization.yaml")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_selects_pods_selects_the_workers_and_only_those(overlay):
    objects = build(overlay)
    pods = {
        each["metadata"]["name"]: each["spec"].get("jobTemplate", {}).get("spec", each["spec"])["template"]
        for kind in ("Deployment", "Job", "CronJob")
        for each in of_kind(objects, kind)
    }

    def selected(selector: dict[str, str]) -> set[str]:
        return {name for name, pod in pods.items() if selector.items() <= pod["metadata"]["labels"].items()}

    (service,) = [each for each in of_kind(objects, "Service") if each["metadata"]["name"] == "gendurable-worker"]
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    (policy,) = of_kind(objects, "NetworkPolicy")
    (worker,) = [each for each in of_kind(objects, "Deployment") if each["metadata"]["name"] == "gendurable-worker"]
    assert selected(service["spec"]["selector"]) == {"gendurable-worker"}
    assert selected(budget["spec"]["selector"]["matchLabels"]) == {"gendurable-worker"}
    assert selected(worker["spec"]["selector"]["matchLabels"]) == {"gendurable-worker"}
    ours = {"gendurable-worker", "gendurable-migrate", "gendurable-gc"}
    assert selected(policy["spec"]["podSelector"]["matchLabels"]) == ours
    for monitor in of_kind(objects, "ServiceMonitor"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        # The alert on workers that do not answer goes by this name.
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "gendurable"


def test_the_policy_lets_names_and_the_database_through():
    policy = manifest("NetworkPolicy", "gendurable")["spec"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 5432}


@pytest.mark.parametrize("owner", dict(pod_specs()))
def test_a_pod_may_do_nothing_to_its_node(owner):
    pod = dict(pod_specs())[owner]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False  # variables of a service named gendurable are not meant for us
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "cpu" not in container["resources"]["limits"]
        assert container["resources"]["limits"]["memory"]


def test_only_the_migration_has_the_owners_rights():
    keys = {
        owner: each["valueFrom"]["secretKeyRef"]["key"]
        for owner, pod in pod_specs()
        for each in pod["containers"][0]["env"]
        if each["name"] == "GENDURABLE_DSN"
    }
    assert keys == {
        "gendurable-migrate": "owner-dsn",
        "gendurable-worker": "worker-dsn",
        "gendurable-gc": "worker-dsn",
    }


def test_the_playground_makes_the_secret_that_the_base_asks_for():
    objects = build("dev")
    (secret,) = of_kind(objects, "Secret")
    assert {"worker-dsn", "owner-dsn"} <= set(secret["data"])
    names = {
        each["valueFrom"]["secretKeyRef"]["name"]
        for deployment in of_kind(objects, "Deployment")
        for each in deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        if "secretKeyRef" in each.get("valueFrom", {})
    }
    assert names == {secret["metadata"]["name"]}


def test_an_autoscaler_is_not_contradicted_by_a_number_of_replicas():
    objects = build("prod")
    (worker,) = of_kind(objects, "Deployment")
    assert of_kind(objects, "ScaledObject")
    assert "replicas" not in worker["spec"]


@pytest.mark.parametrize(
    ("kind", "window"),
    [("ScaledObject", ("advanced", "horizontalPodAutoscalerConfig")), ("HorizontalPodAutoscaler", ())],
)
def test_both_autoscalers_scale_the_workers_and_take_their_time_to_shrink(kind, window):
    spec = manifest(kind, "gendurable-worker")["spec"]
    assert spec["scaleTargetRef"]["name"] == "gendurable-worker"
    behaviour = spec
    for key in window:
        behaviour = behaviour[key]
    drain = manifest("Deployment", "gendurable-worker")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert behaviour["behavior"]["scaleDown"]["stabilizationWindowSeconds"] > drain


class Waiting(FSM[dict[str, int]], name="deploy.waiting"):
    @step
    def start(self, ctx: Context[dict[str, int]]) -> Outcome[dict[str, int]]:
        return Done({})


def test_the_autoscalers_query_counts_due_instances_and_no_others(fresh_database):
    (trigger,) = manifest("ScaledObject", "gendurable-worker")["spec"]["triggers"]
    migrate.up(fresh_database, schema="gendurable")
    with Client(fresh_database, schema="gendurable") as client:
        client.insert_many([Waiting.new({}) for _ in range(3)])
        client.insert(Waiting.new({}, schedule_in=3600))
        client.insert(Waiting.new({}, queue="other"))
    with psycopg.connect(fresh_database) as conn:
        assert conn.execute(trigger["metadata"]["query"]).fetchall() == [(3,)]
        conn.execute("insert into gendurable.paused_queues values ('default')")
        assert conn.execute(trigger["metadata"]["query"]).fetchall() == [(0,)], "more workers would not help it"
