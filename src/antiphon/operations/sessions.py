"""Creates sessions and changes their settings."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from antiphon import access, keys
from antiphon.access import Action, Caller
from antiphon.engine.sessions import session_rows
from antiphon.engine.validation import THINKING_LEVELS
from antiphon.errors import InvalidInput
from antiphon.operations import request_validation
from antiphon.operations.context import OperationContext
from antiphon.store import Row, Tx
from antiphon.views import SessionView

MAX_DISPLAY_NAME_CHARACTERS = 200

_Settings: TypeAlias = Mapping[str, str | int | None]


class SessionPatch(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to change on a session. Unset fields stay as they are; None removes a setting."""

    label: str | UnsetType | None = UNSET
    display_name: str | UnsetType | None = UNSET
    model: str | UnsetType | None = UNSET
    thinking_level: str | UnsetType | None = UNSET
    verbose_level: str | UnsetType | None = UNSET
    send_policy: str | UnsetType | None = UNSET
    archived: bool | UnsetType | None = UNSET


_COLUMN_BY_FIELD = {
    "thinking_level": "thinking",
    "verbose_level": "verbose",
}  # all other fields are named like their column


class SessionOperations(OperationContext):
    def is_main(self, caller: Caller, session: str) -> bool:
        """Whether this names the main session of a configured agent, which need not exist yet."""
        return self._session_resolver.is_main_session(caller, session)

    async def open(self, caller: Caller, session: str) -> SessionView:
        """Return the session; it is created if it does not exist."""
        row, founded = await self._store.tx(self._open, caller, session, self._clock.now())
        if founded:
            self._publish_change(row, "create")
        return self._build_session_view(caller, row)

    async def _open(self, tx: Tx, caller: Caller, session: str, now: int) -> tuple[Row, bool]:
        row, founded = await self._open_or_create_session(tx, caller, "send", session, now)
        request_validation.require_current_conversation(row, session)
        return await self._load_described_session(tx, row["id"]), founded

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
            owner = agent or caller.agent_id or self.config.default_agent_id
            session = str(keys.owned_key(owner, "dashboard", str(uuid.uuid4())))
        given = {"label": label, "display_name": display_name, "model": model}
        settings = {
            name: self._validate_setting(name, value) for name, value in given.items() if value is not None
        }
        now = self._clock.now()
        row, reason = await self._store.tx(self._create, caller, session, agent, parent, settings, now)
        if reason:
            self._publish_change(row, reason)
        return self._build_session_view(caller, row)

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
        # The parent first: a session cannot be its own parent, and must not be created to become it.
        above = None if parent is None else await self._session_resolver.open(tx, caller, "send", parent)
        row, founded = await self._open_or_create_session(tx, caller, "send", session, now)
        request_validation.require_current_conversation(row, session)
        _check_agent(row, agent)
        if founded and above:
            await session_rows.attach_to_parent(tx, row["id"], above["id"])
        before = await self._load_described_session(tx, row["id"])
        changed = {column: value for column, value in settings.items() if value != before[column]}
        if changed:
            if not founded:
                self._session_resolver.authorize(caller, "control", row, session)
            await session_rows.patch_session(tx, row["id"], changed, now)
        reason = "create" if founded else "patch" if changed else None
        return await self._load_described_session(tx, row["id"]), reason

    async def patch(self, caller: Caller, session: str, changes: SessionPatch) -> SessionView:
        """Change the given settings, all or none. A key without a session gets one.

        Names, model and the like need the right to control the session, the send policy that to manage it.
        """
        action: Action = "control" if changes.send_policy is UNSET else "manage"
        access.require_scope(caller, action)
        given = {name: getattr(changes, name) for name in SessionPatch.__struct_fields__}
        settings = {
            _COLUMN_BY_FIELD.get(name, name): self._validate_setting(name, value)
            for name, value in given.items()
            if value is not UNSET
        }
        row, founded = await self._store.tx(self._patch, caller, action, session, settings, self._clock.now())
        if founded:
            self._publish_change(row, "create")
        if settings:
            self._publish_change(row, "patch")
        return self._build_session_view(caller, row)

    async def _patch(
        self, tx: Tx, caller: Caller, action: Action, session: str, settings: _Settings, now: int
    ) -> tuple[Row, bool]:
        row, founded = await self._open_or_create_session(tx, caller, action, session, now)
        if settings:
            await session_rows.patch_session(tx, row["id"], settings, now)
        return await self._load_described_session(tx, row["id"]), founded

    def _validate_setting(self, field: str, value: str | bool | None) -> str | int | None:
        """Return a setting in its stored form."""
        match field, value:
            case "archived", _:
                return int(bool(value))
            case "label", str():
                return request_validation.validate_printable_name(
                    value, request_validation.MAX_LABEL_CHARACTERS, "label"
                )
            case "display_name", str():
                return request_validation.validate_printable_name(
                    value, MAX_DISPLAY_NAME_CHARACTERS, "displayName"
                )
            case "model", str():
                self.config.find_model(value)
            case "thinking_level", str():
                request_validation.validate_choice(value, THINKING_LEVELS, "thinkingLevel")
            case "verbose_level", str():
                request_validation.validate_choice(value, request_validation.VERBOSE_LEVELS, "verboseLevel")
            case "send_policy", str():
                request_validation.validate_choice(value, request_validation.SEND_POLICIES, "sendPolicy")
            case _:
                return None
        return value


def _check_agent(row: Row, agent: str | None) -> None:
    if agent is not None and row["agent_id"] != agent:
        raise InvalidInput(
            f"Session {row['key']!r} belongs to agent {row['agent_id']!r}, not to {agent!r}.",
            "Leave out one of the two, or write the key in full.",
            field="agentId",
        )
