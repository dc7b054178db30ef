"""Texts of the command tools: the state, the output and the end of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from antiphon.clock import Clock
from antiphon.engine.runs.command_rows import LIVE_STATES, CommandEnd
from antiphon.engine.toolbox import ToolOutput
from antiphon.store import Row
from antiphon.workspace.command_output import cut_middle

if TYPE_CHECKING:
    from antiphon.config import Config

MAX_NOTICE_CHARACTERS = 4000
MAX_NAMED_COMMAND_CHARACTERS = 200


def render_command(row: Row, now: int, *, output: str | None = None, note: str = "") -> ToolOutput:
    """Render a command with its output; by default, with what is shown of it after its end."""
    shown = output if output is not None else (row["output"] or "")
    parts = [describe_state(row, now)]
    if note:
        parts.append(note)
    if shown.strip() or row["state"] == "ended":
        parts.append(shown if shown.strip() else "(no output)")
    if row["output_file"]:
        parts.append(f"[All {row['output_bytes']} bytes of output are in {row['output_file']!r}; use read.]")
    return ToolOutput(
        text="\n\n".join(parts),
        details=build_details(row, now),
        is_error=row["state"] in ("failed", "lost") or bool(row["timed_out"]),
    )


def build_details(row: Row, now: int) -> dict[str, Any]:
    details: dict[str, Any] = {
        "status": _name_status(row),
        "sessionId": row["id"],
        "command": row["command"],
        "cwd": row["workdir"],
        "startedAt": row["created_at"],
        "durationMs": (row["ended_at"] or now) - row["created_at"],
    }
    optional = {
        "exitCode": row["exit_code"],
        "signal": row["signal"],
        "outputBytes": row["output_bytes"] or None,
        "outputFile": row["output_file"],
        "error": row["error"],
    }
    return details | {name: value for name, value in optional.items() if value is not None}


def _name_status(row: Row) -> str:
    if row["state"] in LIVE_STATES:
        return "running"
    if row["state"] != "ended":
        return "interrupted" if row["state"] == "lost" else "failed"
    if row["stop_reason"] is not None:
        return "killed"
    return "timeout" if row["timed_out"] else "completed"


def describe_state(row: Row, now: int) -> str:
    """Describe the state of a command in one or two sentences."""
    seconds = f"{max(0, (row['ended_at'] or now) - row['created_at']) / 1000:.3g} s"
    code = row["exit_code"]
    texts = {
        "running": f"Running for {seconds} as sessionId {row['id']!r}.",
        "failed": f"Not started: {row['error']}",
        "interrupted": (
            "Interrupted: the machine or the process that runs commands stopped while the command was running. It may "
            "have had effects; check before repeating it. Its last output:"
        ),
        "killed": f"Stopped after {seconds} ({row['stop_reason']}).",
        "timeout": f"Stopped after {seconds}: its timeout of {row['timeout_seconds']} s was over.",
        "completed": f"Exit code {code} after {seconds}."
        if code is not None
        else f"Ended by signal {row['signal']} after {seconds}.",
    }
    return texts[_name_status(row)]


class CommandNotices:
    """Builds the notices that a session reads when its background commands end."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock

    def __call__(self, row: Row, end: CommandEnd) -> str | None:
        """Return the notice about an end; None if the settings of the agent keep it quiet."""
        if row["agent_id"] in self._config.agent_ids:
            settings = self._config.get_agent(row["agent_id"]).exec
            is_plain = end.state == "ended" and end.exit_code == 0 and not end.output.strip()
            if not settings.notify_on_exit or (is_plain and not settings.notify_on_exit_empty_success):
                return None
        return _build_notice(row, end, self._clock.now())


def _build_notice(row: Row, end: CommandEnd, now: int) -> str:
    ended = _EndedRow(row, end, now)
    command = row["command"][:MAX_NAMED_COMMAND_CHARACTERS]
    shown = cut_middle(end.output, MAX_NOTICE_CHARACTERS).text
    parts = [
        f"The background command {row['id']!r} has ended. {describe_state(ended, now)}",
        f"Command: {command}",
        shown.strip() or "(no output)",
    ]
    if len(shown) < len(end.output) or end.output_file:
        where = (
            f"read {end.output_file!r}" if end.output_file else f"process log with sessionId {row['id']!r}"
        )
        parts.append(f"[For all output: {where}.]")
    return "\n\n".join(parts)


class _EndedRow:
    """A row with the end that is being recorded."""

    def __init__(self, row: Row, end: CommandEnd, now: int) -> None:
        self._row = row
        self._end: dict[str, Any] = {
            "state": end.state,
            "exit_code": end.exit_code,
            "signal": end.signal,
            "error": end.error,
            "timed_out": int(end.timed_out),
            "ended_at": now,
        }

    def __getitem__(self, column: str, /) -> Any:
        return self._end[column] if column in self._end else self._row[column]

    def __iter__(self) -> Any:
        return iter(self._row)
