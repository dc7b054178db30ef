"""Requests and results of operations: plain typed data with the names that every wire uses.

Results about transcripts are in `transcript_types`, those about sessions that work together in `collaboration_types`.
Absent means unknown. Nothing here reads anything; rows of the store are converted to these types. It imports little,
so that a command that asks a running gateway starts fast.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from antiphon import keys
from antiphon.bus import ApprovalChanged, RunChanged, RunUsage
from antiphon.engine.collaboration.attachments import SpawnAttachment
from antiphon.engine.runs.approval_rows import ApprovalDecision
from antiphon.engine.runs.run_queue import QUIET_ORIGINS, SANITIZED_ORIGINS, RunOptions
from antiphon.engine.sessions.transcripts import Entry
from antiphon.messages import (
    AnnounceMode,
    ImageBlock,
    Provenance,
    TextBlock,
    ToolResult,
)
from antiphon.store import Row
from antiphon.store.listing import SessionListRow

if TYPE_CHECKING:
    from antiphon.config.sandbox import SandboxMode

APPROVAL_DECISIONS: tuple[ApprovalDecision, ...] = ("allow-once", "allow-always", "deny")
DEFAULT_LIST_ROWS, MAX_LIST_ROWS = 50, 200
DEFAULT_REPLY_TIMEOUT_SECONDS, MAX_REPLY_TIMEOUT_SECONDS = 30, 3600

# --- requests ---


class IncomingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message to a session. `idempotency_key` becomes the run's id: sending it again changes nothing."""

    session: str
    content: str | list[TextBlock | ImageBlock] | ToolResult
    """The text, or the result of a client-side tool that an earlier run of the session called."""
    idempotency_key: str | None = None
    origin: str = "chat"
    model: str | None = None
    thinking: str | None = None
    instructions: str | None = None
    options: RunOptions | None = None
    timeout_seconds: float | None = None
    provenance: Provenance | None = None
    literal: bool = False
    """Whether the content is plain text, even if it looks like a command."""


class SendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A message to another session, which is named by `session`, by `label` or by `agent_id`."""

    message: str
    session: str | None = None
    """The target's key or session id."""
    label: str | None = None
    agent_id: str | None = None
    """With a label, the agent whose session it is; alone, the agent whose main session is the target."""
    timeout_seconds: float = DEFAULT_REPLY_TIMEOUT_SECONDS
    idempotency_key: str | None = None
    reply_back: int | None = None
    announce: AnnounceMode = "target"


class SpawnRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A request for a sub-agent. Fields that are left out use the configured defaults."""

    task: str
    label: str | None = None
    agent_id: str | None = None
    model: str | None = None
    thinking: str | None = None
    run_timeout_seconds: float | None = None
    thread: bool = False
    mode: Literal["run", "session"] | None = None
    cleanup: Literal["delete", "keep"] = "keep"
    sandbox: Literal["inherit", "require"] = "inherit"
    attachments: Sequence[SpawnAttachment] = ()
    mount_path: str | None = None
    runtime: Literal["subagent", "acp"] = "subagent"
    idempotency_key: str | None = None
    announce: Literal["channel", "parent", "none"] = "channel"

    def compute_digest(self, requester_key: str) -> str:
        """Return a digest of the whole request and its requester, to recognize a repeated idempotency key."""
        seconds = self.run_timeout_seconds
        fields = [
            requester_key,
            self.task,
            self.label,
            self.agent_id,
            self.model,
            self.thinking,
            None if seconds is None else float(seconds),
            self.thread,
            self.mode,
            self.cleanup,
            self.sandbox,
            self._files_digest,
            self.mount_path,
            self.runtime,
            self.announce,
        ]
        return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()[:32]

    @cached_property
    def _files_digest(self) -> list[tuple[str, str, str | None, str]]:
        """Digests of the attachments, cached because the files may be megabytes and are hashed in a transaction."""
        return [
            (file.name, file.encoding, file.mime_type, hashlib.sha256(file.content.encode()).hexdigest())
            for file in self.attachments
        ]


class SessionPatch(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to change on a session. Unset fields stay as they are; None removes a setting."""

    label: str | UnsetType | None = UNSET
    display_name: str | UnsetType | None = UNSET
    model: str | UnsetType | None = UNSET
    thinking_level: str | UnsetType | None = UNSET
    verbose_level: str | UnsetType | None = UNSET
    send_policy: str | UnsetType | None = UNSET
    archived: bool | UnsetType | None = UNSET


class RequestOrigin(msgspec.Struct, frozen=True):
    """The run and the tool call that a request is made in; they identify it if it is repeated."""

    run_id: str | None = None
    key: str | None = None


class ListFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which sessions to list."""

    kinds: Sequence[str] | None = None
    limit: int = DEFAULT_LIST_ROWS
    active_minutes: float | None = None
    agent_id: str | None = None
    label: str | None = None
    search: str | None = None
    spawned_by: str | None = None
    include_archived: bool = False
    cursor: str | None = None


# --- results ---


class View(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of results: camel case on the wire, defaults omitted."""


class MessageReceipt(View, frozen=True):
    """Receipt for a durably stored message.

    `state` is `queued`, or the current state of its run if the key was used before.
    """

    run_id: str
    session_key: str
    session_id: str
    state: str
    new: bool = True
    """False if the key was used before."""


class RunView(View, frozen=True):
    run_id: str
    session_key: str
    state: str
    created_at: int
    started_at: int | None = None
    ended_at: int | None = None
    queued_ms: int | None = None
    running_ms: int | None = None
    position: int | None = None
    reply: str | None = None
    error_code: str | None = None
    error: str | None = None
    model: str | None = None
    usage: RunUsage | None = None
    origin: str | None = None
    """What caused the run: a chat, a job, another session."""
    yielded: bool = False
    """It ended its turn to wait for its sub-agents; a later run has the answer."""

    @property
    def has_ended(self) -> bool:
        return self.state not in {"queued", "running"}


class StopView(msgspec.Struct, frozen=True):
    """Runs that were ended or asked to end."""

    run_ids: list[str]


class PairingView(View, frozen=True):
    """A person who may write directly to an account of a chat service, or asks to."""

    channel: str
    account: str
    sender: str
    state: str
    """`approved` or `pending`."""
    requested_at: int
    name: str | None = None
    """As the person writes it; not to be trusted."""
    code: str | None = None
    is_owner: bool = False
    expires_at: int | None = None
    approved_at: int | None = None
    warning: str | None = None


class DeliveryRoute(View, frozen=True):
    channel: str | None = None
    to: str | None = None
    account_id: str | None = None
    thread_id: str | None = None


class SessionView(View, frozen=True, kw_only=False, gc=False):
    """A row of a session list. Built by position, since by name each field would be looked up in every row.

    `model` is the one that answers, `model_override` the session's own choice; the active run is set only if a single
    session is described. `context_tokens` is how many tokens fit into that model's context, as in every answer of the
    gateway; `used_tokens` is how many of them the last call used, and `total_tokens` the sum over all calls.
    `sandboxed` is true only if the sandbox of its agent has been examined and works.
    """

    key: str
    kind: str
    channel: str
    agent_id: str | None
    session_id: str
    updated_at: int
    last_activity_at: int
    state: str
    display_name: str | None = None
    label: str | None = None
    model: str | None = None
    context_tokens: int | None = None
    total_tokens: int | None = None
    thinking_level: str | None = None
    verbose_level: str | None = None
    system_sent: bool | None = None
    aborted_last_run: bool | None = None
    send_policy: str | None = None
    last_channel: str | None = None
    last_to: str | None = None
    last_account_id: str | None = None
    delivery_context: DeliveryRoute | None = None
    transcript_path: str | None = None
    parent_key: str | None = None
    child_count: int | None = None
    chat_type: str | None = None
    subject: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    created_at: int | None = None
    archived: bool | None = None
    model_override: str | None = None
    active_run_id: str | None = None
    used_tokens: int | None = None
    sandboxed: bool | None = None


class Answerer(NamedTuple):
    """What answers in a session: the model's configured name, the size of its context in tokens, and where it acts."""

    model: str | None
    window: int | None
    sandbox_mode: SandboxMode


class SessionsSummary(View, omit_defaults=False, frozen=True):
    """Counts of sessions and of current activity."""

    sessions: int
    queued: int
    running: int
    agents: dict[str, int]
    """Sessions by agent, without archived ones."""


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a gateway at `/readyz`."""

    ready: bool
    failing: list[str] = []
    """What keeps the gateway from accepting work."""
    degraded: list[str] = []
    """What fails although the gateway accepts work."""


class SystemStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over all replicas that share the store. Large counts are capped."""

    queued: int
    running: int
    oldest_unclaimed_run_seconds: float
    """How long the oldest run that could start has waited for a replica."""
    abandoned: int
    """Runs whose replica is silent and that no other replica has taken over yet."""
    replicas: int
    pending: int
    ambiguous: int
    dead: int
    expired: int = 0


class ReplicaView(View, frozen=True):
    """A process that hosts this store's sessions."""

    id: str
    name: str
    lanes: int
    """Sessions that it is running right now."""
    alive: bool
    is_coordinator: bool = msgspec.field(name="watching")
    """Whether this replica is the coordinator, which does the work that belongs to no single session."""
    address: str | None = None
    version: str | None = None
    started_at: int | None = None
    lag_ms: int | None = None
    """Milliseconds since its last heartbeat."""


class SessionPage(View, frozen=True):
    """A page of sessions. `scope` says whose these are: `all`, or what the caller's visibility narrows it to."""

    count: int
    sessions: list[SessionView]
    scope: str
    next_cursor: str | None = None


class SessionOverview(NamedTuple):
    """A page of sessions with details about each of its rows, in their order."""

    page: SessionPage
    cursors: Sequence[str]
    """The cursor after each row, for callers that cannot show all of them."""
    messages_by_row: Sequence[Sequence[Entry]]
    """Last messages of the first rows, oldest first; empty if none were requested. Oversized ones have no body."""
    hidden: int
    """Number of sessions that the caller's visibility hides, counted up to a thousand."""
    hint: str | None = None
    """The settings that would show more."""


class UsageLine(View, omit_defaults=False, frozen=True):
    provider: str | None
    model: str | None
    calls: int
    input: int
    output: int
    cache_read: int
    cache_write: int
    cost: float | None


class SessionStatusView(View, omit_defaults=False, frozen=True):
    """One session, its active and waiting runs in order, and its cost by model."""

    session: SessionView
    runs: list[RunView]
    usage: list[UsageLine]


class ReachableAgent(View, frozen=True):
    """An agent in a list. `runtime` is what answers for it; `model` is absent if that is not a model.

    `can_spawn` is about `sessions_spawn`, `can_message` about `sessions_send` to the agent's main session.
    """

    id: str
    configured: bool
    can_spawn: bool
    can_message: bool
    name: str | None = None
    model: str | None = None
    runtime: str | None = None


class AgentsView(View, frozen=True):
    """The agents that the requester may spawn, itself first. `allow_any`: every configured one."""

    requester: str
    allow_any: bool
    agents: list[ReachableAgent]
    message_only: list[ReachableAgent] = []
    """Agents that the requester may send to but not spawn."""
    hint: str | None = None
    """The settings that decide, if the requester can message no other agent."""


class AgentSummary(View, omit_defaults=False, frozen=True):
    """An agent as operators see it.

    `may_spawn`: agents that it may start, itself first. `may_message`: other agents whose main session it may send to.
    """

    id: str
    default: bool
    name: str | None
    model: str | None
    runtime: str | None
    may_spawn: list[str]
    may_message: list[str] = []


class ApprovalView(View, frozen=True, kw_only=True):
    """A tool call that waits, or waited, for a person's decision."""

    id: str
    session_key: str
    run_id: str
    agent_id: str
    tool: str
    text: str
    """The call as it can be shown to a person."""
    can_allow_always: bool
    state: str
    """`pending`, `allowed`, `denied` or `expired`."""
    decision: str | None = None
    """`allow-once`, `allow-always` or `deny`."""
    decided_by: str | None = None
    created_at: int
    expires_at: int
    decided_at: int | None = None

    @property
    def allowed_decisions(self) -> list[ApprovalDecision]:
        return [
            decision for decision in APPROVAL_DECISIONS if decision != "allow-always" or self.can_allow_always
        ]


def build_approval_view(event: ApprovalChanged) -> ApprovalView:
    decision = {"allowed": "allow-always" if event.always else "allow-once", "denied": "deny"}.get(
        event.state
    )
    return ApprovalView(
        id=event.approval_id,
        session_key=event.session_key,
        run_id=event.run_id,
        agent_id=event.agent_id,
        tool=event.tool,
        text=event.question,
        can_allow_always=event.can_allow_always,
        state=event.state,
        decision=decision,
        decided_by=event.decided_by,
        created_at=event.created_at,
        expires_at=event.expires_at,
        decided_at=event.decided_at,
    )


class GrantView(View, frozen=True, kw_only=True):
    """A call that is always allowed."""

    id: str
    agent_id: str
    tool: str
    text: str
    decided_by: str | None = None
    created_at: int


# --- building results from rows ---


def build_run_view(row: Row, spent: Row | None, now: int) -> RunView:
    started, ended = row["started_at"], row["ended_at"]
    return RunView(
        run_id=row["id"],
        session_key=row["key"],
        origin=row["origin"],
        yielded=bool(row["yielded"]),
        state=row["state"],
        created_at=row["created_at"],
        started_at=started,
        ended_at=ended,
        queued_ms=(started or ended or now) - row["created_at"],
        running_ms=(ended or now) - started if started else None,
        position=row["ahead"] + 1 if row["state"] == "queued" else None,
        reply=row["reply"],
        error_code=row["error_code"],
        error=row["error"],
        model=row["model_answered"],
        usage=RunUsage(input=spent["input"], output=spent["output"], cost=spent["cost"]) if spent else None,
    )


def build_run_ended_event(session_key: str, view: RunView) -> RunChanged:
    """The event of a run's end, for listeners that missed it."""
    return RunChanged(
        session_key=session_key,
        run_id=view.run_id,
        state=view.state,
        reply=view.reply,
        error_code=view.error_code,
        error=view.error,
        model=view.model,
        started_at=view.started_at,
        ended_at=view.ended_at,
        usage=view.usage,
        yielded=view.yielded,
        quiet=view.origin in QUIET_ORIGINS,
        needs_sanitizing=view.origin in SANITIZED_ORIGINS,
    )


def apply_run_end(view: RunView, event: RunChanged) -> RunView:
    """An earlier view of a run, completed with the event of its end."""
    started, ended = event.started_at or view.created_at, event.ended_at or view.created_at
    return msgspec.structs.replace(
        view,
        state=event.state,
        started_at=started,
        ended_at=ended,
        queued_ms=started - view.created_at,
        running_ms=ended - started,
        position=None,
        reply=event.reply,
        error_code=event.error_code,
        yielded=event.yielded,
        error=event.error,
        model=event.model,
        usage=event.usage or RunUsage(input=0, output=0, cost=None),
    )


def build_session_view(
    row: SessionListRow,
    viewer_agent_id: str | None,
    transcript_path: str | None,
    find_answerer: Callable[[str, str | None, str | None], Answerer],
    has_attested_sandbox: Callable[[str], bool],
) -> SessionView:
    # fmt: off
    (
        _, key, kind, channel, agent_id, session_id, updated_at, state, display_name, label, model, last_model,
        context_tokens, total_tokens, thinking, verbose, system_sent, aborted, send_policy,
        last_channel, last_to, last_account, last_thread, parent_key, child_count,
        chat_type, subject, input_tokens, output_tokens, created_at, archived, sandboxed,
    ) = row
    answering, window, mode = find_answerer(agent_id, model, last_model)
    is_sandboxed = sandboxed or (mode != "off" and (mode == "all" or kind != "main"))
    route = None
    if last_channel:
        route = DeliveryRoute(channel=last_channel, to=last_to, account_id=last_account, thread_id=last_thread)
    return SessionView(
        keys.display_stored_key(key, viewer_agent_id=viewer_agent_id), kind,
        keys.resolve_list_channel(kind, channel, last_channel), agent_id, session_id, updated_at, updated_at,
        state, display_name, label, answering, window, total_tokens, thinking, verbose,
        system_sent == 1, aborted == 1, send_policy, last_channel, last_to, last_account, route,
        transcript_path, parent_key, child_count, chat_type, subject, input_tokens,
        output_tokens, created_at, archived == 1, model, None, context_tokens,
        True if is_sandboxed and has_attested_sandbox(agent_id) else None,
    )
    # fmt: on
