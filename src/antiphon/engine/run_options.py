"""Options that a request sets for its run: model settings, client-side tools, earlier messages.

They are stored in one column of the run's row, so a run that is resumed after a crash has the same options. Calls of
client-side tools are not executed here: they end the run, and their results come with a later request.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from antiphon.engine import transcripts
from antiphon.messages import Assistant, Compaction, Message, Text, ToolResult, User
from antiphon.runtimes import Sampling, ToolSpec
from antiphon.store import Tx
from antiphon.store.queries import Queries

SQL = Queries("transcripts")
MAX_ENTRIES_COMPARED = 1000  # of a session with the earlier messages of a request
MAX_BYTES_COMPARED = 8 * 2**20
ENTRIES_PER_PAGE = 64


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    sampling: Sampling | None = None
    tools: list[ToolSpec] = []
    earlier: list[User | Assistant | ToolResult] = []
    """The client's account of the conversation; messages that the session lacks are added before the new one."""

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


_decoder = msgspec.json.Decoder(RunOptions)


def encode_options(options: RunOptions | None) -> str | None:
    return None if options is None else msgspec.json.encode(options).decode()


def decode_options(stored: str | None) -> RunOptions | None:
    return None if stored is None else _decoder.decode(stored)


async def unknown_messages(
    tx: Tx, transcript: int, options: RunOptions
) -> Sequence[User | Assistant | ToolResult]:
    """The earlier messages of a request that are not among the latest entries of the session."""
    if not options.earlier:
        return []
    known = await _latest_messages(tx, transcript)
    if not known:
        return options.earlier
    identities = {_identify(message) for message in known}
    answers = tuple(
        {text for message in known if isinstance(message, Assistant) and (text := message.text.strip())}
    )
    return [
        message
        for message in options.earlier
        if _identify(message) not in identities
        # For the client, an answer of several steps is one text that ends with the last step's text.
        and not (
            isinstance(message, Assistant)
            and not message.tool_calls
            and message.text.strip().endswith(answers)
        )
    ]


async def _latest_messages(tx: Tx, transcript: int) -> list[Message]:
    found: list[Message] = []
    before, size = transcripts.END, 0
    while len(found) < MAX_ENTRIES_COMPARED and size < MAX_BYTES_COMPARED:
        rows = await tx.all(SQL.tail, transcript=transcript, since=1, before=before, limit=ENTRIES_PER_PAGE)
        found += [message for row in rows if (message := transcripts.readable(row)) is not None]
        if len(rows) < ENTRIES_PER_PAGE:
            break
        size += sum(len(row["body"]) for row in rows)
        before = rows[-1]["seq"]
    return found


def _identify(message: Message) -> tuple[str, ...]:
    match message:
        case ToolResult():
            return "result", message.tool_call_id
        case Assistant():
            calls = [call.id for call in message.tool_calls]
            return ("calls", *calls) if calls else ("assistant", message.text.strip())
        case User():
            blocks = [Text(text=message.content)] if isinstance(message.content, str) else message.content
            return "user", "\n".join(b.text if isinstance(b, Text) else b.data for b in blocks).strip()
        case Compaction():
            return ("compaction",)
