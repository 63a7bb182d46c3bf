"""Where an instance stands: the values of the column `status`."""

from enum import StrEnum


class Status(StrEnum):
    """Where an instance stands."""

    RUNNABLE = "runnable"
    EXECUTING = "executing"
    AWAITING_SIGNAL = "awaiting_signal"
    AWAITING_CHILDREN = "awaiting_children"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({Status.RUNNABLE, Status.EXECUTING, Status.AWAITING_SIGNAL, Status.AWAITING_CHILDREN})
PARKED = frozenset({Status.AWAITING_SIGNAL, Status.AWAITING_CHILDREN})
TERMINAL = frozenset(Status) - LIVE
