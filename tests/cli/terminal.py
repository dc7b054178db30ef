"""The real `antiphon` process for tests: run to its end, or held on a pseudo-terminal and talked to.

Every wait is bounded, and a process that is still there when its test ends is killed.
"""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyte

COMMAND = [sys.executable, "-m", "antiphon"]
BOUND = 60.0  # seconds after which any wait of a test is a failure
SCREEN_COLUMNS = 250  # wider than what is printed, so that no line is wrapped unless a test asks for it


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.err)["error"]


@dataclass(frozen=True)
class Program:
    """Antiphon with a home of its own."""

    home: Path
    bytecode: Path
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    command: Sequence[str] = tuple(COMMAND)

    @property
    def state(self) -> Path:
        return self.home / "state"

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
        own = {"HOME": str(self.home), "ANTIPHON_STATE_DIR": str(self.state), "TERM": "xterm"}
        return {
            **kept,
            **own,
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
            "PYTHONWARNINGS": "error",
            **self.extra,
        }

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write its configuration, readable by its owner only."""
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.state / "config.json5"
        path.write_text(json.dumps(config))
        path.chmod(0o600)

    def run(self, *arguments: str, stdin: str = "") -> Result:
        done = subprocess.run(
            [*self.command, *arguments],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            env=self.environ,
            timeout=BOUND,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def say(self, *messages: str) -> str:
        """Messages to the main session; what was answered."""
        options = [part for message in messages for part in ("--message", message)]
        done = self.run("chat", *options)
        assert done.code == 0, done.err
        return done.out

    def until_answering(self) -> None:
        """By the list, since a script is shown no words before the answer is complete."""
        until = time.monotonic() + BOUND
        while time.monotonic() < until:
            listed = self.run("sessions", "list", "--json")
            if listed.code == 0 and any(row["state"] == "running" for row in listed.json["sessions"]):
                return
        raise AssertionError("no answer has begun")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            env=self.environ,
        )

    def terminal(self, *arguments: str) -> Terminal:
        return Terminal(self, arguments)


class Terminal:
    """A process on a terminal, of 100 columns unless its program says otherwise.

    `expect` reads until something is there.
    """

    def __init__(
        self, program: Program, arguments: tuple[str, ...], screen_columns: int = SCREEN_COLUMNS
    ) -> None:
        environ = {"COLUMNS": "100", "LINES": "40", **program.environ}
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (int(environ["LINES"]), screen_columns))
        self.process = subprocess.Popen(
            [*program.command, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environ,
        )
        os.close(slave)
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._screen = Screen(screen_columns, int(environ["LINES"]))
        self._seen = (0, "")
        """The line that the last match ended in, and that line up to there."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(BOUND)
        os.close(self._master)

    @property
    def text(self) -> str:
        """Everything on the screen and scrolled out of it."""
        return "\n".join(self._screen.lines)

    @property
    def _unseen(self) -> str:
        """What follows the last match; if something else is there by now, what stands in its place."""
        number, before = self._seen
        first, *rest = self._screen.lines[number:] or [""]
        return "\n".join([first.removeprefix(before), *rest])

    def type(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def expect(self, pattern: str) -> re.Match[str]:
        """Until what has been shown since the last match contains the pattern."""
        until = time.monotonic() + BOUND
        while not (found := re.compile(pattern).search(self._unseen)):
            left = until - time.monotonic()
            assert left > 0, f"{pattern!r} was not shown in:\n{self._unseen}"
            assert self._more(left), f"the process ended without {pattern!r}:\n{self._unseen}"
        number, before = self._seen
        *passed, last = found.string[: found.end()].split("\n")
        if not passed and self._screen.lines[number].startswith(before):
            last = before + last
        self._seen = (number + len(passed), last)
        return found

    def ended(self, seconds: float = BOUND) -> int:
        """Read to the end; the exit code."""
        until = time.monotonic() + seconds
        while self._more(max(0.0, until - time.monotonic())):
            assert time.monotonic() < until, f"the process has not ended after:\n{self._unseen}"
        return self.process.wait(BOUND)

    def _more(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            chunk = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        text = self._decoder.decode(chunk)
        self.raw += text
        self._screen.feed(text)
        return bool(chunk)


class Screen:
    """What a terminal shows after some output, as a person would see it."""

    def __init__(self, columns: int, rows: int) -> None:
        self._screen: Any = pyte.HistoryScreen(columns, rows, history=100_000)
        self._stream: Any = pyte.Stream(self._screen)

    def feed(self, text: str) -> None:
        self._stream.feed(text)

    @property
    def lines(self) -> list[str]:
        """All lines to the cursor or to the last one that is not empty; the cursor's as far as the cursor at least."""
        screen = self._screen
        rows = [*screen.history.top, *(screen.buffer[y] for y in range(screen.lines))]
        lines: list[str] = [
            "".join(row[x].data for x in range(max(row, default=-1) + 1)).rstrip() for row in rows
        ]
        cursor_line: int = len(screen.history.top) + screen.cursor.y
        lines[cursor_line] = lines[cursor_line].ljust(screen.cursor.x)
        while len(lines) > cursor_line + 1 and not lines[-1]:
            del lines[-1]
        return lines
