"""Meet gendurable as a newcomer does: a clean clone, no Postgres on PATH, `make demo` and `make test`.

    python3 tests/newcomer.py        # or: make newcomer

First as whoever runs this; for root, then once more as an ordinary account. The clone holds what is committed. Of the
tests a few are run, with real workers, and as an ordinary account those of the private server: what is in question is
the way there, the rest is for `make test`. Whatever cannot be done here is told in a line that says SKIPPED.
"""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = "tests/e2e/test_life.py"
ORDINARY_TESTS = f"{TESTS} tests/embedded"
POSTGRES = ("postgres", "initdb", "pg_ctl", "psql")
ORDINARY = "nobody"
OTHER_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
IS_USABLE = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))"
# "Well under two minutes", also on a machine that does other things.
DEMO_SECONDS = 90
# What this account has set up for itself, a newcomer has not. MAKE: we may have been started by make.
FORGOTTEN = ("GENDURABLE_", "PG", "DATABASE_URL", "PYTHON", "VIRTUAL_ENV", "XDG_", "MAKE", "MFLAGS")


def main() -> int:
    """Be a newcomer; return the exit code."""
    if os.geteuid() == 0:
        ordinary = pwd.getpwnam(ORDINARY)
        return meet("root", None, [own_python()]) or meet(ORDINARY, ordinary, [own_python(), *OTHER_PYTHONS])
    say("SKIPPED: the same as root, since this is no root")
    return meet(pwd.getpwuid(os.geteuid()).pw_name, None, [own_python()])


def meet(name: str, account: pwd.struct_passwd | None, pythons: list[str]) -> int:
    """Go from a clone to a demo and green tests, as this account; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        visit = Visit(Path(folder), account)
        python = next((each for each in pythons if visit.run(each, "-c", IS_USABLE, quiet=True) == 0), None)
        if python is None:
            say(f"SKIPPED: as {name}, who can use none of {', '.join(pythons)}: it takes Python 3.11 with venv and pip")
            return 0
        say(f"as {name}, with {python}: make install")
        visit.environment["PYTHON"] = python
        if visit.run("make", "install") or visit.run(".venv/bin/python", "-c", SERVER_IS_OURS):
            return 1
        began = time.monotonic()
        if visit.run("make", "demo"):
            return 1
        lasted = time.monotonic() - began
        say(f"as {name}: the demo took {lasted:.0f} s")
        tests = TESTS if account is None else ORDINARY_TESTS
        return int(lasted > DEMO_SECONDS or visit.run("make", "test", f"TESTS={tests}") != 0)


# Whatever else this machine has, the server that runs must be the one that came with the installation.
SERVER_IS_OURS = """
import sys
from gendurable.embedded import find_binaries
assert find_binaries().is_relative_to(sys.prefix), find_binaries()
"""


class Visit:
    """A clone, and an environment that knows nothing of Postgres, for one account."""

    def __init__(self, folder: Path, account: pwd.struct_passwd | None) -> None:
        self.clone = folder / "gendurable"
        self.account = account
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FORGOTTEN)}
        self.environment = kept | {"HOME": str(folder / "home"), "PATH": without_postgres(folder / "programs")}
        if account is None:  # downloads may be remembered: they are no part of the question
            self.environment.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))
        (folder / "home").mkdir()
        subprocess.run(["git", "clone", "--quiet", ROOT, self.clone], check=True)
        folder.chmod(0o711)
        if account is not None:
            for path in (folder / "home", self.clone, *self.clone.rglob("*")):
                os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)

    def run(self, *command: str, quiet: bool = False) -> int:
        """Run a command in the clone, as the account; return its exit code."""
        where = subprocess.DEVNULL if quiet else None
        try:
            return subprocess.run(
                command,
                cwd=self.clone,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=where,
                stderr=where,
                user=self.account and self.account.pw_uid,
                group=self.account and self.account.pw_gid,
                extra_groups=[] if self.account else None,
                check=False,
            ).returncode
        except OSError:  # it is not there, or not for this account
            return 126


def without_postgres(shadows: Path) -> str:
    """Return PATH with the folders that hold Postgres replaced by links to whatever else they hold."""
    folders = dict.fromkeys(Path(each).resolve() for each in os.environ.get("PATH", "").split(os.pathsep) if each)
    path = []
    for number, folder in enumerate(each for each in folders if each.is_dir()):
        if any((folder / program).exists() for program in POSTGRES):
            shadow = shadows / str(number)
            shadow.mkdir(parents=True)
            for program in folder.iterdir():
                if program.name not in POSTGRES:
                    (shadow / program.name).symlink_to(program)
            path.append(str(shadow))
        else:
            path.append(str(folder))
    found = [program for program in POSTGRES if shutil.which(program, path=os.pathsep.join(path))]
    assert not found, found
    return os.pathsep.join(path)


def own_python() -> str:
    """Return the interpreter that runs this, not that of a virtual environment."""
    return str(Path(sys.base_prefix, "bin/python3") if sys.prefix != sys.base_prefix else sys.executable)


def say(text: str) -> None:
    """Print a heading that stands out between the output of others."""
    sys.stdout.write(f"== newcomer {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
