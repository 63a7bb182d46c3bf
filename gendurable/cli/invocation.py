"""One call of the command line: its global options, wherever they stood, and the configuration they lead to."""

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gendurable.config import Config, Loaded

VARIABLE = "GENDURABLE_CONFIG"


class Invocation:
    """What was said before and after the subcommand; a later word wins."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self.settings: dict[str, Any] = {}
        self.flags: dict[str, str] = {}
        self.config_file: str | None = None
        self.json = False
        self.debug = False
        self.arguments: tuple[str, ...] = ()
        self.commands: tuple[str, ...] = ()

    @cached_property
    def loaded(self) -> "Loaded":
        """The configuration of this call, with provenance; its limits are in force from here on."""
        from gendurable.config import load
        from gendurable.core.limits import apply_limits

        path = self._find_file()
        loaded = load(
            cli=self.settings,
            env=os.environ,
            file=None if path is None else _read_toml(path),
            file_path=str(path),
            flags=self.flags,
            commands=self.commands,
        )
        apply_limits(loaded.config.limits)
        return loaded

    @property
    def config(self) -> "Config":
        """The configuration of this call."""
        return self.loaded.config

    def _find_file(self) -> Path | None:
        from gendurable.config import FILE_NAME
        from gendurable.errors import ConfigError

        for given, source in ((self.config_file, "--config"), (os.environ.get(VARIABLE), VARIABLE)):
            if given:
                if not Path(given).exists():
                    raise ConfigError(f"{given}: there is no such file; correct {source}, or leave it out")
                return Path(given)
        return Path(FILE_NAME) if Path(FILE_NAME).exists() else None


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib

    from gendurable.errors import ConfigError

    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a file that this user may read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}; correct the file") from error


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)
