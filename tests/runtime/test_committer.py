"""Group commit at its worst: rows that somebody holds, and a connection that is lost meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
from races import NewConn, claim, insert, is_done, statuses
from support import hold, until

from gendurable.core.claim import Claim
from gendurable.db.connection import Connection, Database
from gendurable.events import Event, OutcomeDeferred, StepCommitted
from gendurable.runtime import committer as committing
from gendurable.runtime.committer import Committer, Performed
from gendurable.runtime.loop import Wires
from gendurable.runtime.session import Session

APPLICATION = "gendurable committer"


class Written:
    """A committer, and what came of it."""

    def __init__(self, dsn: str, lock_timeout: float) -> None:
        self.events: list[Event] = []
        self.settled: list[Claim] = []
        self.deaths: list[None] = []
        patience = timedelta(seconds=lock_timeout)
        self.committer = Committer(
            Session(lambda: Database(dsn).connect(APPLICATION, lock_timeout=patience)),
            Wires(self.events.append, lambda: self.deaths.append(None)),
            lambda claims, _: self.settled.extend(claims),
            lambda _: None,
        )

    def submit(self, *claims: Claim) -> None:
        for claimed in claims:
            self.committer.submit(Performed(claimed, is_done(claimed), 0.0))

    def of(self, kind: type[Event]) -> list[int]:
        """The ids that events of this kind name."""
        return [event.id for event in self.events if isinstance(event, kind)]  # type: ignore[union-attr]


@pytest.fixture
def make(dsn: str) -> Iterator[Callable[..., Written]]:
    with ExitStack() as stack:

        def made(*, lock_timeout: float) -> Written:
            written = Written(dsn, lock_timeout)
            stack.callback(written.committer._session.close)
            return written

        yield made


@contextmanager
def held(new_conn: NewConn, claims: Sequence[Claim]) -> Iterator[None]:
    with ExitStack() as stack:
        for claimed in claims:
            stack.enter_context(hold(new_conn(), claimed.id))
        yield


def claims_of(conn: Connection, count: int) -> list[Claim]:
    for _ in range(count):
        insert(conn)
    return claim(conn)


def test_what_somebody_holds_is_put_aside_and_the_rest_of_its_batch_is_written(
    conn: Connection, new_conn: NewConn, make: Callable[..., Written]
):
    claims = claims_of(conn, 9)
    written = make(lock_timeout=0.05)
    written.submit(*claims)
    with held(new_conn, claims[3:5]):
        while len(written.of(OutcomeDeferred)) < 2:
            written.committer.run_once()
        while written.committer._halves:
            written.committer.run_once()
        assert sorted(written.of(OutcomeDeferred)) == [claims[3].id, claims[4].id]
        assert len(written.of(StepCommitted)) == 7
    until(lambda: written.committer.run_once() and len(written.settled) == 9, "the two that were held")
    assert statuses(conn, [claimed.id for claimed in claims]) == ["done"] * 9


def test_outcomes_that_nobody_holds_wait_for_one_that_somebody_does_and_not_for_all_of_them(
    conn: Connection, new_conn: NewConn, make: Callable[..., Written], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(committing, "FIRST_DEFERRAL", 0.0)  # each is due again at once
    *locked, free = claims_of(conn, 5)
    written = make(lock_timeout=0.05)
    with held(new_conn, locked):
        written.submit(*locked)
        while len(written.of(OutcomeDeferred)) < len(locked):
            written.committer.run_once()
        before = len(written.of(OutcomeDeferred))
        written.submit(free)
        written.committer.run_once()
        assert written.of(StepCommitted) == [free.id]
        assert len(written.of(OutcomeDeferred)) == before + 1


def test_a_connection_that_is_lost_while_a_held_row_is_singled_out_costs_no_outcome(
    conn: Connection, new_conn: NewConn, make: Callable[..., Written]
):
    first, second = claims_of(conn, 2)
    written = make(lock_timeout=1)

    def waiting() -> tuple[int, object] | None:
        """The committer's session and transaction, if it waits for a lock."""
        query = """select pid, xact_start from pg_stat_activity
                   where application_name = %s and datname = current_database() and wait_event_type = 'Lock'"""
        found = conn.execute(query, [APPLICATION]).fetchone()
        return None if found is None else (found[0], found[1])

    def waiting_again() -> int | None:
        now = waiting()
        return now[0] if now is not None and now != together else None

    with held(new_conn, [first]):
        written.submit(first, second)
        written.committer.start()
        together = until(waiting, "the batch waiting for the row")
        session = until(waiting_again, "the outcome waiting alone")
        conn.execute("select pg_terminate_backend(%s)", [session])
        until(lambda: written.of(StepCommitted) == [second.id], "the other one written")
    until(lambda: len(written.settled) == 2, "both written")
    written.committer.stop()
    assert written.committer.join(10)
    assert statuses(conn, [first.id, second.id]) == ["done", "done"]
    assert written.deaths == []
