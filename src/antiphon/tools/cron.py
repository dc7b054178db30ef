"""The tool `cron`: an agent's own scheduled jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from antiphon.engine.toolbox import Tool, ToolRequest
from antiphon.errors import InvalidInput
from antiphon.operations.jobs import JobPatch, JobSpec, parse_job_input
from antiphon.operations.operations import Operations
from antiphon.tools._adapter import ToolArguments, build_tool

MAX_LISTED_JOBS, MAX_LISTED_RUNS = 50, 20
DISABLED_REASON = "'cron.enabled' is false."
TOOL_DESCRIPTION = (
    "Manage your scheduled jobs: reminders and repeated work. 'add' takes 'job', for example {\"name\": \"tea\", "
    '"schedule": {"kind": "at", "at": "2030-01-01T09:00:00Z"} or {"kind": "every", "everyMs": '
    '3600000} or {"kind": "cron", "expr": "0 9 * * 1", "tz": "Europe/Lisbon"}, "payload": {"kind": '
    '"agentTurn", "message": "…"}, "delivery": {"mode": "announce"}}. It runs in a session of its own, with '
    '"announce" its answer is posted to your main chat. To run in the main chat: "sessionTarget": "main", '
    '"payload": {"kind": "systemEvent", "text": "…"}.'
)


class CronArguments(ToolArguments, frozen=True):
    action: Annotated[
        Literal["list", "add", "update", "remove", "run", "runs"], Meta(description="What to do.")
    ] = "list"
    job: Annotated[dict[str, Any], Meta(description="For add: the job.")] | None = None
    job_id: (
        Annotated[str, Meta(description="For update, remove, run and runs: which job, as list shows it.")]
        | None
    ) = None
    patch: Annotated[dict[str, Any], Meta(description="For update: the fields to change.")] | None = None
    include_disabled: Annotated[bool, Meta(description="For list: disabled jobs, too.")] = False


def cron(operations: Operations, *, is_enabled: bool) -> Tool:
    async def run(call: ToolRequest, arguments: CronArguments) -> Any:
        jobs = operations.jobs
        match arguments.action:
            case "list":
                found = await jobs.list(call.caller, include_disabled=arguments.include_disabled)
                return {"total": len(found), "jobs": found[:MAX_LISTED_JOBS]}
            case "add":
                if arguments.job is None:
                    raise InvalidInput("'job' is missing.", "Describe the job in it.", field="job")
                return await jobs.add(call.caller, parse_job_input(JobSpec, arguments.job), key=call.key)
            case "update":
                patch = parse_job_input(JobPatch, arguments.patch or {})
                return await jobs.update(call.caller, _require_job_id(arguments), patch)
            case "remove":
                return {"removed": await jobs.remove(call.caller, _require_job_id(arguments))}
            case "run":
                return await jobs.run(call.caller, _require_job_id(arguments), key=call.key)
            case "runs":
                return {
                    "runs": await jobs.list_runs(call.caller, _require_job_id(arguments), MAX_LISTED_RUNS)
                }

    return build_tool(
        "cron",
        TOOL_DESCRIPTION,
        CronArguments,
        run,
        aliases={"id": "jobId", "job_id": "jobId"},
        has_side_effects=True,
        unavailable=None if is_enabled else lambda _agent_id, _is_sandboxed: DISABLED_REASON,
    )


def _require_job_id(arguments: CronArguments) -> str:
    if arguments.job_id is None:
        raise InvalidInput("'jobId' is missing.", "Use an id that the action 'list' shows.", field="jobId")
    return arguments.job_id
