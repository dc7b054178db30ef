"""The send policy: the session's own setting, then any deny, then any allow, then the default."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.errors import InvalidKey
from antiphon.keys import ChatType
from antiphon.send_policy import SendDecision, SendPolicy, SendRule, decide_send, parse_send_command

GROUP = "agent:main:discord:group:42"
KEYS = (
    GROUP,
    "agent:ops:telegram:direct:Bob",
    "agent:main:main",
    "agent:main:cron:1",
    "agent:a:irc:channel:#X",
)
MAIN = "agent:main:main"

decisions: st.SearchStrategy[SendDecision] = st.sampled_from(("allow", "deny"))
maybe_channel = st.none() | st.sampled_from(["discord", "Telegram", "irc"])
maybe_type = st.none() | st.sampled_from(get_args(ChatType))
maybe_prefix = st.none() | st.sampled_from(
    ["agent:main:", "discord:", "cron:", "agent:", "telegram:direct:bob", ""]
)
rules = st.builds(SendRule, decisions, maybe_channel, maybe_type, maybe_prefix, maybe_prefix)
policies = st.builds(SendPolicy, st.lists(rules, max_size=4).map(tuple), decisions)


def result(
    *given_rules: SendRule, key: str = GROUP, default: SendDecision = "allow", **facts: str | None
) -> SendDecision:
    return decide_send(
        SendPolicy(given_rules, default),
        override=None,
        channel=facts.get("channel"),
        chat_type=facts.get("chat_type"),  # pyright: ignore[reportArgumentType]
        key=key,
    )


@pytest.mark.requirement("D1")
@settings(max_examples=200, deadline=None)
@given(policies, decisions, maybe_channel, maybe_type, st.sampled_from(KEYS))
def test_the_sessions_own_setting_wins(
    policy: SendPolicy, override: SendDecision, channel: str | None, chat_type: ChatType | None, key: str
) -> None:
    assert decide_send(policy, override=override, channel=channel, chat_type=chat_type, key=key) == override


@pytest.mark.requirement("D1")
@settings(max_examples=200, deadline=None)
@given(policies, rules, maybe_channel, maybe_type, st.sampled_from(KEYS))
def test_a_further_deny_never_opens_and_a_further_allow_never_lifts_a_deny_rule(
    policy: SendPolicy, rule: SendRule, channel: str | None, chat_type: ChatType | None, key: str
) -> None:
    def ask(some: SendPolicy) -> SendDecision:
        return decide_send(some, override=None, channel=channel, chat_type=chat_type, key=key)

    denies = SendPolicy(tuple(one for one in policy.rules if one.action == "deny"), "allow")
    stays_shut = ask(denies) == "deny" or (rule.action == "deny" and ask(policy) == "deny")
    for more in ((rule, *policy.rules), (*policy.rules, rule)):
        if stays_shut:
            assert ask(SendPolicy(more, policy.default)) == "deny"


@pytest.mark.requirement("D1")
@settings(max_examples=200, deadline=None)
@given(policies, st.sampled_from(KEYS), st.integers(1, 3))
def test_the_order_of_rules_does_not_matter(policy: SendPolicy, key: str, turn: int) -> None:
    turned = (*policy.rules[turn:], *policy.rules[:turn])
    for rules_again in (turned, turned[::-1]):
        assert result(*rules_again, key=key, default=policy.default) == result(
            *policy.rules, key=key, default=policy.default
        )


@pytest.mark.requirement("D1")
def test_deny_then_allow_then_default() -> None:
    deny, allow, miss = SendRule("deny"), SendRule("allow"), SendRule("deny", channel="irc")
    assert result(allow, deny) == result(deny, allow) == "deny"
    assert result(allow, default="deny") == "allow"
    assert result(miss) == "allow"
    assert result(miss, default="deny") == "deny"
    assert SendPolicy().default == "allow"
    assert SendRule().action == "allow"
    assert decide_send(None, override=None, channel=None, chat_type=None, key=MAIN) == "allow"


@pytest.mark.requirement("D1")
@pytest.mark.parametrize(
    ("rule", "key", "denied"),
    [
        (SendRule("deny", channel="discord"), GROUP, True),
        (SendRule("deny", channel="Discord"), GROUP, True),
        (SendRule("deny", channel="telegram"), GROUP, False),
        (SendRule("deny", channel="discord"), MAIN, False),
        (SendRule("deny", chat_type="group"), GROUP, True),
        (SendRule("deny", chat_type="channel"), GROUP, False),
        (SendRule("deny", chat_type="direct"), MAIN, True),
        (SendRule("deny", chat_type="direct"), "agent:a:direct:bob", True),
        (SendRule("deny", channel="discord", chat_type="direct"), GROUP, False),
        (SendRule("deny", key_prefix="discord:group:"), GROUP, True),
        (SendRule("deny", key_prefix="DISCORD:"), GROUP, True),
        (SendRule("deny", key_prefix="agent:main:"), GROUP, True),
        (SendRule("deny", key_prefix="group:"), GROUP, False),
        (SendRule("deny", key_prefix="telegram:direct:bob"), "agent:a:telegram:direct:BOB", True),
        (SendRule("deny", key_prefix="cron:"), "agent:main:cron:1", True),
        (SendRule("deny", raw_key_prefix="agent:Main:"), GROUP, True),
        (SendRule("deny", raw_key_prefix="agent:a:irc:direct:bob"), "agent:a:irc:direct:BOB", True),
        (SendRule("deny", raw_key_prefix="discord:"), GROUP, False),
        (SendRule("deny", key_prefix="discord:", raw_key_prefix="agent:ops:"), GROUP, False),
    ],
)
def test_what_a_rule_matches(rule: SendRule, key: str, denied: bool) -> None:
    assert (result(rule, key=key) == "deny") is denied


@pytest.mark.requirement("D1")
def test_recorded_facts_come_before_the_key() -> None:
    telegram, direct = SendRule("deny", channel="telegram"), SendRule("deny", chat_type="direct")
    assert result(telegram, key=MAIN, channel="Telegram") == "deny"
    assert result(direct, key=MAIN, chat_type="direct") == "deny"
    assert result(SendRule("deny", channel="discord"), key=GROUP, channel="telegram") == "allow"
    assert result(SendRule("deny", chat_type="group"), key=GROUP, chat_type="channel") == "allow"


@pytest.mark.requirement("D1")
@pytest.mark.parametrize("chat_type", get_args(ChatType))
def test_an_unknown_chat_type_matches_no_rule_about_it(chat_type: ChatType) -> None:
    job = "agent:main:cron:1"
    assert result(SendRule("allow", chat_type=chat_type), key=job, default="deny") == "deny"
    assert result(SendRule("deny", chat_type=chat_type), key=job, default="allow") == "allow"


@pytest.mark.requirement("D1")
def test_a_key_that_is_not_stored_so_is_no_basis_for_a_decision() -> None:
    with pytest.raises(InvalidKey):
        result(SendRule("deny", chat_type="group"), key="discord:group:42")


@pytest.mark.requirement("D2", "003-policy-command-alone")
@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/send on", "allow"),
        ("/send allow", "allow"),
        ("/send off", "deny"),
        ("/send deny", "deny"),
        ("/send inherit", "inherit"),
        ("/send default", "inherit"),
        ("/send reset", "inherit"),
        ("  /SEND \t OFF \n", "deny"),
        ("/send", None),
        ("/send maybe", None),
        ("/sendon", None),
        ("/send on please", None),
        ("please /send on", None),
        ("/send on\nthanks", None),
        ("/send\non", None),
        ("send on", None),
        ("", None),
    ],
)
def test_send_command_is_the_whole_message(text: str, command: str | None) -> None:
    assert parse_send_command(text) == command
