"""Renders a conversation on a terminal: turns events into text and prints each word once.

Answers to the reader are streamed. The committed message has the definitive text of a step, and whatever was not yet
printed is printed then, so a missed event delays text but never loses it. Messages of others are printed only when they
are committed, because they reach a client in several ways and in different wordings.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, cast

import click
import msgspec

from antiphon.bus import ApprovalChanged, Delivered, Delta, Event, MessageAppended, RunChanged, ToolPhase
from antiphon.cli._output import bold, clean_line, clean_text, dim, format_tool_calls, red
from antiphon.cli.approvals import format_choices
from antiphon.cli.chat import speakers
from antiphon.operations.types import ApprovalView, build_approval_view

RenderStyle = Literal["conversation", "answers", "silent"]
"""For a person at a terminal; only the answers; no output at all."""
SILENT_REPLIES = {"REPLY_SKIP": "({} ended the conversation)", "ANNOUNCE_SKIP": None, "NO_REPLY": None}
"""Replies by which an agent says nothing (see `antiphon.engine.outbox.sanitize`), and what is shown instead."""

TOKEN_WRAPPING_CHARACTERS = " \t\r\n`*\"'"  # noqa: S105
MAX_REMEMBERED_RUNS = 256  # ended runs
MAX_PROGRESS_CHARACTERS = 100  # of the output of a running tool call


def _print_text(text: str) -> None:
    click.echo(text, nl=False)


class ChatRenderer:
    def __init__(self, style: RenderStyle, speaker: str = "agent") -> None:
        self._style = style
        self._streams = style == "conversation" or (style == "answers" and sys.stdout.isatty())
        """Whether text may be streamed that is withdrawn if an answer is cut off and restarted."""
        self.speaker = speaker
        self.known = speakers.KnownSpeakers()
        self.out: Callable[[str], None] = _print_text
        self._own_run_ids: set[str] = set()
        self._last_text_by_run: dict[str, str] = {}
        """The last text of each run in `_own_run_ids`, for runs that are shown as a whole."""
        self._pending_output: list[str] = []
        self._ended_run_ids: deque[str] = deque(maxlen=MAX_REMEMBERED_RUNS)
        self._answer_by_run: dict[str, str] = {}
        """The last text of each ended run; later events of these runs are ignored."""
        self._speaker_by_unposted_run: dict[str, str] = {}
        """Runs whose text is shown once it is posted, with the speaker's name."""
        self._end_event_by_run: dict[str, asyncio.Event] = {}
        self._undecided_approval_ids: deque[str] = deque(maxlen=MAX_REMEMBERED_RUNS)
        """Approvals that were shown and not yet decided."""
        self._begin_run(None)

    def _begin_run(self, run_id: str | None) -> None:
        self._current_run_id = run_id
        self._has_printed_speaker = False
        self._last_delta_number = 0
        self._begin_step()

    def _begin_step(self) -> None:
        self._streamed_text = ""
        self._withheld_text = ""
        """The beginning of a step that may turn out to be a control token."""
        self._has_missed_delta = False

    def expect_answer(self, run_id: str) -> None:
        """Stream the answer of this run to the reader; the style `answers` shows no other runs."""
        self._own_run_ids.add(run_id)

    def report_connection_change(self, text: str) -> None:
        """Print that the connection was lost or is back; what follows of an answer is shown from its beginning."""
        self._end_open_line()
        self._begin_step()
        self._has_missed_delta, self._has_printed_speaker = True, False
        self.print_note(text)

    def print_note(self, text: str) -> None:
        """Print a note from the chat itself."""
        if self._style == "conversation":
            self._append_line(dim(clean_text(text)))
            self._flush()

    def print_result(self, text: str) -> None:
        """Print the output of a command."""
        if self._style != "silent":
            self._append_line(dim(clean_text(text)))
            self._flush()

    def print_warning(self, text: str) -> None:
        """Print a warning, also in the style `answers`."""
        if self._style == "answers":
            self._end_open_line()
            self._flush()
            click.echo(clean_text(text), err=True)
        else:
            self.print_note(text)

    async def wait_until_shown(self, run_id: str, seconds: float) -> bool:
        """Wait until the end of a run has been shown, `seconds` at most; return whether it has."""
        if run_id in self._ended_run_ids:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._end_event_by_run.setdefault(run_id, asyncio.Event()).wait()
        except TimeoutError:
            return False
        return True

    def show_event(self, event: Event) -> None:
        if self._style == "answers" and getattr(event, "run_id", None) not in self._own_run_ids:
            return
        match event:
            case RunChanged():
                self._show_run_change(event)
            case Delta():
                self._show_delta(event)
            case ToolPhase():
                self._show_tool_phase(event)
            case ApprovalChanged():
                self.show_approval(build_approval_view(event))
            case MessageAppended():
                self._show_message(event)
            case Delivered() if name := self._speaker_by_unposted_run.pop(event.run_id or "", None):
                self._print_other_message(name, event.text)
            case _:
                pass
        self._flush()

    def show_run_end(self, run_id: str, state: str, reply: str | None, error: str | None) -> None:
        """Print the rest of a run's answer, and how it ended unless that was well."""
        if run_id in self._ended_run_ids:
            return
        self._ended_run_ids.append(run_id)
        ours = self._current_run_id in {
            None,
            run_id,
        }  # otherwise it ended in the queue, while another run is being shown
        last_text = self._last_text_by_run.pop(run_id, None)
        if (
            ours
            and run_id in self._own_run_ids
            and reply
            and reply != last_text
            and reply.strip() not in SILENT_REPLIES
        ):
            self._print_rest_of_step(reply)
        if run_id in self._own_run_ids:
            self._own_run_ids.remove(run_id)
            self._answer_by_run[run_id] = reply or ""
            if len(self._answer_by_run) > MAX_REMEMBERED_RUNS:
                del self._answer_by_run[next(iter(self._answer_by_run))]
        self._end_open_line()
        if state != "ok":
            self._print_failure(state, error)
        if ours:
            self._begin_run(None)
        self._flush()
        if waiting := self._end_event_by_run.pop(run_id, None):
            waiting.set()

    def _print_failure(self, state: str, error: str | None) -> None:
        text = clean_text(error or f"The run ended as {state!r}.")
        if self._style == "conversation":
            self._append_line(dim(f"({text})") if state == "cancelled" else red(text))
        elif self._style == "answers":
            self._flush()
            click.echo(text, err=True)

    def _show_run_change(self, event: RunChanged) -> None:
        if event.state == "running":
            self._begin_run(event.run_id)
        elif event.state != "queued":
            self.show_run_end(event.run_id, event.state, event.reply, event.error)

    def _show_delta(self, event: Delta) -> None:
        if event.run_id not in self._own_run_ids or not self._streams or event.number == 0:
            return
        if event.run_id != self._current_run_id:
            self._begin_run(event.run_id)
        # A gateway that was started again counts from one.
        if event.restart or event.number == 1:
            if self._streamed_text:
                self._end_open_line()
                self.print_note("(the answer was cut off; it starts again)")
                self._has_printed_speaker = False
            self._begin_step()
        elif event.number != self._last_delta_number + 1:
            self._has_missed_delta = True
        self._last_delta_number = event.number
        if event.text and not self._has_missed_delta:
            self._withheld_text += event.text
            if self._streamed_text or not may_be_control_token(self._withheld_text):
                self._streamed_text += self._withheld_text
                self._append_text(self._withheld_text)
                self._withheld_text = ""

    def _show_tool_phase(self, event: ToolPhase) -> None:
        """Show the last line that a running call has printed, or that it failed.

        The call itself is shown with the message that makes it.
        """
        if event.phase == "update":
            if last_line := clean_line(event.output.rstrip().rpartition("\n")[2])[-MAX_PROGRESS_CHARACTERS:]:
                self.print_note(f"  · {event.name}: {last_line}")
        elif event.phase != "start" and event.is_error:
            self.print_note(f"  · {event.name} failed")

    def show_approval(self, approval: ApprovalView) -> None:
        """Show a call that waits for the reader's decision, once, and later what was decided."""
        if approval.state != "pending":
            if approval.id in self._undecided_approval_ids:
                self._undecided_approval_ids.remove(approval.id)
                by = f" by {approval.decided_by}" if approval.decided_by else ""
                self.print_note(f"  · {approval.tool} was {approval.state}{by}")
            return
        if approval.id in self._undecided_approval_ids:
            return
        self._undecided_approval_ids.append(approval.id)
        lines = "\n".join(f"    {line}" for line in approval.text.split("\n"))
        question = f"{clean_line(self.speaker)} asks to call {approval.tool}:\n{lines}\n  Answer with: "
        self._end_open_line()
        if self._style == "conversation":
            choices = "|".join(approval.allowed_decisions)
            self._append_line(bold(clean_text(f"{question}/approve {approval.id} {choices}")))
            self._flush()
        else:  # the next line of a script is read after the answer, so the decision comes from another terminal
            self._flush()
            choices = "".join(f"\n    {command}" for command in format_choices(approval))
            click.echo(clean_text(f"{question.rstrip()}{choices}"), err=True)

    @property
    def has_undecided_approval(self) -> bool:
        """Whether a call that was shown waits for a decision."""
        return bool(self._undecided_approval_ids)

    def _show_message(self, event: MessageAppended) -> None:
        body: dict[str, Any] = msgspec.json.decode(event.body)
        answer = self._answer_by_run.get(event.run_id or "")
        if answer is not None and (body.get("role") == "user" or _extract_text(body) == answer):
            return
        entry = {**body, "runId": event.run_id}
        if body.get("role") == "assistant":
            text = _extract_text(body)
            if event.internal:
                self._handle_internal_answer(entry, event.run_id, text)
            elif event.run_id in self._own_run_ids:
                self._print_rest_of_step(text)
                self._begin_step()
                self._last_text_by_run[event.run_id or ""] = text
            else:
                self._print_other_message(speakers.format_answerer(entry, self.known, self.speaker), text)
            for call in [] if event.internal else format_tool_calls(body):
                self.print_note(f"  · {call}")
        elif (
            body.get("role") == "user"
            and event.run_id not in self._own_run_ids
            and not _is_hidden(event, body)
        ):
            speaker = speakers.format_speaker(entry, self.known) or speakers.OTHER_CLIENT_SPEAKER
            self.print_note(f"{speaker}> {_extract_text(body)}")

    def _handle_internal_answer(self, entry: speakers.TranscriptItem, run_id: str | None, text: str) -> None:
        """Handle an answer that is not for people, or only after it is posted."""
        if run_id in self._own_run_ids:
            self._begin_step()
            self._last_text_by_run[run_id or ""] = text
        elif text.strip() in SILENT_REPLIES:
            self._print_other_message("", text)
        elif run_id:
            self._speaker_by_unposted_run[run_id] = speakers.format_answerer(entry, self.known, self.speaker)
            if len(self._speaker_by_unposted_run) > MAX_REMEMBERED_RUNS:
                del self._speaker_by_unposted_run[next(iter(self._speaker_by_unposted_run))]

    def _print_other_message(self, name: str, text: str) -> None:
        """Print an entry that does not answer the reader."""
        if self._style != "conversation" or not text:
            return
        if text.strip() not in SILENT_REPLIES:
            self._append_line(f"{bold(f'{name}> ')}{clean_text(text)}")
        elif about := SILENT_REPLIES[text.strip()]:
            self._append_line(dim(about.format(clean_line(self.speaker))))

    def _print_rest_of_step(self, text: str) -> None:
        """Print the part of a step's text that was not streamed."""
        if not text.startswith(self._streamed_text):
            self._end_open_line()
            if text:
                self.print_note("(full answer)")
            self._streamed_text = ""
            self._has_printed_speaker = False
        self._append_text(text[len(self._streamed_text) :])
        self._end_open_line()

    def _append_text(self, text: str) -> None:
        if not text or self._style == "silent":
            return
        if not self._has_printed_speaker and self._style == "conversation":
            self._pending_output.append(bold(f"{clean_line(self.speaker)}> "))
        self._has_printed_speaker = True
        self._mid_line = not text.endswith("\n")
        self._pending_output.append(clean_text(text) if sys.stdout.isatty() else text)

    def _append_line(self, text: str) -> None:
        self._end_open_line()
        self._pending_output.append(f"{text}\n")

    def _end_open_line(self) -> None:
        if self._mid_line:
            self._pending_output.append("\n")
        self._mid_line = False

    def _flush(self) -> None:
        """Print the collected output in one piece, since a prompt may have to be redrawn below it."""
        if self._pending_output:
            self.out("".join(self._pending_output))
        self._pending_output.clear()

    _mid_line = False


def _is_hidden(event: MessageAppended, body: dict[str, Any]) -> bool:
    return event.internal or speakers.is_internal_step(body)


def may_be_control_token(text: str) -> bool:
    """Whether a text is a reply by which an agent says nothing, or its beginning."""
    begun = text.strip(TOKEN_WRAPPING_CHARACTERS)
    return any(token.startswith(begun) for token in SILENT_REPLIES)


def _extract_text(body: dict[str, Any]) -> str:
    content: Any = body.get("content") or []
    if isinstance(content, str):
        return content
    blocks = cast("list[dict[str, Any]]", content)
    return "".join(block.get("text", "") for block in blocks if block.get("type") == "text")
