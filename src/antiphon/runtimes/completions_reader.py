"""The `Reader` for OpenAI chat completions, the API that nearly every provider speaks: one POST, one event stream.

It sends what `PydanticReader` sends for the same prompt and makes the same transcript of the same answer, without
an SDK and without its objects for every piece. What is sent is `completions_request`, what is received
`completions_answer`, and what failed `completions_errors`; here they meet the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import httpx2

from antiphon import __version__
from antiphon.messages import Assistant, Usage, call_ids
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.completions_answer import Answer, chunk_in
from antiphon.runtimes.completions_efforts import reasoning_efforts
from antiphon.runtimes.completions_errors import interrupted, lost, refused
from antiphon.runtimes.completions_request import request_body
from antiphon.runtimes.completions_usage import Counters
from antiphon.runtimes.event_stream import Events, Unreadable
from antiphon.runtimes.http_reader import OPENAI_URL, PLACEHOLDER_KEY, AnswerMeter, HttpReader
from antiphon.runtimes.model import failure
from antiphon.runtimes.prices import Prices

GOODBYE = 0.5
"""Seconds a server has to end its response after `[DONE]`; a connection read to its end is used again."""


class CompletionsReader(HttpReader):
    """Reads answers straight off one HTTP client."""

    def _prepare(self) -> None:
        spec = self._spec
        base = (spec.base_url or OPENAI_URL).rstrip("/")
        self._url = f"{base}/chat/completions"
        self._headers = httpx2.Headers(
            {
                "authorization": f"Bearer {spec.api_key or PLACEHOLDER_KEY}",
                "content-type": "application/json",
                "user-agent": f"antiphon/{__version__}",
            }
        )
        self._headers.update(dict(spec.headers))
        self._prices = Prices(spec, f"{base}/")
        self._counters = Counters(spec, f"{base}/")
        self._efforts: Mapping[str, str | None] | None = None

    async def _read(self, prompt: Prompt, deltas: Deltas, meter: AnswerMeter) -> Assistant:
        body = request_body(self._spec, prompt, await self._effort(prompt.thinking))
        request = self._http.build_request("POST", self._url, content=body, headers=self._headers)
        answer = Answer(deltas, meter)
        try:
            response = await self._http.send(request, stream=True)
            async with aclosing(response):
                if not response.is_success:
                    raise await refused(self._spec, response)
                await self._listen(response, answer)
        except httpx2.HTTPError as error:
            # The cause is left out: it would drag the request, with its headers, into tracebacks.
            raise lost(self._spec, error) from None
        self._check(answer)
        model = self._model_name(answer.model)
        return self._assistant(
            answer.blocks(call_ids(prompt.messages)),
            finish=answer.finish,
            model=model,
            usage=self._usage(answer, model),
            native=answer.native,
        )

    async def _effort(self, level: str | None) -> str | None:
        if level is None:
            return None
        if self._efforts is None:
            self._efforts = await reasoning_efforts(self._spec)
        return self._efforts.get(level)

    async def _listen(self, response: httpx2.Response, answer: Answer) -> None:
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
        except Unreadable as error:
            raise failure(self._spec, "brokenOff", reason=str(error)) from None
        if not events.any:
            kind = response.headers.get("content-type", "nothing").partition(";")[0]
            raise failure(self._spec, "brokenOff", reason=f"it answered with {kind} instead of a stream")

    def _take(self, data: bytes, answer: Answer) -> None:
        chunk = chunk_in(data)
        if chunk.error:
            raise interrupted(self._spec, chunk.error)
        answer.take(chunk)

    def _check(self, answer: Answer) -> None:
        """Refuse what is not an answer: a stream that ended early, or nothing because of a filter."""
        if not answer.finish:
            raise failure(self._spec, "brokenOff", reason="the stream ended before the answer did")
        if (answer.finish == "content_filter" or answer.refusal) and not answer.said:
            if not answer.refusal:
                raise failure(self._spec, "withheld", reason="content filter")
            answer.refuse()

    def _usage(self, answer: Answer, model: str) -> Usage | None:
        """None when the provider reported none: nought tokens would be a claim."""
        counted = self._counters.count(answer.usage, model) if answer.usage else None
        if counted is None:
            return None
        said = {"finish_reason": answer.finish, "service_tier": answer.tier}
        return self._prices.usage(counted, model, said)
