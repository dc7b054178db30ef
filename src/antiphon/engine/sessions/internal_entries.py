"""Which entries of a transcript are not part of what a person would call the conversation.

Those are: answers that are only control tokens, the prompts of announce steps, what an announce step came to unless it
was posted, and reports that were kept from people. They stay in the transcript under their numbers, so that it is
complete; what is shown to people leaves them out.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from antiphon.engine.outbox import sanitize

ANNOUNCE_STEP_KIND = "announce_step"
MAX_TOKEN_CHARACTERS = 1000
"""Of an answer that can be nothing but control tokens. A longer one was meant to be read."""


class _EntryBody(msgspec.Struct, frozen=True):
    """What tells, also in an entry of another writer that is no `Message`."""

    content: Any = None
    provenance: Any = None


_entry_body_decoder = msgspec.json.Decoder(_EntryBody)


def is_internal_entry(role: str, body: str) -> bool:
    """Whether an entry is internal by what it says. What became of its run is another matter (`Entry.internal`)."""
    # Every control token and the name of the step have an underscore, however the rest is written.
    if role not in {"user", "assistant"} or ("_" not in body and "\\u" not in body and body.isascii()):
        return False
    try:
        said = _entry_body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return False
    if role == "user":
        kind = _get_provenance_kind(said.provenance)
        return kind == ANNOUNCE_STEP_KIND or (kind is not None and _is_silence(said.content))
    return _is_silence(said.content)


def _get_provenance_kind(provenance: object) -> object:
    """What a person has typed has none, and is shown whatever it is."""
    return cast("dict[str, object]", provenance).get("kind") if isinstance(provenance, dict) else None


def _is_silence(content: object) -> bool:
    text = content if isinstance(content, str) else _extract_text(content)
    return bool(text and len(text) <= MAX_TOKEN_CHARACTERS and text.strip()) and sanitize.is_silence(text)


def _extract_text(content: object) -> str:
    """The words of blocks; none where something else than words and thoughts is among them."""
    blocks = cast("list[object]", content) if isinstance(content, list) else []
    texts: list[str] = []
    for each in blocks:
        block = cast("dict[str, object]", each) if isinstance(each, dict) else {}
        text = block.get("text")
        if block.get("type") == "text" and isinstance(text, str):
            texts.append(text)
        elif block.get("type") != "thinking":
            return ""
    return "".join(texts)
