"""The OpenAI routes keep what a client sends, down to the model's provider, or refuse it by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest

from antiphon.engine.runs import client_history
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.gateway.openai.common import MAX_MESSAGES_PER_REQUEST
from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, DATABASE, OPERATOR
from support.databases import query_database
from support.gateway_http import ALL_ENDPOINTS, HttpGatewayFixture, open_http_gateway
from support.model_provider import Answer, Call, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W5")]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLING = Answer(text=("Let me see.",), calls=(Call("get_weather", '{"city":"Oslo"}', id="call_w"),))
REQUEST_SECONDS = 60.0  # the first request of an API imports its library
Api = Literal["openai-completions", "openai-responses", "anthropic-messages"]


@asynccontextmanager
async def gateway(
    path: Path, provider: Provider, api: Api = "openai-completions"
) -> AsyncGenerator[tuple[HttpGatewayFixture, openai.AsyncOpenAI]]:
    base = provider.url if api == "anthropic-messages" else f"{provider.url}/v1"
    models = [{"id": "m", "maxTokens": 500}]
    settings = {
        **ALL_ENDPOINTS,
        "models": {"providers": {"local": {"baseUrl": base, "apiKey": "k", "api": api, "models": models}}},
        "agents": {"defaults": {"model": "local/m"}},
    }
    async with (
        open_http_gateway(path, None, settings=settings) as http_gateway,
        openai.AsyncOpenAI(
            base_url=f"{http_gateway.url}/v1",
            api_key=http_gateway.tokens.owner_token,
            max_retries=0,
            timeout=REQUEST_SECONDS,
        ) as client,
    ):
        yield http_gateway, client


@pytest.fixture
async def provider() -> AsyncGenerator[Provider]:
    async with Provider().running() as running:
        yield running


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def test_settings_and_earlier_messages_reach_the_provider(tmp_path: Path, provider: Provider) -> None:
    schema = {"name": "out", "schema": {"type": "object"}}
    async with gateway(tmp_path, provider) as (_, client):
        await client.chat.completions.create(
            model="antiphon",
            messages=[
                {"role": "system", "content": "Speak like a pirate."},
                {"role": "assistant", "content": "How can I help?"},
                user("first"),
                {"role": "assistant", "content": "second"},
                user("third"),
            ],
            temperature=0.25,
            top_p=0.5,
            max_tokens=77,
            stop=["END"],
            seed=4,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            response_format={"type": "json_schema", "json_schema": schema},  # pyright: ignore
        )
    [body] = provider.bodies
    expected = {
        "temperature": 0.25,
        "top_p": 0.5,
        "max_tokens": 77,
        "stop": ["END"],
        "seed": 4,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    assert {name: body.get(name) for name in expected} == expected
    system, *messages = body["messages"]
    assert "Speak like a pirate." in system["content"]
    said = [message["content"] for message in messages if message["role"] in {"user", "assistant"}]
    assert said[-4:] == ["How can I help?", "first", "second", "third"]


def assistant(text: str) -> Any:
    return {"role": "assistant", "content": text}


def said_in(body: Any) -> list[str]:
    """What a provider was told, without the system prompt."""
    return [message["content"] for message in body["messages"] if message["role"] in {"user", "assistant"}]


HELLO = [user("hello"), assistant("ok.")]
NO = assistant("No, never delete, that is not ok.")


@pytest.mark.parametrize(
    ("earlier", "added"),
    [
        ([*HELLO, user("delete all?"), NO, user("hello"), assistant("Hi again")], 2),
        ([*HELLO, *HELLO, *HELLO], 2),
        ([user("hello"), NO, user("more"), assistant("ok.")], 0),
        ([user("else"), assistant("ok."), user("hello"), assistant("ok.")], 0),
        ([assistant(" ok.\n")], 1),
    ],
)
async def test_a_session_gets_what_it_lacks_whole_and_in_the_order_of_the_client(
    tmp_path: Path, provider: Provider, earlier: list[Any], added: int
) -> None:
    """Twice, since what was added the first time is known the second time."""
    provider.default = Answer(text=("ok.",))
    async with gateway(tmp_path, provider) as (_, client):
        for messages in ([], earlier, [*earlier, user("next?"), assistant("ok.")]):
            last = user("next?" if messages else "hello")
            await client.chat.completions.create(model="antiphon", messages=[*messages, last], user="ada")
    _, second, third = map(said_in, provider.bodies)
    rest = [message["content"] for message in earlier[added:]]
    assert second == ["hello", "ok.", *rest, "next?"]
    assert third == [*second, "ok.", "next?"]


@pytest.mark.parametrize("field", ["messages", "input"])
async def test_a_request_carries_a_bounded_number_of_messages(
    tmp_path: Path, provider: Provider, field: str
) -> None:
    async with gateway(tmp_path, provider) as (_, client):
        messages: Any = [user(f"word-{at}") for at in range(MAX_MESSAGES_PER_REQUEST + 1)]

        async def ask(these: Any) -> None:
            if field == "input":
                await client.responses.create(model="antiphon", input=these)
            else:
                await client.chat.completions.create(model="antiphon", messages=these)

        with pytest.raises(
            openai.BadRequestError, match=f"'{field}' has 501 messages, and at most 500"
        ) as refused:
            await ask(messages)
        assert refused.value.param == field
        await ask(messages[1:])
        assert len(provider.bodies) == 1
        # What is in the transcript is not kept with the run as well.
        [run] = query_database(tmp_path / DATABASE, "SELECT options FROM runs")
        assert run["options"] == "{}"


async def test_a_document_and_a_question_after_it_stay_as_they_are(
    tmp_path: Path, provider: Provider
) -> None:
    async with gateway(tmp_path, provider) as (_, client):
        messages = [user("a document"), user("another one"), user("what do they say?")]
        await client.chat.completions.create(model="antiphon", messages=messages, user="ada")
    [body] = provider.bodies
    assert "assistant" not in [message["role"] for message in body["messages"]]
    assert "\n\n".join(said_in(body)) == "a document\n\nanother one\n\nwhat do they say?"


async def test_messages_older_than_what_is_compared_are_not_added_again(
    tmp_path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_history, "ENTRIES_PER_PAGE", 2)
    monkeypatch.setattr(client_history, "MAX_ENTRIES_COMPARED", 2)
    provider.default = Answer(text=("ok.",))
    messages: list[Any] = []
    async with gateway(tmp_path, provider) as (_, client):
        for question in ("one", "two", "three", "four"):
            messages.append(user(question))
            await client.chat.completions.create(model="antiphon", messages=messages, user="ada")
            messages.append(assistant("ok."))
    assert said_in(provider.bodies[-1]) == ["one", "ok.", "two", "ok.", "three", "ok.", "four"]


async def test_the_steps_of_a_streamed_answer_are_known_as_one(tmp_path: Path, provider: Provider) -> None:
    provider.script(
        Answer(text=("Let me see.",), calls=(Call("session_status", "{}", id="call_s"),)),
        Answer(text=("Ready.",)),
    )
    async with gateway(tmp_path, provider) as (_, client):
        stream = await client.chat.completions.create(
            model="antiphon", messages=[user("hello")], user="ada", stream=True
        )
        told = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert told == "Let me see.\n\nReady."
        for earlier in ([user("hello"), assistant(told)], [user("hello"), assistant("Not Ready.")]):
            await client.chat.completions.create(
                model="antiphon", messages=[*earlier, user("next?")], user="ada"
            )
    steps = said_in(provider.bodies[1])
    known, other = map(said_in, provider.bodies[2:])
    assert known == [*steps, "Ready.", "next?"]
    assert other[len(known) + 1 :] == ["hello", "Not Ready.", "next?"]


@pytest.mark.parametrize("asked", [100, 5000])
async def test_a_limit_holds_beside_the_one_of_the_model(
    tmp_path: Path, provider: Provider, asked: int
) -> None:
    async with gateway(tmp_path, provider) as (_, client):
        await client.chat.completions.create(
            model="antiphon", messages=[user("x")], max_completion_tokens=asked
        )
    assert provider.bodies[0]["max_tokens"] == min(asked, 500)


async def test_other_apis_get_the_settings_in_their_own_fields(tmp_path: Path, provider: Provider) -> None:
    async with gateway(tmp_path / "a", provider, "anthropic-messages") as (_, client):
        await client.chat.completions.create(
            model="antiphon", messages=[user("x")], temperature=0.5, max_tokens=50, stop="END"
        )
    async with gateway(tmp_path / "r", provider, "openai-responses") as (_, client):
        await client.responses.create(
            model="antiphon",
            input="x",
            temperature=0.5,
            max_output_tokens=50,
            text={"format": {"type": "json_object"}},
        )
    anthropic, responses = provider.bodies
    assert (anthropic["temperature"], anthropic["max_tokens"]) == (0.5, 50)
    assert anthropic["stop_sequences"] == ["END"]
    assert (responses["temperature"], responses["max_output_tokens"]) == (0.5, 50)
    assert responses["text"]["format"] == {"type": "json_object"}


async def test_a_setting_that_the_model_does_not_have_is_refused_by_name(
    tmp_path: Path, provider: Provider
) -> None:
    async with gateway(tmp_path, provider, "anthropic-messages") as (_, client):
        with pytest.raises(openai.BadRequestError, match="'seed'"):
            await client.chat.completions.create(model="antiphon", messages=[user("x")], seed=1)
    assert provider.bodies == []


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 2}),
    ("logprobs", {"logprobs": True}),
    ("logit_bias", {"logit_bias": {"50256": 1}}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("top_k", {"top_k": 5}),
    ("temperature", {"temperature": 3}),
    ("max_tokens", {"max_tokens": 1, "max_completion_tokens": 2}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tools[0]", {"tools": [{"type": "function", "function": {"name": "sessions_list"}}]}),
    ("tools[0]", {"tools": [{"type": "function", "function": {"name": "no spaces"}}]}),
    ("messages[0].name", {"messages": [{"role": "user", "content": "x", "name": "Ada"}]}),
    ("messages[0]", {"messages": [{"role": "tool", "content": "x", "tool_call_id": "unknown"}]}),
    ("messages", {"messages": [user("x"), {"role": "assistant", "content": "y"}]}),
]


@pytest.mark.parametrize(
    ("field", "sent"), REFUSED, ids=[f"{field}-{i}" for i, (field, _) in enumerate(REFUSED)]
)
async def test_a_field_that_is_not_honoured_is_refused_by_name(
    http_gateway: HttpGatewayFixture, field: str, sent: dict[str, Any]
) -> None:
    body = {"model": "antiphon", "messages": [user("x")], **sent}
    reply = await http_gateway.http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", field), error


async def test_values_that_ask_for_nothing_are_taken(http_gateway: HttpGatewayFixture) -> None:
    neutral = {"n": 1, "logprobs": False, "store": False, "service_tier": "auto", "metadata": {"a": "b"}}
    body = {"model": "antiphon", "messages": [user("x")], **neutral, "functions": None}
    assert (await http_gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
    for field, value in {"background": True, "truncation": "never", "verbosity": "high"}.items():
        reply = await http_gateway.http.post(
            "/v1/responses", json={"model": "antiphon", "input": "x", field: value}
        )
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", [None, "ada"])
async def test_client_side_tools_are_called_by_the_client(
    tmp_path: Path, provider: Provider, stream: bool, session: str | None
) -> None:
    """The run ends with the call; the next request brings the result, and the model reads it as one."""
    provider.script(CALLING, Answer(text=("It rains.",)))
    async with gateway(tmp_path, provider) as (_, client):
        asked: list[Any] = [user("How is Oslo?")]
        call = await _called(client, asked, stream, session)
        assert (call["id"], call["function"]) == (
            "call_w",
            {"name": "get_weather", "arguments": '{"city":"Oslo"}'},
        )
        done = await client.chat.completions.create(
            model="antiphon",
            messages=[
                *asked,
                {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_w", "content": "rain"},
            ],
            tools=[WEATHER],
            user=session or openai.omit,
        )
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("It rains.", "stop")
    first, second = provider.bodies
    assert [tool["function"] for tool in first["tools"]][-1]["name"] == "get_weather"
    question, answer, result = [message for message in second["messages"] if message["role"] != "system"]
    assert question["content"] == "How is Oslo?"
    assert answer["tool_calls"][0]["id"] == result["tool_call_id"] == "call_w"
    assert (result["role"], result["content"]) == ("tool", "rain")


async def _called(client: openai.AsyncOpenAI, messages: list[Any], stream: bool, session: str | None) -> Any:
    if not stream:
        answer = await client.chat.completions.create(
            model="antiphon", messages=messages, tools=[WEATHER], user=session or openai.omit
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content == "Let me see."
        [call] = answer.choices[0].message.tool_calls or []
        return call.model_dump()
    chunks = [
        chunk.choices[0]
        async for chunk in await client.chat.completions.create(
            model="antiphon", messages=messages, tools=[WEATHER], stream=True, user=session or openai.omit
        )
    ]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    assert chunks[-1].finish_reason == "tool_calls"
    [call] = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    return {name: value for name, value in call.model_dump().items() if name != "index"}


async def test_a_demanded_tool_is_the_only_one_on_offer(tmp_path: Path, provider: Provider) -> None:
    provider.script(CALLING)
    async with gateway(tmp_path, provider) as (_, client):
        await client.chat.completions.create(
            model="antiphon",
            messages=[user("x")],
            tools=[WEATHER],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            parallel_tool_calls=False,
        )
        await client.chat.completions.create(
            model="antiphon", messages=[user("x")], tools=[WEATHER], tool_choice="none"
        )
    demanded, declined = provider.bodies
    assert [tool["function"]["name"] for tool in demanded["tools"]] == ["get_weather"]
    assert demanded["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    assert demanded["parallel_tool_calls"] is False
    assert "get_weather" not in [tool["function"]["name"] for tool in declined["tools"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_client_side_tools_too(tmp_path: Path, provider: Provider, stream: bool) -> None:
    provider.script(CALLING, Answer(text=("It rains.",)))
    tool: Any = {"type": "function", **WEATHER["function"], "strict": False}
    async with gateway(tmp_path, provider) as (_, client):
        if stream:
            async with client.responses.stream(
                model="antiphon", input="How is Oslo?", tools=[tool]
            ) as events:
                async for _event in events:
                    pass
                first = await events.get_final_response()
        else:
            first = await client.responses.create(model="antiphon", input="How is Oslo?", tools=[tool])
        call = first.output[-1]
        assert call.type == "function_call"
        assert (call.call_id, call.name, call.arguments) == ("call_w", "get_weather", '{"city":"Oslo"}')
        assert first.output_text == "Let me see."
        second = await client.responses.create(
            model="antiphon",
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": "call_w", "output": "rain"}],
        )
        assert second.output_text == "It rains."
    result = provider.bodies[1]["messages"][-1]
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "call_w", "rain")


@pytest.mark.requirement("G2")
async def test_what_a_request_set_survives_a_restart(tmp_path: Path) -> None:
    seen: list[Prompt] = []
    begun = asyncio.Event()

    async def hang(prompt: Prompt) -> str:
        begun.set()
        await asyncio.Event().wait()
        return "never"

    async def answer(prompt: Prompt) -> str:
        seen.append(prompt)
        return "yes"

    body = {
        "model": "antiphon",
        "user": "ada",
        "messages": [user("old"), {"role": "assistant", "content": "answer"}, user("new")],
        "temperature": 0.5,
        "tools": [WEATHER],
    }
    headers = {"idempotency-key": "k1"}
    async with open_http_gateway(tmp_path, hang) as http_gateway:
        asking = asyncio.create_task(
            http_gateway.http.post("/v1/chat/completions", json=body, headers=headers)
        )
        async with asyncio.timeout(BOUND):
            await begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with open_http_gateway(tmp_path, answer) as http_gateway:
        reply = await http_gateway.http.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.json()["choices"][0]["message"]["content"] == "yes"
        changed = await http_gateway.http.post(
            "/v1/chat/completions", json={**body, "temperature": 1}, headers=headers
        )
        assert changed.status_code == 409  # another request under the same key
        page = await http_gateway.app.operations.transcripts.read(
            OPERATOR, "agent:main:openai-user:ada", HistoryFilter()
        )
    [prompt] = seen
    assert prompt.sampling is not None
    assert prompt.sampling.temperature == 0.5
    assert "get_weather" in {tool.name for tool in prompt.tools}
    assert [message["role"] for message in page.messages] == ["user", "assistant", "user", "assistant"]
