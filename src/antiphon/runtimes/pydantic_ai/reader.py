"""The `Reader` on pydantic-ai's model layer: transcript in, one streamed request, transcript out.

Only `Model.request_stream` is used, never the agent loop. pydantic-ai's exceptions do not leave this module:
they become `ProviderError`. The provider SDKs' own retries are off, and an SDK is imported when the first
model of its API is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import httpx2
from pydantic_ai import exceptions as pai
from pydantic_ai.messages import (
    InstructionPart,
    ModelResponse,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from antiphon.errors import AntiphonError, ConfigError, InvalidInput, ProviderError, format_install_hint
from antiphon.messages import AssistantMessage, TokenUsage, collect_call_ids
from antiphon.runtimes import Deltas, Prompt, Sampling
from antiphon.runtimes.http_reader import OPENAI_URL, PLACEHOLDER_KEY, AnswerMeter, HttpReader
from antiphon.runtimes.model import (
    Api,
    FailureKind,
    ModelSpec,
    build_provider_error,
    classify_status,
    extract_reason,
    get_max_answer_tokens,
)
from antiphon.runtimes.prices import Prices
from antiphon.runtimes.pydantic_ai.transcript import (
    Dialect,
    build_blocks,
    build_conversation,
    extract_message_native,
)

_THINKING_SETTINGS = {"off": False, "adaptive": True}
"""Levels that pydantic-ai names differently; `adaptive` leaves the amount to the model."""


class PydanticReader(HttpReader):
    """One model object, reused by every step of a spec."""

    def _prepare(self) -> None:
        spec = self._spec
        self._model = _MODEL_BUILDERS[spec.api](spec, self._http)
        self._dialect = Dialect(spec.api, spec.provider, self._model.system)
        self._prices = Prices(spec, self._model.base_url)

    async def _read(self, prompt: Prompt, deltas: Deltas, meter: AnswerMeter) -> AssistantMessage:
        messages = build_conversation(prompt.messages, self._dialect)
        try:
            async with self._model.request_stream(
                messages, self._build_settings(prompt), _build_parameters(prompt)
            ) as stream:
                async for event in stream:
                    _count_event(event, meter)
                    _forward_event(event, deltas)
                response = stream.get()
        except Exception as error:  # noqa: BLE001 - a library may raise anything for an invalid response
            # The cause is left out: it would carry the provider's request and its headers into tracebacks.
            raise _find_own_error(error) or self._translate_error(error) from None
        response = self._check_response(response, deltas)
        model = self._choose_model_name(response.model_name)
        return self._build_assistant(
            build_blocks(response.parts, self._dialect, taken=collect_call_ids(prompt.messages)),
            finish=response.finish_reason,
            model=model,
            usage=self._build_usage(response, model),
            native=extract_message_native(response),
        )

    def _build_settings(self, prompt: Prompt) -> ModelSettings:
        """The settings of a request; its model's profile drops what the model does not support, `thinking` included."""
        settings: dict[str, Any] = {}
        if (most := get_max_answer_tokens(self._spec, prompt)) is not None:
            settings["max_tokens"] = most
        if prompt.sampling is not None:
            settings |= _build_sampling(self._spec, prompt.sampling)
        if prompt.thinking is not None:
            settings["thinking"] = _THINKING_SETTINGS.get(prompt.thinking, prompt.thinking)
        if self._spec.api == "openai-responses":
            # We keep the transcript: nothing is stored at the provider, and reasoning comes back encrypted.
            settings["openai_store"] = False
        return cast(ModelSettings, settings)

    def _check_response(self, response: ModelResponse, deltas: Deltas) -> ModelResponse:
        """Refuses what is not an answer: a stream that ended early, or an empty one caused by a filter."""
        details = response.provider_details or {}
        if response.state == "incomplete" or not (response.finish_reason or details.get("finish_reason")):
            raise build_provider_error(
                self._spec, "brokenOff", reason="the stream ended before the answer did"
            )
        if response.finish_reason == "error":
            raise build_provider_error(self._spec, "busy", reason=str(details.get("finish_reason", "")))
        if response.finish_reason == "content_filter" and not response.text:
            refusal = details.get("refusal")
            if not refusal:
                raise build_provider_error(self._spec, "withheld", reason="content filter")
            deltas.text(str(refusal))
            response.parts = [*response.parts, TextPart(str(refusal))]
        return response

    def _build_usage(self, response: ModelResponse, model: str) -> TokenUsage | None:
        """The usage with its cost, or None if the provider reported none: zero tokens would be a claim."""
        counted = response.usage
        if counted.unmeasured_requests:
            return None
        return self._prices.price_usage(counted, model, response.provider_details)

    def _translate_error(self, error: Exception) -> ProviderError:
        spec = self._spec
        match error:
            case pai.ModelHTTPError():
                reason = extract_reason(error.body)
                kind = _KIND_BY_ERROR.get(_find_category(error)) or classify_status(
                    error.status_code, f"{reason} {_join_codes(error)}"
                )
                return build_provider_error(
                    spec, kind, status=error.status_code, reason=reason, retry_after=error.retry_after
                )
            case pai.ModelTimeoutError() | httpx2.ReadTimeout():
                unopened = isinstance(error, pai.ModelTimeoutError) and error.phase == "connect"
                return build_provider_error(spec, "unreachable" if unopened else "silent", reason="timed out")
            case pai.ModelConnectionError(phase="connect"):
                return build_provider_error(spec, "unreachable")
            case pai.ModelAPIError():
                return build_provider_error(
                    spec, _KIND_BY_ERROR.get(_find_category(error), "brokenOff"), reason=error.message
                )
            case pai.UserError():
                return build_provider_error(spec, "rejected", reason=error.message)
            case _:
                lost = isinstance(error, httpx2.TransportError)
                reason = "the connection failed" if lost else f"it could not be read: {type(error).__name__}"
                return build_provider_error(spec, "brokenOff", reason=reason)


_UNSUPPORTED_SETTINGS: dict[Api, set[str]] = {
    "openai-completions": set(),
    "openai-responses": {"stop", "seed", "presence_penalty", "frequency_penalty"},
    "anthropic-messages": {"seed", "presence_penalty", "frequency_penalty", "response_format"},
    "google-generative-ai": {"response_format", "parallel_tool_calls"},
}
"""Settings that an API has no field for; the library would drop them silently."""


def _build_sampling(spec: ModelSpec, chosen: Sampling) -> dict[str, Any]:
    given: dict[str, Any] = {
        name: value
        for name in chosen.__struct_fields__
        if name not in {"max_tokens", "tool_required", "tool_name"}
        and (value := getattr(chosen, name)) is not None
    }
    if refused := sorted(_UNSUPPORTED_SETTINGS[spec.api] & given.keys()):
        raise InvalidInput(
            f"Model {spec.model!r} does not support {', '.join(map(repr, refused))} ({spec.api} has no such field).",
            "Remove it, or choose a model of another API.",
            field=refused[0],
        )
    if "stop" in given:
        given["stop_sequences"] = given.pop("stop")
    if "response_format" in given:
        given["extra_body"] = _build_response_format(spec, given.pop("response_format"))
    if chosen.tool_required:
        given["tool_choice"] = [chosen.tool_name] if chosen.tool_name else "required"
    return given


def _build_response_format(spec: ModelSpec, response_format: dict[str, Any]) -> dict[str, Any]:
    """The response format field of the API; the Responses API has the schema beside its type, not below it."""
    if spec.api == "openai-completions":
        return {"response_format": response_format}
    schema: dict[str, Any] = response_format.get("json_schema") or {}
    return {"text": {"format": {"type": response_format["type"], **schema}}}


_KIND_BY_ERROR: dict[type[Exception] | None, FailureKind] = {
    pai.ModelContextWindowExceededError: "overflow",
    pai.ModelQuotaExceededError: "quota",
    pai.ModelNotFoundError: "unknownModel",
    pai.ModelAuthenticationError: "credentials",
    pai.ModelRateLimitError: "rateLimit",
}


def _find_category(error: pai.ModelAPIError) -> type[Exception] | None:
    return next((category for category in _KIND_BY_ERROR if category and isinstance(error, category)), None)


def _join_codes(error: pai.ModelAPIError) -> str:
    return f"{error.provider_error_code or ''} {error.provider_error_type or ''}"


def _find_own_error(error: BaseException | None) -> AntiphonError | None:
    """Our own error that stopped the reading, unwrapped from the libraries' exceptions."""
    while error is not None and not isinstance(error, AntiphonError):
        error = error.__cause__ or error.__context__
    return error


def _count_event(event: ModelResponseStreamEvent, meter: AnswerMeter) -> None:
    if isinstance(event, PartStartEvent):
        if isinstance(event.part, ToolCallPart):
            meter.begin_call()
        else:
            meter.begin_block()
        match event.part:
            case TextPart():
                meter.add(event.part.content)
            case ThinkingPart():
                meter.add(event.part.content)
                meter.add(event.part.signature or "")
            case ToolCallPart():
                meter.add(event.part.tool_name)
                meter.add(event.part.tool_call_id)
                meter.add_arguments(str(event.part.args or ""))
            case _:
                pass
    elif isinstance(event, PartDeltaEvent):
        match event.delta:
            case TextPartDelta():
                meter.add(event.delta.content_delta)
            case ThinkingPartDelta():
                meter.add(event.delta.content_delta or "")
                meter.add(event.delta.signature_delta or "")
            case ToolCallPartDelta():
                meter.add(event.delta.tool_name_delta or "")
                meter.add_arguments(event.delta.args_delta if isinstance(event.delta.args_delta, str) else "")
            case _:
                pass


def _forward_event(event: ModelResponseStreamEvent, deltas: Deltas) -> None:
    if isinstance(event, PartDeltaEvent):
        piece = event.delta
        if isinstance(piece, TextPartDelta):
            deltas.text(piece.content_delta)
        elif isinstance(piece, ThinkingPartDelta) and piece.content_delta:
            deltas.thinking(piece.content_delta)
    elif isinstance(event, PartStartEvent):
        part = event.part
        if isinstance(part, TextPart) and part.content:
            deltas.text(part.content)
        elif isinstance(part, ThinkingPart) and part.content:
            deltas.thinking(part.content)


def _build_parameters(prompt: Prompt) -> ModelRequestParameters:
    return ModelRequestParameters(
        function_tools=[
            # Our schemas are sent unchanged; strict mode would have the provider rewrite them.
            ToolDefinition(
                name=tool.name,
                parameters_json_schema=dict(tool.parameters),
                description=tool.description,
                strict=tool.strict,
            )
            for tool in prompt.tools
        ],
        instruction_parts=[InstructionPart(content=prompt.instructions)] if prompt.instructions else [],
    )


_UNCHANGED_SCHEMA_PROFILE = ModelProfile(json_schema_transformer=None)


def _build_openai_completions(spec: ModelSpec, http: httpx2.AsyncClient) -> Model[Any]:
    from pydantic_ai.models.openai import OpenAIChatModel  # noqa: PLC0415

    # Without a finish reason, an answer looks the same as the first half of one.
    profile = OpenAIModelProfile(
        json_schema_transformer=None, openai_chat_streaming_requires_finish_reason=True
    )
    if spec.provider != "openai":
        # Every compatible server reads the older name.
        profile["openai_chat_supports_max_completion_tokens"] = False
    return OpenAIChatModel(spec.model, provider=_build_openai_provider(spec, http), profile=profile)


def _build_openai_responses(spec: ModelSpec, http: httpx2.AsyncClient) -> Model[Any]:
    from pydantic_ai.models.openai import OpenAIResponsesModel  # noqa: PLC0415

    return OpenAIResponsesModel(
        spec.model, provider=_build_openai_provider(spec, http), profile=_UNCHANGED_SCHEMA_PROFILE
    )


def _build_openai_provider(spec: ModelSpec, http: httpx2.AsyncClient) -> Any:
    from openai import AsyncOpenAI  # noqa: PLC0415
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider  # noqa: PLC0415

    client = AsyncOpenAI(
        # Set even if it is the default, so that no environment variable redirects it.
        base_url=spec.base_url or OPENAI_URL,
        api_key=spec.api_key or PLACEHOLDER_KEY,
        default_headers=dict(spec.headers),
        http_client=http,
        timeout=http.timeout,
        max_retries=0,
    )
    if spec.provider == "openai":
        return OpenAIProvider(openai_client=client)
    return OpenAICompatibleProvider(spec.provider, openai_client=client)


def _build_anthropic_messages(spec: ModelSpec, http: httpx2.AsyncClient) -> Model[Any]:
    from anthropic import AsyncAnthropic  # noqa: PLC0415
    from pydantic_ai.models.anthropic import AnthropicModel  # noqa: PLC0415
    from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: PLC0415

    client = AsyncAnthropic(
        base_url=spec.base_url or "https://api.anthropic.com",
        api_key=spec.api_key or PLACEHOLDER_KEY,
        default_headers=dict(spec.headers),
        http_client=http,
        timeout=http.timeout,
        max_retries=0,
    )
    return AnthropicModel(
        spec.model, provider=AnthropicProvider(anthropic_client=client), profile=_UNCHANGED_SCHEMA_PROFILE
    )


def _build_google_generative_ai(spec: ModelSpec, http: httpx2.AsyncClient) -> Model[Any]:
    try:
        # Imported by name, because the SDK is an extra and its types may be missing.
        models = importlib.import_module("pydantic_ai.models.google")
        providers = importlib.import_module("pydantic_ai.providers.google")
    except ImportError:
        raise ConfigError(
            f"Provider {spec.provider!r} needs the Google SDK, which is not installed.",
            format_install_hint("google"),
            path=f"models.providers.{spec.provider}.api",
        ) from None
    provider = providers.GoogleProvider(
        api_key=spec.api_key or PLACEHOLDER_KEY, base_url=spec.base_url, http_client=http
    )
    return models.GoogleModel(spec.model, provider=provider)


_MODEL_BUILDERS: dict[Api, Callable[[ModelSpec, httpx2.AsyncClient], Model[Any]]] = {
    "openai-completions": _build_openai_completions,
    "openai-responses": _build_openai_responses,
    "anthropic-messages": _build_anthropic_messages,
    "google-generative-ai": _build_google_generative_ai,
}
