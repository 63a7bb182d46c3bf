"""Write sql/schema.sql: the newest schema as one text, to be read and to be seen in the diff of a review.

From the catalogue, not by pg_dump: the text is the same whichever server version made it. `make schema` runs this.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psycopg.sql import Literal

from gendurable import embedded, migrate
from gendurable.db.connection import DEFAULT_SCHEMA, Connection, connect

SCHEMA_FILE = Path(__file__).parents[2] / "sql" / "schema.sql"
HEAD = "-- The newest schema, generated from sql/migrations by `make schema`. To be read; nothing runs it.\n"

TYPES = """
select t.typname as name,
       array(select e.enumlabel::text from pg_enum e where e.enumtypid = t.oid order by e.enumsortorder) as labels
from pg_type t
where t.typnamespace = %(schema)s::regnamespace and t.typtype = 'e'
order by t.typname collate "C"
"""
TABLES = """
select c.relname as name, c.reloptions as options, obj_description(c.oid, 'pg_class') as comment
from pg_class c
where c.relnamespace = %(schema)s::regnamespace and c.relkind in ('r', 'p')
order by c.relname collate "C"
"""
COLUMNS = """
select a.attname as name, format_type(a.atttypid, a.atttypmod) as type, a.attnotnull as required,
       a.attidentity::text as identity, a.attgenerated::text as generated,
       pg_get_expr(d.adbin, d.adrelid, true) as expression, col_description(a.attrelid, a.attnum) as comment
from pg_attribute a
left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
where a.attrelid = %(table)s::regclass and a.attnum > 0 and not a.attisdropped
order by a.attnum
"""
# Newer servers list "not null" among the constraints ('n'); it stands with its column here.
CONSTRAINTS = """
select k.conname as name, pg_get_constraintdef(k.oid, true) as definition
from pg_constraint k
where k.conrelid = %(table)s::regclass and k.contype <> 'n'
order by position(k.contype::text in 'pucfxt'), k.conname collate "C"
"""
INDEXES = """
select pg_get_indexdef(i.indexrelid, 0, true) as definition
from pg_index i
join pg_class c on c.oid = i.indexrelid
where i.indrelid = %(table)s::regclass
  and not exists (select from pg_constraint k where k.conindid = i.indexrelid and k.contype in ('p', 'u', 'x'))
order by c.relname collate "C"
"""
# Nothing of this kind is expected; a migration that brings one must show up all the same.
OTHERS = """
select kind || ' ' || name as what
from (
  select case c.relkind when 'v' then 'view' when 'm' then 'materialized view' when 'f' then 'foreign table'
                        else 'sequence' end as kind, c.relname as name
  from pg_class c
  where c.relnamespace = %(schema)s::regnamespace and c.relkind in ('v', 'm', 'f', 'S')
    and not exists (select from pg_depend d where d.objid = c.oid and d.deptype = 'i'
                                              and d.classid = 'pg_class'::regclass and c.relkind = 'S')
  union all
  select 'function', p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')'
  from pg_proc p where p.pronamespace = %(schema)s::regnamespace
  union all
  select 'trigger', t.tgname || ' on ' || c.relname
  from pg_trigger t join pg_class c on c.oid = t.tgrelid
  where c.relnamespace = %(schema)s::regnamespace and not t.tgisinternal
) as other
order by (kind || ' ' || name) collate "C"
"""


def dump(conn: Connection, schema: str = DEFAULT_SCHEMA) -> str:
    """Return the schema that `conn` has on its search path as text."""
    return "\n".join([HEAD, *_parts(conn, schema)])


def _parts(conn: Connection, schema: str) -> Iterator[str]:
    for name, labels in conn.execute(TYPES, {"schema": schema}):
        yield f"create type {name} as enum ({', '.join(_literal(label) for label in labels)});\n"
    for name, options, comment in conn.execute(TABLES, {"schema": schema}).fetchall():
        yield _table(conn, name, options, comment)
    for (what,) in conn.execute(OTHERS, {"schema": schema}):
        yield f"-- and {what}\n"


def _table(conn: Connection, name: str, options: list[str] | None, comment: str | None) -> str:
    columns = conn.execute(COLUMNS, {"table": name}).fetchall()
    inside = [_column(column) for column in columns]
    inside += [f"constraint {key} {what}" for key, what in conn.execute(CONSTRAINTS, {"table": name})]
    lines = [f"create table {name} (", ",\n".join(f"  {each}" for each in inside)]
    lines += [f") with ({', '.join(options)});" if options else ");"]
    if comment is not None:
        lines += ["", f"comment on table {name} is {_literal(comment)};"]
    lines += [
        f"comment on column {name}.{column[0]} is {_literal(column[-1])};"
        for column in columns
        if column[-1] is not None
    ]
    indexes = [f"{definition};" for (definition,) in conn.execute(INDEXES, {"table": name})]
    return "\n".join([*lines, *([""] if indexes else []), *indexes, ""])


def _column(column: tuple[Any, ...]) -> str:
    name, kind, required, identity, generated, expression, _ = column
    words = [name, kind]
    if required:
        words.append("not null")
    if identity:
        words.append("generated always as identity" if identity == "a" else "generated by default as identity")
    elif generated:
        words.append(f"generated always as ({' '.join((expression or '').split())})")
        words.append("stored" if generated == "s" else "virtual")
    elif expression is not None:
        words.append(f"default {expression}")
    return " ".join(words)


def _literal(value: Any) -> str:
    return Literal(value).as_string(None)


def main() -> None:
    """Migrate an empty database and write down what came of it."""
    server = embedded.start_temporary()
    try:
        migrate.up(server.dsn)
        with connect(server.dsn) as conn:
            SCHEMA_FILE.write_text(dump(conn))
    finally:
        server.stop()
    sys.stdout.write(f"wrote {SCHEMA_FILE}\n")


if __name__ == "__main__":
    main()
