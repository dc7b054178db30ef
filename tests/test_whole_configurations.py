"""Configurations as people have them, each with the real gateway: a conversation with a tool call, and what it cost.

`tests/configs/` holds whole files in the form people write, and the documents show more. Only what belongs to the
writer's machine is replaced: addresses of providers by a stand-in on the loopback, the port, and where secrets are.
What is expected is worked out from the file as it is written, not by the code under test.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2
import pyjson5
import pytest

from antiphon.client import Client, Site
from channels.telegram.fake import TOKEN as TELEGRAM_TOKEN
from channels.telegram.fake import FakeTelegram
from cli.gateways import Gateway, token, up
from cli.terminal import BOUND, Program
from support.model_provider import Answer, Call, Provider, Received, Tokens
from support.sandboxes import make_sandboxes
from test_docs import list_blocks

Json = dict[str, Any]

FILES = sorted((Path(__file__).parent / "configs").glob("*.json5"))
DOCUMENTED = [
    pytest.param(text, id=f"{page}-{number}")
    for number, (page, text) in enumerate(list_blocks("json5"), start=1)
]
WRITTEN = [pytest.param(path.read_text("utf-8"), id=path.stem) for path in FILES]

FILES_AND_WEB = {"read", "write", "edit", "apply_patch", "web_fetch"}
SESSION_TOOLS = {
    "sessions_list", "sessions_history", "sessions_search", "session_status", "agents_list",
    "sessions_send", "sessions_spawn", "sessions_yield", "subagents",
}  # fmt: skip
MEMORY = {"memory_search", "memory_get"}
COMMANDS = {"exec", "process"}
TOOLS = SESSION_TOOLS | FILES_AND_WEB | MEMORY | COMMANDS | {"cron", "image"}
SUFFIXES = {"openai-responses": "/responses", "anthropic-messages": "/v1/messages"}
STEPS = (Tokens(1200, 40, cache_read=300), Tokens(1500, 60, cache_read=500))
REPLY = "One session is open: this one."
LOCAL: Json = {
    "baseUrl": "http://127.0.0.1:11434/v1",
    "models": [{"id": "m", "cost": {"input": 3, "output": 7}}],
}
CLERK = """
async def clerk(prompt):
    return f"noted: {prompt.messages[-1].content}"
"""
PYTHON_TOOL = next(text for _, text in list_blocks("python") if "@antiphon.tool" in text)


@dataclass(frozen=True)
class Prepared:
    """A configuration made to fit this machine, with the file as it was written beside it."""

    written: Json
    program: Program
    secrets: dict[str, str] = field(default_factory=dict[str, str])

    def secret(self, value: object) -> str | None:
        """What a secret of the file comes to."""
        if isinstance(value, dict):
            reference = cast("Json", value)
            source = reference.get("env") or reference.get("id") or reference.get("file")
            return self.secrets[source or reference["exec"][-1]]
        named = re.fullmatch(r"\$\{(\w+)\}", value) if isinstance(value, str) else None
        return self.secrets[named[1]] if named else cast("str | None", value)


@dataclass(frozen=True)
class Seat:
    """An agent and the model that is to answer for it."""

    agent: Json
    provider: str
    model: Json
    api: str
    base_url: str
    key: str | None
    headers: dict[str, str]


@pytest.mark.anyio
@pytest.mark.requirement("C", "G28")
@pytest.mark.parametrize("text", [*WRITTEN, *DOCUMENTED])
async def test_a_conversation_with_every_agent_of_a_configuration(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, text: str, *, has_sandbox: bool
) -> None:
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    async with Provider().running() as provider, FakeTelegram().running() as telegram:
        prepared = _prepare(program, text, provider.url, telegram.url)
        own_sandbox: Json = prepared.written.get("agents", {}).get("defaults", {}).get("sandbox", {})
        if own_sandbox.get("backend") == "docker":
            has_sandbox = await _has_containers(tmp_path, own_sandbox)
        with _up(prepared) as gateway:
            site = Site(gateway.url, _owner_secret(prepared))
            async with Client(_always(site)) as client:
                for seat in _seats(prepared):
                    await _converse(client, provider, prepared, seat, has_sandbox=has_sandbox)
                for agent in _functions(prepared.written):
                    assert await _say(client, _session(prepared.written, agent), "hello") == "noted: hello"
                await _use_the_clock(client, provider, prepared.written)
                await _use_the_hook(client, gateway, provider, prepared)
            assert gateway.stop() == 0
    assert _list_unexpected_lines(prepared.program.state / "antiphon.log") == []


async def _has_containers(state: Path, settings: Json) -> bool:
    status = await make_sandboxes(state / "sandboxes", **settings).find_status("main")
    return status.backend is not None


def _list_unexpected_lines(log: Path) -> list[str]:
    """The lines of a log, but for what this machine lacks: MCP servers of examples, and a sandbox."""
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    return [
        line
        for line in lines
        if (entry := json.loads(line))["logger"] != "antiphon.mcp.server_actor"
        and not entry["event"].startswith("No commands for ")
    ]


# --- fitting a file to this machine ---


def _prepare(program: Program, text: str, url: str, telegram_url: str) -> Prepared:
    written = cast("Json", pyjson5.decode(text))
    fitted = cast("Json", pyjson5.decode(text))
    providers = written.setdefault("models", {}).setdefault("providers", {})
    if not providers:  # the documents show parts of files
        providers["local"] = LOCAL
    fitted["models"] = json.loads(json.dumps(written["models"]))
    for name, settings in fitted["models"]["providers"].items():
        settings["baseUrl"] = url + urlsplit(_base_url(name, settings)).path
    _leave_the_cluster(fitted)
    if telegram := fitted.get("channels", {}).get("telegram"):
        telegram.pop("accounts", None)  # each would need a bot of its own
        telegram |= {"apiRoot": telegram_url, "botToken": TELEGRAM_TOKEN}
    program.state.mkdir(mode=0o700)
    secrets = dict(_place_secrets(fitted, program.state))
    program.configure(fitted)
    (program.home / "my_agents.py").write_text(CLERK)
    (program.state / "my_tools.py").write_text(PYTHON_TOOL)
    extra = {name: value for name, value in secrets.items() if name.isupper()}
    return Prepared(written, replace(program, extra={**extra, "PYTHONPATH": str(program.home)}), secrets)


def _base_url(name: str, provider: Json) -> str:
    public = "https://api.anthropic.com" if name == "anthropic" else "https://api.openai.com/v1"
    return provider.get("baseUrl") or public


def _leave_the_cluster(fitted: Json) -> None:
    """Databases and buses of others are in `tests/cluster` and `tests/cli/test_joining.py`."""
    fitted.pop("bus", None)
    for name in ("url", "password", "connections"):
        fitted.get("store", {}).pop(name, None)


def _place_secrets(value: object, state: Path) -> Iterator[tuple[str, str]]:
    """Puts a secret wherever a file says that one is; those from files are found by their relative path."""
    if isinstance(value, str) and (named := re.fullmatch(r"\$\{(\w+)\}", value)):
        yield named[1], f"the value of {named[1]}"
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _place_secrets(item, state)
    elif isinstance(value, dict):
        entries = cast("Json", value)
        if "env" in entries and isinstance(entries["env"], str):
            yield entries["env"], f"the value of {entries['env']}"
        elif entries.get("source") == "env":
            yield entries["id"], f"the value of {entries['id']}"
        elif isinstance(entries.get("file"), str) or isinstance(entries.get("exec"), list):
            name: str = entries["file"] if "file" in entries else entries["exec"][-1]
            file = state / name
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text(f"the text of {name}\n")
            file.chmod(0o600)
            yield name, f"the text of {name}"
        else:
            for item in entries.values():
                yield from _place_secrets(item, state)


@contextmanager
def _up(prepared: Prepared) -> Generator[Gateway]:
    checked = prepared.program.run("config", "check", "--json")
    assert checked.code == 0, checked.err
    with up(prepared.program) as gateway:
        yield gateway


def _owner_secret(prepared: Prepared) -> str | None:
    auth: Json = prepared.written.get("gateway", {}).get("auth", {})
    given = prepared.secret(auth.get("token") or auth.get("password"))
    return given or token(prepared.program)


def _always(site: Site) -> Any:
    async def find() -> Site:
        return site

    return find


# --- who is there, as the file says ---


def _agents(written: Json) -> list[Json]:
    return written.get("agents", {}).get("list") or [{"id": "main", "default": True}]


def _functions(written: Json) -> list[Json]:
    return [agent for agent in _agents(written) if agent.get("runtime", {}).get("type") == "function"]


def _session(written: Json, agent: Json) -> str:
    return "main" if agent.get("default") or len(_agents(written)) == 1 else f"agent:{agent['id']}:main"


def _seats(prepared: Prepared) -> Iterator[Seat]:
    written = prepared.written
    providers: Json = written["models"]["providers"]
    first = next(f"{name}/{provider['models'][0]['id']}" for name, provider in providers.items())
    for agent in _agents(written):
        if agent in _functions(written) or agent.get("runtime", {}).get("type") == "acp":
            continue  # a program, such as Codex, that is not on this machine
        choice = agent.get("model") or written.get("agents", {}).get("defaults", {}).get("model") or first
        name, _, model_id = (choice if isinstance(choice, str) else choice["primary"]).partition("/")
        provider: Json = providers[name]
        yield Seat(
            agent=agent,
            provider=name,
            model=next(model for model in provider["models"] if model["id"] == model_id),
            api=provider.get("api") or "openai-completions",
            base_url=_base_url(name, provider),
            key=prepared.secret(provider.get("apiKey")),
            headers={
                header: prepared.secret(value) or "" for header, value in provider.get("headers", {}).items()
            },
        )


def _offered(written: Json, seat: Seat) -> set[str]:
    """The tools that an agent's own session has, read once more from the lists as they stand in the file."""
    agent = seat.agent
    groups = {
        "group:runtime": COMMANDS,
        "group:media": {"image"},
        "group:fs": FILES_AND_WEB - {"web_fetch"},
        "group:web": {"web_fetch"},
        "group:sessions": SESSION_TOOLS - {"agents_list"},
        "group:agents": {"agents_list"},
        "group:memory": MEMORY,
        "group:automation": {"cron"},
        "group:messaging": {"message"},
        "group:openclaw": SESSION_TOOLS | MEMORY | {"web_fetch", "cron", "message", "image"},
    }
    messaging = {"sessions_list", "sessions_history", "sessions_send", "session_status", "message"}
    profiles = {"minimal": {"session_status"}, "messaging": messaging, "full": TOOLS | {"message"}}
    levels = [written.get("tools", {}), agent.get("tools", {})]
    profile: str = next((lists["profile"] for lists in reversed(levels) if "profile" in lists), "")
    found = profiles.get(profile, set(TOOLS))
    found = found.union(
        *(groups.get(name, {name}) for lists in levels for name in lists.get("alsoAllow", ()))
    )
    for lists in levels:
        if "allow" in lists:
            found &= set[str]().union(*(groups.get(name, {name}) for name in lists["allow"]))
        found -= set[str]().union(*(groups.get(name, {name}) for name in lists.get("deny", ())))
    sandbox: Json = {
        **written.get("agents", {}).get("defaults", {}).get("sandbox", {}),
        **agent.get("sandbox", {}),
    }
    if "image" not in seat.model.get("input", ()):
        found -= {"image"}
    if sandbox.get("mode") == "all":  # the session is a main session
        return found & (SESSION_TOOLS | FILES_AND_WEB | COMMANDS | {"image"}) - {"web_fetch"}
    return found | ({"weather"} if written.get("tools", {}).get("python") else set())


def _has_commands(written: Json, agent: Json, *, has_sandbox: bool) -> bool:
    own: Json = {**written.get("tools", {}).get("exec", {}), **agent.get("tools", {}).get("exec", {})}
    return own.get("security") != "deny" and (own.get("host") == "gateway" or has_sandbox)


@pytest.fixture(scope="module")
def has_sandbox(tmp_path_factory: pytest.TempPathFactory) -> bool:
    """Whether this machine can isolate commands."""
    sandboxes = make_sandboxes(tmp_path_factory.mktemp("sandbox"))
    return asyncio.run(sandboxes.find_status("main")).backend is not None


# --- the conversation ---


async def _converse(
    client: Client, provider: Provider, prepared: Prepared, seat: Seat, *, has_sandbox: bool
) -> None:
    first, second = STEPS
    provider.script(
        Answer(calls=(Call("sessions_list", '{"limit": 5}', "call_1"),), tokens=first),
        Answer(text=(REPLY[:9], REPLY[9:]), tokens=second),
    )
    before = len(provider.received)
    session = _session(prepared.written, seat.agent)
    assert await _say(client, session, "What is going on?") == REPLY
    asked, told = provider.received[before:]
    for request in (asked, told):
        _check_request(request, seat)
    missing = set[str]() if _has_commands(prepared.written, seat.agent, has_sandbox=has_sandbox) else COMMANDS
    assert _tools_in(asked.body) == _offered(prepared.written, seat) - missing
    result = json.loads(_result_in(told.body))
    assert "main" in [row["key"] for row in result["sessions"]]
    await _check_usage(client, session, seat)


async def _say(client: Client, session: str, message: str) -> str | None:
    sent = await client.call(
        "chat.send", {"sessionKey": session, "message": message, "idempotencyKey": f"{session} {message}"}
    )
    ended = await client.call(
        "agent.wait", {"runId": sent["runId"], "timeoutMs": int(BOUND * 1000)}, seconds=BOUND
    )
    assert ended["status"] == "ok", ended.get("error")
    return ended["reply"]


def _check_request(request: Received, seat: Seat) -> None:
    path = urlsplit(seat.base_url).path + SUFFIXES.get(seat.api, "/chat/completions")
    assert (request.path, request.body["model"]) == (path, seat.model["id"])
    if seat.key is not None:
        sent = {
            request.headers.get("x-api-key"),
            request.headers.get("authorization", "").removeprefix("Bearer "),
        }
        assert seat.key in sent
    for name, value in seat.headers.items():
        assert request.headers[name.lower()] == value
    if "maxTokens" in seat.model:
        limits = {
            request.body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
        }
        assert seat.model["maxTokens"] in limits
    if instructions := seat.agent.get("instructions"):
        assert instructions in json.dumps(request.body, ensure_ascii=False)


def _tools_in(body: Json) -> set[str]:
    return {tool.get("name") or tool["function"]["name"] for tool in body["tools"]}


def _result_in(body: Json) -> str:
    """The result of the last tool call, in whichever dialect."""
    last: Json = (body.get("messages") or body["input"])[-1]
    content = last.get("output") or last["content"]
    while not isinstance(content, str):
        block: Json = content[-1]
        content = block.get("text") or block["content"]
    return content


async def _check_usage(client: Client, session: str, seat: Seat) -> None:
    usage = await client.call("sessions.usage", {"key": session})
    [line] = usage["models"]
    spent = {
        "input": sum(step.input for step in STEPS),
        "output": sum(step.output for step in STEPS),
        "cacheRead": sum(step.cache_read for step in STEPS),
        "cacheWrite": 0,
    }
    assert (line["provider"], line["model"]) == (seat.provider, seat.model["id"])
    assert {name: line[name] for name in spent} == spent
    if (prices := seat.model.get("cost")) is None:
        return
    if "cacheRead" in prices:
        cost = sum(spent[name] * prices.get(name, 0) for name in spent) / 1_000_000
        assert line["cost"] == pytest.approx(cost)
    else:
        assert line["cost"] is None  # a price that is not known makes no cost, rather than a wrong one


# --- what else a file turns on ---


async def _use_the_clock(client: Client, provider: Provider, written: Json) -> None:
    if not written.get("cron", {}).get("enabled"):
        return
    provider.script(Answer(text=("All quiet.",)))
    job = await client.call(
        "cron.add",
        {
            "name": "nightly",
            "schedule": {"kind": "cron", "expr": "0 3 * * *"},
            "sessionTarget": "isolated",
            "payload": {"kind": "agentTurn", "message": "Anything new?"},
            "delivery": {"mode": "none"},
        },
    )
    fired = await client.call("cron.run", {"id": job["id"], "mode": "force"})
    ended = await client.call("agent.wait", {"runId": fired["runId"]}, seconds=BOUND)
    assert (ended["status"], ended["reply"]) == ("ok", "All quiet.")


async def _use_the_hook(client: Client, gateway: Gateway, provider: Provider, prepared: Prepared) -> None:
    hooks: Json = prepared.written.get("hooks", {})
    if not hooks.get("enabled"):
        return
    provider.script(Answer(text=("Noted.",)))
    async with httpx2.AsyncClient(timeout=BOUND) as web:
        answer = await web.post(
            f"http://127.0.0.1:{gateway.port}{hooks.get('path', '/hooks')}/agent",
            headers={"Authorization": f"Bearer {prepared.secret(hooks['token'])}"},
            json={"message": "The build has failed.", "name": "forge"},
        )
    assert answer.status_code == 200, answer.text
    ended = await client.call("agent.wait", {"runId": answer.json()["runId"]}, seconds=BOUND)
    assert (ended["status"], ended["reply"]) == ("ok", "Noted.")
