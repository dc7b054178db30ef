"""Sessions: creating, changing, describing, listing and deleting them, and acting as one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET

from antiphon import access, keys
from antiphon.access import Action, Caller
from antiphon.engine import idempotency, validation
from antiphon.engine.idempotency import IdempotentCommand
from antiphon.engine.runs import lifecycle
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.identity import SessionIdentity, SessionIdentityResolver
from antiphon.engine.sessions.transcripts import Entry
from antiphon.engine.validation import (
    MAX_LABEL_CHARACTERS,
    SEND_POLICIES,
    VERBOSE_LEVELS,
    require_current_conversation,
    require_deletable_key,
    validate_and_clamp,
    validate_choice,
    validate_printable_name,
)
from antiphon.errors import Forbidden, InvalidInput, NotFound
from antiphon.messages import THINKING_LEVELS
from antiphon.operations.context import OperationContext
from antiphon.operations.runs import IdleChange, RunOperations
from antiphon.operations.transcripts import TranscriptOperations
from antiphon.operations.types import (
    MAX_LIST_ROWS,
    ListFilter,
    RunView,
    SessionOverview,
    SessionPage,
    SessionPatch,
    SessionsSummary,
    SessionStatusView,
    SessionView,
    UsageLine,
)
from antiphon.store import Row, Tx, listing
from antiphon.store.listing import SESSION_KINDS, SessionListQuery, SessionListRow

MAX_DISPLAY_NAME_CHARACTERS = 200
MAX_LISTED_RUNS = 50  # in the status of a session; further runs are left out
MAX_MESSAGES_PER_SESSION = 20  # of each session in an overview
# Hidden sessions beyond this number are not counted; the exact number does not matter.
MAX_HIDDEN_COUNTED = 1000
MAX_MESSAGE_BYTES = 256 * 1024  # of one message in an overview

_Settings: TypeAlias = Mapping[str, str | int | None]

_COLUMN_BY_FIELD = {
    "thinking_level": "thinking",
    "verbose_level": "verbose",
}  # all other fields are named like their column


class MessageBudget(NamedTuple):
    """Size limits for the messages in an overview: in total, per message, and the overhead of a row."""

    total_bytes: int = 4 * 2**20
    message_bytes: int = MAX_MESSAGE_BYTES
    row_bytes: int = 0


DEFAULT_MESSAGE_BUDGET = MessageBudget()


class ActingSession(NamedTuple):
    """A session and its identity, exactly as a run in it would have it."""

    session: SessionView
    actor: SessionIdentity


class _SessionRows(NamedTuple):
    list_row: Row
    full_row: Row


class SessionOperations:
    def __init__(
        self, context: OperationContext, runs: RunOperations, transcripts: TranscriptOperations
    ) -> None:
        self._context = context
        self._runs = runs
        self._transcripts = transcripts
        self._identities = SessionIdentityResolver(context.config, context.session_resolver, context.toolbox)

    def is_main(self, caller: Caller, session: str) -> bool:
        """Whether this names the main session of a configured agent, which need not exist yet."""
        return self._context.session_resolver.is_main_session(caller, session)

    async def open(self, caller: Caller, session: str) -> SessionView:
        """Return the session. Creates the session if it does not exist."""
        row, created = await self._context.store.tx(self._open, caller, session, self._context.clock.now())
        if created:
            self._context.publish_change(row, "create")
        return self._context.build_session_view(caller, row)

    async def _open(self, tx: Tx, caller: Caller, session: str, now: int) -> tuple[Row, bool]:
        row, created = await self._context.open_or_create_session(tx, caller, "send", session, now)
        require_current_conversation(row, session)
        return await session_rows.load_list_row(tx, row["id"]), created

    async def create(
        self,
        caller: Caller,
        *,
        session: str | None = None,
        agent_id: str | None = None,
        label: str | None = None,
        display_name: str | None = None,
        model: str | None = None,
        parent: str | None = None,
    ) -> SessionView:
        """Create a session, by default under a generated key.

        An existing session gets the given names and model, if the caller may control it; its parent does not change.
        """
        access.require_scope(caller, "send")
        agent = None if agent_id is None else keys.validate_agent_id(agent_id)
        if session is None:
            owner = agent or caller.agent_id or self._context.config.default_agent_id
            session = str(keys.owned_key(owner, "dashboard", str(uuid.uuid4())))
        given = {"label": label, "display_name": display_name, "model": model}
        settings = {
            name: self._validate_setting(name, value) for name, value in given.items() if value is not None
        }
        now = self._context.clock.now()
        row, reason = await self._context.store.tx(
            self._create, caller, session, agent, parent, settings, now
        )
        if reason:
            self._context.publish_change(row, reason)
        return self._context.build_session_view(caller, row)

    async def _create(
        self,
        tx: Tx,
        caller: Caller,
        session: str,
        agent: str | None,
        parent: str | None,
        settings: _Settings,
        now: int,
    ) -> tuple[Row, str | None]:
        # Resolve the parent first, so that a session cannot become its own parent.
        above = (
            None if parent is None else await self._context.session_resolver.open(tx, caller, "send", parent)
        )
        row, created = await self._context.open_or_create_session(tx, caller, "send", session, now)
        require_current_conversation(row, session)
        _check_agent(row, agent)
        if created and above:
            await session_rows.attach_to_parent(tx, row["id"], above["id"])
        before = await session_rows.load_list_row(tx, row["id"])
        changed = {column: value for column, value in settings.items() if value != before[column]}
        if changed:
            if not created:
                self._context.session_resolver.authorize(caller, "control", row, session)
            await session_rows.patch_session(tx, row["id"], changed, now)
        reason = "create" if created else "patch" if changed else None
        return await session_rows.load_list_row(tx, row["id"]), reason

    async def patch(self, caller: Caller, session: str, changes: SessionPatch) -> SessionView:
        """Change the given settings, all or none. Creates the session if it does not exist.

        The send policy requires `manage`, every other setting `control`.
        """
        action: Action = "control" if changes.send_policy is UNSET else "manage"
        access.require_scope(caller, action)
        given = {name: getattr(changes, name) for name in SessionPatch.__struct_fields__}
        settings = {
            _COLUMN_BY_FIELD.get(name, name): self._validate_setting(name, value)
            for name, value in given.items()
            if value is not UNSET
        }
        row, created = await self._context.store.tx(
            self._patch, caller, action, session, settings, self._context.clock.now()
        )
        if created:
            self._context.publish_change(row, "create")
        if settings:
            self._context.publish_change(row, "patch")
        return self._context.build_session_view(caller, row)

    async def _patch(
        self, tx: Tx, caller: Caller, action: Action, session: str, settings: _Settings, now: int
    ) -> tuple[Row, bool]:
        row, created = await self._context.open_or_create_session(tx, caller, action, session, now)
        if settings:
            await session_rows.patch_session(tx, row["id"], settings, now)
        return await session_rows.load_list_row(tx, row["id"]), created

    def _validate_setting(self, field: str, value: str | bool | None) -> str | int | None:
        """Return a setting in its stored form."""
        match field, value:
            case "archived", _:
                return int(bool(value))
            case "label", str():
                return validate_printable_name(value, MAX_LABEL_CHARACTERS, "label")
            case "display_name", str():
                return validate_printable_name(value, MAX_DISPLAY_NAME_CHARACTERS, "displayName")
            case "model", str():
                self._context.config.find_model(value)
            case "thinking_level", str():
                validate_choice(value, THINKING_LEVELS, "thinkingLevel")
            case "verbose_level", str():
                validate_choice(value, VERBOSE_LEVELS, "verboseLevel")
            case "send_policy", str():
                validate_choice(value, SEND_POLICIES, "sendPolicy")
            case _:
                return None
        return value

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
            row = await self._runs.change_when_idle(caller, session, plan, timeout)
        except NotFound:
            return False
        if row is not None:
            self._context.publish_change(row, "delete")
        return True

    # --- one session ---

    async def describe(self, caller: Caller, session: str, *, with_file: bool = True) -> SessionView:
        """Return one session as a list row, with its active run; `with_file` also looks for its transcript file."""
        row, active = await self._context.store.read(self._load_session_and_run, caller, session)
        if with_file:
            await self._context.find_transcript_files([(row["session_id"], row["key"])])
        view = self._context.build_session_view(caller, row)
        return msgspec.structs.replace(view, active_run_id=active["id"]) if active else view

    async def _load_session_and_run(self, tx: Tx, caller: Caller, session: str) -> tuple[Row, Row | None]:
        row = await self._context.session_resolver.open(tx, caller, "read", session)
        return await session_rows.load_list_row(tx, row["id"]), await lifecycle.find_active_run(tx, row["id"])

    async def get_status(self, caller: Caller, session: str) -> SessionStatusView:
        """Return the status of a session; for callers that may read it."""
        row, runs, usage = await self._context.store.read(self._load_status, caller, session)
        await self._context.find_transcript_files([(row["session_id"], row["key"])])
        return SessionStatusView(
            session=self._context.build_session_view(caller, row), runs=runs, usage=usage
        )

    async def _load_status(
        self, tx: Tx, caller: Caller, session: str
    ) -> tuple[Row, list[RunView], list[UsageLine]]:
        row, _ = await self._load_session_and_run(tx, caller, session)
        unfinished = await self._runs.load_unfinished(tx, caller, session)
        runs = [await self._runs.load_view(tx, caller, run_id) for run_id in unfinished[:MAX_LISTED_RUNS]]
        return row, runs, await self._transcripts.load_usage(tx, caller, session, tree=False)

    async def act_as(self, caller: Caller, session: str) -> ActingSession:
        """Return the identity of a session, for operators only. Creates the session if it does not exist.

        It has the rights of the session's agent, which are fewer than an operator's.
        """
        if not caller.is_operator:
            raise Forbidden("Only operators can act as a session.", "Use your own tools.", action="send")
        found, created = await self._context.store.tx(
            self._act_as, caller, session, self._context.clock.now()
        )
        if created:
            self._context.publish_change(found.list_row, "create")
        return self._build_acting_session(caller, session, found)

    async def describe_actor(self, caller: Caller, session: str) -> ActingSession:
        """Return the identity of a session without creating it, to find out what the session could do."""
        return self._build_acting_session(
            caller, session, await self._context.store.read(self._load_actor_session, caller, session)
        )

    async def _act_as(self, tx: Tx, caller: Caller, session: str, now: int) -> tuple[_SessionRows, bool]:
        row, created = await self._context.open_or_create_session(tx, caller, "send", session, now)
        require_current_conversation(row, session)
        return await self._load_session_rows(tx, row["id"]), created

    async def _load_actor_session(self, tx: Tx, caller: Caller, session: str) -> _SessionRows:
        row = await self._context.session_resolver.open(tx, caller, "read", session)
        return await self._load_session_rows(tx, row["id"])

    async def _load_session_rows(self, tx: Tx, id: int) -> _SessionRows:
        return _SessionRows(
            list_row=await session_rows.load_list_row(tx, id),
            full_row=await session_rows.load_full_session(tx, id),
        )

    def _build_acting_session(self, caller: Caller, session: str, found: _SessionRows) -> ActingSession:
        row = found.full_row
        agent_id = self._context.session_resolver.find_addressed_agent(caller, session) or row["agent_id"]
        actor = self._identities.resolve(
            agent_id,
            row["key"],
            sandboxed=bool(row["sandboxed"]),
            envelope=row["envelope"],
            model=row["model"],
        )
        return ActingSession(self._context.build_session_view(caller, found.list_row), actor)

    # --- many sessions ---

    async def get_summary(self, caller: Caller) -> SessionsSummary:
        """Return counts over all sessions; for operators that may read every session."""
        access.require_operator(caller, "list")
        return await self._context.store.read(_load_summary)

    async def _build_session_page(
        self, caller: Caller, rows: Sequence[SessionListRow], limit: int
    ) -> SessionPage:
        """Build a page from up to `limit` + 1 rows; the extra row only shows that more follow."""
        page = rows[:limit]
        await self._context.find_transcript_files((row.session_id, row.key) for row in page)
        return SessionPage(
            count=len(page),
            sessions=self._context.build_listed_views(caller, page),
            scope="all" if caller.is_operator else self._context.session_resolver.get_grants(caller).read,
            next_cursor=_format_cursor(page[-1]) if len(rows) > limit else None,
        )

    async def get_overview(
        self,
        caller: Caller,
        filter: ListFilter,
        messages: int = 0,
        *,
        budget: MessageBudget = DEFAULT_MESSAGE_BUDGET,
    ) -> SessionOverview:
        """Return `list` with the last messages of each session and the number of hidden ones, in one snapshot.

        Messages are read for the first rows only, until `budget` is used up.
        """
        access.require_scope(caller, "list")
        limit = validate_and_clamp(filter.limit, 1, MAX_LIST_ROWS, "limit")
        messages = validate_and_clamp(messages, 0, MAX_MESSAGES_PER_SESSION, "messages")
        rows, messages_by_row, hidden = await self._context.store.read(
            self._load_overview, caller, filter, limit + 1, messages, budget
        )
        return SessionOverview(
            page=await self._build_session_page(caller, rows, limit),
            cursors=[_format_cursor(row) for row in rows[:limit]],
            messages_by_row=messages_by_row,
            hidden=hidden,
            hint=self._build_visibility_hint(caller, hidden),
        )

    def _build_visibility_hint(self, caller: Caller, hidden: int) -> str | None:
        """Return which settings restrict what an agent is shown; None if nothing is hidden."""
        if caller.is_operator:
            return None
        scope = self._context.session_resolver.get_grants(caller).read
        if scope == "all":
            if not hidden:
                return None
            return (
                "Sessions of other agents are shown where tools.agentToAgent.enabled is true and "
                "tools.agentToAgent.allow names both agents."
            )
        boxed = " or agents.defaults.sandbox.sessionToolsVisibility" if caller.sandboxed else ""
        return (
            f"Only what visibility {scope!r} admits is shown. The operator can widen it with "
            f"tools.sessions.visibility{boxed}; sessions of other agents need tools.agentToAgent, too."
        )

    async def _load_overview(
        self, tx: Tx, caller: Caller, filter: ListFilter, limit: int, messages: int, budget: MessageBudget
    ) -> tuple[Sequence[SessionListRow], Sequence[Sequence[Entry]], int]:
        rows = await self._load_list(tx, caller, filter, limit)
        rows_with_messages = rows[: limit - 1] if messages else ()
        return (
            rows,
            await _load_last_messages(tx, rows_with_messages, messages, budget),
            await self._count_hidden(tx, caller),
        )

    async def _count_hidden(self, tx: Tx, caller: Caller) -> int:
        """Count the sessions hidden from this caller, up to `MAX_HIDDEN_COUNTED`."""
        reach = access.compute_reach(caller, self._context.session_resolver.get_grants(caller))
        if reach.own_key is None:
            return 0
        agents = [agent for agent in await listing.list_agent_ids(tx) if not reach.admits_agent(agent)]
        return await listing.count_hidden_sessions(
            tx, agents, reach.own_key, descendants=reach.descendants, max_count=MAX_HIDDEN_COUNTED
        )

    async def _load_list(
        self, tx: Tx, caller: Caller, filter: ListFilter, limit: int
    ) -> list[SessionListRow]:
        query = await self._build_list_query(tx, caller, filter, limit)
        return await listing.load_session_page(tx, query) if query else []

    async def _build_list_query(
        self, tx: Tx, caller: Caller, filter: ListFilter, limit: int
    ) -> SessionListQuery | None:
        """Build the query from the caller's filters and reach; None if it cannot match anything."""
        reach = access.compute_reach(caller, self._context.session_resolver.get_grants(caller))
        agents = None if reach.everything else await listing.load_admitted_agents(tx, reach.admits_agent)
        only = None if filter.agent_id is None else keys.validate_agent_id(filter.agent_id)
        if only is not None:
            agents = [only] if agents is None or only in agents else []
        parent = None
        if filter.spawned_by is not None:
            parent = (await self._context.session_resolver.open(tx, caller, "list", filter.spawned_by))["key"]
        if agents == [] and reach.own_key is None:
            return None
        active = filter.active_minutes
        return SessionListQuery(
            limit=limit,
            kinds=_validate_kinds(filter.kinds),
            agents=agents,
            own_key=reach.own_key,
            descendants=reach.descendants,
            only_agent=only,
            label=filter.label,
            parent=parent,
            search=filter.search,
            active_since=None if active is None else self._context.clock.now() - round(active * 60_000),
            archived=filter.include_archived,
            cursor=_parse_cursor(filter.cursor),
        )

    async def list(self, caller: Caller, filter: ListFilter) -> SessionPage:
        """Return the sessions that the caller may read, newest first."""
        access.require_scope(caller, "list")
        limit = validate_and_clamp(filter.limit, 1, MAX_LIST_ROWS, "limit")
        rows = await self._context.store.read(self._load_list, caller, filter, limit + 1)
        return await self._build_session_page(caller, rows, limit)


def _check_agent(row: Row, agent: str | None) -> None:
    if agent is not None and row["agent_id"] != agent:
        raise InvalidInput(
            f"Session {row['key']!r} belongs to agent {row['agent_id']!r}, not to {agent!r}.",
            "Leave out one of the two, or write the key in full.",
            field="agentId",
        )


def _plan_deletion(caller: Caller, session: str, key: str | None, expected: str | None) -> IdleChange:
    command = IdempotentCommand(key, ("delete", session, expected))

    async def was_done(tx: Tx, now: int) -> bool:
        return await idempotency.load_recorded_answer(tx, command, bool) is not None

    def check(row: Row) -> None:
        require_current_conversation(row, session, expected)
        require_deletable_key(row["key"])

    async def delete(tx: Tx, row: Row, now: int) -> Row:
        await session_rows.delete_session(tx, row["id"], row["key"], now)
        if caller.is_operator:
            await session_rows.delete_task_texts(tx, row["id"], row["key"])
        await idempotency.record_answer(tx, command, True, now)
        return row

    return IdleChange(was_done, check, delete)


def _validate_kinds(kinds: Sequence[str] | None) -> Sequence[str]:
    unknown = set(kinds or ()) - set(SESSION_KINDS)
    if unknown:
        raise InvalidInput(
            f"{sorted(unknown)[0]!r} is not a session kind.",
            f"Use {', '.join(SESSION_KINDS)}.",
            field="kinds",
        )
    return tuple(dict.fromkeys(kinds)) if kinds else SESSION_KINDS


def _parse_cursor(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    at, _, key = text.partition("|")
    if not (at.isdecimal() and len(at) < 18 and key):
        raise InvalidInput(
            f"{text[:80]!r} is not a valid cursor.",
            "Pass nextCursor unchanged.",
            field="cursor",
        )
    return int(at), key


def _format_cursor(row: SessionListRow) -> str:
    return f"{row.updated_at}|{row.key}"


async def _load_last_messages(
    tx: Tx, rows: Sequence[SessionListRow], limit: int, budget: MessageBudget
) -> Sequence[Sequence[Entry]]:
    """Load the last messages of each row, oldest first, for as many rows as the budget allows."""
    left = budget.total_bytes
    messages_by_row: list[Sequence[Entry]] = []
    for row in rows:
        found = await listing.load_last_messages(tx, row.id, limit, MAX_MESSAGE_BYTES)
        entries = [Entry(*entry) for entry in reversed(found)]
        messages_by_row.append(entries)
        left -= budget.row_bytes + sum(min(len(entry.body), budget.message_bytes) for entry in entries)
        if left < 0:
            break
    return messages_by_row


async def _load_summary(tx: Tx) -> SessionsSummary:
    agents = await listing.count_sessions_by_agent(tx)
    runs = await listing.count_active_runs(tx)
    return SessionsSummary(
        sessions=sum(agents.values()), queued=runs["queued"], running=runs["running"], agents=agents
    )
