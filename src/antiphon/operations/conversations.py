"""The conversation of a session as a whole: begun anew, brought back, shortened, added to, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal, TypeAlias

from antiphon import keys
from antiphon.access import READ, Caller
from antiphon.engine import compaction, runs, sessions, transcripts
from antiphon.engine.transcripts import Entry
from antiphon.errors import Conflict, NotFound
from antiphon.messages import Assistant, Text
from antiphon.operations import checks
from antiphon.operations.runs import Runs
from antiphon.store import Row, Tx
from antiphon.views import CompactView, Conversation, Injected, SessionView

KEEP_MOST = 1_000_000  # entries
LABEL_MOST = 100  # characters
_PATIENT = Caller.operator([READ])

_Check: TypeAlias = Callable[[Row, str], None]
_Change: TypeAlias = Callable[[Tx, Row, int], Awaitable[Row]]


class Conversations(Runs):
    async def conversations(self, caller: Caller, session: str) -> list[Conversation]:
        """The conversations a key has had, newest first; each is readable by its session id."""
        rows = await self._store.read(self._conversations, caller, session)
        return [
            Conversation(
                session_id=row["session_id"],
                reason=row["reason"],
                started_at=row["started_at"],
                ended_at=row["ended_at"],
            )
            for row in rows
        ]

    async def _conversations(self, tx: Tx, caller: Caller, session: str) -> list[Row]:
        return await sessions.conversations(tx, await self._door.open(tx, caller, "read", session))

    # --- another transcript ---

    async def renew(
        self, caller: Caller, session: str, reason: Literal["new", "reset"] = "new"
    ) -> SessionView:
        """Begin a new conversation under the same key. The old one stays readable, and can be restored."""
        row = await self._store.tx(self._renew, caller, session, reason, self._clock.now())
        return self._renewed(caller, row, reason)

    async def _renew(self, tx: Tx, caller: Caller, session: str, reason: str, now: int) -> Row:
        row = await self._door.open(tx, caller, "manage", session)
        await sessions.renew(tx, row, reason, now)
        return await self._described(tx, row["id"])

    async def restore(self, caller: Caller, session_id: str) -> SessionView:
        """Make an older conversation of a key its current one again."""
        row = await self._store.tx(self._restore, caller, session_id, self._clock.now())
        return self._renewed(caller, row, "restore")

    async def _restore(self, tx: Tx, caller: Caller, session_id: str, now: int) -> Row:
        row = await self._door.open(tx, caller, "manage", session_id)
        await sessions.restore(tx, row, now)
        return await self._described(tx, row["id"])

    def _renewed(self, caller: Caller, row: Row, reason: str) -> SessionView:
        self._tell_one(row, "renewed")  # for whoever follows it, why it goes on elsewhere is all the same
        self._tell_all(row, reason)
        return self._session_view(caller, row)

    async def reset(
        self,
        caller: Caller,
        session: str,
        reason: Literal["new", "reset"] = "reset",
        timeout: float = 15.0,
        *,
        key: str | None = None,
    ) -> SessionView:
        """As `renew`, for a session that may be busy: what runs or waits in it is stopped first.

        Asked again with the same key, nothing is done again.
        """
        checks.key(key)
        if key is not None and (done := await self._store.read(self._done, caller, session, key)):
            return self._session_view(caller, done)

        async def renew(tx: Tx, row: Row, now: int) -> Row:
            if key is None or await runs.record_command(tx, key, row["id"], reason, now):
                await sessions.renew(tx, row, reason, now)
            return await self._described(tx, row["id"])

        row = await self._when_idle(caller, session, checks.current, renew, timeout)
        return self._renewed(caller, row, reason)

    async def _done(self, tx: Tx, caller: Caller, session: str, key: str) -> Row | None:
        """The session, if what this key stands for was done before."""
        row = await self._door.open(tx, caller, "manage", session)
        known = await tx.one(runs.SQL.accepted_before, id=key)
        return await self._described(tx, row["id"]) if known and known["session"] == row["id"] else None

    async def delete(self, caller: Caller, session: str, timeout: float = 15.0) -> bool:
        """Remove a session and everything said in it; False if there is none. What it spawned stays."""

        async def forget(tx: Tx, row: Row, now: int) -> Row:
            await sessions.forget(tx, row["id"], row["key"])
            return row

        try:
            row = await self._when_idle(caller, session, _check_deletable, forget, timeout)
        except NotFound:
            return False
        self._tell(row, "delete")
        return True

    async def _when_idle(
        self, caller: Caller, session: str, check: _Check, change: _Change, timeout: float
    ) -> Row:
        """Stop whatever runs or waits in a session, and change it in the commit that finds it idle."""
        engine = self._running()
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            row, stopped, active = await self._store.tx(
                self._change_idle, caller, session, check, change, self._clock.now()
            )
            engine.stopping(stopped)
            if active is None:
                return row
            left = until - loop.time()
            if left <= 0:
                raise Conflict(
                    f"Session {row['key']} is still active;", "try again in a moment.", key=row["key"]
                )
            with suppress(NotFound):  # somebody else has deleted it, which the next look shows
                # Whoever may manage a session need not be allowed to read it: the wait is our own.
                await self.wait(_PATIENT, active["id"], left)

    async def _change_idle(
        self, tx: Tx, caller: Caller, session: str, check: _Check, change: _Change, now: int
    ) -> tuple[Row, runs.Stopped, Row | None]:
        row = await self._door.open(tx, caller, "manage", session)
        check(row, session)
        stopped = await runs.cancel(tx, row["id"], None, now)
        active = await tx.one(runs.SQL.active_in, session=row["id"])
        return row if active else await change(tx, row, now), stopped, active

    # --- entries that belong to no run ---

    async def compact(self, caller: Caller, session: str, keep: int = 400) -> CompactView:
        """Leave all but about the last `keep` entries out of prompts. The transcript keeps them."""
        keep = checks.between(keep, 1, KEEP_MOST, "keep")
        row, entry, kept = await self._store.tx(self._compact, caller, session, keep, self._clock.now())
        if entry is None:
            return CompactView(compacted=False, kept=kept, reason="short enough" if kept else "no transcript")
        self._tell_entry(row, entry)
        self._tell(row, "compact")
        return CompactView(compacted=True, kept=kept)

    async def _compact(
        self, tx: Tx, caller: Caller, session: str, keep: int, now: int
    ) -> tuple[Row, Entry | None, int]:
        row = await self._door.open(tx, caller, "manage", session)
        checks.current(row, session)
        await sessions.check_idle(tx, row)
        shortened, kept = await compaction.shorten(tx, row["transcript"], keep, now)
        if shortened is None:
            return row, None, kept
        await tx.do(sessions.SQL.clear_context, id=row["id"])
        return row, await sessions.note(tx, row["id"], shortened, now), kept

    async def inject(self, caller: Caller, session: str, text: str, label: str | None = None) -> Injected:
        """Put words into a transcript as if the agent had said them, without asking it."""
        said = text if label is None else f"[{checks.name(label, LABEL_MOST, 'label')}]\n\n{text}"
        checks.content(text, self.config.store.message_max_bytes, beside=label)
        row, entry = await self._store.tx(self._inject, caller, session, said, self._clock.now())
        self._tell_entry(row, entry)
        self._tell_all(row, "inject")
        return Injected(
            message_id=entry.id, seq=entry.seq, session_key=row["key"], session_id=row["session_id"]
        )

    async def _inject(self, tx: Tx, caller: Caller, session: str, text: str, now: int) -> tuple[Row, Entry]:
        row = await self._door.open(tx, caller, "manage", session)
        checks.current(row, session)
        await _check_no_call_waits(tx, row)
        notice = Assistant(
            content=[Text(text=text)],
            timestamp=now,
            stop_reason="stop",
            provider="antiphon",
            model="gateway-injected",
        )
        return row, await sessions.note(tx, row["id"], notice, now)


def _check_deletable(row: Row, reference: str) -> None:
    checks.current(row, reference)
    if keys.parse(row["key"]).kind == "main":
        raise Conflict(f"Cannot delete the main session ({row['key']}).", "Reset it instead.", key=row["key"])


async def _check_no_call_waits(tx: Tx, row: Row) -> None:
    """Between a call and its result an entry would part them: the model would be told the call was interrupted."""
    active = await tx.one(runs.SQL.active_in, session=row["id"])
    if active and await transcripts.open_calls(tx, active["transcript"], active["first_seq"]):
        raise Conflict(
            f"Session {row['key']!r} is waiting for a tool.",
            "Try again when the tool has answered, or stop the run first.",
            run_id=active["id"],
        )
