"""Draws a conversation between sessions as a sequence diagram, with one column for each participant.

`DiagramStepBuilder` turns events into steps; `Diagram` turns a step into lines of text. Nothing here prints, waits or
does other I/O.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from antiphon.bus import Delivered, Event, MessageAppended, RunChanged
from antiphon.cli._output import bold, clean_text, dim, is_coloured
from antiphon.messages import AssistantMessage, Provenance, ToolCall, ToolResult, UserMessage, decode_message

MIN_TEXT_COLUMNS = 44  # columns that the text needs beside the participants
MAX_PARTICIPANTS = 4  # participants that fit
# The first participant's column, and the allowed distances between participants.
FIRST_PARTICIPANT_COLUMN, MIN_PARTICIPANT_GAP_COLUMNS, MAX_PARTICIPANT_GAP_COLUMNS = (
    3,
    9,
    14,
)
MIN_DIAGRAM_COLUMNS = 72  # below this width, steps are printed without columns
MAX_DIAGRAM_COLUMNS = 120  # beyond this width, the text would be too far from its speaker
PARTICIPANT_ANSI_COLOURS = ("1", "36", "35", "33")  # assigned to participants in order of appearance


class DiagramStep(NamedTuple):
    """One step of the diagram: its source and target, the means, and the text."""

    source: str
    target: str | None
    """None if the source acts alone."""
    label: str
    words: str
    spoken: bool = False
    """True if the text was said by a participant, False if it describes what happened."""


# --- events to steps ---


class ParticipantTally(msgspec.Struct):
    """How much one participant has said, and how many tokens that took."""

    runs: int = 0
    messages: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


class DiagramStepBuilder:
    """Turns events into diagram steps. A message is shown once: when it is sent, not when it arrives.

    Sessions are independent, so an event may come before the one that explains it; it is held until then.
    """

    def __init__(self, names: Mapping[str, str], person: str, heard: Callable[[str], str] = str) -> None:
        """Start with the sessions in `names`; `person` talks to the first one.

        `heard` returns the part of a text that is meant for people.
        """
        self.tallies = {name: ParticipantTally() for name in names.values()}
        self.turns = Counter[str]()
        """How many turns each exchange has had, by its id."""
        self.over: set[str] = set()
        """Kinds of deliveries that were made, and `wake` once a woken run has ended."""
        self._names = dict(names)
        self._confidant = next(iter(names.values()))
        self._person = person
        self._heard = heard
        self._causes: dict[str, Provenance | None] = {}
        self._calls: dict[str, ToolCall] = {}
        self._standing: set[tuple[str, str]] = set()
        self._held: list[MessageAppended | RunChanged | Delivered] = []

    def process_event(self, event: Event) -> list[DiagramStep]:
        if not isinstance(event, MessageAppended | RunChanged | Delivered):
            return []
        moves: list[DiagramStep] = []
        self._held.append(event)
        while due := next(filter(self._is_explained, self._held), None):
            self._held.remove(due)
            moves += self._build_steps(due)
        return moves

    def _is_explained(self, event: MessageAppended | RunChanged | Delivered) -> bool:
        """Whether the event's session is known and, for a delivery, whether its text was already shown."""
        if isinstance(event, Delivered):
            return (event.session_key, event.text) in self._standing
        return event.session_key in self._names

    def _build_steps(self, event: MessageAppended | RunChanged | Delivered) -> Iterator[DiagramStep]:
        name = self._names[event.session_key]
        if isinstance(event, RunChanged):
            self._count_run(name, event)
        elif isinstance(event, Delivered):
            self.over.add(event.kind)
            yield self._build_delivery_step(name, event)
        else:
            yield from self._build_message_steps(name, event)

    def _count_run(self, name: str, event: RunChanged) -> None:
        if event.usage is None:
            return
        tally = self.tallies[name]
        tally.runs += 1
        tally.tokens_in += event.usage.input
        tally.tokens_out += event.usage.output
        if (cause := self._causes.get(event.run_id)) and cause.kind == "wake":
            self.over.add("wake")

    def _build_delivery_step(self, name: str, event: Delivered) -> DiagramStep:
        # The last paragraph of a report is meant for the operator.
        words, _, _ = event.text.partition("\n\n")
        read_by = self._person if name == self._confidant else None
        return DiagramStep(name, read_by, f"delivered to {name}'s chat", words, spoken=True)

    def _build_message_steps(self, name: str, event: MessageAppended) -> Iterator[DiagramStep]:
        match decode_message(event.body):
            case UserMessage() as message:
                self._causes[event.run_id or ""] = message.provenance
                yield from self._build_input_steps(name, message)
            case AssistantMessage() as message:
                self._standing.add((event.session_key, message.text))
                self._calls |= {call.id: call for call in message.tool_calls}
                if message.text:
                    yield from self._build_answer_steps(name, message, self._causes.get(event.run_id or ""))
            case ToolResult() as message:
                yield from self._build_tool_result_steps(name, message)
            case _:
                pass

    def _build_input_steps(self, name: str, message: UserMessage) -> Iterator[DiagramStep]:
        """Yield the steps for a message that begins a run."""
        cause = message.provenance
        text = message.content if isinstance(message.content, str) else ""
        if cause is None:
            yield DiagramStep(self._person, name, "", self._heard(text), spoken=True)
        elif cause.kind == "announce_step":
            yield DiagramStep(name, None, "announce step", "chooses what to post")
        elif cause.kind == "wake":
            yield DiagramStep(name, None, "woken", "because the report is in")
        elif cause.kind == "inter_session":
            first = (cause.exchange_id or "") not in self.turns
            self.turns[cause.exchange_id or ""] += 0 if first else 1
            if first:
                yield DiagramStep(
                    self._get_source_name(cause), name, "sessions_send", self._heard(text), spoken=True
                )

    def _build_answer_steps(
        self, name: str, message: AssistantMessage, cause: Provenance | None
    ) -> Iterator[DiagramStep]:
        """Yield the steps for an answer, addressed to its recipient."""
        text = self._heard(message.text)
        if message.provenance:
            words, _, _ = message.text.partition("\n\n")
            yield DiagramStep(self._get_source_name(message.provenance), name, "report", words, spoken=True)
            return
        self.tallies[name].messages += 1
        match cause.kind if cause else None:
            case None | "wake":
                yield DiagramStep(name, self._person, "", text, spoken=True)
            case "inter_session" if cause:
                turn = self.turns[cause.exchange_id or ""]
                label = f"reply-back {turn}" if turn else "reply"
                if text == "REPLY_SKIP":
                    yield DiagramStep(name, None, label, "REPLY_SKIP: nothing to add")
                else:
                    yield DiagramStep(name, self._get_source_name(cause), label, text, spoken=True)
            case "spawn":
                yield DiagramStep(name, None, "result", text, spoken=True)
            case _:
                pass  # the text of an announce step is shown when it is delivered

    def _build_tool_result_steps(self, name: str, result: ToolResult) -> Iterator[DiagramStep]:
        found: dict[str, Any] = msgspec.json.decode(result.text)
        match result.tool_name:
            case "sessions_list":
                keys = ", ".join(row["key"] for row in found["sessions"])
                yield DiagramStep(name, None, "sessions_list", f"finds {keys}")
            case "sessions_send":
                took = found["delivery"]["queuedMs"] + found["delivery"]["runningMs"]
                yield DiagramStep(name, None, "sessions_send", f"returns {found['status']!r} after {took} ms")
            case "sessions_spawn":
                yield self._build_spawn_step(
                    name, found["childSessionKey"], self._calls[result.tool_call_id].arguments
                )
            case "sessions_yield":
                yield DiagramStep(name, None, "sessions_yield", "ends its turn until a report")
            case other:
                yield DiagramStep(name, None, other, "returns")

    def _build_spawn_step(self, name: str, child_key: str, arguments: dict[str, Any]) -> DiagramStep:
        child = arguments.get("label") or "sub-agent"
        self._names[child_key] = child
        self.tallies[child] = ParticipantTally()
        return DiagramStep(name, child, "sessions_spawn", self._heard(arguments["task"]), spoken=True)

    def _get_source_name(self, cause: Provenance) -> str:
        return self._names.get(cause.source_session_key or "", "?")


# --- steps to text ---


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
    def draw(self, move: DiagramStep) -> list[str]: ...


def make_diagram(voices: Sequence[str], width: int, marks: DiagramCharacters) -> Diagram:
    """Return a diagram that fits the width."""
    if width < MIN_DIAGRAM_COLUMNS:
        return LinearDiagram(voices, width, marks)
    return ColumnDiagram(voices, min(width, MAX_DIAGRAM_COLUMNS), marks)


class LinearDiagram:
    """Prints one step after the other without columns, for narrow terminals."""

    def __init__(self, voices: Sequence[str], width: int, marks: DiagramCharacters) -> None:
        self._width = width
        self._marks = marks
        self._palette = _Palette(voices)

    def draw_title(self, text: str) -> list[str]:
        return ["", *(bold(line) for line in textwrap.wrap(text, self._width))]

    def draw(self, move: DiagramStep) -> list[str]:
        arrow = self._marks.dash + self._marks.right
        who = f"{move.source} {arrow} {move.target}" if move.target else move.source
        paint = self._palette.get_paint(move.source)
        first, *more = _wrap_step(
            move._replace(label=f"{who}: {move.label}".rstrip()), self._width - 2, self._marks
        )
        return [first.render(paint), *(f"  {line.render(paint)}" for line in more)]


class ColumnDiagram:
    """Draws a continuous column for each participant; a new participant gets the next column."""

    def __init__(self, voices: Sequence[str], width: int, marks: DiagramCharacters) -> None:
        self._marks = marks
        self._gap = min(
            MAX_PARTICIPANT_GAP_COLUMNS,
            max(MIN_PARTICIPANT_GAP_COLUMNS, (width - MIN_TEXT_COLUMNS) // MAX_PARTICIPANTS),
        )
        self._beside = FIRST_PARTICIPANT_COLUMN + (MAX_PARTICIPANTS - 1) * self._gap + 5
        self._room = width - self._beside
        self._palette = _Palette(voices)
        self._at = {voice: self._compute_column(number) for number, voice in enumerate(voices)}
        self._opened = False

    def draw_title(self, text: str) -> list[str]:
        head = [] if self._opened else [self._draw_names(list(self._at))]
        self._opened = True
        return [*head, self._join_row(self._draw_rails()), self._join_row(self._draw_rails(), bold(text))]

    def draw(self, move: DiagramStep) -> list[str]:
        entering = [voice for voice in (move.source, move.target) if voice and voice not in self._at]
        rows = [self._add_participant(voice) for voice in entering]
        paint = self._palette.get_paint(move.source)
        cells = (
            self._draw_arrow(move.source, move.target, paint)
            if move.target
            else self._draw_dot(move.source, paint)
        )
        for line in _wrap_step(move, self._room, self._marks):
            rows.append(self._join_row(cells, line.render(paint)))
            cells = self._draw_rails()
        return rows

    def _compute_column(self, number: int) -> int:
        return FIRST_PARTICIPANT_COLUMN + number * self._gap

    def _add_participant(self, voice: str) -> str:
        row = self._draw_names([voice])
        self._at[voice] = self._compute_column(len(self._at))
        return row

    def _draw_names(self, voices: Sequence[str]) -> str:
        cells = self._draw_rails() if self._opened else [" "] * self._beside
        for voice in voices:
            name = clean_text(voice)[: self._gap - 1]
            at = self._at.get(voice, self._compute_column(len(self._at))) - len(name) // 2
            paint = self._palette.get_paint(voice)
            cells[at : at + len(name)] = [paint(char) for char in name]
        return self._join_row(cells)

    def _draw_rails(self) -> list[str]:
        cells = [" "] * self._beside
        for at in self._at.values():
            cells[at] = dim(self._marks.line)
        return cells

    def _draw_dot(self, voice: str, paint: PaintText) -> list[str]:
        cells = self._draw_rails()
        cells[self._at[voice]] = paint(self._marks.dot)
        return cells

    def _draw_arrow(self, source: str, target: str, paint: PaintText) -> list[str]:
        cells, marks = self._draw_rails(), self._marks
        begin, end = self._at[source], self._at[target]
        for at in range(min(begin, end) + 1, max(begin, end)):
            cells[at] = paint(marks.cross if at in self._at.values() else marks.dash)
        rightwards = begin < end
        cells[begin] = paint(marks.leave_right if rightwards else marks.leave_left)
        cells[end + (-1 if rightwards else 1)] = paint(marks.right if rightwards else marks.left)
        return cells

    @staticmethod
    def _join_row(cells: Sequence[str], text: str = "") -> str:
        return f"{''.join(cells)}{text}".rstrip()


class PaintText(Protocol):
    def __call__(self, text: str) -> str: ...


class _Palette:
    """Assigns a colour to each participant, if colours are supported."""

    def __init__(self, voices: Sequence[str]) -> None:
        self._voices = list(voices)

    def get_paint(self, voice: str) -> PaintText:
        if voice not in self._voices:
            self._voices.append(voice)
        code = PARTICIPANT_ANSI_COLOURS[self._voices.index(voice) % len(PARTICIPANT_ANSI_COLOURS)]
        return lambda text: f"\033[{code}m{text}\033[0m" if text and is_coloured() else text


class _TextLine(NamedTuple):
    """One line of the text beside the columns."""

    label: str
    words: str
    spoken: bool

    def render(self, paint: PaintText) -> str:
        return paint(self.label) + (self.words if self.spoken else dim(self.words))


def _wrap_step(move: DiagramStep, width: int, marks: DiagramCharacters) -> list[_TextLine]:
    """Return the label and the text, wrapped to the width."""
    words = clean_text(move.words).strip()
    if move.spoken:
        words = f"{marks.opening}{words}{marks.closing}"
    label = f"{move.label} " if move.label and words else move.label
    lines = [
        line
        for paragraph in f"{label}{words}".splitlines()
        for line in textwrap.wrap(paragraph, width, break_on_hyphens=False)
    ]
    if marks is ASCII_CHARACTERS:
        lines = [line.encode("ascii", "replace").decode() for line in lines]
    labels = [label[: len(lines[0])] if lines else "", *([""] * len(lines))]
    return [
        _TextLine(named, line[len(named) :], move.spoken) for named, line in zip(labels, lines, strict=False)
    ] or [_TextLine("", "", False)]
