"""The runtime for each agent and model, built once from the configuration and then reused.

Secrets are read when a runtime is built, because that may take seconds. If the provider refuses them they may have
been rotated: the next run gets a new runtime that reads them again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from antiphon.clock import Clock
from antiphon.config import NATIVE_PROVIDER_APIS, REHEARSAL_PROVIDER, Config, FoundModel
from antiphon.errors import CredentialsRefused
from antiphon.messages import AssistantMessage
from antiphon.runtimes import Deltas, Prompt, Runtime
from antiphon.runtimes.function import AgentFunction, FunctionRuntime, load_function
from antiphon.runtimes.model import (
    ModelPrice,
    ModelRuntime,
    ModelSpec,
    Reader,
    is_plain_chat_completions,
    open_reader,
)
from antiphon.runtimes.rehearsal import RehearsalRuntime
from antiphon.runtimes.retry import RetryPolicy

log = logging.getLogger(__name__)

PRELOAD_THREAD_NAME = "preload-libraries"


class RuntimeRegistry:
    """Builds and caches runtimes. `functions` are agents given as code, which override the configuration.

    `clock` dates the answers; it is the store's clock, which all of its processes share.
    """

    def __init__(
        self, config: Config, functions: Mapping[str, Runtime] | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._by_agent: dict[str, Runtime] = dict(functions or {})
        self._by_model: dict[str, Runtime] = {}
        self._building: dict[str, asyncio.Lock] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        """By provider, so that a slow one takes no slots from the others."""

    async def get_runtime(self, agent_id: str, model: str | None) -> Runtime:
        """The runtime for a run of this agent; `model` is the session's or the run's own choice."""
        if agent_id in self._by_agent:
            return self._by_agent[agent_id]
        settings = self._config.get_agent(agent_id).runtime
        if settings.type == "function" and settings.target:
            function: AgentFunction = await asyncio.to_thread(load_function, settings.target)
            self._by_agent[agent_id] = FunctionRuntime(function, history=settings.history, clock=self._clock)
            return self._by_agent[agent_id]
        return await self.get_model_runtime(model or self._config.get_model_ref(agent_id))

    async def get_model_runtime(self, ref: str) -> Runtime:
        """The runtime for a model given as `provider/model`."""
        if ref in self._by_model:
            return self._by_model[ref]
        found = self._config.find_model(ref)
        async with self._building.setdefault(ref, asyncio.Lock()):  # many runs may start at once
            if ref not in self._by_model:
                self._by_model[ref] = await self._build_model_runtime(ref, found)
            return self._by_model[ref]

    def preload_libraries(self) -> None:
        """Import the provider libraries of the configured models in a separate thread.

        Their first import takes seconds, which would count against the time of the first run. Plain chat completions
        need none of them. No secret is read and no connection opened.
        """
        specs: dict[str, ModelSpec] = {}
        for found in map(self._config.find_model, self._config.model_refs):
            spec = _build_keyless_spec(found)
            if found.provider_name != REHEARSAL_PROVIDER and not is_plain_chat_completions(spec):
                specs.setdefault(spec.api, spec)
        if specs:
            # A daemon, so that a process that stops meanwhile does not wait for it.
            threading.Thread(
                target=_import_libraries, args=(list(specs.values()),), name=PRELOAD_THREAD_NAME, daemon=True
            ).start()

    async def aclose(self) -> None:
        for runtime in [*self._by_agent.values(), *self._by_model.values()]:
            await runtime.close()

    async def _build_model_runtime(self, ref: str, found: FoundModel) -> Runtime:
        if found.provider_name == REHEARSAL_PROVIDER:
            return RehearsalRuntime(clock=self._clock)

        def discard(runtime: Runtime) -> None:
            if self._by_model.get(ref) is runtime:
                del self._by_model[ref]

        spec = await asyncio.to_thread(build_model_spec, found, self._config)
        slots = self._slots.setdefault(
            found.provider_name, asyncio.Semaphore(self._config.agents.defaults.max_concurrent)
        )
        return _CredentialedRuntime(spec, discard, slots=slots, clock=self._clock)


class _CredentialedRuntime(ModelRuntime):
    """A `ModelRuntime` that is discarded when its provider refuses its credentials.

    Runs that already use it keep it, and it stays open only while one of them executes a step.
    """

    _reader: Reader | None

    def __init__(
        self,
        spec: ModelSpec,
        discard: Callable[[Runtime], None],
        *,
        slots: asyncio.Semaphore,
        clock: Clock | None,
    ) -> None:
        super().__init__(spec, slots=slots, clock=clock)
        self._discard = discard
        self._discarded = False
        self._steps = 0

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        self._steps += 1
        try:
            return await super().step(prompt, deltas)
        except CredentialsRefused:
            self._discarded = True
            self._discard(self)
            raise
        finally:
            self._steps -= 1
            if self._discarded and not self._steps:
                await self._close_reader()

    async def _close_reader(self) -> None:
        # Cleared first, so that a concurrent step opens a new reader instead of using this one while it closes.
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()


class ConcurrencyLimitedRuntime:
    """Wraps `runtime` and runs a step only while holding one of `slots`, which other runtimes may share.

    A run that waits for something else holds no slot.
    """

    def __init__(self, runtime: Runtime, slots: asyncio.Semaphore) -> None:
        self._runtime = runtime
        self._slots = slots

    @property
    def context_window(self) -> int | None:
        return self._runtime.context_window

    @property
    def reads_history(self) -> bool:
        return self._runtime.reads_history

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        async with self._slots:
            return await self._runtime.step(prompt, deltas)

    async def close(self) -> None:
        """Does nothing: the wrapped runtime is closed by its owner."""


ENCODED_CHARACTERS_PER_BYTE = 2
"""Characters of a tool call per byte of a file: base64 takes four for three, and escapes as many again.

Slightly oversized files fit as well, so that the tool can refuse them and the model learns why.
"""


def _import_libraries(specs: Sequence[ModelSpec]) -> None:
    for spec in specs:
        try:
            asyncio.run(open_reader(spec, RetryPolicy()).close())
        except Exception:  # such as a package that is not installed; the run that needs it reports it
            log.debug("The library for %r could not be imported", spec.api, exc_info=True)


def _build_keyless_spec(found: FoundModel) -> ModelSpec:
    name, provider, model = found
    api = model.api or provider.api or NATIVE_PROVIDER_APIS.get(name, "openai-completions")
    return ModelSpec(provider=name, model=model.id, api=api, base_url=provider.base_url)


def build_model_spec(found: FoundModel, config: Config) -> ModelSpec:
    """Builds the spec. It reveals secrets, which may read a file or start a program: call it off the event loop."""
    _, provider, model = found
    cost = model.cost
    attachments = config.tools.sessions_spawn.attachments
    return replace(
        _build_keyless_spec(found),
        api_key=provider.api_key.reveal() if provider.api_key else None,
        headers={header: secret.reveal() for header, secret in provider.headers.items()},
        context_window=model.context_window,
        max_tokens=model.max_tokens,
        max_answer_bytes=config.store.message_max_bytes,
        max_attachment_bytes=ENCODED_CHARACTERS_PER_BYTE * attachments.max_total_bytes
        if attachments.enabled
        else 0,
        price=ModelPrice(**cost.model_dump(by_alias=False)) if cost else None,
    )
