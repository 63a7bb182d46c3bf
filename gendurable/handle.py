"""Handle: one instance, to hold on to."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from attrs import field, frozen

from gendurable.core.duration import Duration
from gendurable.core.instance import Instance
from gendurable.core.status import Status
from gendurable.db.rows import Delivery
from gendurable.errors import InstanceCancelled, InstanceFailed

if TYPE_CHECKING:
    from gendurable.client import Client

EMPTY: Mapping[str, Any] = {}

# Ended; or ended, or waiting for a signal or for children.
Until: TypeAlias = Literal["terminal", "parked"]


@frozen
class Handle:
    """An instance and the client to reach it by; equal to every other handle of that id."""

    id: int
    _client: "Client" = field(repr=False, eq=False)

    def get(self) -> Instance:
        """Return the instance as it stands; InstanceNotFound."""
        return self._client.get(self.id)

    def wait(self, timeout: Duration | None = None, until: Until = "terminal") -> Instance:
        """Return the instance once it has ended, or with "parked" once it waits; WaitTimeout."""
        return self._client.wait(self.id, timeout=timeout, until=until)

    def result(self, timeout: Duration | None = None) -> Any:
        """Return the result once the instance is done; InstanceFailed, InstanceCancelled or WaitTimeout."""
        ended = self.wait(timeout)
        if ended.status == Status.FAILED:
            raise InstanceFailed(ended)
        if ended.status == Status.CANCELLED:
            raise InstanceCancelled(ended)
        return ended.result

    def signal(self, name: str, payload: Any = EMPTY, *, dedup_key: str | None = None) -> Delivery:
        """Send it a signal; NoTarget if it has ended."""
        return self._client.signal(self.id, name, payload, dedup_key=dedup_key)

    def cancel(self, *, reason: str | None = None, cascade: bool = False) -> bool:
        """Cancel it; false if it already is, NoTarget if it has ended otherwise."""
        return self._client.cancel(self.id, reason=reason, cascade=cascade)
