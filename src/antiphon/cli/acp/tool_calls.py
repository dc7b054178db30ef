"""Tracks the tool calls that an editor is shown: announced once, then updated, in whatever order events arrive."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from antiphon.bus import ToolPhase
from antiphon.cli.acp.updates import (
    describe_call,
    describe_phase,
    describe_result,
    get_call_id,
    get_tool_kind,
)

Json: TypeAlias = dict[str, Any]

MAX_REMEMBERED_CALLS = 1000
_ENDED_STATUSES = frozenset({"completed", "failed"})


class _ShownCall(msgspec.Struct):
    run_id: str | None
    name: str
    status: str = "pending"


class ShownToolCalls:
    def __init__(self) -> None:
        self._calls: OrderedDict[str, _ShownCall] = OrderedDict()
        self.announced = asyncio.Event()
        """Set when a call is announced, for those who wait for one."""

    def announce(self, block: Mapping[str, Any], run_id: str | None) -> Json:
        """Return the update for a call that a model makes."""
        call_id = get_call_id(run_id, block.get("id"))
        return self._update(call_id, run_id, str(block.get("name")), describe_call(block))

    def take_phase(self, event: ToolPhase) -> Json | None:
        """Return the update for a call that has started, goes on or has ended; None if that is known."""
        call_id = get_call_id(event.run_id, event.call_id)
        if self._has_ended(call_id):
            return None
        return self._update(call_id, event.run_id, event.name, describe_phase(event))

    def take_result(self, entry: Mapping[str, Any], run_id: str | None) -> Json:
        call_id = get_call_id(run_id, entry.get("toolCallId"))
        return self._update(call_id, run_id, str(entry.get("toolName")), describe_result(entry))

    def end_run(self, run_id: str) -> list[Json]:
        """Return the updates for the calls of an ended run that have no result."""
        return [
            self._update(call_id, run_id, call.name, {"status": "failed"})
            for call_id, call in list(self._calls.items())
            if call.run_id == run_id and call.status not in _ENDED_STATUSES
        ]

    def find_waiting(self, run_id: str, name: str) -> str | None:
        """Return the id of the first call of a tool in a run that has not ended."""
        for call_id, call in self._calls.items():
            if (call.run_id, call.name) == (run_id, name) and call.status not in _ENDED_STATUSES:
                return call_id
        return None

    def _has_ended(self, call_id: str) -> bool:
        call = self._calls.get(call_id)
        return call is not None and call.status in _ENDED_STATUSES

    def _update(self, call_id: str, run_id: str | None, name: str, fields: Json) -> Json:
        call = self._calls.get(call_id)
        is_new = call is None
        if call is None:
            call = self._calls[call_id] = _ShownCall(run_id, name)
            if len(self._calls) > MAX_REMEMBERED_CALLS:
                self._calls.popitem(last=False)
        call.status = fields.get("status", call.status)
        if is_new:
            self.announced.set()
            first = {"title": name, "kind": get_tool_kind(name), "status": call.status}
            return {"sessionUpdate": "tool_call", "toolCallId": call_id, **first, **fields}
        return {"sessionUpdate": "tool_call_update", "toolCallId": call_id, **fields}
