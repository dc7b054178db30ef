"""What follows from the end of a run, in the commit that ends it."""

from __future__ import annotations

import msgspec

from antiphon import keys
from antiphon.engine import admissions, deliveries, exchanges, gate, tasks
from antiphon.engine.admissions import NOTE, Submission
from antiphon.engine.deliveries import Destination, Parcel
from antiphon.engine.steps import NOTHING, Sequel, Step, queued
from antiphon.messages import INJECTED, Assistant, Provenance, Text
from antiphon.store import Tx
from antiphon.store.queries import Queries

RUNS = Queries("runs")


class Addressee(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Whose chat is to hear the reply of a run, as it was when the run was accepted."""

    session: int
    session_key: str
    destination: Destination

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()


async def addressee_of(tx: Tx, run_id: str | None) -> Addressee | None:
    """Whose chat is to hear the reply of a run, if somebody's is."""
    row = await tx.one(RUNS.handed_on, id=run_id) if run_id else None
    if row is None or row["target"] is None:
        return None
    return msgspec.json.decode(row["target"], type=Addressee)


async def after(tx: Tx, step: Step, now: int) -> Sequel:
    sequel = NOTHING
    if step.exchange is not None and not step.yielded:
        sequel += await exchanges.advance(tx, step, now)
    if step.task is not None:
        sequel += await tasks.advance(tx, step, now)
    if step.target is not None and step.said is not None and not step.yielded:
        sequel += await _pass_on(tx, step, step.said, now)
    return sequel


async def _pass_on(tx: Tx, step: Step, said: str, now: int) -> Sequel:
    """The reply goes to the chat that was named for it, and into that session's transcript."""
    addressee = msgspec.json.decode(step.target or "", type=Addressee)
    body = gate.clear_for_agents(said)  # the outbox clears it for people
    if gate.is_skip(said, gate.NO_REPLY) or not body:
        return NOTHING
    sequel, entry_run = NOTHING, step.run_id
    if addressee.session != step.session:
        note = _note(step, addressee, body, now)
        sequel, entry_run = queued(await admissions.follow(tx, note, now)), note.run_id
    parcel = Parcel(
        key=f"run:{step.run_id}",
        kind="reply",
        session=addressee.session,
        session_key=addressee.session_key,
        destination=addressee.destination,
        body=body,
        entry_run=entry_run,
    )
    await deliveries.post(tx, parcel, now)
    return sequel + Sequel(posted=True)


def _note(step: Step, addressee: Addressee, body: str, now: int) -> Submission:
    """What was said, in the transcript of another session than the one that said it."""
    message = Assistant(
        content=[Text(text=body)],
        timestamp=now,
        stop_reason="stop",
        provider="antiphon",
        model=INJECTED,
        provenance=Provenance(kind=step.origin, source_session_key=keys.spoken(step.session_key)),
    )
    return Submission(
        run_id=f"note:{step.run_id}",
        session=addressee.session,
        session_key=addressee.session_key,
        origin=NOTE,
        message=message,
    )


async def astray(tx: Tx) -> bool:
    """Whether anything is left that no run's end will move on."""
    return bool(await tx.all(exchanges.SQL.astray) or await tx.all(tasks.SQL.astray))


async def mend(tx: Tx, now: int) -> Sequel:
    """Settle it. That should never be needed, and nobody may wait for ever if it is."""
    return await exchanges.mend(tx, now) + await tasks.mend(tx, now)
