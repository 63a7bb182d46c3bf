"""What went wrong, as one line on stderr and an exit code."""

import re
import sys
from typing import NamedTuple

import click

from gendurable import errors
from gendurable.cli.output import printable

FAILED, USAGE, NO_TARGET, CONFLICT, NO_DATABASE, TIMED_OUT = 1, 2, 3, 4, 5, 6
INTERRUPTED = 128 + 2


class CommandFailed(errors.GenDurableError):
    """A command did not do what it was asked to, for a reason that is no error of its own class."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        """Say why, and with which code to leave."""
        super().__init__(message)
        self.code = code


_CODES: tuple[tuple[type[Exception], int], ...] = (
    (errors.InvalidInstance, USAGE),
    (errors.Unstorable, USAGE),
    (errors.ConfigError, USAGE),
    (errors.LoadError, USAGE),
    (errors.DefinitionError, USAGE),
    (errors.InstanceNotFound, NO_TARGET),
    (errors.NoTarget, NO_TARGET),
    (errors.NotRetryable, NO_TARGET),
    (errors.NotPaused, NO_TARGET),
    (errors.DuplicateInstance, CONFLICT),
    (errors.DatabaseUnavailable, NO_DATABASE),
    (errors.SchemaMissing, NO_DATABASE),
    (errors.SchemaTooNew, NO_DATABASE),
    (errors.EmbeddedError, NO_DATABASE),
    (errors.WaitTimeout, TIMED_OUT),
    (errors.MigrationBlocked, TIMED_OUT),
)


class Failure(NamedTuple):
    """How a command ends that could not do its work."""

    code: int
    message: str


def judge(error: BaseException) -> Failure:
    """Return the exit code for an error, and what to say."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx is not None else "gendurable"
        return Failure(USAGE, f"{error.format_message().rstrip('.')}; see '{path} --help'")
    if isinstance(error, click.ClickException):
        return Failure(FAILED, error.format_message())
    if isinstance(error, CommandFailed):
        return Failure(error.code, str(error))
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Failure(code, str(error))
    if isinstance(error, errors.GenDurableError):
        return Failure(FAILED, str(error))
    return _judge_driver(error) or _judge_system(error)


# What the server's own errors mean here, by the beginning of their SQLSTATE.
_STATES: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (
        ("42P01", "3F000", "42703", "42704"),
        NO_DATABASE,
        "the tables are missing or too old: run `gendurable migrate up` ({})",
    ),
    (("42501",), FAILED, "{}; grant this role the right, see `gendurable migrate sql --grants ROLE`"),
    (("57014",), TIMED_OUT, "{}; raise statement_timeout, or ask for less"),
    (("08", "53", "57"), NO_DATABASE, "the database is unavailable: {}"),
    (("25",), FAILED, "the database takes no writes now: {}; connect to the primary"),
    (("",), FAILED, "the database refused: {}"),
)


def _judge_driver(error: BaseException) -> Failure | None:
    """Judge an error of psycopg; the driver is not imported for it."""
    if isinstance(error, ImportError) and "pq wrapper" in str(error):
        return Failure(FAILED, "psycopg finds no libpq on this machine: pip install 'gendurable[binary]'")
    psycopg = sys.modules.get("psycopg")
    if psycopg is None or not isinstance(error, psycopg.Error):
        return None
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        return Failure(NO_DATABASE, f"the database is unavailable: {error}")
    code, text = next((code, text) for begin, code, text in _STATES if (error.sqlstate or "").startswith(begin))
    return Failure(code, text.format(error))


def _judge_system(error: BaseException) -> Failure:
    if isinstance(error, OSError):
        return Failure(FAILED, f"{errors.describe(error)}; see what the system complains about")
    return Failure(FAILED, f"this should not happen: {errors.describe(error)}; run it again with --debug and report it")


def one_line(text: str) -> str:
    """Return a message as a single line that a terminal can show."""
    return printable(re.sub(r"\s+", " ", text).strip())
