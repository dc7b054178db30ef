"""Agents at work with the real gateway: a model over HTTP writes, reads and edits, and a sub-agent reads its file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon.client import Client, Site
from cli.gateways import token, up
from cli.terminal import BOUND, Program
from support.model_provider import Answer, Call, Provider

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
BRIEF = "Count the sheep."
STEPS = [
    Call("write", json.dumps({"file_path": "notes/plan.md", "content": "one\ntwo\n"}), "call_w"),
    Call("read", json.dumps({"path": "notes/plan.md"}), "call_r"),
    Call("edit", json.dumps({"path": "notes/plan.md", "old_string": "two", "new_string": "three"}), "call_e"),
]


def choose_answer(body: Json) -> Answer:
    """Answer as the model of both: the parent acts on its last message, the child reads what it was given."""
    messages = cast("list[Json]", body["messages"])
    last_user = max(number for number, message in enumerate(messages) if message["role"] == "user")
    results = [message["content"] for message in messages[last_user + 1 :] if message["role"] == "tool"]
    if attached := re.search(r"'(\.antiphon/attachments/[^']+)'", json.dumps(messages[0])):
        if results or last_user > 1:
            return Answer(text=(results[-1] if results else "done",))
        return Answer(calls=(Call("read", json.dumps({"path": f"{attached[1]}/brief.txt"}), "call_b"),))
    asked = messages[last_user]["content"]
    if asked == "work" and len(results) < len(STEPS):
        return Answer(calls=(STEPS[len(results)],))
    if asked == "delegate" and not results:
        given = {"task": "read it", "attachments": [{"name": "brief.txt", "content": BRIEF}]}
        return Answer(calls=(Call("sessions_spawn", json.dumps(given), "call_s"),))
    return Answer(text=(" | ".join(results) or "noted",))


@pytest.mark.requirement("T1", "T3", "P9")
async def test_a_model_works_on_files_and_so_does_its_sub_agent(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    work = tmp_path / "work"
    async with Provider(choose=choose_answer).running() as provider:
        program.configure(
            {
                "agents": {"defaults": {"workspace": "~/work"}},
                "tools": {"profile": "coding", "deny": ["group:web"]},
                "models": {
                    "providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}
                },
            }
        )
        with up(program) as gateway:
            site = Site(gateway.url, token(program))

            async def find() -> Site:
                return site

            async with Client(find) as client:
                assert await _say(client, "work") == (
                    "Wrote 'notes/plan.md' (8 bytes). | one\ntwo | Wrote 'notes/plan.md' (10 bytes)."
                )
                assert (work / "notes" / "plan.md").read_text() == "one\nthree\n"
                spawned = json.loads(await _say(client, "delegate"))
                ended = await client.call(
                    "agent.wait",
                    {"runId": spawned["runId"], "timeoutMs": int(BOUND * 1000)},
                    seconds=BOUND,
                )
                assert (ended["status"], ended["reply"]) == ("ok", BRIEF)
            assert gateway.stop() == 0
    offered = {tool["function"]["name"] for tool in provider.bodies[0]["tools"]}
    assert {"read", "write", "edit", "apply_patch", "sessions_spawn"} <= offered
    assert "web_fetch" not in offered
    child = next(body for body in provider.bodies if "You are a sub-agent" in json.dumps(body["messages"][0]))
    of_the_child = {tool["function"]["name"] for tool in child["tools"]}
    assert of_the_child >= {"read", "write", "edit", "apply_patch"}
    assert not {name for name in of_the_child if "session" in name or name in ("subagents", "agents_list")}
    log = program.state / "antiphon.log"
    assert not log.exists() or log.read_text("utf-8") == ""


async def _say(client: Client, message: str) -> str:
    sent = await client.call(
        "chat.send", {"sessionKey": "main", "message": message, "idempotencyKey": message}
    )
    ended = await client.call(
        "agent.wait", {"runId": sent["runId"], "timeoutMs": int(BOUND * 1000)}, seconds=BOUND
    )
    assert ended["status"] == "ok", ended.get("error")
    return ended["reply"]
