"""Every exception gendurable raises, named for the situation; each message says what to do next."""

from datetime import timedelta
from typing import Any


class GenDurableError(Exception):
    """The root of all our errors."""


# What a programmer wrote.


class DefinitionError(GenDurableError):
    """A machine class is not well formed; raised when the class is made."""


class InvalidPolicy(DefinitionError, ValueError):
    """A value of a `RetryPolicy` is out of range; the message names it."""


class LoadError(GenDurableError):
    """A dotted path leads to no machines."""


class DuplicateMachine(LoadError):
    """Two machines claim one (name, version)."""


class InvalidInstance(GenDurableError, ValueError):
    """A parameter of `.new(...)`, `signal(...)` or a client call is out of range; nothing was written."""


class InvalidState(InvalidInstance):
    """A state does not fit its state class; the message names the field."""


# What a step did.


class Fatal(GenDurableError):
    """Raised by a step: running it again could not help. No policy retries it."""


class ChildFailed(Fatal):
    """A parent task asked for the result of a child that has none; the message names the child that failed."""


class Snooze(GenDurableError):
    """Raised by a step: not yet. It runs again after `delay`, no attempt is spent, and `handle` is not asked."""

    def __init__(self, delay: timedelta | float) -> None:
        """Say how long to wait: a timedelta, or seconds."""
        super().__init__(delay)
        self.delay = delay


class Unstorable(GenDurableError, ValueError):
    """A value cannot be stored as JSON; the message carries the path to the culprit."""


class BadOutcome(GenDurableError):
    """A step or handler returned something that is no well-formed outcome."""


class StepTimeout(GenDurableError, TimeoutError):
    """An execution of a step took longer than it may; whatever it still returns is dropped."""

    def __init__(self, step: str, timeout: float) -> None:
        """Name the step and how many seconds it had."""
        super().__init__(step, timeout)
        self.step = step
        self.timeout = timeout

    def __str__(self) -> str:
        return f"step {self.step!r} took longer than its {self.timeout:g} s"


class NotTransactional(GenDurableError):
    """A step that has no transaction asked for it."""

    def __init__(self, step: str, what: str) -> None:
        """Name the step and what it asked for."""
        super().__init__(step, what)
        self.step = step
        self.what = what

    def __str__(self) -> str:
        return (
            f"{self.what}: step {self.step!r} has no transaction; mark it with @step(transactional=True) "
            "(a handler never has one)"
        )


class TransactionMisused(GenDurableError):
    """A step ended, closed or broke the transaction that the engine had lent it."""


class UndecodableRow(GenDurableError):
    """What a row, signal or child holds cannot be read back."""


# What the database answered.


class DuplicateInstance(GenDurableError):
    """The unique key is occupied by another instance."""

    def __init__(self, unique_key: bytes, occupant: int | None) -> None:
        """Name the key and, where it could be found, the instance that holds it."""
        super().__init__(unique_key, occupant)
        self.unique_key = unique_key
        self.occupant = occupant

    def __str__(self) -> str:
        holder = "another instance" if self.occupant is None else f"instance {self.occupant}"
        key = self.unique_key.decode("utf-8", "backslashreplace")
        return (
            f"unique key {key!r} is occupied by {holder}; nothing was inserted: wait for it to end, or use another key"
        )


class InstanceNotFound(GenDurableError):
    """No instance has this id."""

    def __init__(self, id: int) -> None:  # noqa: A002  the column's name
        """Name the id."""
        super().__init__(id)
        self.id = id

    def __str__(self) -> str:
        return f"no instance has id {self.id}; it was never inserted here, or was removed after it ended"


class NoTarget(GenDurableError):
    """The instance that was to be signalled or cancelled has ended or does not exist."""

    def __init__(self, id: int) -> None:  # noqa: A002  the column's name
        """Name the id."""
        super().__init__(id)
        self.id = id

    def __str__(self) -> str:
        return f"instance {self.id} has ended or does not exist; nothing was changed"


class NotRetryable(GenDurableError):
    """An instance that was to run again has neither failed nor been cancelled."""

    def __init__(self, id: int, status: str) -> None:  # noqa: A002  the column's name
        """Name the id and where it stands."""
        super().__init__(id, status)
        self.id = id
        self.status = status

    def __str__(self) -> str:
        return f"instance {self.id} is {self.status}, not failed or cancelled; only such instances run again"


class NotPaused(GenDurableError):
    """A queue that was to be resumed is not paused."""

    def __init__(self, queue: str) -> None:
        """Name the queue."""
        super().__init__(queue)
        self.queue = queue

    def __str__(self) -> str:
        return f"queue {self.queue!r} is not paused; `gendurable status` names those that are"


class InboxFull(GenDurableError):
    """The instance holds as many unread signals as it may."""

    def __init__(self, id: int, limit: int) -> None:  # noqa: A002  the column's name
        """Name the id and the limit."""
        super().__init__(id, limit)
        self.id = id
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"instance {self.id} already holds {self.limit} signals; the signal was not stored: "
            "send again once its steps have consumed some"
        )


class WaitTimeout(GenDurableError, TimeoutError):
    """An instance did not end in time; it goes on."""

    def __init__(self, instance: Any, timeout: float) -> None:
        """Keep the instance as it stands, and say how long was waited."""
        super().__init__(instance, timeout)
        self.instance = instance
        self.id = instance.id
        self.status = instance.status
        self.timeout = timeout

    def __str__(self) -> str:
        return (
            f"instance {self.id} is still {self.status} after {self.timeout:g} s; it goes on, wait again or look at it"
        )


class InstanceFailed(GenDurableError):
    """The instance whose result was asked for ended `failed`."""

    def __init__(self, instance: Any) -> None:
        """Keep the instance as it ended."""
        super().__init__(instance)
        self.instance = instance

    def __str__(self) -> str:
        return f"instance {self.instance.id} ended failed: {self.instance.last_error}"


class InstanceCancelled(GenDurableError):
    """The instance whose result was asked for was cancelled."""

    def __init__(self, instance: Any) -> None:
        """Keep the instance as it ended."""
        super().__init__(instance)
        self.instance = instance

    def __str__(self) -> str:
        return f"instance {self.instance.id} was cancelled: {self.instance.last_error}"


class OutcomeUnknown(GenDurableError):
    """The connection was lost while a write was under way: it may or may not have been committed."""


class DatabaseUnavailable(GenDurableError):
    """The database could not be reached."""


class DatabaseRefused(GenDurableError):
    """The database answered with an error that trying again does not mend, such as a right that is missing."""


class SchemaMissing(GenDurableError):
    """The database has no gendurable tables in this schema, or too old ones."""


class SchemaTooNew(GenDurableError):
    """The database was migrated by a newer gendurable than this one."""


class MigrationError(GenDurableError):
    """A migration was asked for that does not exist or cannot run."""


class MigrationBlocked(MigrationError):
    """A migration did not get a lock in the time it was given."""


# Tools.


class ConfigError(GenDurableError, ValueError):
    """A setting is unknown or impossible; the message names it, its value, the layer it came from and the remedy."""


class AddressUnavailable(GenDurableError):
    """The address for probes is taken, or is none of this machine's."""


class RunawayError(GenDurableError):
    """A drain took more steps than it was allowed."""


class EmbeddedError(GenDurableError):
    """The private Postgres server could not be found or started."""


def describe(error: Any) -> str:
    """Return `Type: message` of an exception; for anything else its text. Never raises."""
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001  a reason must be recorded even if its own __str__ fails
        message = f"(its text could not be made: {type(broken).__name__})"
        return f"{type(error).__name__}: {message}"
    if not isinstance(error, BaseException):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
