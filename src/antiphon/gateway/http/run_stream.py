"""Telling a run as it happens: submit, then its words as they come, then how it ended.

Words that were told cannot be taken back. What a listener has is therefore always compared with what a step says
as a whole: the rest is told, and a step that began again and says something else is told after a blank line. So
the pieces together are the answer, unless the model began again or said something before it called a tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Set
from contextlib import aclosing

from antiphon.access import Caller
from antiphon.bus import Delta, Event, MessageAppended
from antiphon.errors import InvalidInput
from antiphon.gateway.http.responses import cancel_and_wait
from antiphon.messages import CLIENT_PROVIDER, AssistantMessage, decode_message
from antiphon.operations import HistoryFilter, IncomingMessage, Operations
from antiphon.views import MessageReceipt, RunView

STEP_SEPARATOR = "\n\n"


class StreamedText:
    """What one listener has been told of a run."""

    def __init__(self, client_tools: Set[str] = frozenset()) -> None:
        self._client_tools = client_tools
        self.sent_text = ""
        """Everything, with the breaks."""
        self._step_text = ""
        """Of the step that is being told."""
        self._received_step: str | None = ""
        """The step as far as it has come; None when a piece of it was missed."""
        self._last_delta_number = 0
        self._has_answer = False

    @property
    def has_begun(self) -> bool:
        return self._last_delta_number > 0

    def add_delta(self, delta: Delta) -> str:
        """What is new in a piece."""
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
        """What is left of a step that is known as a whole; the next piece belongs to another one."""
        calls = step.tool_calls
        self._has_answer = not calls or any(call.name in self._client_tools for call in calls)
        rest = self._extend_to(step.text)
        self._step_text, self._received_step = "", ""
        return rest

    def finish(self, reply: str | None) -> str:
        """What is left of the answer, if its step was not heard of as a whole."""
        return "" if self._has_answer else self._extend_to(reply or "")

    def _extend_to(self, text: str) -> str:
        if self._step_text.startswith(text):
            return ""  # the step began again, and has not yet come to where it was
        goes_on = bool(self._step_text) and text.startswith(self._step_text)
        new = text[len(self._step_text) :] if goes_on else text
        if self.sent_text and not goes_on:
            new = STEP_SEPARATOR + new
        self._step_text = text
        self.sent_text += new
        return new


async def stream_run(
    operations: Operations, caller: Caller, message: IncomingMessage, timeout: float
) -> AsyncGenerator[MessageReceipt | str | RunView]:
    """First that the message is accepted, then pieces of text, and at last the run."""
    await operations.open(caller, message.session)
    before = await operations.read_history(caller, message.session, HistoryFilter(limit=1))
    async with aclosing(operations.follow(caller, message.session, before.total)) as feed:
        # Asked before anything can happen, so that it listens; what is missed all the same, `StreamedText` makes up
        # for.
        coming = asyncio.ensure_future(anext(feed))
        ended: asyncio.Future[RunView] | None = None
        try:
            accepted = await operations.submit(caller, message)
            yield accepted
            words = StreamedText(message.options.tool_names if message.options else frozenset())
            ended = asyncio.ensure_future(operations.wait(caller, accepted.run_id, timeout))
            while await _wait_for_event(coming, ended):
                if piece := _get_new_text(words, accepted.run_id, coming.result()):
                    yield piece
                coming = asyncio.ensure_future(anext(feed))
            view = await ended
            # The end may be heard of before the last pieces are; it says the same.
            if rest := words.finish(view.reply):
                yield rest
            yield view
        finally:
            await cancel_and_wait(coming, ended)


async def _wait_for_event(coming: asyncio.Future[Event], ended: asyncio.Future[RunView]) -> bool:
    """Wait for either; whether there is an event. What happened before the end is told before it."""
    await asyncio.wait({coming, ended}, return_when=asyncio.FIRST_COMPLETED)
    return coming.done() and not isinstance(coming.exception(), StopAsyncIteration)


def _get_new_text(words: StreamedText, run_id: str, event: Event) -> str:
    if isinstance(event, Delta) and event.run_id == run_id:
        return words.add_delta(event)
    # An entry that was read again does not say whose it is. Runs of a session do not overlap, so it is this
    # run's if something of this run came before it.
    if isinstance(event, MessageAppended) and (
        event.run_id == run_id or (event.run_id is None and words.has_begun)
    ):
        return _get_step_text(words, event.body)
    return ""


def _get_step_text(words: StreamedText, body: str) -> str:
    try:
        message = decode_message(body)
    except InvalidInput:
        return ""
    if not isinstance(message, AssistantMessage) or message.provider == CLIENT_PROVIDER:
        return ""  # the client's own account of what was said before is not told to it
    return words.add_committed_step(message)
