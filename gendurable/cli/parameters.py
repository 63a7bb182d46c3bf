"""What arguments may look like; each is judged before a connection is opened."""

import json
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic only since click 8.4

# Far beyond the limit of what is stored, far below what would fill the memory.
LARGEST_INPUT = 64 * 1024 * 1024


def _shown(value: object) -> str:
    from gendurable.core.limits import show

    return show(value)


class InstanceId(ParamType):
    """A positive 64-bit integer."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the id."""
        if not re.fullmatch(r"[0-9]{1,19}", str(value)) or not 1 <= int(value) < 2**63:
            self.fail(f"{_shown(value)} is no instance id: give a positive 64-bit integer", param, ctx)
        return int(value)


class Duration(ParamType):
    """A number with a unit."""

    name = "time"

    def __init__(self, *, positive: bool = False) -> None:
        """With `positive`, nothing is too short."""
        self.positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Return the duration."""
        from gendurable.core.duration import parse_duration

        if isinstance(value, timedelta):
            return value
        try:
            duration = parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self.positive and not duration:
            self.fail(f"{_shown(value)} is not longer than nothing: give more", param, ctx)
        return duration


class Instant(ParamType):
    """An ISO 8601 time with its zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the instant."""
        try:
            instant = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{_shown(value)} is no time: write 2031-12-24T18:00:00Z", param, ctx)
        if instant.utcoffset() is None:
            self.fail(f"{_shown(value)} has no time zone: add Z or an offset such as +02:00", param, ctx)
        try:
            return instant.astimezone(UTC)
        except OverflowError:
            self.fail(f"{_shown(value)} lies outside the years 1 to 9999 in UTC", param, ctx)


class Limited(ParamType):
    """Text whose limits are a matter of configuration, and are therefore checked once every option has been read."""

    check = ""

    def check_limits(self, value: str, param: click.Parameter, ctx: click.Context) -> None:
        """Refuse text that is empty, too long, or of characters that it must not have."""
        from gendurable.core import limits
        from gendurable.errors import InvalidInstance

        try:
            getattr(limits, self.check)("", value)
        except InvalidInstance as error:
            self.fail(str(error).removeprefix(": "), param, ctx)


class Name(Limited):
    """The name of a machine, queue, step or signal."""

    name = "name"
    check = "check_name"


class Key(Limited):
    """A partition, unique or dedup key."""

    name = "key"
    check = "check_key"


class Json(ParamType):
    """JSON, or `-` for stdin, or `@FILE`."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what the text says."""
        if not isinstance(value, str):
            return value  # a default
        if ctx is not None and ctx.resilient_parsing:
            return None
        text = self._text(value, param, ctx)
        try:
            return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_twins)
        except RecursionError:
            self.fail("it is nested too deeply; flatten it", param, ctx)
        except ValueError as error:
            self.fail(f"it is no JSON: {error}; quote it for the shell, or use - or @FILE", param, ctx)

    def _text(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value != "-" and not value.startswith("@"):
            return value
        where = "stdin" if value == "-" else value[1:]
        try:
            if value == "-":
                data = sys.stdin.buffer.read(LARGEST_INPUT + 1)
            else:
                with Path(value[1:]).open("rb") as file:
                    data = file.read(LARGEST_INPUT + 1)
        except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
            self.fail(f"{where} cannot be read: {getattr(error, 'strerror', error)}", param, ctx)
        if len(data) > LARGEST_INPUT:
            self.fail(f"{where} holds more than {LARGEST_INPUT} bytes; keep it elsewhere, send a reference", param, ctx)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self.fail(f"{where} is not UTF-8 (byte {error.start}); convert it", param, ctx)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {_shown(twin)} stands there twice")
    return keys


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Role(ParamType):
    """The name of a role in the database."""

    name = "role"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name."""
        from gendurable.readers import read_identifier

        try:
            return read_identifier(value)
        except ValueError as error:
            self.fail(str(error).replace("schema name", "role name"), param, ctx)


class Filter(ParamType):
    """`state.path.to=value`."""

    name = "path=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return the path as a JSON array that begins with the column, and the value's text."""
        if isinstance(value, tuple):
            return value
        path, equals, wanted = str(value).partition("=")
        parts = path.split(".")
        if not equals or not _is_utf8(value) or len(parts) == 1 or parts[0] not in {"state", "result"} or "" in parts:
            self.fail(f"{_shown(value)} is no filter: write state.customer.id=7 or result.total=100", param, ctx)
        return json.dumps(parts), wanted
