"""Assembles the answer of a chat completion from its event stream: bytes to events, chunks and blocks.

Chunks are decoded into typed structs; unknown fields are ignored. Sizes are limited by `http_reader`. The reader
judges whether the result is a valid answer, and its cost is computed elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from antiphon.messages import TextBlock, ThinkingBlock, ToolCall
from antiphon.runtimes import Deltas
from antiphon.runtimes.http_reader import AnswerMeter
from antiphon.runtimes.text import repair_surrogates
from antiphon.runtimes.tool_calls import MAX_KEPT_TOOL_CALLS, build_tool_call, is_too_deep

THINKING_FIELDS = ("reasoning", "reasoning_content")
"""Fields in which servers send thinking, in the order they are checked."""
THINKING_TAGS = ("<think>", "</think>")
"""Tags that models write around their thinking if the server does not remove it."""

MAX_ANSWER_ID_CHARACTERS = 256
"""Characters kept of the provider's id for its answer; its support asks for that id."""

_Json = dict[str, Any]


class UnreadableStream(Exception):
    """The stream is malformed; the text says why."""


class EventStreamParser:
    """Extracts the data of server-sent events from arbitrarily split pieces."""

    def __init__(self) -> None:
        self.has_events = False
        self._rest = bytearray()
        self._data: list[bytearray] = []

    def feed(self, piece: bytes) -> Sequence[bytes]:
        """The data of the events that this piece completes."""
        end = len(piece) - 2
        if (
            end > len(b"data: ")
            and not (self._rest or self._data)
            and piece.startswith(b"data: ")
            and piece.find(b"\n") == end
            and piece.endswith(b"\n\n")
            and b"\r" not in piece
        ):
            self.has_events = True
            return (piece[6:end],)  # nearly every piece is one event of one line
        self._rest += piece
        if b"\n" not in piece:
            return ()
        *lines, self._rest = self._rest.split(b"\n")
        return [event for line in lines if (event := self._complete_event(line))]

    def _complete_event(self, line: bytearray) -> bytes | None:
        """The event completed by this line, if any."""
        text = line.removesuffix(b"\r")
        if text.startswith(b"data:"):
            self._data.append(text[5:].removeprefix(b" "))
        if text or not self._data:
            return None
        data, self._data = b"\n".join(self._data), []
        self.has_events = True
        return data


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | _Json | None = None


class _CallDelta(msgspec.Struct):
    index: int | None = None
    id: str | int | None = None
    function: _Function | None = None
    extra_content: Any = None


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class CompletionChunk(msgspec.Struct):
    id: str | int | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Json | None = None
    service_tier: str | None = None
    error: Any = None


_CHUNK_DECODER = msgspec.json.Decoder(CompletionChunk)


def decode_chunk(data: bytes) -> CompletionChunk:
    try:
        return _CHUNK_DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decode_split_chunk(data)


def _decode_split_chunk(data: bytes) -> CompletionChunk:
    """Decodes a chunk that ends in half a surrogate pair, which msgspec rejects."""
    try:
        return msgspec.convert(json.loads(data), CompletionChunk)
    except (ValueError, RecursionError):
        raise UnreadableStream("a piece of the stream could not be read") from None


class _AnswerPart(msgspec.Struct, eq=False):
    """A block of the answer while it grows. `source` is the field it comes from, `tags` or `call`."""

    source: str
    pieces: list[str] = msgspec.field(default_factory=list[str])
    arguments: _Json | None = None
    """Arguments of a call whose server sends them as an object rather than text."""
    names: list[str] = msgspec.field(default_factory=list[str])
    id: str = ""
    extra: Any = None

    @property
    def name(self) -> str:
        return "".join(self.names)

    @property
    def text(self) -> str:
        return repair_surrogates("".join(self.pieces))


class CompletionAnswer:
    """The answer received so far."""

    def __init__(self, deltas: Deltas, meter: AnswerMeter) -> None:
        self._deltas = deltas
        self._meter = meter
        self._parts: list[_AnswerPart] = []
        self._calls: dict[int, _AnswerPart] = {}
        self._tagged: _AnswerPart | None = None
        self._refusals: list[str] = []
        self.ended = False
        self.id = self.model = self.tier = self.finish = ""
        self.usage: _Json | None = None

    @property
    def has_text(self) -> bool:
        return any(part.source == "content" for part in self._parts)

    @property
    def refusal(self) -> str:
        return "".join(self._refusals)

    @property
    def native(self) -> _Json | None:
        return _drop_empty(id=self.id, details=_drop_empty(service_tier=self.tier, refusal=self.refusal))

    def add_chunk(self, chunk: CompletionChunk) -> None:
        self.id = str(chunk.id or self.id)[:MAX_ANSWER_ID_CHARACTERS]
        self.model = chunk.model or self.model
        self.tier = chunk.service_tier or self.tier
        # The last report counts: some servers report cumulative usage with every chunk.
        self.usage = chunk.usage or self.usage
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        self.finish = choice.finish_reason or self.finish
        delta = choice.delta
        if delta is None:
            return
        if delta.refusal:
            self._meter.add(delta.refusal)
            self._refusals.append(delta.refusal)
            return
        self._add_thinking(delta)
        self._add_content(delta.content)
        for call in delta.tool_calls or ():
            self._add_call(call)

    def add_refusal_as_text(self) -> None:
        self._deltas.text(self.refusal)
        self._get_growing_part("content").pieces.append(self.refusal)

    def build_blocks(self, taken: set[str]) -> list[TextBlock | ThinkingBlock | ToolCall]:
        """The answer's blocks, with at most `MAX_KEPT_TOOL_CALLS` calls. `taken` are call ids already in use."""
        content: list[TextBlock | ThinkingBlock | ToolCall] = []
        calls = 0
        for part in self._parts:
            if part.source == "content":
                content.append(TextBlock(text=part.text))
            elif part.source != "call":
                origin = "content" if part.source == "tags" else part.source
                content.append(ThinkingBlock(thinking=part.text, native={"id": origin}))
            elif part.names and (calls := calls + 1) <= MAX_KEPT_TOOL_CALLS:
                native = {"details": {"extra_content": part.extra}} if part.extra else None
                written = part.text if part.arguments is None else part.arguments
                content.append(build_tool_call(part.id, part.name, written, native=native, taken=taken))
        return content

    def _get_growing_part(self, source: str) -> _AnswerPart:
        """The block that a piece from `source` extends: the last one, or a new one if that has another source."""
        if not self._parts or self._parts[-1].source != source:
            return self._begin_part(source)
        return self._parts[-1]

    def _begin_part(self, source: str) -> _AnswerPart:
        if source == "call":
            self._meter.begin_call()
        else:
            self._meter.begin_block()
        self._parts.append(_AnswerPart(source))
        return self._parts[-1]

    def _add_thinking(self, delta: _Delta) -> None:
        if not (delta.reasoning or delta.reasoning_content):
            return
        for name, piece in zip(THINKING_FIELDS, (delta.reasoning, delta.reasoning_content), strict=True):
            if piece and isinstance(piece, str):
                self._meter.add(piece)
                self._get_growing_part(name).pieces.append(piece)
                self._deltas.thinking(piece)
                return

    def _add_content(self, content: str | list[Any] | None) -> None:
        piece = content if isinstance(content, str) else _join_text_parts(content)
        if not piece:
            return
        self._meter.add(piece)
        if self._tagged is not None:
            if piece == THINKING_TAGS[1]:
                self._tagged = None
            else:
                self._tagged.pieces.append(piece)
                self._deltas.thinking(piece)
        elif piece == THINKING_TAGS[0]:
            self._tagged = self._begin_part("tags")
        else:
            self._get_growing_part("content").pieces.append(piece)
            self._deltas.text(piece)

    def _add_call(self, delta: _CallDelta) -> None:
        function = delta.function or _Function()
        part = self._get_call_part(delta.index, function.name)
        if function.name:
            self._meter.add(function.name)
            part.names.append(function.name)
        if delta.id:
            part.id = str(delta.id)
            self._meter.add(part.id)
        if delta.extra_content and not is_too_deep(delta.extra_content):
            part.extra = delta.extra_content
        if isinstance(function.arguments, str):
            self._meter.add_arguments(function.arguments)
            part.pieces.append(function.arguments)
        elif function.arguments:
            self._meter.add_arguments(str(function.arguments))
            part.arguments = function.arguments

    def _get_call_part(self, index: int | None, name: str | None) -> _AnswerPart:
        """The part of a tool call. Some servers do not number calls; then a name starts the next one."""
        if index is None and not name and self._parts and self._parts[-1].source == "call":
            return self._parts[-1]
        if index is None or index not in self._calls:
            begun = self._begin_part("call")
            if index is None:
                return begun
            self._calls[index] = begun
        return self._calls[index]


def _join_text_parts(content: list[Any] | None) -> str:
    """Joins text that some servers stream as a list of parts."""
    parts = (
        cast(_Json, part) if isinstance(part, dict) else {"type": "text", "text": part}
        for part in content or ()
    )
    texts: list[object] = [part.get("text") for part in parts if part.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))


def _drop_empty(**fields: Any) -> _Json | None:
    return {key: value for key, value in fields.items() if value} or None
