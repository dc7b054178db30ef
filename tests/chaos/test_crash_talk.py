"""Killed at any commit of a conversation or of a sub-agent's task, started again: each step has happened once.

What is checked after every kill and at the end is in `laws` and `outcomes`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from chaos.book import Book
from chaos.harness import Servers, suffer_by_chance, suffer_every_moment
from chaos.talk import KEYED, UNKEYED

BATCHES = 4
Record = Callable[[str, object], None]


@pytest.mark.requirement(
    "G1",
    "G2",
    "S5",
    "S6",
    "S9",
    "003-reply-back-alternates",
    "003-reply-back-limit",
    "003-send-announce",
    "003-send-announce-posted",
)
@pytest.mark.parametrize("shape", ["five turns", "five turns, no wait"])
def test_a_send_with_five_turns_and_an_announce_survives_a_kill_at_every_moment(
    servers: Servers, tmp_path: Path, shape: str, record_property: Record
) -> None:
    count, died = suffer_every_moment(servers, tmp_path, f"single:{shape}")
    record_property("kills", died)
    assert count >= 40
    assert died >= count - 6


@pytest.mark.requirement("G1", "G2", "P4", "P5", "S9", "003-announce")
@pytest.mark.parametrize(
    ("shape", "least"),
    [
        ("spawn", 20),
        ("spawn, yield", 24),
        ("spawn for parent", 24),
        ("spawn for parent, yield", 20),
        ("nested", 36),
        ("nested, yield", 36),
    ],
)
def test_a_sub_agent_and_its_report_survive_a_kill_at_every_moment(
    servers: Servers, tmp_path: Path, shape: str, least: int, record_property: Record
) -> None:
    count, died = suffer_every_moment(servers, tmp_path, f"single:{shape}")
    record_property("kills", died)
    assert count >= least
    assert died >= count - 8


@pytest.mark.requirement("G2", "P4", "P5", "P7", "003-spawn-cleanup")
def test_a_child_that_is_to_be_deleted_is_reported_first_and_removed_once(
    servers: Servers, tmp_path: Path, record_property: Record
) -> None:
    count, died = suffer_every_moment(servers, tmp_path, "single:spawn and delete")
    record_property("kills", died)
    assert count >= 24
    assert died >= count - 12  # the sweeper commits when it likes


@pytest.mark.requirement("G3", "S6")
def test_a_channel_that_honours_keys_shows_each_message_once(
    servers: Servers, tmp_path: Path, record_property: Record
) -> None:
    attempts: Counter[int] = Counter()

    def look(state_dir: Path) -> None:
        (delivery,) = Book(state_dir).deliveries
        assert delivery["state"] == "delivered"
        assert (state_dir / f"{KEYED}.txt").read_text() == f"{delivery['key']}\n"
        attempts[len((state_dir / f"{KEYED}.attempts").read_text().splitlines())] += 1

    _, died = suffer_every_moment(servers, tmp_path, "single:keyed", look)
    record_property("kills", died)
    # It was killed between the post and its commit, too.
    assert attempts.keys() == {1, 2}


@pytest.mark.requirement("G3", "S6")
def test_a_channel_without_keys_gets_a_message_at_most_once_and_the_doubt_is_on_record(
    servers: Servers, tmp_path: Path, record_property: Record
) -> None:
    ends: Counter[tuple[str, int]] = Counter()

    def look(state_dir: Path) -> None:
        book = Book(state_dir)
        (delivery,) = book.deliveries
        ends[delivery["state"], book.posts[UNKEYED][delivery["key"]]] += 1

    _, died = suffer_every_moment(servers, tmp_path, "single:unkeyed", look)
    record_property("kills", died)
    assert ends.keys() == {("delivered", 1), ("ambiguous", 0), ("ambiguous", 1)}


@pytest.mark.requirement(
    "G1", "G2", "S5", "S6", "S9", "P4", "P5", "003-reply-back-skip", "003-send-announce-skip", "003-announce-skip"
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_many_conversations_and_tasks_survive_seeded_kills(
    servers: Servers,
    tmp_path: Path,
    batch: int,
    pytestconfig: pytest.Config,
    record_property: Record,
) -> None:
    wanted = -(-cast(int, pytestconfig.getoption("--kills")) // BATCHES)
    dice = random.Random(100 + batch)
    died = suffer_by_chance(
        servers, tmp_path, lambda number: f"talking:{batch * 1000 + number}", dice, wanted
    )
    record_property("kills", died)
