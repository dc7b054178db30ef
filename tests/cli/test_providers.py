"""The real gateway with a model over HTTP, and what a provider of any kind can do to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from test_client import client

from antiphon.client import Client
from antiphon.engine import context
from antiphon.operations import Message
from antiphon.views import RunView
from cli.gateways import up
from cli.terminal import BOUND, Program
from providers import Answer, Failure, Provider

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
        async with client(program, gateway.url) as desk:
            yield desk


async def ask(desk: Client, text: str, session: str = "main") -> RunView:
    accepted = await desk.submit(Message(session=session, content=text))
    return await desk.wait(accepted.run_id, BOUND)


@pytest.mark.requirement("W8")
@pytest.mark.parametrize("api", ["openai-completions", "anthropic-messages"])
async def test_a_stopped_or_failed_question_is_not_glued_to_the_next_one(program: Program, api: str) -> None:
    async with Provider().running() as provider:
        refusal = Failure(status=400, body={"error": {"message": "no"}})
        provider.script(Answer(text=("x",), hold_after=0), refusal)
        base = f"{provider.url}/v1" if api == "openai-completions" else provider.url
        async with conversing(program, settings(provider.url, api=api, baseUrl=base)) as desk:
            stopped = await desk.submit(Message(session="main", content="LONG"))
            async with asyncio.timeout(BOUND):
                await provider.arrived.wait()
            await desk.stop("main")
            assert (await desk.wait(stopped.run_id, BOUND)).state == "cancelled"
            assert (await ask(desk, "REFUSED")).state == "error"
            assert (await ask(desk, "NEXT")).reply == "Hello there."
        messages = [m for m in provider.bodies[-1]["messages"] if m["role"] != "system"]
        said = [(m["role"], _text(m["content"])) for m in messages]
        assert said == [
            ("user", "LONG"),
            ("assistant", context.STOPPED),
            ("user", "REFUSED"),
            ("assistant", context.FAILED),
            ("user", "NEXT"),
        ]


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
