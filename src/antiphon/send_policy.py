"""The send policy: whether a session may send messages to the people in its chat.

Pure: rules and facts in, a decision out. It does not depend on who asks (see `antiphon.access`) and does not apply
to incoming messages, which are always recorded. Older names of rule fields are handled where rules are read.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from antiphon.keys import ChatType, parse

SendDecision = Literal["allow", "deny"]
SendCommand = Literal["allow", "deny", "inherit"]

_SEND_COMMAND_PATTERN = re.compile(r"/send[ \t]+([a-z]+)", re.IGNORECASE | re.ASCII)
_SEND_COMMAND_ARGUMENTS: dict[str, SendCommand] = {
    "on": "allow",
    "allow": "allow",
    "off": "deny",
    "deny": "deny",
    "inherit": "inherit",
    "default": "inherit",
    "reset": "inherit",
}


class SendRule(msgspec.Struct, frozen=True):
    """Matches if every field that is set matches; a rule without fields matches everything."""

    action: SendDecision = "allow"
    channel: str | None = None
    chat_type: ChatType | None = None
    key_prefix: str | None = None
    """Compared with the whole key and with the key without its agent."""
    raw_key_prefix: str | None = None
    """Compared with the whole key only."""


class SendPolicy(msgspec.Struct, frozen=True):
    """Rules have no order: one matching deny outweighs every allow."""

    rules: tuple[SendRule, ...] = ()
    default: SendDecision = "allow"


class _ChatFacts(msgspec.Struct, frozen=True):
    channel: str | None
    chat_type: ChatType | None
    key: str
    short_key: str


def decide_send(
    policy: SendPolicy | None,
    *,
    override: SendDecision | None,
    channel: str | None,
    chat_type: ChatType | None,
    key: str,
) -> SendDecision:
    """Decides whether the session may send. `override` is the session's own setting and wins over every rule.

    If `channel` or `chat_type` is not recorded on the session, it is derived from the key. A fact that neither
    provides matches no rule that requires it.

    Raises:
        InvalidKey: `key` is not a stored key, so its chat cannot be judged and nothing may be sent.
    """
    if override is not None:
        return override
    if policy is None:
        return "allow"
    if not policy.rules:
        return policy.default
    facts = _gather_facts(channel, chat_type, key)
    actions = {rule.action for rule in policy.rules if _rule_applies(rule, facts)}
    if "deny" in actions:
        return "deny"
    return "allow" if "allow" in actions else policy.default


def parse_send_command(text: str) -> SendCommand | None:
    """The decision in `/send on|off|inherit`, if that is the whole message. The sender is checked elsewhere."""
    match = _SEND_COMMAND_PATTERN.fullmatch(text.strip())
    return _SEND_COMMAND_ARGUMENTS.get(match[1].lower()) if match else None


def _gather_facts(channel: str | None, chat_type: ChatType | None, key: str) -> _ChatFacts:
    parsed = parse(key)
    name = channel or parsed.channel
    return _ChatFacts(
        channel=name.lower() if name else None,
        chat_type=chat_type or parsed.chat_type,
        key=key.lower(),
        short_key=parsed.rest.lower(),
    )


def _rule_applies(rule: SendRule, facts: _ChatFacts) -> bool:
    if rule.channel is not None and rule.channel.lower() != facts.channel:
        return False
    if rule.chat_type is not None and rule.chat_type != facts.chat_type:
        return False
    if rule.key_prefix is not None:
        prefix = rule.key_prefix.lower()
        if not (facts.key.startswith(prefix) or facts.short_key.startswith(prefix)):
            return False
    return rule.raw_key_prefix is None or facts.key.startswith(rule.raw_key_prefix.lower())
