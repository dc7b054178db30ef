"""The entries of `sessions.json`: what such a file says of a session, and what our rows say of it.

Each known name becomes a column if its value can be one; everything else is kept in `extra`, so that an export
gives it back. Pure data in, pure data out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from antiphon.engine.words import THINKING
from antiphon.keys import SessionKey
from antiphon.store import Param, Row

LONGEST_TEXT = 1024  # characters of one column
MOST_EXTRA = 256 * 1024  # bytes

_TEXTS = {
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
_CHOICES = {
    "thinking": ("thinkingLevel", set(THINKING)),
    "send_policy": ("sendPolicy", {"allow", "deny"}),
    "chat_type": ("chatType", {"direct", "group", "channel"}),
}
_FLAGS = {"system_sent": "systemSent", "aborted_last_run": "abortedLastRun"}
_COUNTS = {
    "input_tokens": "inputTokens",
    "output_tokens": "outputTokens",
    "total_tokens": "totalTokens",
    "context_tokens": "contextTokens",
}
_NOTHING_BY_DEFAULT = {*_FLAGS.values(), *_COUNTS.values()}
_ROUTE = {"last_channel": "channel", "last_to": "to", "last_account": "accountId", "last_thread": "threadId"}
_PLACE = (*_ROUTE, "channel", "chat_type")
_SETTINGS = ("label", "display_name", "subject", "model", "thinking", "verbose")
_OLD_CHAT_TYPES = {"dm": "direct", "room": "channel"}
CONVERSATIONS = "conversations"
"""Every conversation of a key whose file is there, oldest first and with the current one among them.

A name of ours that other programs pass over; only where a key has had more than one."""

_LEFT_BEHIND = {
    "sessionId",
    "updatedAt",
    "archivedAt",
    "sessionFile",
    "skillsSnapshot",
    "systemPromptReport",
    CONVERSATIONS,
}
"""Said in other ways here, or caches and paths that mean nothing outside the program that wrote them."""


class Told(msgspec.Struct, rename="camel", frozen=True, omit_defaults=True):
    """One conversation of a key, as `conversations` tells of it. `reason` is why it was begun."""

    session_id: str
    reason: str = "imported"
    ended_at: int | None = None


def told_in(entry: Mapping[str, Any]) -> list[Told]:
    """The conversations that an entry tells of. What another program keeps under that name is none."""
    try:
        return msgspec.convert(entry.get(CONVERSATIONS, []), list[Told])
    except msgspec.ValidationError:
        return []


def columns(
    entry: Mapping[str, Any], key: SessionKey, known_model: Callable[[str], bool]
) -> dict[str, Param]:
    """The columns an entry fills. An override of a model that is not configured here stays in `extra`."""
    rest = {name: value for name, value in entry.items() if name not in _LEFT_BEHIND}
    found: dict[str, Param] = {column: _text(rest, name) for column, name in _TEXTS.items()}
    found |= {column: _choice(rest, name, allowed) for column, (name, allowed) in _CHOICES.items()}
    found |= {column: int(_flag(rest, name)) for column, name in _FLAGS.items()}
    found |= {column: _count(rest, name) or 0 for column, name in _COUNTS.items()}
    found["context_tokens"] = found["context_tokens"] or None
    route = entry.get("deliveryContext")
    if isinstance(route, dict):
        for column, name in _ROUTE.items():
            found[column] = found[column] or _text(dict(cast("dict[str, Any]", route)), name)
    found["channel"] = found["channel"] or key.channel
    found["chat_type"] = found["chat_type"] or key.chat_type
    found["model"] = _override(rest, known_model)
    return {**found, "extra": _extra(rest)}


def merged(row: Row, told: Mapping[str, Param]) -> dict[str, Param]:
    """The columns of a session that is here, with what an entry of the same key told and it has nothing of.

    They belong to the key and not to one conversation, so they are there whichever of them is current. What was
    decided here stays, with one exception: of two send policies the stricter one holds, so an imported `allow` is
    not taken even where nothing was said. A route is taken as a whole or not at all: half of one leads elsewhere.
    Counters are those of a conversation, and the ledger here knows nothing of theirs.
    """
    after: dict[str, Param] = {column: row[column] for column in told}
    after |= {column: told[column] for column in _SETTINGS if row[column] is None}
    routed = any(row[column] for column in _ROUTE)
    if not routed:
        after |= {column: row[column] or told[column] for column in _PLACE}
    if told["send_policy"] == "deny":
        after["send_policy"] = "deny"
    theirs = extra_of(told)
    if routed:
        theirs.pop("deliveryContext", None)
    return {**after, "extra": _extra({**theirs, **extra_of(row)}) or row["extra"]}


def unlike(one: Row, other: Row) -> list[str]:
    """The names under which the columns of `other` say something else than those of `one`, or something more."""
    before, after = _told(one), _told(other)
    said = {name: value for name, value in after.items() if value or name not in _NOTHING_BY_DEFAULT}
    return [name for name, value in said.items() if before.get(name) != value]


def entry_of(row: Row) -> dict[str, Any]:
    """A session as an entry: what we know, and what an import left with us."""
    known = {
        "sessionId": row["session_id"],
        "updatedAt": row["updated_at"],
        "spawnedBy": row["parent_key"],
        "subagentRole": row["role"],
        "archivedAt": row["archived_at"],
    }
    return _told(row) | {name: value for name, value in known.items() if value is not None}


def _told(row: Row) -> dict[str, Any]:
    """What `columns` makes columns of, as it was."""
    known = {name: row[column] for column, name in (_TEXTS | _COUNTS).items()}
    known |= {name: row[column] for column, (name, _) in _CHOICES.items()}
    known |= {name: bool(row[column]) for column, name in _FLAGS.items()}
    if row["model"]:
        known["providerOverride"], _, known["modelOverride"] = row["model"].partition("/")
    return extra_of(row) | {name: value for name, value in known.items() if value is not None}


def extra_of(row: Row) -> dict[str, Any]:
    return msgspec.json.decode(row["extra"], type=dict[str, Any]) if row["extra"] else {}


def _text(rest: dict[str, Any], name: str) -> str | None:
    value = rest.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # threads and chats are numbers on some channels
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
        return None
    del rest[name]
    return value


def _choice(rest: dict[str, Any], name: str, allowed: set[str]) -> str | None:
    value = rest.get(name)
    value = _OLD_CHAT_TYPES.get(value, value) if isinstance(value, str) else None
    if value not in allowed:
        return None
    del rest[name]
    return value


def _flag(rest: dict[str, Any], name: str) -> bool:
    return isinstance(rest.get(name), bool) and bool(rest.pop(name))


def _count(rest: dict[str, Any], name: str) -> int | None:
    value = rest.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        return None
    return rest.pop(name)


def _override(rest: dict[str, Any], known_model: Callable[[str], bool]) -> str | None:
    provider, model = rest.get("providerOverride"), rest.get("modelOverride")
    if not isinstance(model, str):
        return None
    ref = f"{provider}/{model}" if isinstance(provider, str) and provider else model
    if not known_model(ref):
        return None
    rest.pop("providerOverride", None)
    del rest["modelOverride"]
    return ref


def _extra(rest: dict[str, Any]) -> str | None:
    encoded = msgspec.json.encode(rest)
    return encoded.decode() if rest and len(encoded) <= MOST_EXTRA else None
