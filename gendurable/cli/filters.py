"""The filters that choose instances, for `list` and for commands that work on many."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import click

from gendurable.cli.parameters import Duration, Filter, InstanceId, Name


def filter_options() -> list[click.Option]:
    """Return the options that choose instances."""
    return [
        click.Option(["--fsm"], type=Name(), help="Only of this machine."),
        click.Option(["--queue"], type=Name(), help="Only in this queue."),
        click.Option(["--step"], type=Name(), help="Only at this step."),
        click.Option(["--parent"], type=InstanceId(), help="Only children of this instance."),
        click.Option(["--older-than"], type=Duration(), help="Only those untouched for this long."),
        click.Option(
            ["--where"], type=Filter(), multiple=True, help="Only where a field has this value: state.customer.id=7."
        ),
    ]


class Filters:
    """What was asked for; nothing at all is false."""

    def __init__(
        self,
        *,
        fsm: str | None,
        queue: str | None,
        step: str | None,
        parent: int | None,
        older_than: timedelta | None,
        where: Sequence[tuple[str, str]],
        status: str | None = None,
    ) -> None:
        """Keep what was given; `status` where the command has an option for it."""
        self.status = status
        self._given = {"fsm": fsm, "queue": queue, "step": step, "parent": parent, "older_than": older_than}
        self._where = where

    def __bool__(self) -> bool:
        return bool(self._where) or self.status is not None or any(value is not None for value in self._given.values())

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the statements that filter, but for the status."""
        return {
            **self._given,
            "paths": [path for path, _ in self._where],
            "values": [value for _, value in self._where],
        }
