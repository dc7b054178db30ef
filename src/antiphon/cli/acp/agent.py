"""The methods of the Agent Client Protocol, version 1: an editor's sessions are sessions of a gateway.

The id of a session is its key. The agent works in its own workspace, so the directory, files, terminals and MCP servers
of the editor are not used; a log record says so.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec

from antiphon import __version__
from antiphon.cli.acp.connection import Answer, EditorConnection, MethodNotFound
from antiphon.cli.acp.prompts import EditorPrompt, translate_prompt
from antiphon.cli.acp.session import EditorSession
from antiphon.client import Client
from antiphon.errors import AntiphonError, InvalidInput

log = logging.getLogger(__name__)

Json: TypeAlias = dict[str, Any]
T = TypeVar("T")

PROTOCOL_VERSION = 1
MAX_OPEN_SESSIONS = 64  # beyond, those that were used longest ago are closed until they are used again
LISTED_SESSIONS_PER_PAGE = 50
MAX_TITLE_CHARACTERS = 80
AGENT_CAPABILITIES: Json = {
    "loadSession": True,
    "promptCapabilities": {"image": True, "audio": False, "embeddedContext": True},
    "mcpCapabilities": {"http": False, "sse": False},
    "sessionCapabilities": {"list": {}, "resume": {}, "close": {}},
}


class _NewSessionParams(msgspec.Struct, rename="camel"):
    cwd: str | None = None
    mcp_servers: list[Any] | None = None


class _OpenSessionParams(_NewSessionParams, rename="camel", kw_only=True):
    session_id: str


class _SessionParams(msgspec.Struct, rename="camel"):
    session_id: str


class _PromptParams(msgspec.Struct, rename="camel"):
    session_id: str
    prompt: list[Any]


class _ListParams(msgspec.Struct, rename="camel"):
    cwd: str | None = None
    cursor: str | None = None


class EditorAgent:
    """Answers the requests of one editor. Close it after its connection has ended."""

    def __init__(
        self,
        make_client: Callable[[Callable[[str], None]], Client],
        *,
        agent_id: str | None,
        session_key: str | None,
        report: Callable[[AntiphonError], None],
        report_change: Callable[[str], None],
    ) -> None:
        """`make_client` raises if no gateway is found. `report_change` is called when it is lost or back."""
        self._make_client = make_client
        self._agent_id = agent_id
        self._session_key = session_key
        self._report = report
        self._report_change = report_change
        self._resources = AsyncExitStack()
        self._client: Client | None = None
        self._connection: EditorConnection | None = None
        self._sessions: OrderedDict[str, EditorSession] = OrderedDict()
        self._connecting, self._opening = asyncio.Lock(), asyncio.Lock()
        self._has_left = asyncio.Event()
        """Set when the editor is gone."""
        self._commands: list[Json] = []
        self._methods: Mapping[str, Callable[[object], Awaitable[Answer]]] = {
            "initialize": self._initialize,
            "authenticate": self._authenticate,
            "session/new": self._new_session,
            "session/load": self._load_session,
            "session/resume": self._resume_session,
            "session/close": self._close_session,
            "session/list": self._list_sessions,
            "session/prompt": self._prompt,
        }

    @property
    def has_reached_gateway(self) -> bool:
        return self._client is not None

    def attach(self, connection: EditorConnection) -> None:
        """Set the connection to the editor; the two need each other."""
        self._connection = connection

    async def close(self) -> None:
        """Close the sessions. Their runs continue."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
        await self._resources.aclose()

    # --- messages ---

    async def handle_request(self, method: str, params: object) -> Answer:
        handler = self._methods.get(method)
        if handler is None:
            raise MethodNotFound
        return await handler(params)

    def handle_notification(self, method: str, params: object) -> None:
        if method == "session/cancel":
            session = self._sessions.get(_convert(params, _SessionParams).session_id)
            if session is not None:
                session.cancel()

    def handle_end(self) -> None:
        self._has_left.set()

    # --- methods ---

    async def _initialize(self, _: object) -> Answer:
        await self._connect()
        return Answer(
            {
                "protocolVersion": PROTOCOL_VERSION,
                "agentCapabilities": AGENT_CAPABILITIES,
                "agentInfo": {"name": "antiphon", "title": "Antiphon", "version": __version__},
                "authMethods": [],
            }
        )

    async def _authenticate(self, _: object) -> Answer:
        return Answer({})

    async def _new_session(self, params: object) -> Answer:
        _note_unused(_convert(params, _NewSessionParams))
        client = await self._connect()
        if self._session_key is not None:
            key = (await client.open(self._session_key)).key
        else:
            wanted: Json = {"idempotencyKey": uuid.uuid4().hex}
            if self._agent_id is not None:
                wanted["agentId"] = self._agent_id
            key = (await client.call("sessions.create", wanted))["key"]
        async with self._opening:
            session = self._sessions.get(key) or await self._open(key, replays=False)
        return Answer({"sessionId": key}, then=lambda: self._begin(session))

    async def _load_session(self, params: object) -> Answer:
        return await self._reopen(params, replays=True)

    async def _resume_session(self, params: object) -> Answer:
        return await self._reopen(params, replays=False)

    async def _reopen(self, params: object, *, replays: bool) -> Answer:
        wanted = _convert(params, _OpenSessionParams)
        _note_unused(wanted)
        async with self._opening:
            session = await self._open(wanted.session_id, replays=replays)
        return Answer({}, then=lambda: self._begin(session))

    async def _close_session(self, params: object) -> Answer:
        session = self._sessions.pop(_convert(params, _SessionParams).session_id, None)
        if session is not None:
            await session.stop_turns()
            await session.close()
        return Answer({})

    async def _list_sessions(self, params: object) -> Answer:
        wanted = _convert(params, _ListParams)
        client = await self._connect()
        query: Json = {
            "limit": LISTED_SESSIONS_PER_PAGE,
            "agentId": self._agent_id,
            "cursor": wanted.cursor,
            "excludeSubagents": True,
            "includeLastMessage": True,
        }
        page = await client.call("sessions.list", {name: it for name, it in query.items() if it is not None})
        cwd = wanted.cwd or str(Path.cwd())  # the protocol requires a directory, and sessions have none
        found = [_describe_session(row, cwd) for row in page["sessions"] if _find_title(row)]
        return Answer(
            {"sessions": found, **({"nextCursor": page["nextCursor"]} if page["nextCursor"] else {})}
        )

    async def _prompt(self, params: object) -> Answer:
        wanted = _convert(params, _PromptParams)
        prompt = translate_prompt(wanted.prompt)
        session = self._sessions.get(wanted.session_id)
        if session is None:
            async with self._opening:
                session = self._sessions.get(wanted.session_id) or await self._open(
                    wanted.session_id, replays=False
                )
        self._sessions.move_to_end(wanted.session_id)
        may_be_command = await self._may_be_command(prompt)
        result = await session.prompt(prompt, may_be_command=may_be_command, has_left=self._has_left)
        return Answer(result)

    # --- sessions ---

    async def _open(self, session_id: str, *, replays: bool) -> EditorSession:
        """Open a session, closing it first if it is open, and replay its conversation if asked to."""
        assert self._connection is not None
        client = await self._connect()
        key = (await client.describe(session_id)).key
        if earlier := self._sessions.pop(session_id, None):
            if earlier.is_busy:
                self._sessions[session_id] = earlier
                raise InvalidInput(
                    f"Session {session_id!r} is answering a prompt.",
                    "Wait until the prompt is answered.",
                    field="sessionId",
                )
            await earlier.close()
        await self._close_idle_sessions()
        session = EditorSession(
            session_id, key, client=client, connection=self._connection, report=self._report
        )
        if replays:
            await session.replay()
        else:
            await session.skip_to_end()
        self._sessions[session_id] = session
        return session

    async def _close_idle_sessions(self) -> None:
        """Make room for one more session."""
        for session_id, session in list(self._sessions.items()):
            if len(self._sessions) < MAX_OPEN_SESSIONS:
                return
            if not session.is_busy:
                del self._sessions[session_id]
                await session.close()

    async def _begin(self, session: EditorSession) -> None:
        """Send the updates that the editor accepts only when it knows the session."""
        assert self._connection is not None
        try:
            update = {
                "sessionUpdate": "available_commands_update",
                "availableCommands": await self._list_commands(),
            }
            await self._connection.notify(
                "session/update", {"sessionId": session.session_id, "update": update}
            )
            session.follow()
        except AntiphonError as error:
            self._report(error)

    async def _list_commands(self) -> list[Json]:
        if not self._commands:
            client = await self._connect()
            self._commands = [
                {
                    "name": each["name"],
                    "description": each["description"],
                    **({"input": {"hint": "arguments"}} if each.get("acceptsArgs") else {}),
                }
                for each in (await client.call("commands.list"))["commands"]
            ]
        return self._commands

    async def _may_be_command(self, prompt: EditorPrompt) -> bool:
        """Whether a prompt is a command of the gateway, and not a text that looks like one."""
        if not prompt.is_plain_text or not prompt.text.startswith("/"):
            return False
        name = prompt.text[1:].split(maxsplit=1)[:1]
        return name in ([command["name"]] for command in await self._list_commands())

    # --- the gateway ---

    async def _connect(self) -> Client:
        """Return the client of the gateway. After the first connection, it reconnects by itself."""
        async with self._connecting:
            if self._client is None:
                client = self._make_client(self._handle_connection_change)
                self._client = await self._resources.enter_async_context(client)
            return self._client

    def _handle_connection_change(self, text: str) -> None:
        self._report_change(text)
        is_connected = self._client is not None and self._client.reconnect_deadline is None
        for session in self._sessions.values():
            if is_connected:
                session.handle_new_connection()
            else:
                session.handle_lost_connection()


def _convert(params: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(params, kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(
            f"The parameters are not valid: {error}.", "Correct them.", field="params"
        ) from None


def _note_unused(params: _NewSessionParams) -> None:
    log.info(
        "The directory %r and %d MCP servers of the editor are not used: the agent works in its own workspace.",
        params.cwd,
        len(params.mcp_servers or ()),
    )


def _find_title(row: Mapping[str, Any]) -> str | None:
    """Return the name of a session or its last message; None if nothing was said in it."""
    return row.get("displayName") or row.get("label") or row.get("lastMessagePreview")


def _describe_session(row: Mapping[str, Any], cwd: str) -> Json:
    title = " ".join(str(_find_title(row)).split())
    updated_at = datetime.fromtimestamp(row["updatedAt"] / 1000, UTC)
    return {
        "sessionId": row["key"],
        "cwd": cwd,
        "title": title if len(title) <= MAX_TITLE_CHARACTERS else f"{title[: MAX_TITLE_CHARACTERS - 1]}…",
        "updatedAt": updated_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
