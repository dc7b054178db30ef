"""A core that has played many runs is as it was before: what is in memory belongs to what plays now."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterable
from contextlib import aclosing
from functools import _lru_cache_wrapper, partial  # pyright: ignore[reportPrivateUsage]
from pathlib import Path

import pytest

import antiphon
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import InvalidInput
from antiphon.messages import AssistantMessage
from antiphon.operations.types import IncomingMessage
from antiphon.runtimes import Prompt
from antiphon.store import Tx
from support.app_fixture import (
    OPERATOR,
    AppFixture,
    make_answer,
    make_tool,
    make_tool_calls,
    open_app_fixture,
    wait_until,
)

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]  # what is measured is the engine, not the database

SESSIONS = [f"agent:main:dashboard:{number}" for number in range(6)]
ROUNDS = 30  # so that what is kept of each run stands out from the noise of free lists, up to 40 KB
KINDS = ("plain", "tool", "fail", "stop", "late")
RUNS = ROUNDS * len(SESSIONS) * len(KINDS)
PADDING = "x" * 120  # in every id, word and answer, so that anything that is kept of a run is noticed
LEAST = 150 * RUNS  # bytes; little more than half of what keeping one id of each run would take


async def agent(prompt: Prompt) -> AssistantMessage:
    said = str(prompt.messages[-1])
    if "fail" in said:
        raise InvalidInput("no", "no")
    if "stop" in said or "late" in said:
        await asyncio.Event().wait()
    return make_tool_calls("work") if "tool" in said else make_answer(f"answer {PADDING}")


async def work(call: ToolRequest) -> ToolOutput:
    return ToolOutput(text=f"done {PADDING}")


async def play(app: AppFixture, session: str, kind: str, number: int) -> None:
    """One run of a kind, watched by a listener that then leaves."""
    run_id = f"{session}-{number}-{kind}-{PADDING}"
    words = IncomingMessage(
        session=session,
        content=f"{kind} {PADDING}",
        idempotency_key=run_id,
        timeout_seconds=0.05 if kind == "late" else 60,
    )
    await app.operations.messages.submit(OPERATOR, words)
    async with aclosing(app.operations.transcripts.follow(OPERATOR, session, 0)) as feed:
        await anext(feed)
    if kind == "stop":
        await app.operations.runs.stop(OPERATOR, session)
    await app.wait_for_end(run_id)


async def play_round(app: AppFixture, number: int) -> None:
    async def turns(session: str) -> None:
        for kind in KINDS:
            await play(app, session, kind, number)
        await app.operations.conversations.renew(
            OPERATOR, session
        )  # a growing conversation is held while read

    await asyncio.gather(*map(turns, SESSIONS))


def held(app: AppFixture) -> dict[str, int]:
    """Objects that live as long as a run is active or a listener is open."""
    lanes = app.engine._lanes  # pyright: ignore[reportPrivateUsage]
    parts: dict[str, Iterable[object]] = {
        "playing": app.engine.worker.active_runs,
        **{name: part for name, part in vars(lanes).items() if isinstance(part, dict | set)},
        "topics": app.bus.count_listeners(),
    }
    return {name: len([*part]) for name, part in parts.items()}


async def is_idle(app: AppFixture) -> bool:
    """But for the engine itself, which listens for stops."""
    return sum(held(app).values()) == 1


async def nothing(tx: Tx) -> None: ...


async def weight(app: AppFixture) -> int:
    """Bytes that our own code has taken and not given back, without its caches, each of which has a limit."""
    for _ in range(8):  # a thread of the store holds what it did last until there is something else to do
        await asyncio.gather(app.store.tx(nothing), *(app.store.read(nothing) for _ in range(32)))
    for cached in gc.get_objects():
        is_ours = isinstance(cached, _lru_cache_wrapper) and cached.__module__.startswith("antiphon.")
        if is_ours and cached.cache_info().maxsize is not None:
            cached.cache_clear()
    gc.collect()
    ours = tracemalloc.Filter(inclusive=True, filename_pattern=f"{Path(antiphon.__file__).parent}/*")
    return sum(
        found.size for found in tracemalloc.take_snapshot().filter_traces([ours]).statistics("filename")
    )


@pytest.mark.requirement("G24")
async def test_nothing_is_left_of_runs_that_have_ended(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, agent, tools=[make_tool("work", work)]) as app:
        await play_round(app, 0)  # what is created once is created now
        await wait_until(partial(is_idle, app))
        idle = held(app)
        tracemalloc.start()
        try:
            await play_round(app, 1)
            before = await weight(app)
            for number in range(2, ROUNDS + 2):
                await play_round(app, number)
            await wait_until(partial(is_idle, app))
            assert await weight(app) - before < LEAST
        finally:
            tracemalloc.stop()
        assert held(app) == idle
