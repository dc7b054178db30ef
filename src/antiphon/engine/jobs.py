"""Scheduled jobs: what they are, what is accepted as one, and managing them as transaction scripts.

A job says when (`engine.slots`), into which session and with which words; what comes of that is in `engine.firings`.
Who may manage jobs is not decided here (see `antiphon.schedules`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine import commands, slots, words
from antiphon.engine.commands import Command
from antiphon.engine.deliveries import WEBCHAT
from antiphon.engine.door import Door
from antiphon.engine.slots import At, Closed, Schedule
from antiphon.engine.words import Thinking
from antiphon.errors import AntiphonError, Conflict, InvalidInput, NotFound
from antiphon.store import Param, Row, Tx
from antiphon.store.queries import Queries

if TYPE_CHECKING:
    from antiphon.config import Config

SQL = Queries("jobs")
LAST_HEARD = "last"
MOST_JOBS = 1000

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]


class AgentTurn(Closed, frozen=True, tag_field="kind", tag="agentTurn"):
    message: str
    model: str | None = None
    thinking: Thinking | None = None
    timeout_seconds: Annotated[float, Meta(gt=0, le=366 * 86_400)] | None = None


class SystemEvent(Closed, frozen=True, tag_field="kind", tag="systemEvent"):
    """Words for the main session, which gets them as a message."""

    text: str


class Silent(Closed, frozen=True, tag_field="mode", tag="none"):
    """The answer stays in its session."""


class Announce(Closed, frozen=True, tag_field="mode", tag="announce"):
    """The answer also goes to a chat: where the agent's main session last heard from somebody, or as named."""

    channel: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,39}$")] = LAST_HEARD
    to: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    account_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    thread_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    best_effort: bool | None = None
    """Without effect: what cannot be delivered is a dead letter, and the run is what it is."""


Payload: TypeAlias = AgentTurn | SystemEvent
Delivery: TypeAlias = Silent | Announce


class JobSpec(Closed, frozen=True):
    """What somebody wants done. `settled` fills in what is left open, and refuses what cannot be."""

    name: Name
    schedule: Schedule
    payload: Payload
    session_target: str | None = None
    """`isolated` (a session of its own), `main`, or `session:<key>`; left out, as the payload suggests."""
    delivery: Delivery = Silent()
    agent_id: str | None = None
    enabled: bool = True
    delete_after_run: bool = False


class JobPatch(Closed, frozen=True):
    """What is to be different; everything else stays."""

    name: Name | UnsetType = UNSET
    schedule: Schedule | UnsetType = UNSET
    payload: Payload | UnsetType = UNSET
    session_target: str | UnsetType = UNSET
    delivery: Delivery | UnsetType = UNSET
    agent_id: str | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    delete_after_run: bool | UnsetType = UNSET

    def applied(self, spec: JobSpec) -> JobSpec:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return msgspec.structs.replace(spec, **{k: v for k, v in given.items() if v is not UNSET})


class Job(Struct, frozen=True, kw_only=True):
    """A job's row, and how the run of its last firing is doing."""

    id: str
    spec: JobSpec
    created_at: int
    updated_at: int
    next_at: int | None
    last_at: int | None
    last_run_id: str | None
    last_status: str | None
    last_error: str | None


class Terms(msgspec.Struct, frozen=True):
    """What every firing is judged by."""

    config: Config
    door: Door
    channels: frozenset[str] = frozenset()
    """Channels that this process can deliver to, besides the web chat."""


# --- what is accepted ---


def settled(spec: JobSpec, config: Config, now: int) -> JobSpec:
    """The spec with everything said that was left open; the session it names is not looked up here.

    Raises:
        InvalidInput: something cannot be accepted; `field` says what.
        NotFound: there is no such agent.
    """
    agent_id = spec.agent_id or config.default_agent_id
    with naming("agentId"):
        config.agent(keys.checked_agent_id(agent_id))
    target = spec.session_target or ("main" if isinstance(spec.payload, SystemEvent) else "isolated")
    whole = msgspec.structs.replace(
        spec,
        schedule=slots.settled(spec.schedule, now),
        agent_id=agent_id.lower(),
        session_target=target,
    )
    slots.next_slot(
        whole.schedule, now
    )  # raises for one that means nothing, also where the job is not enabled
    _check_name(whole.name)
    _check_payload(whole, config)
    _check_ends(whole)
    return whole


def _check_name(name: str) -> None:
    if not (name.strip() and name.isprintable()):
        raise InvalidInput(
            "The name of a job must be 1 to 200 printable characters.", "Give it such a name.", field="name"
        )


def _check_payload(spec: JobSpec, config: Config) -> None:
    if isinstance(spec.payload, SystemEvent):
        if spec.session_target != "main":
            raise InvalidInput(
                f"A system event is for the main session, not for {spec.session_target!r}.",
                "Use the kind 'agentTurn', or the session target 'main'.",
                field="payload.kind",
            )
        words.check(spec.payload.text, config.store.message_max_bytes, field="payload.text")
        return
    words.check(spec.payload.message, config.store.message_max_bytes, field="payload.message")
    if spec.payload.model is not None:
        with naming("payload.model"):
            config.find_model(spec.payload.model)


def check_channel(delivery: Delivery, terms: Terms) -> None:
    """Refuse a delivery that would always fail. Jobs that are already stored keep theirs.

    Raises:
        InvalidInput: this gateway has no such channel.
    """
    if isinstance(delivery, Announce) and delivery.channel not in {LAST_HEARD, WEBCHAT, *terms.channels}:
        known = ", ".join(repr(name) for name in sorted({WEBCHAT, *terms.channels}))
        raise InvalidInput(
            f"This gateway has no channel {delivery.channel!r}.",
            f"Use {known}, or leave the channel out to post where the agent last received a message.",
            field="delivery.channel",
        )


def _check_ends(spec: JobSpec) -> None:
    if spec.delete_after_run and not isinstance(spec.schedule, At):
        raise InvalidInput(
            "Only a job that runs once can be deleted after its run.",
            "Leave deleteAfterRun out, or use a schedule of kind 'at'.",
            field="deleteAfterRun",
        )


@contextmanager
def naming(field: str) -> Generator[None]:
    """Errors that somebody else raises about this field get its name."""
    try:
        yield
    except AntiphonError as error:
        error.data.setdefault("field", field)
        raise


# --- managing, as transaction scripts ---


async def add(
    tx: Tx, terms: Terms, caller: Caller, job_id: str, spec: JobSpec, command: Command, now: int
) -> Job:
    """A new job; or the one that was added under this key, as it was then."""
    if before := await commands.answered(tx, command, Job):
        return before
    overview = await tx.one(SQL.overview)
    if overview and overview["jobs"] >= MOST_JOBS:
        raise Conflict(f"There are {MOST_JOBS} jobs already.", "Remove one first.", max=MOST_JOBS)
    spec = await _aimed(tx, terms, caller, spec)
    next_at = slots.first_slot(spec.schedule, now) if spec.enabled else None
    await tx.do(SQL.insert, id=job_id, **_columns(spec), next_at=next_at, now=now)
    job = await get(tx, job_id)
    await commands.record(tx, command, job, now)
    return job


async def update(tx: Tx, terms: Terms, caller: Caller, job_id: str, patch: JobPatch, now: int) -> Job:
    job = await get(tx, job_id)
    if patch.delivery is not UNSET:
        check_channel(patch.delivery, terms)
    spec = settled(patch.applied(job.spec), terms.config, now)
    if patch.session_target is not UNSET:
        spec = await _aimed(tx, terms, caller, spec)
    next_at = job.next_at if spec.enabled else None
    if spec.enabled and (next_at is None or spec.schedule != job.spec.schedule):
        next_at = slots.first_slot(spec.schedule, now)
    await tx.do(SQL.update, id=job_id, **_columns(spec), next_at=next_at, now=now)
    return await get(tx, job_id)


async def remove(tx: Tx, job_id: str) -> bool:
    return await tx.do(SQL.remove, id=job_id) > 0


async def get(tx: Tx, job_id: str) -> Job:
    row = await tx.one(SQL.by_id, id=job_id)
    if row is None:
        raise NotFound(
            f"Job {job_id[:80]!r} was not found.", "Use an id from the list of jobs.", job_id=job_id
        )
    return read(row)


async def listed(tx: Tx, include_disabled: bool) -> list[Job]:
    return [read(row) for row in await tx.all(SQL.listed, disabled=int(include_disabled))]


async def overview(tx: Tx) -> tuple[int, int | None]:
    """How many jobs there are, and the earliest slot of them all."""
    row = await tx.one(SQL.overview)
    assert row is not None
    return row["jobs"], row["next_at"]


async def runs_of(tx: Tx, job_id: str, limit: int) -> list[Row]:
    await get(tx, job_id)
    # ';' follows ':' in every encoding, so this is exactly what begins with the job's own prefix.
    return await tx.all(SQL.runs_between, first=f"cron:{job_id}:", after=f"cron:{job_id};", limit=limit)


async def _aimed(tx: Tx, terms: Terms, caller: Caller, spec: JobSpec) -> JobSpec:
    """With the key of the session that the target names, if it names one; it must exist."""
    target = spec.session_target or ""
    if target in {"isolated", "main"}:
        return spec
    kind, _, reference = target.partition(":")
    with naming("sessionTarget"):
        if kind != "session":
            raise InvalidInput(
                f"There is no session target {target[:80]!r}.", "Use 'isolated', 'main' or 'session:<key>'."
            )
        row = await terms.door.open(tx, caller, "send", reference)
    return msgspec.structs.replace(spec, session_target=f"session:{keys.spoken(row['key'])}")


def _columns(spec: JobSpec) -> dict[str, Param]:
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


_SCHEDULE = msgspec.json.Decoder[Schedule](Schedule)
_PAYLOAD = msgspec.json.Decoder[Payload](Payload)
_DELIVERY = msgspec.json.Decoder[Delivery](Delivery)


def read(row: Row) -> Job:
    state = row["run_state"]
    return Job(
        id=row["id"],
        spec=JobSpec(
            name=row["name"],
            schedule=_SCHEDULE.decode(row["schedule"]),
            payload=_PAYLOAD.decode(row["payload"]),
            session_target=row["session_target"],
            delivery=_DELIVERY.decode(row["delivery"]),
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
