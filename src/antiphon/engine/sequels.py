"""What follows from the end of a run, in the commit that ends it."""

from __future__ import annotations

import msgspec

from antiphon import keys
from antiphon.engine import admissions, deliveries, exchanges, gate, tasks, yields
from antiphon.engine.admissions import NOTE, Submission
from antiphon.engine.deliveries import Destination, Parcel
from antiphon.engine.steps import NOTHING, WAKE, Sequel, Step, queued
from antiphon.messages import INJECTED, Assistant, Provenance, Text
from antiphon.store import Row, Tx
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
    sequel, answer = NOTHING, step
    if step.yielded and not await yields.end(tx, step.run_id):
        # It was stopped after it yielded: no run will answer for it.
        answer = step._replace(yielded=False, state="cancelled", reply=None)
    if not answer.yielded:
        sequel += await _answer(tx, answer, now)
    if step.task is not None:
        sequel += await tasks.advance(tx, step, now)
    return sequel


async def _answer(tx: Tx, step: Step, now: int) -> Sequel:
    """Pass the outcome of a run to its exchange and addressee, and to those of the runs it was woken for."""
    sequel, addressees = NOTHING, set[str]()
    answered: list[Row] = await yields.answered_by(tx, step.run_id) if step.origin == WAKE else []
    parts = [(step.run_id, step.exchange, step.target)]
    parts += [(run["id"], run["exchange"], run["target"]) for run in answered]
    for asked, exchange, target in parts:
        if exchange is not None:
            sequel += await exchanges.advance(tx, step._replace(exchange=exchange), now)
        if target is not None and step.said is not None and target not in addressees:
            addressees.add(target)
            sequel += await _pass_on(tx, step, asked, target, now)
    return sequel


async def stop_waiting(tx: Tx, session: int, now: int) -> None:
    """Stop a session from being woken; the exchanges of its yielded runs end without a reply."""
    for exchange, run_id in await yields.stop(tx, session):
        await exchanges.give_up(tx, exchange, run_id, now)


async def _pass_on(tx: Tx, step: Step, asked: str, target: str, now: int) -> Sequel:
    """Post the reply to the chat that was named for it, and add it to that session's transcript.

    `asked` is the run that named the chat: the one that answers, or one that it was woken for.
    """
    addressee = msgspec.json.decode(target, type=Addressee)
    said = step.said or ""
    body = gate.clear_for_agents(said)  # the outbox clears it for people
    if gate.is_skip(said, gate.NO_REPLY) or not body:
        return NOTHING
    sequel, entry_run = NOTHING, step.run_id
    if addressee.session != step.session:
        note = _note(step, asked, addressee, body, now)
        sequel, entry_run = queued(await admissions.follow(tx, note, now)), note.run_id
    parcel = Parcel(
        key=f"run:{asked}",
        kind="reply",
        session=addressee.session,
        session_key=addressee.session_key,
        destination=addressee.destination,
        body=body,
        entry_run=entry_run,
    )
    await deliveries.post(tx, parcel, now)
    return sequel + Sequel(posted=True)


def _note(step: Step, asked: str, addressee: Addressee, body: str, now: int) -> Submission:
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
        run_id=f"note:{asked}",
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
