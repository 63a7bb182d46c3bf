"""The options that every command takes, before and after its name, and those of the worker."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gendurable.cli.failures import USAGE
from gendurable.cli.invocation import Invocation
from gendurable.cli.parameters import Limited

F = TypeVar("F", bound=Callable[..., Any])


def _keep_setting(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is not None and value != () and param.name is not None:
        invocation = ctx.ensure_object(Invocation)
        invocation.settings[param.name] = value
        invocation.flags[param.name] = param.opts[0]


def _keep_config_file(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Invocation).config_file = value


def _keep_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Invocation).json |= value


def _keep_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Invocation).debug |= value


def setting(flag: str, help: str, *, name: str | None = None, **others: Any) -> click.Option:  # noqa: A002
    """Return an option that is one layer of a setting; what it says is judged together with the other layers."""
    declared = [flag] if name is None else [flag, name]
    # No automatic variable: the environment is a layer of its own.
    return click.Option(
        declared, help=help, expose_value=False, callback=_keep_setting, allow_from_autoenv=False, **others
    )


def global_options() -> list[click.Option]:
    """Return new options that any command and group takes."""
    return [
        setting("--dsn", "The database: a URL or libpq's key=value form.", metavar="DSN"),
        setting("--schema", "The schema that holds the tables.", metavar="NAME"),
        click.Option(
            ["--config"],
            help="The configuration file, else $GENDURABLE_CONFIG, else ./gendurable.toml.",
            metavar="FILE",
            expose_value=False,
            callback=_keep_config_file,
            allow_from_autoenv=False,
        ),
        click.Option(["--json"], is_flag=True, help="Print JSON.", expose_value=False, callback=_keep_json),
        click.Option(
            ["--debug"], is_flag=True, help="Show the traceback of an error.", expose_value=False, callback=_keep_debug
        ),
        setting("--log-level", "debug, info, warning or error.", metavar="LEVEL"),
        setting("--log-format", "auto, console or json.", metavar="FORMAT"),
    ]


def machine_options() -> list[click.Option]:
    """Return the option that says which machines are loaded."""
    return [
        setting(
            "--fsms",
            "Modules or registries to load: shop.machines, shop.machines:registry. Commas, or repeat it.",
            multiple=True,
            metavar="PATH",
        )
    ]


def worker_options() -> list[click.Option]:
    """Return the settings of a worker."""
    return [
        setting("--queues", "Queues and how many steps of each run at once.", multiple=True, metavar="NAME=N,…"),
        *machine_options(),
        setting("--lease", "How long a claim holds without a heartbeat.", metavar="TIME"),
        setting("--heartbeat", "How often claims are prolonged.", metavar="TIME"),
        setting("--poll", "How often an idle queue is looked at.", metavar="TIME"),
        setting("--max-poll", "How rarely a long idle queue is looked at.", metavar="TIME"),
        setting("--reap", "How often expired claims are looked for.", metavar="TIME"),
        setting("--no-reaper", "Leave expired claims to other workers.", name="reaper", flag_value="off"),
        setting("--no-gc", "Delete nothing, whatever the file says.", name="gc_retention", flag_value="off"),
        setting("--drain-timeout", "How long running steps may finish when stopping.", metavar="TIME"),
        setting("--prefetch", "Claims held ready beyond those that run: a number, or auto.", metavar="N"),
        setting("--min-demand", "Free places that make a claim worthwhile.", metavar="N"),
        setting("--processes", "How many processes, each with the given queues.", metavar="N"),
        setting("--http", "Where to serve /livez, /readyz and /metrics.", metavar="HOST:PORT"),
        setting("--name", "The worker's name; a random part is added.", metavar="NAME"),
    ]


def takes(make_options: Callable[[], list[click.Option]]) -> Callable[[F], F]:
    """Give a command options that are kept for the configuration and not handed to its function."""

    def decorate(function: F) -> F:
        params = function.__dict__.setdefault("__click_params__", [])
        params.extend(reversed(make_options()))  # click turns them round again
        return function

    return decorate


class _WithGlobalOptions(click.Command):
    """A command that takes the global options and shows them under a heading of their own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.global_options = global_options()
        self.params = [*self.params, *self.global_options]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "Global options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                sections["Global options" if param in self.global_options else "Options"].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Command(_WithGlobalOptions):
    """A command of ours."""

    def invoke(self, ctx: click.Context) -> Any:
        """Check what depends on the configuration, now that all of it is known, and run."""
        for param in self.params:
            value = ctx.params.get(param.name or "")
            if isinstance(param.type, Limited) and value is not None:
                _ = ctx.ensure_object(Invocation).loaded
                param.type.check_limits(value, param, ctx)
        return super().invoke(ctx)


class Group(_WithGlobalOptions, click.Group):
    """A command with subcommands."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  click's signature
        """Name the subcommands in the order in which they were written."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without arguments, explain, and leave as after any other mistake (click's versions differ in that)."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(USAGE)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options, then the subcommands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
