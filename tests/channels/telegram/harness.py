"""A gateway with the Telegram channel in this process, beside the stand-in of the service."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.access import Caller
from antiphon.config.load import parse
from antiphon.gateway.server import ListeningGateway, serve_gateway
from antiphon.operations.operations import Operations
from antiphon.runtimes import Prompt
from antiphon.runtimes.function import AgentFunction, FunctionRuntime
from channels.telegram.fake import TOKEN, FakeTelegram
from support.app_fixture import DATABASE
from support.databases import query_database

OPERATOR = Caller.operator()
OWNER = 7
Json = dict[str, Any]


async def echo(prompt: Prompt) -> str:
    """An agent that answers with what it was told last."""
    return f"heard: {read_last(prompt)}"


def read_last(prompt: Prompt) -> str:
    content = prompt.messages[-1].content
    if isinstance(content, str):
        return content
    return " ".join(getattr(block, "text", f"<{type(block).__name__}>") for block in content)


@dataclass(frozen=True)
class Chats:
    """A running gateway and its service."""

    fake: FakeTelegram
    served: ListeningGateway
    path: Path

    @property
    def operations(self) -> Operations:
        return self.served.gateway.app.operations

    @property
    def http_url(self) -> str:
        return self.served.url.replace("ws", "http", 1)

    def rows(self, sql: str, *parameters: object) -> list[dict[str, Any]]:
        return query_database(self.path / DATABASE, sql, *parameters)

    def outcomes(self) -> list[str]:
        found = self.rows("SELECT outcome FROM inbound_events ORDER BY CAST(event_id AS INTEGER)")
        return [row["outcome"] for row in found]


def configure(fake: FakeTelegram, telegram: Json | None = None, **sections: Any) -> Json:
    """A configuration in which the owner may write, unless `telegram` says otherwise."""
    settings = {"dmPolicy": "allowlist", "allowFrom": [OWNER]} if telegram is None else telegram
    channel = {"botToken": TOKEN, "apiRoot": fake.url, **settings}
    return {"channels": {"telegram": channel}, **sections}


@asynccontextmanager
async def open_chats(
    path: Path,
    fake: FakeTelegram,
    telegram: Json | None = None,
    *,
    agent: AgentFunction = echo,
    agents: dict[str, AgentFunction] | None = None,
    **sections: Any,
) -> AsyncGenerator[Chats]:
    config, _ = parse(configure(fake, telegram, **sections))
    functions = {"main": agent, **(agents or {})}
    runtimes = {name: FunctionRuntime(function) for name, function in functions.items()}
    path.mkdir(exist_ok=True)
    async with serve_gateway(config, path, port=0, functions=runtimes) as served:
        yield Chats(fake, served, path)


Condition = Callable[[], bool]
