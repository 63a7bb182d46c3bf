import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import textwrap
from typing import Any, get_args

import pytest
import structlog
from attrs import evolve, fields
from hypothesis import assume, given
from hypothesis import strategies as st

from gendurable import events
from gendurable.current import CurrentStep, in_step
from gendurable.events import Event
from gendurable.observability import logs
from gendurable.observability.logs import LEVELS, Logs, event_name

COMMITTED = events.StepCommitted(7, "default", "checkout", 2, "ship", "next", 1, 0.0123456789)
BATCH = events.BatchCommitted(1, 0.001)

# Text as it comes from users and from the network: anything at all.
TEXT = st.text(st.characters(exclude_categories=()))


class Log:
    """A listener and the lines it wrote."""

    def __init__(self, **settings: Any) -> None:
        self.stream = io.StringIO()
        self.listener = Logs(worker="w-1", stream=self.stream, **settings)

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line, parse_constant=pytest.fail) for line in self.lines()]


def write(event: Event, **settings: Any) -> dict[str, Any]:
    """Return the one line that an event becomes."""
    log = Log(**settings)
    log.listener(event)
    if event == COMMITTED:
        log.listener(BATCH)
    (line,) = log.objects()
    return line


@pytest.fixture
def log() -> Log:
    return Log(log_level="debug")


@pytest.fixture
def logger(log):
    """A logger of `logging` whose records go to the log."""
    found = logging.getLogger("shop.checkout")
    handler = log.listener.handler()
    found.addHandler(handler)
    found.setLevel(logging.DEBUG)
    found.propagate = False
    yield found
    found.removeHandler(handler)
    found.setLevel(logging.NOTSET)
    found.propagate = True


VALUES: dict[Any, Any] = {
    int: 3,
    str: "text",
    str | None: "text",
    float: 0.5,
    bool: True,
    tuple[float, ...]: (0.5,),
    tuple[str, ...]: ("a", "b"),
    dict[str, int]: {"default": 10},
}


def example(kind: type) -> Any:
    """Make an event of a kind, whatever its fields."""
    return kind(**{field.name: VALUES[field.type] for field in fields(kind)})


# What a line holds.


def test_a_committed_step_is_one_line_with_fixed_keys():
    line = write(COMMITTED)
    assert list(line) == [
        "ts", "level", "event", "worker", "id", "queue", "fsm", "step", "outcome", "attempt", "seconds",
    ]  # fmt: skip
    assert line | {"ts": ""} == {
        "ts": "", "level": "info", "event": "step_committed", "worker": "w-1", "id": 7, "queue": "default",
        "fsm": "checkout", "step": "ship", "outcome": "next", "attempt": 1, "seconds": 0.012346,
    }  # fmt: skip


def test_the_error_that_ended_a_step_stands_in_its_line():
    event = events.StepCommitted(7, "default", "checkout", 1, "ship", "stop", 0, 0.5, "ValueError: no")
    assert write(event)["error"] == "ValueError: no"


def test_the_lines_of_a_commit_are_written_together_and_before_whatever_follows():
    log = Log()
    log.listener(COMMITTED)
    log.listener(evolve(COMMITTED, id=8, error="ValueError: no"))
    log.listener(evolve(COMMITTED, id=9, fsm='a "quoted" machine\n'))
    log.listener(events.UnsafeServer("fsync"))
    assert [(line["event"], line.get("id")) for line in log.objects()] == [
        ("step_committed", 7),
        ("step_committed", 8),
        ("step_committed", 9),
        ("unsafe_server", None),
    ]
    assert log.objects()[2]["fsm"] == 'a "quoted" machine\n'


def test_times_are_iso_and_utc():
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", write(COMMITTED)["ts"])


def test_every_event_has_a_level_and_becomes_a_line(log):
    assert set(LEVELS) == set(get_args(Event))
    for kind, level in LEVELS.items():
        log.listener(example(kind))
        line = log.objects()[-1]
        assert (line["event"], line["level"]) == (event_name(kind), level)
    assert len(log.lines()) == len(LEVELS)


def test_events_are_named_like_their_class_in_snake_case():
    promised = {
        "step_committed", "outcome_stale", "step_failed", "lease_reaped", "drain_started", "drain_finished",
        "database_unavailable", "unsafe_server", "loop_died", "step_crashed", "worker_started",
    }  # fmt: skip
    assert promised <= {event_name(kind) for kind in LEVELS}


def test_what_is_below_the_level_is_not_written():
    log = Log(log_level="warning")
    log.listener(COMMITTED)
    log.listener(events.DatabaseAvailable("committer"))
    log.listener(events.UnsafeServer("fsync"))
    assert [line["event"] for line in log.objects()] == ["unsafe_server"]


def test_debug_shows_polls_without_their_list_of_delays():
    assert "delays" not in write(events.Claimed("default", 2, 0.01, (0.5, 0.25)), log_level="debug")


def test_a_dead_loop_brings_its_traceback():
    line = write(events.LoopDied("committer", "KeyError: 1", "Traceback …\nKeyError: 1"))
    assert (line["level"], line["exception"]) == ("critical", "Traceback …\nKeyError: 1")


# For people.


def test_the_console_shows_the_same_as_words_in_a_row():
    log = Log(log_format="console")
    log.listener(COMMITTED)
    (line,) = log.lines()
    shown = "worker=w-1 id=7 queue=default fsm=checkout step=ship outcome=next attempt=1 seconds=0.012346"
    assert "step_committed" in line
    assert line.endswith(shown)


@pytest.mark.parametrize(("settings", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_the_console_form_in_color_unless_told_otherwise(settings, colored):
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | settings
    ours, theirs = pty.openpty()
    program = "from gendurable.observability.logs import *; Logs()(events.UnsafeServer('fsync'))"
    subprocess.run([sys.executable, "-c", program], stderr=theirs, env=environment, check=True)
    os.close(theirs)
    written = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "unsafe_server" in written
    assert not written.startswith("{")
    assert ("\x1b[" in written) == colored


def test_what_is_no_terminal_gets_json():
    program = "from gendurable.observability.logs import *; Logs()(events.UnsafeServer('fsync'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stderr)["setting"] == "fsync"
    assert done.stdout == b""


# Lines stay lines.


@pytest.mark.parametrize("log_format", ["json", "console"])
@given(text=TEXT)
def test_no_text_breaks_a_line_or_reaches_the_terminal_unescaped(log_format, text):
    assume(not re.search("://|password|secret", text, re.IGNORECASE))
    log = Log(log_format=log_format)
    log.listener(events.StepFailed(1, "default", "checkout", "ship", 0, "exception", text))
    written = log.stream.getvalue()
    assert written.count("\n") == 1
    assert written[:-1].isprintable()
    if log_format == "json":
        assert json.loads(written)["error"] == text


def test_a_message_cannot_pass_for_a_line_of_the_log_even_in_a_traceback():
    log = Log(log_format="console")
    forged = "2026-01-01T00:00:00.000Z [info     ] step_committed id=1"
    log.listener(events.LoopDied("committer", "x", f"Traceback\nValueError: \x1b[2J\n{forged}"))
    assert not any(line.startswith("2026-01-01") for line in log.lines())
    assert "\x1b" not in log.stream.getvalue()


# Nothing a log does may hurt a step.


def test_a_stream_that_is_closed_loses_the_line_and_nothing_else():
    log = Log()
    log.stream.close()
    log.listener(COMMITTED)


def test_a_reader_that_is_gone_loses_the_line_and_nothing_else():
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    listener = Logs(stream=stream)
    listener(COMMITTED)
    listener(BATCH)
    with pytest.raises(BrokenPipeError):  # it was indeed gone
        stream.close()


def test_a_process_without_stderr_runs():
    program = "from gendurable.observability.logs import *; logs = Logs(); logs.install(); logs(events.UnsafeServer('fsync')); logging.error('x'); print('ran')"
    command = f'exec "{sys.executable}" -c "$PROGRAM" 2>&-'
    done = subprocess.run(
        ["sh", "-c", command], env=os.environ | {"PROGRAM": program}, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"ran\n"


def test_a_signal_handler_may_log_while_its_thread_is_writing():
    class Reentrant(io.StringIO):
        def write(self, text: str) -> int:
            if "step_committed" in text:
                listener(events.DrainStarted(1, 0, 5.0))
            return super().write(text)

    listener = Logs(stream=Reentrant())
    listener(COMMITTED)


# A database that is away.


def unavailable(pool: str = "committer") -> events.DatabaseUnavailable:
    return events.DatabaseUnavailable(pool, "connection refused", 0.1)


def test_an_outage_is_one_line_per_loop_and_not_one_per_try(log):
    for _ in range(50):
        log.listener(unavailable("committer"))
        log.listener(unavailable("heartbeat"))
    assert [line["pool"] for line in log.objects()] == ["committer", "heartbeat"]


def test_an_outage_that_goes_on_is_told_again_with_a_count(log, monkeypatch):
    for _ in range(4):
        log.listener(unavailable())
    monkeypatch.setattr(logs, "QUIET_SECONDS", 0.0)
    log.listener(unavailable())
    assert [line.get("repeated") for line in log.objects()] == [None, 3]


@pytest.mark.parametrize("level", ["debug", "warning"])
def test_the_next_outage_is_told_at_once(level):
    log = Log(log_level=level)
    log.listener(unavailable())
    log.listener(events.DatabaseAvailable("committer"))
    log.listener(unavailable())
    assert [line["event"] for line in log.objects()].count("database_unavailable") == 2


# Secrets.


@pytest.mark.parametrize(
    "text",
    [
        "cannot connect to postgresql://shop:hunter2@db:5432/shop",
        "cannot connect to postgres://shop:hun/ter2@x:hunter2@db/shop",
        "host=db user=shop password=hunter2 dbname=shop",
        "host=db password = 'a hunter2 \\' b' dbname=shop",
        "postgresql://db/shop?sslpassword=hunter2&user=x",
        "PGPASSWORD=hunter2 psql",
    ],
)
@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_password_in_a_message_is_masked(text, log_format):
    log = Log(log_format=log_format)
    log.listener(events.DatabaseUnavailable("committer", text, 1.0))
    log.listener(events.LoopDied("committer", text, f"Traceback\n{text}"))
    assert "hunter2" not in log.stream.getvalue()
    assert "***" in log.stream.getvalue()


def test_what_only_speaks_of_passwords_stays_as_it_is():
    text = 'FATAL: password authentication failed for user "shop" at http://db:9464/readyz'
    assert write(events.DatabaseUnavailable("committer", text, 1.0))["error"] == text


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_never_show_local_variables(log_format):
    log = Log(log_format=log_format)

    def fail() -> None:
        card = "4111" * 2
        raise ValueError(len(card))

    with pytest.raises(ValueError) as failed:
        fail()
    record = logging.LogRecord("shop", logging.ERROR, __file__, 1, "no", (), (ValueError, failed.value, failed.tb))
    log.listener.handler().handle(record)
    assert "in fail" in log.stream.getvalue()
    assert "41114111" not in log.stream.getvalue()


# Users' own lines, and other libraries'.


def test_a_record_of_logging_becomes_a_line_like_ours(log, logger):
    logger.warning("paid %s", 12, extra={"order": 42})
    (line,) = log.objects()
    assert line | {"ts": ""} == {
        "ts": "", "level": "warning", "event": "paid 12", "worker": "w-1", "logger": "shop.checkout", "order": 42,
    }  # fmt: skip


def test_lines_that_a_step_writes_carry_its_id_machine_and_step(log, logger):
    in_step(CurrentStep(7, "checkout", "ship"), logger.info, "booked")
    logger.info("elsewhere")
    booked, elsewhere = log.objects()
    assert (booked["id"], booked["fsm"], booked["step"]) == (7, "checkout", "ship")
    assert "id" not in elsewhere


def test_what_a_step_binds_does_not_show_in_the_next(log, logger):
    def bind() -> None:
        structlog.contextvars.bind_contextvars(customer=1)
        logger.info("bound")

    in_step(CurrentStep(7, "checkout", "ship"), bind)
    in_step(CurrentStep(8, "checkout", "ship"), logger.info, "next")
    bound, following = log.objects()
    assert bound["customer"] == 1
    assert "customer" not in following


def test_an_exception_is_part_of_its_line(log, logger):
    logger.error("it failed", exc_info=ValueError("first\nsecond"))
    (line,) = log.objects()
    assert (line["level"], line["event"]) == ("error", "it failed")
    assert line["exception"].endswith("ValueError: first\nsecond")


def test_values_that_json_does_not_know_are_shown_as_text(log, logger):
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    endless: list[Any] = []
    endless.append(endless)
    logger.info("odd", extra={"nan": float("nan"), "when": object, "endless": endless, "broken": Broken(), "n": 1})
    (line,) = log.objects()
    assert line["nan"] == "nan"
    assert line["broken"] == "<Broken>"


def test_a_log_call_that_does_not_fit_its_arguments_says_where_it_stands(log):
    record = logging.LogRecord("shop", logging.INFO, "/shop/checkout.py", 12, "%d pieces", ("many",), None)
    log.listener.handler().handle(record)
    (line,) = log.objects()
    assert line["event"] == "unloggable"
    assert line["what"] == "shop at /shop/checkout.py:12"
    assert line["error"].startswith("TypeError")


def test_the_complaints_of_the_drivers_pool_are_not_repeated_at_every_try(log):
    pool = logging.getLogger("psycopg.pool")
    handler = log.listener.handler()
    pool.addHandler(handler)
    try:
        for attempt in range(20):
            pool.warning("error connecting in %r: %s", "pool-1", f"attempt {attempt}")
        pool.warning("something else")
    finally:
        pool.removeHandler(handler)
    assert [line["event"] for line in log.objects()] == ["error connecting in 'pool-1': attempt 0", "something else"]


def run(program: str) -> list[dict[str, Any]]:
    """Run a process that installs our logs first; return its lines."""
    start = "import logging, warnings, structlog\nfrom gendurable.observability.logs import Logs\nLogs(worker='w-1').install()\n"
    done = subprocess.run([sys.executable, "-c", start + textwrap.dedent(program)], capture_output=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_a_process_that_is_ours_renders_everything_alike():
    lines = run(
        """
        from gendurable.current import CurrentStep, in_step
        log = structlog.get_logger()
        in_step(CurrentStep(7, "checkout", "ship"), lambda: log.info("from structlog", order=42))
        logging.getLogger("shop").error("from logging")
        logging.getLogger("shop").debug("too quiet")
        log.debug("too quiet")
        warnings.warn("from warnings")
        try:
            1 / 0
        except ZeroDivisionError:
            log.exception("it failed")
        """
    )
    assert [(line["level"], line["worker"]) for line in lines] == [
        ("info", "w-1"), ("error", "w-1"), ("warning", "w-1"), ("error", "w-1"),
    ]  # fmt: skip
    assert (lines[0]["event"], lines[0]["order"], lines[0]["id"]) == ("from structlog", 42, 7)
    assert lines[1]["event"] == "from logging"
    assert "from warnings" in lines[2]["event"]
    assert "ZeroDivisionError" in lines[3]["exception"]


def test_users_who_set_structlog_up_themselves_keep_what_they_want():
    lines = run(
        """
        structlog.configure(
            processors=[structlog.processors.JSONRenderer()],
            logger_factory=structlog.PrintLoggerFactory(__import__("sys").stderr),
        )
        structlog.get_logger().info("mine")
        """
    )
    assert lines == [{"event": "mine"}]


def test_basic_config_in_a_users_module_does_not_double_lines():
    assert len(run("logging.basicConfig(level='DEBUG'); logging.warning('once')")) == 1
