"""`antiphon status`: how the gateway is; or, where none runs, what is kept and how to start one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

SHOWN = (
    "version", "pid", "uptimeMs", "stateDir", "connections", "rssBytes", "runs", "cron", "deliveries", "replicas",
)  # fmt: skip


@click.command(help="How the gateway is, or what is kept while none runs.")
@reaching
@common
@click.pass_obj
def command(settings: Settings) -> None:
    facts = asyncio.run(_facts(settings))
    if settings.json:
        output.emit(facts)
        return
    for name, fact in _running(facts) if facts["running"] else _stopped(facts):
        click.echo(f"{name:<12} {output.line(fact)}")


async def _facts(settings: Settings) -> dict[str, Any]:
    from antiphon.cli.desk import calling

    client = calling(settings)
    if client is None:
        return await _without(settings)
    async with client:
        told = await client.call("status")
        return {
            "running": True,
            "url": client.site.url,
            **{name: told.get(name) for name in SHOWN},
            "sessions": told["sessions"]["count"],
            **({"tokenFile": _token_file(settings)} if settings.named_gateway is None else {}),
        }


async def _without(settings: Settings) -> dict[str, Any]:
    """From the store, if there is one by now."""
    from antiphon.access import Caller
    from antiphon.store.statedir import StateDir
    from antiphon.visits import looking

    home = StateDir.look(settings.paths.state_dir)
    facts: dict[str, Any] = {"running": False, "stateDir": str(home.path), "holder": home.holder}
    if not home.database.exists():
        return {**facts, "sessions": 0, "runs": {"queued": 0, "running": 0}, "deliveries": {}}
    async with looking(settings.config_when_needed(), home.path) as operations:
        summary = await operations.summary(Caller.operator())
        standing = (await operations.deliveries(Caller.operator(), limit=1)).standing
    runs = {"queued": summary.queued, "running": summary.running}
    facts |= {"sessions": summary.sessions, "runs": runs, "deliveries": standing}
    return {**facts, "tokenFile": _token_file(settings)}


def _token_file(settings: Settings) -> str:
    from antiphon.gateway.tokens import NAME

    return str(settings.paths.state_dir / NAME)


def _running(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    runs, cron = facts["runs"], facts["cron"]
    yield "gateway", f"running at {facts['url']} (process {facts['pid']})"
    yield "version", facts["version"]
    yield "up for", output.lasting(facts["uptimeMs"])
    yield "sessions", str(facts["sessions"])
    yield "runs", f"{runs['running']} running, {runs['queued']} queued"
    yield "connections", str(facts["connections"])
    yield "memory", f"{facts['rssBytes'] // 2**20} MiB at most"
    yield "cron", f"{cron['jobs']} jobs" + ("" if cron["enabled"] else ", switched off")
    yield from _deliveries(facts)
    yield from _replicas(facts)
    yield "state", facts["stateDir"]
    if facts.get("tokenFile"):
        yield "token", f"the owner's is in {facts['tokenFile']}"


def _stopped(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    runs = facts["runs"]
    yield "gateway", "not running; start it with: antiphon up"
    if facts["holder"]:
        yield "in use", f"by process {facts['holder']}, which is no gateway (a chat, an import)"
    yield "sessions", str(facts["sessions"])
    yield "runs", f"{runs['running']} interrupted, {runs['queued']} queued; they go on at the next start"
    yield from _deliveries(facts)
    yield "state", facts["stateDir"]


def _replicas(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each, where there are several."""
    replicas: list[dict[str, Any]] = facts["replicas"] or []
    for replica in replicas if len(replicas) > 1 else ():
        lanes = f"{replica['lanes']} lanes"
        heard = f"heard of {output.lasting(replica.get('lagMs') or 0)} ago"
        parts = [
            replica.get("address") or "no address",
            replica.get("version") or "unknown version",
            lanes,
            heard,
        ]
        parts += [] if replica["alive"] else ["silent: its lanes pass to others"]
        parts += ["looks after the whole"] if replica["watching"] else []
        yield "replica", f"{replica['name']}: {', '.join(parts)}"


def _deliveries(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Only what somebody has to look at."""
    standing: dict[str, int] = facts["deliveries"] or {}
    stuck = [f"{standing[state]} {state}" for state in ("dead", "ambiguous") if standing.get(state)]
    if stuck:
        yield "deliveries", f"{', '.join(stuck)}; see: antiphon deliveries"
