"""Imports conversations from a state directory of the OpenClaw family, or from an Antiphon export.

Each session is one transaction: it is imported with all its messages, or not at all. Importing again changes nothing,
because known session ids are skipped. If a key is taken, its conversation stays current; the imported one is readable
by its session id, as if `/new` had ended it. Settings of its key are adopted at once where none exist here (see
`sessions_index.merge_columns`), because a `deny` applies to the chat, whichever conversation is current. Conversations
that `/new` had ended are imported along with the one that followed them.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from antiphon import keys
from antiphon.config import Config
from antiphon.config.base import suggest_options
from antiphon.engine.sessions import session_rows as sessions
from antiphon.engine.sessions import transcripts
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import AntiphonError, InvalidInput, NotFound, StoreError, TooLarge, UnknownModel
from antiphon.keys import SessionIdRef, SessionKey
from antiphon.store import Param, Row, Store, Tx
from antiphon.transfers import sessions_index
from antiphon.transfers.exports import INDEX_FILE_NAME, SESSION_ID_PATTERN, SQL
from antiphon.transfers.jsonl import TranscriptReader, parse_timestamp
from antiphon.transfers.sessions_index import ConversationRecord
from antiphon.validation_errors import replace_lone_surrogates

MAX_INDEX_BYTES = 512 * 2**20  # of one sessions.json
MAX_LINE_BYTES = 64 * 2**20  # longer lines count as damaged
MAX_REPORTED_ITEMS = 100  # listed one by one
MAX_REASON_CHARACTERS = 64

_ARCHIVED_FILE_PATTERN = re.compile(r"\.jsonl\.(reset|deleted|bak)\.")

ImportOutcome: TypeAlias = Literal["imported", "beside", "skipped"]


class ImportFailure(msgspec.Struct, rename="camel", frozen=True):
    key: str
    reason: str


class MergedSession(msgspec.Struct, rename="camel", frozen=True):
    """How the data of a session whose key was taken was merged, by the field names of `sessions.json`."""

    key: str
    taken_over: list[str]
    left_behind: list[str]


class ImportReport(msgspec.Struct, rename="camel", kw_only=True):
    """The result of an import, or with `dryRun` what it would be."""

    dry_run: bool = False
    imported: int = 0
    beside: int = 0
    """Imported sessions whose key already had a conversation."""
    merged: list[MergedSession] = []
    past: int = 0
    """Ended conversations that were imported along with the session of their key."""
    skipped: int = 0
    """Sessions whose session id already exists here."""
    passed_over: int = 0
    """Entries called `unknown`, which are not sessions: other programs store there what they could not assign."""
    failed: list[ImportFailure] = []
    failed_count: int = 0
    messages: int = 0
    damaged_lines: int = 0
    left_out_entries: int = 0
    """Entries that are not part of a conversation, such as a change of model."""
    left_out_labels: int = 0
    """Labels of imported sessions that another session of the agent already has."""
    missing_transcripts: int = 0
    archived_files: int = 0
    unlisted_files: int = 0
    unknown_agents: list[str] = []
    """Agents of imported sessions that are not configured here, so that their sessions get no answers yet."""


class SessionsFolder(msgspec.Struct, frozen=True):
    """A directory with a `sessions.json`, and the agent that its short keys belong to."""

    path: Path
    agent_id: str


class PastConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation of a key that is not its current one."""

    told: ConversationRecord
    file: Path


class SourceSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session of a `sessions.json`."""

    key: SessionKey
    agent_id: str
    session_id: str
    entry: Mapping[str, Any]
    parent: str | None
    file: Path | None
    reason: str = "imported"
    stands_in: bool = False
    """True for an entry called `global`: it becomes the main session, unless that has an entry of its own."""
    before: Sequence[PastConversation] = ()
    """Older than the current conversation, oldest first."""
    after: Sequence[PastConversation] = ()
    """Newer than the current conversation, which was restored over them."""

    @property
    def files(self) -> Iterator[Path | None]:
        yield self.file
        yield from (past.file for past in (*self.before, *self.after))

    @property
    def updated_at(self) -> int:
        return parse_timestamp(self.entry.get("updatedAt")) or 0

    @property
    def archived_at(self) -> int | None:
        return parse_timestamp(self.entry.get("archivedAt"))

    @property
    def ids(self) -> set[str]:
        """The key and the ids of its conversations: no other session can have them."""
        past = (past.told.session_id for past in (*self.before, *self.after))
        return {str(self.key), self.session_id, *past}

    @property
    def label(self) -> str:
        """The label as text, whatever its type; valid only if `_SessionImport.label_taken` is set."""
        return str(self.entry.get("label"))


class ImportSource(msgspec.Struct, frozen=True):
    """The sessions to import, and the report so far from reading the indexes."""

    sessions: Sequence[SourceSession]
    report: ImportReport


class _SessionImport(msgspec.Struct):
    outcome: ImportOutcome = "skipped"
    past: int = 0
    messages: int = 0
    damaged: int = 0
    left_out: int = 0
    label_taken: bool = False
    label_left_out: bool = False
    merged: MergedSession | None = None


class _DryRunRollback(Exception):
    """Rolls back the transaction of a dry run and carries its result out of it."""

    def __init__(self, done: _SessionImport) -> None:
        self.done = done


class _DryRunImporter:
    """A dry run. Each session is rolled back, so those that it could conflict with are written again before it."""

    def __init__(self) -> None:
        self._tried: list[SourceSession] = []
        self._takers: dict[str, set[int]] = {}

    async def import_session(
        self, store: Store, found: SourceSession, config: Config, now: int
    ) -> _SessionImport:
        numbers = set[int]().union(*(self._takers.get(name, ()) for name in (*found.ids, found.label)))
        earlier = [self._tried[number] for number in sorted(numbers)]
        try:
            return await store.tx(_write_and_roll_back, earlier, found, config, now)
        except _DryRunRollback as rehearsed:
            self._remember(found, rehearsed.done, numbers)
            return rehearsed.done

    def _remember(self, found: SourceSession, done: _SessionImport, after: set[int]) -> None:
        if done.outcome == "skipped" and not done.past:
            return
        for name in found.ids:
            self._takers.setdefault(name, set()).update(after, {len(self._tried)})
        if done.label_taken:  # one session with the label is enough to know that it is taken
            self._takers.setdefault(found.label, {*after, len(self._tried)})
        self._tried.append(found)


def scan_source(source: Path, config: Config, agent_id: str | None = None) -> ImportSource:
    """Return what can be imported from `source`, for one agent or for all. Needs no store.

    Raises:
        InvalidInput: nothing there can be imported, or `agent_id` is not valid.
        NotFound: `source` has no sessions of that agent.
    """
    report = ImportReport()
    found: list[SourceSession] = []
    only = None if agent_id is None else keys.validate_agent_id(agent_id)
    for folder in find_session_folders(source, config.default_agent_id, only=only):
        found += _read_folder(folder, config, report)
    return ImportSource(found, report)


async def import_source(
    store: Store, config: Config, source: ImportSource, now: int, *, dry_run: bool = False
) -> ImportReport:
    """Import the scanned sessions. The store must be owned by this process; no engine is needed."""
    report = source.report
    report.dry_run = dry_run
    rehearsal = _DryRunImporter() if dry_run else None
    for found in _order_parents_first(source.sessions):
        try:
            if rehearsal:
                done = await rehearsal.import_session(store, found, config, now)
            else:
                done = await store.tx(_write_source_session, found, config, now)
        except StoreError:
            raise  # every other session would fail in the same way
        except (AntiphonError, OSError) as error:
            _record_failure(report, str(found.key), error)
        else:
            _add_to_report(report, found, done, config)
    return report


def find_session_folders(source: Path, default: str, *, only: str | None = None) -> list[SessionsFolder]:
    """Return the session directories: `source` itself, its `sessions`, or `agents/<id>/sessions` below it.

    The short keys of a single directory that is not in such a place belong to `only`, or else to `default`.
    """
    found = _find_single_folder(source, only or default) or [
        SessionsFolder(path.parent, keys.normalize_agent_id(path.parent.parent.name))
        for path in sorted(source.glob(f"agents/*/sessions/{INDEX_FILE_NAME}"))
    ]
    if not found:
        raise _build_nothing_found_error(source)
    chosen = [folder for folder in found if only in {None, folder.agent_id}]
    if only and not chosen:
        there = sorted({folder.agent_id for folder in found})
        raise NotFound(
            f"There are no sessions of agent {only!r} in {str(source)!r}.",
            suggest_options(only, there, noun="agent ids"),
            agent_id=only,
        )
    return chosen


def _find_single_folder(source: Path, agent_id: str) -> list[SessionsFolder]:
    for path in (source.absolute(), source.absolute() / "sessions"):
        if (path / INDEX_FILE_NAME).is_file():
            within = path.parent.parent.name == "agents" and path.name == "sessions"
            return [SessionsFolder(path, keys.normalize_agent_id(path.parent.name) if within else agent_id)]
    return []


def _build_nothing_found_error(source: Path) -> InvalidInput:
    if any(source.glob("agents/*/agent/*.sqlite")):
        return InvalidInput(
            f"The sessions under {str(source)!r} are kept in SQLite, which cannot be imported.",
            "Import a backup from before that migration, or its transcripts as JSONL.",
            field="directory",
        )
    return InvalidInput(
        f"There is no {INDEX_FILE_NAME!r} in {str(source)!r}, nor under 'agents/<id>/sessions' in it.",
        "Pass a state directory such as '~/.openclaw', or a directory that holds that file.",
        field="directory",
    )


def _read_folder(folder: SessionsFolder, config: Config, report: ImportReport) -> list[SourceSession]:
    found: list[SourceSession] = []
    for raw_key, entry in _read_index(folder.path / INDEX_FILE_NAME).items():
        if _is_key_named(raw_key, "unknown"):
            report.passed_over += 1
            continue
        try:
            found.append(_build_source_session(raw_key, entry, folder, config))
        except AntiphonError as error:
            _record_failure(report, raw_key, error)
    used = {file for item in found for file in item.files}
    names = [path.name for path in folder.path.iterdir()]
    report.archived_files += sum(1 for name in names if _ARCHIVED_FILE_PATTERN.search(name))
    files = (folder.path / name for name in names if name.endswith(".jsonl"))
    report.unlisted_files += sum(1 for path in files if path not in used)
    report.missing_transcripts += sum(1 for item in found if item.file is None)
    return found


def _read_index(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise TooLarge(
            f"{str(path)!r} is larger than {MAX_INDEX_BYTES} bytes.", "Split it.", max=MAX_INDEX_BYTES
        )
    content = path.read_bytes()
    read = _read_json(content)
    read = _read_json5(content, path) if read is None else read
    if not isinstance(read, dict):
        raise InvalidInput(f"{str(path)!r} is not an object of sessions.", "Check that it is the right file.")
    return cast("dict[str, Any]", read)


def _read_json(content: bytes) -> object:
    """Parse JSON; return None if it is invalid, or null, which is not an object of sessions either."""
    for mend in (bytes, replace_lone_surrogates):
        with suppress(ValueError, RecursionError):
            return msgspec.json.decode(mend(content))
    return None


def _read_json5(content: bytes, path: Path) -> object:
    import pyjson5  # noqa: PLC0415 - only hand-edited files need it

    try:
        return pyjson5.decode(content.decode("utf-8-sig"))
    except (pyjson5.Json5Exception, ValueError, RecursionError) as error:
        reason = str(error.args[0]) if error.args else type(error).__name__
    raise InvalidInput(f"{str(path)!r} cannot be read ({reason}).", "Fix it, or restore a backup of it.")


def _build_source_session(
    raw_key: str, entry: object, folder: SessionsFolder, config: Config
) -> SourceSession:
    if not isinstance(entry, dict):
        raise InvalidInput("The entry is not an object.", f"Fix it in {INDEX_FILE_NAME!r}.")
    values = cast("dict[str, Any]", entry)
    session_id = values.get("sessionId")
    if not isinstance(session_id, str) or not SESSION_ID_PATTERN.fullmatch(session_id):
        raise InvalidInput(f"{session_id!r} is not a valid session id.", f"Fix it in {INDEX_FILE_NAME!r}.")
    key = _canonicalise_key(raw_key, folder.agent_id, config)
    file = _find_transcript_file(folder.path, session_id, values, key)
    spawned_by = values.get("spawnedBy")
    told = [item for item in sessions_index.parse_conversation_records(values) if _is_valid_record(item)]
    place = next((at for at, item in enumerate(told) if item.session_id == session_id), len(told))
    return SourceSession(
        key=key,
        agent_id=key.agent_id or folder.agent_id,
        session_id=session_id,
        entry=values,
        parent=_canonicalise_parent(spawned_by, folder.agent_id, config)
        if isinstance(spawned_by, str)
        else None,
        file=file,
        reason=told[place].reason if place < len(told) else "imported",
        stands_in=_is_key_named(raw_key, "global") and (file is None or config.session.scope != "global"),
        before=_find_past_conversations(folder.path, told[:place]),
        after=_find_past_conversations(folder.path, told[place + 1 :]),
    )


def _find_past_conversations(folder: Path, told: Sequence[ConversationRecord]) -> list[PastConversation]:
    """Return the conversations that have a file; without one, nothing can be imported."""
    named = [PastConversation(told=item, file=folder / f"{item.session_id}.jsonl") for item in told]
    return [past for past in named if _is_file(past.file)]


def _is_valid_record(told: ConversationRecord) -> bool:
    return (
        bool(SESSION_ID_PATTERN.fullmatch(told.session_id)) and 0 < len(told.reason) <= MAX_REASON_CHARACTERS
    )


def _is_key_named(raw_key: str, name: str) -> bool:
    return raw_key.strip().lower() == name


def _canonicalise_key(raw_key: str, agent_id: str, config: Config) -> SessionKey:
    """Return the stored form of a key, from any spelling that was ever used."""
    if _is_key_named(raw_key, "global"):
        return keys.main_session_key(agent_id, scope=config.session.scope)
    session = config.session
    found = keys.canonicalise(raw_key, agent_id=agent_id, main_key=session.main_key, scope=session.scope)
    if isinstance(found, SessionIdRef):  # a bare peer or chat id, from before keys had agents
        found = keys.canonicalise(f"agent:{agent_id}:{found.value}", agent_id=agent_id)
    assert isinstance(found, SessionKey)
    return found


def _canonicalise_parent(spawned_by: str, agent_id: str, config: Config) -> str | None:
    try:
        return str(_canonicalise_key(spawned_by, agent_id, config))
    except AntiphonError:
        return None


def _find_transcript_file(
    folder: Path, session_id: str, entry: Mapping[str, Any], key: SessionKey
) -> Path | None:
    """Return the transcript file. A recorded path may be from another machine, so only its last part is used."""
    recorded = entry.get("sessionFile")
    topic = key.thread.id if key.thread else None
    names = [
        re.split(r"[/\\]", recorded)[-1] if isinstance(recorded, str) else None,
        f"{session_id}-topic-{topic}.jsonl" if topic else None,
        f"{session_id}.jsonl",
    ]
    usable = (name for name in names if name and "/" not in name)
    return next((folder / name for name in usable if _is_file(folder / name)), None)


def _is_file(path: Path) -> bool:
    """Like `Path.is_file`, but False for a name that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for such a name


def _order_parents_first(everything: Sequence[SourceSession]) -> Iterator[SourceSession]:
    """Yield sessions newest first, but parents before their children: lineage is recorded on creation.

    An entry called `global` comes last, however new it is: by then the main session's own entry, if any, has the key.
    """
    newest = sorted(everything, key=lambda found: (found.stands_in, -found.updated_at))
    by_key = {str(found.key): found for found in reversed(newest)}
    placed: set[int] = set()
    for found in newest:
        chain: list[SourceSession] = []
        above: SourceSession | None = found
        while above is not None and id(above) not in placed:
            placed.add(id(above))
            chain.append(above)
            above = by_key.get(above.parent) if above.parent else None
        yield from reversed(chain)


async def _write_and_roll_back(
    tx: Tx, earlier: Sequence[SourceSession], found: SourceSession, config: Config, now: int
) -> _SessionImport:
    for other in earlier:
        await _write_source_session(tx, other, config, now)
    raise _DryRunRollback(await _write_source_session(tx, found, config, now))


async def _write_source_session(tx: Tx, found: SourceSession, config: Config, now: int) -> _SessionImport:
    """Write one session with all its conversations; its files are read in the writer's thread, entry by entry."""
    done = _SessionImport()
    known = await tx.one(SQL.has_session_id, session_id=found.session_id)
    present = await sessions.find_session(tx, found.key, None)
    if known and not present:
        return done  # the session exists under another key, so its past conversations cannot be attached
    # Conversations are listed in the order in which they were written.
    for past in found.before:
        await _write_past(tx, found, past, now, done)
    if not known:
        await _write_current(tx, found, config, now, done, present)
    for past in found.after:
        await _write_past(tx, found, past, now, done)
    return done


async def _write_current(
    tx: Tx, found: SourceSession, config: Config, now: int, done: _SessionImport, present: Row | None
) -> None:
    reading = TranscriptReader(lambda: _iterate_lines(found.file))
    began = reading.started_at or found.updated_at or now
    entry = {**found.entry, **({"cwd": reading.cwd} if reading.cwd else {})}
    columns = sessions_index.build_columns(entry, found.key, lambda ref: _is_known_model(config, ref))
    if present is not None:
        done.outcome = "beside"
        told = ConversationRecord(found.session_id, found.reason)
        done.messages += await _write_ended_conversation(tx, str(found.key), told, reading, began)
        done.merged = await _merge_settings(tx, found.key, present["id"], columns)
        done.label_taken = "label" in done.merged.taken_over
    else:
        done.outcome = "imported"
        await _write_session(tx, found, columns, reading, began, done)
    done.damaged += reading.damaged
    done.left_out += reading.left_out


async def _write_past(
    tx: Tx, found: SourceSession, past: PastConversation, now: int, done: _SessionImport
) -> None:
    if await tx.one(SQL.has_session_id, session_id=past.told.session_id):
        return
    reading = TranscriptReader(lambda: _iterate_lines(past.file))
    began = reading.started_at or found.updated_at or now
    done.messages += await _write_ended_conversation(tx, str(found.key), past.told, reading, began)
    done.past += 1
    done.damaged += reading.damaged
    done.left_out += reading.left_out


async def _write_session(
    tx: Tx,
    found: SourceSession,
    columns: Mapping[str, Param],
    reading: TranscriptReader,
    began: int,
    done: _SessionImport,
) -> None:
    parent = await sessions.find_session(tx, keys.parse(found.parent), None) if found.parent else None
    role = found.entry.get("subagentRole")
    birth = NewSession(
        agent_id=found.agent_id,
        session_id=found.session_id,
        reason=found.reason,
        parent=parent["id"] if parent else None,
        role=role if isinstance(role, str) else None,
    )
    row = await sessions.create_session(tx, found.key, began, birth)
    # A sub-agent gets its label even if it is taken, as it does when it is spawned.
    unasked = found.archived_at or found.key.shape == "subagent"
    after = columns if unasked else await _drop_taken_label(tx, row, columns)
    done.label_taken = after["label"] is not None and not found.archived_at
    done.label_left_out = after["label"] != columns["label"]
    count, last_at = await _append_entries(tx, row["transcript"], reading)
    updated_at = found.updated_at or last_at or began
    await tx.one(sessions.SQL.reserve_seq_unfenced, id=row["id"], count=count, now=updated_at)
    await _store_columns(tx, found.key, row["id"], updated_at, after)
    if found.archived_at:
        await tx.do(sessions.SQL.archive, id=row["id"], now=found.archived_at)
    done.messages += count


async def _merge_settings(tx: Tx, key: SessionKey, session: int, told: Mapping[str, Param]) -> MergedSession:
    row = await tx.one(sessions.SQL.by_id, id=session)
    assert row is not None
    after = sessions_index.merge_columns(row, await _drop_taken_label(tx, row, told))
    await _store_columns(tx, key, session, row["updated_at"], after)
    return MergedSession(
        str(key),
        taken_over=sessions_index.list_differing_fields(row, after),
        left_behind=sessions_index.list_differing_fields(after, told),
    )


async def _drop_taken_label(tx: Tx, session: Row, told: Mapping[str, Param]) -> Mapping[str, Param]:
    """Return the columns without the label if another session has it."""
    free = told["label"] is None or await sessions.is_label_free(tx, session, told["label"])
    return told if free else {**told, "label": None}


async def _store_columns(
    tx: Tx, key: SessionKey, session: int, updated_at: int, columns: Mapping[str, Param]
) -> None:
    await tx.do(sessions.SQL.set_imported_columns, id=session, updated_at=updated_at, **columns)
    names = cast("list[str | None]", [columns["label"], columns["display_name"]])
    await sessions.index_session_names(tx, session, key.id, key.thread and key.thread.id, *names)


async def _write_ended_conversation(
    tx: Tx, key: str, told: ConversationRecord, reading: TranscriptReader, began: int
) -> int:
    transcript = await tx.one(
        sessions.SQL.insert_transcript,
        session_id=told.session_id,
        key=key,
        reason=told.reason,
        now=began,
    )
    assert transcript is not None
    count, last_at = await _append_entries(tx, transcript["id"], reading)
    ended_at = parse_timestamp(told.ended_at) or last_at or began
    await tx.do(sessions.SQL.end_transcript, transcript=transcript["id"], now=ended_at)
    return count


async def _append_entries(tx: Tx, transcript: int, reading: TranscriptReader) -> tuple[int, int]:
    """Append the entries; return their number and the time of the last one."""
    count = last_at = 0
    for entry in reading.iterate_entries():
        await transcripts.append_raw(tx, transcript, None, entry)
        count, last_at = entry.seq, entry.created_at
    return count, last_at


def _iterate_lines(path: Path | None) -> Iterator[bytes]:
    """Yield lines of bounded length; a longer line is yielded as unreadable content."""
    if path is None:
        return
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
                yield line
                continue
            while (more := file.readline(MAX_LINE_BYTES)) and not more.endswith(b"\n"):
                pass
            yield b"(too long)"


def _is_known_model(config: Config, ref: str) -> bool:
    try:
        config.find_model(ref)
    except UnknownModel:
        return False
    return True


def _add_to_report(report: ImportReport, found: SourceSession, done: _SessionImport, config: Config) -> None:
    report.skipped += done.outcome == "skipped"
    report.imported += done.outcome != "skipped"
    report.beside += done.outcome == "beside"
    if done.merged and (done.merged.taken_over or done.merged.left_behind):
        report.merged += [done.merged][: MAX_REPORTED_ITEMS - len(report.merged)]
    report.past += done.past
    report.messages += done.messages
    report.damaged_lines += done.damaged
    report.left_out_entries += done.left_out
    report.left_out_labels += done.label_left_out
    if done.outcome != "skipped" and found.agent_id not in {*config.agent_ids, *report.unknown_agents}:
        report.unknown_agents.append(found.agent_id)


def _record_failure(report: ImportReport, key: str, error: Exception) -> None:
    report.failed_count += 1
    if len(report.failed) < MAX_REPORTED_ITEMS:
        report.failed.append(ImportFailure(key[:200], str(error)))
