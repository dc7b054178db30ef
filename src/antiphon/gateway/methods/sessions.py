"""Sessions: finding, describing, making and changing them, and hearing of them."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from antiphon import keys
from antiphon.access import ADMIN, READ, WRITE
from antiphon.errors import Ambiguous, AntiphonError, Conflict, InvalidInput, NotFound
from antiphon.gateway import attachments, rows
from antiphon.gateway.attachments import Attachment
from antiphon.gateway.frames import IdempotencyKey, Params
from antiphon.gateway.methods import chat
from antiphon.gateway.methods.registry import Call, Nothing, method, named
from antiphon.operations import HistoryFilter, ListFilter, Message, Patch
from antiphon.operations import Send as Exchange
from antiphon.operations.exchanges import TIMEOUT
from antiphon.store.listing import KINDS
from antiphon.views import HistoryPage, Sent, SessionView

Key = Annotated[str, Meta(min_length=1, max_length=512)]
Word = Annotated[str, Meta(min_length=1)]
LIST_MOST = 200
_NAMESPACE = uuid.UUID("8c1f7a52-31c5-4e0e-8f0b-5d1d0a3f9b6e")


class List(Params, frozen=True):
    limit: Annotated[int, Meta(ge=1)] | None = None
    cursor: str | None = None
    offset: Annotated[int, Meta(ge=0)] = 0
    active_minutes: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    kinds: list[str] | None = None
    label: str | None = None
    spawned_by: str | None = None
    agent_id: str | None = None
    search: str | None = None
    archived: bool | Literal["all"] = False
    include_derived_titles: bool = False
    include_last_message: bool = False
    # What clients say that changes nothing: there are no such sessions, and one order.
    include_global: bool = True
    include_unknown: bool = False
    configured_agents_only: bool = False
    sort_by: str | None = None
    require_last_interaction: bool = False
    board_face: str | None = None
    owner_first: bool = False
    involving_me: bool = False
    include_people: bool = False
    include_activity_summary: bool = False
    # What some clients do not want to see.
    active_only: bool = False
    exclude_cron: bool = False
    exclude_system: bool = False
    exclude_subagents: bool = False


@method("sessions.list", READ, List)
async def list_(call: Call, params: List) -> dict[str, Any]:
    """Newest first. `offset` is for clients that count; `nextCursor` finds the next page without counting."""
    limit = min(params.limit or LIST_MOST, LIST_MOST)
    wanted = ListFilter(
        kinds=_kinds(params),
        limit=limit,
        active_minutes=params.active_minutes,
        agent_id=params.agent_id,
        label=params.label,
        search=params.search or None,
        spawned_by=params.spawned_by,
        include_archived=bool(params.archived),
        cursor=params.cursor,
    )
    wanted = await _skip(call, wanted, params.offset)
    page = await call.operations.list(call.caller, wanted)
    found = [rows.session_row(view) for view in page.sessions if _wanted(view, params)]
    if params.include_last_message or params.include_derived_titles:
        await _add_last_messages(call, found)
    return {
        "ts": call.now,
        "path": call.gateway.database,
        "count": len(found),
        "limitApplied": limit,
        "hasMore": page.next_cursor is not None,
        "nextCursor": page.next_cursor,
        "nextOffset": params.offset + page.count if page.next_cursor else None,
        "defaults": chat.defaults(call),
        "sessions": found,
    }


def _kinds(params: List) -> list[str] | None:
    left_out = {"cron"} if params.exclude_cron else set[str]()
    left_out |= {"hook", "node"} if params.exclude_system else set[str]()
    if not left_out:
        return params.kinds
    return [kind for kind in params.kinds or KINDS if kind not in left_out]


def _wanted(view: SessionView, params: List) -> bool:
    """What no index knows is left out of the page, which then has fewer rows."""
    if params.active_only and view.state != "running":
        return False
    return not (params.exclude_subagents and ":subagent:" in view.key)


async def _skip(call: Call, wanted: ListFilter, offset: int) -> ListFilter:
    """Past `offset` rows, a page at a time; at most a thousand, beyond which a cursor has to be used."""
    if offset > 1000:
        raise InvalidInput("'offset' is at most 1000.", "Use nextCursor to go on.", field="offset")
    while offset > 0:
        page = await call.operations.list(
            call.caller, msgspec.structs.replace(wanted, limit=min(offset, LIST_MOST))
        )
        if page.next_cursor is None:
            return msgspec.structs.replace(wanted, cursor="0|~")  # after everything there is
        offset -= page.count
        wanted = msgspec.structs.replace(wanted, cursor=page.next_cursor)
    return wanted


async def _add_last_messages(call: Call, found: list[dict[str, Any]]) -> None:
    for start in range(0, len(found), 64):
        part = found[start : start + 64]
        previews = await call.operations.preview(call.caller, [row["key"] for row in part], 1, 120)
        for row, preview in zip(part, previews, strict=True):
            if preview.items:
                row["lastMessagePreview"] = preview.items[-1].text
            row["derivedTitle"] = row.get("displayName") or row.get("label") or row["key"]


class Resolve(Params, frozen=True):
    key: str | None = None
    session_id: str | None = None
    label: str | None = None
    agent_id: str | None = None
    spawned_by: str | None = None
    include_global: bool = True
    include_unknown: bool = False
    allow_missing: bool = False
    short_id: str | None = None
    slug_hint: str | None = None


@method("sessions.resolve", READ, Resolve)
async def resolve(call: Call, params: Resolve) -> dict[str, Any]:
    given = [value for value in (params.key, params.session_id, params.label) if value]
    if not given:
        raise InvalidInput("Either key, sessionId, or label is required.", "Pass one.", field="key")
    if len(given) > 1:
        raise InvalidInput(
            "Provide either key, sessionId, or label (not multiple).", "Pass one.", field="key"
        )
    try:
        view = await _resolved(call, params)
    except (NotFound, Ambiguous) as error:
        if params.allow_missing:
            return {"ok": False, "candidates": []}
        if isinstance(error, NotFound):
            what = (
                f"No session found with label: {params.label}"
                if params.label
                else f"No session found: {given[0]}"
            )
            raise NotFound(f"{what}.", "See sessions.list.") from None
        raise
    return {"ok": True, "key": view.key, "agentId": view.agent_id, "sessionId": view.session_id}


async def _resolved(call: Call, params: Resolve) -> SessionView:
    if params.label is None:
        reference = named(params.key, params.agent_id) if params.key else params.session_id or ""
        return await call.operations.describe(call.caller, reference)
    # Not as a reference: a label may read like a key.
    page = await call.operations.list(
        call.caller, ListFilter(label=params.label, agent_id=params.agent_id, limit=10)
    )
    candidates = [view.key for view in page.sessions]
    if not candidates:
        raise NotFound(f"No session found with label: {params.label}.", "See sessions.list.")
    if len(candidates) > 1:
        raise Ambiguous(
            f"Multiple sessions found with label: {params.label} ({', '.join(candidates)}).",
            "Pass one of these keys.",
            candidates=candidates,
        )
    return page.sessions[0]


class Previews(Params, frozen=True):
    keys: Annotated[list[Key], Meta(min_length=1)]
    limit: Annotated[int, Meta(ge=1)] = 12
    max_chars: Annotated[int, Meta(ge=20)] = 240


@method("sessions.preview", READ, Previews)
async def preview(call: Call, params: Previews) -> dict[str, Any]:
    found = await call.operations.preview(
        call.caller, params.keys[:64], min(params.limit, 50), min(params.max_chars, 2000)
    )
    return {"ts": call.now, "previews": found}


class Describe(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    include_derived_titles: bool = False
    include_last_message: bool = False


@method("sessions.describe", READ, Describe)
async def describe(call: Call, params: Describe) -> dict[str, Any]:
    try:
        view = await call.operations.describe(call.caller, named(params.key, params.agent_id))
    except NotFound:
        return {"session": None}
    row = rows.session_row(view)
    row["activeRunIds"] = await call.operations.unfinished(call.caller, view.key)
    if params.include_derived_titles or params.include_last_message:
        await _add_last_messages(call, [row])
    return {"session": row}


class Search(Params, frozen=True):
    query: Annotated[str, Meta(min_length=1, max_length=4096)]
    limit: Annotated[int, Meta(ge=1, le=25)] = 10
    agent_id: str | None = None
    session_keys: Annotated[list[Key], Meta(min_length=1, max_length=200)] | None = None


@method("sessions.search", READ, Search)
async def search(call: Call, params: Search) -> dict[str, Any]:
    only = params.session_keys
    page = await call.operations.search(
        call.caller,
        params.query,
        limit=params.limit,
        agent_id=params.agent_id,
        sessions=None if only is None else [named(key, params.agent_id) for key in only],
    )
    found: dict[str, Any] = msgspec.to_builtins(page)
    for hit in found["results"]:
        hit["messageSeq"] = hit.pop("seq")
    return found


class Get(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200


@method("sessions.get", READ, Get)
async def get(call: Call, params: Get) -> dict[str, Any]:
    wanted = HistoryFilter(limit=params.limit, include_tools=True)
    page = await call.operations.history(call.caller, named(params.key, params.agent_id), wanted)
    messages, _ = chat.bounded([rows.message(item) for item in page.messages])
    return {"messages": messages, "sessionId": page.session_id, "hasMore": page.has_more}


class History(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 50
    include_tools: bool = False
    before: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    after: Annotated[int, Meta(ge=0, le=2**53)] | None = None


@method("sessions.history", READ, History)
async def history(call: Call, params: History) -> HistoryPage:
    """Raw entries by their numbers, as they are stored; `key` may be the id of an earlier conversation."""
    wanted = HistoryFilter(
        limit=params.limit, include_tools=params.include_tools, before=params.before, after=params.after
    )
    return await call.operations.history(call.caller, named(params.key, params.agent_id), wanted)


class Conversations(Params, frozen=True):
    key: Key
    agent_id: str | None = None


@method("sessions.conversations", READ, Conversations)
async def conversations(call: Call, params: Conversations) -> dict[str, Any]:
    """What a session has had before, newest first; each can be read, and restored, by its id."""
    found = await call.operations.conversations(call.caller, named(params.key, params.agent_id))
    return {"conversations": found}


class Restore(Params, frozen=True):
    session_id: Word


@method("sessions.restore", ADMIN, Restore)
async def restore(call: Call, params: Restore) -> dict[str, Any]:
    view = await call.operations.restore(call.caller, params.session_id)
    return {"ok": True, "key": view.key, "entry": rows.session_row(view)}


class Create(Params, frozen=True):
    key: Key | None = None
    agent_id: str | None = None
    label: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    display_name: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    model: str | None = None
    parent_session_key: str | None = None
    task: str | None = None
    message: str | None = None
    attachments: list[Attachment] = []
    idempotency_key: IdempotencyKey | None = None
    thinking_level: str | None = None
    emit_command_hooks: bool = False


@method("sessions.create", WRITE, Create)
async def create(call: Call, params: Create) -> dict[str, Any]:
    """With a message, its run begins at once; a message that is refused does not undo the session."""
    view = await call.operations.create(
        call.caller,
        session=_new_key(call, params),
        agent_id=params.agent_id,
        label=params.label,
        display_name=params.display_name,
        model=params.model,
        parent=params.parent_session_key,
    )
    result: dict[str, Any] = {
        "ok": True,
        "key": view.key,
        "sessionId": view.session_id,
        "entry": rows.session_row(view),
        "runStarted": False,
    }
    text = params.message if params.message is not None else params.task
    if text is None and not params.attachments:
        return result
    message = Message(
        session=view.key,
        content=attachments.content(text or "", params.attachments),
        idempotency_key=params.idempotency_key,
        thinking=params.thinking_level,
    )
    try:
        accepted = await call.operations.submit(call.caller, message)
    except AntiphonError as error:
        return {**result, "runError": {"code": error.ws, "message": str(error)}}
    return {**result, "runStarted": True, "runId": accepted.run_id}


def _new_key(call: Call, params: Create) -> str | None:
    """Asked again with the same idempotency key, the same session is meant."""
    if params.key:
        return named(params.key, params.agent_id)
    if params.idempotency_key is None:
        return None
    agent = params.agent_id or call.config.default_agent_id
    name = uuid.uuid5(_NAMESPACE, params.idempotency_key)
    return str(keys.owned_key(agent, "dashboard", str(name)))


class Patches(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    expected_session_id: str | None = None
    label: str | UnsetType | None = UNSET
    display_name: str | UnsetType | None = UNSET
    model: str | UnsetType | None = UNSET
    thinking_level: str | UnsetType | None = UNSET
    verbose_level: str | UnsetType | None = UNSET
    send_policy: str | UnsetType | None = UNSET
    archived: bool | UnsetType = UNSET


@method("sessions.patch", WRITE, Patches)
async def patch(call: Call, params: Patches) -> dict[str, Any]:
    changes = Patch(
        label=params.label,
        display_name=params.display_name,
        model=params.model,
        thinking_level=params.thinking_level,
        verbose_level=params.verbose_level,
        send_policy=params.send_policy,
        archived=params.archived,
    )
    session = await _expected(call, named(params.key, params.agent_id), params.expected_session_id)
    view = await call.operations.patch(call.caller, session, changes)
    row = rows.session_row(view)
    agent = view.agent_id or call.config.default_agent_id
    found = call.config.find_model(view.model_override or call.config.model_ref(agent))
    return {
        "ok": True,
        "path": call.gateway.database,
        "key": view.key,
        "entry": row,
        "resolved": {"modelProvider": found.provider_name, "model": found.model.id},
    }


class Reset(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    expected_session_id: str | None = None
    reason: Literal["new", "reset"] = "reset"
    idempotency_key: IdempotencyKey | None = None


@method("sessions.reset", ADMIN, Reset, waits=True)
async def reset(call: Call, params: Reset) -> dict[str, Any]:
    view = await call.operations.reset(
        call.caller,
        named(params.key, params.agent_id),
        params.reason,
        key=params.idempotency_key,
        expected=params.expected_session_id,
    )
    return {"ok": True, "key": view.key, "entry": rows.session_row(view)}


async def _expected(call: Call, session: str, session_id: str | None) -> str:
    """What to name the session by: a client that looked at one conversation must not end the next one.

    An id of a conversation that has ended since is refused by the operation itself, in its own transaction.
    """
    if session_id is None:
        return session
    view = await call.operations.describe(call.caller, session)
    if view.session_id != session_id:
        raise Conflict(
            f"Session {session!r} has moved on to another conversation.",
            "Look at it again first.",
            key=session,
        )
    return session_id


class Delete(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    delete_transcript: bool = True
    expected_session_id: str | None = None
    emit_lifecycle_hooks: bool = False
    idempotency_key: IdempotencyKey | None = None


@method("sessions.delete", ADMIN, Delete, waits=True)
async def delete(call: Call, params: Delete) -> dict[str, Any]:
    """Without `deleteTranscript` the session is archived instead: a transcript without its session cannot be found.

    Archiving again changes nothing, so that a key adds nothing to it.
    """
    session, expected = named(params.key, params.agent_id), params.expected_session_id
    if params.delete_transcript:
        deleted = await call.operations.delete(
            call.caller, session, key=params.idempotency_key, expected=expected
        )
    else:
        session = await _expected(call, session, expected)
        await call.operations.patch(call.caller, session, Patch(archived=True))
        deleted = False
    return {"ok": True, "key": params.key, "deleted": deleted, "archived": []}


class Compact(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    max_lines: Annotated[int, Meta(ge=1)] = 400
    idempotency_key: IdempotencyKey | None = None


@method("sessions.compact", ADMIN, Compact)
async def compact(call: Call, params: Compact) -> dict[str, Any]:
    session = named(params.key, params.agent_id)
    done = await call.operations.compact(call.caller, session, params.max_lines, key=params.idempotency_key)
    reason = {"reason": done.reason} if done.reason else {}
    return {"ok": True, "key": params.key, "compacted": done.compacted, "kept": done.kept, **reason}


class Said(Params, frozen=True):
    key: Key
    message: str
    agent_id: str | None = None
    thinking: str | None = None
    attachments: list[Attachment] = []
    timeout_ms: chat.Milliseconds | None = None
    idempotency_key: IdempotencyKey | None = None


class Send(Said, frozen=True):
    """With `fromSessionKey` it is one session that sends to another, and what follows is for that."""

    from_session_key: Key | None = None
    timeout_seconds: Annotated[float, Meta(ge=0, le=3600)] | None = None
    reply_back: Annotated[int, Meta(ge=0, le=5)] | None = None
    announce: Literal["target", "none"] | None = None


def _awaits_reply(params: Send) -> bool:
    return params.from_session_key is not None and params.timeout_seconds != 0


@method("sessions.send", WRITE, Send, waits=_awaits_reply)
async def send(call: Call, params: Send) -> dict[str, Any] | Sent:
    """As chat.send, to a session that exists; or an exchange between two of them."""
    session = named(params.key, params.agent_id)
    if params.from_session_key is not None:
        return await call.operations.send(
            call.caller, _exchange(params, session), requester=params.from_session_key
        )
    for field in ("timeout_seconds", "reply_back", "announce"):
        if getattr(params, field) is not None:
            name = _camel(field)
            raise InvalidInput(f"{name!r} is for an exchange.", "Pass fromSessionKey, too.", field=name)
    await call.operations.describe(call.caller, session)
    return await chat.spoken(call, _message(params, session))


def _exchange(params: Send, session: str) -> Exchange:
    for field in ("thinking", "attachments", "timeout_ms"):
        if getattr(params, field):
            name = _camel(field)
            raise InvalidInput(
                f"{name!r} cannot be sent from one session to another.", "Leave it out.", field=name
            )
    return Exchange(
        session=session,
        message=params.message,
        idempotency_key=params.idempotency_key,
        reply_back=params.reply_back,
        announce=params.announce or "target",
        timeout_seconds=TIMEOUT if params.timeout_seconds is None else params.timeout_seconds,
    )


def _camel(field: str) -> str:
    return msgspec.structs.fields(Send)[Send.__struct_fields__.index(field)].encode_name


@method("sessions.steer", WRITE, Said, waits=True)
async def steer(call: Call, params: Said) -> dict[str, Any]:
    """Stop what is being answered and say this instead; if it cannot be said, nothing is stopped."""
    message = _message(params, named(params.key, params.agent_id))
    accepted, stopped = await call.operations.steer(call.caller, message)
    return {**chat.receipt(call, accepted), "interruptedActiveRun": bool(stopped)}


def _message(params: Said, session: str) -> Message:
    return Message(
        session=session,
        content=attachments.content(params.message, params.attachments),
        idempotency_key=params.idempotency_key or str(uuid.uuid4()),
        thinking=params.thinking or None,
        timeout_seconds=params.timeout_ms / 1000 if params.timeout_ms else None,
    )


class Abort(Params, frozen=True):
    key: Key | None = None
    run_id: str | None = None
    agent_id: str | None = None
    clear_queued: bool = False


@method("sessions.abort", WRITE, Abort)
async def abort(call: Call, params: Abort) -> dict[str, Any]:
    if params.key is None and params.run_id is None:
        raise InvalidInput("Either key or runId is required.", "Pass one.", field="key")
    session = (
        named(params.key, params.agent_id)
        if params.key
        else rows.shown((await call.operations.run(call.caller, params.run_id or "")).session_key)
    )
    stopped = await call.operations.stop(call.caller, session, params.run_id)
    aborted = stopped.run_ids[0] if stopped.run_ids else None
    return {"ok": True, "abortedRunId": aborted, "status": "aborted" if aborted else "no-active-run"}


class Usage(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    tree: bool = False


@method("sessions.usage", READ, Usage)
async def usage(call: Call, params: Usage) -> dict[str, Any]:
    lines = await call.operations.usage(call.caller, named(params.key, params.agent_id), tree=params.tree)
    known = [line.cost for line in lines]
    return {
        "key": params.key,
        "models": lines,
        "totals": {
            "input": sum(line.input for line in lines),
            "output": sum(line.output for line in lines),
            "cacheRead": sum(line.cache_read for line in lines),
            "cacheWrite": sum(line.cache_write for line in lines),
            "cost": None if None in known else sum(cost for cost in known if cost is not None),
        },
    }


@method("sessions.subscribe", READ)
async def subscribe(call: Call, params: Nothing) -> dict[str, Any]:
    call.connection.every_session = True
    return {"subscribed": True}


@method("sessions.unsubscribe", READ)
async def unsubscribe(call: Call, params: Nothing) -> dict[str, Any]:
    call.connection.every_session = False
    return {"subscribed": False}


class Messages(Params, frozen=True):
    key: Key
    agent_id: str | None = None
    after_seq: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    session_id: str | None = None
    """The conversation that `afterSeq` counts in; if another one goes on now, there is a gap."""
    include_approvals: bool = False


@method("sessions.messages.subscribe", READ, Messages)
async def messages_subscribe(call: Call, params: Messages) -> dict[str, Any]:
    session = named(params.key, params.agent_id)
    try:
        await call.operations.describe(call.caller, session)
    except NotFound:  # clients subscribe to the main session before anything was said in it
        if WRITE not in call.caller.scopes:
            raise
        await call.operations.open(call.caller, session)
    return await call.hub.subscriptions.add(call.connection, session, params.after_seq, params.session_id)


class MessagesEnd(Params, frozen=True):
    key: Key
    agent_id: str | None = None


@method("sessions.messages.unsubscribe", READ, MessagesEnd)
async def messages_unsubscribe(call: Call, params: MessagesEnd) -> dict[str, Any]:
    view = await call.operations.describe(call.caller, named(params.key, params.agent_id))
    call.hub.subscriptions.remove(call.connection, view.key)
    return {"subscribed": False, "key": view.key}
