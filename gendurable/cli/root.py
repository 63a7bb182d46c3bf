"""The root of the command line: finds commands lazily, takes global options, and turns errors into exit codes."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any, TextIO

import click

from gendurable.cli.failures import FAILED, INTERRUPTED, judge, one_line
from gendurable.cli.invocation import Invocation
from gendurable.cli.options import Group

PROGRAM = "gendurable"
COMPLETE = "_GENDURABLE_COMPLETE"

# In the order of the help: module and function, imported when they are asked for.
COMMANDS = {
    "worker": "worker:worker",
    "dev": "dev:dev",
    "migrate": "migrations:migrate",
    "insert": "instances:insert",
    "signal": "instances:signal",
    "wait": "instances:wait",
    "get": "looking:get",
    "list": "looking:list_instances",
    "status": "looking:status",
    "retry": "changing:retry",
    "cancel": "changing:cancel",
    "pause": "upkeep:pause",
    "resume": "upkeep:resume",
    "gc": "upkeep:gc",
    "schedules": "looking:schedules",
    "fsms": "settings:fsms",
    "config": "settings:config",
    "health": "upkeep:health",
    "doctor": "doctor:doctor",
    "bench": "bench:bench",
    "completion": "settings:completion",
}


class Root(Group):
    """The command `gendurable`."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """Name the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(f"gendurable.cli.{module}"), function)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; one that is misspelt is named."""
        if args[0] in COMMANDS or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        import difflib

        close = difflib.get_close_matches(args[0], COMMANDS, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise click.UsageError(f"No command {args[0]!r}{hint}", ctx)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,  # noqa: ARG002  under whatever name it was started
        complete_var: str | None = None,  # noqa: ARG002
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and leave with its exit code."""
        given = list(sys.argv[1:] if args is None else args)
        if instruction := os.environ.get(COMPLETE):
            from click.shell_completion import shell_complete

            sys.exit(shell_complete(self, {}, PROGRAM, COMPLETE, instruction))
        invocation = Invocation()
        invocation.arguments = tuple(given)
        invocation.commands = tuple(COMMANDS)

        def run() -> Any:
            with self.make_context(PROGRAM, given, obj=invocation, **extra) as ctx:
                return self.invoke(ctx)

        return run() if not standalone_mode else sys.exit(_guarded(run, invocation))


def _guarded(run: Callable[[], Any], invocation: Invocation) -> int:
    """Run a command; whatever happens, return an exit code and say no more than one line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # In a locale that lacks a letter it is escaped; a program must not fail over its own output.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _code(run)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        code = 0  # whoever read our output has left, as `head` does: nothing went wrong, and there is nobody to tell
    except KeyboardInterrupt:
        code = _tell("interrupted", INTERRUPTED)
    except (click.Abort, EOFError):  # asked whether to go on, somebody did not want to
        code = _tell("nothing was done", FAILED)
    except Exception as error:  # noqa: BLE001  the last place to catch it
        code = _failed(error, invocation)
    _settle(sys.stdout)
    _settle(sys.stderr)
    return code


def _code(run: Callable[[], Any]) -> int:
    try:
        code = run()
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    return code if isinstance(code, int) else 0


def _failed(error: Exception, invocation: Invocation) -> int:
    failure = judge(error)
    if invocation.debug and not isinstance(error, click.ClickException):
        with suppress(OSError):
            click.echo(_without_secrets("".join(traceback.format_exception(error)), invocation), err=True)
    return _tell(_without_secrets(failure.message, invocation), failure.code)


def _tell(message: str, code: int) -> int:
    with suppress(OSError):
        click.echo(f"{PROGRAM}: {one_line(message)}", err=True)
    return code


def _settle(stream: TextIO | None) -> None:
    """See to it that Python does not complain, when it ends, about output that nobody takes."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# Shorter ones would blot out half of a message, and are no secret.
_SHORTEST_SECRET = 3


def _without_secrets(text: str, invocation: Invocation) -> str:
    """Take out what a DSN of any layer calls a password: the driver repeats parts of a DSN that it cannot read."""
    from gendurable.masking import MASK, secrets_in

    dsns = [value for name, value in os.environ.items() if name in {"DATABASE_URL", "GENDURABLE_DSN"}]
    dsns += [str(value) for name, value in invocation.settings.items() if name.endswith("dsn")]
    if "loaded" in invocation.__dict__:
        dsns += [invocation.config.dsn, invocation.config.lock_dsn or ""]
    for secret in (secret for dsn in dsns for secret in secrets_in(dsn)):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, MASK)
    return text


@click.group(
    cls=Root,
    name=PROGRAM,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "GENDURABLE",
        "max_content_width": 100,
    },
)
@click.version_option(package_name="gendurable", message="%(prog)s %(version)s")
def main() -> None:
    """Durable execution on Postgres: state machines, one row per instance."""
