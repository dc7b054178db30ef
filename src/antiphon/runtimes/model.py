"""Answers a step with a language model behind an HTTP API.

Defines the model (`ModelSpec`) and its errors (`build_provider_error`); `retry` defines its retries. A `Reader`
reads an answer off the wire: a lean one for chat completions, and one on pydantic-ai's model layer for every other
API. It is imported and opened on the first step, so importing this module is cheap. The durable loop is the
engine's; pydantic-ai's agent loop is not used. A reader makes one attempt and raises `ProviderError`; retries are
counted here.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, cast

import msgspec

from antiphon.clock import Clock
from antiphon.config.addresses import mask_url
from antiphon.errors import ContextOverflow, CredentialsRefused, ProviderError
from antiphon.messages import AssistantMessage
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.retry import RetryPolicy, iterate_attempts

if TYPE_CHECKING:
    import httpx2

Api = Literal["openai-completions", "openai-responses", "anthropic-messages", "google-generative-ai"]

MAX_RETRY_AFTER_SECONDS = 7 * 86_400.0
"""Longest Retry-After that is recorded; a provider that asks for more is recorded with this."""

INVALID_ARGUMENTS_KEY = "invalidArguments"
"""Key in `ToolCall.native` for arguments that are not a JSON object, or one nested too deeply.

Such a call has `arguments == {}`. The tool is not run; the call is answered with an error result that quotes this
text, which goes back to the model exactly as written.
"""


class ModelPrice(msgspec.Struct, frozen=True, kw_only=True):
    """US dollars per million tokens; a missing price is unknown, not free."""

    input: float | None = None
    output: float | None = None
    cache_read: float | None = None
    cache_write: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One configured model at one provider. Secrets are left out of its `repr`."""

    provider: str
    model: str
    api: Api
    base_url: str | None = None
    """None means the public endpoint of the API's vendor."""
    api_key: str | None = field(default=None, repr=False)
    """None is fine for local servers, which receive a placeholder."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    context_window: int | None = None
    max_tokens: int | None = None
    """Maximum tokens of one answer; None leaves it to the provider."""
    max_answer_bytes: int = 1024 * 1024
    """Maximum bytes of one answer: text, thinking and tool calls together."""
    max_attachment_bytes: int = 0
    """Additional bytes for the arguments of tool calls, which can contain files."""
    price: ModelPrice | None = None
    """None means the bundled price list; the cost of a model not listed there is unknown."""


def get_max_answer_tokens(spec: ModelSpec, prompt: Prompt) -> int | None:
    """Maximum tokens of one answer: the configured limit, or a lower one chosen by the request."""
    chosen = prompt.sampling.max_tokens if prompt.sampling else None
    limits = [limit for limit in (spec.max_tokens, chosen) if limit is not None]
    return min(limits, default=None)


class Reader(Protocol):
    """Reads one answer of one model from the wire."""

    async def read(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        """Makes one attempt.

        Raises:
            ProviderError: built by `build_provider_error`; `retryable` says whether another attempt makes sense.
        """
        ...

    async def close(self) -> None: ...


class ModelRuntime:
    """A `Runtime` for a `ModelSpec`. Create one per spec: it holds the connections to the provider."""

    reads_history = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        retry_policy: RetryPolicy | None = None,
        reader: Reader | None = None,
        slots: asyncio.Semaphore | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`slots` limits concurrent requests across all runtimes that share it; waiting for a retry holds none."""
        self._slots = slots or asyncio.Semaphore(1000)
        self.spec = spec
        self._retry_policy = retry_policy or RetryPolicy()
        self._reader = reader
        self._clock = clock
        self._opening = asyncio.Lock()

    @property
    def context_window(self) -> int | None:
        return self.spec.context_window

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        reader = self._reader or await self._open_reader()
        async for attempt in iterate_attempts(self._retry_policy):
            with attempt:
                if attempt.num > 1:
                    deltas.restart()
                return await self._attempt(reader, prompt, deltas)
        raise AssertionError("The last attempt returns or raises.")

    async def _attempt(self, reader: Reader, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        try:
            async with self._slots:
                return await reader.read(prompt, deltas)
        except ProviderError as error:
            error.data |= prompt.log_fields  # the retry hook logs only what the error carries
            raise

    async def close(self) -> None:
        async with self._opening:
            if self._reader is not None:
                await self._reader.close()
                self._reader = None

    async def _open_reader(self) -> Reader:
        async with self._opening:
            if self._reader is None:
                # Importing the provider libraries takes most of a second, so do it off the event loop.
                self._reader = await asyncio.to_thread(
                    open_reader, self.spec, self._retry_policy, self._clock
                )
            return self._reader


def open_reader(
    spec: ModelSpec,
    retry_policy: RetryPolicy,
    clock: Clock | None = None,
    *,
    http: httpx2.AsyncClient | None = None,
) -> Reader:
    """Opens the reader for a spec: the lean one wherever it covers everything, else the one on pydantic-ai."""
    import_module("stamina")  # imported here, in a thread, rather than on the first step

    if is_plain_chat_completions(spec):
        from antiphon.runtimes.openai_chat.reader import CompletionsReader  # noqa: PLC0415

        return CompletionsReader(spec, retry_policy, http=http, clock=clock)
    from antiphon.runtimes.pydantic_ai.reader import PydanticReader  # noqa: PLC0415

    return PydanticReader(spec, retry_policy, http=http, clock=clock)


_PECULIAR_MODEL_PREFIXES = ("anthropic/", "deepseek/", "moonshotai/", "qwen/")
"""Models with other tags around their thinking, or blank text before their calls."""


def is_plain_chat_completions(spec: ModelSpec) -> bool:
    """Whether plain chat completions suffice; models with quirks are left to pydantic-ai, which knows them."""
    url, model = spec.base_url or "", spec.model
    return (
        spec.api == "openai-completions"
        and spec.provider not in ("azure", "zai")
        and not any(mark in url for mark in ("?", "#", ".azure.com"))
        and not model.startswith(("o1-mini", *_PECULIAR_MODEL_PREFIXES))
        and "-search-preview" not in model
    )


FailureKind = Literal[
    "overflow",
    "credentials",
    "unknownModel",
    "quota",
    "rateLimit",
    "busy",
    "rejected",
    "unreachable",
    "silent",
    "brokenOff",
    "notAStream",
    "withheld",
    "stalled",
    "tooLong",
    "tooManyCalls",
    "redirected",
]

_ERROR_CLASSES: dict[FailureKind, type[ProviderError]] = {
    "overflow": ContextOverflow,
    "credentials": CredentialsRefused,
}
_SENTENCES_BY_KIND: dict[FailureKind, tuple[str, str]] = {
    "overflow": (
        "reports that the conversation exceeds the context window of {model!r}",
        "Compact the session or choose a model with a larger window.",
    ),
    "credentials": ("refused the credentials for {model!r}", "Check models.providers.{provider}.apiKey."),
    "unknownModel": (
        "does not know the model {model!r}",
        "Choose one that it offers, or check models.providers.{provider}.baseUrl.",
    ),
    "quota": ("has no credit left for {model!r}", "Top up the account or choose another model."),
    "rateLimit": (
        "is limiting the requests to {model!r}",
        "Try again later, or reduce agents.defaults.maxConcurrent.",
    ),
    "busy": ("could not answer for {model!r}", "Try again later."),
    "rejected": (
        "rejected the request to {model!r}",
        "Check the model's settings; repeating the request does not help.",
    ),
    "unreachable": ("cannot be reached for {model!r}", "Check that the server at {url} is running."),
    "silent": ("stopped sending while answering for {model!r}", "Try again, or check the server at {url}."),
    "brokenOff": ("broke off the answer of {model!r}", "Try again later."),
    "notAStream": (
        "answered for {model!r} with something other than a stream",
        "Check models.providers.{provider}.baseUrl.",
    ),
    "withheld": ("withheld the answer of {model!r}", "Rephrase the message or choose another model."),
    "stalled": (
        "keeps the connection open without answering for {model!r}",
        "Try again, or check the server at {url}.",
    ),
    "tooLong": (
        "sent an answer of {model!r} that is too long to store",
        "Ask for less at once, or raise store.messageMaxBytes.",
    ),
    "tooManyCalls": ("sent an answer of {model!r} with too many tool calls", "Ask for less at once."),
    "redirected": (
        "redirects requests for {model!r} to another address, which is not followed",
        "Set models.providers.{provider}.baseUrl to the address that answers.",
    ),
}

_RETRYABLE_KINDS: frozenset[FailureKind] = frozenset(
    {"rateLimit", "busy", "unreachable", "silent", "brokenOff"}
)

_OVERFLOW_PATTERN = re.compile(
    r"context.length.exceeded|exceed.context.size|maximum context length|reduce the length of the messages"
    r"|prompt is too long|prompt too long|input is too long|longer than the (maximum )?(model|context)"
    r"|exceeds? (the |max(imum)? )*(available |model'?s? )*context|greater than the context length"
    r"|exceed context limit|context window|context size|input token count.*exceeds|request_too_large",
    re.IGNORECASE,
)
"""Context overflow messages of OpenAI, Anthropic, Google, vLLM, llama.cpp, Ollama, LM Studio and gateways."""


def classify_status(status: int, reason: str) -> FailureKind:
    """The kind of failure that an HTTP status means, given the provider's message."""
    # A 429 that mentions size is about tokens per minute, which compacting does not help.
    if status != 429 and (status == 413 or _OVERFLOW_PATTERN.search(reason)):
        return "overflow"
    if status in (401, 403):
        return "credentials"
    if status == 402:
        return "quota"
    if status == 404:
        return "unknownModel"
    if status == 429:
        return "rateLimit"
    return "busy" if status in (408, 409) or status >= 500 else "rejected"


def extract_reason(body: object) -> str:
    """The message in an error body: `{"error": {"message": …}}` in its many variants."""
    while isinstance(body, dict):
        fields = cast(dict[str, object], body)
        body = fields.get("error") or fields.get("message") or fields.get("detail")
    return body if isinstance(body, str) else ""


def build_provider_error(
    spec: ModelSpec,
    kind: FailureKind,
    *,
    status: int | None = None,
    reason: str = "",
    retry_after: float | None = None,
) -> ProviderError:
    """Builds the error: who failed, why, and what to do next; never with a secret.

    Providers tend to quote refused credentials, so their reason is left out in that case.
    """
    what, hint = _SENTENCES_BY_KIND[kind]
    names = {"provider": spec.provider, "model": spec.model, "url": mask_url(spec.base_url)}
    shown_reason = "" if kind == "credentials" else _mask_secrets(spec, reason)
    aside = ": ".join(str(part) for part in (status, shown_reason) if part)
    what = f"Provider {spec.provider!r} {what.format(**names)}{f' ({aside})' if aside else ''}."
    data: dict[str, object] = {"status": status, "provider": spec.provider, "model": spec.model}
    if retry_after is not None and retry_after >= 0:  # false for NaN as well
        retry_after = min(retry_after, MAX_RETRY_AFTER_SECONDS)
        data["retryAfter"] = retry_after
        hint = f"Try again in {math.ceil(retry_after)} seconds, at {_format_clock_time(retry_after)}."
    return _ERROR_CLASSES.get(kind, ProviderError)(
        what, hint.format(**names), retryable=kind in _RETRYABLE_KINDS, **data
    )


def _mask_secrets(spec: ModelSpec, reason: str) -> str:
    masked = " ".join(reason.split())
    # In `Bearer abc` the second word alone is a secret, too.
    tokens = [
        v.partition(" ")[2] for name, v in spec.headers.items() if name.lower().endswith("authorization")
    ]
    for secret in (spec.api_key, *spec.headers.values(), *tokens):
        if secret:
            masked = masked.replace(secret, "***")
    return masked if len(masked) <= 300 else f"{masked[:299]}…"


def _format_clock_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() + seconds))
