"""Base class of readers that query a provider over HTTP: a bounded client, and assembly of the message.

A provider is not trusted with memory or time. Both our readers and the SDKs read answers from streams that end at a
limit, follow no redirect to another origin, and wait only a limited time for content. How requests are built and
answers are parsed is up to the readers of the individual APIs.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from types import TracebackType
from typing import Any, Self

import httpx2
import msgspec

from antiphon.clock import Clock, SystemClock
from antiphon.errors import ProviderError
from antiphon.messages import AssistantMessage, StopReason, TextBlock, ThinkingBlock, TokenUsage, ToolCall
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.model import ModelSpec, build_provider_error
from antiphon.runtimes.retry import RetryPolicy
from antiphon.runtimes.text import sanitize_answer

PLACEHOLDER_KEY = "not-needed"
"""Sent if no key is configured: the SDKs require one, and local servers ignore it."""

OPENAI_URL = "https://api.openai.com/v1"

BYTES_PER_MIB = 1024 * 1024
MAX_ERROR_BODY_BYTES = 64 * 1024
"""Bytes of an error body that are read; the rest is discarded."""
WIRE_FACTOR, MIN_WIRE_BYTES = 64, 4 * BYTES_PER_MIB
"""Wire bytes allowed per byte of an answer: a token of four bytes arrives in a chunk of about 250."""
EVENT_FACTOR, MIN_EVENT_BYTES = 4, 4 * BYTES_PER_MIB
"""Likewise for the longest event: some servers repeat the whole answer in the last one."""
MAX_LINES_PER_EVENT = 256
"""Lines allowed per event: SDKs copy an event once per line, and real ones have three."""
PIECE_BYTES = 16 * 1024
"""Bytes of events handed over at once; an SDK parses them for tens of milliseconds, blocking other tasks."""
MAX_TOOL_CALLS_READ = 1024
BLOCK_BYTES = 64
"""Fixed cost of a block on top of its text, so that thousands of empty blocks count as well."""
MIN_SECRET_CHARACTERS = 8
"""Shortest key or header that is looked for in a model's name; shorter ones occur in ordinary names."""

_EVENT_END_PATTERN = re.compile(rb"\n\r?\n|\r\r")
_MODEL_NAME_PATTERN = re.compile(r"[A-Za-z0-9./_~@][A-Za-z0-9./_~@:+-]{0,127}")


class HttpReader(ABC):
    """One HTTP client, reused by every step of a spec."""

    def __init__(
        self,
        spec: ModelSpec,
        retry_policy: RetryPolicy,
        *,
        http: httpx2.AsyncClient | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._spec = spec
        self._retry_policy = retry_policy
        self._http = http or _open_client(retry_policy)
        # Not a custom transport: a client with one ignores the proxy settings of the environment.
        self._http.event_hooks = {"response": [self._guard_response]}
        self._clock = clock or SystemClock()
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Builds what every step shares."""

    async def read(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        async with AnswerMeter(self._spec, self._retry_policy.content) as meter:
            return await self._read(prompt, deltas, meter)

    @abstractmethod
    async def _read(self, prompt: Prompt, deltas: Deltas, meter: AnswerMeter) -> AssistantMessage:
        """Makes one attempt, and has `meter` count the parts of the answer."""

    async def close(self) -> None:
        await self._http.aclose()

    def _build_assistant(
        self,
        content: list[TextBlock | ThinkingBlock | ToolCall],
        *,
        finish: str | None,
        model: str,
        usage: TokenUsage | None,
        native: dict[str, Any] | None,
    ) -> AssistantMessage:
        self._check_native(content, native)
        return sanitize_answer(
            AssistantMessage(
                content=content,
                timestamp=self._clock.now(),
                stop_reason=_get_stop_reason(finish, content),
                api=self._spec.api,
                provider=self._spec.provider,
                model=model,
                usage=usage,
                native=native,
            )
        )

    def _choose_model_name(self, reported: str | None) -> str:
        """The model name that the provider reports, or the spec's if the report is not a plausible name."""
        secrets = (self._spec.api_key, *self._spec.headers.values())
        if (
            reported is None
            or not _MODEL_NAME_PATTERN.fullmatch(reported)
            or any(
                len(secret) >= MIN_SECRET_CHARACTERS and secret in reported for secret in secrets if secret
            )
        ):
            return self._spec.model
        return reported

    def _check_native(
        self, content: list[TextBlock | ThinkingBlock | ToolCall], native: dict[str, Any] | None
    ) -> None:
        """Refuses provider-specific data that is too large to store; it is not counted while it arrives."""
        kept = [native, *(block.native for block in content)]
        try:
            size = len(msgspec.json.encode(kept)) if any(kept) else 0
        except RecursionError:
            raise build_provider_error(
                self._spec, "brokenOff", reason="its answer is nested too deeply"
            ) from None
        except UnicodeEncodeError:
            return  # a lone surrogate, which `sanitize_answer` removes
        if size > self._spec.max_answer_bytes:
            raise build_too_long_error(self._spec)

    async def _guard_response(self, response: httpx2.Response) -> None:
        """Bounds every response, redirects included, before any of its body is read."""
        if response.has_redirect_location:
            try:
                target = response.url.join(response.headers["location"])
            except httpx2.InvalidURL:
                raise build_provider_error(self._spec, "redirected", status=response.status_code) from None
            if _get_origin(target) != _get_origin(response.url):
                place = f"to {target.scheme}://{target.netloc.decode()}"
                raise build_provider_error(
                    self._spec, "redirected", status=response.status_code, reason=place
                )
        if response.is_success and response.headers.get("content-type", "").startswith("text/html"):
            raise build_provider_error(self._spec, "notAStream", reason="text/html")
        decode = self._build_decoder(response.headers.pop("content-encoding", "identity").strip().lower())
        response.stream = _BoundedStream(response.stream, self._spec, decode, failed=not response.is_success)

    def _build_decoder(self, encoding: str) -> Callable[[bytes], Generator[bytes]] | None:
        """A decoder for a compressed body, if any: some servers compress although it was not requested."""
        if encoding in ("identity", ""):
            return None
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise build_provider_error(
                self._spec, "brokenOff", reason="its answer has an unsupported encoding"
            )
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
        return lambda data: _inflate_pieces(inflate, data)


def iterate_body(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """Yields the events of a successful response as `httpx2` would, without its two more layers per piece."""
    assert isinstance(response.stream, _BoundedStream)
    return response.stream.read_events()


def build_too_long_error(spec: ModelSpec) -> ProviderError:
    return build_provider_error(spec, "tooLong", reason=f"more than {spec.max_answer_bytes} bytes")


class AnswerMeter:
    """Counts the parts of an answer, and aborts the attempt if it grows too large or stalls for too long.

    Keep-alive comments and empty chunks are not content: a provider could send them for days.
    """

    def __init__(self, spec: ModelSpec, max_idle_seconds: float) -> None:
        self._spec = spec
        self._max_idle_seconds = max_idle_seconds
        self._bytes = self._argument_bytes = self._calls = 0
        self._loop = asyncio.get_running_loop()
        self._latest = self._loop.time()
        self._limit = asyncio.timeout(None)
        self._timer = self._loop.call_later(max_idle_seconds, self._check_idle)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            waited = f"no content for {self._max_idle_seconds:g} seconds"
            raise build_provider_error(self._spec, "stalled", reason=waited) from None

    def add(self, piece: str) -> None:
        """Counts a piece of text, thinking or a name."""
        if piece:
            self._grow(_count_utf8_bytes(piece))

    def add_arguments(self, piece: str) -> None:
        """Counts a piece of a tool call's arguments, which may be longer because they can contain files."""
        if piece:
            self._argument_bytes += _count_utf8_bytes(piece)
            self._grow(0)

    def begin_block(self) -> None:
        """Counts the start of a text, thinking or tool call block."""
        self._grow(BLOCK_BYTES)

    def begin_call(self) -> None:
        """Counts the start of a tool call. Their number is limited because libraries slow down with many."""
        self._calls += 1
        if self._calls > MAX_TOOL_CALLS_READ:
            raise build_provider_error(self._spec, "tooManyCalls", reason=f"more than {MAX_TOOL_CALLS_READ}")
        self.begin_block()

    def _grow(self, size: int) -> None:
        self._latest = self._loop.time()
        self._bytes += size
        attached = min(self._argument_bytes, self._spec.max_attachment_bytes)
        if self._bytes + self._argument_bytes - attached > self._spec.max_answer_bytes:
            raise build_too_long_error(self._spec)

    def _check_idle(self) -> None:
        """Aborts if idle for too long. One rescheduled timer is cheaper than one per piece."""
        due = self._latest + self._max_idle_seconds
        if self._loop.time() >= due:
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_at(due, self._check_idle)


def _count_utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


class _BoundedStream(httpx2.AsyncByteStream):
    """A response body that yields whole events, decompressed, up to a limit of bytes."""

    def __init__(
        self,
        stream: object,
        spec: ModelSpec,
        decode: Callable[[bytes], Generator[bytes]] | None,
        *,
        failed: bool,
    ) -> None:
        assert isinstance(stream, httpx2.AsyncByteStream)
        self._stream = stream
        self._spec = spec
        self._decode = decode
        self._failed = failed

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._read_beginning() if self._failed else self.read_events()

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def _read_beginning(self) -> AsyncGenerator[bytes]:
        left = MAX_ERROR_BODY_BYTES
        async for piece in self._stream if self._decode is None else self._decompress():
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return

    async def read_events(self) -> AsyncGenerator[bytes]:
        held = bytearray()  # the start of an incomplete event
        seen = 0
        max_bytes = self._spec.max_answer_bytes + self._spec.max_attachment_bytes
        async for piece in self._stream if self._decode is None else self._decompress():
            seen += len(piece)
            if seen > max(MIN_WIRE_BYTES, WIRE_FACTOR * max_bytes):
                raise build_provider_error(
                    self._spec, "tooLong", reason=f"{seen} bytes including its framing"
                )
            if not held and len(piece) <= PIECE_BYTES and piece.endswith(b"\n\n"):
                yield piece
                continue
            searched = max(0, len(held) - 3)
            held += piece
            for end in self._find_event_ends(held, searched):
                yield bytes(held[:end])
                del held[:end]
                await asyncio.sleep(0)
            if len(held) > max(MIN_EVENT_BYTES, EVENT_FACTOR * max_bytes):
                raise build_provider_error(self._spec, "tooLong", reason=f"one event has {len(held)} bytes")
        if held:
            self._check_lines(held, 0, len(held))
            yield bytes(held)

    def _find_event_ends(self, held: bytearray, searched: int) -> Generator[int]:
        """Yields how many bytes to hand over: complete events of about `PIECE_BYTES` together."""
        done = 0
        while found := _EVENT_END_PATTERN.search(held, searched):
            searched = found.end()
            self._check_lines(held, done, searched)
            done = searched
            if done >= PIECE_BYTES:
                yield done
                done = searched = 0
        if done:
            yield done

    def _check_lines(self, held: bytearray, start: int, end: int) -> None:
        if end - start <= MAX_LINES_PER_EVENT:
            return
        if held.count(b"\n", start, end) + held.count(b"\r", start, end) > 2 * MAX_LINES_PER_EVENT:
            raise build_provider_error(
                self._spec, "brokenOff", reason="an event of the stream has too many lines"
            )

    async def _decompress(self) -> AsyncGenerator[bytes]:
        """Yields the decompressed body."""
        assert self._decode is not None
        try:
            async for piece in self._stream:
                for part in self._decode(piece):
                    yield part
        except zlib.error:
            raise build_provider_error(
                self._spec, "brokenOff", reason="its answer could not be decompressed"
            ) from None


def _inflate_pieces(inflate: Any, data: bytes) -> Generator[bytes]:
    """Decompresses in pieces, since a few bytes can expand to millions."""
    while data and (piece := inflate.decompress(data, PIECE_BYTES)):
        yield piece
        data = inflate.unconsumed_tail


def _get_origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    ports = {"http": 80, "https": 443}
    return url.scheme, url.host, url.port or ports.get(url.scheme)


def _open_client(retry_policy: RetryPolicy) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(retry_policy.idle, connect=retry_policy.connect, pool=None),
        # The engine limits how many runs are active; a second limit here would only hide the waiting.
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        headers={"accept-encoding": "identity"},
        follow_redirects=True,
    )


def _get_stop_reason(finish: str | None, content: list[TextBlock | ThinkingBlock | ToolCall]) -> StopReason:
    if any(isinstance(block, ToolCall) for block in content):
        return "toolUse"
    return "length" if finish == "length" else "stop"
