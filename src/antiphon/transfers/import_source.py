"""The sessions that can be imported from a directory: its `sessions.json` files and the transcripts they name.

Only indexes are read here; `imports` reads the transcripts. Nothing here needs a store.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from antiphon import keys
from antiphon.config import Config
from antiphon.errors import AntiphonError, InvalidInput, NotFound, TooLarge
from antiphon.keys import SessionIdRef, SessionKey
from antiphon.transfers import sessions_index
from antiphon.transfers.exports import INDEX_FILE_NAME, SESSION_ID_PATTERN
from antiphon.transfers.jsonl import parse_timestamp
from antiphon.transfers.sessions_index import ConversationRecord
from antiphon.validation_errors import replace_lone_surrogates, suggest_options

MAX_INDEX_BYTES = 512 * 2**20  # of one sessions.json
MAX_REPORTED_ITEMS = 100  # listed one by one
MAX_REASON_CHARACTERS = 64

_ARCHIVED_FILE_PATTERN = re.compile(r"\.jsonl\.(reset|deleted|bak)\.")


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

    def record_failure(self, key: str, error: Exception) -> None:
        self.failed_count += 1
        if len(self.failed) < MAX_REPORTED_ITEMS:
            self.failed.append(ImportFailure(key[:200], str(error)))


class SessionsFolder(msgspec.Struct, frozen=True):
    """A directory with a `sessions.json`, and the agent that its short keys belong to."""

    path: Path
    agent_id: str


class PastConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation of a key that is not its current one."""

    record: ConversationRecord
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
    is_global_entry: bool = False
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
        past = (past.record.session_id for past in (*self.before, *self.after))
        return {str(self.key), self.session_id, *past}

    @property
    def label(self) -> str:
        """The label as text, whatever its type; valid only if `_SessionImport.label_taken` is set."""
        return str(self.entry.get("label"))


class ImportSource(msgspec.Struct, frozen=True):
    """The sessions to import, and the report so far from reading the indexes."""

    sessions: Sequence[SourceSession]
    report: ImportReport


def scan_source(source: Path, config: Config, agent_id: str | None = None) -> ImportSource:
    """Returns what can be imported from `source`, for one agent or for all. Needs no store.

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


def find_session_folders(source: Path, default: str, *, only: str | None = None) -> list[SessionsFolder]:
    """Returns the session directories: `source` itself, its `sessions`, or `agents/<id>/sessions` below it.

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
        agent_ids = sorted({folder.agent_id for folder in found})
        raise NotFound(
            f"There are no sessions of agent {only!r} in {str(source)!r}.",
            suggest_options(only, agent_ids, noun="agent ids"),
            agent_id=only,
        )
    return chosen


def _find_single_folder(source: Path, agent_id: str) -> list[SessionsFolder]:
    for path in (source.absolute(), source.absolute() / "sessions"):
        if (path / INDEX_FILE_NAME).is_file():
            is_agent_folder = path.parent.parent.name == "agents" and path.name == "sessions"
            return [
                SessionsFolder(
                    path, keys.normalize_agent_id(path.parent.name) if is_agent_folder else agent_id
                )
            ]
    return []


def _build_nothing_found_error(source: Path) -> InvalidInput:
    if any(source.glob("agents/*/agent/*.sqlite")):
        return InvalidInput(
            f"The sessions under {str(source)!r} are stored in SQLite, which cannot be imported.",
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
            report.record_failure(raw_key, error)
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
            f"{str(path)!r} is larger than {MAX_INDEX_BYTES} bytes.",
            "Split it into several directories.",
            max=MAX_INDEX_BYTES,
        )
    content = path.read_bytes()
    index = _read_json(content)
    index = _read_json5(content, path) if index is None else index
    if not isinstance(index, dict):
        raise InvalidInput(f"{str(path)!r} is not an object of sessions.", "Check that it is the right file.")
    return cast("dict[str, Any]", index)


def _read_json(content: bytes) -> object:
    """Parses JSON; returns None if it is invalid, or null, which is not an object of sessions either."""
    for repair in (bytes, replace_lone_surrogates):
        with suppress(ValueError, RecursionError):
            return msgspec.json.decode(repair(content))
    return None


def _read_json5(content: bytes, path: Path) -> object:
    import pyjson5  # noqa: PLC0415 - only hand-edited files need it

    try:
        return pyjson5.decode(content.decode("utf-8-sig"))
    except (pyjson5.Json5Exception, ValueError, RecursionError) as error:
        reason = str(error.args[0]) if error.args else type(error).__name__
    raise InvalidInput(f"{str(path)!r} could not be read ({reason}).", "Fix it, or restore a backup of it.")


def _build_source_session(
    raw_key: str, entry: object, folder: SessionsFolder, config: Config
) -> SourceSession:
    if not isinstance(entry, dict):
        raise InvalidInput("The entry is not an object.", f"Fix it in {INDEX_FILE_NAME!r}.")
    values = cast("dict[str, Any]", entry)
    session_id = values.get("sessionId")
    if not isinstance(session_id, str) or not SESSION_ID_PATTERN.fullmatch(session_id):
        raise InvalidInput(f"{session_id!r} is not a valid session id.", f"Fix it in {INDEX_FILE_NAME!r}.")
    key = _canonicalize_key(raw_key, folder.agent_id, config)
    file = _find_transcript_file(folder.path, session_id, values, key)
    spawned_by = values.get("spawnedBy")
    records = [
        record for record in sessions_index.parse_conversation_records(values) if _is_valid_record(record)
    ]
    current = next((at for at, record in enumerate(records) if record.session_id == session_id), len(records))
    return SourceSession(
        key=key,
        agent_id=key.agent_id or folder.agent_id,
        session_id=session_id,
        entry=values,
        parent=_canonicalize_parent(spawned_by, folder.agent_id, config)
        if isinstance(spawned_by, str)
        else None,
        file=file,
        reason=records[current].reason if current < len(records) else "imported",
        is_global_entry=_is_key_named(raw_key, "global")
        and (file is None or config.session.scope != "global"),
        before=_find_past_conversations(folder.path, records[:current]),
        after=_find_past_conversations(folder.path, records[current + 1 :]),
    )


def _find_past_conversations(folder: Path, records: Sequence[ConversationRecord]) -> list[PastConversation]:
    """Returns the conversations that have a file; without one, nothing can be imported."""
    with_names = [
        PastConversation(record=record, file=folder / f"{record.session_id}.jsonl") for record in records
    ]
    return [past for past in with_names if _is_file(past.file)]


def _is_valid_record(record: ConversationRecord) -> bool:
    return (
        bool(SESSION_ID_PATTERN.fullmatch(record.session_id))
        and 0 < len(record.reason) <= MAX_REASON_CHARACTERS
    )


def _is_key_named(raw_key: str, name: str) -> bool:
    return raw_key.strip().lower() == name


def _canonicalize_key(raw_key: str, agent_id: str, config: Config) -> SessionKey:
    """Returns the stored form of a key, from any spelling that was ever used."""
    if _is_key_named(raw_key, "global"):
        return keys.main_session_key(agent_id, scope=config.session.scope)
    session = config.session
    found = keys.canonicalize(raw_key, agent_id=agent_id, main_key=session.main_key, scope=session.scope)
    if isinstance(found, SessionIdRef):  # a bare peer or chat id, from before keys had agents
        found = keys.canonicalize(f"agent:{agent_id}:{found.value}", agent_id=agent_id)
    assert isinstance(found, SessionKey)
    return found


def _canonicalize_parent(spawned_by: str, agent_id: str, config: Config) -> str | None:
    try:
        return str(_canonicalize_key(spawned_by, agent_id, config))
    except AntiphonError:
        return None


def _find_transcript_file(
    folder: Path, session_id: str, entry: Mapping[str, Any], key: SessionKey
) -> Path | None:
    """Returns the transcript file. A recorded path may be from another machine, so only its last part is used."""
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
