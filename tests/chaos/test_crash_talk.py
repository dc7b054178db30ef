"""Killed at any commit of a conversation or of a sub-agent's task, started again: each step has happened once.

What is checked after every kill and at the end is in `laws` and `outcomes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from chaos.harness import (
    BATCHES,
    ELSEWHERE,
    Kill,
    Servers,
    run_with_kill_at_every_commit,
    run_with_kills,
    run_with_random_kills,
)
from support.planned_exchanges import ATTEMPTS, KEYED, POSTED, POSTING, UNKEYED
from support.store_snapshot import StoreSnapshot

MOMENTS = [f"{moment}{part}" for part in ("", "#2") for moment in (POSTING, POSTED)]
BETWEEN = {channel: [(f"single:{channel}", [moment]) for moment in MOMENTS] for channel in (KEYED, UNKEYED)}
Record = Callable[[str, object], None]


@pytest.mark.timeout(300)
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
@pytest.mark.parametrize(
    "shape",
    [
        "five turns",
        pytest.param("five turns, no wait", marks=ELSEWHERE),
        pytest.param("the same twice", marks=ELSEWHERE),
    ],
)
def test_a_send_with_five_turns_and_an_announce_survives_a_kill_at_every_moment(
    servers: Servers, tmp_path: Path, shape: str, record_property: Record
) -> None:
    died = run_with_kill_at_every_commit(servers, tmp_path, f"single:{shape}")
    record_property("kills", died)
    assert died >= 30


@pytest.mark.timeout(300)
@pytest.mark.requirement("G1", "G2", "P4", "P5", "S9", "003-announce")
@pytest.mark.parametrize(
    ("shape", "least"),
    [
        pytest.param("spawn", 18, marks=ELSEWHERE),
        ("spawn, yield", 22),
        pytest.param("spawn for parent", 22, marks=ELSEWHERE),
        pytest.param("spawn for parent, yield", 20, marks=ELSEWHERE),
        ("nested", 36),
        pytest.param("nested, yield", 36, marks=ELSEWHERE),
        pytest.param("nested for parent", 30, marks=ELSEWHERE),
    ],
)
def test_a_sub_agent_and_its_report_survive_a_kill_at_every_moment(
    servers: Servers, tmp_path: Path, shape: str, least: int, record_property: Record
) -> None:
    died = run_with_kill_at_every_commit(servers, tmp_path, f"single:{shape}")
    record_property("kills", died)
    assert died >= least


@pytest.mark.timeout(300)
@pytest.mark.requirement("G2", "P4", "P5", "P7", "003-spawn-cleanup")
def test_a_child_that_is_to_be_deleted_is_reported_first_and_removed_once(
    servers: Servers, tmp_path: Path, record_property: Record
) -> None:
    died = run_with_kill_at_every_commit(servers, tmp_path, "single:spawn and delete")
    record_property("kills", died)
    assert died >= 20


@pytest.mark.timeout(300)
@pytest.mark.requirement("G3", "S6")
def test_a_channel_that_honours_keys_shows_each_part_of_a_message_once(
    servers: Servers, tmp_path: Path, record_property: Record
) -> None:
    attempts: Counter[int] = Counter()

    def look(state_dir: Path, _: Sequence[Kill]) -> list[str]:
        (delivery,) = StoreSnapshot(state_dir).deliveries
        assert delivery["state"] == "delivered"
        assert (state_dir / f"{KEYED}.txt").read_text() == f"{delivery['key']}\n{delivery['key']}#2\n"
        attempts[len((state_dir / f"{KEYED}{ATTEMPTS}").read_text().splitlines())] += 1
        return []

    died = run_with_kill_at_every_commit(servers, tmp_path, "single:keyed", look)
    attempts.clear()
    died += run_with_kills(servers, tmp_path / "between", BETWEEN[KEYED], look)
    record_property("kills", died)
    assert attempts == {3: 4}, "only the part in doubt is sent again"


@pytest.mark.timeout(300)
@pytest.mark.requirement("G3", "S6")
def test_a_channel_without_keys_gets_a_message_at_most_once_and_the_doubt_is_on_record(
    servers: Servers, tmp_path: Path, record_property: Record
) -> None:
    ends: Counter[tuple[str, int, int]] = Counter()

    def look(state_dir: Path, _: Sequence[Kill]) -> list[str]:
        snapshot = StoreSnapshot(state_dir)
        (delivery,) = snapshot.deliveries
        posts = snapshot.posts[UNKEYED]
        ends[delivery["state"], posts[delivery["key"]], posts[f"{delivery['key']}#2"]] += 1
        return []

    died = run_with_kill_at_every_commit(servers, tmp_path, "single:unkeyed", look)
    doubts = {("ambiguous", 0, 0), ("ambiguous", 1, 0), ("ambiguous", 1, 1)}
    assert ends.keys() <= {("delivered", 1, 1), *doubts}
    ends.clear()
    died += run_with_kills(servers, tmp_path / "between", BETWEEN[UNKEYED], look)
    record_property("kills", died)
    assert ends == {("ambiguous", 0, 0): 1, ("ambiguous", 1, 0): 2, ("ambiguous", 1, 1): 1}


@pytest.mark.requirement(
    "G1",
    "G2",
    "S5",
    "S6",
    "S9",
    "P4",
    "P5",
    "003-reply-back-skip",
    "003-send-announce-skip",
    "003-announce-skip",
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
    kills = cast(int, pytestconfig.getoption("--kills"))
    died = run_with_random_kills(servers, tmp_path, "talking", batch, kills)
    record_property("kills", died)
