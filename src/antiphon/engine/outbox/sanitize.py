"""Sanitizes text before it is sent to people.

Control tokens and frame markers are removed wherever they occur; secrets and the address in a session key (a direct
peer, a phone number, an e-mail address) are masked. The search ignores case, invisible characters, look-alike Unicode
letters and Markdown marks, because a person would read the same. Everything else passes unchanged.

Whether and where a text is sent is decided elsewhere (`send_policy`, `sender`).
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from antiphon.engine.collaboration.framing import MARKER_PATTERN
from antiphon.engine.outbox.redaction import redact

REPLY_SKIP = "REPLY_SKIP"
ANNOUNCE_SKIP = "ANNOUNCE_SKIP"
NO_REPLY = "NO_REPLY"
ADDRESS_MASK = "***"
MAX_SANITIZE_ROUNDS = 8
"""A removal can join the halves of another token. Text that is not clean after so many rounds is crafted to evade
this, and nothing of it is sent."""

_TOKEN_ALTERNATIVES = "|".join(token.lower() for token in (REPLY_SKIP, ANNOUNCE_SKIP, NO_REPLY))
# An id may contain anything, so a key ends at white space, a quote or a bracket. Punctuation at its end belongs to the
# sentence.
_KEY_REST_PATTERN = r"""(?:[^\s"'<>()\[\]{}]*[^\s"'<>()\[\]{}.,;:!?])?"""
_COLON_PATTERN = "(?::|%3a)"  # plain or percent-encoded
_TOKEN_PATTERN = re.compile(_TOKEN_ALTERNATIVES)
_CUT_PATTERN = re.compile(f"{_TOKEN_ALTERNATIVES}|{MARKER_PATTERN.pattern}")
_SESSION_KEY_PATTERN = re.compile(
    rf"agent{_COLON_PATTERN}[a-z0-9][a-z0-9_-]{{0,63}}+{_COLON_PATTERN}{_KEY_REST_PATTERN}"
)

# Invisible characters besides those in the categories Cc and Cf: fillers and variation selectors.
_INVISIBLE_PATTERN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)
_LINE_BREAK_PATTERN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MARKDOWN_CHARACTERS = "\\*`~"  # escapes and emphasis; `_` is part of the tokens
_FENCE_PATTERN = re.compile(r"^[ \t>]*(?:```|~~~)[ \t]*[\w+.#-]*[ \t]*$", re.MULTILINE)
_INSIGNIFICANT_CATEGORIES = frozenset(
    {"Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sk", "Sm", "Zs", "Zl", "Zp", "Cc", "Cf"}
)
"""Unicode categories that may surround a token and mean nothing alone: quotes, punctuation, white space."""

_DIRECT_PEER_PATTERN = re.compile(rf"{_COLON_PATTERN}(?:direct|dm|openai-user){_COLON_PATTERN}")
_PHONE_PATTERN = re.compile(r"(?:\+|%2b)[0-9]{6,}")


def is_skip(text: str | None, token: str) -> bool:
    """Whether the whole answer is exactly this token."""
    return text is not None and text.strip() == token


def is_silence(text: str) -> bool:
    """Whether an answer is empty or only control tokens, even if quoted, fenced or with punctuation."""
    return not text.strip() or (has_control_token(text) and not remove_control_tokens(text))


def has_control_token(text: str) -> bool:
    """Whether a person would see a control token anywhere in the text."""
    return _TOKEN_PATTERN.search(text.translate(_FOLDING_TABLE)) is not None


@lru_cache(maxsize=256)  # every answer repeats the name of its model
def is_plain_name(name: str) -> bool:
    """Whether an external name contains no control token, marker, session key or secret."""
    folded = name.translate(_FOLDING_TABLE)
    return not (_CUT_PATTERN.search(folded) or _SESSION_KEY_PATTERN.search(folded)) and redact(name) == name


def sanitize_for_people(text: str, *, stats: str | None = None, own_key: str | None = None) -> str:
    """Return the text that may be sent to a person; empty if nothing is to be sent.

    `stats` is a line of this system that names the session on purpose; it is appended without masking. `own_key` is the
    key of the reader's own session: the address in it is theirs and is not masked.
    """
    text = _sanitize_until_stable(text, lambda folded: _find_address(folded, own_key))
    if not text or stats is None:
        return text
    return f"{text}\n\n{_LINE_BREAK_PATTERN.sub(' ', stats)}"


def sanitize_for_agents(text: str) -> str:
    """Return the text for another agent: sanitized as for people, but with usable session keys."""
    return _sanitize_until_stable(text, lambda _: None)


def remove_control_tokens(text: str) -> str:
    """Return the text without control tokens and markers; empty if nothing else is left."""
    return _sanitize_until_stable(text, lambda _: None, lambda same: same)


def _find_address(key: str, own_key: str | None) -> int | None:
    """Return the position of the address in a folded session key; None if it has none or is the reader's own."""
    if own_key is not None and key == own_key.translate(_FOLDING_TABLE):
        return None
    found = [match.start() for match in (_PHONE_PATTERN.search(key),) if match]
    if (direct := _DIRECT_PEER_PATTERN.search(key)) and direct.end() < len(key):
        found.append(direct.end())
    for at in (key.find("@"), key.find("%40")):
        if at > 0:
            found.append(
                max(key.rfind(":", 0, at) + 1, key.rfind("%3a", 0, at) + 3 if "%3a" in key[:at] else 0)
            )
    return min(found, default=None)


def _sanitize_until_stable(
    text: str, address: Callable[[str], int | None], mask: Callable[[str], str] = redact
) -> str:
    for _ in range(MAX_SANITIZE_ROUNDS):
        cleaned = _sanitize_once(text, address)
        if cleaned == text:
            cleaned = mask(text)
        if cleaned == text:
            return text
        text = cleaned
    return ""


class _FoldingTable:
    """For `str.translate`: each character as a reader perceives it. Not a dict, which would grow without limit."""

    def __getitem__(self, code: int) -> str:
        return _fold_character(chr(code))


@lru_cache(maxsize=4096)
def _fold_character(char: str) -> str:
    if char in _MARKDOWN_CHARACTERS or _INVISIBLE_PATTERN.match(char):
        return ""
    if unicodedata.category(char) in ("Cc", "Cf") and not char.isspace():
        return ""
    return unicodedata.normalize("NFKC", char).lower()


_FOLDING_TABLE = _FoldingTable()


def _sanitize_once(text: str, address: Callable[[str], int | None]) -> str:
    """Remove or mask forbidden parts, found in the folded text and cut out of the original."""
    folded = text.translate(_FOLDING_TABLE)
    # Tokens first, since one may be inside a key.
    if cuts := [match.span() for match in _CUT_PATTERN.finditer(folded)]:
        rest = _replace_spans(text, cuts, None)
        return "" if _is_insignificant(rest) else rest
    keys = ((match, address(match[0])) for match in _SESSION_KEY_PATTERN.finditer(folded))
    spans = [(match.start() + first, match.end()) for match, first in keys if first is not None]
    return _replace_spans(text, spans, ADDRESS_MASK) if spans else text


def _replace_spans(text: str, spans: Iterable[tuple[int, int]], put: str | None) -> str:
    """Replace spans of the folded text in the original, or remove them if `put` is None."""
    ends = list(accumulate(map(len, map(_fold_character, text))))
    pieces: list[str | None] = []
    done = 0
    for first, last in spans:
        pieces += (text[done : bisect_right(ends, first)], put)
        done = bisect_right(ends, last - 1) + 1
    return _join_pieces([*pieces, text[done:]])


def _is_insignificant(rest: str) -> bool:
    return all(
        unicodedata.category(char) in _INSIGNIFICANT_CATEGORIES for char in _FENCE_PATTERN.sub("", rest)
    )


def _join_pieces(pieces: Iterable[str | None]) -> str:
    """Join pieces; None marks a removed part, and the white space around it becomes one gap."""
    out: list[str] = []
    gap: list[str] = []
    cut = False
    for piece in pieces:
        if piece is None:
            cut = True
        elif words := piece.strip():
            before, _, after = piece.partition(words)
            gap.append(before)
            out += ("".join(gap) if not cut else _squeeze_gap(gap) if out else "", words)
            gap, cut = [after], False
        else:
            gap.append(piece)
    return "".join(out if cut else [*out, *gap])


def _squeeze_gap(gap: list[str]) -> str:
    """Merge the white space on both sides of a removed part, with one empty line at most."""
    lines = max(blanks.count("\n") for blanks in gap)
    if not lines:
        return max(gap, key=len)
    _, line, indent = gap[-1].rpartition("\n")
    return "\n" * min(lines, 2) + (indent if line else "")


class SanitizingStream:
    """`sanitize_for_people` for text that arrives in chunks: each word is released when it is complete.

    No token or key contains white space, and all released text ends in it, so nothing can be assembled from two pieces.
    A marker or named secret may contain white space, but begins with a telling word, and then its line is held until it
    is complete; a private key holds everything until the end. A hold has no limit, since text released early could be
    half of something; it is never more than the answer, which is in memory anyway.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._until: Literal["blank", "line", "end"] = "blank"

    def feed(self, chunk: str) -> str:
        """Add a chunk and return the text that can be shown now."""
        self._held.append(chunk)
        if not any(blank in chunk for blank in _RELEASE_CHARACTERS[self._until]):
            return ""
        text = "".join(self._held)
        ready = self._count_ready_characters(text)
        self._held = [text[ready:]]
        return _sanitize_complete_words(text[:ready])

    def finish(self) -> str:
        """Return the text that was still held."""
        text = "".join(self._held)
        self._held, self._until = [], "blank"
        return sanitize_for_people(text)

    def _count_ready_characters(self, text: str) -> int:
        """Return how many characters are complete, and set what to wait for next."""
        lines = text.rfind("\n") + 1
        words = max(text.rfind(blank) for blank in _BLANK_CHARACTERS) + 1
        # Searched in the sanitized text, since a removal can create a telling word.
        if "-----begin" in sanitize_for_people(text[:lines]).translate(_FOLDING_TABLE):
            self._until = "end"
            return 0
        if _HOLD_LINE_PATTERN.search(sanitize_for_people(text[lines:words]).translate(_FOLDING_TABLE)):
            self._until = "line"
            return lines
        self._until = "blank"
        return words


_BLANK_CHARACTERS = " \t\r\n"
_RELEASE_CHARACTERS = {"blank": _BLANK_CHARACTERS, "line": "\n", "end": ""}
_HOLD_LINE_PATTERN = re.compile("<<<|-----begin|key|token|secret|passw|authorization|bearer")


def _sanitize_complete_words(text: str) -> str:
    """Sanitize complete words, keeping the white space after them as a separator."""
    words = text.rstrip(_BLANK_CHARACTERS)
    cleaned = sanitize_for_people(words)
    return "" if words and not cleaned else cleaned + text[len(words) :]
