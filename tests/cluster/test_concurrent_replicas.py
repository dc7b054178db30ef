"""What is asked of several replicas at the same moment is decided once, as if they were one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from chaos.killer import UNFINISHED
from chaos.verify import always
from cluster.database import Postgres
from support.replicas import BOUND, Facts, ReplicaSet, open_replica_set
from support.store_snapshot import StoreSnapshot

pytestmark = pytest.mark.anyio

TIMES = 20
MAIN, HELPER = "agent:main:main", "agent:helper:main"


async def everywhere(replica_set: ReplicaSet, do: str, **given: Any) -> list[Facts]:
    """What each of them says to the same request."""
    return await asyncio.gather(*(replica.ask(do, **given) for replica in replica_set.replicas))


@pytest.mark.requirement("S9", "G13")
async def test_the_same_key_is_the_same_request_on_every_replica(tmp_path: Path, postgres: Postgres) -> None:
    async with open_replica_set(tmp_path, postgres) as replica_set:
        for session in (MAIN, HELPER):
            await replica_set.ask_until_done("open", session=session)
        for number in range(TIMES):
            said = await everywhere(
                replica_set, "submit", session=MAIN, text=f"say {number}", key=f"m{number}"
            )
            sent = await everywhere(
                replica_set, "send", session=HELPER, message=f"say {number}", timeout_seconds=0,
                idempotency_key=f"s{number}",
            )  # fmt: skip
            spawned = await everywhere(
                replica_set, "spawn", requester=MAIN, task=f"say {number}", idempotency_key=f"t{number}"
            )
            assert len(_ids(said)) == len(_ids(sent)) == len(_ids(spawned)) == 1
        await replica_set.until(lambda: _settled(replica_set), 60, what="everything has ended")
        snapshot = StoreSnapshot(replica_set.home)
        assert (len(snapshot.exchanges), len(snapshot.tasks)) == (TIMES, TIMES)
        assert sum(run["origin"] == "chat" for run in snapshot.runs) == TIMES
        assert always(replica_set.home, [f"m{number}" for number in range(TIMES)]) == []


@pytest.mark.requirement("S7", "G12")
async def test_two_sessions_do_not_wait_for_each_other(tmp_path: Path, postgres: Postgres) -> None:
    """Each asks the other in the same moment, on another replica: one of them is refused, and no wait is in vain."""
    async with open_replica_set(tmp_path, postgres) as replica_set:
        for session in (MAIN, HELPER):
            await replica_set.ask_until_done("open", session=session)
        for number in range(TIMES // 2):
            asked = [
                replica.ask("submit", session=one, text=_asking(other, number), key=f"{one}-{number}")
                for replica, one, other in zip(
                    replica_set.replicas, (MAIN, HELPER), (HELPER, MAIN), strict=False
                )
            ]
            await asyncio.gather(*asked)
            for session in (MAIN, HELPER):
                assert (await replica_set.wait_for_run_end(f"{session}-{number}", BOUND))["state"] == "ok"
        await replica_set.until(lambda: _settled(replica_set), what="everything has ended")
        assert always(replica_set.home, []) == []


@pytest.mark.requirement("G9")
async def test_a_session_that_is_deleted_while_others_write_to_it(tmp_path: Path, postgres: Postgres) -> None:
    """What was accepted is answered, or gone with its session: nothing is left that no process can take up."""
    async with open_replica_set(tmp_path, postgres) as replica_set:
        one, other, third = replica_set.replicas
        for number in range(TIMES):
            session = f"agent:main:direct:d{number}"
            await one.ask("submit", session=session, text="say first")
            await asyncio.gather(
                other.ask("delete", session=session),
                one.ask("submit", session=session, text="say second"),
                third.ask("submit", session=session, text="say third"),
                return_exceptions=True,
            )
        await replica_set.until(lambda: _settled(replica_set), what="everything has ended")
        assert always(replica_set.home, []) == []


def _asking(other: str, number: int) -> str:
    arguments = {
        "sessionKey": other, "message": f"say {number}", "timeoutSeconds": 60, "replyBack": 0, "announce": "none",
    }  # fmt: skip
    return f"call sessions_send {json.dumps(arguments)}\nsay done"


def _ids(answers: list[Facts]) -> set[str]:
    return {answer["runId"] for answer in answers}


def _settled(replica_set: ReplicaSet) -> bool:
    return not replica_set.rows(UNFINISHED)[0]["?column?"]
