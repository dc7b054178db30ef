"""The prompt of an interactive chat, by prompt_toolkit: line editing, history, paste, completion of commands.

Output goes above the prompt. The line of an answer that is still being written is drawn as a part of the prompt and
printed once it is complete, so that the terminal wraps it, and copies it, as one line.

Only an interactive chat imports this module: importing prompt_toolkit takes longer than most commands do.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import DynamicCompleter, WordCompleter
from prompt_toolkit.data_structures import Size
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
MAX_HISTORY_ENTRIES = 1000
MAX_HISTORY_BYTES = 1024 * 1024
HISTORY_SEPARATOR = b"\n# "  # begins the comment before each entry, as `FileHistory` writes it
MENU_ROWS = 9  # the line that is being edited, and below it every command
MAX_ROW_CHARACTERS = 4000  # beyond that, characters without a width are not shown
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
        self._open_line = OpenLine()
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
        if self._open_line.has_text:
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
        app = self._session.app
        lines, newline, rest = text.rpartition("\n")
        if newline:
            # Not through patch_stdout, whose delay would let a complete line disappear before it is printed.
            if app.is_running:
                app.renderer.erase()
            self._output.enable_autowrap()
            self._output.write_raw(f"{self._open_line.take_text()}{lines}\n")
            self._output.flush()
        if rest:
            self._open_line.append(rest, self._output.get_size())
        app.invalidate()

    def _handle_interrupt_key(self, _: KeyPressEvent) -> None:
        self.on_interrupt()

    def _format_message(self) -> StyleAndTextTuples:
        label = to_formatted_text(ANSI(self.get_label()))
        if self._session.app.is_done or not self._open_line.has_text:
            return label
        return [*self._open_line.format_last_rows(self._output.get_size()), *label]


class OpenLine:
    """The line of an answer that is still being written: its whole text, and its last rows as they are shown.

    Each character is formatted once, because the prompt is drawn again for every key and every piece of an answer.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._rows: list[StyleAndTextTuples] = [[]]
        self._columns = 0  # of the terminal for which the rows were wrapped
        self._used_columns = 0  # of the last row

    @property
    def has_text(self) -> bool:
        return bool(self._pieces)

    def append(self, text: str, size: Size) -> None:
        self._pieces.append(text)
        self._rewrap_if_resized(size)
        self._wrap(to_formatted_text(ANSI(text[-size.columns * size.rows :])))
        del self._rows[: -size.rows]

    def take_text(self) -> str:
        """Return the whole text, and begin another line."""
        text = "".join(self._pieces)
        self._pieces, self._rows, self._used_columns = [], [[]], 0
        return text

    def format_last_rows(self, size: Size) -> StyleAndTextTuples:
        """Return as many rows as fit above the prompt, each with a newline."""
        self._rewrap_if_resized(size)
        newline: OneStyleAndTextTuple = ("", "\n")
        return [part for row in self._rows[-max(1, size.rows - PROMPT_ROWS) :] for part in (*row, newline)]

    def _rewrap_if_resized(self, size: Size) -> None:
        if self._columns != size.columns:
            shown = [part for row in self._rows for part in row]
            self._rows, self._used_columns, self._columns = [[]], 0, size.columns
            self._wrap(shown)

    def _wrap(self, fragments: StyleAndTextTuples) -> None:
        """Append to the rows, with one fragment for characters of one style, since prompt_toolkit copies them often."""
        for style, char, *_ in explode_text_fragments(fragments):
            self._used_columns += (width := get_cwidth(char))
            if self._used_columns > self._columns:
                self._rows.append([])
                self._used_columns = width
            row = self._rows[-1]
            if not row or row[-1][0] != style:
                row.append((style, char))
            elif width or len(row[-1][1]) < MAX_ROW_CHARACTERS:
                row[-1] = (style, f"{row[-1][1]}{char}")


class ChatHistory(FileHistory):
    """The last entered lines, in a file that only its owner can read. A line that cannot be stored is not an error.

    Chats that run at the same time share the file: a line that one stores while another trims may be lost.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        path.touch(0o600)
        self._trim()

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            self._path.touch(0o600)  # it may have been deleted
            super().store_string(string)
            if self._path.stat().st_size > MAX_HISTORY_BYTES:
                self._trim()

    def _trim(self) -> None:
        """Remove the oldest entries if the file exceeds a limit."""
        with suppress(OSError):
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_HISTORY_BYTES))
                # Lines of an entry begin with a plus sign. What precedes the first separator is part of an older entry.
                entries = file.read().split(HISTORY_SEPARATOR)[1:]
            if size <= MAX_HISTORY_BYTES and len(entries) <= MAX_HISTORY_ENTRIES:
                return
            number, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")  # mode 0600
            try:
                with os.fdopen(number, "wb") as draft:
                    draft.writelines(HISTORY_SEPARATOR + entry for entry in entries[-MAX_HISTORY_ENTRIES:])
                Path(name).replace(self._path)
            except OSError:
                Path(name).unlink()


def _open_history(path: Path) -> History:
    """Return the history in this file; one in memory if the file cannot be written."""
    try:
        return ChatHistory(path)
    except OSError:  # such as no state directory, for a client of a gateway elsewhere
        return InMemoryHistory()


def _raise_interrupt() -> None:
    raise KeyboardInterrupt
