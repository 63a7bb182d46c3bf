"""How a worker behaves towards its database: few statements when idle, few connections, no open transactions."""

import re
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from attrs import frozen
from facts import WORKERS
from machines import Collector, Gated, Noop, Parent, Scene, Stepwise, Waiter
from psycopg.sql import SQL, Identifier
from stage import Stage
from support import until
from workers import worker

from gendurable import Client, embedded, migrate
from gendurable.db.connection import Connection, connect
from gendurable.errors import EmbeddedError

# What a worker does unless it is told otherwise.
DEFAULTS = {"lease": "60s", "heartbeat": "20s", "reap": "30s", "poll": "1s", "max-poll": "5s"}

STATEMENT = re.compile(r"^([0-9.]+)\|([^|]*)\|LOG:  (?:statement|execute [^:]*): ", re.MULTILINE)


@frozen
class Statement:
    """A line of the server's log."""

    time: float
    application: str
    text: str

    @property
    def name(self) -> str:
        """What our statements call themselves in their first line."""
        return self.text.removeprefix("-- ").partition(":")[0]


@pytest.fixture(scope="module")
def talkative_dsn() -> Iterator[str]:
    """A server of our own that writes every statement down."""
    settings = {
        "log_statement": "all",
        "log_line_prefix": "%n|%a|",
        "logging_collector": "on",
        "log_filename": "statements.log",
    }
    try:
        server = embedded.start_temporary(settings=settings)
    except EmbeddedError as error:
        pytest.skip(f"needs a server of its own: {error}")
    with server:
        migrate.up(server.dsn)
        yield server.dsn


@pytest.fixture
def statements(talkative_dsn: str) -> Iterator[Callable[[], list[Statement]]]:
    """Read what workers have sent to the talkative server."""
    with closing(connect(talkative_dsn, application="reader")) as conn:

        def read() -> list[Statement]:
            [(log,)] = conn.execute("select pg_read_file(pg_current_logfile())").fetchall()
            starts = list(STATEMENT.finditer(log))
            ends = [start.start() for start in starts[1:]] + [len(log)]
            found = [
                Statement(float(start[1]), start[2], log[start.end() : end].strip())
                for start, end in zip(starts, ends, strict=True)
            ]
            return [each for each in found if re.match(r"gendurable \w+", each.application)]

        yield read


@pytest.fixture
def scene(stage: Stage) -> Callable[..., Scene]:
    return lambda gate="", **more: Scene(str(stage.folder), gate=gate, **more)


def test_a_worker_never_listens_and_when_idle_says_at_most_two_things_a_second(talkative_dsn: str, statements, scene):
    with Client(talkative_dsn) as client, worker(talkative_dsn, settings=DEFAULTS) as only:
        ids = [
            client.insert(Gated.new(scene(), partition_key="a key")),
            client.insert(Parent.new(scene(count=2))),
            client.insert(Stepwise.new(scene())),
            client.insert(Waiter.new(scene(timeout=0.1))),
            client.insert(Collector.new(scene())),
        ]
        for name in "abc":
            client.signal(ids[-1], name)
        for id in ids:
            assert client.wait(id, timeout=30).status == "done"
        done = statements()[-1].time

        def sweeps() -> list[float]:
            return [each.time for each in statements() if each.name == "deadlines_passed" and each.time > done]

        # A sweep comes every second: by the sixth the poller has found its slowest pace, by the eighteenth we have seen
        # enough.
        until(lambda: len(sweeps()) >= 18, "eighteen sweeps", 60)
        said = statements()
        since, to = sweeps()[5], sweeps()[17]
        assert only.process.poll() is None
    idle = [each.name for each in said if since < each.time <= to]
    assert len(idle) / (to - since) <= 2, idle
    assert {"claim", "deadlines_passed"} <= set(idle)
    assert not [each for each in said if re.search(r"\b(un)?listen\b|notify\b", each.text, re.IGNORECASE)]
    assert {"advance", "spawn", "park", "finish", "lock_partitions"} <= {each.name for each in said}


def sessions(conn: Connection) -> dict[str, int]:
    """Count the workers' sessions by name; none of them may be in a transaction that does nothing."""
    query = f"select application_name, state from pg_stat_activity where datname = current_database() and {WORKERS}"
    found = conn.execute(query).fetchall()
    assert not [name for name, state in found if (state or "").startswith("idle in transaction")]
    names = [name for name, _ in found]
    return {name: names.count(name) for name in names}


def test_connections_are_few_and_no_transaction_is_open_while_steps_run(
    dsn: str, client: Client, conn: Connection, stage: Stage, scene
):
    alone = {
        f"gendurable {name}": 1
        for name in ("poller default", "poller other", "committer", "heartbeat", "maintenance", "spare")
    }
    with_locks = alone | {"gendurable lock": 3}
    client.insert_many(Gated.new(scene("on"), partition_key=f"key {n}") for n in range(5))
    client.insert_many(Gated.new(scene("on"), queue="other") for _ in range(2))
    client.insert(Noop.new(priority=-1, queue="other"))  # so that the committer has had something to write
    with worker(dsn, "--queues", "default=5,other=2", environment={"lock_connections": "3"}):
        stage.wait_for("entered", 5)
        until(lambda: sessions(conn) == with_locks, "three keyed steps and two others running")
        in_transaction = f"select count(xact_start) from pg_stat_activity where pid <> pg_backend_pid() and {WORKERS}"
        # Between its statements, which are short, no session is in a transaction.
        until(lambda: conn.execute(in_transaction).fetchone() == (0,), "nobody in a transaction")
        for _ in range(100):
            assert sessions(conn) == with_locks

        stage.open("on")
        client.insert_many(Noop.new() for _ in range(500))
        unfinished = "select from gen_durable where status <> 'done' limit 1"
        while conn.execute(unfinished).fetchone():
            assert sum(sessions(conn).values()) <= sum(with_locks.values())
        until(lambda: sessions(conn) == alone, "the idle lock connections closed", 60)


def test_a_server_that_forgets_commits_is_named(own_dsn: str, own_conn: Connection):
    durable = SQL("alter database {} set synchronous_commit = {}")
    for setting, warnings in (("off", 1), ("on", 0)):
        own_conn.execute(durable.format(Identifier(own_conn.info.dbname), SQL(setting)))
        with worker(own_dsn) as running:
            running.started()
            assert len(running.events("unsafe_server", setting="synchronous_commit", level="warning")) == warnings
