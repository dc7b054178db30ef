"""Builds the messages a model is shown from a transcript.

The transcript is the checkpoint, so any prefix of it must give a valid request: every tool call is followed directly by
its results, no result stands alone, and a stopped or failed turn has a notice in place of its answer.
`load_model_context` adds the notice where one of our runs left no answer; consecutive questions from a client or an
import stay as they are. `repair_messages` ensures the rest, whatever a crash or an import left behind. Stored entries
are never changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeGuard

import msgspec

from antiphon.engine.collaboration.framing import RECORD_KIND
from antiphon.engine.sessions.transcripts import AFTER_LAST_SEQ, SQL, decode_or_none
from antiphon.messages import (
    CLIENT_PROVIDER,
    INJECTED_MODEL,
    AssistantMessage,
    CompactionEntry,
    ImageBlock,
    Message,
    Provenance,
    TextBlock,
    ThinkingBlock,
    ToolCall,
    ToolResult,
    UserMessage,
    collect_call_ids,
    get_role,
)
from antiphon.store import Row, Tx

ENTRIES_PER_PAGE = 64  # entries fetched at once, which limits the memory for large ones
CHARACTERS_PER_TOKEN = 4  # a rule of thumb that overestimates Latin-script text
MESSAGE_OVERHEAD_TOKENS = 8  # of a message besides its text
IMAGE_TOKENS = 1200  # regardless of its size in bytes
MIN_CUT_TOKENS = 32  # a summary of less could not be shorter
UNBOUNDED_WINDOW_TOKENS = 2**20  # for runtimes without a known window; they report an overflow themselves
MAX_LOADED_BYTES = 32 * 2**20  # of entries: images are large, and no provider accepts more

_LEFT_OUT_PATTERN = re.compile(r"\[Earlier messages left out here: (\d+)\]")
STOPPED_TURN_TEXT = "(No answer: this turn was stopped before it was finished.)"
FAILED_TURN_TEXT = "(No answer: this turn failed before it was finished.)"
SILENT_TURN_TEXT = "(No answer: this turn ended without one.)"
CUT_SHORT_ANSWER_TEXT = "(This answer was stopped here and is not complete.)"
INTERRUPTED_CALL_TEXT = (
    "This call was interrupted: it may or may not have taken effect. Check before repeating it."
)


class NumberedMessage(NamedTuple):
    """A stored message, its number, and the run that wrote it, if any."""

    seq: int
    message: Message
    run: int | None


class ModelContext(msgspec.Struct):
    """Numbered messages, oldest first, as stored in the transcript (not yet repaired).

    A missing-answer notice takes the number of the following question.
    """

    seqs: list[int] = msgspec.field(default_factory=list[int])
    messages: list[Message] = msgspec.field(default_factory=list[Message])

    def add(self, seq: int, message: Message) -> None:
        self.seqs.append(seq)
        self.messages.append(message)

    def list_messages_since(self, seq: int) -> list[Message]:
        return [message for at, message in zip(self.seqs, self.messages, strict=True) if at >= seq]

    @property
    def tokens(self) -> int:
        return sum(estimate_tokens(message) for message in self.messages)


async def load_model_context(tx: Tx, transcript: int, question: int, window: int | None) -> ModelContext:
    """Load the messages since the latest compaction, at most about twice `window` tokens.

    The entry numbered `question`, which the run answers, is always included, however long its answer already is. A
    notice replaces the omitted entries.
    """
    head = await load_latest_compaction(tx, transcript)
    since = head[1].first_kept_seq if head else 1
    found, first = await _load_tail(
        tx, transcript, since, UNBOUNDED_WINDOW_TOKENS if window is None else 2 * window
    )
    question_entry: list[NumberedMessage] = []
    if first > question >= since:
        rows = await tx.all(SQL.tail, transcript=transcript, since=question, before=question + 1, limit=1)
        question_entry = _decode_rows(rows)
    context = ModelContext()
    if first > since:
        seq, earlier = head or (0, None)
        count = _count_left_out(earlier) + first - since - len(question_entry)
        context.add(seq, build_left_out_notice(count, earlier, first, now=0))
    elif head:
        context.add(*head)
    before: NumberedMessage | None = None
    for entry in (*question_entry, *found):
        if before is not None and _lacks_answer(before, entry):
            silent = AssistantMessage(
                content=[TextBlock(text=SILENT_TURN_TEXT)],
                timestamp=entry.message.timestamp,
                stop_reason="stop",
            )
            context.add(entry.seq, silent)
        context.add(entry.seq, entry.message)
        before = entry
    return context


def _lacks_answer(entry: NumberedMessage, following: NumberedMessage) -> bool:
    """Whether both entries are questions and the run of the first one ended without an answer."""
    return (
        entry.run is not None
        and entry.run != following.run
        and _is_question(entry.message)
        and _is_question(following.message)
    )


async def load_call_ids_since(tx: Tx, transcript: int, question: int) -> set[str]:
    """Return the ids of all tool calls after an entry, including those that a prompt no longer contains."""
    ids: set[str] = set()
    seq = question
    while rows := await tx.all(
        SQL.page_after_without_tools, transcript=transcript, seq=seq, limit=ENTRIES_PER_PAGE
    ):
        ids |= collect_call_ids(message for row in rows if (message := decode_or_none(row)) is not None)
        seq = rows[-1]["seq"]
    return ids


async def load_latest_compaction(tx: Tx, transcript: int) -> tuple[int, CompactionEntry] | None:
    """Return the latest compaction entry, with which a prompt begins, and its number."""
    row = await tx.one(SQL.latest_compaction, transcript=transcript)
    if row and isinstance(found := decode_or_none(row), CompactionEntry):
        return row["seq"], found
    return None


async def _load_tail(tx: Tx, transcript: int, since: int, tokens: int) -> tuple[list[NumberedMessage], int]:
    """Return the last entries with about `tokens` tokens, and the number of the first one."""
    found: list[NumberedMessage] = []
    before, size = AFTER_LAST_SEQ, 0
    while tokens > 0 and size < MAX_LOADED_BYTES:
        page = await tx.all(
            SQL.tail, transcript=transcript, since=since, before=before, limit=ENTRIES_PER_PAGE
        )
        messages = _decode_rows(page)
        found += messages
        if len(page) < ENTRIES_PER_PAGE:
            return found[::-1], since
        tokens -= sum(estimate_tokens(entry.message) for entry in messages)
        size += sum(len(row["body"]) for row in page)
        before = page[-1]["seq"]
    return found[::-1], before


async def load_entries_between(
    tx: Tx, transcript: int, since: int, before: int, tokens: int
) -> list[NumberedMessage]:
    """Return the entries from `since` up to but without `before`, at most about `tokens` tokens of the latest."""
    found: list[NumberedMessage] = []
    while tokens > 0 and before > since:
        page = await tx.all(
            SQL.tail, transcript=transcript, since=since, before=before, limit=ENTRIES_PER_PAGE
        )
        entries = _decode_rows(page)
        found += entries
        if len(page) < ENTRIES_PER_PAGE:
            break
        tokens -= sum(estimate_tokens(entry.message) for entry in entries)
        before = page[-1]["seq"]
    return found[::-1]


def _decode_rows(rows: Iterable[Row]) -> list[NumberedMessage]:
    return [
        NumberedMessage(row["seq"], message, row["run"])
        for row in rows
        if (message := decode_or_none(row)) is not None
    ]


def _count_left_out(earlier: CompactionEntry | None) -> int:
    return sum(map(int, _LEFT_OUT_PATTERN.findall(earlier.summary))) if earlier else 0


def build_left_out_notice(
    count: int, earlier: CompactionEntry | None, first: int, now: int, tokens: int = 0
) -> CompactionEntry:
    """Build the entry that replaces messages without a summary. The text of an earlier summary is carried over."""
    carried = _LEFT_OUT_PATTERN.sub("", earlier.summary).strip() if earlier else ""
    return CompactionEntry(
        summary=f"{carried}\n\n[Earlier messages left out here: {count}]".strip(),
        first_kept_seq=first,
        tokens_before=tokens,
        timestamp=now,
    )


def repair_messages(messages: Iterable[Message]) -> list[Message]:
    """Return the entries as a valid conversation, as defined in the module docstring."""
    repaired: list[Message] = []
    waiting: dict[str, ToolCall] = {}
    timestamp = 0
    for message in messages:
        timestamp = message.timestamp
        if isinstance(message, ToolResult):
            if waiting.pop(message.tool_call_id, None):
                repaired.append(message)
            continue
        if waiting:
            repaired += _build_interrupted_results(waiting, timestamp)
            waiting = {}
        if isinstance(message, AssistantMessage):
            if message.provenance is not None and not message.text:
                continue
            if calls := message.tool_calls:
                message = _drop_repeated_calls(message, calls)  # noqa: PLW2901
                waiting = {call.id: call for call in calls}
            else:
                message = _mark_if_incomplete(message)  # noqa: PLW2901
        repaired.append(message)
    repaired += _build_interrupted_results(waiting, timestamp)
    if repaired and isinstance(repaired[0], UserMessage):
        return repaired
    # A bounded tail may begin in the middle of a turn; providers require a question first.
    first = next(
        (at for at, message in enumerate(repaired) if _can_begin(message) or _is_note(message)), None
    )
    if first is None:
        return []
    return [_convert_to_record(repaired[first]), *repaired[first + 1 :]]


def _can_begin(message: Message) -> bool:
    """Whether a message may come first. A client's conversation may begin with an answer.

    A message with a provenance is framed as user-side data (`collaboration.framing`), even if it is an answer.
    """
    return isinstance(message, UserMessage | CompactionEntry) or (
        isinstance(message, AssistantMessage)
        and not message.tool_calls
        and (message.provider == CLIENT_PROVIDER or message.provenance is not None)
    )


def _is_note(message: Message) -> TypeGuard[AssistantMessage]:
    """Whether a message was written in the session's name without asking its model."""
    return (
        isinstance(message, AssistantMessage)
        and message.model == INJECTED_MODEL
        and message.provider != CLIENT_PROVIDER
        and message.provenance is None
        and not message.tool_calls
    )


def _convert_to_record(message: Message) -> Message:
    """Return a message that may come first: one of our notes becomes framed data."""
    if not _is_note(message):
        return message
    return UserMessage(
        content=message.text, timestamp=message.timestamp, provenance=Provenance(kind=RECORD_KIND)
    )


def _build_interrupted_results(waiting: dict[str, ToolCall], timestamp: int) -> list[ToolResult]:
    return [build_interrupted_result(call, timestamp) for call in waiting.values()]


def _is_question(message: Message) -> bool:
    return isinstance(message, UserMessage) and message.provenance is None


def _mark_if_incomplete(message: AssistantMessage) -> AssistantMessage:
    """Return the answer, with a notice at its end if it is incomplete. Partial thinking is omitted."""
    note = _find_incomplete_text(message)
    if note is None:
        return message
    texts = [block for block in message.content if isinstance(block, TextBlock) and block.text.strip()]
    content = [*texts, TextBlock(text=note)]
    return msgspec.structs.replace(message, content=content, stop_reason="stop", error_message=None)


def _find_incomplete_text(message: AssistantMessage) -> str | None:
    """Return the notice for a missing or incomplete answer; None for a complete one."""
    broken = message.stop_reason in {"error", "aborted"}
    has_text = bool(message.text.strip())
    if (has_text and not broken) or message.tool_calls:
        return None
    if has_text:
        return CUT_SHORT_ANSWER_TEXT
    if not broken:
        return SILENT_TURN_TEXT
    return STOPPED_TURN_TEXT if message.stop_reason == "aborted" else FAILED_TURN_TEXT


def _drop_repeated_calls(message: AssistantMessage, calls: Sequence[ToolCall]) -> AssistantMessage:
    if len(calls) == len({call.id for call in calls}):
        return message
    seen: set[str] = set()
    content = [
        b for b in message.content if not (isinstance(b, ToolCall) and (b.id in seen or seen.add(b.id)))
    ]
    return msgspec.structs.replace(message, content=content)


def build_interrupted_result(call: ToolCall, now: int) -> ToolResult:
    return ToolResult(
        tool_call_id=call.id,
        tool_name=call.name,
        content=[TextBlock(text=INTERRUPTED_CALL_TEXT)],
        is_error=True,
        interrupted=True,
        timestamp=now,
    )


def estimate_tokens(message: Message) -> int:
    """Return the approximate number of tokens of a message."""
    images = _count_images(message) * IMAGE_TOKENS
    return (
        sum(map(len, _collect_text_pieces(message))) // CHARACTERS_PER_TOKEN
        + images
        + MESSAGE_OVERHEAD_TOKENS
    )


def _get_speaker_label(message: Message) -> str:
    """Name the role of a message; text from another session has no role in this one."""
    if isinstance(message, UserMessage | AssistantMessage) and message.provenance is not None:
        return f"data from elsewhere ({message.provenance.kind})"
    return get_role(message)


def _collect_text_pieces(message: Message) -> Iterable[str]:
    if isinstance(message, CompactionEntry):
        return [message.summary]
    if isinstance(message.content, str):
        return [message.content]
    shown = _mark_if_incomplete(message) if isinstance(message, AssistantMessage) else message
    return [_render_block(block) for block in shown.content]


def _count_images(message: Message) -> int:
    if isinstance(message, CompactionEntry) or isinstance(message.content, str):
        return 0
    return sum(isinstance(block, ImageBlock) for block in message.content)


def _render_block(block: object) -> str:
    match block:
        case TextBlock(text=text):
            return text
        case ThinkingBlock(thinking=text):
            return text
        case ToolCall(name=name, arguments=arguments):
            return f"{name}{arguments}"
        case _:
            return "[image]"


def find_cut_index(context: ModelContext, keep_tokens: int) -> int:
    """Return the index before which messages are summarized; 0 if that would free too little.

    The rest has at most `keep_tokens` tokens and at most a quarter of the whole, since the setting does not depend on
    the window; at least the last question or answer stays. The rest never begins with a tool result, so no call is
    separated from its result.
    """
    whole = context.tokens
    max_kept_tokens = min(keep_tokens, whole // 4)
    tail_tokens = kept_tokens = best = 0
    for index in range(len(context.messages) - 1, 0, -1):
        message = context.messages[index]
        tail_tokens += estimate_tokens(message)
        if best and tail_tokens > max_kept_tokens:
            break
        if not isinstance(message, ToolResult):
            best, kept_tokens = index, tail_tokens
    return best if whole - kept_tokens >= max(MIN_CUT_TOKENS, whole // 8) else 0


def truncate_summary(summary: str, messages: Sequence[Message]) -> str:
    """Truncate a summary to at most half the tokens of its messages, so that it makes room."""
    max_characters = (
        sum(map(estimate_tokens, messages)) // 2 - MESSAGE_OVERHEAD_TOKENS
    ) * CHARACTERS_PER_TOKEN
    return summary if len(summary) <= max_characters else summary[: max_characters - 1] + "…"


def clip_messages(messages: Sequence[Message], tokens: int) -> list[Message]:
    """Clip each message to an equal share of about `tokens` tokens in total."""
    share = tokens * CHARACTERS_PER_TOKEN // len(messages)
    return [_clip_message(message, share) for message in messages]


def _clip_message(message: Message, characters: int) -> Message:
    text = " ".join(_collect_text_pieces(message))[:characters]
    if isinstance(message, CompactionEntry):
        return msgspec.structs.replace(message, summary=text)
    return msgspec.structs.replace(message, content=[TextBlock(text=text)])


def render_as_text(messages: Sequence[Message], limit: int) -> str:
    """Render messages as plain text for a summary, oldest first, cut to fit `limit` characters.

    An earlier summary may take up to half of the limit, so that later messages do not crowd it out.
    """
    if messages and isinstance(messages[0], CompactionEntry):
        earlier = _render_line(messages[0], limit // 2)
        return f"{earlier}\n{render_as_text(messages[1:], limit - len(earlier))}"
    each = max(400, limit // max(1, len(messages)))
    text = "\n".join(_render_line(message, each) for message in messages)
    return text if len(text) <= limit else "[…]\n" + text[-limit:]


def _render_line(message: Message, max_characters: int) -> str:
    """Render a message on one line; text with line breaks could imitate another message."""
    text = " ".join(" ".join(_collect_text_pieces(message)).split())
    return f"{_get_speaker_label(message)}: {text[:max_characters]}"
