"""Detects internal entries of a transcript, which are hidden from people.

Internal are: answers that are only control tokens, the prompts of announce steps, announcements that were not posted,
and reports whose delivery was blocked. They stay in the transcript under their numbers, so that it is complete; views
for people leave them out.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from antiphon.engine.outbox import sanitize

ANNOUNCE_STEP_KIND = "announce_step"
MAX_TOKEN_CHARACTERS = 1000
"""Maximum length of an answer that is only control tokens. A longer one is shown."""


class _EntryBody(msgspec.Struct, frozen=True):
    """The relevant fields of an entry, even if another program wrote it and it is no valid `Message`."""

    content: Any = None
    provenance: Any = None


_entry_body_decoder = msgspec.json.Decoder(_EntryBody)


def is_internal_entry(role: str, body: str) -> bool:
    """Whether an entry is internal by its content. `Entry.is_internal` also considers its delivery."""
    # Every control token and the kind of announce steps contain an underscore, however they are encoded.
    if role not in {"user", "assistant"} or ("_" not in body and "\\u" not in body and body.isascii()):
        return False
    try:
        entry = _entry_body_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return False
    if role == "user":
        kind = _get_provenance_kind(entry.provenance)
        return kind == ANNOUNCE_STEP_KIND or (kind is not None and _is_silence(entry.content))
    return _is_silence(entry.content)


def _get_provenance_kind(provenance: object) -> object:
    """Return the kind of provenance; None for text typed by a person, which is always shown."""
    return cast("dict[str, object]", provenance).get("kind") if isinstance(provenance, dict) else None


def _is_silence(content: object) -> bool:
    text = content if isinstance(content, str) else _extract_text(content)
    return bool(text and len(text) <= MAX_TOKEN_CHARACTERS and text.strip()) and sanitize.is_silence(text)


def _extract_text(content: object) -> str:
    """Return the text of blocks; empty if any block is neither text nor thinking."""
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
