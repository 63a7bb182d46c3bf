"""Deadlines of instances against whatever happens to them at that moment."""

from datetime import timedelta

from races import NewConn, claim, claim_one, errors, insert, is_done, new, parks, spawns, statuses, written
from support import Background, hold, row

from gendurable.core.claim import Claim
from gendurable.db import store
from gendurable.db.connection import Connection
from gendurable.db.operations import commit
from gendurable.runtime.sweeping import end_late

HOUR = timedelta(hours=1)


def ended(conn: Connection) -> list[int]:
    late, _ = end_late(conn, ahead=2 * HOUR)
    return [row.id for row in late]


def overdue_family(conn: Connection) -> tuple[int, Claim]:
    """A parent that waits for a child, both overdue in two hours."""
    parent = claim_one(conn, deadline=HOUR)
    commit(conn, [spawns(parent, new(deadline=HOUR))])
    [child] = claim(conn)
    return parent.id, child


def test_a_step_that_is_just_committing_is_left_to_it(conn: Connection, new_conn: NewConn):
    step = new_conn()
    claimed = claim_one(conn, deadline=HOUR)
    step.execute("begin")
    store.finish(step, [is_done(claimed)])
    assert ended(conn) == []
    step.execute("commit")
    assert ended(conn) == []
    assert statuses(conn, [claimed.id]) == ["done"]


def test_a_step_that_is_just_parking_is_ended_by_the_next_sweep(conn: Connection, new_conn: NewConn):
    step = new_conn()
    claimed = claim_one(conn, deadline=HOUR)
    step.execute("begin")
    store.park(step, [parks(claimed)])
    assert ended(conn) == []
    step.execute("commit")
    assert ended(conn) == [claimed.id]
    found = row(conn, claimed.id)
    assert (found["status"], found["awaits"], found["locked_by"]) == ("failed", None, None)


def test_a_step_that_comes_after_the_deadline_changes_nothing(conn: Connection):
    claimed = claim_one(conn, deadline=HOUR)
    assert ended(conn) == [claimed.id]
    assert written(commit(conn, [is_done(claimed)])) == set()
    found = row(conn, claimed.id)
    assert found["status"] == "failed"
    assert found["last_error"].startswith("DeadlineExceeded: it was to end by 2")


def test_of_two_sweeps_at_once_one_ends_it(conn: Connection, new_conn: NewConn):
    other = new_conn()
    id = insert(conn, deadline=HOUR)
    other.execute("begin")
    assert [row.id for row in store.lock_free_instances(other, ids=[id])] == [id]
    assert ended(conn) == []
    other.execute("rollback")
    assert ended(conn) == [id]
    assert ended(other) == []


def test_a_parent_and_its_child_may_be_overdue_together(conn: Connection):
    parent, child = overdue_family(conn)
    assert sorted(ended(conn)) == [parent, child.id]
    assert statuses(conn, [parent, child.id]) == ["failed", "failed"]
    assert row(conn, parent)["children_pending"] == 0


def test_a_sweep_does_not_wait_for_a_child_that_is_just_ending(
    conn: Connection, new_conn: NewConn, background: Background
):
    step = new_conn()
    parent, child = overdue_family(conn)
    step.execute("begin")
    store.lock_claims(step, [child])
    assert ended(conn) == [parent]
    store.finish(step, [is_done(child)])
    step.execute("commit")
    assert statuses(conn, [parent, child.id]) == ["failed", "done"]


def test_a_sweep_that_waited_for_it_would_deadlock(conn: Connection, new_conn: NewConn, background: Background):
    step, sweeper = new_conn(), new_conn()
    parent, child = overdue_family(conn)
    step.execute("begin")
    store.lock_claims(step, [child])
    sweeper.execute("begin")
    naive = background.start_blocked(sweeper, lambda: store.lock_instances(sweeper, ids=[parent, child.id]).all())
    ending = background.start(lambda: store.finish(step, [is_done(child)]).all())
    assert errors(naive, ending) == ["DeadlockDetected"]


def test_one_whose_parent_somebody_holds_does_not_keep_the_others_alive(conn: Connection, new_conn: NewConn):
    holder = new_conn()
    held = claim_one(conn)
    commit(conn, [spawns(held, new(deadline=HOUR, queue="elsewhere"))])
    [stuck] = [id for (id,) in conn.execute("select id from gen_durable where parent_id is not null")]
    others = [insert(conn, deadline=HOUR) for _ in range(5)]
    conn.execute("set lock_timeout = '50ms'")
    with hold(holder, held.id):
        assert sorted(ended(conn)) == others
    assert ended(conn) == [stuck]
    assert statuses(conn, [held.id]) == ["runnable"]
