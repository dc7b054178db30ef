"""The grammar of session keys: what a key says, how it is written, and what a caller may write instead.

A stored key is `agent:<agentId>:<rest>`, or `main` for the one session of `session.scope = "global"`. Ids
that come from a channel are opaque: they keep their case and their colons, and only what would read as
something else is escaped, as `%25` (%), `%3A` (:) or `%20` (a blank at the end). Every `SessionKey` that can
be built reads back as itself, so two sessions never share a key.

Nothing here knows whether a session exists or who may see it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

import msgspec

from antiphon.errors import InvalidKey

Shape = Literal[
    "main", "global", "group", "channel", "direct", "subagent", "acp", "cron", "hook", "node",
    "dashboard", "openai", "openai-user", "other",
]  # fmt: skip
OwnedShape = Literal["subagent", "acp", "cron", "hook", "node", "dashboard", "openai", "openai-user"]
Kind = Literal["main", "group", "cron", "hook", "node", "other"]
ChatType = Literal["direct", "group", "channel"]
Scope = Literal["per-sender", "global"]
DmScope = Literal["main", "per-peer", "per-channel-peer", "per-account-channel-peer"]

MAX_LENGTH = 512  # characters of a whole key
DEFAULT_AGENT_ID = "main"
DEFAULT_ACCOUNT = "default"
WEBCHAT = "webchat"
"""The channel of a person who writes over the gateway itself: page, command line, WebSocket, HTTP."""

_OWNED: dict[str, Shape] = {
    "subagent": "subagent",
    "acp": "acp",
    "cron": "cron",
    "hook": "hook",
    "dashboard": "dashboard",
    "openai": "openai",
    "openai-user": "openai-user",
}
_CHATS: dict[str, ChatType] = {"group": "group", "channel": "channel", "direct": "direct", "dm": "direct"}
_WORDS = frozenset({"agent", "main", "node", "global", "unknown", "current", *_OWNED, *_CHATS})
"""What a channel cannot be called, because a key or a reference that starts so means something else."""

_SHARED_BEFORE = "global"  # what versions before schema 9 store the shared session as
_SHARED = ("main", _SHARED_BEFORE)
"""The stored key of the session that all agents share, and the one used before schema 9."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FULL = re.compile(r"agent:([^:]+):(.+)", re.IGNORECASE | re.ASCII | re.DOTALL)
# The account is tried last: `telegram:direct:direct:x` is the peer `direct:x`, not an account named `direct`.
_CHAT = re.compile(
    r"([^:]+):(?:([^:]+):(?=(?:direct|dm):))??(group|channel|direct|dm):(.+)",
    re.IGNORECASE | re.ASCII | re.DOTALL,
)
_THREAD = re.compile(r"(.+):(thread|topic):([^:]+)", re.DOTALL)
_THREAD_COLON = re.compile(r"(?:(?<=:thread)|(?<=:topic)):")
_ESCAPE = re.compile(r"%(25|3A|20)")
_ESCAPED = {"25": "%", "3A": ":", "20": " "}
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE | re.ASCII)
_BLANKS = " \t\r\n"


class Thread(msgspec.Struct, frozen=True):
    """A thread inside a chat. Telegram calls its forum threads topics, and so do the keys."""

    id: str
    word: Literal["thread", "topic"] = "thread"


_Parts: TypeAlias = tuple[Shape, str, str | None, str | None, Thread | None]


class SessionKey(msgspec.Struct, frozen=True):
    """A canonical key, taken apart. `str(key)` is what is stored; the builders below lower-case the names."""

    agent_id: str
    """Empty only for the global session, which belongs to no single agent."""
    shape: Shape
    id: str = ""
    """The chat, peer, job or uuid; for `other` everything after the agent id, as it is."""
    channel: str | None = None
    account: str | None = None
    thread: Thread | None = None

    def __post_init__(self) -> None:
        if self.shape == "global":
            self._check_global()
            return
        text = str(self)
        _check_text(text)
        self._check_filled(text)
        if self.agent_id != checked_agent_id(self.agent_id):
            raise InvalidKey(
                f"Agent id {self.agent_id!r} is not lower-case.", f"Write {self.agent_id.lower()!r}."
            )
        if self.channel is not None:
            _check_channel(self.channel)
        if self.shape == "other":
            _check_other(self.id)
        if _read(self.rest) != (self.shape, self.id, self.channel, self.account, self.thread):
            raise InvalidKey(
                f"Session key {text!r} would be read as something else than what it was made of.",
                "Give every part a value and use no word of the key grammar as an account name.",
                key=text,
            )

    def _check_filled(self, text: str) -> None:
        needed = [self.channel, self.account, self.thread and self.thread.id]
        if "" in needed or (self.shape != "main" and not self.id):
            raise InvalidKey(
                f"Session key {text!r} has an empty part.", "Write an id after each word.", key=text
            )

    def _check_global(self) -> None:
        if any((self.agent_id, self.id, self.channel, self.account, self.thread)):
            raise InvalidKey(
                "The key of the session that all agents share has no agent, id or thread.",
                "Use keys.GLOBAL as it is.",
            )

    def __str__(self) -> str:
        return "main" if self.shape == "global" else f"agent:{self.agent_id}:{self.rest}"

    @property
    def rest(self) -> str:
        """The key without `agent:<agentId>:`."""
        thread = f":{self.thread.word}:{_write_part(self.thread.id)}" if self.thread else ""
        return f"{self._body()}{thread}"

    def _body(self) -> str:
        if self.shape in ("main", "global"):
            return "main"
        if self.shape == "other":
            return self.id
        if self.shape == "node":
            return f"node-{_write_id(self.id)}"
        if self.shape in ("group", "channel", "direct"):
            account = None if self.account is None else _write_part(self.account)
            names = [name for name in (self.channel, account) if name is not None]
            return ":".join([*names, self.shape, _write_chat_id(self.id)])
        return f"{self.shape}:{_write_id(self.id)}"

    @property
    def kind(self) -> Kind:
        """What a list calls the session. A thread of a group is a `group`, one of a direct chat `other`."""
        if self.shape in ("group", "channel"):
            return "group"
        if self.shape in ("main", "global"):
            return "other" if self.thread else "main"
        if self.shape in ("cron", "hook", "node"):
            return self.shape
        return "other"

    @property
    def chat_type(self) -> ChatType | None:
        """Who is in the chat, where the key can tell. A main session is where direct messages come together."""
        if self.shape in ("main", "global"):
            return "direct"
        return self.shape if self.shape in ("group", "channel", "direct") else None

    @property
    def parent(self) -> SessionKey | None:
        """The chat a thread hangs under."""
        return msgspec.structs.replace(self, thread=None) if self.thread else None


class SessionIdRef(msgspec.Struct, frozen=True):
    """A reference that is no key; the store looks it up as a session id."""

    value: str


GLOBAL = SessionKey(agent_id="", shape="global")
"""The one session that every main alias means when `session.scope = "global"`: stored and shown as `main`."""


def normalize_agent_id(raw: str) -> str:
    """The nearest valid agent id, for names that nobody chose as an id; empty gives `main`.

    An id that a caller states is checked with `checked_agent_id` instead: guessing would reach another agent.
    """
    text = raw.strip().lower()
    if _NAME.fullmatch(text):
        return text
    return re.sub(r"[^a-z0-9_-]+", "-", text).lstrip("-_").rstrip("-")[:64] or DEFAULT_AGENT_ID


def checked_agent_id(text: str) -> str:
    """The agent id in lower case.

    Raises:
        InvalidKey: it is not 1–64 letters, digits, `_` or `-` that start with a letter or digit.
    """
    if not _NAME.fullmatch(text):
        raise InvalidKey(
            f"Agent id {text[:80]!r} is not valid.",
            "Use 1 to 64 letters, digits, '_' or '-', the first a letter or digit; agents_list shows them.",
            field="agentId",
        )
    return text.lower()


@lru_cache(maxsize=4096)  # the same few sessions are spoken of again and again
def parse(text: str) -> SessionKey:
    """Read a stored key. Only the canonical spelling is accepted, so that a session has one key.

    Raises:
        InvalidKey: the text is no key, or another spelling of one.
    """
    if text in _SHARED:
        return GLOBAL
    key = _read_full(text)
    if str(key) != text:
        raise InvalidKey(f"Session key {text!r} is not in its stored form.", f"Write {str(key)!r}.", key=text)
    return key


def canonicalise(
    reference: str,
    *,
    agent_id: str,
    main_key: str = "main",
    scope: Scope = "per-sender",
    current: SessionKey | None = None,
) -> SessionKey | SessionIdRef:
    """Turn what a caller wrote into the key that is stored, or into a session id to look up.

    `agent_id` is the agent that short forms belong to: the caller's own, or for an operator the default one.
    `main_key` is only another name for `main`; the stored key always says `main`.

    Raises:
        InvalidKey: the reference is empty, malformed, or names a session that no caller may name.
    """
    return _canonical(_trimmed(reference), agent_id, main_key, scope, current)


@lru_cache(maxsize=4096)  # of texts that are not longer than a key may be
def _canonical(
    text: str, agent_id: str, main_key: str, scope: Scope, current: SessionKey | None
) -> SessionKey | SessionIdRef:
    if text.lower() == "current":
        return _scoped(_required(current), scope)
    if _UUID.fullmatch(text):
        return SessionIdRef(text)
    if text[:6].lower() == "agent:":
        key = _read_full(text)
    else:
        parts = _read(text)
        if parts[0] == "other" and text.lower() != main_key.lower():
            return SessionIdRef(text)
        key = SessionKey(checked_agent_id(agent_id), *parts)
    if key.shape == "other" and key.id.lower() == main_key.lower():
        key = SessionKey(key.agent_id, "main")
    return _scoped(key, scope)


def display(key: SessionKey, *, viewer_agent_id: str | None) -> str:
    """How a key is shown to an agent: its own main, cron, hook and node sessions short, all others in full.

    `None` is a viewer without an agent, who gets full keys. `canonicalise` accepts whatever this returns.
    """
    if key.agent_id == viewer_agent_id and key.kind in ("main", "cron", "hook", "node"):
        return key.rest
    return str(key)


def display_text(text: str, *, viewer_agent_id: str | None) -> str:
    """`display` of a stored key, taking it apart only where that can make a difference: lists have many."""
    if text == _SHARED_BEFORE:
        return str(GLOBAL)
    if viewer_agent_id is None or not text.startswith(f"agent:{viewer_agent_id}:"):
        return text
    return display(parse(text), viewer_agent_id=viewer_agent_id)


def spoken(text: str) -> str:
    """A stored key as every agent and operator reads it: in full, and never `global`."""
    return display_text(text, viewer_agent_id=None)


def channel_of(kind: Kind, recorded_channel: str | None, last_channel: str | None) -> str:
    """The channel a list shows. A group belongs to the channel it lives in, whoever spoke last in it."""
    if kind in ("cron", "hook", "node"):
        return "internal"
    return (recorded_channel if kind == "group" else last_channel) or "unknown"


def main_session(agent_id: str, *, scope: Scope = "per-sender") -> SessionKey:
    return _scoped(SessionKey(checked_agent_id(agent_id), "main"), scope)


def group_key(
    agent_id: str, channel: str, chat_id: str, *, shape: Literal["group", "channel"] = "group"
) -> SessionKey:
    return SessionKey(checked_agent_id(agent_id), shape, chat_id, channel=channel.lower())


def direct_key(
    agent_id: str,
    channel: str,
    peer: str,
    *,
    account_id: str | None = None,
    dm_scope: DmScope = "main",
    identity_links: Mapping[str, Sequence[str]] | None = None,
    scope: Scope = "per-sender",
) -> SessionKey:
    """The session a direct message belongs to.

    `per-peer` shares one session between all channels on which a peer has the same id or linked name.
    """
    if dm_scope == "main":
        return main_session(agent_id, scope=scope)
    return SessionKey(
        checked_agent_id(agent_id),
        "direct",
        _linked(channel, peer, identity_links or {}),
        channel=None if dm_scope == "per-peer" else channel.lower(),
        account=(account_id or DEFAULT_ACCOUNT) if dm_scope == "per-account-channel-peer" else None,
    )


def thread_key(
    parent: SessionKey, thread_id: str, *, word: Literal["thread", "topic"] = "thread"
) -> SessionKey:
    """A thread of a chat or of the main session. A thread has no threads of its own: it is replaced."""
    return msgspec.structs.replace(parent, thread=Thread(thread_id, word))


def owned_key(agent_id: str, shape: OwnedShape, owned_id: str) -> SessionKey:
    """A session that no chat feeds: a sub-agent, job, hook, node, dashboard tab or HTTP conversation."""
    return SessionKey(checked_agent_id(agent_id), shape, owned_id)


def subagent_key(agent_id: str, uuid: str) -> SessionKey:
    return owned_key(agent_id, "subagent", uuid)


def _linked(channel: str, peer: str, links: Mapping[str, Sequence[str]]) -> str:
    wanted = {peer.lower(), f"{channel}:{peer}".lower()}
    names = (name for name, peers in links.items() if any(entry.lower() in wanted for entry in peers))
    return next(names, peer)


def _scoped(key: SessionKey, scope: Scope) -> SessionKey:
    return GLOBAL if scope == "global" and key.kind == "main" else key


def _trimmed(reference: str) -> str:
    text = reference.strip(_BLANKS)
    _check_text(text)
    if not text:
        raise InvalidKey(
            "Session reference '' is empty.", "Write 'main', 'current' or a key from sessions_list."
        )
    if text.lower() in ("global", "unknown"):
        raise InvalidKey(f"Session {text!r} cannot be named.", "Write 'main' for the main session.", key=text)
    return text


def _required(current: SessionKey | None) -> SessionKey:
    if current is None:
        raise InvalidKey(
            "Session 'current' means the caller's own session, and this caller has none.",
            "Write 'main' or a key from sessions_list.",
        )
    return current


@lru_cache(maxsize=8192)  # every operation reads a key, and most read the same few
def _read_full(text: str) -> SessionKey:
    match = _FULL.fullmatch(text)
    if not match:
        raise InvalidKey(
            f"Session key {text[:80]!r} is not valid.",
            "Write agent:<agentId>:main or agent:<agentId>:<channel>:group:<id>; sessions_list shows them.",
            key=text,
        )
    return SessionKey(checked_agent_id(match[1]), *_read(match[2]))


def _read(rest: str) -> _Parts:
    """Take apart what follows the agent id, in any accepted spelling. The caller checks the result."""
    head, _, tail = rest.partition(":")
    word = head.lower()
    if word in _OWNED:
        return (_OWNED[word], _unescape(tail), None, None, None)
    if rest[:5].lower() in ("node-", "node:"):
        return ("node", _unescape(rest[5:]), None, None, None)
    if word in ("direct", "dm"):
        return _read_chat("direct", tail)
    if word == "main":
        body, thread = _split_thread(rest)
        return (
            ("main", "", None, None, thread) if body.lower() == "main" else ("other", rest, None, None, None)
        )
    match = _CHAT.fullmatch(rest)
    if not match:
        return ("other", rest, None, None, None)
    account = None if match[2] is None else _unescape(match[2])
    return _read_chat(_CHATS[match[3].lower()], match[4], match[1].lower(), account)


def _read_chat(shape: ChatType, tail: str, channel: str | None = None, account: str | None = None) -> _Parts:
    body, thread = _split_thread(tail)
    return (shape, _unescape(body), channel, account, thread)


def _split_thread(text: str) -> tuple[str, Thread | None]:
    match = _THREAD.fullmatch(text)
    if not match:
        return text, None
    return match[1], Thread(_unescape(match[3]), "topic" if match[2] == "topic" else "thread")


def _write_id(text: str) -> str:
    """Escape a final id: a `%` that would read as an escape, and a last blank, which trimming would eat."""
    text = _ESCAPE.sub(r"%25\1", text)
    return f"{text[:-1]}%20" if text.endswith(" ") else text


def _write_chat_id(text: str) -> str:
    return _THREAD_COLON.sub("%3A", _write_id(text))


def _write_part(text: str) -> str:
    return _write_id(text).replace(":", "%3A")


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED[match[1]], text)


def _check_text(text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise InvalidKey(
            f"Session key {text[:40] + '…'!r} has {len(text)} characters.",
            f"Use at most {MAX_LENGTH}.",
            max=MAX_LENGTH,
        )
    if _UNPRINTABLE.search(text):
        raise InvalidKey(
            f"Session key {text!r} contains a control character.",
            "Write it without line breaks and control codes.",
        )


def _check_channel(name: str) -> None:
    if not _NAME.fullmatch(name) or name != name.lower() or name in _WORDS or name.startswith("node-"):
        raise InvalidKey(
            f"Channel name {name[:80]!r} is not valid.",
            "Use 1 to 64 lower-case letters, digits, '_' or '-', but no word of the keys and not 'node-…'.",
            field="channel",
        )


def _check_other(rest: str) -> None:
    parts = rest.split(":")
    if not all(parts) or rest != rest.strip(_BLANKS):
        raise InvalidKey(f"Session key part {rest!r} has an empty part.", "Put text between all colons.")
    if parts[0].lower() == "agent" or rest.lower() in _WORDS:
        raise InvalidKey(
            f"Session key part {rest!r} is a word of the key grammar.",
            "Write one agent:<agentId>: prefix and a whole form after it, such as main or cron:<jobId>.",
        )
