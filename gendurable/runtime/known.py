"""The limits that a worker knows: read from the database now and then, since other workers may publish some."""

from gendurable.core.limiters import Limiters
from gendurable.db.connection import Connection
from gendurable.db.limiting import known_limiters


class KnownLimits:
    """What was read last. One thread refreshes it, any may look."""

    def __init__(self) -> None:
        """Know of none yet."""
        self.current = Limiters()

    def refresh(self, conn: Connection) -> None:
        """Read the limits anew."""
        self.current = known_limiters(conn)
