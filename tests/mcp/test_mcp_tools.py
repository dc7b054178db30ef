"""Tools of real MCP servers: what is offered, what a call returns, and what a server may see and say."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.config import parse
from antiphon.errors import ConfigError, McpServerUnavailable, ToolFailed
from antiphon.mcp import server_actor
from antiphon.mcp.listings import Listing, RawTool, build_listing, locate_directory
from antiphon.mcp.offers import list_offers
from antiphon.mcp.results import MAX_RESULT_CHARACTERS
from antiphon.tool_selection import ToolAudience
from cli.gateways import connect, send_and_wait, up
from cli.terminal import BOUND, Program
from support.mcp_servers import (
    MAIN,
    SCRIPTED_SERVER_FILE,
    describe_scripted_server,
    describe_stdio_server,
    open_client,
    run_http_server,
    wait_until,
)
from support.model_provider import Answer, Call, Provider
from support.sandboxes import hide_every_bubblewrap

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M1")]

NONCE = "0123456789ab"


async def test_stdio_and_http_servers_answer_alike(tmp_path: Path) -> None:
    async with run_http_server() as http:
        servers = {"s": describe_stdio_server(), "h": {"url": http.url}}
        async with open_client(tmp_path, servers) as client:
            await client.prepare()
            assert client.states == {"s": "ready", "h": "ready"}
            for server in ("s", "h"):
                assert (await client.call(f"mcp__{server}__add", a=1, b=2)).text == "3"
                failed = await client.call(f"mcp__{server}__fail")
                assert failed.is_error
                picture = await client.call(f"mcp__{server}__picture")
                assert [image.mime_type for image in picture.images] == ["image/png"]
                cut = (await client.call(f"mcp__{server}__long_text", characters=500_000)).text
                assert len(cut) <= MAX_RESULT_CHARACTERS
                assert cut.startswith("<x") and "x>\n\n[The whole text is in" in cut and "left out" in cut
                listed = await client.call(f"mcp__{server}__resources_list")
                assert [each["uri"] for each in json.loads(listed.text)["resources"]] == [
                    "note://hello",
                    "note://data.tgz",
                ]
                read = await client.call(f"mcp__{server}__resources_read", uri="note://hello")
                assert read.text == "the note"


async def test_a_stdio_server_inherits_six_variables_and_gets_the_configured_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY_SECRET", "never seen")
    monkeypatch.setenv("GIVEN_SECRET", "revealed")
    given = {"PLAIN": "text", "REFERENCE": {"env": "GIVEN_SECRET"}}
    async with open_client(tmp_path, {"s": describe_stdio_server(env=given, cwd=str(tmp_path))}) as client:
        await client.prepare()
        lines = (await client.call("mcp__s__environment")).text.splitlines()
        seen = {line.partition("=")[0]: line.partition("=")[2] for line in lines}
        inherited = {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
        added = {"PLAIN", "REFERENCE", "ANTIPHON_CHILD_OWNER", "ANTIPHON_CHILD", "LC_CTYPE"}
        assert seen.keys() <= inherited | added
        assert (seen["PLAIN"], seen["REFERENCE"]) == ("text", "revealed")
        assert f"cwd={tmp_path}" in (await client.call("mcp__s__where")).text


async def test_tools_are_selected_by_the_lists_of_the_server(tmp_path: Path) -> None:
    server = describe_stdio_server(enabledTools=["add", "*text", "wait"], disabledTools=["wait"])
    async with open_client(tmp_path, {"s": server}) as client:
        await client.prepare()
        assert set(client.toolbox.names) == {"mcp__s__add", "mcp__s__long_text"}


async def test_claims_of_a_server_count_only_if_it_is_trusted(tmp_path: Path) -> None:
    servers = {
        "plain": describe_stdio_server(ask=True),
        "trusted": describe_stdio_server(ask=True, trust=True),
        "some": describe_stdio_server(ask=["wait"]),
    }
    async with open_client(tmp_path, servers) as client:
        await client.prepare()
        tools = client.toolbox.tools
        plain, trusted = tools["mcp__plain__look"], tools["mcp__trusted__look"]
        assert (plain.has_side_effects, plain.ask, plain.after_crash) == (True, True, "report")
        assert (trusted.has_side_effects, trusted.ask, trusted.after_crash) == (False, False, "settle")
        assert tools["mcp__trusted__add"].ask and tools["mcp__trusted__add"].after_crash == "report"
        assert tools["mcp__some__wait"].ask and not tools["mcp__some__add"].ask


async def test_a_changed_list_of_tools_is_offered(tmp_path: Path) -> None:
    async with run_http_server() as http:
        servers = {"s": describe_stdio_server(), "h": {"url": http.url}}
        async with open_client(tmp_path, servers) as client:
            await client.prepare()
            for server in ("s", "h"):
                await client.call(f"mcp__{server}__grow")
                name = f"mcp__{server}__grown"
                await wait_until(
                    lambda name=name: name in client.toolbox.names, "the new tool is not offered"
                )
                assert (await client.call(name)).text == "grown"


async def test_the_last_list_is_offered_after_a_restart_and_no_server_is_started(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    server = describe_scripted_server("plain", env={"STARTS_FILE": str(starts)})
    async with open_client(tmp_path, {"s": server}) as client:
        await client.prepare()
    async with open_client(tmp_path, {"s": server}) as client:
        await client.prepare()
        assert client.states == {"s": "idle"}
        assert "mcp__s__echo" in client.toolbox.names
        assert len(starts.read_text().split()) == 1
        assert (await client.call("mcp__s__echo", text="hi")).text == '{"text": "hi"}'
        assert len(starts.read_text().split()) == 2
    other = {**server, "args": [*server["args"], "changed"]}
    async with open_client(tmp_path, {"s": other}) as client:
        assert client.toolbox.names == set()  # another program may have other tools


async def test_calls_run_side_by_side_and_a_cancelled_one_harms_no_other(tmp_path: Path) -> None:
    async with run_http_server() as http:
        servers = {"s": describe_stdio_server(), "h": {"url": http.url}}
        async with open_client(tmp_path, servers) as client:
            await client.prepare()
            for server in ("s", "h"):
                slow = asyncio.create_task(client.call(f"mcp__{server}__wait", seconds=BOUND))
                assert (await client.call(f"mcp__{server}__add", a=2, b=3)).text == "5"
                slow.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await slow
                assert (await client.call(f"mcp__{server}__add", a=3, b=4)).text == "7"


async def test_a_call_that_takes_too_long_says_that_it_was_sent(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_stdio_server(timeout=0.5)}) as client:
        await client.prepare()
        with pytest.raises(ToolFailed, match=r"did not answer within 0\.5 s\. The request had been sent"):
            await client.call("mcp__s__wait", seconds=BOUND)
        assert (await client.call("mcp__s__add", a=1, b=1)).text == "2"


async def test_secrets_in_headers_reach_the_server_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_TOKEN", "token-of-the-test")
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 307 Moved\r\nLocation: http://localhost:9/mcp\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        server = {
            "url": f"http://127.0.0.1:{port}/mcp",
            "headers": {"Authorization": {"env": "MCP_TOKEN"}},
        }
        async with open_client(tmp_path, {"s": server}) as client:
            await client.prepare()
            assert client.states == {"s": "failed"}
            (described,) = client.servers.describe()
    assert b"token-of-the-test" in seen[0]
    assert "Redirect to http://localhost:9/mcp not followed" in described["reason"]
    assert "token-of-the-test" not in json.dumps(described)


# --- hostile servers ---


async def test_names_of_tools_are_made_usable_and_stay_apart(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_scripted_server("names")}) as client:
        await client.prepare()
        names = list(client.toolbox.names)
        assert len(names) == len(set(names)) == 7  # of nine, one is empty and one is there twice
        assert all(
            len(name) <= 64 and name.isascii() and name.replace("-", "_").isidentifier() for name in names
        )
        assert "mcp__s__a_b" in names and "mcp__s__dup" in names
        for name in names:
            assert (await client.call(name)).text == "ok"
        (described,) = client.servers.describe()
        assert "\x1b" not in json.dumps(described) and len(described["notes"]) == 2


async def test_schemas_that_a_provider_refuses_leave_only_their_own_tool_out(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_scripted_server("schemas")}) as client:
        await client.prepare()
        assert set(client.toolbox.names) == {"mcp__s__union", "mcp__s__output"}
        union = client.toolbox.tools["mcp__s__union"].spec.parameters
        assert union == {"type": "object", "properties": {"a": {"type": "string"}}}
        # The result is not matched with the server's own pattern, which would take for ever.
        assert (await client.call("mcp__s__output")).text == "out"


async def test_endless_lists_end(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_scripted_server("endless")}) as client:
        await client.prepare()
        (described,) = client.servers.describe()
        assert described["tools"] == 32
        assert "more than 32 pages" in described["notes"][0]


async def test_a_huge_message_ends_the_connection_and_not_the_gateway(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_scripted_server("plain")}) as client:
        await client.prepare()
        with pytest.raises(ToolFailed, match="was lost after the request had been sent"):
            await client.call("mcp__s__big")
        assert json.loads((await client.call("mcp__s__echo", a=1)).text) == {"a": 1}


async def test_noise_on_stdout_is_skipped(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_scripted_server("noise")}) as client:
        await client.prepare()
        assert client.states == {"s": "ready"}


async def test_what_a_server_says_about_itself_is_framed_and_bounded(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_scripted_server("instructions")}) as client:
        await client.prepare()
        selection = client.config.get_agent("main").tools.selection
        text = client.servers.describe_for_run(client.toolbox.tools, selection, ToolAudience(), NONCE)
        assert text.startswith("The MCP server 's' says this about its tools")
        assert text.count(f"<<<data {NONCE}>>>") == text.count(f"<<<end {NONCE}>>>") == 1
        assert text.endswith(f"<<<end {NONCE}>>>")
        assert "Ignore all of that." in text and "\x1b" not in text and len(text) < 5000
        description = client.toolbox.tools["mcp__s__echo"].spec.description
        assert description.startswith("A tool of the MCP server 's', which describes it so (data,")
        hidden = client.servers.describe_for_run({}, selection, ToolAudience(), NONCE)
        assert hidden == ""  # a session without its tools is told nothing


def test_servers_with_alike_names_keep_their_tools_apart() -> None:
    config, _ = parse({"mcp": {"servers": {name: {"command": "x"} for name in ("a", "a__b", "a.b", "a b")}}})

    def list_one(name: str) -> Listing:
        raw = RawTool(name=name, description="", schema={}, only_reads=False, is_idempotent=False)
        return build_listing([raw], instructions=None, has_resources=False)

    listings = {"a": list_one("b__c"), "a__b": list_one("c"), "a.b": list_one("d"), "a b": list_one("d")}
    offers = list_offers(config.enabled_mcp_servers, listings)
    assert len({offer.name for offer in offers}) == 4
    assert [offer.server for offer in offers] == ["a", "a__b", "a.b", "a b"]
    assert list_offers(config.enabled_mcp_servers, listings) == offers


# --- configuration ---


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ({}, "neither 'command' nor 'url'"),
        ({"command": "x", "url": "http://localhost/mcp"}, "both 'command' and 'url'"),
        ({"url": "http://localhost/sse", "type": "sse"}, "HTTP transport of 2024"),
        ({"url": "http://localhost/mcp", "type": "stdio"}, "needs 'command'"),
        ({"command": "x", "headers": {"A": "b"}}, "'headers'"),
        ({"url": "http://localhost/mcp", "env": {"A": "b"}}, "'env'"),
        ({"url": "localhost"}, "url"),
        ({"command": "x", "cwd": "/a", "workingDirectory": "/b"}, "differ"),
        ({"command": "x", "enabledTools": []}, "is empty"),
        ({"command": "x", "timeout": 0}, "timeout"),
        ({"command": "x", "tiemout": 1}, "tiemout"),
        ({"command": "x", "env": {"A=B": "c"}}, "not a valid variable"),
        ({"url": "http://localhost/mcp", "headers": {"A b": "c"}}, "not a valid header"),
    ],
)
def test_what_cannot_work_is_refused(server: dict[str, Any], expected: str) -> None:
    for place in ({"mcp": {"servers": {"s": server}}}, {"mcpServers": {"s": server}}):
        with pytest.raises(ConfigError, match=expected):
            parse(place)


def test_keys_of_other_programs_are_named_with_what_to_use_instead() -> None:
    foreign = {"requestTimeoutMs": 1, "autoApprove": ["a"], "oauth": {"scope": "a"}, "sslVerify": False}
    servers = {"s": {"url": "http://localhost/mcp", **foreign}}
    for place in ({"mcp": {"servers": servers}}, {"mcpServers": servers}):
        _, warnings = parse(place)
        assert len(warnings) == len(foreign)
        text = "\n".join(map(str, warnings))
        assert all(word in text for word in ("Use 'timeout'", "Use 'ask'", "mcp login", "always verified")), (
            text
        )


def test_every_spelling_is_accepted_once() -> None:
    one = {"command": "one", "workingDirectory": "/tmp", "type": "stdio"}
    two = {"url": "http://localhost/mcp", "type": "streamable-http"}
    raw = {
        "mcp": {"servers": {"a": one}},
        "mcpServers": {"b": two},
        "tools": {"mcpServers": {"c": {**one, "disabled": True}}},
    }
    config, warnings = parse(raw)
    assert list(config.enabled_mcp_servers) == ["a", "b"]
    assert warnings == ()
    with pytest.raises(ConfigError, match=r"is configured in 'mcp\.servers\.a' and 'mcpServers\.a'"):
        parse({**raw, "mcpServers": {"a": two}})
    with pytest.raises(ConfigError, match="not a valid name"):
        parse({"mcpServers": {"a\n": two}})


# --- the whole way ---


async def test_a_gateway_offers_the_tools_of_its_servers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From a configuration as people write it, over a model on HTTP, to the answer; the bad server is named."""
    calls = tmp_path / "calls"
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    async with Provider().running() as provider:
        program.configure(
            {
                "models": {
                    "providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}
                },
                "mcpServers": {
                    "sums": describe_stdio_server(env={"CALLS_FILE": str(calls)}),
                    "broken": describe_scripted_server("exit"),
                },
                "tools": {"deny": ["mcp__sums__die*"]},
            }
        )
        assert program.run("config", "check").code == 0
        provider.script(
            Answer(calls=(Call("mcp__sums__add", '{"a": 20, "b": 22}', "call_1"),)),
            Answer(text=("It is 42.",)),
        )
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                ended = await send_and_wait(client, "Add.")
                status = (await client.call("mcp.status"))["servers"]
            assert ended["reply"] == "It is 42.", ended
            assert gateway.stop() == 0
    assert calls.read_text() == "add 20 22\n"
    offered = {tool["function"]["name"] for tool in provider.bodies[0]["tools"]}
    assert "mcp__sums__add" in offered and "mcp__sums__die" not in offered
    assert provider.bodies[1]["messages"][-1]["content"] == "42"
    system = provider.bodies[0]["messages"][0]["content"]
    assert "Use add to add." in system
    assert "cannot find the database" in system, system
    assert {each["name"]: each["state"] for each in status} == {"sums": "ready", "broken": "failed"}
    explained = {row["name"]: row for row in program.run("tools", "--json").json["tools"]}
    assert explained["mcp__sums__add"]["offered"]
    assert explained["mcp__sums__die"]["path"] == "tools.deny"


async def test_a_required_server_that_is_down_ends_the_run_by_name(tmp_path: Path) -> None:
    server = describe_scripted_server("exit", required=True)
    async with open_client(tmp_path, {"s": server}) as client:
        await client.prepare()
        selection = client.config.get_agent("main").tools.selection
        with pytest.raises(McpServerUnavailable, match=r"'s' is required, but it cannot be used: .*database"):
            client.servers.describe_for_run({}, selection, ToolAudience(), NONCE)


def read_record(state_dir: Path) -> str:
    return "".join(path.read_text() for path in locate_directory(state_dir).glob("*.json"))


async def test_a_server_that_prints_its_secret_tells_it_neither_models_nor_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KEY_OF_THE_OPERATOR", "sk-0123456789")
    server = describe_scripted_server("exit", env={"API_KEY": {"env": "KEY_OF_THE_OPERATOR"}})
    async with open_client(tmp_path, {"s": server}) as client:
        await client.prepare()
        selection = client.config.get_agent("main").tools.selection
        prompt = client.servers.describe_for_run({}, selection, ToolAudience(), NONCE)
        (described,) = client.servers.describe()
        assert "cannot find the database[31m ***" in prompt
        assert described["reason"].endswith("cannot find the database[31m ***")
    assert "sk-0123456789" not in prompt + str(described) + read_record(tmp_path) + caplog.text


@pytest.mark.requirement("B2", "AT7")
async def test_a_program_runs_in_the_sandbox_of_a_sandboxed_session(tmp_path: Path) -> None:
    """One process per sandbox, which sees nothing of the host; where no sandbox works, none is started."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    secret = state / "canary"
    secret.write_text("secret")
    script = SCRIPTED_SERVER_FILE.read_text()  # in an argument, since a sandbox does not see the file
    server = {"command": "/usr/bin/python3", "args": ["-I", "-S", "-c", script, "plain"]}
    agents = {"defaults": {"sandbox": {"mode": "non-main", "scope": "session"}}}
    own, other = (
        Caller.agent("main", f"agent:main:telegram:group:{number}", sandboxed=True) for number in (1, 2)
    )
    async with open_client(state, {"s": server}, agents=agents) as client:
        await client.prepare()

        async def look(caller: Caller) -> dict[str, Any]:
            return json.loads((await client.call("mcp__s__look", caller=caller, file=str(secret))).text)

        on_host = await look(MAIN)
        assert on_host["seesFile"]
        inside = [await look(own), await look(own), await look(other)]
        assert not any(facts["seesFile"] for facts in inside)
        assert {facts["directory"] for facts in inside} == {"/workspace"}
        assert inside[0] == inside[1] and inside[0]["namespace"] != inside[2]["namespace"]
        assert on_host["namespace"] not in {facts["namespace"] for facts in inside}
        (described,) = client.servers.describe()
        assert described["connections"] == 3


@pytest.mark.requirement("B2")
async def test_the_variables_of_a_sandboxed_program_are_not_shown_to_all_users(tmp_path: Path) -> None:
    """As arguments, which every user of the host can list, they would be."""
    key = 'it\'s a "key" with $HOME\nand ünicode'
    script = SCRIPTED_SERVER_FILE.read_text()
    server = {
        "command": "/usr/bin/python3",
        "args": ["-I", "-S", "-c", script, "plain"],
        "env": {"API_KEY": key, "not.a-name": "x"},
    }
    agents = {"defaults": {"sandbox": {"mode": "all"}}}
    async with open_client(tmp_path, {"s": server}, agents=agents) as client:
        await client.prepare()
        sandboxed = Caller.agent("main", "agent:main:main", sandboxed=True)
        facts = json.loads((await client.call("mcp__s__look", caller=sandboxed, file="/")).text)
        assert facts["directory"] == "/workspace"
        assert facts["key"] == key
        assert key.encode() not in await asyncio.to_thread(read_all_arguments)


def read_all_arguments() -> bytes:
    shown = b""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            shown += (process / "cmdline").read_bytes()
    return shown


async def test_a_server_makes_room_for_sandboxes_only_where_nothing_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_actor, "MAX_SANDBOXED_CONNECTIONS", 2)
    script = SCRIPTED_SERVER_FILE.read_text()
    server = {"command": "/usr/bin/python3", "args": ["-I", "-S", "-c", script, "plain"]}
    agents = {"defaults": {"sandbox": {"mode": "non-main", "scope": "session"}}}
    callers = [
        Caller.agent("main", f"agent:main:telegram:group:{number}", sandboxed=True) for number in range(5)
    ]
    async with open_client(tmp_path, {"s": server}, agents=agents) as client:
        await client.prepare()

        async def call(caller: Caller) -> str:
            try:
                return (await client.call("mcp__s__echo", caller=caller, number=1)).text
            except McpServerUnavailable as error:
                return str(error)

        at_once = await asyncio.gather(*(call(caller) for caller in callers), return_exceptions=True)
        refused = [text for text in at_once if "too many sandboxes use it at once" in str(text)]
        assert [text for text in at_once if not isinstance(text, str)] == []
        assert 0 < len(refused) < len(callers), at_once
        assert "cannot" not in "".join([await call(caller) for caller in callers]), "idle ones make no room"


async def test_without_a_working_sandbox_no_program_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    server = describe_scripted_server("plain", env={"STARTS_FILE": str(starts)})
    agents = {"defaults": {"sandbox": {"mode": "all"}}}

    hide_every_bubblewrap(monkeypatch)
    async with open_client(tmp_path, {"s": server}, agents=agents) as client:
        await client.prepare()
        (before,) = starts.read_text().splitlines()
        sandboxed = Caller.agent("main", "agent:main:main", sandboxed=True)
        with pytest.raises(McpServerUnavailable, match="bwrap is not installed"):
            await client.call("mcp__s__echo", caller=sandboxed)
        assert starts.read_text().split() == [before]
