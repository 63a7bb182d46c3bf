"""The pytest fixture `durable`: a Harness in a schema of its own, on your server or on a private one.

It runs the machines that the test's module holds, imported ones included; or those of the ini option
`gendurable_fsms` (dotted paths); or what the fixture `durable_fsms` returns, if you override it. It works on the
server that GENDURABLE_TEST_DSN or the ini option `gendurable_dsn` names, or that the fixture `durable_dsn` returns.

pytest loads this module in every run, so it imports the engine only when a test asks for it.
"""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from gendurable.core.registry import Source
    from gendurable.testing import Harness


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare our ini options."""
    parser.addini("gendurable_fsms", "dotted paths of the machines that the fixture `durable` runs", type="args")
    parser.addini("gendurable_dsn", "where the fixture `durable` finds Postgres (default: it starts a private one)")


@pytest.fixture(scope="session")
def durable_dsn(pytestconfig: pytest.Config) -> Iterator[str]:
    """The server that `durable` works on."""
    from gendurable import embedded  # noqa: PLC0415

    dsn = os.environ.get("GENDURABLE_TEST_DSN") or str(pytestconfig.getini("gendurable_dsn") or "")
    if dsn:
        yield dsn
    else:
        with embedded.start_temporary() as server:
            yield server.dsn


@pytest.fixture
def durable_fsms(request: pytest.FixtureRequest) -> "Sequence[Source]":
    """The machines that `durable` runs."""
    return request.config.getini("gendurable_fsms") or [request.module]


@pytest.fixture
def durable(durable_dsn: str, durable_fsms: "Sequence[Source]") -> "Iterator[Harness]":
    """A harness over a real Postgres, in a new schema that is dropped after the test."""
    import psycopg  # noqa: PLC0415
    from psycopg import sql  # noqa: PLC0415

    from gendurable.testing import Harness  # noqa: PLC0415

    schema = f"gendurable_test_{uuid4().hex[:12]}"
    try:
        with Harness(durable_dsn, durable_fsms, schema=schema) as harness:
            yield harness
    finally:
        with psycopg.connect(durable_dsn, autocommit=True) as conn:
            conn.execute("set lock_timeout = '5s'")  # a transaction that the test left open must not hang the run
            conn.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(schema)))
