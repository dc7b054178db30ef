"""Detects a run that repeats a tool call with the same arguments and the same result.

Only the last `history_size` calls of one run count. Other calls in between do not matter, so that alternating calls are
recognized too; a different result restarts the count.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from antiphon.engine.toolbox import ToolOutput
from antiphon.messages import AssistantMessage, ImageBlock, Message, TextBlock, ToolCall, ToolResult

if TYPE_CHECKING:
    from antiphon.config.agents import LoopDetectionSettings

Verdict = Literal["run", "warn", "refuse", "end"]

_DURATION_PATTERN = re.compile(r"\b\d+(\.\d+)?(e[+-]?\d+)? ?m?s\b")
"""Matches a duration, which differs from call to call, as in the results of `exec`."""
_REPEAT_NOTE = "This is call {count} of {tool!r} with the same arguments and the same result."
_REPEAT_ADVICE = "Do something else, or answer with what you know."
_REFUSED_DETAILS = {"status": "error", "reason": "repeated"}


class CallRecord(NamedTuple):
    """A call that was made or refused. Both are digests."""

    call: bytes
    result: bytes


def count_repeats(history: Sequence[CallRecord], call: bytes) -> int:
    """Return how often in a row this call had the same result, up to the last time that it was made."""
    results = [record.result for record in reversed(history) if record.call == call]
    return next((n for n, result in enumerate(results) if result != results[0]), len(results))


def decide_repeat(count: int, settings: LoopDetectionSettings) -> Verdict:
    """Return what happens to the call that is number `count` in a row with the same result."""
    if count >= settings.global_circuit_breaker_threshold:
        return "end"
    if count >= settings.critical_threshold:
        return "refuse"
    return "warn" if count >= settings.warning_threshold else "run"


class RepeatedCalls:
    """The last calls of one run."""

    def __init__(self, settings: LoopDetectionSettings) -> None:
        self._settings = settings
        self._history: deque[CallRecord] = deque(maxlen=settings.history_size)
        self.ending: str | None = None
        """Why the run must end; None while it may continue."""

    def load(self, messages: Iterable[Message]) -> None:
        """Count the calls that an interrupted run has already made."""
        calls: dict[str, ToolCall] = {}
        for message in messages:
            if isinstance(message, AssistantMessage):
                calls |= {call.id: call for call in message.tool_calls}
            elif isinstance(message, ToolResult) and (call := calls.get(message.tool_call_id)):
                self._append(call, message)

    def find_refusal(self, call: ToolCall) -> ToolOutput | None:
        """Return the result of a refused call, or None if the call may be made."""
        count = count_repeats(self._history, _digest_call(call)) + 1
        verdict = decide_repeat(count, self._settings)
        if verdict not in ("refuse", "end"):
            return None
        made = _REPEAT_NOTE.format(count=count, tool=call.name)
        if verdict == "end":
            self.ending = (
                f"{made} Ask for something else, or change what it depends on"
                " ('tools.loopDetection' has the limits)."
            )
            return ToolOutput(
                text=f"{made} It was not made, and the run ends.", is_error=True, details=_REFUSED_DETAILS
            )
        return ToolOutput(
            text=f"{made} It was not made. {_REPEAT_ADVICE}", is_error=True, details=_REFUSED_DETAILS
        )

    def record(self, call: ToolCall, result: ToolResult) -> ToolResult:
        """Count a call. Returns its result, with a note to the model if it was repeated often."""
        self._append(call, result)
        count = count_repeats(self._history, _digest_call(call))
        if result.details == _REFUSED_DETAILS or decide_repeat(count, self._settings) == "run":
            return result
        note = TextBlock(text=f"\n\n[{_REPEAT_NOTE.format(count=count, tool=call.name)} {_REPEAT_ADVICE}]")
        return msgspec.structs.replace(result, content=[*result.content, note])

    def _append(self, call: ToolCall, result: ToolResult) -> None:
        digest = _digest_call(call)
        earlier = (record.result for record in reversed(self._history) if record.call == digest)
        # A refused call would have had the same result as before.
        last = next(earlier, None) if result.details == _REFUSED_DETAILS else None
        self._history.append(CallRecord(digest, last or _digest_result(result)))


def _digest_call(call: ToolCall) -> bytes:
    return _digest(msgspec.json.encode((call.name, call.arguments), order="deterministic"))


def _digest_result(result: ToolResult) -> bytes:
    """Return a digest of the first text, since a note may follow, and of all images."""
    text = next((block.text for block in result.content if isinstance(block, TextBlock)), "")
    parts = [_DURATION_PATTERN.sub("", text).encode("utf-8", "replace")]
    parts += [block.data.encode() for block in result.content if isinstance(block, ImageBlock)]
    return _digest(b"".join(map(_digest, parts)))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
