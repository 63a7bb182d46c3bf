"""The files of deploy/ as tests read them: units, manifests, container files, and the tools that judge them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from gendurable import config
from gendurable.cli.invocation import Invocation
from gendurable.cli.root import PROGRAM, main

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FETCHED = ROOT / ".cache/tools"
UNITS = DEPLOY / "systemd"
BASE = DEPLOY / "k8s/base"
OVERLAYS = ("dev", "prod")

# Every variable that is ours, and the one that names the configuration file.
VARIABLES = {variable for key in config._KEYS for variable in key.variables} | {"GENDURABLE_CONFIG"}

# Where a tool comes from, for whoever reads why a test was skipped.
SOURCES = {
    "promtool": "make deploy-check fetches it where there is apt-get",
    "pgbouncer": "make deploy-check fetches it where there is apt-get",
    "systemd-analyze": "part of systemd",
    "kubectl": "see kubernetes.io",
    "hadolint": "make deploy-check installs it",
    "kubernetes-validate": "make deploy-check installs it",
    "yamllint": "make deploy-check installs it",
}


def find_tool(name: str) -> str:
    """Return the path of a program, or skip the test that needs it."""
    places = [Path(sys.executable).parent, FETCHED / "usr/bin", FETCHED / "usr/sbin"]
    path = os.pathsep.join([*map(str, places), os.environ.get("PATH", ""), "/usr/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"no {name} here ({SOURCES[name]})")
    return found


def fetched_libraries() -> dict[str, str]:
    """Variables with which a fetched program finds the libraries that were fetched with it."""
    folders = ":".join(str(folder) for folder in FETCHED.glob("usr/lib/*-linux-gnu"))
    return {"LD_LIBRARY_PATH": folders} if folders else {}


def run(name: str, *arguments: str | Path, cwd: Path = ROOT, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a tool to its end, with this on its stdin; both of its outputs come as one."""
    return subprocess.run(
        [find_tool(name), *map(str, arguments)],
        cwd=cwd,
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )


# What is in the files.


def unit(name: str) -> dict[str, list[str]]:
    """Read a unit: every directive and its values."""
    directives: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            directives.setdefault(key, []).append(value)
    return directives


def toml(path: Path) -> config.Config:
    """Load a configuration file as a worker would."""
    return config.load(cli={}, env={}, file=tomllib.loads(path.read_text()), file_path=str(path)).config


def documents(*paths: Path) -> list[dict[str, Any]]:
    """Read YAML files."""
    return [document for path in paths for document in yaml.safe_load_all(path.read_text()) if document]


def manifests() -> list[dict[str, Any]]:
    """Every Kubernetes object as it stands in the files, kustomize's own aside."""
    found = documents(*sorted((DEPLOY / "k8s").rglob("*.yaml")))
    return [each for each in found if not each["apiVersion"].startswith("kustomize")]


def manifest(kind: str, name: str) -> dict[str, Any]:
    """The object of this kind and name, as the base or a component defines it."""
    found = [each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return next(each for each in found if each.get("spec", {}).get("selector") is not None or kind != "Deployment")


def pod_specs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods of the base, by the name of what makes them."""
    for each in documents(*sorted(BASE.glob("*.yaml"))):
        spec = each.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template is not None:
            yield each["metadata"]["name"], template["spec"]


def compose() -> dict[str, Any]:
    """Read the services of the compose file."""
    return yaml.safe_load((DEPLOY / "docker/compose.yaml").read_text())["services"]


def dockerfile() -> list[tuple[str, str]]:
    """Read the Dockerfile: instructions and their arguments, lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "docker/Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def last_of(instruction: str) -> str:
    """What the Dockerfile's final image says under an instruction."""
    return [argument for each, argument in dockerfile() if each == instruction][-1]


def image_environment() -> dict[str, str]:
    """The variables of the final image."""
    return dict(part.split("=", 1) for part in shlex.split(last_of("ENV")))


# Our own command line.


def parse(arguments: list[str]) -> Invocation:
    """Parse a command line as `gendurable` does, flags and values, without running it; click's errors if it is bad."""
    invocation = Invocation()
    command: click.Command = main
    name: str | None = PROGRAM
    rest = list(arguments)
    ctx: click.Context | None = None
    while True:
        ctx = command.make_context(name, rest, parent=ctx, obj=invocation)
        if not isinstance(command, click.Group):
            return invocation
        name, found, rest = command.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        assert found is not None
        command = found
