"""Bringing conversations in from a state directory of the OpenClaw family, or from an export of ours.

Each session is one transaction: it is there with everything said in it, or not at all. Importing again changes
nothing, because a session id that is known is left alone. A key that is taken keeps its conversation; the
imported one is put beside it, readable by its session id, as if `/new` had ended it. What is set for its key is
taken over where nothing is set here (see `index.merged`), at once and not when somebody goes back to it: a `deny` is
about the chat, whatever is said in it. Conversations that `/new` did end come along with the one that followed them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from antiphon import keys
from antiphon.config import Config
from antiphon.engine import sessions, transcripts
from antiphon.engine.sessions import Birth
from antiphon.errors import AntiphonError, InvalidInput, StoreError, TooLarge, UnknownModel
from antiphon.keys import SessionIdRef, SessionKey
from antiphon.misfits import mended
from antiphon.store import Param, Row, Store, Tx
from antiphon.transfers import index
from antiphon.transfers.exports import INDEX, SESSION_ID, SQL
from antiphon.transfers.index import Told
from antiphon.transfers.jsonl import Reading, moment

MOST_INDEX = 512 * 2**20  # bytes of one sessions.json
LONGEST_LINE = 64 * 2**20  # bytes; longer ones count as damaged
MOST_TOLD = 100  # one by one
LONGEST_REASON = 64  # characters

_ARCHIVED = re.compile(r"\.jsonl\.(reset|deleted|bak)\.")

Outcome: TypeAlias = Literal["imported", "beside", "skipped"]


class Failure(msgspec.Struct, rename="camel", frozen=True):
    key: str
    reason: str


class Merged(msgspec.Struct, rename="camel", frozen=True):
    """What became of the data of a session that was put beside another, by the names of `sessions.json`."""

    key: str
    taken_over: list[str]
    left_behind: list[str]


class Imported(msgspec.Struct, rename="camel", kw_only=True):
    """What an import did, or with `dryRun` would do."""

    dry_run: bool = False
    imported: int = 0
    beside: int = 0
    """Of the imported ones: put beside a conversation that already had the key."""
    merged: list[Merged] = []
    past: int = 0
    """Ended conversations that came along with the session whose key they had."""
    skipped: int = 0
    """Sessions whose session id is already here."""
    passed_over: int = 0
    """Entries called `unknown`, which are no sessions: other programs put there what they could not place."""
    failed: list[Failure] = []
    failed_count: int = 0
    messages: int = 0
    damaged_lines: int = 0
    left_out_entries: int = 0
    """Entries that are no part of a conversation, such as a change of model."""
    missing_transcripts: int = 0
    archived_files: int = 0
    unlisted_files: int = 0
    unknown_agents: list[str] = []
    """Agents of imported sessions that are not configured here, so that nobody answers for them yet."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A directory with a `sessions.json`, and the agent that its short keys belong to."""

    path: Path
    agent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A conversation that ended before the current one of its key began, or was left for it."""

    told: Told
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One session of a `sessions.json`."""

    key: SessionKey
    agent_id: str
    session_id: str
    entry: Mapping[str, Any]
    parent: str | None
    file: Path | None
    reason: str = "imported"
    stands_in: bool = False
    """It is called `global` and is taken for the main session, unless that has an entry of its own."""
    before: Sequence[Past] = ()
    """Older than the current conversation, oldest first."""
    after: Sequence[Past] = ()
    """Younger than the current conversation, which somebody went back to."""

    @property
    def files(self) -> Iterator[Path | None]:
        yield self.file
        yield from (past.file for past in (*self.before, *self.after))

    @property
    def updated_at(self) -> int:
        return moment(self.entry.get("updatedAt")) or 0


@dataclass(slots=True)
class _Done:
    outcome: Outcome = "skipped"
    past: int = 0
    messages: int = 0
    damaged: int = 0
    left_out: int = 0
    merged: Merged | None = None


class _DryRun(Exception):
    """Undoes the transaction of a dry run, and brings its result out of it."""

    def __init__(self, done: _Done) -> None:
        self.done = done


async def bring(
    store: Store,
    config: Config,
    source: Path,
    now: int,
    *,
    agent_id: str | None = None,
    dry_run: bool = False,
) -> Imported:
    """Import every session under `source`. The store must be owned, and no engine need run on it."""
    report = Imported(dry_run=dry_run)
    everything: list[Found] = []
    for folder in folders(source, agent_id or config.default_agent_id, only=agent_id):
        everything += _read_folder(folder, config, report)
    for found in _parents_first(everything):
        try:
            done = await _take(store, found, config, now, dry_run=dry_run)
        except StoreError:
            raise  # no other session would fare better
        except (AntiphonError, OSError) as error:
            _fail(report, str(found.key), error)
        else:
            _count(report, found, done, config)
    return report


def folders(source: Path, agent_id: str, *, only: str | None = None) -> list[Folder]:
    """Where the sessions are: in `source` itself, in its `sessions`, or in `agents/<id>/sessions` below it."""
    for single in (source, source / "sessions"):
        if (single / INDEX).is_file():
            within = single.parent.parent.name == "agents" and single.name == "sessions"
            own = keys.normalize_agent_id(single.parent.name) if within else agent_id
            return [Folder(single, own)]
    found = [
        Folder(path.parent, keys.normalize_agent_id(path.parent.parent.name))
        for path in sorted(source.glob(f"agents/*/sessions/{INDEX}"))
    ]
    if not found:
        raise _nothing_in(source)
    return [folder for folder in found if only in {None, folder.agent_id}]


def _nothing_in(source: Path) -> InvalidInput:
    if any(source.glob("agents/*/agent/*.sqlite")):
        return InvalidInput(
            f"The sessions under {str(source)!r} are kept in SQLite, which cannot be imported.",
            "Import a backup from before that migration, or its transcripts as JSONL.",
            field="directory",
        )
    return InvalidInput(
        f"There is no {INDEX!r} in {str(source)!r}, nor under 'agents/<id>/sessions' in it.",
        "Pass a state directory such as '~/.openclaw', or a directory that holds that file.",
        field="directory",
    )


def _read_folder(folder: Folder, config: Config, report: Imported) -> list[Found]:
    found: list[Found] = []
    for raw_key, entry in _read_index(folder.path / INDEX).items():
        if _is(raw_key, "unknown"):
            report.passed_over += 1
            continue
        try:
            found.append(_found(raw_key, entry, folder, config))
        except AntiphonError as error:
            _fail(report, raw_key, error)
    used = {file for item in found for file in item.files}
    names = [path.name for path in folder.path.iterdir()]
    report.archived_files += sum(1 for name in names if _ARCHIVED.search(name))
    files = (folder.path / name for name in names if name.endswith(".jsonl"))
    report.unlisted_files += sum(1 for path in files if path not in used)
    report.missing_transcripts += sum(1 for item in found if item.file is None)
    return found


def _read_index(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MOST_INDEX:
        raise TooLarge(f"{str(path)!r} is larger than {MOST_INDEX} bytes.", "Split it.", max=MOST_INDEX)
    content = path.read_bytes()
    read = _read_json(content)
    read = _read_json5(content, path) if read is None else read
    if not isinstance(read, dict):
        raise InvalidInput(f"{str(path)!r} is not an object of sessions.", "Check that it is the right file.")
    return cast("dict[str, Any]", read)


def _read_json(content: bytes) -> object:
    """None where it is no JSON, or JSON's null, which is no object of sessions either."""
    for mend in (bytes, mended):
        with suppress(ValueError, RecursionError):
            return msgspec.json.decode(mend(content))
    return None


def _read_json5(content: bytes, path: Path) -> object:
    import pyjson5  # noqa: PLC0415 - files that programs wrote do not need it

    try:
        return pyjson5.decode(content.decode("utf-8-sig"))
    except (pyjson5.Json5Exception, ValueError, RecursionError) as error:
        reason = str(error.args[0]) if error.args else type(error).__name__
    raise InvalidInput(f"{str(path)!r} cannot be read ({reason}).", "Mend it, or restore a backup of it.")


def _found(raw_key: str, entry: object, folder: Folder, config: Config) -> Found:
    if not isinstance(entry, dict):
        raise InvalidInput("The entry is not an object.", f"Mend it in {INDEX!r}.")
    values = cast("dict[str, Any]", entry)
    session_id = values.get("sessionId")
    if not isinstance(session_id, str) or not SESSION_ID.fullmatch(session_id):
        raise InvalidInput(f"The session id {session_id!r} is not one.", f"Mend it in {INDEX!r}.")
    key = _canonical(raw_key, folder.agent_id, config)
    file = _file(folder.path, session_id, values, key)
    spawned_by = values.get("spawnedBy")
    told = [item for item in index.told_in(values) if _sound(item)]
    place = next((at for at, item in enumerate(told) if item.session_id == session_id), len(told))
    return Found(
        key=key,
        agent_id=key.agent_id or folder.agent_id,
        session_id=session_id,
        entry=values,
        parent=_parent(spawned_by, folder.agent_id, config) if isinstance(spawned_by, str) else None,
        file=file,
        reason=told[place].reason if place < len(told) else "imported",
        stands_in=_is(raw_key, "global") and (file is None or config.session.scope != "global"),
        before=_past(folder.path, told[:place]),
        after=_past(folder.path, told[place + 1 :]),
    )


def _past(folder: Path, told: Sequence[Told]) -> list[Past]:
    """Those that have a file: without one there is nothing to remember."""
    named = [Past(told=item, file=folder / f"{item.session_id}.jsonl") for item in told]
    return [past for past in named if past.file.is_file()]


def _sound(told: Told) -> bool:
    return bool(SESSION_ID.fullmatch(told.session_id)) and 0 < len(told.reason) <= LONGEST_REASON


def _is(raw_key: str, name: str) -> bool:
    return raw_key.strip().lower() == name


def _canonical(raw_key: str, agent_id: str, config: Config) -> SessionKey:
    """The key that is stored, from any spelling that was ever used."""
    if _is(raw_key, "global"):
        return keys.main_session(agent_id, scope=config.session.scope)
    session = config.session
    found = keys.canonicalise(raw_key, agent_id=agent_id, main_key=session.main_key, scope=session.scope)
    if isinstance(found, SessionIdRef):  # a bare peer or chat id, from before keys had agents
        found = keys.canonicalise(f"agent:{agent_id}:{found.value}", agent_id=agent_id)
    assert isinstance(found, SessionKey)
    return found


def _parent(spawned_by: str, agent_id: str, config: Config) -> str | None:
    try:
        return str(_canonical(spawned_by, agent_id, config))
    except AntiphonError:
        return None


def _file(folder: Path, session_id: str, entry: Mapping[str, Any], key: SessionKey) -> Path | None:
    """The transcript. A recorded path is from another place or time, so only its last part is used."""
    recorded = entry.get("sessionFile")
    topic = key.thread.id if key.thread else None
    names = [
        re.split(r"[/\\]", recorded)[-1] if isinstance(recorded, str) else None,
        f"{session_id}-topic-{topic}.jsonl" if topic else None,
        f"{session_id}.jsonl",
    ]
    usable = (name for name in names if name and "\0" not in name and "/" not in name)
    return next((folder / name for name in usable if (folder / name).is_file()), None)


def _parents_first(everything: Sequence[Found]) -> Iterator[Found]:
    """Newest first, but nobody before whoever spawned it: lineage is recorded when a session is created.

    What stands in comes last, however new it is: if the key has a conversation of its own, that one has it by then.
    """
    newest = sorted(everything, key=lambda found: (found.stands_in, -found.updated_at))
    by_key = {str(found.key): found for found in reversed(newest)}
    placed: set[int] = set()
    for found in newest:
        chain: list[Found] = []
        above: Found | None = found
        while above is not None and id(above) not in placed:
            placed.add(id(above))
            chain.append(above)
            above = by_key.get(above.parent) if above.parent else None
        yield from reversed(chain)


async def _take(store: Store, found: Found, config: Config, now: int, *, dry_run: bool) -> _Done:
    try:
        return await store.tx(_write, found, config, now, dry_run)
    except _DryRun as rehearsed:
        return rehearsed.done


async def _write(tx: Tx, found: Found, config: Config, now: int, dry_run: bool) -> _Done:
    """The whole session. Reads its files in the writer's thread, entry by entry."""
    done = _Done()
    known = await tx.one(SQL.has_session_id, session_id=found.session_id)
    present = await sessions.find(tx, found.key, None)
    if known and not present:
        return done  # it is here under another key, and its past has nowhere to go
    # Conversations are listed in the order they were written in.
    for past in found.before:
        await _write_past(tx, found, past, now, done)
    if not known:
        await _write_current(tx, found, config, now, done, present)
    for past in found.after:
        await _write_past(tx, found, past, now, done)
    if dry_run:
        raise _DryRun(done)
    return done


async def _write_current(
    tx: Tx, found: Found, config: Config, now: int, done: _Done, present: Row | None
) -> None:
    reading = Reading(lambda: _lines(found.file))
    began = reading.started_at or found.updated_at or now
    entry = {**found.entry, **({"cwd": reading.cwd} if reading.cwd else {})}
    columns = index.columns(entry, found.key, lambda ref: _known(config, ref))
    if present is not None:
        done.outcome = "beside"
        told = Told(found.session_id, found.reason)
        done.messages += await _write_beside(tx, str(found.key), told, reading, began)
        done.merged = await _merge(tx, found.key, present["id"], columns)
    else:
        done.outcome = "imported"
        done.messages += await _write_session(tx, found, columns, reading, began)
    done.damaged += reading.damaged
    done.left_out += reading.left_out


async def _write_past(tx: Tx, found: Found, past: Past, now: int, done: _Done) -> None:
    if await tx.one(SQL.has_session_id, session_id=past.told.session_id):
        return
    reading = Reading(lambda: _lines(past.file))
    began = reading.started_at or found.updated_at or now
    done.messages += await _write_beside(tx, str(found.key), past.told, reading, began)
    done.past += 1
    done.damaged += reading.damaged
    done.left_out += reading.left_out


async def _write_session(
    tx: Tx, found: Found, columns: Mapping[str, Param], reading: Reading, began: int
) -> int:
    parent = await sessions.find(tx, keys.parse(found.parent), None) if found.parent else None
    role = found.entry.get("subagentRole")
    birth = Birth(
        agent_id=found.agent_id,
        session_id=found.session_id,
        reason=found.reason,
        parent=parent["id"] if parent else None,
        role=role if isinstance(role, str) else None,
        label=cast("str | None", columns["label"]),
        display_name=cast("str | None", columns["display_name"]),
    )
    row = await sessions.create(tx, found.key, began, birth)
    count, last_at = await _append(tx, row["transcript"], reading)
    updated_at = found.updated_at or last_at or began
    await tx.one(sessions.SQL.advance_unfenced, id=row["id"], count=count, now=updated_at)
    await tx.do(sessions.SQL.adopt, id=row["id"], updated_at=updated_at, **columns)
    if archived_at := moment(found.entry.get("archivedAt")):
        await tx.do(sessions.SQL.archive, id=row["id"], now=archived_at)
    return count


async def _merge(tx: Tx, key: SessionKey, session: int, told: Mapping[str, Param]) -> Merged:
    row = await tx.one(sessions.SQL.by_id, id=session)
    assert row is not None
    free = told["label"] is None or await sessions.label_is_free(tx, row, told["label"])
    after = index.merged(row, told if free else {**told, "label": None})
    await tx.do(sessions.SQL.adopt, id=session, updated_at=row["updated_at"], **after)
    names = cast("list[str | None]", [after["label"], after["display_name"]])
    await sessions.name(tx, session, key.id, key.thread and key.thread.id, *names)
    return Merged(str(key), taken_over=index.unlike(row, after), left_behind=index.unlike(after, told))


async def _write_beside(tx: Tx, key: str, told: Told, reading: Reading, began: int) -> int:
    transcript = await tx.one(
        sessions.SQL.insert_transcript,
        session_id=told.session_id,
        key=key,
        reason=told.reason,
        now=began,
    )
    assert transcript is not None
    count, last_at = await _append(tx, transcript["id"], reading)
    ended_at = moment(told.ended_at) or last_at or began
    await tx.do(sessions.SQL.end_transcript, transcript=transcript["id"], now=ended_at)
    return count


async def _append(tx: Tx, transcript: int, reading: Reading) -> tuple[int, int]:
    """How many entries were written, and when the last of them was said."""
    count = last_at = 0
    for entry in reading.entries():
        await transcripts.append_raw(tx, transcript, None, entry)
        count, last_at = entry.seq, entry.created_at
    return count, last_at


def _lines(path: Path | None) -> Iterator[bytes]:
    """Lines of a bounded length; what is longer is given as something that cannot be read."""
    if path is None:
        return
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            if len(line) < LONGEST_LINE or line.endswith(b"\n"):
                yield line
                continue
            while (more := file.readline(LONGEST_LINE)) and not more.endswith(b"\n"):
                pass
            yield b"(too long)"


def _known(config: Config, ref: str) -> bool:
    try:
        config.find_model(ref)
    except UnknownModel:
        return False
    return True


def _count(report: Imported, found: Found, done: _Done, config: Config) -> None:
    report.skipped += done.outcome == "skipped"
    report.imported += done.outcome != "skipped"
    report.beside += done.outcome == "beside"
    if done.merged and (done.merged.taken_over or done.merged.left_behind):
        report.merged += [done.merged][: MOST_TOLD - len(report.merged)]
    report.past += done.past
    report.messages += done.messages
    report.damaged_lines += done.damaged
    report.left_out_entries += done.left_out
    if done.outcome != "skipped" and found.agent_id not in {*config.agent_ids, *report.unknown_agents}:
        report.unknown_agents.append(found.agent_id)


def _fail(report: Imported, key: str, error: Exception) -> None:
    report.failed_count += 1
    if len(report.failed) < MOST_TOLD:
        report.failed.append(Failure(key[:200], str(error)))
