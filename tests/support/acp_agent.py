"""A real ACP agent for tests, built on the library. What it does is in the text of the prompt, one word per step:

`say:TEXT` answers; `think:TEXT`; `tool:KIND` makes a call; `ask:KIND` makes one if it is permitted; `wait` goes on when
it is cancelled; `deaf` does not even then; `exit` ends the process; `recall` says what it remembers; `cwd`, `pid` and
`env:NAME` tell about the process; `usage` reports tokens and cost; `spawn` starts a child that outlives it; `none` says
nothing; `flood:N` sends N kilobytes of text; `late` updates a call that it never announced; `parallel` overlaps two
calls; `fail` answers with an error; `use:TOOL:JSON` calls a tool of the MCP server that it was given and says what that
answered, `list` says which tools there are, and `later:TOOL:JSON` calls one when a file `go` appears, and keeps the
answer in the file `done`.

Its memory is a file per session in the directory `ACP_TEST_MEMORY`, if that is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from acp import RequestError, run_agent
from acp.schema import (
    AgentCapabilities,
    AgentMessageChunk,
    AgentThoughtChunk,
    AllowedOutcome,
    Cost,
    InitializeResponse,
    LoadSessionResponse,
    McpCapabilities,
    NewSessionResponse,
    PermissionOption,
    PromptResponse,
    TextContentBlock,
    ToolCallProgress,
    ToolCallStart,
    ToolCallUpdate,
    Usage,
    UsageUpdate,
)

MODE = os.environ.get("ACP_TEST_MODE", "")
MEMORY = os.environ.get("ACP_TEST_MEMORY")
# The first allows for good, so that a client that goes by the order would be found out.
OPTIONS = [
    PermissionOption(option_id="always", name="Always", kind="allow_always"),
    PermissionOption(option_id="once", name="Once", kind="allow_once"),
    PermissionOption(option_id="no", name="No", kind="reject_once"),
]


class TestAgent:
    __test__ = False

    def __init__(self) -> None:
        self._client: Any = None
        self._cancelled = asyncio.Event()
        self._memories: dict[str, list[str]] = {}
        self._turns = 0
        self._calls = 0
        self.mcp_servers: list[Any] = []
        self._later: asyncio.Task[None] | None = None

    def on_connect(self, conn: Any) -> None:
        self._client = conn

    async def initialize(self, protocol_version: int, **_: Any) -> InitializeResponse:
        if MODE == "silent":
            await asyncio.Event().wait()
        return InitializeResponse(
            protocol_version=9 if MODE == "newer" else protocol_version,
            agent_capabilities=AgentCapabilities(
                load_session=MEMORY is not None, mcp_capabilities=McpCapabilities(http=MODE != "stdio")
            ),
        )

    async def new_session(self, cwd: str, mcp_servers: Any = None, **_: Any) -> NewSessionResponse:
        if MODE == "login":
            raise RequestError.auth_required()
        self.mcp_servers = mcp_servers or []
        session_id = uuid.uuid4().hex
        self._memories[session_id] = []
        return NewSessionResponse(session_id=session_id)

    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Any = None, **_: Any
    ) -> LoadSessionResponse:
        self.mcp_servers = mcp_servers or []
        file = self._locate(session_id)
        if file is None or not file.exists():
            raise RequestError.resource_not_found(session_id)
        self._memories[session_id] = json.loads(file.read_text())
        for text in self._memories[session_id]:  # the history is repeated, as the protocol wants it
            await self._say(session_id, f"replayed {text}")
        return LoadSessionResponse()

    def _locate(self, session_id: str) -> Path | None:
        return None if MEMORY is None else Path(MEMORY, session_id)

    async def cancel(self, session_id: str, **_: Any) -> None:
        self._cancelled.set()

    async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> PromptResponse:
        self._cancelled.clear()
        self._turns += 1
        texts = [block.text for block in prompt if isinstance(block, TextContentBlock)]
        memory = self._memories[session_id]
        memory += texts
        if (file := self._locate(session_id)) is not None:
            file.write_text(json.dumps(memory))
        usage = None
        for step in _read_steps(texts[-1]):
            word, _separator, rest = step.partition(":")
            if word == "usage":
                usage = Usage(
                    total_tokens=15 * self._turns,
                    input_tokens=10 * self._turns,
                    output_tokens=5 * self._turns,
                )
                cost = Cost(amount=0.25 * self._turns, currency="USD")
                await self._update(
                    session_id, UsageUpdate(session_update="usage_update", used=1, size=2, cost=cost)
                )
            elif word == "fail":
                raise RequestError.internal_error({"details": "the model is on fire."})
            elif not await self._take_step(session_id, word, rest, memory):
                return PromptResponse(stop_reason="cancelled", usage=usage)
        return PromptResponse(stop_reason="end_turn", usage=usage)

    async def _take_step(self, session_id: str, word: str, rest: str, memory: list[str]) -> bool:
        """Do one step. False if the turn was cancelled."""
        told: dict[str, Callable[[], str]] = {
            "say": lambda: f"{rest} ",
            "recall": lambda: json.dumps(memory),
            "cwd": lambda: str(Path.cwd()),
            "pid": lambda: str(os.getpid()),
            "env": lambda: os.environ.get(rest, "unset"),
            "mcp": lambda: json.dumps([each.model_dump(mode="json") for each in self.mcp_servers]),
            "flood": lambda: "x" * 1024 * int(rest),
        }
        if word in told:
            await self._say(session_id, told[word]())
        elif word in ("use", "list"):
            await self._say(session_id, await self._call_session_tool(rest))
        elif word == "later":
            self._later = asyncio.create_task(self._call_session_tool_later(rest))
        elif word == "think":
            chunk = AgentThoughtChunk(session_update="agent_thought_chunk", content=_text(rest))
            await self._update(session_id, chunk)
        elif word in ("tool", "ask"):
            return await self._use_tool(session_id, rest, asks=word == "ask")
        elif word == "parallel":
            await self._overlap(session_id)
        elif word == "late":
            update = ToolCallProgress(
                session_update="tool_call_update",
                tool_call_id="never",
                status="completed",
                raw_output="found",
            )
            await self._update(session_id, update)
        else:
            return await self._end_or_wait(word)
        return True

    async def _end_or_wait(self, word: str) -> bool:
        match word:
            case "spawn":
                subprocess.Popen(["sleep", "3600"], start_new_session=True)  # noqa: ASYNC220
            case "wait":
                await self._cancelled.wait()
                return False
            case "deaf":
                await asyncio.Event().wait()
            case "exit":
                print("out of memory", file=sys.stderr, flush=True)  # noqa: T201
                os._exit(7)
            case _:
                pass
        return True

    async def _use_tool(self, session_id: str, kind: Any, *, asks: bool) -> bool:
        call_id = f"call-{self._turns}-{self._calls}"
        self._calls += 1
        start = ToolCallStart(
            session_update="tool_call", tool_call_id=call_id, title=f"do {kind}", kind=kind, status="pending"
        )
        await self._update(session_id, start)
        raw = {"command": f"run-{kind}"}
        outcome = "ran"
        if asks:
            call = ToolCallUpdate(tool_call_id=call_id, raw_input=raw)
            answer = await self._client.request_permission(session_id, call, OPTIONS)
            if not isinstance(answer.outcome, AllowedOutcome):
                return False
            outcome = answer.outcome.option_id
        progress = ToolCallProgress(
            session_update="tool_call_update", tool_call_id=call_id, status="in_progress", raw_input=raw
        )
        await self._update(session_id, progress)
        done = ToolCallProgress(
            session_update="tool_call_update",
            tool_call_id=call_id,
            status="failed" if outcome == "no" else "completed",
            raw_output=outcome,
        )
        await self._update(session_id, done)
        return True

    async def _call_session_tool_later(self, call: str) -> None:
        while not Path("go").exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)
        Path("begun").write_text(await self._call_session_tool(call))  # noqa: ASYNC240
        Path("begun").rename("done")  # noqa: ASYNC240

    async def _call_session_tool(self, call: str) -> str:
        """Call a tool, or list the tools, through the only MCP server."""
        from mcp.client.client import Client

        tool, _separator, arguments = call.partition(":")
        async with connect(self.mcp_servers[0]) as transport, Client(transport, mode="auto") as client:
            if not tool:
                return " ".join(sorted(each.name for each in (await client.list_tools()).tools))
            result = await client.call_tool(tool, json.loads(arguments or "{}"))
            return json.dumps(result.structured_content, separators=(",", ":"))

    async def _overlap(self, session_id: str) -> None:
        """Begin two calls, say something, and end the second first."""
        for name in ("one", "two"):
            begun = ToolCallStart(
                session_update="tool_call", tool_call_id=name, title=name, kind="search", status="in_progress"
            )
            await self._update(session_id, begun)
            await self._say(session_id, f"begun-{name} ")
        for name in ("two", "one"):
            done = ToolCallProgress(
                session_update="tool_call_update",
                tool_call_id=name,
                status="completed",
                raw_output=f"found {name}",
            )
            await self._update(session_id, done)

    async def _say(self, session_id: str, words: str) -> None:
        await self._update(
            session_id, AgentMessageChunk(session_update="agent_message_chunk", content=_text(words))
        )

    async def _update(self, session_id: str, update: Any) -> None:
        await self._client.session_update(session_id, update)


@asynccontextmanager
async def connect(server: Any) -> AsyncGenerator[Any]:
    """Yield the transport to an MCP server, as ACP describes it."""
    if getattr(server, "command", None):
        from mcp.client.stdio import StdioServerParameters, stdio_client

        environ = {each.name: each.value for each in server.env}
        yield stdio_client(StdioServerParameters(command=server.command, args=server.args, env=environ))
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    headers = {each.name: each.value for each in server.headers}
    async with httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
        yield streamable_http_client(server.url, http_client=http)


def _read_steps(text: str) -> list[str]:
    """Return the steps of a message: its last line, as in the task of a sub-agent, before the end of a frame."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("<<<end ")]
    return lines[-1].split()


def _text(text: str) -> TextContentBlock:
    return TextContentBlock(type="text", text=text)


if __name__ == "__main__":
    if MODE == "exit":
        print("no such model", file=sys.stderr)  # noqa: T201
        sys.exit(3)
    asyncio.run(run_agent(TestAgent()))  # pyright: ignore[reportArgumentType]
