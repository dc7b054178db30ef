"""Turns what servers list into tools of agents: their names, and which are offered."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from antiphon.config.mcp import McpServerConfig
from antiphon.mcp.listings import ListedTool, Listing
from antiphon.tool_selection import MCP_TOOL_PREFIX

MAX_OFFERED_NAME_CHARACTERS = 64
NAME_HASH_CHARACTERS = 8
_UNUSABLE_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]")

OfferKind = Literal["tool", "resources_list", "resources_read", "prompts_list", "prompts_get"]


class Offer(NamedTuple):
    """A tool of a server under the name that models call it by."""

    name: str
    server: str
    tool: ListedTool
    kind: OfferKind = "tool"


def build_prefix(server: str) -> str:
    """Return the prefix of the names of a server's tools."""
    return f"{MCP_TOOL_PREFIX}{_UNUSABLE_CHARACTERS.sub('_', server)}__"


def list_offers(servers: Mapping[str, McpServerConfig], listings: Mapping[str, Listing]) -> list[Offer]:
    """Return the tools to offer, each under a unique name."""
    found: list[tuple[str, ListedTool, OfferKind]] = [
        (server, tool, kind)
        for server, config in servers.items()
        if server in listings
        for tool, kind in _list_tools(listings[server])
        if config.offers(tool.name)
    ]
    taken = Counter(_build_name(server, tool.name) for server, tool, _ in found)
    offers: dict[str, Offer] = {}
    for server, tool, kind in found:
        name = _build_name(server, tool.name)
        is_exact = name == f"{MCP_TOOL_PREFIX}{server}__{tool.name}"
        if len(name) > MAX_OFFERED_NAME_CHARACTERS or (taken[name] > 1 and not is_exact) or name in offers:
            name = _cut_name(name, server, tool.name)
        offers.setdefault(name, Offer(name, server, tool, kind))
    return list(offers.values())


def _build_name(server: str, tool: str) -> str:
    return build_prefix(server) + _UNUSABLE_CHARACTERS.sub("_", tool)


def _cut_name(name: str, server: str, tool: str) -> str:
    digest = hashlib.sha256(f"{server}\0{tool}".encode(errors="replace")).hexdigest()[:NAME_HASH_CHARACTERS]
    return f"{name[: MAX_OFFERED_NAME_CHARACTERS - NAME_HASH_CHARACTERS - 1]}_{digest}"


def _list_tools(listing: Listing) -> Iterator[tuple[ListedTool, OfferKind]]:
    """Yield the tools of a server and, if it has resources or prompts, those to list and read them."""
    names = {tool.name for tool in listing.tools}
    for tool in listing.tools:
        yield tool, "tool"
    added = (
        *(_RESOURCE_TOOLS if listing.has_resources else ()),
        *(_PROMPT_TOOLS if listing.has_prompts else ()),
    )
    for tool, kind in added:
        if tool.name not in names:
            yield tool, kind


def _describe_request(
    kind: OfferKind, description: str, required: Sequence[str] = (), **properties: Mapping[str, Any]
) -> tuple[ListedTool, OfferKind]:
    """Return a tool that requests resources or prompts from a server."""
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        parameters["required"] = list(required)
    tool = ListedTool(
        name=kind, description=description, parameters=parameters, only_reads=True, is_idempotent=True
    )
    return tool, kind


_CURSOR = {"type": "string", "description": "The nextCursor of the previous page."}
_RESOURCE_TOOLS = (
    _describe_request(
        "resources_list", "List the resources of this server, such as files and records.", cursor=_CURSOR
    ),
    _describe_request(
        "resources_read",
        "Read a resource of this server.",
        ("uri",),
        uri={
            "type": "string",
            "description": "The address of the resource, as it is listed or made from a template.",
        },
    ),
)
_PROMPT_TOOLS = (
    _describe_request(
        "prompts_list", "List the prompts of this server: texts prepared for certain tasks.", cursor=_CURSOR
    ),
    _describe_request(
        "prompts_get",
        "Read a prompt of this server.",
        ("name",),
        name={"type": "string", "description": "The name of the prompt, as it is listed."},
        arguments={
            "type": "object",
            "description": "The arguments that the prompt has, as texts.",
            "additionalProperties": {"type": "string"},
        },
    ),
)
