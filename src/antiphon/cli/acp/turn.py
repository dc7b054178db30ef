"""Tracks how much of the answer to one prompt the editor has been sent.

A growing answer is streamed, and its entry in the transcript has the definitive text. An editor can take nothing back,
so each text is sent once: an answer that begins again after a crash continues where it was, and is repeated only if it
reads differently now. Control tokens, which are not for people, are never sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeAlias

from antiphon.bus import Delta
from antiphon.cli.acp.updates import ChunkKind, build_text_chunk, join_blocks
from antiphon.cli.chat.renderer import may_be_control_token

Json: TypeAlias = dict[str, Any]

RESTART_NOTE = "(The answer was cut off; it starts again.)"


class _SentText:
    """A text that grows, and how much of it has been sent."""

    def __init__(self, kind: ChunkKind, message_id: str) -> None:
        self._kind: ChunkKind = kind
        self._message_id = message_id
        self._attempt = 0
        self.sent = ""

    def send_up_to(self, text: str) -> list[Json]:
        """Return the updates after which the editor has this text."""
        if self.sent.startswith(text):
            return []
        if text.startswith(self.sent):
            rest = text[len(self.sent) :]
        else:
            self._attempt += 1
            rest = f"{RESTART_NOTE}\n\n{text}"
        self.sent = text
        suffix = f":{self._attempt}" if self._attempt else ""
        return [build_text_chunk(self._kind, rest, f"{self._message_id}{suffix}")]


class EditorTurn:
    """A prompt that is being answered."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.is_accepted = False
        self.is_cancelled = False
        self.has_ended = asyncio.Event()
        """Set when everything that the run has led to has been sent."""
        self._step = 0
        self._last_delta_number = 0
        self._last_answer = ""
        self._begin_step()

    def _begin_step(self, begun: str = "") -> None:
        self._step += 1
        message_id = f"{self.run_id}:{self._step}"
        self._answer = _SentText("agent_message_chunk", message_id)
        self._thought = _SentText("agent_thought_chunk", f"{message_id}:thought")
        self._answer.sent = self._text = begun
        self._thinking = ""
        self._has_missed_delta = self._has_missed_thinking = False

    def record_gap(self) -> None:
        """Record that the connection was lost. Thoughts have no numbers, so the rest of this step's is not streamed."""
        self._has_missed_thinking = True

    def take_delta(self, event: Delta) -> list[Json]:
        """Return the updates for a piece of the growing answer."""
        if event.thinking:
            if self._has_missed_thinking:
                return []
            self._thinking += event.thinking
            return self._thought.send_up_to(self._thinking)
        # A gateway that was started again counts from one, and sends the text so far first.
        begins_again = event.restart or event.number == 1
        self._has_missed_delta = self._has_missed_delta or event.number != self._last_delta_number + 1
        self._last_delta_number = event.number
        if begins_again:
            self._text, self._thinking, self._has_missed_delta = "", "", False
        if self._has_missed_delta:
            return []
        self._text += event.text
        if not self._answer.sent and may_be_control_token(self._text):
            return []
        return self._answer.send_up_to(self._text)

    def take_answer(self, entry: Mapping[str, Any], *, is_internal: bool) -> list[Json]:
        """Return the updates for the entry that completes a step: what the editor lacks."""
        updates: list[Json] = []
        begun = ""
        if not is_internal:
            thinking, text = join_blocks(entry, "thinking"), join_blocks(entry, "text")
            if text and self._answer.sent.startswith(text):  # the next step was faster than this entry
                begun = self._answer.sent.removeprefix(text)
            if not self._answer.sent and thinking.startswith(self._thought.sent) and thinking.strip():
                updates += self._thought.send_up_to(thinking)
            if text.strip():
                updates += self._answer.send_up_to(text)
            self._last_answer = text
        self._begin_step(begun)
        return updates

    def take_reply(self, reply: str) -> list[Json]:
        """Return the updates for the missing part of an answer whose entry did not arrive."""
        if not reply.strip() or reply == self._last_answer or may_be_control_token(reply):
            return []
        return self._answer.send_up_to(reply)
