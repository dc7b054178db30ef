"""The tool `image`: a model that accepts images looks at a file of the workspace, over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from antiphon.config import Config
from antiphon.engine.runs import lifecycle
from antiphon.errors import StoreFull
from antiphon.store import Tx
from support.agents_fixture import AgentsFixture, make_agents_config, open_agents_fixture
from support.app_fixture import MAIN, OPERATOR
from support.model_provider import Answer, Call, Failure, Provider, Tokens
from tools.command_gateway import RUN_ID

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("T1")]

Json = dict[str, Any]
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
IMAGE_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def make_config(provider: Provider, agent: Json | None = None, **defaults: Any) -> Config:
    """An agent with a model for text; the provider has another one for images."""
    models = [{"id": "text"}, {"id": "eye"}, {"id": "both", "input": ["text", "image"]}]
    listed = {"id": "main", "default": True, "model": "local/text", **(agent or {})}
    local = {"baseUrl": f"{provider.url}/v1", "apiKey": "key", "models": models}
    return make_agents_config(listed, agents={"defaults": defaults}, models={"providers": {"local": local}})


def put_image(state: Path, name: str, data: bytes = PNG) -> None:
    state.mkdir(mode=0o700, exist_ok=True)
    workspace = state / "workspaces" / "main"
    workspace.mkdir(parents=True, exist_ok=True)
    (workspace / name).write_bytes(data)


def is_about_image(body: Json) -> bool:
    return "image_url" in json.dumps(body["messages"])


def answer_step(body: Json) -> Answer:
    """Call the tool once, and repeat its result; to an image, say what it shows."""
    if is_about_image(body):
        return Answer(text=("A red ", "kettle."), tokens=Tokens(input=700, output=4))
    last = cast("list[Json]", body["messages"])[-1]
    if last["role"] == "tool":
        return Answer(text=(f"It says: {last['content']}",))
    return Answer(calls=(Call("image", json.dumps({"image": "kettle.png", "prompt": "Which colour?"})),))


async def use(agents: AgentsFixture, **arguments: Any) -> Json:
    await agents.open_sessions(MAIN)
    return await agents.use("image", MAIN, **arguments)


async def list_offered(agents: AgentsFixture) -> set[str]:
    return set((await agents.operations.sessions.act_as(OPERATOR, MAIN)).actor.tools)


async def test_the_image_reaches_the_chosen_model_and_its_answer_the_agent(tmp_path: Path) -> None:
    put_image(tmp_path, "kettle.png")
    async with (
        Provider(choose=answer_step).running() as provider,
        open_agents_fixture(make_config(provider, imageModel="local/eye"), tmp_path) as agents,
    ):
        ended = await agents.ask("look")
        assert ended.reply == "It says: A red kettle.", ended.error
        lines = await agents.operations.transcripts.get_usage(OPERATOR, MAIN)
        status = await agents.operations.sessions.describe(OPERATOR, MAIN)
    [seen] = [body for body in provider.bodies if is_about_image(body)]
    assert (seen["model"], seen.get("tools")) == ("eye", None)
    question, shown = cast("list[Json]", seen["messages"][-1]["content"])
    assert (question["text"], shown["image_url"]["url"]) == ("Which colour?", IMAGE_URL)
    assert {line.model: (line.calls, line.input) for line in lines} == {"text": (2, 20), "eye": (1, 700)}
    assert status.model == "local/text"


async def test_which_model_looks(tmp_path: Path) -> None:
    put_image(tmp_path, "a.png")
    own = {"model": "local/both"}
    cases: list[tuple[Json, Json, str | None]] = [
        ({}, {}, None),
        ({}, {"imageModel": "local/eye"}, "eye"),
        (own, {}, "both"),
        (own, {"imageModel": {"primary": "local/eye"}}, "eye"),
        ({**own, "imageModel": "local/text"}, {"imageModel": "local/eye"}, "text"),
    ]
    async with Provider().running() as provider:
        for number, (agent, defaults, expected) in enumerate(cases):
            config = make_config(provider, agent, **defaults)
            state = tmp_path / str(number)
            put_image(state, "a.png")
            async with open_agents_fixture(config, state) as agents:
                offered = "image" in await list_offered(agents)
                assert offered == (expected is not None), (agent, defaults)
                reason = agents.app.toolbox.tools["image"].explain_absence("main", is_sandboxed=False)
                assert (reason is None) == offered
                if expected is None:
                    assert "agents.defaults.imageModel" in (reason or "")
                else:
                    assert (await use(agents, path="a.png"))["model"] == f"local/{expected}"


async def test_what_is_no_image_is_never_sent(tmp_path: Path) -> None:
    put_image(tmp_path, "notes.txt", b"A text.\n")
    put_image(tmp_path, "large.png", PNG + b"\0" * (5 * 1024 * 1024))
    async with Provider().running() as provider:
        async with open_agents_fixture(make_config(provider, imageModel="local/eye"), tmp_path) as agents:
            assert "is not a PNG" in (await use(agents, path="notes.txt"))["error"]
            assert "at most 5242880" in (await use(agents, path="large.png"))["error"]
            assert (await use(agents, path="../antiphon.db"))["status"] in ("error", "forbidden")
            assert (await use(agents, path="missing.png"))["code"] == "not_found"
        assert provider.bodies == []


async def test_a_model_that_fails_or_is_silent_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_image(tmp_path, "a.png")
    provider = Provider()
    provider.script(Failure(status=400, body={"error": {"message": "no images here"}}), Answer(hold_after=0))
    async with (
        provider.running(),
        open_agents_fixture(make_config(provider, imageModel="local/eye"), tmp_path) as agents,
    ):
        refused = await use(agents, path="a.png")
        assert refused["code"] == "unavailable"
        assert "'local/eye' did not answer" in refused["error"]
        image_module = importlib.import_module(
            "antiphon.tools.image"
        )  # the package has a function of this name
        monkeypatch.setattr(image_module, "ANSWER_TIMEOUT_SECONDS", 0.05)
        assert "within" in (await use(agents, path="a.png"))["error"]


GATEWAY = Path(__file__).with_name("command_gateway.py")
COMMITS_KILLED_AT = {
    "before the usage": 1,
    "after the usage": 2,
    "before the result": 3,
    "after the result": 4,
}


@pytest.mark.sqlite_only
@pytest.mark.requirement("AT20", "G28")
@pytest.mark.parametrize("moment", COMMITS_KILLED_AT)
async def test_after_a_crash_the_question_is_asked_again_and_every_answer_is_counted(
    tmp_path: Path, moment: str
) -> None:
    """Each commit after the answer is a moment to be killed. The usage of an answer is recorded in the first."""
    state, answered = tmp_path / "state", tmp_path / "answered"
    put_image(state, "kettle.png")

    def choose(body: Json) -> Answer:
        if is_about_image(body):
            answered.touch()
        return answer_step(body)

    async with Provider(choose=choose).running() as provider:
        config = make_config(provider, imageModel="local/eye")
        victim = await asyncio.create_subprocess_exec(
            *(sys.executable, str(GATEWAY), str(state)),
            config.model_dump_json(by_alias=True, exclude_unset=True),
            *("look", str(COMMITS_KILLED_AT[moment]), str(answered)),
        )
        assert await asyncio.wait_for(victim.wait(), 90) == -signal.SIGKILL
        async with open_agents_fixture(config, state) as agents:
            ended = await agents.wait_for_end(RUN_ID)
            assert ended.reply == "It says: A red kettle.", ended.error
            lines = await agents.operations.transcripts.get_usage(OPERATOR, MAIN)
        asked = sum(map(is_about_image, provider.bodies))
    assert asked == (1 if moment == "after the result" else 2)
    recorded = {line.model: line.calls for line in lines}
    assert recorded["eye"] == asked - (moment == "before the usage")


async def test_a_full_disk_does_not_ask_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [StoreFull("There is no room left.", "Make some."), StoreFull("Still none.", "Make some.")]
    image_module = importlib.import_module("antiphon.tools.image")

    async def record(tx: Tx, *arguments: Any) -> None:
        if failures:
            raise failures.pop()
        await lifecycle.record_tool_usage(tx, *arguments)

    monkeypatch.setattr(image_module, "record_tool_usage", record)
    monkeypatch.setattr(lifecycle, "STORE_FULL_RETRY_SECONDS", 0.01)
    put_image(tmp_path, "kettle.png")
    async with (
        Provider(choose=answer_step).running() as provider,
        open_agents_fixture(make_config(provider, imageModel="local/eye"), tmp_path) as agents,
    ):
        ended = await agents.ask("look")
        assert ended.reply == "It says: A red kettle.", ended.error
        lines = await agents.operations.transcripts.get_usage(OPERATOR, MAIN)
    assert failures == []
    assert sum(map(is_about_image, provider.bodies)) == 1
    assert {line.model: line.calls for line in lines}["eye"] == 1
