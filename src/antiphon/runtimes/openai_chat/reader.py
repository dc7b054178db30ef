"""The `Reader` for OpenAI chat completions, which nearly every provider speaks: one POST, one event stream.

It sends the same request as `PydanticReader` for a prompt and builds the same transcript from the answer, but
without an SDK and its objects for every chunk. The `request` module builds the body, `answer` assembles the answer
and `errors` translates failures; this module connects them over HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import httpx2

from antiphon import __version__
from antiphon.errors import ProviderError
from antiphon.messages import AssistantMessage, TokenUsage, collect_call_ids
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.http_reader import OPENAI_URL, PLACEHOLDER_KEY, AnswerMeter, HttpReader, iterate_body
from antiphon.runtimes.model import build_provider_error
from antiphon.runtimes.openai_chat.answer import (
    CompletionAnswer,
    EventStreamParser,
    UnreadableStream,
    decode_chunk,
)
from antiphon.runtimes.openai_chat.errors import (
    build_connection_error,
    build_status_error,
    build_stream_error,
    build_unsendable_error,
)
from antiphon.runtimes.openai_chat.reasoning_efforts import load_reasoning_efforts
from antiphon.runtimes.openai_chat.request import build_request_body
from antiphon.runtimes.openai_chat.usage import TokenCounters
from antiphon.runtimes.prices import Prices

STREAM_END_SECONDS = 0.5
"""Seconds a server has to end its response after `[DONE]`; a connection read to its end is reused."""


class CompletionsReader(HttpReader):
    """Reads answers directly from one HTTP client."""

    def _prepare(self) -> None:
        spec = self._spec
        base = (spec.base_url or OPENAI_URL).rstrip("/")
        self._url = httpx2.URL(f"{base}/chat/completions")
        try:
            self._headers = httpx2.Headers(
                {
                    "authorization": f"Bearer {spec.api_key or PLACEHOLDER_KEY}",
                    "content-type": "application/json",
                    "user-agent": f"antiphon/{__version__}",
                }
            )
            self._headers.update(dict(spec.headers))
        except UnicodeEncodeError:
            raise build_unsendable_error(spec) from None
        self._prices = Prices(spec, f"{base}/")
        self._counters = TokenCounters(spec, f"{base}/")
        self._efforts: Mapping[str, str | None] | None = None

    async def _read(self, prompt: Prompt, deltas: Deltas, meter: AnswerMeter) -> AssistantMessage:
        body = build_request_body(self._spec, prompt, await self._get_effort(prompt.thinking))
        request = self._http.build_request("POST", self._url, content=body, headers=self._headers)
        answer = CompletionAnswer(deltas, meter)
        try:
            response = await self._http.send(request, stream=True)
            async with aclosing(response):
                if not response.is_success:
                    raise await build_status_error(self._spec, response)
                await self._read_stream(response, answer)
        except httpx2.HTTPError as error:
            # The cause is left out: it would carry the request and its headers into tracebacks.
            raise build_connection_error(self._spec, error) from None
        self._check_answer(answer)
        model = self._choose_model_name(answer.model)
        return self._build_assistant(
            answer.build_blocks(collect_call_ids(prompt.messages)),
            finish=answer.finish,
            model=model,
            usage=self._build_usage(answer, model),
            native=answer.native,
        )

    async def _get_effort(self, level: str | None) -> str | None:
        if level is None:
            return None
        if self._efforts is None:
            self._efforts = await load_reasoning_efforts(self._spec)
        return self._efforts.get(level)

    async def _read_stream(self, response: httpx2.Response, answer: CompletionAnswer) -> None:
        events = EventStreamParser()
        is_empty = True
        try:
            async with asyncio.timeout(None) as end_timeout, aclosing(iterate_body(response)) as pieces:
                async for piece in pieces:
                    is_empty = is_empty and not piece
                    for data in events.feed(piece):
                        if data.startswith(b"[DONE]"):
                            answer.ended = True
                            end_timeout.reschedule(asyncio.get_running_loop().time() + STREAM_END_SECONDS)
                        elif not answer.ended:
                            self._add_event(data, answer)
        except (httpx2.HTTPError, TimeoutError):
            if not answer.ended:
                raise
        except UnreadableStream as error:
            raise build_provider_error(self._spec, "brokenOff", reason=str(error)) from None
        if not events.has_events:
            raise self._build_no_events_error(response, is_empty=is_empty)

    def _build_no_events_error(self, response: httpx2.Response, *, is_empty: bool) -> ProviderError:
        kind = response.headers.get("content-type", "").partition(";")[0]
        if is_empty or kind == "text/event-stream":
            return build_provider_error(self._spec, "brokenOff", reason="it sent no events")
        return build_provider_error(self._spec, "notAStream", reason=kind or "without a content type")

    def _add_event(self, data: bytes, answer: CompletionAnswer) -> None:
        chunk = decode_chunk(data)
        if chunk.error:
            raise build_stream_error(self._spec, chunk.error)
        answer.add_chunk(chunk)

    def _check_answer(self, answer: CompletionAnswer) -> None:
        """Refuses what is not an answer: a stream that ended early, or an empty one caused by a filter."""
        if not answer.finish:
            raise build_provider_error(
                self._spec, "brokenOff", reason="the stream ended before the answer did"
            )
        if (answer.finish == "content_filter" or answer.refusal) and not answer.has_text:
            if not answer.refusal:
                raise build_provider_error(self._spec, "withheld", reason="content filter")
            answer.add_refusal_as_text()

    def _build_usage(self, answer: CompletionAnswer, model: str) -> TokenUsage | None:
        """The usage with its cost, or None if the provider reported none: zero tokens would be a claim."""
        counted = self._counters.count_tokens(answer.usage, model) if answer.usage else None
        if counted is None:
            return None
        details = {"finish_reason": answer.finish, "service_tier": answer.tier}
        return self._prices.price_usage(counted, model, details)
