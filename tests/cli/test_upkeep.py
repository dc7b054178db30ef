"""Finding, naming and deleting sessions: the same beside a gateway as without one."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, nullcontext
from typing import Any

import pytest

from cli.gateways import up
from cli.terminal import BOUND, Program

pytestmark = pytest.mark.requirement("R", "G2")
SIDE = "agent:main:dashboard:side"


@pytest.fixture(params=["alone", "gateway"])
def talked(program: Program, request: pytest.FixtureRequest) -> Generator[Program]:
    """Two sessions with messages."""
    with up(program) if request.param == "gateway" else nullcontext():
        assert program.run("send", "main", "say the parrot is green", "--wait", "30").code == 0
        assert program.run("send", SIDE, "say a parrot, too", "--wait", "30").code == 0
        yield program


def found(program: Program, *arguments: str) -> list[str]:
    page = program.run("sessions", "search", *arguments, "--json").json
    assert not page.get("indexing")
    return [hit["snippet"] for hit in page["results"]]


def test_what_was_said_is_found(talked: Program) -> None:
    assert found(talked, "parrot") == [
        "a parrot, too",
        "say a parrot, too",
        "the parrot is green",
        "say the parrot is green",
    ]
    assert found(talked, "parrot", "green", "--limit", "1") == ["the parrot is green"]
    assert found(talked, "parrot", "--session", SIDE) == ["a parrot, too", "say a parrot, too"]
    assert found(talked, '"green parrot"') == []
    shown = talked.run("sessions", "search", "green").out
    current = talked.run("sessions", "history", "main", "--json").json["sessionId"]
    assert shown.startswith(
        f"agent:main:main 2 assistant, just now, in {current}\n      the parrot is green\n"
    )
    assert talked.run("sessions", "search", "xyzzy").out == "Nothing was found.\n"
    assert talked.run("sessions", "search", "green", "--session", "nobody").code == 3


def test_a_label_is_given_and_taken_away(talked: Program) -> None:
    assert talked.run("sessions", "label", SIDE, "birds").out == f"{SIDE} is called 'birds'.\n"
    assert "a parrot, too" in talked.run("sessions", "history", "birds").out
    assert talked.run("sessions", "label", "birds", "--remove").out == f"{SIDE} has no label.\n"
    assert talked.run("sessions", "history", "birds").code == 3
    for wrong in (["main"], ["main", "x", "--remove"], ["main", ""]):
        assert talked.run("sessions", "label", *wrong).code == 2
    assert talked.run("sessions", "label", "agent:main:dashboard:nobody", "x").code == 3
    listed = talked.run("sessions", "list", "--json").json["sessions"]
    assert [session.get("label") for session in listed] == [None, None]


def test_a_session_is_deleted_after_confirmation(talked: Program) -> None:
    assert talked.run("sessions", "delete", SIDE).code == 2
    assert talked.run("sessions", "delete", "main", "--yes").code == 2
    with talked.terminal("sessions", "delete", SIDE) as terminal:
        terminal.expect(rf"Delete {SIDE} and all its messages.*\[y/N\]")
        terminal.type("n")
        terminal.expect(r"Nothing was deleted\.")
        assert terminal.ended() == 1
    assert "a parrot, too" in found(talked, "parrot")
    assert talked.run("sessions", "label", SIDE, "birds").code == 0
    with talked.terminal("sessions", "delete", "birds") as terminal:
        terminal.expect(r"\[y/N\]")
        assert talked.run("sessions", "label", "birds", "--remove").code == 0
        terminal.type("y")
        terminal.expect(rf"Deleted {SIDE}\.")
        assert terminal.ended() == 0
    assert found(talked, "parrot") == ["the parrot is green", "say the parrot is green"]
    assert talked.run("sessions", "delete", SIDE, "--yes").code == 3


def past(program: Program, session: str) -> tuple[str, str]:
    """The current conversation of a session, and the one before it."""
    current, old = program.run("sessions", "past", session, "--json").json["conversations"]
    assert current.get("endedAt") is None
    return current["sessionId"], old["sessionId"]


def renewed(program: Program) -> str:
    """A session with a second conversation; the id of the first."""
    assert program.run("sessions", "reset", SIDE).code == 0
    assert program.run("send", SIDE, "say the second one", "--wait", "30").code == 0
    return past(program, SIDE)[1]


@pytest.mark.requirement("G21")
def test_an_earlier_conversation_does_not_stand_for_its_session(talked: Program) -> None:
    old = renewed(talked)
    for wrong in (["delete", old, "--yes"], ["reset", old]):
        done = talked.run("sessions", *wrong)
        assert (done.code, done.out) == (2, "")
        assert done.err == (
            f"Error: The conversation '{old}' has ended.\nRestore it first, or name its session by the key.\n"
        )
    assert "the second one" in talked.run("sessions", "history", SIDE).out
    assert talked.run("sessions", "delete", past(talked, SIDE)[0], "--yes").out == f"Deleted {SIDE}.\n"
    assert talked.run("sessions", "history", old).code == 3


@pytest.mark.requirement("G21")
def test_what_is_deleted_is_what_was_asked_about(talked: Program) -> None:
    for anew, code, said in ((True, 2, "has moved on"), (False, 3, "was not found")):
        with talked.terminal("sessions", "delete", SIDE) as terminal:
            terminal.expect(r"\[y/N\]")
            assert talked.run("sessions", "delete", SIDE, "--yes").code == 0
            if anew:
                assert talked.run("send", SIDE, "say new words", "--wait", "30").code == 0
            terminal.type("y")
            terminal.expect(f"Error: Session '{SIDE}' {said}")
            assert terminal.ended() == code
            assert "Deleted" not in terminal.text
        if anew:
            assert "new words" in talked.run("sessions", "history", SIDE).out


def test_a_main_session_is_reset_and_not_deleted(talked: Program) -> None:
    with talked.terminal("sessions", "delete", "main") as terminal:
        assert terminal.ended() == 2
        assert "[y/N]" not in terminal.text
        assert "`antiphon sessions reset agent:main:main`" in terminal.text
    done = talked.run("sessions", "reset", "agent:main:main")
    current, old = past(talked, "main")
    assert done.out == (
        f"agent:main:main begins a new conversation. The old one: antiphon sessions history {old}\n"
    )
    assert "green" in talked.run("sessions", "history", old).out
    assert talked.run("sessions", "history", "main", "--json").json["messages"] == []
    again = talked.run("sessions", "reset", "main", "--json").json
    assert (again["key"], again["sessionId"] in {current, old}) == ("agent:main:main", False)
    assert talked.run("sessions", "reset", "agent:main:dashboard:nobody").code == 3


@pytest.mark.requirement("G16")
def test_what_is_being_answered_is_not_reset(talked: Program) -> None:
    """Nor what waits behind it dropped, by whomever it was asked; with or without a gateway."""
    with talked.terminal("chat") as terminal:
        terminal.expect("you> ")
        terminal.type("slow 60 a b c d e f")
        terminal.expect("main> a")
        terminal.type("say later")
        terminal.expect("queued behind")
        terminal.type("/new")
        terminal.expect("is still answering. Wait for the answer, or stop it")
        terminal.type("/stop")
        terminal.expect("you> ")
        assert "main> later\n" in terminal.text
        terminal.type("/quit")
        assert terminal.ended() == 0
    assert len(talked.run("sessions", "past", "main", "--json").json["conversations"]) == 1


def test_nothing_is_made_where_nothing_is(program: Program) -> None:
    nobody = "agent:main:dashboard:nobody"
    read = program.run("sessions", "history", nobody)
    for wish in (["label", nobody, "x"], ["restore", nobody], ["reset", nobody], ["delete", nobody, "--yes"]):
        assert program.run("sessions", *wish) == read
    assert (read.code, program.state.exists()) == (7, False)


# --- searching without a gateway ---


def talked_much(program: Program, entries: int) -> None:
    """Words that are not indexed yet."""
    conversation = "11111111-1111-4111-8111-111111111111"
    folder = program.home / "before" / "agents" / "main" / "sessions"
    folder.mkdir(parents=True)
    at = "2026-01-01T00:00:00.000Z"
    lines: list[dict[str, Any]] = [
        {"type": "session", "version": 3, "id": conversation, "timestamp": at, "cwd": "/"}
    ]
    for number in range(entries):
        text = f"entry{number} " + " ".join(f"w{number * 7 + n}" for n in range(40))
        message = {"role": "user", "content": [{"type": "text", "text": text}], "timestamp": 1767225600000}
        before = f"{number - 1:08x}" if number else None
        entry = {"type": "message", "id": f"{number:08x}", "parentId": before, "timestamp": at}
        lines.append({**entry, "message": message})
    (folder / f"{conversation}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = {"agent:main:main": {"sessionId": conversation, "updatedAt": 1767225600000}}
    (folder / "sessions.json").write_text(json.dumps(rows))
    assert program.run("sessions", "import", str(program.home / "before")).code == 0


@pytest.mark.requirement("G13")
def test_a_search_locks_no_writer_out(program: Program) -> None:
    talked_much(program, 4000)
    process = program.start("sessions", "search", "entry3999", "--json")
    codes = [program.run("sessions", "label", "main", "one").code]
    while process.poll() is None:
        codes.append(program.run("sessions", "label", "main", f"number {len(codes)}").code)
    out, err = process.communicate(timeout=BOUND)
    assert set(codes) == {0}
    assert (process.returncode, err) == (0, "")
    assert len(json.loads(out)["results"]) == 1


def test_a_search_brings_nothing_up_to_date(program: Program) -> None:
    program.say("say hello")
    with closing(sqlite3.connect(program.state / "antiphon.db")) as connection:
        [known] = connection.execute("PRAGMA user_version").fetchone()
        connection.execute(f"PRAGMA user_version = {known - 1}")
    assert program.run("sessions", "search", "hello").code == 7
    with closing(sqlite3.connect(program.state / "antiphon.db")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (known - 1,)


# --- deleting without a gateway ---


def abandoned(program: Program, session: str, *more: str) -> None:
    """A process asks there, and is killed while it is answered."""
    process = program.start("send", session, "slow 600 a b", "--wait", "60", *more)
    until = time.monotonic() + BOUND
    while (session, "running", 1) not in standing(program):
        assert time.monotonic() < until
    process.kill()
    process.communicate(timeout=BOUND)


def standing(program: Program) -> list[tuple[str, str, int]]:
    """Of every session, how its runs are and how often they were begun."""
    with closing(sqlite3.connect(f"file:{program.state / 'antiphon.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(
            "SELECT s.key, r.state, r.attempts FROM runs r JOIN sessions s ON s.id = r.session ORDER BY r.n"
        ).fetchall()


@pytest.mark.requirement("G16", "G2")
def test_deleting_plays_nothing(program: Program) -> None:
    program.say("say hello")
    assert program.run("send", SIDE, "say a", "--wait", "30").code == 0
    abandoned(program, "agent:main:main")
    abandoned(program, SIDE)
    before = [row for row in standing(program) if row[0] != SIDE]
    deleted = program.run("sessions", "delete", SIDE, "--yes")
    assert (deleted.code, deleted.out) == (0, f"Deleted {SIDE}.\n")
    assert standing(program) == before


@pytest.mark.requirement("G16", "G2")
def test_an_abandoned_wait_blocks_no_other(program: Program) -> None:
    """A gateway was killed, and there is none that could be told to stop."""
    program.say("say hello")
    old = program.run("sessions", "list", "--json").json["sessions"][0]["sessionId"]
    abandoned(program, "agent:main:main")
    assert program.run("sessions", "reset", "main").code == 0
    assert [state for _, state, _ in standing(program)] == ["ok", "cancelled"]
    abandoned(program, "agent:main:main")
    assert program.run("sessions", "restore", old).code == 0
    assert [state for _, state, _ in standing(program)] == ["ok", "cancelled", "cancelled"]
    assert program.say("say again") == "again\n"


@pytest.mark.requirement("G1")
def test_what_follows_from_a_deleted_run_waits_for_the_next_start(program: Program) -> None:
    program.say("say hello")
    assert program.run("send", SIDE, "say a", "--wait", "30").code == 0
    abandoned(program, SIDE, "--from", "main")
    assert program.run("sessions", "delete", SIDE, "--yes").code == 0
    with up(program):
        until = time.monotonic() + BOUND
        while program.run("exchanges", "--unsettled", "--json").json["exchanges"]:
            assert time.monotonic() < until
        [exchange] = program.run("exchanges", "--json").json["exchanges"]
        assert exchange["targetSessionKey"] == SIDE
