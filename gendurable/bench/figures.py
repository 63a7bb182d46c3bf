"""What is measured, as values, and how it is shown."""

from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

FEW = 10


@frozen(kw_only=True)
class Figure:
    """One measurement. `ratio` is to the limit of the same run, or to what `note` says; None: not measured."""

    scenario: str
    amount: int
    seconds: float
    unit: str = "steps"
    ratio: float | None = None
    worker_cpu: float | None = None
    server_cpu: float | None = None
    transactions: float | None = None
    wal_bytes: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    note: str = ""

    @property
    def rate(self) -> float:
        """How many in a second."""
        return self.amount / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the figure as plain values."""
        return asdict(self) | {"rate": self.rate}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


HEADINGS = ("scenario", "per second", "ratio", "cpu ms", "server ms", "commits", "wal bytes", "p50/p95/p99 ms", "note")


def rows(figures: Sequence[Figure]) -> list[tuple[str, ...]]:
    """Return what a table shows of each figure, under HEADINGS; times and bytes are per step."""
    return [
        (
            figure.scenario,
            f"{figure.rate:,.0f} {figure.unit}" if figure.rate >= FEW else f"{figure.rate:.2f} {figure.unit}",
            _shown(figure.ratio, "{:.2f}"),
            _shown(figure.worker_cpu, "{:.3f}"),
            _shown(figure.server_cpu, "{:.3f}"),
            _shown(figure.transactions, "{:.3f}"),
            _shown(figure.wal_bytes, "{:,.0f}"),
            "-" if figure.p50 is None else "/".join(_ms(p) for p in (figure.p50, figure.p95, figure.p99)),
            figure.note,
        )
        for figure in figures
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
