"""What a model is shown of a transcript.

The transcript is the checkpoint, so any prefix of it must make a valid request: every tool call is followed
by its results and nothing else, no result stands alone, and a turn that was stopped or failed says so in the place
of its answer, so that the next question is not taken for a part of it. `load` says so where a run of ours left nothing
behind; questions that came one after the other from a client or an import stay that way. `mend` gives the rest of that
guarantee whatever a crash, an import or another program left behind; the stored entries stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeGuard

import msgspec

from antiphon.engine.framing import RECORD
from antiphon.engine.transcripts import END, SQL, readable
from antiphon.messages import (
    CLIENT,
    INJECTED,
    Assistant,
    Compaction,
    Image,
    Message,
    Provenance,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    User,
    call_ids,
)
from antiphon.store import Row, Tx

PAGE = 64  # entries that are fetched at once: so many large ones may be in memory beside the rest
CHARACTERS_PER_TOKEN = 4  # a rule of thumb that errs on the long side for text in Latin script
OVERHEAD = 8  # tokens of a message besides its words
IMAGE = 1200  # tokens, whatever its bytes
LEAST_CUT = 32  # tokens; a summary of less could not be shorter
UNBOUNDED = 2**20  # tokens that a runtime without a window is shown; one that cannot take them says so
MOST_BYTES = 32 * 2**20  # of entries, whatever they weigh: images are large, and no provider takes more

_NOTICE = re.compile(r"\[Earlier messages left out here: (\d+)\]")
STOPPED = "(No answer: this turn was stopped before it was finished.)"
FAILED = "(No answer: this turn failed before it was finished.)"
SILENT = "(No answer: this turn ended without one.)"
CUT_SHORT = "(This answer was stopped here and is not complete.)"
INTERRUPTED = "This call was interrupted: it may or may not have taken effect. Check before repeating it."


class Numbered(NamedTuple):
    """A stored message: its number, and the run that has written it, if one of ours has."""

    seq: int
    message: Message
    run: int | None


class Context(msgspec.Struct):
    """Numbered messages, oldest first, as they are in the transcript (not yet mended).

    What stands for an answer that is missing has the number of the question after it.
    """

    seqs: list[int] = msgspec.field(default_factory=list[int])
    messages: list[Message] = msgspec.field(default_factory=list[Message])

    def add(self, seq: int, message: Message) -> None:
        self.seqs.append(seq)
        self.messages.append(message)

    def since(self, seq: int) -> list[Message]:
        return [message for at, message in zip(self.seqs, self.messages, strict=True) if at >= seq]

    @property
    def tokens(self) -> int:
        return sum(weigh(message) for message in self.messages)


async def load(tx: Tx, transcript: int, question: int, window: int | None) -> Context:
    """From the latest compaction to the end, and no more than could matter for a window of that many tokens.

    The entry with the number `question`, which the run is about, is there however long its answer already is. What
    else is left out is said in its place.
    """
    head = await latest_compaction(tx, transcript)
    since = head[1].first_kept_seq if head else 1
    found, first = await _tail(tx, transcript, since, UNBOUNDED if window is None else 2 * window)
    asked: list[Numbered] = []
    if first > question >= since:
        rows = await tx.all(SQL.tail, transcript=transcript, since=question, before=question + 1, limit=1)
        asked = _readable(rows)
    context = Context()
    if first > since:
        seq, earlier = head or (0, None)
        count = _left_out_before(earlier) + first - since - len(asked)
        context.add(seq, left_out(count, earlier, first, now=0))
    elif head:
        context.add(*head)
    before: Numbered | None = None
    for entry in (*asked, *found):
        if before is not None and _lacks_answer(before, entry):
            silent = Assistant(
                content=[Text(text=SILENT)], timestamp=entry.message.timestamp, stop_reason="stop"
            )
            context.add(entry.seq, silent)
        context.add(entry.seq, entry.message)
        before = entry
    return context


def _lacks_answer(entry: Numbered, following: Numbered) -> bool:
    """Whether a run has asked one and ended, and something else asked the other."""
    return (
        entry.run is not None
        and entry.run != following.run
        and _is_question(entry.message)
        and _is_question(following.message)
    )


async def calls_since(tx: Tx, transcript: int, question: int) -> set[str]:
    """The ids of the tool calls after an entry, also of those that a prompt no longer contains."""
    ids: set[str] = set()
    seq = question
    while rows := await tx.all(SQL.after_without_tools, transcript=transcript, seq=seq, limit=PAGE):
        ids |= call_ids(message for row in rows if (message := readable(row)) is not None)
        seq = rows[-1]["seq"]
    return ids


async def latest_compaction(tx: Tx, transcript: int) -> tuple[int, Compaction] | None:
    """The entry that a prompt begins with, and its number."""
    row = await tx.one(SQL.latest_compaction, transcript=transcript)
    if row and isinstance(found := readable(row), Compaction):
        return row["seq"], found
    return None


async def _tail(tx: Tx, transcript: int, since: int, tokens: int) -> tuple[list[Numbered], int]:
    """The last entries that weigh about so much, and the number that they begin with."""
    found: list[Numbered] = []
    before, size = END, 0
    while tokens > 0 and size < MOST_BYTES:
        page = await tx.all(SQL.tail, transcript=transcript, since=since, before=before, limit=PAGE)
        messages = _readable(page)
        found += messages
        tokens -= sum(weigh(entry.message) for entry in messages)
        size += sum(len(row["body"]) for row in page)
        if len(page) < PAGE:
            return found[::-1], since
        before = page[-1]["seq"]
    return found[::-1], before


def _readable(rows: Iterable[Row]) -> list[Numbered]:
    return [
        Numbered(row["seq"], message, row["run"]) for row in rows if (message := readable(row)) is not None
    ]


def _left_out_before(earlier: Compaction | None) -> int:
    return sum(map(int, _NOTICE.findall(earlier.summary))) if earlier else 0


def left_out(count: int, earlier: Compaction | None, first: int, now: int, tokens: int = 0) -> Compaction:
    """What stands for messages that nobody has summarised. What an earlier summary says is carried on."""
    carried = _NOTICE.sub("", earlier.summary).strip() if earlier else ""
    return Compaction(
        summary=f"{carried}\n\n[Earlier messages left out here: {count}]".strip(),
        first_kept_seq=first,
        tokens_before=tokens,
        timestamp=now,
    )


def mend(messages: Iterable[Message]) -> list[Message]:
    """The valid conversation these entries stand for."""
    mended: list[Message] = []
    waiting: dict[str, ToolCall] = {}
    moment = 0
    for message in messages:
        moment = message.timestamp
        if isinstance(message, ToolResult):
            if waiting.pop(message.tool_call_id, None):
                mended.append(message)
            continue
        mended += _interruptions(waiting, moment)
        waiting = {}
        if isinstance(message, Assistant):
            if message.provenance is not None and not message.text:
                continue
            message = _without_repeated_ids(_completed(message))  # noqa: PLW2901
            waiting = {call.id: call for call in message.tool_calls}
        mended.append(message)
    mended += _interruptions(waiting, moment)
    # A bounded tail may begin in the middle of a turn; providers want a question first.
    first = next((at for at, message in enumerate(mended) if _can_begin(message) or _is_note(message)), None)
    if first is None:
        return []
    return [_as_record(mended[first]), *mended[first + 1 :]]


def _can_begin(message: Message) -> bool:
    """Whether a message may come first. A client may say that its conversation began with an answer.

    What has a provenance is framed as data on the side of the user (`engine.framing`), also where it is an answer.
    """
    return isinstance(message, User | Compaction) or (
        isinstance(message, Assistant)
        and not message.tool_calls
        and (message.provider == CLIENT or message.provenance is not None)
    )


def _is_note(message: Message) -> TypeGuard[Assistant]:
    """Whether it was said in the session's name without asking its model."""
    return (
        isinstance(message, Assistant)
        and message.model == INJECTED
        and message.provider != CLIENT
        and message.provenance is None
        and not message.tool_calls
    )


def _as_record(message: Message) -> Message:
    """A message as it may come first: a note of ours becomes data that its model reads as such."""
    if not _is_note(message):
        return message
    return User(content=message.text, timestamp=message.timestamp, provenance=Provenance(kind=RECORD))


def _interruptions(waiting: dict[str, ToolCall], moment: int) -> list[ToolResult]:
    return [interrupted(call, moment) for call in waiting.values()]


def _is_question(message: Message) -> bool:
    return isinstance(message, User) and message.provenance is None


def _completed(message: Assistant) -> Assistant:
    """The answer, with a note at its end if it is not complete. Thinking that was cut off is left out."""
    note = _missing(message)
    if note is None:
        return message
    said = [block for block in message.content if isinstance(block, Text) and block.text.strip()]
    content = [*said, Text(text=note)]
    return msgspec.structs.replace(message, content=content, stop_reason="stop", error_message=None)


def _missing(message: Assistant) -> str | None:
    """The note for an answer that is missing or incomplete; None for one that is complete."""
    broken = message.stop_reason in {"error", "aborted"}
    if message.tool_calls:
        return None
    if message.text.strip():
        return CUT_SHORT if broken else None
    if not broken:
        return SILENT
    return STOPPED if message.stop_reason == "aborted" else FAILED


def _without_repeated_ids(message: Assistant) -> Assistant:
    ids = [call.id for call in message.tool_calls]
    if len(ids) == len(set(ids)):
        return message
    seen: set[str] = set()
    content = [
        b for b in message.content if not (isinstance(b, ToolCall) and (b.id in seen or seen.add(b.id)))
    ]
    return msgspec.structs.replace(message, content=content)


def interrupted(call: ToolCall, now: int) -> ToolResult:
    return ToolResult(
        tool_call_id=call.id,
        tool_name=call.name,
        content=[Text(text=INTERRUPTED)],
        is_error=True,
        interrupted=True,
        timestamp=now,
    )


def weigh(message: Message) -> int:
    """Tokens, roughly."""
    images = _images(message) * IMAGE
    return sum(map(len, _pieces(message))) // CHARACTERS_PER_TOKEN + images + OVERHEAD


def _speaker(message: Message) -> str:
    """Who said it; what came from another session is nobody's in this one."""
    if isinstance(message, User | Assistant) and message.provenance is not None:
        return f"data from elsewhere ({message.provenance.kind})"
    return str(message.__struct_config__.tag)


def _pieces(message: Message) -> Iterable[str]:
    if isinstance(message, Compaction):
        return [message.summary]
    if isinstance(message.content, str):
        return [message.content]
    shown = _completed(message) if isinstance(message, Assistant) else message
    return [_piece(block) for block in shown.content]


def _images(message: Message) -> int:
    if isinstance(message, Compaction) or isinstance(message.content, str):
        return 0
    return sum(isinstance(block, Image) for block in message.content)


def _piece(block: object) -> str:
    match block:
        case Text(text=text):
            return text
        case Thinking(thinking=text):
            return text
        case ToolCall(name=name, arguments=arguments):
            return f"{name}{arguments}"
        case _:
            return "[image]"


def cut(context: Context, keep_tokens: int) -> int:
    """Where to cut: what stands before the index is summarised. 0 when that would make no room worth speaking of.

    What stays weighs at most `keep_tokens` and at most a quarter of the whole, since a setting knows no window; or
    else it is the last question or answer. Only one of these may come first afterwards, never a tool's result, so no
    call loses its pair.
    """
    whole = context.tokens
    most = min(keep_tokens, whole // 4)
    weight = kept = best = 0
    for index in range(len(context.messages) - 1, 0, -1):
        message = context.messages[index]
        weight += weigh(message)
        if best and weight > most:
            break
        if not isinstance(message, ToolResult):
            best, kept = index, weight
    return best if whole - kept >= max(LEAST_CUT, whole // 8) else 0


def brief(summary: str, messages: Sequence[Message]) -> str:
    """A summary of these messages, cut off where it would weigh more than half of them: it is to make room."""
    most = (sum(map(weigh, messages)) // 2 - OVERHEAD) * CHARACTERS_PER_TOKEN
    return summary if len(summary) <= most else summary[: most - 1] + "…"


def clipped(messages: Sequence[Message], tokens: int) -> list[Message]:
    """Messages that weigh about that much together: of each only as many words as it has a share in that."""
    share = tokens * CHARACTERS_PER_TOKEN // len(messages)
    return [_clip(message, share) for message in messages]


def _clip(message: Message, characters: int) -> Message:
    words = " ".join(_pieces(message))[:characters]
    if isinstance(message, Compaction):
        return msgspec.structs.replace(message, summary=words)
    return msgspec.structs.replace(message, content=[Text(text=words)])


def as_text(messages: Sequence[Message], limit: int) -> str:
    """Messages as plain text for a summary, oldest first, each and all of them cut to fit `limit` characters.

    An earlier summary may have half of them: what was said after it must not crowd it out.
    """
    if messages and isinstance(messages[0], Compaction):
        earlier = _line(messages[0], limit // 2)
        return f"{earlier}\n{as_text(messages[1:], limit - len(earlier))}"
    each = max(400, limit // max(1, len(messages)))
    text = "\n".join(_line(message, each) for message in messages)
    return text if len(text) <= limit else "[…]\n" + text[-limit:]


def _line(message: Message, most: int) -> str:
    """On one line: a text of several could pass for what somebody else has said."""
    return f"{_speaker(message)}: {' '.join(' '.join(_pieces(message)).split())[:most]}"
