"""Lines on stderr: the engine's events, users' own log calls and other libraries', for people or as JSON.

Events do not go through a logger but straight into the rendering: the way through `logging` alone would cost a fifth
of a core at two thousand steps a second.
"""

import json
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from threading import Lock, RLock
from time import monotonic, time
from typing import Any, Literal, TextIO, TypeAlias

import structlog
from attrs import fields_dict
from structlog.typing import EventDict

from gendurable import events
from gendurable.current import current_step
from gendurable.errors import describe
from gendurable.events import Event

Level: TypeAlias = Literal["debug", "info", "warning", "error", "critical"]
Fields: TypeAlias = dict[str, Any]

LEVELS: dict[type[Event], Level] = {
    events.StepCommitted: "info",
    events.OutcomeStale: "warning",
    events.ClaimLost: "warning",
    events.StepFailed: "warning",
    events.ThreadAbandoned: "warning",
    events.TooManyAbandoned: "error",
    events.OutcomeLate: "warning",
    events.StepCrashed: "error",
    events.Claimed: "debug",
    events.TokensCounted: "debug",
    events.BatchCommitted: "debug",
    events.OutcomeDeferred: "debug",
    events.PartitionContended: "debug",
    events.LockLost: "warning",
    events.TransactionLost: "warning",
    events.PartitionsRefused: "warning",
    events.LeaseReaped: "warning",
    events.ClaimsReclaimed: "info",
    events.AwaitsTimedOut: "info",
    events.DeadlineExceeded: "warning",
    events.GarbageCollected: "info",
    events.ScheduleTicked: "info",
    events.HeartbeatSent: "debug",
    events.DatabaseUnavailable: "warning",
    events.DatabaseAvailable: "info",
    events.WorkerStarted: "info",
    events.UnsafeServer: "warning",
    events.DrainStarted: "info",
    events.DrainFinished: "info",
    events.LoopDied: "critical",
    events.ProcessEnded: "warning",
}

_NUMBERS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}

# Too much for a line: the version stands in worker_started, the delays are for the metrics.
_UNLOGGED = {"fsm_version", "delays"}

# While the database is away every loop says so at every try: a line per loop in so many seconds is enough.
QUIET_SECONDS = 30.0

_MASK = "***"
_SECRET = re.compile(
    r"""(://[^\s:/@?"]*:)[^\s"]*(?=@)|(\w*(?:password|secret)\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&"'\\]+)""",
    re.IGNORECASE,
)


def event_name(kind: type[Event]) -> str:
    """Return what an event is called in logs: `step_committed`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


class Logs:
    """A listener that writes one line for each event. It never raises: what a log cannot take must not stop a step."""

    def __init__(
        self,
        *,
        worker: str | None = None,
        log_format: str = "auto",
        log_level: str = "info",
        stream: TextIO | None = None,
    ) -> None:
        """Write what is of `log_level` or above to `stream`, by default stderr; console, JSON, or auto by terminal.

        `worker` stands in every line; it may be set later, once it is known.
        """
        self.worker = worker
        self._level = _NUMBERS[log_level]
        self._out = _Output(sys.stderr if stream is None else stream)
        terminal = self._out.is_terminal()
        console = log_format == "console" or (log_format == "auto" and terminal)
        self._render = _console(colors=terminal and "NO_COLOR" not in os.environ) if console else _json
        self._outages = _Quiet()
        self._writers: dict[type[Event], Callable[[Any], None]] = {
            kind: partial(self._event, event_name(kind), level, *_reader(kind))
            for kind, level in LEVELS.items()
            if self._shows(level)
        } | {
            events.DatabaseUnavailable: self._unavailable,
            events.DatabaseAvailable: self._available,
            events.LoopDied: self._loop_died,
        }
        if self._render is _json and self._shows("info"):
            self._writers[events.StepCommitted] = self._step_committed
            self._writers[events.BatchCommitted] = self._batch_committed
        # Lines of committed steps, by far the most frequent: they are written together, once for each commit.
        self._steps: deque[str] = deque()
        self._of_step: dict[tuple[str, str, str, str], tuple[str, str]] = {}
        self._second = (0, "")

    def __call__(self, event: Event) -> None:
        """Write the event's line, if its level is wanted."""
        write = self._writers.get(type(event))
        if write is not None:
            write(event)

    def install(self) -> None:
        """Take over this process's `logging`, warnings and structlog as well; for a process that is all ours.

        To be called before users' modules are loaded: structlog that they configure themselves stays as they want it.
        """
        root = logging.getLogger()
        root.addHandler(self.handler())
        root.setLevel(self._level)
        logging.captureWarnings(capture=True)
        if not structlog.is_configured():
            structlog.configure(
                processors=[structlog.processors.StackInfoRenderer(), *self._finish()],
                wrapper_class=structlog.make_filtering_bound_logger(self._level),
                logger_factory=lambda *_: self._out,
                cache_logger_on_first_use=True,
            )

    def handler(self) -> logging.Handler:
        """Return a handler that renders the records of `logging` like our own lines."""
        formatter = structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *self._finish()],
        )
        return _Handler(formatter, self._out, self._unloggable)

    def _finish(self) -> list[Callable[..., Any]]:
        return [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            self._finished,
        ]

    def _finished(self, _logger: Any, _method: str, given: EventDict) -> str:
        step = current_step.get()
        where = {} if step is None else {"id": step.id, "fsm": step.fsm, "step": step.step}
        return self._line(given.pop("level", "info"), given.pop("event", ""), where | dict(given))

    def _shows(self, level: Level) -> bool:
        return _NUMBERS[level] >= self._level

    def _event(
        self, name: str, level: Level, keys: tuple[str, ...], values: Callable[[Event], tuple[Any, ...]], event: Event
    ) -> None:
        fields = {
            key: round(value, 6) if type(value) is float else value
            for key, value in zip(keys, values(event), strict=True)
            if value is not None
        }
        self._write(level, name, fields)

    def _step_committed(self, event: events.StepCommitted) -> None:
        if event.error is not None:
            self._event("step_committed", "info", *_reader(events.StepCommitted), event)
            return
        key = (event.queue, event.fsm, event.step, event.outcome)
        parts = self._of_step.get(key)
        if parts is None:
            who = {} if self.worker is None else {"worker": self.worker}
            names = dict(zip(("queue", "fsm", "step", "outcome"), key, strict=True))
            head = _json({"level": "info", "event": "step_committed", **who})[1:-1]
            parts = self._of_step[key] = f'{head}, "id": ', f", {_json(names)[1:-1]}"
        self._steps.append(
            f'{{"ts": "{self._now()}", {parts[0]}{event.id}{parts[1]}'
            f', "attempt": {event.attempt}, "seconds": {event.seconds:.6f}}}'
        )

    def _batch_committed(self, event: events.BatchCommitted) -> None:
        self._write_steps()
        if self._shows("debug"):
            self._event("batch_committed", "debug", *_reader(events.BatchCommitted), event)

    def _write_steps(self) -> None:
        lines = []
        while self._steps:
            with suppress(IndexError):  # another thread was quicker
                lines.append(self._steps.popleft())
        if lines:
            self._out.write("\n".join(lines))

    def _unavailable(self, event: events.DatabaseUnavailable) -> None:
        repeated = self._outages.admit(event.pool)
        if repeated is not None:
            fields = {"pool": event.pool, "error": event.error, "retry_in": round(event.retry_in, 3)}
            self._write("warning", "database_unavailable", fields | ({"repeated": repeated} if repeated else {}))

    def _available(self, event: events.DatabaseAvailable) -> None:
        self._outages.forget(event.pool)
        self._write("info", "database_available", {"pool": event.pool})

    def _loop_died(self, event: events.LoopDied) -> None:
        # `exception` is the key that renderers know how to show.
        fields = {"loop": event.loop, "error": event.error, "exception": event.traceback}
        self._write("critical", "loop_died", fields)

    def _unloggable(self, error: Exception, what: str) -> None:
        self._write("error", "unloggable", {"what": what, "error": describe(error)})

    def _write(self, level: Level, name: str, fields: Fields) -> None:
        if self._shows(level):
            self._write_steps()
            self._out.write(self._line(level, name, fields))

    def _now(self) -> str:
        moment = time()
        second, text = self._second
        if int(moment) != second:
            second = int(moment)
            text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            self._second = second, text
        return f"{text}.{int((moment - second) * 1000):03}Z"

    def _line(self, level: str, name: Any, fields: Fields) -> str:
        worker = {} if self.worker is None else {"worker": self.worker}
        line = self._render({"ts": self._now(), "level": level, "event": name, **worker, **fields})
        return _SECRET.sub(_masked, line) if _may_hold_secret(line) else line


class _Output:
    """Whole lines to a stream. One that is closed, full or gone loses them, and nobody hears of it."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: Any = stream  # None where the process was started without a stderr
        self._lock = RLock()  # a signal handler may log while its thread is in the middle of a line

    def is_terminal(self) -> bool:
        try:
            return self._stream is not None and bool(self._stream.isatty())
        except ValueError:
            return False

    def write(self, line: str) -> None:
        try:
            with self._lock:
                self._stream.write(line + "\n")
                self._stream.flush()
        except Exception:  # noqa: BLE001, S110
            pass

    # What structlog calls on a logger.
    msg = log = debug = info = warning = error = critical = exception = fatal = warn = failure = err = write


class _Handler(logging.Handler):
    def __init__(
        self, formatter: logging.Formatter, out: _Output, unloggable: Callable[[Exception, str], None]
    ) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.addFilter(self._not_again)
        self._out = out
        self._unloggable = unloggable
        self._quiet = _Quiet()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001  whatever was wrong with the user's log call
            self._unloggable(error, f"{record.name} at {record.pathname}:{record.lineno}")
        else:
            self._out.write(line)

    def _not_again(self, record: logging.LogRecord) -> bool:
        """Hold the driver's complaints back, of which its pool makes one at every try to connect."""
        if not record.name.startswith("psycopg"):
            return True
        repeated = self._quiet.admit((record.name, record.levelno, record.msg))
        if repeated:
            record.repeated = repeated
        return repeated is not None


class _Quiet:
    """Lets the first of equal messages through, then one in a while, and counts those it held back."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: dict[Hashable, tuple[float, int]] = {}

    def admit(self, message: Hashable) -> int | None:
        """Return how many were held back since the last one, or None: hold this one back too."""
        now = monotonic()
        with self._lock:
            last, held = self._last.get(message, (-QUIET_SECONDS, 0))
            if now - last < QUIET_SECONDS:
                self._last[message] = (last, held + 1)
                return None
            self._last[message] = (now, 0)
            return held

    def forget(self, message: Hashable) -> None:
        """Let the next one through."""
        with self._lock:
            self._last.pop(message, None)


def _reader(kind: type[Event]) -> tuple[tuple[str, ...], Callable[[Event], tuple[Any, ...]]]:
    keys = tuple(name for name in fields_dict(kind) if name not in _UNLOGGED)
    if len(keys) > 1:
        return keys, attrgetter(*keys)
    return keys, lambda event: (getattr(event, keys[0]),)


def _may_hold_secret(line: str) -> bool:
    """Glance at a line; the pattern itself would cost more than all the rest of it."""
    folded = line.lower()
    return "://" in folded or "password" in folded or "secret" in folded


def _masked(match: re.Match[str]) -> str:
    return (match[1] or match[2]) + _MASK


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  a value that cannot even be shown
        return f"<{type(value).__name__}>"


# NaN is no JSON: what strict readers would choke on goes out as text instead.
_encode = json.JSONEncoder(default=_shown, allow_nan=False).encode


def _json(fields: Fields) -> str:
    try:
        return _encode(fields)
    except (TypeError, ValueError, RecursionError):
        return _encode({str(key): value if isinstance(value, str) else _shown(value) for key, value in fields.items()})


def _console(*, colors: bool) -> Callable[[Fields], str]:
    # Never a formatter that shows local variables: they hold users' data.
    render = structlog.dev.ConsoleRenderer(
        colors=colors, sort_keys=False, timestamp_key="ts", exception_formatter=structlog.dev.plain_traceback
    )

    def rendered(fields: Fields) -> str:
        return render(None, "", {_printable(key): _text(key, value) for key, value in fields.items()})

    return rendered


def _text(key: str, value: Any) -> Any:
    if key in {"exception", "stack"} and isinstance(value, str):
        # Indented, so that no line of a message can pass for a line of the log.
        return "\n".join("    " + _printable(line) for line in value.split("\n"))
    if isinstance(value, str):
        return _printable(value)
    return value if isinstance(value, bool | int | float) else _printable(_shown(value))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
