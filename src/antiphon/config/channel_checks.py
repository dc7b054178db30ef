"""Checks of channels and of the bindings that choose agents for their chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from antiphon.config.channels import ACCOUNT_ID_PATTERN, ANY_SENDER, ChannelConfig, has_nested_repeat
from antiphon.config.errors import Problem
from antiphon.config.schema import Config
from antiphon.config.secrets import Secret
from antiphon.validation_errors import suggest_options


def check_channels(config: Config) -> Iterator[Problem]:
    """Problems of accounts whose settings contradict each other."""
    for name, section in config.channel_sections.items():
        path = f"channels.{name}"
        for account_id in section.accounts:
            if not ACCOUNT_ID_PATTERN.fullmatch(account_id):
                what = f"The account name {account_id!r} in '{path}.accounts' is not valid."
                yield Problem(
                    f"{path}.accounts", what, "Use letters, digits, '_' and '-', and no word of session keys."
                )
        if section.default_account is not None and section.default_account not in section.list_accounts():
            what = f"'{path}.defaultAccount' is {section.default_account!r}, which is not an account."
            known = suggest_options(section.default_account, tuple(section.list_accounts()), noun="accounts")
            yield Problem(f"{path}.defaultAccount", what, known)
        if section.enabled:
            yield from _check_accounts(name, section)


def _check_accounts(name: str, section: ChannelConfig) -> Iterator[Problem]:
    owners: dict[Secret, str] = {}
    for account_id, account in section.list_enabled_accounts().items():
        path = section.get_account_path(name, account_id)
        for where, what, hint in account.find_problems(path):
            yield Problem(where, what, hint)
        for key, value in account:
            if isinstance(value, Secret) and key.endswith("token"):
                first = owners.setdefault(value, path)
                if first != path:
                    what = f"{first!r} and {path!r} have the same token, and a service allows one receiver."
                    yield Problem(path, what, "Remove one of the accounts.")


def find_channel_warnings(config: Config) -> Iterator[str]:
    """Warnings for channels, bindings, and direct chats that share a session."""
    for name, section in config.channel_sections.items():
        for account_id, account in section.list_accounts().items():
            yield from account.find_warnings(section.get_account_path(name, account_id))
    for index, binding in enumerate(config.bindings):
        if binding.type == "acp":
            yield f"'bindings[{index}].type' is 'acp', so it has no effect. Name an agent that is a program instead."
        elif binding.agent_id not in config.agent_ids:
            yield (
                f"'bindings[{index}].agentId' is {binding.agent_id!r}, but no such agent is configured, so it has no"
                f" effect. {suggest_options(binding.agent_id, config.agent_ids, noun='agent ids')}"
            )
        elif binding.match.channel.lower() not in config.channel_sections:
            yield (
                f"'bindings[{index}].match.channel' is {binding.match.channel!r}, which is not configured, so it has"
                " no effect."
            )
    yield from _find_pattern_warnings(config)
    if config.session.dm_scope == "main" and (channels := _list_shared_channels(config)):
        yield (
            "'session.dmScope' is 'main', so all direct chats share one session, and more than one sender is"
            f" admitted by {' and '.join(channels)}. Each can read what the others wrote."
            " Set it to 'per-channel-peer' to give each sender a session."
        )


def _find_pattern_warnings(config: Config) -> Iterator[str]:
    places = {"messages.groupChat": config.messages.group_chat.mention_patterns}
    for index, entry in enumerate(config.agents.list):
        places[f"agents.list[{index}].groupChat"] = entry.group_chat.mention_patterns
    for path, patterns in places.items():
        for pattern in patterns or ():
            if has_nested_repeat(pattern):
                yield (
                    f"'{path}.mentionPatterns' has {pattern!r}, which repeats a repetition or a choice, so it could"
                    " stop the gateway and has no effect. Write it without."
                )


def _list_shared_channels(config: Config) -> list[str]:
    """Channels that admit senders to direct chats, if they admit more than one person in total."""
    people = {
        alias.lower(): name for name, aliases in config.session.identity_links.items() for alias in aliases
    }
    senders: dict[str, set[str]] = {}
    for channel, settings in config.channels.items():
        admitted = {str(peer).lower() for peer in _list_admitted_senders(settings)}
        if admitted:
            senders[channel] = {
                people.get(f"{channel}:{p}", people.get(p, f"{channel}:{p}")) for p in admitted
            }
    all_senders = set[str]().union(*senders.values())
    is_open = any(sender.endswith(":*") for sender in all_senders)
    return [f"'channels.{channel}'" for channel in senders] if len(all_senders) > 1 or is_open else []


def _list_admitted_senders(settings: object) -> Iterator[object]:
    """Senders named by a channel, its accounts or its `dm` section; `*` stands for everyone."""
    if isinstance(settings, ChannelConfig):
        for account in settings.list_enabled_accounts().values():
            if account.dm_policy != "disabled":
                yield from account.allow_from
    elif isinstance(settings, dict):
        yield from _list_written_senders(cast("dict[str, Any]", settings))


def _list_written_senders(settings: dict[str, Any]) -> Iterator[object]:
    """The same for a channel that this release does not have."""
    if settings.get("enabled") is False:
        return
    if "open" in (settings.get("dmPolicy"), settings.get("policy")):
        yield ANY_SENDER
    allow = settings.get("allowFrom")
    yield from cast("list[object]", allow) if isinstance(allow, list) else ()
    accounts = settings.get("accounts")
    parts = cast("dict[str, object]", accounts).values() if isinstance(accounts, dict) else ()
    for part in (settings.get("dm"), *parts):
        if isinstance(part, dict):
            yield from _list_written_senders(cast("dict[str, Any]", part))
