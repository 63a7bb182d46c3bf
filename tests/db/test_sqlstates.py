"""What an error of the database means is read off its SQLSTATE, whatever class the driver makes of it."""

import psycopg
import pytest
from psycopg import errors

from gendurable.db.faults import is_locked, is_passing, is_read_only, is_refusal
from gendurable.errors import DatabaseUnavailable

PASSING = [
    "08006",  # the connection broke
    "08P01",  # what poolers say
    "25006",  # read-only for now
    "25P03",  # idle in a transaction for too long, in the server's eyes
    "25P04",  # a transaction that took too long
    "40001",  # a serialization failure
    "40P01",  # a deadlock
    "53100",  # the disk is full
    "53300",  # too many connections
    "55P03",  # a lock that did not come free
    "57014",  # cancelled: a timeout, or an operator
    "57P01",  # the server is shut down
    "57P03",  # the server is not up yet
    "57P05",  # idle for too long, in the server's eyes
    "58030",  # an input or output error
]
REFUSALS = [
    "22P02",  # no JSON
    "22P05",  # a NUL
    "22021",  # not UTF-8
    "23505",  # a unique violation
    "23514",  # a check
    "44000",  # a view's check
    "54000",  # a program limit
    "P0001",  # somebody's trigger
]
BUGS = ["42P01", "42501", "42703", "42804", "25P02", "XX000"]


def made(sqlstate: str) -> psycopg.Error:
    """An error as the driver raises it."""
    error = errors.lookup(sqlstate)("said the server")
    assert error.sqlstate == sqlstate
    return error


@pytest.mark.parametrize("sqlstate", PASSING)
def test_what_passes_is_tried_again(sqlstate: str):
    assert is_passing(made(sqlstate))
    assert not is_refusal(made(sqlstate))
    assert is_locked(made(sqlstate)) == (sqlstate == "55P03")
    assert is_read_only(made(sqlstate)) == (sqlstate == "25006")


@pytest.mark.parametrize("sqlstate", REFUSALS)
def test_what_is_refused_is_not(sqlstate: str):
    assert is_refusal(made(sqlstate))
    assert not is_passing(made(sqlstate))


@pytest.mark.parametrize("sqlstate", BUGS)
def test_what_should_not_happen_is_neither(sqlstate: str):
    assert not is_refusal(made(sqlstate))
    assert not is_passing(made(sqlstate))


def test_what_no_server_said_is_judged_by_who_did():
    assert is_passing(psycopg.OperationalError("server closed the connection"))
    assert is_passing(psycopg.InterfaceError("the connection is closed"))
    assert is_passing(DatabaseUnavailable("nobody there"))
    assert is_refusal(psycopg.DataError("no NUL in text"))
    assert not is_passing(psycopg.DataError("no NUL in text"))
    assert not is_passing(KeyError("a bug of ours"))
