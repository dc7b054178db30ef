"""Scheduled jobs: their types and validation, and managing them as transaction scripts.

A job has a schedule (`schedule`), a session and a message; `firings` executes it. Authorization is not decided
here (see `antiphon.operations.jobs`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine import idempotency, validation
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.jobs.schedule import (
    AtSchedule,
    Schedule,
    StrictStruct,
    find_first_slot,
    find_next_slot,
    pin_schedule,
)
from antiphon.engine.outbox.delivery_rows import WEBCHAT_CHANNEL
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.errors import AntiphonError, Conflict, InvalidInput, NotFound
from antiphon.messages import ThinkingLevel
from antiphon.store import Param, Row, Tx
from antiphon.store.queries import Queries

if TYPE_CHECKING:
    from antiphon.config import Config

SQL = Queries("jobs")
LAST_USED_CHANNEL = "last"
MAX_JOBS = 1000

JobName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]


class AgentTurn(StrictStruct, frozen=True, tag_field="kind", tag="agentTurn"):
    message: str
    model: str | None = None
    thinking: ThinkingLevel | None = None
    timeout_seconds: Annotated[float, Meta(gt=0, le=366 * 86_400)] | None = None


class SystemEvent(StrictStruct, frozen=True, tag_field="kind", tag="systemEvent"):
    """A text for the main session, which gets it as a message."""

    text: str


class SilentDelivery(StrictStruct, frozen=True, tag_field="mode", tag="none"):
    """The answer stays in its session."""


class AnnounceDelivery(StrictStruct, frozen=True, tag_field="mode", tag="announce"):
    """The answer is also posted: to the last chat of the agent's main session, or to the one that is named."""

    channel: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,39}$")] = LAST_USED_CHANNEL
    to: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    account_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    thread_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    best_effort: bool | None = None
    """Without effect, for clients that send it: a failed delivery never changes the outcome of the run."""


JobPayload: TypeAlias = AgentTurn | SystemEvent
JobDelivery: TypeAlias = SilentDelivery | AnnounceDelivery


class JobSpec(StrictStruct, frozen=True):
    """A job as it is requested. `complete_job_spec` fills in the defaults and refuses invalid fields."""

    name: JobName
    schedule: Schedule
    payload: JobPayload
    session_target: str | None = None
    """`isolated` (a session of its own), `main`, or `session:<key>`; the default depends on the payload."""
    delivery: JobDelivery = SilentDelivery()
    agent_id: str | None = None
    enabled: bool = True
    delete_after_run: bool = False


class JobPatch(StrictStruct, frozen=True):
    """Changes to a job; fields that are not set stay as they are."""

    name: JobName | UnsetType = UNSET
    schedule: Schedule | UnsetType = UNSET
    payload: JobPayload | UnsetType = UNSET
    session_target: str | UnsetType = UNSET
    delivery: JobDelivery | UnsetType = UNSET
    agent_id: str | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    delete_after_run: bool | UnsetType = UNSET

    def apply_to(self, spec: JobSpec) -> JobSpec:
        changes = {name: getattr(self, name) for name in self.__struct_fields__}
        return msgspec.structs.replace(spec, **{k: v for k, v in changes.items() if v is not UNSET})


class Job(Struct, frozen=True, kw_only=True):
    """A job's row, with the state of its latest run."""

    id: str
    spec: JobSpec
    created_at: int
    updated_at: int
    next_at: int | None
    last_at: int | None
    last_run_id: str | None
    last_status: str | None
    last_error: str | None


class FiringContext(msgspec.Struct, frozen=True):
    """Configuration, session resolver and channels for firing jobs."""

    config: Config
    resolver: SessionResolver
    channels: frozenset[str] = frozenset()
    """Channels that this process can deliver to, in addition to the web chat."""


# --- validation ---


def complete_job_spec(spec: JobSpec, config: Config, now: int) -> JobSpec:
    """Return the spec with all defaults filled in; the session it names is not looked up here.

    Raises:
        InvalidInput: a field is invalid; `field` names it.
        NotFound: the agent does not exist.
    """
    agent_id = spec.agent_id or config.default_agent_id
    with attach_field_to_errors("agentId"):
        config.get_agent(keys.validate_agent_id(agent_id))
    target = spec.session_target or ("main" if isinstance(spec.payload, SystemEvent) else "isolated")
    completed = msgspec.structs.replace(
        spec,
        schedule=pin_schedule(spec.schedule, now),
        agent_id=agent_id.lower(),
        session_target=target,
    )
    # Raises for an invalid schedule, even if the job is disabled.
    find_next_slot(completed.schedule, now)
    if not (completed.name.strip() and completed.name.isprintable()):
        raise InvalidInput(
            "The name of a job must be 1 to 200 printable characters.", "Give it such a name.", field="name"
        )
    if completed.delete_after_run and not isinstance(completed.schedule, AtSchedule):
        raise InvalidInput(
            "Only a job that runs once can be deleted after its run.",
            "Leave deleteAfterRun out, or use a schedule of kind 'at'.",
            field="deleteAfterRun",
        )
    _check_payload(completed, config)
    return completed


def _check_payload(spec: JobSpec, config: Config) -> None:
    if isinstance(spec.payload, SystemEvent):
        if spec.session_target != "main":
            raise InvalidInput(
                f"A system event is for the main session, not for {spec.session_target!r}.",
                "Use the kind 'agentTurn', or the session target 'main'.",
                field="payload.kind",
            )
        validation.validate_message_content(
            spec.payload.text, config.store.message_max_bytes, field="payload.text"
        )
        return
    validation.validate_message_content(
        spec.payload.message, config.store.message_max_bytes, field="payload.message"
    )
    if spec.payload.model is not None:
        with attach_field_to_errors("payload.model"):
            config.find_model(spec.payload.model)


def check_channel(delivery: JobDelivery, context: FiringContext) -> None:
    """Check that a delivery can succeed. Stored jobs are not checked again.

    Raises:
        InvalidInput: this gateway has no such channel.
    """
    if isinstance(delivery, AnnounceDelivery) and delivery.channel not in {
        LAST_USED_CHANNEL,
        WEBCHAT_CHANNEL,
        *context.channels,
    }:
        known = ", ".join(repr(name) for name in sorted({WEBCHAT_CHANNEL, *context.channels}))
        raise InvalidInput(
            f"This gateway has no channel {delivery.channel!r}.",
            f"Use {known}, or leave the channel out to post where the agent last received a message.",
            field="delivery.channel",
        )


@contextmanager
def attach_field_to_errors(field: str) -> Generator[None]:
    """Add the name of a field to errors raised in the block."""
    try:
        yield
    except AntiphonError as error:
        error.data.setdefault("field", field)
        raise


# --- transaction scripts ---


async def add_job(
    tx: Tx,
    context: FiringContext,
    caller: Caller,
    job_id: str,
    spec: JobSpec,
    command: IdempotentCommand,
    now: int,
) -> Job:
    """Add a job. A repeated request with the same key returns the job as it was then."""
    if before := await idempotency.load_recorded_answer(tx, command, Job):
        return before
    overview = await tx.one(SQL.overview)
    if overview and overview["jobs"] >= MAX_JOBS:
        raise Conflict(f"There are {MAX_JOBS} jobs already.", "Remove one first.", max=MAX_JOBS)
    await _check_name_is_free(tx, spec.name, job_id)
    spec = await _resolve_session_target(tx, context, caller, spec)
    next_at = find_first_slot(spec.schedule, now) if spec.enabled else None
    await tx.do(SQL.insert, id=job_id, **_build_columns(spec), next_at=next_at, now=now)
    job = await get_job(tx, job_id)
    await idempotency.record_answer(tx, command, job, now)
    return job


async def update_job(
    tx: Tx, context: FiringContext, caller: Caller, job_id: str, patch: JobPatch, now: int
) -> Job:
    job = await get_job(tx, job_id)
    if patch.delivery is not UNSET:
        check_channel(patch.delivery, context)
    spec = complete_job_spec(patch.apply_to(job.spec), context.config, now)
    if spec.name != job.spec.name:
        await _check_name_is_free(tx, spec.name, job_id)
    if patch.session_target is not UNSET:
        spec = await _resolve_session_target(tx, context, caller, spec)
    next_at = job.next_at if spec.enabled else None
    if spec.enabled and (next_at is None or spec.schedule != job.spec.schedule):
        next_at = find_first_slot(spec.schedule, now)
    await tx.do(SQL.update, id=job_id, **_build_columns(spec), next_at=next_at, now=now)
    return await get_job(tx, job_id)


async def _check_name_is_free(tx: Tx, name: str, job_id: str) -> None:
    """Check that no other job has this name. Jobs of earlier versions may share one; they keep it."""
    await tx.lock("job names")
    holder = await tx.one(SQL.other_with_name, name=name, id=job_id)
    if holder is not None:
        raise Conflict(
            f"A job named {name!r} exists already: {holder['id']}.",
            "Use another name, or change or remove that job.",
            field="name",
            job_id=holder["id"],
        )


async def remove_job(tx: Tx, job_id: str) -> bool:
    return await tx.do(SQL.remove, id=job_id) > 0


async def get_job(tx: Tx, job_id: str) -> Job:
    row = await tx.one(SQL.by_id, id=job_id)
    if row is None:
        raise NotFound(
            f"Job {job_id[:80]!r} was not found.", "Use an id from the list of jobs.", job_id=job_id
        )
    return decode_job_row(row)


async def list_jobs(tx: Tx, include_disabled: bool) -> list[Job]:
    return [decode_job_row(row) for row in await tx.all(SQL.list_all, disabled=int(include_disabled))]


async def load_overview(tx: Tx) -> tuple[int, int | None]:
    """Return the number of jobs and the earliest slot of all jobs."""
    row = await tx.one(SQL.overview)
    assert row is not None
    return row["jobs"], row["next_at"]


async def list_job_runs(tx: Tx, job_id: str, limit: int) -> list[Row]:
    await get_job(tx, job_id)
    # ';' follows ':' in every encoding, so this range is exactly the ids with the job's prefix.
    return await tx.all(SQL.runs_between, first=f"cron:{job_id}:", after=f"cron:{job_id};", limit=limit)


async def _resolve_session_target(tx: Tx, context: FiringContext, caller: Caller, spec: JobSpec) -> JobSpec:
    """Return the spec with the full key of the session that its target names, if any; it must exist."""
    target = spec.session_target or ""
    if target in {"isolated", "main"}:
        return spec
    kind, _, reference = target.partition(":")
    with attach_field_to_errors("sessionTarget"):
        if kind != "session":
            raise InvalidInput(
                f"{target[:80]!r} is not a session target.", "Use 'isolated', 'main' or 'session:<key>'."
            )
        row = await context.resolver.open(tx, caller, "send", reference)
    return msgspec.structs.replace(spec, session_target=f"session:{keys.display_full_key(row['key'])}")


def _build_columns(spec: JobSpec) -> dict[str, Param]:
    return {
        "name": spec.name,
        "enabled": int(spec.enabled),
        "agent_id": spec.agent_id,
        "schedule": msgspec.json.encode(spec.schedule).decode(),
        "session_target": spec.session_target,
        "payload": msgspec.json.encode(spec.payload).decode(),
        "delivery": msgspec.json.encode(spec.delivery).decode(),
        "delete_after_run": int(spec.delete_after_run),
    }


_SCHEDULE_DECODER = msgspec.json.Decoder[Schedule](Schedule)
_PAYLOAD_DECODER = msgspec.json.Decoder[JobPayload](JobPayload)
_DELIVERY_DECODER = msgspec.json.Decoder[JobDelivery](JobDelivery)


def decode_job_row(row: Row) -> Job:
    state = row["run_state"]
    return Job(
        id=row["id"],
        spec=JobSpec(
            name=row["name"],
            schedule=_SCHEDULE_DECODER.decode(row["schedule"]),
            payload=_PAYLOAD_DECODER.decode(row["payload"]),
            session_target=row["session_target"],
            delivery=_DELIVERY_DECODER.decode(row["delivery"]),
            agent_id=row["agent_id"],
            enabled=bool(row["enabled"]),
            delete_after_run=bool(row["delete_after_run"]),
        ),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        next_at=row["next_at"],
        last_at=row["last_at"],
        last_run_id=row["last_run_id"],
        last_status=row["last_status"] or ("running" if state == "queued" else state),
        last_error=row["last_error"] or row["run_error"],
    )
