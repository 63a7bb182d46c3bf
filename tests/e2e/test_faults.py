"""The database goes away, falls silent, refuses to write, or is locked by others: workers go on as if nothing had been."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import datetime

import pytest
from facts import AUDIT, committed_twice, done, terminate, terminating, until_done
from machines import Gated, Parent, Scene, Stepwise
from proxy import Link, Proxy
from psycopg.sql import SQL, Identifier
from servers import OwnServer, own_server
from stage import Stage
from support import hold, row, until
from workers import WorkerProcess, worker

from gendurable import Client, migrate
from gendurable.core.instance import NewInstance
from gendurable.db.connection import Connection, connect
from gendurable.errors import DatabaseUnavailable, EmbeddedError

DEBUG = ("--log-level", "debug")
IMPATIENT = {"statement_timeout": "1s"}
LONG_LEASE = {"lease": "60s"}


@pytest.fixture
def server() -> Iterator[OwnServer]:
    try:
        with own_server() as server:
            yield server
    except EmbeddedError as error:
        pytest.skip(f"no server of one's own: {error}")


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as proxy:
        yield proxy


def stepwise(stage: Stage, count: int) -> list[NewInstance]:
    return [Stepwise.new(Scene(str(stage.folder))) for _ in range(count)]


def gated(stage: Stage, gate: str = "g", key: str | None = None) -> NewInstance:
    return Gated.new(Scene(str(stage.folder), gate=gate), partition_key=key)


def assert_done_once(conn: Connection, stage: Stage, ids: Sequence[int]) -> None:
    """Nothing was lost, and no step was begun again once its outcome had been committed."""
    newest: dict[int, int] = {}
    for note in stage.notes("entered", step="start"):
        newest[note["id"]] = max(note["attempt"], newest.get(note["id"], 0))
    believed = {
        id: result["by"] for id, result in conn.execute("select id, result from gen_durable where fsm = 'stepwise'")
    }
    assert believed == newest
    assert set(believed) == set(ids)
    assert committed_twice(conn) == []


def test_a_server_that_is_stopped_and_one_that_is_killed_under_load_cost_nothing_but_time(
    server: OwnServer, stage: Stage
):
    migrate.up(server.dsn)
    with closing(connect(server.dsn)) as conn, Client(server.dsn) as client:
        conn.execute(AUDIT)
        ids = client.insert_many(stepwise(stage, 1500))
    with worker(server.dsn) as one, worker(server.dsn) as other:
        for blow in (server.stop, server.kill):
            with closing(connect(server.dsn)) as conn:
                start = done(conn, ids)
                until(lambda conn=conn, start=start: done(conn, ids) > start + 100, "some of the work")
                assert done(conn, ids) < len(ids)
            heard = [complaints(one), complaints(other)]
            blow()
            until(lambda heard=heard: complaints(one) > heard[0] and complaints(other) > heard[1], "both complaining")
            server.start()
        with closing(connect(server.dsn)) as conn:
            until_done(conn, ids)
            assert_done_once(conn, stage, ids)
        assert [one.process.poll(), other.process.poll()] == [None, None]


def complaints(process: WorkerProcess) -> int:
    return len(process.events("database_unavailable"))


def test_every_session_terminated_again_and_again_loses_nothing_and_repeats_nothing(
    own_dsn: str, own_conn: Connection, stage: Stage
):
    own_conn.execute(AUDIT)
    ids: list[int] = []
    with Client(own_dsn) as client, worker(own_dsn) as one, worker(own_dsn) as other:
        one.started()
        other.started()
        with terminating(own_dsn) as ended:
            while len(ended) < 15:
                seen = len(ended)
                ids += client.insert_many(stepwise(stage, 100))
                until(lambda seen=seen: len(ended) > seen, "the next blow")
        assert sum(ended) > 15
        until_done(own_conn, ids)
        assert [one.process.poll(), other.process.poll()] == [None, None]
    assert_done_once(own_conn, stage, ids)


def test_connections_that_are_cut_and_delayed_lose_nothing(own_dsn: str, own_conn: Connection, stage: Stage):
    own_conn.execute(AUDIT)
    with Proxy(own_dsn) as proxy, Client(own_dsn) as client, worker(proxy.dsn) as running:
        running.started()
        ids = client.insert_many(stepwise(stage, 50))
        for _ in range(5):
            until(proxy.cut, "a connection to be cut")
            ids += client.insert_many(stepwise(stage, 50))
        proxy.refuse()
        proxy.cut()
        ids += client.insert_many(stepwise(stage, 50))
        until(lambda: len(running.events("database_unavailable")) > 1, "the outage in the log")
        proxy.delay = 0.02
        proxy.accept()
        until_done(own_conn, ids)
    assert_done_once(own_conn, stage, ids)


def committer(link: Link) -> bool:
    return link.application == "gendurable committer"


def test_an_outcome_whose_answer_was_lost_counts_once(proxy: Proxy, client: Client, conn: Connection, stage: Stage):
    with worker(proxy.dsn, settings=LONG_LEASE) as running:
        parent = client.insert(Parent.new(Scene(str(stage.folder), gate="c", count=2)))
        stage.wait_for("entered", 2)
        fault = proxy.lose_answer("commit", committer)
        stage.open("c0")
        fault.wait()
        stale = running.wait_for("outcome_stale")
        assert stale["answer_lost"]
        # A second decrement would have released the parent.
        assert (row(conn, parent)["status"], row(conn, parent)["children_pending"]) == ("awaiting_children", 1)
        stage.open("c1")
        until_done(conn, [parent])
    assert len(stage.notes("joined")) == 1
    assert len(stage.notes("entered")) == 2


def test_a_keyed_outcome_whose_answer_was_lost_counts_once_and_frees_its_key(
    proxy: Proxy, client: Client, conn: Connection, stage: Stage
):
    with worker(proxy.dsn, settings=LONG_LEASE) as running:
        ids = [client.insert(gated(stage, key="k")), client.insert(gated(stage, key="k"))]
        stage.wait_for("entered")
        fault = proxy.lose_answer("commit", lambda link: link.application == "gendurable lock")
        stage.open("g")
        fault.wait()
        until_done(conn, ids)
        running.wait_for("lock_lost", id=ids[0])
    assert [note["id"] for note in stage.notes("entered")] == ids


def test_claims_whose_answer_was_lost_come_back_when_their_lease_is_over(
    proxy: Proxy, client: Client, conn: Connection, stage: Stage
):
    id = client.insert(gated(stage, ""))
    fault = proxy.lose_answer("claim")
    with worker(proxy.dsn, settings={"lease": "1500ms"}) as running:
        fault.wait()
        running.wait_for("lease_reaped", id=id)
        until_done(conn, [id])
    assert [note["attempt"] for note in stage.notes("entered")] == [1]


@pytest.mark.parametrize(
    ("pool", "application", "statement"),
    [
        ("poller default", "poller default", "claim"),
        ("committer", "committer", "begin"),
        ("committer", "committer", "commit"),  # the server has locked rows by then, and would keep them locked
        ("heartbeat", "heartbeat", "extend_leases"),
        ("maintenance", "maintenance", "deadlines_passed"),
        ("locks", "lock", "lock_partitions"),
    ],
)
def test_a_connection_that_falls_silent_for_ever_is_given_up_and_replaced(
    proxy: Proxy, stage: Stage, *, pool: str, application: str, statement: str
):
    settings = {"lease": "10s"}
    with (
        closing(connect(proxy.dsn)) as conn,
        Client(proxy.dsn) as client,
        worker(proxy.dsn, settings=settings, environment=IMPATIENT) as running,
    ):
        long = client.insert(gated(stage, "long"))
        stage.wait_for("entered", id=long)
        fault = proxy.swallow_at(statement, lambda link: link.application == f"gendurable {application}")
        ids = [client.insert(gated(stage, "g", key=f"key {number}")) for number in range(4)]
        ids += client.insert_many(stepwise(stage, 20))
        stage.open("g")
        fault.wait()
        running.wait_for("database_unavailable", pool=pool)
        until_done(conn, ids)
        # Leases outlive a beat without an answer.
        assert row(conn, long)["fence"] == 1
        stage.open("long")
        until_done(conn, [long])


def test_a_keyed_step_whose_session_falls_silent_commits_nothing_and_is_done_again(
    proxy: Proxy, client: Client, conn: Connection, stage: Stage
):
    settings = {"lease": "1500ms"}
    with worker(proxy.dsn, settings=settings, environment=IMPATIENT) as running:
        id = client.insert(gated(stage, key="k"))
        sibling = client.insert(gated(stage, "", key="k"))
        stage.wait_for("entered", id=id)
        proxy.swallow_at("begin", lambda link: link.application == "gendurable lock")
        stage.open("g")
        running.wait_for("lock_lost", id=id)
        until_done(conn, [id, sibling])
    assert row(conn, id)["result"] == {"by": 1}
    assert [note["id"] for note in stage.notes("entered")] == [id, id, sibling]


def test_a_read_only_period_is_waited_out(own_dsn: str, own_conn: Connection, stage: Stage):
    own_conn.execute(AUDIT)
    name = own_conn.info.dbname
    terms = SQL("alter database {} set default_transaction_read_only = {}")
    with Client(own_dsn) as client, worker(own_dsn) as running:
        held = client.insert(gated(stage))
        keyed = client.insert(gated(stage, key="k"))
        stage.wait_for("entered", 2)
        ids = client.insert_many(stepwise(stage, 50))
        until_done(own_conn, ids)
        own_conn.execute(terms.format(Identifier(name), SQL("on")))
        terminate(own_conn)
        stage.open("g")
        for application in ("gendurable poller default", "gendurable committer", "gendurable heartbeat"):
            # A session that may not write is not kept: the next one may be with the server that has taken over.
            sessions: set[int] = set()
            until(
                lambda name=application, sessions=sessions: seen(own_conn, name, sessions) >= 3,
                f"{application} trying again and again",
            )
        assert done(own_conn, [held, keyed]) == 0
        own_conn.execute(terms.format(Identifier(name), SQL("off")))
        ids += client.insert_many(stepwise(stage, 50))
        until_done(own_conn, [held, keyed, *ids])
        assert running.process.poll() is None
    assert_done_once(own_conn, stage, ids)


def seen(conn: Connection, application: str, sessions: set[int]) -> int:
    """Add the sessions of this name to those seen before, and count them."""
    query = "select pid from pg_stat_activity where application_name = %s and datname = current_database()"
    sessions.update(pid for (pid,) in conn.execute(query, [application]))
    return len(sessions)


# Rows that somebody else has locked.


def lease(conn: Connection, id: int) -> datetime:
    found = row(conn, id)["lease_expires_at"]
    assert isinstance(found, datetime)
    return found


@pytest.mark.parametrize("key", [None, "k"])
def test_a_foreign_lock_on_one_running_row_delays_its_outcome_and_nothing_else(
    dsn: str, new_conn: Callable[[], Connection], stage: Stage, key: str | None
):
    conn, foreign = new_conn(), new_conn()
    with Client(dsn) as client, worker(dsn, *DEBUG, settings={"lease": "30s"}) as running:
        locked, other = client.insert(gated(stage, "locked", key)), client.insert(gated(stage, "other"))
        stage.wait_for("entered", 2)
        with hold(foreign, locked):
            before = lease(conn, other)
            stage.open("locked")
            stage.wait_for("left", id=locked)
            until(lambda: lease(conn, other) > before, "the neighbour's lease prolonged")
            until_done(conn, client.insert_many(stepwise(stage, 50)))
            running.let_poll()
            assert row(conn, locked)["status"] == "executing"
        until_done(conn, [locked])
        stage.open("other")
        until_done(conn, [other])
        assert not running.events("outcome_stale")
        assert not running.events("lease_reaped")
    assert len(stage.notes("left", id=locked)) == 1


def test_a_foreign_lock_on_a_parent_delays_its_child_and_nothing_else(
    dsn: str, new_conn: Callable[[], Connection], stage: Stage
):
    conn, foreign = new_conn(), new_conn()
    with Client(dsn) as client, worker(dsn, *DEBUG, settings={"lease": "30s"}) as running:
        parent = client.insert(Parent.new(Scene(str(stage.folder), gate="c", count=1)))
        [child] = stage.wait_for("entered")
        with hold(foreign, parent):
            stage.open("c0")
            running.wait_for("outcome_deferred", id=child["id"])
            until_done(conn, client.insert_many(stepwise(stage, 50)))
            assert done(conn, [child["id"]]) == 0
        until_done(conn, [parent])
        assert not running.events("outcome_stale")
    assert len(stage.notes("joined")) == 1


# The client library; more in tests/client.


def test_a_client_gives_a_silent_connection_up_and_an_idle_one_that_fell_silent_costs_no_error(
    proxy: Proxy, stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    with Client(proxy.dsn) as client:
        monkeypatch.setattr("gendurable.db.connection.EngineConnection.patience", 1.0)
        id = client.insert(gated(stage))
        for link in proxy.links:
            link.swallow()
        assert client.get(id).id == id
        proxy.swallow_at("get_instance")
        with pytest.raises(DatabaseUnavailable, match="no answer"):
            client.get(id)
