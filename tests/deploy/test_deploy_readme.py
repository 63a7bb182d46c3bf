import re
from pathlib import Path

from deployment import DEPLOY, unit

README = (DEPLOY / "README.md").read_text()


def test_every_file_is_explained_and_every_file_that_is_explained_is_there():
    table = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in README.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in line}
    files = [
        path.relative_to(DEPLOY) for path in DEPLOY.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]

    def tells_of(name: str, path: Path) -> bool:
        return str(path).startswith(name) or name in {path.name, path.parent.name}

    assert [path for path in files if not any(tells_of(name, path) for name in named)] == [Path("README.md")]
    assert [name for name in named if not any(tells_of(name, path) for path in files)] == []


def test_paths_that_are_told_are_those_of_the_units():
    worker = unit("gendurable-worker@.service")
    for path in (worker["ExecStart"][0].split()[0].rpartition("/bin/")[0], worker["ExecStart"][0].split()[-1]):
        assert path in README
    assert worker["EnvironmentFile"] == ["-/etc/gendurable/gendurable.env", "-/etc/gendurable/%i.env"]
    assert "/etc/gendurable/gendurable.env" in README
    assert f"/var/lib/{worker['StateDirectory'][0]} " in README
