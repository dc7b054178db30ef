"""The tool `session_status`: how one session is right now.

It only looks. Setting a model would make it a tool that acts, which is offered to fewer callers: that is a matter
for `sessions.patch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from antiphon.engine.toolbox import Call, Tool
from antiphon.operations import Operations
from antiphon.tools.adapter import adapted
from antiphon.tools.arguments import Arguments
from antiphon.tools.rows import row
from antiphon.views import RunView, SessionView, StatusView, UsageLine

DESCRIPTION = (
    "Show how a session is right now: its state, model, what runs or waits in it, its tokens and cost. "
    "Without sessionKey it is the session you are in."
)


class StatusArguments(Arguments, frozen=True):
    session_key: (
        Annotated[str, Meta(description="A key or sessionId from sessions_list; left out, this session.")]
        | None
    ) = None


def session_status(operations: Operations) -> Tool:
    async def answer(call: Call, given: StatusArguments) -> dict[str, Any]:
        here = "main" if call.caller.is_operator else "current"
        status = await operations.status(
            call.caller, here if given.session_key is None else given.session_key
        )
        return {
            "ok": True,
            "sessionKey": status.session.key,
            "session": row(call.caller, status.session),
            "runs": [_run(run) for run in status.runs],
            "usage": status.usage,
            "statusText": card(status),
        }

    return adapted("session_status", DESCRIPTION, StatusArguments, answer)


def _run(run: RunView) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(run)
    return {name: value for name, value in told.items() if name != "sessionKey"}  # it is said once, above


def card(status: StatusView) -> str:
    """A few lines for people. Names are put on one line each, so that none can pass for another line."""
    session = status.session
    lines = [
        ("Session", _title(session)),
        ("State", _state(status.runs)),
        ("Model", _joined(session.model, session.thinking_level and f"thinking {session.thinking_level}")),
        ("Tokens", _tokens(session, status.usage)),
        ("Cost", _cost(status.usage)),
        ("Active", _time(session.last_activity_at)),
    ]
    return "\n".join(f"{name}: {_one_line(said)}" for name, said in lines if said)


def _title(session: SessionView) -> str:
    agent = session.agent_id and f"agent {session.agent_id}"
    return _joined(session.key, session.label or session.display_name, agent, session.archived and "archived")


def _state(runs: Sequence[RunView]) -> str:
    active = next((run for run in runs if run.state == "running"), None)
    waiting = sum(run.state == "queued" for run in runs)
    seconds = (active.running_ms or 0) / 1000 if active else 0
    return _joined(f"running for {seconds:.0f} s" if active else "idle", waiting and f"{waiting} waiting")


def _tokens(session: SessionView, usage: Sequence[UsageLine]) -> str:
    spent = f"{sum(line.input for line in usage)} in, {sum(line.output for line in usage)} out"
    return _joined(spent, session.used_tokens and f"{session.used_tokens} in the last prompt")


def _cost(usage: Sequence[UsageLine]) -> str:
    """Nothing is said unless every price is known: a part of a sum looks like the sum."""
    costs = [line.cost for line in usage if line.cost is not None]
    return f"${sum(costs):.4f}" if usage and len(costs) == len(usage) else ""


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _joined(*parts: object) -> str:
    return " · ".join(str(part) for part in parts if part)


def _one_line(text: str) -> str:
    return " ".join(text.split())
