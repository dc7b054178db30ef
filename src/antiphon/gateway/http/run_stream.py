"""Streams a run over HTTP: submits the message, yields text as it arrives, then the ended run.

Text that was sent cannot be taken back. It is therefore compared with the full text of each step: only the rest is
sent, and a step that restarted with different text follows after a blank line. The pieces together are the answer,
unless the model restarted or produced text before a tool call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Set
from contextlib import aclosing

from antiphon.access import Caller
from antiphon.bus import Delta, Event, MessageAppended
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import InvalidInput
from antiphon.gateway.http.responses import cancel_and_wait
from antiphon.messages import CLIENT_PROVIDER, AssistantMessage, decode_message
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, MessageReceipt, RunView

STEP_SEPARATOR = "\n\n"


class StreamedText:
    """The text of a run that one listener has been sent."""

    def __init__(self, client_tools: Set[str] = frozenset()) -> None:
        self._client_tools = client_tools
        self.sent_text = ""
        """All text, including the step separators."""
        self._step_text = ""
        """Text sent of the current step."""
        self._received_step: str | None = ""
        """Text received of the current step; None if a piece was missed."""
        self._last_delta_number = 0
        self._has_answer = False

    @property
    def has_begun(self) -> bool:
        return self._last_delta_number > 0

    def add_delta(self, delta: Delta) -> str:
        """Return the new text of a delta."""
        follows, self._last_delta_number = delta.number == self._last_delta_number + 1, delta.number
        if delta.restart:
            self._received_step = ""
        elif not follows:
            self._received_step = None
        if self._received_step is None:
            return ""
        self._received_step += delta.text
        return self._extend_to(self._received_step)

    def add_committed_step(self, step: AssistantMessage) -> str:
        """Return the unsent rest of a completed step; the next delta belongs to another step."""
        calls = step.tool_calls
        self._has_answer = not calls or any(call.name in self._client_tools for call in calls)
        rest = self._extend_to(step.text)
        self._step_text, self._received_step = "", ""
        return rest

    def finish(self, reply: str | None) -> str:
        """Return the unsent rest of the answer, if its completed step was not received."""
        return "" if self._has_answer else self._extend_to(reply or "")

    def _extend_to(self, text: str) -> str:
        if self._step_text.startswith(text):
            return ""  # the step restarted and has not yet caught up
        continues = bool(self._step_text) and text.startswith(self._step_text)
        new = text[len(self._step_text) :] if continues else text
        if self.sent_text and not continues:
            new = STEP_SEPARATOR + new
        self._step_text = text
        self.sent_text += new
        return new


async def stream_run(
    operations: Operations, caller: Caller, message: IncomingMessage, timeout: float
) -> AsyncGenerator[MessageReceipt | str | RunView]:
    """Submit a message; yield its receipt, then pieces of text, and finally the run."""
    await operations.sessions.open(caller, message.session)
    before = await operations.transcripts.read(caller, message.session, HistoryFilter(limit=1))
    async with aclosing(operations.transcripts.follow(caller, message.session, before.total)) as feed:
        # Start following before the message is submitted; `StreamedText` makes up for events that are still missed.
        coming = asyncio.ensure_future(anext(feed))
        ended: asyncio.Future[RunView] | None = None
        try:
            accepted = await operations.messages.submit(caller, message)
            yield accepted
            streamed = StreamedText(message.options.tool_names if message.options else frozenset())
            ended = asyncio.ensure_future(operations.runs.wait(caller, accepted.run_id, timeout))
            while await _wait_for_event(coming, ended):
                if piece := _get_new_text(streamed, accepted.run_id, coming.result()):
                    yield piece
                coming = asyncio.ensure_future(anext(feed))
            view = await ended
            # The end may arrive before the last pieces; its reply has the same text.
            if rest := streamed.finish(view.reply):
                yield rest
            yield view
        finally:
            await cancel_and_wait(coming, ended)


async def _wait_for_event(coming: asyncio.Future[Event], ended: asyncio.Future[RunView]) -> bool:
    """Wait for an event or the end; return whether there is an event. Pending events precede the end."""
    await asyncio.wait({coming, ended}, return_when=asyncio.FIRST_COMPLETED)
    return coming.done() and not isinstance(coming.exception(), StopAsyncIteration)


def _get_new_text(streamed: StreamedText, run_id: str, event: Event) -> str:
    if isinstance(event, Delta) and event.run_id == run_id:
        return streamed.add_delta(event)
    # An entry read from the store has no run id. Runs of a session do not overlap, so it belongs to this run
    # if a delta of this run preceded it.
    if isinstance(event, MessageAppended) and (
        event.run_id == run_id or (event.run_id is None and streamed.has_begun)
    ):
        return _get_step_text(streamed, event.body)
    return ""


def _get_step_text(streamed: StreamedText, body: str) -> str:
    try:
        message = decode_message(body)
    except InvalidInput:
        return ""
    if not isinstance(message, AssistantMessage) or message.provider == CLIENT_PROVIDER:
        return ""  # an earlier message that the client itself sent
    return streamed.add_committed_step(message)
