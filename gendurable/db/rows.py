"""What the answers of statements are read into, where core has no word for it."""

from attrs import frozen


@frozen
class Delivery:
    """What became of a signal. `id` is its own, or that of the signal it duplicates."""

    found: bool
    id: int | None
    duplicate: bool
    woke: bool


@frozen
class Reaped:
    """A claim that was taken away. If `spent`, the row is now our claim and must be ended."""

    id: int
    fence: int
    queue: str
    fsm: str
    step: str
    crashes: int
    spent: bool


@frozen
class Expired:
    """A parked instance whose deadline has passed."""

    id: int
    queue: str


@frozen
class Count:
    """How many instances of a queue have a status."""

    queue: str
    status: str
    count: int
