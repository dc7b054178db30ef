"""Invokes one tool and turns whatever happens into a result that the model can read.

Tools are foreign code: they may fail, ignore being cancelled, or try to end the process. `RunLoop` decides which calls
are made, and commits their results.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import TypeVar

import msgspec

from antiphon.access import Caller
from antiphon.engine.runs.effects import RunIdentity
from antiphon.engine.runs.lifecycle import retry_while_store_full
from antiphon.engine.toolbox import OutputListener, Tool, ToolOutput, ToolRequest
from antiphon.errors import AntiphonError, Fenced, StoreError, ToolFailed
from antiphon.messages import TextBlock, ToolCall, ToolResult
from antiphon.runtimes.function import PROCESS_ENDING_ERRORS
from antiphon.runtimes.model import INVALID_ARGUMENTS_KEY
from antiphon.runtimes.text import repair_surrogates
from antiphon.runtimes.tool_calls import MAX_ARGUMENT_LEVELS
from antiphon.tracing import start_span

log = logging.getLogger(__name__)
T = TypeVar("T")

TOOL_CANCEL_GRACE_SECONDS = 1.0


def find_call_error(call: ToolCall, tools: Mapping[str, Tool]) -> ToolOutput | None:
    """Return why a call cannot be made, or None if it can."""
    if call.name not in tools:
        known = ", ".join(tools) or "none"
        return ToolOutput(text=f"There is no tool {call.name!r}. The tools are: {known}.", is_error=True)
    if call.native and INVALID_ARGUMENTS_KEY in call.native:
        return ToolOutput(
            text=f"The arguments of {call.name!r} were not a JSON object, or were nested deeper than "
            f"{MAX_ARGUMENT_LEVELS} levels. Call it again.",
            is_error=True,
        )
    return None


def build_request(
    call: ToolCall,
    tools: Mapping[str, Tool],
    caller: Caller,
    run: RunIdentity,
    output_listener: OutputListener | None = None,
) -> ToolRequest:
    return ToolRequest(
        caller=caller,
        run_id=run.run_id,
        call_id=call.id,
        arguments=call.arguments,
        tool_names=tools.keys(),
        output_listener=output_listener,
    )


async def invoke_tool(
    call: ToolCall,
    tools: Mapping[str, Tool],
    caller: Caller,
    run: RunIdentity,
    output_listener: OutputListener | None = None,
) -> ToolOutput:
    """Execute a call. Errors become outputs, except those that keep the run from going on."""
    if error := find_call_error(call, tools):
        return error
    return await contain_tool_errors(
        call, run, _invoke(tools[call.name], build_request(call, tools, caller, run, output_listener))
    )


async def _invoke(tool: Tool, request: ToolRequest) -> ToolOutput:
    with start_span("tool", run_id=request.run_id, tool=tool.spec.name, call_id=request.call_id):
        if tool.after_crash == "report":
            return await run_with_cancel_grace(tool.invoke(request))
        return await retry_while_store_full(lambda: run_with_cancel_grace(tool.invoke(request)))


async def contain_tool_errors(call: ToolCall, run: RunIdentity, work: Awaitable[T]) -> T | ToolOutput:
    """Await work of a tool. Errors become outputs, except those that keep the run from going on."""
    try:
        return await work
    except (Fenced, StoreError):
        raise
    except AntiphonError as error:
        return ToolOutput(text=str(error), is_error=True, details={"code": error.code, **error.data})
    except Exception as error:
        fields = {"run_id": run.run_id, "session_key": run.session_key}
        log.exception("Tool %r failed in run %r", call.name, run.run_id, extra=fields)
        return ToolOutput(
            text=f"The tool {call.name!r} failed: {type(error).__name__}: {error}", is_error=True
        )


def build_tool_result(call: ToolCall, output: ToolOutput, max_chars: int, now: int) -> ToolResult:
    """Build the transcript entry of a result, with its text and its structured data bounded."""
    text = repair_surrogates(output.text)
    if len(text) > max_chars:
        text = f"{text[:max_chars]}\n[{len(text) - max_chars} of {len(text)} characters left out]"
    return ToolResult(
        tool_call_id=call.id,
        tool_name=call.name,
        content=[TextBlock(text=text), *output.images],
        is_error=output.is_error,
        details=output.details if _is_storable(output.details, max_chars) else None,
        timestamp=now,
    )


def _is_storable(details: object, max_bytes: int) -> bool:
    """Whether a tool's structured result can be stored; the model reads its text instead."""
    try:
        return len(msgspec.json.encode(details)) <= max_bytes
    except (TypeError, ValueError):
        return False


async def run_with_cancel_grace(work: Awaitable[T]) -> T:
    """Await foreign code; when cancelled, give it `TOOL_CANCEL_GRACE_SECONDS` to finish, then abandon it.

    A tool that ignores cancellation must not block its session's lane.
    """
    task = asyncio.ensure_future(_contain_process_exit(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        _, running = await asyncio.wait([task], timeout=TOOL_CANCEL_GRACE_SECONDS)
        if running:
            log.warning("A tool ignored its cancellation and was abandoned")
        raise


async def _contain_process_exit(work: Awaitable[T]) -> T:
    """Turn an attempt to end the process into a tool failure."""
    try:
        return await work
    except PROCESS_ENDING_ERRORS as error:
        raise ToolFailed(f"The tool tried to end the process ({error!r}).", "Fix the tool.") from error
