"""Who may do what, at every door: one table against every method, every route, every scope and every way to log in."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.routing import Route

from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import AntiphonError
from antiphon.gateway.http import openapi
from antiphon.gateway.http.routes import HttpRoutes
from antiphon.gateway.methods import METHODS_BY_NAME
from antiphon.operations.jobs import JobSpec, parse_job_input
from antiphon.operations.operations import Operations
from antiphon.operations.types import ListFilter, SpawnRequest
from support.app_fixture import BOUND, MAIN, OPERATOR, make_tool, wait_until
from support.databases import dump_database, query_database
from support.gateway_http import ALL_ENDPOINTS, HOOK_TOKEN
from support.gateway_ws import (
    ADMIN,
    READ,
    WRITE,
    Answer,
    Client,
    GatewayFixture,
    connect_params,
    open_gateway,
)

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("V3", "W7", "SEC4")]

INDEX = ("message_words", "search_cursor")
APPROVALS = "operator.approvals"
SPARE = "agent:main:dashboard:spare"
SEND = {"message": "words", "idempotencyKey": "k"}
JOB = {
    "name": "n",
    "schedule": {"kind": "every", "everyMs": 10**9},
    "payload": {"kind": "agentTurn", "message": "x"},
}

# What each method needs, as documented, and arguments with which it would do something.
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "health": (READ, {}),
    "status": (READ, {}),
    "system-presence": (READ, {}),
    "config.get": (READ, {}),
    "agents.list": (READ, {}),
    "agent.identity.get": (READ, {"sessionKey": MAIN}),
    "models.list": (READ, {}),
    "commands.list": (READ, {}),
    "channels.status": (READ, {}),
    "question.list": (READ, {}),
    "logs.tail": (READ, {}),
    "tools.catalog": (READ, {}),
    "mcp.status": (READ, {}),
    "tools.effective": (READ, {"sessionKey": MAIN}),
    "sessions.list": (READ, {}),
    "sessions.resolve": (READ, {"key": MAIN}),
    "sessions.preview": (READ, {"keys": [MAIN]}),
    "sessions.describe": (READ, {"key": MAIN}),
    "sessions.search": (READ, {"query": "before"}),
    "sessions.get": (READ, {"key": MAIN}),
    "sessions.history": (READ, {"key": MAIN}),
    "sessions.conversations": (READ, {"key": MAIN}),
    "sessions.restore": (ADMIN, {"sessionId": "nobody"}),
    "sessions.usage": (READ, {"key": MAIN}),
    "sessions.subscribe": (READ, {}),
    "sessions.unsubscribe": (READ, {}),
    "sessions.messages.subscribe": (READ, {"key": MAIN, "afterSeq": 0}),
    "sessions.messages.unsubscribe": (READ, {"key": MAIN}),
    "chat.history": (READ, {"sessionKey": MAIN}),
    "chat.startup": (READ, {"sessionKey": MAIN}),
    "chat.metadata": (READ, {}),
    "agent.wait": (READ, {"runId": "first", "timeoutMs": 0}),
    "cron.list": (READ, {}),
    "cron.status": (READ, {}),
    "cron.runs": (READ, {"id": "job"}),
    "subagents.list": (READ, {"sessionKey": MAIN}),
    "subagents.report": (READ, {"runId": "dead"}),
    "agents.spawnable": (READ, {}),
    "exchanges.list": (READ, {"sessionKey": MAIN}),
    "exchanges.get": (READ, {"id": "none"}),
    "deliveries.list": (READ, {}),
    "chat.send": (WRITE, {"sessionKey": MAIN, **SEND}),
    "chat.abort": (WRITE, {"sessionKey": MAIN}),
    "agent": (WRITE, {"sessionKey": MAIN, **SEND, "idempotencyKey": "k2"}),
    "send": (WRITE, {"to": "x", "idempotencyKey": "k3"}),
    "sessions.create": (WRITE, {"key": "agent:main:dashboard:new", "message": "x"}),
    "sessions.send": (WRITE, {"key": SPARE, **SEND, "idempotencyKey": "k4"}),
    "sessions.spawn": (WRITE, {"task": "x", "requesterSessionKey": SPARE, "idempotencyKey": "k6"}),
    "sessions.steer": (WRITE, {"key": SPARE, **SEND, "idempotencyKey": "k5"}),
    "sessions.abort": (WRITE, {"key": SPARE}),
    "tools.invoke": (WRITE, {"name": "peek", "args": {"key": f"{SPARE}-1"}, "sessionKey": f"{SPARE}-1"}),
    "sessions.patch": (WRITE, {"key": SPARE, "label": "changed"}),
    "exec.approval.list": (APPROVALS, {}),
    "exec.approval.resolve": (APPROVALS, {"id": "none", "decision": "deny"}),
    "exec.approval.waitDecision": (APPROVALS, {"id": "none"}),
    "exec.approval.grants": (APPROVALS, {}),
    "exec.approval.revoke": (APPROVALS, {"id": "none"}),
    "deliveries.retry": (ADMIN, {"key": "task:dead"}),
    "pairing.list": (ADMIN, {}),
    "pairing.approve": (ADMIN, {"channel": "telegram", "code": "ABCDEFGH"}),
    "pairing.revoke": (ADMIN, {"channel": "telegram", "sender": "7"}),
    "chat.inject": (ADMIN, {"sessionKey": MAIN, "message": "x"}),
    "sessions.reset": (ADMIN, {"key": SPARE}),
    "sessions.compact": (ADMIN, {"key": MAIN, "maxLines": 1}),
    "sessions.delete": (ADMIN, {"key": SPARE}),
    "cron.add": (ADMIN, {**JOB, "name": "another"}),
    "cron.update": (ADMIN, {"id": "job", "patch": {"enabled": False}}),
    "cron.run": (ADMIN, {"id": "job"}),
    "cron.remove": (ADMIN, {"id": "job"}),
}  # fmt: skip

NOTHING_THERE = (  # no channel, earlier conversation, exchange, approval or grant
    *("send", "sessions.restore", "exchanges.get"),
    *("exec.approval.resolve", "exec.approval.waitDecision", "exec.approval.revoke"),
    *("pairing.approve", "pairing.revoke"),
)
CHAT = {"model": "antiphon", "messages": [{"role": "user", "content": "hi"}]}
# What each route needs: a scope, nothing, or the token of hooks.
ROUTES: dict[tuple[str, str], tuple[str, Any]] = {
    ("GET", "/"): ("nobody", None),
    ("GET", "/healthz"): ("nobody", None),
    ("GET", "/health"): ("nobody", None),
    ("GET", "/readyz"): ("nobody", None),
    ("GET", "/ready"): ("nobody", None),
    ("GET", "/openapi.json"): (READ, None),
    ("GET", "/metrics"): (READ, None),
    ("GET", "/sessions/{key:path}/history"): (READ, None),
    ("GET", "/v1/models"): (READ, None),
    ("POST", "/mcp"): (
        READ,
        {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "sessions_list"}},
    ),
    ("POST", "/sessions/{key:path}/kill"): (WRITE, {}),
    ("POST", "/tools/invoke"): (
        WRITE,
        {"tool": "peek", "args": {"key": f"{SPARE}-2"}, "sessionKey": f"{SPARE}-2"},
    ),
    ("POST", "/v1/chat/completions"): (WRITE, CHAT),
    ("POST", "/v1/responses"): (WRITE, {"model": "antiphon", "input": "hi"}),
    ("POST", "/hooks/agent"): ("hook", {"message": "hi"}),
    ("POST", "/hooks/wake"): ("hook", {"text": "hi"}),
}

CLOSURE: dict[str | None, set[str]] = {
    None: set(),
    READ: {READ},
    WRITE: {READ, WRITE},
    ADMIN: {READ, WRITE, ADMIN, APPROVALS},
    APPROVALS: {APPROVALS},
}
MODES: dict[str, dict[str, Any]] = {
    "token": {},
    "password": {"mode": "password", "password": "open sesame"},
    "none": {"mode": "none"},
}


def test_every_method_is_in_the_table_with_the_scope_it_has() -> None:
    assert {name: scope for name, (scope, _) in TABLE.items()} == {
        name: method.scope for name, method in METHODS_BY_NAME.items()
    }


def test_every_parameter_set_of_the_table_would_be_accepted() -> None:
    for name, (_, params) in TABLE.items():
        import msgspec

        METHODS_BY_NAME[name].decoder.decode(msgspec.json.encode(params))


async def test_every_route_is_in_the_table(gateway: GatewayFixture) -> None:
    found: set[tuple[str, str]] = set()
    for route in HttpRoutes(gateway.served.gateway).routes:
        assert isinstance(route, Route)
        methods: dict[str, Any] = route.endpoint._endpoints  # pyright: ignore
        found |= {(method, route.path) for method in methods if method != "HEAD"}
    assert found == set(ROUTES)
    documented = {
        (method.upper(), path)
        for path, operations in openapi.build_document()["paths"].items()
        for method in operations
    }
    plain = {(method, path.replace("{key:path}", "{key}")) for method, path in ROUTES}
    assert documented <= plain
    assert plain - documented <= {("GET", "/health"), ("GET", "/ready"), ("POST", "/mcp")}


# --- the stage: a gateway with something in it that could be changed ---


async def _peek(operations: Operations, call: ToolRequest) -> ToolOutput:
    """Reads a session and lists sessions as the session that calls."""
    try:
        page = await operations.transcripts.read(call.caller, call.arguments["key"], HistoryFilter())
        listed = await operations.sessions.list(call.caller, ListFilter())
    except AntiphonError as error:
        return ToolOutput(text=str(error), is_error=True)
    keys = [view.key for view in listed.sessions]
    return ToolOutput(text=f"{page.total}", details={"listed": keys})


@asynccontextmanager
async def _stage(path: Path, mode: str) -> AsyncGenerator[GatewayFixture]:
    settings = {**ALL_ENDPOINTS, "gateway": {**ALL_ENDPOINTS["gateway"], "auth": MODES[mode]}}
    async with open_gateway(
        path,
        settings=settings,
        tools=lambda operations: [
            make_tool("peek", lambda call: _peek(operations, call), has_side_effects=False)
        ],
    ) as gateway:
        from antiphon.operations.types import IncomingMessage

        message = IncomingMessage(session=MAIN, content="before", idempotency_key="first")
        await gateway.operations.messages.submit(OPERATOR, message)
        assert (await gateway.operations.runs.wait(OPERATOR, "first", BOUND)).has_ended
        await gateway.operations.sessions.open(OPERATOR, SPARE)
        await _leave_something_undelivered(gateway)
        await gateway.app.operations.jobs.add(OPERATOR, parse_job_input(JobSpec, JOB))
        await wait_until(lambda: _is_quiet(gateway))
        yield gateway


async def _is_quiet(gateway: GatewayFixture) -> bool:
    """Whether everything that was begun has come to its end, so that only requests change rows from here on."""
    (left,) = query_database(
        gateway.database,
        "SELECT (SELECT count(*) FROM runs WHERE ended_at IS NULL)"
        " + (SELECT count(*) FROM tasks WHERE phase <> 'settled' OR announced = 'pending')"
        " + (SELECT count(*) FROM deliveries WHERE settled_at IS NULL)"
        " + (SELECT count(*) FROM sessions WHERE state <> 'idle') AS n",
    )
    return left["n"] == 0


async def _leave_something_undelivered(gateway: GatewayFixture) -> None:
    """A report for a chat of a channel that is not there."""
    wanted = SpawnRequest(task="x", idempotency_key="dead")
    await gateway.operations.subagents.spawn(OPERATOR, wanted, requester="agent:main:telegram:group:7")

    async def given_up() -> bool:
        return "dead" in (await gateway.operations.deliveries.list(OPERATOR)).count_by_state

    await wait_until(given_up)


def _changed(gateway: GatewayFixture, before: dict[str, list[tuple[Any, ...]]]) -> list[str]:
    """The tables that are not as they were; the index of words is brought up to date whenever there is time."""
    now = dump_database(gateway.database)
    return [name for name in now if now[name] != before.get(name) and not name.startswith(INDEX)]


def _lacks(answer: Answer, scope: str) -> bool:
    return not answer.ok and answer.error["message"] == f"missing scope: {scope}"


@asynccontextmanager
async def _entered(gateway: GatewayFixture, mode: str, scope: str | None) -> AsyncGenerator[Client]:
    """A client with that scope: from its token's record where there are tokens, else from what it asks for."""
    async with gateway.connect_unauthenticated() as client:
        asked = [] if scope is None else [scope]
        auth = {"token": gateway.owner} if mode == "token" else {"password": "open sesame"}
        params = connect_params(auth=auth if mode != "none" else {}, scopes=asked)
        if mode == "token" and scope is not None:
            params |= {"auth": {"token": gateway.issue(scope)}, "scopes": [ADMIN, "operator.everything"]}
        await client.call("connect", **params)
        yield client


async def _arguments(gateway: GatewayFixture, name: str) -> dict[str, Any]:
    params = dict(TABLE[name][1])
    if params.get("id") == "job":
        params["id"] = (await gateway.app.operations.jobs.list(OPERATOR, include_disabled=True))[0].id
    return params


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scope", CLOSURE)
async def test_every_method_does_what_the_table_says_and_nothing_when_refused(
    tmp_path: Path, mode: str, scope: str | None
) -> None:
    async with _stage(tmp_path, mode) as gateway, _entered(gateway, mode, scope) as client:
        before = dump_database(gateway.database)
        refused = [name for name, (needed, _) in TABLE.items() if needed not in CLOSURE[scope]]
        for name in refused:
            answer = await client.ask(name, await _arguments(gateway, name))
            assert _lacks(answer, TABLE[name][0]), (name, answer)
            assert _changed(gateway, before) == [], f"{name} was refused and changed something"
        for name in (name for name in TABLE if name not in refused):
            needed, _ = TABLE[name]
            answer = await client.ask(name, await _arguments(gateway, name))
            assert answer.ok or name in NOTHING_THERE, (name, answer)
            if needed == READ:
                assert _changed(gateway, before) == [], f"{name} only reads and changed something"
        if scope in (WRITE, ADMIN):  # what is not refused does do something, or this would prove nothing
            assert _changed(gateway, before)


@pytest.mark.parametrize("scope", [READ, WRITE, None])
async def test_commands_in_texts_and_other_side_doors_need_what_the_front_door_needs(
    tmp_path: Path, scope: str | None
) -> None:
    async with _stage(tmp_path, "token") as gateway, _entered(gateway, "token", scope) as client:
        before = dump_database(gateway.database)
        words = ("/new", "/reset", " /RESET ", *(("/stop", "/send off") if scope != WRITE else ()))
        for word in words:
            for name, key in (
                ("chat.send", "sessionKey"),
                ("agent", "sessionKey"),
            ):
                answer = await client.ask(
                    name, {key: MAIN, "message": word, "idempotencyKey": f"{word}{name}"}
                )
                assert _lacks(answer, ADMIN if scope == WRITE else WRITE), (word, name, answer)
        for policy in ("allow", "deny", None):  # who may write may name a session, not open or shut it
            answer = await client.ask("sessions.patch", {"key": MAIN, "label": "x", "sendPolicy": policy})
            assert _lacks(answer, ADMIN if scope == WRITE else WRITE), (policy, answer)
        assert _changed(gateway, before) == []


async def test_without_a_scope_what_exists_and_what_does_not_look_alike(tmp_path: Path) -> None:
    async with _stage(tmp_path, "token") as gateway, _entered(gateway, "token", None) as client:
        for name, (_, params) in TABLE.items():
            swapped = {
                key: "agent:main:dashboard:never" if value in (MAIN, SPARE) else value
                for key, value in params.items()
            }
            one, other = await client.ask(name, params), await client.ask(name, swapped)
            assert one == other, name


# --- HTTP ---


def _headers(gateway: GatewayFixture, mode: str, scope: str | None) -> dict[str, str]:
    if mode == "none":
        return {}
    secret = "open sesame" if mode == "password" else gateway.issue(scope) if scope else "wrong"
    return {"Authorization": f"Bearer {secret}"}


async def _request(
    http: httpx2.AsyncClient, route: tuple[str, str], headers: dict[str, str]
) -> httpx2.Response:
    method, path = route
    body = ROUTES[route][1]
    return await http.request(
        method, path.replace("{key:path}", MAIN), headers=headers, **({} if body is None else {"json": body})
    )


@pytest.mark.parametrize(
    ("mode", "scope"),
    [
        ("token", None),
        ("token", READ),
        ("token", WRITE),
        ("token", ADMIN),
        ("password", ADMIN),
        ("none", ADMIN),
    ],
)
async def test_every_route_does_what_the_table_says_and_nothing_when_refused(
    tmp_path: Path, mode: str, scope: str | None
) -> None:
    async with _stage(tmp_path, mode) as gateway, gateway.http() as http:
        http.headers.clear()
        http.headers["Accept"] = "*/*"
        headers = _headers(gateway, mode, scope)
        before = dump_database(gateway.database)
        for route, (needed, _) in ROUTES.items():
            if needed not in (*CLOSURE[scope], "nobody"):
                response = await _request(http, route, headers)
                known = scope is not None and needed != "hook"
                assert response.status_code == (403 if known else 401), (route, response.text)
                assert needed in response.text or not known
                assert _changed(gateway, before) == [], f"{route} was refused and changed something"
        for route, (needed, _) in ROUTES.items():
            if needed in (*CLOSURE[scope], "nobody"):
                response = await _request(http, route, headers)
                assert response.status_code == 200, (route, response.text)
                if needed in (READ, "nobody"):
                    assert _changed(gateway, before) == [], f"{route} only reads and changed something"


@pytest.mark.requirement("SEC2")
@pytest.mark.parametrize("mode", ["token", "password"])
async def test_nothing_but_what_is_public_is_answered_without_credentials(tmp_path: Path, mode: str) -> None:
    async with _stage(tmp_path, mode) as gateway, gateway.http() as http:
        http.headers.clear()
        http.headers["Accept"] = "*/*"
        before = dump_database(gateway.database)
        for headers in (
            {},
            {"Authorization": "Basic eDp5"},
            {"Authorization": "Bearer"},
            {"X-Forwarded-User": "root"},
        ):
            for route, (needed, _) in ROUTES.items():
                status = (await _request(http, route, headers)).status_code
                assert status == (200 if needed == "nobody" else 401), (route, headers)
        assert _changed(gateway, before) == []


async def test_the_token_of_hooks_opens_hooks_and_nothing_else(tmp_path: Path) -> None:
    async with _stage(tmp_path, "token") as gateway, gateway.http(HOOK_TOKEN) as http:
        for route, (needed, _) in list(ROUTES.items())[::-1]:  # hooks first: wrong tokens are counted
            status = (await _request(http, route, {})).status_code
            assert status == (200 if needed in ("hook", "nobody") else 401), route
        async with gateway.connect_unauthenticated() as client:
            answer = await client.ask("connect", connect_params(auth={"token": HOOK_TOKEN}))
            assert not answer.ok


# --- sessions among themselves ---


@pytest.mark.requirement("V1", "G30")
@pytest.mark.parametrize("door", ["ws", "http"])
async def test_what_an_agent_may_not_see_looks_to_it_like_what_is_not_there(
    tmp_path: Path, door: str
) -> None:
    """Through either door a tool acts as its session, and reaches what that session reaches."""
    async with _stage(tmp_path, "token") as gateway, gateway.client() as client, gateway.http() as http:
        await gateway.operations.sessions.open(OPERATOR, SPARE)
        await _leave_something_undelivered(gateway)

        async def peek(key: str) -> tuple[bool, str, list[str]]:
            args = {"key": key}
            if door == "ws":
                told = await client.call("tools.invoke", name="peek", args=args, sessionKey=SPARE)
                good, bad = told.get("output"), told.get("error")
            else:
                body = {"tool": "peek", "args": args, "sessionKey": SPARE}
                told = (await http.post("/tools/invoke", json=body)).json()
                good, bad = told.get("result"), told.get("error")
                if good and isinstance(good["details"], dict) and good["details"].get("status") == "error":
                    bad = {"message": good["details"]["error"]}
            if bad:
                return False, bad["message"].replace(key, "<key>"), []
            return True, good["content"][0]["text"], good["details"]["listed"]

        hidden, missing, own = await peek(MAIN), await peek("agent:main:dashboard:never"), await peek(SPARE)
        assert hidden == missing
        assert hidden[0] is False
        assert own == (True, "0", [SPARE])  # listed if and only if it can be read
