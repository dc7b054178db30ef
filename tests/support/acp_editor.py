"""An editor for tests: the client side of the protocol's own library, connected to a real `antiphon acp`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from acp import PROTOCOL_VERSION, spawn_agent_process
from acp.client import ClientSideConnection
from acp.schema import (
    AllowedOutcome,
    DeniedOutcome,
    PermissionOption,
    RequestPermissionResponse,
    TextContentBlock,
    ToolCallUpdate,
)

from support.app_fixture import BOUND

Json = dict[str, Any]


class Editor:
    """Records what it is shown, in order, and decides about permissions as it is told."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, Json]] = []
        self.asked: list[tuple[ToolCallUpdate, list[PermissionOption]]] = []
        self.decisions: asyncio.Queue[str | None] = asyncio.Queue()
        """The kinds of the options to choose; None cancels."""
        self.agent: Any = None
        self.process: Any = None
        self._changed = asyncio.Event()

    # --- called by the library ---

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append((session_id, update.model_dump(mode="json", by_alias=True, exclude_none=True)))
        self._changed.set()

    async def request_permission(
        self, session_id: str, tool_call: ToolCallUpdate, options: list[PermissionOption], **_: Any
    ) -> RequestPermissionResponse:
        self.asked.append((tool_call, options))
        self._changed.set()
        kind = await self.decisions.get()
        if kind is None:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        chosen = next(option for option in options if option.kind == kind)
        return RequestPermissionResponse(
            outcome=AllowedOutcome(outcome="selected", option_id=chosen.option_id)
        )

    def on_connect(self, conn: Any) -> None:
        self.agent = conn

    # --- used by tests ---

    async def say(self, session_id: str, text: str) -> Any:
        async with asyncio.timeout(BOUND):
            return await self.agent.prompt(
                session_id=session_id, prompt=[TextContentBlock(type="text", text=text)]
            )

    async def begin(self) -> str:
        """Open a new session and return its id."""
        return (await self.agent.new_session(cwd="/", mcp_servers=[])).session_id

    async def wait_until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(BOUND):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def get_updates(self, kind: str, session_id: str | None = None) -> list[Json]:
        return [
            update
            for session, update in self.updates
            if update["sessionUpdate"] == kind and session_id in (None, session)
        ]

    def get_text(self, kind: str = "agent_message_chunk", session_id: str | None = None) -> str:
        return "".join(update["content"].get("text", "") for update in self.get_updates(kind, session_id))

    def get_call(self, number: int = 0) -> Json:
        """Return the last state of a tool call."""
        found = self.get_updates("tool_call")[number]
        call = dict(found)
        for update in self.get_updates("tool_call_update"):
            if update["toolCallId"] == call["toolCallId"]:
                call |= update
        return call

    def forget(self) -> None:
        self.updates.clear()


@asynccontextmanager
async def start_editor(
    command: Sequence[str], environ: Mapping[str, str], *options: str
) -> AsyncGenerator[Editor]:
    """Start `antiphon acp` as editors do, and shake hands."""
    editor = Editor()
    async with spawn_agent_process(
        cast("Any", editor),
        command[0],
        *command[1:],
        "acp",
        *options,
        env=environ,
        transport_kwargs={"limit": 2**26},
        use_unstable_protocol=True,
    ) as (connection, process):
        assert isinstance(connection, ClientSideConnection)
        editor.agent, editor.process = connection, process
        async with asyncio.timeout(BOUND):
            started = await connection.initialize(protocol_version=PROTOCOL_VERSION)
        assert started.protocol_version == PROTOCOL_VERSION
        assert started.agent_capabilities is not None and started.agent_capabilities.load_session
        yield editor
