"""Masks secrets in output: history, lists, announcements, logs, exports.

Stored text and text for models are not masked: a mask that reaches a model could end up in files it writes. Secrets are
recognised by their name or shape, so some may be missed.

Every pattern takes linear time: its repetitions are possessive and stop where the next match could begin. Only private
keys span several lines.
"""

from __future__ import annotations

import re
from functools import cache
from typing import overload

MIN_PARTIALLY_SHOWN_CHARACTERS = 18  # shorter secrets are masked completely
MAX_EXCERPT_CHARACTERS = 300
MAX_EXCERPT_SOURCE_CHARACTERS = 600  # of the text that an excerpt is made from
CUT_EDGE_CHARACTERS = 200  # at the end of a cut text, where a cut secret would not be recognised
MAX_REDACTION_ROUNDS = 8
"""A mask can put the end of one secret before the name of another, so masking is repeated until nothing changes."""

# The first letter is separate because `re` then skips to the next such letter; matching `aecret` is harmless.
_SECRET_NAME_PATTERN = (
    r"[aprstAPRST](?i:(?:pi|ecret|ccess|rivate)[_-]?key|(?:ccess|efresh)[_-]?token|oken|ecret|assword|asswd)"  # noqa: S105
)
# A backslash before a quote or line break belongs to the surrounding text, such as a shell line inside JSON.
_VALUE_PATTERN = (
    r"""(?:"(?P<double>[^"\n]++)|'(?P<single>[^'\n]++)|(?P<plain>(?:[^\s"'`\\]|\\(?![nrt"']))++))"""
)
_PREFIXED_TOKEN_PATTERN = (
    r"sk-[A-Za-z0-9_-]{8,}+|ghp_[A-Za-z0-9]{10,}+|github_pat_[A-Za-z0-9_]{10,}+|xox[baprs]-[A-Za-z0-9-]{8,}+"  # noqa: S105
    r"|xapp-[A-Za-z0-9-]{8,}+|gsk_[A-Za-z0-9_-]{10,}+|AIza[A-Za-z0-9_-]{20,}+|pplx-[A-Za-z0-9_-]{10,}+"
    r"|npm_[A-Za-z0-9]{10,}+"
)
_SECRET_PATTERNS = (
    # API_KEY=…, DB_PASSWORD: … Capitals only: `key=len` and `Key: value` are ordinary code and prose.
    rf"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)[ \t]{{0,8}}[=:](?![=:])[ \t]{{0,8}}{_VALUE_PATTERN}",
    # api_key=…, password=… as in URLs and connection strings.
    rf"{_SECRET_NAME_PATTERN}=(?!=){_VALUE_PATTERN}",
    rf"""(?P<mark>["']){_SECRET_NAME_PATTERN}(?P=mark)[ \t]{{0,8}}:[ \t]{{0,8}}"""
    r"""(?P<quote>["'])(?P<plain>(?:(?!(?P=quote))[^\\\n]|\\.)++)""",
    # JSON inside a JSON string.
    rf"""\\"{_SECRET_NAME_PATTERN}\\"[ \t]{{0,8}}:[ \t]{{0,8}}\\"(?P<plain>(?:[^"\\\n]|\\[^"\n])++)""",
    rf"--{_SECRET_NAME_PATTERN}[ \t]{{1,8}}(?!-){_VALUE_PATTERN}",
    r"""(?i:authorization)["']?[ \t]{0,8}[:=][ \t]{0,8}["']?(?i:bearer|basic)[ \t]{1,8}"""
    r"""(?P<plain>[^\s"'`\\,;]++)""",
    r"(?i:bearer)[ \t]{1,8}(?P<plain>[A-Za-z0-9._~+/=-]{18,}+)",
    rf"(?<![A-Za-z0-9])(?P<plain>{_PREFIXED_TOKEN_PATTERN})",
    # A Telegram bot token; in its URLs it follows `bot`.
    r"(?<![0-9])(?P<plain>[0-9]{6,12}+:[A-Za-z0-9_-]{20,}+)",
)
_PEM_LABEL_PATTERN = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_PRIVATE_KEY_PATTERN = (
    rf"(?P<first>-----BEGIN {_PEM_LABEL_PATTERN})"
    rf"(?:(?P<body>(?:[^-]|-(?!----))*+)(?P<last>-----END {_PEM_LABEL_PATTERN})"
    # A truncated key: everything that looks like its lines.
    r"|(?P<rest>(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]{16,}+)++(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]++(?=\s*$))?))"
)
_SECRET_HINTS = (
    "key", "oken", "ecret", "assw", "bearer", "authorization",
    "sk-", "ghp_", "github_pat_", "xox", "xapp-", "gsk_", "aiza", "pplx-", "npm_",
)  # fmt: skip
"""Lower-case substrings: a text without any of them can match only the last pattern."""
_QUOTE_PATTERN = re.compile(r"""["'\\]""")
_MASKED_PATTERN = re.compile(r"[*…]+|.{6}….{4}", re.DOTALL)


@cache  # on first use: most commands redact nothing, and compiling takes as long as importing several modules
def _compile_patterns() -> tuple[re.Pattern[str], tuple[re.Pattern[str], ...]]:
    """Return the pattern of private keys, and those of other secrets."""
    return re.compile(_PRIVATE_KEY_PATTERN), tuple(map(re.compile, _SECRET_PATTERNS))


def redact(text: str) -> str:
    """Return the text with its secrets masked; the same object if it has none."""
    if not _may_hold_secret(text):
        return text
    private_key, secrets = _compile_patterns()
    before = text
    for _ in range(MAX_REDACTION_ROUNDS):
        after = private_key.sub(_mask_private_key, before)
        for pattern in secrets:
            after = pattern.sub(_mask_match, after)
        if after == before:
            break
        before = after
    return text if before == text else before


@overload
def redact_excerpt(text: str) -> str: ...
@overload
def redact_excerpt(text: None) -> None: ...
def redact_excerpt(text: str | None) -> str | None:
    """Return the beginning of a text with its secrets masked; `text` has `MAX_EXCERPT_SOURCE_CHARACTERS` at most."""
    if not text:
        return text
    masked = redact(text)
    if len(text) < MAX_EXCERPT_SOURCE_CHARACTERS:
        return masked if len(masked) <= MAX_EXCERPT_CHARACTERS else f"{masked[:MAX_EXCERPT_CHARACTERS]}…"
    # It was cut: a secret that is cut at the end is not recognised, so the end is not shown.
    shown = max(0, min(len(masked) - CUT_EDGE_CHARACTERS, MAX_EXCERPT_CHARACTERS))
    return f"{masked[:shown]}…"


def _may_hold_secret(text: str) -> bool:
    """Whether the patterns need to be applied. Most texts do not need it, and this check is ten times cheaper."""
    folded = text.casefold()
    if any(word in folded for word in _SECRET_HINTS):
        return True
    return ":" in text and _compile_patterns()[1][-1].search(text) is not None


def _mask_match(match: re.Match[str]) -> str:
    """Mask the value of a match, which is the last group of every pattern and ends the match."""
    assert match.lastindex is not None
    secret: str = match[match.lastindex]
    return match[0][: -len(secret)] + _mask_secret(secret)


def _mask_secret(secret: str) -> str:
    """Return the mask of a secret. A mask is kept, and a secret with quotes is masked completely.

    Otherwise, half of an escaped quote could end the string around it.
    """
    if _MASKED_PATTERN.fullmatch(secret):
        return secret
    if len(secret) < MIN_PARTIALLY_SHOWN_CHARACTERS or _QUOTE_PATTERN.search(secret):
        return "***"
    return f"{secret[:6]}…{secret[-4:]}"


def _mask_private_key(match: re.Match[str]) -> str:
    inside: str = match["body"] or match["rest"] or ""
    line = "\\n" if inside.startswith("\\n") else "\n"  # inside JSON it must stay on one line
    return f"{match['first']}{line}…redacted…{line}{match['last'] or ''}"
