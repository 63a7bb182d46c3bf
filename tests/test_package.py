"""The package as a plain `import gendurable` gives it."""

import subprocess
import sys

import pytest

import gendurable


@pytest.mark.parametrize("name", gendurable.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(gendurable, name)
    assert name in dir(gendurable)


@pytest.mark.parametrize("name", ["errors.NoTarget", "migrate.up", "testing.Harness", "Client"])
def test_a_module_need_not_be_imported_by_itself(name: str):
    command = [sys.executable, "-c", f"import gendurable; gendurable.{name}"]
    assert subprocess.run(command, capture_output=True, check=False).stderr == b""


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Chekout'"):
        gendurable.Chekout  # type: ignore[attr-defined]  # noqa: B018
