"""The grammar of session keys: what a key means, how it is spelled, and which shorter forms a caller may use.

A stored key is `agent:<agentId>:<rest>`, or `main` for the one session of `session.scope = "global"`. Ids
that come from a channel are opaque: they keep their case and their colons, and only what would be ambiguous
is escaped, as `%25` (%), `%3A` (:) or `%20` (a trailing space). Every `SessionKey` that can be built parses
back to itself, so two sessions never share a key.

Nothing here knows whether a session exists or who may see it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

import msgspec

from antiphon.errors import InvalidKey

KeyShape = Literal[
    "main", "global", "group", "channel", "direct", "subagent", "acp", "cron", "hook", "node",
    "dashboard", "openai", "openai-user", "other",
]  # fmt: skip
OwnedKeyShape = Literal["subagent", "acp", "cron", "hook", "node", "dashboard", "openai", "openai-user"]
SessionKind = Literal["main", "group", "cron", "hook", "node", "other"]
ChatType = Literal["direct", "group", "channel"]
SessionScope = Literal["per-sender", "global"]
DmScope = Literal["main", "per-peer", "per-channel-peer", "per-account-channel-peer"]

MAX_KEY_CHARACTERS = 512  # characters of a whole key
DEFAULT_AGENT_ID = "main"
REHEARSAL_PROVIDER = "rehearsal"
"""Name of the built-in offline provider and of its only model; no configured provider may use it."""
REHEARSAL_MODEL_REF = f"{REHEARSAL_PROVIDER}/{REHEARSAL_PROVIDER}"
DEFAULT_ACCOUNT = "default"
WEBCHAT_CHANNEL = "webchat"
"""The channel of a person who writes through the gateway itself: page, command line, WebSocket, HTTP."""

_OWNED_SHAPES: dict[str, KeyShape] = {
    "subagent": "subagent",
    "acp": "acp",
    "cron": "cron",
    "hook": "hook",
    "dashboard": "dashboard",
    "openai": "openai",
    "openai-user": "openai-user",
}
_CHAT_TYPES: dict[str, ChatType] = {
    "group": "group",
    "channel": "channel",
    "direct": "direct",
    "dm": "direct",
}
_RESERVED_WORDS = frozenset(
    {"agent", "main", "node", "global", "unknown", "current", *_OWNED_SHAPES, *_CHAT_TYPES}
)
"""Names a channel cannot have, because a key or reference that starts with one means something else."""

_LEGACY_SHARED_KEY = "global"  # the key of the shared session before schema 9
_SHARED_KEYS = ("main", _LEGACY_SHARED_KEY)
"""The stored key of the session that all agents share, and the one used before schema 9."""

_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FULL_KEY_PATTERN = re.compile(r"agent:([^:]+):(.+)", re.IGNORECASE | re.ASCII | re.DOTALL)
# The account is tried last: `telegram:direct:direct:x` is the peer `direct:x`, not an account named `direct`.
_CHAT_PATTERN = re.compile(
    r"([^:]+):(?:([^:]+):(?=(?:direct|dm):))??(group|channel|direct|dm):(.+)",
    re.IGNORECASE | re.ASCII | re.DOTALL,
)
_THREAD_PATTERN = re.compile(r"(.+):(thread|topic):([^:]+)", re.DOTALL)
_THREAD_COLON_PATTERN = re.compile(r"(?:(?<=:thread)|(?<=:topic)):")
_ESCAPE_PATTERN = re.compile(r"%(25|3A|20)")
_ESCAPED_CHARACTERS = {"25": "%", "3A": ":", "20": " "}
_UNPRINTABLE_PATTERN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_UUID_PATTERN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)
_BLANK_CHARACTERS = " \t\r\n"


class ChatThread(msgspec.Struct, frozen=True):
    """A thread inside a chat. Telegram calls its forum threads topics, and so do the keys."""

    id: str
    word: Literal["thread", "topic"] = "thread"


_KeyParts: TypeAlias = tuple[KeyShape, str, str | None, str | None, ChatThread | None]


class SessionKey(msgspec.Struct, frozen=True):
    """A canonical key, taken apart. `str(key)` is what is stored; the builders below lower-case the names."""

    agent_id: str
    """Empty only for the global session, which belongs to no single agent."""
    shape: KeyShape
    id: str = ""
    """The chat, peer, job or uuid; for `other` everything after the agent id, unchanged."""
    channel: str | None = None
    account: str | None = None
    thread: ChatThread | None = None

    def __post_init__(self) -> None:
        if self.shape == "global":
            self._check_global()
            return
        text = str(self)
        _check_text(text)
        self._check_no_empty_parts(text)
        if self.agent_id != validate_agent_id(self.agent_id):
            raise InvalidKey(
                f"Agent id {self.agent_id!r} is not lower-case.", f"Write {self.agent_id.lower()!r}."
            )
        if self.channel is not None:
            _check_channel(self.channel)
        if self.shape == "other":
            _check_other(self.id)
        if _parse_rest(self.rest) != (self.shape, self.id, self.channel, self.account, self.thread):
            raise InvalidKey(
                f"Session key {text!r} would not parse back to the parts it was built from.",
                "Give every part a value, and do not use a word of the key grammar as an account name.",
                key=text,
            )

    def _check_no_empty_parts(self, text: str) -> None:
        needed = [self.channel, self.account, self.thread and self.thread.id]
        if "" in needed or (self.shape != "main" and not self.id):
            raise InvalidKey(
                f"Session key {text!r} has an empty part.", "Write an id after each word.", key=text
            )

    def _check_global(self) -> None:
        if any((self.agent_id, self.id, self.channel, self.account, self.thread)):
            raise InvalidKey(
                "The key of the session that all agents share has no agent, id or thread.",
                "Use keys.GLOBAL_KEY unchanged.",
            )

    @property
    def is_spawned(self) -> bool:
        """Whether it is the key of a sub-agent: of a model, or of an ACP program."""
        return self.shape in ("subagent", "acp")

    def __str__(self) -> str:
        return "main" if self.shape == "global" else f"agent:{self.agent_id}:{self.rest}"

    @property
    def rest(self) -> str:
        """The key without `agent:<agentId>:`."""
        thread = f":{self.thread.word}:{_escape_part(self.thread.id)}" if self.thread else ""
        return f"{self._format_body()}{thread}"

    def _format_body(self) -> str:
        if self.shape in ("main", "global"):
            return "main"
        if self.shape == "other":
            return self.id
        if self.shape == "node":
            return f"node-{_escape_id(self.id)}"
        if self.shape in ("group", "channel", "direct"):
            account = None if self.account is None else _escape_part(self.account)
            names = [name for name in (self.channel, account) if name is not None]
            return ":".join([*names, self.shape, _escape_chat_id(self.id)])
        return f"{self.shape}:{_escape_id(self.id)}"

    @property
    def kind(self) -> SessionKind:
        """The session's kind in lists. A thread of a group is a `group`, one of a direct chat `other`."""
        if self.shape in ("group", "channel"):
            return "group"
        if self.shape in ("main", "global"):
            return "other" if self.thread else "main"
        if self.shape in ("cron", "hook", "node"):
            return self.shape
        return "other"

    @property
    def chat_type(self) -> ChatType | None:
        """The kind of chat, if the key shows it. Direct messages go to a main session."""
        if self.shape in ("main", "global"):
            return "direct"
        return self.shape if self.shape in ("group", "channel", "direct") else None

    @property
    def parent(self) -> SessionKey | None:
        """The chat that a thread belongs to."""
        return msgspec.structs.replace(self, thread=None) if self.thread else None


class SessionIdRef(msgspec.Struct, frozen=True):
    """A reference that is not a key; the store looks it up as a session id."""

    value: str


GLOBAL_KEY = SessionKey(agent_id="", shape="global")
"""The one session that every main alias means when `session.scope = "global"`: stored and shown as `main`."""


def normalize_agent_id(raw: str) -> str:
    """The nearest valid agent id, for names that were not chosen as an id; empty gives `main`.

    Ids given by callers are checked with `validate_agent_id` instead: guessing could reach another agent.
    """
    text = raw.strip().lower()
    if _NAME_PATTERN.fullmatch(text):
        return text
    return re.sub(r"[^a-z0-9_-]+", "-", text).lstrip("-_").rstrip("-")[:64] or DEFAULT_AGENT_ID


def validate_agent_id(text: str) -> str:
    """The agent id in lower case.

    Raises:
        InvalidKey: it is not 1–64 letters, digits, `_` or `-` that start with a letter or digit.
    """
    if not _NAME_PATTERN.fullmatch(text):
        raise InvalidKey(
            f"Agent id {text[:80]!r} is not valid.",
            "Use 1 to 64 letters, digits, '_' or '-', the first a letter or digit; agents_list shows them.",
            field="agentId",
        )
    return text.lower()


@lru_cache(maxsize=4096)  # the same few sessions are parsed again and again
def parse(text: str) -> SessionKey:
    """Parses a stored key. Only the canonical spelling is accepted, so that a session has one key.

    Raises:
        InvalidKey: the text is not a key, or not its canonical spelling.
    """
    if text in _SHARED_KEYS:
        return GLOBAL_KEY
    key = _parse_full_key(text)
    if str(key) != text:
        raise InvalidKey(f"Session key {text!r} is not in its stored form.", f"Write {str(key)!r}.", key=text)
    return key


def canonicalize(
    reference: str,
    *,
    agent_id: str,
    main_key: str = "main",
    scope: SessionScope = "per-sender",
    current: SessionKey | None = None,
) -> SessionKey | SessionIdRef:
    """Turns a caller's reference into the stored key, or into a session id to look up.

    `agent_id` is the agent that short forms belong to: the caller's own, or for an operator the default one.
    `main_key` is only another name for `main`; the stored key always says `main`.

    Raises:
        InvalidKey: the reference is empty, malformed, or names a session that no caller may name.
    """
    return _canonicalize_text(_trim_reference(reference), agent_id, main_key, scope, current)


@lru_cache(maxsize=4096)  # only called with texts no longer than a key
def _canonicalize_text(
    text: str, agent_id: str, main_key: str, scope: SessionScope, current: SessionKey | None
) -> SessionKey | SessionIdRef:
    if text.lower() == "current":
        return _apply_scope(_require_current(current), scope)
    if _UUID_PATTERN.fullmatch(text):
        return SessionIdRef(text)
    if text[:6].lower() == "agent:":
        key = _parse_full_key(text)
    else:
        parts = _parse_rest(text)
        if parts[0] == "other" and text.lower() != main_key.lower():
            return SessionIdRef(text)
        key = SessionKey(validate_agent_id(agent_id), *parts)
    if key.shape == "other" and key.id.lower() == main_key.lower():
        key = SessionKey(key.agent_id, "main")
    return _apply_scope(key, scope)


def display_key(key: SessionKey, *, viewer_agent_id: str | None) -> str:
    """The key as an agent sees it: its own main, cron, hook and node sessions short, all others in full.

    `None` is a viewer without an agent, who gets full keys. `canonicalize` accepts every result.
    """
    if key.agent_id == viewer_agent_id and key.kind in ("main", "cron", "hook", "node"):
        return key.rest
    return str(key)


def display_stored_key(text: str, *, viewer_agent_id: str | None) -> str:
    """`display_key` of a stored key, parsed only where that can make a difference, since lists have many."""
    if text == _LEGACY_SHARED_KEY:
        return str(GLOBAL_KEY)
    if viewer_agent_id is None or not text.startswith(f"agent:{viewer_agent_id}:"):
        return text
    return display_key(parse(text), viewer_agent_id=viewer_agent_id)


def display_full_key(text: str) -> str:
    """A stored key in full, as every agent and operator sees it; never `global`."""
    return display_stored_key(text, viewer_agent_id=None)


def resolve_list_channel(kind: SessionKind, recorded_channel: str | None, last_channel: str | None) -> str:
    """The channel that a list shows. A group belongs to its own channel, whichever was used last."""
    if kind in ("cron", "hook", "node"):
        return "internal"
    return (recorded_channel if kind == "group" else last_channel) or "unknown"


def main_session_key(agent_id: str, *, scope: SessionScope = "per-sender") -> SessionKey:
    return _apply_scope(SessionKey(validate_agent_id(agent_id), "main"), scope)


def group_key(
    agent_id: str, channel: str, chat_id: str, *, shape: Literal["group", "channel"] = "group"
) -> SessionKey:
    return SessionKey(validate_agent_id(agent_id), shape, chat_id, channel=channel.lower())


def direct_key(
    agent_id: str,
    channel: str,
    peer: str,
    *,
    account_id: str | None = None,
    dm_scope: DmScope = "main",
    identity_links: Mapping[str, Sequence[str]] | None = None,
    scope: SessionScope = "per-sender",
) -> SessionKey:
    """The session a direct message belongs to.

    `per-peer` shares one session between all channels on which a peer has the same id or linked name.
    """
    if dm_scope == "main":
        return main_session_key(agent_id, scope=scope)
    return SessionKey(
        validate_agent_id(agent_id),
        "direct",
        _resolve_linked_peer(channel, peer, identity_links or {}),
        channel=None if dm_scope == "per-peer" else channel.lower(),
        account=(account_id or DEFAULT_ACCOUNT) if dm_scope == "per-account-channel-peer" else None,
    )


def thread_key(
    parent: SessionKey, thread_id: str, *, word: Literal["thread", "topic"] = "thread"
) -> SessionKey:
    """The key of a thread in a chat or main session. Threads do not nest: an existing thread is replaced."""
    return msgspec.structs.replace(parent, thread=ChatThread(thread_id, word))


def owned_key(agent_id: str, shape: OwnedKeyShape, owned_id: str) -> SessionKey:
    """A session without a chat: a sub-agent, job, hook, node, dashboard tab or HTTP conversation."""
    return SessionKey(validate_agent_id(agent_id), shape, owned_id)


def subagent_key(agent_id: str, uuid: str, *, is_program: bool = False) -> SessionKey:
    """The key of a sub-agent; one whose agent is an ACP program has a word of its own."""
    return owned_key(agent_id, "acp" if is_program else "subagent", uuid)


def _resolve_linked_peer(channel: str, peer: str, links: Mapping[str, Sequence[str]]) -> str:
    aliases = {peer.lower(), f"{channel}:{peer}".lower()}
    names = (name for name, peers in links.items() if any(entry.lower() in aliases for entry in peers))
    return next(names, peer)


def _apply_scope(key: SessionKey, scope: SessionScope) -> SessionKey:
    return GLOBAL_KEY if scope == "global" and key.kind == "main" else key


def _trim_reference(reference: str) -> str:
    text = reference.strip(_BLANK_CHARACTERS)
    _check_text(text)
    if not text:
        raise InvalidKey(
            "Session reference '' is empty.", "Write 'main', 'current' or a key from sessions_list."
        )
    if text.lower() in ("global", "unknown"):
        raise InvalidKey(f"Session {text!r} cannot be named.", "Write 'main' for the main session.", key=text)
    return text


def _require_current(current: SessionKey | None) -> SessionKey:
    if current is None:
        raise InvalidKey(
            "Session 'current' means the caller's own session, and this caller has none.",
            "Write 'main' or a key from sessions_list.",
        )
    return current


@lru_cache(maxsize=8192)  # every operation parses a key, and most parse the same few
def _parse_full_key(text: str) -> SessionKey:
    match = _FULL_KEY_PATTERN.fullmatch(text)
    if not match:
        raise InvalidKey(
            f"Session key {text[:80]!r} is not valid.",
            "Write agent:<agentId>:main or agent:<agentId>:<channel>:group:<id>; sessions_list shows them.",
            key=text,
        )
    return SessionKey(validate_agent_id(match[1]), *_parse_rest(match[2]))


def _parse_rest(rest: str) -> _KeyParts:
    """Parses the part after the agent id, in any accepted spelling. The caller checks the result."""
    head, _, tail = rest.partition(":")
    word = head.lower()
    if word in _OWNED_SHAPES:
        return (_OWNED_SHAPES[word], _unescape(tail), None, None, None)
    if rest[:5].lower() in ("node-", "node:"):
        return ("node", _unescape(rest[5:]), None, None, None)
    if word in ("direct", "dm"):
        return _parse_chat("direct", tail)
    if word == "main":
        body, thread = _split_thread(rest)
        return (
            ("main", "", None, None, thread) if body.lower() == "main" else ("other", rest, None, None, None)
        )
    match = _CHAT_PATTERN.fullmatch(rest)
    if not match:
        return ("other", rest, None, None, None)
    account = None if match[2] is None else _unescape(match[2])
    return _parse_chat(_CHAT_TYPES[match[3].lower()], match[4], match[1].lower(), account)


def _parse_chat(
    shape: ChatType, tail: str, channel: str | None = None, account: str | None = None
) -> _KeyParts:
    body, thread = _split_thread(tail)
    return (shape, _unescape(body), channel, account, thread)


def _split_thread(text: str) -> tuple[str, ChatThread | None]:
    match = _THREAD_PATTERN.fullmatch(text)
    if not match:
        return text, None
    return match[1], ChatThread(_unescape(match[3]), "topic" if match[2] == "topic" else "thread")


def _escape_id(text: str) -> str:
    """Escapes a final id: a `%` that would read as an escape, and a trailing space, which trimming would remove."""
    text = _ESCAPE_PATTERN.sub(r"%25\1", text)
    return f"{text[:-1]}%20" if text.endswith(" ") else text


def _escape_chat_id(text: str) -> str:
    return _THREAD_COLON_PATTERN.sub("%3A", _escape_id(text))


def _escape_part(text: str) -> str:
    return _escape_id(text).replace(":", "%3A")


def _unescape(text: str) -> str:
    return _ESCAPE_PATTERN.sub(lambda match: _ESCAPED_CHARACTERS[match[1]], text)


def _check_text(text: str) -> None:
    if len(text) > MAX_KEY_CHARACTERS:
        raise InvalidKey(
            f"Session key {text[:40] + '…'!r} has {len(text)} characters.",
            f"Use at most {MAX_KEY_CHARACTERS}.",
            max=MAX_KEY_CHARACTERS,
        )
    if _UNPRINTABLE_PATTERN.search(text):
        raise InvalidKey(
            f"Session key {text!r} contains a control character.",
            "Write it without line breaks and control codes.",
        )


def _check_channel(name: str) -> None:
    if (
        not _NAME_PATTERN.fullmatch(name)
        or name != name.lower()
        or name in _RESERVED_WORDS
        or name.startswith("node-")
    ):
        raise InvalidKey(
            f"Channel name {name[:80]!r} is not valid.",
            "Use 1 to 64 lower-case letters, digits, '_' or '-', but no reserved word and not 'node-…'.",
            field="channel",
        )


def _check_other(rest: str) -> None:
    parts = rest.split(":")
    if not all(parts) or rest != rest.strip(_BLANK_CHARACTERS):
        raise InvalidKey(f"Session key part {rest!r} has an empty part.", "Put text between all colons.")
    if parts[0].lower() == "agent" or rest.lower() in _RESERVED_WORDS:
        raise InvalidKey(
            f"Session key part {rest!r} is a word of the key grammar.",
            "Write one agent:<agentId>: prefix and a whole form after it, such as main or cron:<jobId>.",
        )
