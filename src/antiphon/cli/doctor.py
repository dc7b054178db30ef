"""`antiphon doctor`: prints one line per finding and sets an exit code for scripts.

The checks of the configuration, the state directory, the database and the models are in `antiphon.doctor`. The checks
that need to know gateways are here: the bus, the gateways on this machine, their token file and their port.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from antiphon.cli import _output
from antiphon.cli._gateway_lookup import find_local_gateways
from antiphon.cli._options import Settings, common_options
from antiphon.cli._output import format_age
from antiphon.cli._ownership import explain_owner
from antiphon.cli.channels import load_accounts
from antiphon.cli.status import read_readiness
from antiphon.config import Config
from antiphon.doctor import (
    Finding,
    find_secret_error,
    path_exists,
    report_failure,
    report_ok,
    report_warning,
    run_checks,
)
from antiphon.errors import AntiphonError, BusError, ConfigError, StoreError, Unavailable
from antiphon.gateway import discovery
from antiphon.gateway.discovery import DiscoveryRecord
from antiphon.store.statedir import StateDir

if TYPE_CHECKING:
    from antiphon.config.channels import ChannelAccount
    from antiphon.nats.connection import NatsServers

LEVEL_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "fail"}
GATEWAY_CONNECT_TIMEOUT_SECONDS = 2.0  # for a gateway on this machine
BUS_CONNECT_TIMEOUT_SECONDS = 3.0  # for one of the NATS servers


@click.command(help="Check the installation and suggest fixes. Exits with 1 if a check fails.")
@click.option(
    "--online", is_flag=True, help="Also contact the model providers (no key is sent) and the MCP servers."
)
@common_options
@click.pass_obj
def command(settings: Settings, online: bool) -> int:
    findings = asyncio.run(_collect_findings(settings, online=online))
    failed = any(finding.level == "fail" for finding in findings)
    if settings.json:
        _output.print_json({"ok": not failed, "findings": findings})
        return int(failed)
    for finding in findings:
        mark = _output.red(LEVEL_MARKS["fail"]) if finding.level == "fail" else LEVEL_MARKS[finding.level]
        hint = f" {finding.next_step}" if finding.next_step else ""
        start = f"{mark}  {finding.check:<12} "
        width = len(start) - len(mark) + len(LEVEL_MARKS[finding.level])
        _output.print_wrapped(
            start, _output.clean_text(_output.name_program(finding.what + hint)), width=width
        )
    return int(failed)


async def _collect_findings(settings: Settings, *, online: bool) -> list[Finding]:
    config = _load_config_or_none(settings)
    findings = await run_checks(settings.paths, online=online)
    findings += await check_bus(config) if config else []
    findings += check_gateways(settings.paths.state_dir, config)
    return [*findings, *(await _check_channels(settings, config) if config else [])]


async def _check_channels(settings: Settings, config: Config) -> list[Finding]:
    """Report every enabled account: as the running gateway sees it, else whether it could connect."""
    findings: list[Finding] = []
    if not config.enabled_channels:
        return findings
    try:
        accounts = await load_accounts(settings)
    except AntiphonError as error:
        return [report_warning("channels", f"the gateway was not asked: {error.what}", error.hint)]
    running = {(account["channel"], account["accountId"]): account for account in accounts or []}
    for name, section in config.enabled_channels.items():
        for account_id, account in section.list_enabled_accounts().items():
            findings.append(_report_account(name, account_id, account, running.get((name, account_id))))
    return findings


def _report_account(
    name: str, account_id: str, account: ChannelAccount, seen: dict[str, Any] | None
) -> Finding:
    label = f"{name} account {account_id!r}"
    if missing := account.find_missing_credentials(account_id):
        return report_failure("channels", f"{label} cannot connect.", missing)
    if seen is None:
        return report_ok("channels", f"{label} is not connected, because no gateway runs with it")
    proof = f"last answer {format_age(seen['proofAt'])}" if seen.get("proofAt") else "no answer yet"
    if seen["state"] != "ready":
        what = f"{label} is {seen['state']}, {proof}: {seen.get('reason') or 'it is connecting'}"
        hint = f"Check the token and the network: `antiphon channels test {name} --account {account_id}`."
        return report_failure("channels", what, hint)
    if seen.get("givenUp"):
        what = f"{label} is connected, but {seen['givenUp']} messages could not be taken."
        return report_warning("channels", what, "See `antiphon logs` for the reasons.")
    return report_ok("channels", f"{label} is connected as {seen.get('identity')}, {proof}")


def _load_config_or_none(settings: Settings) -> Config | None:
    try:
        return settings.load().config
    except AntiphonError:
        return None  # already reported as a finding


async def check_bus(config: Config) -> list[Finding]:
    """Check that a NATS server accepts a connection, if gateways are configured to use one."""
    if config.bus.url is None or config.store.url is None:
        return []
    from antiphon.coordination import build_nats_servers

    try:
        servers = build_nats_servers(config)
        await _connect_to_bus(servers)
    except AntiphonError as error:
        return [report_failure("bus", error.what, error.hint)]
    return [report_ok("bus", f"reached at {servers.format_without_secrets()}")]


async def _connect_to_bus(servers: NatsServers) -> None:
    from antiphon.nats.connection import NatsConnection

    async def on_connected(_: object) -> None: ...

    connection = NatsConnection(
        servers, name="antiphon doctor", on_connected=on_connected, on_disconnected=lambda: None
    )
    try:
        async with asyncio.timeout(BUS_CONNECT_TIMEOUT_SECONDS):
            await connection.start(timeout=0)
    except TimeoutError as error:
        where = servers.format_without_secrets()
        raise BusError(
            f"No NATS server at {where} answers in {BUS_CONNECT_TIMEOUT_SECONDS:.0f} s.",
            "Check bus.url, and that it runs.",
        ) from error
    finally:
        await connection.stop()


def check_gateways(state_dir: Path, config: Config | None) -> Iterator[Finding]:
    found = _find_gateways_or_none(state_dir)
    if found is None:
        yield report_warning(
            "gateway", "was not checked, because the state directory could not be read.", "Fix that first."
        )
    elif found:
        yield from map(_check_gateway, found)
    elif left := discovery.read(state_dir):
        yield report_warning(
            "gateway",
            f"not running; {discovery.DISCOVERY_FILE_NAME} was left behind by process {left.pid}, which was killed.",
            f"Nothing is lost. The directory is in use by {owner}. {explain_owner(owner)}"
            if (owner := StateDir.open_unlocked(state_dir).owner)
            else "Nothing is lost: start it again with `antiphon up`.",
        )
    else:
        yield report_ok("gateway", "not running")
    if config:
        yield from _check_secrets(config)
    if not found and config:
        yield from _check_port(config)
    yield from _check_token_file(state_dir)


def _find_gateways_or_none(state_dir: Path) -> list[DiscoveryRecord] | None:
    try:
        return [*find_local_gateways(state_dir)]
    except StoreError:
        return None  # already reported as a finding


def _check_gateway(found: DiscoveryRecord) -> Finding:
    parts = urlsplit(found.url)
    try:
        socket.create_connection(
            (parts.hostname or "", parts.port or 0), timeout=GATEWAY_CONNECT_TIMEOUT_SECONDS
        ).close()
    except OSError as error:
        return report_failure(
            "gateway",
            f"process {found.pid} runs, but {found.url} does not answer ({error}).",
            f"See the log; if it stays like this: kill {found.pid}, then `antiphon up`.",
        )
    if "store" in read_readiness(found.url).failing:
        return report_failure(
            "gateway",
            f"process {found.pid} runs at {found.url}, but it cannot use its database.",
            "See `antiphon logs`. If the database file was deleted or replaced, put the right one there and restart.",
        )
    return report_ok("gateway", f"running at {found.url}, process {found.pid}")


def _check_secrets(config: Config) -> Iterator[Finding]:
    """Check the secrets without which `up` does not start."""
    auth, hooks = config.gateway.auth, config.hooks
    needed = {
        "gateway.auth.token": auth.token,
        "gateway.auth.password": auth.password,
        "hooks.token": hooks.token if hooks.enabled else None,
    }
    for path, secret in needed.items():
        if secret and (error := find_secret_error(secret)):
            yield report_failure("secrets", f"{path!r} could not be read: {error.what}", error.hint)


def _check_port(config: Config) -> Iterator[Finding]:
    from antiphon.gateway.server import choose_listen_address, open_listener

    port = config.gateway.port
    try:
        host = choose_listen_address(config)
        open_listener(host, port).close()
    except ConfigError as error:
        yield report_failure("port", error.what, error.hint)
    except Unavailable as error:
        yield report_warning("port", error.what, error.hint)
    else:
        yield report_ok("port", f"{host}:{port} is free")


def _check_token_file(state_dir: Path) -> Iterator[Finding]:
    """Check the token file by reading it as the gateway does."""
    from antiphon.gateway.tokens import TOKEN_FILE_NAME, TokenRegistry

    path = state_dir / TOKEN_FILE_NAME
    if not path_exists(path):
        return
    try:
        TokenRegistry.read(path)
    except StoreError as error:
        yield report_failure("tokens", error.what, error.hint)
    else:
        yield report_ok("tokens", f"{str(path)!r} is private to its owner")
