"""Masks secrets in announcements, tool results about sessions, search hits and excerpts.

Not masked: stored text, prompts, transcripts shown to people, exports and logs. A mask in a prompt could end up in a
file that the model writes. Secrets are recognized by their name or shape, so some may be missed.

Every pattern takes linear time: its repetitions stop where the next match could begin, and are possessive or at the
end, where nothing makes them go back. Repeated groups are not possessive, since Python before 3.11.5 matches them
wrongly. Only private keys span several lines.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple, overload

MIN_PARTIALLY_SHOWN_CHARACTERS = 18  # shorter secrets are masked completely
MAX_EXCERPT_CHARACTERS = 300
MAX_EXCERPT_SOURCE_CHARACTERS = 600  # of the text that an excerpt is made from
CUT_EDGE_CHARACTERS = 200  # at the end of a cut text, where a cut secret would not be recognized
MAX_REDACTION_ROUNDS = 8
"""A mask can put the end of one secret before the name of another, so masking is repeated until nothing changes."""

# The first letter is separate because `re` then skips to the next such letter; matching `aecret` is harmless.
_SECRET_NAME_PATTERN = (
    r"[aprstAPRST](?i:(?:pi|ecret|ccess|rivate)[_-]?key|(?:ccess|efresh)[_-]?token|oken|ecret|assword|asswd)"  # noqa: S105
)
# A backslash before a quote or line break belongs to the surrounding text, such as a shell line inside JSON.
_VALUE_PATTERN = (
    r"""(?:"(?P<double>[^"\n]++)|'(?P<single>[^'\n]++)|(?P<plain>(?:[^\s"'`\\]|\\(?![nrt"']))+))"""
)
_PREFIXED_TOKEN_PATTERN = (
    r"sk-[A-Za-z0-9_-]{8,}+|ghp_[A-Za-z0-9]{10,}+|github_pat_[A-Za-z0-9_]{10,}+|xox[baprs]-[A-Za-z0-9-]{8,}+"  # noqa: S105
    r"|xapp-[A-Za-z0-9-]{8,}+|gsk_[A-Za-z0-9_-]{10,}+|AIza[A-Za-z0-9_-]{20,}+|pplx-[A-Za-z0-9_-]{10,}+"
    r"|npm_[A-Za-z0-9]{10,}+"
)
_PEM_LABEL_PATTERN = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_PRIVATE_KEY_PATTERN = (
    rf"(?P<first>-----BEGIN {_PEM_LABEL_PATTERN})"
    rf"(?:(?P<body>(?:[^-]|-(?!----))*)(?P<last>-----END {_PEM_LABEL_PATTERN})"
    # A truncated key: everything that looks like its lines.
    r"|(?P<rest>(?:(?:\s|\\[nr])*[A-Za-z0-9+/=]{16,}+)+(?:(?:\s|\\[nr])*[A-Za-z0-9+/=]++(?=\s*$))?))"
)
_QUOTE_PATTERN = re.compile(r"""["'\\]""")
_MASKED_PATTERN = re.compile(r"[*…]+|.{6}….{4}", re.DOTALL)


class SecretShape(NamedTuple):
    """One way to recognize secrets: the last group of the pattern is the secret and ends the match."""

    hints: tuple[str, ...]
    """Lower-case; every match contains one of them. A text without any is not searched for this shape."""
    pattern: str


_NAME_HINTS = ("key", "oken", "ecret", "assw")
_SECRET_SHAPES = (
    # First, so that nothing inside a private key is masked separately.
    SecretShape(("private key",), _PRIVATE_KEY_PATTERN),
    # API_KEY=…, DB_PASSWORD: … Capitals only: `key=len` and `Key: value` are ordinary code and prose.
    SecretShape(
        _NAME_HINTS,
        rf"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)[ \t]{{0,8}}[=:](?![=:])[ \t]{{0,8}}{_VALUE_PATTERN}",
    ),
    # api_key=…, password=… as in URLs and connection strings.
    SecretShape(_NAME_HINTS, rf"{_SECRET_NAME_PATTERN}=(?!=){_VALUE_PATTERN}"),
    SecretShape(
        _NAME_HINTS,
        rf"""(?P<mark>["']){_SECRET_NAME_PATTERN}(?P=mark)[ \t]{{0,8}}:[ \t]{{0,8}}"""
        r"""(?P<quote>["'])(?P<plain>(?:(?!(?P=quote))[^\\\n]|\\.)+)""",
    ),
    # JSON inside a JSON string.
    SecretShape(
        _NAME_HINTS,
        rf"""\\"{_SECRET_NAME_PATTERN}\\"[ \t]{{0,8}}:[ \t]{{0,8}}\\"(?P<plain>(?:[^"\\\n]|\\[^"\n])+)""",
    ),
    SecretShape(_NAME_HINTS, rf"--{_SECRET_NAME_PATTERN}[ \t]{{1,8}}(?!-){_VALUE_PATTERN}"),
    SecretShape(
        ("authorization",),
        r"""(?i:authorization)["']?[ \t]{0,8}[:=][ \t]{0,8}["']?(?i:bearer|basic)[ \t]{1,8}"""
        r"""(?P<plain>[^\s"'`\\,;]++)""",
    ),
    SecretShape(("bearer",), r"(?i:bearer)[ \t]{1,8}(?P<plain>[A-Za-z0-9._~+/=-]{18,}+)"),
    SecretShape(
        ("sk-", "ghp_", "github_pat_", "xox", "xapp-", "gsk_", "aiza", "pplx-", "npm_"),
        rf"(?<![A-Za-z0-9])(?P<plain>{_PREFIXED_TOKEN_PATTERN})",
    ),
    # A Telegram bot token; in its URLs it follows `bot`.
    SecretShape((":",), r"(?<![0-9])(?P<plain>[0-9]{6,12}+:[A-Za-z0-9_-]{20,}+)"),
)


@cache  # on first use: most commands redact nothing, and compiling takes as long as importing several modules
def _compile_shapes() -> dict[tuple[str, ...], list[re.Pattern[str]]]:
    """Return the compiled patterns by their hints, in order."""
    compiled: dict[tuple[str, ...], list[re.Pattern[str]]] = {}
    for shape in _SECRET_SHAPES:
        compiled.setdefault(shape.hints, []).append(re.compile(shape.pattern))
    return compiled


def redact(text: str) -> str:
    """Return the text with its secrets masked; the same object if it has none."""
    patterns = _select_patterns(text)
    before = text
    for _ in range(MAX_REDACTION_ROUNDS):
        after = before
        for pattern in patterns:
            after = pattern.sub(_mask_match, after)
        if after == before:
            break
        before = after
    return text if before == text else before


def _select_patterns(text: str) -> list[re.Pattern[str]]:
    """Return the patterns that may match. Most texts have few hints, and looking for them is ten times cheaper.

    A mask contains no hint, so later rounds need no further patterns.
    """
    folded = text.casefold()
    return [
        pattern
        for hints, patterns in _compile_shapes().items()
        if any(hint in folded for hint in hints)
        for pattern in patterns
    ]


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
    # It was cut: a secret that is cut at the end is not recognized, so the end is not shown.
    shown = max(0, min(len(masked) - CUT_EDGE_CHARACTERS, MAX_EXCERPT_CHARACTERS))
    return f"{masked[:shown]}…"


def _mask_match(match: re.Match[str]) -> str:
    if "body" in match.re.groupindex:
        return _mask_private_key(match)
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
