from collections.abc import Iterator
from pathlib import Path

import pytest
from stage import Stage

from gendurable import Client


@pytest.fixture
def client(dsn: str) -> Iterator[Client]:
    with Client(dsn) as client:
        yield client


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)
