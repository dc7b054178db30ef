"""The OpenAI-compatible endpoints, with OpenAI's own client on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from antiphon.bus import Delta
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.gateway.http.run_stream import StreamedText
from antiphon.messages import AssistantMessage, UserMessage
from antiphon.operations.types import ListFilter
from antiphon.runtimes import Deltas, Prompt
from support.app_fixture import (
    BOUND,
    MAIN,
    OPERATOR,
    make_answer,
    make_tool,
    make_tool_calls,
    wait_for_event,
    wait_until,
)
from support.gateway_http import ALL_ENDPOINTS, HttpGatewayFixture, open_event_stream, open_http_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("W5")]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@asynccontextmanager
async def client_of(http_gateway: HttpGatewayFixture) -> AsyncGenerator[openai.AsyncOpenAI]:
    token = http_gateway.tokens.owner_token
    async with openai.AsyncOpenAI(
        base_url=f"{http_gateway.url}/v1", api_key=token, max_retries=0, timeout=BOUND
    ) as client:
        yield client


def user(words: str | list[Any]) -> Any:
    return {"role": "user", "content": words}


async def words(prompt: Prompt) -> AsyncGenerator[str, None]:
    for word in ("one ", "two ", "", "three"):
        yield word
        await asyncio.sleep(0)


async def test_a_completion_is_the_reply_of_a_run(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, None) as http_gateway, client_of(http_gateway) as client:
        answer = await client.chat.completions.create(model="antiphon", messages=[user("say hello there")])
        assert answer.choices[0].message.content == "hello there"
        assert (answer.choices[0].finish_reason, answer.object, answer.model) == (
            "stop",
            "chat.completion",
            "antiphon",
        )
        run = await http_gateway.app.operations.runs.get(OPERATOR, answer.id.removeprefix("chatcmpl-"))
        assert answer.usage is not None
        assert run.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
            run.usage.input,
            run.usage.output,
        )
        assert answer.usage.total_tokens == run.usage.input + run.usage.output
        assert run.session_key.startswith("agent:main:openai:")


async def test_a_streamed_completion_is_the_same_in_pieces(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, None) as http_gateway, client_of(http_gateway) as client:
        stream = await client.chat.completions.create(
            model="antiphon/default",
            messages=[user("slow 0.3 a fairly long answer in many words, with ünïcode")],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(said) == "a fairly long answer in many words, with ünïcode"
        assert len([piece for piece in said if piece]) > 1
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens > 0
        assert len({chunk.id for chunk in chunks}) == 1
        assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


async def test_pieces_add_up_to_the_reply_however_they_come(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, words) as http_gateway, client_of(http_gateway) as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model="main", messages=[user(str(number))], user=f"u{number % 3}", stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*(one(number) for number in range(20))) == ["one two three"] * 20
        await wait_until(_quiet(http_gateway))


def _quiet(http_gateway: HttpGatewayFixture) -> Any:
    async def quiet() -> bool:
        return http_gateway.listeners() == 0 and http_gateway.web.slots.open_count == 0

    return quiet


async def test_the_stream_ends_with_done(http_gateway: HttpGatewayFixture) -> None:
    body = {"model": "antiphon", "messages": [user("x")], "stream": True}
    async with open_event_stream(
        http_gateway.http, "/v1/chat/completions", method="POST", json=body
    ) as stream:
        events = await stream.rest()
        assert events[-1].data == "[DONE]"
        assert "usage" not in events[0].json


async def test_a_model_is_an_agent(tmp_path: Path) -> None:
    settings = {**ALL_ENDPOINTS, "agents": {"list": [{"id": "main"}, {"id": "work"}]}}
    async with (
        open_http_gateway(tmp_path, None, settings=settings) as http_gateway,
        client_of(http_gateway) as client,
    ):
        for model, agent in (
            ("antiphon", "main"), ("antiphon/default", "main"), ("antiphon/work", "work"), ("antiphon:work", "work"),
            ("agent:work", "work"), ("openclaw", "main"), ("openclaw/work", "work"), ("openclaw:default", "main"),
            ("work", "work"), ("WORK", "work"),
        ):  # fmt: skip
            answer = await client.chat.completions.create(model=model, messages=[user("say x")])
            run = await http_gateway.app.operations.runs.get(OPERATOR, answer.id.removeprefix("chatcmpl-"))
            assert run.session_key.startswith(f"agent:{agent}:openai:"), model


async def test_models_are_listed_and_others_are_not_found(tmp_path: Path) -> None:
    settings = {**ALL_ENDPOINTS, "agents": {"list": [{"id": "main"}, {"id": "work"}]}}
    async with (
        open_http_gateway(tmp_path, None, settings=settings) as http_gateway,
        client_of(http_gateway) as client,
    ):
        models = [model.id async for model in client.models.list()]
        assert models == ["antiphon", "antiphon/main", "antiphon/work"]
        for model in ("gpt-5", "antiphon/nobody", "agent:", ""):
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model=model, messages=[user("x")])
            assert missing.value.code == "model_not_found"
            assert missing.value.param == "model"


async def test_a_user_has_a_session_that_remembers(tmp_path: Path) -> None:
    seen: list[int] = []

    async def agent(prompt: Prompt) -> str:
        seen.append(len(prompt.messages))
        return "yes"

    async with open_http_gateway(tmp_path, agent) as http_gateway, client_of(http_gateway) as client:
        before: list[Any] = [user("old"), {"role": "assistant", "content": "answer"}]
        for earlier in (before[:0], before, before):
            answer = await client.chat.completions.create(
                model="antiphon", messages=[*earlier, user("new")], user="ada:1"
            )
            run = await http_gateway.app.operations.runs.get(OPERATOR, answer.id.removeprefix("chatcmpl-"))
            assert run.session_key == "agent:main:openai-user:ada:1"
            before += [user("new"), {"role": "assistant", "content": "yes"}]
        # What the session lacks is added in the client's order, and then it lacks nothing.
        assert seen == [1, 7, 9]
        page = await http_gateway.app.operations.transcripts.read(
            OPERATOR, "agent:main:openai-user:ada:1", HistoryFilter()
        )
        asked = [message["content"] for message in page.messages if message["role"] == "user"]
        assert asked == ["new", "old", "new", "new", "new"]


async def test_a_header_names_the_session(http_gateway: HttpGatewayFixture) -> None:
    async with client_of(http_gateway) as client:
        for header in ("x-openclaw-session-key", "x-antiphon-session-key"):
            answer = await client.chat.completions.create(
                model="antiphon", messages=[user("x")], extra_headers={header: "main"}
            )
            assert (await http_gateway.app.operations.runs.get(OPERATOR, answer.id[9:])).session_key == MAIN
        with pytest.raises(openai.BadRequestError, match="does not belong"):
            await client.chat.completions.create(
                model="antiphon",
                messages=[user("x")],
                extra_headers={"x-openclaw-session-key": "agent:other:main"},
            )


async def test_a_fresh_session_is_told_what_was_said_before_and_the_rules(tmp_path: Path) -> None:
    prompts: list[Prompt] = []

    async def agent(prompt: Prompt) -> str:
        prompts.append(prompt)
        return "yes"

    async with open_http_gateway(tmp_path, agent) as http_gateway, client_of(http_gateway) as client:
        await client.chat.completions.create(
            model="antiphon",
            messages=[
                {"role": "system", "content": "Be brief."},
                user("first"),
                {"role": "assistant", "content": "second"},
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "third"}]},
            ],
        )
    [prompt] = prompts
    assert "Be brief.\n\nBe kind." in prompt.instructions
    first, second, third = prompt.messages
    assert isinstance(first, UserMessage)
    assert isinstance(second, AssistantMessage)
    assert isinstance(third, UserMessage)
    assert (first.content, second.text) == ("first", "second")
    assert third.content[0].text == "third"  # pyright: ignore


async def test_images_are_taken_as_they_are_and_never_fetched(tmp_path: Path) -> None:
    prompts: list[Prompt] = []

    async def agent(prompt: Prompt) -> str:
        prompts.append(prompt)
        return "yes"

    def part(url: str) -> Any:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    async with open_http_gateway(tmp_path, agent) as http_gateway, client_of(http_gateway) as client:
        url = f"data:image/png;base64,{PIXEL}"
        await client.chat.completions.create(model="antiphon", messages=[part(url)])
        content: Any = [
            {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}
        ]
        await client.responses.create(model="antiphon", input=content)
        for message in (prompt.messages[0] for prompt in prompts):
            assert isinstance(message, UserMessage)
            assert message.content[0].data == PIXEL  # pyright: ignore
        for bad in (
            "http://169.254.169.254/x.png",
            "file:///etc/passwd",
            "data:image/png;base64,!",
            "data:text/html;base64,YQ==",
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="antiphon", messages=[part(bad)])
            assert refused.value.param == "messages[0].content[0]"


async def test_requests_that_say_nothing_are_refused(http_gateway: HttpGatewayFixture) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": "antiphon", "messages": []}),
        ("/v1/chat/completions", {"model": "antiphon", "messages": [{"role": "assistant", "content": "x"}]}),
        ("/v1/chat/completions", {"model": "antiphon", "messages": [user("")]}),
        ("/v1/chat/completions", {"model": "antiphon", "messages": [{"role": "nobody", "content": "x"}]}),
        ("/v1/chat/completions", {"model": "antiphon", "messages": [user([{"type": "file"}])]}),
        ("/v1/chat/completions", {"messages": [user("x")]}),
        ("/v1/responses", {"model": "antiphon", "input": []}),
        ("/v1/responses", {"model": "antiphon", "input": [{"type": "function_call_output"}]}),
    ]
    for path, body in requests:
        for stream in (False, True):
            reply = await http_gateway.http.post(path, json={**body, "stream": stream})
            assert reply.status_code == 400, body
            assert reply.json()["error"]["type"] == "invalid_request_error"
    assert (await http_gateway.app.operations.sessions.list(OPERATOR, ListFilter())).count <= 1


async def test_asking_again_with_the_same_key_is_the_same_run(http_gateway: HttpGatewayFixture) -> None:
    async with client_of(http_gateway) as client:
        ids: set[str] = set()
        for stream in (False, False):
            answer = await client.chat.completions.create(
                model="antiphon",
                messages=[user("x")],
                stream=stream,
                extra_headers={"Idempotency-Key": "once"},
            )
            ids.add(answer.id)
        assert ids == {"chatcmpl-once"}
        streamed_again = await client.chat.completions.create(
            model="antiphon", messages=[user("x")], stream=True, extra_headers={"Idempotency-Key": "once"}
        )
        assert "".join([c.choices[0].delta.content or "" async for c in streamed_again]) == "heard x"
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(
                model="antiphon", messages=[user("y")], extra_headers={"Idempotency-Key": "once"}
            )


async def test_a_run_that_fails_is_an_error_that_is_not_tried_again(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, None) as http_gateway:
        token = http_gateway.tokens.owner_token
        async with openai.AsyncOpenAI(
            base_url=f"{http_gateway.url}/v1", api_key=token, timeout=BOUND
        ) as client:
            for ask in (
                client.chat.completions.create(model="antiphon", messages=[user("fail today")]),
                client.responses.create(model="antiphon", input="fail today"),
            ):
                with pytest.raises(openai.InternalServerError) as failed:
                    await ask
                assert failed.value.status_code == 502
                assert failed.value.code == "provider_error"
            stream = await client.chat.completions.create(
                model="antiphon", messages=[user("fail today")], stream=True
            )
            with pytest.raises(openai.APIError, match="failed as instructed"):
                _ = [chunk async for chunk in stream]
        assert (await http_gateway.app.operations.sessions.list(OPERATOR, ListFilter())).count == 3


async def test_an_answer_that_reached_the_limit_says_so(tmp_path: Path) -> None:
    async def agent(prompt: Prompt) -> AssistantMessage:
        return make_answer("half an ans", stop_reason="length")

    async with open_http_gateway(tmp_path, agent) as http_gateway, client_of(http_gateway) as client:
        answer = await client.chat.completions.create(model="antiphon", messages=[user("x")])
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == (
            "length",
            "half an ans",
        )
        response = await client.responses.create(model="antiphon", input="x")
        assert (response.status, response.output_text) == ("incomplete", "half an ans")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"


async def test_a_client_that_leaves_stops_nothing_and_is_not_waited_for(tmp_path: Path) -> None:
    began, go = asyncio.Event(), asyncio.Event()
    runs: list[str] = []

    async def agent(prompt: Prompt) -> str:
        runs.append(prompt.run_id)
        began.set()
        await go.wait()
        return "done"

    async with open_http_gateway(tmp_path, agent) as http_gateway:
        for stream in (False, True):
            began.clear()
            go.clear()
            body = {"model": "antiphon", "messages": [user("x")], "stream": stream}
            asking = asyncio.create_task(http_gateway.http.post("/v1/chat/completions", json=body))
            await wait_for_event(began)
            asking.cancel()
            await asyncio.wait([asking])
            await wait_until(_quiet(http_gateway))
            go.set()
            view = await http_gateway.app.operations.runs.wait(OPERATOR, runs[-1], BOUND)
            assert (view.state, view.reply) == ("ok", "done")


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/chat/completions", {"messages": [user("x")]}), ("/v1/responses", {"input": "x"})]
)
async def test_waiting_clients_learn_that_the_gateway_closes(
    tmp_path: Path, path: str, more: dict[str, Any]
) -> None:
    began = asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        began.set()
        await asyncio.Event().wait()
        return ""

    async with open_http_gateway(tmp_path, agent) as http_gateway:
        asking = asyncio.create_task(http_gateway.http.post(path, json={"model": "antiphon", **more}))
        await wait_for_event(began)
        http_gateway.state.closing.set()
        reply = await asking
        assert reply.status_code == 503
        assert reply.headers["x-should-retry"] == "false"  # OpenAI's clients would start a second run
        assert reply.json()["error"]["code"] == "unavailable"


async def test_nothing_is_accepted_that_could_not_be_waited_for(http_gateway: HttpGatewayFixture) -> None:
    http_gateway.web.slots.max_open = 0
    for path, body in (
        ("/v1/chat/completions", {"messages": [user("x")]}),
        ("/v1/responses", {"input": "x"}),
    ):
        for stream in (False, True):
            reply = await http_gateway.http.post(path, json={"model": "antiphon", "stream": stream, **body})
            assert reply.status_code == 503
            assert "x-should-retry" not in reply.headers
    assert (await http_gateway.app.operations.sessions.list(OPERATOR, ListFilter())).count == 0


async def test_a_run_that_was_stopped_is_no_answer(tmp_path: Path) -> None:
    began = asyncio.Event()

    async def agent(prompt: Prompt) -> str:
        began.set()
        await asyncio.Event().wait()
        return ""

    async with open_http_gateway(tmp_path, agent) as http_gateway:
        body = {"model": "antiphon", "messages": [user("x")], "user": "u"}
        asking = asyncio.create_task(http_gateway.http.post("/v1/chat/completions", json=body))
        await wait_for_event(began)
        await http_gateway.app.operations.runs.stop(OPERATOR, "agent:main:openai-user:u")
        reply = await asking
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "cancelled")
        assert reply.headers["x-should-retry"] == "false"


async def test_a_response_is_a_run_and_the_next_one_goes_on_from_it(tmp_path: Path) -> None:
    seen: list[int] = []

    async def agent(prompt: Prompt) -> str:
        seen.append(len(prompt.messages))
        return f"answer {len(seen)}"

    async with open_http_gateway(tmp_path, agent) as http_gateway, client_of(http_gateway) as client:
        first = await client.responses.create(model="antiphon", input="one", instructions="Be brief.")
        assert (first.status, first.output_text) == ("completed", "answer 1")
        assert first.usage is not None
        second = await client.responses.create(model="antiphon", input="two", previous_response_id=first.id)
        assert second.output_text == "answer 2"
        assert second.previous_response_id == first.id
        assert seen == [1, 3]
        one, two = [
            await http_gateway.app.operations.runs.get(OPERATOR, r.id.removeprefix("resp_"))
            for r in (first, second)
        ]
        assert one.session_key == two.session_key
        for missing in ("resp_nothing", "nothing", "resp_"):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.responses.create(model="antiphon", input="x", previous_response_id=missing)
            assert refused.value.code == "previous_response_not_found"


async def test_a_streamed_response_tells_every_part_in_order(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, None) as http_gateway, client_of(http_gateway) as client:
        stream = await client.responses.create(
            model="antiphon", input=[{"role": "user", "content": "slow 0.2 one two three four"}], stream=True
        )
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert [kind for kind in dict.fromkeys(kinds)] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert len(deltas) > 1
        assert "".join(deltas) == "one two three four"
        last = events[-1]
        assert last.type == "response.completed"
        assert isinstance(last.response, Response)
        assert last.response.output_text == "one two three four"
        assert last.response.usage is not None


async def test_the_clients_own_stream_helper_understands_it(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, words) as http_gateway, client_of(http_gateway) as client:
        async with client.responses.stream(model="antiphon", input="x") as stream:
            async for _ in stream:
                pass
            assert (await stream.get_final_response()).output_text == "one two three"
        async with client.chat.completions.stream(model="antiphon", messages=[user("x")]) as chat:
            async for _ in chat:
                pass
            assert (await chat.get_final_completion()).choices[0].message.content == "one two three"


async def test_a_streamed_response_that_fails_says_so(tmp_path: Path) -> None:
    async with open_http_gateway(tmp_path, None) as http_gateway, client_of(http_gateway) as client:
        stream = await client.responses.create(model="antiphon", input="fail today", stream=True)
        events = [event async for event in stream]
        last = events[-1]
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert "failed as instructed" in last.response.error.message


async def test_what_is_said_before_a_tool_is_told_and_set_apart(tmp_path: Path) -> None:
    from antiphon.engine.toolbox import ToolOutput, ToolRequest
    from antiphon.messages import TextBlock

    async def look(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="a view")

    class Talker:
        reads_history = True
        context_window = None

        async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
            first = len(prompt.messages) == 1
            said = "Let me look." if first else "It is fine."
            deltas.text(said)
            blocks = make_tool_calls("look").content if first else []
            return AssistantMessage(content=[TextBlock(text=said), *blocks], timestamp=1, stop_reason="stop")

        async def close(self) -> None: ...

    async with (
        open_http_gateway(tmp_path, Talker(), tools=lambda _: [make_tool("look", look)]) as http_gateway,
        client_of(http_gateway) as client,
    ):
        stream = await client.chat.completions.create(model="antiphon", messages=[user("x")], stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert said == "Let me look.\n\nIt is fine."
        answer = await client.chat.completions.create(model="antiphon", messages=[user("x")])
        assert answer.choices[0].message.content == "It is fine."


def delta(number: int, piece: str = "", *, restart: bool = False) -> Delta:
    return Delta(session_key="k", run_id="r", number=number, text=piece, restart=restart)


async def test_what_was_told_is_not_told_again_after_a_restart() -> None:
    words = StreamedText()
    pieces = [
        words.add_delta(delta(1, "one ")),
        words.add_delta(delta(2, "two ")),
        words.add_delta(delta(3, restart=True)),
        words.add_delta(delta(4, "one ")),
        words.add_delta(delta(5, "two three")),
        words.add_committed_step(make_answer("one two three")),
    ]
    assert pieces == ["one ", "two ", "", "", "three", ""]
    assert words.sent_text == "one two three"


async def test_another_answer_after_a_restart_is_told_as_a_whole() -> None:
    words = StreamedText()
    pieces = [
        words.add_delta(delta(1, "one ")),
        words.add_delta(delta(2, restart=True)),
        words.add_delta(delta(3, "else")),
    ]
    assert pieces == ["one ", "", "\n\nelse"]
    assert words.finish("else, then") == ", then"


async def test_a_step_of_which_a_piece_was_missed_is_told_when_it_is_whole() -> None:
    words = StreamedText()
    assert words.add_delta(delta(1, "one ")) == "one "
    assert words.add_delta(delta(3, "three ")) == ""
    assert words.add_delta(delta(4, "four")) == ""
    assert words.add_committed_step(make_answer("one two three four")) == "two three four"
    assert words.add_delta(delta(5, "next")) == "\n\nnext"
