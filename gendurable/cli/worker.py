"""`gendurable worker`: the daemon."""

import click

from gendurable.cli.invocation import Invocation, pass_invocation
from gendurable.cli.options import Command, takes, worker_options
from gendurable.cli.output import note
from gendurable.service.shutdown import Shutdown


@click.command(cls=Command)
@takes(worker_options)
@click.option("--until-idle", is_flag=True, help="End when nothing that could run here is due or running.")
@click.option("--check-config", is_flag=True, help="Check the configuration, load the machines, and end.")
@pass_invocation
def worker(invocation: Invocation, /, until_idle: bool, check_config: bool) -> int:
    """Run instances: claim, execute, commit, until told to stop."""
    shutdown = Shutdown()
    config = invocation.config
    if check_config:
        from gendurable.core.registry import load
        from gendurable.runtime.scheduling import plan

        registry = load(config.fsms)
        plan(config.schedules.values(), registry)
        machines = ", ".join(registry.capabilities)
        note(f"the configuration is good; machines: {machines or 'none'}")
        return 0
    if config.processes > 1:
        from gendurable.service.processes import supervise

        return supervise(config, invocation.arguments, shutdown, until_idle=until_idle)
    from gendurable.service.run import run_worker

    return run_worker(config, shutdown, until_idle=until_idle)
