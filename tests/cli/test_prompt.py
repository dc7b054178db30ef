"""The prompt of an interactive chat on a terminal of 80 columns: editing, paste, history, completion, keys."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from prompt_toolkit.data_structures import Size
from prompt_toolkit.formatted_text import ANSI, fragment_list_to_text
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.utils import get_cwidth

from antiphon.cli.chat import prompt as prompt_module
from antiphon.cli.chat.prompt import (
    MAX_HISTORY_BYTES,
    MAX_HISTORY_ENTRIES,
    PROMPT_ROWS,
    ChatHistory,
    ChatPrompt,
    OpenLine,
)
from cli.terminal import BOUND, Program, Terminal
from cli.test_cli import imported

pytestmark = pytest.mark.requirement("R")

COLUMNS = 80
WORDS = " ".join(f"word{number}" for number in range(40))
UP, CTRL_C, CTRL_D, CTRL_U, TAB = b"\x1b[A", b"\x03", b"\x04", b"\x15", b"\t"
PASTE_BEGIN, PASTE_END = b"\x1b[200~", b"\x1b[201~"


SOON = 20.0  # seconds, where a lookup that hangs would be waited for without end
HANGING_LOOKUP = """
import asyncio
import os
from antiphon import cli
from antiphon.cli._backend import LocalBackend

async def hang(self, session):
    os.write(1, b"looking up unfinished runs")  # not printed: that leaves raw mode for a moment
    await asyncio.Event().wait()

LocalBackend.list_unfinished = hang
raise SystemExit(cli.main())
"""


def open_chat(program: Program) -> Terminal:
    return Terminal(program, ("chat",), COLUMNS)


def test_an_answer_streams_above_what_is_being_typed(program: Program) -> None:
    with open_chat(program) as terminal:
        terminal.expect("you> ")
        terminal.type(f"slow 3 {WORDS}")
        terminal.expect("main> word0 word1")
        terminal.press(b"half a line")
        terminal.expect(r"word2[^\n]*\nhalf a line$")
        terminal.expect("word39\nyou> half a line$")
        assert terminal.text.count("half a line") == 1
        assert terminal.text.count("main> word0") == 1
        answer = terminal.text[terminal.text.index("main> ") :].splitlines()[:-1]
        assert "".join(answer).replace(" ", "") == f"main> {WORDS}".replace(" ", "")
        assert max(map(len, terminal.text.splitlines())) <= COLUMNS


def test_an_answer_longer_than_the_screen_is_printed_once(program: Program) -> None:
    small = Program(program.home, program.bytecode, {"LINES": "8"})
    words = " ".join(f"word{number}" for number in range(200))
    with open_chat(small) as terminal:
        terminal.expect("you> ")
        terminal.type(f"slow 2 {words}")
        terminal.expect("word199\nyou> $")
        answer = terminal.text[terminal.text.rindex("main> ") :]
        assert "".join(answer.split()[1:-1]) == words.replace(" ", "")
        assert terminal.text.count("main> word0") == 1


def test_ctrl_c_stops_the_answer_and_then_leaves(program: Program) -> None:
    with open_chat(program) as terminal:
        terminal.expect("you> ")
        terminal.type(f"slow 60 {WORDS}")
        terminal.expect("main> word0")
        terminal.press(CTRL_C)
        terminal.expect(r"\(The run was stopped\.\)\nyou> ")
        terminal.press(CTRL_C)
        assert terminal.ended() == 0


def test_a_pasted_text_is_one_message(program: Program) -> None:
    with open_chat(program) as terminal:
        terminal.expect("you> ")
        terminal.press(PASTE_BEGIN + b"say one\rsay two" + PASTE_END)
        terminal.expect("say one\n *say two$")
        terminal.type("")
        terminal.expect("main> one\ntwo\nyou> ")
        terminal.press(CTRL_D)
        assert terminal.ended() == 0
    messages = program.run("sessions", "history", "main", "--json").json["messages"]
    assert [item["content"] for item in messages if item["role"] == "user"] == ["say one\nsay two"]


def test_the_next_chat_remembers_what_was_typed_in_a_file_of_its_own(program: Program) -> None:
    with open_chat(program) as terminal:
        terminal.expect("you> ")
        terminal.type("say remember me")
        terminal.expect("main> remember me\nyou> ")
        terminal.press(CTRL_D)
        assert terminal.ended() == 0
    assert (program.state / "chat_history").stat().st_mode & 0o777 == 0o600
    with open_chat(program) as terminal:
        terminal.expect("you> ")
        terminal.press(b"draft")
        terminal.expect("draft$")  # the history is loaded after the prompt was first drawn
        terminal.press(CTRL_U + UP)
        terminal.expect("you> say remember me$")
        terminal.type("")
        terminal.expect("main> remember me\nyou> ")


@pytest.mark.parametrize("key", [CTRL_C, CTRL_D], ids=["ctrl-c", "ctrl-d"])
def test_a_chat_can_be_left_while_unfinished_runs_are_looked_up(program: Program, key: bytes) -> None:
    hanging = replace(program, command=(sys.executable, "-c", HANGING_LOOKUP))
    with open_chat(hanging) as terminal:
        terminal.expect("looking up unfinished runs")
        terminal.press(key)
        assert terminal.ended(SOON) == 0


class RecordingOutput(DummyOutput):
    """A terminal of 80 columns and 40 rows that only records what is printed above the prompt."""

    printed = ""

    def write_raw(self, data: str) -> None:
        self.printed += data


@pytest.mark.anyio
async def test_each_character_of_a_long_line_is_formatted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output, delta = RecordingOutput(), "0123456789"
    parsed, measured = list[str](), list[str]()

    def parse(text: str) -> ANSI:
        parsed.append(text)
        return ANSI(text)

    def measure(text: str) -> int:
        measured.append(text)
        return get_cwidth(text)

    monkeypatch.setattr(prompt_module, "ANSI", parse)
    monkeypatch.setattr(prompt_module, "get_cwidth", measure)
    monkeypatch.setattr(prompt_module.Vt100_Output, "from_pty", Mock(return_value=output))
    with create_pipe_input() as keys:
        monkeypatch.setattr(prompt_module, "create_input", Mock(return_value=keys))
        prompt, drawn = ChatPrompt(tmp_path / "history"), asyncio.Event()
        prompt.get_label = lambda: (drawn.set(), "")[1]
        reading = asyncio.create_task(prompt.read_line())
        for number in range(20_000):
            prompt.print_above(delta)
            if number % 1000 == 0:
                drawn.clear()
                async with asyncio.timeout(BOUND):
                    await drawn.wait()
        assert "".join(parsed) == "".join(measured) == delta * 20_000
        assert output.printed == ""
        prompt.print_above("\n")
        assert output.printed == f"{delta * 20_000}\n"
        keys.send_text("\r")
        assert await reading == ""


def test_an_open_line_is_wrapped_for_the_terminal_as_it_is_now() -> None:
    line, text = OpenLine(), "".join(f"{number:04}" for number in range(1000))
    line.append(f"\x1b[1mmain> \x1b[0m{text}", Size(rows=10, columns=80))

    def show(size: Size) -> list[str]:
        return fragment_list_to_text(line.format_last_rows(size)).splitlines()

    rows = show(Size(rows=10, columns=80))
    assert [len(row) for row in rows] == [80] * (10 - PROMPT_ROWS - 1) + [len(rows[-1])]
    assert text.endswith("".join(rows))
    narrow = show(Size(rows=10, columns=30))
    assert max(map(len, narrow)) == 30
    assert text.endswith("".join(narrow))
    line.append("語" * 100, Size(rows=10, columns=31))  # of two columns each
    assert show(Size(rows=5, columns=31))[0] == "語" * 15
    assert line.take_text() == f"\x1b[1mmain> \x1b[0m{text}{'語' * 100}"
    assert not line.has_text


def test_the_history_keeps_the_last_entries(tmp_path: Path) -> None:
    path = tmp_path / "history"
    history = ChatHistory(path)
    for number in range(MAX_HISTORY_ENTRIES + 10):
        history.store_string(f"first {number}\n# second")
    path.chmod(0o644)
    kept = list(ChatHistory(path).load_history_strings())
    assert len(kept) == MAX_HISTORY_ENTRIES
    assert kept[0] == f"first {MAX_HISTORY_ENTRIES + 9}\n# second"
    assert kept[-1] == "first 10\n# second"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_the_history_is_trimmed_to_a_size_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "history"
    history = ChatHistory(path)
    for number in range(12):
        history.store_string(f"{number} {'x' * (MAX_HISTORY_BYTES // 10)}")
        assert path.stat().st_size <= MAX_HISTORY_BYTES
    kept = [entry.split()[0] for entry in history.load_history_strings()]
    assert kept == ["11", "10", "9", "8", "7", "6", "5", "4", "3"]
    path.unlink()
    history.store_string("y" * 2 * MAX_HISTORY_BYTES)
    assert list(history.load_history_strings()) == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_every_command_is_in_the_menu(program: Program) -> None:
    with open_chat(program) as terminal:
        terminal.expect("you> ")
        terminal.press(b"/")
        terminal.expect("/new +start (.*\n)+ */help .*\n */quit +leave")


def test_a_command_without_an_argument_refuses_one(program: Program) -> None:
    program.say("say hello")
    refused = program.run("chat", stdin="/new now\n")
    assert (refused.code, "/new takes no argument" in refused.err) == (2, True)
    assert len(program.run("sessions", "past", "main", "--json").json["conversations"]) == 1


def test_a_command_is_completed(program: Program) -> None:
    with open_chat(program) as terminal:
        terminal.expect("you> ")
        terminal.press(b"/sta")
        terminal.expect("/status +show the state of this conversation")
        terminal.press(TAB)
        terminal.type("")
        terminal.expect("session id ")
        assert "you> /status\n" in terminal.text


@pytest.mark.parametrize(
    "arguments", [["--version"], ["chat", "--message", "say hello"], ["sessions", "list"]]
)
def test_only_an_interactive_chat_imports_the_line_editor(program: Program, arguments: list[str]) -> None:
    assert "prompt_toolkit" not in imported(program, *arguments)
