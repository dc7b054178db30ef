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
_MAX_WORD_CHARACTERS = 128  # longer words are cut
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
        positions_by_word: dict[str, list[int]] = {}
        for position, word in enumerate(split_words(self.text), 1):
            positions = positions_by_word.setdefault(word, [])
            if len(positions) < _MAX_POSITIONS_PER_WORD:
                positions.append(min(position, _MAX_POSITION))
        lexemes = [
            f"'{word}':{','.join(map(str, positions))}" for word, positions in positions_by_word.items()
        ]
        return " ".join([*lexemes, *(_quote_lexeme(f"~{word}") for word in self.scope.lower().split())])


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
        terms = " AND ".join(phrases)  # explicit, or a phrase without words would count as a match
        if self.either:
            either = " OR ".join(map(_quote_fts5_string, self.either))
            terms = f"({terms}) AND ({either})" if self.phrases else either
        scopes = (f"scope : ({' OR '.join(map(_quote_fts5_string, group))})" for group in self.scopes)
        return " AND ".join([f"{self.column} : ({terms})", *scopes])

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
        window: deque[tuple[int, str]] = deque(maxlen=longest)
        for word in _iterate_words(text):
            window.append(word)
            recent = tuple(folded for _, folded in window)
            for term in self._search_terms:
                if len(recent) >= len(term) and self._matches_term(recent[-len(term) :], term):
                    return window[-len(term)][0]
        return 0

    def matches(self, text: str) -> bool:
        """Whether a text itself matches, apart from scopes; the index may have been built from another form of it."""
        padded_text = f" {' '.join(split_words(text))} "
        phrases = [f" {' '.join(found)} " for phrase in self.phrases if (found := split_words(phrase))]
        if self.beginning and phrases:
            phrases[-1] = phrases[-1].rstrip(" ")
        either = [f" {' '.join(found)} " for phrase in self.either if (found := split_words(phrase))]
        return all(phrase in padded_text for phrase in phrases) and (
            not either or any(phrase in padded_text for phrase in either)
        )

    @cached_property
    def _search_terms(self) -> list[tuple[str, ...]]:
        return [tuple(found) for phrase in (*self.phrases, *self.either) if (found := split_words(phrase))]

    def _matches_term(self, recent: tuple[str, ...], term: tuple[str, ...]) -> bool:
        if self.beginning and term is self._search_terms[-1]:
            return recent[:-1] == term[:-1] and recent[-1].startswith(term[-1])
        return recent == term


def _iterate_words(text: str) -> Iterator[tuple[int, str]]:
    for found in _WORD_PATTERN.finditer(text):
        yield found.start(), fold_text(found[0])[:_MAX_WORD_CHARACTERS]


def _build_phrase(words: Sequence[str]) -> str:
    return " <-> ".join(map(_quote_lexeme, words)) if words else _NEVER_MATCHING_LEXEME


def _quote_lexeme(word: str) -> str:
    """Quotes and escapes a lexeme for PostgreSQL."""
    escaped = word.replace("\\", "\\\\").replace("'", "''").replace("\0", "\ufffd")
    return f"'{escaped}'"


def _quote_fts5_string(phrase: str) -> str:
    """Quotes a phrase for FTS5."""
    escaped = phrase.replace('"', '""').replace("\0", " ")
    return f'"{escaped}"'
