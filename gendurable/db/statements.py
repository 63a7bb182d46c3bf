"""The SQL files: inside the package when installed, beside it in a checkout."""

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def folder() -> Path:
    """Return the folder that holds `statements` and `migrations`."""
    installed = _PACKAGE / "sql"
    return installed if installed.is_dir() else _PACKAGE.parent / "sql"


@cache
def statement(name: str, *, room: str = "statements") -> bytes:
    """Return the text of one statement; `room` is its folder."""
    return (folder() / room / f"{name}.sql").read_bytes()
