"""Who may write to an agent from a chat service, and which session it is: pure tables, against their definition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon import keys
from antiphon.engine.inbound.admission import (
    AdmissionFacts,
    AdmissionRules,
    DmPolicy,
    GroupPolicy,
    decide_admission,
)
from antiphon.engine.inbound.events import ChatKind, Inbound, InboundChat, InboundSender
from antiphon.engine.inbound.routing import build_session_key

SENDER, GROUP = "7", "-1"
GROUP_POLICIES: list[GroupPolicy] = ["allowlist", "open", "disabled"]
DM_POLICIES: list[DmPolicy] = ["pairing", "allowlist", "open", "disabled"]
BOOLEANS = (False, True)
LISTS = [frozenset[str](), frozenset({SENDER}), frozenset({"*"}), frozenset({"8"})]


def list_direct_cases() -> Iterator[tuple[AdmissionRules, AdmissionFacts]]:
    for policy, allowed, paired in product(DM_POLICIES, LISTS, BOOLEANS):
        rules = AdmissionRules(dm_policy=policy, allow_from=allowed, group_allow_from=frozenset({"*"}))
        yield rules, AdmissionFacts(chat_kind="direct", sender_id=SENDER, is_paired=paired)


@pytest.mark.requirement("CH17", "CH18")
def test_direct_chats_admit_whom_their_policy_names() -> None:
    for rules, facts in list_direct_cases():
        named = SENDER in rules.allow_from
        expected = {
            "disabled": "ignore",
            "open": "admit" if named or "*" in rules.allow_from else "ignore",
            "allowlist": "admit" if named else "ignore",
            "pairing": "admit" if named or facts.is_paired else "challenge",
        }[rules.dm_policy]
        assert decide_admission(rules, facts).outcome == expected, (rules, facts)


@pytest.mark.requirement("CH17", "CH18")
def test_groups_follow_policy_list_sender_and_mention_and_never_a_pairing() -> None:
    for (policy, allowed), flags in product(product(GROUP_POLICIES, LISTS), product(BOOLEANS, repeat=8)):
        listed, has_list, enabled, required, mentioned, command, paired, own = flags
        rules = AdmissionRules(
            dm_policy="open",
            allow_from=frozenset({"*"}),
            group_policy=policy,
            group_allow_from=allowed,
            has_own_senders=own,
            has_group_list=has_list,
            is_group_listed=listed,
            is_group_enabled=enabled,
            requires_mention=required,
        )
        facts = AdmissionFacts(
            chat_kind="group",
            sender_id=SENDER,
            is_paired=paired,
            is_mentioned=mentioned,
            is_command=command,
        )
        named = bool(allowed & {SENDER, "*"})
        may_write = (
            policy != "disabled"
            and (listed or not has_list)
            and enabled
            and (named or (policy == "open" and not own and not command))
        )
        addressed = mentioned or command or not required
        decision = decide_admission(rules, facts)
        assert decision.outcome == ("ignore" if not may_write else "admit" if addressed else "context")
        assert decision.reason


@pytest.mark.requirement("CH17", "N6")
def test_an_owner_may_enter_commands_in_an_open_group_that_has_no_list_of_people() -> None:
    rules = AdmissionRules(allow_from=frozenset({SENDER}), group_policy="open")
    for sender, outcome in ((SENDER, "admit"), ("8", "ignore")):
        facts = AdmissionFacts(chat_kind="group", sender_id=sender, is_command=True)
        assert decide_admission(rules, facts).outcome == outcome


@pytest.mark.requirement("CH20")
@pytest.mark.parametrize("field", ["is_self", "is_bot", "is_edited", "is_empty"])
def test_some_messages_reach_no_agent_wherever_they_are(field: str) -> None:
    rules = AdmissionRules(
        dm_policy="open", allow_from=frozenset({"*"}), group_policy="open", requires_mention=False
    )
    kinds: list[ChatKind] = ["direct", "group"]
    for kind in kinds:
        facts = msgspec.structs.replace(AdmissionFacts(chat_kind=kind, sender_id=SENDER), **{field: True})
        assert decide_admission(rules, facts).outcome == "ignore"


IDS = st.text(min_size=1, max_size=20).filter(
    lambda text: (
        text.isprintable() and text.strip() == text and not any(0xD800 <= ord(c) < 0xE000 for c in text)
    )
)


@pytest.mark.requirement("CH16", "K1", "K5")
@given(
    chat=IDS,
    sender=IDS,
    thread=st.none() | IDS,
    kind=st.sampled_from(["direct", "group", "channel"]),
    scope=st.sampled_from(["main", "per-peer", "per-channel-peer", "per-account-channel-peer"]),
    account=st.sampled_from(["default", "work"]),
)
def test_ids_are_the_same_in_keys_for_all_that_a_channel_can_produce(
    chat: str, sender: str, thread: str | None, kind: str, scope: str, account: str
) -> None:
    inbound = Inbound(
        account=account,
        event_id="1",
        message_id="1",
        chat=InboundChat(kind=kind, id=chat),  # pyright: ignore[reportArgumentType]
        sender=InboundSender(id=sender),
        sent_at=0,
        thread_id=thread,
    )
    key = build_session_key(
        "main",
        "telegram",
        inbound,
        dm_scope=scope,  # pyright: ignore[reportArgumentType]
        identity_links={},
        scope="per-sender",
        is_bound=False,
        thread_word="topic",
    )
    parsed = keys.parse(str(key))
    assert parsed == key
    if kind != "direct":
        assert (parsed.id, parsed.thread and parsed.thread.id) == (chat, thread)
    elif scope != "main" or account != "default":
        assert parsed.id == sender
    if kind == "direct" and account == "work":
        assert parsed.account == "work", "its people never share the main session"
