"""The ids of a run's tool calls: one each for the whole run, with any part cut from its prompt, and in any process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from antiphon.engine.runs import compaction, context
from antiphon.engine.sessions import transcripts
from antiphon.engine.sessions.transcripts import Entry
from antiphon.engine.toolbox import Tool, ToolOutput, ToolRequest
from antiphon.messages import AssistantMessage, CompactionEntry, ToolCall, encode_message
from antiphon.runtimes import Deltas, Prompt
from antiphon.store import Tx
from support.app_fixture import (
    AppFixture,
    make_answer,
    make_tool,
    open_app_fixture,
    open_test_store,
    wait_for_event,
)

pytestmark = pytest.mark.anyio

STEPS = 8
LONG = "x" * 300


class Counting:
    """A server that numbers the calls of every answer from nought, with a window for two steps."""

    context_window = 400

    def __init__(self, *, history: bool = True, width: int = 1) -> None:
        self.reads_history = history
        self.steps = 0
        self.shortened = 0
        self._width = width

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        if prompt.instructions == compaction.SUMMARY_INSTRUCTIONS:
            return make_answer("They pay.", stop_reason="stop")
        assert sum(map(context.estimate_tokens, prompt.messages)) <= self.context_window
        self.shortened += any(isinstance(message, CompactionEntry) for message in prompt.messages)
        if self.steps == STEPS:
            return make_answer("paid", stop_reason="stop")
        self.steps += 1
        made = [
            ToolCall(id=f"call_{place}", name="pay", arguments={"bill": f"{self.steps}.{place}", "for": LONG})
            for place in range(self._width)
        ]
        return AssistantMessage(content=[*made], timestamp=1, stop_reason="toolUse")

    async def close(self) -> None: ...


class Till:
    """A tool with one effect a key; it never comes back from the call about the bill it is held at."""

    def __init__(self) -> None:
        self.paid: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.held_at = ""
        self.begun = asyncio.Event()

    async def pay(self, call: ToolRequest) -> ToolOutput:
        bill = call.arguments["bill"]
        self.asked.append((call.key, bill))
        self.paid.setdefault(call.key, bill)
        if bill == self.held_at:
            self.begun.set()
            await asyncio.Event().wait()
        return ToolOutput(text=f"paid {self.paid[call.key]}")

    @property
    def tools(self) -> list[Tool]:
        return [make_tool("pay", self.pay, settle=True)]


def bills(width: int = 1) -> list[str]:
    return [f"{step}.{place}" for step in range(1, STEPS + 1) for place in range(width)]


async def check(app: AppFixture, till: Till, width: int = 1) -> None:
    """Every bill was paid, by a call that says so, with an id of its own."""
    assert sorted(till.paid.values()) == bills(width)
    entries = await app.transcript()
    made = [b for e in entries if e["role"] == "assistant" for b in e["content"] if b["type"] == "toolCall"]
    told = {e["toolCallId"]: e["content"][0]["text"] for e in entries if e["role"] == "toolResult"}
    assert len(made) == len(told) == len(bills(width))
    assert [told[call["id"]] for call in made] == [f"paid {bill}" for bill in bills(width)]


@pytest.mark.requirement("G3", "G26")
@pytest.mark.parametrize("width", [1, 2])
async def test_a_call_has_an_id_of_its_own_after_a_compaction(tmp_path: Path, width: int) -> None:
    runtime, till = Counting(width=width), Till()
    runtime.context_window *= width
    async with open_app_fixture(tmp_path, runtime, tools=till.tools) as app:
        assert (await app.ask("go")).reply == "paid"
        assert runtime.shortened
        await check(app, till, width)


@pytest.mark.requirement("G2", "G3", "G26")
@pytest.mark.parametrize("history", [True, False])
async def test_a_resumed_run_knows_the_ids_it_has_given(tmp_path: Path, *, history: bool) -> None:
    """The call that was cut off is found again under its own id, and those after it have new ones."""
    runtime, till = Counting(history=history), Till()
    for stop in ("5.0", "7.0"):
        till.held_at = stop
        till.begun.clear()
        async with open_app_fixture(tmp_path, runtime, tools=till.tools) as app:
            if stop == "5.0":
                await app.say("go", idempotency_key="run")
            await wait_for_event(till.begun)
    till.held_at = ""
    async with open_app_fixture(tmp_path, runtime, tools=till.tools) as app:
        assert (await app.wait_for_end("run")).reply == "paid"
        await check(app, till)
    again = [asked for asked in till.asked if till.asked.count(asked) > 1]
    assert sorted({bill for _, bill in again}) == ["5.0", "7.0"]
    assert runtime.shortened


async def _write(tx: Tx, answers: int) -> None:
    for seq in range(1, answers + 1):
        made = ToolCall(id=f"c{seq}", name="pay", arguments={})
        body = encode_message(AssistantMessage(content=[made], timestamp=1)) if seq % 10 else "{torn"
        await transcripts.append_raw(tx, 7, None, Entry(seq, f"{seq:08x}", "assistant", body, 1))


@pytest.mark.requirement("G2", "G21")
async def test_all_ids_of_a_run_are_found_however_long_it_is(tmp_path: Path) -> None:
    answers = 2 * context.ENTRIES_PER_PAGE + 5
    async with open_test_store(tmp_path) as store:
        await store.tx(_write, answers)
        found = await store.read(context.load_call_ids_since, 7, 1)
        assert found == {f"c{seq}" for seq in range(2, answers + 1) if seq % 10}
        assert await store.read(context.load_call_ids_since, 7, answers) == set()
