"""Converts between the entries of `sessions.json` and session rows.

Each known name becomes a column if its value fits; everything else is kept in `extra`, so that an export returns it.
This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from antiphon.keys import SessionKey
from antiphon.messages import THINKING_LEVELS
from antiphon.store import Param, Row

MAX_COLUMN_CHARACTERS = 1024  # of one column
MAX_EXTRA_BYTES = 256 * 1024

_TEXT_FIELDS = {
    "label": "label",
    "display_name": "displayName",
    "subject": "subject",
    "last_channel": "lastChannel",
    "last_to": "lastTo",
    "last_account": "lastAccountId",
    "last_thread": "lastThreadId",
    "last_model": "model",
    "verbose": "verboseLevel",
    "channel": "channel",
}
_CHOICE_FIELDS = {
    "thinking": ("thinkingLevel", set(THINKING_LEVELS)),
    "send_policy": ("sendPolicy", {"allow", "deny"}),
    "chat_type": ("chatType", {"direct", "group", "channel"}),
}
_FLAG_FIELDS = {"system_sent": "systemSent", "aborted_last_run": "abortedLastRun"}
_COUNT_FIELDS = {
    "input_tokens": "inputTokens",
    "output_tokens": "outputTokens",
    "total_tokens": "totalTokens",
    "context_tokens": "contextTokens",
}
_EMPTY_BY_DEFAULT_FIELDS = {*_FLAG_FIELDS.values(), *_COUNT_FIELDS.values()}
_ROUTE_FIELDS = {
    "last_channel": "channel",
    "last_to": "to",
    "last_account": "accountId",
    "last_thread": "threadId",
}
_CHAT_COLUMNS = (*_ROUTE_FIELDS, "channel", "chat_type")
_SETTING_COLUMNS = ("label", "display_name", "subject", "model", "thinking", "verbose")
_OLD_CHAT_TYPES = {"dm": "direct", "room": "channel"}
CONVERSATIONS_FIELD = "conversations"
"""Every conversation of a key whose file exists, oldest first, including the current one.

A field of Antiphon's own that other programs ignore; written only if a key has had more than one conversation.
"""

_DROPPED_FIELDS = {
    "sessionId",
    "updatedAt",
    "archivedAt",
    "sessionFile",
    "skillsSnapshot",
    "systemPromptReport",
    CONVERSATIONS_FIELD,
}
"""Fields represented differently here, or caches and paths that mean nothing outside the program that wrote them."""


class ConversationRecord(msgspec.Struct, rename="camel", frozen=True, omit_defaults=True):
    """One conversation of a key, as listed in `conversations`. `reason` is why it was started."""

    session_id: str
    reason: str = "imported"
    ended_at: int | None = None


def parse_conversation_records(entry: Mapping[str, Any]) -> list[ConversationRecord]:
    """Returns the conversations listed in an entry; other programs' data under that name is ignored."""
    try:
        return msgspec.convert(entry.get(CONVERSATIONS_FIELD, []), list[ConversationRecord])
    except msgspec.ValidationError:
        return []


def build_columns(
    entry: Mapping[str, Any], key: SessionKey, known_model: Callable[[str], bool]
) -> dict[str, Param]:
    """Returns the columns that an entry sets. A model override that is not configured here stays in `extra`."""
    rest = {name: value for name, value in entry.items() if name not in _DROPPED_FIELDS}
    columns: dict[str, Param] = {column: _take_text(rest, name) for column, name in _TEXT_FIELDS.items()}
    columns |= {
        column: _take_choice(rest, name, allowed) for column, (name, allowed) in _CHOICE_FIELDS.items()
    }
    columns |= {column: int(_take_flag(rest, name)) for column, name in _FLAG_FIELDS.items()}
    columns |= {column: _take_count(rest, name) or 0 for column, name in _COUNT_FIELDS.items()}
    columns["context_tokens"] = columns["context_tokens"] or None
    route = entry.get("deliveryContext")
    if isinstance(route, dict):
        for column, name in _ROUTE_FIELDS.items():
            columns[column] = columns[column] or _take_text(dict(cast("dict[str, Any]", route)), name)
    columns["channel"] = columns["channel"] or key.channel
    columns["chat_type"] = columns["chat_type"] or key.chat_type
    columns["model"] = _take_model_override(rest, known_model)
    return {**columns, "extra": _encode_extra(rest)}


def merge_columns(row: Row, imported: Mapping[str, Param]) -> dict[str, Param]:
    """Returns the columns of an existing session, with those it lacks taken from an imported entry of the same key.

    Columns belong to the key, not to one conversation. Values set here stay, with one exception: of two send policies
    the stricter one wins, so an imported `allow` is never adopted. A route is adopted as a whole or not at all, since
    half of one would lead elsewhere. Counters belong to a conversation and are not adopted.
    """
    after: dict[str, Param] = {column: row[column] for column in imported}
    after |= {column: imported[column] for column in _SETTING_COLUMNS if row[column] is None}
    has_route = any(row[column] for column in _ROUTE_FIELDS)
    if not has_route:
        after |= {column: row[column] or imported[column] for column in _CHAT_COLUMNS}
    if imported["send_policy"] == "deny":
        after["send_policy"] = "deny"
    extra = parse_extra(imported)
    if has_route:
        extra.pop("deliveryContext", None)
    return {**after, "extra": _encode_extra({**extra, **parse_extra(row)}) or row["extra"]}


def list_differing_fields(one: Row, other: Row) -> list[str]:
    """Returns the names of the fields that `other` sets differently from `one`, or in addition."""
    before, after = _collect_fields(one), _collect_fields(other)
    present = {name: value for name, value in after.items() if value or name not in _EMPTY_BY_DEFAULT_FIELDS}
    return [name for name, value in present.items() if before.get(name) != value]


def build_index_entry(row: Row) -> dict[str, Any]:
    """Returns a session as an entry: its columns, and the extra fields that an import kept."""
    known = {
        "sessionId": row["session_id"],
        "updatedAt": row["updated_at"],
        "spawnedBy": row["parent_key"],
        "subagentRole": row["role"],
        "archivedAt": row["archived_at"],
    }
    return _collect_fields(row) | {name: value for name, value in known.items() if value is not None}


def _collect_fields(row: Row) -> dict[str, Any]:
    """Returns the fields that `build_columns` turned into columns, in their original form."""
    known = {name: row[column] for column, name in (_TEXT_FIELDS | _COUNT_FIELDS).items()}
    known |= {name: row[column] for column, (name, _) in _CHOICE_FIELDS.items()}
    known |= {name: bool(row[column]) for column, name in _FLAG_FIELDS.items()}
    if row["model"]:
        known["providerOverride"], _, known["modelOverride"] = row["model"].partition("/")
    return parse_extra(row) | {name: value for name, value in known.items() if value is not None}


def parse_extra(row: Row) -> dict[str, Any]:
    return msgspec.json.decode(row["extra"], type=dict[str, Any]) if row["extra"] else {}


def get_working_directory(row: Row) -> str:
    """Returns the working directory that an import recorded, or an empty text."""
    cwd = parse_extra(row).get("cwd")
    return cwd if isinstance(cwd, str) else ""


def _take_text(rest: dict[str, Any], name: str) -> str | None:
    value = rest.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # threads and chats are numbers on some channels
    if not isinstance(value, str) or not 0 < len(value) <= MAX_COLUMN_CHARACTERS:
        return None
    del rest[name]
    return value


def _take_choice(rest: dict[str, Any], name: str, allowed: set[str]) -> str | None:
    value = rest.get(name)
    value = _OLD_CHAT_TYPES.get(value, value) if isinstance(value, str) else None
    if value not in allowed:
        return None
    del rest[name]
    return value


def _take_flag(rest: dict[str, Any], name: str) -> bool:
    return isinstance(rest.get(name), bool) and bool(rest.pop(name))


def _take_count(rest: dict[str, Any], name: str) -> int | None:
    value = rest.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        return None
    return rest.pop(name)


def _take_model_override(rest: dict[str, Any], known_model: Callable[[str], bool]) -> str | None:
    provider, model = rest.get("providerOverride"), rest.get("modelOverride")
    if not isinstance(model, str):
        return None
    ref = f"{provider}/{model}" if isinstance(provider, str) and provider else model
    if not known_model(ref):
        return None
    rest.pop("providerOverride", None)
    del rest["modelOverride"]
    return ref


def _encode_extra(rest: dict[str, Any]) -> str | None:
    encoded = msgspec.json.encode(rest)
    return encoded.decode() if rest and len(encoded) <= MAX_EXTRA_BYTES else None
