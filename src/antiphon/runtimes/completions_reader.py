"""The `Reader` for OpenAI chat completions, the API that nearly every provider speaks: one POST, one event stream.

It sends what `PydanticReader` sends for the same prompt and makes the same transcript of the same answer, without
an SDK and without its objects for every piece: the wire is read into typed structs, and what they do not name is
skipped. `native` is used as there: `id` is the field that thinking came in, `details` is opaque data to send back.
What is read is bounded: a line, an answer, and what is looked at of an error.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import html
import re
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import sha1
from itertools import chain, groupby
from typing import Any, cast

import httpx2
import msgspec
from genai_prices import calc_price
from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import Provider

from antiphon import __version__
from antiphon.clock import Clock, SystemClock
from antiphon.errors import ProviderError
from antiphon.messages import (
    Assistant,
    Compaction,
    Cost,
    Image,
    Message,
    StopReason,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Usage,
    User,
)
from antiphon.runtimes import Deltas, Prompt, ToolSpec
from antiphon.runtimes.model import (
    INVALID_ARGUMENTS,
    Kind,
    ModelSpec,
    Patience,
    Price,
    failure,
    kind_of,
    reason_in,
)

PLACEHOLDER_KEY = "not-needed"
"""Sent where no key is configured: the SDKs refuse to work without one, local servers do not look at it."""

LONGEST_EVENT = 16 * 1024 * 1024
LONGEST_ANSWER = 64 * 1024 * 1024
LONGEST_ERROR = 64 * 1024
GOODBYE = 0.5
"""Seconds a server has to end its response after `[DONE]`; a connection read to its end is used again."""

_Json = dict[str, Any]


class CompletionsReader:
    """One HTTP client, reused by every step of a spec."""

    def __init__(
        self,
        spec: ModelSpec,
        patience: Patience,
        *,
        http: httpx2.AsyncClient | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._spec = spec
        self._http = http or open_client(patience)
        self._clock = clock or SystemClock()
        base = (spec.base_url or "https://api.openai.com/v1").rstrip("/")
        self._url = f"{base}/chat/completions"
        self._headers = httpx2.Headers(
            {
                "authorization": f"Bearer {spec.api_key or PLACEHOLDER_KEY}",
                "content-type": "application/json",
                "user-agent": f"antiphon/{__version__}",
            }
        )
        self._headers.update(dict(spec.headers))
        self._price_list = price_list(spec, f"{base}/")
        self._counters = list(_counters(spec, f"{base}/"))
        self._efforts: Mapping[str, str | None] | None = None

    async def read(self, prompt: Prompt, deltas: Deltas) -> Assistant:
        body = request_body(self._spec, prompt, await self._effort(prompt.thinking))
        request = self._http.build_request("POST", self._url, content=body, headers=self._headers)
        answer = _Answer(deltas)
        try:
            response = await self._http.send(request, stream=True)
            async with aclosing(response):
                if not response.is_success:
                    raise await self._refusal(response)
                await self._listen(response, answer)
        except httpx2.HTTPError as error:
            # The cause is left out: it would drag the request, with its headers, into tracebacks.
            raise self._lost(error) from None
        self._check(answer)
        return self._assistant(answer, prompt)

    async def close(self) -> None:
        await self._http.aclose()

    async def _effort(self, level: str | None) -> str | None:
        if level is None:
            return None
        if self._efforts is None:
            # Which model takes which effort is known to a library that is slow to import and else not needed.
            self._efforts = await asyncio.to_thread(reasoning_efforts, self._spec)
        return self._efforts.get(level)

    async def _listen(self, response: httpx2.Response, answer: _Answer) -> None:
        events = Events()
        try:
            async with asyncio.timeout(None) as goodbye, aclosing(response.aiter_bytes()) as pieces:
                async for piece in pieces:
                    for data in events.of(piece):
                        if data.startswith(b"[DONE]"):
                            answer.ended = True
                            goodbye.reschedule(asyncio.get_running_loop().time() + GOODBYE)
                        elif not answer.ended:
                            self._take(data, answer)
        except (httpx2.HTTPError, TimeoutError):
            if not answer.ended:
                raise
        except _Unreadable as error:
            raise failure(self._spec, "brokenOff", reason=str(error)) from None
        if not events.any:
            kind = response.headers.get("content-type", "nothing").partition(";")[0]
            raise failure(self._spec, "brokenOff", reason=f"it answered with {kind} instead of a stream")

    def _take(self, data: bytes, answer: _Answer) -> None:
        try:
            chunk = _CHUNKS.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise _Unreadable("a piece of the stream cannot be read") from None
        if chunk.error:
            error = chunk.error
            raise self._said(_status_of(error), error, otherwise="an error in the middle of the stream")
        answer.take(chunk)

    def _check(self, answer: _Answer) -> None:
        """Refuse what is not an answer: a stream that ended early, or nothing because of a filter."""
        if not answer.finish:
            raise failure(self._spec, "brokenOff", reason="the stream ended before the answer did")
        if (answer.finish == "content_filter" or answer.refusal) and not answer.said:
            if not answer.refusal:
                raise failure(self._spec, "withheld", reason="content filter")
            answer.refuse()

    def _assistant(self, answer: _Answer, prompt: Prompt) -> Assistant:
        model = answer.model or self._spec.model
        content = answer.blocks(_call_ids(prompt.messages))
        details = {"service_tier": answer.tier, "refusal": answer.refusal}
        return Assistant(
            content=content,
            timestamp=self._clock.now(),
            stop_reason=_stop_reason(answer.finish, content),
            api=self._spec.api,
            provider=self._spec.provider,
            model=model,
            usage=self._usage(answer, model),
            native=_present(id=answer.id, details=_present(**details)),
        )

    def _usage(self, answer: _Answer, model: str) -> Usage | None:
        """None when the provider reported none: nought tokens would be a claim."""
        counted = self._counted(answer.usage, model) if answer.usage else None
        if counted is None:
            return None
        read, written = counted.cache_read_tokens or 0, counted.cache_write_tokens or 0
        input_, output = counted.input_tokens or 0, counted.output_tokens or 0
        usage = Usage(
            input=max(input_ - read - written, 0),
            output=output,
            cache_read=read,
            cache_write=written,
            total_tokens=max(input_, read + written) + output,
        )
        if self._spec.price is not None:
            cost = own_cost(self._spec.price, usage)
        else:
            said = {"finish_reason": answer.finish, "service_tier": answer.tier}
            cost = listed_cost(self._price_list, counted, model, said)
        return msgspec.structs.replace(usage, cost=cost)

    def _counted(self, usage: _Json, model: str) -> Any:
        """The counts under their common names: providers put what was cached in different places."""
        known = _without_nulls(usage)
        for counter in self._counters:
            try:
                _, counted = counter.extract_usage({"model": model, "usage": known}, api_flavor="chat")
            except (LookupError, ValueError, TypeError):
                continue
            details = known.get("prompt_tokens_details")
            written: object = (
                cast(_Json, details).get("cache_write_tokens") if isinstance(details, dict) else None
            )
            if isinstance(written, int):
                counted.cache_write_tokens = written
            return counted
        return None

    def _lost(self, error: httpx2.HTTPError) -> ProviderError:
        """What the library says is left out, because it may quote a header or an address."""
        if isinstance(error, httpx2.TimeoutException):
            unopened = isinstance(error, httpx2.ConnectTimeout)
            return failure(self._spec, "unreachable" if unopened else "silent", reason="timed out")
        if isinstance(error, httpx2.ConnectError):
            return failure(self._spec, "unreachable")
        return failure(self._spec, "brokenOff", reason="the connection failed")

    async def _refusal(self, response: httpx2.Response) -> ProviderError:
        body = await _beginning(response)
        try:
            error: object = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            error = body.decode(errors="replace")
        if isinstance(error, dict):
            error = cast(_Json, error).get("error", cast(_Json, error))
        return self._said(response.status_code, error, retry_after=_retry_after(response.headers))

    def _said(
        self, status: int | None, error: object, *, otherwise: str = "", retry_after: float | None = None
    ) -> ProviderError:
        codes = _codes(error)
        reason = reason_in(error) or otherwise
        kind = _category(status, codes, reason)
        if kind is None:
            kind = "brokenOff" if status is None else kind_of(status, f"{reason} {' '.join(codes)}")
        return failure(self._spec, kind, status=status, reason=reason, retry_after=retry_after)


def open_client(patience: Patience) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(patience.idle, connect=patience.connect, pool=None),
        # The engine bounds how many runs go at once; a second bound here would only hide waiting.
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        follow_redirects=True,
    )


# What is sent.

_OPENING = "(The conversation begins.)"
_CONTINUE = "(Continue.)"
_BLANK = "(empty message)"
_NO_OUTPUT = "(no output)"
_INTERRUPTED = "[interrupted: this call may or may not have taken effect]"
_SUMMARY = "Summary of the conversation so far, which is no longer shown in full:\n\n"
_UNREADABLE = "[an image that cannot be read]"
_THINKING_FIELDS = ("reasoning", "reasoning_content")
"""Where servers put thinking, in the order they are looked at."""
_TAGS = ("<think>", "</think>")
"""What models write around their thinking where the server does not take it out."""


def request_body(spec: ModelSpec, prompt: Prompt, effort: str | None) -> bytes:
    system = [{"role": "system", "content": prompt.instructions}] if prompt.instructions else []
    body: _Json = {
        "model": spec.model,
        "messages": [*system, *_conversation(prompt.messages, spec.provider)],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompt.tools:
        body["tools"] = [_tool(tool) for tool in prompt.tools]
        body["tool_choice"] = "auto"
    if spec.max_tokens is not None:
        # The older name is the one that every compatible server reads.
        body["max_completion_tokens" if spec.provider == "openai" else "max_tokens"] = spec.max_tokens
    if effort is not None:
        body["reasoning_effort"] = effort
    return msgspec.json.encode(body)


def _tool(tool: ToolSpec) -> _Json:
    """Our schemas are sent as they are; strict mode would have the provider's dialect rewrite them."""
    described = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": described}


def _conversation(messages: Iterable[Message], provider: str) -> list[_Json]:
    """What strict providers take: it begins and ends with the user, turns alternate and no text is blank."""
    told = (message for message in messages if not isinstance(message, Assistant) or _spoken(message))
    sent: list[_Json] = []
    for answered, group in groupby(told, key=lambda message: isinstance(message, Assistant)):
        turn = list(group)
        if answered:
            sent.append(_answered(cast(list[Assistant], turn), provider))
        else:
            sent.extend(_asked(turn))
    if not sent or sent[0]["role"] == "assistant":
        sent.insert(0, {"role": "user", "content": _OPENING})
    if sent[-1]["role"] == "assistant":
        sent.append({"role": "user", "content": _CONTINUE})
    _fill_thinking(sent)
    return sent


def _spoken(message: Assistant) -> bool:
    """False for a message that failed or was stopped before it said anything."""
    return any(
        isinstance(block, ToolCall) or (isinstance(block, Text) and block.text.strip())
        for block in message.content
    )


def _answered(messages: Sequence[Assistant], provider: str) -> _Json:
    texts: list[str] = []
    thoughts: dict[str, list[str]] = {}
    calls: list[_Json] = []
    for message in messages:
        for block in message.content:
            own = ((block.native or {}).get("provider") or message.provider) == provider
            match block:
                case Text():
                    texts.extend([block.text] if block.text.strip() else [])
                case ToolCall():
                    calls.append(_called(block, own))
                case Thinking():
                    # To another provider it would be noise, and half a thought is none.
                    if own and message.stop_reason not in ("error", "aborted"):
                        _replay(block, texts, thoughts)
    said: _Json = {"role": "assistant"} | {name: "\n\n".join(thought) for name, thought in thoughts.items()}
    said["content"] = "\n\n".join(texts) if texts else None
    return said | ({"tool_calls": calls} if calls else {})


def _replay(block: Thinking, texts: list[str], thoughts: dict[str, list[str]]) -> None:
    """Thinking goes back the way it came: in its field, or between tags in the text."""
    origin = (block.native or {}).get("id")
    if origin in _THINKING_FIELDS:
        thoughts.setdefault(origin, []).append(block.thinking)
    elif origin in (None, "content"):
        texts.append("\n".join((_TAGS[0], block.thinking, _TAGS[1])))


def _called(call: ToolCall, own: bool) -> _Json:
    native = call.native or {}
    arguments = msgspec.json.encode(
        _arguments_to_send(native.get(INVALID_ARGUMENTS, call.arguments))
    ).decode()
    sent: _Json = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
    details: _Json = native.get("details") or {}
    extra = details.get("extra_content")
    return sent | ({"extra_content": extra} if extra and own else {})


def _arguments_to_send(written: str | _Json) -> _Json:
    """Always an object, which is all that strict providers take."""
    if not isinstance(written, str):
        return written
    read = _arguments(written)
    return {"INVALID_JSON": written} if read is None else read


def _asked(messages: Iterable[Message]) -> list[_Json]:
    """Results first, as providers demand, then one prompt: some chat templates refuse two in a row."""
    sent: list[_Json] = []
    prompts: list[str | list[_Json]] = []
    shown: list[_Json] = []
    for message in messages:
        match message:
            case ToolResult():
                sent.append(_returned(message, shown))
            case Compaction():
                prompts.append(_SUMMARY + message.summary)
            case User():
                prompts.append(_user_content(message.content))
            case Assistant():  # not in this turn
                pass
    if prompts:
        sent.append({"role": "user", "content": _joined(prompts)})
    if shown:
        sent.append({"role": "user", "content": shown})
    return sent


def _joined(prompts: list[str | list[_Json]]) -> str | list[_Json]:
    texts = [content for content in prompts if isinstance(content, str)]
    if len(texts) == len(prompts):
        return "\n\n".join(texts)
    return list(chain.from_iterable([_text(it)] if isinstance(it, str) else it for it in prompts))


def _user_content(content: str | list[Text | Image]) -> str | list[_Json]:
    if isinstance(content, str):
        return content if content.strip() else _BLANK
    items = [_item(block) for block in content if not isinstance(block, Text) or block.text.strip()]
    if all(item["type"] == "text" for item in items):
        return "\n\n".join(item["text"] for item in items) or _BLANK
    return items


def _item(block: Text | Image) -> _Json:
    if isinstance(block, Text):
        return _text(block.text)
    data = _bytes_of(block)
    return _text(_UNREADABLE) if data is None else _picture(data, block.mime_type)


def _text(text: str) -> _Json:
    return {"type": "text", "text": text}


def _picture(data: bytes, mime_type: str) -> _Json:
    url = f"data:{mime_type};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _bytes_of(image: Image) -> bytes | None:
    try:
        return base64.b64decode(image.data) if image.mime_type.startswith("image/") else None
    except binascii.Error:
        return None


def _returned(result: ToolResult, shown: list[_Json]) -> _Json:
    """A result is text here; its images are named in it and `shown` in a message of the user after it."""
    text = result.text if result.text.strip() else _NO_OUTPUT
    if result.interrupted:
        text = f"{_INTERRUPTED}\n{text}"
    parts: list[str] = [text]
    names: list[str] = []
    for image in (block for block in result.content if isinstance(block, Image)):
        data = _bytes_of(image)
        if data is None:
            parts.append(_UNREADABLE)
            continue
        name = sha1(data, usedforsecurity=False).hexdigest()[:6]
        parts.append(f"See file {name}.")
        names.append(parts[-1])
        shown.extend((_text(_frame(result, name)), _picture(data, image.mime_type), _text("</tool_result>")))
    content = _result_text(parts, names, failed=result.is_error)
    return {"role": "tool", "tool_call_id": result.tool_call_id, "content": content}


def _frame(result: ToolResult, name: str) -> str:
    """Says that what follows came from a tool: it must not pass for something the user sent."""
    marks = {"tool_name": result.tool_name, "tool_call_id": result.tool_call_id, "file_id": name}
    written = (f'{key}="{html.escape(value)}"' for key, value in marks.items())
    return f"<tool_result {' '.join(written)}>"


def _result_text(parts: list[str], names: list[str], *, failed: bool) -> str:
    """Plain text for plain text, JSON for more, and `{"error": …}` for a failure, which has no field of its own."""
    if not failed:
        return parts[0] if len(parts) == 1 else _json(parts)
    said = [part for part in parts if part not in names] if names else parts
    error = {"error": said[0] if len(said) == 1 else _json(said)}
    return _json([error, *names] if names else error)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _fill_thinking(sent: list[_Json]) -> None:
    """A server that thinks in a field wants it, even empty, on every call since the user last spoke."""
    used = {name for message in sent for name in _THINKING_FIELDS if name in message}
    if len(used) != 1:
        return
    for message in reversed(sent):
        if message["role"] == "user":
            return
        if message.get("tool_calls"):
            message.setdefault(next(iter(used)), "")


def reasoning_efforts(spec: ModelSpec) -> dict[str, str | None]:
    """What to send for each level of thinking: the nearest effort the model takes, or nothing if it takes none."""
    from pydantic_ai.profiles.openai import OPENAI_REASONING_EFFORT_MAP, OpenAIModelProfile  # noqa: PLC0415
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider  # noqa: PLC0415

    family = OpenAIProvider if spec.provider == "openai" else OpenAICompatibleProvider
    profile = cast(OpenAIModelProfile, family.model_profile(spec.model) or {})
    always = profile.get("thinking_always_enabled", False)
    if not (profile.get("supports_thinking", False) or always):
        return {}
    levels = {str(level): str(effort) for level, effort in OPENAI_REASONING_EFFORT_MAP.items() if level}
    taken = profile.get("openai_reasoning_efforts")
    if taken is None:
        least = "minimal" if profile.get("openai_supports_minimal_reasoning_effort", True) else "low"
        return {**levels, "minimal": least, "off": None if always else OPENAI_REASONING_EFFORT_MAP[False]}
    most = profile.get("openai_chat_supports_max_reasoning_effort", False)
    return _nearest(levels, [it for it in _EFFORTS if it in taken and (it != "max" or most)])


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _nearest(levels: Mapping[str, str], accepted: list[str]) -> dict[str, str | None]:
    """For each level the least effort that is not below it, else the most there is; for none, the least."""
    active = [effort for effort in accepted if effort != "none"]
    nearest: dict[str, str | None] = {"off": next(iter(accepted), None)}
    for level, effort in levels.items():
        enough = (it for it in active if _EFFORTS.index(it) >= _EFFORTS.index(effort))
        nearest[level] = next(enough, active[-1] if active else None)
    return nearest


# What is received.


class _Unreadable(Exception):
    """The stream is not what it should be; the text says why."""


class Events:
    """The data of server-sent events, out of pieces that are cut anywhere."""

    def __init__(self) -> None:
        self.any = False
        self._rest = bytearray()
        self._data: list[bytearray] = []
        self._held = 0
        self._seen = 0

    def of(self, piece: bytes) -> Generator[bytes]:
        """The events that this piece completes."""
        self._seen += len(piece)
        self._rest += piece
        if b"\n" in piece:
            *lines, self._rest = self._rest.split(b"\n")
            yield from filter(None, map(self._completed, lines))
        if self._held + len(self._rest) > LONGEST_EVENT:
            raise _Unreadable(f"a piece of the stream is longer than {LONGEST_EVENT} bytes")
        if self._seen > LONGEST_ANSWER:
            raise _Unreadable(f"the answer is longer than {LONGEST_ANSWER} bytes")

    def _completed(self, line: bytearray) -> bytes | None:
        """The event that ends with this line, if one does."""
        text = line.removesuffix(b"\r")
        if text.startswith(b"data:"):
            self._data.append(text[5:].removeprefix(b" "))
            self._held += len(text)
        if text or not self._data:
            return None
        data, self._data, self._held = b"\n".join(self._data), [], 0
        self.any = True
        return data


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | _Json | None = None


class _CallDelta(msgspec.Struct):
    index: int | None = None
    id: str | int | None = None
    function: _Function | None = None
    extra_content: Any = None


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str | int | None = None
    model: str | None = None
    choices: list[_Choice] | None = None
    usage: _Json | None = None
    service_tier: str | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True, eq=False)
class _Part:
    """A block of the answer while it grows. `source` is the field it comes from, `tags` or `call`."""

    source: str
    pieces: list[str] = field(default_factory=list[str])
    name: str = ""
    id: str = ""
    extra: Any = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class _Answer:
    """What has been received, put together."""

    def __init__(self, deltas: Deltas) -> None:
        self._deltas = deltas
        self._parts: list[_Part] = []
        self._calls: dict[int, _Part] = {}
        self._tagged: _Part | None = None
        self.ended = False
        self.id = self.model = self.tier = self.finish = self.refusal = ""
        self.usage: _Json | None = None

    @property
    def said(self) -> bool:
        return any(part.source == "content" for part in self._parts)

    def take(self, chunk: _Chunk) -> None:
        self.id = str(chunk.id or self.id)
        self.model = chunk.model or self.model
        self.tier = chunk.service_tier or self.tier
        # The last report counts: some servers report what was used so far with every piece.
        self.usage = chunk.usage or self.usage
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        self.finish = choice.finish_reason or self.finish
        delta = choice.delta
        if delta is None:
            return
        if delta.refusal:
            self.refusal += delta.refusal
            return
        self._think(delta)
        self._say(delta.content)
        for call in delta.tool_calls or ():
            self._call(call)

    def refuse(self) -> None:
        self._deltas.text(self.refusal)
        self._growing("content").pieces.append(self.refusal)

    def blocks(self, taken: set[str]) -> list[Text | Thinking | ToolCall]:
        """`taken` are the call ids that are no longer free."""
        content: list[Text | Thinking | ToolCall] = []
        for part in self._parts:
            if part.source == "content":
                content.append(Text(text=part.text))
            elif part.source != "call":
                origin = "content" if part.source == "tags" else part.source
                content.append(Thinking(thinking=part.text, native={"id": origin}))
            elif part.name:
                content.append(_tool_call(part, taken))
        return content

    def _growing(self, source: str) -> _Part:
        """The block that a piece from there belongs to: the last one, or a new one if that came from elsewhere."""
        if not self._parts or self._parts[-1].source != source:
            self._parts.append(_Part(source))
        return self._parts[-1]

    def _think(self, delta: _Delta) -> None:
        for name, piece in zip(_THINKING_FIELDS, (delta.reasoning, delta.reasoning_content), strict=True):
            if piece and isinstance(piece, str):
                self._growing(name).pieces.append(piece)
                self._deltas.thinking(piece)
                return

    def _say(self, content: str | list[Any] | None) -> None:
        piece = content if isinstance(content, str) else _text_of(content)
        if not piece:
            return
        if self._tagged is not None:
            if piece == _TAGS[1]:
                self._tagged = None
            else:
                self._tagged.pieces.append(piece)
                self._deltas.thinking(piece)
        elif piece == _TAGS[0]:
            self._tagged = _Part("tags")
            self._parts.append(self._tagged)
        else:
            self._growing("content").pieces.append(piece)
            self._deltas.text(piece)

    def _call(self, delta: _CallDelta) -> None:
        function = delta.function or _Function()
        part = self._call_part(delta.index, function.name)
        part.name += function.name or ""
        part.id = str(delta.id or part.id)
        part.extra = delta.extra_content or part.extra
        arguments = function.arguments
        if arguments:
            part.pieces.append(arguments if isinstance(arguments, str) else _json(arguments))

    def _call_part(self, index: int | None, name: str | None) -> _Part:
        """Some servers do not number calls: there a name begins the next one."""
        if index is None and not name and self._parts and self._parts[-1].source == "call":
            return self._parts[-1]
        if index is None or index not in self._calls:
            self._parts.append(_Part("call"))
            if index is None:
                return self._parts[-1]
            self._calls[index] = self._parts[-1]
        return self._calls[index]


def _text_of(content: list[Any] | None) -> str:
    """Some servers stream text as a list of parts."""
    parts = (
        cast(_Json, part) if isinstance(part, dict) else {"type": "text", "text": part}
        for part in content or ()
    )
    texts: list[object] = [part.get("text") for part in parts if part.get("type") == "text"]
    return "".join(text for text in texts if isinstance(text, str))


def _tool_call(part: _Part, taken: set[str]) -> ToolCall:
    native: _Json = {"details": {"extra_content": part.extra}} if part.extra else {}
    arguments = _arguments(part.text)
    if arguments is None:
        native[INVALID_ARGUMENTS] = part.text
    call_id = part.id
    if not call_id or call_id in taken:
        # Some local servers count from nought in every answer; a result must belong to one call only.
        call_id = f"call_{uuid.uuid4().hex[:24]}"
    taken.add(call_id)
    return ToolCall(id=call_id, name=part.name, arguments=arguments or {}, native=native or None)


def _arguments(raw: str) -> _Json | None:
    """None when the model did not write a JSON object."""
    if not raw.strip():
        return {}
    try:
        return msgspec.json.decode(raw, type=_Json)
    except msgspec.MsgspecError:
        return None


def _call_ids(messages: Iterable[Message]) -> set[str]:
    return {call.id for message in messages if isinstance(message, Assistant) for call in message.tool_calls}


def _stop_reason(finish: str, content: list[Text | Thinking | ToolCall]) -> StopReason:
    if any(isinstance(block, ToolCall) for block in content):
        return "toolUse"
    return "length" if finish == "length" else "stop"


def _present(**fields: Any) -> _Json | None:
    return {key: value for key, value in fields.items() if value} or None


# What it cost.


def own_cost(price: Price, usage: Usage) -> Cost:
    per_read = price.input if price.cache_read is None else price.cache_read
    per_write = price.input if price.cache_write is None else price.cache_write
    parts = {
        "input": usage.input * price.input / 1e6,
        "output": usage.output * price.output / 1e6,
        "cache_read": usage.cache_read * per_read / 1e6,
        "cache_write": usage.cache_write * per_write / 1e6,
    }
    return Cost(total=sum(parts.values()), **parts)


def price_list(spec: ModelSpec, url: str | None) -> str | None:
    """Whose bundled prices apply: the owner of the address, else the provider of exactly that name.

    A name that merely resembles a known one, or a model that merely has a known name, is not priced.
    """
    snapshot = get_snapshot()
    try:
        return snapshot.find_provider(None, None, url or "").id
    except LookupError:
        return next((provider.id for provider in snapshot.providers if provider.id == spec.provider), None)


def listed_cost(listed: str | None, usage: Any, model: str, details: Mapping[str, Any] | None) -> Cost | None:
    if listed is None:
        return None
    context = {key: value for key, value in (details or {}).items() if isinstance(value, str) and value}
    try:
        price = calc_price(usage, model, provider_id=listed, price_context=context)
    except (LookupError, ValueError):
        return None
    return Cost(
        total=float(price.total_price), input=float(price.input_price), output=float(price.output_price)
    )


def _counters(spec: ModelSpec, url: str) -> Generator[Provider]:
    """Who may know how this provider reports its tokens, most likely first; most report them as OpenAI does."""
    snapshot = get_snapshot()
    for name, address in ((None, url), (spec.provider, None), ("openai", None)):
        try:
            yield snapshot.find_provider(None, name, address)
        except LookupError:
            continue


def _without_nulls(usage: _Json) -> _Json:
    return {
        key: _without_nulls(cast(_Json, value)) if isinstance(value, dict) else value
        for key, value in usage.items()
        if value is not None
    }


# What went wrong.

_NO_CREDIT = frozenset(
    {
        "insufficient_quota",
        "billing_hard_limit_reached",
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "project_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
    }
)
_BY_CODE: dict[str, Kind] = {
    **dict.fromkeys(_NO_CREDIT, "quota"),
    "context_length_exceeded": "overflow",
    "model_not_found": "unknownModel",
    "invalid_api_key": "credentials",
}
_BY_STATUS: dict[int | None, Kind] = {
    401: "credentials",
    402: "quota",
    403: "credentials",
    404: "unknownModel",
    429: "rateLimit",
}
_STATUSES = {
    **dict.fromkeys(_NO_CREDIT, 429),
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "too_many_requests": 429,
    "context_length_exceeded": 400,
    "service_unavailable": 503,
    "service_unavailable_error": 503,
    "server_is_overloaded": 503,
    "overloaded": 503,
    "server_error": 500,
}
"""The status an error has before a stream begins, by its code or type."""


def _codes(error: object) -> tuple[str, str]:
    """The code and the type of an error, where it has them."""
    fields = cast(_Json, error) if isinstance(error, dict) else {}
    code, kind = fields.get("code"), fields.get("type")
    return str(code) if isinstance(code, str | int) else "", kind if isinstance(kind, str) else ""


def _status_of(error: object) -> int | None:
    """The status of an error inside a stream; gateways send the number itself as the code."""
    code, kind = _codes(error)
    if re.fullmatch(r"[45]\d\d", code, re.ASCII):
        return int(code)
    return _STATUSES.get(code) or _STATUSES.get(kind)


def _category(status: int | None, codes: tuple[str, str], reason: str) -> Kind | None:
    """What the provider says in as many words, which comes before what is read out of its sentence."""
    code, kind = codes
    if kind in _NO_CREDIT:
        return "quota"
    if "maximum context length" in reason.lower() or "reduce the length of the messages" in reason.lower():
        return "overflow"
    return _BY_CODE.get(code) or _BY_STATUS.get(status)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds the provider asks for, in milliseconds, in seconds or as a date."""
    try:
        milliseconds = float(headers.get("retry-after-ms", ""))
    except ValueError:
        milliseconds = -1.0
    if 0 <= milliseconds < float("inf"):
        return milliseconds / 1000
    raw = headers.get("retry-after", "")
    try:
        seconds = int(raw)
    except ValueError:
        return _until(raw)
    return float(seconds) if seconds >= 0 else None


def _until(date: str) -> float | None:
    try:
        moment = parsedate_to_datetime(date)
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (aware - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return None


async def _beginning(response: httpx2.Response) -> bytes:
    """As much of an error as anybody reads; reading it to its end lets the connection be used again."""
    body = b""
    async with aclosing(response.aiter_bytes()) as pieces:
        async for piece in pieces:
            body += piece
            if len(body) > LONGEST_ERROR:
                break
    return body[:LONGEST_ERROR].strip()
