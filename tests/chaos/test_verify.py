"""The checker of the crash suite can fail: a store in which one thing is wrong does not pass."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos import outcomes, verify
from chaos.harness import Servers
from chaos.scenario import plan
from support.app_fixture import DATABASE
from support.databases import query_database
from support.store_snapshot import StoreSnapshot

TALK, TASK, NESTED, DELETED = "five turns", "spawn, yield", "nested", "spawn and delete"
Played = Callable[[str], Path]

A_TURN_AGAIN = """
INSERT INTO runs (id, session, origin, digest, input, state, exchange, chain, hop, created_at)
SELECT id || ':again', session, origin, digest, input, 'cancelled', exchange, chain, hop, created_at FROM runs
WHERE origin = 'reply-back' LIMIT 1
"""
A_WAKE_AGAIN = """
INSERT INTO runs (id, session, origin, digest, input, state, created_at)
SELECT id || ':again', session, origin, digest, input, 'cancelled', created_at FROM runs WHERE origin = 'wake'
"""
A_DELIVERY_AGAIN = """
INSERT INTO deliveries (key, kind, session, session_key, destination, place, body, exchange, next_at, created_at)
SELECT key || ':again', kind, session, session_key, destination, place, body, exchange, next_at, created_at
FROM deliveries
"""
A_NOTE_LOST = """
DELETE FROM messages WHERE run = (SELECT n FROM runs WHERE origin = 'note');
DELETE FROM runs WHERE origin = 'note'
"""
A_NOTE_AGAIN = """
INSERT INTO messages (transcript, seq, entry, role, run, body, created_at)
SELECT transcript, 1000, entry || 'again', role, run, body, created_at FROM messages
WHERE run = (SELECT n FROM runs WHERE origin = 'note')
"""
A_CHILD_WAITING = """
UPDATE tasks SET phase = 'waiting' WHERE n = 1;
DELETE FROM runs WHERE id = (SELECT 'announce:' || id FROM tasks WHERE n = 1)
"""
LIES = {
    "a turn is doubled": (TALK, A_TURN_AGAIN, "has the runs"),
    "a turn is lost": (TALK, "DELETE FROM runs WHERE id LIKE 'turn:%:3'", "has the runs"),
    "a turn is another one's": (
        TALK,
        "UPDATE runs SET session = (SELECT target FROM exchanges) WHERE id LIKE 'turn:%:1'",
        "turn 1 of exchange",
    ),
    "a turn is told something else": (
        TALK,
        "UPDATE runs SET input = replace(input, 'wörtlich  ', 'wörtlich ') WHERE id LIKE 'turn:%:2'",
        "turn 2 of exchange",
    ),
    "a turn says something else": (TALK, "UPDATE runs SET reply = 'x' WHERE id LIKE 'turn:%:5'", "was said"),
    "an exchange has not settled": (
        TALK,
        "UPDATE exchanges SET phase = 'announce', settled_at = NULL",
        "is announce and at []",
    ),
    "an exchange forgets its reply": (TALK, "UPDATE exchanges SET latest_reply = first_reply", "ended as"),
    "an exchange is lost": (TALK, "DELETE FROM exchanges", "is of no exchange"),
    "a delivery is lost": (TALK, "DELETE FROM deliveries", "its delivery is False"),
    "a delivery is doubled": (TALK, A_DELIVERY_AGAIN, "has no owner"),
    "a delivery is on its way": (TALK, "UPDATE deliveries SET state = 'sending'", "is sending, its exchange"),
    "a delivery says something else": (TALK, "UPDATE deliveries SET body = 'x'", "was announced 'x'"),
    "a chain is counted wrong": (TALK, "UPDATE chains SET runs = runs + 1", "the chains record"),
    "an announce step is lost": (TALK, "DELETE FROM runs WHERE id LIKE 'announce:%'", "has the runs"),
    "a report is lost": (TASK, "DELETE FROM deliveries", "its delivery is False"),
    "a note is lost": (TASK, A_NOTE_LOST, "its note is False"),
    "a note is doubled": (TASK, A_NOTE_AGAIN, "is 2 times in the transcript"),
    "a wake is doubled": (TASK, A_WAKE_AGAIN, "was woken by"),
    "a wake is lost": (TASK, "DELETE FROM runs WHERE origin = 'wake'", "was woken by []"),
    "a session still waits": (
        TASK,
        "UPDATE sessions SET yielded = 'all' WHERE spawned_by IS NULL",
        "still waits",
    ),
    "a task has no session": (TASK, "DELETE FROM sessions WHERE spawned_by IS NOT NULL", "has no session"),
    "a session has no task": (TASK, "DELETE FROM tasks", "has no task"),
    "a task has not settled": (TASK, "UPDATE tasks SET phase = 'announcing'", "is announcing and at []"),
    "a task ended as something else": (TASK, "UPDATE tasks SET outcome = 'error'", "ended as"),
    "a child's last word is lost": (NESTED, "UPDATE tasks SET result = 'Turn yielded.'", "ended as"),
    "a child waits for nobody": (NESTED, A_CHILD_WAITING, "waits for nothing"),
    "a child was not deleted": (DELETED, "UPDATE tasks SET archived_at = NULL", "cleaned up"),
    "a child's cost is lost": (
        DELETED,
        "DELETE FROM usage WHERE session_key LIKE '%:subagent:%'",
        "cleaned up",
    ),
    "a post has no delivery": ("keyed", "DELETE FROM deliveries", "was posted without a delivery"),
    "a post was not tried": ("unkeyed", "UPDATE deliveries SET attempts = 0", "was posted 1 times"),
}


@pytest.fixture(scope="module")
def played(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The state directory of an undisturbed play of a shape, which passes."""
    known: dict[str, Path] = {}

    def play(shape: str) -> Path:
        if shape not in known:
            state_dir = tmp_path_factory.mktemp("played") / "state"
            assert servers.play(state_dir, f"single:{shape}", None) == 0
            assert verify.finally_(state_dir, plan(f"single:{shape}")) == []
            known[shape] = state_dir
        return known[shape]

    return play


@pytest.mark.sqlite_only  # the laws are about rows, wherever they were read; a file is soon copied
@pytest.mark.parametrize("lie", LIES)
def test_a_store_in_which_one_thing_is_wrong_does_not_pass(played: Played, tmp_path: Path, lie: str) -> None:
    shape, script, complaint = LIES[lie]
    state_dir = tmp_path / "state"
    shutil.copytree(played(shape), state_dir)
    connection = sqlite3.connect(state_dir / "antiphon.db")
    connection.executescript(script)
    connection.close()
    found = verify.finally_(state_dir, plan(f"single:{shape}"))
    found += outcomes.missed(StoreSnapshot(state_dir), plan(f"single:{shape}"))
    assert [line for line in found if complaint in line], found


@pytest.mark.parametrize("lie", ["a turn is lost", "a delivery says something else"])
def test_a_lie_is_seen_in_either_database(servers: Servers, tmp_path: Path, lie: str) -> None:
    shape, statement, complaint = LIES[lie]
    state_dir = tmp_path / "state"
    assert servers.play(state_dir, f"single:{shape}", None) == 0
    assert verify.finally_(state_dir, plan(f"single:{shape}")) == []
    query_database(state_dir / DATABASE, statement)
    found = verify.finally_(state_dir, plan(f"single:{shape}"))
    found += outcomes.missed(StoreSnapshot(state_dir), plan(f"single:{shape}"))
    assert [line for line in found if complaint in line], found


@pytest.mark.sqlite_only
@pytest.mark.parametrize("channel", ["keyed", "unkeyed"])
def test_a_message_that_was_posted_twice_or_never_does_not_pass(
    played: Played, tmp_path: Path, channel: str
) -> None:
    state_dir = tmp_path / "state"
    shutil.copytree(played(channel), state_dir)
    posts = state_dir / f"{channel}.txt"
    for times in 2, 0:
        posts.write_text(played(channel).joinpath(posts.name).read_text() * times)
        found = verify.finally_(state_dir, plan(f"single:{channel}"))
        assert [line for line in found if f"was posted {times} times" in line], found
