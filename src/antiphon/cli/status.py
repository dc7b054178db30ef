"""`antiphon status`: the state of the gateway; without one, that of the store and how to start a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import msgspec

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.cli._ownership import explain_owner
from antiphon.errors import Forbidden
from antiphon.store.statedir import LockOwner

if TYPE_CHECKING:
    from antiphon.client import Client
    from antiphon.operations.types import Readiness

READINESS_TIMEOUT_SECONDS = 5.0  # for the whole check; the gateway gives its store two of them
STATUS_FIELDS = (
    "version", "pid", "uptimeMs", "stateDir", "connections", "rssBytes", "runs", "cron", "deliveries", "replicas",
)  # fmt: skip
FAILURE_DESCRIPTIONS = {
    "closing": ("stopping", "accepts no new work and ends soon"),
    "store": ("database", "unavailable, nothing is accepted; run: antiphon doctor"),
    "bus": (
        "bus",
        "NATS is unreachable: messages are stored, new runs wait; run: antiphon doctor",
    ),
}


@click.command(help="Show the state of the gateway, or of the store if none runs.")
@gateway_options
@common_options
@click.pass_obj
def command(settings: Settings) -> None:
    facts = asyncio.run(_collect_facts(settings))
    if settings.json:
        _output.print_json(facts)
        return
    for name, fact in _format_running(facts) if facts["running"] else _format_stopped(facts):
        click.echo(f"{name:<12} {_output.clean_line(_output.name_program(fact))}")


async def _collect_facts(settings: Settings) -> dict[str, Any]:
    from antiphon.cli._backend import make_gateway_client

    client = make_gateway_client(settings)
    if client is None:
        return await _read_store_status(settings)
    async with client:
        ready = await asyncio.to_thread(read_readiness, client.site.url)
        # Without its store, the gateway would answer only after a long wait, and only with that error.
        status = (
            _build_unavailable_status(settings)
            if "store" in ready.failing
            else await _fetch_gateway_status(client)
        )
        return {
            "running": True,
            "url": client.site.url,
            "failing": ready.failing,
            "degraded": ready.degraded,
            **status,
            **({"tokenFile": _get_token_file(settings)} if settings.named_gateway is None else {}),
        }


async def _fetch_gateway_status(client: Client) -> dict[str, Any]:
    status = await client.call("status")
    config = (await client.call("config.get"))["config"]
    shared = all(config.get(part, {}).get("url") for part in ("store", "bus"))
    facts = {name: status.get(name) for name in STATUS_FIELDS}
    facts["approvals"] = await _count_approvals(client)
    return {**facts, "shared": shared, "sessions": status["sessions"]["count"]}


async def _count_approvals(client: Client) -> int | None:
    """Return how many calls wait for a person; None for a token that may not decide on them."""
    try:
        return len(await client.list_approvals())
    except Forbidden:
        return None


def _build_unavailable_status(settings: Settings) -> dict[str, Any]:
    """Return what is known about a gateway that cannot report its status."""
    from antiphon.cli._gateway_lookup import find_local_gateways

    found = None if settings.named_gateway else next(find_local_gateways(settings.paths.state_dir), None)
    return {
        **dict.fromkeys((*STATUS_FIELDS, "approvals", "shared", "sessions")),
        "pid": found.pid if found else None,
    }


def read_readiness(url: str) -> Readiness:
    """Read `/readyz`, which needs no token; an unreachable path, as behind some proxies, counts as ready."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    from antiphon.operations.types import Readiness

    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "wss" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=READINESS_TIMEOUT_SECONDS)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/readyz")
        return msgspec.json.decode(connection.getresponse().read(), type=Readiness)
    except (OSError, HTTPException, msgspec.MsgspecError):
        return Readiness(ready=True)
    finally:
        connection.close()


async def _read_store_status(settings: Settings) -> dict[str, Any]:
    """Read the status from the store, if it exists."""
    from antiphon.access import Caller
    from antiphon.state_access import open_operations_readonly
    from antiphon.store.statedir import StateDir

    home = StateDir.open_unlocked(settings.paths.state_dir)
    owner = home.owner
    facts: dict[str, Any] = {
        "running": False,
        "stateDir": str(home.path),
        "holder": owner.pid if owner else None,
        "holderCommand": owner.command if owner else None,
    }
    config, operator = settings.load_config_lazily(), Caller.operator()
    elsewhere = config.store_url is not None
    if not elsewhere and not home.database.exists():
        runs = {"queued": 0, "running": 0}
        return {**facts, "sessions": 0, "runs": runs, "approvals": 0, "deliveries": {}}
    async with open_operations_readonly(config, home.path) as operations:
        summary = await operations.sessions.get_summary(operator)
        deliveries = (await operations.deliveries.list(operator, limit=1)).count_by_state
        approvals = len(await operations.approvals.list(operator))
        replicas = await operations.status.list_replicas(operator) if elsewhere else []
    runs = {"queued": summary.queued, "running": summary.running}
    facts |= {"sessions": summary.sessions, "runs": runs, "approvals": approvals, "deliveries": deliveries}
    facts |= {"replicas": msgspec.to_builtins(replicas), "shared": True} if elsewhere else {}
    return {**facts, "tokenFile": _get_token_file(settings)}


def _get_token_file(settings: Settings) -> str:
    from antiphon.gateway.tokens import TOKEN_FILE_NAME

    return str(settings.paths.state_dir / TOKEN_FILE_NAME)


def _format_running(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "gateway", f"running at {facts['url']}" + (f" (process {facts['pid']})" if facts["pid"] else "")
    yield from (
        FAILURE_DESCRIPTIONS[part]
        for part in facts["failing"] + facts["degraded"]
        if part in FAILURE_DESCRIPTIONS
    )
    if "store" not in facts["failing"]:
        yield from _format_gateway_facts(facts)
    if facts.get("tokenFile"):
        yield "token", f"owner's token in {facts['tokenFile']}"


def _format_gateway_facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    runs, cron = facts["runs"], facts["cron"]
    yield "version", facts["version"]
    yield "up for", _output.format_duration(facts["uptimeMs"])
    yield "sessions", str(facts["sessions"])
    yield "runs", _format_run_counts(runs)
    yield from _format_waiting_approvals(facts)
    yield "connections", str(facts["connections"])
    yield "memory", f"{facts['rssBytes'] // 2**20} MiB at most"
    yield "cron", _output.format_count(cron["jobs"], "job") + ("" if cron["enabled"] else ", disabled")
    yield from _format_stuck_deliveries(facts)
    yield from _format_replicas(facts)
    yield "state", facts["stateDir"]


def _format_stopped(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    runs = facts["runs"]
    hosted = any(replica["alive"] for replica in facts.get("replicas", ()))
    state = f"not running{' here, but elsewhere' * hosted}"
    if facts["holder"]:
        yield from _format_owner(state, LockOwner(facts["holder"], facts["holderCommand"]))
    else:
        yield "gateway", f"{state}; start it with: {_output.format_program()} up"
    yield "sessions", str(facts["sessions"])
    if hosted or facts["holder"]:
        yield "runs", _format_run_counts(runs)
    else:
        yield (
            "runs",
            f"{runs['running']} interrupted, {runs['queued']} queued; they continue at the next start",
        )
    yield from _format_waiting_approvals(facts)
    yield from _format_stuck_deliveries(facts)
    yield from _format_replicas(facts)
    yield "state", facts["stateDir"]


def _format_owner(state: str, owner: LockOwner) -> Iterator[tuple[str, str]]:
    """Yield how a gateway can be started while another command owns the directory."""
    yield "gateway", state
    what = str(owner) if owner.command else f"{owner} that is not a gateway (such as a chat or an import)"
    yield "in use", f"by {what}. {explain_owner(owner)}"


def _format_run_counts(runs: dict[str, int]) -> str:
    return f"{runs['running']} running, {runs['queued']} queued"


def _format_replicas(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a line for each replica, if several run or could run."""
    replicas: list[dict[str, Any]] = facts.get("replicas") or []
    for replica in replicas if facts.get("shared") or len(replicas) > 1 else ():
        heartbeat = f"last heartbeat {_output.format_duration(replica.get('lagMs') or 0)} ago"
        parts = [
            replica.get("address") or "no address",
            replica.get("version") or "unknown version",
            _output.format_count(replica["lanes"], "lane"),
            heartbeat,
        ]
        parts += [] if replica["alive"] else ["no heartbeat: other replicas take over its lanes"]
        parts += ["coordinator"] if replica["watching"] else []
        yield "replica", f"{replica['name']}: {', '.join(parts)}"


def _format_waiting_approvals(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how many calls wait for a person, if any do."""
    if count := facts["approvals"]:
        waiting = f"{_output.format_count(count, 'call waits', 'calls wait')} for approval"
        yield "approvals", f"{waiting}; see: {_output.format_program()} approvals"


def _format_stuck_deliveries(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the deliveries that need attention."""
    counts: dict[str, int] = facts["deliveries"] or {}
    stuck = [f"{counts[state]} {state}" for state in ("dead", "ambiguous", "expired") if counts.get(state)]
    if stuck:
        yield "deliveries", f"{', '.join(stuck)}; see: {_output.format_program()} deliveries"
