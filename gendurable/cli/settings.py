"""Commands about this program itself: fsms, config, completion."""

from typing import Any

import click

from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command, Group, machine_options, takes, worker_options
from gendurable.cli.output import echo, emit, note, table, to_json


@click.command(cls=Command)
@takes(machine_options)
@pass_invocation
def fsms(invocation: Invocation, /) -> None:
    """Show the machines that the configured modules hold."""
    from gendurable.core.fsm import definition
    from gendurable.core.registry import load
    from gendurable.errors import ConfigError

    if not invocation.config.fsms:
        raise ConfigError("fsms: no machines are configured; say where they are, as in --fsms shop.machines")
    found = []
    for machine in load(invocation.config.fsms):
        mine, cls = definition(type(machine)), type(machine)
        found.append(
            {
                "fsm": mine.name,
                "fsm_version": mine.version,
                "queue": mine.queue,
                "initial": mine.initial,
                "steps": list(mine.steps),
                "state": mine.codec.state_class.__qualname__,
                "class": f"{cls.__module__}.{cls.__qualname__}",
            }
        )
    found.sort(key=lambda each: (each["fsm"], each["fsm_version"]))
    if invocation.json:
        emit(found)
    else:
        columns = ["fsm", "version", "queue", "initial", "steps", "state", "class"]
        rows = [[", ".join(value) if isinstance(value, list) else value for value in each.values()] for each in found]
        table(columns, rows, right=["version"])


@click.group(cls=Group)
def config() -> None:
    """Look at the configuration."""


@config.command()
@takes(worker_options)
@click.option("--check", is_flag=True, help="Print nothing; only judge.")
@pass_invocation
def show(invocation: Invocation, /, check: bool) -> None:
    """Show every setting and the layer it came from."""
    settings = invocation.loaded.settings
    if check:
        note("the configuration is good")
    elif invocation.json:
        emit({name: {"value": each.value, "source": each.source} for name, each in settings.items()})
    else:
        table(
            ["setting", "value", "source"], [(name, _shown(each.value), each.source) for name, each in settings.items()]
        )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else to_json(value)


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    To be put where the shell looks for it, for bash ~/.local/share/bash-completion/completions/gendurable
    """
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    from gendurable.cli.root import COMPLETE, PROGRAM, main

    completers = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    echo(completers[shell](main, {}, PROGRAM, COMPLETE).source())
