from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from stage import Stage

from gendurable import Client, migrate
from gendurable.db.connection import Connection, connect


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as client:
        yield client


@pytest.fixture
def own_dsn(fresh_database: str) -> str:
    """A migrated database of the test's own, to be changed at will."""
    migrate.up(fresh_database)
    return fresh_database


@pytest.fixture
def own_conn(own_dsn: str) -> Iterator[Connection]:
    with closing(connect(own_dsn)) as conn:
        yield conn


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)
