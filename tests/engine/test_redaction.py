"""Secrets are masked on the way out, ordinary text is left alone, and no input makes it slow."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.engine.outbox.redaction import (
    _SECRET_SHAPES,  # pyright: ignore[reportPrivateUsage]
    SecretShape,
    _select_patterns,  # pyright: ignore[reportPrivateUsage]
    redact,
)

pytestmark = pytest.mark.requirement("H3")

LONG = "Zq81kd02mXw93hTbvP55"
MASKED = "Zq81kd…vP55"
PEM = (
    "-----BEGIN RSA PRIVATE KEY-----\nMIIEabcdefghijklmnop\nQRSTuvwxyz012345==\n-----END RSA PRIVATE KEY-----"
)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"export OPENAI_API_KEY={LONG}", f"export OPENAI_API_KEY={MASKED}"),
        ("DB_PASSWORD=hunter2", "DB_PASSWORD=***"),
        ("MY_SECRET: hunter2 # note", "MY_SECRET: *** # note"),
        ('X_TOKEN = "two words"; ls', 'X_TOKEN = "***"; ls'),
        ("PASSWD='it is'", "PASSWD='***'"),
        ("run `A_KEY=abc` now", "run `A_KEY=***` now"),
        ('{"cmd": "A_KEY=abc\\nls"}', '{"cmd": "A_KEY=***\\nls"}'),
        (f"https://x.test/?api_key={LONG}", f"https://x.test/?api_key={MASKED}"),
        ("postgres://h/db?password=hunter2", "postgres://h/db?password=***"),
        (f'{{"apiKey": "{LONG}"}}', f'{{"apiKey": "{MASKED}"}}'),
        ('{"token":"a\\"b secret tail"}', '{"token":"***"}'),
        ("{'refreshToken': 'abc', 'n': 1}", "{'refreshToken': '***', 'n': 1}"),
        ('{"accessToken" : "abc"}', '{"accessToken" : "***"}'),
        ('"{\\"passwd\\": \\"abc\\", \\"n\\": 1}"', '"{\\"passwd\\": \\"***\\", \\"n\\": 1}"'),
        ("curl --token abc --verbose", "curl --token *** --verbose"),
        (f"x --api-key={LONG} y", f"x --api-key={MASKED} y"),
        ('--password "two words" z', '--password "***" z'),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ('"authorization": "Bearer abc"', '"authorization": "Bearer ***"'),
        (f"send bearer {LONG}.", "send bearer Zq81kd…P55."),
        (f"a sk-{LONG} b", "a sk-Zq8…vP55 b"),
        ("sk-12345678", "***"),
        (f"ghp_{LONG}", "ghp_Zq…vP55"),
        (f"github_pat_{LONG}", "github…vP55"),
        (f"xoxb-{LONG}", "xoxb-Z…vP55"),
        (f"xapp-1-{LONG}", "xapp-1…vP55"),
        (f"gsk_{LONG}", "gsk_Zq…vP55"),
        (f"AIza{LONG}", "AIzaZq…vP55"),
        (f"pplx-{LONG}", "pplx-Z…vP55"),
        (f"npm_{LONG}", "npm_Zq…vP55"),
        (f"xoxb-{LONG}-gsk_{LONG}", "xoxb-Z…-gsk_Zq…vP55"),  # the first takes the beginning of the second
        (f'{{"token":"{LONG}\\"bcd"}}', '{"token":"***"}'),  # its end would close the string
        (f"12345678:{LONG}abc", "123456…5abc"),
        (f"https://api.telegram.org/bot12345678:{LONG}abc/me", "https://api.telegram.org/bot123456…5abc/me"),
        (f"key:\n{PEM}\nend", f"key:\n{PEM.splitlines()[0]}\n…redacted…\n{PEM.splitlines()[-1]}\nend"),
        (
            "-----BEGIN PRIVATE KEY-----\nMIIEabcdefghijklmnop\n",
            "-----BEGIN PRIVATE KEY-----\n…redacted…\n\n",
        ),
        (
            '{"pem": "-----BEGIN PRIVATE KEY-----\\nMIIEabcd\\n-----END PRIVATE KEY-----"}',
            '{"pem": "-----BEGIN PRIVATE KEY-----\\n…redacted…\\n-----END PRIVATE KEY-----"}',
        ),
    ],
)
def test_a_secret_is_masked_and_what_is_around_it_stays(text: str, masked: str) -> None:
    assert redact(text) == masked
    assert redact(masked) == masked


def test_only_a_value_of_18_characters_shows_its_ends() -> None:
    assert redact("A_KEY=" + "x" * 17) == "A_KEY=***"
    assert redact("A_KEY=abcdefxxxxxxxxwxyz") == "A_KEY=abcdef…wxyz"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The key is to ask for a token in secret; a password helps.",
        "sorted(rows, key=len) and if API_KEY == other: TOKEN::Kind",
        "task-management, risk-assessment, disk-encryption, sk-short",
        "Bearer of news; --token",
        "meet at 12:30:45 on 2026-01-01, 123456:short",
        "-----BEGIN CERTIFICATE-----\nMIIEabcdefghijklmnop\n-----END CERTIFICATE-----",
        "a PEM file begins with -----BEGIN PRIVATE KEY----- and goes on",
        '{"tokens": 12, "tokenCount": "many", "token": 5}',
    ],
)
def test_ordinary_text_is_the_same_object(text: str) -> None:
    assert redact(text) is text


PIECES = st.sampled_from(
    [
        "KEY", "API_TOKEN", "PASSWORD", "=", ":", ": ", " ", "\n", '"', "'", "\\", '\\"', "`", "…", "***", ".", ",",
        '"token": "', "'secret':'", '\\"passwd\\":\\"', "--token ", "password=", "Authorization: Bearer ", "Bearer ",
        "sk-", "ghp_", "xoxb-", "AIza", "123456:", "bot1234567:", "-----BEGIN PRIVATE KEY-----",
        "-----END PRIVATE KEY-----", LONG, "x" * 17, "y" * 40, "a1",
    ]
)  # fmt: skip
mixed = st.lists(PIECES | st.text(max_size=3), max_size=14).map("".join)


@settings(max_examples=600)
@given(mixed)
def test_masking_twice_is_masking_once(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


secrets = st.text("abcdefghijkmnpqrstuvwxyzABCDEFGH0123456789", min_size=40, max_size=60)
carriers = st.sampled_from(
    [
        "APP_KEY={}", "APP_TOKEN: {}", 'S_SECRET="{}"', '"apiKey": "{}"', "--password {}", "--token={}", "Bearer {}",
        "Authorization: Bearer {}", "sk-{}", "ghp_{}", "github_pat_{}", "xoxp-{}", "xapp-{}", "gsk_{}", "AIza{}",
        "pplx-{}", "npm_{}", "1234567890:{}", "bot1234567890:{}",
        "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    ]
)  # fmt: skip
around = st.text("abc .,\n()", max_size=20)


@pytest.mark.parametrize("shape", _SECRET_SHAPES)
@given(data=st.data())
def test_a_text_that_a_pattern_matches_contains_one_of_its_hints(
    shape: SecretShape, data: st.DataObject
) -> None:
    text = data.draw(st.from_regex(shape.pattern))
    assert shape.pattern in [pattern.pattern for pattern in _select_patterns(text)]


@given(around, carriers, secrets, around)
def test_no_secret_comes_through_whole(before: str, carrier: str, secret: str, after: str) -> None:
    assert secret[6:-4] not in redact(f"{before} {carrier.format(secret)} {after}")


@given(st.text("abcdefghij XYZ.,;!?\n()[]{}<>#*_", max_size=200))
def test_text_without_names_or_shapes_of_secrets_survives(text: str) -> None:
    assert redact(text) is text


UNITS = [
    "a", "1", " ", "\n", "-", '"', "\\", "KEY", "KEY=", 'KEY="', "KEY        ", "password=", '"token":"', "\"token\":'",
    '\\"token\\":\\"', "--token ", "Bearer ", "Authorization: ", "sk-", "sk-aaaaaaaa ", "-sk-aaaaaaa", "ghp_",
    "123456789012:", "123456:aaaaaaaaaaaaaaaaaaa ", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", "…", "***",
    "Bearer aaaaaaaaaaaaaaaaaa.KEY= ", "-----BEGIN PRIVATE KEY-----AAAAAAAAAAAAAAAA" + "\n" * 100,
]  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_hostile_text_is_linear(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    begun = time.process_time()
    redact(text)
    assert time.process_time() - begun < 2.0  # quadratic would take minutes; one second on a quiet machine
