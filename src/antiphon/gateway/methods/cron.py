"""Scheduled jobs over the wire; what they are is in `schedules`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from antiphon.access import ADMIN, READ
from antiphon.errors import InvalidInput
from antiphon.gateway.frames import IdempotencyKey, Params
from antiphon.gateway.methods.registry import Call, Nothing, method
from antiphon.schedules import FiredView, JobPatch, JobSpec, JobView, StatusView, read_as


class List(Params, frozen=True):
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


@method("cron.list", READ, List)
async def list_(call: Call, params: List) -> dict[str, Any]:
    everything = params.include_disabled or params.enabled != "enabled"
    jobs = await call.gateway.house.schedules.list(call.caller, include_disabled=everything)
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


@method("cron.status", READ)
async def status(call: Call, params: Nothing) -> StatusView:
    return await call.gateway.house.schedules.status(call.caller)


class Add(Params, frozen=True):
    """The job itself is read by `schedules`; only what this wire adds to it is named here."""

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


@method("cron.add", ADMIN, Add)
async def add(call: Call, params: Add) -> JobView:
    raw = _given(params)
    return await call.gateway.house.schedules.add(
        call.caller, read_as(JobSpec, raw), key=params.idempotency_key
    )


def _given(params: Params) -> dict[str, Any]:
    """As plain data again, without what only this wire knows."""
    raw: dict[str, Any] = msgspec.to_builtins(params)
    unknown = {"wakeMode", "description", "idempotencyKey", "id", "jobId"}
    return _silent({name: value for name, value in raw.items() if name not in unknown and value is not None})


def _silent(raw: dict[str, Any]) -> dict[str, Any]:
    """Clients say where nothing is to be delivered to; it is enough to know that nothing is."""
    delivery = raw.get("delivery")
    if isinstance(delivery, dict) and cast("dict[str, Any]", delivery).get("mode") == "none":
        return {**raw, "delivery": {"mode": "none"}}
    return raw


class Named(Params, frozen=True):
    id: str | None = None
    job_id: str | None = None

    @property
    def job(self) -> str:
        if bool(self.id) == bool(self.job_id):
            raise InvalidInput("Either id or jobId is required.", "Pass one.", field="id")
        return self.id or self.job_id or ""


class Update(Named, frozen=True):
    patch: dict[str, Any] = {}


@method("cron.update", ADMIN, Update)
async def update(call: Call, params: Update) -> JobView:
    known = {name: value for name, value in params.patch.items() if name not in ("wakeMode", "description")}
    return await call.gateway.house.schedules.update(
        call.caller, params.job, read_as(JobPatch, _silent(known))
    )


@method("cron.remove", ADMIN, Named)
async def remove(call: Call, params: Named) -> dict[str, Any]:
    return {"ok": True, "removed": await call.gateway.house.schedules.remove(call.caller, params.job)}


class Run(Named, frozen=True):
    mode: Literal["due", "force"] = "force"
    idempotency_key: IdempotencyKey | None = None


@method("cron.run", ADMIN, Run)
async def run(call: Call, params: Run) -> dict[str, Any]:
    fired: FiredView = await call.gateway.house.schedules.run(
        call.caller, params.job, params.mode, key=params.idempotency_key
    )
    return {"ok": True, **msgspec.to_builtins(fired)}


class Runs(Named, frozen=True):
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


@method("cron.runs", READ, Runs)
async def runs(call: Call, params: Runs) -> dict[str, Any]:
    return {"entries": await call.gateway.house.schedules.runs(call.caller, params.job, params.limit)}
