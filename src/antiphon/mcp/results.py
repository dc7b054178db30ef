"""Formats the answers of servers for the model: bounded text, images as images, and files in the workspace.

What a model cannot be shown, or only in part, is written to a file of the session's workspace, where its other tools
can open it. Files are named by their content, so that equal answers look the same.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import mimetypes
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import mcp_types

from antiphon.child_processes.text import clean_text
from antiphon.engine.toolbox import ToolOutput
from antiphon.errors import AntiphonError
from antiphon.messages import ImageBlock
from antiphon.workspace.command_output import cut_middle
from antiphon.workspace.files import MAX_IMAGE_BYTES, find_image_type

log = logging.getLogger(__name__)

MAX_RESULT_CHARACTERS = 30_000
MAX_IMAGES_PER_RESULT = 8
MAX_FILES_PER_RESULT = 16
MAX_FILE_BYTES = MAX_IMAGE_BYTES
MAX_URI_CHARACTERS = 2000
MAX_NAME_CHARACTERS, MAX_SUMMARY_CHARACTERS, MAX_TYPE_CHARACTERS = 200, 300, 100
MAX_LISTED_ITEMS = 200
MAX_LISTED_ARGUMENTS = 30
FILE_HASH_CHARACTERS = 16
UNKNOWN_SUFFIX = ".bin"
_SUFFIX_BY_IMAGE_TYPE = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
}
_SUFFIX_PATTERN = re.compile(r"\.[A-Za-z0-9]{1,8}\Z")
_TYPES = mimetypes.MimeTypes()  # those that Python knows, whatever the machine adds

KeepFile = Callable[[str, bytes], Awaitable[str]]
"""Keeps a file in the workspace of the session, under the end of its name, and returns its path."""
ContentBlock = (
    mcp_types.TextContent
    | mcp_types.ImageContent
    | mcp_types.AudioContent
    | mcp_types.ResourceLink
    | mcp_types.EmbeddedResource
)
ResourceContents = mcp_types.TextResourceContents | mcp_types.BlobResourceContents


class _ResultWriter:
    """Collects the parts of a result."""

    def __init__(self, keep_file: KeepFile | None) -> None:
        self._keep_file = keep_file
        self.texts: list[str] = []
        self.images: list[ImageBlock] = []
        self.paths: list[str] = []

    def add_text(self, text: str) -> None:
        if text:
            self.texts.append(text)

    async def add_data(self, data: str, mime_type: str | None, what: str, uri: str = "") -> None:
        """Add an image, a file, or a note in place of what can be neither."""
        content = _decode(data)
        image_type = find_image_type(content) if content else None
        kind = image_type or clean_text(mime_type or "unknown type", MAX_TYPE_CHARACTERS)
        size = len(data) * 3 // 4 if content is None else len(content)
        is_shown = image_type is not None and len(self.images) < MAX_IMAGES_PER_RESULT
        where = None
        if content:
            if image_type is not None and is_shown:
                self.images.append(ImageBlock(data=base64.b64encode(content).decode(), mime_type=image_type))
            where = await self._keep(content, _find_suffix(image_type, mime_type, uri))
        notes = [f"{what}: {kind}", f"{size} bytes"]
        if where is not None:
            notes.append(f"in the file {where}")
        elif not is_shown:
            notes.append("which cannot be shown")
        self.texts.append(f"[{', '.join(notes)}.]")

    async def _keep(self, content: bytes, suffix: str) -> str | None:
        """Keep the content in a file, and return its path, or None if it cannot be kept."""
        if (
            self._keep_file is None
            or len(self.paths) >= MAX_FILES_PER_RESULT
            or len(content) > MAX_FILE_BYTES
        ):
            return None
        name = hashlib.sha256(content).hexdigest()[:FILE_HASH_CHARACTERS] + suffix
        try:
            path = await self._keep_file(name, content)
        except (AntiphonError, OSError) as error:
            log.warning("A file in the result of an MCP server could not be kept: %s", error)
            return None
        if path not in self.paths:
            self.paths.append(path)
        return path

    async def build(self, *, is_error: bool = False, details: Any = None) -> ToolOutput:
        whole = "\n\n".join(self.texts) or "Done, without a result."
        shown = cut_middle(whole, MAX_RESULT_CHARACTERS)
        text = shown.text
        if not shown.is_whole:
            named = await self._describe_cut(whole)
            text = cut_middle(whole, MAX_RESULT_CHARACTERS - len(named)).text + named
        return ToolOutput(text=text, details=details, is_error=is_error, images=tuple(self.images))

    async def _describe_cut(self, whole: str) -> str:
        """Return a note with the file of the whole text, and the files whose names may have been cut out."""
        kept = list(self.paths)
        where = await self._keep(whole.encode(errors="replace"), ".txt")
        notes = [f"[The whole text is in the file {where}.]"] if where else []
        if kept:
            notes.append(f"[Files of this result: {', '.join(kept)}.]")
        return "".join(f"\n\n{note}" for note in notes)


def _decode(data: str) -> bytes | None:
    """Return the content of a base64 text; None if it is too large, or not base64."""
    if len(data) * 3 // 4 > MAX_FILE_BYTES + 2:
        return None
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None
    return content if len(content) <= MAX_FILE_BYTES else None


def _find_suffix(image_type: str | None, mime_type: str | None, uri: str) -> str:
    if image_type is not None:
        return _SUFFIX_BY_IMAGE_TYPE[image_type]
    plain = (mime_type or "").partition(";")[0].strip().lower()
    named = _SUFFIX_PATTERN.search(uri)
    return _TYPES.guess_extension(plain) or (named[0].lower() if named else UNKNOWN_SUFFIX)


async def render_tool_result(result: mcp_types.CallToolResult, keep_file: KeepFile | None) -> ToolOutput:
    writer = _ResultWriter(keep_file)
    for block in result.content:
        await _add_block(writer, block)
    structured: Any = result.structured_content
    if structured is not None and not writer.texts:
        writer.add_text(json.dumps(structured, ensure_ascii=False))
    return await writer.build(is_error=bool(result.is_error), details=structured)


async def render_contents(contents: Sequence[ResourceContents], keep_file: KeepFile | None) -> ToolOutput:
    """Return the contents of a resource."""
    writer = _ResultWriter(keep_file)
    for each in contents:
        await _add_contents(writer, each)
    return await writer.build()


async def render_prompt(prompt: mcp_types.GetPromptResult, keep_file: KeepFile | None) -> ToolOutput:
    """Return the messages of a prompt, each after the role that it is written for."""
    writer = _ResultWriter(keep_file)
    for message in prompt.messages:
        writer.add_text(f"{message.role}:")
        await _add_block(writer, message.content)
    return await writer.build()


async def render_resources(
    result: mcp_types.ListResourcesResult, templates: Sequence[mcp_types.ResourceTemplate]
) -> ToolOutput:
    """Return one page of a server's resources, and the templates of its resource addresses."""
    details: dict[str, Any] = {
        "resources": [
            {"uri": clean_text(str(each.uri), MAX_URI_CHARACTERS), **_describe(each, each.mime_type)}
            for each in result.resources[:MAX_LISTED_ITEMS]
        ]
    }
    if templates:
        details["templates"] = [
            {
                "uriTemplate": clean_text(each.uri_template, MAX_URI_CHARACTERS),
                **_describe(each, each.mime_type),
            }
            for each in templates[:MAX_LISTED_ITEMS]
        ]
    return await _render_page(details, result.next_cursor)


async def render_prompts(result: mcp_types.ListPromptsResult) -> ToolOutput:
    """Return one page of a server's prompts."""
    listed = [
        {
            **_describe(each, None),
            "name": clean_text(each.name, MAX_NAME_CHARACTERS),
            "arguments": [
                {
                    "name": clean_text(argument.name, MAX_NAME_CHARACTERS),
                    "required": argument.required is True,
                    **_describe_text(argument.description),
                }
                for argument in (each.arguments or ())[:MAX_LISTED_ARGUMENTS]
            ],
        }
        for each in result.prompts[:MAX_LISTED_ITEMS]
    ]
    return await _render_page({"prompts": listed}, result.next_cursor)


async def _render_page(details: dict[str, Any], next_cursor: str | None) -> ToolOutput:
    if next_cursor is not None:
        details["nextCursor"] = next_cursor
    writer = _ResultWriter(None)
    writer.add_text(json.dumps(details, ensure_ascii=False))
    return await writer.build(details=details)


def _describe(
    item: mcp_types.Resource | mcp_types.ResourceTemplate | mcp_types.Prompt, mime_type: str | None
) -> dict[str, Any]:
    return {
        "name": clean_text(item.title or item.name, MAX_NAME_CHARACTERS),
        **_describe_text(item.description),
        **({"mimeType": clean_text(mime_type, MAX_TYPE_CHARACTERS)} if mime_type else {}),
    }


def _describe_text(description: str | None) -> dict[str, str]:
    return {"description": clean_text(description, MAX_SUMMARY_CHARACTERS)} if description else {}


async def _add_block(writer: _ResultWriter, block: ContentBlock) -> None:
    match block:
        case mcp_types.TextContent():
            writer.add_text(block.text)
        case mcp_types.ImageContent():
            await writer.add_data(block.data, block.mime_type, "An image")
        case mcp_types.AudioContent():
            await writer.add_data(block.data, block.mime_type, "A sound")
        case mcp_types.ResourceLink():
            named = ", ".join(str(fact) for fact in _describe(block, block.mime_type).values())
            writer.add_text(f"[A resource: {clean_text(str(block.uri), MAX_URI_CHARACTERS)} ({named})]")
        case mcp_types.EmbeddedResource():
            await _add_contents(writer, block.resource)


async def _add_contents(writer: _ResultWriter, contents: ResourceContents) -> None:
    if isinstance(contents, mcp_types.TextResourceContents):
        writer.add_text(contents.text)
    else:
        await writer.add_data(contents.blob, contents.mime_type, "A file", str(contents.uri))
