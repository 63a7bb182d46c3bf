"""A module of machines that has its worker take a loop for stuck soon: nobody wants to wait a minute for that."""

from machines import Noop

from gendurable.service import worker

worker.stuck_after = lambda _: 0.5

__all__ = ["Noop"]
