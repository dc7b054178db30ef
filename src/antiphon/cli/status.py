"""`antiphon status`: how the gateway is; or, where none runs, what is kept and how to start one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from antiphon.cli import output
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.client import Client

SOON = 5.0  # seconds in which a gateway says whether it can work; it gives its store two
SHOWN = (
    "version", "pid", "uptimeMs", "stateDir", "connections", "rssBytes", "runs", "cron", "deliveries", "replicas",
)  # fmt: skip
LACKING = {
    "closing": ("stopping", "it takes nothing any more, and is gone soon"),
    "store": ("database", "cannot be used now, so nothing is accepted; why: antiphon doctor"),
    "bus": (
        "bus",
        "NATS is away: what is said is kept, and new runs wait until it is back; why: antiphon doctor",
    ),
}


class Readiness(msgspec.Struct, frozen=True):
    """What a gateway says of itself at `/readyz`."""

    failing: list[str] = []
    degraded: list[str] = []


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
        ready = await asyncio.to_thread(read_readiness, client.site.url)
        # Without its store it would answer after a long wait, and then only that.
        told = _known(settings) if "store" in ready.failing else await _told(client)
        return {
            "running": True,
            "url": client.site.url,
            "failing": ready.failing,
            "degraded": ready.degraded,
            **told,
            **({"tokenFile": _token_file(settings)} if settings.named_gateway is None else {}),
        }


async def _told(client: Client) -> dict[str, Any]:
    told = await client.call("status")
    config = (await client.call("config.get"))["config"]
    shared = all(config.get(part, {}).get("url") for part in ("store", "bus"))
    facts = {name: told.get(name) for name in SHOWN}
    return {**facts, "shared": shared, "sessions": told["sessions"]["count"]}


def _known(settings: Settings) -> dict[str, Any]:
    """What is known of a gateway that cannot say how it is."""
    from antiphon.cli.running import here

    found = None if settings.named_gateway else next(here(settings.paths.state_dir), None)
    return {**dict.fromkeys((*SHOWN, "shared", "sessions")), "pid": found.pid if found else None}


def read_readiness(url: str) -> Readiness:
    """Asked without a token; nothing is lacking where this way does not lead to the gateway, as behind some proxies."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "wss" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=SOON)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/readyz")
        return msgspec.json.decode(connection.getresponse().read(), type=Readiness)
    except (OSError, HTTPException, msgspec.MsgspecError):
        return Readiness()
    finally:
        connection.close()


async def _without(settings: Settings) -> dict[str, Any]:
    """From the store, if there is one by now."""
    from antiphon.access import Caller
    from antiphon.store.statedir import StateDir
    from antiphon.visits import looking

    home = StateDir.look(settings.paths.state_dir)
    facts: dict[str, Any] = {"running": False, "stateDir": str(home.path), "holder": home.holder}
    config, operator = settings.config_when_needed(), Caller.operator()
    elsewhere = config.store.url is not None
    if not elsewhere and not home.database.exists():
        return {**facts, "sessions": 0, "runs": {"queued": 0, "running": 0}, "deliveries": {}}
    async with looking(config, home.path) as operations:
        summary = await operations.summary(operator)
        standing = (await operations.deliveries(operator, limit=1)).standing
        replicas = await operations.replicas(operator) if elsewhere else []
    runs = {"queued": summary.queued, "running": summary.running}
    facts |= {"sessions": summary.sessions, "runs": runs, "deliveries": standing}
    facts |= {"replicas": msgspec.to_builtins(replicas), "shared": True} if elsewhere else {}
    return {**facts, "tokenFile": _token_file(settings)}


def _token_file(settings: Settings) -> str:
    from antiphon.gateway.tokens import NAME

    return str(settings.paths.state_dir / NAME)


def _running(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "gateway", f"running at {facts['url']}" + (f" (process {facts['pid']})" if facts["pid"] else "")
    yield from (LACKING[part] for part in facts["failing"] + facts["degraded"] if part in LACKING)
    if "store" not in facts["failing"]:
        yield from _working(facts)
    if facts.get("tokenFile"):
        yield "token", f"the owner's is in {facts['tokenFile']}"


def _working(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    runs, cron = facts["runs"], facts["cron"]
    yield "version", facts["version"]
    yield "up for", output.lasting(facts["uptimeMs"])
    yield "sessions", str(facts["sessions"])
    yield "runs", _going_on(runs)
    yield "connections", str(facts["connections"])
    yield "memory", f"{facts['rssBytes'] // 2**20} MiB at most"
    yield "cron", _many(cron["jobs"], "job") + ("" if cron["enabled"] else ", switched off")
    yield from _deliveries(facts)
    yield from _replicas(facts)
    yield "state", facts["stateDir"]


def _stopped(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    runs = facts["runs"]
    hosted = any(replica["alive"] for replica in facts.get("replicas", ()))
    yield "gateway", f"not running{' here, but elsewhere' * hosted}; start it with: antiphon up"
    if facts["holder"]:
        yield "in use", f"by process {facts['holder']}, which is no gateway (a chat, an import)"
    yield "sessions", str(facts["sessions"])
    if hosted or facts["holder"]:
        yield "runs", _going_on(runs)
    else:
        yield "runs", f"{runs['running']} interrupted, {runs['queued']} queued; they go on at the next start"
    yield from _deliveries(facts)
    yield from _replicas(facts)
    yield "state", facts["stateDir"]


def _going_on(runs: dict[str, int]) -> str:
    return f"{runs['running']} running, {runs['queued']} queued"


def _replicas(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each, where there are or could be several."""
    replicas: list[dict[str, Any]] = facts.get("replicas") or []
    for replica in replicas if facts.get("shared") or len(replicas) > 1 else ():
        heard = f"heard of {output.lasting(replica.get('lagMs') or 0)} ago"
        parts = [
            replica.get("address") or "no address",
            replica.get("version") or "unknown version",
            _many(replica["lanes"], "lane"),
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


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
