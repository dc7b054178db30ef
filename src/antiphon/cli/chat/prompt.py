"""The prompt of an interactive chat, by prompt_toolkit: line editing, history, paste, completion of commands.

Output goes above the prompt. The line of an answer that is still being written is drawn as a part of the prompt and
printed once it is complete, so that the terminal wraps it, and copies it, as one line.

Only an interactive chat imports this module: importing prompt_toolkit takes longer than most commands do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import DynamicCompleter, WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI, OneStyleAndTextTuple, StyleAndTextTuples, to_formatted_text
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.utils import explode_text_fragments
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.patch_stdout import patch_stdout
from prompt_toolkit.utils import get_cwidth

HISTORY_FILE_NAME = "chat_history"  # in the state directory
MENU_ROWS = 7
PROMPT_ROWS = 3  # kept free below an answer that is longer than the terminal is high


class ChatPrompt:
    """Reads lines from the terminal, and prints above the line that is being edited.

    The terminal stays in raw mode between two lines, so that no key is lost or echoed twice.
    """

    def __init__(self, history_path: Path) -> None:
        self.get_label: Callable[[], str] = str
        """Returns what stands before the cursor; empty while an answer is due."""
        self.on_interrupt: Callable[[], None] = _raise_interrupt
        """Called when Ctrl-C is pressed."""
        self.commands: Mapping[str, str] = {}
        """Slash commands to complete, with a description of each."""
        self._open_line = ""
        self._output = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
        self._output.enable_cpr = (
            False  # not every terminal reports the cursor's position, and it is not needed
        )
        bindings = KeyBindings()
        bindings.add("c-c")(self._handle_interrupt_key)
        self._session: PromptSession[str] = PromptSession(
            self._format_message,
            input=create_input(sys.stdin),
            output=self._output,
            history=_open_history(history_path),
            key_bindings=bindings,
            completer=DynamicCompleter(
                lambda: WordCompleter(list(self.commands), sentence=True, meta_dict=self.commands)
            ),
            complete_while_typing=Condition(lambda: self._session.default_buffer.text.startswith("/")),
            reserve_space_for_menu=MENU_ROWS,
            enable_suspend=True,
        )
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        self._contexts.enter_context(self._session.input.raw_mode())
        self._contexts.enter_context(patch_stdout())  # for what is printed by others, such as warnings
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open_line:
            self.print_above("\n")
        self._contexts.close()

    async def read_line(self) -> str | None:
        """Return the next line, or None if the user leaves with Ctrl-D. A pasted text may have several lines."""
        try:
            return await self._session.prompt_async(handle_sigint=False, set_exception_handler=False)
        except EOFError:
            return None

    def refresh(self) -> None:
        """Draw the prompt again, after its label has changed."""
        self._session.app.invalidate()

    def print_above(self, text: str) -> None:
        """Print complete lines above the prompt; a line without its end is shown, and printed when it ends."""
        # Not through patch_stdout, whose delay would let a complete line disappear before it is printed.
        lines, newline, self._open_line = f"{self._open_line}{text}".rpartition("\n")
        app = self._session.app
        if newline:
            if app.is_running:
                app.renderer.erase()
            self._output.enable_autowrap()
            self._output.write_raw(f"{lines}\n")
            self._output.flush()
        app.invalidate()

    def _handle_interrupt_key(self, _: KeyPressEvent) -> None:
        self.on_interrupt()

    def _format_message(self) -> StyleAndTextTuples:
        message: StyleAndTextTuples = []
        if self._open_line and not self._session.app.is_done:
            message = self._wrap_open_line()
        return [*message, *to_formatted_text(ANSI(self.get_label()))]

    def _wrap_open_line(self) -> StyleAndTextTuples:
        """Return the last rows of the unfinished line, each with a newline."""
        size = self._output.get_size()
        rows: list[StyleAndTextTuples] = [[]]
        used = 0
        for style, char, *_ in explode_text_fragments(to_formatted_text(ANSI(self._open_line))):
            used += get_cwidth(char)
            if used > size.columns:
                rows.append([])
                used = get_cwidth(char)
            rows[-1].append((style, char))
        newline: OneStyleAndTextTuple = ("", "\n")
        return [part for row in rows[-max(1, size.rows - PROMPT_ROWS) :] for part in (*row, newline)]


class _PrivateHistory(FileHistory):
    """Entered lines in a file that only its owner can read. A line that cannot be stored is not an error."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def _open_history(path: Path) -> History:
    """Return the history in this file; one in memory if the file cannot be written."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:  # such as no state directory, for a client of a gateway elsewhere
        return InMemoryHistory()
    return _PrivateHistory(path)


def _raise_interrupt() -> None:
    raise KeyboardInterrupt
