"""Answers a step with a language model behind an HTTP API.

Here live what a model is (`ModelSpec`), how long one is tried (`RetryPolicy`) and what its failures are called
(`build_provider_error`). How an answer is read off the wire is the business of a `Reader`, one per spec and opened on
the first step and imported only then, so importing this module costs nothing: a lean one for chat completions, and one
on pydantic-ai's model layer for every other API. The agent loop of that library is not used; the durable loop is the
engine's.

A reader makes exactly one attempt and raises `ProviderError`; the attempts are counted here.
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

if TYPE_CHECKING:
    import httpx2

Api = Literal["openai-completions", "openai-responses", "anthropic-messages", "google-generative-ai"]

MAX_RETRY_AFTER_SECONDS = 7 * 86_400.0
"""What a provider that asks for more is said to ask for."""

INVALID_ARGUMENTS_KEY = "invalidArguments"
"""Key in `ToolCall.native` holding what the model wrote where its arguments were not a JSON object, or too deep a one.

Such a call has `arguments == {}`; whoever runs tools answers it with an error result that quotes this text
instead of running the tool. The text goes back to the model as it was written.
"""


class ModelPrice(msgspec.Struct, frozen=True, kw_only=True):
    """US dollars per million tokens; what has no price here is unknown, not free."""

    input: float | None = None
    output: float | None = None
    cache_read: float | None = None
    cache_write: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model at one provider, as configured. Secrets stay out of its `repr`."""

    provider: str
    model: str
    api: Api
    base_url: str | None = None
    """None means the public endpoint of the API's owner."""
    api_key: str | None = field(default=None, repr=False)
    """None is fine for local servers; they are sent a placeholder."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    context_window: int | None = None
    max_tokens: int | None = None
    """Most tokens of one answer; None leaves it to the provider."""
    max_answer_bytes: int = 1024 * 1024
    """Most bytes of one answer: its texts, thoughts and tool calls together."""
    max_attachment_bytes: int = 0
    """Bytes that the arguments of its tool calls may have besides: files are handed over in them."""
    price: ModelPrice | None = None
    """None means the bundled price list, and an unknown cost for what is not on it."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often and how long a step tries before it gives up. Times are in seconds."""

    attempts: int = 4
    first_wait: float = 0.5
    """Doubles with every attempt; up to `jitter` is added so that many sessions do not return together."""
    longest_wait: float = 20.0
    jitter: float = 1.0
    retry_after: float = 60.0
    """A provider that asks for more than this is not waited for."""
    connect: float = 10.0
    idle: float = 120.0
    """Longest silence on an open connection, before the first byte as well as between bytes."""
    content: float = 600.0
    """Longest time without content, whatever else is sent: some models think long behind keep-alives."""


def get_max_answer_tokens(spec: ModelSpec, prompt: Prompt) -> int | None:
    """Most tokens of one answer: the configured limit, or a lower one that the request chose."""
    chosen = prompt.sampling.max_tokens if prompt.sampling else None
    limits = [limit for limit in (spec.max_tokens, chosen) if limit is not None]
    return min(limits, default=None)


class Reader(Protocol):
    """Reads one answer of one model from the wire."""

    async def read(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        """Make one attempt.

        Raises:
            ProviderError: made by `build_provider_error`; `retryable` says whether another attempt makes sense.
        """
        ...

    async def close(self) -> None: ...


class ModelRuntime:
    """A `Runtime` on a `ModelSpec`. Make one per spec: it holds the connections to the provider."""

    reads_history = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        patience: RetryPolicy | None = None,
        reader: Reader | None = None,
        slots: asyncio.Semaphore | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`slots` bounds the requests under way at once, with whoever shares it; waiting to try again holds none."""
        self._slots = slots or asyncio.Semaphore(1000)
        self.spec = spec
        self._patience = patience or RetryPolicy()
        self._reader = reader
        self._clock = clock
        self._opening = asyncio.Lock()

    @property
    def context_window(self) -> int | None:
        return self.spec.context_window

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        reader = self._reader or await self._open_reader()
        from antiphon.runtimes.retry import iterate_attempts  # noqa: PLC0415 - came with the reader

        async for attempt in iterate_attempts(self._patience):
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
            error.data |= prompt.log_fields  # who logs the retry is given nothing but the error
            raise

    async def close(self) -> None:
        async with self._opening:
            if self._reader is not None:
                await self._reader.close()
                self._reader = None

    async def _open_reader(self) -> Reader:
        async with self._opening:
            if self._reader is None:
                # The provider libraries take most of a second to import: not on the event loop.
                self._reader = await asyncio.to_thread(open_reader, self.spec, self._patience, self._clock)
            return self._reader


def open_reader(
    spec: ModelSpec,
    patience: RetryPolicy,
    clock: Clock | None = None,
    *,
    http: httpx2.AsyncClient | None = None,
) -> Reader:
    """The reader for a spec: the lean one wherever it does all that the other would."""
    import_module("antiphon.runtimes.retry")  # here, in a thread, and not with the first step

    if is_plain_chat_completions(spec):
        from antiphon.runtimes.openai_chat.reader import CompletionsReader  # noqa: PLC0415

        return CompletionsReader(spec, patience, http=http, clock=clock)
    from antiphon.runtimes.pydantic_ai.reader import PydanticReader  # noqa: PLC0415

    return PydanticReader(spec, patience, http=http, clock=clock)


_PECULIAR_MODEL_PREFIXES = ("anthropic/", "deepseek/", "moonshotai/", "qwen/")
"""Other tags around their thinking, or blank text before their calls."""


def is_plain_chat_completions(spec: ModelSpec) -> bool:
    """Whether chat completions as documented are enough; what is peculiar is left to the library that knows it."""
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
        "says the conversation is longer than the context window of {model!r}",
        "Compact the session or choose a model with a larger window.",
    ),
    "credentials": ("refused the credentials for {model!r}", "Check models.providers.{provider}.apiKey."),
    "unknownModel": (
        "does not know the model {model!r}",
        "Choose one it offers, or check models.providers.{provider}.baseUrl.",
    ),
    "quota": ("has no credit left for {model!r}", "Top up the account or choose another model."),
    "rateLimit": ("is limiting the requests to {model!r}", "Try again later, or let fewer runs go at once."),
    "busy": ("could not answer for {model!r}", "Try again later."),
    "rejected": (
        "rejected the request to {model!r}",
        "Check the model's settings: the same request will be rejected again.",
    ),
    "unreachable": ("cannot be reached for {model!r}", "Is the server at {url} running?"),
    "silent": ("stopped sending while answering for {model!r}", "Try again, or check the server at {url}."),
    "brokenOff": ("broke off the answer of {model!r}", "Try again later."),
    "withheld": ("withheld the answer of {model!r}", "Word the message differently or choose another model."),
    "stalled": (
        "keeps the connection open without answering for {model!r}",
        "Try again, or check the server at {url}.",
    ),
    "tooLong": (
        "sent a longer answer of {model!r} than may be kept",
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
"""How OpenAI, Anthropic, Google, vLLM, llama.cpp, Ollama, LM Studio and gateways word an overflow."""


def classify_status(status: int, reason: str) -> FailureKind:
    """What an HTTP error status means, given what the provider wrote with it."""
    # A 429 that speaks of size is about tokens per minute, which compacting does not help.
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
    """The sentence in an error body: `{"error": {"message": …}}` in its many spellings."""
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
    """The error to raise: who failed, why, and what to do next; never a secret.

    What a provider says about refused credentials tends to quote them, so that reason is left out.
    """
    what, hint = _SENTENCES_BY_KIND[kind]
    names = {"provider": spec.provider, "model": spec.model, "url": mask_url(spec.base_url)}
    said = "" if kind == "credentials" else _mask_secrets(spec, reason)
    aside = ": ".join(str(part) for part in (status, said) if part)
    what = f"Provider {spec.provider!r} {what.format(**names)}{f' ({aside})' if aside else ''}."
    data: dict[str, object] = {"status": status, "provider": spec.provider, "model": spec.model}
    if retry_after is not None and retry_after >= 0:  # not a number is neither
        retry_after = min(retry_after, MAX_RETRY_AFTER_SECONDS)
        data["retryAfter"] = retry_after
        hint = f"Try again in {math.ceil(retry_after)} seconds, at {_format_clock_time(retry_after)}."
    return _ERROR_CLASSES.get(kind, ProviderError)(
        what, hint.format(**names), retryable=kind in _RETRYABLE_KINDS, **data
    )


def _mask_secrets(spec: ModelSpec, reason: str) -> str:
    said = " ".join(reason.split())
    # Of `Bearer abc` the second word alone is as secret.
    tokens = [
        v.partition(" ")[2] for name, v in spec.headers.items() if name.lower().endswith("authorization")
    ]
    for secret in (spec.api_key, *spec.headers.values(), *tokens):
        if secret:
            said = said.replace(secret, "***")
    return said if len(said) <= 300 else f"{said[:299]}…"


def _format_clock_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() + seconds))
