"""The real gateway with a model over HTTP, and what a provider of any kind can do to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from test_client import make_client

from antiphon.client import Client
from antiphon.engine.runs import context
from antiphon.operations.types import IncomingMessage, RunView
from cli.gateways import up
from cli.terminal import BOUND, Program
from support.model_provider import Answer, Failure, Provider, serve_asgi

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("R")]


def settings(url: str, **more: Any) -> dict[str, Any]:
    """A configuration with one provider at that address."""
    provider = {"baseUrl": f"{url}/v1", "apiKey": "sk-0123456789abcdef", "models": [{"id": "m"}]}
    return {
        "agents": {"defaults": {"model": "local/m"}},
        "models": {"providers": {"local": provider | more}},
    }


@asynccontextmanager
async def conversing(program: Program, config: dict[str, Any]) -> AsyncGenerator[Client]:
    """A client of a gateway with this configuration."""
    program.configure(config)
    with up(program) as gateway:
        async with make_client(program, gateway.url) as client:
            yield client


async def ask(client: Client, text: str, session: str = "main") -> RunView:
    accepted = await client.submit(IncomingMessage(session=session, content=text))
    return await client.wait(accepted.run_id, BOUND)


@pytest.mark.requirement("W8")
@pytest.mark.parametrize("api", ["openai-completions", "anthropic-messages"])
async def test_a_stopped_or_failed_question_is_not_glued_to_the_next_one(program: Program, api: str) -> None:
    async with Provider().running() as provider:
        refusal = Failure(status=400, body={"error": {"message": "no"}})
        provider.script(Answer(text=("x",), hold_after=0), refusal)
        base = f"{provider.url}/v1" if api == "openai-completions" else provider.url
        async with conversing(program, settings(provider.url, api=api, baseUrl=base)) as client:
            stopped = await client.submit(IncomingMessage(session="main", content="LONG"))
            async with asyncio.timeout(BOUND):
                await provider.arrived.wait()
            await client.stop("main")
            assert (await client.wait(stopped.run_id, BOUND)).state == "cancelled"
            assert (await ask(client, "REFUSED")).state == "error"
            assert (await ask(client, "NEXT")).reply == "Hello there."
        messages = [m for m in provider.bodies[-1]["messages"] if m["role"] != "system"]
        said = [(m["role"], _text(m["content"])) for m in messages]
        assert said == [
            ("user", "LONG"),
            ("assistant", context.STOPPED_TURN_TEXT),
            ("user", "REFUSED"),
            ("assistant", context.FAILED_TURN_TEXT),
            ("user", "NEXT"),
        ]


MIB = 1024 * 1024
MAX_GROWTH_BYTES = 96 * MIB
MAX_DELAY_SECONDS = (
    10.0  # of another client, on a machine that is busy with the whole suite; it was 44 and more
)


def flooding(chunk: dict[str, Any], times: int, tail: dict[str, Any]) -> Any:
    """A provider of chat completions that answers "hi" to the first question, and with a flood to every other."""
    asked = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal asked
        while (await receive()).get("more_body"):
            pass
        asked += 1
        start = {"type": "http.response.start", "status": 200}
        await send(start | {"headers": [(b"content-type", b"text/event-stream")]})
        if asked == 1 or asked > 2:
            await send({"type": "http.response.body", "body": _event({"content": "hi"}) + _event({}, "stop")})
            return
        for at in range(times):
            body = json.dumps(chunk).replace('"NUMBER"', str(at)).replace("NUMBER", str(at)).encode()
            await send({"type": "http.response.body", "body": b"data: " + body + b"\n\n", "more_body": True})
            if at % 64 == 0:
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": _event(tail, "tool_calls")})

    return app


def _event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return b"data: " + json.dumps(_chunk(delta, finish)).encode() + b"\n\n"


def _chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


TEXT = _chunk({"content": "word " * 12_800})
CALLS = _chunk(
    {"tool_calls": [{"index": "NUMBER", "id": "cNUMBER", "function": {"name": "none", "arguments": "{}"}}]}
)
PLAIN, LIBRARY = "m", "qwen/m"  # the reader of ours, and the one on the libraries


@pytest.mark.parametrize("model", [PLAIN, LIBRARY])
@pytest.mark.parametrize(
    ("chunk", "times", "reason"),
    [(TEXT, 5000, "store.messageMaxBytes"), (CALLS, 50_000, "too many tool calls")],
    ids=["300 MiB of text", "50,000 calls"],
)
async def test_a_flood_takes_neither_memory_nor_the_time_of_others(
    program: Program, model: str, chunk: dict[str, Any], times: int, reason: str
) -> None:
    async with serve_asgi(flooding(chunk, times, {})) as url:
        config = settings(url, models=[{"id": model}])
        config["agents"]["defaults"]["model"] = f"local/{model}"
        program.configure(config)
        with up(program) as gateway:
            process = psutil.Process(gateway.process.pid)
            async with (
                make_client(program, gateway.url) as client,
                make_client(program, gateway.url) as other,
            ):
                assert (await ask(client, "first")).reply == "hi"
                before = process.memory_info().rss
                flood = asyncio.create_task(ask(client, "flood"))
                longest, most = await _watch(flood, other, process)
                view = await flood
    assert view.state == "error"
    assert view.error
    assert reason in view.error
    assert most - before < MAX_GROWTH_BYTES
    assert longest < MAX_DELAY_SECONDS


async def _watch(run: asyncio.Task[RunView], other: Client, process: psutil.Process) -> tuple[float, int]:
    """The longest that another client waited for an answer meanwhile, and the most memory that was taken."""
    loop = asyncio.get_running_loop()
    longest, most = 0.0, 0
    async with asyncio.timeout(4 * BOUND):
        while not run.done():
            began = loop.time()
            await other.describe("main")
            longest = max(longest, loop.time() - began)
            most = max(most, process.memory_info().rss)
            await asyncio.wait([run], timeout=0.05)
    return longest, most


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
