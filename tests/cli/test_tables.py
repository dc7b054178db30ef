"""Tables keep every key and every error, on a narrow terminal as in a pipe."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from cli.terminal import Program

pytestmark = pytest.mark.requirement("R")

REASON = "a very long reason with much to read until its very last word"


@pytest.fixture
def used(program: Program) -> Program:
    """A state directory with a session that has a long key, and a sub-agent that failed with a long error."""
    assert program.run("spawn", f"fail {REASON}", "--label", "calc", "--wait").code == 8
    return program


def shown(program: Program, columns: int, *command: str) -> list[str]:
    """What a terminal of that width shows."""
    with replace(program, extra={"COLUMNS": str(columns)}).terminal(*command) as terminal:
        assert terminal.ended() == 0
        return terminal.text.splitlines()


@pytest.mark.parametrize("columns", [80, 120, 400])
def test_no_key_and_no_error_is_cut_on_a_terminal(used: Program, columns: int) -> None:
    [task] = used.run("subagents", "--json").json["subagents"]
    [delivery] = used.run("deliveries", "--json").json["deliveries"]
    for command, kept in (
        (("subagents",), [task["error"]]),
        (("sessions", "list"), [task["childSessionKey"]]),
        (("deliveries",), [delivery["key"]]),
    ):
        lines = shown(used, columns, *command)
        text = " ".join(" ".join(lines).split())
        assert [whole for whole in kept if whole not in text] == [], text
        assert [line for line in lines if len(line) > columns] == []


def test_a_narrow_terminal_says_which_cell_is_which(used: Program) -> None:
    lines = shown(used, 80, "deliveries")
    assert lines[0].startswith("delivered · where webchat agent:main:main · since ")
    assert lines[1].startswith("  key task:")
    assert not any("KEY" in line for line in lines)


def test_a_last_column_that_is_too_wide_is_wrapped(program: Program) -> None:
    offered = {each["name"]: each["reason"] for each in program.run("tools", "--json").json["tools"]}
    lines = shown(program, 80, "tools")
    assert re.fullmatch(r"TOOL +OFFERED +KEY +WHY", lines[0])
    assert max(map(len, lines)) <= 80
    start = lines[0].index("WHY")
    shown_reasons: dict[str, str] = {}
    name = ""
    for line in lines[1:]:
        name = line.split()[0] if line[0] != " " else name
        shown_reasons[name] = f"{shown_reasons.get(name, '')} {line[start:]}".strip()
    assert shown_reasons == offered


def test_lines_are_wrapped_between_words(program: Program) -> None:
    path = str(program.state)
    lines = shown(program, 60, "doctor")
    text = " ".join(" ".join(lines).split())
    assert path in text
    in_pipe = " ".join(program.run("doctor").out.split())
    free = re.compile(r"\d+ MiB free")  # other programs use the disk, too
    assert free.sub("", in_pipe) == free.sub("", text)
    assert [
        line for line in lines if len(line) > 60 and not any(len(word) > 40 for word in line.split())
    ] == []
    answer = " ".join(["word"] * 30)
    lines = shown(program, 60, "agent", "--message", f"say {answer}")
    assert {word for line in lines if "Accepted" not in line for word in line.split()} >= {"word"}
    assert [line for line in lines if line.startswith("word") and len(line) > 60] == []


@pytest.mark.parametrize(
    "command",
    [
        ("config", "check"),
        ("subagents", "show", "calc"),
        ("cron", "run", "nightly"),
        ("send", "main", f"fail {REASON}", "--wait", "30"),
        ("sessions", "history", "nowhere"),
    ],
)
def test_reports_and_errors_are_wrapped_between_words(used: Program, command: tuple[str, ...]) -> None:
    used.configure({"tools": {"allow": ["no_such_tool"]}})
    assert (
        used.run("cron", "add", "--name", "nightly", "--every", "1h", "--message", f"fail {REASON}").code == 0
    )
    with replace(used, extra={"COLUMNS": "50"}).terminal(*command) as terminal:
        terminal.ended()
        lines = terminal.text.splitlines()
    assert max(map(len, lines)) > 30, "there is something to wrap"
    assert [line for line in lines if len(line) > 50 and len(line.split()) > 2] == [], (
        "names and keys stay whole"
    )


def test_hints_name_the_program_as_it_was_called(program: Program) -> None:
    program = replace(program, extra={"ANTIPHON_COMMAND": "./antiphon"})
    sent = program.run("send", "main", "say hello")
    assert "The answer: ./antiphon sessions history agent:main:main" in sent.err
    assert "start it with: ./antiphon up" in program.run("status").out
    assert program.run("chat", "--agent").err.endswith("\nTry `./antiphon chat --help`.\n")
    assert program.run("sessions", "list", "--limit").err.endswith(
        "\nTry `./antiphon sessions list --help`.\n"
    )
    assert "`./antiphon up`" in program.run("--help").out
    assert "List the open ones: ./antiphon approvals." in program.run("approvals", "allow", "x").err


def test_hints_keep_the_options_that_select_the_store(program: Program) -> None:
    for command in ("./antiphon", "antiphon"):
        called = replace(program, extra={"ANTIPHON_COMMAND": command})
        store = str(program.home / f"a store of {command[0]}")
        config = program.home / "other.json5"
        config.write_text("{}")
        options = ("--state-dir", store, "--config", str(config))
        named = f"{command} --config {config} --state-dir '{store}'"
        assert f"`{named} chat`" in called.run("sessions", "list", *options).err
        sent = called.run(*options, "send", "main", "say hello")
        assert f"The answer: {named} sessions history agent:main:main" in sent.err
        assert f"start it with: {named} up" in called.run("status", *options).out


def test_a_pipe_gets_one_complete_line_for_each_row(used: Program) -> None:
    [task] = used.run("subagents", "--json").json["subagents"]
    heading, row, _ = used.run("subagents").out.splitlines()
    assert heading.split() == ["LABEL", "STATE", "AGENT", "SINCE", "TOKENS", "ERROR", "RESULT"]
    assert task["error"] in row
    [delivery] = used.run("deliveries", "--json").json["deliveries"]
    heading, row = used.run("deliveries").out.splitlines()
    assert heading.split() == ["STATE", "WHERE", "SINCE", "TRIES", "KEY", "ERROR", "TEXT"]
    assert row.endswith(" ".join(delivery["text"].split()))
