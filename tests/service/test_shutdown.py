"""Signals of the kernel: the first asks, the second ends it."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

from support import until

PIPE = 60_000  # nearly what a pipe holds

STALLED = """
import sys, threading
from gendurable.service.shutdown import Shutdown

shutdown = Shutdown()
shutdown.serve()

def talk():
    while True:
        sys.stderr.write("x" * 4095 + "\\n")

threading.Thread(target=talk, daemon=True).start()
print("ready", flush=True)
while not shutdown.wait(60):
    pass
print("asked", flush=True)
threading.Event().wait()
"""


def test_a_second_signal_ends_a_process_whose_log_nobody_reads():
    command = [sys.executable, "-c", STALLED]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            pipe = process.stderr.fileno()
            assert process.stdout.readline() == b"ready\n"
            waiting = bytes(4)
            until(
                lambda: int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, waiting), sys.byteorder) > PIPE,
                "a full pipe",
            )
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == b"asked\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
        finally:
            process.kill()


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
    import base64, binascii  # a handler runs before the next line
except BaseException:
    swallowed = True
from gendurable import Job

class Nothing(Job[dict], name="nothing"):
    def perform(self, ctx):
        assert swallowed
"""


def test_a_signal_whose_exit_a_module_swallows_while_it_is_loaded_is_obeyed_all_the_same(dsn: str, tmp_path: Path):
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    command = [sys.executable, "-m", "gendurable", "worker", "--fsms", "swallows", "--dsn", dsn]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "worker_started" not in done.stderr
