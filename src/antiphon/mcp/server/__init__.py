"""The MCP server: offers tools and resources of a `Provider` to MCP clients.

`protocol` speaks MCP over HTTP, `stdio` carries it to programs that start a command. What is offered to whom is decided
by the gateway (`gateway/mcp.py`). This module imports nothing of MCP, so that a gateway can name these types for free.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from antiphon.engine.toolbox import Tool, ToolOutput

SESSION_KEY_HEADER = "x-antiphon-session-key"
"""Names the session that a request acts as, percent-encoded once."""

ReportProgress = Callable[[float, float, str], Awaitable[None]]
"""Reports progress to the client: seconds waited, seconds asked for, and a sentence."""


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource in a list."""

    uri: str
    name: str
    title: str
    description: str
    media_type: str = "application/json"
    last_modified: str | None = None
    """ISO 8601."""


class ResourcePage(msgspec.Struct, frozen=True):
    resources: Sequence[Resource]
    next_cursor: str | None = None


class Provider(Protocol):
    """Offers tools and resources to one caller. An `AntiphonError` becomes an error of the protocol."""

    instructions: str
    resource_template: Resource
    """Its `uri` is a template of RFC 6570."""

    async def list_tools(self) -> Sequence[Tool]: ...

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], report_progress: ReportProgress | None
    ) -> ToolOutput:
        """Call a tool. Without `report_progress` the client expects the answer soon."""
        ...

    async def list_resources(self, cursor: str | None) -> ResourcePage: ...

    async def read_resource(self, uri: str) -> str: ...
