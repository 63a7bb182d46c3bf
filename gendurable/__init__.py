"""gendurable: durable execution on Postgres. An instance is a row; its program counter is a column."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gendurable.client import Client
    from gendurable.core.context import Child, Context, Signal
    from gendurable.core.fsm import FSM, Job, step
    from gendurable.core.instance import Instance, NewInstance
    from gendurable.core.outcomes import Again, Await, Done, Interrupted, Next, Outcome, Retry, Spawn, Stop
    from gendurable.core.policy import RetryPolicy
    from gendurable.core.registry import Registry
    from gendurable.core.status import Status
    from gendurable.errors import Fatal, Snooze, StepTimeout
    from gendurable.handle import Handle
    from gendurable.tasks import Children, ParentTask, sequence
else:
    # A name is imported when first asked for: `gendurable --help` must not wait for the driver and the codec.
    _HOMES = {
        "client": ("Client",),
        "core.context": ("Child", "Context", "Signal"),
        "core.fsm": ("FSM", "Job", "step"),
        "core.instance": ("Instance", "NewInstance"),
        "core.outcomes": ("Again", "Await", "Done", "Interrupted", "Next", "Outcome", "Retry", "Spawn", "Stop"),
        "core.policy": ("RetryPolicy",),
        "core.registry": ("Registry",),
        "core.status": ("Status",),
        "errors": ("Fatal", "Snooze", "StepTimeout"),
        "handle": ("Handle",),
        "tasks": ("Children", "ParentTask", "sequence"),
    }
    _MODULES = ("errors", "migrate", "testing")

    def __getattr__(name):  # noqa: ANN001, ANN202  only Python sees it, never a type checker
        from importlib import import_module  # noqa: PLC0415

        if name in _MODULES:
            return import_module(f"gendurable.{name}")
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(import_module(f"gendurable.{home}"), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module 'gendurable' has no attribute {name!r}")

    def __dir__():  # noqa: ANN202
        return sorted({*globals(), *__all__})


__all__ = [
    "FSM",
    "Again",
    "Await",
    "Child",
    "Children",
    "Client",
    "Context",
    "Done",
    "Fatal",
    "Handle",
    "Instance",
    "Interrupted",
    "Job",
    "NewInstance",
    "Next",
    "Outcome",
    "ParentTask",
    "Registry",
    "Retry",
    "RetryPolicy",
    "Signal",
    "Snooze",
    "Spawn",
    "Status",
    "StepTimeout",
    "Stop",
    "sequence",
    "step",
]
