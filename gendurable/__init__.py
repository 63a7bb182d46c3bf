"""gendurable: durable execution on Postgres. An instance is a row; its program counter is a column."""

from gendurable.client import Client
from gendurable.core.context import Child, Context, Signal
from gendurable.core.fsm import FSM, Job, step
from gendurable.core.instance import Instance, NewInstance
from gendurable.core.outcomes import Await, Done, Next, Outcome, Retry, Spawn, Stop
from gendurable.core.registry import Registry
from gendurable.core.status import Status

__all__ = [
    "FSM",
    "Await",
    "Child",
    "Client",
    "Context",
    "Done",
    "Instance",
    "Job",
    "NewInstance",
    "Next",
    "Outcome",
    "Registry",
    "Retry",
    "Signal",
    "Spawn",
    "Status",
    "Stop",
    "step",
]
