"""One claim -> context -> step or handle -> transition. No database, no thread: only the user's code is called."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeAlias

from attrs import evolve, frozen

from gendurable.core.claim import Claim, StoredChild, StoredSignal
from gendurable.core.codec import decode_readable, decode_value
from gendurable.core.context import NEVER, Child, Context, Flag, Signal, Transaction
from gendurable.core.fsm import FSM, definition, state_check
from gendurable.core.limiters import Limiters
from gendurable.core.outcomes import Done
from gendurable.core.policy import read_policy
from gendurable.core.status import Status
from gendurable.core.transition import GiveBack, Transition, snoozed, stop, transition, with_error
from gendurable.errors import BadOutcome, Snooze, StepTimeout, UndecodableRow

# Told of each error on the way to a transition, and whose it is: "exception" and "bad_outcome" of the step, "timeout",
# "transaction" if that could not be committed, "handler", or "undecodable" if the row could not even be read.
Report: TypeAlias = Callable[[str, Exception], None]


def _ignore(kind: str, error: Exception) -> None:
    """Report to nobody."""


class Surroundings(Protocol):
    """What a context tells of the run itself, besides the row."""

    @property
    def deadline(self) -> datetime | None:
        """When the run must have ended, the instance's own deadline aside."""

    @property
    def cancelled(self) -> Flag:
        """Whether the run's outcome counts no more."""

    @property
    def shutting_down(self) -> Flag:
        """Whether the worker wants to end."""

    @property
    def limiters(self) -> Limiters | None:
        """The limits that an outcome may name; None where that cannot be judged."""

    @property
    def transaction(self) -> "Sealing | None":
        """What a transactional step works in."""


class Sealing(Transaction, Protocol):
    """A transaction that can be ended."""

    def commit(self, change: Transition) -> None:
        """Commit it with the outcome; an error means that nothing was committed."""

    def undo(self) -> None:
        """Roll it back."""


@frozen
class Calm:
    """The surroundings of a run that nothing can disturb."""

    deadline: datetime | None = None
    cancelled: Flag = NEVER
    shutting_down: Flag = NEVER
    limiters: Limiters | None = None
    transaction: Sealing | None = None


CALM = Calm()


def execute(claim: Claim, machine: FSM[Any], report: Report = _ignore, run: Surroundings = CALM) -> Transition:
    """Run the claimed step to a transition.

    Whatever Exception comes up becomes one too. SystemExit and its like pass through: they are crashes, without an
    outcome, and the reaper's business.
    """
    try:
        function = _find_function(claim, machine)
        ctx = _context(claim, machine, run)
    except Exception as error:  # noqa: BLE001  a row that cannot be read must not hurt its neighbours
        _undo(run)
        report("undecodable", error)
        return stop(claim, error)
    kind = "exception"
    try:
        outcome = function(machine, ctx)
        kind = "bad_outcome"
        change = _judged(claim, machine, outcome, ctx, run)
        if run.transaction is not None:
            kind = "transaction"
            run.transaction.commit(change)
    except Snooze as snooze:
        _undo(run)
        return _put_off(claim, machine, snooze, report, run)
    except Exception as error:  # noqa: BLE001  the step's error, whatever it is, is for its handler
        _undo(run)
        report(kind, error)
        return _handled(claim, machine, error, report, run)
    return change


def _undo(run: Surroundings) -> None:
    if run.transaction is not None:
        run.transaction.undo()


def time_out(
    claim: Claim,
    machine: FSM[Any],
    timeout: timedelta,
    report: Report = _ignore,
    limiters: Limiters | None = None,
) -> Transition:
    """Give up on a step that took too long, and ask its handler what is to follow."""
    error = StepTimeout(claim.step, timeout.total_seconds())
    report("timeout", error)
    return _handled(claim, machine, error, report, Calm(limiters=limiters))


def timeout_of(claim: Claim, machine: FSM[Any]) -> timedelta | None:
    """Return how long the claimed step may take; None if there is no limit."""
    step = definition(type(machine)).steps.get(claim.step)
    return None if step is None or claim.cancelling else step.timeout


def is_transactional(claim: Claim, machine: FSM[Any]) -> bool:
    """Tell whether the claimed step runs in a transaction; what runs in its place never does."""
    step = definition(type(machine)).steps.get(claim.step)
    return step is not None and step.transactional and not claim.cancelling


def _find_function(claim: Claim, machine: FSM[Any]) -> Callable[[Any, Context[Any]], object]:
    """Return the step, or what runs in its place because the instance was cancelled."""
    step = definition(type(machine)).steps.get(claim.step)
    if step is None:
        raise UndecodableRow(f"{claim.fsm} version {claim.fsm_version} has no step {claim.step!r}; was it renamed?")
    return _run_hook if claim.cancelling else step.function


def _run_hook(machine: FSM[Any], ctx: Context[Any]) -> object:
    # It may be gone: the row was inserted by other code.
    outcome = machine.on_cancel(ctx) if definition(type(machine)).on_cancel else None
    return Done() if outcome is None else outcome


def _judged(claim: Claim, machine: FSM[Any], outcome: object, ctx: Context[Any], run: Surroundings) -> Transition:
    change = transition(claim, outcome, ctx.state, machine, run.limiters)
    if isinstance(change, GiveBack) and not ctx.shutting_down.is_set():
        raise BadOutcome(
            f"step {claim.step!r} returned Interrupted, but nothing interrupts it: return it only while "
            "ctx.shutting_down is set"
        )
    return change


def _put_off(claim: Claim, machine: FSM[Any], snooze: Snooze, report: Report, run: Surroundings) -> Transition:
    try:
        return snoozed(claim, snooze)
    except BadOutcome as error:
        report("bad_outcome", error)
        return _handled(claim, machine, error, report, run)


def _handled(claim: Claim, machine: FSM[Any], error: Exception, report: Report, run: Surroundings) -> Transition:
    try:
        # Decoded afresh: what the failed step did to its state, the handler must not see.
        ctx = _bare_context(claim, machine, run)
        outcome = machine.handle(error, ctx)
        return with_error(claim, _judged(claim, machine, outcome, ctx, run), error)
    except Exception as second:  # noqa: BLE001  nobody is left to ask
        report("handler", second)
        return stop(claim, second)


def _bare_context(claim: Claim, machine: FSM[Any], run: Surroundings) -> Context[Any]:
    mine = definition(type(machine))
    policy = mine.policy(claim.step)
    return Context(
        id=claim.id,
        fsm=claim.fsm,
        fsm_version=claim.fsm_version,
        step=claim.step,
        attempt=claim.attempt,
        state=mine.codec.decode(claim.state, check=state_check(type(machine))),
        parent_id=claim.parent_id,
        last_error=claim.last_error,
        retry=policy if claim.retry is None else read_policy(claim.retry, policy),
        deadline=run.deadline if claim.deadline is None else _earlier(run.deadline, claim.deadline),
        cancelled=run.cancelled,
        shutting_down=run.shutting_down,
        cancel_reason=claim.cancel_reason,
    )


def _earlier(deadline: datetime | None, stored: str) -> datetime:
    ending = _instant(stored, what="the deadline of the instance")
    return ending if deadline is None else min(deadline, ending)


def _context(claim: Claim, machine: FSM[Any], run: Surroundings) -> Context[Any]:
    ctx = _bare_context(claim, machine, run)
    if run.transaction is not None:
        ctx = evolve(ctx, transaction=run.transaction)
    if not claim.inbox and not claim.children:
        return ctx
    inbox = tuple(_signal(signal) for signal in claim.inbox)
    awaits = frozenset(claim.awaits or ())
    children = tuple(_child(child) for child in claim.children)
    return evolve(
        ctx,
        awaited=tuple(signal for signal in inbox if signal.name in awaits),
        inbox=inbox,
        children=children,
        joined=tuple(child for child in children if child.round == claim.join_round),
    )


def _signal(stored: StoredSignal) -> Signal:
    inserted_at = _instant(stored.inserted_at, what=f"the time of signal {stored.id}")
    payload = decode_value(stored.payload, what=f"payload of signal {stored.id}")
    return Signal(stored.id, stored.name, payload, stored.dedup_key, inserted_at)


def _instant(stored: str, *, what: str) -> datetime:
    try:
        return datetime.fromisoformat(stored)
    except ValueError as error:
        raise UndecodableRow(f"{what} is {stored!r}, which cannot be read") from error


def _child(stored: StoredChild) -> Child:
    return Child(
        id=stored.id,
        fsm=stored.fsm,
        status=Status(stored.status),
        # What a child holds is its own misfortune: its parent can still be told how it ended.
        state=decode_readable(stored.state),
        result=None if stored.result is None else decode_readable(stored.result),
        last_error=stored.last_error,
        round=stored.round,
        index=stored.index,
    )
