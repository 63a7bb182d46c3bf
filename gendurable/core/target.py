"""References to steps: where an outcome may lead."""

from typing import Generic, TypeAlias, TypeVar

S = TypeVar("S")


class StepRef(Generic[S]):
    """A step of a machine whose state is S. Worth its name: `self.ship`, `Checkout.ship` and "ship" are equal."""

    name: str
    owner: type | None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StepRef):
            return self.name == other.name and self.owner is other.owner
        return self.name == other if isinstance(other, str) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{self.owner.__name__ if self.owner else '?'}.{self.name}"


# Where to go: a step reference (`self.ship`, `Checkout.ship`), or its name.
Target: TypeAlias = StepRef[S] | str
