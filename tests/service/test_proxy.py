"""The proxy itself: a fault test proves nothing if the fault never happened, or another one did."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psycopg
import pytest
from proxy import Proxy
from support import until

from gendurable.db.connection import Connection, Database, connect, one_commit


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with Proxy(dsn) as running:
        yield running


@pytest.fixture
def through(proxy: Proxy) -> Iterator[Callable[..., Connection]]:
    """Open connections through the proxy."""
    opened = []

    def open_one(application: str = "tested", *, patience: float = 30.0) -> Connection:
        opened.append(Database(proxy.dsn).connect(application))
        opened[-1].patience = patience
        return opened[-1]

    yield open_one
    for conn in opened:
        with suppress(psycopg.Error):
            conn.close()


@pytest.fixture
def notes(conn: Connection) -> Iterator[Callable[[], list[str]]]:
    """A table `notes`, and what is in it, read without the proxy."""
    conn.execute("drop table if exists notes")
    conn.execute("create table notes (note text)")
    yield lambda: [note for (note,) in conn.execute("select note from notes order by note").fetchall()]
    conn.execute("drop table notes")


def write(conn: Connection, note: str) -> None:
    """Write a note as the engine writes outcomes: one transaction, one round trip."""
    with one_commit(conn):
        conn.execute("insert into notes values (%s)", [note])


def test_everything_passes_through_untouched(through, proxy):
    conn = through()
    text = "ä" * 300_000
    assert conn.execute("select %s", [text]).fetchone() == (text,)
    assert conn.execute("select count(*) from generate_series(1, 50000) n").fetchone() == (50_000,)
    assert len(conn.execute("select n from generate_series(1, 50000) n").fetchall()) == 50_000
    assert [link.application for link in proxy.links] == ["tested"]
    assert proxy.accepted == 1


def test_a_client_that_asks_for_encryption_is_told_to_do_without(proxy):
    with psycopg.connect(proxy.dsn, sslmode="prefer", gssencmode="prefer") as conn:
        assert conn.execute("select 1").fetchone() == (1,)


def test_a_request_to_cancel_gets_through(through, background):
    conn = through()
    waiting = background.start(conn.execute, "select pg_sleep(60)")

    def cancelled() -> bool:
        conn.cancel_safe()
        return waiting.done()

    until(cancelled, "the query cancelled")
    assert isinstance(waiting.exception(), psycopg.errors.QueryCanceled)


def test_closed_connections_are_forgotten(through, proxy):
    for _ in range(3):
        through().close()
    until(lambda: not proxy.links, "the links closed")
    assert proxy.accepted == 3


def test_a_cut_ends_the_chosen_connections_and_no_others(through, proxy):
    struck, spared = through("struck"), through("spared")
    assert proxy.cut(lambda link: link.application == "struck") == 1
    with pytest.raises(psycopg.OperationalError):
        struck.execute("select 1")
    assert spared.execute("select 1").fetchone() == (1,)
    assert proxy.cut() == 1


def test_a_cut_ends_the_session_at_the_server(through, proxy, conn):
    pid = through().info.backend_pid
    proxy.cut()
    until(
        lambda: conn.execute("select 1 from pg_stat_activity where pid = %s", [pid]).fetchone() is None,
        "the backend gone",
    )


def test_new_connections_are_refused_until_accepted_again(through, proxy):
    old = through()
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))
    assert old.execute("select 1").fetchone() == (1,)
    proxy.accept()
    assert through().execute("select 1").fetchone() == (1,)


def test_a_delay_holds_answers_back(through, proxy):
    conn = through(patience=1.0)
    proxy.delay = 30.0
    with pytest.raises(psycopg.OperationalError, match="no answer"):
        conn.execute("select 1")
    proxy.delay = 0.0
    assert through().execute("select 1").fetchone() == (1,)


def test_a_swallowed_connection_stays_open_and_silent_on_both_sides(through, proxy, conn):
    silent, other = through("silent", patience=1.0), through("other")
    pid = silent.info.backend_pid
    fault = proxy.swallow_at("select 'swallow me'", lambda link: link.application == "silent")
    with pytest.raises(psycopg.OperationalError, match="no answer"):
        silent.execute("select 'swallow me'")
    assert fault.wait().application == "silent"
    # The client has given up and closed its end. The server knows of nothing.
    state = conn.execute("select state from pg_stat_activity where pid = %s", [pid]).fetchone()
    assert state == ("idle",)
    assert other.execute("select 'swallow me'").fetchone() == ("swallow me",)


def test_an_idle_connection_can_be_swallowed_too(through, proxy, conn):
    silent = through(patience=1.0)
    (link,) = proxy.links
    link.swallow()
    conn.execute("select pg_terminate_backend(%s)", [silent.info.backend_pid])
    with pytest.raises(psycopg.OperationalError, match="no answer"):
        silent.execute("select 1")


@pytest.mark.parametrize("times_before", [0, 20], ids=["unprepared", "prepared"])
def test_the_answer_to_a_commit_is_lost_but_the_commit_is_not(through, proxy, notes, times_before):
    conn = through()
    for time in range(times_before):  # the driver prepares after five times
        write(conn, f"before {time:02}")
    fault = proxy.lose_answer("commit")
    with pytest.raises(psycopg.OperationalError):
        write(conn, "lost")
    fault.wait()
    assert notes()[times_before:] == ["lost"]
    write(through(), "next")  # it strikes once
    assert notes()[times_before:] == ["lost", "next"]


def test_the_answer_is_lost_without_a_pipeline_as_well(through, proxy, notes):
    conn = through()
    proxy.lose_answer("commit")
    with pytest.raises(psycopg.OperationalError), conn.transaction():
        conn.execute("insert into notes values ('lost')")
    assert notes() == ["lost"]


def test_the_answer_to_a_statement_that_commits_by_itself_is_lost(through, proxy, notes):
    conn = through()
    proxy.lose_answer("insert into notes")
    with pytest.raises(psycopg.OperationalError):
        conn.execute("insert into notes values (%s)", ["lost"])
    assert notes() == ["lost"]


def test_an_answer_is_lost_in_the_middle_of_several_pipelines(through, proxy, notes):
    conn = through()
    proxy.lose_answer("commit")
    with pytest.raises(psycopg.OperationalError), conn.pipeline() as pipeline:
        conn.execute("select 1")
        pipeline.sync()
        conn.execute("begin")
        conn.execute("insert into notes values ('lost')")
        conn.execute("commit")
        conn.execute("insert into notes values ('in the same breath')")
    assert notes() == ["in the same breath", "lost"]


@pytest.mark.parametrize("times_before", [0, 20], ids=["unprepared", "prepared"])
def test_a_commit_that_never_arrives_changes_nothing(through, proxy, notes, times_before):
    conn = through()
    for time in range(times_before):
        write(conn, f"before {time:02}")
    fault = proxy.cut_at("commit")
    with pytest.raises(psycopg.OperationalError):
        write(conn, "never")
    fault.wait()
    assert notes()[times_before:] == []


def test_a_statement_of_ours_is_known_by_the_name_of_its_file(through, proxy):
    conn = through()
    fault = proxy.cut_at("claim")
    conn.execute("select 'claim'")
    conn.execute("-- claims: no such file\nselect 1")
    assert not fault.has_struck
    with pytest.raises(psycopg.OperationalError):
        conn.execute("-- claim: lease due instances\nselect 1")
    fault.wait()


def test_a_fault_strikes_only_where_it_is_meant_to(through, proxy, notes):
    committer, poller = through("committer"), through("poller")
    fault = proxy.lose_answer("commit", lambda link: link.application == "committer")
    write(poller, "poller")
    assert not fault.has_struck
    with pytest.raises(psycopg.OperationalError):
        write(committer, "committer")
    assert notes() == ["committer", "poller"]


def test_many_connections_at_once_keep_apart(proxy):
    def ask(number: int) -> bool:
        with connect(proxy.dsn) as conn:
            return all(conn.execute("select %s", [number]).fetchone() == (number,) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(24)))
    assert proxy.accepted == 24


def test_closing_leaves_no_thread_behind(dsn):
    before = threading.active_count()
    with Proxy(dsn) as proxy:
        conn = connect(proxy.dsn)
        proxy.links[0].swallow()
        other = connect(proxy.dsn)
        assert threading.active_count() > before
    assert threading.active_count() == before
    for abandoned in (conn, other):
        abandoned.close()
