"""Write the reference parts of README.md anew from the code. `make reference` runs this."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from gendurable import config
from gendurable.cli.root import COMMANDS, Root
from gendurable.observability.metrics import METRICS

README = Path(__file__).parents[2] / "README.md"
PART = re.compile(r"(<!-- reference: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def commands() -> Iterator[str]:
    yield "| command | does | options |"
    yield "|---|---|---|"
    root = Root("gendurable")
    ctx = click.Context(root)
    for name in COMMANDS:
        command = root.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            for inner in command.list_commands(ctx):
                yield from _command(f"{name} {inner}", command.get_command(ctx, inner))
        else:
            yield from _command(name, command)


def _command(name: str, command: click.Command | None) -> Iterator[str]:
    assert command is not None
    ctx = click.Context(command)
    arguments = " ".join(each.make_metavar(ctx) for each in command.params if isinstance(each, click.Argument))
    general = {option for each in Root("gendurable").params for option in each.opts}
    options = [
        max(each.opts, key=len)
        for each in command.params
        if isinstance(each, click.Option) and not set(each.opts) & general and "--help" not in each.opts
    ]
    does = (command.help or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    usage = f"{name} {arguments}".strip().replace("|", "\\|")
    yield f"| `{usage}` | {does} | {' '.join(f'`{option}`' for option in options)} |"


def settings() -> Iterator[str]:
    yield "| key | default | variable |"
    yield "|---|---|---|"
    shown = config.load(cli={}, env={}).settings
    for key in config._KEYS:
        default = "the host's name" if key.name == "name" else _plain(shown[key.name].value)
        yield f"| `{key.places[0]}` | {default} | {' '.join(f'`{each}`' for each in key.variables)} |"


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "`" + ",".join(f"{name}={each}" for name, each in value.items()) + "`"
    return "" if value in (None, "", []) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def metrics() -> Iterator[str]:
    yield "| metric | type | labels | |"
    yield "|---|---|---|---|"
    for each in METRICS:
        yield f"| `{each.name}` | {each.type} | {', '.join(each.labels)} | {each.help} |"


PARTS: dict[str, Callable[[], Iterator[str]]] = {"commands": commands, "settings": settings, "metrics": metrics}


def renewed(text: str) -> str:
    """Return the text with its reference parts as the code has them."""
    return PART.sub(lambda part: part[1] + "\n" + "\n".join(PARTS[part[2]]()) + "\n\n" + part[3], text)


if __name__ == "__main__":
    README.write_text(renewed(README.read_text()))
    sys.stdout.write(f"wrote {README}\n")
