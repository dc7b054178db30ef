"""The interface for a program's use of its session's tools: opened when it starts, closed when it ends.

The implementation is above this package: the gateway serves the tools over MCP (`gateway/program_tools.py`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from antiphon.runtimes.turns import TurnIdentity


class ProgramConnection(msgspec.Struct, frozen=True, kw_only=True):
    """How a program can be reached, and whether it still runs."""

    is_alive: Callable[[], bool]
    has_http: bool
    """Whether it connects to MCP servers over HTTP, not only to those that it starts."""
    keeps_headers_private: bool
    """Whether it can be told a secret as a header; some programs pass headers on as arguments of a process."""
    is_sandboxed: bool
    listener: asyncio.Future[socket.socket] | None
    """The socket that it opens in its sandbox, if it can."""


class OfferedTools(Protocol):
    """The tools of one session, for its program alone. They can be called during its turns."""

    @property
    def server(self) -> dict[str, Any]:
        """The MCP server that the program is told to use, as ACP describes it."""
        ...

    def begin_turn(self, identity: TurnIdentity) -> None: ...

    async def end_turn(self) -> None:
        """End the calls that still wait."""
        ...

    async def close(self) -> None: ...


class SessionToolServer(Protocol):
    async def open(self, identity: TurnIdentity, connection: ProgramConnection) -> OfferedTools | None:
        """Offer a program the tools of its session; None if there are none, or no way to reach them."""
        ...
