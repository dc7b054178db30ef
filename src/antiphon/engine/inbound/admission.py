"""Admission: whether a message from a chat service reaches an agent. Pure: rules and facts in, a decision out.

Every decision has a reason, which is logged and stored. A pairing admits to direct chats only: groups have lists of
their own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from antiphon.engine.inbound.events import ChatKind

DmPolicy = Literal["pairing", "allowlist", "open", "disabled"]
GroupPolicy = Literal["allowlist", "open", "disabled"]
AdmissionOutcome = Literal["admit", "context", "challenge", "ignore"]
"""To the agent; kept as context of the next message; answered with a pairing code; nothing at all."""
ANYONE = "*"


class AdmissionRules(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an account, of one of its groups, and of a topic there, merged."""

    dm_policy: DmPolicy = "pairing"
    allow_from: frozenset[str] = frozenset()
    """Senders in direct chats; `*` is everyone."""
    group_policy: GroupPolicy = "allowlist"
    group_allow_from: frozenset[str] = frozenset()
    """Senders in this group; `*` is everyone."""
    has_own_senders: bool = False
    """Whether that list is the group's own, which holds in an open group too."""
    has_group_list: bool = False
    is_group_listed: bool = False
    is_group_enabled: bool = True
    requires_mention: bool = True


class AdmissionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a message."""

    chat_kind: ChatKind
    sender_id: str
    is_self: bool = False
    is_bot: bool = False
    is_edited: bool = False
    is_empty: bool = False
    is_paired: bool = False
    is_mentioned: bool = False
    """By the service's mark, a configured pattern, or a reply to the account's own message."""
    is_command: bool = False


class Admission(msgspec.Struct, frozen=True):
    outcome: AdmissionOutcome
    reason: str


class _Rule(NamedTuple):
    """A row of a table: the first one that applies decides."""

    applies: bool
    outcome: AdmissionOutcome
    reason: str


def decide_admission(rules: AdmissionRules, facts: AdmissionFacts) -> Admission:
    """Return what happens to a message, and why."""
    chat_rules = _list_direct_rules if facts.chat_kind == "direct" else _list_group_rules
    table = [*_list_general_rules(facts), *chat_rules(rules, facts)]
    rule = next(rule for rule in table if rule.applies)
    if facts.is_empty and rule.outcome in ("admit", "context"):
        return Admission("ignore", "no text and no file")
    return Admission(rule.outcome, rule.reason)


def _list_general_rules(facts: AdmissionFacts) -> list[_Rule]:
    return [
        _Rule(facts.is_self, "ignore", "own message"),
        _Rule(facts.is_bot, "ignore", "sender is a bot"),
        _Rule(facts.is_edited, "ignore", "edit of an earlier message"),
    ]


def _list_direct_rules(rules: AdmissionRules, facts: AdmissionFacts) -> list[_Rule]:
    is_open = rules.dm_policy == "open" and ANYONE in rules.allow_from
    return [
        _Rule(rules.dm_policy == "disabled", "ignore", "dmPolicy is disabled"),
        _Rule(is_open, "admit", "dmPolicy is open"),
        _Rule(facts.sender_id in rules.allow_from, "admit", "sender is in allowFrom"),
        _Rule(rules.dm_policy != "pairing", "ignore", "sender is not in allowFrom"),
        _Rule(facts.is_paired, "admit", "sender is paired"),
        _Rule(True, "challenge", "sender is not paired"),
    ]


def _list_group_rules(rules: AdmissionRules, facts: AdmissionFacts) -> list[_Rule]:
    is_allowed = bool(rules.group_allow_from & {facts.sender_id, ANYONE})
    is_unlisted = rules.has_group_list and not rules.is_group_listed
    needs_list = rules.group_policy == "allowlist" or rules.has_own_senders
    may_command = is_allowed or facts.sender_id in rules.allow_from
    return [
        _Rule(rules.group_policy == "disabled", "ignore", "groupPolicy is disabled"),
        _Rule(is_unlisted, "ignore", "group is not in groups"),
        _Rule(not rules.is_group_enabled, "ignore", "group or topic is disabled"),
        _Rule(needs_list and not is_allowed, "ignore", "sender is not in groupAllowFrom"),
        _Rule(facts.is_command and not may_command, "ignore", "command of a sender that no list names"),
        _Rule(facts.is_mentioned, "admit", "mentioned"),
        _Rule(facts.is_command, "admit", "command"),
        _Rule(rules.requires_mention, "context", "not mentioned"),
        _Rule(True, "admit", "no mention required"),
    ]
