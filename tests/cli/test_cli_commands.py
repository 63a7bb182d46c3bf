"""Every command that works: what it prints for people, and the shape of its JSON."""

import json
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
import psycopg
import pytest
from commandline import Cli, CliJson, Out
from storefront import Checkout, Pack
from support import inbox, row

from gendurable import Client, Instance, migrate
from gendurable.cli.root import COMMANDS, main
from gendurable.core.status import Status
from gendurable.db.connection import Connection
from gendurable.db.migrate import migrations
from gendurable.testing import Harness

COLUMNS = [field.name for field in attrs.fields(Instance)]
LIVE = ("runnable", "executing", "awaiting_signal", "awaiting_children")


@pytest.fixture
def run_all(harness: Callable[..., Harness]) -> Callable[[], dict[str, int]]:
    """Run whatever is due."""
    return lambda: harness("storefront").drain()


@pytest.fixture
def failed(out: Out, run_all: Callable[[], object]) -> int:
    """An instance that has failed."""
    id = int(out("insert", "pack", '{"fails": true}', "--step", "perform"))
    run_all()
    return id


# Help.


def test_help_lists_every_command_and_the_global_options(bare_cli: Cli):
    result = bare_cli("--help")
    assert result.exit_code == 0
    for word in (*COMMANDS, "--dsn", "--schema", "--config", "--json", "--debug", "--log-level", "--log-format"):
        assert word in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_explains_itself(bare_cli: Cli, command: str, flag: str):
    result = bare_cli(command, flag)
    assert result.exit_code == 0, result.stderr
    assert f"Usage: gendurable {command}" in result.stdout
    assert "Global options:" in result.stdout


def test_every_option_says_what_it_is_for():
    def options(command: Any, path: str) -> Any:
        for param in command.params:
            if param.param_type_name == "option":
                yield path, param
        for name in getattr(command, "list_commands", lambda _: ())(None):
            yield from options(command.get_command(None, name), f"{path} {name}")

    silent = [f"{path} {param.opts[0]}" for path, param in options(main, "gendurable") if not param.help]
    assert silent == []


WORKERS_FLAGS = (
    "--queues --fsms --lease --heartbeat --poll --max-poll --reap --drain-timeout --prefetch --min-demand --processes"
    " --http --name --until-idle --no-reaper --no-gc"
)
FILTERS = "--fsm --queue --step --parent --older-than --where"
PROMISED = {
    "worker": f"{WORKERS_FLAGS} --check-config",
    "dev": f"{WORKERS_FLAGS} --port --reset --home",
    "migrate up": "--to --dry-run --lock-timeout",
    "migrate down": "--to --yes",
    "migrate status": "--check",
    "migrate sql": "--to --from --down --grants",
    "insert": "--step --queue --priority --partition-key --unique-key --in --at --version --wait --timeout --fsms",
    "signal": "--dedup-key",
    "get": "--field",
    "list": f"{FILTERS} --status --limit --jsonl",
    "status": "--watch",
    "wait": "--timeout",
    "retry": f"{FILTERS} --dry-run --yes",
    "gc": "--older-than --dry-run --batch",
    "fsms": "--fsms",
    "config show": "--check",
    "health": "--url",
    "doctor": "--queues",
    "completion": "",
}


@pytest.mark.parametrize("command", PROMISED)
def test_a_command_has_the_options_that_were_promised(bare_cli: Cli, command: str):
    text = bare_cli(*command.split(), "--help").stdout
    general = "--dsn --schema --config --json --debug --log-level --log-format -h"
    shown = re.findall(r"(?:^ +|, )(-{1,2}[a-z-]+)", text, re.MULTILINE)
    assert set(f"{PROMISED[command]} {general}".split()) <= set(shown)


def test_without_arguments_the_help_is_printed_and_the_exit_code_says_that_nothing_was_done(bare_cli: Cli):
    for arguments in ([], ["migrate"], ["config"]):
        result = bare_cli(*arguments)
        assert result.exit_code == 2
        assert "Usage:" in result.stderr + result.stdout
        assert "Commands:" in result.stderr + result.stdout


def test_the_version_is_printed(bare_cli: Cli):
    assert re.fullmatch(r"gendurable \d+\.\d+\.\d+\n", bare_cli("--version").stdout)


# Insert.


def test_insert_prints_the_id(out: Out, conn: Connection):
    id = int(out("insert", "anything", '{"a": 1}'))
    found = row(conn, id)
    assert (found["fsm"], found["fsm_version"], found["step"], found["queue"]) == ("anything", 1, "start", "default")
    assert (found["state"], found["status"], found["max_crashes"]) == ({"a": 1}, "runnable", 20)


def test_insert_as_json_is_the_id_alone(out_json: CliJson):
    document = out_json("insert", "anything")
    assert list(document) == ["id"]


def test_insert_takes_everything_a_row_can_be_told(out: Out, conn: Connection):
    options = (
        "--step s --queue q --priority -7 --partition-key p --unique-key u --version 3 --at 2099-01-01T00:00:00+02:00"
    )
    found = row(conn, int(out("insert", "m", "{}", *options.split())))
    assert (found["step"], found["queue"], found["priority"], found["fsm_version"]) == ("s", "q", -7, 3)
    assert (found["partition_key"], found["unique_key"]) == ("p", b"u")
    assert found["eligible_at"].isoformat() == "2098-12-31T22:00:00+00:00"


def test_insert_in_a_while_is_reckoned_by_the_clock_of_the_database(out: Out, conn: Connection):
    id = int(out("insert", "m", "--in", "2h"))
    [late] = conn.execute(
        "select extract(epoch from eligible_at - inserted_at) from gen_durable where id = %s", [id]
    ).fetchone() or [0]
    assert abs(float(late) - 7200) < 1


@pytest.mark.parametrize("where", ["stdin", "file"])
def test_the_state_may_come_from_stdin_or_a_file(out: Out, conn: Connection, tmp_path, where: str):
    (tmp_path / "state.json").write_text('{"größe": "XL"}', encoding="utf-8")
    given = {"stdin": ("-", '{"größe": "XL"}'), "file": ("@state.json", None)}[where]
    id = int(out("insert", "m", given[0], input=given[1]))
    assert row(conn, id)["state"] == {"größe": "XL"}


def test_with_machines_configured_the_class_decides_step_queue_and_state(out: Out, conn: Connection):
    found = row(conn, int(out("insert", "checkout", '{"number": 7}', "--version", 1, "--fsms", "storefront")))
    assert (found["step"], found["queue"], found["state"]) == ("start", "tills", {"number": 7, "paid": 0})


def test_without_a_version_the_newest_that_is_loaded_is_meant(out: Out, conn: Connection):
    found = row(conn, int(out("insert", "checkout", '{"number": 7}', "--fsms", "storefront")))
    assert (found["fsm_version"], found["queue"]) == (2, "default")


def in_the_background(work: Callable[[], object]) -> ExitStack:
    """Do something again and again until the block is left."""
    over = threading.Event()

    def again() -> None:
        while not over.wait(0.02):
            work()

    thread = threading.Thread(target=again)
    thread.start()
    stack = ExitStack()
    stack.callback(thread.join)
    stack.callback(over.set)
    return stack


def test_insert_and_wait_prints_the_id_and_then_the_result(out: Out, harness: Callable[..., Harness]):
    with in_the_background(harness("storefront").drain):
        lines = out("insert", "checkout", '{"number": 7}', "--fsms", "storefront", "--wait", "--timeout", "20s")
    id, result = lines.splitlines()
    assert int(id) >= 1
    assert json.loads(result) == {"number": 7}


def test_insert_and_wait_as_json_is_one_document(out_json: CliJson, harness: Callable[..., Harness]):
    with in_the_background(harness("storefront").drain):
        document = out_json("insert", "checkout", '{"number": 7}', "--fsms", "storefront", "--wait")
    assert document == {"id": document["id"], "status": "done", "result": {"number": 7}, "last_error": None}


def test_insert_and_wait_leaves_with_1_when_the_instance_fails(cli: Cli, harness: Callable[..., Harness]):
    with in_the_background(harness("storefront").drain):
        result = cli("insert", "pack", '{"fails": true}', "--step", "perform", "--wait")
    assert result.exit_code == 1
    assert re.fullmatch(r"gendurable: instance \d+ ended failed: out of .*\n", result.stderr)
    assert result.stdout.strip().isdecimal()


def test_insert_and_wait_leaves_with_6_when_it_takes_too_long_and_still_tells_the_id(cli: Cli):
    result = cli("insert", "nobody", "--wait", "--timeout", "50ms", "--json")
    assert result.exit_code == 6
    assert json.loads(result.stdout)["status"] == "runnable"


def test_an_occupied_unique_key_is_a_conflict(cli: Cli, out: Out):
    first = out("insert", "m", "--unique-key", "k").strip()
    result = cli("insert", "m", "--unique-key", "k")
    assert (result.exit_code, result.stdout) == (4, "")
    assert f"occupied by instance {first}" in result.stderr


# Signal.


def test_signal_says_nothing_and_the_signal_is_there(out: Out, conn: Connection):
    id = int(out("insert", "m"))
    assert out("signal", id, "paid", '{"amount": 5}') == ""
    assert inbox(conn, id) == ["paid"]


def test_signal_as_json_tells_its_id_whether_it_woke_and_whether_it_was_one_too_many(
    out_json: CliJson, out: Out, run_all
):
    id = int(out("insert", "checkout", '{"number": 1}', "--version", 1, "--fsms", "storefront"))
    run_all()
    first = out_json("signal", id, "paid", "--dedup-key", "e1")
    assert first == {"id": first["id"], "woke": True, "duplicate": False}
    assert out_json("signal", id, "paid", "--dedup-key", "e1") == {"id": first["id"], "woke": False, "duplicate": True}


@pytest.mark.parametrize(
    ("given", "stored"),
    [([], {}), (["null"], None), (["[1, 2]"], [1, 2]), (['"x"'], "x"), (["0"], 0), (["-1.5"], -1.5)],
)
def test_a_payload_is_any_json_value_and_without_one_an_empty_object(out: Out, conn: Connection, given, stored):
    id = int(out("insert", "m"))
    out("signal", id, "n", *(["--", *given] if given else []))
    [payload] = conn.execute("select payload from signals where target_id = %s", [id]).fetchone() or []
    assert payload == stored


# Wait.


def test_wait_prints_the_result(out: Out, out_json: CliJson, run_all):
    ids = [out("insert", "checkout", f'{{"number": {n}}}', "--version", 2).strip() for n in (1, 2)]
    run_all()
    assert json.loads(out("wait", ids[0])) == {"number": 1}
    assert out_json("wait", ids[0]) == {"number": 1}
    assert [json.loads(line) for line in out("wait", *ids).splitlines()] == [{"number": 1}, {"number": 2}]
    assert out_json("wait", *ids) == [{"number": 1}, {"number": 2}]


def test_waiting_for_one_that_failed_leaves_with_1_and_its_reason(cli: Cli, failed: int):
    result = cli("wait", failed)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"gendurable: instance {failed} ended failed: out of \\x1b[31mpaper and string\n"


def test_waiting_too_long_leaves_with_6(cli: Cli, out: Out):
    id = out("insert", "nobody").strip()
    result = cli("wait", id, "--timeout", "10ms")
    assert result.exit_code == 6
    assert "still runnable after 0.01 s" in result.stderr


# Get.


def a_family(out: Out, run_all: Callable[[], object]) -> int:
    """A parent with two children, one of which failed, and a signal."""
    id = int(out("insert", "checkout", '{"number": 1}', "--version", 1, "--fsms", "storefront"))
    run_all()
    out("signal", id, "paid", '{"amount": 5}', "--dedup-key", "e1")
    run_all()
    return id


def test_get_as_json_is_every_column_with_inbox_and_children(out: Out, out_json: CliJson, run_all, conn: Connection):
    id = int(out("insert", "checkout", '{"number": 1}', "--version", 1, "--fsms", "storefront", "--unique-key", "k"))
    out("signal", id, "note", '{"ü": [1, null]}', "--dedup-key", "d")
    document = out_json("get", id)
    assert list(document) == [*COLUMNS, "inbox", "children"]
    assert (document["state"], document["unique_key"], document["status"]) == (
        {"number": 1, "paid": 0},
        "k",
        "runnable",
    )
    [signal] = document["inbox"]
    assert set(signal) == {"id", "name", "payload", "dedup_key", "inserted_at"}
    assert (signal["name"], signal["payload"], signal["dedup_key"]) == ("note", {"ü": [1, None]}, "d")
    assert document["children"] == []


def test_get_shows_children_in_their_order(out: Out, out_json: CliJson, run_all):
    id = a_family(out, run_all)
    children = out_json("get", id)["children"]
    assert set(children[0]) == {"id", "fsm", "status", "state", "result", "last_error", "round", "index"}
    assert [(each["status"], each["index"], each["state"]["part"]) for each in children] == [
        ("done", 0, 0),
        ("failed", 1, 1),
    ]


def test_get_for_people_shows_what_matters_and_escapes_what_could_steer_the_terminal(out: Out, run_all):
    id = a_family(out, run_all)
    text = out("get", id)
    assert re.search(r"^fsm +checkout version 1$", text, re.MULTILINE)
    assert re.search(r"^status +done$", text, re.MULTILINE)
    assert re.search(r'^result +\{"packed": \["done", "failed"\]\}$', text, re.MULTILINE)
    assert re.search(r"^CHILD +FSM +STATUS", text, re.MULTILINE)
    assert r"out of \x1b[31mpaper\nand string" in text
    assert "\x1b" not in text


def test_get_prints_one_column_if_asked(out: Out, out_json: CliJson):
    id = int(out("insert", "m", '{"a": 1}', "--unique-key", "k"))
    assert json.loads(out("get", id, "--field", "state")) == {"a": 1}
    assert out("get", id, "--field", "status") == "runnable\n"
    assert out("get", id, "--field", "unique_key") == "k\n"
    assert out("get", id, "--field", "parent_id") == "\n"
    assert json.loads(out("get", id, "--field", "unique_scope")) == sorted(LIVE)
    assert out("get", id, "--field", "cancelling") == "false\n"
    assert out_json("get", id, "--field", "queue") == "default"


# List.


@pytest.fixture
def shelf(out: Out) -> dict[str, int]:
    """Three instances to choose from."""
    given = {
        "a": ("m", '{"customer": {"id": 7}, "tag": "x"}', "--queue", "q"),
        "b": ("m", '{"customer": {"id": 8}, "tag": "x"}', "--step", "s"),
        "c": ("n", '{"customer": {"id": "7"}}', "--queue", "q"),
    }
    return {name: int(out("insert", *arguments)) for name, arguments in given.items()}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ("", "cba"),
        ("--fsm m", "ba"),
        ("--queue q", "ca"),
        ("--step s", "b"),
        ("--status runnable", "cba"),
        ("--status failed", ""),
        ("--limit 1", "c"),
        ("--where state.customer.id=7", "ca"),
        ("--where state.tag=x --where state.customer.id=7", "a"),
        ("--where state.nothing=x", ""),
        ("--where result.a=1", ""),
        ("--fsm m --queue q", "a"),
        ("--older-than 1h", ""),
        ("--older-than 0s", "cba"),
        ("--parent 1", ""),
    ],
)
def test_list_shows_the_newest_that_match_every_filter(
    out_json: CliJson, shelf: dict[str, int], filters: str, expected: str
):
    found = out_json("list", *filters.split())
    assert [each["id"] for each in found] == [shelf[name] for name in expected]
    assert all(list(each) == COLUMNS for each in found)


def test_list_finds_the_children_of_an_instance(out: Out, out_json: CliJson, run_all):
    id = a_family(out, run_all)
    assert {each["parent_id"] for each in out_json("list", "--parent", id)} == {id}


def test_list_prints_a_document_a_line_if_asked(out: Out, shelf: dict[str, int]):
    lines = out("list", "--jsonl").splitlines()
    assert [json.loads(line)["id"] for line in lines] == sorted(shelf.values(), reverse=True)


def test_list_for_people_is_a_table_with_one_line_an_instance(out: Out, failed: int):
    heading, line = out("list").splitlines()
    assert heading.split() == ["ID", "FSM", "STATUS", "STEP", "QUEUE", "ATTEMPT", "AGE", "ERROR"]
    assert line.split()[:6] == [str(failed), "pack", "failed", "perform", "default", "0"]
    assert "\x1b" not in line


def test_an_empty_list_is_an_empty_array(out: Out, out_json: CliJson):
    assert out_json("list") == []
    assert out("list").splitlines()[0].startswith("ID")


# Status.


def test_status_as_json_counts_by_queue_and_names_workers_and_work_without_one(
    out: Out, out_json: CliJson, conn, run_all
):
    for arguments in (["m"], ["m", "--in", "1h"], ["n", "--queue", "q", "--version", "2"]):
        out("insert", *arguments)
    conn.execute(
        "insert into workers (id, name, host, pid, queues, machines, expires_at) values"
        " ('w-1', 'w', 'h', 7, '{\"default\": 10}', '{m@1}', now() + interval '1 minute'),"
        " ('w-0', 'w', 'h', 6, '{\"default\": 10}', '{n@2}', now() - interval '1 second')"
    )
    document = out_json("status")
    assert list(document) == ["queues", "workers", "unserved", "schema_version"]
    default, other = document["queues"]
    assert set(default) == {"queue", "counts", "due", "oldest_due_seconds", "paused"}
    assert (default["queue"], default["counts"]["runnable"], default["due"], default["paused"]) == (
        "default",
        2,
        1,
        False,
    )
    assert default["oldest_due_seconds"] >= 0
    assert set(default["counts"]) == set(Status)
    assert (other["queue"], other["due"]) == ("q", 1)
    [worker] = document["workers"]
    assert set(worker) == {"id", "name", "host", "pid", "queues", "machines", "started_at", "beat_at", "expires_at"}
    assert (worker["id"], worker["queues"], worker["machines"]) == ("w-1", {"default": 10}, ["m@1"])
    assert document["unserved"] == [{"fsm": "n", "fsm_version": 2, "count": 1}]
    assert document["schema_version"] == len(migrations())


def test_status_for_people_shows_the_same(out: Out):
    assert out("status").startswith("no instances yet\n\nno live worker\n\nschema version ")
    out("insert", "n", "--queue", "q", "--version", "2")
    text = out("status")
    assert re.search(r"^q +1 +0 +0 +0 +0 +0 +0 +1 +\d+s$", text, re.MULTILINE)
    assert re.search(r"^NO WORKER FOR +VERSION +DUE\nn +2 +1$", text, re.MULTILINE)


def test_status_for_people_fits_a_terminal_of_80(out: Out, conn: Connection):
    out("insert", "n", "--queue", "q" * 12)
    conn.execute(
        "insert into gen_durable (fsm, step, queue, status, eligible_at)"
        " select 'f', 's', 'q', 'done', now() from generate_series(1, 10000)"
    )
    conn.execute("update gen_durable set eligible_at = now() - interval '23 hours 59 minutes' where fsm = 'n'")
    text = out("status")
    assert re.search(r"^q{12} +1 +0 +0 +0 +0 +0 +0 +1 +23h59m$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80


# Pause and resume.


def test_pause_and_resume_say_in_json_how_the_queue_stands(out: Out, out_json: CliJson):
    assert out_json("pause", "mail") == {"queue": "mail", "paused": True}
    assert out_json("pause", "mail") == {"queue": "mail", "paused": True}, "once more does no harm"
    assert out_json("resume", "mail") == {"queue": "mail", "paused": False}
    assert out("pause", "mail") == out("resume", "mail") == ""


def test_status_shows_paused_queues_also_those_without_rows(out: Out, out_json: CliJson):
    out("insert", "m")
    out("insert", "m", "--queue", "busy")
    for queue in ("empty", "busy"):
        out("pause", queue)
    queues = {each["queue"]: each for each in out_json("status")["queues"]}
    assert {name: each["paused"] for name, each in queues.items()} == {"busy": True, "default": False, "empty": True}
    assert set(queues["empty"]["counts"].values()) == {0}
    assert (queues["empty"]["due"], queues["empty"]["oldest_due_seconds"]) == (0, None)
    assert "\npaused: busy, empty\n" in out("status")
    out("resume", "empty")
    assert "empty" not in out("status")


def test_to_resume_a_queue_that_is_not_paused_leaves_with_3(cli: Cli):
    result = cli("resume", "mail")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "queue 'mail' is not paused" in result.stderr


def test_pause_wonders_about_a_queue_that_no_live_worker_serves(cli: Cli, conn: Connection):
    conn.execute(
        "insert into workers (id, name, host, pid, queues, machines, expires_at)"
        " values ('w', 'w', 'h', 7, '{\"mail\": 1}', '{}', now() + interval '1 minute')"
    )
    assert cli("pause", "mail").stderr == ""
    result = cli("pause", "mial")
    assert result.exit_code == 0
    assert "is its name right?" in result.stderr


# Retry.


def test_retry_prints_the_ids_that_run_again(out: Out, out_json: CliJson, failed: int, conn: Connection, run_all):
    assert out("retry", failed) == f"{failed}\n"
    found = row(conn, failed)
    assert (found["status"], found["attempt"], found["crashes"], found["locked_by"]) == ("runnable", 0, 0, None)
    run_all()
    assert row(conn, failed)["status"] == "failed"
    assert out_json("retry", failed) == {"retried": [failed]}


def test_retry_of_what_has_not_failed_leaves_with_3_but_does_the_others(
    cli: Cli, out: Out, failed: int, conn: Connection
):
    fresh = int(out("insert", "m"))
    result = cli("retry", fresh, failed, 999_999, failed)
    assert (result.exit_code, result.stdout) == (3, f"{failed}\n")
    assert result.stderr == (
        f"gendurable: instance {fresh} is runnable, not failed or cancelled; only such instances run again"
        " (and 1 more were left as they are)\n"
    )
    assert row(conn, failed)["status"] == "runnable"


def test_retry_by_filters_takes_every_failed_one_that_matches(cli: Cli, out: Out, out_json: CliJson, run_all, conn):
    ids = [int(out("insert", "pack", f'{{"fails": true, "n": {n}}}', "--step", "perform")) for n in range(3)]
    run_all()
    assert out_json("retry", "--fsm", "pack", "--dry-run") == {"would_retry": ids}
    assert row(conn, ids[0])["status"] == "failed"
    assert out_json("retry", "--where", "state.n=1", "--yes") == {"retried": [ids[1]]}
    assert out("retry", "--fsm", "pack", "--yes").split() == [str(ids[0]), str(ids[2])]
    assert cli("retry", "--fsm", "pack", "--yes").exit_code == 3


def test_a_retry_that_would_take_an_occupied_key_is_a_conflict(cli: Cli, out: Out, run_all, conn: Connection):
    old = int(out("insert", "pack", '{"fails": true}', "--step", "perform", "--unique-key", "k"))
    run_all()
    new = int(out("insert", "m", "--unique-key", "k"))
    result = cli("retry", old)
    assert result.exit_code == 4
    assert f"occupied by instance {new}" in result.stderr
    assert row(conn, old)["status"] == "failed"


# Cancel.


def test_cancel_prints_the_ids_that_it_cancelled(cli: Cli, out: Out, out_json: CliJson, conn: Connection):
    first, second = int(out("insert", "m")), int(out("insert", "m"))
    assert out("cancel", first, "--reason", "no longer wanted") == f"{first}\n"
    assert (row(conn, first)["status"], row(conn, first)["last_error"]) == ("cancelled", "no longer wanted")
    assert out_json("cancel", first, second) == {"cancelled": [second]}, "the first was cancelled before"
    result = cli("wait", first)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"instance {first} ended cancelled: no longer wanted" in result.stderr
    assert [each["id"] for each in out_json("list", "--status", "cancelled")] == [second, first]
    assert out_json("status")["queues"][0]["counts"]["cancelled"] == 2


def test_cancel_of_what_has_ended_leaves_with_3_but_does_the_others(cli: Cli, out: Out, failed: int, conn: Connection):
    fresh = int(out("insert", "m"))
    result = cli("cancel", failed, fresh, 999_999)
    assert (result.exit_code, result.stdout) == (3, f"{fresh}\n")
    assert f"instance {failed} has ended or does not exist" in result.stderr
    assert "(and 1 more were left as they are)" in result.stderr
    assert row(conn, failed)["status"] == "failed"


def test_cancel_by_filters_takes_every_live_one_that_matches(
    cli: Cli, out: Out, out_json: CliJson, failed: int, conn: Connection
):
    ids = [int(out("insert", "m", f'{{"n": {n}}}')) for n in range(3)]
    assert out_json("cancel", "--fsm", "m", "--dry-run") == {"would_cancel": ids}
    assert out_json("cancel", ids[0], "--dry-run") == {"would_cancel": [ids[0]]}
    assert row(conn, ids[0])["status"] == "runnable"
    assert out_json("cancel", "--where", "state.n=1", "--yes") == {"cancelled": [ids[1]]}
    assert out_json("cancel", ids[1], "--dry-run") == {"would_cancel": []}
    assert cli("cancel", "--status", "awaiting_signal", "--yes").exit_code == 3
    assert out("cancel", "--status", "runnable", "--yes").split() == [str(ids[0]), str(ids[2])]
    assert cli("cancel", "--fsm", "m", "--yes").exit_code == 3
    assert row(conn, failed)["status"] == "failed"


def test_cancel_leaves_children_alone_unless_told_otherwise(out: Out, conn: Connection):
    parents = [int(out("insert", "m")) for _ in range(2)]
    for parent in parents:
        conn.execute("update gen_durable set spawn_round = 1 where id = %s", [parent])
        conn.execute(
            "insert into gen_durable (fsm, step, parent_id, child_round, child_index) values ('m', 's', %s, 1, 0)",
            [parent],
        )
    out("cancel", parents[0])
    out("cancel", parents[1], "--cascade")
    found = conn.execute("select status::text from gen_durable where parent_id is not null order by parent_id")
    assert [status for (status,) in found] == ["runnable", "cancelled"]


def test_what_was_cancelled_can_be_retried(out: Out, out_json: CliJson, conn: Connection):
    id = int(out("insert", "m"))
    out("cancel", id)
    assert out_json("retry", id, "--dry-run") == {"would_retry": [id]}
    assert out_json("retry", id) == {"retried": [id]}
    found = row(conn, id)
    assert (found["status"], found["cancel_reason"]) == ("runnable", None)


# Garbage.


def test_gc_deletes_what_ended_long_ago_and_says_how_much(out: Out, out_json: CliJson, failed: int, conn: Connection):
    waiting = int(out("insert", "m"))
    assert out("gc", "--older-than", "1h") == "deleted 0\n"
    assert out("gc", "--older-than", "0s", "--dry-run") == "would delete 1\n"
    assert out_json("gc", "--older-than", "0s", "--dry-run") == {"would_delete": 1}
    assert out_json("gc", "--older-than", "0s", "--batch", "1") == {"deleted": 1}
    assert [each for (each,) in conn.execute("select id from gen_durable")] == [waiting]
    assert failed != waiting


def test_what_gc_would_delete_is_what_it_deletes(out: Out, out_json: CliJson, run_all, conn: Connection):
    """Families: one whole and old, one with a young child, one whose parent lives."""
    old, young, living = (a_family(out, run_all) for _ in range(3))
    conn.execute("update gen_durable set updated_at = now() - interval '2 days'")
    conn.execute("update gen_durable set updated_at = now() where parent_id = %s and child_index = 0", [young])
    conn.execute("update gen_durable set status = 'runnable' where id = %s", [living])
    promised = out_json("gc", "--older-than", "1d", "--dry-run")["would_delete"]
    assert out_json("gc", "--older-than", "1d")["deleted"] == promised == 4
    left = {each for (each,) in conn.execute("select coalesce(parent_id, id) from gen_durable")}
    assert left == {young, living}
    assert old not in left


# Machines, configuration, help for shells.


def test_fsms_shows_what_is_loaded(out: Out, out_json: CliJson):
    found = out_json("fsms", "--fsms", "storefront")
    assert [(each["fsm"], each["fsm_version"], each["queue"]) for each in found] == [
        ("checkout", 1, "tills"),
        ("checkout", 2, "default"),
        ("pack", 1, "default"),
    ]
    assert found[0] == {
        "fsm": "checkout",
        "fsm_version": 1,
        "queue": "tills",
        "initial": "start",
        "steps": ["start", "pack", "finish"],
        "state": "Order",
        "class": "storefront.Checkout",
    }
    assert re.search(
        r"^checkout +1 +tills +start +start, pack, finish +Order +storefront\.Checkout$",
        out("fsms", "--fsms", "storefront"),
        re.MULTILINE,
    )


def test_config_show_tells_every_setting_and_its_layer(out: Out, out_json: CliJson, tmp_path, monkeypatch):
    (tmp_path / "gendurable.toml").write_text('[worker]\nlease = "70s"\npoll = "2s"\n[queues]\na = 3\n')
    monkeypatch.setenv("GENDURABLE_POLL", "3s")
    document = out_json("config", "show", "--reap", "11s")
    assert document["lease"] == {"value": "70s", "source": "file gendurable.toml"}
    assert document["poll"] == {"value": "3s", "source": "environment GENDURABLE_POLL"}
    assert document["reap"] == {"value": "11s", "source": "cli --reap"}
    assert document["heartbeat"] == {"value": "20s", "source": "default"}
    assert document["queues"]["value"] == {"a": 3}
    text = out("config", "show")
    assert re.search(r"^lease +70s +file gendurable.toml$", text, re.MULTILINE)
    assert re.search(r'^queues +\{"a": 3\} +file gendurable.toml$', text, re.MULTILINE)


def test_a_worker_can_be_told_to_leave_chores_to_others(out_json: CliJson, tmp_path):
    (tmp_path / "gendurable.toml").write_text('[gc]\nretention = "7d"\n')
    document = out_json("config", "show", "--no-reaper", "--no-gc")
    assert document["reaper"] == {"value": False, "source": "cli --no-reaper"}
    assert document["gc_retention"] == {"value": None, "source": "cli --no-gc"}
    document = out_json("config", "show")
    assert document["reaper"] == {"value": True, "source": "default"}
    assert document["gc_retention"] == {"value": "7d", "source": "file gendurable.toml"}


def test_config_show_never_shows_a_password(cli: Cli):
    for dsn in ("postgresql://u:hidden@h/d", "host=h password=hidden"):
        for arguments in (["config", "show"], ["config", "show", "--json"]):
            result = cli(*arguments, "--dsn", dsn)
            assert result.exit_code == 0
            assert "hidden" not in result.output
            assert "***" in result.stdout


def test_config_show_can_only_judge(cli: Cli):
    result = cli("config", "show", "--check")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "the configuration is good\n")


def test_a_worker_can_only_check_its_configuration(cli: Cli):
    result = cli("worker", "--fsms", "storefront", "--check-config")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "checkout@1" in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(bare_cli: Cli, shell: str):
    result = bare_cli("completion", shell)
    assert result.exit_code == 0
    assert "_GENDURABLE_COMPLETE" in result.stdout


def test_the_shell_is_told_which_commands_there_are(bare_cli: Cli, monkeypatch):
    monkeypatch.setenv("_GENDURABLE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "gendurable mi")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert bare_cli().stdout == "plain,migrate\n"


# Migrations.


def test_migrations_go_up_and_down_and_tell_where_they_stand(fresh_database: str, bare_cli: Cli):
    def run(*arguments: object) -> Any:
        result = bare_cli("migrate", *arguments, "--dsn", fresh_database)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout) if "--json" in arguments else result.stdout

    names = [step.name for step in migrations()]
    newest = len(names)
    status = {"schema": "public", "installed": 0, "newest": newest, "pending": newest}
    assert run("status", "--json") == status
    assert run("up", "--dry-run").splitlines() == [f"would apply {name}" for name in names]
    assert run("up", "--dry-run", "--json") == {"applied": [], "pending": names}
    assert run("up", "--to", "0") == "nothing to do: the schema has that version\n"
    assert run("up").splitlines() == [f"applied {name}" for name in names]
    assert run("up", "--json") == {"applied": [], "pending": []}
    assert run("status", "--json", "--check") == status | {"installed": newest, "pending": 0}
    assert re.search(rf"^installed +{newest}$", run("status"), re.MULTILINE)
    assert run("down", "--yes").splitlines() == [f"undid {name}" for name in reversed(names)]
    assert run("down", "--yes", "--json") == {"undone": []}


def test_migrate_status_can_be_asked_to_leave_with_5_when_behind(fresh_database: str, bare_cli: Cli):
    result = bare_cli("migrate", "status", "--check", "--dsn", fresh_database)
    assert result.exit_code == 5
    assert "run `gendurable migrate up`" in result.stderr
    assert "installed" in result.stdout


def test_a_migration_that_waits_for_a_lock_gives_up_when_told_to(fresh_database: str, bare_cli: Cli):
    migrate.up(fresh_database)
    with psycopg.connect(fresh_database) as holder:
        holder.execute("lock table gen_durable in access share mode")
        result = bare_cli("migrate", "down", "--yes", "--lock-timeout", "50ms", "--dsn", fresh_database)
    assert result.exit_code == 6
    assert "nothing was changed" in result.stderr
    assert migrate.status(fresh_database).pending == 0


def test_the_sql_that_dbas_run_makes_the_same_schema_and_a_role_that_can_work(fresh_database: str, bare_cli: Cli):
    text = bare_cli("migrate", "sql", "--schema", 'odd "name"', "--grants", "gendurable_sql_test").stdout
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        conn.execute("create role gendurable_sql_test login")
        try:
            conn.execute(text.encode())
            assert migrate.status(fresh_database, schema='odd "name"').pending == 0
            with Client(f"{fresh_database} user=gendurable_sql_test", schema='odd "name"') as client:
                id = client.insert(Pack.new({"part": 1}))
                client.signal(id, "n")
                assert client.get(id).fsm == "pack"
            back = bare_cli("migrate", "sql", "--schema", 'odd "name"', "--down").stdout
            conn.execute(back.encode())
            assert migrate.status(fresh_database, schema='odd "name"').installed == 0
        finally:
            conn.execute("drop owned by gendurable_sql_test cascade")
            conn.execute("drop role gendurable_sql_test")


# Health.


@pytest.fixture
def probe():
    """A worker's probe that answers what the test wants."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(server.answer)
            self.end_headers()
            self.wfile.write(b"draining\n")

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        answer = 200

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_health_says_ok_when_the_worker_does(bare_cli: Cli, probe):
    address = f"127.0.0.1:{probe.server_port}"
    assert bare_cli("health", "--http", address).stdout == "ok\n"
    assert bare_cli("health", "--url", f"http://{address}/livez").stdout == "ok\n"
    assert json.loads(bare_cli("health", "--http", address, "--json").stdout) == {"healthy": True}


def test_health_leaves_with_1_and_the_reason_when_the_worker_is_not_well(bare_cli: Cli, probe):
    probe.answer = 503
    result = bare_cli("health", "--url", f"http://127.0.0.1:{probe.server_port}/readyz")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "answers 503: draining" in result.stderr


def test_health_leaves_with_1_when_nobody_answers(bare_cli: Cli, probe):
    probe.shutdown()
    probe.server_close()
    result = bare_cli("health", "--http", f"127.0.0.1:{probe.server_port}")
    assert result.exit_code == 1
    assert "does not answer" in result.stderr


# Doctor.


def test_doctor_looks_at_server_role_sizes_and_sessions(cli: Cli):
    result = cli("doctor", "--json")
    checks = {each["check"]: each for each in json.loads(result.stdout)["checks"]}
    assert set(checks["schema"]) == {"check", "ok", "message"}
    assert set(checks) == {
        "schema",
        "server",
        "primary",
        "durability",
        "rights",
        "clock",
        "autovacuum",
        "connections",
        "partition locks",
        "prepared statements",
    }
    assert checks["server"]["ok"]
    assert checks["rights"]["ok"]
    assert checks["partition locks"]["ok"]
    findings = [name for name, each in checks.items() if not each["ok"]]
    assert result.exit_code == (1 if findings else 0)
    text = cli("doctor").stdout
    assert text.splitlines()[0].split() == ["CHECK", "VERDICT", "WHAT"]


def test_doctor_finds_what_is_wrong(cli: Cli, conn: Connection, dsn: str):
    conn.execute("create role gendurable_poor_test login")
    conn.execute("alter table signals set (autovacuum_enabled = false)")
    try:
        conn.execute("grant select on all tables in schema public to gendurable_poor_test")
        result = cli(
            "doctor", "--json", "--queues", "a=1000", "--processes", "99", "--dsn", f"{dsn} user=gendurable_poor_test"
        )
        checks = {each["check"]: each for each in json.loads(result.stdout)["checks"]}
    finally:
        conn.execute("alter table signals reset (autovacuum_enabled)")
        conn.execute("drop owned by gendurable_poor_test")
        conn.execute("drop role gendurable_poor_test")
    assert result.exit_code == 1
    assert "lacks insert on gen_durable" in checks["rights"]["message"]
    assert "select" not in checks["rights"]["message"].split(";")[0]
    assert "off for signals" in checks["autovacuum"]["message"]
    assert "raise max_connections" in checks["connections"]["message"]
    assert "rights" in result.stderr


# Where global options stand.


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dsn", "DSN", "--json", "list"],
        ["list", "--dsn", "DSN", "--json"],
        ["--json", "list", "--dsn", "DSN"],
        ["--dsn", "host=nowhere.invalid", "list", "--dsn", "DSN", "--json"],
        [
            "--schema",
            "public",
            "--debug",
            "--log-level",
            "info",
            "list",
            "--json",
            "--log-format",
            "json",
            "--dsn",
            "DSN",
        ],
        ["--dsn", "DSN", "migrate", "--json", "status"],
        ["migrate", "--dsn", "DSN", "status", "--json"],
        ["config", "--dsn", "DSN", "show", "--json"],
    ],
)
def test_global_options_are_taken_before_and_after_the_command(bare_cli: Cli, dsn: str, arguments: list[str]):
    result = bare_cli(*[dsn if word == "DSN" else word for word in arguments])
    assert result.exit_code == 0, result.stderr
    json.loads(result.stdout)


def test_another_schema_is_another_world(cli: Cli, conn: Connection):
    try:
        assert cli("--schema", "elsewhere", "migrate", "up").exit_code == 0
        assert cli("insert", "m", "--schema", "elsewhere").exit_code == 0
        assert json.loads(cli("list", "--json").stdout) == []
        assert len(json.loads(cli("list", "--json", "--schema", "elsewhere").stdout)) == 1
    finally:
        conn.execute("drop schema elsewhere cascade")


def test_the_client_and_the_command_line_see_the_same(out_json: CliJson, dsn: str):
    with Client(dsn) as client:
        id = client.insert(Checkout.new({"number": 1}))
        document = out_json("get", id)
        instance = client.get(id)
    assert document["state"] == instance.state
    assert document["inserted_at"] == instance.inserted_at.isoformat()
