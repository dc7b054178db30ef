"""Agents that are functions."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon.clock import ManualClock
from antiphon.errors import ConfigError, ContextOverflow, ProviderError
from antiphon.messages import AssistantMessage, TextBlock, ToolCall, UserMessage, encode_message
from antiphon.runtimes import Prompt, Runtime
from antiphon.runtimes.function import AgentFunction, FunctionRuntime, load_function
from antiphon.runtimes.text import sanitize_answer

pytestmark = pytest.mark.anyio
PROMPT = Prompt(
    run_id="run",
    session_key="agent:main:main",
    agent_id="main",
    instructions="",
    messages=[UserMessage(content="hi", timestamp=1)],
)


@pytest.mark.requirement("G2", "G21")
def test_an_answer_is_repaired_with_any_other_irregularity() -> None:
    call = ToolCall(id="c", name="n", arguments={"half \ud83d": [float("nan"), "\ud83d\ude00"]})
    answer = sanitize_answer(AssistantMessage(content=[TextBlock(text="\ude00"), call], timestamp=1))
    assert answer.text == "\ufffd"
    (name, (number, face)), *_ = answer.tool_calls[0].arguments.items()
    assert (name, face, math.isnan(number)) == ("half \ufffd", "\N{GRINNING FACE}", True)
    encode_message(answer)


class Pieces(list[str]):
    """Deltas as a list."""

    def text(self, piece: str) -> None:
        self.append(piece)

    def thinking(self, piece: str) -> None: ...

    def restart(self) -> None: ...


async def echo(prompt: Prompt) -> str:
    message = prompt.messages[-1]
    assert isinstance(message, UserMessage)
    return f"you said {message.content}"


async def stream(prompt: Prompt) -> AsyncGenerator[str, None]:
    for word in ("one ", "two ", prompt.agent_id):
        yield word


NOT_CALLABLE = 7


async def test_a_text() -> None:
    runtime: Runtime = FunctionRuntime(echo, clock=ManualClock(5))
    pieces = Pieces()
    answer = await runtime.step(PROMPT, pieces)
    assert answer == AssistantMessage(
        content=[TextBlock(text="you said hi")],
        timestamp=5,
        stop_reason="stop",
        api="function",
        provider="function",
        model="echo",
    )
    assert pieces == ["you said hi"]
    assert runtime.context_window is None
    await runtime.close()


async def test_pieces_are_streamed() -> None:
    pieces = Pieces()
    answer = await FunctionRuntime(stream).step(PROMPT, pieces)
    assert answer.text == "one two main"
    assert pieces == ["one ", "two ", "main"]


async def test_a_whole_message() -> None:
    async def agent(prompt: Prompt) -> AssistantMessage:
        return AssistantMessage(content=[ToolCall(id="c", name="t", arguments={})], timestamp=9, model="mine")

    answer = await FunctionRuntime(agent).step(PROMPT, Pieces())
    assert (answer.stop_reason, answer.timestamp, answer.model) == ("toolUse", 9, "mine")


async def test_cancelling_closes_the_generator() -> None:
    started, closed = asyncio.Event(), asyncio.Event()

    async def agent(prompt: Prompt) -> AsyncGenerator[str, None]:
        try:
            yield "a"
            started.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    running = asyncio.create_task(FunctionRuntime(agent).step(PROMPT, Pieces()))
    async with asyncio.timeout(5):
        await started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert closed.is_set()


async def test_what_it_raises_is_told_with_its_place_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(prompt: Prompt) -> str:
        return json.loads("no JSON")  # raises in a library: the place is here

    with pytest.raises(ProviderError, match="'agent' failed with JSONDecodeError") as caught:
        await FunctionRuntime(agent).step(PROMPT, Pieces())
    assert caught.value.data["model"] == "agent"
    assert f"({__file__}:{agent.__code__.co_firstlineno + 1})." in caught.value.what
    assert caught.value.hint == "See the log for the traceback."
    [record] = caplog.records
    assert (record.levelno, record.name) == (logging.ERROR, "antiphon.runtimes.function")
    assert record.exc_info
    assert isinstance(record.exc_info[1], json.JSONDecodeError)
    assert (vars(record)["run_id"], vars(record)["session_key"]) == (PROMPT.run_id, PROMPT.session_key)


async def test_a_function_that_cannot_be_called_is_told_what_one_is() -> None:
    async def agent() -> str:
        return ""

    with pytest.raises(ProviderError, match="failed with TypeError") as caught:
        await FunctionRuntime(cast("AgentFunction", agent)).step(PROMPT, Pieces())
    assert caught.value.hint.startswith("Fix the function")


async def test_our_own_errors_pass() -> None:
    async def agent(prompt: Prompt) -> str:
        raise ContextOverflow("Too long.", "Compact.")

    with pytest.raises(ContextOverflow):
        await FunctionRuntime(agent).step(PROMPT, Pieces())


async def test_answers_that_are_none() -> None:
    async def number(prompt: Prompt) -> Any:
        return 7

    def synchronous(prompt: Prompt) -> Any:
        return "not awaited"

    with pytest.raises(ProviderError, match=r"returned 'int'.*Fix the function"):
        await FunctionRuntime(number).step(PROMPT, Pieces())
    with pytest.raises(ProviderError, match="instead of an awaitable"):
        await FunctionRuntime(synchronous).step(PROMPT, Pieces())


async def test_an_instant_agent_costs_microseconds() -> None:
    async def agent(prompt: Prompt) -> str:
        return "ok"

    runtime, pieces = FunctionRuntime(agent), Pieces()
    began = time.process_time()
    for _ in range(1000):
        await runtime.step(PROMPT, pieces)
    assert (time.process_time() - began) / 1000 < 0.0002


def test_load() -> None:
    found: AgentFunction = load_function(f"{__name__}:echo")
    assert found is echo


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no-colon", "does not have the form"),
        (":echo", "does not have the form"),
        ("absent_module:echo", "'absent_module', which cannot be found"),
        ("json.absent:echo", "'json.absent', which cannot be found"),
        ("json:absent", "names 'absent', which 'json' does not have"),
        (f"{__name__}:NOT_CALLABLE", "is a 'int', not a function"),
        ("needs_absent:run", "imports 'absent_library', which is not installed"),
        ("breaks:run", "could not be imported (ZeroDivisionError"),
    ],
)
def test_load_says_what_is_wrong(
    target: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_absent.py").write_text("import absent_library\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(ConfigError) as caught:
        load_function(target)
    assert said in str(caught.value)
    assert caught.value.hint


@pytest.mark.requirement("G24")
@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt()])
async def test_a_function_that_would_end_the_process_fails_its_step(ending: BaseException) -> None:
    async def agent(prompt: Prompt) -> str:
        raise ending

    with pytest.raises(ProviderError, match=f"failed with {type(ending).__name__}"):
        await FunctionRuntime(agent).step(PROMPT, Pieces())
