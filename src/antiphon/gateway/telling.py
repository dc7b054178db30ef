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
from antiphon.gateway.replies import dropped
from antiphon.messages import CLIENT, Assistant, decode
from antiphon.operations import HistoryFilter, Message, Operations
from antiphon.views import Accepted, RunView

BREAK = "\n\n"


class Words:
    """What one listener has been told of a run."""

    def __init__(self, client_tools: Set[str] = frozenset()) -> None:
        self._client_tools = client_tools
        self.told = ""
        """Everything, with the breaks."""
        self._step = ""
        """Of the step that is being told."""
        self._heard: str | None = ""
        """The step as far as it has come; None when a piece of it was missed."""
        self._number = 0
        self._answered = False

    @property
    def begun(self) -> bool:
        return self._number > 0

    def delta(self, delta: Delta) -> str:
        """What is new in a piece."""
        follows, self._number = delta.number == self._number + 1, delta.number
        if delta.restart:
            self._heard = ""
        elif not follows:
            self._heard = None
        if self._heard is None:
            return ""
        self._heard += delta.text
        return self._rest(self._heard)

    def committed(self, step: Assistant) -> str:
        """What is left of a step that is known as a whole; the next piece belongs to another one."""
        calls = step.tool_calls
        self._answered = not calls or any(call.name in self._client_tools for call in calls)
        rest = self._rest(step.text)
        self._step, self._heard = "", ""
        return rest

    def ended(self, reply: str | None) -> str:
        """What is left of the answer, if its step was not heard of as a whole."""
        return "" if self._answered else self._rest(reply or "")

    def _rest(self, text: str) -> str:
        if self._step.startswith(text):
            return ""  # the step began again, and has not yet come to where it was
        goes_on = bool(self._step) and text.startswith(self._step)
        new = text[len(self._step) :] if goes_on else text
        if self.told and not goes_on:
            new = BREAK + new
        self._step = text
        self.told += new
        return new


async def tell(
    operations: Operations, caller: Caller, message: Message, timeout: float
) -> AsyncGenerator[Accepted | str | RunView]:
    """First that the message is accepted, then pieces of text, and at last the run."""
    await operations.open(caller, message.session)
    before = await operations.history(caller, message.session, HistoryFilter(limit=1))
    async with aclosing(operations.follow(caller, message.session, before.total)) as feed:
        # Asked before anything can happen, so that it listens; what is missed all the same, `Words` makes up for.
        coming = asyncio.ensure_future(anext(feed))
        ended: asyncio.Future[RunView] | None = None
        try:
            accepted = await operations.submit(caller, message)
            yield accepted
            words = Words(message.options.tool_names if message.options else frozenset())
            ended = asyncio.ensure_future(operations.wait(caller, accepted.run_id, timeout))
            while await _first(coming, ended):
                if piece := _piece(words, accepted.run_id, coming.result()):
                    yield piece
                coming = asyncio.ensure_future(anext(feed))
            view = await ended
            # The end may be heard of before the last pieces are; it says the same.
            if rest := words.ended(view.reply):
                yield rest
            yield view
        finally:
            await dropped(coming, ended)


async def _first(coming: asyncio.Future[Event], ended: asyncio.Future[RunView]) -> bool:
    """Wait for either; whether there is an event. What happened before the end is told before it."""
    await asyncio.wait({coming, ended}, return_when=asyncio.FIRST_COMPLETED)
    return coming.done() and not isinstance(coming.exception(), StopAsyncIteration)


def _piece(words: Words, run_id: str, event: Event) -> str:
    if isinstance(event, Delta) and event.run_id == run_id:
        return words.delta(event)
    # An entry that was read again does not say whose it is. Runs of a session do not overlap, so it is this
    # run's if something of this run came before it.
    if isinstance(event, MessageAppended) and (
        event.run_id == run_id or (event.run_id is None and words.begun)
    ):
        return _step(words, event.body)
    return ""


def _step(words: Words, body: str) -> str:
    try:
        message = decode(body)
    except InvalidInput:
        return ""
    if not isinstance(message, Assistant) or message.provider == CLIENT:
        return ""  # the client's own account of what was said before is not told to it
    return words.committed(message)
