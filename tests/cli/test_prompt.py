"""The prompt of an interactive chat on a terminal of 80 columns: editing, paste, history, completion, keys."""

from __future__ import annotations

import pytest

from cli.terminal import Program, Terminal
from cli.test_cli import imported

pytestmark = pytest.mark.requirement("R")

COLUMNS = 80
WORDS = " ".join(f"word{number}" for number in range(40))
UP, CTRL_C, CTRL_D, CTRL_U, TAB = b"\x1b[A", b"\x03", b"\x04", b"\x15", b"\t"
PASTE_BEGIN, PASTE_END = b"\x1b[200~", b"\x1b[201~"


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
