"""Moves between sessions: who did what towards whom, built from events.

`MoveBuilder` turns the events of an app or a gateway into moves; `_move_diagram` draws them. Nothing here does I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec

from antiphon.bus import Delivered, Event, MessageAppended, RunChanged
from antiphon.messages import AssistantMessage, Provenance, ToolCall, ToolResult, UserMessage, decode_message


class Move(NamedTuple):
    """One action of a participant: a message to another one, or a step by itself."""

    source: str
    target: str | None
    """None if the source acts alone."""
    kind: str
    """What it was, in a word: a tool's name, `reply`, `report`. Empty for a plain message."""
    text: str
    spoken: bool = False
    """True if a participant wrote the text, False if it describes what happened."""
    time_ms: int | None = None


class ParticipantTally(msgspec.Struct):
    """Runs, messages and tokens of one participant."""

    runs: int = 0
    messages: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


class MoveBuilder:
    """Turns events into moves. A message is shown once: when it is sent, not when it arrives.

    Sessions are independent, so an event may come before the one that explains it; it is held until then.
    """

    def __init__(self, names: Mapping[str, str], person: str, clean_text: Callable[[str], str] = str) -> None:
        """Start with the sessions in `names`, by key; `person` talks to the first one.

        `clean_text` returns the part of a text that is meant for people.
        """
        self.tallies = {name: ParticipantTally() for name in names.values()}
        self.turns = Counter[str]()
        """How many turns each exchange has had, by its id."""
        self.finished: set[str] = set()
        """Kinds of deliveries that were made, and `wake` once a woken run has ended."""
        self._names = dict(names)
        self._first_name = next(iter(names.values()))
        self._person = person
        self._clean_text = clean_text
        self._causes: dict[str, Provenance | None] = {}
        self._calls: dict[str, ToolCall] = {}
        self._shown_texts: set[tuple[str, str]] = set()
        self._held_events: list[MessageAppended | RunChanged | Delivered] = []

    def process_event(self, event: Event) -> list[Move]:
        if not isinstance(event, MessageAppended | RunChanged | Delivered):
            return []
        moves: list[Move] = []
        self._held_events.append(event)
        while due := next(filter(self._is_explained, self._held_events), None):
            self._held_events.remove(due)
            moves += self._build_moves(due)
        return moves

    def _is_explained(self, event: MessageAppended | RunChanged | Delivered) -> bool:
        """Whether the event's session is known and, for a delivery, whether its text was already shown."""
        if isinstance(event, Delivered):
            return (event.session_key, event.text) in self._shown_texts
        return event.session_key in self._names

    def _build_moves(self, event: MessageAppended | RunChanged | Delivered) -> Iterator[Move]:
        name = self._names[event.session_key]
        if isinstance(event, RunChanged):
            self._count_run(name, event)
        elif isinstance(event, Delivered):
            self.finished.add(event.kind)
            yield self._build_delivery_move(name, event)
        else:
            yield from self._build_message_moves(name, event)

    def _count_run(self, name: str, event: RunChanged) -> None:
        if event.usage is None:
            return
        tally = self.tallies[name]
        tally.runs += 1
        tally.tokens_in += event.usage.input
        tally.tokens_out += event.usage.output
        if (cause := self._causes.get(event.run_id)) and cause.kind == "wake":
            self.finished.add("wake")

    def _build_delivery_move(self, name: str, event: Delivered) -> Move:
        # The last paragraph of a report is meant for the operator.
        words, _, _ = event.text.partition("\n\n")
        read_by = self._person if name == self._first_name else None
        return Move(name, read_by, f"delivered to {name}'s chat", words, spoken=True)

    def _build_message_moves(self, name: str, event: MessageAppended) -> Iterator[Move]:
        match decode_message(event.body):
            case UserMessage() as message:
                self._causes[event.run_id or ""] = message.provenance
                yield from self._build_input_moves(name, message)
            case AssistantMessage() as message:
                self._shown_texts.add((event.session_key, message.text))
                self._calls |= {call.id: call for call in message.tool_calls}
                if message.text:
                    yield from self._build_answer_moves(name, message, self._causes.get(event.run_id or ""))
            case ToolResult() as message:
                yield from self._build_tool_result_moves(name, message)
            case _:
                pass

    def _build_input_moves(self, name: str, message: UserMessage) -> Iterator[Move]:
        """Yield the moves for a message that begins a run."""
        cause = message.provenance
        text = message.content if isinstance(message.content, str) else ""
        if cause is None:
            yield Move(self._person, name, "", self._clean_text(text), spoken=True)
        elif cause.kind == "announce_step":
            yield Move(name, None, "announce step", "chooses what to post")
        elif cause.kind == "wake":
            yield Move(name, None, "woken", "because the report is in")
        elif cause.kind == "inter_session":
            first = (cause.exchange_id or "") not in self.turns
            self.turns[cause.exchange_id or ""] += 0 if first else 1
            if first:
                yield Move(
                    self._get_source_name(cause), name, "sessions_send", self._clean_text(text), spoken=True
                )

    def _build_answer_moves(
        self, name: str, message: AssistantMessage, cause: Provenance | None
    ) -> Iterator[Move]:
        """Yield the moves for an answer, addressed to its recipient."""
        text = self._clean_text(message.text)
        if message.provenance:
            words, _, _ = message.text.partition("\n\n")
            yield Move(self._get_source_name(message.provenance), name, "report", words, spoken=True)
            return
        self.tallies[name].messages += 1
        match cause.kind if cause else None:
            case None | "wake":
                yield Move(name, self._person, "", text, spoken=True)
            case "inter_session" if cause:
                turn = self.turns[cause.exchange_id or ""]
                label = f"reply-back {turn}" if turn else "reply"
                if text == "REPLY_SKIP":
                    yield Move(name, None, label, "REPLY_SKIP: nothing to add")
                else:
                    yield Move(name, self._get_source_name(cause), label, text, spoken=True)
            case "spawn":
                yield Move(name, None, "result", text, spoken=True)
            case _:
                pass  # the text of an announce step is shown when it is delivered

    def _build_tool_result_moves(self, name: str, result: ToolResult) -> Iterator[Move]:
        arguments = self._calls[result.tool_call_id].arguments if result.tool_call_id in self._calls else {}
        match result.tool_name:
            case "sessions_list":
                keys = ", ".join(row["key"] for row in msgspec.json.decode(result.text)["sessions"])
                yield Move(name, None, "sessions_list", f"finds {keys}")
            case "sessions_send":
                found = msgspec.json.decode(result.text)
                took = found["delivery"]["queuedMs"] + found["delivery"]["runningMs"]
                yield Move(name, None, "sessions_send", f"returns {found['status']!r} after {took} ms")
            case "sessions_spawn":
                child_key = msgspec.json.decode(result.text)["childSessionKey"]
                yield self._build_spawn_move(name, child_key, arguments)
            case "sessions_yield":
                yield Move(name, None, "sessions_yield", "ends its turn until a report")
            case "exec":
                yield Move(name, None, "exec", str(arguments.get("command")), spoken=True)
                shown = [" ".join(line.split()) for line in result.text.splitlines() if line.strip()]
                yield Move(name, None, "output", ", ".join(shown), spoken=True)
            case "read" | "write" | "edit" as tool:
                yield Move(name, None, tool, PurePosixPath(str(arguments.get("path"))).name)
            case other:
                yield Move(name, None, other, "returns")

    def _build_spawn_move(self, name: str, child_key: str, arguments: dict[str, Any]) -> Move:
        child = arguments.get("label") or "sub-agent"
        self._names[child_key] = child
        self.tallies[child] = ParticipantTally()
        return Move(name, child, "sessions_spawn", self._clean_text(arguments["task"]), spoken=True)

    def _get_source_name(self, cause: Provenance) -> str:
        return self._names.get(cause.source_session_key or "", "?")
