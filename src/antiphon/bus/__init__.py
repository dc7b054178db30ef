"""Live events: hints over durable rows, delivered at most once.

A topic is a word, or a word and an id (`sessions`, `session.7`, `run.<id>`); `session.*` hears of every session.
Whoever needs certainty listens first, then reads the rows, then follows; a listener that could not keep up is
told so by a `Gap` and reads the rows again. Events are plain data that any transport can encode.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

import msgspec

ALL_SESSIONS_TOPIC = "session.*"


def session_topic(session: int) -> str:
    return f"session.{session}"


def run_topic(run_id: str) -> str:
    """Hears only of the run's end."""
    return f"run.{run_id}"


class _Event(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="event"):
    pass


class MessageAppended(_Event, tag="message", frozen=True):
    """An entry was committed. `body` is its raw transcript JSON; `seq` has no gap within `sessionId`."""

    session_key: str
    session_id: str
    seq: int
    entry: str
    body: str
    run_id: str | None = None
    internal: bool = False
    """It is not part of what a person would call the conversation."""


class RunUsage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Tokens and US dollars of a run; a cost that is not known is null."""

    input: int
    output: int
    cost: float | None


class RunChanged(_Event, tag="run", frozen=True):
    """A run was accepted, started or ended, after the commit that made it so.

    An end that was played carries everything there is to know of it; for any other, read the row.
    """

    session_key: str
    run_id: str
    state: str
    reply: str | None = None
    error_code: str | None = None
    error: str | None = None
    model: str | None = None
    started_at: int | None = None
    ended_at: int | None = None
    usage: RunUsage | None = None
    quiet: bool = False
    """What it says is for other sessions, not for whoever watches this one's chat."""
    gated: bool = False
    """Whoever watches did not ask for it: they get it through the gate."""
    yielded: bool = False
    """The turn has ended to wait for others: the answer is that of a later run."""


class Delta(_Event, tag="delta", frozen=True):
    """What a step has streamed since the last one. `text` is new text; `restart` voids the step so far."""

    session_key: str
    run_id: str
    number: int
    text: str = ""
    thinking: str = ""
    restart: bool = False


class ToolPhase(_Event, tag="tool", frozen=True):
    """A tool was called, or has answered; what was passed to it and back is in the transcript."""

    session_key: str
    run_id: str
    call_id: str
    name: str
    phase: str
    is_error: bool = False


class Delivered(_Event, tag="delivered", frozen=True):
    """Words were posted in a session's chat; they stand in the transcript as an entry of that run."""

    session_key: str
    key: str
    run_id: str | None
    kind: str
    text: str


class StopRequested(_Event, tag="stop", frozen=True):
    """Somebody committed a request to stop this run."""

    run_id: str


class SessionChanged(_Event, tag="session", frozen=True):
    """Something about a session other than its entries.

    A feed says with `renewed` which conversation goes on, and after which of its numbers.
    """

    session_key: str
    reason: str
    session_id: str | None = None
    seq: int = 0


class Gap(_Event, tag="gap", frozen=True):
    """Events were dropped here: read the rows again."""


Event: TypeAlias = (
    MessageAppended | RunChanged | Delta | ToolPhase | Delivered | StopRequested | SessionChanged | Gap
)


class Listener(Protocol):
    async def get(self, timeout: float | None = None) -> Event | None:
        """The next event, or None when there was none for `timeout` seconds."""
        ...


class EventBus(Protocol):
    def has_listeners(self, topic: str) -> bool:
        """Whether anybody may be listening; a publisher may skip building an event nobody wants."""
        ...

    def publish(self, topic: str, event: Event) -> None:
        """Never blocks, never raises."""
        ...

    def listen(self, topic: str) -> AbstractAsyncContextManager[Listener]:
        """Listening begins when the context is entered. A topic may end in `.*`."""
        ...
