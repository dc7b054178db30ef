"""Looking for what is wrong with a configuration and a state directory. Nothing is changed, and nothing mended.

Each check gives findings: what was looked at, how it is, and what to do about it. A check that cannot be made is
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

from antiphon.config import Config, Loaded, Paths, Secret, load
from antiphon.config.addresses import shown_url
from antiphon.errors import AntiphonError, ConfigError, InvalidInput
from antiphon.messages import decode
from antiphon.paths import may_write
from antiphon.preflight import find_problems
from antiphon.store import Row, Store, Tx
from antiphon.store.migrations import migrations
from antiphon.store.queries import Queries
from antiphon.store.sqlite import check_file, check_library
from antiphon.store.statedir import StateDir, explain, exposed
from antiphon.visits import reading

SQL = Queries("doctor")
WARNINGS = 20  # of the configuration; `config check` shows all
LEAST_FREE, LITTLE_FREE = 64 * 2**20, 1024 * 2**20  # bytes
ENTRIES = 100_000  # newest transcript entries that are read
PAGE = 500
NEVER = 2**62  # a time after every lease
ONLINE_SECONDS = 5.0

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    check: str
    level: Level
    what: str
    next_step: str | None = None


def ok(check: str, what: str) -> Finding:
    return Finding(check=check, level="ok", what=what)


def warn(check: str, what: str, next_step: str) -> Finding:
    return Finding(check=check, level="warn", what=what, next_step=next_step)


def fail(check: str, what: str, next_step: str) -> Finding:
    return Finding(check=check, level="fail", what=what, next_step=next_step)


def _failed(check: str, error: AntiphonError) -> Finding:
    return fail(check, error.what, error.hint)


async def examine(paths: Paths, *, online: bool = False) -> list[Finding]:
    """Everything, in the order in which one thing can explain the next."""
    findings = [*_machine()]
    loaded = _configuration(paths, findings)
    home = StateDir.look(paths.state_dir)
    findings += [*_directory(home), *_disk(home.path)]
    if loaded is not None and loaded.config.store.url is not None:
        findings += await _server(loaded.config, home)
    elif is_there(home.database):
        findings += await _file(home)
    elif holder := home.holder:
        findings.append(_deleted(home, holder))
    if loaded is not None:
        findings += await _models(loaded.config, online=online)
        findings += [
            fail("models", problem.what, problem.hint) for problem in await find_problems(loaded.config)
        ]
    return findings


def _machine() -> Iterator[Finding]:
    yield ok("python", f"Python {platform.python_version()}")
    try:
        check_library()
    except AntiphonError as error:
        yield _failed("sqlite", error)
    else:
        yield ok("sqlite", f"SQLite {sqlite3.sqlite_version}")


def _configuration(paths: Paths, findings: list[Finding]) -> Loaded | None:
    try:
        loaded = load(paths.config, required=paths.config_explicit)
    except AntiphonError as error:
        findings.append(_failed("config", error))
        return None
    where = str(loaded.path) if loaded.path else f"none at {str(paths.config)!r}; the defaults are used"
    findings.append(ok("config", where))
    shown, rest = loaded.warnings[:WARNINGS], len(loaded.warnings[WARNINGS:])
    findings += [warn("config", text, "See docs/configuration.md.") for text in shown]
    if rest:
        findings.append(warn("config", f"There are {rest} more warnings.", "See: antiphon config check"))
    return loaded


# --- the directory ---


def is_there(path: Path) -> bool:
    """As far as can be told; what cannot be told is a finding of the state directory."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises where a directory may not be entered


def _directory(home: StateDir) -> Iterator[Finding]:
    try:
        home.check()
    except AntiphonError as error:
        yield _failed("state", error)
        return
    if not home.path.exists():
        yield _unmade(home.path)
        return
    if not (home.path.is_dir() and may_write(home.path)):
        yield fail(
            "state",
            f"{str(home.path)!r} is no directory that can be written to.",
            "Give this user write access, or choose another with --state-dir.",
        )
        return
    try:
        error = exposed(home.path)
    except OSError as found:
        error = explain(found, home.path)
    if error:
        yield _failed("state", error)
        return
    for path in _private(home):
        if not may_write(path):
            yield fail("state", f"{str(path)!r} cannot be written to.", "Give this user write access to it.")
    open_to_others = [path for path in _private(home) if stat.S_IMODE(path.stat().st_mode) & 0o077]
    for path in open_to_others:
        yield warn("state", f"{str(path)!r} can be read by others.", f"Run: chmod go= {str(path)!r}")
    if not open_to_others:
        yield ok("state", f"{str(home.path)!r} is private to its owner")
    holder = home.holder
    yield ok("lock", f"in use by process {holder}" if holder else "free")


def _unmade(path: Path) -> Finding:
    parent = _nearest(path)
    if may_write(parent):
        return ok("state", f"{str(path)!r} does not exist yet; it is made at the first start")
    return fail(
        "state",
        f"{str(path)!r} does not exist and cannot be made in {str(parent)!r}.",
        "Give this user write access there, or choose another with --state-dir.",
    )


def _nearest(path: Path) -> Path:
    """What there is of a path."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if is_there(place))


def _private(home: StateDir) -> Iterable[Path]:
    database = home.database
    paths = [home.path, database, *(database.with_name(database.name + end) for end in ("-wal", "-shm"))]
    return [path for path in [*paths, home.path / "lock", home.transcripts] if path.exists()]


def _disk(path: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(_nearest(path)).free
    text = f"{free // 2**20} MiB free"
    if free < LEAST_FREE:
        yield fail("disk", f"Only {text}.", "Free some space: nothing can be accepted without it.")
    elif free < LITTLE_FREE:
        yield warn("disk", f"Only {text}.", "Free some space before it runs out.")
    else:
        yield ok("disk", text)


# --- the database ---


async def _file(home: StateDir) -> list[Finding]:
    try:
        await asyncio.to_thread(check_file, home.database)
    except AntiphonError as error:
        return [_failed("database", error)]
    intact = ok("database", f"intact, schema {migrations()[-1].version}")
    return [intact, *await _content(Config(), home, running=home.holder is not None)]


def _deleted(home: StateDir, holder: str) -> Finding:
    return fail(
        "database",
        f"{str(home.database)!r} does not exist, though process {holder} is using this directory: it was deleted.",
        "Stop that process, put the file back or restore a backup, then start it again; see docs/operating.md.",
    )


async def _server(config: Config, home: StateDir) -> list[Finding]:
    """A database that others may be using, too: what is under way there may be theirs."""
    try:
        async with reading(config, home.path):
            pass
    except AntiphonError as error:
        return [_failed("database", error)]
    return [ok("database", "reached"), *await _content(config, home, running=True)]


async def _content(config: Config, home: StateDir, *, running: bool) -> list[Finding]:
    try:
        async with reading(config, home.path) as store:
            return [await _transcripts(store), *await _runs(store, running=running)]
    except AntiphonError as error:
        return [_failed("database", error)]


async def _transcripts(store: Store) -> Finding:
    """Reads the newest entries, a page at a time, as a prompt would."""
    looked = unreadable = 0
    first: Row | None = None
    before = 2**62
    while looked < ENTRIES:
        page = await store.read(_entries_before, before)
        damaged = [row for row in page if not _readable(row["body"])]
        looked += len(page)
        unreadable += len(damaged)
        first = first or (damaged[0] if damaged else None)
        if len(page) < PAGE:
            break
        before = page[-1]["id"]
    if first is None:
        return ok("transcripts", f"the newest {looked} entries can be read")
    return warn(
        "transcripts",
        f"{unreadable} of the newest {looked} entries cannot be shown to a model; "
        f"the newest is {first['seq']} in {first['key']!r}.",
        f"See: antiphon sessions history {first['session_id']} --before {first['seq'] + 1} --limit 1 --json",
    )


async def _entries_before(tx: Tx, before: int) -> list[Row]:
    return await tx.all(SQL.entries_before, before=before, limit=PAGE)


def _readable(body: str) -> bool:
    try:
        decode(body)
    except InvalidInput:
        return False
    return True


async def _runs(store: Store, *, running: bool) -> list[Finding]:
    now = store.clock.now() if running else NEVER  # nobody is alive where nobody holds the lock
    interrupted, orphaned = await store.read(_run_rows, now)
    findings: list[Finding] = []
    if interrupted:
        findings.append(
            warn(
                "runs",
                f"{_many(len(interrupted))} given up after too many interruptions, "
                f"the latest in {interrupted[0]['key']!r}.",
                "Say the message again if it still matters.",
            )
        )
    if orphaned and running:
        findings.append(
            fail(
                "runs",
                f"{_many(len(orphaned))} running without a live owner, the first in {orphaned[0]['key']!r}.",
                "If that does not change within a minute, restart Antiphon.",
            )
        )
    elif orphaned:
        findings.append(
            warn("runs", f"{_many(len(orphaned))} interrupted.", "They are carried on at the next start.")
        )
    return findings or [ok("runs", "none is lost or given up")]


async def _run_rows(tx: Tx, now: int) -> tuple[list[Row], list[Row]]:
    return await tx.all(SQL.interrupted), await tx.all(SQL.without_owner, now=now)


def _many(count: int) -> str:
    return f"{count} {'run was' if count == 1 else 'runs were'}"


# --- the models ---


async def _models(config: Config, *, online: bool) -> list[Finding]:
    if not config.models.providers:
        return [
            warn(
                "models",
                "No provider is configured; the built-in rehearsal model answers.",
                "Put one under models.providers.",
            )
        ]
    findings: list[Finding] = []
    for name, provider in config.models.providers.items():
        where = shown_url(provider.base_url)
        secrets = [secret for secret in (provider.api_key, *provider.headers.values()) if secret]
        if trouble := await asyncio.to_thread(_first_trouble, secrets):
            findings.append(fail("models", f"{name!r} cannot be asked: {trouble.what}", trouble.hint))
        elif online and provider.base_url:
            findings.append(await _reach(name, where))
        else:
            findings.append(ok("models", f"{name!r} at {where}, not contacted (--online does)"))
    return findings


def _first_trouble(secrets: Iterable[Secret]) -> ConfigError | None:
    return next(filter(None, map(unreadable, secrets)), None)


def unreadable(secret: Secret) -> ConfigError | None:
    """Why a secret cannot be had. A command that gives it out is not run for this."""
    if secret.kind == "exec":
        return None
    try:
        secret.reveal()
    except ConfigError as error:
        return error
    return None


async def _reach(name: str, url: str) -> Finding:
    """Whether anything answers at an address as it is shown: no key is sent, so a refusal is an answer, too."""
    import httpx2  # noqa: PLC0415 - only for --online

    try:
        async with httpx2.AsyncClient(timeout=ONLINE_SECONDS) as client:
            response = await client.get(url)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        why = str(error) or type(error).__name__
        return fail(
            "models", f"{name!r} at {url} does not answer ({why}).", "Check the address and the network."
        )
    return ok("models", f"{name!r} at {url} answers (HTTP {response.status_code})")
