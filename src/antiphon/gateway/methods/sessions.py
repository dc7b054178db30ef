"""Methods that find, describe and read sessions, and subscribe to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from antiphon.access import READ_SCOPE, WRITE_SCOPE
from antiphon.engine.sessions.transcripts import EntryRole, HistoryFilter
from antiphon.errors import Ambiguous, InvalidInput, NotFound
from antiphon.gateway import wire
from antiphon.gateway.methods import chat
from antiphon.gateway.methods.registry import MethodCall, NoParams, qualify_session_key, rpc_method
from antiphon.gateway.ws.frames import Params, SessionReference
from antiphon.operations.transcript_types import HistoryPage
from antiphon.operations.types import ListFilter, SessionView
from antiphon.store.listing import SESSION_KINDS

MAX_SESSIONS_PER_PAGE = 200
MAX_SESSIONS_PER_PREVIEW = 64  # read by one query
MAX_PREVIEW_CHARACTERS = 120  # of the last message in a list


class SessionListParams(Params, frozen=True):
    limit: Annotated[int, Meta(ge=1)] | None = None
    cursor: str | None = None
    offset: Annotated[int, Meta(ge=0)] = 0
    active_minutes: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    kinds: list[str] | None = None
    label: str | None = None
    spawned_by: str | None = None
    agent_id: str | None = None
    search: str | None = None
    archived: bool | Literal["all"] = False
    include_derived_titles: bool = False
    include_last_message: bool = False
    # Accepted without effect: no such sessions exist, and the order is fixed.
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
    # Filters.
    active_only: bool = False
    exclude_cron: bool = False
    exclude_system: bool = False
    exclude_subagents: bool = False


@rpc_method("sessions.list", READ_SCOPE, SessionListParams)
async def list_sessions(call: MethodCall, params: SessionListParams) -> dict[str, Any]:
    """List sessions, newest first. `nextCursor` is cheaper than `offset`, which has to skip rows."""
    limit = min(params.limit or MAX_SESSIONS_PER_PAGE, MAX_SESSIONS_PER_PAGE)
    filter = ListFilter(
        kinds=_choose_kinds(params),
        limit=limit,
        active_minutes=params.active_minutes or None,
        agent_id=params.agent_id,
        label=params.label,
        search=params.search or None,
        spawned_by=params.spawned_by,
        include_archived=bool(params.archived),
        cursor=params.cursor,
    )
    filter = await _skip_rows(call, filter, params.offset)
    page = await call.operations.sessions.list(call.caller, filter)
    found = page.sessions
    if params.active_only or params.exclude_subagents:
        found = [view for view in found if _matches_filters(view, params)]
    return {
        "ts": call.now,
        "path": call.gateway.database_path,
        "count": len(found),
        "limitApplied": limit,
        "hasMore": page.next_cursor is not None,
        "nextCursor": page.next_cursor,
        "nextOffset": params.offset + page.count if page.next_cursor else None,
        "defaults": chat.get_model_defaults(call),
        "sessions": await _build_rows(call, found, with_last_message=_wants_last_message(params)),
    }


def _wants_last_message(params: SessionListParams | SessionDescribeParams) -> bool:
    return params.include_last_message or params.include_derived_titles


async def _build_rows(
    call: MethodCall, found: Sequence[SessionView], *, with_last_message: bool
) -> list[wire.SessionRow]:
    if not with_last_message:
        return [wire.build_session_row(view) for view in found]
    rows: list[wire.SessionRow] = []
    for start in range(0, len(found), MAX_SESSIONS_PER_PREVIEW):
        part = found[start : start + MAX_SESSIONS_PER_PREVIEW]
        previews = await call.operations.transcripts.preview(
            call.caller, [view.key for view in part], 1, MAX_PREVIEW_CHARACTERS
        )
        for view, preview in zip(part, previews, strict=True):
            last_message = preview.items[-1].text if preview.items else None
            title = view.display_name or view.label or view.key
            rows.append(wire.build_session_row(view, last_message, title))
    return rows


def _choose_kinds(params: SessionListParams) -> list[str] | None:
    excluded = {"cron"} if params.exclude_cron else set[str]()
    excluded |= {"hook", "node"} if params.exclude_system else set[str]()
    if not excluded:
        return params.kinds
    return [kind for kind in params.kinds or SESSION_KINDS if kind not in excluded]


def _matches_filters(view: SessionView, params: SessionListParams) -> bool:
    """Return whether a row passes the filters without an index; a page may have fewer rows than its limit."""
    if params.active_only and view.state != "running":
        return False
    return not (params.exclude_subagents and ":subagent:" in view.key)


async def _skip_rows(call: MethodCall, filter: ListFilter, offset: int) -> ListFilter:
    """Return the filter moved past `offset` rows, page by page; at most 1000, beyond that clients use a cursor."""
    if offset > 1000:
        raise InvalidInput("'offset' is at most 1000.", "Continue with nextCursor.", field="offset")
    while offset > 0:
        page = await call.operations.sessions.list(
            call.caller, msgspec.structs.replace(filter, limit=min(offset, MAX_SESSIONS_PER_PAGE))
        )
        if page.next_cursor is None:
            return msgspec.structs.replace(filter, cursor="0|~")  # after the last row
        offset -= page.count
        filter = msgspec.structs.replace(filter, cursor=page.next_cursor)
    return filter


class SessionResolveParams(Params, frozen=True):
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


@rpc_method("sessions.resolve", READ_SCOPE, SessionResolveParams)
async def resolve_session(call: MethodCall, params: SessionResolveParams) -> dict[str, Any]:
    references = [value for value in (params.key, params.session_id, params.label) if value]
    if not references:
        raise InvalidInput("Either key, sessionId, or label is required.", "Pass one.", field="key")
    if len(references) > 1:
        raise InvalidInput(
            "Provide either key, sessionId, or label (not multiple).", "Pass one.", field="key"
        )
    try:
        view = await _find_session(call, params)
    except (NotFound, Ambiguous) as error:
        if params.allow_missing:
            return {"ok": False, "candidates": []}
        if isinstance(error, NotFound):
            what = (
                f"No session found with label: {params.label}"
                if params.label
                else f"No session found: {references[0]}"
            )
            raise NotFound(f"{what}.", "See sessions.list.") from None
        raise
    return {"ok": True, "key": view.key, "agentId": view.agent_id, "sessionId": view.session_id}


async def _find_session(call: MethodCall, params: SessionResolveParams) -> SessionView:
    if params.label is None:
        reference = (
            qualify_session_key(params.key, params.agent_id) if params.key else params.session_id or ""
        )
        return await call.operations.sessions.describe(call.caller, reference)
    # Not used as a reference: a label may look like a key.
    page = await call.operations.sessions.list(
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


class SessionPreviewParams(Params, frozen=True):
    keys: Annotated[list[SessionReference], Meta(min_length=1)]
    limit: Annotated[int, Meta(ge=1)] = 12
    max_chars: Annotated[int, Meta(ge=20)] = 240


@rpc_method("sessions.preview", READ_SCOPE, SessionPreviewParams)
async def preview_sessions(call: MethodCall, params: SessionPreviewParams) -> dict[str, Any]:
    found = await call.operations.transcripts.preview(
        call.caller, params.keys[:64], min(params.limit, 50), min(params.max_chars, 2000)
    )
    return {"ts": call.now, "previews": found}


class SessionDescribeParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    include_derived_titles: bool = False
    include_last_message: bool = False


@rpc_method("sessions.describe", READ_SCOPE, SessionDescribeParams)
async def describe_session(call: MethodCall, params: SessionDescribeParams) -> dict[str, Any]:
    try:
        view = await call.operations.sessions.describe(
            call.caller, qualify_session_key(params.key, params.agent_id)
        )
    except NotFound:
        return {"session": None}
    rows = await _build_rows(call, [view], with_last_message=_wants_last_message(params))
    active = await call.operations.runs.list_unfinished(call.caller, view.key)
    return {"session": msgspec.structs.replace(rows[0], active_run_ids=active)}


class SessionSearchParams(Params, frozen=True):
    query: Annotated[str, Meta(min_length=1, max_length=4096)]
    limit: Annotated[int, Meta(ge=1, le=25)] = 10
    agent_id: str | None = None
    session_keys: Annotated[list[SessionReference], Meta(min_length=1, max_length=200)] | None = None


@rpc_method("sessions.search", READ_SCOPE, SessionSearchParams)
async def search_sessions(call: MethodCall, params: SessionSearchParams) -> dict[str, Any]:
    only = params.session_keys
    page = await call.operations.search.find(
        call.caller,
        params.query,
        limit=params.limit,
        agent_id=params.agent_id,
        sessions=None if only is None else [qualify_session_key(key, params.agent_id) for key in only],
    )
    found: dict[str, Any] = msgspec.to_builtins(page)
    for hit in found["results"]:
        hit["messageSeq"] = hit.pop("seq")
    return found


class SessionGetParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200


@rpc_method("sessions.get", READ_SCOPE, SessionGetParams)
async def get_session_messages(call: MethodCall, params: SessionGetParams) -> dict[str, Any]:
    filter = HistoryFilter(limit=params.limit, include_tools=True)
    page = await call.operations.transcripts.read(
        call.caller, qualify_session_key(params.key, params.agent_id), filter
    )
    messages, _ = chat.fit_history_bytes([wire.format_history_item(item) for item in page.messages])
    return {"messages": messages, "sessionId": page.session_id, "hasMore": page.has_more}


class SessionHistoryParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 50
    include_tools: bool = False
    before: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    after: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    roles: Annotated[tuple[EntryRole, ...], Meta(min_length=1, max_length=10)] | None = None
    since: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    errors: bool = False
    tool: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    without_internal: bool = False


@rpc_method("sessions.history", READ_SCOPE, SessionHistoryParams)
async def get_session_history(call: MethodCall, params: SessionHistoryParams) -> HistoryPage:
    """Return raw entries with their numbers; `key` may be the id of an earlier conversation."""
    filter = HistoryFilter(
        limit=params.limit,
        include_tools=params.include_tools,
        before=params.before,
        after=params.after,
        roles=params.roles,
        since=params.since,
        errors=params.errors,
        tool=params.tool,
        without_internal=params.without_internal,
    )
    return await call.operations.transcripts.read(
        call.caller, qualify_session_key(params.key, params.agent_id), filter
    )


class SessionConversationsParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None


@rpc_method("sessions.conversations", READ_SCOPE, SessionConversationsParams)
async def list_conversations(call: MethodCall, params: SessionConversationsParams) -> dict[str, Any]:
    """List the conversations of a session, newest first; each can be read and restored by its id."""
    found = await call.operations.conversations.list(
        call.caller, qualify_session_key(params.key, params.agent_id)
    )
    return {"conversations": found}


class SessionUsageParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    tree: bool = False


@rpc_method("sessions.usage", READ_SCOPE, SessionUsageParams)
async def get_session_usage(call: MethodCall, params: SessionUsageParams) -> dict[str, Any]:
    lines = await call.operations.transcripts.get_usage(
        call.caller, qualify_session_key(params.key, params.agent_id), tree=params.tree
    )
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


@rpc_method("sessions.subscribe", READ_SCOPE)
async def subscribe_to_sessions(call: MethodCall, params: NoParams) -> dict[str, Any]:
    call.hub.connections.subscribe_to_sessions(call.connection)
    return {"subscribed": True}


@rpc_method("sessions.unsubscribe", READ_SCOPE)
async def unsubscribe_from_sessions(call: MethodCall, params: NoParams) -> dict[str, Any]:
    call.hub.connections.session_subscribers.discard(call.connection)
    return {"subscribed": False}


class MessagesSubscribeParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None
    after_seq: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    session_id: str | None = None
    """The conversation that `afterSeq` belongs to. If the session has another one now, the client gets a gap event."""
    include_approvals: bool = False


@rpc_method("sessions.messages.subscribe", READ_SCOPE, MessagesSubscribeParams)
async def subscribe_to_messages(call: MethodCall, params: MessagesSubscribeParams) -> dict[str, Any]:
    session = qualify_session_key(params.key, params.agent_id)
    try:
        await call.operations.sessions.describe(call.caller, session)
    except NotFound:  # clients subscribe to the main session before it exists
        if WRITE_SCOPE not in call.caller.scopes or not call.operations.sessions.is_main(
            call.caller, session
        ):
            raise
        await call.operations.sessions.open(call.caller, session)
    subscription = await call.hub.subscriptions.subscribe(
        call.connection, session, params.after_seq, params.session_id
    )
    call.hub.run_streams.send_from_beginning(call.connection, subscription["key"])
    return subscription


class MessagesUnsubscribeParams(Params, frozen=True):
    key: SessionReference
    agent_id: str | None = None


@rpc_method("sessions.messages.unsubscribe", READ_SCOPE, MessagesUnsubscribeParams)
async def unsubscribe_from_messages(call: MethodCall, params: MessagesUnsubscribeParams) -> dict[str, Any]:
    view = await call.operations.sessions.describe(
        call.caller, qualify_session_key(params.key, params.agent_id)
    )
    call.hub.subscriptions.unsubscribe(call.connection, view.key)
    return {"subscribed": False, "key": view.key}
