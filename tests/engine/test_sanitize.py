"""Sanitizing: no control token, frame marker or address in a key reaches a human, however disguised or split.

The checker below is written apart from the gate: it walks over characters and uses no expression of the gate's.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable
from itertools import takewhile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from antiphon import keys
from antiphon.engine.outbox.redaction import redact
from antiphon.engine.outbox.sanitize import (
    ANNOUNCE_SKIP,
    NO_REPLY,
    REPLY_SKIP,
    SanitizingStream,
    has_control_token,
    is_silence,
    is_skip,
    sanitize_for_agents,
    sanitize_for_people,
)
from antiphon.errors import InvalidKey

pytestmark = pytest.mark.requirement("S6", "D3")

TOKENS = (REPLY_SKIP, ANNOUNCE_SKIP, NO_REPLY)
UUID = "6f1c2b54-8d0e-4a35-9a37-0f0c2f6f7e11"
MARKER = "<<<end 0123456789ab>>>"
HEX = "0123456789abcdef"


def as_read(text: str) -> str:
    """What is left for the eye: no invisible characters, no Markdown, one form of each letter."""
    return "".join(unicodedata.normalize("NFKC", char).lower() for char in text if not is_unseen(char))


def is_unseen(char: str) -> bool:
    category, number = unicodedata.category(char), ord(char)
    if category in ("Cf", "Cc"):
        return not char.isspace()
    fillers = (0x34F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2065, 0x3164, 0xFFA0)
    selectors = 0x180B <= number <= 0x180F or 0xFE00 <= number <= 0xFE0F or 0xE0000 <= number <= 0xE0FFF
    return char in "\\*`~" or number in fillers or selectors or 0xFFF0 <= number <= 0xFFF8


def has_address(read: str) -> bool:
    """Whether a session key in it names a direct peer, a phone number or an e-mail address."""
    return any(
        read.startswith("agent:", at) and is_address(*read[at + 6 :].partition(":"))
        for at in range(len(read))
    )


def is_address(agent: str, colon: str, rest: str) -> bool:
    if not colon or not is_agent(agent):
        return False
    key = "".join(takewhile(lambda char: not char.isspace() and char not in "\"'<>()[]{}", rest)).rstrip(
        ".,;:!?"
    )
    parts = key.replace("%3a", ":").split(":")
    peers = any(
        part in ("direct", "dm", "openai-user") and parts[n + 1 :] for n, part in enumerate(parts[:-1])
    )
    digits = any(
        len(list(takewhile(str.isdecimal, tail))) >= 6 for tail in key.replace("%2b", "+").split("+")[1:]
    )
    return peers or digits or "@" in key


def is_agent(text: str) -> bool:
    try:
        keys.validate_agent_id(text)
    except InvalidKey:
        return False
    return True


def has_marker(read: str) -> bool:
    for tail in read.split("<<<")[1:]:
        word, _, rest = tail.lstrip("<").partition(" ")
        if word in ("data", "end") and rest[12:15] == ">>>" and set(rest[:12]) <= set(HEX):
            return True
    return False


def leaks(text: str) -> list[str]:
    read = as_read(text)
    found = [token for token in TOKENS if token.lower() in read]
    return found + ["address"] * has_address(read) + ["marker"] * has_marker(read)


@pytest.mark.parametrize(
    "text",
    [
        "xno_replyx", "REPLY\\_SKIP", "ANNOUNCE\u200b_SK\u00adIP", "ＮＯ＿ＲＥＰＬＹ", "№_reply", "a agent:x:direct:y",
        "agent:agent:x:a@b", "agent:x:sms:group:+123456", MARKER, "<<<<data 0123456789ab>>>",
    ],
)  # fmt: skip
def test_the_checker_sees(text: str) -> None:
    assert leaks(text)


INVISIBLE = [
    "\u200b",
    "\u200c",
    "\u200d",
    "\u2060",
    "\ufeff",
    "\u00ad",
    "\u202e",
    "\ufe0f",
    "\u034f",
    "\x00",
    "\x1b",
]
DISGUISES: list[Callable[[str], str]] = [
    str.upper,
    str.lower,
    str.swapcase,
    lambda char: chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char,  # full width
    lambda char: chr(0x1D400 + ord(char) - 65) if "A" <= char <= "Z" else char,  # mathematical bold
    lambda char: f"\\{char}",
]


@st.composite
def disguised(draw: st.DrawFn, secret: str) -> str:
    """One style for all, or a style and invisible characters for each character."""
    if draw(st.booleans()):
        return secret
    styles = st.sampled_from(DISGUISES)
    noise = st.sampled_from(["", "", "", *INVISIBLE, "**", "`"])
    return "".join(f"{draw(styles)(char)}{draw(noise)}" for char in secret)


markers = st.builds(
    "<<<{} {}>>>".format, st.sampled_from(["data", "end"]), st.text(HEX, min_size=12, max_size=12)
)
opaque = st.text("abcXYZ019-_+@#%!.:/=é", min_size=1, max_size=12)
agents = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,9}", fullmatch=True)
session_keys = st.one_of(
    st.builds("agent:{}:main".format, agents),
    st.builds("agent:{}:{}".format, agents, opaque),
    st.builds("agent:{}:telegram:direct:{}".format, agents, opaque),
    st.builds("agent:{}:dm:{}:thread:{}".format, agents, opaque, opaque),
    st.builds("agent:{}:sms:group:+{}".format, agents, st.integers(10**6, 10**12)),
    st.builds("agent:{}:telegram:group:{}:topic:{}".format, agents, opaque, opaque),
    agents.map(lambda agent: str(keys.subagent_key(agent, UUID))),
    st.just(f"subagent:{UUID}"),
)
plain = st.sampled_from(TOKENS) | markers | session_keys


@st.composite
def nested(draw: st.DrawFn) -> str:
    """Something forbidden inside something forbidden: taking the inner one out completes the outer one."""
    text = draw(plain)
    for _ in range(draw(st.integers(0, 2))):
        outer = draw(plain)
        at = draw(st.integers(0, len(outer)))
        text = outer[:at] + text + outer[at:]
    return text


forbidden = nested() | plain.flatmap(disguised)
wrappings = st.sampled_from(
    [
        "{}",
        "{}{}",
        "{} {}",
        "```\n{}\n```",
        "`{}`",
        "**{}**",
        "> {}",
        "x{}y",
        "({})",
        '"{}"',
        "\n\n{}\n\n",
        "{}\n",
    ]
)
harmless = st.text(max_size=12) | st.sampled_from(
    ["REPLY", "SKIP", "_SKIP", "NO_", "REPLY_", "ANNOUNCE", "agent", "agent:", ":main", "sub", "<<<", "<<<end", ">>>",
     "data ", " ", "\n", "```", "TOKEN=", "Bearer ", "-----BEGIN PRIVATE KEY-----\n", "sk-aaaaaaaaaaaa"]
)  # fmt: skip
wrapped = st.tuples(wrappings, forbidden).map(lambda pair: pair[0].replace("{}", pair[1]))
hostile = st.lists(harmless | wrapped, min_size=1, max_size=6).map("".join)


@st.composite
def chunked(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    if draw(st.booleans()):
        return list(text)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(chunks: list[str]) -> str:
    stream = SanitizingStream()
    return "".join([*(stream.feed(chunk) for chunk in chunks), stream.finish()])


@settings(max_examples=1000)
@given(hostile)
@example("REPLY_REPLY_SKIPSKIP")
@example("REPLY_<<<end 0123456789ab>>>SKIP")
@example("<<<end 01234NO_REPLY56789ab>>>")
@example("agent:NO_REPLYmain:main")
def test_nothing_forbidden_is_left(text: str) -> None:
    cleared = sanitize_for_people(text)
    assert leaks(cleared) == []
    assert sanitize_for_people(cleared) == cleared


@settings(max_examples=1000)
@given(chunked(hostile))
@example(["REPLY_", " NO_REPLY\n", "SKIP"])
@example(["<<NO_REPLY<data ", "0123456789ab>>>"])
@example(["<<<end ", "0123456789ab>>>"])
@example(["REPLY_ ", MARKER, "SKIP"])
def test_nothing_forbidden_is_streamed(chunks: list[str]) -> None:
    assert leaks(streamed(chunks)) == []


@settings(max_examples=300)
@given(harmless, st.sampled_from(TOKENS).flatmap(disguised), harmless)
def test_a_disguised_token_is_noticed(before: str, token: str, after: str) -> None:
    assert has_control_token(before + token + after)


ordinary = (
    st.lists(
        st.text(max_size=10)
        | st.sampled_from(
            ["REPLY", "SKIP", "no reply", "reply-skip", "agent", "agent: x", "Agent Smith: hi", "user-agent:", "<<<",
             "data", "<<< end", ">>>", "subagent", "subagent: yes", "the key", "a token ", "  ", "\n\n\n\n", "```py\n",
             "👩‍👩‍👧", "**bold**", "a\\_b", "ﬁ", "½", "\u200b", "    indented\n", "\r\n", "Bearer of"]
        ),
        max_size=12,
    )
    .map("".join)
    .filter(lambda text: not leaks(text) and redact(text) == text)
)  # fmt: skip


@settings(max_examples=300)
@given(ordinary)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert not has_control_token(text)
    assert sanitize_for_people(text) == text


@settings(max_examples=300)
@given(chunked(ordinary))
def test_ordinary_text_streams_unchanged(chunks: list[str]) -> None:
    assert streamed(chunks) == "".join(chunks)


words = st.text("abcdef", min_size=1, max_size=8)


@given(words, st.sampled_from(TOKENS).flatmap(disguised), words)
def test_the_words_around_a_token_survive(before: str, token: str, after: str) -> None:
    assert as_read(sanitize_for_people(f"{before} {token} {after}")).split() == [before, after]


readable_keys = session_keys.filter(lambda key: not leaks(key) and redact(key) == key)


@given(words, readable_keys, words)
@example("a", "agent:0:0", "a")
def test_a_key_without_an_address_stays_readable(before: str, key: str, after: str) -> None:
    assert sanitize_for_people(f"{before} {key} {after}") == f"{before} {key} {after}"


@given(words, session_keys.filter(lambda key: redact(key) == key), words)
def test_every_key_stays_readable_to_agents_and_the_own_one_to_its_person(
    before: str, key: str, after: str
) -> None:
    text = f"{before} {key} {after}"
    assert sanitize_for_agents(text) == text
    if key == key.rstrip(".,;:!?"):
        assert sanitize_for_people(text, own_key=key) == text


@given(words, agents, opaque.filter(lambda peer: peer == peer.strip(".:!")), words)
def test_the_words_around_an_address_survive(before: str, agent: str, peer: str, after: str) -> None:
    text = f"{before} agent:{agent}:direct:{peer} {after}"
    assert sanitize_for_people(text) == f"{before} agent:{agent}:direct:*** {after}"


secret_bodies = st.text("abcdefghijkmnpqrstuvwxyz0123456789", min_size=40, max_size=50)
carriers = st.sampled_from(
    ["A_KEY = {}", 'B_TOKEN="{}"', '{{"apiKey": "{}"}}', "--password {}", "Authorization: Bearer {}", "sk-{}",
     "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n"]
)  # fmt: skip


leaking = st.tuples(carriers, secret_bodies).map(lambda pair: f"see {pair[0].format(pair[1])} ok")


@given(chunked(leaking))
def test_a_secret_is_masked_in_a_stream_too(chunks: list[str]) -> None:
    text = "".join(chunks)
    shown = streamed(chunks)
    assert shown == sanitize_for_people(text) == redact(text) != text


@pytest.mark.parametrize("token", TOKENS)
def test_a_skip_is_exactly_the_token(token: str) -> None:
    assert is_skip(token, token)
    assert is_skip(f" \n{token}\t", token)
    for other in (None, "", token.lower(), f"{token}.", f"{token} {token}", f"`{token}`", f"ok {token}"):
        assert not is_skip(other, token)
    assert not is_skip("REPLY_SKIP", ANNOUNCE_SKIP)


@pytest.mark.parametrize("token", TOKENS)
def test_silence_is_nothing_but_tokens(token: str) -> None:
    quiet = (
        "",
        " \n",
        token,
        token.lower(),
        f"{token}.",
        f"“{token}”",
        f"```text\n{token}\n```",
        f"- {token} {token}",
    )
    assert [text for text in quiet if not is_silence(text)] == []
    spoken = (f"ok {token}", f"{token}: nothing new", "...", "```\ncode\n```", f"{token} 👍")
    assert [text for text in spoken if is_silence(text)] == []


@pytest.mark.parametrize(
    ("text", "cleared"),
    [
        ("NO_REPLY", ""),
        ("```\nNO_REPLY\n```", ""),
        ("**ANNOUNCE_SKIP**.", ""),
        ("Done.\n\nREPLY_SKIP", "Done."),
        ("One.\n\nREPLY_SKIP\n\nTwo.\n\n\n\nThree.", "One.\n\nTwo.\n\n\n\nThree."),
        ("One.\nREPLY_SKIP\n    two", "One.\n    two"),
        ("One.\n\n\n\nREPLY_SKIP\nNO_REPLY\n\n\nTwo.", "One.\n\nTwo."),
        ("foono_replybar", "foobar"),
        (f"see {MARKER} here", "see here"),
        ("ask agent:main:telegram:group:-1001:topic:5.", "ask agent:main:telegram:group:-1001:topic:5."),
        (f"(agent:main:main, 'subagent:{UUID}')", f"(agent:main:main, 'subagent:{UUID}')"),
        ("ask agent:main:telegram:direct:77:thread:5.", "ask agent:main:telegram:direct:***."),
        ("('Agent:Main:DM:Bob', x)", "('Agent:Main:DM:***', x)"),
        ("to agent:main:mail:group:a.b@c.test!", "to agent:main:mail:group:***!"),
        ("to agent:main:sms:group:+4915112345678, ok", "to agent:main:sms:group:***, ok"),
        ("x.test/?s=agent%3Amain%3Adirect%3Abob", "x.test/?s=agent%3Amain%3Adirect%3A***"),
        ("A_KEY=hunter2", "A_KEY=***"),
        ("...", "..."),
        ("", ""),
    ],
)
def test_what_is_left(text: str, cleared: str) -> None:
    assert sanitize_for_people(text) == cleared


def test_stats_are_put_below_as_they_are() -> None:
    stats = "Stats: sessionKey agent:main:main"
    assert sanitize_for_people("Done NO_REPLY", stats=stats) == f"Done\n\n{stats}"
    assert sanitize_for_people("Done", stats="a\nb\x1bc\u2028d") == "Done\n\na b c d"
    assert sanitize_for_people("NO_REPLY", stats=stats) == ""


def test_what_is_built_to_get_through_does_not_leave() -> None:
    assert sanitize_for_people("hello " + "REPLY_" * 50 + "SKIP" * 50) == ""


def test_a_stream_shows_words_as_they_are_completed() -> None:
    stream = SanitizingStream()
    assert stream.feed("Hel") == ""
    assert stream.feed("lo wor") == "Hello "
    assert stream.feed("ld, NO_RE") == "world, "
    assert stream.feed("PLY\nbye") == ""
    assert stream.finish() == "bye"
    assert stream.feed("again ") == "again "


def test_a_stream_holds_a_line_that_may_hold_a_secret() -> None:
    stream = SanitizingStream()
    assert stream.feed("fine A_KEY = hun") == ""
    assert stream.feed("ter2 and more\nnext ") == "fine A_KEY = *** and more\nnext "
    assert stream.feed("-----BEGIN PRIVATE KEY-----\nMIIEabcdefghijklmnop\n") == ""
    assert stream.feed("-----END PRIVATE KEY-----\ndone ") == ""
    assert stream.finish() == "-----BEGIN PRIVATE KEY-----\n…redacted…\n-----END PRIVATE KEY-----\ndone "


UNITS = [
    "a", "é", " ", "\n", "\u200b", "NO_REPLY", "NO_REPLY\n", "ＮＯ＿ＲＥＰＬＹ", "agent:", "agent:a:", "agent:a:b ",
    "agent:a:.(", "agent:a:direct:b", "agent:a:@", "subagent:", "<<<data ", MARKER, "REPLY_",
]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_hostile_text_is_linear(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    begun = time.process_time()
    sanitize_for_people(text)
    assert time.process_time() - begun < 6.0  # quadratic would take hours


@pytest.mark.parametrize("unit", ["a", "a key ", "a key\n", "agent:a:", "-----BEGIN PRIVATE KEY-----\n"])
def test_a_hostile_stream_is_linear(unit: str) -> None:
    text = unit * (20_000 // len(unit))
    begun = time.process_time()
    streamed(list(text))
    assert time.process_time() - begun < 6.0


def test_deep_nesting_is_given_up_soon() -> None:
    begun = time.process_time()
    assert sanitize_for_people("REPLY_" * 100_000 + "SKIP" * 100_000) == ""
    assert time.process_time() - begun < 15.0
