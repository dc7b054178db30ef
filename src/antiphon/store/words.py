"""Words in an index of texts: what is put in and what is asked for, in the language of each database.

A `Match` or a `Vector` is a parameter like any other; the store that runs the statement writes it down in its own way.
SQLite's index takes texts apart by itself. PostgreSQL is given the words, so that neither its locale nor its parser
has a say in what a word is: runs of letters and digits, in lower case and without marks.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

_WORD = re.compile(r"[^\W_]+")
_LONGEST = 128  # characters of a word that are looked at
_NOTHING = "'!'"  # what neither a text nor a scope ever has
_PLACES, _LAST_PLACE = 255, 16_383  # of one word in one text; PostgreSQL knows no more


def folded(text: str) -> str:
    """In lower case and without marks; a sigma is one wherever it stands."""
    lower = text.lower().replace("ς", "σ")
    if lower.isascii():
        return lower
    bare = "".join(
        letter for letter in unicodedata.normalize("NFD", lower) if not unicodedata.combining(letter)
    )
    return unicodedata.normalize("NFC", bare)


def words(text: str) -> list[str]:
    return [word[:_LONGEST] for word in _WORD.findall(folded(text))]


class Vector(msgspec.Struct, frozen=True):
    """The words of a text with their places, and beside them those of a scope, which are never mistaken for them."""

    text: str
    scope: str = ""

    def tsvector(self) -> str:
        places: dict[str, list[int]] = {}
        for place, word in enumerate(words(self.text), 1):
            found = places.setdefault(word, [])
            if len(found) < _PLACES:
                found.append(min(place, _LAST_PLACE))
        said = [f"'{word}':{','.join(map(str, found))}" for word, found in places.items()]
        return " ".join([*said, *(_quoted(f"~{word}") for word in self.scope.lower().split())])


class Match(msgspec.Struct, frozen=True, dict=True):
    """Texts with all of `phrases`, one of `either` if there are any, and of every group of `scopes` one word.

    With `beginning`, the last phrase may end in the middle of a word. Nothing asked for is nothing found.
    """

    column: str
    phrases: Sequence[str]
    either: Sequence[str] = ()
    beginning: bool = False
    scopes: Sequence[Sequence[str]] = ()

    def fts5(self) -> str:
        phrases = [_string(phrase) for phrase in self.phrases] or ['""']
        if self.beginning and self.phrases:
            phrases[-1] += "*"
        said = " AND ".join(phrases)  # without it, phrases without a word would count as found
        if self.either:
            either = " OR ".join(map(_string, self.either))
            said = f"({said}) AND ({either})" if self.phrases else either
        scopes = (f"scope : ({' OR '.join(map(_string, group))})" for group in self.scopes)
        return " AND ".join([f"{self.column} : ({said})", *scopes])

    def __conform__(self, protocol: object) -> str:
        """How `sqlite3`, which alone asks for it, has a parameter written in its own way."""
        return self.fts5()

    def tsquery(self) -> str:
        if not self.phrases and not self.either:
            return ""
        parts = [_adjacent(words(phrase)) for phrase in self.phrases]
        if self.beginning and self.phrases and words(self.phrases[-1]):
            parts[-1] += ":*"
        if self.either:
            parts.append(f"({' | '.join(_adjacent(words(phrase)) for phrase in self.either)})")
        parts += [f"({' | '.join(_quoted('~' + word.lower()) for word in group)})" for group in self.scopes]
        return " & ".join(parts)

    def found_in(self, text: str) -> int:
        """Where the first of what was asked for stands in a text that has it; 0 where that cannot be said."""
        longest = max(map(len, self._wanted), default=0)
        seen: deque[tuple[int, str]] = deque(maxlen=longest)
        for spot in _words_at(text):
            seen.append(spot)
            tail = tuple(word for _, word in seen)
            for wanted in self._wanted:
                if len(tail) >= len(wanted) and self._fits(tail[-len(wanted) :], wanted):
                    return seen[-len(wanted)][0]
        return 0

    def matches(self, text: str) -> bool:
        """Whether a text holds what is asked for, whatever the index of another form of it says; scopes aside."""
        held = f" {' '.join(words(text))} "
        phrases = [f" {' '.join(found)} " for phrase in self.phrases if (found := words(phrase))]
        if self.beginning and phrases:
            phrases[-1] = phrases[-1].rstrip(" ")
        either = [f" {' '.join(found)} " for phrase in self.either if (found := words(phrase))]
        return all(phrase in held for phrase in phrases) and (
            not either or any(one in held for one in either)
        )

    @cached_property
    def _wanted(self) -> list[tuple[str, ...]]:
        return [tuple(found) for phrase in (*self.phrases, *self.either) if (found := words(phrase))]

    def _fits(self, tail: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
        if self.beginning and wanted is self._wanted[-1]:
            return tail[:-1] == wanted[:-1] and tail[-1].startswith(wanted[-1])
        return tail == wanted


def _words_at(text: str) -> Iterator[tuple[int, str]]:
    for found in _WORD.finditer(text):
        yield found.start(), folded(found[0])[:_LONGEST]


def _adjacent(found: Sequence[str]) -> str:
    return " <-> ".join(map(_quoted, found)) if found else _NOTHING


def _quoted(word: str) -> str:
    """For PostgreSQL; what is special between quotes is so no more."""
    doubled = word.replace("\\", "\\\\").replace("'", "''").replace("\0", "\ufffd")
    return f"'{doubled}'"


def _string(phrase: str) -> str:
    """For FTS5."""
    doubled = phrase.replace('"', '""').replace("\0", " ")
    return f'"{doubled}"'
