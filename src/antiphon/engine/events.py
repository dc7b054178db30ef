"""Publishes what was committed: entries, phases of runs and tool calls, ended runs.

Nothing is published before its commit. Events are hints: the store has the truth, and after a lost event a listener
reads again. Most events are built only if their topic has listeners.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.bus import (
    SESSION_CHANGES_TOPIC,
    EventBus,
    Gap,
    MessageAppended,
    RunChanged,
    RunUsage,
    SessionChanged,
    ToolPhase,
    run_topic,
    session_topic,
)
from antiphon.engine.runs.effects import EndedRun, RunIdentity
from antiphon.engine.runs.run_queue import ANNOUNCE_ORIGIN, NOTE_ORIGIN, QUIET_ORIGINS, SANITIZED_ORIGINS
from antiphon.engine.sessions.retention import RemovedSession
from antiphon.engine.sessions.transcripts import Entry
from antiphon.messages import ToolCall, ToolResult


class EventPublisher:
    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    def publish_phase(self, session: int, session_key: str, run_id: str, state: str) -> None:
        """Publish that a run was queued or has started."""
        topic = session_topic(session)
        if self._bus.has_listeners(topic):
            self._bus.publish(topic, RunChanged(session_key=session_key, run_id=run_id, state=state))

    def publish_entries(self, run: RunIdentity, entries: Sequence[Entry]) -> None:
        """Publish entries that a run added to its session's transcript."""
        if entries and self._bus.has_listeners(SESSION_CHANGES_TOPIC):
            self._bus.publish(
                SESSION_CHANGES_TOPIC, SessionChanged(session_key=run.session_key, reason="message")
            )
        topic = session_topic(run.session)
        if self._bus.has_listeners(topic):
            for entry in entries:
                event = MessageAppended(
                    session_key=run.session_key,
                    session_id=run.session_id,
                    seq=entry.seq,
                    entry=entry.id,
                    body=entry.body,
                    run_id=None if run.origin == NOTE_ORIGIN else run.run_id,
                    internal=run.origin == ANNOUNCE_ORIGIN or entry.is_internal,  # shown once it is posted
                )
                self._bus.publish(topic, event)

    def publish_tool_phase(self, run: RunIdentity, call: ToolCall, result: ToolResult | None) -> None:
        """Publish that a tool call starts, or its result."""
        topic = session_topic(run.session)
        if self._bus.has_listeners(topic):
            event = ToolPhase(
                session_key=run.session_key,
                run_id=run.run_id,
                call_id=call.id,
                name=call.name,
                phase="result" if result else "start",
                is_error=bool(result and result.is_error),
            )
            self._bus.publish(topic, event)

    def open_tool_output(self, run: RunIdentity, call: ToolCall) -> ToolOutputPublisher:
        return ToolOutputPublisher(self._bus, run, call)

    def publish_ended_run(self, ended: EndedRun) -> None:
        """Publish the last entries of a run and its end. A note has only its entry."""
        run = ended.run
        self.publish_entries(run, ended.entries)
        topics = (run_topic(run.run_id), session_topic(run.session))
        if run.origin != NOTE_ORIGIN and any(map(self._bus.has_listeners, topics)):
            event = _build_end_event(ended)
            for topic in topics:
                self._bus.publish(topic, event)

    def publish_removed_session(self, removed: RemovedSession) -> None:
        """Publish that retention removed a session."""
        event = SessionChanged(session_key=removed.key, reason="retention", session_id=removed.session_id)
        self._bus.publish(SESSION_CHANGES_TOPIC, event)

    def publish_gap(self) -> None:
        """Make all feeds read again, because a replica may have committed entries without publishing them."""
        self._bus.publish(session_topic(0), Gap())


class ToolOutputPublisher:
    """Publishes what a running tool call has printed so far."""

    def __init__(self, bus: EventBus, run: RunIdentity, call: ToolCall) -> None:
        self._bus = bus
        self._run = run
        self._call = call
        self._topic = session_topic(run.session)

    def is_listening(self) -> bool:
        return self._bus.has_listeners(self._topic)

    def show(self, text: str, total_bytes: int) -> None:
        event = ToolPhase(
            session_key=self._run.session_key,
            run_id=self._run.run_id,
            call_id=self._call.id,
            name=self._call.name,
            phase="update",
            output=text,
            output_bytes=total_bytes,
        )
        self._bus.publish(self._topic, event)


def _build_end_event(ended: EndedRun) -> RunChanged:
    run, ending, usage = ended.run, ended.ending, ended.usage
    return RunChanged(
        session_key=run.session_key,
        run_id=run.run_id,
        state=ending.state,
        reply=ending.reply,
        error_code=ending.error_code,
        error=ending.error,
        model=ending.model_answered,
        started_at=ended.started_at,
        ended_at=None if ended.started_at is None else ended.ended_at,
        usage=RunUsage(input=usage["input"], output=usage["output"], cost=usage["cost"]) if usage else None,
        quiet=run.origin in QUIET_ORIGINS,
        needs_sanitizing=run.origin in SANITIZED_ORIGINS,
        yielded=ending.yielded,
    )
