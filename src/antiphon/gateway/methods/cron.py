"""Methods for scheduled jobs; the jobs themselves are in `operations.jobs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from antiphon.access import ADMIN_SCOPE, READ_SCOPE
from antiphon.errors import InvalidInput
from antiphon.gateway.methods.registry import MethodCall, NoParams, rpc_method
from antiphon.gateway.ws.frames import IdempotencyKey, Params
from antiphon.operations.jobs import (
    JobFireResult,
    JobPatch,
    JobSpec,
    JobView,
    SchedulerStatusView,
    parse_job_input,
)


class CronListParams(Params, frozen=True):
    include_disabled: bool = False
    enabled: Literal["all", "enabled", "disabled"] = "enabled"
    limit: Annotated[int, Meta(ge=1, le=200)] = 200
    offset: Annotated[int, Meta(ge=0)] = 0
    query: str | None = None
    agent_id: str | None = None
    compact: bool = False
    sort_by: str | None = None
    sort_dir: str | None = None
    schedule_kind: str | None = None
    last_run_status: str | None = None
    trigger: str | None = None
    include_delivery_previews: bool = False
    session_key: str | None = None
    session_agent_id: str | None = None


@rpc_method("cron.list", READ_SCOPE, CronListParams)
async def list_jobs(call: MethodCall, params: CronListParams) -> dict[str, Any]:
    everything = params.include_disabled or params.enabled != "enabled"
    jobs = await call.gateway.app.operations.jobs.list(call.caller, include_disabled=everything)
    if params.enabled == "disabled":
        jobs = [job for job in jobs if not job.enabled]
    if params.agent_id:
        jobs = [job for job in jobs if job.agent_id == params.agent_id]
    if params.query:
        jobs = [job for job in jobs if params.query.lower() in job.name.lower()]
    page = jobs[params.offset : params.offset + params.limit]
    end = params.offset + len(page)
    return {
        "jobs": page,
        "total": len(jobs),
        "offset": params.offset,
        "limit": params.limit,
        "hasMore": end < len(jobs),
        "nextOffset": end if end < len(jobs) else None,
        "snapshotRevision": f"{len(jobs)}-{max((job.updated_at_ms for job in jobs), default=0)}",
    }


@rpc_method("cron.status", READ_SCOPE)
async def get_cron_status(call: MethodCall, params: NoParams) -> SchedulerStatusView:
    return await call.gateway.app.operations.jobs.get_status(call.caller)


class CronAddParams(Params, frozen=True):
    """The job itself is read by `operations.jobs`; only what this wire adds to it is named here."""

    name: str
    schedule: Any
    payload: Any
    session_target: str | None = None
    enabled: bool = True
    delivery: Any = msgspec.UNSET
    agent_id: str | None = None
    delete_after_run: bool = False
    wake_mode: Literal["now", "next-heartbeat"] = "now"
    description: str | None = None
    idempotency_key: IdempotencyKey | None = None


@rpc_method("cron.add", ADMIN_SCOPE, CronAddParams)
async def add_job(call: MethodCall, params: CronAddParams) -> JobView:
    raw = _to_job_data(params)
    return await call.gateway.app.operations.jobs.add(
        call.caller, parse_job_input(JobSpec, raw), key=params.idempotency_key
    )


def _to_job_data(params: Params) -> dict[str, Any]:
    """Return the parameters as plain data, without the fields that only this protocol has."""
    raw: dict[str, Any] = msgspec.to_builtins(params)
    unknown = {"wakeMode", "description", "idempotencyKey", "id", "jobId"}
    return _normalize_delivery(
        {name: value for name, value in raw.items() if name not in unknown and value is not None}
    )


def _normalize_delivery(raw: dict[str, Any]) -> dict[str, Any]:
    """Drop the delivery target that clients send along with mode `none`."""
    delivery = raw.get("delivery")
    if isinstance(delivery, dict) and cast("dict[str, Any]", delivery).get("mode") == "none":
        return {**raw, "delivery": {"mode": "none"}}
    return raw


class CronJobParams(Params, frozen=True):
    id: str | None = None
    job_id: str | None = None

    @property
    def job(self) -> str:
        if bool(self.id) == bool(self.job_id):
            raise InvalidInput("Either id or jobId is required.", "Pass one.", field="id")
        return self.id or self.job_id or ""


class CronUpdateParams(CronJobParams, frozen=True):
    patch: dict[str, Any] = {}


@rpc_method("cron.update", ADMIN_SCOPE, CronUpdateParams)
async def update_job(call: MethodCall, params: CronUpdateParams) -> JobView:
    known = {name: value for name, value in params.patch.items() if name not in ("wakeMode", "description")}
    return await call.gateway.app.operations.jobs.update(
        call.caller, params.job, parse_job_input(JobPatch, _normalize_delivery(known))
    )


@rpc_method("cron.remove", ADMIN_SCOPE, CronJobParams)
async def remove_job(call: MethodCall, params: CronJobParams) -> dict[str, Any]:
    return {"ok": True, "removed": await call.gateway.app.operations.jobs.remove(call.caller, params.job)}


class CronRunParams(CronJobParams, frozen=True):
    mode: Literal["due", "force"] = "force"
    idempotency_key: IdempotencyKey | None = None


@rpc_method("cron.run", ADMIN_SCOPE, CronRunParams)
async def run_job(call: MethodCall, params: CronRunParams) -> dict[str, Any]:
    fired: JobFireResult = await call.gateway.app.operations.jobs.run(
        call.caller, params.job, params.mode, key=params.idempotency_key
    )
    return {"ok": True, **msgspec.to_builtins(fired)}


class CronRunsParams(CronJobParams, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


@rpc_method("cron.runs", READ_SCOPE, CronRunsParams)
async def list_job_runs(call: MethodCall, params: CronRunsParams) -> dict[str, Any]:
    return {
        "entries": await call.gateway.app.operations.jobs.list_runs(call.caller, params.job, params.limit)
    }
