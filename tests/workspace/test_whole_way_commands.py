"""Commands with the real gateway: a model over HTTP runs them in the sandbox, and on this machine when allowed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon.bus import RunChanged, ToolPhase
from antiphon.cli.chat.renderer import ChatRenderer
from antiphon.client import Client, Site
from antiphon.workspace.sandbox_backend import find_program
from antiphon.workspace.sandbox_network import find_python
from cli.gateways import token, up
from cli.terminal import BOUND, Program
from support.keepers import end_keeper, wait_until_true
from support.model_provider import Answer, Call, Provider

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
SCRIPT_BY_MESSAGE: dict[str, list[tuple[str, Json]]] = {
    "work": [
        ("exec", {"command": "echo from a command > made.txt; pwd"}),
        ("read", {"path": "made.txt"}),
        (
            "exec",
            {"command": "tail -n +3 /proc/net/dev | cut -d: -f1; bash -c ': > /dev/tcp/127.0.0.1/PORT'"},
        ),
        (
            "exec",
            {"command": "while [ ! -e go ]; do sleep 0.05; done; echo finished; exit 3", "background": True},
        ),
        ("process", {"action": "poll", "sessionId": "ID"}),
    ],
    "look": [("process", {"action": "poll", "sessionId": "ID"})],
    "ask": [
        ("exec", {"command": "echo listed"}),
        ("exec", {"command": "echo once >> effect; echo the answer"}),
    ],
}


def choose_answer(body: Json, port: str) -> Answer:
    """Answer as a model that works through the calls for the last message, and then repeats their results."""
    messages = cast("list[Json]", body["messages"])
    last_user = max(number for number, message in enumerate(messages) if message["role"] == "user")
    results = [message["content"] for message in messages[last_user + 1 :] if message["role"] == "tool"]
    calls = SCRIPT_BY_MESSAGE.get(messages[last_user]["content"], [])
    if len(results) == len(calls):
        return Answer(text=(" | ".join(results) or "noted",))
    name, given = calls[len(results)]
    started = re.findall(r"sessionId '(\w+)'", " ".join(str(message["content"]) for message in messages))
    text = json.dumps(given).replace("ID", started[-1] if started else "").replace("PORT", port)
    return Answer(calls=(Call(name, text, f"call_{len(messages)}"),))


@dataclass
class Installation:
    program: Program
    provider: Provider
    client: Client

    async def send(self, message: str) -> str:
        """Send a message to the main session; return the id of its run."""
        sent = await self.client.call(
            "chat.send", {"sessionKey": "main", "message": message, "idempotencyKey": message}
        )
        return sent["runId"]

    async def wait_for_reply(self, run_id: str) -> str:
        ended = await self.client.call(
            "agent.wait", {"runId": run_id, "timeoutMs": int(BOUND * 1000)}, seconds=BOUND
        )
        assert ended["status"] == "ok", ended.get("error")
        return ended["reply"]

    def find_notes(self) -> list[str]:
        """Return what the last prompt says about ends of background commands."""
        texts = [str(message["content"]) for message in self.provider.bodies[-1]["messages"]]
        return [text for text in texts if "The background command" in text]


@asynccontextmanager
async def running(program: Program, tools: Json, sandbox: Json | None = None) -> AsyncGenerator[Installation]:
    provider = Provider(choose=lambda body: choose_answer(body, provider.url.rpartition(":")[2]))
    async with provider.running():
        program.configure(
            {
                "agents": {"defaults": {"workspace": "~/work", "sandbox": sandbox or {}}},
                "tools": {"profile": "coding", **tools},
                "models": {
                    "providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}
                },
            }
        )
        try:
            with up(program) as gateway:
                site = Site(gateway.url, token(program))

                async def find() -> Site:
                    return site

                async with Client(find) as client:
                    yield Installation(program, provider, client)
                assert gateway.stop() == 0
        finally:
            end_keeper(program.state)


@pytest.fixture
def program(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")


@pytest.mark.skipif(
    find_program("bwrap", []) is None, reason="bwrap is not installed (apt-get install bubblewrap)"
)
@pytest.mark.requirement("T1", "T5", "T6", "AT4", "AT9")
async def test_a_model_runs_commands_in_the_sandbox(program: Program) -> None:
    async with running(program, {}) as antiphon:
        reply = await antiphon.wait_for_reply(await antiphon.send("work"))
        written, read, network_seen, started, polled = reply.split(" | ")
        assert written.endswith("\n\n/workspace\n")
        assert "from a command" in read
        assert "\n\nlo\n" in re.sub(" +", "", network_seen)
        assert "Connection refused" in network_seen
        assert (antiphon.program.home / "work" / "made.txt").read_text() == "from a command\n"
        for text in (started, polled):
            assert text.startswith("Running for ")
        (antiphon.program.home / "work" / "go").touch()

        async def is_told() -> bool:
            return bool(antiphon.find_notes())

        await wait_until_true(is_told, BOUND)
        [found] = re.findall(r"sessionId '(\w+)'", started)[:1]
        assert await antiphon.wait_for_reply(f"wake:exec:{found}") == "noted"
        looked = await antiphon.wait_for_reply(await antiphon.send("look"))
        assert looked.startswith("Exit code 3 after ")
        assert looked.endswith("\n\nfinished\n")
        [note] = antiphon.find_notes()
        assert f"The background command '{found}' has ended. Exit code 3 after " in note
        assert "\n\nfinished\n<<<end " in note


FETCH = """
import sys, urllib.error, urllib.request
for host in ("localhost:" + sys.argv[1], "example.org"):
    try:
        print(urllib.request.urlopen(f"http://{host}/").read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode())
"""


@pytest.mark.skipif(
    find_program("bwrap", []) is None or find_python() is None,
    reason="bwrap or /usr/bin/python3 is not installed (apt-get install bubblewrap python3)",
)
@pytest.mark.requirement("B1")
async def test_a_model_reaches_a_listed_host_and_no_other(program: Program) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\nfrom the network")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        SCRIPT_BY_MESSAGE["fetch"] = [("exec", {"command": f"python3 fetch.py {port}"})]
        (program.home / "work").mkdir(parents=True)
        (program.home / "work" / "fetch.py").write_text(FETCH)
        sandbox = {"network": "proxy", "allowHosts": [f"localhost:{port}"]}
        async with running(program, {}, sandbox) as antiphon:
            reply = await antiphon.wait_for_reply(await antiphon.send("fetch"))
            assert "\n\nfrom the network\n403 example.org:80 is not allowed" in reply
            assert "'agents.defaults.sandbox.allowHosts'" in reply
            explained = await asyncio.to_thread(program.run, "sandbox", "explain")
            assert f"localhost:{port}" in explained.out


@pytest.mark.requirement("T5", "W3")
async def test_people_see_the_output_of_a_command_while_it_runs(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "echo first; printf 'half\\033[31mway'; while [ ! -e go ]; do sleep 0.05; done; echo; echo done"
    SCRIPT_BY_MESSAGE["slowly"] = [("exec", {"command": script, "yieldMs": 60_000})]
    settings: Json = {"exec": {"host": "gateway", "security": "full", "ask": "off"}}
    async with running(program, settings) as antiphon, asyncio.timeout(BOUND):
        renderer = ChatRenderer("conversation")
        updates: list[ToolPhase] = []
        async with aclosing(antiphon.client.follow("main")) as events:
            run_id = await antiphon.send("slowly")
            async for event in events:
                renderer.show_event(event)
                if isinstance(event, ToolPhase) and event.phase == "update":
                    updates.append(event)
                    (program.home / "work" / "go").touch()
                if isinstance(event, RunChanged) and event.state == "ok":
                    break
        assert updates[0].name == "exec"
        assert updates[0].output == "first\nhalf\x1b[31mway"
        assert updates[0].output_bytes == len("first\nhalf\x1b[31mway")
        assert re.search(r"· exec: half.*way\n", capsys.readouterr().out)
        assert (await antiphon.wait_for_reply(run_id)).endswith("\ndone\n")
        results = [
            message for message in antiphon.provider.bodies[-1]["messages"] if message["role"] == "tool"
        ]
        assert [str(result["content"]).count("first") for result in results] == [1]


@pytest.mark.requirement("LOOP")
async def test_a_model_that_repeats_a_command_is_stopped(program: Program) -> None:
    SCRIPT_BY_MESSAGE["repeat"] = [("exec", {"command": "echo again >> effect; echo same"})] * 10
    thresholds = {"warningThreshold": 2, "criticalThreshold": 3, "globalCircuitBreakerThreshold": 4}
    settings: Json = {
        "loopDetection": {"enabled": True, **thresholds},
        "exec": {"host": "gateway", "security": "full", "ask": "off"},
    }
    async with running(program, settings) as antiphon:
        shown = await asyncio.to_thread(program.run, "agent", "--message", "repeat")
        assert shown.code != 0
        assert "This is call 4 of 'exec' with the same arguments and the same result." in shown.err
        assert (program.home / "work" / "effect").read_text() == "again\n" * 2
        results = [
            message for message in antiphon.provider.bodies[-1]["messages"] if message["role"] == "tool"
        ]
        assert ["[This is call 2 of 'exec'" in str(result["content"]) for result in results] == [
            *(False, True, False)
        ]
        assert "It was not made. Do something else" in str(results[-1]["content"])


@pytest.mark.requirement("T1", "T6", "T7", "AT13")
async def test_a_command_on_this_machine_waits_for_a_person_and_runs_once(program: Program) -> None:
    settings = {"host": "gateway", "security": "allowlist", "ask": "on-miss", "allowlist": ["echo"]}
    effect = program.home / "work" / "effect"
    async with running(program, {"exec": settings}) as antiphon:
        run_id = await antiphon.send("ask")
        waiting: list[Json] = []
        async with asyncio.timeout(BOUND):
            while not waiting:
                listed = await asyncio.to_thread(program.run, "approvals", "list", "--json")
                assert listed.code == 0, listed.err
                waiting = listed.json["approvals"]
        [approval] = waiting
        assert "echo once >> effect; echo the answer" in json.dumps(approval)
        assert not effect.exists()
        allowed = await asyncio.to_thread(program.run, "approvals", "allow", approval["id"])
        assert allowed.code == 0, allowed.err
        listed, answered = (await antiphon.wait_for_reply(run_id)).split(" | ")
        assert listed.endswith("\n\nlisted\n")
        assert answered.startswith("Exit code 0 after ")
        assert answered.endswith("\n\nthe answer\n")
        assert effect.read_text() == "once\n"
        await asyncio.to_thread(program.run, "approvals", "allow", approval["id"])
        assert await antiphon.wait_for_reply(await antiphon.send("thanks")) == "noted"
        assert effect.read_text() == "once\n"
