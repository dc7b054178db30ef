"""The tool `session_status`: the current state of one session.

It is read-only. Setting a model here would make it an acting tool, which fewer callers get; use `sessions.patch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.operations.operations import Operations
from antiphon.operations.types import RunView, SessionStatusView, SessionView, UsageLine
from antiphon.tools._adapter import ToolArguments, build_tool
from antiphon.tools._session_row import build_tool_session_row

TOOL_DESCRIPTION = (
    "Show the current status of a session: its state, model, active and queued runs, tokens and cost. "
    "Default: the session you are in."
)


class StatusArguments(ToolArguments, frozen=True):
    session_key: (
        Annotated[str, Meta(description="A key or sessionId from sessions_list. Default: this session.")]
        | None
    ) = None


def session_status(operations: Operations) -> Tool:
    async def run(call: ToolRequest, arguments: StatusArguments) -> dict[str, Any]:
        here = "main" if call.caller.is_operator else "current"
        status = await operations.sessions.get_status(
            call.caller, here if arguments.session_key is None else arguments.session_key
        )
        return {
            "ok": True,
            "sessionKey": status.session.key,
            "session": build_tool_session_row(call.caller, status.session),
            "runs": [_describe_run(run) for run in status.runs],
            "usage": status.usage,
            "statusText": format_status_card(status),
        }

    return build_tool("session_status", TOOL_DESCRIPTION, StatusArguments, run)


def _describe_run(run: RunView) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(run)
    return {
        name: value for name, value in fields.items() if name != "sessionKey"
    }  # already present at the top level


def format_status_card(status: SessionStatusView) -> str:
    """Format the status in a few lines. Names are reduced to one line, so that none can imitate another line."""
    session = status.session
    lines = [
        ("Session", _format_title(session)),
        ("State", _format_state(status.runs)),
        (
            "Model",
            _join_parts(session.model, session.thinking_level and f"thinking {session.thinking_level}"),
        ),
        ("Tokens", _format_tokens(session, status.usage)),
        ("Cost", _format_cost(status.usage)),
        ("Active", _format_time(session.last_activity_at)),
    ]
    return "\n".join(f"{name}: {_collapse_lines(value)}" for name, value in lines if value)


def _format_title(session: SessionView) -> str:
    agent = session.agent_id and f"agent {session.agent_id}"
    return _join_parts(
        session.key,
        session.label or session.display_name,
        agent,
        session.archived and "archived",
        session.sandboxed and "sandboxed",
    )


def _format_state(runs: Sequence[RunView]) -> str:
    active = next((run for run in runs if run.state == "running"), None)
    waiting = sum(run.state == "queued" for run in runs)
    seconds = (active.running_ms or 0) / 1000 if active else 0
    return _join_parts(f"running for {seconds:.0f} s" if active else "idle", waiting and f"{waiting} waiting")


def _format_tokens(session: SessionView, usage: Sequence[UsageLine]) -> str:
    spent = f"{sum(line.input for line in usage)} in, {sum(line.output for line in usage)} out"
    return _join_parts(spent, session.used_tokens and f"{session.used_tokens} in the last prompt")


def _format_cost(usage: Sequence[UsageLine]) -> str:
    """Format the cost; empty unless every price is known, since a partial sum would look like the total."""
    costs = [line.cost for line in usage if line.cost is not None]
    return f"${sum(costs):.4f}" if usage and len(costs) == len(usage) else ""


def _format_time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _join_parts(*parts: object) -> str:
    return " · ".join(str(part) for part in parts if part)


def _collapse_lines(text: str) -> str:
    return " ".join(text.split())
