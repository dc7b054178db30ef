"""The commands for what goes on between sessions: `send --from`, `spawn`, `agents`, `exchanges`, `deliveries`."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from cli.gateways import up
from cli.terminal import BOUND, Program

pytestmark = pytest.mark.requirement("R")

MAIN, HELPER = "agent:main:main", "agent:helper:main"
GROUP = "agent:main:telegram:group:7"
CONFIG: dict[str, Any] = {
    "agents": {
        "list": [
            {"id": "main", "default": True, "subagents": {"allowAgents": ["*"]}},
            {"id": "helper", "name": "The helper"},
        ]
    },
    "tools": {"sessions": {"visibility": "all"}, "agentToAgent": {"enabled": True}},
}


@pytest.fixture(params=["beside a gateway", "alone"])
def program_with_helper(request: pytest.FixtureRequest, program: Program) -> Generator[Program]:
    """Two agents; commands are to do the same with a gateway and without one."""
    program.configure(CONFIG)
    with up(program) if request.param == "beside a gateway" else nullcontext():
        yield program


def users(program: Program, session: str) -> list[str]:
    page = program.run("sessions", "history", session, "--json").json
    return [item["content"] for item in page["messages"] if item["role"] == "user"]


@pytest.mark.requirement("S2", "S5", "S6")
def test_one_session_sends_to_another(program_with_helper: Program) -> None:
    asked = ("send", HELPER, "say say pong", "--from", "main", "--reply-back", "1", "--no-announce")
    done = program_with_helper.run(*asked, "--wait", "30", "--key", "k1")
    assert (done.code, done.out) == (0, "say pong\n"), done.err
    assert program_with_helper.run("send", MAIN, "say after it", "--wait", "30").code == 0
    assert users(program_with_helper, HELPER) == ["say say pong"]
    assert users(program_with_helper, MAIN) == ["say pong", "say after it"]
    again = program_with_helper.run(*asked, "--key", "k1", "--json").json
    assert (again["runId"], again["status"], again["sessionKey"]) == ("k1", "accepted", HELPER)
    late = program_with_helper.run(
        "send", HELPER, "slow 30 a b", "--from", "main", "--reply-back", "0", "--wait", "0.2"
    )
    assert (late.code, late.out) == (1, "")
    assert late.err.startswith("Accepted: run ")
    assert "The message was delivered and has been running" in late.err
    assert f"antiphon sessions history {HELPER}" in late.err


@pytest.mark.requirement("S7")
def test_what_cannot_be_sent(program_with_helper: Program) -> None:
    itself = program_with_helper.run("send", "main", "x", "--from", "main", "--json")
    assert (itself.code, itself.error["code"]) == (2, "self_send")
    for wrong in (["--reply-back", "1"], ["--no-announce"], ["--from", "main", "--wait", "3601"]):
        assert program_with_helper.run("send", HELPER, "x", *wrong).code == 2
    failed = program_with_helper.run("send", HELPER, "fail badly", "--from", "main", "--wait", "30")
    assert (failed.code, failed.out) == (8, "")
    assert "badly" in failed.err


@pytest.mark.requirement("P2", "P4", "P9", "003-announce", "003-announce-stats")
def test_a_sub_agent_and_its_report(program_with_helper: Program, tmp_path: Path) -> None:
    notes = tmp_path / "notes.bin"
    notes.write_bytes(b"\xff\x00")
    asked = ("spawn", "say the answer is 42", "--agent", "helper", "--label", "calc", "--attach", str(notes))
    accepted = program_with_helper.run(*asked, "--key", "k1", "--json").json
    assert (accepted["status"], accepted["runId"]) == ("accepted", "k1")
    assert accepted["childSessionKey"].startswith("agent:helper:subagent:")
    assert accepted["attachments"]["files"][0]["bytes"] == 2
    done = program_with_helper.run(*asked, "--key", "k1", "--wait")
    assert done.code == 0, done.err
    assert f"Attached: 1 file, 2 bytes, in {accepted['attachments']['relDir']}." in done.err
    status, result, _, stats = done.out.splitlines()
    assert (status, result) == ("Status: ok", "Result: the answer is 42")
    assert accepted["childSessionKey"] in stats
    assert "the answer is 42" in program_with_helper.run("sessions", "history", "main").out
    told = program_with_helper.run("spawn", "say nothing of it", "--announce", "none", "--wait", "30")
    assert (told.code, told.out) == (0, "Status: ok\nResult: nothing of it\n")


@pytest.mark.requirement("P4")
def test_files_within_the_limits_are_attached_whatever_they_contain(
    program_with_helper: Program, tmp_path: Path
) -> None:
    first, second, long = (tmp_path / name for name in ("a", "b", "long"))
    for path, size in ((first, 1_000_000), (second, 1_000_000), (long, 2_000_000)):
        path.write_bytes(bytes(size))
    asked = ("spawn", "say done", "--json", "--attach", str(first), "--attach")
    accepted = program_with_helper.run(*asked, str(second))
    assert accepted.code == 0, accepted.err
    assert [each["bytes"] for each in accepted.json["attachments"]["files"]] == [1_000_000] * 2
    refused = program_with_helper.run(*asked, str(long))
    assert refused.code == 2 and "at most 1048576 are allowed" in refused.error["message"], refused.err


@pytest.mark.requirement("P2", "P6")
def test_sub_agents_that_fail_or_are_refused(program_with_helper: Program) -> None:
    failed = program_with_helper.run("spawn", "fail badly", "--wait", "30", "--json")
    assert (failed.code, failed.json["status"]) == (8, "error")
    assert "badly" in failed.json["report"]
    stopped = program_with_helper.run("spawn", "slow 30 a b c", "--timeout", "0.3", "--wait")
    assert (stopped.code, stopped.out.splitlines()[0]) == (1, "Status: timeout")
    for wrong, code in (
        (["x", "--agent", "nobody"], 4),
        (["x", "--model", "no/such"], 2),
        (["x", "--attach", "/no/such/file"], 2),
        (["--wait", "x"], 2),
        ([" "], 2),
    ):
        refused = program_with_helper.run("spawn", *wrong)
        assert (refused.code, refused.out) == (code, ""), wrong
        assert len(refused.err.splitlines()) == 2, refused.err


def test_a_report_that_is_late(program: Program) -> None:
    program.configure(CONFIG)
    with up(program):
        late = program.run("spawn", "slow 30 a b c", "--label", "calc", "--wait", "0.3")
        assert (late.code, late.out) == (1, "")
        assert "calc is at work" in late.err
        assert "the sub-agent continues" in late.err


@pytest.mark.requirement("P2", "P9")
def test_the_report_of_a_sub_agent_that_is_deleted(program_with_helper: Program) -> None:
    asked = ("spawn", "say bye", "--cleanup", "delete", "--wait", "30", "--key", "k1")
    for _ in range(2):  # the second time it is gone for certain
        done = program_with_helper.run(*asked)
        assert (done.code, done.out.splitlines()[:2]) == (0, ["Status: ok", "Result: bye"]), done.err
    assert program_with_helper.run(*asked, "--json").json["report"].startswith("Status: ok")


@pytest.mark.requirement("S7", "P2")
def test_a_session_that_is_mistyped_is_not_founded(program_with_helper: Program) -> None:
    for wrong in (
        ["send", HELPER, "say x", "--from", "agent:main:typo"],
        ["send", "agent:main:typo", "say x", "--from", "main"],
        ["spawn", "say x", "--for", "agent:main:typo"],
        ["spawn", "say x", "--for", "agent:nobody:main"],
    ):
        refused = program_with_helper.run(*wrong)
        assert (refused.code, refused.out) == (3, ""), wrong
    assert "typo" not in program_with_helper.run("sessions", "list").out
    assert (
        program_with_helper.run("send", "agent:main:typo", "say founded", "--wait", "30").out == "founded\n"
    )


def test_what_is_empty_is_refused(program_with_helper: Program) -> None:
    for command in (["send", HELPER, "x"], ["send", HELPER, "x", "--from", "main"], ["spawn", "x"]):
        refused = program_with_helper.run(*command, "--key", "")
        assert (refused.code, refused.out) == (2, ""), command
        assert "The idempotency key must be" in refused.err
    for task in ("", " "):
        assert "The task is empty." in program_with_helper.run("spawn", task).err


@pytest.mark.parametrize(
    "command",
    [
        ["spawn", "slow 30 a b", "--wait"],
        ["send", HELPER, "slow 30 a b", "--wait", "60"],
        ["send", HELPER, "slow 30 a b", "--wait", "60", "--from", "main"],
    ],
)
def test_who_stops_waiting_hears_what_becomes_of_it(program: Program, command: list[str]) -> None:
    program.configure(CONFIG)
    with up(program), program.terminal(*command, "--key", "k1") as terminal:
        until_running(program, "k1")
        terminal.interrupt()
        assert terminal.ended() == 130
        assert terminal.text.count("The work continues. Look later: antiphon sessions history ") == 1


def until_running(program: Program, run_id: str) -> None:
    """By the store, since the command says nothing while it waits."""
    until = time.monotonic() + BOUND
    path = f"file:{program.state / 'antiphon.db'}?mode=ro"
    while time.monotonic() < until:
        with closing(sqlite3.connect(path, uri=True)) as database:
            found = database.execute("SELECT state FROM runs WHERE id = ?", (run_id,)).fetchone()
        if found == ("running",):
            return
    pytest.fail(f"run {run_id!r} did not start")


@pytest.mark.requirement("A1")
def test_who_is_there(program_with_helper: Program) -> None:
    cards = {card["id"]: card for card in program_with_helper.run("agents", "--json").json["agents"]}
    assert {id: card["maySpawn"] for id, card in cards.items()} == {
        "main": ["main", "helper"],
        "helper": ["helper"],
    }
    assert cards["main"]["default"]
    assert cards["helper"]["model"] == "rehearsal/rehearsal"
    table = program_with_helper.run("agents").out.splitlines()
    assert table[0].split() == ["AGENT", "NAME", "MODEL", "MAY", "SPAWN", "MAY", "MESSAGE"]
    assert table[1].split() == ["main", "*", "rehearsal/rehearsal", "itself,", "helper", "helper"]


@pytest.mark.requirement("G43")
def test_what_was_said_to_whom(program_with_helper: Program) -> None:
    assert program_with_helper.run("send", "main", "say hello", "--wait", "30").code == 0
    assert program_with_helper.run("exchanges").out == "No exchanges.\n"
    assert program_with_helper.run("exchanges", "--unsettled").out == "No unfinished exchanges.\n"
    for number in (1, 2):
        sent = (
            "send",
            HELPER,
            f"say {'so ' * 20}{number}",
            "--from",
            "main",
            "--reply-back",
            "0",
            "--no-announce",
        )
        assert program_with_helper.run(*sent, "--wait", "30", "--key", f"k{number}").code == 0
    heading, newest, _, _ = program_with_helper.run("exchanges", "--session", "main").out.splitlines()
    assert heading.split("  ")[0] == "PHASE"
    assert newest.split()[:3] == ["settled", MAIN, HELPER]
    assert " k2 " in newest
    assert newest.endswith(f"{'so ' * 20}2")
    first = program_with_helper.run("exchanges", "--limit", "1", "--json").json
    [exchange] = first["exchanges"]
    assert (exchange["id"], exchange["announced"], exchange["phase"]) == ("k2", "none", "settled")
    assert exchange["latestReply"] == f"{'so ' * 20}2"
    assert (
        f"There are more: --cursor {first['nextCursor']}"
        in program_with_helper.run("exchanges", "--limit", "1").out
    )
    rest = program_with_helper.run(
        "exchanges", "--cursor", first["nextCursor"], "--session", HELPER, "--json"
    ).json
    assert [found["id"] for found in rest["exchanges"]] == ["k1"]
    assert program_with_helper.run("exchanges", "--unsettled", "--json").json == {"exchanges": []}
    shown = program_with_helper.run("exchanges", "show", "k1")
    assert shown.out.startswith("exchange k1\n  agent:main:main ↔ agent:helper:main\n  settled, turn 0/"), (
        shown
    )
    assert program_with_helper.run("exchanges", "show", "k1", "--json").json["exchange"]["id"] == "k1"
    failed = program_with_helper.run(
        "send", HELPER, "fail at once", "--from", "main", "--wait", "30", "--key", "f3", "--json"
    )
    assert failed.json["replyBack"] == {"turns": 0, "reason": "run_failed"}
    assert "announcement run failed" in program_with_helper.run("exchanges", "show", "f3").out
    assert program_with_helper.run("exchanges", "show", "k").code == 2
    assert program_with_helper.run("exchanges", "show", "nothing").code == 3
    assert program_with_helper.run("exchanges", "--session", "agent:main:direct:nobody").code == 3
    for wrong in (["--limit", "501"], ["--cursor", "x"]):
        assert program_with_helper.run("exchanges", *wrong).code == 2


@pytest.mark.requirement("G3")
def test_what_did_not_get_there(program_with_helper: Program) -> None:
    assert program_with_helper.run("chat", "--message", "say hello").code == 0
    assert program_with_helper.run("deliveries").out == "No deliveries.\n"
    assert "deliveries" not in program_with_helper.run("status").out
    assert program_with_helper.run("send", GROUP, "say hello", "--wait", "30").code == 0
    assert program_with_helper.run("spawn", "say 42", "--for", GROUP, "--key", "k1", "--wait").code == 0
    retried = program_with_helper.run("deliveries", "retry", "task:k1")
    assert (retried.code, retried.out) == (1, "")
    assert "dead again: Channel 'telegram' is not configured." in retried.err
    heading, row, hint = program_with_helper.run("deliveries").out.splitlines()
    assert heading.split() == ["STATE", "WHERE", "SINCE", "TRIES", "KEY", "ERROR", "TEXT"]
    assert row.split()[:3] == ["dead", "telegram", "7"]
    assert "Status: ok Result: 42" in row
    assert "retry KEY" in hint
    page = program_with_helper.run("deliveries", "list", "--state", "dead", "--json").json
    assert [(found["key"], found["state"]) for found in page["deliveries"]] == [("task:k1", "dead")]
    assert page["standing"] == {"dead": 1}
    assert "1 dead; see: antiphon deliveries" in program_with_helper.run("status").out
    assert program_with_helper.run("status", "--json").json["deliveries"] == {"dead": 1}
    assert program_with_helper.run("deliveries", "retry", "nothing").code == 3
    assert program_with_helper.run("deliveries", "--state", "lost").code == 2
