"""The base of all operations: store, bus, session resolver, and how a row becomes a view."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon import access, keys, views
from antiphon.access import Action, Caller
from antiphon.bus import EventBus, MessageAppended, SessionChanged, session_topic
from antiphon.clock import Clock
from antiphon.engine.sessions import session_rows as sessions
from antiphon.engine.sessions.identity import SessionIdentityResolver
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.transcripts import Entry
from antiphon.engine.toolbox import Toolbox
from antiphon.errors import NotFound, StoreReadOnly, UnknownModel
from antiphon.operations.spawn_rules import SpawnRules
from antiphon.store import Row, Store, Tx
from antiphon.store.listing import SessionListRow
from antiphon.store.transcript_files import TranscriptFiles
from antiphon.views import AnsweringModel, SessionView

if TYPE_CHECKING:  # not needed at run time; keeps commands that only read fast
    from antiphon.config import Config
    from antiphon.engine.worker import Worker


class OperationContext:
    INTERNAL_CALLER = Caller.operator([access.READ_SCOPE])
    """For internal waits and reads, whose results go only to callers that were already authorized."""

    def __init__(
        self,
        *,
        config: Config,
        store: Store,
        bus: EventBus,
        clock: Clock,
        door: SessionResolver,
        engine: Worker | None,
        state_dir: Path,
        files: TranscriptFiles | None = None,
        toolbox: Toolbox | None = None,
    ) -> None:
        self.config = config
        self._store = store
        self._bus = bus
        self._clock = clock
        self._session_resolver = door
        self._engine = engine
        self._transcript_files = files
        tools = toolbox or Toolbox()
        self._spawn_rules = SpawnRules(config, door, tools, state_dir, files)
        self._actors = SessionIdentityResolver(config, door, tools)
        # The result is the same for most rows of a list.
        self._cached_answering_model = lru_cache(maxsize=1024)(self._resolve_answering_model)

    def _require_engine(self) -> Worker:
        if self._engine is None:
            raise StoreReadOnly(
                "This view of the store is for reading.", "Start Antiphon on this state directory."
            )
        return self._engine

    async def _open_or_create_session(
        self, tx: Tx, caller: Caller, action: Action, reference: str, now: int
    ) -> tuple[Row, bool]:
        """Return the session, and whether it was created by this call."""
        try:
            return await self._session_resolver.open(tx, caller, action, reference), False
        except NotFound:
            return await self._session_resolver.open(tx, caller, action, reference, found_at=now), True

    @staticmethod
    async def _load_described_session(tx: Tx, session: int) -> Row:
        row = await tx.one(sessions.SQL.list_row, id=session)
        assert row is not None
        return row

    # --- events, always published after the commit they report ---

    def _publish_change(self, row: Row, reason: str) -> None:
        """Notify subscribers of this session and subscribers of all sessions."""
        self._publish_to_session(row, reason)
        self._publish_to_all_sessions(row, reason)

    def _publish_to_session(self, row: Row, reason: str) -> None:
        event = SessionChanged(session_key=row["key"], reason=reason)
        self._bus.publish(session_topic(row["id"]), event)

    def _publish_to_all_sessions(self, row: Row, reason: str) -> None:
        self._bus.publish("sessions", SessionChanged(session_key=row["key"], reason=reason))

    def _publish_created(self, key: str) -> None:
        self._bus.publish("sessions", SessionChanged(session_key=key, reason="create"))

    def _publish_entry(self, row: Row, entry: Entry) -> None:
        event = MessageAppended(
            session_key=row["key"],
            session_id=row["session_id"],
            seq=entry.seq,
            entry=entry.id,
            body=entry.body,
            internal=entry.is_internal,
        )
        self._bus.publish(session_topic(row["id"]), event)

    # --- views ---

    def _resolve_answering_model(self, agent_id: str, chosen: str | None, last: str | None) -> AnsweringModel:
        """Return the session's own model, else its agent's; if neither is configured, the one that answered last."""
        own = self.config.get_model_ref(agent_id) if agent_id in self.config.agent_ids else None
        for name in (chosen, own):
            with suppress(UnknownModel):
                if name is not None:
                    return AnsweringModel(name, self.config.get_context_window(name))
        return AnsweringModel(last, None)

    async def _find_transcript_files(self, sessions: Iterable[tuple[str, str]]) -> None:
        """Look up transcript files by session id and key, so that the views built next include their paths."""
        if self._transcript_files is not None:
            await self._transcript_files.look_for(sessions)

    def _build_session_view(self, caller: Caller, row: Row) -> SessionView:
        """Build the view of a row from `_load_described_session`."""
        return self._build_listed_view(caller, SessionListRow(*row))

    def _build_listed_view(self, caller: Caller, row: SessionListRow) -> SessionView:
        path = None if self._transcript_files is None else self._transcript_files.get_path(row.session_id)
        view = views.build_session_view(row, caller.agent_id, path, self._cached_answering_model)
        return view if caller.is_operator else self._hide_unreachable_relatives(caller, view, row.key)

    def _hide_unreachable_relatives(self, caller: Caller, view: SessionView, key: str) -> SessionView:
        """Remove the parent and the child count from a view if the caller may not see them."""
        reach = _cached_reach(caller, self._session_resolver.get_grants(caller))
        parent = view.parent_key
        if parent is None and reach.descendants:
            return view
        if parent is not None and parent != reach.own_key and not reach.admits_agent(_get_agent_id(parent)):
            # If the caller sees a session only as its descendant, the parent is a descendant too.
            below = reach.descendants and key != reach.own_key and not reach.admits_agent(_get_agent_id(key))
            parent = parent if below else None
        children = view.child_count if reach.descendants else None
        return msgspec.structs.replace(view, parent_key=parent, child_count=children)


_cached_reach = lru_cache(maxsize=256)(access.compute_reach)  # the result is the same for every row of a list


def _get_agent_id(key: str) -> str:
    return keys.parse(key).agent_id
