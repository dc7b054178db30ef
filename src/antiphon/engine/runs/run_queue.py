"""The queue of a lane: a run is accepted when the commit of `submit` succeeds.

A run's id is the caller's idempotency key, so a repeated request is the same run. Runs that the engine queues itself
(`submit_follow_up`) have ids that no caller may use, and no limit applies to them: their number is bounded by the runs
accepted before. `lifecycle` handles a run after it was queued.
"""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from antiphon.errors import Conflict, LaneFull
from antiphon.messages import AssistantMessage, ToolResult, UserMessage, encode_message
from antiphon.runtimes import Sampling, ToolSpec
from antiphon.store import Tx
from antiphon.store.queries import Queries

SQL = Queries("runs")
SESSIONS_SQL = Queries("sessions")
CHAINS_SQL = Queries("chains")

_random_id_parts: list[bytes] = []

NOTE_ORIGIN = "note"  # a run that only appends an entry to the transcript, in its turn
CHANNEL_ORIGIN = "channel"  # a message of a person in a chat service
REPLY_BACK_ORIGIN = "reply-back"
ANNOUNCE_ORIGIN = "announce"
WAKE_ORIGIN = "wake"
QUIET_ORIGINS = frozenset({REPLY_BACK_ORIGIN, ANNOUNCE_ORIGIN})
"""Origins of runs whose text is meant for other sessions or the outbox and is not streamed to the chat."""
SANITIZED_ORIGINS = frozenset({"sessions_send", "sessions_spawn", WAKE_ORIGIN, "steer", "cron", "hook"})
"""Origins of runs that are streamed to viewers who did not request them, so their text is sanitized."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options that a request sets for its run: model settings, client-side tools, earlier messages.

    They are stored in one column of the run's row, so a run that is resumed after a crash has the same options. Calls
    of client-side tools are not executed here: they end the run, and their results come with a later request.
    """

    sampling: Sampling | None = None
    tools: list[ToolSpec] = []
    earlier: list[UserMessage | AssistantMessage | ToolResult] = []
    """The conversation as the client has it; messages the session lacks are added before the new message."""

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)


_options_decoder = msgspec.json.Decoder(RunOptions)


def encode_options(options: RunOptions | None) -> str | None:
    return None if options is None else msgspec.json.encode(options).decode()


def decode_options(stored: str | None) -> RunOptions | None:
    return None if stored is None else _options_decoder.decode(stored)


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A message for a session, with everything that its run needs."""

    run_id: str
    session: int
    session_key: str
    origin: str
    message: UserMessage | AssistantMessage | ToolResult
    options: RunOptions | None = None
    instructions: str | None = None
    model: str | None = None
    thinking: str | None = None
    reply_target_json: str | None = None
    """The chat that receives the reply (`completion.ReplyTarget`)."""
    deadline_at: int | None = None
    max_queued: int = 1000
    exchange: int | None = None
    task: int | None = None
    chain: str | None = None
    hop: int = 0
    agent_id: str | None = None
    """The agent that answers, if it is not the session's own agent."""

    @property
    def digest(self) -> str:
        """A hash of session, origin and content, without times: a repeated id must have the same digest."""
        content = self.message.content
        if isinstance(self.message, ToolResult):
            content = encode_message(msgspec.structs.replace(self.message, timestamp=0))
        elif not isinstance(content, str):
            content = encode_message(msgspec.structs.replace(self.message, timestamp=0, provenance=None))
        if self.options is not None:
            earlier = [msgspec.structs.replace(message, timestamp=0) for message in self.options.earlier]
            content += encode_options(msgspec.structs.replace(self.options, earlier=earlier)) or ""
        return hashlib.sha256(f"{self.session}\n{self.origin}\n{content}".encode()).hexdigest()[:32]


class AcceptedRun(msgspec.Struct, frozen=True):
    run_id: str
    session: int
    session_key: str
    state: str
    new: bool
    note: bool = False
    """Whether it is a note, which is not executed and causes no run events."""


def new_run_id(now: int) -> str:
    """Return a unique, unpredictable id for a run whose caller sets none.

    It begins with the time, which keeps index inserts fast. Random bytes are drawn for many ids at once, because the
    system call releases the interpreter lock to other threads, which costs more than the rest of this function.
    """
    if not _random_id_parts:
        drawn = secrets.token_bytes(10 * 256)
        _random_id_parts.extend(drawn[start : start + 10] for start in range(0, len(drawn), 10))
    return f"{now:012x}{_random_id_parts.pop().hex()}"


async def submit(tx: Tx, submission: Submission, now: int) -> AcceptedRun:
    """Queue a run, or return the one already accepted under this id."""
    if await _insert_run(tx, submission, now, others=submission.max_queued - 1):
        return AcceptedRun(submission.run_id, submission.session, submission.session_key, "queued", new=True)
    return await _load_accepted_run(tx, submission)


async def submit_follow_up(tx: Tx, submission: Submission, now: int) -> AcceptedRun | None:
    """Queue a run that the engine itself causes. Returns None if its session no longer exists."""
    if await tx.one(SESSIONS_SQL.key_by_id, id=submission.session) is None:
        return None
    new = bool(await _insert_run(tx, submission, now))
    note = submission.origin == NOTE_ORIGIN
    return AcceptedRun(submission.run_id, submission.session, submission.session_key, "queued", new, note)


async def _insert_run(tx: Tx, submission: Submission, now: int, others: int | None = None) -> int:
    """Insert a run; 0 if its id is taken or if its lane already has more than `others` queued runs."""
    new = await tx.do(
        SQL.insert,
        id=submission.run_id,
        session=submission.session,
        origin=submission.origin,
        digest=submission.digest,
        input=encode_message(submission.message),
        options=encode_options(submission.options),
        instructions=submission.instructions,
        model=submission.model,
        thinking=submission.thinking,
        target=submission.reply_target_json,
        deadline_at=submission.deadline_at,
        exchange=submission.exchange,
        task=submission.task,
        chain=submission.chain,
        hop=submission.hop,
        agent_id=submission.agent_id,
        others=others,
        now=now,
    )
    if new and submission.chain is not None:
        await tx.one(CHAINS_SQL.count_run, id=submission.chain, now=now)
    return new


async def _load_accepted_run(tx: Tx, submission: Submission) -> AcceptedRun:
    row = await tx.one(SQL.find_accepted, id=submission.run_id)
    if row is None:
        raise LaneFull(
            f"This session already has {submission.max_queued} messages waiting.",
            "Wait until some of them are answered, or stop them, then send again.",
            max=submission.max_queued,
        )
    if row["digest"] != submission.digest:
        raise build_idempotency_conflict_error(submission.run_id)
    return AcceptedRun(row["id"], row["session"], submission.session_key, row["state"], new=False)


async def record_command(
    tx: Tx, run_id: str, session: int, command: str, now: int, reply: str | None = None
) -> bool:
    """Record a command under its key, as a run that has already ended. False if it was recorded before.

    `reply` is the answer to the person who gave the command; it is in no transcript.
    """
    digest = hashlib.sha256(f"{session}\ncommand\n{command}".encode()).hexdigest()[:32]
    if await tx.do(SQL.record_command, id=run_id, session=session, digest=digest, reply=reply, now=now):
        return True
    before = await tx.one(SQL.find_accepted, id=run_id)
    if before is None or before["digest"] != digest:
        raise build_idempotency_conflict_error(run_id)
    return False


def build_idempotency_conflict_error(run_id: str) -> Conflict:
    return Conflict(
        f"The idempotency key {run_id!r} was already used for another message.",
        "Use a new key for a new message.",
        field="idempotencyKey",
    )
