"""Whatever deploy/ has run is a command line that this gendurable understands."""

import json
import re
import shlex

import click
import pytest
from deployment import DEPLOY, compose, documents, last_of, parse, pod_specs, unit

ENTRY_POINT = json.loads(last_of("ENTRYPOINT"))


def in_units() -> dict[str, list[str]]:
    return {
        name: shlex.split(unit(name)["ExecStart"][0])
        for name in ("gendurable-worker@.service", "gendurable-gc.service")
    }


def in_images() -> dict[str, list[str]]:
    health = last_of("HEALTHCHECK").partition("CMD ")[2]
    return {"Dockerfile": ENTRY_POINT + json.loads(last_of("CMD")), "HEALTHCHECK": json.loads(health)}


def in_services() -> dict[str, list[str]]:
    return {
        f"compose {name}": ENTRY_POINT + service["command"]
        for name, service in compose().items()
        if service["image"] == "gendurable"
    }


def in_pods() -> dict[str, list[str]]:
    return {
        f"pod of {owner}": ENTRY_POINT + container["args"]
        for owner, pod in pod_specs()
        for container in pod["containers"]
    }


def told_to_people() -> dict[str, list[str]]:
    """Command lines in comments, descriptions and the README: those in backticks, and lines of their own."""
    found: dict[str, list[str]] = {}
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and path.suffix != ".json":
            text = re.sub(r"{{.*?}}", "NAME", path.read_text())
            lines = re.findall(r"`(gendurable [^`]+)`|^[ #-]*(gendurable [a-z]+ .*)$", text, flags=re.MULTILINE)
            for line in filter(None, (quoted or whole for quoted, whole in lines)):
                found[f"{path.name}: {line}"] = shlex.split(line)
    return found


COMMANDS = in_units() | in_images() | in_services() | in_pods() | told_to_people()


@pytest.mark.parametrize("where", COMMANDS)
def test_a_command_line_has_only_commands_flags_and_values_that_there_are(where):
    program, *arguments = COMMANDS[where]
    assert program.rpartition("/")[2] == "gendurable"
    if arguments != ["migrate"]:  # the command as such
        parse(arguments)


def test_the_check_itself_knows_a_bad_command_line_from_a_good_one():
    parse(["worker", "--queues", "default=10"])
    for bad in (["worker", "--queue", "default=10"], ["wrok"], ["migrate", "upp"], ["gc", "--older-than", "30"]):
        with pytest.raises(click.UsageError):
            parse(bad)


def test_every_kind_of_file_has_command_lines_that_are_checked():
    assert set(in_pods()) == {"pod of gendurable-migrate", "pod of gendurable-worker", "pod of gendurable-gc"}
    assert set(in_services()) == {"compose migrate", "compose worker"}
    assert len(told_to_people()) >= 3


def test_only_our_program_runs_in_pods_of_our_image():
    for document in documents(DEPLOY / "k8s/base/deployment.yaml"):
        (container,) = document["spec"]["template"]["spec"]["containers"]
        assert "command" not in container  # which would take the place of the image's entry point
