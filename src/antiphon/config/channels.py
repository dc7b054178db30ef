"""Sections of chat channels: the keys that all of them share, and how the model of each channel is found.

A channel's own keys are in its folder (`channels/<name>/config.py`), which is imported only if the channel is
configured. The blocks of channels that this release does not have stay as they are written, with a warning.
"""

from __future__ import annotations

import re
import re._parser as _regex_parser
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationInfo
from typing_extensions import TypedDict

from antiphon.channel_manifest import load_manifest
from antiphon.config.base import (
    AgentId,
    Amount,
    Section,
    Strings,
    Text,
    build_expected_error,
    format_path,
)
from antiphon.keys import DEFAULT_ACCOUNT

DmPolicyName = Literal["pairing", "allowlist", "open", "disabled"]
GroupPolicyName = Literal["allowlist", "open", "disabled"]
ANY_SENDER = "*"
DEFAULTS_KEY = "defaults"  # in `channels`, beside the names of channels
ACCOUNT_ID_PATTERN = re.compile(
    r"(?!(?:direct|dm|group|channel|thread|topic)$)[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
)
"""Matches names of accounts, which are part of session keys."""
_SHARED_KEYS_WITHOUT_EFFECT = {
    "modelByChannel": "the model depends on the agent. Use 'bindings' to give a chat an agent of its own."
}
_DEFAULTS_WITHOUT_EFFECT = {
    "heartbeat": "there are no heartbeats. Use a job (`antiphon cron`).",
    "contextVisibility": "what a group says is always shown to the agent as data. Remove it.",
}
_REPEATS = frozenset({"MAX_REPEAT", "MIN_REPEAT"})  # possessive ones do not try again
_HARMLESS_VALUES: tuple[object, ...] = (None, False, "off", {}, [])


def _normalize_id(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _normalize_peer_kind(value: object) -> object:
    return "direct" if value == "dm" else value


BindingPeerKind = Annotated[
    Literal["direct", "group", "channel"],
    BeforeValidator(_normalize_peer_kind, Literal["direct", "group", "channel", "dm"]),
]


def _normalize_ids(value: object) -> object:
    """Ids may be written as numbers, which JSON keeps exactly up to 2^53."""
    if not isinstance(value, list | tuple):
        return value
    items = cast("Iterable[object]", value)
    return tuple(_normalize_id(item) for item in items)


Senders = Annotated[tuple[Text, ...], BeforeValidator(_normalize_ids, json_schema_input_type=list[str | int])]
"""Ids of people, as text or numbers; `*` is everyone."""


class GroupRules(Section):
    """Who may write in a group or in one of its topics, and when the agent answers there."""

    enabled: bool | None = None
    require_mention: bool | None = None
    group_policy: GroupPolicyName | None = None
    allow_from: Senders | None = None
    system_prompt: Text | None = Field(default=None, description="Added to the agent's instructions there.")


class TopicConfig(GroupRules):
    """A topic or thread of a group. What is not set is as in the group."""

    agent_id: AgentId | None = Field(default=None, description="The agent that answers there.")


class GroupConfig(GroupRules):
    """A group, or `*` for all that have no entry. What is not set is as in the account."""

    topics: dict[str, TopicConfig] = Field(default_factory=dict[str, TopicConfig])


class BindingPeerConfig(Section):
    """A chat: a person, a group or a channel of a service."""

    kind: BindingPeerKind
    id: Annotated[str, Field(min_length=1), BeforeValidator(_normalize_id, json_schema_input_type=str | int)]


class BindingMatchConfig(Section):
    """The messages that a binding is for; every key that is set must match."""

    channel: Text
    account_id: Text | None = Field(
        default=None, description="Default: the default account; `*`: any account."
    )
    peer: BindingPeerConfig | None = None
    guild_id: Text | None = Field(default=None, description="A Discord server; no other channel has any.")
    team_id: Text | None = Field(default=None, description="A Slack workspace; no other channel has any.")
    roles: Strings = Field(default=(), description="Roles on a Discord server.")


class BindingConfig(Section):
    """Which agent answers in some chats."""

    type: Literal["route", "acp"] = Field(default="route", description="`acp` has no effect.")
    comment: str | None = Field(default=None, description="For people; not read.")
    agent_id: AgentId
    match: BindingMatchConfig


def _check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error:
            raise build_expected_error("a list of regular expressions") from None
    return patterns


def has_nested_repeat(pattern: str) -> bool:
    """Whether a regular expression repeats a repetition or a choice.

    Such a one can take for ever on a text that almost matches.
    """
    parsed: Any = cast("Any", _regex_parser).parse(pattern)
    return _repeats_within(parsed, is_repeated=False)


def _repeats_within(node: Any, *, is_repeated: bool) -> bool:
    """Whether a part of a parsed expression, an item or a sequence, has such a repetition inside another one."""
    if isinstance(node, tuple) and len(node) == 2:  # pyright: ignore[reportUnknownArgumentType]
        kind, content = cast("tuple[object, Any]", node)
        if is_repeated and str(kind) == "BRANCH":
            return True
        if str(kind) in _REPEATS:
            least, most, repeated = content
            if is_repeated and most > 1 and least != most:
                return True
            return _repeats_within(repeated, is_repeated=is_repeated or most > 1)
    if isinstance(node, tuple | list | _regex_parser.SubPattern):
        parts = cast("Iterable[Any]", node)
        return any(_repeats_within(part, is_repeated=is_repeated) for part in parts)
    return False


MentionPatterns = Annotated[Strings, AfterValidator(_check_patterns)]


class GroupChatConfig(Section):
    """When a message in a group addresses the agent."""

    mention_patterns: MentionPatterns | None = Field(
        default=None, description="Regular expressions besides the service's own mentions; case is ignored."
    )
    history_limit: Amount | None = Field(
        default=None, description="For channels that do not set one: see `channels.<name>.historyLimit`."
    )


class MessagesConfig(Section):
    """Messages from chats."""

    group_chat: GroupChatConfig = Field(default_factory=GroupChatConfig.model_construct)


class ChannelAccount(Section):
    """The keys of one account that all channels share."""

    DEFAULT_HISTORY_LIMIT: ClassVar[int] = 50
    OWN_KEYS: ClassVar[frozenset[str]] = frozenset({"name", "enabled"})
    """Fields that a named account does not take over from the channel."""

    enabled: bool = True
    name: Text | None = Field(default=None, description="A label for people.")
    dm_policy: DmPolicyName = Field(default="pairing", description="Who may write directly.")
    allow_from: Senders = Field(default=(), description="Ids of people who may write directly.")
    group_policy: GroupPolicyName | None = Field(
        default=None, description="Default: `channels.defaults.groupPolicy`, else `allowlist`."
    )
    group_allow_from: Senders | None = Field(
        default=None, description="People who may write in groups. Default: `allowFrom`."
    )
    history_limit: Amount | None = Field(
        default=None, description="Messages of a group that are kept as context of the next mention."
    )
    text_chunk_limit: Annotated[int, Field(ge=100, le=100_000)] | None = None
    media_max_mb: Annotated[float, Field(gt=0, le=2000)] | None = None

    @property
    def group_rules(self) -> Mapping[str, GroupConfig] | None:
        """The groups that have settings of their own, by their ids; None for a channel without such a list."""
        return None

    def merge_account(self, own: ChannelAccount) -> Self:
        """Return the settings of a named account: its own, and the channel's for what it does not set."""
        inherited = {
            name: getattr(self, name) for name in self.model_fields_set - self.OWN_KEYS - {"accounts"}
        }
        written = {name: getattr(own, name) for name in own.model_fields_set}
        return cast("Self", own).model_copy(update={**inherited, **written})

    def find_problems(self, path: str) -> Iterator[tuple[str, str, str]]:
        """Yield contradictions in an account, as path, what is wrong and what to do."""
        if self.dm_policy == "open" and ANY_SENDER not in self.allow_from:
            yield (
                f"{path}.dmPolicy",
                f"{path + '.dmPolicy'!r} is 'open', but {path + '.allowFrom'!r} does not contain \"*\".",
                "Add \"*\" to admit everyone, or use 'pairing' or 'allowlist'.",
            )
        if self.dm_policy == "allowlist" and not self.allow_from:
            yield (
                f"{path}.allowFrom",
                f"{path + '.dmPolicy'!r} is 'allowlist', but {path + '.allowFrom'!r} is empty.",
                "List the people who may write, or use 'pairing'.",
            )

    def find_missing_credentials(self, account_id: str) -> str | None:
        """Return why an account cannot be used, as far as that is known without connecting."""
        return None

    def find_warnings(self, path: str) -> Iterator[str]:
        """Yield warnings about an account."""
        yield from ()


class ChannelDefaults(Section):
    """Settings of all channels that do not have their own."""

    group_policy: GroupPolicyName = "allowlist"


class ChannelConfig(ChannelAccount):
    """The section of a channel: its accounts, or one account written directly."""

    KEYS_WITHOUT_EFFECT: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Keys of related gateways that do nothing here, with the reason, by the path of their section."""

    accounts: dict[str, Any] = Field(default_factory=dict[str, Any])
    default_account: Text | None = None

    @property
    def has_default_credentials(self) -> bool:
        """Whether the account that is written directly can be used."""
        return not self.accounts

    def get_account_path(self, channel: str, account_id: str) -> str:
        """Return where the settings of an account are written."""
        place = ("channels", channel, "accounts", account_id)
        return format_path(place if account_id in self.accounts else place[:2])

    @property
    def default_account_id(self) -> str:
        accounts = self.list_accounts()
        first = DEFAULT_ACCOUNT if DEFAULT_ACCOUNT in accounts else next(iter(accounts), DEFAULT_ACCOUNT)
        return self.default_account or first

    def list_accounts(self) -> dict[str, Self]:
        """Return every account with its settings merged."""
        return self._merged_accounts

    @cached_property  # every message needs it
    def _merged_accounts(self) -> dict[str, Self]:
        merged = {name: self.merge_account(own) for name, own in self.accounts.items()}
        if DEFAULT_ACCOUNT not in merged and self.has_default_credentials:
            merged = {DEFAULT_ACCOUNT: self, **merged}
        return merged

    def list_enabled_accounts(self) -> dict[str, Self]:
        accounts = self.list_accounts() if self.enabled else {}
        return {name: account for name, account in accounts.items() if account.enabled}


def load_channel_model(name: str) -> type[ChannelConfig] | None:
    """Return the model of a channel's section, or None if this release does not have the channel."""
    manifest = load_manifest(name)
    return None if manifest is None else manifest.load_config_model()


def validate_blocks(blocks: object, info: ValidationInfo) -> object:
    """Check the blocks of all channels; those of channels that this release has become sections."""
    if not isinstance(blocks, dict):
        return blocks
    written = cast("dict[str, object]", blocks)
    kinds: dict[str, Any] = {}
    for name, block in written.items():
        is_section = isinstance(block, Section)
        model = ChannelDefaults if name == DEFAULTS_KEY else load_channel_model(name)
        kinds[name] = Any if is_section else model or dict[str, Any]
    if not all(name.isprintable() for name in kinds):
        raise build_expected_error("an object whose keys are names of channels")
    if not kinds:
        return {}
    adapter: TypeAdapter[Any] = TypeAdapter(TypedDict("Channels", kinds))  # pyright: ignore[reportArgumentType]
    return adapter.validate_python(written, context=info.context)


def drop_keys_without_effect(channels: object) -> Iterator[str]:
    """Remove the keys of channels that do nothing here, and yield a warning for each that asks for something."""
    if not isinstance(channels, dict):
        return
    written = cast("dict[str, Any]", channels)
    yield from _drop_keys(written, [], ("channels",), _SHARED_KEYS_WITHOUT_EFFECT)
    yield from _drop_keys(written, [DEFAULTS_KEY], ("channels",), _DEFAULTS_WITHOUT_EFFECT)
    for name, block in written.items():
        model = load_channel_model(name)
        if model is None or not isinstance(block, dict):
            continue
        section = cast("dict[str, Any]", block)
        accounts = section.get("accounts")
        places: list[tuple[tuple[str | int, ...], dict[str, Any]]] = [(("channels", name), section)]
        if isinstance(accounts, dict):
            named = cast("dict[str, object]", accounts).items()
            places += [
                (("channels", name, "accounts", account), cast("dict[str, Any]", own))
                for account, own in named
                if isinstance(own, dict)
            ]
        for path, node in places:
            for place, keys in model.KEYS_WITHOUT_EFFECT.items():
                yield from _drop_keys(node, place.split(".") if place else [], path, keys)


def _drop_keys(
    node: object, place: list[str], path: tuple[str | int, ...], keys: Mapping[str, str]
) -> Iterator[str]:
    if not isinstance(node, dict):
        return
    section = cast("dict[str, Any]", node)
    if place:
        step, *rest = place
        for key in list(section) if step == "*" else [step] if step in section else []:
            yield from _drop_keys(section[key], rest, (*path, key), keys)
        return
    for key in sorted(keys.keys() & section.keys()):
        value = section.pop(key)
        if value not in _HARMLESS_VALUES:
            yield f"{format_path((*path, key))!r} has no effect: {keys[key]}"
