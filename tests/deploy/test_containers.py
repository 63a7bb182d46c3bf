import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from deployment import DEPLOY, ROOT, compose, dockerfile, documents, last_of, manifest, pod_specs, run

DOCKERFILE = DEPLOY / "docker/Dockerfile"


def copied() -> list[str]:
    """What the image is built from: files and folders of the checkout."""
    copies = [argument.split() for instruction, argument in dockerfile() if instruction == "COPY"]
    return [source for copy in copies if not copy[0].startswith("--from") for source in copy[:-1]]


def test_hadolint_has_nothing_to_say():
    linted = run("hadolint", "--no-color", DOCKERFILE)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_what_is_copied_is_enough_to_build_the_package_with_its_sql(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    for name in copied():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*command, "--disable-pip-version-check", "--wheel-dir", tmp_path, source],
        env={**os.environ, "PIP_NO_CACHE_DIR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"gendurable/cli/root.py", "gendurable/sql/statements/claim.sql", "gendurable/demo/machines.py"} <= names


def test_what_is_copied_and_nothing_else_is_sent_to_the_builder():
    lines = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    assert {pattern[1:] for pattern in patterns if pattern.startswith("!")} == set(copied())
    assert any(fnmatch("gendurable/cli/__pycache__", pattern.replace("**/", "*/")) for pattern in patterns[1:])


def test_the_image_runs_as_a_number_that_is_not_root_and_the_pods_as_the_same():
    user, group = map(int, last_of("USER").split(":"))
    assert user
    assert group
    for _, pod in pod_specs():
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (user, group)


def test_the_image_is_stopped_by_what_drains_a_worker():
    assert last_of("STOPSIGNAL") == "SIGTERM"
    assert last_of("ENTRYPOINT").startswith("[")  # no shell between the signal and us


@pytest.mark.parametrize(
    "image",
    [argument.split()[0] for instruction, argument in dockerfile() if instruction == "FROM"]
    + [service["image"] for service in compose().values() if "build" not in service]
    + [
        container["image"]
        for document in documents(DEPLOY / "k8s/overlays/dev/postgres.yaml")
        if document["kind"] == "Deployment"
        for container in document["spec"]["template"]["spec"]["containers"]
    ],
)
def test_an_image_of_others_has_a_tag_that_stays_what_it_is(image):
    assert re.search(r":[0-9][0-9.]*-[a-z]", image)


def test_the_image_has_a_python_that_is_supported():
    classifiers = re.findall(r"Python :: (3\.[0-9]+)", (ROOT / "pyproject.toml").read_text())
    pythons = {re.findall(r"python:([0-9.]+)", argument)[0] for kind, argument in dockerfile() if kind == "FROM"}
    assert len(pythons) == 1
    assert pythons <= set(classifiers)


def test_a_worker_starts_only_after_the_migration_and_that_only_with_a_database():
    services = compose()
    assert services["worker"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert services["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    same = {"GENDURABLE_DSN", "GENDURABLE_SCHEMA"}
    for name in same:
        assert services["worker"]["environment"][name] == services["migrate"]["environment"][name]


def test_compose_builds_the_image_that_is_checked_here():
    build = compose()["worker"]["build"]
    context = Path(DEPLOY / "docker", build["context"]).resolve()
    assert context == ROOT
    assert context / build["dockerfile"] == DOCKERFILE
    (image,) = {container["image"] for _, pod in pod_specs() for container in pod["containers"]}
    assert image == compose()["worker"]["image"]
    assert manifest("Deployment", "gendurable-worker")
