"""A client, and machines to make instances of."""

from collections.abc import Iterator

import pytest

from gendurable import Client


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as connected:
        yield connected
