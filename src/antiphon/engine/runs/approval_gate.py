"""Waits for approval before a tool call is made.

The waiting run occupies no slot, and after a crash it keeps waiting: the approval is a row (`approval_rows`). An
allowed call begins in a commit of its own. A call that may have begun before a crash is never begun again, unless the
tool can settle it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal

from antiphon.bus import EventBus
from antiphon.clock import Clock
from antiphon.engine.runs import approval_rows, lifecycle
from antiphon.engine.runs.approval_rows import SQL, build_approval_event, compute_digest, publish_approval
from antiphon.engine.runs.lifecycle import Claim, retry_while_store_full
from antiphon.engine.toolbox import ApprovalQuestion, Tool, ToolOutput, ToolRequest
from antiphon.store import Row, Store, Tx

DEFAULT_APPROVAL_TIMEOUT_SECONDS = 1800.0
MAX_QUESTION_CHARACTERS = 8000  # a person reads all of it; a longer call is refused
MAX_STORED_APPROVALS_PER_SESSION = 500
APPROVAL_RECHECK_SECONDS = 5.0  # then the store's clock is read again, which may drift from the event loop's


async def open_approval(
    tx: Tx, claim: Claim, tool: str, call: str, question: ApprovalQuestion, expires_at: int, now: int
) -> Row:
    """Return the approval of a call. A new one is pending, unless a person always allows this call."""
    await lifecycle.commit_messages(
        tx, claim, [], now
    )  # fenced; and a run that waits for a person makes progress
    binding = _compute_binding(question)
    subject = None if "\0" in (question.grant or "") else question.grant  # not every database stores it
    while (row := await tx.one(SQL.by_call, call=call)) is None:
        grant = await approval_rows.find_grant(tx, claim.agent_id, tool, subject, binding)
        await tx.do(  # without effect if the random id is taken
            SQL.insert,
            id=approval_rows.new_approval_id(),
            call=call,
            run_id=claim.run_id,
            session=claim.session,
            session_key=claim.session_key,
            agent_id=claim.agent_id,
            tool=tool,
            question=approval_rows.format_question(question.text),
            binding=binding,
            subject=subject,
            state="pending" if grant is None else "allowed",
            always=int(grant is not None),
            decided_by=None if grant is None else f"grant {grant['id']}",
            now=now,
            expires_at=expires_at,
            decided_at=None if grant is None else now,
        )
        await tx.do(SQL.delete_oldest, session=claim.session, kept=MAX_STORED_APPROVALS_PER_SESSION)
    return row


async def begin_call(tx: Tx, claim: Claim, approval_id: str, now: int) -> bool:
    """Record that an allowed call begins. False if it may have begun before."""
    await lifecycle.commit_messages(tx, claim, [], now)
    return bool(await tx.do(SQL.start, id=approval_id, now=now))


def _compute_binding(question: ApprovalQuestion) -> str:
    return compute_digest(question.text if question.grant is None else question.grant, question.binding)


def _is_same_question(row: Row, question: ApprovalQuestion) -> bool:
    """Whether a decision was about what the call would do now."""
    return row["binding"] == _compute_binding(question) and row["question"] == approval_rows.format_question(
        question.text
    )


class ApprovalGate:
    """Holds calls back until they are allowed."""

    def __init__(
        self,
        store: Store,
        bus: EventBus,
        clock: Clock,
        release_slot: Callable[[str | None], AbstractContextManager[None]],
    ) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._release_slot = release_slot

    async def find_refusal(
        self, claim: Claim, tool: Tool, request: ToolRequest, timeout_seconds: float, *, resumed: bool
    ) -> ToolOutput | Literal["interrupted"] | None:
        """Wait until the call may be made. Returns None then, and otherwise the result that the model gets instead.

        `interrupted` means that the call may have been made before a crash and must not be made again.
        """
        is_repeatable = tool.after_crash == "settle"
        question = await tool.find_question(request)
        if question is None:
            return "interrupted" if resumed and not is_repeatable else None
        if len(question.text) > MAX_QUESTION_CHARACTERS:
            return _build_refusal(
                f"A person must allow this call, but it has more than {MAX_QUESTION_CHARACTERS} characters, "
                "too many to check. Make a shorter call."
            )
        may_have_run_unasked = resumed and not is_repeatable and not tool.ask
        if may_have_run_unasked and not await self._has_approval(request):
            return "interrupted"
        row = await self._open(claim, tool, request, question, timeout_seconds)
        if row["state"] == "pending":
            with self._release_slot(claim.run_id):
                row = await self._wait_for_decision(claim, row)
        if row is None or row["state"] != "allowed":
            return _build_refusal(_explain_refusal(row, timeout_seconds))
        if not _is_same_question(row, question):
            return _build_refusal(
                "What this call would do has changed since a person allowed it, so it was not made. "
                "Make the call again."
            )
        approval_id = row["id"]
        has_begun = await retry_while_store_full(
            lambda: self._store.tx(begin_call, claim, approval_id, self._clock.now())
        )
        return None if has_begun or is_repeatable else "interrupted"

    async def _has_approval(self, request: ToolRequest) -> bool:
        return await self._store.read(approval_rows.find_approval_of_call, request.key) is not None

    async def _open(
        self,
        claim: Claim,
        tool: Tool,
        request: ToolRequest,
        question: ApprovalQuestion,
        timeout_seconds: float,
    ) -> Row:
        now = self._clock.now()
        expires_at = min(now + round(timeout_seconds * 1000), claim.deadline_at)
        row = await retry_while_store_full(
            lambda: self._store.tx(
                open_approval, claim, tool.spec.name, request.key, question, expires_at, now
            )
        )
        if row["state"] == "pending":
            publish_approval(self._bus, claim.session, build_approval_event(row))
        return row

    async def _wait_for_decision(self, claim: Claim, row: Row) -> Row | None:
        """Return the row once it is decided or has expired; None if it was deleted with its session."""
        approval_id, expires_at = row["id"], row["expires_at"]
        while (left := expires_at - self._clock.now()) > 0:
            await approval_rows.wait_for_change(
                self._store, self._bus, approval_id, min(left / 1000, APPROVAL_RECHECK_SECONDS)
            )
            current = await self._store.read(approval_rows.load_approval, approval_id)
            if current is None or current["state"] != "pending":
                return current
        return await self._expire(claim, approval_id)

    async def _expire(self, claim: Claim, approval_id: str) -> Row | None:
        row = await retry_while_store_full(
            lambda: self._store.tx(approval_rows.expire_approval, approval_id, self._clock.now())
        )
        if row is not None:
            publish_approval(self._bus, claim.session, build_approval_event(row))
        return row


def _build_refusal(text: str) -> ToolOutput:
    return ToolOutput(text=text, is_error=True, details={"status": "forbidden", "error": text})


def _explain_refusal(row: Row | None, timeout_seconds: float) -> str:
    if row is not None and row["state"] == "denied":
        return "A person denied this call, and it was not made. Do not make it again unless the person asks for it."
    return (
        f"No person allowed this call within {timeout_seconds:.10g} s, so it was not made. "
        "Say what you need, and make the call again when the person asks for it."
    )
