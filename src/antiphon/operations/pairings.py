"""Pairings: people who may write directly to an account of a chat service, besides those in its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon import access
from antiphon.access import Caller
from antiphon.channel_manifest import load_manifest
from antiphon.engine.inbound import pairing_rows
from antiphon.errors import NotFound
from antiphon.operations.context import OperationContext
from antiphon.operations.types import PairingView
from antiphon.store import Row

if TYPE_CHECKING:
    from antiphon.config.channels import ChannelConfig

SHARED_MAIN_WARNING = (
    "'session.dmScope' is 'main', so all direct chats share one session, and each person can read what the others"
    " wrote. Set it to 'per-channel-peer' to give each person a session."
)


class PairingOperations:
    def __init__(self, context: OperationContext) -> None:
        self._context = context

    async def list(self, caller: Caller) -> list[PairingView]:
        """Return pairings and open requests."""
        access.require_operator(caller, "manage", "pairings")
        rows = await self._context.store.read(pairing_rows.list_pairings, self._context.clock.now())
        return [_build_view(row) for row in rows]

    async def approve(
        self, caller: Caller, channel: str, code: str, account: str | None = None
    ) -> PairingView:
        """Admit the person who was shown this code.

        Raises:
            NotFound: no open request has this code.
            Forbidden: too many wrong codes were entered.
        """
        access.require_operator(caller, "manage", "pairings")
        section = self._find_section(channel)
        account_id = account or section.default_account_id
        settings = section.list_accounts().get(account_id)
        owners = set(settings.allow_from) - {"*"} if settings else set[str]()
        row = await self._context.store.tx(
            pairing_rows.approve_pairing,
            channel,
            account_id,
            code,
            self._context.clock.now(),
            has_configured_owner=bool(owners),
        )
        if row is None:
            raise NotFound(
                f"No open request of {channel!r} account {account_id!r} has this code.",
                "Codes are valid for an hour: ask the person to write again. See `antiphon pairing list`.",
            )
        others = [
            view
            for view in await self.list(caller)
            if view.state == "approved" and view.sender != row["sender"]
        ]
        is_shared = self._context.config.session.dm_scope == "main" and bool(
            others or owners - {row["sender"]}
        )
        return _build_view(row, SHARED_MAIN_WARNING if is_shared else None)

    async def revoke(self, caller: Caller, channel: str, sender: str, account: str | None = None) -> None:
        """Remove a pairing or an open request. A sender that the configuration names stays admitted."""
        access.require_operator(caller, "manage", "pairings")
        section = self._find_section(channel)
        manifest = load_manifest(channel)
        sender = manifest.strip_prefix(sender) if manifest else sender
        await self._context.store.tx(
            pairing_rows.revoke_pairing, channel, account or section.default_account_id, sender
        )

    def _find_section(self, channel: str) -> ChannelConfig:
        section = self._context.config.channel_sections.get(channel)
        if section is None:
            raise NotFound(
                f"The channel {channel!r} is not configured.",
                f"Set 'channels.{channel}', or see `antiphon channels list`.",
            )
        return section


def _build_view(row: Row, warning: str | None = None) -> PairingView:
    return PairingView(
        channel=row["channel"],
        account=row["account"],
        sender=row["sender"],
        name=row["name"] or None,
        state=row["state"],
        code=row["code"],
        is_owner=bool(row["is_owner"]),
        requested_at=row["requested_at"],
        expires_at=row["expires_at"],
        approved_at=row["approved_at"],
        warning=warning,
    )
