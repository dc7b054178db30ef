"""`antiphon demo`: the whole story, in order, from a real house; and nothing of it is left behind."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from antiphon.bus import Delivered, Event, MessageAppended, RunChanged
from antiphon.cli._move_diagram import (
    ASCII_CHARACTERS,
    MIN_DIAGRAM_COLUMNS,
    UNICODE_CHARACTERS,
    make_diagram,
)
from antiphon.cli._moves import Move, MoveBuilder
from antiphon.messages import (
    AssistantMessage,
    Message,
    Provenance,
    TextBlock,
    ToolCall,
    ToolResult,
    UserMessage,
    encode_message,
)
from cli.terminal import Program, Terminal
from cli.test_cli import imported

pytestmark = pytest.mark.requirement("R")

ASKED = (
    "Can we take the ferry today?",
    "sessions_list finds main, agent:helper:main",
    "sessions_send .When does the ferry leave?",
    "reply .At 12:40, from pier 2.",
    "sessions_send returns 'ok' after",
    "There is one at 12:40.",
    "reply-back 1 .That is too early for us.",
    "reply-back 2 .Yes, at 15:10.",
    "reply-back 3 .Yes, please.",
    "reply-back 4 REPLY_SKIP",
    "announce step",
    "delivered to helper's chat .I am holding two seats on the 15:10 ferry.",
)
SPAWNED = (
    "Will the sea be calm?",
    "scout",
    "sessions_spawn .How strong is the wind at 15:10?",
    "sessions_yield",
    "A scout is finding out.",
    "result .A light breeze",
    "announce step",
    "report .Status: ok Result: A light breeze from the south-west.",
    "woken",
    "Their reports are in.",
)
DELIVERED = "delivered to main's chat .Status: ok Result: A light breeze from the south-west."
ENDING = (
    "exchange +settled: .* 4 reply-back turns",
    "scout reported 'ok'",
    "2, all delivered",
    "antiphon up",
)


@pytest.fixture
def program(program: Program, tmp_path: Path) -> Program:
    """One whose temporary files can be seen."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    return Program(program.home, program.bytecode, {"TMPDIR": str(temporary)})


def left_behind(program: Program) -> list[str]:
    found = [path.name for path in Path(program.extra["TMPDIR"]).iterdir()]
    return [*found, *(["state"] if program.state.exists() else [])]


def told(text: str) -> str:
    """The words beside the columns, in one line."""
    beside = [re.sub(r"^[ |│*●+┼<>◄►├┤─-]*(?=[^ |│*●+┼<>◄►├┤─-]|$)", "", line) for line in text.splitlines()]
    return " ".join(" ".join(beside).split())


def assert_in_order(text: str, *patterns: str) -> None:
    at = 0
    for pattern in patterns:
        found = re.compile(pattern).search(text, at)
        assert found, f"{pattern!r} is not where it should be in:\n{text}"
        at = found.end()


# --- the command ---


@pytest.mark.requirement("S1", "S2", "S5", "S6", "P1", "P4", "P5")
def test_the_story_is_complete_and_in_order(program: Program) -> None:
    done = program.run("demo")
    assert (done.code, done.err) == (0, "")
    assert done.out.isascii()
    assert max(map(len, done.out.splitlines())) <= 80
    assert_in_order(told(done.out), *ASKED, *SPAWNED, *ENDING)
    assert_in_order(told(done.out), "report .Status", DELIVERED)
    assert left_behind(program) == []


@pytest.mark.parametrize("width", [80, 120])
def test_a_person_sees_who_talks_to_whom(program: Program, width: int) -> None:
    with terminal(program, width, "--pace", "0.01") as shown:
        assert shown.ended() == 0
    lines = shown.text.splitlines()
    assert max(map(len, lines)) <= width
    assert_in_order(told(shown.text), *ASKED, *SPAWNED, *ENDING)
    sent = next(line for line in lines if "When does the ferry leave?" in line)
    assert re.match(r"   │ +├─+►│ +sessions_send", sent)
    report = next(line for line in lines if "report “Status" in line)
    assert re.match(r"   │ +│◄─+┼─+┤ +report", report)
    assert "\x1b[36m" in shown.raw
    assert "for reading along" in told(shown.text)
    assert left_behind(program) == []


def test_a_narrow_terminal_gets_lines(program: Program) -> None:
    with terminal(program, 50, "--fast") as shown:
        assert shown.ended() == 0
    assert max(map(len, shown.text.splitlines())) <= 50
    assert "main ─► helper: sessions_send “When does the" in shown.text
    assert "for reading along" not in shown.text


def terminal(program: Program, width: int, *arguments: str) -> Terminal:
    extra = {**program.extra, "COLUMNS": str(width), "PYTHONIOENCODING": "utf-8"}
    return Program(program.home, program.bytecode, extra).terminal("demo", *arguments)


@pytest.mark.requirement("S3", "P5")
def test_events_for_programs(program: Program) -> None:
    done = program.run("demo", "--json")
    assert (done.code, done.err) == (0, "")
    *events, summary = [json.loads(line) for line in done.out.splitlines()]
    kinds = [(event["kind"], event["sessionKey"]) for event in events if event["event"] == "delivered"]
    assert kinds == [("announce", "agent:helper:main"), ("task", "agent:main:main")]
    calls = [event["name"] for event in events if event["event"] == "tool" and event["phase"] == "start"]
    assert calls == ["sessions_list", "sessions_send", "sessions_spawn", "sessions_yield"]
    assert provenances(events) == {
        "agent:main:main": {None, "inter_session", "subagent_result", "wake"},
        "agent:helper:main": {None, "inter_session", "announce_step"},
        "scout": {None, "spawn", "announce_step"},
    }
    assert summary.items() >= {"event": "summary", "turns": 4, "stateDir": None}.items()
    assert (summary["deliveries"], summary["tasks"]) == ({"delivered": 2}, {"scout": "ok"})
    assert [(part["name"], part["runs"]) for part in summary["voices"]] == [
        ("main", 5),
        ("helper", 4),
        ("scout", 2),
    ]
    assert left_behind(program) == []


def provenances(events: list[dict[str, Any]]) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for event in events:
        if event["event"] == "message":
            name = "scout" if ":subagent:" in event["sessionKey"] else event["sessionKey"]
            found.setdefault(name, set()).add(event["body"].get("provenance", {}).get("kind"))
    return found


def test_what_is_kept_can_be_looked_at(program: Program) -> None:
    kept = json.loads(program.run("demo", "--json", "--keep").out.splitlines()[-1])["stateDir"]
    assert left_behind(program) == [Path(kept).name]
    assert Path(kept).stat().st_mode & 0o077 == 0
    rows = program.run("--state-dir", kept, "sessions", "list", "--json").json["sessions"]
    assert {row["key"] for row in rows} > {"agent:main:main", "agent:helper:main"}
    checked = program.run("--state-dir", kept, "config", "check")
    assert (checked.code, "helper" in checked.out) == (0, True)


@pytest.mark.requirement("T1", "T5", "T6", "P9")
def test_a_sub_agent_reads_runs_a_command_and_leaves_a_file(program: Program) -> None:
    *events, summary = [json.loads(line) for line in program.run("demo", "work", "--json").out.splitlines()]
    calls = [event["name"] for event in events if event["event"] == "tool" and event["phase"] == "start"]
    assert [name for name in calls if not name.startswith("sessions_")] == ["read", "exec", "write"]
    outputs = [
        block["text"]
        for event in events
        if event["event"] == "message" and event["body"].get("toolName") == "exec"
        for block in event["body"]["content"]
    ]
    assert re.search(r"3 plum\s+2 pear\s+1 apple", outputs[0])
    assert summary["tasks"] == {"clerk": "ok"}
    assert Path(summary["writtenFile"]).read_text("utf-8").startswith("# Sales")
    assert Path(summary["writtenFile"]).is_relative_to(summary["stateDir"])


def test_where_it_was_kept_is_said(program: Program) -> None:
    done = program.run("demo", "--keep")
    (name,) = left_behind(program)
    assert name in "".join(done.out.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_nothing_is_left(program: Program, number: signal.Signals) -> None:
    with program.terminal("demo", "--pace", "10") as shown:
        shown.expect("An agent asks another one")
        assert left_behind(program) != []
        shown.process.send_signal(number)
        shown.expect("Stopped. Nothing is left behind.")
        assert shown.ended() == 128 + number
    assert "Traceback" not in shown.text
    assert left_behind(program) == []


def test_it_uses_no_directory_of_another_user(program: Program) -> None:
    refused = program.run("demo", "--state-dir", str(program.state), "--json")
    assert (refused.code, refused.error["code"]) == (2, "usage")
    assert not program.state.exists()


def test_no_other_command_pays_for_it(program: Program) -> None:
    assert imported(program, "sessions", "list").isdisjoint(
        {"antiphon.cli.demo", "antiphon.cli._move_diagram"}
    )


# --- telling: events in any order that sessions can have ---

PARENT, CHILD = "agent:main:main", "agent:main:subagent:1"


def narrator() -> MoveBuilder:
    return MoveBuilder({PARENT: "main", "agent:helper:main": "helper"}, "you")


def entry(key: str, message: Message, run_id: str | None = "r") -> MessageAppended:
    return MessageAppended(
        session_key=key, session_id="s", seq=1, entry="e", body=encode_message(message), run_id=run_id
    )


def said(text: str, provenance: Provenance | None = None) -> AssistantMessage:
    return AssistantMessage(content=[TextBlock(text=text)], timestamp=1, provenance=provenance)


def hear(one: MoveBuilder, *events: Event) -> list[Move]:
    return [move for event in events for move in one.process_event(event)]


def test_a_child_is_not_heard_before_it_was_spawned() -> None:
    one = narrator()
    call = ToolCall(id="c", name="sessions_spawn", arguments={"task": "look", "label": "scout"})
    returned = ToolResult(
        tool_call_id="c",
        tool_name="sessions_spawn",
        content=[TextBlock(text=json.dumps({"childSessionKey": CHILD}))],
        timestamp=1,
    )
    task = UserMessage(
        content="look", timestamp=1, provenance=Provenance(kind="spawn", source_session_key=PARENT)
    )
    asked = entry(PARENT, AssistantMessage(content=[call], timestamp=1))
    assert hear(one, asked, entry(CHILD, task, "child"), entry(CHILD, said("seen"), "child")) == []
    assert hear(one, entry(PARENT, returned)) == [
        Move("main", "scout", "sessions_spawn", "look", spoken=True),
        Move("scout", None, "result", "seen", spoken=True),
    ]


def test_a_delivery_is_told_after_the_words_it_delivers() -> None:
    one = narrator()
    text = "Status: ok\n\nStats: none"
    posted = Delivered(session_key=PARENT, key="k", run_id="note:1", kind="task", text=text)
    report = Provenance(kind="subagent_result", source_session_key="agent:helper:main")
    assert hear(one, posted) == []
    assert one.finished == set()
    assert hear(one, entry(PARENT, said(text, report), None)) == [
        Move("helper", "main", "report", "Status: ok", spoken=True),
        Move("main", "you", "delivered to main's chat", "Status: ok", spoken=True),
    ]
    assert one.finished == {"task"}


def test_only_a_turn_that_ended_is_over() -> None:
    one = narrator()
    woken = UserMessage(content="", timestamp=1, provenance=Provenance(kind="wake"))
    running = RunChanged(session_key=PARENT, run_id="r", state="running")
    assert [move.kind for move in hear(one, entry(PARENT, woken), running)] == ["woken"]
    assert one.finished == set()


# --- drawing ---


@pytest.mark.parametrize("width", [20, MIN_DIAGRAM_COLUMNS - 1, MIN_DIAGRAM_COLUMNS, 80, 200])
def test_nothing_is_wider_than_its_place(width: int) -> None:
    drawn = make_diagram(["you", "main"], width, ASCII_CHARACTERS)
    move = Move("main", "you", "a label", "words \x1b[31m and “others” " * 20, spoken=True)
    lines = [
        *drawn.draw_title("A title"),
        *drawn.draw([move, move._replace(target="somebody else")]),
    ]
    assert max(map(len, lines)) <= width
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_who_comes_later_gets_a_column() -> None:
    drawn = make_diagram(["you", "main"], 80, UNICODE_CHARACTERS)
    drawn.draw_title("")
    assert drawn.draw([Move("you", "scout", "", "go", spoken=True)]) == [
        "   │        │      scout",
        "   ├────────┼───────►│             “go”",
    ]


def test_who_gets_no_column_is_named_beside_the_others() -> None:
    drawn = make_diagram(["you", "main", "helper", "scout"], 80, ASCII_CHARACTERS)
    drawn.draw_title("")
    [line] = drawn.draw([Move("late", "main", "reply", "here", spoken=True, time_ms=0)])
    assert re.fullmatch(r' +\|( +\|){3} +\d\d:\d\d:\d\d late -> main: reply "here"', line)
