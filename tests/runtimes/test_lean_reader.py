"""The lean reader of chat completions against the one it replaces: same requests, same transcripts, same errors."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx2
import pydantic_ai.profiles.openai as openai_profiles
import pytest
from hypothesis import given, settings
from test_model import KEY, Recorder, prompt_of, result_of, spec_for, transcripts

from antiphon.clock import ManualClock
from antiphon.errors import ProviderError
from antiphon.messages import (
    AssistantMessage,
    CompactionEntry,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    TokenUsage,
    ToolCall,
    ToolResult,
    UserMessage,
    decode_message,
    encode_message,
)
from antiphon.runtimes import Prompt
from antiphon.runtimes.model import (
    INVALID_ARGUMENTS_KEY,
    ModelPrice,
    ModelSpec,
    is_plain_chat_completions,
)
from antiphon.runtimes.openai_chat import reader as completions_reader
from antiphon.runtimes.openai_chat.answer import EventStreamParser
from antiphon.runtimes.openai_chat.reader import CompletionsReader
from antiphon.runtimes.openai_chat.reasoning_efforts import load_library_efforts, load_reasoning_efforts
from antiphon.runtimes.pydantic_ai.reader import PydanticReader
from antiphon.runtimes.retry import RetryPolicy
from antiphon.runtimes.text import MAX_TOKENS_PER_CALL
from support.model_provider import Provider

pytestmark = pytest.mark.anyio

PIXEL = ImageBlock(data="iVBORw0KGgo=", mime_type="image/png")
BROKEN = ImageBlock(data="!", mime_type="image/png")
CALL = ToolCall(id="c1", name="add", arguments={"a": 1, "ü": [None, 1.5]})
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def spec_of(**changes: Any) -> ModelSpec:
    return spec_for("openai-completions", "http://provider", **changes)


def readers(app: Any, spec: ModelSpec) -> tuple[CompletionsReader, PydanticReader]:
    def client() -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))

    clock = ManualClock()
    return (
        CompletionsReader(spec, RetryPolicy(), http=client(), clock=clock),
        PydanticReader(spec, RetryPolicy(), http=client(), clock=clock),
    )


async def bodies_of(prompt: Prompt, spec: ModelSpec) -> tuple[Any, Any]:
    provider = Provider()
    for reader in readers(provider, spec):
        await reader.read(prompt, Recorder())
        await reader.close()
    lean, library = provider.bodies
    return lean, library


def said(*content: TextBlock | ThinkingBlock | ToolCall, **changes: Any) -> AssistantMessage:
    given: dict[str, Any] = {"timestamp": 1, "stop_reason": "stop", "provider": "openai"}
    return AssistantMessage(content=[*content], **{**given, **changes})


def user(content: str | list[TextBlock | ImageBlock] = "hi") -> UserMessage:
    return UserMessage(content=content, timestamp=1)


def shown(*content: TextBlock | ImageBlock, **changes: Any) -> ToolResult:
    return ToolResult(tool_call_id=CALL.id, tool_name='a "b"', content=[*content], timestamp=1, **changes)


THOUGHT = ThinkingBlock(thinking="hm", native={"id": "reasoning_content"})
CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "nothing": (),
    "text": (user(), user("again"), said(TextBlock(text="yes")), user(" ")),
    "images": (
        user([TextBlock(text="look"), PIXEL, TextBlock(text=" ")]),
        user("and"),
        user([BROKEN]),
        user([]),
    ),
    "summary": (CompactionEntry(summary="So far.", first_kept_seq=1, tokens_before=1, timestamp=1), user()),
    "calls": (user(), said(TextBlock(text="see"), CALL), result_of(CALL), said(TextBlock(text="3"))),
    "failed call": (user(), said(CALL), result_of(CALL, 'no "way"', is_error=True), user("meanwhile")),
    "refused call": (user(), said(CALL), result_of(CALL, '{"status":"error","error":"no"}', is_error=True)),
    "broken JSON": (user(), said(CALL), result_of(CALL, '{"status":', is_error=True)),
    "interrupted call": (user(), said(CALL), result_of(CALL, " ", interrupted=True)),
    "image result": (user(), said(CALL), shown(TextBlock(text="this"), PIXEL, BROKEN, PIXEL), user("nice")),
    "failed image result": (user(), said(CALL), shown(TextBlock(text="this"), PIXEL, is_error=True)),
    "failed images": (user(), said(CALL), shown(TextBlock(text="this"), PIXEL, BROKEN, is_error=True)),
    "broken image result": (user(), said(CALL), shown(BROKEN)),
    "failed broken image": (user(), said(CALL), shown(BROKEN, is_error=True)),
    "invalid arguments": (
        user(),
        said(ToolCall(id="c1", name="add", arguments={}, native={INVALID_ARGUMENTS_KEY: '{"a": '})),
        result_of(CALL),
    ),
    "thinking": (user(), said(THOUGHT, THOUGHT, TextBlock(text="so")), user("more")),
    "thinking and calls": (
        *(user(), said(CALL), result_of(CALL), user("go on")),
        *(said(THOUGHT, CALL), result_of(CALL)),
    ),
    "calls without their thinking": (
        *(user(), said(THOUGHT, CALL), result_of(CALL), said(ToolCall(id="c2", name="add", arguments={}))),
        ToolResult(tool_call_id="c2", tool_name="add", content=[TextBlock(text="x")], timestamp=1),
    ),
    "two fields": (
        *(user(), said(THOUGHT, CALL), result_of(CALL)),
        said(ThinkingBlock(thinking="x", native={"id": "reasoning"}), TextBlock(text="y")),
    ),
    "tagged thinking": (
        user(),
        said(ThinkingBlock(thinking="hm", native={"id": "content"}), TextBlock(text="so")),
    ),
    "nameless thinking": (user(), said(ThinkingBlock(thinking="hm"), TextBlock(text="so"))),
    "foreign thinking": (user(), said(THOUGHT, TextBlock(text="so"), provider="elsewhere")),
    "half a thought": (user(), said(THOUGHT, TextBlock(text="so"), stop_reason="aborted")),
    "unspoken": (user(), said(THOUGHT), said(TextBlock(text=" ")), user("still there?")),
    "signed call": (
        user(),
        said(ToolCall(id="c1", name="add", arguments={}, native={"details": {"extra_content": {"s": 1}}})),
        result_of(CALL),
    ),
    "begun by the assistant": (said(TextBlock(text="hello")), user()),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_both_send_the_same(name: str) -> None:
    messages = CONVERSATIONS[name]
    lean, library = await bodies_of(prompt_of(messages=messages), spec_of())
    assert lean == library


@pytest.mark.parametrize("provider", ["openai", "local"])
async def test_both_send_the_same_settings(provider: str) -> None:
    spec = spec_of(provider=provider, max_tokens=77)
    lean, library = await bodies_of(prompt_of(tools=(), instructions=""), spec)
    assert lean == library
    assert "tool_choice" not in lean
    lean, library = await bodies_of(prompt_of(), spec)
    assert lean == library
    assert lean["tool_choice"] == "auto"


@settings(max_examples=60, deadline=None)
@given(messages=transcripts())
def test_both_send_the_same_for_any_transcript(messages: list[Message]) -> None:
    lean, library = asyncio.run(bodies_of(prompt_of(messages=messages), spec_of()))
    assert lean == library


MODELS = ("gpt-5", "gpt-5.1", "gpt-5.6", "o3", "gpt-4.1", "llama3", "google/gemini-3-pro", "openai/gpt-5-pro")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("provider", ["openai", "router"])
async def test_both_ask_for_the_same_effort(provider: str, model: str) -> None:
    for level in ("off", "minimal", "low", "medium", "high", "xhigh"):
        lean, library = await bodies_of(prompt_of(thinking=level), spec_of(provider=provider, model=model))
        assert lean == library, level


LISTED_BY_THE_LIBRARY: tuple[str, ...] = tuple(vars(openai_profiles)["_REASONING_SUPPORT_BY_PREFIX"])
VENDORS = (
    "amazon",
    "bedrock",
    "cohere",
    "elsewhere",
    "google",
    "groq",
    "meta",
    "meta-llama",
    "mistral",
    "mistralai",
)
VENDORS_MODELS = (
    "gpt-5",
    "gemini-3-pro",
    "grok-4.5",
    "command-a-reasoning",
    "magistral-medium",
    "muse-1",
    "glm-5.3",
)


@pytest.mark.parametrize("provider", ["openai", "router"])
async def test_the_listed_efforts_are_those_of_the_library(provider: str) -> None:
    """Every family that the library lists, so that a new one is noticed here, under every vendor's name."""
    names = [
        f"{name}{end}" for name in (*LISTED_BY_THE_LIBRARY, "gpt-4.1", "llama3") for end in ("", "-mini")
    ]
    names += [f"openai/{name}" for name in names]
    names += [f"{vendor}/{name}" for vendor in (*VENDORS, "x-ai", "zai-org") for name in VENDORS_MODELS]
    for name in names:
        spec = spec_of(provider=provider, model=name)
        if is_plain_chat_completions(spec):
            assert await load_reasoning_efforts(spec) == load_library_efforts(spec), name


def chunk(delta: Any = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "x1", "object": "chunk", "created": 1, "model": "m-1", "choices": [choice], **fields}


def call(index: int | None, **function: Any) -> dict[str, Any]:
    return {"index": index, "id": f"c{index}", "type": "function", "function": function}


def usage(**fields: Any) -> dict[str, Any]:
    counted = {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050, **fields}
    return chunk(usage=counted, choices=[])


def stream(*chunks: Any, newline: str = "\n", end: str = "[DONE]") -> bytes:
    texts = [json.dumps(it) for it in chunks] + ([end] if end else [])
    return "".join(f"data: {text}{newline}{newline}" for text in texts).encode()


def answering(body: bytes, status: int = 200, **headers: str) -> Any:
    """An application that always answers with this."""
    named = {"content-type": "text/event-stream"} | {key.replace("_", "-"): it for key, it in headers.items()}
    raw = [(key.encode(), it.encode()) for key, it in named.items()]

    async def app(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": body})

    return app


STOP = chunk({}, "stop")
ANSWERS: dict[str, bytes] = {
    "interleaved": stream(
        chunk({"reasoning": "a"}),
        chunk({"reasoning": "b", "reasoning_content": "not twice"}),
        chunk({"content": "c"}),
        chunk({"reasoning": "d"}),
        chunk({"content": "e"}),
        chunk({"tool_calls": [call(0, name="add", arguments="{")]}),
        chunk({"content": "f"}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}),
        chunk({"content": "g"}),
        STOP,
    ),
    "tags": stream(
        *(chunk({"content": it}) for it in ("so", "<think>", "a", "b", "</think>", "c", "</think>")), STOP
    ),
    "calls": stream(
        chunk({"tool_calls": [call(0, name="add", arguments=""), call(1, name="sub", arguments='{"a":')]}),
        chunk({"tool_calls": [{"index": 1, "id": None, "function": {"arguments": " 1}"}}]}),
        chunk(
            {"tool_calls": [{**call(2, name="mul", arguments="[1]"), "extra_content": {"s": "x"}}]},
            "tool_calls",
        ),
    ),
    "content in parts": stream(chunk({"content": [{"type": "text", "text": "a"}, {"type": "x"}]}), STOP),
    "refusal": stream(chunk({"refusal": "I "}), chunk({"refusal": "won't"}), STOP, usage()),
    "refusal after text": stream(chunk({"content": "Hm."}), chunk({"refusal": "no"}), STOP),
    "tier": stream(chunk({"content": "a"}, service_tier="priority"), STOP, usage()),
    "no choices": stream(chunk(choices=None), chunk(choices=[]), chunk({"content": "a"}), STOP),
    "unknown reason": stream(chunk({"content": "a"}, "eos")),
    "length": stream(chunk({"content": "a"}, "length")),
    "old function": stream(chunk({"content": "a"}, "function_call")),
    "cached": stream(chunk({"content": "a"}, "stop"), usage(prompt_tokens_details={"cached_tokens": 300})),
    "written": stream(
        STOP,
        usage(prompt_tokens_details={"cached_tokens": 300, "cache_write_tokens": 200, "audio_tokens": None}),
    ),
    "reasoned": stream(STOP, usage(completion_tokens_details={"reasoning_tokens": 30})),
    "carriage returns": stream(chunk({"content": "a"}), STOP, newline="\r\n"),
    "without an end": stream(chunk({"content": "a"}), STOP, end=""),
    "comments": b": hello\n\nevent: x\nid: 3\n" + stream(chunk({"content": "a"}), STOP) + b": bye\n\n",
    "lines": b'data: {"id": "x", "choices":\ndata: []}\n\n' + stream(chunk({"content": "a"}), STOP),
    "after the end": stream(chunk({"content": "a"}), STOP) + stream(chunk({"content": "b"})),
    "halves": stream(*(chunk({"content": it}) for it in ("a\ud83d", "\ude00b", "\ud83d")), STOP),
    "half thoughts": stream(*(chunk({"reasoning": it}) for it in ("\ud83d", "\ude00")), STOP),
    "half arguments": stream(
        chunk({"tool_calls": [call(0, name="add", arguments='{"a": "\ud83d')]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '\ude00 \ude00"}'}}]}),
        STOP,
    ),
    "half in an object": stream(
        chunk({"tool_calls": [call(0, name="add", arguments={"a": "\ud83d", "b": 1.5})]}), STOP
    ),
    "far too many": stream(
        chunk({"content": "a"}, "stop"), usage(prompt_tokens=2**63, completion_tokens=10**400)
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize(
    "changes", [{}, {"provider": "local"}, {"price": ModelPrice(input=1, output=2)}], ids=str
)
async def test_both_make_the_same_of_an_answer(name: str, changes: dict[str, Any]) -> None:
    spec = spec_of(**{"model": "gpt-5", **changes})
    heard: list[Any] = []
    for reader in readers(answering(ANSWERS[name].replace(b"m-1", b"gpt-5")), spec):
        deltas = Recorder()
        heard.append((await reader.read(prompt_of(), deltas), deltas.said, deltas.thought))
    assert heard[0] == heard[1]


@pytest.mark.requirement("G2", "G21")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("halves", [TextBlock(text="a\N{GRINNING FACE}b\ufffd")]),
        ("half thoughts", [ThinkingBlock(thinking="\N{GRINNING FACE}", native={"id": "reasoning"})]),
        ("half in an object", [ToolCall(id="c0", name="add", arguments={"a": "\ufffd", "b": 1.5})]),
        ("half arguments", [ToolCall(id="c0", name="add", arguments={"a": "\N{GRINNING FACE} \ufffd"})]),
    ],
)
async def test_characters_that_come_in_halves_are_put_together(name: str, content: list[Any]) -> None:
    for reader in readers(answering(ANSWERS[name]), spec_of()):
        answer = await reader.read(prompt_of(), Recorder())
        assert answer.content == content
        assert decode_message(encode_message(answer)) == answer


@pytest.mark.requirement("G2", "G21")
async def test_counts_that_no_call_can_have_are_bounded_and_have_no_price() -> None:
    spec = spec_of(price=ModelPrice(input=1, output=2))
    for reader in readers(answering(ANSWERS["far too many"]), spec):
        counted = (await reader.read(prompt_of(), Recorder())).usage
        assert counted == TokenUsage(
            input=MAX_TOKENS_PER_CALL, output=MAX_TOKENS_PER_CALL, total_tokens=MAX_TOKENS_PER_CALL
        )


async def error_of(reader: CompletionsReader | PydanticReader) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await reader.read(prompt_of(), Recorder())
    assert KEY not in f"{caught.value} {caught.value.data}"
    return caught.value


SAID: dict[str, Any] = {
    "plain": "Oh no",
    "html": "<html>bad gateway</html>",
    "nothing": "",
    "list": ["x"],
    "null": {"error": None},
    "detail": {"detail": "Not like this"},
    "message": {"error": {"message": "Slow down", "type": "requests", "code": None}},
    "number": {"error": {"message": "No", "code": 1234}},
    "quota": {"error": {"message": "Pay", "type": "insufficient_quota"}},
    "overflow": {"error": {"message": "x", "code": "context_length_exceeded"}},
    "long": {"error": {"message": "The maximum context length is 3"}},
    "window": {"error": {"message": "exceeds the context window"}},
    "model": {"error": {"message": "x", "code": "model_not_found"}},
    "key": {"error": {"message": f"bad {KEY}", "code": "invalid_api_key"}},
    "busy": {"error": {"message": "x", "type": "overloaded_error"}},
}


@pytest.mark.parametrize("said", SAID)
async def test_both_call_a_refusal_the_same(said: str) -> None:
    content = SAID[said] if isinstance(SAID[said], str) else json.dumps(SAID[said])
    for status in (400, 401, 402, 403, 404, 408, 409, 413, 418, 422, 429, 500, 503, 529):
        lean, library = readers(answering(content.encode(), status), spec_of())
        ours, theirs = await error_of(lean), await error_of(library)
        assert (type(ours), str(ours), ours.retryable) == (type(theirs), str(theirs), theirs.retryable), (
            status
        )
        assert ours.data == theirs.data


@pytest.mark.parametrize(
    "headers",
    [
        *({"retry_after": it} for it in ("7", "-1", "soon", "Wed, 21 Oct 2015 07:28:00 GMT", "")),
        *({"retry_after_ms": it, "retry_after": "3"} for it in ("250", "nan", "inf", "-5", "x")),
    ],
    ids=str,
)
async def test_both_hear_when_to_come_back(headers: dict[str, str]) -> None:
    lean, library = readers(answering(b"{}", 429, **headers), spec_of())
    assert (await error_of(lean)).data == (await error_of(library)).data


IN_STREAM: dict[str, Any] = {
    **{name: SAID[name]["error"] for name in ("message", "number", "quota", "overflow", "long", "window")},
    **{name: SAID[name]["error"] for name in ("model", "key", "busy")},
    "status": {"message": "x", "code": 502},
    "limit": {"message": "x", "code": "rate_limit_exceeded"},
    "server": {"message": "x", "type": "server_error"},
    "sentence": "out of memory",
}


@pytest.mark.parametrize("name", IN_STREAM)
async def test_both_call_an_error_in_the_stream_the_same(name: str) -> None:
    body = stream(chunk({"content": "a"}), {"error": IN_STREAM[name]})
    lean, library = readers(answering(body), spec_of())
    ours, theirs = await error_of(lean), await error_of(library)
    assert (type(ours), ours.retryable, ours.data) == (type(theirs), theirs.retryable, theirs.data)
    assert name == "sentence" or str(ours) == str(theirs)


NO_ANSWERS = {
    "json": b'{"choices": []}',
    "empty": b"",
    "cut": stream(chunk({"content": "a"}), end=""),
    "ended early": stream(chunk({"content": "a"})),
    "half a line": stream(STOP, end="")[:-9],
    "not json": b"data: {]\n\n",
    "not an object": b"data: [1]\n\n",
    "not text": b'data: {"id": "\xff"}\n\n',
}


@pytest.mark.parametrize("name", NO_ANSWERS)
async def test_what_is_no_answer_is_tried_again(name: str) -> None:
    lean, _ = readers(answering(NO_ANSWERS[name]), spec_of())
    error = await error_of(lean)
    assert error.retryable
    assert "broke off" in str(error)


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "application/json", ""])
async def test_an_address_that_sends_no_stream_is_named_and_not_asked_again(kind: str) -> None:
    lean, pydantic = readers(answering(b"<html>hello</html>", content_type=kind), spec_of())
    asked = (lean, pydantic) if kind.startswith("text/html") else (lean,)
    for error in [await error_of(reader) for reader in asked]:
        assert not error.retryable
        assert "baseUrl" in error.hint
        assert (kind.partition(";")[0] or "without a content type") in error.what


async def test_an_empty_answer_is_tried_again_whatever_its_type() -> None:
    lean, _ = readers(answering(b"", content_type="application/json"), spec_of())
    assert (await error_of(lean)).retryable


async def test_a_huge_piece_is_read() -> None:
    text = "x" * 5_000_000
    spec = spec_of(max_answer_bytes=6_000_000)
    lean, _ = readers(answering(stream(chunk({"content": text}, "stop"))), spec)
    assert (await lean.read(prompt_of(), Recorder())).text == text


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_may_be_cut_anywhere(size: int) -> None:
    events = EventStreamParser()
    sent = b": x\r\n\r\ndata: a\r\ndata:b\r\n\r\nevent: e\n\ndata: \xc3\xbc\n\ndata: lost\n"
    found = [data for at in range(0, len(sent), size) for data in events.feed(sent[at : at + size])]
    assert found == [b"a\nb", "ü".encode()]


@pytest.mark.parametrize("keep_alive", [b"data: \n\n", b"data:\n\n", b"\n\n", b": ping\n\n"])
def test_an_event_without_data_is_no_event(keep_alive: bytes) -> None:
    events = EventStreamParser()
    found = [data for piece in (keep_alive, b"data: a\n\n", keep_alive) for data in events.feed(piece)]
    assert found == [b"a"]


async def test_a_key_that_cannot_be_sent_is_not_quoted() -> None:
    reader = CompletionsReader(spec_of(api_key=f"{KEY}\n", base_url="http://127.0.0.1:9/v1"), RetryPolicy())
    assert not (await error_of(reader)).data["status"]
    await reader.close()


async def served(ending: bytes, times: int) -> int:
    """How many connections so many answers take, from a server that ends each of them like this."""
    body = stream(chunk({"content": "a"}), STOP)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    connections: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b'"include_usage":true}}'):
                writer.write(head + f"{len(body):x}\r\n".encode() + body + b"\r\n" + ending)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(20):
        port = server.sockets[0].getsockname()[1]
        reader = CompletionsReader(spec_of(base_url=f"http://127.0.0.1:{port}/v1"), RetryPolicy())
        prompt = prompt_of(tools=(), instructions="")
        for _ in range(times):
            assert (await reader.read(prompt, Recorder())).text == "a"
        await reader.close()
    return len(connections)


async def test_connections_are_used_again() -> None:
    assert await served(b"0\r\n\r\n", times=3) == 1


async def test_a_server_that_does_not_hang_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions_reader, "STREAM_END_SECONDS", 0.01)
    assert await served(b"", times=2) == 2


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"base_url": None}, True),
        ({"provider": "local", "model": "Qwen/Qwen3-8B"}, True),
        ({"model": "openai/gpt-5"}, True),
        ({"api": "openai-responses"}, False),
        ({"provider": "azure"}, False),
        ({"base_url": "https://x.openai.azure.com/openai/v1"}, False),
        ({"base_url": "https://proxy/v1?api-version=1"}, False),
        ({"model": "o1-mini-2024"}, False),
        ({"model": "gpt-4o-search-preview"}, False),
        ({"model": "anthropic/claude-sonnet-5"}, False),
    ],
)
def test_what_is_peculiar_is_left_to_the_library(changes: dict[str, Any], plain: bool) -> None:
    assert is_plain_chat_completions(replace(spec_of(), **changes)) is plain


def test_the_lean_reader_needs_no_provider_library() -> None:
    code = (
        "import sys, antiphon.runtimes.openai_chat.reader\n"
        "print([name for name in ('pydantic_ai', 'openai', 'anthropic') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("level", [None, "high"])
async def test_a_request_needs_no_provider_library(level: str | None) -> None:
    """Importing one takes seconds, in which the request waits."""
    code = (
        "import asyncio, sys\n"
        "from antiphon.messages import UserMessage\n"
        "from antiphon.runtimes import Prompt\n"
        "from antiphon.runtimes.model import ModelRuntime, ModelSpec\n"
        "class Hush:\n"
        "    text = thinking = restart = lambda *_: None\n"
        "spec = ModelSpec(provider='openai', model='gpt-5', api='openai-completions', base_url=sys.argv[1])\n"
        "prompt = Prompt(run_id='r', session_key='k', agent_id='main', instructions='', thinking=sys.argv[2] or None,\n"
        "    messages=[UserMessage(content='hi', timestamp=1)])\n"
        "print(asyncio.run(ModelRuntime(spec).step(prompt, Hush())).text)\n"
        "print([name for name in ('pydantic_ai', 'openai', 'anthropic') if name in sys.modules])"
    )
    async with asyncio.timeout(60), Provider().running() as provider:
        arguments = (sys.executable, "-c", code, f"{provider.url}/v1", level or "")
        process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        printed, _ = await process.communicate()
    assert printed.decode().splitlines() == ["Hello there.", "[]"]
    assert provider.bodies[0].get("reasoning_effort") == level
