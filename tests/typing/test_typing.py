"""The public API as a type checker sees it: right.py passes mypy --strict, wrong.py fails exactly where it says."""

import re
from pathlib import Path

import pytest
from mypy import api

HERE = Path(__file__).parent


def errors_of(file: str, cache: Path) -> dict[int, str]:
    output, problems, _ = api.run(["--strict", "--cache-dir", str(cache), "--config-file=", str(HERE / file)])
    assert not problems, problems
    found = re.findall(rf"{file}:(\d+): error: (.*)", output)
    assert ("Success" in output) == (not found), output
    return {int(line): message for line, message in found}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def test_right_uses_pass(cache: Path):
    assert errors_of("right.py", cache) == {}


def test_each_mistake_is_a_type_error_and_nothing_else_is(cache: Path):
    lines = (HERE / "wrong.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    found = errors_of("wrong.py", cache)
    assert set(found) == marked, {line: found.get(line, "no error here") for line in set(found) ^ marked}
