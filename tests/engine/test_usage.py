"""What was used: one ledger row per model call, and every sum agrees with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.clock import ManualClock
from antiphon.engine.sessions import retention
from antiphon.engine.sessions.retention import RetentionPolicy
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.messages import AssistantMessage, Cost, TokenUsage, ToolResult
from antiphon.operations.types import UsageLine
from antiphon.runtimes import Prompt
from support.app_fixture import MAIN, OPERATOR, make_answer, make_tool, make_tool_calls, open_app_fixture

CHILD, GRANDCHILD, STRANGER = (f"agent:main:direct:{name}" for name in ("child", "grandchild", "stranger"))


def used(number: int, cost: float | None) -> TokenUsage:
    """Four numbers that cannot be mistaken for each other."""
    return TokenUsage(
        input=number,
        output=10 * number,
        cache_read=100 * number,
        cache_write=1000 * number,
        total_tokens=1111 * number,
        cost=None if cost is None else Cost(total=cost),
    )


class Spender:
    """Makes one tool call, so every run is two model calls; remembers what each has cost."""

    def __init__(self, costs: list[float | None] | None = None) -> None:
        self.spent: dict[str, list[TokenUsage]] = {}
        self._costs = costs

    async def __call__(self, prompt: Prompt) -> AssistantMessage:
        number = sum(map(len, self.spent.values())) + 1
        usage = used(number, self._costs[number % len(self._costs)] if self._costs else None)
        self.spent.setdefault(prompt.session_key, []).append(usage)
        model = f"m{number % 2}"
        answer = make_answer("ok") if isinstance(prompt.messages[-1], ToolResult) else make_tool_calls("work")
        return AssistantMessage(content=answer.content, timestamp=1, usage=usage, provider="p", model=model)


async def work(call: ToolRequest) -> ToolOutput:
    return ToolOutput(text="done")


def sums(usages: list[TokenUsage]) -> tuple[int, int, int, int, int]:
    return (
        len(usages),
        sum(usage.input for usage in usages),
        sum(usage.output for usage in usages),
        sum(usage.cache_read for usage in usages),
        sum(usage.cache_write for usage in usages),
    )


def totals(lines: list[UsageLine]) -> tuple[int, int, int, int, int]:
    return (
        sum(line.calls for line in lines),
        sum(line.input for line in lines),
        sum(line.output for line in lines),
        sum(line.cache_read for line in lines),
        sum(line.cache_write for line in lines),
    )


@pytest.mark.anyio
@pytest.mark.requirement("G28")
async def test_the_ledger_adds_up_by_run_session_and_tree(tmp_path: Path) -> None:
    spender = Spender(costs=[0.25, 0.5])
    async with open_app_fixture(tmp_path, spender, tools=[make_tool("work", work)]) as app:
        await app.create(MAIN)
        await app.create(CHILD, MAIN)
        await app.create(GRANDCHILD, CHILD)
        for key in (MAIN, CHILD, GRANDCHILD, STRANGER, MAIN):
            view = await app.ask("go", key)
            mine = spender.spent[key][-2:]
            assert view.usage is not None
            assert (view.usage.input, view.usage.output) == sums(mine)[1:3]
            assert view.usage.cost == pytest.approx(0.75)
            # The same from the row as from the event that told of the end.
            assert (await app.operations.runs.get(OPERATOR, view.run_id)).usage == view.usage
        for key, usages in spender.spent.items():
            assert totals(await app.operations.transcripts.get_usage(OPERATOR, key)) == sums(usages)
            row = await app.operations.sessions.describe(OPERATOR, key)
            # What was used in all, and what the last call looked at, are different numbers.
            assert row.total_tokens == sum(usage.total_tokens for usage in usages)
            last = usages[-1]
            assert row.used_tokens == last.input + last.cache_read + last.cache_write + last.output
        tree = [usage for key in (MAIN, CHILD, GRANDCHILD) for usage in spender.spent[key]]
        lines = await app.operations.transcripts.get_usage(OPERATOR, MAIN, tree=True)
        assert totals(lines) == sums(tree)
        assert {line.model for line in lines} == {"m0", "m1"}
        assert sum(line.cost or 0 for line in lines) == pytest.approx(0.375 * len(tree))


@pytest.mark.anyio
@pytest.mark.requirement("G28")
async def test_an_unknown_price_makes_the_sum_unknown_not_smaller(tmp_path: Path) -> None:
    spender = Spender(costs=[0.25, None])  # every run has one call of each kind
    async with open_app_fixture(tmp_path, spender, tools=[make_tool("work", work)]) as app:
        view = await app.ask("go")
        assert view.usage is not None and view.usage.cost is None
        lines = {line.model: line.cost for line in await app.operations.transcripts.get_usage(OPERATOR, MAIN)}
        assert sorted(lines.values(), key=str) == [0.25, None]
        assert app.rows("SELECT count(*) n FROM usage WHERE cost = 0") == [{"n": 0}]


@pytest.mark.anyio
@pytest.mark.requirement("G28")
async def test_what_costs_nothing_is_nothing_and_not_unknown(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, Spender(costs=[0.0]), tools=[make_tool("work", work)]) as app:
        view = await app.ask("go")
        assert view.usage is not None and view.usage.cost == 0.0


@pytest.mark.anyio
@pytest.mark.requirement("G27", "G28")
async def test_the_ledger_outlives_its_session(tmp_path: Path) -> None:
    clock = ManualClock()
    spender = Spender()
    timings = EngineTimings(lease_seconds=10**7, sweep_interval_seconds=3600, retention_interval_seconds=3600)
    async with open_app_fixture(
        tmp_path, spender, tools=[make_tool("work", work)], clock=clock, timings=timings
    ) as app:
        await app.create(MAIN)
        await app.create(CHILD, MAIN)
        await app.ask("go", CHILD)
        await app.operations.conversations.renew(OPERATOR, CHILD)
        await app.ask("go", CHILD)
        before = app.rows("SELECT * FROM usage")
        assert len(before) == 4
        for _ in range(2):
            clock.advance(days=10)
            await app.ask("alive")
            keep = RetentionPolicy(archive_after_days=5, delete_archived_after_days=5)
            await retention.apply_retention(app.store, keep, clock.now())
        assert app.rows("SELECT 1 FROM sessions WHERE key = ?", CHILD) == []
        assert app.rows("SELECT * FROM usage WHERE session_key = ? ORDER BY id", CHILD) == before
        tree = await app.operations.transcripts.get_usage(OPERATOR, MAIN, tree=True)
        assert totals(tree) == sums([usage for usages in spender.spent.values() for usage in usages])


@pytest.mark.requirement("G28")
@settings(max_examples=8, deadline=None)
@given(costs=st.lists(st.none() | st.floats(0, 10), min_size=1, max_size=4), turns=st.integers(1, 4))
def test_the_sum_of_the_ledger_is_the_sum_of_the_calls(
    tmp_path_factory: pytest.TempPathFactory, costs: list[float | None], turns: int
) -> None:
    import asyncio

    async def run(path: Path) -> None:
        spender = Spender(costs)
        async with open_app_fixture(path, spender, tools=[make_tool("work", work)]) as app:
            for _ in range(turns):
                await app.ask("go")
            lines = await app.operations.transcripts.get_usage(OPERATOR, MAIN)
            assert totals(lines) == sums(spender.spent[MAIN])
            for line in lines:
                mine = [u for at, u in enumerate(spender.spent[MAIN], 1) if f"m{at % 2}" == line.model]
                known = [usage.cost.total for usage in mine if usage.cost]
                assert line.cost == (pytest.approx(sum(known)) if len(known) == len(mine) else None)

    asyncio.run(run(tmp_path_factory.mktemp("usage")))
