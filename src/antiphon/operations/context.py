"""The context that all operations share: store, bus, clock, engine, session access, events and views."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon import access, keys
from antiphon.access import Action, Caller
from antiphon.bus import SESSION_CHANGES_TOPIC, EventBus, MessageAppended, SessionChanged, session_topic
from antiphon.clock import Clock
from antiphon.engine.collaboration import chains
from antiphon.engine.collaboration.chains import ChainLimits, ChainLink
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.transcripts import Entry
from antiphon.engine.toolbox import Toolbox
from antiphon.errors import ChainTooLong, NotFound, StoreReadOnly, UnknownModel
from antiphon.operations import types
from antiphon.operations.types import Answerer, RequestOrigin, SessionView
from antiphon.store import Row, Store, Tx
from antiphon.store.listing import SessionListRow
from antiphon.store.transcript_files import TranscriptFiles

if TYPE_CHECKING:  # not needed at run time; keeps commands that only read fast
    from antiphon.config import Config
    from antiphon.engine.worker import Worker
    from antiphon.workspace.sandbox import Sandboxes

log = logging.getLogger(__name__)

INTERNAL_CALLER = Caller.operator([access.READ_SCOPE])
"""For internal waits and reads, whose results go only to callers that were already authorized."""


class OperationContext:
    """The parts of one process that its operations use. Without a worker, no run is started or stopped."""

    def __init__(
        self,
        *,
        config: Config,
        store: Store,
        bus: EventBus,
        clock: Clock,
        session_resolver: SessionResolver,
        worker: Worker | None,
        toolbox: Toolbox,
        state_dir: Path,
        transcript_files: TranscriptFiles | None = None,
        sandboxes: Sandboxes | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.bus = bus
        self.clock = clock
        self.session_resolver = session_resolver
        self.worker = worker
        self.toolbox = toolbox
        self.state_dir = state_dir
        self.sandboxes = sandboxes
        self.transcript_files = transcript_files
        # The result is the same for most rows of a list.
        self._cached_answerer = lru_cache(maxsize=1024)(self._resolve_answerer)

    def require_worker(self) -> Worker:
        if self.worker is None:
            raise StoreReadOnly(
                "This view of the store is for reading.", "Start Antiphon on this state directory."
            )
        return self.worker

    def explain_missing_sandbox(self, agent_id: str) -> str | None:
        """Return why the commands of an agent have no sandbox; None if they have one, or it is not known yet."""
        if self.sandboxes is None:
            return "Start Antiphon on this state directory to have sandboxes."
        return self.sandboxes.explain_unavailable(agent_id)

    # --- sessions, inside a transaction ---

    async def open_or_create_session(
        self, tx: Tx, caller: Caller, action: Action, reference: str, now: int
    ) -> tuple[Row, bool]:
        """Return the session, and whether it was created by this call."""
        try:
            return await self.session_resolver.open(tx, caller, action, reference), False
        except NotFound:
            return await self.session_resolver.open(tx, caller, action, reference, found_at=now), True

    async def open_or_create_main(
        self, tx: Tx, caller: Caller, action: Action, reference: str, now: int, created: list[Row]
    ) -> Row:
        """Return the session; a main session that does not exist yet is created and added to `created`.

        Any other key must exist: a mistyped one is an error and not a new session.
        """
        if not self.session_resolver.is_main_session(caller, reference):
            return await self.session_resolver.open(tx, caller, action, reference)
        row, is_new = await self.open_or_create_session(tx, caller, action, reference, now)
        if is_new:
            created.append(row)
        return row

    async def resolve_requester(
        self, tx: Tx, caller: Caller, action: Action, reference: str | None, now: int, created: list[Row]
    ) -> Row | None:
        """Return the session that a request is made from: an agent's own, or the one that an operator names."""
        if caller.session_key is not None:
            own = await session_rows.find_by_key(tx, caller.session_key)
            if own is None:  # deleted while its agent was still running
                raise access.build_session_missing_error(caller.session_key)
            return own
        if reference is None:
            return None
        row = await self.open_or_create_main(tx, caller, action, reference, now, created)
        return await session_rows.load_full_session(tx, row["id"])

    # --- chains of messages between sessions ---

    async def build_chain_link(
        self, tx: Tx, origin: RequestOrigin, session: int, new_chain: str
    ) -> ChainLink:
        """Return the next link of the chain that the session's run is in, or the first link of a new chain.

        Raises:
            ChainTooLong: the chain has reached one of its limits.
        """
        limits = self.config.session.agent_to_agent
        return await chains.extend_chain(
            tx, origin.run_id, session, new_chain, ChainLimits(limits.max_hops, limits.max_runs)
        )

    def report_chain_limit(self, caller: Caller, error: ChainTooLong) -> None:
        """Log that a chain reached its limit, and notify operators."""
        key = caller.session_key or ""
        log.warning("%s", error, extra={"session_key": key, "chain_id": error.data.get("chain_id")})
        self.bus.publish(SESSION_CHANGES_TOPIC, SessionChanged(session_key=key, reason="chain_limit"))

    # --- events, always published after the commit they report ---

    def publish_change(self, row: Row, reason: str) -> None:
        """Notify subscribers of this session and subscribers of all sessions."""
        self.publish_to_session(row, reason)
        self.publish_to_all_sessions(row["key"], reason, row["session_id"] if reason == "delete" else None)

    def publish_to_session(self, row: Row, reason: str) -> None:
        self.bus.publish(session_topic(row["id"]), SessionChanged(session_key=row["key"], reason=reason))

    def publish_to_all_sessions(self, key: str, reason: str, session_id: str | None = None) -> None:
        event = SessionChanged(session_key=key, reason=reason, session_id=session_id)
        self.bus.publish(SESSION_CHANGES_TOPIC, event)

    def publish_entry(self, row: Row, entry: Entry) -> None:
        event = MessageAppended(
            session_key=row["key"],
            session_id=row["session_id"],
            seq=entry.seq,
            entry=entry.id,
            body=entry.body,
            internal=entry.is_internal,
        )
        self.bus.publish(session_topic(row["id"]), event)

    # --- views ---

    async def find_transcript_files(self, sessions: Iterable[tuple[str, str]]) -> None:
        """Look up transcript files by session id and key, so that the views built next include their paths."""
        if self.transcript_files is not None:
            await self.transcript_files.look_for(sessions)

    def build_session_view(self, caller: Caller, row: Row) -> SessionView:
        """Build the view of a row from `session_rows.load_list_row`."""
        [view] = self.build_listed_views(caller, [SessionListRow(*row)])
        return view

    def build_listed_views(self, caller: Caller, rows: Sequence[SessionListRow]) -> list[SessionView]:
        find_path = _find_no_path if self.transcript_files is None else self.transcript_files.get_path
        viewer, find_answerer, build = caller.agent_id, self._cached_answerer, types.build_session_view
        views = [
            build(row, viewer, find_path(row.session_id), find_answerer, self._has_attested_sandbox)
            for row in rows
        ]
        if caller.is_operator:
            return views
        return [
            self._hide_unreachable_relatives(caller, row.key, view)
            for row, view in zip(rows, views, strict=True)
        ]

    def _has_attested_sandbox(self, agent_id: str) -> bool:
        """Whether the backend of an agent was examined and works."""
        if self.sandboxes is None or agent_id not in self.config.agent_ids:
            return False
        return self.sandboxes.is_attested(agent_id)

    def _resolve_answerer(self, agent_id: str, chosen: str | None, last: str | None) -> Answerer:
        """Return what answers: the session's own model, else its agent's; if neither is configured, the last one.

        For an agent without a configured model that is what its function or program has named, once it has answered.
        """
        is_configured = agent_id in self.config.agent_ids
        # Without a gateway, nothing is sandboxed, and that part of the configuration is not even read.
        has_sandbox = is_configured and self.sandboxes is not None
        sandbox_mode = self.config.get_agent(agent_id).sandbox.mode if has_sandbox else "off"
        if is_configured and not self.config.uses_model(agent_id):
            return Answerer(last, None, sandbox_mode)
        own = self.config.get_model_ref(agent_id) if is_configured else None
        for name in (chosen, own):
            with suppress(UnknownModel):
                if name is not None:
                    return Answerer(name, self.config.get_context_window(name), sandbox_mode)
        return Answerer(last, None, sandbox_mode)

    def _hide_unreachable_relatives(self, caller: Caller, key: str, view: SessionView) -> SessionView:
        """Remove the parent and the child count from a view if the caller may not see them."""
        reach = _compute_cached_reach(caller, self.session_resolver.get_grants(caller))
        parent = view.parent_key
        if parent is None and reach.descendants:
            return view
        if parent is not None and parent != reach.own_key and not reach.admits_agent(_get_agent_id(parent)):
            # If the caller sees a session only as its descendant, the parent is a descendant too.
            below = reach.descendants and key != reach.own_key and not reach.admits_agent(_get_agent_id(key))
            parent = parent if below else None
        children = view.child_count if reach.descendants else None
        return msgspec.structs.replace(view, parent_key=parent, child_count=children)


def _find_no_path(_session_id: str) -> None:
    """Stand in for `TranscriptFiles.get_path` where no files are written."""


_compute_cached_reach = lru_cache(maxsize=256)(access.compute_reach)  # the same for every row of a list


def _get_agent_id(key: str) -> str:
    return keys.parse(key).agent_id
