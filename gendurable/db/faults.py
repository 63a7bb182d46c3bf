"""What a database error means for whoever met it: by SQLSTATE, not by exception class."""

import psycopg

from gendurable.errors import DatabaseUnavailable

# The values are to blame: trying again cannot help.
_REFUSALS = (
    "22",  # data exceptions
    "23",  # integrity violations
    "44",  # the check option of a view
    "54",  # program limits
    "P0",  # raised by somebody's trigger
)

# The moment is to blame: trying again, on a new connection where that broke, will help sooner or later.
_PASSING = (
    "08",  # connection exceptions
    "0A000",  # a prepared statement whose result type a migration changed
    "25006",  # read-only for now: a standby, or a failover under way
    "25P03",  # a transaction idle for longer than the server allows: we were slow
    "25P04",  # a transaction longer than the server allows
    "26000",  # a prepared statement that a pooler's server has never seen
    "40",  # serialization failures and deadlocks
    "42P05",  # a prepared statement that another client of the pooler made
    "53",  # out of disk, memory or connections
    "55P03",  # a lock that did not come free in time
    "57",  # shutdown, crash recovery, cancelled by a timeout or an operator
    "58",  # system errors
)
_LOCKED = "55P03"
_READ_ONLY = "25006"
_POOLED = ("26000", "42P05")


def is_refusal(error: psycopg.Error) -> bool:
    """Tell whether the database blames the values. A DataError of psycopg itself has no SQLSTATE."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.DataError)
    return error.sqlstate.startswith(_REFUSALS)


def is_passing(error: Exception) -> bool:
    """Tell whether trying again will help."""
    if isinstance(error, DatabaseUnavailable):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_PASSING)


def is_locked(error: psycopg.Error) -> bool:
    """Tell whether somebody else held a row for longer than we wait."""
    return error.sqlstate == _LOCKED


def is_read_only(error: Exception) -> bool:
    """Tell whether this session may not write: others may, or one to the server that has taken over meanwhile."""
    return isinstance(error, psycopg.Error) and error.sqlstate == _READ_ONLY


def hint(error: Exception) -> str:
    """Say what an operator can do about an error that comes back."""
    if isinstance(error, psycopg.Error) and error.sqlstate in _POOLED:
        return "; is there a transaction pooler? Set prepare = false"
    return ""
