"""Reads lines from standard input without blocking the event loop.

A thread does the reading. At a prompt on a terminal it uses `input()`, so the line can be edited; while other work is
in progress its wait can be cancelled, and no typed text is lost. Bytes are read from the descriptor itself: a thread
blocked in a buffered read would keep the program from ending.

Output during a prompt is printed above it, on lines of its own; the prompt and the typed text are then drawn again
below. (This moves the cursor to the end of the line.)
"""

from __future__ import annotations

import asyncio
import os
import queue
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import click

from antiphon.cli._output import clean_text

PROMPT_TEXT = "you> "


class _WaitCancelled(Exception):
    """Raised when the wait for a line was cancelled."""


class LineReader:
    """Reads lines from descriptor 0, and None at its end. `interactive` means a person at a terminal."""

    def __init__(self, *, interactive: bool) -> None:
        self.interactive = interactive
        self._loop = asyncio.get_running_loop()
        self._wishes: queue.SimpleQueue[tuple[str | None, asyncio.Future[str | None]]] = queue.SimpleQueue()
        self._early: deque[str | None] = deque()
        self._last: asyncio.Future[str | None] | None = None
        self._buffer = b""
        self._calls_off, self._call_off = os.pipe()
        self._terminal: list[Any] | None = None
        self._asked = ""
        self._drawn: str | None = None
        """The prompt on the screen, until a line is entered."""

    def __enter__(self) -> Self:
        if self.interactive:
            import readline  # the import alone enables editing in input()
            import termios

            readline.set_pre_input_hook(self._on_prompt_drawn)
            self._terminal = termios.tcgetattr(0)
        threading.Thread(target=self._read_requested_lines, name="antiphon-keyboard", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal is not None:
            import termios

            termios.tcsetattr(0, termios.TCSADRAIN, self._terminal)

    async def read_line(self, prompt: str | None = None) -> str | None:
        """Return the next line. A wait without a prompt can be cancelled; the next call then returns the line."""
        if self._early:
            return self._early.popleft()
        answer: asyncio.Future[str | None] = self._loop.create_future()
        self._wishes.put((prompt, answer))
        self._last = answer
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if self._drawn is not None:
                click.echo()  # later output goes below the prompt
            self._drawn = None
            if prompt is None:
                await self._cancel_wait(answer)
            raise

    def has_more(self) -> bool:
        """Whether a pipe or a file has more input, as far as that is known without blocking."""
        if self._last is not None and not self._last.done():
            return False  # the reader thread is waiting for it; reading here too could block forever
        if not self._buffer and select.select([0], [], [], 0)[0]:
            with suppress(OSError):
                self._buffer = os.read(0, 65536)
        return bool(self._early or self._buffer.strip())

    def print_above_prompt(self, text: str) -> None:
        """Print lines above the prompt, if one is shown."""
        drawn = self._drawn
        if drawn is None:
            click.echo(text, nl=False)
            return
        import readline

        visible = drawn.replace("\001", "").replace("\002", "")
        click.echo(f"\n{text}{visible}{clean_text(readline.get_line_buffer())}", nl=False)

    async def _cancel_wait(self, answer: asyncio.Future[str | None]) -> None:
        os.write(self._call_off, b"x")
        await asyncio.wait([answer])
        if answer.exception() is None:
            self._early.append(answer.result())
            # The line came first, so the wake-up byte is still in the pipe.
            os.read(self._calls_off, 1)

    def _read_requested_lines(self) -> None:
        while True:
            prompt, answer = self._wishes.get()
            try:
                ahead = b"\n" in self._buffer  # typed before the prompt was shown
                edits = self.interactive and not ahead
                line = self._read_edited_line(prompt) if prompt and edits else self._read_plain_line()
            except _WaitCancelled as error:
                self._resolve_future(answer.set_exception, error)
            except (EOFError, OSError, ValueError):
                self._resolve_future(answer.set_result, None)
            else:
                self._resolve_future(answer.set_result, line)

    def _resolve_future(self, settle: Callable[[Any], None], outcome: object) -> None:
        with suppress(RuntimeError):  # the event loop is closed, so no caller is waiting
            self._loop.call_soon_threadsafe(settle, outcome)

    def _read_edited_line(self, prompt: str) -> str:
        import readline

        self._asked = prompt
        begun, self._buffer = self._buffer.decode(errors="replace"), b""
        readline.set_startup_hook(lambda: readline.insert_text(begun))
        try:
            return input(prompt)
        finally:
            self._drawn = None

    def _on_prompt_drawn(self) -> None:
        """Called by readline once the prompt is drawn; drawing it earlier would show it twice."""
        self._drawn = self._asked

    def _read_plain_line(self) -> str | None:
        """Return a line, or None at the end of the input."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([0, self._calls_off], [], [])
            if self._calls_off in ready:
                os.read(self._calls_off, 1)
                raise _WaitCancelled
            chunk = os.read(0, 65536)
            if not chunk:
                rest, self._buffer = self._buffer, b""
                return rest.decode(errors="replace") or None
            # Input during line editing ends with the pressed key, also in a paste.
            self._buffer += chunk.replace(b"\r", b"\n") if self.interactive else chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.removesuffix(b"\r").decode(errors="replace")


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
