"""The method that shows the state of the MCP servers."""

from __future__ import annotations

from typing import Any

from antiphon.access import READ_SCOPE
from antiphon.gateway.methods.registry import MethodCall, rpc_method
from antiphon.gateway.ws.frames import Params


class McpStatusParams(Params, frozen=True):
    pass


@rpc_method("mcp.status", READ_SCOPE, McpStatusParams)
async def get_mcp_status(call: MethodCall, params: McpStatusParams) -> dict[str, Any]:
    """List the configured MCP servers with the state of each and the last time it answered."""
    servers = call.gateway.app.mcp_servers
    if servers is not None:
        return {"servers": servers.describe()}
    config = call.gateway.app.config
    if not config.list_mcp_servers():
        return {"servers": []}
    from antiphon.mcp.listings import describe_disabled_servers  # noqa: PLC0415 - most gateways have no servers

    return {"servers": describe_disabled_servers(config)}
