"""What the tests of the command line call its runners."""

from collections.abc import Callable
from typing import Any, TypeAlias

from click.testing import Result

Cli: TypeAlias = Callable[..., Result]
CliJson: TypeAlias = Callable[..., Any]
Out: TypeAlias = Callable[..., str]
