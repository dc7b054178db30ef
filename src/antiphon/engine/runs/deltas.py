"""Streams the partial output of a step, in batches at least `DELTA_INTERVAL_SECONDS` apart.

A model may stream a hundred pieces a second to a thousand listeners; people read far more slowly. The text since the
last commit is kept, because a stopped run keeps its partial answer.
"""

from __future__ import annotations

import asyncio

from antiphon.bus import Delta, EventBus
from antiphon.engine.outbox import sanitize
from antiphon.runtimes.text import SurrogateRepairer

DELTA_INTERVAL_SECONDS = 0.05


class DeltaStream:
    """The deltas of one run, numbered consecutively so that a listener can detect gaps."""

    def __init__(
        self, bus: EventBus, topic: str, session_key: str, run_id: str, *, quiet: bool, sanitized: bool
    ) -> None:
        self._quiet = quiet
        self._sanitizer = sanitize.SanitizingStream() if sanitized else None
        self._bus = bus
        self._topic = topic
        self._session_key = session_key
        self._run_id = run_id
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._next_flush_at = 0.0
        self._number = 0
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._uncommitted_pieces: list[str] = []
        self._text_repairer, self._thinking_repairer = SurrogateRepairer(), SurrogateRepairer()

    @property
    def uncommitted_text(self) -> str:
        """The text of the step that is not committed yet."""
        return "".join(self._uncommitted_pieces)

    def text(self, piece: str) -> None:
        if complete := self._text_repairer.feed(piece):
            self._uncommitted_pieces.append(complete)
            self._text.append(complete)
            self._schedule_flush()

    def thinking(self, piece: str) -> None:
        if complete := self._thinking_repairer.feed(piece):
            self._thinking.append(complete)
            self._schedule_flush()

    def restart(self) -> None:
        self._reset_step()
        self._text.clear()
        self._thinking.clear()
        if self._sanitizer:
            self._sanitizer.finish()  # discards the text it held back
        self._publish_delta(restart=True)

    def finish_step(self) -> None:
        """Send what is left of a committed step and begin the next one."""
        self.flush()
        if self._sanitizer and (held := self._sanitizer.finish()):
            self._publish_delta(held)
        self._reset_step()

    def _reset_step(self) -> None:
        """Clear the state of the current step, for the next step or a retry."""
        self._uncommitted_pieces.clear()
        self._text_repairer.reset()
        self._thinking_repairer.reset()

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._text or self._thinking:
            text = "".join(self._text)
            self._publish_delta(self._sanitizer.feed(text) if self._sanitizer else text)

    def _schedule_flush(self) -> None:
        if self._timer is None:
            now = self._loop.time()
            if now >= self._next_flush_at:
                self.flush()
            else:
                self._timer = self._loop.call_at(self._next_flush_at, self.flush)

    def _publish_delta(self, text: str = "", *, restart: bool = False) -> None:
        self._next_flush_at = self._loop.time() + DELTA_INTERVAL_SECONDS
        has_content = bool(text or self._thinking or restart)  # the sanitizer may hold back all of it
        self._number += (
            has_content  # also if it is not published: who listens later knows that it missed something
        )
        if has_content and not self._quiet and self._bus.has_listeners(self._topic):
            event = Delta(
                session_key=self._session_key,
                run_id=self._run_id,
                number=self._number,
                text=text,
                thinking="".join(self._thinking),
                restart=restart,
            )
            self._bus.publish(self._topic, event)
        self._text.clear()
        self._thinking.clear()
