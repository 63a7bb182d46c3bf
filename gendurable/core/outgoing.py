"""Signals that a transactional step sends: checked when it sends them, delivered when its outcome is committed."""

from typing import Any

from attrs import field, frozen

from gendurable.core.codec import encode_value
from gendurable.core.limits import check_id, check_key, check_name


@frozen
class Outgoing:
    """A signal on its way; `encoded` is the payload as it was when it was sent."""

    id: int
    name: str
    payload: Any
    dedup_key: str | None
    encoded: str = field(eq=False, repr=False)


def outgoing(id: object, name: object, payload: Any, dedup_key: object) -> Outgoing:  # noqa: A002  the column's name
    """Check a signal; InvalidInstance or Unstorable if it could not be stored."""
    return Outgoing(
        check_id(id),
        check_name("signal name", name),
        payload,
        None if dedup_key is None else check_key("dedup_key", dedup_key),
        encode_value(payload, what="payload"),
    )
