"""Session rows: finding, creating, resetting, archiving and deleting them, as transaction scripts.

A session is a key and a lane. Its messages are in its transcript; `start_new_transcript` gives the key a new one and
keeps the old one, which stays readable by its session id. Authorization is not decided here (see `resolver`).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import msgspec

from antiphon import keys
from antiphon.engine.sessions import search, transcripts
from antiphon.engine.sessions.transcripts import Entry
from antiphon.engine.validation import DELETED_TRANSCRIPT_PREFIX
from antiphon.errors import Conflict
from antiphon.keys import SessionIdRef, SessionKey
from antiphon.messages import Message
from antiphon.store import Param, Row, Tx
from antiphon.store.fulltext import FulltextVector
from antiphon.store.queries import Queries

SQL = Queries("sessions")
_FILE_VERSIONS_SQL = Queries("file_versions")
_COMMANDS_SQL = Queries("exec_commands")
_APPROVALS_SQL = Queries("approvals")
RUNS_SQL = Queries("runs")
EXCHANGES_SQL = Queries("exchanges")
DELIVERIES_SQL = Queries("deliveries")
TASKS_SQL = Queries("tasks")
PATCHABLE_COLUMNS = ("label", "display_name", "model", "thinking", "verbose", "send_policy", "archived")


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a session that are set when it is created."""

    agent_id: str | None = None
    """For the global session, whose key names no agent."""
    label: str | None = None
    display_name: str | None = None
    parent: int | None = None
    """The session that spawned it."""
    role: str | None = None
    sandboxed: bool = False
    envelope: str | None = None
    model: str | None = None
    thinking: str | None = None
    session_id: str | None = None
    reason: str = "created"


async def find_session(tx: Tx, reference: SessionKey | SessionIdRef, viewer: str | None) -> Row | None:
    """Return the session for a reference. `descendant` in the row says whether `viewer` is an ancestor of it."""
    if isinstance(reference, SessionKey):
        return await tx.one(SQL.by_key, key=str(reference), viewer=viewer)
    return await tx.one(SQL.by_session_id, session_id=reference.value, viewer=viewer)


def get_named_transcript(row: Row) -> tuple[int, str]:
    """Return the transcript that a reference meant: the current one, or an older one given by its session id."""
    return row["named_transcript"], row["named_session_id"]


async def find_by_id(tx: Tx, session: int) -> Row | None:
    """Return every column of a session; None if it was deleted."""
    return await tx.one(SQL.by_id, id=session)


async def find_by_key(tx: Tx, key: str) -> Row | None:
    """Return every column of a session; None if no session has this key."""
    return await tx.one(SQL.all_columns_by_key, key=key)


async def find_unfinished_run(tx: Tx, session: int) -> Row | None:
    """Return the id of the session's running run, else of a queued one, and whether it is `running`."""
    return await tx.one(SQL.running_or_queued, id=session)


async def has_unsettled_work(tx: Tx, session: int) -> bool:
    """Whether tasks or exchanges of the session have not settled, although no run is active."""
    return bool(await tx.one(SQL.has_unsettled_work, id=session))


async def load_last_activity(tx: Tx, session: int) -> int | None:
    """Return when the session was last used; None if it has no entries."""
    row = await tx.one(SQL.last_activity, id=session)
    return row["updated_at"] if row and row["last_seq"] else None


async def record_channel(tx: Tx, session: int, channel: str, to: str) -> None:
    """Record the channel that a session without one was written to from."""
    await tx.do(SQL.record_channel, id=session, channel=channel, to=to)


async def clear_context_size(tx: Tx, session: int) -> None:
    """Forget how many tokens the last call used, because the context has changed."""
    await tx.do(SQL.clear_context, id=session)


async def list_unused_sessions(tx: Tx, kind: str, before: int, limit: int) -> list[Row]:
    """Return idle sessions that were last used before then."""
    return await tx.all(SQL.unused, kind=kind, before=before, limit=limit)


async def list_expired_sessions(tx: Tx, kind: str, before: int, limit: int) -> list[Row]:
    """Return sessions that were archived before then."""
    return await tx.all(SQL.expired, kind=kind, before=before, limit=limit)


async def load_full_session(tx: Tx, session: int) -> Row:
    """Return every column of a session that exists."""
    row = await tx.one(SQL.by_id, id=session)
    assert row is not None
    return row


async def load_list_row(tx: Tx, session: int) -> Row:
    """Return a session that exists with the columns of `SessionListRow`."""
    row = await tx.one(SQL.list_row, id=session)
    assert row is not None
    return row


async def list_by_label(tx: Tx, label: str, viewer: str | None) -> list[Row]:
    return await tx.all(SQL.by_label, label=label, viewer=viewer)


async def create_session(tx: Tx, key: SessionKey, now: int, properties: NewSession | None = None) -> Row:
    properties = properties or NewSession()
    session_id = properties.session_id or str(uuid.uuid4())
    parent = await tx.one(SQL.by_id, id=properties.parent) if properties.parent is not None else None
    # Also true if it was not spawned here: it was imported, or an operator wrote to the key.
    subagent = key.is_spawned
    transcript = await _insert_transcript(tx, session_id, str(key), properties.reason, now)
    row = await tx.one(
        SQL.insert,
        key=str(key),
        session_id=session_id,
        transcript=transcript,
        agent_id=key.agent_id or properties.agent_id,
        kind=key.kind,
        chat_type=key.chat_type,
        channel=key.channel,
        label=properties.label,
        display_name=properties.display_name,
        spawned_by=parent["id"] if parent else None,
        parent_key=parent["key"] if parent else None,
        root_key=(parent["root_key"] or parent["key"]) if parent else None,
        depth=parent["depth"] + 1 if parent else int(subagent),
        role=properties.role or ("leaf" if subagent else None),
        sandboxed=int(properties.sandboxed),
        envelope=properties.envelope,
        model=properties.model,
        thinking=properties.thinking,
        now=now,
    )
    assert row is not None
    if parent:
        await _link_child(tx, row["id"], parent["id"])
    await index_session_names(
        tx, row["id"], key.id, key.thread and key.thread.id, properties.label, properties.display_name
    )
    return row


async def _link_child(tx: Tx, child: int, parent: int) -> None:
    await tx.do(SQL.insert_lineage, parent=parent, child=child)
    await tx.do(SQL.count_child, parent=parent, change=1)


async def attach_to_parent(tx: Tx, session: int, parent: int) -> None:
    """Make a session without parent and children the child of another session."""
    parent_row = await tx.one(SQL.by_id, id=parent)
    assert parent_row is not None
    await tx.do(
        SQL.set_parent,
        id=session,
        parent=parent,
        parent_key=parent_row["key"],
        root_key=parent_row["root_key"] or parent_row["key"],
        depth=parent_row["depth"] + 1,
    )
    await _link_child(tx, session, parent)


async def _insert_transcript(tx: Tx, session_id: str, key: str, reason: str, now: int) -> int:
    row = await tx.one(SQL.insert_transcript, session_id=session_id, key=key, reason=reason, now=now)
    assert row is not None
    return row["id"]


async def index_session_names(tx: Tx, session: int, *names: str | None) -> None:
    """Replace the names under which search finds a session."""
    await tx.do(SQL.delete_names, id=session)
    text = " ".join(filter(None, names))
    await tx.do(SQL.insert_names, id=session, names=text, vector=FulltextVector(text))


async def patch_session(tx: Tx, session: int, settings: Mapping[str, str | int | None], now: int) -> None:
    """Set some of `PATCHABLE_COLUMNS`. Labels are unique per agent, and only idle sessions can be archived."""
    row = await tx.one(SQL.by_id, id=session)
    assert row is not None
    after: dict[str, Param] = {column: settings.get(column, row[column]) for column in PATCHABLE_COLUMNS}
    if settings.keys() & {"label", "archived"} and after["label"] is not None and not after["archived"]:
        await _check_label(tx, row, after["label"])
    if after["archived"] and not row["archived"]:
        await check_idle(tx, row)
        await _stop_commands(tx, session, "archived")
    await tx.do(SQL.patch, id=session, now=now, **after)
    if settings.keys() & {"label", "display_name"}:
        key = keys.parse(row["key"])
        names = (after["label"], after["display_name"])
        await index_session_names(
            tx, session, key.id, key.thread and key.thread.id, *(n for n in names if isinstance(n, str))
        )


async def is_label_free(tx: Tx, session: Row, label: Param) -> bool:
    await tx.lock(f"label:{session['agent_id']}:{label}")
    return not await tx.one(
        SQL.label_holder, label=label, agent_id=session["agent_id"], besides=session["id"]
    )


async def _check_label(tx: Tx, session: Row, label: Param) -> None:
    if not await is_label_free(tx, session, label):
        raise make_label_conflict(label)


async def find_and_lock_label(tx: Tx, agent_id: str, label: str) -> Row | None:
    """Return the agent's session with this label. The label stays locked until the commit."""
    await tx.lock(f"label:{agent_id}:{label}")
    return await tx.one(SQL.label_holder, label=label, agent_id=agent_id, besides=0)


def make_label_conflict(label: Param) -> Conflict:
    """Return the error for a label in use. It does not name the other session, which may be hidden from the caller."""
    return Conflict(f"label already in use: {label}.", "Choose another one.", field="label")


async def append_note(tx: Tx, session: int, message: Message, now: int) -> Entry:
    """Append an entry that belongs to no run."""
    reserved = await tx.one(SQL.reserve_seq_unfenced, id=session, count=1, now=now)
    assert reserved is not None
    (entry,) = await transcripts.append(
        tx, reserved["transcript"], reserved["last_seq"], None, [message], now
    )
    return entry


async def start_new_transcript(tx: Tx, session: Row, reason: str, now: int) -> None:
    """End the current transcript and start a new one, which records the reason."""
    await check_idle(tx, session)
    await _stop_commands(tx, session["id"], "reset")
    session_id = str(uuid.uuid4())
    await tx.do(SQL.end_transcript, transcript=session["transcript"], now=now)
    transcript = await _insert_transcript(tx, session_id, session["key"], reason, now)
    await tx.do(
        SQL.start_conversation, id=session["id"], session_id=session_id, transcript=transcript, now=now
    )


async def restore_transcript(tx: Tx, session: Row, now: int) -> None:
    """Switch back to the older transcript by which the row was found."""
    await check_idle(tx, session)
    transcript, session_id = get_named_transcript(session)
    await tx.do(SQL.end_transcript, transcript=session["transcript"], now=now)
    await tx.do(SQL.reopen_transcript, transcript=transcript)
    await tx.do(
        SQL.restore_conversation, id=session["id"], session_id=session_id, transcript=transcript, now=now
    )


async def check_idle(tx: Tx, session: Row) -> None:
    """Check that no run of the session is active.

    Raises:
        Conflict: a run is active.
    """
    active = await tx.one(RUNS_SQL.active_in_session, session=session["id"])
    if active:
        raise Conflict(
            f"Session {session['key']!r} is still answering.",
            "Wait for the answer, or stop it (/stop in a chat), then try again.",
            run_id=active["id"],
        )


async def list_transcripts(tx: Tx, session: Row) -> list[Row]:
    """Return all transcripts of this key, newest first."""
    return await tx.all(SQL.transcripts_of, key=session["key"])


async def archive_session(tx: Tx, session: int, now: int) -> None:
    """Hide a session and end its commands; nothing of it is deleted."""
    await _stop_commands(tx, session, "archived")
    await tx.do(SQL.archive, id=session, now=now)


async def delete_session(tx: Tx, session: int, key: str, now: int) -> None:
    """Delete an idle session and all messages in it, to it and from it.

    The usage ledger stays, and so do the results of its tasks (see `delete_task_texts`). Finished exchanges and
    deliveries stay without their texts. The deletion of its conversations is recorded, for programs that keep copies.
    """
    row = await tx.one(SQL.by_id, id=session)
    if row and row["spawned_by"] is not None:
        await tx.do(SQL.count_child, parent=row["spawned_by"], change=-1)
    await search.delete_from_index(tx, key)  # uses the ids of the messages, so this comes first
    await tx.do(SQL.delete_messages, key=key)
    await tx.do(SQL.record_deletion, prefix=DELETED_TRANSCRIPT_PREFIX, key=key, now=now)
    await tx.do(SQL.delete_transcripts, key=key)
    await tx.do(SQL.delete_runs, id=session)
    await tx.do(SQL.delete_notes, id=session)
    await tx.do(EXCHANGES_SQL.clear_texts, session=session)
    await tx.do(DELIVERIES_SQL.clear_part_texts, session=session)
    await tx.do(DELIVERIES_SQL.clear_texts, session=session)
    await tx.do(SQL.delete_lineage, id=session)
    await tx.do(SQL.delete_names, id=session)
    await tx.do(_FILE_VERSIONS_SQL.delete_of_session, session=session)
    await tx.do(_APPROVALS_SQL.delete_of_session, session=session)
    await _stop_commands(tx, session, "deleted")  # their rows are deleted when they have ended
    await tx.do(_COMMANDS_SQL.delete_of_session, session=session)
    await tx.do(SQL.delete_session, id=session)


async def _stop_commands(tx: Tx, session: int, reason: str) -> None:
    """Request the stop of the session's commands. Their host looks for such requests while it runs any."""
    await tx.do(_COMMANDS_SQL.stop_all_of_session, session=session, reason=reason)


async def delete_task_texts(tx: Tx, session: int, key: str) -> None:
    """Delete the texts and results of a session's tasks, for a person who wants nothing of it kept."""
    await tx.do(TASKS_SQL.clear_texts, child=session, key=key)
