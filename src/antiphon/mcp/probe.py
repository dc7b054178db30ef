"""Connects to a server once, without a gateway, for CLI commands and `doctor`."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from antiphon.child_processes.processes import ChildProcesses
from antiphon.clock import SystemClock
from antiphon.config.mcp import McpServerConfig
from antiphon.mcp.listings import ServerState
from antiphon.mcp.offers import Offer, list_offers
from antiphon.mcp.server_actor import CONNECT_TIMEOUT_SECONDS, ServerActor, ServerContext


class ProbedTool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The outcome of a test of a server. `state` is `ready`, `failed` or `needs_auth`."""

    name: str
    state: ServerState
    reason: str | None = None
    duration_ms: int
    tools: list[ProbedTool] = []
    """Named as agents call them; only those that `enabledTools` and `disabledTools` allow."""
    listed_tools: int = 0
    notes: list[str] = []


async def probe_server(state_dir: Path, name: str, config: McpServerConfig) -> ProbeResult:
    """Connect to a server as a gateway does, list its tools, and disconnect. The answer is stored."""
    processes = ChildProcesses(state_dir, "mcp", adopts=False)
    context = ServerContext(state_dir=state_dir, clock=SystemClock(), processes=processes)
    actor = ServerActor(name, config, context, lambda: None)
    actor.load()
    began = time.monotonic()
    try:
        await actor.try_connect(CONNECT_TIMEOUT_SECONDS)
        state, reason = actor.state, actor.reason
        duration_ms = round((time.monotonic() - began) * 1000)
    finally:
        await actor.aclose()
        await processes.aclose()
    if state != "ready" or actor.listing is None:
        is_decided = state in ("failed", "needs_auth")
        return ProbeResult(
            name=name,
            state=state if is_decided else "failed",
            reason=reason if is_decided else f"it did not answer within {CONNECT_TIMEOUT_SECONDS:.0f} s",
            duration_ms=duration_ms,
        )
    offers = list_offers({name: config}, {name: actor.listing})
    return ProbeResult(
        name=name,
        state="ready",
        duration_ms=duration_ms,
        tools=[_describe_offer(offer) for offer in offers],
        listed_tools=len(actor.listing.tools),
        notes=list(actor.listing.notes),
    )


def _describe_offer(offer: Offer) -> ProbedTool:
    return ProbedTool(name=offer.name, description=offer.tool.description)
