"""Draws moves between sessions as a sequence diagram, with one column for each participant.

The one renderer for terminals: moves in, lines of text out. It knows nothing of where the moves come from, and does
not print or wait.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from antiphon.cli._moves import Move
from antiphon.cli._output import bold, clean_text, dim, is_coloured

MIN_TEXT_COLUMNS = 44  # columns that the text needs beside the participants
MAX_PARTICIPANTS = 4  # with a column of their own
FIRST_PARTICIPANT_COLUMN = 3
MIN_PARTICIPANT_GAP_COLUMNS, MAX_PARTICIPANT_GAP_COLUMNS = 9, 14  # between participants
MIN_DIAGRAM_COLUMNS = 72  # below this width, moves are printed without columns
MAX_DIAGRAM_COLUMNS = 120  # beyond this width, text would be too far from its speaker
PARTICIPANT_ANSI_COLOURS = ("1", "36", "35", "33")  # assigned to participants in order of appearance


class DiagramCharacters(NamedTuple):
    line: str
    dash: str
    cross: str
    leave_right: str
    leave_left: str
    right: str
    left: str
    dot: str
    opening: str
    closing: str


UNICODE_CHARACTERS = DiagramCharacters("│", "─", "┼", "├", "┤", "►", "◄", "●", "“", "”")
ASCII_CHARACTERS = DiagramCharacters("|", "-", "+", "|", "|", ">", "<", "*", '"', '"')
"""For outputs that may support only ASCII: a pipe, a file, an old terminal."""


class Diagram(Protocol):
    def draw_title(self, text: str) -> list[str]: ...
    def draw(self, moves: Iterable[Move]) -> list[str]: ...


def make_diagram(participants: Sequence[str], width: int, characters: DiagramCharacters) -> Diagram:
    """Return a diagram that fits the width."""
    if width < MIN_DIAGRAM_COLUMNS:
        return LinearDiagram(participants, width, characters)
    return ColumnDiagram(participants, min(width, MAX_DIAGRAM_COLUMNS), characters)


class LinearDiagram:
    """Prints one move after the other without columns, for narrow terminals."""

    def __init__(self, participants: Sequence[str], width: int, characters: DiagramCharacters) -> None:
        self._width = width
        self._characters = characters
        self._palette = _Palette(participants)

    def draw_title(self, text: str) -> list[str]:
        return ["", *(bold(line) for line in textwrap.wrap(text, self._width))]

    def draw(self, moves: Iterable[Move]) -> list[str]:
        lines: list[str] = []
        for move in moves:
            paint = self._palette.get_paint(move.source)
            first, *more = _wrap_move(
                _name_participants(move, self._characters), self._width - 2, self._characters
            )
            lines += [first.render(paint), *(f"  {line.render(paint)}" for line in more)]
        return lines


class ColumnDiagram:
    """Draws a continuous column for each participant; a new participant gets the next column.

    Participants for whom there is no column left are named beside the others' columns.
    """

    def __init__(self, participants: Sequence[str], width: int, characters: DiagramCharacters) -> None:
        self._characters = characters
        self._gap = min(
            MAX_PARTICIPANT_GAP_COLUMNS,
            max(MIN_PARTICIPANT_GAP_COLUMNS, (width - MIN_TEXT_COLUMNS) // MAX_PARTICIPANTS),
        )
        self._text_column = FIRST_PARTICIPANT_COLUMN + (MAX_PARTICIPANTS - 1) * self._gap + 5
        self._text_width = width - self._text_column
        self._palette = _Palette(participants)
        self._columns = {
            participant: self._compute_column(number) for number, participant in enumerate(participants)
        }
        self._has_heading = False

    def draw_title(self, text: str) -> list[str]:
        head = [] if self._has_heading else [self._draw_names(list(self._columns))]
        self._has_heading = True
        return [*head, self._join_row(self._draw_rails()), self._join_row(self._draw_rails(), bold(text))]

    def draw(self, moves: Iterable[Move]) -> list[str]:
        return [row for move in moves for row in self._draw_move(move)]

    def _draw_move(self, move: Move) -> list[str]:
        participants = [name for name in (move.source, move.target) if name]
        rows = [
            self._add_participant(name)
            for name in participants
            if name not in self._columns and len(self._columns) < MAX_PARTICIPANTS
        ]
        paint = self._palette.get_paint(move.source)
        if not all(name in self._columns for name in participants):
            move = _name_participants(move, self._characters)
            cells = self._draw_rails()
        elif move.target:
            cells = self._draw_arrow(move.source, move.target, paint)
        else:
            cells = self._draw_dot(move.source, paint)
        for line in _wrap_move(move, self._text_width, self._characters):
            rows.append(self._join_row(cells, line.render(paint)))
            cells = self._draw_rails()
        return rows

    def _compute_column(self, number: int) -> int:
        return FIRST_PARTICIPANT_COLUMN + number * self._gap

    def _add_participant(self, participant: str) -> str:
        row = self._draw_names([participant])
        self._columns[participant] = self._compute_column(len(self._columns))
        return row

    def _draw_names(self, participants: Sequence[str]) -> str:
        cells = self._draw_rails() if self._has_heading else [" "] * self._text_column
        for participant in participants:
            name = clean_text(participant)[: self._gap - 1]
            at = self._columns.get(participant, self._compute_column(len(self._columns))) - len(name) // 2
            paint = self._palette.get_paint(participant)
            cells[at : at + len(name)] = [paint(char) for char in name]
        return self._join_row(cells)

    def _draw_rails(self) -> list[str]:
        cells = [" "] * self._text_column
        for at in self._columns.values():
            cells[at] = dim(self._characters.line)
        return cells

    def _draw_dot(self, participant: str, paint: PaintText) -> list[str]:
        cells = self._draw_rails()
        cells[self._columns[participant]] = paint(self._characters.dot)
        return cells

    def _draw_arrow(self, source: str, target: str, paint: PaintText) -> list[str]:
        cells, characters = self._draw_rails(), self._characters
        begin, end = self._columns[source], self._columns[target]
        for at in range(min(begin, end) + 1, max(begin, end)):
            cells[at] = paint(characters.cross if at in self._columns.values() else characters.dash)
        rightwards = begin < end
        cells[begin] = paint(characters.leave_right if rightwards else characters.leave_left)
        cells[end + (-1 if rightwards else 1)] = paint(characters.right if rightwards else characters.left)
        return cells

    @staticmethod
    def _join_row(cells: Sequence[str], text: str = "") -> str:
        return f"{''.join(cells)}{text}".rstrip()


class PaintText(Protocol):
    def __call__(self, text: str) -> str: ...


class _Palette:
    """Assigns a colour to each participant, if colours are supported."""

    def __init__(self, participants: Sequence[str]) -> None:
        self._participants = list(participants)

    def get_paint(self, participant: str) -> PaintText:
        if participant not in self._participants:
            self._participants.append(participant)
        code = PARTICIPANT_ANSI_COLOURS[self._participants.index(participant) % len(PARTICIPANT_ANSI_COLOURS)]
        return lambda text: f"\033[{code}m{text}\033[0m" if text and is_coloured() else text


class _TextLine(NamedTuple):
    """One line of the text beside the columns."""

    label: str
    text: str
    spoken: bool

    def render(self, paint: PaintText) -> str:
        return paint(self.label) + (self.text if self.spoken else dim(self.text))


def _name_participants(move: Move, characters: DiagramCharacters) -> Move:
    """Return the move with its participants named in its kind."""
    arrow = characters.dash + characters.right
    names = f"{move.source} {arrow} {move.target}" if move.target else move.source
    return move._replace(kind=f"{names}: {move.kind}".rstrip())


def _wrap_move(move: Move, width: int, characters: DiagramCharacters) -> list[_TextLine]:
    """Return the time, the kind and the text of a move, wrapped to the width."""
    text = clean_text(move.text).strip()
    if move.spoken:
        text = f"{characters.opening}{text}{characters.closing}"
    clock = "" if move.time_ms is None else time.strftime("%H:%M:%S ", time.localtime(move.time_ms / 1000))
    label = clock + (f"{move.kind} " if move.kind and text else move.kind)
    lines = [
        line
        for paragraph in f"{label}{text}".splitlines()
        for line in textwrap.wrap(paragraph, width, break_on_hyphens=False)
    ]
    if characters is ASCII_CHARACTERS:
        lines = [line.encode("ascii", "replace").decode() for line in lines]
    labels = [label[: len(lines[0])] if lines else "", *([""] * len(lines))]
    return [
        _TextLine(named, line[len(named) :], move.spoken) for named, line in zip(labels, lines, strict=False)
    ] or [_TextLine("", "", False)]
