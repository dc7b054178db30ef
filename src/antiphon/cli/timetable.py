"""Whom `antiphon cron` asks: the gateway that runs, or the store itself where none does."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from antiphon.access import Caller
from antiphon.cli.choices import choose
from antiphon.cli.desk import Own, calling
from antiphon.cli.settings import Settings
from antiphon.cli.staying import to_the_end
from antiphon.schedules import FiredView, JobPatch, JobSpec, JobView, Schedules, read_as
from antiphon.views import RunView

if TYPE_CHECKING:
    from antiphon.client import Client
    from antiphon.config import Config
    from antiphon.engine.engine import Engine
    from antiphon.store import Store


class Timetable(Protocol):
    async def list(self) -> Sequence[JobView]: ...
    async def add(self, job: dict[str, Any]) -> JobView: ...
    async def update(self, job_id: str, patch: dict[str, Any]) -> JobView: ...
    async def remove(self, job_id: str) -> bool: ...
    async def runs(self, job_id: str, limit: int) -> Sequence[RunView]: ...


class _Asked:
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
        return msgspec.convert(await self._client.call("cron.add", {**job, **_once()}), JobView)

    async def update(self, job_id: str, patch: dict[str, Any]) -> JobView:
        done = await self._client.call("cron.update", {"id": job_id, "patch": patch})
        return msgspec.convert(done, JobView)

    async def remove(self, job_id: str) -> bool:
        return (await self._client.call("cron.remove", {"id": job_id}))["removed"]

    async def runs(self, job_id: str, limit: int) -> Sequence[RunView]:
        done = await self._client.call("cron.runs", {"id": job_id, "limit": limit})
        return msgspec.convert(done["entries"], list[RunView])


class _Kept:
    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules
        self._caller = Caller.operator()

    async def list(self) -> Sequence[JobView]:
        return await self._schedules.list(self._caller, include_disabled=True)

    async def add(self, job: dict[str, Any]) -> JobView:
        return await self._schedules.add(self._caller, read_as(JobSpec, job))

    async def update(self, job_id: str, patch: dict[str, Any]) -> JobView:
        return await self._schedules.update(self._caller, job_id, read_as(JobPatch, patch))

    async def remove(self, job_id: str) -> bool:
        return await self._schedules.remove(self._caller, job_id)

    async def runs(self, job_id: str, limit: int) -> Sequence[RunView]:
        return await self._schedules.runs(self._caller, job_id, limit)


async def find_job(timetable: Timetable, reference: str) -> JobView:
    """The job with this id or name, or the only one whose id or name begins with it."""
    jobs = await timetable.list()
    return choose(reference, jobs, lambda job: (job.id, job.name), "job", "See `antiphon cron list`.")


@asynccontextmanager
async def consulted(settings: Settings) -> AsyncGenerator[Timetable]:
    """For looking at the jobs."""
    if client := calling(settings):
        async with client:
            yield _Asked(client)
        return
    from antiphon.visits import reading

    config = settings.config_when_needed()
    async with reading(config, settings.paths.state_dir) as store:
        yield _Kept(_resting(config, store))


@asynccontextmanager
async def changed(settings: Settings) -> AsyncGenerator[Timetable]:
    """For changing them. Nothing fires meanwhile where no gateway runs."""
    if client := calling(settings):
        async with client:
            yield _Asked(client)
        return
    from antiphon.visits import keeping

    config = settings.load().config
    async with keeping(config, settings.paths.state_dir) as store:
        yield _Kept(_resting(config, store))


async def fired(settings: Settings, reference: str) -> FiredView:
    """Fire one now; without a gateway, in this process and to its end."""
    if client := calling(settings):
        async with client:
            job_id = (await find_job(_Asked(client), reference)).id
            done = await client.call("cron.run", {"id": job_id, **_once()})
            return msgspec.convert(done, FiredView)
    from antiphon.cli.journal import keep_journal
    from antiphon.host import house
    from antiphon.visits import check_alone

    config = settings.load().config
    await check_alone(config, settings.paths.state_dir)
    keep_journal(settings.paths.state_dir, debug=settings.debug)
    async with house(config, settings.paths.state_dir) as opened:
        job_id = (await find_job(_Kept(opened.schedules), reference)).id
        view = await opened.schedules.run(Caller.operator(), job_id)
        if view.run_id:
            await to_the_end(Own(opened.operations), view.run_id)
        return view


def _once() -> dict[str, str]:
    """So that a gateway that went away may be asked again."""
    return {"idempotencyKey": str(uuid.uuid4())}


def _resting(config: Config, store: Store) -> Schedules:
    """The schedules of a store in which nothing runs: they can be read and changed, and nothing can fire."""
    from antiphon.bus.local import LocalBus
    from antiphon.engine.door import Door
    from antiphon.engine.jobs import Terms
    from antiphon.engine.scheduler import Scheduler

    clock, terms = store.clock, Terms(config, Door(config))
    nobody = cast("Engine", None)  # only a scheduler that runs asks it, and this one does not
    scheduler = Scheduler(terms=terms, store=store, bus=LocalBus(), clock=clock, engine=nobody)
    return Schedules(store=store, clock=clock, scheduler=scheduler)
