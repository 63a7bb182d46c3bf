"""The fixture `durable`, as a user's own test run meets it."""

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import gendurable

pytest_plugins = ["pytester"]

CHECKOUT = Path(gendurable.__file__).parents[1]

MACHINES = """
from gendurable import FSM, Await, Done, Job, step

class Waiting(FSM[dict], name="waiting"):
    @step
    def start(self, ctx):
        return Await("paid", then=self.finish, timeout=3600)

    @step
    def finish(self, ctx):
        return Done({"paid": bool(ctx.awaited)})

class Hello(Job[dict], name="hello"):
    def perform(self, ctx):
        return {"hello": "world"}
"""

TESTS = """
def test_a_signal_arrives(durable):
    waiting = durable.insert(Waiting.new())
    assert durable.drain() == {"await": 1}
    durable.signal(waiting, "paid")
    assert durable.drain() == {"done": 1}
    assert durable.get(waiting).result == {"paid": True}

def test_time_passes_and_nothing_is_left_of_the_other_test(durable):
    waiting = durable.insert(Waiting.new())
    assert durable.drain() == {"await": 1}
    durable.advance(3600)
    assert durable.drain() == {"done": 1}
    assert durable.get(waiting).result == {"paid": False}
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run the tests of a user who has installed gendurable, on the given server or without one."""

    def run_pytest(*arguments: str, dsn: str | None = None) -> pytest.RunResult:
        if dsn is None:
            monkeypatch.delenv("GENDURABLE_TEST_DSN", raising=False)
        else:
            monkeypatch.setenv("GENDURABLE_TEST_DSN", dsn)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=100)

    return run_pytest


def test_without_a_dsn_a_private_server_runs_the_machines_of_the_tests_module(pytester: pytest.Pytester, run):
    say = "\ndef test_where(durable, durable_dsn):\n    print('server:', durable_dsn)\n"
    pytester.makepyfile(MACHINES + TESTS + say)
    result = run("-s")
    result.assert_outcomes(passed=3)
    [line] = [line for line in result.outlines if "server: " in line]
    folder = Path(line.partition("host=")[2].split()[0])
    assert not folder.exists()


def test_a_given_server_is_used_and_left_as_it_was(pytester: pytest.Pytester, run, fresh_database: str):
    pytester.makepyfile(machines=MACHINES, test_shop="from machines import Waiting\n" + TESTS)
    run(dsn=fresh_database).assert_outcomes(passed=2)
    with psycopg.connect(fresh_database) as conn:
        query = "select nspname from pg_namespace where nspname not like 'pg\\_%' and nspname <> 'information_schema'"
        assert conn.execute(query).fetchall() == [("public",)]
        assert conn.execute("select to_regclass('public.gen_durable')").fetchone() == (None,)


def test_the_ini_file_names_server_and_machines(pytester: pytest.Pytester, run, fresh_database: str):
    pytester.makeini(f"[pytest]\ngendurable_dsn = {fresh_database}\ngendurable_fsms = machines:Hello")
    pytester.makepyfile(
        machines=MACHINES,
        test_shop="""
        def test_only_what_is_named_runs(durable, durable_dsn):
            from machines import Hello, Waiting
            assert "dbname=gendurable_test_" in durable_dsn
            hello, _ = durable.insert(Hello.new()), durable.insert(Waiting.new())
            assert durable.drain() == {"done": 1}
            assert durable.get(hello).result == {"hello": "world"}
        """,
    )
    run().assert_outcomes(passed=1)


def test_fixtures_of_the_user_name_server_and_machines(pytester: pytest.Pytester, run, fresh_database: str):
    pytester.makeconftest(f"""
        import pytest
        from gendurable import Job

        class Greeting(Job[dict], name="greeting"):
            def __init__(self, whom):
                self.whom = whom
            def perform(self, ctx):
                return {{"hello": self.whom}}

        @pytest.fixture(scope="session")
        def durable_dsn():
            return {fresh_database!r}

        @pytest.fixture
        def durable_fsms():
            return [Greeting("you")]
    """)
    pytester.makepyfile("""
        def test_it(durable):
            from conftest import Greeting
            hello = durable.insert(Greeting.new())
            assert durable.drain() == {"done": 1}
            assert durable.get(hello).result == {"hello": "you"}
    """)
    run().assert_outcomes(passed=1)


def test_without_any_machine_the_test_is_told_so(pytester: pytest.Pytester, run, fresh_database: str):
    pytester.makepyfile("def test_it(durable):\n    durable.drain()\n")
    result = run(dsn=fresh_database)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*LoadError: module 'test_*' holds no machine*"])


def test_a_transaction_left_open_does_not_hang_the_run(pytester: pytest.Pytester, run, fresh_database: str):
    pytester.makepyfile(
        MACHINES
        + """
import psycopg
left_open = []

def test_it(durable, durable_dsn):
    conn = psycopg.connect(durable_dsn)
    [(schema,)] = conn.execute("select nspname from pg_namespace where nspname like 'gendurable_test%'").fetchall()
    conn.execute(f"select * from {schema}.gen_durable")
    left_open.append(conn)
"""
    )
    result = run(dsn=fresh_database)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*LockNotAvailable*"])


def test_a_run_that_does_not_use_it_does_not_load_the_engine():
    script = "import gendurable.pytest_plugin, sys; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert "gendurable.pytest_plugin" in loaded
    assert not {"psycopg", "cattrs", "gendurable.testing", "gendurable.embedded"} & set(loaded)


def test_an_installed_wheel_brings_the_fixture(
    pytester: pytest.Pytester, run, tmp_path: Path, fresh_database: str, monkeypatch: pytest.MonkeyPatch
):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", tmp_path, CHECKOUT], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    where = f"""
def test_it_is_the_wheel(durable):
    import gendurable.pytest_plugin
    assert gendurable.pytest_plugin.__file__.startswith({str(tmp_path)!r})
"""
    pytester.makepyfile(MACHINES + TESTS + where)
    run(dsn=fresh_database).assert_outcomes(passed=3)
