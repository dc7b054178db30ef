"""Reading lines from standard input without stopping the event loop.

A thread does the reading. At a prompt on a terminal it is `input()`, so the line can be edited; while something
else happens it waits for a line in a way that can be called off, and nothing that was typed is lost by that.
Bytes are read from the descriptor itself: a thread that is stuck in a buffered read could not be left behind
when the program ends.

What is to be said while somebody is at the prompt goes `above` it: on lines of its own, and below them the prompt and
what was typed are drawn again. (The cursor is then at its end, also if it was not before.)
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
    """The wait for a line is not needed any more."""


class LineReader:
    """Lines from descriptor 0, or None for its end. `is_interactive` means a person at a terminal."""

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
        """The prompt that somebody sees and has not answered."""

    def __enter__(self) -> Self:
        if self.interactive:
            import readline  # being imported is what it does: input() edits from now on
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
        """The next line. A wait without a prompt can be cancelled; the line is then there for the next call."""
        if self._early:
            return self._early.popleft()
        answer: asyncio.Future[str | None] = self._loop.create_future()
        self._wishes.put((prompt, answer))
        self._last = answer
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if self._drawn is not None:
                click.echo()  # what is said from now on is below the prompt
            self._drawn = None
            if prompt is None:
                await self._cancel_wait(answer)
            raise

    def has_more(self) -> bool:
        """Whether there is more in a pipe or a file, as far as that can be told now."""
        if self._last is not None and not self._last.done():
            return False  # the reader waits for it, and reading here as well could wait for ever
        if not self._buffer and select.select([0], [], [], 0)[0]:
            with suppress(OSError):
                self._buffer = os.read(0, 65536)
        return bool(self._early or self._buffer.strip())

    def print_above_prompt(self, text: str) -> None:
        """Print lines, whether or not somebody is about to write one."""
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
            # The line came first, so the call is still in the pipe.
            os.read(self._calls_off, 1)

    def _read_requested_lines(self) -> None:
        while True:
            prompt, answer = self._wishes.get()
            try:
                ahead = b"\n" in self._buffer  # it was typed before it was asked for
                edits = self.interactive and not ahead
                line = self._read_edited_line(prompt) if prompt and edits else self._read_plain_line()
            except _WaitCancelled as error:
                self._resolve_future(answer.set_exception, error)
            except (EOFError, OSError, ValueError):
                self._resolve_future(answer.set_result, None)
            else:
                self._resolve_future(answer.set_result, line)

    def _resolve_future(self, settle: Callable[[Any], None], outcome: object) -> None:
        with suppress(RuntimeError):  # the loop is gone, and so is whoever asked
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
        """Called by readline when the prompt is there: not earlier, or it would be there twice."""
        self._drawn = self._asked

    def _read_plain_line(self) -> str | None:
        """A line, or None at the end."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([0, self._calls_off], [], [])
            if self._calls_off in ready:
                os.read(self._calls_off, 1)
                raise _WaitCancelled
            chunk = os.read(0, 65536)
            if not chunk:
                rest, self._buffer = self._buffer, b""
                return rest.decode(errors="replace") or None
            # What comes in while a line is edited ends with the key that was pressed, also in a paste.
            self._buffer += chunk.replace(b"\r", b"\n") if self.interactive else chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.removesuffix(b"\r").decode(errors="replace")


def is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
