"""The answer of a chat completion, put together from the chunks it is streamed in.

The wire is read into typed structs, and what they do not name is skipped. Whether the whole is an answer at all is
for the reader to judge, and what its tokens cost is not known here.
"""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec

from antiphon.messages import Text, Thinking, ToolCall
from antiphon.runtimes import Deltas
from antiphon.runtimes.answers import whole
from antiphon.runtimes.event_stream import Unreadable
from antiphon.runtimes.http_reader import AnswerMeter
from antiphon.runtimes.tool_calls import KEPT_TOOL_CALLS, is_too_deep, tool_call

THINKING_FIELDS = ("reasoning", "reasoning_content")
"""Where servers put thinking, in the order they are looked at."""
TAGS = ("<think>", "</think>")
"""What models write around their thinking where the server does not take it out."""

MAX_ID_CHARACTERS = 256
"""Of what a provider calls its answer; its support asks for that."""

_Json = dict[str, Any]


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


class Chunk(msgspec.Struct):
    id: str | int | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Json | None = None
    service_tier: str | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(Chunk)


def chunk_in(data: bytes) -> Chunk:
    try:
        return _CHUNKS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _halved_chunk_in(data)


def _halved_chunk_in(data: bytes) -> Chunk:
    """A character may be cut in two by the end of a chunk, which the decoder above does not take for text."""
    try:
        return msgspec.convert(json.loads(data), Chunk)
    except (ValueError, RecursionError):
        raise Unreadable("a piece of the stream cannot be read") from None


class _Part(msgspec.Struct, eq=False):
    """A block of the answer while it grows. `source` is the field it comes from, `tags` or `call`."""

    source: str
    pieces: list[str] = msgspec.field(default_factory=list[str])
    arguments: _Json | None = None
    """Of a call whose server sends them as an object, and not as text."""
    names: list[str] = msgspec.field(default_factory=list[str])
    id: str = ""
    extra: Any = None

    @property
    def name(self) -> str:
        return "".join(self.names)

    @property
    def text(self) -> str:
        return whole("".join(self.pieces))


class Answer:
    """What has been received, put together."""

    def __init__(self, deltas: Deltas, meter: AnswerMeter) -> None:
        self._deltas = deltas
        self._meter = meter
        self._parts: list[_Part] = []
        self._calls: dict[int, _Part] = {}
        self._tagged: _Part | None = None
        self._refusals: list[str] = []
        self.ended = False
        self.id = self.model = self.tier = self.finish = ""
        self.usage: _Json | None = None

    @property
    def said(self) -> bool:
        return any(part.source == "content" for part in self._parts)

    @property
    def refusal(self) -> str:
        return "".join(self._refusals)

    @property
    def native(self) -> _Json | None:
        return _present(id=self.id, details=_present(service_tier=self.tier, refusal=self.refusal))

    def take(self, chunk: Chunk) -> None:
        self.id = str(chunk.id or self.id)[:MAX_ID_CHARACTERS]
        self.model = chunk.model or self.model
        self.tier = chunk.service_tier or self.tier
        # The last report counts: some servers report what was used so far with every piece.
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
        self._think(delta)
        self._say(delta.content)
        for call in delta.tool_calls or ():
            self._call(call)

    def refuse(self) -> None:
        self._deltas.text(self.refusal)
        self._growing("content").pieces.append(self.refusal)

    def blocks(self, taken: set[str]) -> list[Text | Thinking | ToolCall]:
        """`taken` are the call ids that are no longer free. Of too many calls only the first are there."""
        content: list[Text | Thinking | ToolCall] = []
        calls = 0
        for part in self._parts:
            if part.source == "content":
                content.append(Text(text=part.text))
            elif part.source != "call":
                origin = "content" if part.source == "tags" else part.source
                content.append(Thinking(thinking=part.text, native={"id": origin}))
            elif part.names and (calls := calls + 1) <= KEPT_TOOL_CALLS:
                native = {"details": {"extra_content": part.extra}} if part.extra else None
                written = part.text if part.arguments is None else part.arguments
                content.append(tool_call(part.id, part.name, written, native=native, taken=taken))
        return content

    def _growing(self, source: str) -> _Part:
        """The block that a piece from there belongs to: the last one, or a new one if that came from elsewhere."""
        if not self._parts or self._parts[-1].source != source:
            return self._begin(source)
        return self._parts[-1]

    def _begin(self, source: str) -> _Part:
        if source == "call":
            self._meter.begin_call()
        else:
            self._meter.begin_block()
        self._parts.append(_Part(source))
        return self._parts[-1]

    def _think(self, delta: _Delta) -> None:
        for name, piece in zip(THINKING_FIELDS, (delta.reasoning, delta.reasoning_content), strict=True):
            if piece and isinstance(piece, str):
                self._meter.add(piece)
                self._growing(name).pieces.append(piece)
                self._deltas.thinking(piece)
                return

    def _say(self, content: str | list[Any] | None) -> None:
        piece = content if isinstance(content, str) else _text_of(content)
        if not piece:
            return
        self._meter.add(piece)
        if self._tagged is not None:
            if piece == TAGS[1]:
                self._tagged = None
            else:
                self._tagged.pieces.append(piece)
                self._deltas.thinking(piece)
        elif piece == TAGS[0]:
            self._tagged = self._begin("tags")
        else:
            self._growing("content").pieces.append(piece)
            self._deltas.text(piece)

    def _call(self, delta: _CallDelta) -> None:
        function = delta.function or _Function()
        part = self._call_part(delta.index, function.name)
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

    def _call_part(self, index: int | None, name: str | None) -> _Part:
        """Some servers do not number calls: there a name begins the next one."""
        if index is None and not name and self._parts and self._parts[-1].source == "call":
            return self._parts[-1]
        if index is None or index not in self._calls:
            begun = self._begin("call")
            if index is None:
                return begun
            self._calls[index] = begun
        return self._calls[index]


def _text_of(content: list[Any] | None) -> str:
    """Some servers stream text as a list of parts."""
    parts = (
        cast(_Json, part) if isinstance(part, dict) else {"type": "text", "text": part}
        for part in content or ()
    )
    texts: list[object] = [part.get("text") for part in parts if part.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))


def _present(**fields: Any) -> _Json | None:
    return {key: value for key, value in fields.items() if value} or None
