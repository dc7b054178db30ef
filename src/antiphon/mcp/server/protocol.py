"""Speaks MCP for a `Provider`: builds a server for one caller, and serves one HTTP request with it.

Both generations of the specification are served without sessions, so any replica can answer any request: 2026-07-28 has
none, and in 2025-11-25 they are optional. A server is built for each request, so that the caller is an argument and
nothing is left behind when the request ends.

Importing this takes most of a second: do it on first use, in a thread.
"""

from __future__ import annotations

import logging
from typing import Any

import mcp_types as types
import msgspec
from mcp.server.caching import CacheableMethod, CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_PROTOCOL_VERSION_HEADER
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from antiphon import __version__
from antiphon.engine.toolbox import Tool, ToolOutput
from antiphon.errors import AntiphonError, NotFound
from antiphon.mcp.server import Provider, ReportProgress, Resource

logging.getLogger("mcp.server").setLevel(logging.WARNING)  # it reports every request at level info

Context = ServerRequestContext[Any]

RESOURCE_NOT_FOUND_CODE = -32002  # until 2025-11-25; later versions use -32602
SESSION_NOT_FOUND_CODE = -32001
LIST_TTL_MS = 60_000  # for clients to keep a list of tools
CACHE_HINTS: dict[CacheableMethod, CacheHint] = {
    "server/discover": CacheHint(LIST_TTL_MS, "private"),
    "tools/list": CacheHint(LIST_TTL_MS, "private"),
    "resources/templates/list": CacheHint(LIST_TTL_MS, "private"),
}
"""Private, because tokens and sessions are offered different tools."""


def build_server(provider: Provider) -> Server[Any]:
    """Return a server that offers what the provider has."""

    async def list_tools(context: Context, params: object) -> types.ListToolsResult:
        try:
            return types.ListToolsResult(tools=[_describe_tool(tool) for tool in await provider.list_tools()])
        except AntiphonError as error:
            raise _build_protocol_error(context, error) from error

    async def call_tool(context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            output = await provider.call_tool(
                params.name, params.arguments or {}, _find_progress_report(context)
            )
        except AntiphonError as error:
            raise _build_protocol_error(context, error) from error
        return _build_tool_result(output)

    async def list_resources(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        try:
            page = await provider.list_resources(params.cursor if params else None)
        except AntiphonError as error:
            raise _build_protocol_error(context, error) from error
        return types.ListResourcesResult(
            resources=[_describe_resource(resource) for resource in page.resources],
            next_cursor=page.next_cursor,
        )

    async def list_templates(context: Context, params: object) -> types.ListResourceTemplatesResult:
        template = _describe_template(provider.resource_template)
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def read_resource(
        context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        uri = str(params.uri)
        try:
            text = await provider.read_resource(uri)
        except AntiphonError as error:
            raise _build_protocol_error(context, error, uri) from error
        media_type = provider.resource_template.media_type
        contents = types.TextResourceContents(uri=uri, mime_type=media_type, text=text)
        return types.ReadResourceResult(contents=[contents])

    return Server(
        "antiphon",
        version=__version__,
        title="Antiphon",
        instructions=provider.instructions,
        cache_hints=CACHE_HINTS,
        get_tool_input_schema=_skip_header_schema,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )


async def serve_request(server: Server[Any], body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one POST whose body has been read. Its handler is cancelled when the client disconnects."""
    # The HTTP parser keeps spaces at the end of a header, and the library compares headers with the body.
    scope = {**scope, "headers": [(name, value.strip(b" \t")) for name, value in scope["headers"]]}
    if _has_session_id(Headers(scope=scope)):
        await _build_session_missing_response()(scope, receive, send)
        return
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    manager = StreamableHTTPSessionManager(
        server, stateless=True, max_request_body_size=max(1, len(body)), session_idle_timeout=None
    )
    async with manager.run():
        await manager.handle_request(scope, receive_again, send)


def _has_session_id(headers: Headers) -> bool:
    """Whether the client names an MCP session. This server opens none, so another server did."""
    version = headers.get(MCP_PROTOCOL_VERSION_HEADER)
    is_handshake_era = version is None or version in HANDSHAKE_PROTOCOL_VERSIONS
    return is_handshake_era and "mcp-session-id" in headers


def _build_session_missing_response() -> Response:
    error = {"code": SESSION_NOT_FOUND_CODE, "message": "Session not found. Initialize again."}
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": error})
    return Response(body, 404, media_type="application/json")


def _skip_header_schema(name: str) -> None:
    """Return no schema, since no argument is repeated in a header. Otherwise each call would first list the tools."""


def _find_progress_report(context: Context) -> ReportProgress | None:
    if not context.meta or context.meta.get("progress_token") is None:
        return None
    return context.session.report_progress


def _build_protocol_error(context: Context, error: AntiphonError, uri: str | None = None) -> MCPError:
    if error.who != "caller":
        return MCPError(types.INTERNAL_ERROR, str(error))
    is_missing_resource = isinstance(error, NotFound) and context.method == "resources/read"
    if is_missing_resource:
        is_modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        code = types.INVALID_PARAMS if is_modern else RESOURCE_NOT_FOUND_CODE
        return MCPError(code, str(error), data=None if uri is None else {"uri": uri})
    return MCPError(types.INVALID_PARAMS, str(error))


def _describe_tool(tool: Tool) -> types.Tool:
    return types.Tool(
        name=tool.spec.name,
        description=tool.spec.description,
        input_schema=dict(tool.spec.parameters),
        annotations=types.ToolAnnotations(
            read_only_hint=not tool.has_side_effects,
            destructive_hint=tool.is_destructive,
            open_world_hint=False,
        ),
    )


def _build_tool_result(output: ToolOutput) -> types.CallToolResult:
    """Build a result whose text is the JSON of its structured content, byte for byte."""
    details = output.details
    text = output.text
    if not isinstance(details, dict):
        details = {"status": "error", "error": text} if output.is_error else {"text": text}
        text = msgspec.json.encode(details).decode()
    return types.CallToolResult(
        content=[types.TextContent(text=text)], structured_content=details, is_error=output.is_error
    )


def _describe_resource(resource: Resource) -> types.Resource:
    annotations = types.Annotations(last_modified=resource.last_modified) if resource.last_modified else None
    return types.Resource(
        uri=resource.uri,
        name=resource.name,
        title=resource.title,
        description=resource.description,
        mime_type=resource.media_type,
        annotations=annotations,
    )


def _describe_template(template: Resource) -> types.ResourceTemplate:
    return types.ResourceTemplate(
        uri_template=template.uri,
        name=template.name,
        title=template.title,
        description=template.description,
        mime_type=template.media_type,
    )
