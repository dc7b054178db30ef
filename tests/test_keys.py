"""Session keys: no two sessions share one, short forms mean one thing, and bad ones are refused usefully."""

from __future__ import annotations

import itertools
import re
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from antiphon import keys as grammar
from antiphon.errors import InvalidKey
from antiphon.keys import (
    GLOBAL_KEY,
    MAX_KEY_CHARACTERS,
    ChatThread,
    KeyShape,
    OwnedKeyShape,
    SessionIdRef,
    SessionKey,
    SessionKind,
    canonicalize,
    direct_key,
    display_key,
    group_key,
    main_session_key,
    normalize_agent_id,
    owned_key,
    parse,
    resolve_list_channel,
    subagent_key,
    thread_key,
    validate_agent_id,
)

UUID = "6f1c2b54-8d0e-4a35-9a37-0f0c2f6f7e11"
OWNED: tuple[OwnedKeyShape, ...] = get_args(OwnedKeyShape)
RESERVED = (
    "agent",
    "main",
    "node",
    "node-1",
    "global",
    "unknown",
    "current",
    "direct",
    "dm",
    "group",
    "cron",
    "acp",
)
KEY_WORDS = [
    "thread",
    "topic",
    "direct",
    "dm",
    "group",
    "channel",
    "main",
    "agent",
    "cron",
    "node-",
    "current",
]
ID_PIECES = st.one_of(
    st.sampled_from([":", "%", "%25", "%3A", "%3a", "%20", " ", ":thread:", ":topic:", "::", *KEY_WORDS]),
    st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")),
)
ids = st.lists(ID_PIECES, min_size=1, max_size=8).map("".join)
agents = st.sampled_from(["main", "helper", "a-b_c", "0"])
channels = st.sampled_from(["telegram", "matrix", "ms-teams", "thread", "topic", "openai2"])
accounts = ids.filter(lambda text: text.lower() not in ("group", "channel", "direct", "dm"))
threads = st.none() | st.builds(ChatThread, ids, st.sampled_from(["thread", "topic"]))

keys = st.one_of(
    st.just(GLOBAL_KEY),
    st.builds(SessionKey, agents, st.just("main"), thread=threads),
    st.builds(SessionKey, agents, st.sampled_from(["group", "channel"]), ids, channels, thread=threads),
    st.builds(SessionKey, agents, st.just("direct"), ids, st.none() | channels, thread=threads),
    st.builds(SessionKey, agents, st.just("direct"), ids, channels, accounts, thread=threads),
    st.builds(SessionKey, agents, st.sampled_from(OWNED), ids),
    st.builds(
        SessionKey, agents, st.just("other"), st.sampled_from(["x", "tui-1", "slash:1", "x:thread:5", "Ä:%"])
    ),
)


@pytest.mark.requirement("K1")
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("agent:main:main", SessionKey("main", "main")),
        ("agent:main:telegram:group:-100", SessionKey("main", "group", "-100", "telegram")),
        ("agent:a:discord:channel:9", SessionKey("a", "channel", "9", "discord")),
        ("agent:a:direct:Bob", SessionKey("a", "direct", "Bob")),
        ("agent:a:signal:direct:+49", SessionKey("a", "direct", "+49", "signal")),
        ("agent:a:signal:Work:direct:+49", SessionKey("a", "direct", "+49", "signal", "Work")),
        (
            "agent:a:slack:channel:C1:thread:17.5",
            SessionKey("a", "channel", "C1", "slack", thread=ChatThread("17.5")),
        ),
        (
            "agent:a:telegram:group:-1:topic:7",
            SessionKey("a", "group", "-1", "telegram", thread=ChatThread("7", "topic")),
        ),
        ("agent:a:main:thread:5", SessionKey("a", "main", thread=ChatThread("5"))),
        (f"agent:a:subagent:{UUID}", SessionKey("a", "subagent", UUID)),
        (f"agent:a:acp:{UUID}", SessionKey("a", "acp", UUID)),
        ("agent:a:cron:nightly", SessionKey("a", "cron", "nightly")),
        (f"agent:a:hook:{UUID}", SessionKey("a", "hook", UUID)),
        ("agent:a:node-mac", SessionKey("a", "node", "mac")),
        (f"agent:a:dashboard:{UUID}", SessionKey("a", "dashboard", UUID)),
        (f"agent:a:openai:{UUID}", SessionKey("a", "openai", UUID)),
        ("agent:a:openai-user:bob", SessionKey("a", "openai-user", "bob")),
        ("agent:a:telegram:slash:5", SessionKey("a", "other", "telegram:slash:5")),
        ("main", GLOBAL_KEY),
    ],
)
def test_stored_forms(text: str, key: SessionKey) -> None:
    assert parse(text) == key
    assert str(key) == text


@pytest.mark.requirement("K5", "G32")
@settings(max_examples=200, deadline=None)
@given(keys)
def test_round_trip(key: SessionKey) -> None:
    assert parse(str(key)) == key


@pytest.mark.requirement("K5", "G32")
@settings(max_examples=200, deadline=None)
@given(keys, keys)
def test_different_keys_are_written_differently(one: SessionKey, other: SessionKey) -> None:
    assert (one == other) == (str(one) == str(other))


@pytest.mark.requirement("K5", "G32")
def test_no_collision_among_all_small_hostile_keys() -> None:
    pieces = (":", "direct", ":thread:", "thread", "x", "%", "3A", " ", "%25")
    words = ["".join(some) for size in (1, 2, 3) for some in itertools.product(pieces, repeat=size)]
    hostile = list(dict.fromkeys(words))
    short = [word for word in hostile if len(word) <= 9][:40]
    parts: list[tuple[KeyShape, str | None, str | None]] = [
        ("direct", None, None),
        ("direct", "x", None),
        ("group", "x", None),
        ("direct", "x", "x:direct"),
    ]
    plain = [
        SessionKey("a", shape, word, channel, account)
        for shape, channel, account in parts
        for word in hostile
    ]
    threaded = [
        SessionKey("a", "group", word, "x", thread=ChatThread(thread)) for word in short for thread in short
    ]
    accounts_too = [
        SessionKey("a", "direct", word, "x", account)
        for word in short
        for account in short
        if account != "direct"
    ]
    built = {*plain, *threaded, *accounts_too, *(owned_key("a", "node", word) for word in hostile)}
    assert len(built) > 5000
    assert len({str(key) for key in built}) == len(built)


@pytest.mark.requirement("K5")
@pytest.mark.parametrize(
    ("key", "text"),
    [
        (group_key("a", "matrix", "!Room:example.org"), "agent:a:matrix:group:!Room:example.org"),
        (group_key("a", "matrix", "!r:[::1]:8448"), "agent:a:matrix:group:!r:[::1]:8448"),
        (SessionKey("a", "direct", "@Ann:x.org", "matrix"), "agent:a:matrix:direct:@Ann:x.org"),
        (SessionKey("a", "direct", "direct:x", "matrix"), "agent:a:matrix:direct:direct:x"),
        (SessionKey("a", "direct", "p", "matrix", "@me:x"), "agent:a:matrix:@me%3Ax:direct:p"),
        (group_key("a", "irc", "a:thread:5"), "agent:a:irc:group:a:thread%3A5"),
        (owned_key("a", "cron", "a:thread:5"), "agent:a:cron:a:thread:5"),
        (group_key("a", "irc", "50%"), "agent:a:irc:group:50%"),
        (group_key("a", "irc", "50%25"), "agent:a:irc:group:50%2525"),
        (thread_key(group_key("a", "matrix", "!r:x"), "$e:x"), "agent:a:matrix:group:!r:x:thread:$e%3Ax"),
    ],
)
def test_only_what_is_ambiguous_is_escaped(key: SessionKey, text: str) -> None:
    assert str(key) == text
    assert parse(text) == key


@pytest.mark.requirement("K5")
def test_names_are_lower_cased_and_ids_are_not() -> None:
    assert str(group_key("Main", "Telegram", "AbC")) == "agent:main:telegram:group:AbC"
    assert canonicalize("AGENT:Main:Telegram:Group:AbC", agent_id="x") == group_key("main", "telegram", "AbC")
    assert group_key("a", "t", "AbC") != group_key("a", "t", "aBc")


@pytest.mark.requirement("K5")
@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("agent:Main:main", "agent:main:main"),
        ("agent:a:Telegram:group:1", "agent:a:telegram:group:1"),
        ("agent:a:telegram:dm:1", "agent:a:telegram:direct:1"),
        ("agent:a:node:1", "agent:a:node-1"),
        ("agent:a:irc:group:a%3Ab", "agent:a:irc:group:a:b"),
    ],
)
def test_stored_keys_have_one_spelling(text: str, stored: str) -> None:
    with pytest.raises(InvalidKey, match=re.escape(f"Write {stored!r}.")):
        parse(text)
    assert str(canonicalize(text, agent_id="x")) == stored


@pytest.mark.requirement("K1", "G32")
@pytest.mark.parametrize(
    "text",
    [
        "", "agent", "agent:", "agent:a", "agent:a:", "agent::main", "agent:a b:main", "unknown",
        "agent:a:cron:", "agent:a:cron", "agent:a:node-", "agent:a:direct:", "agent:a:telegram:group:",
        "agent:a::x", "agent:a:x::y", "agent:a:x:", "agent:a:x ", "agent:a:te legram:group:1",
        "agent:a:global", "agent:a:unknown", "agent:a:current", "agent:a:agent:b:main",
        "agent:a:cron:a\nb", "agent:a:cron:\x00", "agent:a:cron:\x85", "agent:a:cron:\ud800",
        "agent:a:cron:\u2028", f"agent:{'a' * 65}:main",
    ],
)  # fmt: skip
def test_malformed_keys_are_refused(text: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        parse(text)
    assert caught.value.hint


@pytest.mark.requirement("K1")
@pytest.mark.parametrize("name", RESERVED)
def test_a_channel_cannot_be_called_like_a_word_of_the_keys(name: str) -> None:
    with pytest.raises(InvalidKey, match="Channel name"):
        group_key("a", name, "1")


@pytest.mark.requirement("K1")
@pytest.mark.parametrize("account", ["group", "Channel", "direct", "dm"])
def test_an_account_cannot_be_called_like_a_chat(account: str) -> None:
    with pytest.raises(InvalidKey):
        SessionKey("a", "direct", "peer", "telegram", account)


@pytest.mark.requirement("K1")
@pytest.mark.parametrize(
    "parts",
    [
        ("A", "main"), ("", "main"), ("a", "main", "x"), ("a", "global"), ("a", "group", "1"),
        ("a", "group", "", "irc"), ("a", "direct", "1", None, "acc"), ("a", "cron", "1", "irc"),
        ("a", "cron", "1", None, None, ChatThread("5")), ("a", "main", "", None, None, ChatThread("")),
        ("a", "other", "main"), ("a", "other", "Cron:x"), ("a", "other", "irc:dm:x"),
    ],
)  # fmt: skip
def test_parts_that_make_no_key_are_refused(parts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidKey):
        SessionKey(*parts)  # pyright: ignore[reportArgumentType]


@pytest.mark.requirement("K1", "G32")
def test_an_empty_part_is_named_as_such() -> None:
    for parts in (
        ("", "irc", None, None),
        ("x", "", None, None),
        ("x", "irc", "", None),
        ("x", "irc", None, ChatThread("")),
    ):
        with pytest.raises(InvalidKey, match="has an empty part"):
            SessionKey("a", "direct", *parts)


@pytest.mark.requirement("K1")
def test_length_is_bounded() -> None:
    prefix = len("agent:a:cron:")
    longest = owned_key("a", "cron", "x" * (MAX_KEY_CHARACTERS - prefix))
    assert len(str(longest)) == MAX_KEY_CHARACTERS
    with pytest.raises(InvalidKey, match="at most 512") as caught:
        owned_key("a", "cron", "x" * (MAX_KEY_CHARACTERS - prefix + 1))
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidKey, match="at most 512"):
        canonicalize("x" * (MAX_KEY_CHARACTERS + 1), agent_id="a")


@pytest.mark.requirement("K2", "K4")
@pytest.mark.parametrize(
    ("reference", "stored"),
    [
        ("main", "agent:helper:main"),
        (" Main\n", "agent:helper:main"),
        ("main:thread:5", "agent:helper:main:thread:5"),
        ("cron:Job", "agent:helper:cron:Job"),
        (f"hook:{UUID}", f"agent:helper:hook:{UUID}"),
        ("node-mac", "agent:helper:node-mac"),
        ("node:mac", "agent:helper:node-mac"),
        ("telegram:group:-100", "agent:helper:telegram:group:-100"),
        ("Discord:channel:9", "agent:helper:discord:channel:9"),
        ("dm:bob", "agent:helper:direct:bob"),
        ("telegram:dm:5", "agent:helper:telegram:direct:5"),
        ("telegram:work:dm:5", "agent:helper:telegram:work:direct:5"),
        ("agent:main:telegram:dm:5:topic:2", "agent:main:telegram:direct:5:topic:2"),
        (f"subagent:{UUID}", f"agent:helper:subagent:{UUID}"),
        (f"acp:{UUID}", f"agent:helper:acp:{UUID}"),
        ("agent:other:main", "agent:other:main"),
        ("agent:other:custom", "agent:other:custom"),
    ],
)
def test_references_that_are_keys(reference: str, stored: str) -> None:
    assert canonicalize(reference, agent_id="helper") == parse(stored)


@pytest.mark.requirement("K2")
@pytest.mark.parametrize(
    "reference", [UUID, UUID.upper(), "helper", "01J8ZC3M", "some:thing", "x:y:group:z", "main:x"]
)
def test_anything_else_is_looked_up_as_a_session_id(reference: str) -> None:
    assert canonicalize(f" {reference} ", agent_id="a") == SessionIdRef(reference)


@pytest.mark.requirement("K2", "G32")
def test_current_is_the_callers_session() -> None:
    here = group_key("a", "irc", "#x")
    assert canonicalize("current", agent_id="a", current=here) == here
    with pytest.raises(InvalidKey, match="Write 'main' or a key"):
        canonicalize("current", agent_id="a")


@pytest.mark.requirement("K3")
@pytest.mark.parametrize("reference", ["global", "Global ", "unknown", "agent:a:global", "agent:a:unknown"])
@pytest.mark.parametrize("scope", ["per-sender", "global"])
def test_global_and_unknown_cannot_be_named(reference: str, scope: str) -> None:
    with pytest.raises(InvalidKey):
        canonicalize(reference, agent_id="a", scope="global" if scope == "global" else "per-sender")


@pytest.mark.requirement("K3")
@pytest.mark.parametrize(
    "reference", ["main", "work", "agent:a:main", "agent:b:main", "agent:b:Work", "current"]
)
def test_global_scope_has_one_main_session(reference: str) -> None:
    found = canonicalize(
        reference, agent_id="a", main_key="work", scope="global", current=SessionKey("a", "main")
    )
    assert found == GLOBAL_KEY == main_session_key("c", scope="global")
    assert (str(GLOBAL_KEY), GLOBAL_KEY.kind, display_key(GLOBAL_KEY, viewer_agent_id="a")) == (
        "main",
        "main",
        "main",
    )


@pytest.mark.requirement("K3")
def test_global_scope_leaves_other_sessions_alone() -> None:
    for text in ("agent:a:irc:group:#x", "agent:a:cron:1", "agent:a:main:thread:5"):
        assert str(canonicalize(text, agent_id="a", scope="global")) == text


@pytest.mark.requirement("K2")
def test_the_configured_main_key_is_another_name_for_main() -> None:
    assert canonicalize("work", agent_id="a", main_key="work") == SessionKey("a", "main")
    assert canonicalize("agent:b:work", agent_id="a", main_key="work") == SessionKey("b", "main")
    assert canonicalize("main", agent_id="a", main_key="work") == SessionKey("a", "main")
    assert canonicalize("work", agent_id="a") == SessionIdRef("work")


@pytest.mark.requirement("K2", "G32")
@settings(max_examples=150, deadline=None)
@given(keys.filter(lambda key: key != GLOBAL_KEY), agents)
def test_canonical_keys_are_accepted_unchanged(key: SessionKey, agent: str) -> None:
    assert canonicalize(str(key), agent_id=agent) == key


@pytest.mark.requirement("K2", "K3")
@settings(max_examples=150, deadline=None)
@given(keys, agents)
def test_what_is_displayed_is_accepted_back(key: SessionKey, viewer: str) -> None:
    scope = "global" if key == GLOBAL_KEY else "per-sender"
    shown = display_key(key, viewer_agent_id=viewer)
    assert canonicalize(shown, agent_id=viewer, scope=scope) == key


@pytest.mark.requirement("K2", "K4", "G32")
@settings(max_examples=200, deadline=None)
@given(
    st.lists(ID_PIECES, max_size=10).map("".join),
    agents,
    st.sampled_from(["", "agent:a:", "irc:", "agent:a:irc:"]),
)
def test_canonicalize_is_idempotent(text: str, agent: str, prefix: str) -> None:
    try:
        first = canonicalize(prefix + text, agent_id=agent, current=SessionKey("a", "main"))
    except InvalidKey:
        assume(False)
        return
    again = canonicalize(first.value if isinstance(first, SessionIdRef) else str(first), agent_id="zzz")
    assert again == first


@pytest.mark.requirement("K2")
@pytest.mark.parametrize(
    ("text", "own", "others"),
    [
        ("agent:a:main", "main", "agent:a:main"),
        ("agent:a:cron:1", "cron:1", "agent:a:cron:1"),
        ("agent:a:hook:1", "hook:1", "agent:a:hook:1"),
        ("agent:a:node-1", "node-1", "agent:a:node-1"),
        ("agent:a:main:thread:1", "agent:a:main:thread:1", "agent:a:main:thread:1"),
        ("agent:a:irc:group:#x", "agent:a:irc:group:#x", "agent:a:irc:group:#x"),
        ("agent:a:subagent:1", "agent:a:subagent:1", "agent:a:subagent:1"),
    ],
)
def test_display_is_short_for_ones_own_agent_only(text: str, own: str, others: str) -> None:
    assert display_key(parse(text), viewer_agent_id="a") == own
    assert display_key(parse(text), viewer_agent_id="b") == others
    assert display_key(parse(text), viewer_agent_id=None) == text


@pytest.mark.requirement("K6")
@pytest.mark.parametrize(
    ("text", "kind", "chat_type", "channel"),
    [
        ("agent:a:main", "main", "direct", None),
        ("main", "main", "direct", None),
        ("agent:a:main:thread:5", "other", "direct", None),
        ("agent:a:irc:group:#x", "group", "group", "irc"),
        ("agent:a:irc:channel:#x:thread:5", "group", "channel", "irc"),
        ("agent:a:irc:direct:x", "other", "direct", "irc"),
        ("agent:a:direct:x", "other", "direct", None),
        ("agent:a:cron:1", "cron", None, None),
        ("agent:a:cron:irc:group:x", "cron", None, None),
        ("agent:a:hook:1", "hook", None, None),
        ("agent:a:node-1", "node", None, None),
        ("agent:a:subagent:1", "other", None, None),
        ("agent:a:custom", "other", None, None),
    ],
)
def test_kind_and_chat_type(text: str, kind: SessionKind, chat_type: str | None, channel: str | None) -> None:
    key = parse(text)
    assert (key.kind, key.chat_type, key.channel) == (kind, chat_type, channel)


@pytest.mark.requirement("K6")
@pytest.mark.parametrize(
    ("kind", "recorded", "last", "shown"),
    [
        ("group", "telegram", "webchat", "telegram"),
        ("group", None, "webchat", "unknown"),
        ("main", "telegram", "signal", "signal"),
        ("other", None, "signal", "signal"),
        ("main", None, None, "unknown"),
        ("cron", "telegram", "telegram", "internal"),
        ("hook", None, None, "internal"),
        ("node", None, "x", "internal"),
    ],
)
def test_channel_of(kind: SessionKind, recorded: str | None, last: str | None, shown: str) -> None:
    assert resolve_list_channel(kind, recorded, last) == shown


@pytest.mark.requirement("K7")
def test_direct_scopes() -> None:
    def key(scope: str, account: str | None = None) -> str:
        built = direct_key("Main", "Signal", "+49Ab", account_id=account, dm_scope=scope)  # pyright: ignore[reportArgumentType]
        return str(built)

    assert str(direct_key("main", "signal", "+49")) == "agent:main:main"
    assert key("main") == "agent:main:main"
    assert key("per-peer") == "agent:main:direct:+49Ab"
    assert key("per-channel-peer") == "agent:main:signal:direct:+49Ab"
    assert key("per-account-channel-peer") == "agent:main:signal:default:direct:+49Ab"
    assert key("per-account-channel-peer", "Work") == "agent:main:signal:Work:direct:+49Ab"
    assert direct_key("main", "signal", "1", scope="global") == GLOBAL_KEY


@pytest.mark.requirement("K7")
def test_identity_links_name_the_peer() -> None:
    links = {"ann": ["telegram:123", "discord:9"], "bob": ["U77", "telegram:123"]}

    def peer(channel: str, peer_id: str) -> str:
        return direct_key("a", channel, peer_id, dm_scope="per-peer", identity_links=links).id

    assert peer("telegram", "123") == peer("Discord", "9") == "ann"
    assert peer("slack", "u77") == peer("irc", "U77") == "bob"
    assert peer("signal", "123") == "123"
    assert direct_key("a", "telegram", "123", identity_links=links) == SessionKey("a", "main")
    linked = direct_key("a", "telegram", "123", dm_scope="per-channel-peer", identity_links=links)
    assert str(linked) == "agent:a:telegram:direct:ann"


@pytest.mark.requirement("K7", "G34")
@settings(max_examples=150, deadline=None)
@given(ids, ids, st.sampled_from(["per-peer", "per-channel-peer", "per-account-channel-peer"]))
def test_different_peers_never_share_a_session(one: str, other: str, dm_scope: str) -> None:
    def built(peer: str) -> str:
        return str(direct_key("a", "irc", peer, dm_scope=dm_scope))  # pyright: ignore[reportArgumentType]

    assert (built(one) == built(other)) == (one == other)
    assert built(one.swapcase()) != built(one) or one.swapcase() == one


@pytest.mark.requirement("K1")
def test_threads_hang_under_chats() -> None:
    group = group_key("a", "telegram", "-1")
    topic = thread_key(group, "7", word="topic")
    assert (topic.parent, group.parent) == (group, None)
    assert str(thread_key(topic, "8")) == "agent:a:telegram:group:-1:thread:8"
    for loner in (subagent_key("a", UUID), GLOBAL_KEY, parse("agent:a:custom")):
        with pytest.raises(InvalidKey):
            thread_key(loner, "5")


@pytest.mark.requirement("K5")
@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        ("Main", "main"), ("  Ops Team! ", "ops-team"), ("--x--", "x"), ("_x", "x"), ("", "main"),
        ("💥", "main"), ("a" * 80, "a" * 64), ("a_b-c", "a_b-c"), ("Über", "ber"),
    ],
)  # fmt: skip
def test_agent_ids_are_normalised(raw: str, normal: str) -> None:
    assert normalize_agent_id(raw) == normal


@pytest.mark.requirement("K5")
@settings(max_examples=150, deadline=None)
@given(st.text(max_size=80))
def test_a_normalised_agent_id_is_valid(raw: str) -> None:
    normal = normalize_agent_id(raw)
    assert validate_agent_id(normal) == normal == normalize_agent_id(normal)


@pytest.mark.requirement("K5")
@pytest.mark.parametrize("text", ["", " a", "a b", "a:b", "-a", "é", "\u212a", "a" * 65, "a\n"])
def test_an_invalid_agent_id_is_never_guessed(text: str) -> None:
    with pytest.raises(InvalidKey, match="Agent id"):
        validate_agent_id(text)
    with pytest.raises(InvalidKey, match="Agent id"):
        main_session_key(text)
    with pytest.raises(InvalidKey, match="Agent id"):
        canonicalize("main", agent_id=text)


def test_references_that_were_read_are_remembered_without_what_stood_around_them() -> None:
    """A million blanks behind a name are not kept in memory."""
    kept = grammar._canonicalize_text.cache_info  # pyright: ignore[reportPrivateUsage]
    before = kept().currsize
    for blanks in range(0, 1_000_000, 50_000):
        assert canonicalize(f"main{' ' * blanks}", agent_id="padded") == SessionKey("padded", "main")
    assert kept().currsize - before <= 1
