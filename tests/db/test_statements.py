"""Files, functions and parameters of the SQL room stay together, in a checkout and in the wheel."""

import ast
import inspect
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import pytest
from attrs import frozen

import gendurable
from gendurable.core.duration import ZERO
from gendurable.core.instance import NewInstance, new_instance
from gendurable.core.limiters import Limiters, RateLimit
from gendurable.core.status import Status
from gendurable.core.transition import Advance, CarryOn, Finish, Park, Repeat, SpawnChildren
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.statements import folder, statement

PACKAGE = Path(gendurable.__file__).parent
CHECKOUT = PACKAGE.parent
PLACEHOLDER = re.compile(r"%\((\w+)\)s")
NAMES = sorted(path.stem for path in (CHECKOUT / "sql" / "statements").iterdir())
FUNCTIONS = {
    name: function
    for name, function in inspect.getmembers(store, inspect.isfunction)
    if function.__module__ == store.__name__ and not name.startswith("_")
}
NEW: NewInstance = new_instance(fsm="f", fsm_version=1, step="s", state="{}", queue="q", max_crashes=3)
MINUTE = timedelta(minutes=1)


@frozen
class Held:
    id: int = 1
    fence: int = 1


# One call of each function; what it passes is what every call passes.
CALLS: dict[str, Callable[[Any], Any]] = {
    "claim": lambda c: store.claim(c, queue="q", machines=["f@1"], worker="w", limit=1, lease=MINUTE),
    "claim_plain": lambda c: store.claim_plain(c, queue="q", machines=["f@1"], worker="w", limit=1, lease=MINUTE),
    "is_paused": lambda c: store.is_paused(c, queue="q"),
    "pause_queue": lambda c: store.pause_queue(c, queue="q"),
    "resume_queue": lambda c: store.resume_queue(c, queue="q"),
    "list_paused": store.list_paused,
    "find_limited": lambda c: store.find_limited(c, queue="q", machines=["f@1"], limit=1, window=9),
    "open_buckets": lambda c: store.open_buckets(c, [("rate", "r")]),
    "hold_buckets": lambda c: store.hold_buckets(c, [("rate", "r")]),
    "claim_limited": lambda c: store.claim_limited(c, [1], [("rate", "r")], worker="w", limit=1, lease=MINUTE),
    "count_tokens": lambda c: store.count_tokens(c, [1]),
    "load_signals": lambda c: store.load_signals(c, ids=[1]),
    "load_children": lambda c: store.load_children(c, ids=[1]),
    "extend_leases": lambda c: store.extend_leases(c, [Held()], lease=MINUTE),
    "find_lost": lambda c: store.find_lost(c, [Held()]),
    "release": lambda c: store.release(c, [Held()]),
    "lock_claims": lambda c: store.lock_claims(c, [Held()]),
    "advance": lambda c: store.advance(c, [Advance(1, 1, "s", "{}", ZERO, (1,))]),
    "carry_on": lambda c: store.carry_on(c, [CarryOn(1, 1, "s", "{}")]),
    "repeat": lambda c: store.repeat(c, [Repeat(1, 1, "{}", ZERO, 1)]),
    "park": lambda c: store.park(c, [Park(1, 1, "s", "{}", '["n"]', None, (1,))]),
    "recheck_parked": lambda c: store.recheck_parked(c, [Park(1, 1, "s", "{}", '["n"]', None, (1,))]),
    "spawn": lambda c: store.spawn(c, [SpawnChildren(1, 1, "s", "{}", (NEW,), (1,))]),
    "finish": lambda c: store.finish(c, [Finish(1, 1, Status.DONE, "{}", None)]),
    "lock_instances": lambda c: store.lock_instances(c, ids=[1]),
    "lock_free_instances": lambda c: store.lock_free_instances(c, ids=[1]),
    "seize": lambda c: store.seize(c, ids=[1], reason="why"),
    "compensate": lambda c: store.compensate(c, ids=[1], reason="why"),
    "find_children": lambda c: store.find_children(c, ids=[1]),
    "reap": lambda c: store.reap(c, worker="w", limit=1, lease=MINUTE),
    "expire_awaits": lambda c: store.expire_awaits(c, limit=1),
    "deadlines_passed": store.deadlines_passed,
    "find_overdue": lambda c: store.find_overdue(c, limit=1),
    "hasten_throttled": lambda c: store.hasten_throttled(c, limit=1),
    "drop_buckets": lambda c: store.drop_buckets(c, limit=1),
    "publish_limiters": lambda c: store.publish_limiters(c, Limiters({"r": RateLimit(1, MINUTE, 1)}, {"g": 1})),
    "list_limiters": store.list_limiters,
    "gc": lambda c: store.gc(c, older_than=MINUTE, after=0, limit=1),
    "insert": lambda c: store.insert(c, [NEW]),
    "find_occupant": lambda c: store.find_occupant(c, unique_key=b"k"),
    "lock_target": lambda c: store.lock_target(c, id=1),
    "deliver": lambda c: store.deliver(c, id=1, name="n", payload="{}", dedup_key=None, inbox_limit=1),
    "get_instance": lambda c: store.get_instance(c, id=1),
    "get_status": lambda c: store.get_status(c, id=1),
    "get_statuses": lambda c: store.get_statuses(c, ids=[1]),
    "list_instances": lambda c: store.list_instances(c, limit=1),
    "count_instances": store.count_instances,
    "count_due": store.count_due,
    "count_unserved": store.count_unserved,
    "lock_partitions": lambda c: store.lock_partitions(c, keys=["k"]),
    "find_siblings": lambda c: store.find_siblings(c, keys=["k"], ids=[1]),
    "unlock_partitions": lambda c: store.unlock_partitions(c, keys=["k"]),
    "end_session": lambda c: store.end_session(c, pid=1, started=datetime.now(UTC)),
    "reclaim": lambda c: store.reclaim(c, prefix="w", remaining=MINUTE, limit=1),
    "beat": lambda c: store.beat(c, worker="w", name="w", host="h", pid=1, queues="{}", machines=["f@1"], lease=MINUTE),
    "leave": lambda c: store.leave(c, worker="w"),
    "has_work": lambda c: store.has_work(c, queues=["q"], machines=["f@1"], keyed=True),
    "server_facts": store.server_facts,
    "due_queues": store.due_queues,
    "list_ids": lambda c: store.list_ids(c, statuses=["failed"], paths=['["state", "a"]'], values=["1"], limit=1),
    "list_workers": store.list_workers,
    "examine": store.examine,
    "count_old": lambda c: store.count_old(c, older_than=MINUTE),
    "open_schedules": lambda c: store.open_schedules(c, names=["n"]),
    "list_schedules": store.list_schedules,
    "lock_schedule": lambda c: store.lock_schedule(c, name="n"),
    "advance_schedule": lambda c: store.advance_schedule(c, name="n", tick=datetime.now(UTC)),
    "retry": lambda c: store.retry(c, id=1),
}


class Recorder:
    """Stands in for a connection and its cursor, and remembers what they were asked to run."""

    def __init__(self) -> None:
        self.ran: list[tuple[bytes, dict[str, Any]]] = []

    def cursor(self, **_: Any) -> "Recorder":
        return self

    def execute(self, query: bytes, parameters: dict[str, Any]) -> "Recorder":
        self.ran.append((query, parameters))
        return self


def text(name: str) -> str:
    return statement(name).decode()


def without_comments(sql: str) -> str:
    return re.sub(r"--.*", "", sql)


def files(*suffixes: str) -> Iterator[Path]:
    for home in (CHECKOUT / "sql", PACKAGE):
        yield from (path for path in sorted(home.rglob("*")) if path.suffix in suffixes)


# The files and the functions.


def test_every_file_has_a_function_and_every_function_a_file():
    assert sorted(FUNCTIONS) == NAMES


def test_this_test_calls_every_function():
    assert sorted(CALLS) == sorted(FUNCTIONS), "add a call of the new function to CALLS"


@pytest.mark.parametrize("name", NAMES)
def test_a_function_runs_the_file_of_its_name_and_supplies_exactly_its_parameters(name: str):
    recorder = Recorder()
    CALLS[name](recorder)
    [(query, parameters)] = recorder.ran
    assert query == statement(name)
    assert set(parameters) == set(PLACEHOLDER.findall(text(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_function_takes_no_argument_that_it_leaves_out_of_its_statement(name: str):
    takes = [each for each in inspect.signature(FUNCTIONS[name]).parameters.values() if each.kind is each.KEYWORD_ONLY]
    recorder = Recorder()
    CALLS[name](recorder)
    assert {each.name for each in takes} <= set(recorder.ran[0][1])


# The text.


@pytest.mark.parametrize("name", NAMES)
def test_the_first_line_of_a_file_is_a_comment_that_names_it(name: str):
    first = text(name).splitlines()[0]
    assert re.match(rf"-- {name}: \S", first), f"pg_stat_activity shows {first!r}"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_no_percent_sign_but_in_placeholders(name: str):
    assert "%" not in PLACEHOLDER.sub("", text(name)), "psycopg reads it as a placeholder, in comments too"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_one_statement_in_lower_case(name: str):
    sql = without_comments(text(name))
    assert ";" not in sql
    assert sql == sql.lower()


@pytest.mark.parametrize("path", list(files(".sql")), ids=lambda path: path.name)
def test_no_file_names_a_schema(path: Path):
    sql = without_comments(path.read_text())
    a_table = r"\b(?:(?<!distinct )from|join|into|using|references|table|type|index|update(?!\s+of))\s+(?:only\s+)?\w+\s*\.\s*\w+"
    a_cast = r"::\s*\w+\s*\.\s*\w+"
    a_function = r"\b\w+\s*\.\s*\w+\s*\("
    for qualified in (a_table, a_cast, a_function):
        assert re.findall(qualified, sql) == [], "search_path decides which schema is meant"


def test_nothing_listens_or_notifies():
    command = re.compile(r"(?:^|;)\s*(?:(?:un)?listen|notify)\s+[\"\w*]", re.IGNORECASE | re.MULTILINE)
    for path in files(".sql"):
        assert not re.search(r"\b(?:un)?listen\b|notify", path.read_text(), re.IGNORECASE), path
    for path in files(".py"):
        source = path.read_text()
        assert not re.search(r"pg_notify|add_notify_handler|\.notifies\b|\bNOTIFY\b", source), path
        tree = ast.parse(source)
        prose = {
            ast.get_docstring(node, clean=False)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and node.value not in prose:
                value = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
                assert not command.search(value), f"{path}:{node.lineno}"


# The index for readers.

LISTED = re.findall(
    r"^\| `(\w+)` \| `([\w./]+)` \| (.+) \|$", (CHECKOUT / "sql" / "README.md").read_text(), re.MULTILINE
)


def test_the_index_lists_every_statement_once():
    assert sorted(name for name, _, _ in LISTED) == NAMES, "sql/README.md: statement, caller, the index that serves it"


def test_the_caller_of_a_statement_calls_it():
    for name, caller, _ in LISTED:
        home = PACKAGE / caller
        modules = home.rglob("*.py") if home.is_dir() else [home]
        assert any(re.search(rf"\bstore\.{name}\b", path.read_text()) for path in modules), name


def test_the_indexes_that_serve_a_statement_exist(conn: Connection):
    found = conn.execute("select indexname from pg_indexes where schemaname = current_schema").fetchall()
    for name, _, served in LISTED:
        assert set(re.findall(r"`(\w+)`", served)) <= {index for (index,) in found}, name


# The server.


def prepare(conn: Connection, name: str) -> list[str]:
    """Have the server prepare a file, inferring the types of its parameters; return the columns of its answer."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}"

    prepared = conn.pgconn.prepare(name.encode(), PLACEHOLDER.sub(number, text(name)).encode())
    assert not prepared.error_message, prepared.error_message.decode()
    described = conn.pgconn.describe_prepared(name.encode())
    assert described.nparams == len(numbers)
    return [(described.fname(each) or b"").decode() for each in range(described.nfields)]


@pytest.mark.parametrize("name", NAMES)
def test_the_server_prepares_every_file(conn: Connection, name: str):
    assert prepare(conn, name)


@pytest.mark.parametrize("name", NAMES)
def test_the_columns_of_an_answer_are_the_fields_of_the_class_that_it_is_read_into(conn: Connection, name: str):
    columns = prepare(conn, name)
    [row] = get_args(get_type_hints(FUNCTIONS[name])["return"])
    if attrs.has(row):
        fields = [each for each in attrs.fields(row) if each.init]
        names, defaults = (
            [each.name for each in fields],
            {each.name for each in fields if each.default is not attrs.NOTHING},
        )
    elif issubclass(row, tuple):
        names, defaults = list(row._fields), set(row._field_defaults)
    else:
        names, defaults = columns, set()
    assert columns == names[: len(columns)], "in the same order: they are read by place"
    assert defaults >= set(names[len(columns) :])
    if names is columns:
        assert len(columns) == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_function_runs_against_the_newest_schema(conn: Connection, name: str):
    conn.execute("begin")
    CALLS[name](conn).all()
    conn.execute("rollback")


# The wheel.

LOAD_ALL = """
import sys
from pathlib import Path
wheel, checkout = Path(sys.argv[1]), Path(sys.argv[2])
sys.path = [str(wheel), *(path for path in sys.path if Path(path).resolve() != checkout)]
import gendurable
from gendurable.db import migrate, statements
assert Path(gendurable.__file__).is_relative_to(wheel), gendurable.__file__
assert statements.folder().is_relative_to(wheel), statements.folder()
for name in sys.argv[3:]:
    assert statements.statement(name).startswith(b"-- %b: " % name.encode()), name
for migration in migrate.migrations():
    assert migration.up.read_text() and migration.down.read_text()
    print(migration.name)
"""


def test_the_wheel_carries_every_statement_and_migration(tmp_path: Path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*build, "--wheel-dir", tmp_path, CHECKOUT], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    for path in (CHECKOUT / "sql").rglob("*.sql"):
        shipped = unpacked / "gendurable" / "sql" / path.relative_to(CHECKOUT / "sql")
        assert shipped.read_bytes() == path.read_bytes()
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, unpacked, CHECKOUT, *NAMES],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == sorted(
        path.name.removesuffix(".up.sql") for path in (folder() / "migrations").glob("*.up.sql")
    )
