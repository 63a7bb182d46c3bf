"""A transaction lent to a step: what it writes, its outcome and its signals are committed together, or not at all."""

import random
from collections.abc import Callable
from datetime import timedelta
from time import monotonic, sleep

import psycopg
from psycopg import pq, sql

from gendurable.core.claim import Fenced
from gendurable.core.duration import ZERO
from gendurable.core.outgoing import Outgoing
from gendurable.core.transition import Transition
from gendurable.db.connection import STEADY_PLANS, EngineConnection, one_line, set_config
from gendurable.db.faults import is_locked
from gendurable.db.operations import Committed, post, write_step
from gendurable.errors import TransactionMisused

# What the engine sets on its connections and a step must not notice. How long a statement may take stays as it is: we
# wait for no answer longer than that.
_OURS = ("search_path", "TimeZone", "DateStyle", "lock_timeout", *STEADY_PLANS)
_BEGIN = "begin isolation level read committed; " + "".join(f"set local {name} to default; " for name in _OURS)
# What a step may have left behind in its session.
_TIDY = "reset role; reset session authorization; reset all; close all; discard temp; select pg_advisory_unlock_all(); "
# A setting of the transaction, and gone with it: so we see that somebody has ended it with a statement of his own.
_MARK = "gendurable.claim"
_OUTCOME = "gendurable_outcome"

# How long a row that somebody holds is waited for, in tries of the engine's own short lock timeout.
LOCK_PATIENCE = 10.0


class SessionLost(BaseException):  # no Exception: there is nothing left that a handler could decide about
    """The session of a transaction is gone, and so is the transaction; or it was just being committed, and may be."""


def lend(conn: EngineConnection, claim: Fenced) -> None:
    """Begin a transaction for a step, in which the server behaves as the role's defaults have it."""
    mark = sql.SQL("select set_config({}, {}, true)").format(sql.Literal(_MARK), sql.Literal(_marked(claim)))
    conn.execute(sql.SQL(_BEGIN) + mark)
    conn.lend()


def tidy(conn: EngineConnection) -> None:
    """Make a connection that was lent as good as new; every lock of its session is let go."""
    conn.was_lent = False
    if conn.settings is not None:  # not behind a pooler, where the session is not ours
        conn.execute(sql.SQL(_TIDY) + set_config(conn.settings, local=False))


class StepTransaction:
    """The transaction that `lend` began, as the step, its executor and its runner use it."""

    def __init__(self, conn: EngineConnection, claim: Fenced, *, ahead: timedelta = ZERO) -> None:
        """Take a connection that `lend` was called for."""
        self.conn = conn
        self.sent: list[Outgoing] = []
        # What the commit wrote, once there was one; nothing, if the claim was stale.
        self.committed: Committed | None = None
        self.seconds = 0.0
        # Asked before anything is written; may raise to prevent it.
        self.before_commit: Callable[[], None] = lambda: None
        self._claim = claim
        self._ahead = ahead

    def send(self, signal: Outgoing) -> None:
        """Have a signal delivered with the outcome."""
        self.sent.append(signal)

    def commit(self, change: Transition) -> None:
        """Commit everything, if the claim still holds; else roll everything back.

        An error means that nothing was committed. SessionLost: that nobody knows.
        """
        self._check()
        self.before_commit()
        self.conn.take_back()
        started = monotonic()
        try:
            committed = self._written(change)
            self.conn.execute("commit" if committed.written else "rollback")
        except psycopg.Error as error:
            if self.conn.closed:
                raise SessionLost(one_line(error)) from error
            raise
        self.committed = committed
        self.seconds = monotonic() - started
        post(committed.written)

    def undo(self) -> None:
        """Roll everything back; SessionLost if there is no session any more."""
        conn = self.conn
        conn.take_back()
        if conn.closed:
            raise SessionLost("the connection is lost")
        if conn.info.transaction_status is pq.TransactionStatus.ACTIVE:
            conn.close()  # a statement is half done: nothing but the end of the session ends it for certain
            return
        try:
            conn.execute("rollback")  # outside a transaction this is a warning
        except psycopg.Error as error:
            raise SessionLost(one_line(error)) from error

    def _check(self) -> None:
        """Refuse to commit what is not the transaction that was lent."""
        match self.conn.info.transaction_status:
            case pq.TransactionStatus.INTRANS:
                return
            case pq.TransactionStatus.IDLE:
                raise TransactionMisused(_ENDED)
            case pq.TransactionStatus.INERROR:
                raise TransactionMisused(
                    "a statement failed on ctx.conn and the transaction is aborted: let the error pass, or put what "
                    "may fail into a savepoint (with ctx.conn.transaction())"
                )
            case pq.TransactionStatus.ACTIVE:
                raise TransactionMisused(
                    "a statement on ctx.conn is not finished: read a stream or copy to its end before the step returns"
                )
            case _:
                raise SessionLost("the connection is lost")

    def _written(self, change: Transition) -> Committed:
        """Write the outcome with our own settings; a row that somebody holds is waited for, the transaction kept."""
        conn = self.conn
        give_up = monotonic() + LOCK_PATIENCE
        while True:
            try:
                self._settle_in()
                return write_step(conn, change, self.sent, ahead=self._ahead)
            except psycopg.Error as error:
                if not is_locked(error) or conn.closed or monotonic() > give_up:
                    raise
            conn.execute(f"rollback to savepoint {_OUTCOME}")
            sleep(random.uniform(0.02, 0.1))  # noqa: S311  so that two who wait for each other do not do it in step

    def _settle_in(self) -> None:
        """Make our own settings for what follows, if it is still the transaction that was lent."""
        conn = self.conn
        ours = set_config(conn.settings or {}, local=True) if conn.local is None else conn.local
        look = sql.SQL("select current_setting({}, true); savepoint {}; reset role; ")
        found = conn.execute(look.format(sql.Literal(_MARK), sql.Identifier(_OUTCOME)) + ours).fetchone()
        if found != (_marked(self._claim),):
            raise TransactionMisused(_ENDED)


_ENDED = (
    "the step has ended the transaction of ctx.conn with a statement of its own (commit or rollback): what it wrote "
    "before may be committed; leave the end to the engine, and use savepoints (with ctx.conn.transaction()) for parts"
)


def _marked(claim: Fenced) -> str:
    return f"{claim.id}:{claim.fence}"
