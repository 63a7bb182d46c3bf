"""The pytest fixture `durable`: a Harness in a schema of its own, on your server or on a private one.

Say which machines it runs with the ini option `gendurable_fsms` (dotted paths) or by overriding the fixture
`durable_fsms`; which server with GENDURABLE_TEST_DSN, the ini option `gendurable_dsn`, or the fixture `durable_dsn`.
"""

import os
from collections.abc import Iterator, Sequence
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from gendurable import embedded
from gendurable.core.registry import Source
from gendurable.testing.harness import Harness


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare our ini options."""
    parser.addini("gendurable_fsms", "dotted paths of the machines that the fixture `durable` runs", type="args")
    parser.addini("gendurable_dsn", "where the fixture `durable` finds Postgres (default: it starts a private one)")


@pytest.fixture(scope="session")
def durable_dsn(pytestconfig: pytest.Config) -> Iterator[str]:
    """The server that `durable` works on."""
    dsn = os.environ.get("GENDURABLE_TEST_DSN") or str(pytestconfig.getini("gendurable_dsn") or "")
    if dsn:
        yield dsn
    else:
        with embedded.start_temporary() as server:
            yield server.dsn


@pytest.fixture
def durable_fsms(pytestconfig: pytest.Config) -> Sequence[Source]:
    """The machines that `durable` runs."""
    paths: list[str] = pytestconfig.getini("gendurable_fsms")
    return paths


@pytest.fixture
def durable(durable_dsn: str, durable_fsms: Sequence[Source]) -> Iterator[Harness]:
    """A harness over a real Postgres, in a new schema that is dropped after the test."""
    schema = f"gendurable_test_{uuid4().hex[:12]}"
    try:
        with Harness(durable_dsn, durable_fsms, schema=schema) as harness:
            yield harness
    finally:
        with psycopg.connect(durable_dsn, autocommit=True) as conn:
            conn.execute(sql.SQL("drop schema if exists {} cascade").format(sql.Identifier(schema)))
