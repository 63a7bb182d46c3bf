"""sql/schema.sql is what the migrations make."""

from pathlib import Path

import pytest
from dump_schema import SCHEMA_FILE, dump

from gendurable import migrate
from gendurable.db.connection import connect


def test_the_schema_file_is_what_the_migrations_make(fresh_database: str):
    migrate.up(fresh_database)
    with connect(fresh_database) as conn:
        assert SCHEMA_FILE.read_text() == dump(conn), "sql/schema.sql is out of date: run make schema"


def test_the_dump_is_the_same_in_every_schema(fresh_database: str):
    migrate.up(fresh_database, schema="Elsewhere")
    with connect(fresh_database, schema="Elsewhere") as conn:
        assert dump(conn, '"Elsewhere"') == SCHEMA_FILE.read_text()


def test_the_schema_file_can_be_run(fresh_database: str):
    with connect(fresh_database) as conn:
        conn.execute(SCHEMA_FILE.read_bytes())
        assert dump(conn) == SCHEMA_FILE.read_text()


@pytest.mark.parametrize(
    "change",
    [
        "alter table gen_durable add column colour text",
        "alter table gen_durable alter column queue set default 'other'",
        "alter table gen_durable alter column attempt drop not null",
        "alter table gen_durable drop constraint gen_durable_parent_id_fkey",
        "alter table gen_durable set (fillfactor = 70)",
        "drop index gen_durable_pick",
        "comment on column gen_durable.fence is 'nothing'",
        "comment on table gen_durable is 'other'",
        "alter type durable_status add value 'lost'",
        "create table more (id int)",
        "create view ones as select 1 as one",
        "create sequence numbers",
        "create function f() returns int language sql as 'select 1'",
    ],
)
def test_the_dump_shows_every_kind_of_change(fresh_database: str, change: str):
    migrate.up(fresh_database)
    with connect(fresh_database) as conn:
        conn.execute(change)
        assert dump(conn) != SCHEMA_FILE.read_text()


def test_the_schema_file_lies_beside_the_migrations():
    assert Path("sql", "schema.sql") == SCHEMA_FILE.relative_to(SCHEMA_FILE.parents[1])
