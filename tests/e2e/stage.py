"""A folder through which a test and the steps of its machines talk: what was done, and what may be done."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from support import until

Note: TypeAlias = dict[str, Any]

# A step whose test has died must not outlive it for ever.
LONGEST_WAIT = 100.0


class Stage:
    """Steps note what they do and wait at gates; the test reads the notes and opens the gates."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    # What steps call.

    def note(self, what: str, **about: Any) -> None:
        """Add a line, at once and whole, so that it survives a kill and never mixes with another process's."""
        line = json.dumps({"what": what, "pid": os.getpid(), "time": time.time(), **about})
        file = os.open(self.folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)

    def wait_at(self, *gates: str) -> None:
        """Wait until one of these gates is open."""
        give_up = time.monotonic() + LONGEST_WAIT
        while not any((self.folder / f"gate {gate}").exists() for gate in gates):
            if time.monotonic() > give_up:
                raise TimeoutError(f"nobody has opened {gates}")
            time.sleep(0.005)

    # What tests call.

    def open(self, *gates: str) -> None:
        for gate in gates:
            (self.folder / f"gate {gate}").touch()

    def notes(self, what: str | None = None, **about: Any) -> list[Note]:
        """What was noted so far, in order; only lines that say this."""
        path = self.folder / "notes"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        wanted = about if what is None else {"what": what, **about}
        return [line for line in lines if wanted.items() <= line.items()]

    def wait_for(self, what: str, count: int = 1, **about: Any) -> list[Note]:
        """Wait until something was noted so many times."""
        enough: Callable[[], list[Note] | None] = lambda: (  # noqa: E731
            found if len(found := self.notes(what, **about)) >= count else None
        )
        return until(enough, f"{count} x {what!r} {about} in {self.notes()}") or []
