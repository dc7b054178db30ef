"""The section `channels.telegram`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, cast

from pydantic import BeforeValidator, Field, ValidationInfo, field_serializer

from antiphon.config.addresses import mask_url
from antiphon.config.base import URL_PATH_PATTERN, WEB_ADDRESS_PATTERN, build_expected_error
from antiphon.config.channels import ChannelAccount, ChannelConfig, GroupConfig
from antiphon.config.secrets import Secret
from antiphon.keys import DEFAULT_ACCOUNT
from antiphon.paths import expand_home

TOKEN_VARIABLE = "TELEGRAM_BOT_TOKEN"  # noqa: S105 - the name of a variable
DEFAULT_TEXT_LIMIT = 4000
DEFAULT_API_ROOT = "https://api.telegram.org"
_SENDER_PATTERN = re.compile(r"\*|(?:(?:telegram|tg):)?-?[0-9]{1,20}")


def _parse_token_file(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str) or not value:
        raise build_expected_error("the path of a file")
    base = cast("Path | None", info.context.get("base") if info.context else None)
    path = (base or Path()) / expand_home(value)
    if path.is_symlink():
        raise build_expected_error("the path of a file, not of a link")
    return Secret("file", (value,), base)


class TelegramAccount(ChannelAccount):
    """One bot."""

    OWN_KEYS: ClassVar[frozenset[str]] = ChannelAccount.OWN_KEYS | {
        "bot_token",
        "token_file",
        "webhook_url",
        "webhook_secret",
        "webhook_path",
    }

    bot_token: Secret | None = Field(default=None, description="The token from @BotFather.")
    token_file: Annotated[Secret, BeforeValidator(_parse_token_file, json_schema_input_type=str)] | None = (
        Field(default=None, description="A file with the token; not a link.")
    )
    api_root: Annotated[str, Field(pattern=WEB_ADDRESS_PATTERN)] = Field(
        default=DEFAULT_API_ROOT, description="The Bot API server: a proxy, or one of your own."
    )
    groups: dict[str, GroupConfig] | None = Field(
        default=None, description="Settings of groups by chat id. If set, only these are answered in."
    )
    link_preview: bool = True
    webhook_url: Annotated[str, Field(pattern=WEB_ADDRESS_PATTERN)] | None = Field(
        default=None,
        description="The public address of this gateway's webhook. Without it, updates are polled.",
    )
    webhook_secret: Secret | None = None
    webhook_path: Annotated[str, Field(pattern=URL_PATH_PATTERN)] | None = Field(
        default=None, description="A further path of the webhook, besides `/channels/telegram/<account>`."
    )
    timeout_seconds: Annotated[float, Field(ge=1, le=3600)] = Field(
        default=20.0, description="For one request to the Bot API."
    )
    proxy: Annotated[str, Field(pattern=WEB_ADDRESS_PATTERN)] | None = None

    @property
    def group_rules(self) -> Mapping[str, GroupConfig] | None:
        return self.groups

    @field_serializer("api_root", "proxy", "webhook_url")
    def _mask_address(self, address: str | None) -> str | None:
        return None if address is None else mask_url(address)

    def find_problems(self, path: str) -> Iterator[tuple[str, str, str]]:
        yield from super().find_problems(path)
        if self.bot_token is not None and self.token_file is not None:
            what = f"{path + '.botToken'!r} and {path + '.tokenFile'!r} are both set."
            yield f"{path}.tokenFile", what, "Keep one of them."
        if self.webhook_url is not None and self.webhook_secret is None:
            what = f"{path + '.webhookUrl'!r} is set without {path + '.webhookSecret'!r}, so anyone could post updates."
            yield f"{path}.webhookSecret", what, "Set a secret of at least 16 letters and digits."

    def find_missing_credentials(self, account_id: str) -> str | None:
        token = find_token(self, account_id)
        if token is None:
            return "It has no token. Set its 'botToken' or 'tokenFile'."
        error = token.availability_error
        if error is None:
            return None
        if self.bot_token is None and self.token_file is None:
            return f"It has no token. Set 'botToken', 'tokenFile' or the variable {TOKEN_VARIABLE}."
        return str(error)

    def find_warnings(self, path: str) -> Iterator[str]:
        lists = {"allowFrom": self.allow_from, "groupAllowFrom": self.group_allow_from or ()}
        for group_id, group in (self.groups or {}).items():
            lists[f"groups.{group_id}.allowFrom"] = group.allow_from or ()
        for key, senders in lists.items():
            for sender in senders:
                if not _SENDER_PATTERN.fullmatch(sender):
                    yield (
                        f"'{path}.{key}' has {sender!r}, which matches no one: names can change hands. Use the"
                        " numeric id, which `/whoami` in a chat with the bot shows."
                    )


class TelegramConfig(TelegramAccount, ChannelConfig):
    """Bots on Telegram: one written directly, or several in `accounts`."""

    accounts: dict[str, TelegramAccount] = Field(default_factory=dict[str, TelegramAccount])

    @property
    def has_default_credentials(self) -> bool:
        written = self.bot_token is not None or self.token_file is not None
        return written or not self.accounts or TOKEN_VARIABLE in os.environ


def find_token(account: TelegramAccount, account_id: str) -> Secret | None:
    """Return the token of an account; the environment's is only for the default account."""
    written = account.bot_token or account.token_file
    if written is not None or account_id != DEFAULT_ACCOUNT:
        return written
    return Secret("env", (TOKEN_VARIABLE,))


_STREAMING = "answers are sent when they are complete. Remove it."
_BLOCKS = "answers are split by 'textChunkLimit' only. Remove it."
_NOT_IN_CHATS = "this release does not have it for chats. Remove it."
_OWN_SERVER = "the webhook is on the gateway's own port. Use 'gateway.port' and a reverse proxy."
_FAILURES_TOLD = "a failed run is always told. Remove it."
_SESSION_TOOLS = "tools depend on the session. Use 'bindings' to give this chat an agent of its own."

_GROUP_KEYS = {
    "skills": _SESSION_TOOLS,
    "tools": _SESSION_TOOLS,
    "toolsBySender": _SESSION_TOOLS,
    "disableAudioPreflight": "voice messages are not read. Remove it.",
    "ingest": _NOT_IN_CHATS,
    "errorPolicy": _FAILURES_TOLD,
    "errorCooldownMs": _FAILURES_TOLD,
}
_ACCOUNT_KEYS: Mapping[str, str] = {
    "capabilities": "they are known of the service. Remove it.",
    "markdown": "tables are sent as code. Remove it.",
    "configWrites": "chats do not change the configuration. Remove it.",
    "defaultTo": "deliveries name their chat. Use '--to' or 'delivery.to'.",
    "dmHistoryLimit": "conversations are compacted by their size. Use 'agents.defaults.compaction'.",
    "dms": "conversations are compacted by their size. Use 'agents.defaults.compaction'.",
    "direct": "all direct chats follow 'dmPolicy' and 'allowFrom'. Use these.",
    "chunkMode": _BLOCKS,
    "blockStreaming": _BLOCKS,
    "blockStreamingCoalesce": _BLOCKS,
    "streaming": _STREAMING,
    "streamMode": _STREAMING,
    "draftChunk": _STREAMING,
    "replyToMode": "answers do not quote the message. Remove it.",
    "responsePrefix": "answers are sent as they are. Remove it.",
    "heartbeat": "there are no heartbeats. Use a job (`antiphon cron`).",
    "healthMonitor": "the connection is always watched. Remove it.",
    "customCommands": "the menu of commands is not set. Remove it.",
    "commands": "the menu of commands is not set. Remove it.",
    "retry": "the outbox decides about retries. Remove it.",
    "network": "addresses are tried in the system's order. Remove it.",
    "webhookHost": _OWN_SERVER,
    "webhookPort": _OWN_SERVER,
    "webhookCertPath": _OWN_SERVER,
    "actions": "agents post with the tool 'message' only. Use 'tools.deny' against that.",
    "threadBindings": "sub-agents have no topics of their own. Remove it.",
    "reactionNotifications": "reactions are not read. Remove it.",
    "reactionLevel": "agents do not react. Remove it.",
    "ackReaction": "messages are acknowledged by typing. Remove it.",
    "execApprovals": "requests are shown to operators. Use `antiphon approvals`.",
    "silentErrorReplies": _FAILURES_TOLD,
    "errorPolicy": _FAILURES_TOLD,
    "errorCooldownMs": _FAILURES_TOLD,
    "autoTopicLabel": "topics keep their names. Remove it.",
    "contextVisibility": _NOT_IN_CHATS,
}
TelegramConfig.KEYS_WITHOUT_EFFECT = {
    "": _ACCOUNT_KEYS,
    "groups.*": _GROUP_KEYS,
    "groups.*.topics.*": _GROUP_KEYS,
}
