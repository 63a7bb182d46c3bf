"""One throw-away Postgres server for the whole run, and databases on it.

The server is started by the process that was called, and its xdist workers are told the address. Set
GENDURABLE_TEST_DSN to run against a server of your own instead.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier
from support import Background

from gendurable import embedded, migrate
from gendurable.db.connection import Connection, connect
from gendurable.testing import Harness

_dsn = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[_dsn] = config.workerinput["server_dsn"]
    elif dsn := os.environ.get("GENDURABLE_TEST_DSN"):
        config.stash[_dsn] = dsn
    elif not config.option.collectonly:
        server = embedded.start_temporary()
        config.add_cleanup(server.stop)
        config.stash[_dsn] = server.dsn


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["server_dsn"] = node.config.stash[_dsn]


@pytest.fixture(scope="session")
def server_dsn(pytestconfig: pytest.Config) -> str:
    """The maintenance database `postgres`: to create databases from, never to write to."""
    return pytestconfig.stash[_dsn]


@pytest.fixture(scope="session")
def database(server_dsn: str) -> Iterator[str]:
    """One database per worker, empty at the start of the run and shared by its tests."""
    with _database(server_dsn, f"gendurable_test_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}") as dsn:
        yield dsn


@pytest.fixture
def fresh_database(server_dsn: str) -> Iterator[str]:
    """A new, empty database of the test's own."""
    with _database(server_dsn, f"gendurable_test_{uuid4().hex}") as dsn:
        yield dsn


@pytest.fixture(scope="module")
def module_database(server_dsn: str) -> Iterator[str]:
    """A new, empty database that the tests of one module share."""
    with _database(server_dsn, f"gendurable_test_{uuid4().hex}") as dsn:
        yield dsn


@contextmanager
def _database(server_dsn: str, name: str) -> Iterator[str]:
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        drop = SQL("drop database if exists {} with (force)").format(Identifier(name))
        conn.execute(drop)  # what a killed run left on a server that outlives it
        conn.execute(SQL("create database {}").format(Identifier(name)))
        yield make_conninfo(server_dsn, dbname=name)
        conn.execute(drop)


@pytest.fixture(scope="session")
def migrated_database(database: str) -> str:
    migrate.up(database)
    return database


@pytest.fixture
def dsn(migrated_database: str) -> str:
    """A migrated database without a row, shared by the tests of one worker."""
    with psycopg.connect(migrated_database, autocommit=True) as conn:
        conn.execute("set lock_timeout = '10s'")
        # Not all at once: a worker that serves a whole module meanwhile takes several of them in an order of its own.
        for tables in ("gen_durable, signals", "limiters", "buckets", "paused_queues", "schedules"):
            conn.execute(f"truncate {tables} restart identity")
    return migrated_database


@pytest.fixture
def new_conn(dsn: str) -> Iterator[Callable[[], Connection]]:
    """Open as many engine connections as the test wants; they are closed after it."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(connect(dsn)))


@pytest.fixture
def conn(new_conn: Callable[[], Connection]) -> Connection:
    return new_conn()


@pytest.fixture
def background(new_conn: Callable[[], Connection]) -> Iterator[Background]:
    running = Background(new_conn())
    yield running
    running.close()


@pytest.fixture
def harness(dsn: str) -> Iterator[Callable[..., Harness]]:
    """Make a harness for the given machines."""
    with ExitStack() as stack:
        yield lambda *fsms: stack.enter_context(Harness(dsn, fsms))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A short path that every account may pass through, which pytest's own tmp_path is not."""
    folder = Path(tempfile.mkdtemp(prefix="gdt-", dir=embedded._folder_with_room()))
    folder.chmod(0o711)
    yield folder
    left_running = list(folder.glob("**/postmaster.pid"))
    for pid_file in left_running:
        os.kill(int(pid_file.read_text().split()[0]), signal.SIGQUIT)
    shutil.rmtree(folder)
    assert not left_running
