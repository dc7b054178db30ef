"""Operations on a session's conversation as a whole: renew, restore, compact, inject, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

import msgspec

from antiphon import access
from antiphon.access import READ_SCOPE, Caller
from antiphon.engine import idempotency, validation
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.runs import compaction, endings, lifecycle, run_queue
from antiphon.engine.runs.effects import NO_EFFECTS, Effects
from antiphon.engine.sessions import session_rows, transcripts
from antiphon.engine.sessions.transcripts import Entry
from antiphon.errors import Conflict, NotFound
from antiphon.messages import INJECTED_MODEL, AssistantMessage, TextBlock
from antiphon.operations import request_validation
from antiphon.operations.runs import RunOperations
from antiphon.store import Row, Tx
from antiphon.views import CompactView, ConversationView, InjectedEntry, SessionView

MAX_KEPT_ENTRIES = 1_000_000
MAX_STOP_ROUNDS = 10  # rounds of stopping runs that were queued by stopping others
MAX_INJECT_LABEL_CHARACTERS = 100
_WAITING_OPERATOR = Caller.operator([READ_SCOPE])


class _IdleChange(msgspec.Struct, frozen=True):
    """A change to apply once a session is idle: whether it was already done, its precondition, and the change."""

    done: Callable[[Tx, int], Awaitable[bool]]
    check: Callable[[Row], None]
    change: Callable[[Tx, Row, int], Awaitable[Row]]


class SessionLifecycleOperations(RunOperations):
    async def list_conversations(self, caller: Caller, session: str) -> list[ConversationView]:
        """Return the conversations of a key, newest first; each is readable by its session id."""
        rows = await self._store.read(self._load_conversations, caller, session)
        return [
            ConversationView(
                session_id=row["session_id"],
                reason=row["reason"],
                started_at=row["started_at"],
                ended_at=row["ended_at"],
            )
            for row in rows
        ]

    async def _load_conversations(self, tx: Tx, caller: Caller, session: str) -> list[Row]:
        return await session_rows.list_transcripts(
            tx, await self._session_resolver.open(tx, caller, "read", session)
        )

    # --- changing the conversation ---

    async def renew(
        self,
        caller: Caller,
        session: str,
        reason: Literal["new", "reset"] = "new",
        *,
        key: str | None = None,
        expected: str | None = None,
    ) -> SessionView:
        """Begin a new conversation under the same key. The old one stays readable and can be restored.

        With `expected`, only that conversation is ended. A repeated call with the same key does nothing.

        Raises:
            Conflict: the session is busy.
        """
        validation.validate_idempotency_key(key)
        plan = self._plan_renewal(caller, session, reason, key, expected)
        row = await self._store.tx(self._renew, caller, session, plan, self._clock.now())
        return await self._build_renewed_view(caller, session, row, reason)

    async def _renew(self, tx: Tx, caller: Caller, session: str, plan: _IdleChange, now: int) -> Row | None:
        if await plan.done(tx, now):
            return None
        row = await self._session_resolver.open(tx, caller, "manage", session)
        plan.check(row)
        await self._end_abandoned(tx, row["id"], now)
        return await plan.change(tx, row, now)

    async def _build_renewed_view(
        self, caller: Caller, session: str, row: Row | None, reason: str
    ) -> SessionView:
        """Return the session with its new conversation; `row` is None if it was begun by an earlier call."""
        if row is not None:
            return self._publish_renewal(caller, row, reason)
        return self._build_session_view(
            caller, await self._store.read(self._load_managed_session, caller, session)
        )

    async def restore(self, caller: Caller, session_id: str) -> SessionView:
        """Make an older conversation of a key its current one again."""
        row = await self._store.tx(self._restore, caller, session_id, self._clock.now())
        return self._publish_renewal(caller, row, "restore")

    async def _restore(self, tx: Tx, caller: Caller, session_id: str, now: int) -> Row:
        row = await self._session_resolver.open(tx, caller, "manage", session_id)
        await self._end_abandoned(tx, row["id"], now)
        await session_rows.restore_transcript(tx, row, now)
        return await self._load_described_session(tx, row["id"])

    def _publish_renewal(self, caller: Caller, row: Row, reason: str) -> SessionView:
        self._publish_to_session(row, "renewed")  # subscribers need not know the reason for the change
        self._publish_to_all_sessions(row, reason)
        return self._build_session_view(caller, row)

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
        """Begin a new conversation as `renew` does, after stopping what runs or waits in the session.

        With `expected`, only that conversation is ended. A repeated call with the same key does nothing.
        """
        validation.validate_idempotency_key(key)
        plan = self._plan_renewal(caller, session, reason, key, expected)
        row = await self._change_when_idle(caller, session, plan, timeout)
        return await self._build_renewed_view(caller, session, row, reason)

    def _plan_renewal(
        self, caller: Caller, session: str, reason: str, key: str | None, expected: str | None
    ) -> _IdleChange:
        async def done(tx: Tx, now: int) -> bool:
            if key is None or await tx.one(lifecycle.SQL.find_accepted, id=key) is None:
                return False
            row = await self._session_resolver.open(tx, caller, "manage", session)
            return not await run_queue.record_command(tx, key, row["id"], reason, now)

        def check(row: Row) -> None:
            request_validation.require_current_conversation(row, session, expected)

        async def renew(tx: Tx, row: Row, now: int) -> Row:
            if key is None or await run_queue.record_command(tx, key, row["id"], reason, now):
                await session_rows.start_new_transcript(tx, row, reason, now)
            return await self._load_described_session(tx, row["id"])

        return _IdleChange(done, check, renew)

    async def _load_managed_session(self, tx: Tx, caller: Caller, session: str) -> Row:
        return await self._load_described_session(
            tx, (await self._session_resolver.open(tx, caller, "manage", session))["id"]
        )

    async def delete(
        self,
        caller: Caller,
        session: str,
        timeout: float = 15.0,
        *,
        key: str | None = None,
        expected: str | None = None,
    ) -> bool:
        """Delete a session with all its conversations; return False if it does not exist. Its sub-agents stay.

        When a person deletes it, the result of the task that it was spawned for is deleted too. With `expected`, it is
        deleted only if that is its conversation. A repeated call with the same key deletes nothing, even if the name is
        in use again.
        """
        validation.validate_idempotency_key(key)
        access.require_scope(caller, "manage")
        plan = _plan_deletion(caller, session, key, expected)
        try:
            row = await self._change_when_idle(caller, session, plan, timeout)
        except NotFound:
            return False
        if row is not None:
            self._publish_change(row, "delete")
        return True

    async def _change_when_idle(
        self, caller: Caller, session: str, plan: _IdleChange, timeout: float
    ) -> Row | None:
        """Stop everything that runs or waits in a session, and change it in the transaction that finds it idle.

        Returns None if the change was already done.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            row, stopped, active = await self._store.tx(
                self._try_change_idle, caller, session, plan, self._clock.now()
            )
            if self._engine is not None:  # without an engine, the effects are applied at the next start
                await self._engine.apply_effects(stopped)
            if row is None or active is None:
                return row
            left = until - loop.time()
            if left <= 0:
                raise Conflict(
                    f"Session {row['key']} is still active;", "try again in a moment.", key=row["key"]
                )
            with suppress(NotFound):  # deleted by another caller; the next iteration handles it
                # The right to manage a session does not include reading it, so the wait uses an internal caller.
                await self.wait(_WAITING_OPERATOR, active["id"], left)

    async def _try_change_idle(
        self, tx: Tx, caller: Caller, session: str, plan: _IdleChange, now: int
    ) -> tuple[Row | None, Effects, Row | None]:
        if await plan.done(tx, now):
            return None, NO_EFFECTS, None
        row = await self._session_resolver.open(tx, caller, "manage", session)
        plan.check(row)
        stopped = await self._stop_all(tx, row["id"], now)
        active = await tx.one(session_rows.SQL.running_or_queued, id=row["id"])
        return row if active else await plan.change(tx, row, now), stopped, active

    async def _stop_all(self, tx: Tx, session: int, now: int) -> Effects:
        """Stop the running run of a session and drop queued ones, also those queued because others were dropped."""
        stopped = NO_EFFECTS
        for _ in range(MAX_STOP_ROUNDS):
            stopped += await endings.cancel_runs(tx, session, None, now)
            stopped += await self._end_abandoned(tx, session, now)
            left = await tx.one(session_rows.SQL.running_or_queued, id=session)
            # The process that executes it was asked to stop; the caller waits for it.
            if left is None or left["running"]:
                break
        return stopped

    async def _end_abandoned(self, tx: Tx, session: int, now: int) -> Effects:
        """End a run whose process is gone. Without an engine this process owns the store, so no other executes it."""
        if self._engine is not None:
            return NO_EFFECTS
        return await endings.end_abandoned_run(tx, session, now, shared=self._store.shared)

    # --- entries outside of runs ---

    async def compact(
        self, caller: Caller, session: str, keep: int = 400, *, key: str | None = None
    ) -> CompactView:
        """Exclude all but about the last `keep` entries from prompts. The transcript keeps them.

        A repeated call with the same key excludes nothing more.
        """
        validation.validate_idempotency_key(key)
        keep = request_validation.validate_and_clamp(keep, 1, MAX_KEPT_ENTRIES, "keep")
        view, row, entry = await self._store.tx(self._compact, caller, session, keep, key, self._clock.now())
        if entry is not None:
            self._publish_entry(row, entry)
            self._publish_change(row, "compact")
        return view

    async def _compact(
        self, tx: Tx, caller: Caller, session: str, keep: int, key: str | None, now: int
    ) -> tuple[CompactView, Row, Entry | None]:
        row = await self._session_resolver.open(tx, caller, "manage", session)
        command = IdempotentCommand(key, ("compact", row["id"], keep))
        if before := await idempotency.load_recorded_answer(tx, command, CompactView):
            return before, row, None
        request_validation.require_current_conversation(row, session)
        await session_rows.check_idle(tx, row)
        shortened, kept = await compaction.compact_without_model(tx, row["transcript"], keep, now)
        entry = None
        if shortened is not None:
            await tx.do(session_rows.SQL.clear_context, id=row["id"])
            entry = await session_rows.append_note(tx, row["id"], shortened, now)
        view = _build_compact_view(kept, shorter=entry is not None)
        await idempotency.record_answer(tx, command, view, now)
        return view, row, entry

    async def inject(
        self, caller: Caller, session: str, text: str, label: str | None = None, *, key: str | None = None
    ) -> InjectedEntry:
        """Append a message of the agent to a transcript without running the agent; with a key, only once."""
        validation.validate_idempotency_key(key)
        said = text
        if label is not None:
            name = request_validation.validate_printable_name(label, MAX_INJECT_LABEL_CHARACTERS, "label")
            said = f"[{name}]\n\n{text}"
        validation.validate_message_content(text, self.config.store.message_max_bytes, beside=label)
        injected, row, entry = await self._store.tx(
            self._inject, caller, session, said, key, self._clock.now()
        )
        if entry is not None:
            self._publish_entry(row, entry)
            self._publish_to_all_sessions(row, "inject")
        return injected

    async def _inject(
        self, tx: Tx, caller: Caller, session: str, text: str, key: str | None, now: int
    ) -> tuple[InjectedEntry, Row, Entry | None]:
        row = await self._session_resolver.open(tx, caller, "manage", session)
        command = IdempotentCommand(key, ("inject", row["id"], text))
        if before := await idempotency.load_recorded_answer(tx, command, InjectedEntry):
            return before, row, None
        request_validation.require_current_conversation(row, session)
        await _require_no_open_calls(tx, row)
        notice = AssistantMessage(
            content=[TextBlock(text=text)],
            timestamp=now,
            stop_reason="stop",
            provider="antiphon",
            model=INJECTED_MODEL,
        )
        entry = await session_rows.append_note(tx, row["id"], notice, now)
        injected = InjectedEntry(
            message_id=entry.id, seq=entry.seq, session_key=row["key"], session_id=row["session_id"]
        )
        await idempotency.record_answer(tx, command, injected, now)
        return injected, row, entry


def _build_compact_view(kept: int, *, shorter: bool) -> CompactView:
    if shorter:
        return CompactView(compacted=True, kept=kept)
    return CompactView(compacted=False, kept=kept, reason="short enough" if kept else "no transcript")


def _plan_deletion(caller: Caller, session: str, key: str | None, expected: str | None) -> _IdleChange:
    command = IdempotentCommand(key, ("delete", session, expected))

    async def done(tx: Tx, now: int) -> bool:
        return await idempotency.load_recorded_answer(tx, command, bool) is not None

    def check(row: Row) -> None:
        request_validation.require_current_conversation(row, session, expected)
        request_validation.require_deletable_key(row["key"])

    async def forget(tx: Tx, row: Row, now: int) -> Row:
        await session_rows.delete_session(tx, row["id"], row["key"], now)
        if caller.is_operator:
            await session_rows.delete_task_texts(tx, row["id"], row["key"])
        await idempotency.record_answer(tx, command, True, now)
        return row

    return _IdleChange(done, check, forget)


async def _require_no_open_calls(tx: Tx, row: Row) -> None:
    """Refuse an entry between a tool call and its result: the model would see the call as interrupted."""
    active = await tx.one(lifecycle.SQL.active_in_session, session=row["id"])
    if active and await transcripts.load_open_calls(tx, active["transcript"], active["first_seq"]):
        raise Conflict(
            f"Session {row['key']!r} is waiting for a tool.",
            "Try again when the tool has answered, or stop the run first.",
            run_id=active["id"],
        )
