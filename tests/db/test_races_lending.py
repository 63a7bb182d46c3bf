"""Races of a step's transaction: in which order it locks rows, whom it wakes, and what others' being quicker leaves of it."""

from typing import Any

import pytest
from races import NewConn, claim, claim_one, goes_on, insert, parks, reap, statuses, uncommitted
from support import Background, expire, hold, inbox

from gendurable.core.claim import Claim
from gendurable.core.outgoing import outgoing
from gendurable.core.transition import Transition
from gendurable.db.connection import Connection, EngineConnection
from gendurable.db.lending import StepTransaction, lend
from gendurable.db.operations import commit


@pytest.fixture(autouse=True)
def _lines(conn: Connection) -> Any:
    conn.execute("create table lines (id bigint not null)")
    yield
    conn.execute("drop table lines")


def begun(conn: Connection, claimed: Claim, *targets: int) -> StepTransaction:
    """A step's transaction that has written a line and sent signals."""
    assert isinstance(conn, EngineConnection)
    lend(conn, claimed)
    conn.execute("insert into lines (id) values (%s)", [claimed.id])
    transaction = StepTransaction(conn, claimed)
    for target in targets:
        transaction.send(outgoing(target, "go", {}, None))
    return transaction


def committed(transaction: StepTransaction, change: Transition) -> bool:
    transaction.commit(change)
    assert transaction.committed is not None
    return bool(transaction.committed.written)


def lines(conn: Connection) -> list[int]:
    return [id for (id,) in conn.execute("select id from lines order by id")]


def test_own_row_and_targets_are_locked_in_the_order_of_their_ids(new_conn: NewConn, background: Background):
    conn, holder, stepping, other = new_conn(), new_conn(), new_conn(), new_conn()
    low = insert(conn, queue="elsewhere")
    own = claim_one(conn)
    high = insert(conn, queue="elsewhere")
    transaction = begun(stepping, own, high, low)
    with hold(holder, low):
        committing = background.start_blocked(stepping, committed, transaction, goes_on(own))
        with uncommitted(other):
            query = "select id from gen_durable where id = any(%s) order by id for no key update nowait"
            assert other.execute(query, [[own.id, high]]).fetchall() == [(own.id,), (high,)]
    assert committing.result() is True
    assert (inbox(conn, low), inbox(conn, high), lines(conn)) == (["go"], ["go"], [own.id])


def test_two_that_signal_each_other_both_get_through(new_conn: NewConn, background: Background):
    conn, holder, one, two = new_conn(), new_conn(), new_conn(), new_conn()
    insert(conn)
    insert(conn)
    first, second = claim(conn)
    transactions = begun(one, first, second.id), begun(two, second, first.id)
    with hold(holder, first.id):
        tries = [
            background.start_blocked(one, committed, transactions[0], parks(first)),
            background.start_blocked(two, committed, transactions[1], parks(second)),
        ]
    assert [each.result() for each in tries] == [True, True]
    assert (inbox(conn, first.id), inbox(conn, second.id)) == (["go"], ["go"])
    assert statuses(conn, [first.id, second.id]) == ["runnable", "runnable"], "each has what it waits for"


def test_a_signal_that_meets_its_targets_park_wakes_it(new_conn: NewConn, background: Background):
    conn, parking, stepping = new_conn(), new_conn(), new_conn()
    target = claim_one(conn)
    own = claim_one(conn)
    transaction = begun(stepping, own, target.id)
    with hold(parking, target.id):
        # Committed by whoever holds the row: the signal must see the park that it had to wait for.
        sending = background.start_blocked(stepping, committed, transaction, goes_on(own))
        parking.execute(
            "update gen_durable set status = 'awaiting_signal', awaits = '{go}', locked_by = null,"
            " lease_expires_at = null where id = %s",
            [target.id],
        )
        parking.execute("commit")
        parking.execute("begin")
    assert sending.result() is True
    assert statuses(conn, [target.id]) == ["runnable"]


def test_one_whose_claim_is_reaped_while_its_commit_waits_leaves_nothing(new_conn: NewConn, background: Background):
    conn, reaper, stepping = new_conn(), new_conn(), new_conn()
    target = insert(conn, queue="elsewhere")
    own = claim_one(conn)
    transaction = begun(stepping, own, target)
    expire(conn, own.id)
    reaper.execute("begin")
    assert reap(reaper) == [own.id]
    committing = background.start_blocked(stepping, committed, transaction, goes_on(own))
    reaper.execute("commit")
    assert committing.result() is False
    assert (lines(conn), inbox(conn, target), statuses(conn, [own.id])) == ([], [], ["runnable"])
    [again] = claim(conn)
    assert commit(conn, [goes_on(again)]).written
