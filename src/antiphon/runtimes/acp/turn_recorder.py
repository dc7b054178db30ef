"""Turns the updates of a turn into streamed text and transcript entries.

A program announces a call, changes it as often as it likes and ends it; entries are never changed. So an answer with
calls is committed when the first of them starts, and the results when they are there. Nothing comes between a call and
its result: what a program says meanwhile waits.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast, get_args

import msgspec

from antiphon.child_processes.text import clean_text
from antiphon.config.acp import ToolKind
from antiphon.errors import AgentProgramFailed
from antiphon.messages import (
    AssistantMessage,
    TextBlock,
    ThinkingBlock,
    ToolCall,
    ToolResult,
)
from antiphon.runtimes import Deltas
from antiphon.runtimes.text import cut_middle, repair_surrogates, sanitize_answer
from antiphon.runtimes.tool_calls import TOO_DEEP_TEXT, is_too_deep, make_storable_id
from antiphon.runtimes.turns import TurnHost

MAX_CALLS_PER_TURN = 5000
MAX_TEXT_CHARACTERS_PER_TURN = 8_000_000
CHARACTERS_PER_BLOCK = 100  # that a block of text counts besides its own
MAX_CALL_BYTES_PER_TURN = 32 * 2**20  # of the calls that have no result yet
MAX_COMPARED_LINES = 2000  # of a file; the time of a comparison grows with their square
CONTEXT_LINES = 2  # around a change
MAX_RESULT_CHARACTERS = 30_000
MAX_ARGUMENT_CHARACTERS = 60_000
MAX_TITLE_CHARACTERS = 300
_TOOL_KINDS: tuple[ToolKind, ...] = get_args(ToolKind)
_LONG_FIELDS = frozenset({"rawInput", "rawOutput", "content"})
NO_RESULT_TEXT = "(The program reported no result.)"

Json: TypeAlias = dict[str, Any]


class RecordedCall:
    """A tool call of the program, as far as it is known."""

    def __init__(self, program_id: str, call_id: str) -> None:
        self.program_id = program_id
        self.call_id = call_id
        self.title = ""
        self.kind: ToolKind = "other"
        self.status = "pending"
        self.input: Any = None
        self.content: list[Json] = []
        self.output: Any = None
        self.is_started = False
        self.is_reported = False
        """Whether its result is in the transcript, or about to be."""
        self._bytes_by_field: dict[str, int] = {}

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed")

    @property
    def size(self) -> int:
        """How many bytes it has as JSON."""
        return sum(self._bytes_by_field.values())

    def update(self, fields: Json) -> None:
        """Apply what an update says; fields that it leaves out stay."""
        for name in _LONG_FIELDS & fields.keys():
            if is_too_deep(fields[name]):
                fields = {**fields, name: TOO_DEEP_TEXT}
            self._bytes_by_field[name] = len(msgspec.json.encode(fields[name]))
        if isinstance(title := fields.get("title"), str):
            self.title = clean_text(title, MAX_TITLE_CHARACTERS)
        if (kind := fields.get("kind")) in _TOOL_KINDS:
            self.kind = kind
        if fields.get("rawInput") is not None:
            self.input = fields["rawInput"]
        if fields.get("rawOutput") is not None:
            self.output = fields["rawOutput"]
        if isinstance(content := fields.get("content"), list):
            self.content = [
                cast("Json", each) for each in cast("list[object]", content) if isinstance(each, dict)
            ]
        status = fields.get("status")
        if status in ("pending", "in_progress", "completed", "failed") and not self.has_ended:
            self.status = status
            self.is_started = self.is_started or status != "pending"

    def clear(self) -> None:
        """Forget what is in the transcript now."""
        self.content, self.output, self.input = [], None, None
        self._bytes_by_field.clear()

    def build_call(self) -> ToolCall:
        given: Any = self.input
        arguments: Json = cast("Json", given) if isinstance(given, dict) else {}
        if given is not None and not isinstance(given, dict):
            arguments = {"input": given}
        if len(msgspec.json.encode(arguments)) > MAX_ARGUMENT_CHARACTERS:
            arguments = {"title": self.title, "leftOut": "The arguments are too long to be stored."}
        if self.title and "title" not in arguments:
            arguments = {"title": self.title, **arguments}
        return ToolCall(id=self.call_id, name=self.kind, arguments=arguments)

    def build_result(self, now: int) -> ToolResult:
        text = cut_middle(repair_surrogates(self._render_output()), MAX_RESULT_CHARACTERS)
        return ToolResult(
            tool_call_id=self.call_id,
            tool_name=self.kind,
            content=[TextBlock(text=text)],
            timestamp=now,
            is_error=self.status == "failed",
        )

    def _render_output(self) -> str:
        shown = "\n".join(filter(None, map(render_content, self.content)))
        if shown:
            return shown
        if isinstance(self.output, str):
            return self.output
        if self.output is not None:
            return msgspec.json.encode(self.output).decode()
        return "" if self.has_ended else NO_RESULT_TEXT


def render_content(content: Json) -> str:
    """Return a part of a call's content as text."""
    match content:
        case {"type": "content", "content": {"type": "text", "text": str(text)}}:
            return text
        case {"type": "content", "content": {"type": str(kind)}}:
            return f"[{clean_text(kind, 40)}]"
        case {"type": "diff", "path": str(path), "newText": str(new)}:
            old = content.get("oldText")
            return render_diff(path, old if isinstance(old, str) else "", new)
        case _:
            return ""


def render_diff(path: str, old: str, new: str) -> str:
    """Return the changed lines of a file, with a few around them. In a long file, all from the first to the last."""
    name = clean_text(path, MAX_TITLE_CHARACTERS)
    before, after = old.splitlines(), new.splitlines()
    if max(len(before), len(after)) > MAX_COMPARED_LINES:
        return "\n".join([f"--- {name}", f"+++ {name}", *_build_hunk(before, after)])
    lines = difflib.unified_diff(before, after, name, name, lineterm="", n=CONTEXT_LINES)
    return "\n".join(lines)


def _build_hunk(before: Sequence[str], after: Sequence[str]) -> Sequence[str]:
    """Return one change that covers all that differs, without looking for equal lines in between."""
    shorter = min(len(before), len(after))
    start = next((n for n in range(shorter) if before[n] != after[n]), shorter)
    rest = shorter - start
    same_at_end = next((n for n in range(rest) if before[-1 - n] != after[-1 - n]), rest)
    first = max(0, start - CONTEXT_LINES)
    ends = [len(lines) - max(0, same_at_end - CONTEXT_LINES) for lines in (before, after)]
    following = len(before) - same_at_end
    return [
        f"@@ -{first + 1},{ends[0] - first} +{first + 1},{ends[1] - first} @@",
        *(f" {line}" for line in before[first:start]),
        *(f"-{line}" for line in before[start:following]),
        *(f"+{line}" for line in after[start : len(after) - same_at_end]),
        *(f" {line}" for line in before[following : ends[0]]),
    ]


class _Piece:
    """A block of text or thinking that grows."""

    def __init__(self, *, is_thinking: bool) -> None:
        self.is_thinking = is_thinking
        self.parts: list[str] = []

    def build(self) -> TextBlock | ThinkingBlock:
        text = repair_surrogates("".join(self.parts))
        return ThinkingBlock(thinking=text) if self.is_thinking else TextBlock(text=text)


class TurnRecorder:
    """Records one turn. Updates are taken at once and in order; commits follow in `flush`."""

    def __init__(self, host: TurnHost, deltas: Deltas, model: str | None, provider: str) -> None:
        self._host = host
        self._deltas = deltas
        self._model = model
        self._provider = provider
        self._calls: dict[str, RecordedCall] = {}
        self._call_ids = set(host.used_call_ids)
        self._blocks: list[_Piece | RecordedCall] = []
        """What is said since the last committed answer."""
        self._batch: list[RecordedCall] = []
        """The calls of the last committed answer that have no result yet."""
        self._work: list[Callable[[], Awaitable[None]]] = []
        self._flushing = asyncio.Lock()
        self._characters = 0
        self._call_bytes = 0
        self.has_work = asyncio.Event()
        self.fault: AgentProgramFailed | None = None

    # --- updates ---

    def apply(self, update: Json) -> None:
        match update.get("sessionUpdate"):
            case "agent_message_chunk":
                self._add_text(_read_text(update.get("content")), is_thinking=False)
            case "agent_thought_chunk":
                self._add_text(_read_text(update.get("content")), is_thinking=True)
            case "tool_call" | "tool_call_update":
                self.apply_call(update)
            case _:
                pass  # plans, modes and commands are the program's own

    def apply_call(self, update: Json, *, starts: bool = False) -> RecordedCall | None:
        """Apply an update of a call, which may be the first that is heard of it. None if it is too late for that."""
        program_id = update.get("toolCallId")
        if not isinstance(program_id, str) or self.fault is not None:
            return None
        call = self._calls.get(program_id)
        if call is None:
            if len(self._calls) >= MAX_CALLS_PER_TURN:
                self._fail(f"The program made more than {MAX_CALLS_PER_TURN} tool calls in one turn.")
                return None
            call = self._calls[program_id] = RecordedCall(program_id, self._make_call_id(program_id))
            self._blocks.append(call)
        if call.is_reported:
            return None
        self._call_bytes -= call.size
        call.update(update)
        self._call_bytes += call.size
        if self._call_bytes > MAX_CALL_BYTES_PER_TURN:
            self._fail("The tool calls that it makes at the same time are too long.")
            return None
        call.is_started = call.is_started or starts
        self._advance()
        return call

    def _add_text(self, text: str, *, is_thinking: bool) -> None:
        if not text or self.fault is not None:
            return
        self._characters += len(text)
        if self._characters > MAX_TEXT_CHARACTERS_PER_TURN:
            self._fail(f"The program wrote more than {MAX_TEXT_CHARACTERS_PER_TURN} characters in one turn.")
            return
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, _Piece) or last.is_thinking != is_thinking:
            last = _Piece(is_thinking=is_thinking)
            self._blocks.append(last)
            self._characters += CHARACTERS_PER_BLOCK
        last.parts.append(text)
        (self._deltas.thinking if is_thinking else self._deltas.text)(text)

    def _fail(self, what: str) -> None:
        self.fault = AgentProgramFailed(what, "Ask for less in one message.")
        self.has_work.set()

    def _make_call_id(self, program_id: str) -> str:
        base = call_id = make_storable_id(program_id)
        number = 1
        while call_id in self._call_ids:
            number += 1
            call_id = f"{base}-{number}"
        self._call_ids.add(call_id)
        return call_id

    # --- entries ---

    def _advance(self) -> None:
        """Schedule the commits that are possible now."""
        while True:
            ended = [call for call in self._batch if call.has_ended]
            if ended:
                self._schedule(lambda calls=ended: self._commit_results(calls))
                self._batch = [call for call in self._batch if not call.has_ended]
            calls = [block for block in self._blocks if isinstance(block, RecordedCall)]
            if self._batch or not any(call.is_started for call in calls):
                return
            self._take_answer(calls)

    def _take_answer(self, calls: Sequence[RecordedCall]) -> None:
        """Schedule the commit of everything up to the last call."""
        end = max(index for index, block in enumerate(self._blocks) if isinstance(block, RecordedCall)) + 1
        blocks, self._blocks = self._blocks[:end], self._blocks[end:]
        self._batch = list(calls)
        answer = self._build_answer(blocks, "toolUse")
        self._schedule(lambda: self._commit_answer(answer, calls))

    def _schedule(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work.append(work)
        self.has_work.set()

    async def _commit_answer(self, answer: AssistantMessage, calls: Iterable[RecordedCall]) -> None:
        await self._host.commit([answer])
        for call in answer.tool_calls:
            self._host.show_call(call, None)

    async def _commit_results(self, calls: Sequence[RecordedCall]) -> None:
        for call in calls:
            call.is_reported = True
        results = [call.build_result(self._host.now()) for call in calls]
        await self._host.commit(results)
        for call, result in zip(calls, results, strict=True):
            self._host.show_call(call.build_call(), result)
            self._call_bytes -= call.size
            call.clear()

    async def flush(self) -> None:
        """Commit what is scheduled."""
        async with self._flushing:
            while self._work:
                await self._work[0]()
                del self._work[0]
            self.has_work.clear()

    async def finish(self, stop_reason: Any, usage: Any) -> AssistantMessage:
        """Commit what is left, and return the closing answer."""
        while self._batch or any(isinstance(block, RecordedCall) for block in self._blocks):
            for call in self._batch:
                call.is_started = True
            unended = [call for call in self._batch if not call.has_ended]
            if unended:
                self._schedule(lambda calls=unended: self._commit_results(calls))
                self._batch = [call for call in self._batch if call not in unended]
            for block in self._blocks:
                if isinstance(block, RecordedCall):
                    block.is_started = True
            self._advance()
        await self.flush()
        return msgspec.structs.replace(self._build_answer(self._blocks, stop_reason), usage=usage)

    def _build_answer(self, blocks: Sequence[_Piece | RecordedCall], stop_reason: Any) -> AssistantMessage:
        content = [
            block.build_call() if isinstance(block, RecordedCall) else block.build() for block in blocks
        ]
        return sanitize_answer(
            AssistantMessage(
                content=content,
                timestamp=self._host.now(),
                stop_reason=stop_reason,
                provider=self._provider,
                model=self._model,
            )
        )


def _read_text(content: object) -> str:
    match content:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            return f"[{clean_text(kind, 40)}]"
        case _:
            return ""
