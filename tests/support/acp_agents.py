"""Apps and configurations with the test's ACP agent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from antiphon.access import Caller
from antiphon.app import App, open_app
from antiphon.config import parse
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.operations.types import IncomingMessage, RunView

AGENT_FILE = Path(__file__).with_name("acp_agent.py")
BOUND = 60.0  # seconds after which any wait of a test is a failure
OPERATOR = Caller.operator()
CODER = "agent:coder:main"


def describe_program(**settings: Any) -> dict[str, Any]:
    """Return the runtime of an agent that is the test's program."""
    return {"type": "acp", "acp": {"command": sys.executable, "args": [str(AGENT_FILE)], **settings}}


def describe_agents(
    program: dict[str, Any] | None = None, agent: dict[str, Any] | None = None, **config: Any
) -> dict[str, Any]:
    """Return a configuration with a model's agent `main` and a program's agent `coder`."""
    coder = {"id": "coder", "runtime": describe_program(**(program or {})), **(agent or {})}
    return {"agents": {"list": [{"id": "main"}, coder]}, **config}


class AcpFixture:
    """An app with the agent `coder`, and short forms for what tests do with it."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def say(self, text: str, session: str = CODER) -> str:
        message = IncomingMessage(session=session, content=text)
        return (await self.app.operations.messages.submit(OPERATOR, message)).run_id

    async def wait_for_end(self, run_id: str) -> RunView:
        view = await self.app.operations.runs.wait(OPERATOR, run_id, BOUND)
        assert view.has_ended, f"{run_id} is still {view.state} after {BOUND} seconds"
        return view

    async def ask(self, text: str, session: str = CODER) -> RunView:
        return await self.wait_for_end(await self.say(text, session))

    async def reply(self, text: str, session: str = CODER) -> str:
        view = await self.ask(text, session)
        assert view.state == "ok", view
        assert view.reply is not None
        return view.reply.strip()

    async def transcript(self, session: str = CODER) -> list[dict[str, Any]]:
        wanted = HistoryFilter(limit=1000, include_tools=True, after=0)
        return (await self.app.operations.transcripts.read(OPERATOR, session, wanted)).messages

    async def wait_for_entries(self, count: int, session: str = CODER) -> None:
        """Wait until the transcript has this many entries."""
        async with asyncio.timeout(BOUND):
            while len(await self.transcript(session)) < count:  # noqa: ASYNC110 - no event names a number
                await asyncio.sleep(0.02)


@asynccontextmanager
async def open_acp_app(path: Path, config: dict[str, Any] | None = None) -> AsyncGenerator[AcpFixture]:
    parsed, _ = parse(config or describe_agents())
    async with open_app(parsed, path) as app:
        yield AcpFixture(app)
