"""Imports conversations from a state directory of the OpenClaw family, or from an Antiphon export.

Each session is one transaction: it is imported with all its messages, or not at all. Importing again changes nothing,
because known session ids are skipped. If a key is taken, its conversation stays current; the imported one is readable
by its session id, as if `/new` had ended it. Settings of its key are adopted at once where none exist here (see
`sessions_index.merge_columns`), because a `deny` applies to the chat, whichever conversation is current. Conversations
that `/new` had ended are imported along with the one that followed them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, cast

import msgspec

from antiphon import keys
from antiphon.config import Config
from antiphon.engine.sessions import session_rows as sessions
from antiphon.engine.sessions import transcripts
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import AntiphonError, StoreError, UnknownModel
from antiphon.keys import SessionKey
from antiphon.store import Param, Row, Store, Tx
from antiphon.transfers import sessions_index
from antiphon.transfers.exports import SQL
from antiphon.transfers.import_source import (
    MAX_REPORTED_ITEMS,
    ImportReport,
    ImportSource,
    MergedSession,
    PastConversation,
    SourceSession,
)
from antiphon.transfers.jsonl import TranscriptReader, parse_timestamp
from antiphon.transfers.sessions_index import ConversationRecord

MAX_LINE_BYTES = 64 * 2**20  # longer lines count as damaged

ImportOutcome: TypeAlias = Literal["imported", "beside", "skipped"]


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

    def __init__(self, result: _SessionImport) -> None:
        self.result = result


class _DryRunImporter:
    """A dry run. Each session is rolled back, so those that it could conflict with are written again before it."""

    def __init__(self) -> None:
        self._tried_sessions: list[SourceSession] = []
        self._takers_by_name: dict[str, set[int]] = {}

    async def import_session(
        self, store: Store, source: SourceSession, config: Config, now: int
    ) -> _SessionImport:
        numbers = set[int]().union(
            *(self._takers_by_name.get(name, ()) for name in (*source.ids, source.label))
        )
        earlier = [self._tried_sessions[number] for number in sorted(numbers)]
        try:
            return await store.tx(_write_and_roll_back, earlier, source, config, now)
        except _DryRunRollback as rollback:
            self._remember(source, rollback.result, numbers)
            return rollback.result

    def _remember(self, source: SourceSession, result: _SessionImport, earlier: set[int]) -> None:
        if result.outcome == "skipped" and not result.past:
            return
        for name in source.ids:
            self._takers_by_name.setdefault(name, set()).update(earlier, {len(self._tried_sessions)})
        if result.label_taken:  # one session with the label is enough to know that it is taken
            self._takers_by_name.setdefault(source.label, {*earlier, len(self._tried_sessions)})
        self._tried_sessions.append(source)


async def import_source(
    store: Store, config: Config, source: ImportSource, now: int, *, dry_run: bool = False
) -> ImportReport:
    """Imports the scanned sessions. The store must be owned by this process; no engine is needed."""
    report = source.report
    report.dry_run = dry_run
    dry_run_importer = _DryRunImporter() if dry_run else None
    for session in _order_parents_first(source.sessions):
        try:
            if dry_run_importer:
                result = await dry_run_importer.import_session(store, session, config, now)
            else:
                result = await store.tx(_write_source_session, session, config, now)
        except StoreError:
            raise  # every other session would fail in the same way
        except (AntiphonError, OSError) as error:
            report.record_failure(str(session.key), error)
        else:
            _add_to_report(report, session, result, config)
    return report


def _order_parents_first(sessions_to_import: Sequence[SourceSession]) -> Iterator[SourceSession]:
    """Yields sessions newest first, but parents before their children: lineage is recorded on creation.

    An entry called `global` comes last, however new it is: by then the main session's own entry, if any, has the key.
    """
    newest = sorted(sessions_to_import, key=lambda session: (session.is_global_entry, -session.updated_at))
    by_key = {str(session.key): session for session in reversed(newest)}
    placed: set[int] = set()
    for session in newest:
        chain: list[SourceSession] = []
        above: SourceSession | None = session
        while above is not None and id(above) not in placed:
            placed.add(id(above))
            chain.append(above)
            above = by_key.get(above.parent) if above.parent else None
        yield from reversed(chain)


async def _write_and_roll_back(
    tx: Tx, earlier: Sequence[SourceSession], source: SourceSession, config: Config, now: int
) -> _SessionImport:
    for other in earlier:
        await _write_source_session(tx, other, config, now)
    raise _DryRunRollback(await _write_source_session(tx, source, config, now))


async def _write_source_session(tx: Tx, source: SourceSession, config: Config, now: int) -> _SessionImport:
    """Writes one session with all its conversations; its files are read in the writer's thread, entry by entry."""
    result = _SessionImport()
    is_known = await tx.one(SQL.has_session_id, session_id=source.session_id)
    existing = await sessions.find_session(tx, source.key, None)
    if is_known and not existing:
        return result  # the session exists under another key, so its past conversations cannot be attached
    # Conversations are listed in the order in which they were written.
    for past in source.before:
        await _write_past(tx, source, past, now, result)
    if not is_known:
        await _write_current(tx, source, config, now, result, existing)
    for past in source.after:
        await _write_past(tx, source, past, now, result)
    return result


async def _write_current(
    tx: Tx, source: SourceSession, config: Config, now: int, result: _SessionImport, existing: Row | None
) -> None:
    reader = TranscriptReader(lambda: _iterate_lines(source.file))
    started_at = reader.started_at or source.updated_at or now
    entry = {**source.entry, **({"cwd": reader.cwd} if reader.cwd else {})}
    columns = sessions_index.build_columns(entry, source.key, lambda ref: _is_known_model(config, ref))
    if existing is not None:
        result.outcome = "beside"
        record = ConversationRecord(source.session_id, source.reason)
        result.messages += await _write_ended_conversation(tx, str(source.key), record, reader, started_at)
        result.merged = await _merge_settings(tx, source.key, existing["id"], columns)
        result.label_taken = "label" in result.merged.taken_over
    else:
        result.outcome = "imported"
        await _write_session(tx, source, columns, reader, started_at, result)
    result.damaged += reader.damaged
    result.left_out += reader.left_out


async def _write_past(
    tx: Tx, source: SourceSession, past: PastConversation, now: int, result: _SessionImport
) -> None:
    if await tx.one(SQL.has_session_id, session_id=past.record.session_id):
        return
    reader = TranscriptReader(lambda: _iterate_lines(past.file))
    started_at = reader.started_at or source.updated_at or now
    result.messages += await _write_ended_conversation(tx, str(source.key), past.record, reader, started_at)
    result.past += 1
    result.damaged += reader.damaged
    result.left_out += reader.left_out


async def _write_session(
    tx: Tx,
    source: SourceSession,
    columns: Mapping[str, Param],
    reader: TranscriptReader,
    started_at: int,
    result: _SessionImport,
) -> None:
    parent = await sessions.find_session(tx, keys.parse(source.parent), None) if source.parent else None
    role = source.entry.get("subagentRole")
    new_session = NewSession(
        agent_id=source.agent_id,
        session_id=source.session_id,
        reason=source.reason,
        parent=parent["id"] if parent else None,
        role=role if isinstance(role, str) else None,
    )
    row = await sessions.create_session(tx, source.key, started_at, new_session)
    # A sub-agent gets its label even if it is taken, as it does when it is spawned.
    keeps_label = source.archived_at or source.key.is_spawned
    stored = columns if keeps_label else await _drop_taken_label(tx, row, columns)
    result.label_taken = stored["label"] is not None and not source.archived_at
    result.label_left_out = stored["label"] != columns["label"]
    count, last_at = await _append_entries(tx, row["transcript"], reader)
    updated_at = source.updated_at or last_at or started_at
    await tx.one(sessions.SQL.reserve_seq_unfenced, id=row["id"], count=count, now=updated_at)
    await _store_columns(tx, source.key, row["id"], updated_at, stored)
    if source.archived_at:
        await tx.do(sessions.SQL.archive, id=row["id"], now=source.archived_at)
    result.messages += count


async def _merge_settings(
    tx: Tx, key: SessionKey, session: int, columns: Mapping[str, Param]
) -> MergedSession:
    row = await tx.one(sessions.SQL.by_id, id=session)
    assert row is not None
    merged = sessions_index.merge_columns(row, await _drop_taken_label(tx, row, columns))
    await _store_columns(tx, key, session, row["updated_at"], merged)
    return MergedSession(
        str(key),
        taken_over=sessions_index.list_differing_fields(row, merged),
        left_behind=sessions_index.list_differing_fields(merged, columns),
    )


async def _drop_taken_label(tx: Tx, session: Row, columns: Mapping[str, Param]) -> Mapping[str, Param]:
    """Returns the columns without the label if another session has it."""
    is_free = columns["label"] is None or await sessions.is_label_free(tx, session, columns["label"])
    return columns if is_free else {**columns, "label": None}


async def _store_columns(
    tx: Tx, key: SessionKey, session: int, updated_at: int, columns: Mapping[str, Param]
) -> None:
    await tx.do(sessions.SQL.set_imported_columns, id=session, updated_at=updated_at, **columns)
    names = cast("list[str | None]", [columns["label"], columns["display_name"]])
    await sessions.index_session_names(tx, session, key.id, key.thread and key.thread.id, *names)


async def _write_ended_conversation(
    tx: Tx, key: str, record: ConversationRecord, reader: TranscriptReader, started_at: int
) -> int:
    transcript = await tx.one(
        sessions.SQL.insert_transcript,
        session_id=record.session_id,
        key=key,
        reason=record.reason,
        now=started_at,
    )
    assert transcript is not None
    count, last_at = await _append_entries(tx, transcript["id"], reader)
    ended_at = parse_timestamp(record.ended_at) or last_at or started_at
    await tx.do(sessions.SQL.end_transcript, transcript=transcript["id"], now=ended_at)
    return count


async def _append_entries(tx: Tx, transcript: int, reader: TranscriptReader) -> tuple[int, int]:
    """Appends the entries; returns their number and the time of the last one."""
    count = last_at = 0
    for entry in reader.iterate_entries():
        await transcripts.append_raw(tx, transcript, None, entry)
        count, last_at = entry.seq, entry.created_at
    return count, last_at


def _iterate_lines(path: Path | None) -> Iterator[bytes]:
    """Yields lines of bounded length; a longer line is yielded as unreadable content."""
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


def _add_to_report(
    report: ImportReport, source: SourceSession, result: _SessionImport, config: Config
) -> None:
    report.skipped += result.outcome == "skipped"
    report.imported += result.outcome != "skipped"
    report.beside += result.outcome == "beside"
    if result.merged and (result.merged.taken_over or result.merged.left_behind):
        report.merged += [result.merged][: MAX_REPORTED_ITEMS - len(report.merged)]
    report.past += result.past
    report.messages += result.messages
    report.damaged_lines += result.damaged
    report.left_out_entries += result.left_out
    report.left_out_labels += result.label_left_out
    if result.outcome != "skipped" and source.agent_id not in {*config.agent_ids, *report.unknown_agents}:
        report.unknown_agents.append(source.agent_id)
