"""The command line: click, thin, one file per command group; commands import what they need when they run."""

from gendurable.cli.root import main

__all__ = ["main"]
