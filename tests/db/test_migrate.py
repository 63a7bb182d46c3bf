"""Migrations: forward and back, one runner at a time, whole or not at all, in any schema."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from attrs import frozen
from dump_schema import dump
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier
from support import until

from gendurable import FSM, Done, migrate, step
from gendurable.db import migrate as db_migrate
from gendurable.db.connection import connect, search_path
from gendurable.db.statements import folder
from gendurable.errors import (
    DatabaseUnavailable,
    InvalidInstance,
    MigrationError,
    SchemaMissing,
    SchemaTooNew,
)
from gendurable.migrate import MigrationStatus
from gendurable.testing import Harness

ALL = [each.name for each in db_migrate.migrations()]
NEWEST = len(ALL)

SCHEMAS = [
    "Upper Case",
    'quo"ted',
    "it's",
    "schöne Umläute",
    "表",
    "select",
    "a.b, c",
    "%s %(x)s {}",
    "back\\slash",
    "x" * 63,
]


def left_in(dsn: str, schema: str = "public") -> list[str]:
    """Name everything that the schema holds: tables, indexes, sequences, types, functions."""
    query = """
        select relname from pg_class where relnamespace = (select oid from pg_namespace where nspname = %(schema)s)
        union select typname from pg_type where typnamespace = (select oid from pg_namespace where nspname = %(schema)s)
        union select proname from pg_proc where pronamespace = (select oid from pg_namespace where nspname = %(schema)s)
    """
    with psycopg.connect(dsn) as conn:
        return [name for (name,) in conn.execute(query, {"schema": schema})]


def do(dsn: str, *commands: str) -> None:
    with psycopg.connect(dsn) as conn:
        for command in commands:
            conn.execute(command)


def comment(dsn: str, schema: str = "public") -> str | None:
    with connect(dsn, schema=schema) as conn:
        return conn.execute("select obj_description('gen_durable'::regclass, 'pg_class')").fetchone()[0]


@frozen
class Files:
    """A folder of migrations beside the real ones, to which a test adds its own."""

    folder: Path

    def add(self, version: int, up: str, down: str = "select 1") -> str:
        name = f"{version:04}_test"
        self.folder.joinpath(f"{name}.up.sql").write_text(up)
        self.folder.joinpath(f"{name}.down.sql").write_text(down)
        return name


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    copy = tmp_path / "migrations"
    copy.mkdir()
    for path in (folder() / "migrations").iterdir():
        copy.joinpath(path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(db_migrate, "folder", lambda: tmp_path)
    return Files(copy)


def test_up_runs_every_migration_once_in_order(fresh_database: str):
    assert migrate.up(fresh_database) == ALL
    assert migrate.up(fresh_database) == []
    assert comment(fresh_database) == str(NEWEST)


def test_status_tells_what_is_installed_and_what_is_pending(fresh_database: str):
    before = migrate.status(fresh_database)
    assert (before, before.pending) == (MigrationStatus(0, NEWEST), NEWEST)
    migrate.up(fresh_database)
    after = migrate.status(fresh_database)
    assert (after, after.pending) == (MigrationStatus(NEWEST, NEWEST), 0)


def test_down_undoes_every_migration_and_leaves_nothing(fresh_database: str):
    migrate.up(fresh_database)
    assert "durable_status" in left_in(fresh_database)
    assert migrate.down(fresh_database) == ALL[::-1]
    assert left_in(fresh_database) == []
    assert migrate.status(fresh_database).installed == 0
    assert migrate.down(fresh_database) == []


def test_down_takes_the_rows_along(fresh_database: str):
    migrate.up(fresh_database)
    do(fresh_database, "insert into gen_durable (fsm, step) values ('f', 's')")
    do(fresh_database, "insert into signals (target_id, name) select id, 'n' from gen_durable")
    migrate.down(fresh_database)
    assert left_in(fresh_database) == []


def test_forward_back_and_forward_again_makes_the_same_schema(fresh_database: str):
    migrate.up(fresh_database)
    with connect(fresh_database) as conn:
        first = dump(conn)
        for version in range(NEWEST):
            migrate.down(fresh_database, to=version)
            assert migrate.status(fresh_database).installed == version
            migrate.up(fresh_database)
            assert dump(conn) == first


def test_what_others_keep_in_the_schema_survives_up_and_down(fresh_database: str):
    do(fresh_database, "create table theirs (id int)")
    migrate.up(fresh_database)
    migrate.down(fresh_database)
    assert set(left_in(fresh_database)) == {"theirs", "_theirs"}


@pytest.mark.parametrize("to", [-1, NEWEST + 1, True, "1", 1.0])
def test_a_version_that_does_not_exist_is_refused_before_anything_runs(fresh_database: str, to: object):
    for run in (migrate.up, migrate.down):
        with pytest.raises(MigrationError, match=re.escape(f"no schema version {to!r}: give a number from 0")):
            run(fresh_database, to=to)
    assert left_in(fresh_database) == []


# Any schema.


class One(FSM[dict], name="one"):
    @step
    def start(self, ctx):
        return Done({"ran": True})


@pytest.mark.parametrize("schema", SCHEMAS)
def test_any_schema_name_works(fresh_database: str, schema: str):
    assert migrate.up(fresh_database, schema=schema) == ALL
    assert comment(fresh_database, schema) == str(NEWEST)
    assert migrate.status(fresh_database, schema=schema).pending == 0
    assert migrate.status(fresh_database).installed == 0
    with Harness(fresh_database, [One], schema=schema) as durable:
        one = durable.insert(One.new())
        assert durable.drain() == {"done": 1}
        assert durable.get(one).result == {"ran": True}
    assert left_in(fresh_database) == []
    assert migrate.down(fresh_database, schema=schema) == ALL[::-1]
    assert left_in(fresh_database, schema) == []


def test_two_schemas_of_one_database_do_not_touch_each_other(fresh_database: str):
    migrate.up(fresh_database, schema="left")
    migrate.up(fresh_database, schema="right")
    before = left_in(fresh_database, "right")
    migrate.down(fresh_database, schema="left")
    assert left_in(fresh_database, "left") == []
    assert left_in(fresh_database, "right") == before


def test_a_path_set_for_the_role_does_not_lead_elsewhere(fresh_database: str):
    do(fresh_database, "create schema decoy")
    migrate.up(make_conninfo(fresh_database, options="-c search_path=decoy"), schema="ours")
    assert left_in(fresh_database, "decoy") == []
    assert migrate.status(fresh_database, schema="ours").pending == 0


@pytest.mark.parametrize("schema", ["", "x" * 64, "ü" * 32, "a\0b", "\ud800", 5])
def test_a_text_that_cannot_name_a_schema_is_refused(fresh_database: str, schema: str):
    with pytest.raises(InvalidInstance, match="is no schema name"):
        migrate.up(fresh_database, schema=schema)


def test_a_name_that_the_server_reserves_is_refused_in_its_words(fresh_database: str):
    with pytest.raises(MigrationError, match="pg_mine"):
        migrate.up(fresh_database, schema="pg_mine")


# Several runners.


def waiting_migrations(dsn: str) -> int:
    query = """
        select count(*) from pg_stat_activity
        where application_name = 'gendurable migrate' and datname = current_database() and wait_event = 'advisory'
    """
    with psycopg.connect(dsn) as conn:
        return conn.execute(query).fetchone()[0]


def test_runners_wait_for_each_other_and_each_migration_runs_once(fresh_database: str):
    with ThreadPoolExecutor(5) as pool, psycopg.connect(fresh_database) as ahead:
        ahead.execute("select pg_advisory_xact_lock(%s, hashtext('public'))", [db_migrate.LOCK_CLASS])
        runs = [pool.submit(migrate.up, fresh_database) for _ in range(5)]
        until(lambda: waiting_migrations(fresh_database) == 5, "five runners waiting for one")
        assert left_in(fresh_database) == []
        ahead.rollback()
        ran = [name for run in runs for name in run.result()]
    assert sorted(ran) == ALL
    assert migrate.status(fresh_database).pending == 0


def test_a_migration_may_take_longer_than_any_other_statement(fresh_database: str, files: Files):
    files.add(NEWEST + 1, "create table limits as select current_setting('statement_timeout') as longest")
    migrate.up(fresh_database)
    with psycopg.connect(fresh_database) as conn:
        assert conn.execute("select longest::interval > interval '1 hour' from limits").fetchone() == (True,)


def test_runners_of_different_schemas_do_not_wait(fresh_database: str):
    with psycopg.connect(fresh_database) as ahead:
        ahead.execute("select pg_advisory_xact_lock(%s, hashtext('public'))", [db_migrate.LOCK_CLASS])
        assert migrate.up(fresh_database, schema="elsewhere") == ALL


def test_processes_that_start_at_once_leave_one_schema(fresh_database: str):
    script = "import sys; from gendurable import migrate; print(*migrate.up(sys.argv[1], schema='new'))"
    command = [sys.executable, "-c", script, fresh_database]
    runners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [runner.communicate(timeout=60)[0] for runner in runners]
    assert [runner.returncode for runner in runners] == [0] * 4
    assert sorted("".join(said).split()) == ALL


def test_up_and_down_at_once_end_in_one_or_the_other(fresh_database: str):
    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(run, fresh_database) for run in [migrate.up, migrate.down] * 3]
        for run in runs:
            run.result()
    installed = migrate.status(fresh_database).installed
    assert (installed, bool(left_in(fresh_database))) in {(0, False), (NEWEST, True)}


# Whole or not at all.


def test_a_failing_migration_leaves_nothing_of_itself_and_all_of_those_before(fresh_database: str, files: Files):
    migrate.up(fresh_database)
    with connect(fresh_database) as conn:
        before = dump(conn)
    broken = files.add(NEWEST + 1, "create table half (id int); insert into half values (1); select 1 / 0;")
    with pytest.raises(MigrationError, match=r"rolled back: division by zero; remove the cause"):
        migrate.up(fresh_database)
    with connect(fresh_database) as conn:
        assert dump(conn) == before
    files.add(NEWEST + 1, "create table half (id int)", "drop table half")
    assert migrate.up(fresh_database) == [broken]
    assert comment(fresh_database) == str(NEWEST + 1)


def test_a_failing_way_back_leaves_the_version_where_it_was(fresh_database: str, files: Files):
    added = files.add(NEWEST + 1, "create table more (id int)", "drop table more; drop table missing")
    migrate.up(fresh_database)
    with pytest.raises(MigrationError, match="missing"):
        migrate.down(fresh_database)
    assert migrate.status(fresh_database).installed == NEWEST + 1
    assert "more" in left_in(fresh_database)
    files.add(NEWEST + 1, "create table more (id int)", "drop table more")
    assert migrate.down(fresh_database) == [added, *ALL[::-1]]
    assert left_in(fresh_database) == []


def test_a_failing_first_migration_takes_its_new_schema_back(fresh_database: str, files: Files):
    files.folder.joinpath(f"{ALL[0]}.up.sql").write_text("create table gen_durable (id int); select 1 / 0")
    with pytest.raises(MigrationError, match="division by zero"):
        migrate.up(fresh_database, schema="new")
    with psycopg.connect(fresh_database) as conn:
        assert conn.execute("select 1 from pg_namespace where nspname = 'new'").fetchone() is None


def test_up_and_down_stop_at_the_version_asked_for(fresh_database: str, files: Files):
    second = files.add(NEWEST + 1, "create table b (id int)", "drop table b")
    third = files.add(NEWEST + 2, "create table c (id int)", "drop table c")
    assert migrate.up(fresh_database, to=NEWEST) == ALL
    assert migrate.status(fresh_database) == MigrationStatus(NEWEST, NEWEST + 2)
    assert migrate.up(fresh_database, to=NEWEST + 1) == [second]
    assert migrate.up(fresh_database) == [third]
    assert migrate.up(fresh_database, to=NEWEST) == []
    assert migrate.down(fresh_database, to=NEWEST + 1) == [third]
    assert comment(fresh_database) == str(NEWEST + 1)
    assert migrate.down(fresh_database, to=0) == [second, *ALL[::-1]]
    assert left_in(fresh_database) == []


def test_a_gap_in_the_numbers_is_a_damaged_installation(files: Files):
    files.add(NEWEST + 2, "select 1")
    with pytest.raises(MigrationError, match="damaged"):
        db_migrate.migrations()


def test_a_lost_connection_is_told_apart_from_a_refusal(fresh_database: str, files: Files):
    files.add(NEWEST + 1, "select pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(DatabaseUnavailable, match="run it again"):
        migrate.up(fresh_database)
    assert migrate.status(fresh_database).installed == NEWEST


@pytest.mark.parametrize("path", sorted((folder() / "migrations").iterdir()), ids=lambda path: path.name)
def test_a_migration_leaves_the_transaction_to_its_runner(path: Path):
    sql = re.sub(r"--.*", "", path.read_text()).lower()
    assert not re.search(r"\b(begin|commit|rollback|concurrently|vacuum)\b", sql)
    assert path.with_name(path.name.replace(".up.", ".down.")).exists()
    assert path.with_name(path.name.replace(".down.", ".up.")).exists()


# Databases that are not ours, or not ours yet, or no longer.


def test_a_database_newer_than_the_code_is_refused_and_left_alone(fresh_database: str):
    migrate.up(fresh_database)
    do(fresh_database, f"comment on table gen_durable is '{NEWEST + 1}'")
    before = left_in(fresh_database)
    for run in (migrate.up, migrate.down):
        with pytest.raises(SchemaTooNew, match=f"version {NEWEST + 1}, and this gendurable knows only up to {NEWEST}"):
            run(fresh_database)
    assert left_in(fresh_database) == before
    status = migrate.status(fresh_database)
    assert (status.installed, status.pending) == (NEWEST + 1, 0)
    with connect(fresh_database) as conn, pytest.raises(SchemaTooNew):
        db_migrate.check_current(conn, "public")


@pytest.mark.parametrize("text", [None, "", "orders", "-1", "1.0", "1 ", "\N{FULLWIDTH DIGIT ONE}", "9" * 10])
def test_a_table_that_does_not_carry_our_version_is_refused_and_left_alone(fresh_database: str, text: str | None):
    do(fresh_database, "create table gen_durable (id int)")
    if text is not None:
        do(fresh_database, f"comment on table gen_durable is '{text}'")
    for run in (migrate.up, migrate.down, migrate.status):
        with pytest.raises(MigrationError, match="instead of a version: it is not ours"):
            run(fresh_database)
    assert set(left_in(fresh_database)) == {"gen_durable", "_gen_durable"}


def test_a_table_of_somebody_elses_in_the_way_is_named(fresh_database: str):
    do(fresh_database, "create table signals (id int)")
    with pytest.raises(MigrationError, match='"signals" already exists'):
        migrate.up(fresh_database)
    assert set(left_in(fresh_database)) == {"signals", "_signals"}


def test_an_engine_refuses_a_database_that_is_not_migrated(fresh_database: str, files: Files):
    with closing(connect(fresh_database)) as conn:
        with pytest.raises(SchemaMissing, match=r"has no gendurable tables.*gendurable migrate up"):
            db_migrate.check_current(conn, "public")
        migrate.up(fresh_database)
        db_migrate.check_current(conn, "public")
        files.add(NEWEST + 1, "select 1")
        with pytest.raises(SchemaMissing, match=f"has schema version {NEWEST}, and version {NEWEST + 1} is needed"):
            db_migrate.check_current(conn, "public")


def test_an_unreachable_server_is_named_without_the_password():
    with pytest.raises(DatabaseUnavailable, match="nowhere") as refusal:
        migrate.up("postgresql://me:secret@127.0.0.1:1/nowhere")
    assert "secret" not in str(refusal.value)


# Rights.


@pytest.fixture
def role(fresh_database: str) -> Iterator[Callable[[str], str]]:
    """Make a role that owns nothing, give it what the test says, and return a DSN that acts as it."""
    name = f"gendurable_{uuid4().hex[:8]}"
    with psycopg.connect(fresh_database, autocommit=True) as conn:
        conn.execute(SQL("create role {} login").format(Identifier(name)))

        def granted(command: str = "") -> str:
            if command:
                conn.execute(command.format(role=name))
            return make_conninfo(fresh_database, options=f"-c role={name}")

        yield granted
        conn.execute(SQL("drop owned by {} cascade").format(Identifier(name)))
        conn.execute(SQL("drop role {}").format(Identifier(name)))


def test_a_role_that_may_not_create_schemas_uses_one_made_for_it(fresh_database: str, role: Callable[[str], str]):
    dsn = role("create schema theirs authorization {role}")
    assert migrate.up(dsn, schema="theirs") == ALL
    with Harness(dsn, [One], schema="theirs") as durable:
        durable.insert(One.new())
        assert durable.drain() == {"done": 1}
    assert migrate.down(dsn, schema="theirs") == ALL[::-1]
    assert left_in(fresh_database, "theirs") == []


def test_a_role_without_rights_is_told_what_to_ask_for(fresh_database: str, role: Callable[..., str]):
    do(fresh_database, "revoke create on schema public from public")
    for schema in ("public", "new"):
        with pytest.raises(MigrationError, match=r"permission denied.*may create in it"):
            migrate.up(role(), schema=schema)
    assert left_in(fresh_database) == []


def test_a_role_that_does_not_own_the_tables_cannot_drop_them(fresh_database: str, role: Callable[..., str]):
    migrate.up(fresh_database)
    before = left_in(fresh_database)
    dsn = role("grant select on all tables in schema public to {role}")
    with pytest.raises(MigrationError, match="must be owner"):
        migrate.down(dsn)
    assert left_in(fresh_database) == before
    assert migrate.status(dsn).pending == 0


def test_a_search_path_quotes_the_schema():
    assert search_path('a"b') == '"a""b", pg_temp'


def test_what_was_cancelled_has_failed_once_the_status_is_gone(fresh_database: str):
    migrate.up(fresh_database)
    with connect(fresh_database) as conn:
        conn.execute(
            "insert into gen_durable (fsm, step, status, cancel_reason, unique_scope) values"
            " ('m', 'start', 'cancelled', 'no longer wanted',"
            "  '{runnable,executing,awaiting_signal,awaiting_children,cancelled}')"
        )
        migrate.down(fresh_database, to=1)
        found = conn.execute("select status::text, last_error, unique_scope::text from gen_durable").fetchone()
    assert found == ("failed", "no longer wanted", "{runnable,executing,awaiting_signal,awaiting_children}")
