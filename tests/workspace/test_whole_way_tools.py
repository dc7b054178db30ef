"""The further tools with the real gateway: a model over HTTP searches, remembers, schedules and posts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from cli.gateways import connect, send_and_wait, up
from cli.terminal import Program
from support.model_provider import Answer, Call, Provider
from support.search_service import SearchService

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
JOB = {
    "name": "tea",
    "schedule": {"kind": "cron", "expr": "0 9 * * *"},
    "payload": {"kind": "agentTurn", "message": "Make tea."},
}
CALLS: list[tuple[str, Json]] = [
    ("web_search", {"query": "tea"}),
    ("memory_search", {"query": "owner tea"}),
    ("memory_get", {"path": "MEMORY.md"}),
    ("cron", {"action": "add", "job": JOB}),
    ("cron", {"action": "list"}),
    ("message", {"action": "send", "message": "The kettle is on."}),
]
STEPS = [Call(name, json.dumps(given), f"call_{number}") for number, (name, given) in enumerate(CALLS)]


def choose_answer(body: Json) -> Answer:
    results = [message for message in cast("list[Json]", body["messages"]) if message["role"] == "tool"]
    return Answer(calls=(STEPS[len(results)],)) if len(results) < len(STEPS) else Answer(text=("done",))


@pytest.mark.requirement("T1", "T2", "T3")
async def test_a_model_searches_remembers_schedules_and_posts(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    work = tmp_path / "work"
    (work / "skills" / "tea").mkdir(parents=True)
    (work / "skills" / "tea" / "SKILL.md").write_text("---\nname: tea\ndescription: Makes tea.\n---\n")
    (work / "MEMORY.md").write_text("The owner likes green tea.\n")
    service = SearchService([{"title": "Tea", "url": "https://tea.test/", "content": "A drink."}])
    async with service.running(), Provider(choose=choose_answer).running() as provider:
        program.configure(
            {
                "agents": {"defaults": {"workspace": "~/work"}},
                "tools": {"alsoAllow": ["message"], "web": {"search": {"searxng": {"baseUrl": service.url}}}},
                "models": {
                    "providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}
                },
            }
        )
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                ended = await send_and_wait(client, "work")
                assert (ended["status"], ended["reply"]) == ("ok", "done")
                [job] = (await client.call("cron.list"))["jobs"]
                assert (job["name"], job["agentId"]) == ("tea", "main")
            assert gateway.stop() == 0
    results = [message["content"] for message in provider.bodies[-1]["messages"] if message["role"] == "tool"]
    assert results[0] == "1. Tea\n   https://tea.test/\n   A drink."
    assert json.loads(results[1])["results"][0]["path"] == "MEMORY.md"
    assert json.loads(results[2])["text"] == "The owner likes green tea."
    assert json.loads(results[4])["total"] == 1
    assert json.loads(results[5])["status"] == "queued"
    assert "- tea (skills/tea/SKILL.md): Makes tea." in json.dumps(provider.bodies[0]["messages"][0])
    assert [request.query["q"] for request in service.requests] == [["tea"]]
