"""How large things may be, and the checks of names, keys and error texts that every door shares."""

import re
import reprlib
from typing import Any

from attrs import define, fields

from gendurable.errors import InvalidInstance


@define
class Limits:
    """The sizes beyond which a value is refused."""

    name_bytes: int = 255
    key_bytes: int = 1024
    json_bytes: int = 1024 * 1024
    json_depth: int = 200
    inbox: int = 10_000
    error_bytes: int = 8 * 1024
    # The largest float has 1024 bits, and jsonb gives large floats back as integers.
    integer_bits: int = 1024


# Those in force in this process; every check that is not told otherwise reads them at the moment it checks.
DEFAULT_LIMITS = Limits()


def apply_limits(limits: Limits) -> None:
    """Put configured limits into force, process-wide; called once at start, before anything is checked by them."""
    for field in fields(Limits):
        setattr(DEFAULT_LIMITS, field.name, getattr(limits, field.name))


def check_name(field: str, value: Any, *, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return the name of an fsm, queue, step or signal, or refuse it."""
    text = _check_text(field, value, limits.name_bytes)
    if not text.isprintable():
        raise InvalidInstance(f"{field}: {show(text)} has unprintable characters; use printable text")
    return text


def check_key(field: str, value: Any, *, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return a key that is stored as text, or refuse it."""
    text = _check_text(field, value, limits.key_bytes)
    if "\0" in text:
        raise InvalidInstance(f"{field}: {show(text)} has a NUL character, which Postgres cannot store; leave it out")
    return text


def check_unique_key(value: Any, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return a unique key as the bytes that are stored, or refuse it."""
    if isinstance(value, str):
        return check_key("unique_key", value, limits=limits).encode()
    if not isinstance(value, bytes):
        raise InvalidInstance(f"unique_key: {show(value)} is neither bytes nor text; give bytes or a str")
    _check_size("unique_key", value, len(value), limits.key_bytes)
    return value


def _check_text(field: str, value: Any, most: int) -> str:
    if not isinstance(value, str):
        raise InvalidInstance(f"{field}: {show(value)} is no text; give a str")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidInstance(f"{field}: {show(value)} has a lone surrogate; give text that UTF-8 can write") from None
    _check_size(field, value, size, most)
    return str.__str__(value)  # an Enum that is a str writes its text, not its name


def _check_size(field: str, value: str | bytes, size: int, most: int) -> None:
    if not size:
        raise InvalidInstance(f"{field}: {show(value)} is empty; give 1 to {most} bytes")
    if size > most:
        raise InvalidInstance(f"{field}: {show(value)} has {size} bytes; give at most {most}")


_CUT = "… (cut)"
_UNSTORABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def error_text(text: str, *, limits: Limits = DEFAULT_LIMITS) -> str:
    """Return `text` so that a text column takes it: control characters and lone surrogates escaped, cut to size."""
    most = limits.error_bytes
    # No character takes less than a byte, so what lies beyond this could not stay anyway.
    safe = _UNSTORABLE.sub(_escape, text[: most + 1])
    data = safe.encode()
    if len(data) <= most:
        return safe
    return data[: most - len(_CUT.encode())].decode(errors="ignore") + _CUT


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlevel = 2

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out integers of thousands of digits.
        bits = x.bit_length()
        return super().repr_int(x, level) if bits <= DEFAULT_LIMITS.integer_bits else f"<an integer of {bits} bits>"


_shown = _Shown()


def show(value: Any) -> str:
    """Return a short repr for a message; never fails, whatever the value's own repr does."""
    return _shown.repr(value)


def check_id(value: object) -> int:
    """Return an instance's id; InvalidInstance if it can be none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise InvalidInstance(f"id: {show(value)} is no instance id: give a positive 64-bit integer")
    return value
