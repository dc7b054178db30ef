"""Operations on scheduled jobs.

For operators, reading jobs needs `operator.read`, and changing or running them `operator.admin`. An agent manages the
jobs of its own agent (`engine.jobs.agent_jobs`). `engine.jobs.scheduler` decides when a job fires, and
`engine.jobs.firings` what that does.
"""

from __future__ import annotations

import uuid
from functools import cached_property
from typing import Any, Literal, TypeVar

import msgspec

from antiphon import access, validation_errors
from antiphon.access import ADMIN_SCOPE, READ_SCOPE, Caller
from antiphon.engine import validation
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.jobs import agent_jobs, jobs
from antiphon.engine.jobs.jobs import FiringContext, Job, JobDelivery, JobPatch, JobPayload, JobSpec
from antiphon.engine.jobs.schedule import Schedule
from antiphon.engine.jobs.scheduler import Scheduler
from antiphon.errors import Forbidden, InvalidInput, StoreReadOnly
from antiphon.operations import types
from antiphon.operations.context import OperationContext
from antiphon.operations.types import RunView, View
from antiphon.store import Tx

__all__ = [
    "JobFireResult",
    "JobOperations",
    "JobPatch",
    "JobSpec",
    "JobState",
    "JobView",
    "SchedulerStatusView",
    "parse_job_input",
]

DEFAULT_JOB_RUNS, MAX_JOB_RUNS = 50, 200
CRON_DISABLED_REASON = "cron-disabled"
T = TypeVar("T")


class JobState(View, frozen=True):
    """State of a job. `lastStatus` is `running` or how the last run ended; `lastError` also covers failed starts."""

    next_run_at_ms: int | None = None
    last_run_at_ms: int | None = None
    last_status: str | None = None
    last_error: str | None = None
    last_run_id: str | None = None


class JobView(View, omit_defaults=False, frozen=True):
    id: str
    name: str
    enabled: bool
    schedule: Schedule
    session_target: str
    payload: JobPayload
    delivery: JobDelivery
    agent_id: str
    delete_after_run: bool
    created_at_ms: int
    updated_at_ms: int
    state: JobState


class JobFireResult(View, frozen=True):
    """`ran` says that a run was accepted; otherwise `reason` says why not."""

    ran: bool
    run_id: str | None = None
    session_key: str | None = None
    reason: str | None = None


class SchedulerStatusView(View, omit_defaults=False, frozen=True):
    """The scheduler's state. It never fires while `cron.enabled` is false."""

    enabled: bool
    jobs: int
    next_wake_at: int | None = msgspec.field(default=None, name="nextWakeAtMs")


class JobOperations:
    def __init__(self, context: OperationContext, scheduler: Scheduler | None) -> None:
        self._context = context
        self._scheduler = scheduler
        """None in a process that hosts no sessions: jobs can be read and changed there, but none fires."""

    @cached_property  # reading the channels reads the whole configuration
    def _firing_context(self) -> FiringContext:
        if self._scheduler is not None:
            return self._scheduler.context
        config = self._context.config
        return FiringContext(config, self._context.session_resolver, frozenset(config.enabled_channels))

    async def add(self, caller: Caller, spec: JobSpec, *, key: str | None = None) -> JobView:
        """Add a job. It is durable on return, and fires while a gateway runs.

        A repeated call with the same key adds nothing, even if the job has fired or was removed since.
        """
        _require_scope(caller, ADMIN_SCOPE)
        validation.validate_idempotency_key(key)
        now = self._context.clock.now()
        given = _revalidate(spec)
        command = IdempotentCommand(key, ("cron.add", given))
        jobs.check_channel(given.delivery, self._firing_context)
        if not caller.is_operator and given.agent_id is None:
            given = msgspec.structs.replace(given, agent_id=caller.agent_id)
        settled = jobs.complete_job_spec(given, self._firing_context.config, now)
        job = await self._context.store.tx(
            jobs.add_job if caller.is_operator else agent_jobs.add_job,
            self._firing_context,
            caller,
            str(uuid.uuid4()),
            settled,
            command,
            now,
        )
        if self._scheduler is not None:
            self._scheduler.wake()
        return _build_job_view(job)

    async def update(self, caller: Caller, job_id: str, patch: JobPatch) -> JobView:
        """Change a job. A new schedule, or enabling it, counts from now: missed times are not made up for."""
        _require_scope(caller, ADMIN_SCOPE)
        now = self._context.clock.now()
        job = await self._context.store.tx(
            jobs.update_job if caller.is_operator else agent_jobs.update_job,
            self._firing_context,
            caller,
            job_id,
            _revalidate(patch),
            now,
        )
        if self._scheduler is not None:
            self._scheduler.wake()
        return _build_job_view(job)

    async def remove(self, caller: Caller, job_id: str) -> bool:
        """Remove a job and return whether it existed. Its runs and its session stay."""
        _require_scope(caller, ADMIN_SCOPE)
        return await self._context.store.tx(_remove_job, caller, job_id)

    async def run(
        self, caller: Caller, job_id: str, mode: Literal["force", "due"] = "force", *, key: str | None = None
    ) -> JobFireResult:
        """Fire a job now, or only if it is due. A repeated call with the same key returns the same run."""
        _require_scope(caller, ADMIN_SCOPE)
        validation.validate_idempotency_key(key)
        await self._context.store.read(agent_jobs.get_job, caller, job_id)
        if not self._context.config.cron.enabled:
            return JobFireResult(ran=False, reason=CRON_DISABLED_REASON)
        if self._scheduler is None:
            raise StoreReadOnly(
                f"Job {job_id!r} was not fired: this process hosts no sessions.",
                "Start Antiphon on this state directory.",
            )
        command = IdempotentCommand(key, ("cron.run", job_id, mode))
        fired = await self._scheduler.fire_on_request(job_id, command, force=mode == "force")
        if fired.accepted is None:
            return JobFireResult(ran=False, reason=fired.reason)
        return JobFireResult(ran=True, run_id=fired.accepted.run_id, session_key=fired.accepted.session_key)

    async def get(self, caller: Caller, job_id: str) -> JobView:
        _require_scope(caller, READ_SCOPE)
        return _build_job_view(await self._context.store.read(agent_jobs.get_job, caller, job_id))

    async def list_runs(self, caller: Caller, job_id: str, limit: int = DEFAULT_JOB_RUNS) -> list[RunView]:
        """Return the runs of a job, newest first."""
        _require_scope(caller, READ_SCOPE)
        if limit < 1:
            raise InvalidInput(
                f"'limit' is {limit}; it must be at least 1.", f"Use 1 to {MAX_JOB_RUNS}.", field="limit"
            )
        await self._context.store.read(agent_jobs.get_job, caller, job_id)
        rows = await self._context.store.read(jobs.list_job_runs, job_id, min(limit, MAX_JOB_RUNS))
        return [types.build_run_view(row, None, self._context.clock.now()) for row in rows]

    async def get_status(self, caller: Caller) -> SchedulerStatusView:
        access.require_operator(caller, "list", "the scheduler", "List your jobs instead.")
        count, next_at = await self._context.store.read(jobs.load_overview)
        enabled = self._context.config.cron.enabled
        return SchedulerStatusView(enabled=enabled, jobs=count, next_wake_at=next_at if enabled else None)

    async def list(self, caller: Caller, include_disabled: bool = False) -> list[JobView]:
        """Return every job that the caller may see, oldest first."""
        _require_scope(caller, READ_SCOPE)
        found = await self._context.store.read(jobs.list_jobs, include_disabled)
        return [
            _build_job_view(job)
            for job in found
            if caller.is_operator or job.spec.agent_id == caller.agent_id
        ]


def parse_job_input(kind: type[T], raw: Any) -> T:
    """Build a `JobSpec` or `JobPatch` from plain data of any wire.

    Raises:
        InvalidInput: the data is invalid; `field` says where.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        issue = validation_errors.parse_validation_error(error)
        field = issue.field or "job"
        raise InvalidInput(
            f"{field!r} is not valid: {issue.what[:1].lower()}{issue.what[1:]}.",
            "Fix it and send it again.",
            field=field,
        ) from error


def _revalidate(given: T) -> T:
    """Validate a struct that was built in Python, which msgspec has not checked against its types."""
    return parse_job_input(type(given), msgspec.to_builtins(given))


async def _remove_job(tx: Tx, caller: Caller, job_id: str) -> bool:
    if caller.is_operator:
        return await jobs.remove_job(tx, job_id)
    return await agent_jobs.remove_job(tx, caller, job_id)


def _require_scope(caller: Caller, scope: str) -> None:
    if not caller.is_operator:
        agent_jobs.require_lasting_session(caller)
    elif scope not in caller.scopes:
        raise Forbidden(
            f"This token may not do that to scheduled jobs: it lacks {scope!r}.",
            "Use a token that was issued with that scope.",
            scope=scope,
        )


def _build_job_view(job: Job) -> JobView:
    spec = job.spec
    return JobView(
        id=job.id,
        name=spec.name,
        enabled=spec.enabled,
        schedule=spec.schedule,
        session_target=spec.session_target or "",
        payload=spec.payload,
        delivery=spec.delivery,
        agent_id=spec.agent_id or "",
        delete_after_run=spec.delete_after_run,
        created_at_ms=job.created_at,
        updated_at_ms=job.updated_at,
        state=JobState(
            next_run_at_ms=job.next_at,
            last_run_at_ms=job.last_at,
            last_status=job.last_status,
            last_error=job.last_error,
            last_run_id=job.last_run_id,
        ),
    )
