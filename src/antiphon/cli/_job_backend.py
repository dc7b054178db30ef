"""The backend of `antiphon cron`: the running gateway, or the store itself if none runs."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from antiphon.access import Caller
from antiphon.cli._backend import LocalBackend, make_gateway_client
from antiphon.cli._name_lookup import find_by_name
from antiphon.cli._options import Settings
from antiphon.cli._wait import wait_for_run_end
from antiphon.job_operations import JobFireResult, JobOperations, JobPatch, JobSpec, JobView, parse_job_input
from antiphon.views import RunView

if TYPE_CHECKING:
    from antiphon.client import Client
    from antiphon.config import Config
    from antiphon.engine.worker import Worker
    from antiphon.store import Store


class JobBackend(Protocol):
    async def list(self) -> Sequence[JobView]: ...
    async def add(self, job: dict[str, Any]) -> JobView: ...
    async def update(self, job_id: str, patch: dict[str, Any]) -> JobView: ...
    async def remove(self, job_id: str) -> bool: ...
    async def list_runs(self, job_id: str, limit: int) -> Sequence[RunView]: ...


class _GatewayJobBackend:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def list(self) -> Sequence[JobView]:
        jobs: list[JobView] = []
        offset: int | None = 0
        while offset is not None:
            page = await self._client.call("cron.list", {"includeDisabled": True, "offset": offset})
            jobs += msgspec.convert(page["jobs"], list[JobView])
            offset = page["nextOffset"]
        return jobs

    async def add(self, job: dict[str, Any]) -> JobView:
        return msgspec.convert(
            await self._client.call("cron.add", {**job, **_make_idempotency_params()}), JobView
        )

    async def update(self, job_id: str, patch: dict[str, Any]) -> JobView:
        done = await self._client.call("cron.update", {"id": job_id, "patch": patch})
        return msgspec.convert(done, JobView)

    async def remove(self, job_id: str) -> bool:
        return (await self._client.call("cron.remove", {"id": job_id}))["removed"]

    async def list_runs(self, job_id: str, limit: int) -> Sequence[RunView]:
        done = await self._client.call("cron.runs", {"id": job_id, "limit": limit})
        return msgspec.convert(done["entries"], list[RunView])


class _StoreJobBackend:
    def __init__(self, schedules: JobOperations) -> None:
        self._schedules = schedules
        self._caller = Caller.operator()

    async def list(self) -> Sequence[JobView]:
        return await self._schedules.list(self._caller, include_disabled=True)

    async def add(self, job: dict[str, Any]) -> JobView:
        return await self._schedules.add(self._caller, parse_job_input(JobSpec, job))

    async def update(self, job_id: str, patch: dict[str, Any]) -> JobView:
        return await self._schedules.update(self._caller, job_id, parse_job_input(JobPatch, patch))

    async def remove(self, job_id: str) -> bool:
        return await self._schedules.remove(self._caller, job_id)

    async def list_runs(self, job_id: str, limit: int) -> Sequence[RunView]:
        return await self._schedules.list_runs(self._caller, job_id, limit)


async def find_job(timetable: JobBackend, reference: str) -> JobView:
    """Return the job with this id or name, or the only one whose id or name begins with it."""
    jobs = await timetable.list()
    return find_by_name(reference, jobs, lambda job: (job.id, job.name), "job", "See `antiphon cron list`.")


@asynccontextmanager
async def open_jobs_for_reading(settings: Settings) -> AsyncGenerator[JobBackend]:
    """Open the jobs for reading."""
    if client := make_gateway_client(settings):
        async with client:
            yield _GatewayJobBackend(client)
        return
    from antiphon.state_access import open_store_readonly

    config = settings.load_config_lazily()
    async with open_store_readonly(config, settings.paths.state_dir) as store:
        yield _StoreJobBackend(_make_idle_schedules(config, store))


@asynccontextmanager
async def open_jobs_for_changes(settings: Settings) -> AsyncGenerator[JobBackend]:
    """Open the jobs for changes. Without a gateway, no job fires meanwhile."""
    if client := make_gateway_client(settings):
        async with client:
            yield _GatewayJobBackend(client)
        return
    from antiphon.state_access import open_store_exclusive

    config = settings.load().config
    async with open_store_exclusive(config, settings.paths.state_dir) as store:
        yield _StoreJobBackend(_make_idle_schedules(config, store))


async def fire_job(settings: Settings, reference: str) -> JobFireResult:
    """Fire a job now; without a gateway, in this process until its run has ended."""
    if client := make_gateway_client(settings):
        async with client:
            job_id = (await find_job(_GatewayJobBackend(client), reference)).id
            done = await client.call("cron.run", {"id": job_id, **_make_idempotency_params()})
            return msgspec.convert(done, JobFireResult)
    from antiphon.app import open_app
    from antiphon.cli._logging import configure_logging
    from antiphon.state_access import require_no_live_replicas

    config = settings.load().config
    await require_no_live_replicas(config, settings.paths.state_dir)
    configure_logging(settings.paths.state_dir, debug=settings.debug)
    async with open_app(config, settings.paths.state_dir) as opened:
        job_id = (await find_job(_StoreJobBackend(opened.schedules), reference)).id
        view = await opened.schedules.run(Caller.operator(), job_id)
        if view.run_id:
            await wait_for_run_end(LocalBackend(opened.operations), view.run_id)
        return view


def _make_idempotency_params() -> dict[str, str]:
    """Return an idempotency key, so that the call can be repeated after the connection was lost."""
    return {"idempotencyKey": str(uuid.uuid4())}


def _make_idle_schedules(config: Config, store: Store) -> JobOperations:
    """Return job operations for a store in which nothing runs: jobs can be read and changed, but none fires."""
    from antiphon.bus.local import LocalBus
    from antiphon.engine.jobs.jobs import FiringContext
    from antiphon.engine.jobs.scheduler import Scheduler
    from antiphon.engine.sessions.resolver import SessionResolver

    clock, context = store.clock, FiringContext(config, SessionResolver(config))
    no_engine = cast("Worker", None)  # only a running scheduler uses the engine, and this one does not run
    scheduler = Scheduler(context=context, store=store, bus=LocalBus(), clock=clock, engine=no_engine)
    return JobOperations(store=store, clock=clock, scheduler=scheduler)
