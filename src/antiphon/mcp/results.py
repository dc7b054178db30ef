"""Formats the answers of servers for the model: bounded text, and images as images."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

import mcp_types

from antiphon.child_processes.text import clean_text
from antiphon.engine.toolbox import ToolOutput
from antiphon.messages import ImageBlock
from antiphon.workspace.command_output import cut_middle
from antiphon.workspace.files import MAX_IMAGE_BYTES, find_image_type

MAX_RESULT_CHARACTERS = 30_000
MAX_IMAGES_PER_RESULT = 8
MAX_URI_CHARACTERS = 2000
MAX_LISTED_RESOURCES = 200


class _ResultWriter:
    """Collects the parts of a result."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.images: list[ImageBlock] = []

    def add_text(self, text: str) -> None:
        if text:
            self.texts.append(text)

    def add_data(self, data: str, mime_type: str | None, what: str) -> None:
        """Add an image, or a note in place of what a model cannot be shown."""
        kind = clean_text(mime_type or "unknown type", 100)
        size = len(data) * 3 // 4
        if size <= MAX_IMAGE_BYTES and len(self.images) < MAX_IMAGES_PER_RESULT:
            try:
                content = base64.b64decode(data, validate=True)
            except (binascii.Error, ValueError):
                content = b""
            if found := find_image_type(content):
                self.images.append(ImageBlock(data=base64.b64encode(content).decode(), mime_type=found))
                self.texts.append(f"[An image: {found}, {len(content)} bytes.]")
                return
        self.texts.append(f"[{what}: {kind}, {size} bytes, which cannot be shown.]")

    def build(self, *, is_error: bool = False, details: Any = None) -> ToolOutput:
        text = cut_middle("\n\n".join(self.texts) or "Done, without a result.", MAX_RESULT_CHARACTERS).text
        return ToolOutput(text=text, details=details, is_error=is_error, images=tuple(self.images))


def render_tool_result(result: mcp_types.CallToolResult) -> ToolOutput:
    writer = _ResultWriter()
    for block in result.content:
        match block:
            case mcp_types.TextContent():
                writer.add_text(block.text)
            case mcp_types.ImageContent():
                writer.add_data(block.data, block.mime_type, "An image")
            case mcp_types.AudioContent():
                writer.add_data(block.data, block.mime_type, "A sound")
            case mcp_types.ResourceLink():
                writer.add_text(f"[A resource: {clean_text(str(block.uri), MAX_URI_CHARACTERS)}]")
            case mcp_types.EmbeddedResource():
                _add_contents(writer, block.resource)
    structured: Any = result.structured_content
    if structured is not None and not writer.texts:
        writer.add_text(json.dumps(structured, ensure_ascii=False))
    return writer.build(is_error=bool(result.is_error), details=structured)


def render_contents(
    contents: Sequence[mcp_types.TextResourceContents | mcp_types.BlobResourceContents],
) -> ToolOutput:
    """Return the contents of a resource."""
    writer = _ResultWriter()
    for each in contents:
        _add_contents(writer, each)
    return writer.build()


def render_resources(result: mcp_types.ListResourcesResult) -> ToolOutput:
    """Return one page of a server's resources."""
    listed = [
        {
            "uri": clean_text(str(resource.uri), MAX_URI_CHARACTERS),
            "name": clean_text(resource.title or resource.name, 200),
            **({"description": clean_text(resource.description, 300)} if resource.description else {}),
            **({"mimeType": clean_text(resource.mime_type, 100)} if resource.mime_type else {}),
        }
        for resource in result.resources[:MAX_LISTED_RESOURCES]
    ]
    details: dict[str, Any] = {"resources": listed}
    if result.next_cursor is not None:
        details["nextCursor"] = result.next_cursor
    writer = _ResultWriter()
    writer.add_text(json.dumps(details, ensure_ascii=False))
    return writer.build(details=details)


def _add_contents(
    writer: _ResultWriter, contents: mcp_types.TextResourceContents | mcp_types.BlobResourceContents
) -> None:
    if isinstance(contents, mcp_types.TextResourceContents):
        writer.add_text(contents.text)
    else:
        writer.add_data(contents.blob, contents.mime_type, "A file")
