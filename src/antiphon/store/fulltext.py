"""Full-text queries and index entries in the language of each database.

A `FulltextQuery` or a `FulltextVector` is a parameter like any other; the store that runs the statement encodes it
in its own syntax. SQLite's index splits texts by itself. PostgreSQL is given the words, so that neither its locale
nor its parser decides what a word is: runs of letters and digits, in lower case and without marks.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

_WORD_PATTERN = re.compile(r"[^\W_]+")
_MAX_WORD_CHARACTERS = 128  # characters of a word that are indexed and compared
_NEVER_MATCHING_LEXEME = "'!'"  # occurs in no text and no scope
_MAX_POSITIONS_PER_WORD, _MAX_POSITION = 255, 16_383  # PostgreSQL's limits per word and text


def fold_text(text: str) -> str:
    """The text in lower case and without marks; both forms of the small sigma become one."""
    lower = text.lower().replace("ς", "σ")
    if lower.isascii():
        return lower
    bare = "".join(
        letter for letter in unicodedata.normalize("NFD", lower) if not unicodedata.combining(letter)
    )
    return unicodedata.normalize("NFC", bare)


def split_words(text: str) -> list[str]:
    return [word[:_MAX_WORD_CHARACTERS] for word in _WORD_PATTERN.findall(fold_text(text))]


class FulltextVector(msgspec.Struct, frozen=True):
    """The words of a text with their positions, plus the words of a scope, which never match as text."""

    text: str
    scope: str = ""

    def to_tsvector(self) -> str:
        places: dict[str, list[int]] = {}
        for place, word in enumerate(split_words(self.text), 1):
            found = places.setdefault(word, [])
            if len(found) < _MAX_POSITIONS_PER_WORD:
                found.append(min(place, _MAX_POSITION))
        said = [f"'{word}':{','.join(map(str, found))}" for word, found in places.items()]
        return " ".join([*said, *(_quote_lexeme(f"~{word}") for word in self.scope.lower().split())])


class FulltextQuery(msgspec.Struct, frozen=True, dict=True):
    """Matches texts with all `phrases`, one of `either` if it is not empty, and one word of each group in `scopes`.

    With `beginning`, the last phrase may end in the middle of a word. An empty query matches nothing.
    """

    column: str
    phrases: Sequence[str]
    either: Sequence[str] = ()
    beginning: bool = False
    scopes: Sequence[Sequence[str]] = ()

    def to_fts5(self) -> str:
        phrases = [_quote_fts5_string(phrase) for phrase in self.phrases] or ['""']
        if self.beginning and self.phrases:
            phrases[-1] += "*"
        said = " AND ".join(phrases)  # explicit, or a phrase without words would count as a match
        if self.either:
            either = " OR ".join(map(_quote_fts5_string, self.either))
            said = f"({said}) AND ({either})" if self.phrases else either
        scopes = (f"scope : ({' OR '.join(map(_quote_fts5_string, group))})" for group in self.scopes)
        return " AND ".join([f"{self.column} : ({said})", *scopes])

    def __conform__(self, protocol: object) -> str:
        """The hook through which `sqlite3` converts the parameter."""
        return self.to_fts5()

    def to_tsquery(self) -> str:
        if not self.phrases and not self.either:
            return ""
        parts = [_build_phrase(split_words(phrase)) for phrase in self.phrases]
        if self.beginning and self.phrases and split_words(self.phrases[-1]):
            parts[-1] += ":*"
        if self.either:
            parts.append(f"({' | '.join(_build_phrase(split_words(phrase)) for phrase in self.either)})")
        parts += [
            f"({' | '.join(_quote_lexeme('~' + word.lower()) for word in group)})" for group in self.scopes
        ]
        return " & ".join(parts)

    def find_position(self, text: str) -> int:
        """The position of the first match in a text that matches; 0 if it cannot be determined."""
        longest = max(map(len, self._search_terms), default=0)
        seen: deque[tuple[int, str]] = deque(maxlen=longest)
        for spot in _iterate_words(text):
            seen.append(spot)
            tail = tuple(word for _, word in seen)
            for wanted in self._search_terms:
                if len(tail) >= len(wanted) and self._matches_term(tail[-len(wanted) :], wanted):
                    return seen[-len(wanted)][0]
        return 0

    def matches(self, text: str) -> bool:
        """Whether a text itself matches, apart from scopes; the index may have been built from another form of it."""
        held = f" {' '.join(split_words(text))} "
        phrases = [f" {' '.join(found)} " for phrase in self.phrases if (found := split_words(phrase))]
        if self.beginning and phrases:
            phrases[-1] = phrases[-1].rstrip(" ")
        either = [f" {' '.join(found)} " for phrase in self.either if (found := split_words(phrase))]
        return all(phrase in held for phrase in phrases) and (
            not either or any(one in held for one in either)
        )

    @cached_property
    def _search_terms(self) -> list[tuple[str, ...]]:
        return [tuple(found) for phrase in (*self.phrases, *self.either) if (found := split_words(phrase))]

    def _matches_term(self, tail: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
        if self.beginning and wanted is self._search_terms[-1]:
            return tail[:-1] == wanted[:-1] and tail[-1].startswith(wanted[-1])
        return tail == wanted


def _iterate_words(text: str) -> Iterator[tuple[int, str]]:
    for found in _WORD_PATTERN.finditer(text):
        yield found.start(), fold_text(found[0])[:_MAX_WORD_CHARACTERS]


def _build_phrase(found: Sequence[str]) -> str:
    return " <-> ".join(map(_quote_lexeme, found)) if found else _NEVER_MATCHING_LEXEME


def _quote_lexeme(word: str) -> str:
    """Quotes and escapes a lexeme for PostgreSQL."""
    doubled = word.replace("\\", "\\\\").replace("'", "''").replace("\0", "\ufffd")
    return f"'{doubled}'"


def _quote_fts5_string(phrase: str) -> str:
    """Quotes a phrase for FTS5."""
    doubled = phrase.replace('"', '""').replace("\0", " ")
    return f'"{doubled}"'
