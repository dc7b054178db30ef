"""A secret of the gateway is nowhere in a sandbox, be it in the environment, the configuration or the arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon.client import Client, Site
from antiphon.workspace import sandbox_backend
from cli.gateways import up
from cli.terminal import BOUND, Program
from support.keepers import end_keeper, find_keeper, wait_until_true
from support.model_provider import Answer, Call, Provider

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.requirement("AT12"),
    pytest.mark.skipif(
        sandbox_backend.find_program("bwrap", []) is None,
        reason="bwrap is not installed (apt-get install bubblewrap)",
    ),
]

Json = dict[str, Any]
FIRST_HALF, SECOND_HALF = "canary", f"secret{os.getpid()}"
CANARY = FIRST_HALF + SECOND_HALF
SEARCH = f"""
canary={FIRST_HALF}; canary="$canary"{SECOND_HALF}
env | grep -c $canary
cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/mountinfo > /tmp/seen 2> /dev/null
grep -ac $canary /tmp/seen
for process in /proc/[0-9]*; do ls -l $process/cwd $process/exe $process/fd; done 2> /dev/null | grep -c $canary
for name in $(ls -A / | grep -vE '^(proc|sys|usr|bin|lib.*|sbin)$'); do
  grep -ras $canary /$name 2> /dev/null
done | wc -l
echo in place > proof; cat .antiphon/attachments/*/brief.txt
"""
"""The secret is put together inside, so that the command itself does not hold it."""


def choose_answer(body: Json) -> Answer:
    """Answer as the model of both: the parent delegates, the child searches and tells what it found."""
    messages = cast("list[Json]", body["messages"])
    results = [str(message["content"]) for message in messages if message["role"] == "tool"]
    if any(
        ".antiphon/attachments/" in str(message["content"])
        for message in messages
        if message["role"] != "tool"
    ):
        search = {"command": SEARCH, "yieldMs": 60_000}
        return (
            Answer(text=(results[-1],))
            if results
            else Answer(calls=(Call("exec", json.dumps(search), "c1"),))
        )
    if not results:
        given = {"task": "search", "attachments": [{"name": "brief.txt", "content": "the brief"}]}
        return Answer(calls=(Call("sessions_spawn", json.dumps(given), "c2"),))
    return Answer(text=("done",))


def find_canary(directory: Path) -> list[str]:
    found = [str(path) for path in directory.rglob("*") if CANARY in str(path)]
    return found + [
        str(path)
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink() and CANARY.encode() in path.read_bytes()
    ]


async def test_a_secret_of_the_gateway_is_nowhere_in_a_sandbox(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bytecode = tmp_path_factory.getbasetemp().parent / "antiphon-bytecode"
    program = Program(tmp_path, bytecode, extra={"PROVIDER_KEY": CANARY})
    async with Provider(choose=choose_answer).running() as provider:
        model: Json = {"baseUrl": f"{provider.url}/v1", "apiKey": CANARY, "models": [{"id": "m"}]}
        program.configure(
            {
                "agents": {"defaults": {"sandbox": {"mode": "all", "workspaceAccess": "rw"}}},
                "gateway": {"auth": {"token": CANARY}},
                "tools": {"profile": "coding"},
                "models": {"providers": {"local": model}},
            }
        )
        configured = (program.state / "config.json5").rename(program.state / f"{CANARY}.json5")
        try:
            with up(program, options=("--config", str(configured))) as gateway:
                own = Path(f"/proc/{gateway.process.pid}")
                for name in ("environ", "cmdline"):
                    assert CANARY.encode() in (own / name).read_bytes()
                site = Site(gateway.url, CANARY)

                async def find() -> Site:
                    return site

                async with Client(find) as client:
                    sent = await client.call(
                        "chat.send", {"sessionKey": "main", "message": "go", "idempotencyKey": "go"}
                    )
                    waiting = {"runId": sent["runId"], "timeoutMs": int(BOUND * 1000)}
                    ended = await client.call("agent.wait", waiting, seconds=BOUND)
                    assert ended["status"] == "ok", ended.get("error")

                    async def has_searched() -> bool:
                        return any("the brief" in result for result in list_results(provider))

                    await wait_until_true(has_searched, BOUND)
                keeper = find_keeper(program.state)
                assert keeper is not None
                assert CANARY not in " ".join(keeper.cmdline())
                assert CANARY not in str(keeper.environ())
                for name in ("keeper", "workspaces", "sandboxes"):
                    assert find_canary(program.state / name) == []
                assert [path.read_text() for path in (program.state / "workspaces").rglob("proof")] == [
                    "in place\n"
                ]
                assert gateway.stop() == 0
        finally:
            end_keeper(program.state)
    [found] = {result for result in list_results(provider) if "the brief" in result}
    assert found.rpartition("\n\n")[2] == "0\n0\n0\n0\nthe brief"
    assert CANARY not in str(provider.bodies)


def list_results(provider: Provider) -> list[str]:
    return [
        str(message["content"])
        for body in provider.bodies
        for message in body["messages"]
        if message["role"] == "tool"
    ]
