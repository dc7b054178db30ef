"""`openclaw tui` on a pseudo-terminal holds a conversation with this gateway."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from interop.wire import wired
from support.interop_processes import BOUND, NODE, OPENCLAW, Gateway, Openclaw, start_process

pytestmark = pytest.mark.requirement("W6")

# Colours, cursor moves, window titles, links and the markers of a synchronised update.
ESCAPES = re.compile(
    r"\x1b[\]_P][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[\[(][0-9;:?<>=]*[ -/]*[@-~]|\x1b[=>78cDEHM]|\r"
)
IDLE = r"connected \| idle"


class Screen:
    """What a terminal of 120 columns is shown. `expect` reads until something is there."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self._process = process
        self._raw = b""
        self._seen = 0

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self._raw.decode(errors="replace"))

    def type(self, line: str) -> None:
        os.write(self._master, f"{line}\r".encode())

    def expect(self, pattern: str) -> None:
        """Until what has been shown since the last match contains the pattern."""
        until = time.monotonic() + BOUND
        while not (found := re.compile(pattern).search(self.text, self._seen)):
            left = until - time.monotonic()
            assert left > 0, f"{pattern!r} was not shown in:\n{self.text[self._seen :]}"
            assert self._more(left), f"the TUI ended without {pattern!r}:\n{self.text[self._seen :]}"
        self._seen = found.end()

    def ended(self) -> int:
        """Read to the end; the exit code."""
        until = time.monotonic() + BOUND
        while self._more(max(0.0, until - time.monotonic())):
            assert time.monotonic() < until, f"the TUI did not end:\n{self.text[self._seen :]}"
        return self._process.wait(BOUND)

    def _more(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            chunk = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self._raw += chunk
        return bool(chunk)


@contextmanager
def tui(gateway: Gateway, openclaw: Openclaw, session: str) -> Generator[Screen]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    options = ("tui", "--url", gateway.url, "--token", gateway.token, "--session", session)
    command = [str(NODE), str(OPENCLAW), *options]
    try:
        with start_process(command, openclaw.environ, stdin=slave, stdout=slave, stderr=slave) as process:
            os.close(slave)
            yield Screen(master, process)
    finally:
        os.close(master)


def test_the_tui_holds_a_conversation(gateway: Gateway, openclaw: Openclaw) -> None:
    with tui(gateway, openclaw, "agent:main:direct:tui") as screen:
        screen.expect(IDLE)
        # Answered at once: a client that is told of the end before it has read the beginning would wait for ever.
        screen.type("good evening")
        screen.expect("You said: 'good evening'")
        screen.expect(IDLE)
        screen.type("slow 1 one two three four")
        screen.expect(r"\n\s*one two three four")
        screen.expect(IDLE)
        screen.type("/exit")
        assert screen.ended() == 0


def test_the_tui_shows_what_was_said_before(gateway: Gateway, openclaw: Openclaw) -> None:
    key = "agent:main:direct:before"
    asked = {"message": "say the day before", "sessionKey": key, "idempotencyKey": "tui-1"}
    assert openclaw.call(gateway, "agent", asked, "--expect-final").json["status"] == "ok"
    with tui(gateway, openclaw, key) as screen:
        screen.expect(r"\n\s*the day before")
        screen.expect(IDLE)
        screen.type("/exit")
        assert screen.ended() == 0


@pytest.mark.requirement("T7")
def test_the_tui_decides_on_a_call_that_waits(payments: Gateway, openclaw: Openclaw) -> None:
    with tui(payments, openclaw, "agent:main:main") as screen:
        screen.expect(IDLE)
        screen.type('call pay {"amount": 5}')
        screen.expect(r"call pay \{")
        # The TUI shows no such question, but sends commands that it does not know.
        requested = "exec.approval.requested"
        with wired(payments) as (wire, _):
            listed: Any = wire.call("exec.approval.list", {})
            if not listed and not wire.events(requested):
                wire.until(lambda frame: frame.get("event") == requested)
            [waiting, *_] = [*listed, *(frame["payload"] for frame in wire.events(requested))]
        screen.type(f"/approve {waiting['id']} allow-once")
        screen.expect("5 paid")
        screen.expect(IDLE)
        screen.type("/exit")
        assert screen.ended() == 0
