"""Scheduled jobs: what they are, when they are due, and their transaction scripts.

A job says when, into which session and with which words. Its firing is a run, and the commit that queues the run
is the one that moves the job to its next slot: a kill can neither lose a firing nor repeat it. Slots that were
missed are one firing, for the latest of them. Who may manage jobs is not decided here (see `antiphon.schedules`),
and nothing here waits for a slot (see `engine.scheduler`).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, TypeAlias
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import UNSET, Meta, Struct, UnsetType

from antiphon import keys
from antiphon.access import Caller
from antiphon.engine import admissions, commands, deliveries, sessions, words
from antiphon.engine.admissions import Accepted, Submission
from antiphon.engine.commands import Command
from antiphon.engine.deliveries import Destination
from antiphon.engine.door import Door
from antiphon.engine.sequels import Addressee
from antiphon.engine.sessions import Birth
from antiphon.engine.words import Thinking
from antiphon.errors import AntiphonError, Conflict, InvalidInput, LaneFull, NotFound
from antiphon.messages import Provenance, User
from antiphon.store import Param, Row, Tx
from antiphon.store.queries import Queries

if TYPE_CHECKING:
    from antiphon.config import Config

SQL = Queries("jobs")
LAST_HEARD = "last"
ORIGIN = "cron"  # as the partial index of unfinished runs has it
MOST_JOBS = 1000
JUST_NOW = 60_000  # milliseconds that a one-time job may be late when it is added: it then fires at once
LAST = 253_402_300_799_000  # the end of the calendar, in milliseconds
NOT_DUE, BUSY = "not-due", "busy"
OPERATOR = Caller.operator()  # jobs are the operators' own: whoever added one was admin

Moment: TypeAlias = Annotated[int, Meta(ge=0, le=LAST)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]


class _Closed(
    Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    pass


class At(_Closed, frozen=True, tag_field="kind", tag="at"):
    """Once. Exactly one of the two is given; a time without an offset is the machine's."""

    at: str | None = None
    at_ms: Moment | None = None


class Every(_Closed, frozen=True, tag_field="kind", tag="every"):
    """At the anchor and every so often after it."""

    every_ms: Annotated[int, Meta(ge=1000, le=LAST)]
    anchor_ms: Moment | None = None


class Cron(_Closed, frozen=True, tag_field="kind", tag="cron"):
    """By a cron expression of five fields, or six with seconds, in a time zone."""

    expr: Annotated[str, Meta(max_length=200)]
    tz: Annotated[str, Meta(max_length=100)] | None = None


class AgentTurn(_Closed, frozen=True, tag_field="kind", tag="agentTurn"):
    message: str
    model: str | None = None
    thinking: Thinking | None = None
    timeout_seconds: Annotated[float, Meta(gt=0, le=366 * 86_400)] | None = None


class SystemEvent(_Closed, frozen=True, tag_field="kind", tag="systemEvent"):
    """Words for the main session, which gets them as a message."""

    text: str


class Silent(_Closed, frozen=True, tag_field="mode", tag="none"):
    """The answer stays in its session."""


class Announce(_Closed, frozen=True, tag_field="mode", tag="announce"):
    """The answer also goes to a chat: where the agent's main session last heard from somebody, or as named."""

    channel: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,39}$")] = LAST_HEARD
    to: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    account_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    thread_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    best_effort: bool | None = None
    """Without effect: what cannot be delivered is a dead letter, and the run is what it is."""


Schedule: TypeAlias = At | Every | Cron
Payload: TypeAlias = AgentTurn | SystemEvent
Delivery: TypeAlias = Silent | Announce


class JobSpec(_Closed, frozen=True):
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


class JobPatch(_Closed, frozen=True):
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


class Fired(Struct, frozen=True, kw_only=True):
    """What came of firing a job: a run, or the reason why there is none."""

    accepted: Accepted | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Terms:
    """What every firing is judged by."""

    config: Config
    door: Door


# --- when ---


def next_slot(schedule: Schedule, after_ms: int) -> int | None:
    """The first slot after that time, or None when there is none any more.

    Raises:
        InvalidInput: the schedule means nothing; `field` says which part of it.
    """
    match schedule:
        case At():
            slot = _moment(schedule)
            return slot if slot > after_ms else None
        case Every(every_ms=every, anchor_ms=anchor):
            start = anchor or 0
            return start + max(0, (after_ms - start) // every + 1) * every
        case Cron():
            return _next_match(schedule, after_ms)


def latest_slot(schedule: Schedule, first: int, now: int) -> int:
    """The last slot that has come by now, where `first` is one that has.

    Found by halving, so that years of missed slots cost no more than an hour of them.
    """
    due = bisect_right(range(first, now), now, key=lambda after: next_slot(schedule, after) or now + 1)
    return (next_slot(schedule, first + due - 1) if due else None) or first


def local_zone() -> str:
    """The machine's time zone by its name, and UTC where that cannot be told."""
    linked = os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    names = (os.environ.get("TZ", "").removeprefix(":"), linked)
    return next((name for name in names if name and _zone(name)), "UTC")


def _zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        return None


def _next_match(schedule: Cron, after_ms: int) -> int | None:
    zone = _zone(schedule.tz or local_zone())
    if zone is None:
        raise InvalidInput(
            f"There is no time zone {schedule.tz!r}.", "Use a name like 'Europe/Berlin'.", field="schedule.tz"
        )
    try:
        matches = CronSim(schedule.expr, datetime.fromtimestamp(after_ms // 1000, zone))
    except CronSimError as error:
        raise InvalidInput(
            f"The cron expression {schedule.expr!r} is not valid: {str(error).lower()}.",
            "Write five fields such as '0 8 * * 1-5': minute, hour, day, month, weekday.",
            field="schedule.expr",
        ) from error
    # In the hour that clocks repeat, a match by the clock may lie before the time that was asked about.
    slots = (round(match.timestamp() * 1000) for match in matches)
    try:
        return next((slot for slot in slots if slot > after_ms), None)
    except OverflowError:  # the calendar ends before the next match
        return None


def _moment(schedule: At) -> int:
    if (schedule.at is None) == (schedule.at_ms is None):
        raise InvalidInput(
            "A schedule of kind 'at' needs one time.", "Give either 'at' or 'atMs'.", field="schedule.at"
        )
    if schedule.at_ms is not None:
        return schedule.at_ms
    return round(datetime.fromisoformat(_with_offset(schedule.at or "")).timestamp() * 1000)


def _with_offset(text: str) -> str:
    """The time as it was written, or with the machine's offset if it was written without one."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text[:80]!r} is not a time.",
            "Write it in ISO 8601, such as '2030-01-31T08:00:00+01:00'.",
            field="schedule.at",
        ) from error
    return text if time.tzinfo else time.replace(tzinfo=ZoneInfo(local_zone())).isoformat()


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
        schedule=_settled_schedule(spec.schedule, now),
        agent_id=agent_id.lower(),
        session_target=target,
    )
    next_slot(whole.schedule, now)  # raises for one that means nothing, also where the job is not enabled
    _check_name(whole.name)
    _check_payload(whole, config)
    _check_ends(whole)
    return whole


def first_slot(schedule: Schedule, now: int) -> int:
    """When a job that is added or enabled now fires first.

    Raises:
        InvalidInput: never, or the schedule means nothing.
    """
    slot = next_slot(schedule, now - JUST_NOW if isinstance(schedule, At) else now)
    if slot is None:
        raise InvalidInput(
            "The schedule has no time that is still to come.", "Give it a later one.", field="schedule"
        )
    return slot


def _settled_schedule(schedule: Schedule, now: int) -> Schedule:
    """Without anything that would mean something else later or on another machine."""
    match schedule:
        case Every(anchor_ms=None):
            return Every(every_ms=schedule.every_ms, anchor_ms=now)
        case Cron(tz=None):
            return Cron(expr=schedule.expr, tz=local_zone())
        case At(at=str(text), at_ms=None):
            return At(at=_with_offset(text))
        case _:
            return schedule


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
    next_at = first_slot(spec.schedule, now) if spec.enabled else None
    await tx.do(SQL.insert, id=job_id, **_columns(spec), next_at=next_at, now=now)
    job = await get(tx, job_id)
    await commands.record(tx, command, job, now)
    return job


async def update(tx: Tx, terms: Terms, caller: Caller, job_id: str, patch: JobPatch, now: int) -> Job:
    job = await get(tx, job_id)
    spec = settled(patch.applied(job.spec), terms.config, now)
    if patch.session_target is not UNSET:
        spec = await _aimed(tx, terms, caller, spec)
    next_at = job.next_at if spec.enabled else None
    if spec.enabled and (next_at is None or spec.schedule != job.spec.schedule):
        next_at = first_slot(spec.schedule, now)
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
    return _job(row)


async def listed(tx: Tx, include_disabled: bool) -> list[Job]:
    return [_job(row) for row in await tx.all(SQL.listed, disabled=int(include_disabled))]


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
    return msgspec.structs.replace(spec, session_target=f"session:{_shown(row['key'])}")


def _shown(key: str) -> str:
    """In words that the door understands: the global session has a key that no caller may write."""
    return keys.display_text(key, viewer_agent_id=None)


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


def _job(row: Row) -> Job:
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


# --- firing, as transaction scripts ---


async def due(tx: Tx, now: int) -> list[str]:
    """Jobs whose slot has come, the longest due first."""
    return [row["id"] for row in await tx.all(SQL.due, now=now)]


async def fire(tx: Tx, terms: Terms, job_id: str, now: int) -> Fired:
    """Fire a job if it is due: its run and its next slot are one commit."""
    row = await tx.one(SQL.by_id, id=job_id)
    job = _job(row) if row else None
    if job is None or job.next_at is None or job.next_at > now:
        return Fired(reason=NOT_DUE)
    if await _busy(tx, terms):
        return Fired(reason=BUSY)
    try:
        slot = latest_slot(job.spec.schedule, job.next_at, now)
        following = next_slot(job.spec.schedule, now)
    except InvalidInput as error:  # such as a time zone that the machine no longer has
        fired = Fired(reason=str(error))
        await _record(tx, job, fired, job.next_at, None, now)
        return fired
    fired = await _submit(tx, terms, job, f"cron:{job.id}:{slot}", now)
    if fired.reason == BUSY:
        return fired  # its session has no room for another message now: the slot is kept
    if following is None and job.spec.delete_after_run and fired.accepted:
        await remove(tx, job.id)
    else:
        await _record(tx, job, fired, slot, following, now)
    return fired


async def force(tx: Tx, terms: Terms, job_id: str, run_id: str, now: int) -> Fired:
    """Fire a job now, whatever its schedule says; the schedule goes on as if nothing had been."""
    job = await get(tx, job_id)
    if await _busy(tx, terms):
        return Fired(reason=BUSY)
    fired = await _submit(tx, terms, job, run_id, now)
    await _record(tx, job, fired, None, job.next_at, now)
    return fired


async def fire_once(
    tx: Tx, terms: Terms, job_id: str, run_id: str | None, command: Command, now: int
) -> Fired:
    """Fire a job for somebody who asks for it: with `run_id` whatever its schedule says, else if it is due.

    Asked again under the same key, the run it led to is told again. What led to none may be tried again.
    """
    if before := await commands.answered(tx, command, Accepted):
        return Fired(accepted=msgspec.structs.replace(before, new=False))
    if run_id is not None:
        fired = await force(tx, terms, job_id, run_id, now)
    else:
        fired = await fire(tx, terms, job_id, now)
    if fired.accepted:
        await commands.record(tx, command, fired.accepted, now)
    return fired


async def _busy(tx: Tx, terms: Terms) -> bool:
    row = await tx.one(SQL.unfinished)
    return row is not None and row["runs"] >= terms.config.cron.max_concurrent_runs


async def _record(tx: Tx, job: Job, fired: Fired, slot: int | None, next_at: int | None, now: int) -> None:
    """A slot that is used up with none to follow is the end of a job that had a schedule."""
    failed = fired.accepted is None
    await tx.do(
        SQL.fired,
        id=job.id,
        enabled=int(job.spec.enabled if slot is None else next_at is not None),
        next_at=next_at,
        slot=slot,
        run_id=None if fired.accepted is None else fired.accepted.run_id,
        status="error" if failed else None,
        error=fired.reason,
        failed=int(failed),
        now=now,
    )


async def _submit(tx: Tx, terms: Terms, job: Job, run_id: str, now: int) -> Fired:
    """Queue the run. What stands in its way is told and recorded, and is not the end of the job."""
    try:
        session = await _session(tx, terms, job, now)
        terms.door.check_send(session)
        submission = _submission(terms, job, session, run_id, now)
        if isinstance(job.spec.delivery, Announce):
            addressee = await _addressee(tx, terms, job, job.spec.delivery, now)
            submission = msgspec.structs.replace(submission, target=addressee.text)
        return Fired(accepted=await admissions.submit(tx, submission, now))
    except LaneFull:
        return Fired(reason=BUSY)
    except AntiphonError as error:
        return Fired(reason=str(error))


async def _session(tx: Tx, terms: Terms, job: Job, now: int) -> Row:
    agent_id, target = job.spec.agent_id or "", job.spec.session_target or ""
    if target == "main":
        return await terms.door.open(tx, OPERATOR, "send", f"agent:{agent_id}:main", found_at=now)
    if target != "isolated":
        return await terms.door.open(tx, OPERATOR, "send", target.removeprefix("session:"))
    key = keys.owned_key(agent_id, "cron", job.id)
    if await sessions.find(tx, key, None) is None:
        terms.config.agent(agent_id)  # raises for one that is not configured any more
        sandboxed = terms.door.sandboxes(agent_id, key)
        await sessions.create(tx, key, now, Birth(display_name=job.spec.name, sandboxed=sandboxed))
    return await terms.door.open(tx, OPERATOR, "send", str(key))


async def _addressee(tx: Tx, terms: Terms, job: Job, wanted: Announce, now: int) -> Addressee:
    """Whose chat hears the answer: that of the agent's main session, wherever it is."""
    main = await terms.door.open(tx, OPERATOR, "send", f"agent:{job.spec.agent_id}:main", found_at=now)
    whole = await tx.one(sessions.SQL.by_id, id=main["id"])
    assert whole is not None
    destination = deliveries.of_session(whole)
    if wanted.channel != LAST_HEARD:
        destination = Destination(
            channel=wanted.channel,
            to=wanted.to or (main["key"] if wanted.channel == deliveries.WEBCHAT else None),
            account_id=wanted.account_id,
            thread_id=wanted.thread_id,
        )
    return Addressee(session=main["id"], session_key=main["key"], destination=destination)


def _submission(terms: Terms, job: Job, session: Row, run_id: str, now: int) -> Submission:
    payload = job.spec.payload
    turn = payload if isinstance(payload, AgentTurn) else AgentTurn(message=payload.text)
    timeout = turn.timeout_seconds
    return Submission(
        run_id=run_id,
        session=session["id"],
        session_key=session["key"],
        origin=ORIGIN,
        message=User(content=turn.message, timestamp=now, provenance=Provenance(kind="cron")),
        model=turn.model,
        thinking=turn.thinking,
        deadline_at=None if timeout is None else now + round(timeout * 1000),
        max_queued=terms.config.store.lane_max_queued,
    )
