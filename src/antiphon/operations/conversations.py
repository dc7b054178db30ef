"""The conversation of a session as a whole: begun anew, brought back, shortened, added to, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

import msgspec

from antiphon import access
from antiphon.access import READ, Caller
from antiphon.engine import admissions, commands, compaction, runs, sessions, transcripts, words
from antiphon.engine.commands import Command
from antiphon.engine.runs import Stopped
from antiphon.engine.transcripts import Entry
from antiphon.errors import Conflict, NotFound
from antiphon.messages import INJECTED, Assistant, Text
from antiphon.operations import checks
from antiphon.operations.runs import Runs
from antiphon.store import Row, Tx
from antiphon.views import CompactView, Conversation, Injected, SessionView

KEEP_MOST = 1_000_000  # entries
ROUNDS = 10  # of stopping what stopping has led to
LABEL_MOST = 100  # characters
_PATIENT = Caller.operator([READ])


class _Plan(msgspec.Struct, frozen=True):
    """What is to become of a session when it is idle: whether that was done before, may be done, and doing it."""

    done: Callable[[Tx, int], Awaitable[bool]]
    check: Callable[[Row], None]
    change: Callable[[Tx, Row, int], Awaitable[Row]]


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
        self,
        caller: Caller,
        session: str,
        reason: Literal["new", "reset"] = "new",
        *,
        key: str | None = None,
        expected: str | None = None,
    ) -> SessionView:
        """Begin a new conversation under the same key. The old one stays readable, and can be restored.

        With `expected`, only that conversation is ended. Asked again with the same key, nothing is done again.

        Raises:
            Conflict: it is answering.
        """
        words.check_key(key)
        plan = self._renewal(caller, session, reason, key, expected)
        row = await self._store.tx(self._renew, caller, session, plan, self._clock.now())
        return await self._goes_on(caller, session, row, reason)

    async def _renew(self, tx: Tx, caller: Caller, session: str, plan: _Plan, now: int) -> Row | None:
        if await plan.done(tx, now):
            return None
        row = await self._door.open(tx, caller, "manage", session)
        plan.check(row)
        await self._end_abandoned(tx, row["id"], now)
        return await plan.change(tx, row, now)

    async def _goes_on(self, caller: Caller, session: str, row: Row | None, reason: str) -> SessionView:
        """The session with its new conversation; without a row it was begun before."""
        if row is not None:
            return self._renewed(caller, row, reason)
        return self._session_view(caller, await self._store.read(self._managed, caller, session))

    async def restore(self, caller: Caller, session_id: str) -> SessionView:
        """Make an older conversation of a key its current one again."""
        row = await self._store.tx(self._restore, caller, session_id, self._clock.now())
        return self._renewed(caller, row, "restore")

    async def _restore(self, tx: Tx, caller: Caller, session_id: str, now: int) -> Row:
        row = await self._door.open(tx, caller, "manage", session_id)
        await self._end_abandoned(tx, row["id"], now)
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
        expected: str | None = None,
    ) -> SessionView:
        """As `renew`, for a session that may be busy: what runs or waits in it is stopped first.

        With `expected`, only that conversation is ended. Asked again with the same key, nothing is done again.
        """
        words.check_key(key)
        plan = self._renewal(caller, session, reason, key, expected)
        row = await self._when_idle(caller, session, plan, timeout)
        return await self._goes_on(caller, session, row, reason)

    def _renewal(
        self, caller: Caller, session: str, reason: str, key: str | None, expected: str | None
    ) -> _Plan:
        async def done(tx: Tx, now: int) -> bool:
            if key is None or await tx.one(runs.SQL.accepted_before, id=key) is None:
                return False
            row = await self._door.open(tx, caller, "manage", session)
            return not await admissions.record_command(tx, key, row["id"], reason, now)

        def check(row: Row) -> None:
            checks.current(row, session, expected)

        async def renew(tx: Tx, row: Row, now: int) -> Row:
            if key is None or await admissions.record_command(tx, key, row["id"], reason, now):
                await sessions.renew(tx, row, reason, now)
            return await self._described(tx, row["id"])

        return _Plan(done, check, renew)

    async def _managed(self, tx: Tx, caller: Caller, session: str) -> Row:
        return await self._described(tx, (await self._door.open(tx, caller, "manage", session))["id"])

    async def delete(
        self,
        caller: Caller,
        session: str,
        timeout: float = 15.0,
        *,
        key: str | None = None,
        expected: str | None = None,
    ) -> bool:
        """Remove a session and everything said in it; False if there is none. What it spawned stays.

        When a person asks for it, what came of the task that it was spawned for goes, too.

        With `expected`, only if that is its conversation. Asked again with the same key, nothing is removed again,
        whatever goes by that name now.
        """
        words.check_key(key)
        access.require_scope(caller, "manage")
        plan = _deletion(caller, session, key, expected)
        try:
            row = await self._when_idle(caller, session, plan, timeout)
        except NotFound:
            return False
        if row is not None:
            self._tell(row, "delete")
        return True

    async def _when_idle(self, caller: Caller, session: str, plan: _Plan, timeout: float) -> Row | None:
        """Stop whatever runs or waits in a session, and change it in the commit that finds it idle.

        None when that was done before.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            row, stopped, active = await self._store.tx(
                self._change_idle, caller, session, plan, self._clock.now()
            )
            if self._engine is not None:  # else nobody listens, and what follows waits for the next start
                await self._engine.stopping(stopped)
            if row is None or active is None:
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
        self, tx: Tx, caller: Caller, session: str, plan: _Plan, now: int
    ) -> tuple[Row | None, Stopped, Row | None]:
        if await plan.done(tx, now):
            return None, Stopped([], []), None
        row = await self._door.open(tx, caller, "manage", session)
        plan.check(row)
        stopped = await self._stop_all(tx, row["id"], now)
        active = await tx.one(sessions.SQL.at_work, id=row["id"])
        return row if active else await plan.change(tx, row, now), stopped, active

    async def _stop_all(self, tx: Tx, session: int, now: int) -> Stopped:
        """Stop what runs in a session and drop what waits, also what is queued because something was dropped."""
        stopped = runs.UNTOUCHED
        for _ in range(ROUNDS):
            stopped += await runs.cancel(tx, session, None, now)
            stopped += await self._end_abandoned(tx, session, now)
            left = await tx.one(sessions.SQL.at_work, id=session)
            if left is None or left["running"]:  # whoever plays it was asked to stop, and it is waited for
                break
        return stopped

    async def _end_abandoned(self, tx: Tx, session: int, now: int) -> Stopped:
        """Who has the store without an engine has it alone, and knows that nobody plays what runs: that ends here."""
        if self._engine is not None:
            return runs.UNTOUCHED
        return await runs.end_abandoned(tx, session, now, shared=self._store.shared)

    # --- entries that belong to no run ---

    async def compact(
        self, caller: Caller, session: str, keep: int = 400, *, key: str | None = None
    ) -> CompactView:
        """Leave all but about the last `keep` entries out of prompts. The transcript keeps them.

        Asked again with the same key, nothing more is left out.
        """
        words.check_key(key)
        keep = checks.between(keep, 1, KEEP_MOST, "keep")
        view, row, entry = await self._store.tx(self._compact, caller, session, keep, key, self._clock.now())
        if entry is not None:
            self._tell_entry(row, entry)
            self._tell(row, "compact")
        return view

    async def _compact(
        self, tx: Tx, caller: Caller, session: str, keep: int, key: str | None, now: int
    ) -> tuple[CompactView, Row, Entry | None]:
        row = await self._door.open(tx, caller, "manage", session)
        command = Command(key, ("compact", row["id"], keep))
        if before := await commands.answered(tx, command, CompactView):
            return before, row, None
        checks.current(row, session)
        await sessions.check_idle(tx, row)
        shortened, kept = await compaction.shorten(tx, row["transcript"], keep, now)
        entry = None
        if shortened is not None:
            await tx.do(sessions.SQL.clear_context, id=row["id"])
            entry = await sessions.note(tx, row["id"], shortened, now)
        view = _compacted(kept, shorter=entry is not None)
        await commands.record(tx, command, view, now)
        return view, row, entry

    async def inject(
        self, caller: Caller, session: str, text: str, label: str | None = None, *, key: str | None = None
    ) -> Injected:
        """Put words into a transcript as if the agent had said them, without asking it; with a key, once."""
        words.check_key(key)
        said = text if label is None else f"[{checks.name(label, LABEL_MOST, 'label')}]\n\n{text}"
        words.check(text, self.config.store.message_max_bytes, beside=label)
        injected, row, entry = await self._store.tx(
            self._inject, caller, session, said, key, self._clock.now()
        )
        if entry is not None:
            self._tell_entry(row, entry)
            self._tell_all(row, "inject")
        return injected

    async def _inject(
        self, tx: Tx, caller: Caller, session: str, text: str, key: str | None, now: int
    ) -> tuple[Injected, Row, Entry | None]:
        row = await self._door.open(tx, caller, "manage", session)
        command = Command(key, ("inject", row["id"], text))
        if before := await commands.answered(tx, command, Injected):
            return before, row, None
        checks.current(row, session)
        await _check_no_call_waits(tx, row)
        notice = Assistant(
            content=[Text(text=text)],
            timestamp=now,
            stop_reason="stop",
            provider="antiphon",
            model=INJECTED,
        )
        entry = await sessions.note(tx, row["id"], notice, now)
        injected = Injected(
            message_id=entry.id, seq=entry.seq, session_key=row["key"], session_id=row["session_id"]
        )
        await commands.record(tx, command, injected, now)
        return injected, row, entry


def _compacted(kept: int, *, shorter: bool) -> CompactView:
    if shorter:
        return CompactView(compacted=True, kept=kept)
    return CompactView(compacted=False, kept=kept, reason="short enough" if kept else "no transcript")


def _deletion(caller: Caller, session: str, key: str | None, expected: str | None) -> _Plan:
    command = Command(key, ("delete", session, expected))

    async def done(tx: Tx, now: int) -> bool:
        return await commands.answered(tx, command, bool) is not None

    def check(row: Row) -> None:
        checks.current(row, session, expected)
        checks.deletable(row["key"])

    async def forget(tx: Tx, row: Row, now: int) -> Row:
        await sessions.forget(tx, row["id"], row["key"], now)
        if caller.is_operator:
            await sessions.forget_tasks(tx, row["id"], row["key"])
        await commands.record(tx, command, True, now)
        return row

    return _Plan(done, check, forget)


async def _check_no_call_waits(tx: Tx, row: Row) -> None:
    """Between a call and its result an entry would part them: the model would be told the call was interrupted."""
    active = await tx.one(runs.SQL.active_in, session=row["id"])
    if active and await transcripts.open_calls(tx, active["transcript"], active["first_seq"]):
        raise Conflict(
            f"Session {row['key']!r} is waiting for a tool.",
            "Try again when the tool has answered, or stop the run first.",
            run_id=active["id"],
        )
