"""The backend of `antiphon cron`, the jobs' counterpart of `_backend`: the running gateway, or the store itself.

Separate because only `cron` needs the types of jobs, and because jobs can be added to a directory that has no database
yet, or to a shared store whose gateways keep running.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from antiphon.access import Caller
from antiphon.cli._backend import LocalBackend, make_gateway_client
from antiphon.cli._options import Settings
from antiphon.cli._ownership import get_command_name
from antiphon.cli._references import find_by_name
from antiphon.cli._wait import wait_for_run_end
from antiphon.operations.jobs import JobFireResult, JobOperations, JobPatch, JobSpec, JobView, parse_job_input
from antiphon.operations.types import RunView

if TYPE_CHECKING:
    from antiphon.client import Client


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


class _LocalJobBackend:
    def __init__(self, jobs: JobOperations) -> None:
        self._jobs = jobs
        self._caller = Caller.operator()

    async def list(self) -> Sequence[JobView]:
        return await self._jobs.list(self._caller, include_disabled=True)

    async def add(self, job: dict[str, Any]) -> JobView:
        return await self._jobs.add(self._caller, parse_job_input(JobSpec, job))

    async def update(self, job_id: str, patch: dict[str, Any]) -> JobView:
        return await self._jobs.update(self._caller, job_id, parse_job_input(JobPatch, patch))

    async def remove(self, job_id: str) -> bool:
        return await self._jobs.remove(self._caller, job_id)

    async def list_runs(self, job_id: str, limit: int) -> Sequence[RunView]:
        return await self._jobs.list_runs(self._caller, job_id, limit)


async def find_job(backend: JobBackend, reference: str) -> JobView:
    """Return the job with this id or name, or the only one whose id or name begins with it."""
    jobs = await backend.list()
    return find_by_name(reference, jobs, lambda job: (job.id, job.name), "job", "See `antiphon cron list`.")


@asynccontextmanager
async def open_jobs_for_reading(settings: Settings) -> AsyncGenerator[JobBackend]:
    """Open the jobs for reading."""
    if client := make_gateway_client(settings):
        async with client:
            yield _GatewayJobBackend(client)
        return
    from antiphon.state_access import open_operations_readonly

    config = settings.load_config_lazily()
    async with open_operations_readonly(config, settings.paths.state_dir) as operations:
        yield _LocalJobBackend(operations.jobs)


@asynccontextmanager
async def open_jobs_for_changes(settings: Settings) -> AsyncGenerator[JobBackend]:
    """Open the jobs for changes. Without a gateway, no job fires meanwhile."""
    if client := make_gateway_client(settings):
        async with client:
            yield _GatewayJobBackend(client)
        return
    from antiphon.state_access import create_operations, open_store_exclusive
    from antiphon.store.statedir import StateDir

    config, home = settings.load().config, StateDir.open_unlocked(settings.paths.state_dir)
    async with open_store_exclusive(config, home.path, get_command_name()) as store:
        yield _LocalJobBackend(create_operations(config, store, home).jobs)


async def fire_job(settings: Settings, reference: str) -> tuple[JobFireResult, RunView | None]:
    """Fire a job now; without a gateway, in this process until its run has ended, which is then returned too."""
    if client := make_gateway_client(settings):
        async with client:
            job_id = (await find_job(_GatewayJobBackend(client), reference)).id
            done = await client.call("cron.run", {"id": job_id, **_make_idempotency_params()})
            return msgspec.convert(done, JobFireResult), None
    from antiphon.app import open_app
    from antiphon.cli._logging import configure_logging
    from antiphon.state_access import require_no_live_replicas

    config = settings.load().config
    await require_no_live_replicas(config, settings.paths.state_dir)
    configure_logging(settings.paths.state_dir, debug=settings.debug)
    async with open_app(config, settings.paths.state_dir, command=get_command_name()) as opened:
        job_id = (await find_job(_LocalJobBackend(opened.operations.jobs), reference)).id
        fired = await opened.operations.jobs.run(Caller.operator(), job_id)
        if not fired.run_id:
            return fired, None
        return fired, await wait_for_run_end(LocalBackend(opened.operations), fired.run_id)


def _make_idempotency_params() -> dict[str, str]:
    """Return an idempotency key, so that the call can be repeated after the connection was lost."""
    return {"idempotencyKey": str(uuid.uuid4())}
