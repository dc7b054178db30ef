"""Diagnoses a configuration and a state directory. Nothing is changed or fixed.

Each check returns findings: what was examined, its state, and what to do about it. A check that cannot run is
a finding too, so one broken part never hides the others.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from antiphon.config import Config, LoadedConfig, Paths, Secret, load
from antiphon.config.addresses import mask_url
from antiphon.config.mcp import McpServerConfig
from antiphon.errors import AntiphonError, ConfigError, InvalidInput
from antiphon.messages import decode_message
from antiphon.paths import expand_home, is_writable
from antiphon.preflight import find_problems
from antiphon.state_access import open_store_readonly
from antiphon.store import Row, Store, Tx
from antiphon.store.migrations import load_migrations
from antiphon.store.queries import Queries
from antiphon.store.sqlite.database_file import check_file, check_library
from antiphon.store.statedir import StateDir, find_exposure, translate_os_error
from antiphon.workspace.sandbox import Sandboxes

SQL = Queries("doctor")
MAX_CONFIG_WARNINGS = 20  # shown here; `config check` shows all
MIN_FREE_DISK_BYTES, LOW_FREE_DISK_BYTES = 64 * 2**20, 1024 * 2**20
MAX_ENTRIES_CHECKED = 100_000  # newest transcript entries that are read
CHECKED_ENTRIES_PER_PAGE = 500
AFTER_EVERY_LEASE_MILLISECONDS = 2**62  # later than any lease
PROVIDER_TIMEOUT_SECONDS = 5.0

FindingLevel = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    check: str
    level: FindingLevel
    what: str
    next_step: str | None = None


def report_ok(check: str, what: str) -> Finding:
    return Finding(check=check, level="ok", what=what)


def report_warning(check: str, what: str, next_step: str) -> Finding:
    return Finding(check=check, level="warn", what=what, next_step=next_step)


def report_failure(check: str, what: str, next_step: str) -> Finding:
    return Finding(check=check, level="fail", what=what, next_step=next_step)


def _report_error(check: str, error: AntiphonError) -> Finding:
    return report_failure(check, error.what, error.hint)


async def run_checks(paths: Paths, *, online: bool = False) -> list[Finding]:
    """Runs all checks, ordered so that earlier findings can explain later ones."""
    findings = [*_check_machine()]
    loaded = _check_configuration(paths, findings)
    home = StateDir.open_unlocked(paths.state_dir)
    findings += [*_check_state_directory(home), *_check_disk_space(home.path)]
    if loaded is not None and loaded.config.store.url is not None:
        findings += await _check_database_server(loaded.config, home)
    elif path_exists(home.database):
        findings += await _check_database_file(home)
    elif holder := home.holder:
        findings.append(_report_deleted_database(home, holder))
    if loaded is not None:
        findings += await _check_sandboxes(loaded.config, home.path)
        findings += await _check_mcp_servers(loaded.config, home.path, online=online)
        findings += await _check_models(loaded.config, online=online)
        findings += [
            report_failure("models", problem.what, problem.hint)
            for problem in await find_problems(loaded.config)
        ]
    return findings


def _check_machine() -> Iterator[Finding]:
    yield report_ok("python", f"Python {platform.python_version()}")
    try:
        check_library()
    except AntiphonError as error:
        yield _report_error("sqlite", error)
    else:
        yield report_ok("sqlite", f"SQLite {sqlite3.sqlite_version}")


def _check_configuration(paths: Paths, findings: list[Finding]) -> LoadedConfig | None:
    try:
        loaded = load(paths.config, required=paths.config_explicit)
    except AntiphonError as error:
        findings.append(_report_error("config", error))
        return None
    where = str(loaded.path) if loaded.path else f"none at {str(paths.config)!r}; the defaults are used"
    findings.append(report_ok("config", where))
    shown, rest = loaded.warnings[:MAX_CONFIG_WARNINGS], len(loaded.warnings[MAX_CONFIG_WARNINGS:])
    findings += [report_warning("config", text, "See docs/configuration.md.") for text in shown]
    if rest:
        findings.append(
            report_warning("config", f"There are {rest} more warnings.", "See: antiphon config check")
        )
    return loaded


# --- the directory ---


def path_exists(path: Path) -> bool:
    """Whether a path exists, as far as this user can see; checking the state directory reports missing access."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises where a directory may not be entered


def _check_state_directory(home: StateDir) -> Iterator[Finding]:
    try:
        home.check_readable()
    except AntiphonError as error:
        yield _report_error("state", error)
        return
    if not home.path.exists():
        yield _check_missing_directory(home.path)
        return
    if not (home.path.is_dir() and is_writable(home.path)):
        yield report_failure(
            "state",
            f"{str(home.path)!r} is not a writable directory.",
            "Give this user write access, or choose another with --state-dir.",
        )
        return
    try:
        error = find_exposure(home.path)
    except OSError as found:
        error = translate_os_error(found, home.path)
    if error:
        yield _report_error("state", error)
        return
    for path in _list_private_paths(home):
        if not is_writable(path):
            yield report_failure(
                "state", f"{str(path)!r} cannot be written to.", "Give this user write access to it."
            )
    open_to_others = [path for path in _list_private_paths(home) if stat.S_IMODE(path.stat().st_mode) & 0o077]
    for path in open_to_others:
        yield report_warning(
            "state", f"{str(path)!r} can be read by other users.", f"Run: chmod go= {str(path)!r}"
        )
    if not open_to_others:
        yield report_ok("state", f"{str(home.path)!r} is private to its owner")
    holder = home.holder
    yield report_ok("lock", f"in use by process {holder}" if holder else "free")


def _check_missing_directory(path: Path) -> Finding:
    parent = _find_nearest_existing_path(path)
    if is_writable(parent):
        return report_ok("state", f"{str(path)!r} does not exist yet; it is created at the first start")
    return report_failure(
        "state",
        f"{str(path)!r} does not exist and cannot be created in {str(parent)!r}.",
        "Give this user write access there, or choose another with --state-dir.",
    )


def _find_nearest_existing_path(path: Path) -> Path:
    """The longest part of a path that exists."""
    return next(existing for existing in (path.absolute(), *path.absolute().parents) if path_exists(existing))


def _list_private_paths(home: StateDir) -> Iterable[Path]:
    database = home.database
    paths = [home.path, database, *(database.with_name(database.name + end) for end in ("-wal", "-shm"))]
    return [path for path in [*paths, home.path / "lock", home.transcripts] if path.exists()]


def _check_disk_space(path: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(_find_nearest_existing_path(path)).free
    text = f"{free // 2**20} MiB free"
    if free < MIN_FREE_DISK_BYTES:
        yield report_failure(
            "disk", f"Only {text}.", "Free some space: messages cannot be accepted without it."
        )
    elif free < LOW_FREE_DISK_BYTES:
        yield report_warning("disk", f"Only {text}.", "Free some space before it runs out.")
    else:
        yield report_ok("disk", text)


# --- the database ---


async def _check_database_file(home: StateDir) -> list[Finding]:
    try:
        await asyncio.to_thread(check_file, home.database)
    except AntiphonError as error:
        return [_report_error("database", error)]
    intact = report_ok("database", f"intact, schema {load_migrations()[-1].version}")
    return [intact, *await _check_database_content(Config(), home, running=home.holder is not None)]


def _report_deleted_database(home: StateDir, holder: str) -> Finding:
    return report_failure(
        "database",
        f"{str(home.database)!r} does not exist, though process {holder} is using this directory: it was deleted.",
        "Stop that process, put the file back or restore a backup, then start it again; see docs/operating.md.",
    )


async def _check_database_server(config: Config, home: StateDir) -> list[Finding]:
    """Checks a database that other gateways may share; its active runs may be theirs."""
    try:
        async with open_store_readonly(config, home.path):
            pass
    except AntiphonError as error:
        return [_report_error("database", error)]
    return [report_ok("database", "reached"), *await _check_database_content(config, home, running=True)]


async def _check_database_content(config: Config, home: StateDir, *, running: bool) -> list[Finding]:
    try:
        async with open_store_readonly(config, home.path) as store:
            return [await _check_transcripts(store), *await _check_runs(store, running=running)]
    except AntiphonError as error:
        return [_report_error("database", error)]


async def _check_transcripts(store: Store) -> Finding:
    """Reads the newest entries, a page at a time, as a prompt would."""
    checked = unreadable = 0
    first: Row | None = None
    before = 2**62
    while checked < MAX_ENTRIES_CHECKED:
        page = await store.read(_load_entries_before, before)
        damaged = [row for row in page if not _is_readable_entry(row["body"])]
        checked += len(page)
        unreadable += len(damaged)
        first = first or (damaged[0] if damaged else None)
        if len(page) < CHECKED_ENTRIES_PER_PAGE:
            break
        before = page[-1]["id"]
    if first is None:
        return report_ok("transcripts", f"the newest {checked} entries can be read")
    return report_warning(
        "transcripts",
        f"{unreadable} of the newest {checked} entries could not be read; "
        f"the newest is {first['seq']} in {first['key']!r}.",
        f"See: antiphon sessions history {first['session_id']} --before {first['seq'] + 1} --limit 1 --json",
    )


async def _check_sandboxes(config: Config, state_dir: Path) -> list[Finding]:
    """Examines the sandbox of every agent from inside. One that is needed and does not work is a failure."""
    sandboxes = Sandboxes(config, state_dir)
    findings: dict[str, Finding] = {}
    for agent_id in config.agent_ids:
        status = await sandboxes.find_status(agent_id)
        reason, cure = status.describe_faults()
        if status.backend is None:
            is_needed = config.get_agent(agent_id).sandbox.mode != "off"
            report = report_failure if is_needed else report_warning
            finding = report("sandbox", reason, cure)
        elif status.faults:
            finding = report_warning(
                "sandbox", f"{status.describe_backend()} replaces a stronger backend. {reason}", cure
            )
        else:
            bound = (
                "; their memory is limited for each process"
                if status.backend in ("bwrap", "landlock")
                else ""
            )
            finding = report_ok("sandbox", f"{status.describe_backend()} isolates commands{bound}")
        findings[finding.level] = finding
    return list(findings.values())


async def _load_entries_before(tx: Tx, before: int) -> list[Row]:
    return await tx.all(SQL.entries_before, before=before, limit=CHECKED_ENTRIES_PER_PAGE)


def _is_readable_entry(body: str) -> bool:
    try:
        decode_message(body)
    except InvalidInput:
        return False
    return True


async def _check_runs(store: Store, *, running: bool) -> list[Finding]:
    now = (
        store.clock.now() if running else AFTER_EVERY_LEASE_MILLISECONDS
    )  # without a lock holder, no lease can be alive
    interrupted, orphaned = await store.read(_load_problem_runs, now)
    findings: list[Finding] = []
    if interrupted:
        findings.append(
            report_warning(
                "runs",
                f"{_format_run_count(len(interrupted))} given up after too many interruptions, "
                f"the latest in {interrupted[0]['key']!r}.",
                "Send the message again if it still matters.",
            )
        )
    if orphaned and running:
        findings.append(
            report_failure(
                "runs",
                f"{_format_run_count(len(orphaned))} running without a live owner, "
                f"the first in {orphaned[0]['key']!r}.",
                "If that does not change within a minute, restart Antiphon.",
            )
        )
    elif orphaned:
        findings.append(
            report_warning(
                "runs",
                f"{_format_run_count(len(orphaned))} interrupted.",
                f"{'It continues' if len(orphaned) == 1 else 'They continue'} at the next start.",
            )
        )
    return findings or [report_ok("runs", "no run was lost or given up")]


async def _load_problem_runs(tx: Tx, now: int) -> tuple[list[Row], list[Row]]:
    return await tx.all(SQL.interrupted_runs), await tx.all(SQL.runs_without_owner, now=now)


def _format_run_count(count: int) -> str:
    return f"{count} {'run was' if count == 1 else 'runs were'}"


# --- the MCP servers ---


async def _check_mcp_servers(config: Config, state_dir: Path, *, online: bool) -> list[Finding]:
    """Report what is known of each MCP server; with `online`, connect to it."""
    servers = config.enabled_mcp_servers
    if not servers:
        return []
    from antiphon.mcp.probe import probe_server  # noqa: PLC0415 - only where servers are configured
    from antiphon.mcp.servers import load_known_servers  # noqa: PLC0415

    if online:
        probed = await asyncio.gather(*(probe_server(state_dir, *server) for server in servers.items()))
        return [
            _report_mcp_server(each.name, servers[each.name], each.state, each.reason, len(each.tools))
            for each in probed
        ]
    known = await asyncio.to_thread(load_known_servers, config, state_dir)
    return [
        _report_mcp_server(
            name,
            servers[name],
            record.state,
            record.reason or await asyncio.to_thread(_find_mcp_server_fault, servers[name]),
            offered_tools,
        )
        for name, record, offered_tools in known
    ]


def _find_mcp_server_fault(server: McpServerConfig) -> str | None:
    """Return why a server cannot be used, as far as can be known without starting it."""
    if server.command is not None and shutil.which(str(expand_home(server.command))) is None:
        return f"the program {server.command!r} is not found"
    error = _find_first_secret_error([*server.env.values(), *server.headers.values()])
    return error.what.rstrip(".") if error else None


def _report_mcp_server(
    name: str, server: McpServerConfig, state: str, reason: str | None, tools: int | None
) -> Finding:
    report = report_failure if server.required else report_warning
    if state == "needs_auth":
        return report("mcp", f"{name!r} needs a login: {reason}.", f"Run: antiphon mcp login {name}")
    if reason is not None:
        return report("mcp", f"{name!r} cannot be used: {reason}.", f"Run: antiphon mcp test {name}")
    if tools is None:
        return report_ok("mcp", f"{name!r} has not been used yet (use --online)")
    return report_ok("mcp", f"{name!r} offers {tools} {'tool' if tools == 1 else 'tools'}")


# --- the models ---


async def _check_models(config: Config, *, online: bool) -> list[Finding]:
    if not config.models.providers:
        return [
            report_warning(
                "models",
                "No provider is configured; the built-in rehearsal model answers.",
                "Add one to models.providers.",
            )
        ]
    findings: list[Finding] = []
    for name, provider in config.models.providers.items():
        where = mask_url(provider.base_url)
        secrets = [secret for secret in (provider.api_key, *provider.headers.values()) if secret]
        if error := await asyncio.to_thread(_find_first_secret_error, secrets):
            findings.append(report_failure("models", f"{name!r} cannot be used: {error.what}", error.hint))
        elif online and provider.base_url:
            findings.append(await _check_provider_reachable(name, where))
        else:
            findings.append(report_ok("models", f"{name!r} at {where}, not contacted (use --online)"))
    return findings


def _find_first_secret_error(secrets: Iterable[Secret]) -> ConfigError | None:
    return next(filter(None, map(find_secret_error, secrets)), None)


def find_secret_error(secret: Secret) -> ConfigError | None:
    """Why a secret is not available. A command that prints it is not run for this check."""
    if secret.kind == "exec":
        return None
    try:
        secret.reveal()
    except ConfigError as error:
        return error
    return None


async def _check_provider_reachable(name: str, url: str) -> Finding:
    """Whether anything answers at an address. No key is sent, so a refusal counts as an answer."""
    import httpx2  # noqa: PLC0415 - only for --online

    try:
        async with httpx2.AsyncClient(timeout=PROVIDER_TIMEOUT_SECONDS) as client:
            response = await client.get(url)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        why = str(error) or type(error).__name__
        return report_failure(
            "models", f"{name!r} at {url} does not answer ({why}).", "Check the address and the network."
        )
    return report_ok("models", f"{name!r} at {url} answers (HTTP {response.status_code})")
