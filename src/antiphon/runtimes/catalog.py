"""Which runtime answers for an agent and a model: built once from the configuration, then reused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from antiphon.clock import Clock
from antiphon.config import OWN_APIS, REHEARSAL, Config, FoundModel
from antiphon.runtimes import Runtime
from antiphon.runtimes.function import Agent, FunctionRuntime, load
from antiphon.runtimes.model import ModelRuntime, ModelSpec, Price
from antiphon.runtimes.rehearsal import RehearsalRuntime


class Catalog:
    """`functions` are agents given as code; they answer for their agent id whatever the configuration says.

    `clock` is the one that answers are dated by: that of the store, which all who share it agree on.
    """

    def __init__(
        self, config: Config, functions: Mapping[str, Runtime] | None = None, clock: Clock | None = None
    ) -> None:
        self._config = config
        self._clock = clock
        self._by_agent: dict[str, Runtime] = dict(functions or {})
        self._by_model: dict[str, Runtime] = {}
        self._slots = asyncio.Semaphore(config.agents.defaults.max_concurrent)

    async def runtime(self, agent_id: str, model: str | None) -> Runtime:
        """The runtime for a run of this agent; `model` is the session's or the run's own choice."""
        if agent_id in self._by_agent:
            return self._by_agent[agent_id]
        settings = self._config.agent(agent_id).runtime
        if settings.type == "function" and settings.target:
            function: Agent = await asyncio.to_thread(load, settings.target)
            self._by_agent[agent_id] = FunctionRuntime(function, history=settings.history, clock=self._clock)
            return self._by_agent[agent_id]
        ref = model or self._config.model_ref(agent_id)
        if ref not in self._by_model:
            built = await self._build(self._config.find_model(ref))
            self._by_model.setdefault(ref, built)
        return self._by_model[ref]

    async def aclose(self) -> None:
        for runtime in [*self._by_agent.values(), *self._by_model.values()]:
            await runtime.close()

    async def _build(self, found: FoundModel) -> Runtime:
        if found.provider_name == REHEARSAL:
            return RehearsalRuntime(clock=self._clock)
        return ModelRuntime(await asyncio.to_thread(_spec, found), slots=self._slots, clock=self._clock)


def _spec(found: FoundModel) -> ModelSpec:
    """Reveals secrets, which may read a file or start a program: not for the event loop."""
    name, provider, model = found
    cost = model.cost
    priced = cost is not None and cost.input is not None and cost.output is not None
    return ModelSpec(
        provider=name,
        model=model.id,
        api=model.api or provider.api or OWN_APIS.get(name, "openai-completions"),
        base_url=provider.base_url,
        api_key=provider.api_key.reveal() if provider.api_key else None,
        headers={header: secret.reveal() for header, secret in provider.headers.items()},
        context_window=model.context_window,
        max_tokens=model.max_tokens,
        price=Price(
            input=cost.input or 0.0,
            output=cost.output or 0.0,
            cache_read=cost.cache_read,
            cache_write=cost.cache_write,
        )
        if cost is not None and priced
        else None,
    )
