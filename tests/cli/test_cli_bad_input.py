"""Whatever is wrong with what was given: the right exit code, one line on stderr, no traceback, nothing written."""

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from attrs import field, frozen
from click.testing import Result
from commandline import Cli
from psycopg.conninfo import make_conninfo

PASSWORD = "hunter2-and-more"
NOWHERE = f"postgresql://u:{PASSWORD}@127.0.0.1:1/d"
DEEP = "[" * 100_000 + "]" * 100_000
# The rows that cases may name: one that is live and one that has ended.
LIVE, ENDED = "1", "2"


@frozen
class Case:
    arguments: str | list[str]
    complaint: str
    code: int = 2
    env: dict[str, str] = field(factory=dict)
    file: str | None = None
    stdin: str | bytes | None = None

    @property
    def words(self) -> list[str]:
        return self.arguments.split(" ") if isinstance(self.arguments, str) else self.arguments


def insert(*options: str) -> list[str]:
    return ["insert", "m", *options]


CASES = {
    # JSON.
    "half a state": Case(["insert", "m", "{"], "STATE_JSON.*is no JSON: Expecting property name.*use - or @FILE"),
    "an empty state": Case(["insert", "m", ""], "is no JSON: Expecting value"),
    "a state that is no object": Case(["insert", "m", "[1]"], "STATE_JSON is no JSON object"),
    "a number as a state": Case(["insert", "m", "7"], "STATE_JSON is no JSON object"),
    "a null state": Case(["insert", "m", "null"], "STATE_JSON is no JSON object"),
    "single quotes": Case(["insert", "m", "{'a': 1}"], "is no JSON"),
    "NaN in a state": Case(["insert", "m", '{"a": NaN}'], "NaN is no JSON number"),
    "infinity in a state": Case(["insert", "m", '{"a": -Infinity}'], "-Infinity is no JSON number"),
    "an overflowing number": Case(["insert", "m", '{"a": 1e999}'], r"state\.a: inf is no JSON number"),
    "a key twice": Case(["insert", "m", '{"a": 1, "a": 2}'], "the key 'a' stands there twice"),
    "something behind the state": Case(["insert", "m", "{} {}"], "Extra data"),
    "a NUL in a state": Case(
        ["insert", "m", r'{"a": "\u0000"}'], r"state\.a: a NUL character, which Postgres cannot store"
    ),
    "half a surrogate pair": Case(["insert", "m", r'{"a": "\ud800"}'], r"state\.a: a lone surrogate"),
    "a state too deep to read": Case(["insert", "m", '{"a":' + DEEP + "}"], "nested too deeply"),
    "a state too deep to store": Case(["insert", "m", '{"a":' + "[" * 250 + "]" * 250 + "}"], "nested too deeply"),
    "a state too large": Case(
        ["insert", "m", "-"], "bytes of JSON, the limit is 1048576", stdin=f'{{"a": "{"x" * 2**20}"}}'
    ),
    "a number too long": Case(["insert", "m", '{"a": ' + "9" * 5000 + "}"], "is no JSON: .*limit"),
    "a state that is not UTF-8": Case(["insert", "m", "-"], "stdin is not UTF-8", stdin=b'{"a": "\xff"}'),
    "a state with a byte order mark": Case(["insert", "m", "-"], "BOM", stdin=b"\xef\xbb\xbf{}"),
    "an empty stdin": Case(["insert", "m", "-"], "is no JSON", stdin=""),
    "a file that is not there": Case(["insert", "m", "@nothing.json"], "nothing.json cannot be read: No such file"),
    "a file that is a folder": Case(["insert", "m", "@."], "cannot be read: Is a directory"),
    "a file without a name": Case(["insert", "m", "@"], "cannot be read"),
    "an endless file": Case(["insert", "m", "@/dev/zero"], "holds more than 67108864 bytes"),
    "half a payload": Case(["signal", LIVE, "n", "{"], "PAYLOAD_JSON.*is no JSON"),
    "NaN as a payload": Case(["signal", LIVE, "n", "NaN"], "NaN is no JSON number"),
    "a NUL in a payload": Case(["signal", LIVE, "n", r'"\u0000"'], "payload: a NUL character"),
    "a payload too deep": Case(["signal", LIVE, "n", "[" * 250 + "]" * 250], "nested too deeply"),
    # A state that its class refuses.
    "a state that its machine refuses": Case(
        ["insert", "pack", '{"part": -1}', "--fsms", "storefront"],
        "state: refused by validate: ValueError: parts count from zero",
    ),
    "a missing field": Case(["insert", "checkout", "{}", "--fsms", "storefront"], r"state\.number: missing"),
    "a field of another type": Case(
        ["insert", "checkout", '{"number": "x"}', "--fsms", "storefront"],
        r"state\.number: expected an integer, got 'x'",
    ),
    "an unknown field": Case(
        ["insert", "checkout", '{"number": 1, "payed": 1}', "--fsms", "storefront"], "did you mean 'paid'"
    ),
    "an unknown machine": Case(
        ["insert", "checkin", "--fsms", "storefront"],
        "No FSM 'checkin' version 1 is loaded; there are: checkout version 1, checkout version 2, pack version 1",
    ),
    "an unknown version": Case(
        ["insert", "checkout", "--version", "9", "--fsms", "storefront"], "No FSM 'checkout' version 9"
    ),
    "an unknown step": Case(
        ["insert", "checkout", '{"number": 1}', "--step", "nope", "--fsms", "storefront"],
        "checkout has no step 'nope'; its steps are start",
    ),
    # Ids.
    "an id of zero": Case("get 0", "'0' is no instance id: give a positive 64-bit integer"),
    "a negative id": Case("get -1", "No such option"),
    "a negative id behind the options": Case("get -- -1", "'-1' is no instance id"),
    "an id that is no number": Case("get abc", "'abc' is no instance id"),
    "an id with a fraction": Case("get 1.0", "'1.0' is no instance id"),
    "an id beyond 64 bits": Case("get 9223372036854775808", "is no instance id"),
    "an id in other digits": Case("get \N{ARABIC-INDIC DIGIT ONE}", "is no instance id"),
    "an id with a sign": Case("get +1", "is no instance id"),
    "an id with a space": Case(["get", " 1"], "is no instance id"),
    "an empty id": Case(["get", ""], "is no instance id"),
    "a bad id for a signal": Case("signal x n", "is no instance id"),
    "a bad id to wait for": Case("wait 1 x", "is no instance id"),
    "a bad id to retry": Case("retry 1 x", "is no instance id"),
    "no id at all": Case("get", "Missing argument 'ID'; see 'gendurable get --help'"),
    "nothing to wait for": Case("wait", "Missing argument"),
    "an id that nobody has": Case("get 424242", "no instance has id 424242", code=3),
    "waiting for nobody": Case("wait 424242", "no instance has id 424242", code=3),
    "a signal to nobody": Case("signal 424242 n", "instance 424242 has ended or does not exist", code=3),
    "a signal to one that has ended": Case(f"signal {ENDED} n", f"instance {ENDED} has ended", code=3),
    "a bad id to cancel": Case("cancel 1 x", "is no instance id"),
    "a cancel of nobody": Case("cancel 424242", "instance 424242 has ended or does not exist", code=3),
    "a cancel of one that is done": Case(f"cancel {ENDED}", "has ended or does not exist", code=3),
    "a cancel of what matches nothing": Case("cancel --fsm nobody --yes", "no live instance matches", code=3),
    "a cancel of nothing": Case("cancel", "Name the instances by id, or choose them by filters"),
    "a cancel by id and filter": Case(f"cancel {LIVE} --fsm m", "one of the two"),
    "a cancel by id and status": Case(f"cancel {LIVE} --status runnable", "one of the two"),
    "a cancel of what has ended": Case("cancel --status done --yes", "'done' is not one of"),
    "a cancel for no reason": Case(["cancel", str(LIVE), "--reason", " "], "reason: ' ' is no text that says why"),
    "a retry of nobody": Case("retry 424242", "no instance has id 424242", code=3),
    "a retry of one that runs": Case(f"retry {LIVE}", "is runnable, not failed", code=3),
    "a retry of one that is done": Case(f"retry {ENDED}", "is done, not failed", code=3),
    "a retry of what matches nothing": Case("retry --fsm nobody --yes", "no failed instance matches", code=3),
    "a retry of nothing": Case("retry", "Name the instances by id, or choose them by filters"),
    "a retry by id and filter": Case(f"retry {LIVE} --fsm m", "one of the two"),
    # Durations and times.
    "a duration without a unit": Case(insert("--in", "5"), "'5' is no duration: write a number with a unit"),
    "a negative duration": Case(insert("--in=-5s"), "is no duration"),
    "an unknown unit": Case(insert("--in", "5w"), "is no duration"),
    "a duration of two parts": Case(insert("--in", "1h30m"), "is no duration"),
    "a duration beyond all time": Case(insert("--in", "99999999d"), "give at most 36525 days"),
    "no duration at all": Case(insert("--in", ""), "is no duration"),
    "a timeout without a unit": Case(f"wait {LIVE} --timeout 5", "'--timeout': '5' is no duration"),
    "a timeout without a wait": Case(insert("--timeout", "5s"), "--timeout needs --wait"),
    "a retention without a unit": Case("gc --older-than 7", "is no duration"),
    "garbage collection of everything": Case("gc", "Missing option '--older-than'"),
    "a batch of nothing": Case("gc --older-than 1d --batch 0", r"gc\.batch: 0 is out of range"),
    "a pause of nothing": Case("status --watch 0s", "is not longer than nothing"),
    "a time without a zone": Case(insert("--at", "2031-01-01T00:00:00"), "has no time zone: add Z"),
    "a day": Case(insert("--at", "2031-01-01"), "has no time zone"),
    "a time that is none": Case(insert("--at", "tomorrow"), "'tomorrow' is no time: write 2031-12-24T18:00:00Z"),
    "the 30th of February": Case(insert("--at", "2031-02-30T00:00:00Z"), "is no time"),
    "a time beyond all time": Case(insert("--at", "9999-12-31T23:59:59-12:00"), "outside the years 1 to 9999"),
    "two times": Case(insert("--at", "2031-01-01T00:00:00Z", "--in", "5s"), "--at and --in exclude each other"),
    # Names, keys, priorities, versions.
    "a machine without a name": Case(["insert", ""], "'' is empty; give 1 to 255 bytes"),
    "a machine's name too long": Case(["insert", "x" * 256], "has 256 bytes; give at most 255"),
    "a name with a line break": Case(["insert", "a\nb"], r"'a\\nb' has unprintable characters"),
    "a name that moves the cursor": Case(["insert", "\x1b[2J"], r"'\\x1b\[2J' has unprintable characters"),
    "a queue without a name": Case(insert("--queue", ""), "'--queue': '' is empty"),
    "a step without a name": Case(insert("--step", ""), "'--step': '' is empty"),
    "a signal without a name": Case(["signal", LIVE, ""], "'NAME': '' is empty"),
    "a signal's name too long": Case(["signal", LIVE, "ü" * 128], "has 256 bytes"),
    "a name that is not UTF-8": Case(["signal", LIVE, "a\udcff"], "lone surrogate"),
    "an empty partition key": Case(insert("--partition-key", ""), "'--partition-key': '' is empty; give 1 to 1024"),
    "a unique key too long": Case(insert("--unique-key", "k" * 1025), "has 1025 bytes; give at most 1024"),
    "a dedup key too long": Case(["signal", LIVE, "n", "--dedup-key", "k" * 1025], "has 1025 bytes"),
    "a priority too high": Case(insert("--priority", "32768"), "'--priority': 32768 is not in the range"),
    "a priority that is no number": Case(insert("--priority", "high"), "'high' is not a valid integer"),
    "a version of zero": Case(insert("--version", "0"), "0 is not in the range"),
    "a version beyond 32 bits": Case(insert("--version", "2147483648"), "is not in the range"),
    # Reading.
    "a limit of nothing": Case("list --limit 0", "'--limit': 0 is not in the range"),
    "a limit that is no number": Case("list --limit many", "'many' is not a valid integer"),
    "an unknown status": Case("list --status finished", "'finished' is not one of"),
    "a filter without a value": Case("list --where state.a", "is no filter: write state.customer.id=7"),
    "a filter of another column": Case("list --where step.a=1", "is no filter"),
    "a filter without a path": Case("list --where state=1", "is no filter"),
    "a filter with a hole": Case("list --where state..a=1", "is no filter"),
    "a filter that is not UTF-8": Case(["list", "--where", "state.a=\udcff"], "is no filter"),
    "a role without a name": Case(["migrate", "sql", "--grants", ""], "'' is no role name"),
    "a role's name that is not UTF-8": Case(["migrate", "sql", "--grants", "r\udcff"], "is not UTF-8"),
    "an id of a megabyte": Case(["get", "9" * 2**20], r"'9+\.\.\.9+' is no instance id"),
    "an unknown column": Case(f"get {LIVE} --field colour", "No column 'colour'; there are: id, fsm"),
    # Commands and options.
    "an unknown command": Case("frobnicate", "No command 'frobnicate'; see 'gendurable --help'"),
    "a misspelt command": Case("insrt m", "No command 'insrt', did you mean insert"),
    "an unknown option": Case("list --colour", "No such option.*; see 'gendurable list --help'"),
    "an option without its value": Case("list --limit", "requires an argument"),
    "too many words": Case("get 1 2", "unexpected extra argument"),
    "an unknown subcommand": Case("migrate sideways", "No such command 'sideways'"),
    "an unknown shell": Case("completion tcsh", "'tcsh' is not one of"),
    "a probe that is no URL": Case("health --url ftp://x", "is no URL"),
    "a probe on no port": Case("health --url http://127.0.0.1:99999/", "not healthy", code=1),
    # Queues and workers.
    "a queue without a size": Case("worker --queues default", "queues: 'default' has no size: write 'default=10'"),
    "a queue of nothing": Case("worker --queues default=0", "0 is out of range: give a number from 1 to 1000"),
    "a queue too large": Case("worker --queues default=1001", "1001 is out of range"),
    "a queue of some": Case("worker --queues default=some", "'some' is no whole number"),
    "a queue twice": Case("worker --queues a=1 --queues a=2", "queue 'a' is named twice"),
    "no queue": Case(["worker", "--queues", ","], "no queue is named"),
    "a lease without a unit": Case("worker --lease 60", r"worker\.lease: '60' is no duration.*\(from cli --lease\)"),
    "a heartbeat too slow for its lease": Case(
        "worker --heartbeat 30s", r"heartbeat 30s \(from cli --heartbeat\) times 3 is longer than worker\.lease 60s"
    ),
    "a poll longer than the longest": Case("worker --poll 10s", "is longer than worker.max_poll 5s"),
    "a prefetch of less than nothing": Case("worker --prefetch=-1", "-1 is out of range"),
    "no processes": Case("worker --processes 0", "0 is out of range"),
    "an address without a port": Case("worker --http localhost", "write HOST:PORT"),
    "an unknown log level": Case("worker --log-level loud", "write debug, info, warning or error"),
    "an unknown log format": Case("--log-format xml worker", "write auto, console or json"),
    "a worker without machines": Case("worker", "fsms: no machines to run; say where they are"),
    "machines that are not configured": Case("fsms", "fsms: no machines are configured"),
    # Modules.
    "a module that is not there": Case(
        "worker --fsms no.such.module", "cannot import 'no.such.module': ModuleNotFoundError"
    ),
    "a module that fails": Case("worker --fsms failing", "cannot import 'failing': RuntimeError: no luck today"),
    "a module with a typing error": Case("fsms --fsms mistyped", "cannot import 'mistyped': SyntaxError"),
    "a module that leaves": Case("fsms --fsms leaving", "cannot import 'leaving': SystemExit"),
    "a module without machines": Case("fsms --fsms json", "module 'json' holds no machine"),
    "an attribute that is not there": Case("fsms --fsms storefront:nothing", "has no attribute 'nothing'"),
    "an attribute that is no machine": Case("fsms --fsms storefront:Order", "is no machine"),
    "a path that is none": Case("fsms --fsms store-front", "'store-front' is no dotted path"),
    "a file name": Case("fsms --fsms ./storefront.py", "is no dotted path"),
    "two machines of one name": Case("worker --fsms storefront,twin", "two machines are named 'pack' version 1"),
    "a machine that is ill defined": Case("fsms --fsms illdefined", "cannot import 'illdefined': DefinitionError"),
    # The database.
    "a server that is not there": Case(
        ["get", "1", "--dsn", NOWHERE], "cannot connect to database 'd' at 127.0.0.1:1", code=5
    ),
    "a host that is not there": Case(["status", "--dsn", "host=/nowhere"], "cannot connect", code=5),
    "a worker without a server": Case(["worker", "--fsms", "storefront", "--dsn", NOWHERE], "cannot connect", code=5),
    "a migration without a server": Case(["migrate", "up", "--dsn", NOWHERE], "cannot connect", code=5),
    "a database that is not there": Case(
        ["get", "1", "--dsn", "DSN dbname=nothing_of_that_name"], "does not exist", code=5
    ),
    "a DSN that is none": Case(
        ["get", "1", "--dsn", f"pass word={PASSWORD}"], "dsn: not understood: write postgresql://", code=2
    ),
    "a DSN of another kind": Case(["get", "1", "--dsn", f"mysql://u:{PASSWORD}@h/d"], "dsn: not understood"),
    "a DSN with an unknown word": Case(
        ["get", "1", "--dsn", f"colour=blue password={PASSWORD}"], "dsn: not understood"
    ),
    "a DSN with a port that is none": Case(
        ["get", "1", "--dsn", f"host=h port=x password={PASSWORD}"], "cannot connect", code=5
    ),
    "a schema without a name": Case(["get", "1", "--schema", ""], "schema: '' is no schema name"),
    "a schema's name too long": Case(["get", "1", "--schema", "s" * 64], "is no schema name"),
    "a schema that is not there": Case(["get", "1", "--schema", "nowhere"], "run `gendurable migrate up`", code=5),
    "an insert before the migration": Case(["insert", "m", "--schema", "nowhere"], "has no gendurable tables", code=5),
    "a version that does not exist": Case("migrate up --to 99", "There is no schema version 99"),
    "a version below zero": Case("migrate up --to=-1", "-1 is not in the range"),
    "a way that leads nowhere": Case("migrate sql --from 1 --to 0", "There is no way from version 1 to 0"),
    "a way back that nobody confirmed": Case("migrate down", "There is nobody to ask: add --yes"),
    "dev with a server": Case("dev --dsn dbname=x", "dev brings its own server"),
    # Configuration files and the environment.
    "a file that was asked for": Case(
        "--config missing.toml get 1", "missing.toml: there is no such file; correct --config"
    ),
    "a file that the environment asked for": Case(
        "get 1",
        "missing.toml: there is no such file; correct GENDURABLE_CONFIG",
        env={"GENDURABLE_CONFIG": "missing.toml"},
    ),
    "a configuration folder": Case("--config . get 1", r"\.: cannot be read \(Is a directory\)"),
    "a file that is no TOML": Case("get 1", r"gendurable\.toml: is no TOML: .*line 1", file="dsn = x"),
    "a file that says things twice": Case("get 1", "is no TOML", file='dsn = ""\ndsn = ""'),
    "an unknown setting": Case(
        "get 1", r"leese: no such setting in gendurable\.toml; did you mean worker\.lease", file='leese = "1s"'
    ),
    "an unknown section": Case("get 1", "did you mean worker", file='[workers]\nlease = "60s"'),
    "a number as a duration": Case("get 1", r"worker\.lease: 60 has no unit", file="[worker]\nlease = 60"),
    "a text as a size": Case("get 1", "size of queue 'a': 'x' is no whole number", file='[queues]\na = "x"'),
    "a DSN that is no text": Case("get 1", "dsn: it is no text", file="dsn = 5"),
    "a limit that no index can hold": Case(
        "get 1", "together pass 2600", file="[limits]\nname_bytes = 1000\nkey_bytes = 2000"
    ),
    "a limit that holds": Case(["insert", "abcd"], "has 4 bytes; give at most 3", file="[limits]\nname_bytes = 3"),
    "a variable that is no duration": Case(
        "get 1", r"from environment GENDURABLE_LEASE", env={"GENDURABLE_LEASE": "soon"}
    ),
    "a misspelt variable": Case("get 1", "did you mean GENDURABLE_QUEUES", env={"GENDURABLE_QUEUE": "a=1"}),
    "a variable of a command": Case("list", "'x' is not a valid integer", env={"GENDURABLE_LIST_LIMIT": "x"}),
    "a URL that leads nowhere": Case(
        "get 1", "cannot connect", code=5, env={"GENDURABLE_DSN": "", "DATABASE_URL": NOWHERE}
    ),
}

MODULES = {
    "failing": "raise RuntimeError('no luck today')",
    "mistyped": "def (:",
    "leaving": "raise SystemExit(3)",
    "twin": "from gendurable import Job\nclass Twin(Job[dict], name='pack'):\n    def perform(self, ctx): ...",
    "illdefined": "from gendurable import FSM, step\nclass M(FSM[dict], initial='x'):\n    @step\n    def start(self, ctx): ...",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that cannot be used."""
    modules = tmp_path / "modules"
    modules.mkdir()
    for name, text in MODULES.items():
        (modules / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(modules)
    return tmp_path


def contents(dsn: str) -> list[Any]:
    with psycopg.connect(dsn) as conn:
        rows = conn.execute("select to_jsonb(g) from gen_durable g order by id").fetchall()
        return rows + conn.execute("select to_jsonb(s) from signals s order by id").fetchall()


@pytest.fixture
def shelf(dsn: str) -> None:
    """One instance that is live, with a signal, and one that has ended."""
    with psycopg.connect(dsn) as conn:
        conn.execute("insert into gen_durable (fsm, step) values ('m', 'start')")
        conn.execute("insert into gen_durable (fsm, step, status, result) values ('m', 'start', 'done', '{}')")
        conn.execute("insert into signals (target_id, name) values (1, 'x')")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("shelf")
def test_what_is_wrong_is_refused(name: str, cli: Cli, dsn: str, folder: Path, monkeypatch):
    case = CASES[name]
    if case.file is not None:
        (folder / "gendurable.toml").write_text(case.file)
    for variable, value in case.env.items():
        monkeypatch.setenv(variable, value)
    before = contents(dsn)
    words = [
        make_conninfo(dsn, dbname=word.split("dbname=")[1]) if word.startswith("DSN ") else word for word in case.words
    ]
    result = cli(*words, input=case.stdin)
    assert_refused(result, case)
    assert contents(dsn) == before, "something was written"


def assert_refused(result: Result, case: Case) -> None:
    assert result.exit_code == case.code, (result.output, result.exception)
    assert result.stdout == ""
    assert re.fullmatch(r"gendurable: [^\n]+\n", result.stderr), result.stderr
    assert re.search(case.complaint, result.stderr), result.stderr
    assert result.stderr[:-1].isprintable()
    assert "Traceback" not in result.stderr
    assert PASSWORD not in result.stderr


def test_there_are_at_least_sixty_cases():
    assert len(CASES) >= 60


def test_debug_shows_where_an_error_came_from_and_still_no_password(bare_cli: Cli):
    result = bare_cli("get", "1", "--dsn", NOWHERE, "--debug")
    assert result.exit_code == 5
    assert "Traceback" in result.stderr
    assert PASSWORD not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("gendurable: cannot connect")


@pytest.mark.parametrize(
    "dsn",
    [NOWHERE, f"host=127.0.0.1 port=1 password={PASSWORD}", f"host=127.0.0.1 port={PASSWORD} password={PASSWORD}"],
)
def test_a_password_is_never_shown_whatever_fails(bare_cli: Cli, dsn: str):
    for command in (
        ["get", "1"],
        ["migrate", "up"],
        ["worker", "--fsms", "storefront"],
        ["doctor"],
        ["status", "--debug"],
    ):
        result = bare_cli(*command, "--dsn", dsn)
        assert result.exit_code in {2, 5}
        assert PASSWORD not in result.output


def test_a_role_without_rights_is_told_so(cli: Cli, dsn: str):
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create role gendurable_nobody_test login")
        try:
            result = cli("insert", "m", "--dsn", f"{dsn} user=gendurable_nobody_test")
        finally:
            conn.execute("drop role gendurable_nobody_test")
    assert result.exit_code == 1
    assert re.fullmatch(r"gendurable: permission denied .*; grant this role the right.*\n", result.stderr)


def test_a_database_that_takes_no_writes_is_named_as_the_cause(cli: Cli, dsn: str):
    result = cli("insert", "m", "--dsn", f"{dsn} options='-c default_transaction_read_only=on'")
    assert result.exit_code == 1
    assert "takes no writes now" in result.stderr


def test_a_schema_of_a_newer_program_is_left_alone(fresh_database: str, bare_cli: Cli):
    assert bare_cli("migrate", "up", "--dsn", fresh_database).exit_code == 0
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        conn.execute("comment on table gen_durable is '99'")
    for command in (["insert", "m"], ["status"], ["migrate", "up"], ["worker", "--fsms", "storefront"]):
        result = bare_cli(*command, "--dsn", fresh_database)
        assert result.exit_code == 5, result.output
        assert "install the newer gendurable" in result.stderr
