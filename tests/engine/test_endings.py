"""How a run ends whose answer cannot be stored as it is, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from antiphon.bus import Delta, Listener, session_topic
from antiphon.clock import ManualClock
from antiphon.engine.runs import lifecycle
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import ProviderError, StoreFull, StoreUnsure
from antiphon.messages import AssistantMessage, TokenUsage, UserMessage, encode_message
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.text import MAX_TOKENS_PER_CALL
from support.app_fixture import (
    BOUND,
    MAIN,
    OPERATOR,
    AppFixture,
    make_answer,
    make_tool,
    make_tool_calls,
    open_app_fixture,
    wait_for_event,
    wait_until,
)

pytestmark = pytest.mark.anyio

BRISK = EngineTimings(lease_seconds=3600, sweep_interval_seconds=0.01)
SLOW = EngineTimings(lease_seconds=3600, sweep_interval_seconds=3600)  # no other process takes over a lane
FACE = "\N{GRINNING FACE}"
HIGH, LOW = "\ud83d", "\ude00"


class Peculiar:
    """A runtime that gives the first of its answers once, and counts how often it is asked."""

    reads_history = True
    context_window = None

    def __init__(self, answer: AssistantMessage) -> None:
        self.answer, self.asked = answer, 0
        self.begun, self.free = asyncio.Event(), asyncio.Event()

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        self.asked += 1
        self.begun.set()
        await wait_for_event(self.free)
        return self.answer if self.asked == 1 else make_answer("fine", stop_reason="stop")

    async def close(self) -> None: ...


def queue(app: AppFixture, run_id: str, origin: str, input: str) -> None:
    """Appended to any answer, and without a sign that it is there."""
    sql = "INSERT INTO runs (id, session, origin, digest, input, created_at) SELECT ?, id, ?, '', ?, ? FROM sessions"
    app.rows(sql, run_id, origin, input, app.clock.now())


@pytest.mark.requirement("G2", "G21")
async def test_half_a_character_in_an_answer_costs_nothing_else(tmp_path: Path) -> None:
    asked = 0

    async def agent(prompt: Prompt) -> AsyncGenerator[str, None]:
        nonlocal asked
        asked += 1
        for piece in (HIGH, LOW, " and ", HIGH):
            yield piece

    async with open_app_fixture(tmp_path, agent, timings=BRISK) as app:
        view = await app.ask("go")
        assert (view.state, view.reply, asked) == ("ok", f"{FACE} and \ufffd", 1)
        assert (await app.transcript())[-1]["content"] == [{"type": "text", "text": view.reply}]


@pytest.mark.requirement("G2", "G21")
async def test_counts_that_no_call_can_have_are_bounded(tmp_path: Path) -> None:
    usage = TokenUsage(input=2**63, output=-1, cache_read=10**400, cache_write=7, total_tokens=2**63)

    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_answer("done", usage=usage)

    async with open_app_fixture(tmp_path, agent, timings=BRISK) as app:
        assert [(await app.ask("go")).state for _ in range(3)] == ["ok"] * 3
        used = [
            [*row.values()] for row in app.rows("SELECT input, output, cache_read, cache_write FROM usage")
        ]
        assert used == [[MAX_TOKENS_PER_CALL, 0, MAX_TOKENS_PER_CALL, 7]] * 3
        assert app.rows("SELECT input_tokens FROM sessions") == [{"input_tokens": 3 * MAX_TOKENS_PER_CALL}]


@pytest.mark.requirement("G1", "G2", "G21")
async def test_an_answer_that_cannot_be_kept_fails_its_run_once_and_the_session_goes_on(
    tmp_path: Path,
) -> None:
    usage = TokenUsage(input=3, output=4, total_tokens=7)
    runtime = Peculiar(make_answer(f"half {HIGH}", stop_reason="stop", usage=usage))
    async with open_app_fixture(tmp_path, runtime, timings=SLOW) as app:
        first = await app.say("one")
        await wait_for_event(runtime.begun)
        queue(app, "second", "chat", encode_message(UserMessage(content="two", timestamp=app.clock.now())))
        runtime.free.set()
        view = await app.wait_for_end(first)
        assert (view.state, view.error_code, view.reply) == ("error", "run_failed", None)
        assert view.error and view.error.startswith("The result of the run could not be stored. ")
        assert view.usage and (view.usage.input, view.usage.output) == (3, 4), "it was paid for"
        assert (await app.wait_for_end("second")).reply == "fine"
        assert runtime.asked == 2
        assert [entry.get("errorMessage") for entry in await app.transcript()] == [
            None,
            view.error,
            None,
            None,
        ]


@pytest.mark.requirement("G2", "G21")
async def test_a_store_that_is_away_when_a_run_ends_has_it_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = lifecycle.finish_run
    runtime = Peculiar(make_answer("lost", stop_reason="stop"))
    runtime.free.set()

    async def away_at_first(*args: Any, **options: Any) -> Any:
        if runtime.asked == 1:
            raise StoreUnsure("It is not known whether this was kept.", "Look.")
        return await finish(*args, **options)

    monkeypatch.setattr(lifecycle, "finish_run", away_at_first)
    async with open_app_fixture(tmp_path, runtime, timings=BRISK) as app:
        view = await app.ask("go")
        assert (view.state, view.reply, runtime.asked) == ("ok", "fine", 2)


@pytest.mark.requirement("G1", "G2", "G21")
async def test_behind_damage_in_its_lane_an_answer_is_kept_and_the_lane_goes_on(tmp_path: Path) -> None:
    runtime = Peculiar(make_answer("precious", stop_reason="stop"))
    async with open_app_fixture(tmp_path, runtime, timings=SLOW) as app:
        first = await app.say("one")
        await wait_for_event(runtime.begun)
        queue(app, "note:torn", "note", "{torn")
        queue(app, "second", "chat", encode_message(UserMessage(content="two", timestamp=app.clock.now())))
        runtime.free.set()
        assert (await app.wait_for_end(first)).reply == "precious"
        assert (await app.wait_for_end("second")).reply == "fine"
        torn = await app.wait_for_end("note:torn")
        assert (torn.state, torn.error_code) == ("error", "invalid_input")
        assert [entry["role"] for entry in await app.transcript()] == ["user", "assistant"] * 2


@pytest.mark.requirement("G1", "G2", "G21")
async def test_when_the_next_run_cannot_be_claimed_the_end_of_this_one_is_kept_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = lifecycle.finish_run
    runtime = Peculiar(make_answer("precious", stop_reason="stop"))

    async def fail_to_claim_next(*args: Any, claim_next: bool) -> Any:
        if claim_next and runtime.asked == 1:
            raise ValueError
        return await finish(*args, claim_next=claim_next)

    monkeypatch.setattr(lifecycle, "finish_run", fail_to_claim_next)
    async with open_app_fixture(tmp_path, runtime, timings=SLOW) as app:
        first = await app.say("one")
        await wait_for_event(runtime.begun)
        queue(app, "second", "chat", encode_message(UserMessage(content="two", timestamp=app.clock.now())))
        runtime.free.set()
        assert (await app.wait_for_end(first)).reply == "precious"
        assert (await app.wait_for_end("second")).reply == "fine"


@pytest.mark.requirement("G2", "G21")
async def test_a_provider_whose_reason_has_half_a_character_is_quoted_with_the_rest_of_it(
    tmp_path: Path,
) -> None:
    async def agent(prompt: Prompt) -> str:
        raise ProviderError(f"It said {HIGH}.", "Wait.")

    async with open_app_fixture(tmp_path, agent, timings=BRISK) as app:
        view = await app.ask("go")
        assert (view.error_code, view.error) == ("provider_error", "It said \ufffd. Wait.")


@pytest.mark.sqlite_only
@pytest.mark.requirement("G2", "G21")
@pytest.mark.parametrize("sort", ["answer", "call", "own tool"])
async def test_on_a_full_disk_the_result_of_a_run_waits_for_room_and_the_model_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sort: str
) -> None:
    """Small commits find their place where this one does not, so that only the run itself would notice."""
    tries, tried = 0, asyncio.Event()
    asked = 0

    async def agent(prompt: Prompt) -> AssistantMessage:
        nonlocal asked
        asked += 1
        return (
            make_answer("done", stop_reason="stop")
            if asked == 2 or sort == "answer"
            else make_tool_calls("work")
        )

    async def work(call: ToolRequest) -> ToolOutput:
        if sort == "own tool" and not tried.is_set():
            fail()
        return ToolOutput(text="worked")

    def fail() -> None:
        nonlocal tries
        tries += 1
        if tries >= 8:
            tried.set()
        raise StoreFull("There is no room left.", "Make some.")

    def full(script: Any) -> Any:
        async def refused(*args: Any, **options: Any) -> Any:
            if not tried.is_set() and sort != "own tool":
                fail()
            return await script(*args, **options)

        return refused

    monkeypatch.setattr(lifecycle, "STORE_FULL_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(lifecycle, "finish_run", full(lifecycle.finish_run))
    monkeypatch.setattr(lifecycle, "commit_messages", full(lifecycle.commit_messages))
    tools = [make_tool("work", work, settle=sort == "own tool")]
    async with open_app_fixture(tmp_path, agent, timings=BRISK, tools=tools) as app:
        view = await app.ask("go")
        assert (view.state, view.reply, tries) == ("ok", "done", 8)
        assert asked == (1 if sort == "answer" else 2)
        assert app.rows("SELECT attempts FROM runs") == [{"attempts": 1}]


@pytest.mark.requirement("G17", "G21")
async def test_an_answer_that_came_in_time_is_kept_when_there_is_room_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    finish = lifecycle.finish_run
    tries, room = 0, asyncio.Event()

    async def full(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        if not room.is_set():
            raise StoreFull("There is no room left.", "Make some.")
        return await finish(*args, **options)

    async def agent(prompt: Prompt) -> str:
        return "precious"

    async def tried() -> bool:
        return tries > 0

    async def late() -> bool:
        """By now it would have been ended by force: it is looked for several times between two tries."""
        return tries >= 10

    monkeypatch.setattr(lifecycle, "finish_run", full)
    monkeypatch.setattr(lifecycle, "STORE_FULL_RETRY_SECONDS", 0.05)
    async with open_app_fixture(tmp_path, agent, timings=BRISK, clock=clock) as app:
        run_id = await app.say("go", timeout_seconds=30)
        await wait_until(tried)
        clock.advance(seconds=3600)
        await wait_until(late)
        room.set()
        assert (await app.wait_for_end(run_id)).reply == "precious"


@pytest.mark.requirement("G16", "G21")
async def test_a_run_that_waits_for_room_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()

    async def full(*_: object) -> None:
        tried.set()
        raise StoreFull("There is no room left.", "Make some.")

    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_tool_calls("work")

    monkeypatch.setattr(lifecycle, "commit_messages", full)
    async with open_app_fixture(tmp_path, agent, timings=SLOW) as app:
        run_id = await app.say("go")
        await wait_for_event(tried)
        await app.operations.runs.stop(OPERATOR, MAIN)
        assert (await app.wait_for_end(run_id)).state == "cancelled"


class Halting:
    """A runtime that streams these pieces and then waits."""

    reads_history = True
    context_window = None

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.said = asyncio.Event()

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        for piece in self.pieces:
            deltas.thinking(piece)
            deltas.text(piece)
        self.said.set()
        await asyncio.Event().wait()
        return make_answer("never")

    async def close(self) -> None: ...


@pytest.mark.requirement("G16", "G17")
async def test_a_run_that_is_stopped_keeps_the_characters_that_came_in_halves(tmp_path: Path) -> None:
    runtime = Halting("so ", HIGH, LOW, " far", HIGH)
    async with open_app_fixture(tmp_path, runtime, timings=BRISK) as app:
        run_id = await app.say("go")
        await wait_for_event(runtime.said)
        await app.operations.runs.stop(OPERATOR, MAIN)
        view = await app.wait_for_end(run_id)
        assert (view.state, view.reply) == ("cancelled", f"so {FACE} far")


async def streamed(app: AppFixture, events: Listener, run_id: str) -> list[Delta]:
    await app.wait_for_end(run_id)
    heard: list[Delta] = []
    while (event := await events.get(0)) is not None:
        if isinstance(event, Delta):
            heard.append(event)
    return heard


@pytest.mark.requirement("G16")
async def test_what_is_streamed_is_whole_characters(tmp_path: Path) -> None:
    runtime = Halting("a", HIGH, LOW, HIGH, "b", LOW, HIGH)
    async with open_app_fixture(tmp_path, runtime, timings=BRISK) as app:
        row = await app.create(MAIN)
        async with app.bus.listen(session_topic(row["id"])) as events:
            run_id = await app.say("go")
            await wait_for_event(runtime.said)
            await app.operations.runs.stop(OPERATOR, MAIN)
            deltas = await asyncio.wait_for(streamed(app, events, run_id), BOUND)
        assert "".join(delta.text for delta in deltas) == f"a{FACE}\ufffdb\ufffd"
        assert "".join(delta.thinking for delta in deltas) == f"a{FACE}\ufffdb\ufffd"
