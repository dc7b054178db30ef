"""Live events: hints about durable rows, delivered at most once.

A topic is a word, or a word and an id (`sessions`, `session.7`, `run.<id>`); `session.*` covers every session.
A consumer that needs certainty subscribes first, then reads the rows, then follows the events. A listener that
falls behind receives a `Gap` and must read the rows again. Events are plain data that any transport can encode.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

import msgspec

EVERY_SESSION_TOPIC = "session.*"  # the topics of all sessions
COMMANDS_TOPIC = "commands"  # `CommandStopRequested`, for the hosts of commands
SESSION_CHANGES_TOPIC = "sessions"  # `SessionChanged`: a session was created, changed or removed


def session_topic(session: int) -> str:
    return f"session.{session}"


def run_topic(run_id: str) -> str:
    """The topic that carries only the end of this run."""
    return f"run.{run_id}"


def approval_topic(approval_id: str) -> str:
    """The topic that carries only the decision about this approval."""
    return f"approval.{approval_id}"


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
    """True for entries that are not part of the visible conversation."""


class RunUsage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Tokens and US dollars of a run; an unknown cost is null."""

    input: int
    output: int
    cost: float | None


class RunChanged(_Event, tag="run", frozen=True):
    """A run was accepted, started or ended; published after the commit.

    The event for a run that executed to its end carries all of its outcome; for any other end, read the row.
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
    """The run's output is for other sessions, not for clients watching this session's chat."""
    needs_sanitizing: bool = msgspec.field(default=False, name="gated")
    """The watching clients did not ask for this run, so its output is sanitized before they receive it."""
    yielded: bool = False
    """The turn ended to wait for others; a later run has the answer."""


class Delta(_Event, tag="delta", frozen=True):
    """Text streamed by a step since its last delta; `restart` discards what the step has streamed so far.

    A gateway's clients get thinking in deltas of its own, which have no number.
    """

    session_key: str
    run_id: str
    number: int
    text: str = ""
    thinking: str = ""
    restart: bool = False


class ToolPhase(_Event, tag="tool", frozen=True):
    """A tool was called (`start`), has returned (`result`), or shows its output so far (`update`).

    Arguments and result are in the transcript.
    """

    session_key: str
    run_id: str
    call_id: str
    name: str
    phase: str
    is_error: bool = False
    output: str = ""
    """The end of the output so far."""
    output_bytes: int = 0


class Delivered(_Event, tag="delivered", frozen=True):
    """A text was posted in a session's chat; the transcript has it as an entry of that run."""

    session_key: str
    key: str
    run_id: str | None
    kind: str
    text: str


class ApprovalChanged(_Event, tag="approval", frozen=True):
    """A tool call waits for a person's approval, or does not wait any more."""

    approval_id: str
    session_key: str
    run_id: str
    agent_id: str
    tool: str
    question: str
    """The call as people are shown it."""
    can_allow_always: bool
    state: str
    """`pending`, `allowed`, `denied` or `expired`."""
    created_at: int
    expires_at: int
    always: bool = False
    decided_by: str | None = None
    decided_at: int | None = None


class StopRequested(_Event, tag="stop", frozen=True):
    """A request to stop this run was committed."""

    run_id: str


class CommandStopRequested(_Event, tag="commandStop", frozen=True):
    """A request to end the processes of this command was committed."""

    key: str
    host: str


class SessionChanged(_Event, tag="session", frozen=True):
    """A session changed in something other than its entries.

    In a feed, `renewed` names the conversation that continues and the sequence number it continues after. To followers
    of all sessions, `delete` and `retention` name the conversation that the session had.
    """

    session_key: str
    reason: str
    session_id: str | None = None
    seq: int = 0


class Gap(_Event, tag="gap", frozen=True):
    """Events were dropped here; read the rows again."""


Event: TypeAlias = (
    MessageAppended
    | RunChanged
    | Delta
    | ToolPhase
    | Delivered
    | ApprovalChanged
    | StopRequested
    | CommandStopRequested
    | SessionChanged
    | Gap
)


class Listener(Protocol):
    async def get(self, timeout: float | None = None) -> Event | None:
        """Returns the next event, or None if none arrived within `timeout` seconds."""
        ...


class EventBus(Protocol):
    def has_listeners(self, topic: str) -> bool:
        """Whether anything may be listening; if not, a publisher can skip building the event."""
        ...

    def publish(self, topic: str, event: Event) -> None:
        """Publishes an event; never blocks and never raises."""
        ...

    def listen(self, topic: str) -> AbstractAsyncContextManager[Listener]:
        """Listens from the moment the context is entered. A topic may end in `.*`."""
        ...
