"""Performs calls of offered tools: tools of the server, and requests for its resources and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from antiphon.engine.toolbox import ToolOutput
from antiphon.mcp import results
from antiphon.mcp.offers import Offer

if TYPE_CHECKING:
    from antiphon.mcp.session import ServerSession


async def perform_call(
    session: ServerSession,
    offer: Offer,
    arguments: Mapping[str, Any],
    *,
    key: str,
    timeout: float,
    keep_file: results.KeepFile | None,
) -> ToolOutput:
    """Make a call and return what the model reads. Raises the errors of the session."""
    cursor = arguments.get("cursor")
    cursor = cursor if isinstance(cursor, str) else None
    match offer.kind:
        case "tool":
            called = await session.call_tool(offer.tool.name, dict(arguments), key=key, timeout=timeout)
            return await results.render_tool_result(called, keep_file)
        case "resources_list":
            listed = await session.list_resources(cursor, key=key, timeout=timeout)
            templates = await session.list_templates(key=key) if cursor is None else ()
            return await results.render_resources(listed, templates)
        case "resources_read":
            read = await session.read_resource(str(arguments.get("uri")), key=key, timeout=timeout)
            return await results.render_contents(read.contents, keep_file)
        case "prompts_list":
            prompts = await session.list_prompts(cursor, key=key, timeout=timeout)
            return await results.render_prompts(prompts)
        case "prompts_get":
            prompt = await session.get_prompt(
                str(arguments.get("name")), _read_texts(arguments.get("arguments")), key=key, timeout=timeout
            )
            return await results.render_prompt(prompt, keep_file)


def _read_texts(given: object) -> dict[str, str]:
    """Return the arguments of a prompt, which the protocol passes as texts."""
    if not isinstance(given, dict):
        return {}
    return {str(name): str(value) for name, value in cast("dict[object, object]", given).items()}
