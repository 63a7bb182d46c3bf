"""Migrate a database: `up`, `down`, `status`; what the command line calls too."""

from gendurable.db.migrate import MigrationStatus, down, status, up

__all__ = ["MigrationStatus", "down", "status", "up"]
