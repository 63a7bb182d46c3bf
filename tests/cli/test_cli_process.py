"""The program as the system sees it: start-up, pipes, locales, signals of the kernel, and a private server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from support import until

from gendurable import Client

HERE = Path(__file__).parent
PATIENCE = 60


@pytest.fixture
def environment(dsn: str) -> dict[str, str]:
    ours = {"GENDURABLE_DSN": dsn, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "error"}
    return {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))} | ours


def run(*arguments: object, env: dict[str, str], **others: Any) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "gendurable", *map(str, arguments)]
    others.setdefault("stdin", subprocess.DEVNULL)
    if "stdout" not in others:
        others |= {"stdout": subprocess.PIPE}
    if "stderr" not in others:
        others |= {"stderr": subprocess.PIPE}
    return subprocess.run(command, env=env, timeout=PATIENCE, check=False, **others)


def insert(env: dict[str, str], *arguments: object) -> int:
    done = run("insert", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_without_any_dsn_the_variables_of_libpq_say_where_the_database_is(dsn: str, environment: dict[str, str]):
    del environment["GENDURABLE_DSN"]
    names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE", "password": "PGPASSWORD"}
    given = {names[word]: str(value) for word, value in conninfo_to_dict(dsn).items() if word in names}
    assert insert(environment | given, "m") == 1
    with Client(dsn) as client:
        assert client.get(1).fsm == "m"


# Start-up.

HEAVY = ("psycopg", "psycopg_pool", "cattrs", "structlog", "prometheus_client")
IMPORTED = f"""
import sys
from gendurable.cli import main
try:
    main(sys.argv[1:])
except SystemExit as leaving:
    assert leaving.code in (0, None, 2), leaving.code
found = [name for name in {HEAVY} if name in sys.modules]
assert not found, found
"""


@pytest.mark.parametrize(
    "arguments", ["--help", "worker --help", "insert --help", "--version", "completion bash", "", "list --nonsense"]
)
def test_help_and_its_like_import_neither_driver_nor_codec_nor_loggers(arguments: str, environment: dict[str, str]):
    command = [sys.executable, "-c", IMPORTED, *arguments.split()]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=PATIENCE)


def test_completion_imports_nothing_of_the_kind_either(environment: dict[str, str]):
    env = environment | {
        "_GENDURABLE_COMPLETE": "bash_complete",
        "COMP_WORDS": "gendurable list --sta",
        "COMP_CWORD": "2",
    }
    done = subprocess.run([sys.executable, "-c", IMPORTED], env=env, check=True, capture_output=True, timeout=PATIENCE)
    assert done.stdout == b"plain,--status\n"


def test_the_installed_script_is_the_same_program(environment: dict[str, str]):
    script = Path(sys.executable).with_name("gendurable")
    done = subprocess.run([script, "--version"], env=environment, check=True, capture_output=True, timeout=PATIENCE)
    assert done.stdout == run("--version", env=environment).stdout


# Pipes and full disks.


def fill(dsn: str, rows: int) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "insert into gen_durable (fsm, step, state) select 'm', 'start', jsonb_build_object('x', repeat('x', 500))"
            " from generate_series(1, %s)",
            [rows],
        )


@pytest.mark.parametrize("flag", ["--json", "--jsonl", "--debug"])
def test_whoever_stops_reading_is_left_in_peace(flag: str, dsn: str, environment: dict[str, str]):
    fill(dsn, 2000)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run("list", "--limit", 2000, flag, env=environment, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_pipe_that_is_closed_half_way_is_no_error(dsn: str, environment: dict[str, str]):
    fill(dsn, 2000)
    command = [sys.executable, "-m", "gendurable", "list", "--jsonl", "--limit", "2000"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["fsm"] == "m"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(PATIENCE) == 0


def test_a_closed_stdout_does_not_keep_a_command_from_its_work(dsn: str, environment: dict[str, str]):
    done = run("insert", "m", env=environment, stdout=None, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, b"")
    with Client(dsn) as client:
        assert client.get(1).fsm == "m"


def test_a_closed_stderr_does_not_hide_the_exit_code(environment: dict[str, str]):
    done = run("get", "x", env=environment, stderr=None, preexec_fn=lambda: os.close(2))
    assert done.returncode == 2
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run("get", "x", env=environment, stderr=writer).returncode == 2
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error_in_one_line(environment: dict[str, str]):
    with Path("/dev/full").open("wb") as full:
        done = run("config", "show", env=environment, stdout=full)
    assert done.returncode == 1
    assert re.fullmatch(rb"gendurable: [^\n]*No space left on device[^\n]*\n", done.stderr)


# Locales.

LOCALES = {
    "C": {"LC_ALL": "C"},
    "POSIX": {"LC_ALL": "POSIX"},
    "C without coercion": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    "ASCII": {"PYTHONIOENCODING": "ascii"},
    "Latin 1": {"PYTHONIOENCODING": "latin-1"},
    "UTF-16": {"PYTHONIOENCODING": "utf-16"},
    "one that does not exist": {"LC_ALL": "xx_YY.nothing"},
    "none": {},
}


# Several commands in one process: what matters is its streams.
SEVERAL = """
import sys
from gendurable.cli import main
for command in sys.argv[1:]:
    try:
        main(command.split())
    except SystemExit as leaving:
        print(end=f"\\n{leaving.code}===", flush=True)
"""


@pytest.mark.parametrize("name", LOCALES)
def test_no_locale_breaks_the_output(name: str, dsn: str, environment: dict[str, str]):
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "insert into gen_durable (fsm, step, status, state, last_error)"
            """ values ('größe', '出荷', 'failed', '{"naïve": "☃ 👋"}', 'kein Paß')"""
        )
    commands = ["list", "get 1", "status", "wait 1", "list --jsonl", "get 1 --json"]
    env = environment | LOCALES[name]
    command = [sys.executable, "-c", SEVERAL, *commands]
    done = subprocess.run(command, env=env, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    # Where a stream pretends to know ASCII only, click writes UTF-8.
    encoding = env.get("PYTHONIOENCODING", "utf-8").replace("ascii", "utf-8")
    outputs = done.stdout.decode(encoding).split("===")
    assert [output.splitlines()[-1] for output in outputs[:-1]] == ["0", "0", "0", "1", "0", "0"]
    for output in outputs[-3:-1]:
        found = json.loads(output.splitlines()[0])
        assert (found["fsm"], found["step"], found["state"]) == ("größe", "出荷", {"naïve": "☃ 👋"})
    [complaint] = done.stderr.decode(encoding).splitlines()
    assert complaint.startswith("gendurable: instance 1 ended failed: kein Pa")


def test_names_that_are_not_utf8_are_refused_and_shown_escaped(environment: dict[str, str]):
    command = [sys.executable, "-m", "gendurable", "insert", b"caf\xe9"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2
    assert re.fullmatch(rb"gendurable: [^\n]*lone surrogate[^\n]*\n", done.stderr)


# Terminals.


def on_a_terminal(*arguments: object, env: dict[str, str], columns: int = 80, typed: bytes = b"") -> tuple[int, str]:
    """Run a command on a terminal of its own; return its exit code and everything that appeared."""
    import fcntl
    import pty
    import struct
    import termios

    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "gendurable", *map(str, arguments)]
    with subprocess.Popen(command, env=env, stdin=inner, stdout=inner, stderr=inner, close_fds=True) as process:
        os.close(inner)
        os.write(outer, typed)
        seen = b""
        while True:
            try:
                part = os.read(outer, 65_536)
            except OSError:  # how a terminal ends on Linux
                break
            if not part:
                break
            seen += part
        os.close(outer)
        return process.wait(PATIENCE), seen.decode()


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_on_a_terminal_tables_are_cut_to_it_and_coloured(dsn: str, environment: dict[str, str]):
    with psycopg.connect(dsn) as conn:
        conn.execute(
            "insert into gen_durable (fsm, step, status, last_error) values ('m', 'start', 'failed', %s)",
            ["a long story " * 30],
        )
    env = environment | {"TERM": "xterm"}
    code, text = on_a_terminal("list", env=env)
    assert code == 0
    assert "\x1b[31mfailed" in text
    lines = without_colours(text).replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].endswith("…")
    assert "\x1b" not in on_a_terminal("list", env=env | {"NO_COLOR": "1"})[1]
    assert "\x1b" not in on_a_terminal("list", env=env | {"TERM": "dumb"})[1]
    assert "a long story " * 30 in run("list", env=env).stdout.decode().replace("\n", " ")


def test_on_a_terminal_json_is_laid_out_for_people(environment: dict[str, str]):
    code, text = on_a_terminal("status", "--json", env=environment)
    assert code == 0
    assert json.loads(text)["queues"] == []
    assert '\n  "queues"' in text.replace("\r", "")


def test_on_a_terminal_destructive_commands_ask(dsn: str, environment: dict[str, str]):
    with psycopg.connect(dsn) as conn:
        conn.execute("insert into gen_durable (fsm, step, status) values ('m', 'start', 'failed')")
    code, text = on_a_terminal("retry", "--fsm", "m", env=environment, typed=b"n\n")
    assert code == 1
    assert "gendurable: nothing was done" in text
    assert "Run 1 failed instances again? [y/N]" in text
    with Client(dsn) as client:
        assert client.get(1).status == "failed"
        code, text = on_a_terminal("retry", "--fsm", "m", env=environment, typed=b"y\n")
        assert code == 0, text
        assert client.get(1).status == "runnable"


def test_on_a_terminal_long_work_shows_how_far_it_is(dsn: str, environment: dict[str, str]):
    fill(dsn, 50)
    with psycopg.connect(dsn) as conn:
        conn.execute("update gen_durable set status = 'done', updated_at = now() - interval '1 day'")
    code, text = on_a_terminal("gc", "--older-than", "1h", "--batch", "10", env=environment)
    assert code == 0
    assert "deleting" in text
    assert "100%" in text
    assert "deleted 50" in text
    code, text = on_a_terminal("gc", "--older-than", "1h", env=environment)
    assert (code, text.replace("\r", "")) == (0, "deleted 0\n"), "no bar where there is nothing to do"


# Signals of the kernel.


def start(*arguments: object, env: dict[str, str], **others: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "gendurable", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, **others)


# Of this test's own database: others run at the same time on the same server.
WAITING = """
from pg_stat_activity
where datname = current_database() and application_name = 'gendurable cli' and query like '-- get_status%'
"""


def test_a_wait_that_is_interrupted_says_so_in_one_line(dsn: str, environment: dict[str, str]):
    id = insert(environment, "nobody")
    with start("wait", id, env=environment) as process, psycopg.connect(dsn, autocommit=True) as conn:
        until(lambda: conn.execute(f"select 1 {WAITING}").fetchone(), "the command waiting")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, b"", b"gendurable: interrupted\n")


def test_watching_ends_with_an_interrupt_as_if_nothing_had_happened(environment: dict[str, str]):
    with start("status", "--watch", "50ms", "--json", env=environment) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert json.loads(process.stdout.readline())["queues"] == []
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, b"")


def test_a_lost_connection_ends_a_wait_with_5(dsn: str, environment: dict[str, str]):
    id = insert(environment, "nobody")
    with start("wait", id, env=environment) as process, psycopg.connect(dsn, autocommit=True) as conn:
        until(lambda: conn.execute(f"select pg_terminate_backend(pid) {WAITING}").fetchone(), "the command waiting")
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 5
    assert re.fullmatch(rb"gendurable: lost the connection to database [^\n]*\n", err)


def test_a_worker_runs_what_was_inserted_by_name_and_shows_up_in_status(dsn: str, environment: dict[str, str]):
    id = insert(environment, "checkout", '{"number": 7}', "--version", 2)
    flags = [
        "--fsms",
        "storefront",
        "--queues",
        "default=2,tills=3",
        "--name",
        "till",
        "--lease",
        "10s",
        "--heartbeat",
        "1s",
    ]
    with start("worker", *flags, env=environment) as process:
        try:
            waited = run("wait", id, "--timeout", "30s", env=environment)
            assert (waited.returncode, json.loads(waited.stdout)) == (0, {"number": 7})

            def workers() -> list[dict[str, Any]]:
                found = json.loads(run("status", "--json", env=environment).stdout)["workers"]
                return [each for each in found if each["pid"] == process.pid]

            [worker] = until(workers, "the worker's row")
            assert (worker["name"], worker["queues"]) == ("till", {"default": 2, "tills": 3})
            assert sorted(worker["machines"]) == ["checkout@1", "checkout@2", "pack@1"]
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


@pytest.mark.parametrize(("flags", "status"), [(["--no-reaper"], "executing"), ([], "done")])
def test_a_worker_without_a_reaper_leaves_expired_claims_to_others(
    flags: list[str], status: str, dsn: str, environment: dict[str, str]
):
    overdue = (
        "insert into gen_durable (fsm, step, state, status, awaits, await_deadline)"
        " values ('checkout', 'finish', '{\"number\": 1}', 'awaiting_signal', '{x}', now()) returning id"
    )
    expired = (
        "insert into gen_durable (fsm, fsm_version, step, state, status, locked_by, lease_expires_at, fence)"
        " values ('checkout', 2, 'start', '{\"number\": 2}', 'executing', 'gone', now() - interval '1 hour', 1) returning id"
    )
    timing = ["--lease", "10s", "--heartbeat", "1s", "--poll", "50ms", "--reap", "50ms"]
    with psycopg.connect(dsn, autocommit=True) as conn, Client(dsn) as client:
        [stuck] = conn.execute(expired).fetchone() or [0]
        with start("worker", "--fsms", "storefront", *timing, *flags, env=environment) as process:
            # Maintenance wakes the overdue before it reaps: when the second is woken, the first round is over.
            for _ in range(2):
                [id] = conn.execute(overdue).fetchone() or [0]
                assert client.wait(id, timeout=30).status == "done"
            until(lambda: client.get(stuck).status == status, f"the claim being {status}")
            process.terminate()
            process.communicate(timeout=PATIENCE)
        assert client.get(stuck).status == status


# A private server.


@pytest.fixture
def no_dsn(environment: dict[str, str], open_folder: Path) -> dict[str, str]:
    del environment["GENDURABLE_DSN"]
    return environment | {"GENDURABLE_HOME": str(open_folder / "home")}


def test_dev_brings_a_server_migrates_it_and_serves_every_queue_that_the_machines_name(no_dsn: dict[str, str]):
    done = run("dev", "--until-idle", "--fsms", "storefront", env=no_dsn)
    assert done.returncode == 0, done.stderr
    assert b"not for production" in done.stderr
    [dsn] = re.findall(r"export GENDURABLE_DSN='([^']*)'", done.stderr.decode())
    queues = next(json.loads(line)["queues"] for line in done.stderr.splitlines() if b"worker_started" in line)
    assert queues == {"default": 10, "tills": 10}
    assert run("get", 1, env=no_dsn | {"GENDURABLE_DSN": dsn}).returncode == 5, "the server left with its last user"


@contextmanager
def dev(*flags: object, env: dict[str, str]) -> "Iterator[dict[str, str]]":
    """Run `dev` until the block is left; yields an environment that reaches its server."""
    with start("dev", "--fsms", "storefront", *flags, env=env) as process:
        assert process.stderr is not None
        said = b""
        for line in iter(process.stderr.readline, b""):
            said += line
            if b"worker_started" in line:
                break
        [dsn] = re.findall(r"export GENDURABLE_DSN='([^']*)'", said.decode())
        try:
            yield env | {"GENDURABLE_DSN": dsn}
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_dev_keeps_its_data_until_it_is_told_to_begin_anew(no_dsn: dict[str, str]):
    with dev(env=no_dsn) as env:
        id = insert(env, "checkout", '{"number": 7}', "--version", 2)
        waited = run("wait", id, "--timeout", "30s", env=env)
        assert json.loads(waited.stdout) == {"number": 7}
    with dev(env=no_dsn) as env:
        assert len(json.loads(run("list", "--json", env=env).stdout)) == 1
    with dev("--reset", "--processes", 2, env=no_dsn) as env:
        assert json.loads(run("list", "--json", env=env).stdout) == []


def test_dev_serves_a_port_of_the_loopback_interface_if_asked_to(no_dsn: dict[str, str]):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with dev("--port", port, env=no_dsn) as env:
        id = insert(env, "checkout", '{"number": 7}', "--version", 2)
        over_tcp = env | {"GENDURABLE_DSN": f"postgresql://postgres@127.0.0.1:{port}/postgres"}
        waited = run("wait", id, "--timeout", "30s", env=over_tcp)
        assert json.loads(waited.stdout) == {"number": 7}


def test_dev_takes_its_server_along_when_its_terminal_is_closed(no_dsn: dict[str, str], open_folder: Path):
    with start("dev", "--fsms", "storefront", env=no_dsn) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if b"worker_started" in line)
        assert list(open_folder.rglob("postmaster.pid"))
        for _ in range(2):  # by the shell and by the kernel
            process.send_signal(signal.SIGHUP)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert list(open_folder.rglob("postmaster.pid")) == []


def test_a_worker_that_was_started_to_outlive_its_terminal_does(environment: dict[str, str]):
    def ignore_hangups() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with start("worker", "--fsms", "storefront", env=environment, preexec_fn=ignore_hangups) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if b"worker_started" in line)
        process.send_signal(signal.SIGHUP)
        id = insert(environment, "checkout", '{"number": 7}', "--version", 2)
        assert json.loads(run("wait", id, "--timeout", "30s", env=environment).stdout) == {"number": 7}
        process.terminate()
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_dev_without_machines_runs_the_demo(no_dsn: dict[str, str]):
    done = run("dev", "--until-idle", env=no_dsn)
    assert done.returncode == 0, done.stderr
    assert b"demo.checkout@1" in done.stderr


def test_dev_without_any_server_to_start_leaves_with_5(tmp_path: Path, no_dsn: dict[str, str]):
    done = run("dev", "--fsms", "storefront", env=no_dsn | {"GENDURABLE_PG_BIN": str(tmp_path)})
    assert done.returncode == 5
    assert re.fullmatch(rb"gendurable: GENDURABLE_PG_BIN: [^\n]*\n", done.stderr)
