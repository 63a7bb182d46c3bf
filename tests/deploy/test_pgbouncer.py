import configparser
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from deployment import DEPLOY, UNITS, fetched_libraries, find_tool
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from support import until

from gendurable import Client, migrate
from gendurable.config import Config
from gendurable.demo.machines import Book, Booking

FILE = DEPLOY / "pgbouncer/pgbouncer.ini"


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(FILE.read_text())
    return parser


def test_transactions_are_pooled_and_nobody_waits_longer_than_the_engine_would():
    ours = settings()["pgbouncer"]
    assert ours["pool_mode"] == "transaction"
    assert timedelta(seconds=int(ours["query_wait_timeout"])) < Config().statement_timeout


def test_the_port_is_the_one_that_examples_connect_to():
    ports = {settings()["pgbouncer"]["listen_port"]}
    for text in (FILE.read_text(), (UNITS / "example.env").read_text()):
        pooled = re.search(r"GENDURABLE_DSN=\S+:(\d+)/\S+\s.*?GENDURABLE_PREPARE=false", text, flags=re.DOTALL)
        direct = re.search(r"GENDURABLE_LOCK_DSN=\S+:(\d+)/", text)
        assert pooled is not None
        assert direct is not None
        ports |= {re.findall(r"GENDURABLE_DSN=\S+:(\d+)/", pooled[0])[-1]}
        assert direct[1] == "5432"
    assert ports == {"6432"}


@pytest.fixture
def pooled(fresh_database: str, tmp_path: Path) -> Iterator[str]:
    """The address of a real PgBouncer that runs with our file; only addresses and accounts are the test's."""
    program = find_tool("pgbouncer")
    server = conninfo_to_dict(fresh_database)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    parser = settings()
    (name,) = parser["databases"]
    place = f"host={server['host']} port={server.get('port', 5432)} user={server['user']} dbname={server['dbname']}"
    query = re.findall(r"connect_query='.*'", parser["databases"][name])[0]
    parser["databases"][name] = f"{place} {query}"
    parser["pgbouncer"].update(listen_port=str(port), unix_socket_dir="", auth_type="any")
    for of_the_machine in ("auth_file", "logfile", "pidfile"):
        del parser["pgbouncer"][of_the_machine]
    with (tmp_path / "pgbouncer.ini").open("w") as file:
        parser.write(file)
    # It refuses to be root, and only the server's own account may enter the folder of its socket.
    account = ["-u", Path(str(server["host"])).owner()] if os.geteuid() == 0 else []
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(
            [program, *account, str(tmp_path / "pgbouncer.ini")],
            env=os.environ | fetched_libraries(),
            stdout=log,
            stderr=log,
        )
    address = make_conninfo(host="127.0.0.1", port=port, dbname=name, user=str(server["user"]), sslmode="disable")

    def answers() -> bool:
        assert running.poll() is None, (tmp_path / "log").read_text()
        try:
            psycopg.connect(address, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        until(answers, "an answer of pgbouncer")
        yield address
    finally:
        running.terminate()
        running.wait()


def test_a_worker_behind_it_runs_instances_with_and_without_partition_keys(pooled, fresh_database):
    migrate.up(fresh_database, schema="gendurable")
    with Client(fresh_database, schema="gendurable") as client:
        keyed = [Book.new(Booking("a", number), partition_key="a") for number in (1, 2)]
        ids = client.insert_many([*keyed, Book.new(Booking("b", 3))])
        others = {key: value for key, value in os.environ.items() if not key.startswith(("GENDURABLE_", "PG"))}
        ours = {"DSN": pooled, "LOCK_DSN": fresh_database, "PREPARE": "false", "SCHEMA": "gendurable"}
        ours |= {"FSMS": "gendurable.demo.machines", "QUEUES": "accounts=4", "POLL": "100ms"}
        worker = subprocess.run(
            [sys.executable, "-m", "gendurable", "worker", "--until-idle"],
            env=others | {f"GENDURABLE_{name}": value for name, value in ours.items()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert worker.returncode == 0, worker.stderr
        assert [client.get(id).status for id in ids] == ["done"] * 3, worker.stderr
