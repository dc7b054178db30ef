"""Commands of a replica that died: the others tell their sessions that they were interrupted, and repeat nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cluster.database import Postgres
from support.keepers import end_keeper, find_marked, wait_until_gone
from support.replicas import ACK_WAIT, open_replica_set

pytestmark = pytest.mark.anyio

WAITING, BACKGROUND = "agent:main:direct:waiting", "agent:main:direct:background"
ON_THIS_MACHINE = {"exec": {"host": "gateway", "security": "full", "ask": "off"}}
GIVEN_UP_WITHIN_SECONDS = 60.0
"""Loosely: the lease, three times `bus.ackWaitSeconds`, and some seconds between two looks."""


def build_call(effect: Path, command: str, *, background: bool) -> str:
    line = f"echo once >> {effect}; {command}"
    return f"call exec {json.dumps({'command': line, 'background': background})}"


@pytest.mark.requirement("T5", "AT1", "AT4", "AT20")
async def test_commands_of_a_dead_replica_are_interrupted(tmp_path: Path, postgres: Postgres) -> None:
    effects = {session: tmp_path / f"effect-{n}" for n, session in enumerate((WAITING, BACKGROUND))}
    try:
        async with open_replica_set(tmp_path, postgres, size=2, tools=ON_THIS_MACHINE) as replica_set:
            first, second = replica_set.replicas
            await second.leave()
            for session, effect in effects.items():
                await first.ask("open", session=session)
                words = build_call(effect, "sleep 6111", background=session == BACKGROUND)
                await first.ask("submit", session=session, text=words, key=session)
            await replica_set.until(
                lambda: all(effect.exists() for effect in effects.values()), what="both commands have begun"
            )
            await replica_set.until_rows("SELECT 1 FROM exec_commands WHERE background = 1")
            await second.start()
            await first.kill()
            killed_at = time.monotonic()
            sql = "SELECT 1 FROM exec_commands WHERE state = 'lost' HAVING count(*) = 2"
            await replica_set.until_rows(sql, seconds=GIVEN_UP_WITHIN_SECONDS)
            assert time.monotonic() - killed_at >= ACK_WAIT, "the replica might have come back until then"
            view = await replica_set.wait_for_run_end(WAITING)
            assert view["reply"].startswith("Interrupted: ")
            await replica_set.until_rows("SELECT 1 FROM runs WHERE id LIKE 'wake:exec:%' AND state = 'ok'")
            [wake] = replica_set.rows("SELECT input FROM runs WHERE id LIKE 'wake:exec:%'")
            assert "Interrupted: " in json.loads(wake["input"])["content"]
            assert find_marked("sleep 6111"), "no other replica can reach its processes"
            await first.start()
            await wait_until_gone("sleep 6111")
            await first.ask("submit", session=WAITING, text="say still here", key="later")
            assert (await replica_set.wait_for_run_end("later"))["reply"] == "still here"
            assert len(replica_set.rows("SELECT 1 FROM runs WHERE id LIKE 'wake:exec:%'")) == 1
        assert [effect.read_text() for effect in effects.values()] == ["once\n"] * 2
    finally:
        for name in ("r0", "r1"):
            end_keeper(tmp_path / name)
