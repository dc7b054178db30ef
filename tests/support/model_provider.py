"""A model provider on the loopback: real HTTP, scripted answers, strict validation of requests.

It speaks OpenAI chat completions (streamed or not), OpenAI responses (streamed) and Anthropic messages
(streamed). Every request is recorded and validated like the strictest real providers do, and refused
with a body like theirs. It is plain ASGI, so it also runs without a socket under
`httpx2.ASGITransport(app=provider)`, and alone: `python tests/support/model_provider.py --port 0` prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import uvicorn

Json = dict[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. `arguments` is the raw text the model writes, valid or not; it is split over chunks."""

    name: str
    arguments: str = "{}"
    id: str = "call_1"


@dataclass(frozen=True, slots=True)
class Tokens:
    """`input` leaves out what was read from or written to the cache."""

    input: int = 10
    output: int = 5
    cache_read: int = 0
    cache_write: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One scripted answer. `text` and `thinking` are the chunks they are streamed in."""

    text: tuple[str, ...] = ()
    thinking: tuple[str, ...] = ()
    signature: str = "c2lnbmF0dXJl"
    calls: tuple[Call, ...] = ()
    tokens: Tokens | None = Tokens()
    model: str | None = None
    """The reported model; None repeats the requested one."""
    finish: str | None = None
    """The finish reason of the API; None derives it from the content."""
    refusal: str | None = None
    cut_after: int | None = None
    """Close the connection after this many frames, in the middle of the answer."""
    end_after: int | None = None
    """End the stream in good order after this many frames, although the answer is not complete."""
    hold_after: int | None = None
    """Send this many frames and then nothing until `Provider.release`; 0 holds back even the headers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An HTTP error. `body` is sent as JSON unless it is a string."""

    status: int
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Received:
    path: str
    headers: Mapping[str, str]
    body: Json


@dataclass(eq=False)
class Provider:
    """The ASGI application. Answers come from `script` in order, then `default` for ever."""

    default: Answer | Failure = Answer(text=("Hello", " there."))
    choose: Callable[[Json], Answer] | None = None
    """Chooses the answer to a request, instead of the script."""
    received: list[Received] = field(default_factory=list[Received])
    recording: bool = True
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client left before its answer was complete."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request has been read."""
    url: str = ""
    _script: deque[Answer | Failure] = field(default_factory=deque[Answer | Failure])
    _released: asyncio.Event = field(default_factory=asyncio.Event)

    def script(self, *answers: Answer | Failure) -> None:
        self._script.extend(answers)

    def release(self) -> None:
        self._released.set()

    @property
    def bodies(self) -> list[Json]:
        return [request.body for request in self.received]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Provider]:
        """Serve on an ephemeral loopback port for as long as the block lasts."""
        async with serve_asgi(self) as self.url:
            try:
                yield self
            finally:
                self.release()

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        body: Json = json.loads(await _read(receive))
        api = next((api for end, api in _APIS.items() if scope["path"].endswith(end)), None)
        if self.recording:
            headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
            self.received.append(Received(scope["path"], headers, body))
        self.arrived.set()
        if api is None:
            return await _respond(send, Failure(status=404, body={"error": {"message": "no such route"}}))
        problem = _CHECKS[api](body)
        if problem is not None:
            return await _respond(send, Failure(status=400, body=_invalid(problem)))
        if self.choose is not None:
            answer = self.choose(body)
        else:
            answer = self._script.popleft() if self._script else self.default
        if isinstance(answer, Failure):
            return await _respond(send, answer)
        answer = answer if answer.model else replace(answer, model=body["model"])
        if api == "chat" and not body.get("stream"):
            return await _json(send, 200, _chat_completion(answer))
        return await self._stream(api, answer, receive, send)

    async def _stream(self, api: str, answer: Answer, receive: _Receive, send: _Send) -> None:
        leaving = asyncio.create_task(_left(receive))
        try:
            await self._send_frames(make_frames(api, answer), answer, leaving, send)
        finally:
            if leaving.done():
                self.disconnected.set()
            leaving.cancel()

    async def _send_frames(
        self, sent: Sequence[bytes], answer: Answer, leaving: asyncio.Task[None], send: _Send
    ) -> None:
        if answer.hold_after == 0:
            await self._hold(leaving)
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        for number, frame in enumerate(sent, start=1):
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            if number == answer.hold_after:
                await self._hold(leaving)
            if number == answer.cut_after:
                return  # uvicorn closes the connection of an application that leaves its response unfinished
            if number == answer.end_after:
                break
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _hold(self, leaving: asyncio.Task[None]) -> None:
        released = asyncio.create_task(self._released.wait())
        await asyncio.wait((released, leaving), return_when=asyncio.FIRST_COMPLETED)
        released.cancel()


@asynccontextmanager
async def serve_asgi(app: Any, port: int = 0) -> AsyncGenerator[str]:
    """The address of an ASGI application on the loopback, for as long as the block lasts."""
    with _socket(port) as listening:
        server = _Server(_config(app))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await server.ready.wait()
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await serving


class _Server(uvicorn.Server):
    """Runs inside an existing loop: installs no signal handlers, and sets `ready` when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def _socket(port: int) -> socket.socket:
    # With the protocol named, asyncio switches Nagle's algorithm off; without, every answer takes 40 ms more.
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    return made


def _config(provider: Any) -> uvicorn.Config:
    return uvicorn.Config(provider, log_level="critical", access_log=False, lifespan="off", ws="none")


_APIS = {"/chat/completions": "chat", "/responses": "responses", "/messages": "anthropic"}
_SSE_HEADERS = [(b"content-type", b"text/event-stream")]


async def _read(receive: _Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _left(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _respond(send: _Send, failure: Failure) -> None:
    await _json(send, failure.status, failure.body, failure.headers)


async def _json(send: _Send, status: int, body: Any, headers: Sequence[tuple[str, str]] = ()) -> None:
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    kind = b"text/plain" if isinstance(body, str) else b"application/json"
    named = [(name.encode(), value.encode()) for name, value in headers]
    start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *named]}
    await send(start)
    await send({"type": "http.response.body", "body": content})


def _invalid(problem: str) -> Json:
    error = {"message": problem, "type": "invalid_request_error", "param": None, "code": None}
    return {"type": "error", "error": error}


@lru_cache(maxsize=256)
def make_frames(api: str, answer: Answer) -> tuple[bytes, ...]:
    """The server-sent events of an answer."""
    return tuple(_FRAMES[api](answer))


def _event(data: Json | str, name: str | None = None) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n".encode() if name else f"data: {text}\n\n".encode()


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def _chat_usage(tokens: Tokens) -> Json:
    prompt = tokens.input + tokens.cache_read + tokens.cache_write
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens.output,
        "total_tokens": prompt + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cache_read},
    }


def _chat_frames(answer: Answer) -> Generator[bytes]:
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": answer.model}

    def chunk(delta: Json, finish: str | None = None) -> bytes:
        return _event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    yield chunk({"role": "assistant", "content": ""})
    for piece in answer.thinking:
        yield chunk({"reasoning_content": piece})
    for piece in answer.text:
        yield chunk({"content": piece})
    if answer.refusal:
        yield chunk({"refusal": answer.refusal})
    for index, call in enumerate(answer.calls):
        first, rest = _halves(call.arguments)
        function = {"name": call.name, "arguments": first}
        yield chunk(
            {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}
        )
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": rest}}]})
    yield chunk({}, answer.finish or ("tool_calls" if answer.calls else "stop"))
    if answer.tokens:
        yield _event({**base, "choices": [], "usage": _chat_usage(answer.tokens)})
    yield _event("[DONE]")


def _chat_completion(answer: Answer) -> Json:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]
    message = {
        "role": "assistant",
        "content": "".join(answer.text),
        **({"tool_calls": calls} if calls else {}),
    }
    finish = answer.finish or ("tool_calls" if calls else "stop")
    body: Json = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": answer.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }
    return {**body, "usage": _chat_usage(answer.tokens)} if answer.tokens else body


def _anthropic_frames(answer: Answer) -> Generator[bytes]:
    tokens = answer.tokens or Tokens(0, 0)
    counted = {
        "input_tokens": tokens.input,
        "cache_read_input_tokens": tokens.cache_read,
        "cache_creation_input_tokens": tokens.cache_write,
    }
    start: Json = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**counted, "output_tokens": 0},
    }
    yield _event({"type": "message_start", "message": start}, "message_start")
    for index, (block, deltas) in enumerate(_anthropic_blocks(answer)):
        begin = {"type": "content_block_start", "index": index, "content_block": block}
        yield _event(begin, "content_block_start")
        for delta in deltas:
            piece = {"type": "content_block_delta", "index": index, "delta": delta}
            yield _event(piece, "content_block_delta")
        yield _event({"type": "content_block_stop", "index": index}, "content_block_stop")
    reason = answer.finish or ("tool_use" if answer.calls else "end_turn")
    end = {
        "type": "message_delta",
        "delta": {"stop_reason": reason, "stop_sequence": None},
        "usage": {"output_tokens": tokens.output},
    }
    yield _event(end, "message_delta")
    yield _event({"type": "message_stop"}, "message_stop")


def _anthropic_blocks(answer: Answer) -> Generator[tuple[Json, list[Json]]]:
    if answer.thinking:
        deltas: list[Json] = [{"type": "thinking_delta", "thinking": piece} for piece in answer.thinking]
        signed = {"type": "signature_delta", "signature": answer.signature}
        yield {"type": "thinking", "thinking": "", "signature": ""}, [*deltas, signed]
    if answer.text:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in answer.text]
    for call in answer.calls:
        pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in _halves(call.arguments)]
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, pieces


def _responses_frames(answer: Answer) -> Generator[bytes]:
    items = list(_response_items(answer))
    number = iter(range(1_000_000))

    def event(kind: str, **data: Any) -> bytes:
        return _event({"type": kind, "sequence_number": next(number), **data}, kind)

    def response(status: str, output: list[Json]) -> Json:
        return {
            "id": "resp_1",
            "object": "response",
            "created_at": 1,
            "model": answer.model,
            "status": status,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": _responses_usage(answer.tokens) if answer.tokens and status == "completed" else None,
        }

    yield event("response.created", response=response("in_progress", []))
    for index, item in enumerate(items):
        yield event("response.output_item.added", output_index=index, item={**item, **_emptied(item)})
        for kind, data in _response_deltas(item, answer):
            yield event(kind, output_index=index, item_id=item["id"], **data)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.completed", response=response("completed", items))


def _response_items(answer: Answer) -> Generator[Json]:
    if answer.thinking:
        summary = [{"type": "summary_text", "text": "".join(answer.thinking)}]
        signed = {"encrypted_content": answer.signature, "summary": summary}
        yield {"type": "reasoning", "id": "rs_1", "status": "completed", **signed}
    if answer.text:
        content: list[Json] = [{"type": "output_text", "text": "".join(answer.text), "annotations": []}]
        said: Json = {"role": "assistant", "status": "completed", "content": content}
        yield {"type": "message", "id": "msg_1", **said}
    for call in answer.calls:
        asked = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
        yield {"type": "function_call", "id": f"fc_{call.id}", **asked}


def _emptied(item: Json) -> Json:
    empty: dict[str, Json] = {
        "reasoning": {"summary": [], "encrypted_content": None},
        "message": {"content": []},
        "function_call": {"arguments": ""},
    }
    return {**empty[item["type"]], "status": "in_progress"}


def _response_deltas(item: Json, answer: Answer) -> Generator[tuple[str, Json]]:
    if item["type"] == "reasoning":
        for piece in answer.thinking:
            yield "response.reasoning_summary_text.delta", {"summary_index": 0, "delta": piece}
    elif item["type"] == "message":
        for piece in answer.text:
            yield "response.output_text.delta", {"content_index": 0, "delta": piece, "logprobs": []}
    else:
        for piece in _halves(item["arguments"]):
            yield "response.function_call_arguments.delta", {"delta": piece}


def _responses_usage(tokens: Tokens) -> Json:
    prompt = tokens.input + tokens.cache_read + tokens.cache_write
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": tokens.cache_read},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + tokens.output,
    }


_FRAMES = {"chat": _chat_frames, "anthropic": _anthropic_frames, "responses": _responses_frames}


class _Refused(Exception):
    """What a strict provider would say to a request."""


def _check_id(call_id: str, *, more: str = "") -> None:
    """The shortest limit there is, and the characters that every server of a kind takes."""
    _demand(len(call_id) <= 40, f"Invalid id: string too long. Expected at most 40, got {len(call_id)}.")
    _demand(
        re.fullmatch(rf"[a-zA-Z0-9_{more}-]+", call_id), f"the id {call_id!r} of a tool call is malformed"
    )


def _objects(value: Any) -> list[Json]:
    return list(value or ())


def _demand(condition: object, otherwise: str) -> None:
    if not condition:
        raise _Refused(otherwise)


def check_chat(body: Json) -> str | None:
    """Why OpenAI chat completions would refuse this request, or None."""
    try:
        _check_chat(body)
    except _Refused as refused:
        return str(refused)
    return None


def _check_chat(body: Json) -> None:
    messages = _objects(body.get("messages"))
    _demand(body.get("model"), "you must provide a model parameter")
    while messages and messages[0]["role"] in ("system", "developer"):
        messages.pop(0)
    _demand(messages and messages[0]["role"] == "user", "the first message must come from the user")
    open_calls: list[str] = []
    for message in messages:
        role = message["role"]
        _demand(role in ("user", "assistant", "tool"), f"unexpected role {role!r}")
        if role == "tool":
            _demand(
                message["tool_call_id"] in open_calls, f"unknown tool_call_id {message['tool_call_id']!r}"
            )
            open_calls.remove(message["tool_call_id"])
            continue
        _demand(
            not open_calls, f"tool_calls must be followed by tool messages: {open_calls} have no response"
        )
        _demand(message.get("content") or message.get("tool_calls"), f"a {role} message without content")
        for call in _objects(message.get("tool_calls")):
            _demand(_is_object(call["function"]["arguments"]), "tool call arguments must be a JSON object")
            _check_id(call["id"], more=".:")
            _demand(call["id"] not in open_calls, "tool call ids must be unique")
            open_calls.append(call["id"])
    _demand(not open_calls, f"tool_calls must be followed by tool messages: {open_calls} have no response")
    _demand(messages[-1]["role"] != "assistant", "the last message must not come from the assistant")


def check_anthropic(body: Json) -> str | None:
    """Why Anthropic messages would refuse this request, or None."""
    try:
        _check_anthropic(body)
    except _Refused as refused:
        return str(refused)
    return None


def _check_anthropic(body: Json) -> None:
    _demand(body.get("max_tokens"), "max_tokens: field required")
    messages = _objects(body.get("messages"))
    expected = "user"
    open_calls: set[str] = set()
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        _demand(
            message["role"] == expected, f"{where}: expected role {expected!r}, found {message['role']!r}"
        )
        content = _as_blocks(message["content"])
        _demand(content, f"{where}: must have non-empty content")
        if expected == "user":
            _check_results(content, open_calls, where)
        open_calls = _check_answer(content, where) if expected == "assistant" else set()
        _check_text(content, where)
        expected = "assistant" if expected == "user" else "user"
    _demand(messages and expected == "assistant", "the conversation must end with a user message")


def _as_blocks(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _check_text(content: list[Json], where: str) -> None:
    for block in content:
        if block["type"] == "text":
            _demand(block["text"].strip(), f"{where}: text content blocks must contain non-whitespace text")
        if block["type"] == "tool_result":
            _check_text(_as_blocks(block["content"]), where)


def _check_results(content: list[Json], open_calls: set[str], where: str) -> None:
    results = [block["tool_use_id"] for block in content if block["type"] == "tool_result"]
    leading = [block["type"] for block in content[: len(results)]]
    _demand(leading == ["tool_result"] * len(results), f"{where}: tool_result blocks must come first")
    _demand(len(results) == len(set(results)), f"{where}: each tool_use must have a single result")
    _demand(set(results) <= open_calls, f"{where}: unexpected tool_use_id in {results}")
    _demand(set(results) == open_calls, f"{where}: tool_use ids without tool_result: {open_calls}")


def _check_answer(content: list[Json], where: str) -> set[str]:
    for block in content:
        if block["type"] == "thinking":
            _demand(block.get("signature"), f"{where}: thinking blocks must be signed")
    calls = [block for block in content if block["type"] == "tool_use"]
    for call in calls:
        _check_id(call["id"])
        _demand(isinstance(call["input"], dict), f"{where}: tool_use.input must be an object")
    ids = {call["id"] for call in calls}
    _demand(len(ids) == len(calls), f"{where}: tool_use ids must be unique")
    return ids


def check_responses(body: Json) -> str | None:
    """Why OpenAI responses would refuse this request, or None."""
    try:
        _check_responses(body)
    except _Refused as refused:
        return str(refused)
    return None


def _check_responses(body: Json) -> None:
    items = [item for item in _objects(body.get("input")) if item.get("role") != "system"]
    _demand(items, "input is required")
    _demand(items[0].get("role") == "user", "the first item must come from the user")
    open_calls: set[str] = set()
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            _demand(_is_object(item["arguments"]), "function call arguments must be a JSON object")
            _check_id(item["call_id"])
            _demand(item["call_id"] not in open_calls, "call_ids must be unique")
            open_calls.add(item["call_id"])
        elif kind == "function_call_output":
            _demand(item["call_id"] in open_calls, f"No tool call found for call_id {item['call_id']!r}")
            open_calls.remove(item["call_id"])
        elif kind == "message" and item.get("role") == "user":
            _demand(not open_calls, f"No tool output found for function call {open_calls}")
    _demand(not open_calls, f"No tool output found for function call {open_calls}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


_CHECKS = {"chat": check_chat, "anthropic": check_anthropic, "responses": check_responses}


def main() -> None:
    """Serve the same text to all clients until killed: the other side of a benchmark."""
    options = argparse.ArgumentParser(description="A model provider that answers at once.")
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--chunks", type=int, default=32)
    chosen = options.parse_args()
    words = tuple(f"word{number} " for number in range(chosen.chunks))
    with _socket(chosen.port) as listening:
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        provider = Provider(default=Answer(text=words), recording=False)
        asyncio.run(uvicorn.Server(_config(provider)).serve(sockets=[listening]))


if __name__ == "__main__":
    main()
