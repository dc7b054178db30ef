"""Converts parts of a transcript into updates of the protocol. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec

from antiphon.bus import ToolPhase
from antiphon.cli._output import clean_line, format_tool_calls
from antiphon.operations.types import ApprovalView
from antiphon.runtimes.text import cut_middle

Json: TypeAlias = dict[str, Any]
ChunkKind = Literal["user_message_chunk", "agent_message_chunk", "agent_thought_chunk"]

MAX_RESULT_CHARACTERS = 20_000  # of a tool's result, its beginning and its end
MAX_TITLE_CHARACTERS = (
    200  # of a call; its arguments, or the content of one that waits for a person, are whole
)
MAX_ARGUMENT_BYTES = 16 * 1024  # of a tool's arguments; longer ones are only in the title, cut
_TOOL_KINDS = frozenset(
    {"read", "edit", "delete", "move", "search", "execute", "think", "fetch", "switch_mode"}
)
"""Kinds of the protocol. Programs that are agents use them as the names of their tools."""
_KIND_BY_TOOL = {
    "write": "edit",
    "apply_patch": "edit",
    "exec": "execute",
    "process": "execute",
    "web_fetch": "fetch",
    "web_search": "search",
    "sessions_search": "search",
    "memory_search": "search",
    "memory_get": "read",
    "sessions_history": "read",
    "sessions_list": "read",
    "session_status": "read",
    "agents_list": "read",
    "image": "read",
}


def build_chunk(kind: ChunkKind, content: Json, message_id: str) -> Json:
    return {"sessionUpdate": kind, "content": content, "messageId": message_id}


def build_text_chunk(kind: ChunkKind, text: str, message_id: str) -> Json:
    return build_chunk(kind, {"type": "text", "text": text}, message_id)


def get_tool_kind(name: str) -> str:
    return name if name in _TOOL_KINDS else _KIND_BY_TOOL.get(name, "other")


def get_call_id(run_id: str | None, call_id: object) -> str:
    """Return an id that is unique in the session. The ids of models are unique only within a turn."""
    return f"{run_id}:{call_id}" if run_id else str(call_id)


def describe_call(block: Mapping[str, Any]) -> Json:
    """Return the fields of an update that describe a call."""
    arguments = block.get("arguments")
    fields: Json = {"title": _format_title(block), "kind": get_tool_kind(str(block.get("name")))}
    if len(msgspec.json.encode(arguments)) <= MAX_ARGUMENT_BYTES:
        fields["rawInput"] = arguments
    return fields


def _format_title(block: Mapping[str, Any]) -> str:
    match block:
        case {"name": "exec", "arguments": {"command": str(command)}}:
            title = command
        case {"arguments": {"title": str(title)}}:  # of a program that is the agent
            pass
        case {"name": str(name), "arguments": {"path": str(target)} | {"url": str(target)}}:
            title = f"{name} {target}"
        case _:
            [title] = format_tool_calls({"content": [{**block, "type": "toolCall"}]})
    return _clip_title(title)


def _clip_title(title: str) -> str:
    line = clean_line(title)
    return line if len(line) <= MAX_TITLE_CHARACTERS else f"{line[: MAX_TITLE_CHARACTERS - 1]}…"


def describe_result(entry: Mapping[str, Any]) -> Json:
    """Return the fields of an update that show the result of a call."""
    text = "\n".join(_render_block(block) for block in get_blocks(entry))
    return {
        "status": "failed" if entry.get("isError") else "completed",
        "content": build_tool_content(text) if text.strip() else [],
    }


def describe_phase(event: ToolPhase) -> Json:
    """Return the fields of an update that show the progress of a call."""
    match event.phase:
        case "start":
            return {"status": "in_progress"}
        case "update":
            return {"status": "in_progress", "content": build_tool_content(event.output)}
        case _:
            return {"status": "failed" if event.is_error else "completed"}


def describe_waiting_call(approval: ApprovalView, call_id: str | None) -> Json:
    """Return the call that a person is asked about. A call that the editor does not know yet gets a new id."""
    call = approval.text if approval.tool == "exec" else f"{approval.tool} {approval.text}"
    return {
        "toolCallId": call_id or f"approval:{approval.id}",
        "title": _clip_title(" ".join(call.split())),
        "kind": get_tool_kind(approval.tool.rpartition(":")[2]),
        "status": "pending",
        "content": build_tool_content(approval.text),
    }


def build_tool_content(text: str) -> list[Json]:
    return [{"type": "content", "content": {"type": "text", "text": cut_middle(text, MAX_RESULT_CHARACTERS)}}]


def build_user_chunks(entry: Mapping[str, Any], speaker: str | None) -> list[Json]:
    """Return a message to the session; one that no person typed here begins with its speaker."""
    message_id = get_message_id(entry)
    prefix = f"[{speaker}] " if speaker else ""
    chunks: list[Json] = []
    for block in get_blocks(entry):
        match block:
            case {"type": "text", "text": str(text)} if text:
                chunks.append(build_text_chunk("user_message_chunk", f"{prefix}{text}", message_id))
                prefix = ""
            case {"type": "image", "data": str(data), "mimeType": str(mime_type)}:
                image = {"type": "image", "data": data, "mimeType": mime_type}
                chunks.append(build_chunk("user_message_chunk", image, message_id))
            case _:
                pass
    return chunks


def build_answer_chunks(entry: Mapping[str, Any], speaker: str | None) -> list[Json]:
    """Return the thoughts and the text of an answer."""
    message_id = get_message_id(entry)
    thought, text = join_blocks(entry, "thinking"), join_blocks(entry, "text")
    chunks: list[Json] = []
    if thought.strip():
        chunks.append(build_text_chunk("agent_thought_chunk", thought, f"{message_id}:thought"))
    if text.strip():
        shown = f"[{speaker}] {text}" if speaker else text
        chunks.append(build_text_chunk("agent_message_chunk", shown, message_id))
    elif isinstance(error := entry.get("errorMessage"), str) and error:
        chunks.append(build_text_chunk("agent_message_chunk", f"({error})", message_id))
    return chunks


def get_message_id(entry: Mapping[str, Any]) -> str:
    return str(entry.get("id") or entry.get("runId") or "message")


def get_blocks(entry: Mapping[str, Any]) -> Sequence[Json]:
    """Return the content of an entry as blocks. An import may hold anything."""
    content: Any = entry.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    found = cast("list[object]", content) if isinstance(content, list) else []
    return [cast("Json", block) for block in found if isinstance(block, dict)]


def get_tool_calls(entry: Mapping[str, Any]) -> list[Json]:
    return [block for block in get_blocks(entry) if block.get("type") == "toolCall"]


def join_blocks(entry: Mapping[str, Any], kind: Literal["text", "thinking"]) -> str:
    """Return the text of all blocks of one kind."""
    texts = (block.get(kind) for block in get_blocks(entry) if block.get("type") == kind)
    return "".join(text for text in texts if isinstance(text, str))


def _render_block(block: Mapping[str, Any]) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            return f"[{block.get('type')}]"
