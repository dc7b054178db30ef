"""Providers that are not to be trusted: with memory, with time, with where a request goes and with what is repeated."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from test_model import HURRIED, KEY, MODELS, Recorder, every, library, prompt_of, spec_for, step

from antiphon.config import parse
from antiphon.errors import ProviderError
from antiphon.messages import TextBlock, ToolCall, ToolResult
from antiphon.runtimes.http_reader import HttpReader
from antiphon.runtimes.model import (
    INVALID_ARGUMENTS_KEY,
    MAX_RETRY_AFTER_SECONDS,
    Api,
    ModelPrice,
    ModelRuntime,
)
from antiphon.runtimes.openai_chat.reader import CompletionsReader
from antiphon.runtimes.pydantic_ai.reader import PydanticReader
from antiphon.runtimes.registry import build_model_spec
from antiphon.runtimes.retry import RetryPolicy
from antiphon.runtimes.tool_calls import MAX_ARGUMENT_LEVELS, MAX_KEPT_TOOL_CALLS, is_too_deep
from support.model_provider import Answer, Call, Failure, Provider, Tokens, serve_asgi

pytestmark = pytest.mark.anyio
__all__ = ["library"]  # the fixture that chooses between the readers

BOUND = 60.0
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Any, Send], Awaitable[None]]
readers = pytest.mark.parametrize("reader", [CompletionsReader, PydanticReader])


def endless(piece: bytes, headers: tuple[tuple[bytes, bytes], ...] = (), status: int = 200) -> App:
    """A provider that sends the same for ever, as long as it is read."""

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        start = {"type": "http.response.start", "status": status}
        await send(start | {"headers": [(b"content-type", b"text/event-stream"), *headers]})
        leaving = asyncio.create_task(_left(receive))
        while not leaving.done():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)

    return app


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def reading(
    reader: type[HttpReader], app: App, retry_policy: RetryPolicy = HURRIED, **changes: Any
) -> AsyncGenerator[HttpReader]:
    async with asyncio.timeout(BOUND), serve_asgi(app) as url:
        opened = reader(spec_for("openai-completions", url, **changes), retry_policy)
        try:
            yield opened
        finally:
            await opened.close()


async def failing(reader: HttpReader) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await reader.read(prompt_of(), Recorder())
    return caught.value


def event(delta: Any, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}], **more}).encode() + b"\n\n"


FLOODS = {
    "text": event({"content": "word " * 100}),
    "thoughts": event({"reasoning_content": "word " * 100}),
    "refusals": event({"refusal": "word " * 100}),
    "arguments": event({"tool_calls": [{"index": 0, "function": {"name": "add", "arguments": "1" * 999}}]}),
    "comments": b": keep-alive\n\n" * 100,
    "empty chunks": event({}, id="x" * 2000),
    "a line without an end": b"data: " + b"x" * 10_000,
    "an event without an end": b"data: x\n" * 1000,
}


@readers
@pytest.mark.parametrize("flood", FLOODS)
async def test_an_answer_without_end_is_cut_off(
    reader: type[HttpReader], flood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.runtimes.http_reader.MIN_WIRE_BYTES", 700_000)
    monkeypatch.setattr("antiphon.runtimes.http_reader.MIN_EVENT_BYTES", 100_000)
    async with reading(reader, endless(FLOODS[flood]), max_answer_bytes=10_000) as opened:
        error = await failing(opened)
    assert not error.retryable
    assert "answer of 'gpt-5' that is too long to store" in str(error)
    assert "store.messageMaxBytes" in str(error)


@readers
async def test_files_in_the_arguments_of_calls_are_counted_apart(reader: type[HttpReader]) -> None:
    """A sub-agent's files may be larger than a message; words may not take their place."""
    limits: dict[str, Any] = {"max_answer_bytes": 10_000, "max_attachment_bytes": 50_000}
    given = {"x": "1" * 40_000}
    async with asyncio.timeout(BOUND), Provider().running() as provider:
        provider.script(Answer(calls=(Call("add", json.dumps(given)),)))
        opened = reader(spec_for("openai-completions", provider.url, **limits), HURRIED)
        answer = await opened.read(prompt_of(), Recorder())
        await opened.close()
    assert [block.arguments for block in answer.content if isinstance(block, ToolCall)] == [given]
    for flood in ("arguments", "text"):
        async with reading(reader, endless(FLOODS[flood]), **limits) as opened:
            assert "too long to store" in str(await failing(opened))


@readers
async def test_calls_without_end_are_cut_off(reader: type[HttpReader]) -> None:
    calls = b"".join(
        event({"tool_calls": [{"index": at, "id": f"c{at}", "function": {"name": "add", "arguments": "{}"}}]})
        for at in range(2000)
    )
    async with reading(reader, endless(calls), max_answer_bytes=20_000) as opened:
        assert "too long to store" in str(await failing(opened))
    async with reading(reader, endless(calls)) as opened:
        assert "too many tool calls (more than 1024)" in str(await failing(opened))


@readers
async def test_a_few_compressed_bytes_are_not_millions(reader: type[HttpReader]) -> None:
    bomb = gzip.compress(event({"content": "x" * 1000}) * 20_000)
    assert len(bomb) < 100_000
    app = endless(bomb, headers=((b"content-encoding", b"gzip"),))
    async with reading(reader, app, max_answer_bytes=10_000) as opened:
        assert "too long to store" in str(await failing(opened))
    odd = endless(b"x", headers=((b"content-encoding", b"br"),))
    async with reading(reader, odd) as opened:
        assert "unsupported encoding" in str(await failing(opened))
    broken = endless(b"no gzip", headers=((b"content-encoding", b"gzip"),))
    async with reading(reader, broken) as opened:
        assert "could not be decompressed" in str(await failing(opened))


@readers
async def test_an_answer_that_is_compressed_unasked_is_read(reader: type[HttpReader]) -> None:
    said = b"".join((event({"content": "héllo"}), event({}, id="1"), STOP))

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": gzip.compress(said)})

    async with reading(reader, app) as opened:
        assert (await opened.read(prompt_of(), Recorder())).text == "héllo"


STOP = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@readers
async def test_an_error_without_end_is_read_as_far_as_it_matters(reader: type[HttpReader]) -> None:
    async with reading(reader, endless(b"oh no! " * 1000, status=500)) as opened:
        error = await failing(opened)
    assert error.data["status"] == 500
    assert error.retryable


@every
async def test_no_redirect_to_another_origin_is_followed(api: Api, library: None) -> None:
    async with asyncio.timeout(BOUND), Provider().running() as other, Provider().running() as provider:
        for status, target in (
            (307, other.url),
            (302, other.url),
            (308, "https://127.0.0.1"),
            (307, "http://["),
        ):
            provider.script(Failure(status=status, body={}, headers=(("location", f"{target}/v1/steal"),)))
        runtime = ModelRuntime(spec_for(api, provider.url), retry_policy=HURRIED)
        for _ in range(4):
            with pytest.raises(ProviderError) as caught:
                await runtime.step(prompt_of(), Recorder())
            assert not caught.value.retryable
            assert "redirects requests" in str(caught.value) or "30" in str(caught.value)
        assert other.received == []
        same = {"chat": "/chat/completions", "responses": "/responses", "anthropic": "/messages"}
        place = {"openai-completions": "chat", "openai-responses": "responses"}.get(api, "anthropic")
        home = Failure(status=307, body={}, headers=(("location", f"{provider.url}/v1{same[place]}"),))
        provider.script(home)
        assert (await runtime.step(prompt_of(), Recorder())).text == "Hello there."
        await runtime.close()


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel"])
async def test_a_key_that_cannot_be_sent_is_reported_as_such_and_not_retried(key: str) -> None:
    async with asyncio.timeout(BOUND), Provider().running() as provider:
        spec = replace(spec_for("openai-completions", provider.url), api_key=key)
        with pytest.raises(ProviderError, match="a character that HTTP does not allow") as caught:
            await step(spec)
        assert not caught.value.retryable and key not in str(caught.value)
        assert provider.received == []


@every
@pytest.mark.parametrize("name", ["x" * 200_000, "a\x1b[31mb", "two\nlines", f"m-{KEY}", "<<<x>>>", "Größe"])
async def test_a_name_that_is_no_models_is_not_repeated(api: Api, name: str, library: None) -> None:
    async with asyncio.timeout(BOUND), Provider().running() as provider:
        provider.script(Answer(text=("hi",), model=name))
        assert (await step(spec_for(api, provider.url))).model == MODELS[api]


@every
async def test_a_short_key_or_header_may_be_part_of_a_models_name(api: Api, library: None) -> None:
    async with asyncio.timeout(BOUND), Provider().running() as provider:
        provider.script(Answer(text=("hi",), model="kimi-k2-preview"))
        spec = replace(spec_for(api, provider.url), api_key="k", headers={"x-tier": "preview"})
        assert (await step(spec)).model == "kimi-k2-preview"


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@every
@pytest.mark.parametrize("levels", [MAX_ARGUMENT_LEVELS + 1, 970, 20_000])
async def test_arguments_nested_too_deeply_are_invalid_ones(api: Api, levels: int, library: None) -> None:
    async with asyncio.timeout(BOUND), Provider().running() as provider:
        provider.script(Answer(calls=(Call("add", nested(levels)),)))
        answer = await step(spec_for(api, provider.url))
        (call,) = answer.tool_calls
        assert (call.arguments, call.native and call.native[INVALID_ARGUMENTS_KEY]) == ({}, nested(levels))
        result = ToolResult(
            tool_call_id=call.id, tool_name="add", content=[TextBlock(text="no")], timestamp=1
        )
        question = prompt_of().messages[0]
        again = await step(spec_for(api, provider.url), prompt_of(question, answer, result))
        assert again.text == "Hello there."


def test_what_is_deep_enough_is_taken() -> None:
    assert not is_too_deep(json.loads(nested(MAX_ARGUMENT_LEVELS)))
    assert is_too_deep(json.loads(nested(MAX_ARGUMENT_LEVELS + 1)))


@readers
async def test_chunks_nested_too_deeply_are_no_answer(reader: type[HttpReader]) -> None:
    deep = b'data: {"choices": [], "usage": ' + nested(100_000).encode() + b"}\n\n"
    async with reading(reader, endless(deep)) as opened:
        error = await failing(opened)
    assert "broke off" in str(error)


@every
@pytest.mark.parametrize(
    "value", ["1" + "0" * 308, "9" * 4000, "9" * 5000, "inf", "nan", "-1", "Fri, 31 Dec 9999 23:59:59 GMT"]
)
@pytest.mark.parametrize("header", ["retry-after", "retry-after-ms"])
async def test_a_wait_that_is_none_is_not_believed(api: Api, value: str, header: str, library: None) -> None:
    async with asyncio.timeout(BOUND), Provider().running() as provider:
        refusal = {"error": {"message": "slow down", "type": "rate_limit_error"}}
        provider.default = Failure(status=429, body=refusal, headers=((header, value),))
        with pytest.raises(ProviderError) as caught:
            await step(spec_for(api, provider.url))
    assert "is limiting the requests" in str(caught.value)
    assert caught.value.data.get("retryAfter", 0) <= MAX_RETRY_AFTER_SECONDS


@every
async def test_of_too_many_calls_the_first_are_kept(api: Api, library: None) -> None:
    async with asyncio.timeout(BOUND), Provider().running() as provider:
        many = tuple(Call("add", f'{{"a": {at}}}', f"c{at}") for at in range(MAX_KEPT_TOOL_CALLS + 50))
        provider.script(Answer(calls=many))
        answer = await step(spec_for(api, provider.url))
    assert [call.arguments["a"] for call in answer.tool_calls] == list(range(MAX_KEPT_TOOL_CALLS))
    assert answer.usage is not None


@readers
@pytest.mark.parametrize(
    "drip", [b": keep-alive\n\n", event({}), event({"role": "assistant", "content": ""})]
)
async def test_keep_alives_are_no_content(reader: type[HttpReader], drip: bytes) -> None:
    retry_policy = RetryPolicy(content=0.3)
    async with reading(reader, endless(drip), retry_policy, max_answer_bytes=1_000_000_000) as opened:
        error = await failing(opened)
    assert not error.retryable
    assert "without answering" in str(error)


@readers
async def test_content_is_waited_for_as_long_as_it_comes(reader: type[HttpReader]) -> None:
    clock = asyncio.get_running_loop()
    retry_policy = RetryPolicy(content=0.2)

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        until = clock.time() + 4 * retry_policy.content
        while clock.time() < until:
            await send({"type": "http.response.body", "body": event({"content": "x"}), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": STOP})

    async with reading(reader, app, retry_policy, max_answer_bytes=1_000_000_000) as opened:
        assert set((await opened.read(prompt_of(), Recorder())).text) == {"x"}


@every
async def test_a_configured_price_is_charged(api: Api, library: None) -> None:
    config, _ = parse(
        {
            "models": {
                "providers": {
                    "p": {
                        "baseUrl": "http://127.0.0.1:9",
                        "api": api,
                        "models": [
                            {"id": "m", "cost": {"input": 1, "output": 2, "cacheRead": 3, "cacheWrite": 4}}
                        ],
                    }
                }
            }
        }
    )
    price = build_model_spec(config.find_model("p/m"), config).price
    assert price == ModelPrice(input=1, output=2, cache_read=3, cache_write=4)
    async with asyncio.timeout(BOUND), Provider().running() as provider:
        provider.script(Answer(text=("hi",), tokens=Tokens(input=1_000_000, output=1_000_000)))
        usage = (await step(spec_for(api, provider.url, price=price))).usage
    assert usage is not None
    assert usage.cost is not None
    assert usage.cost.total == pytest.approx(3.0)
