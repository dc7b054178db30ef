"""The config as one object, and the questions the rest of the system asks it. Nothing is read or resolved."""

from functools import cached_property
from typing import Any, NamedTuple

from pydantic import Field, field_serializer

from antiphon.config.agents import MAIN, AgentConfig, AgentEntry, Agents, merge
from antiphon.config.base import Section, suggestion
from antiphon.config.sections import (
    Bus,
    Cron,
    Gateway,
    Hooks,
    ImpliedProvider,
    ModelConfig,
    Models,
    ProviderConfig,
    Session,
    Store,
    Tools,
    masked,
)
from antiphon.errors import NotFound, UnknownModel

REHEARSAL = "rehearsal"
"""Name of the built-in offline provider and of its one model; no configured provider may take it."""

REHEARSAL_REF = f"{REHEARSAL}/{REHEARSAL}"

SHOWN = 100  # characters of a name that nothing has


class FoundModel(NamedTuple):
    """A model reference, resolved. For the rehearsal model the provider has no address and no key."""

    provider_name: str
    provider: ProviderConfig
    model: ModelConfig


class Config(Section):
    """Configuration of an Antiphon gateway. Every key is optional."""

    schema_url: str | None = Field(default=None, alias="$schema", description="For editors; not read.")
    session: Session = Field(default_factory=Session.model_construct)
    agents: Agents = Field(default_factory=Agents.model_construct)
    tools: Tools = Field(default_factory=Tools.model_construct)
    models: Models = Field(default_factory=Models.model_construct)
    channels: dict[str, dict[str, Any]] = Field(
        default_factory=dict[str, dict[str, Any]],
        repr=False,
        description="Settings of each channel, by its name.",
    )
    gateway: Gateway = Field(default_factory=Gateway.model_construct)
    hooks: Hooks = Field(default_factory=Hooks.model_construct)
    cron: Cron = Field(default_factory=Cron.model_construct)
    store: Store = Field(default_factory=Store.model_construct)
    bus: Bus = Field(default_factory=Bus.model_construct)

    @field_serializer("channels")
    def _mask_channels(self, channels: dict[str, dict[str, Any]]) -> object:
        return masked(channels)

    @property
    def agent_ids(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(self._entries)

    @property
    def mirrors_transcripts(self) -> bool:
        """Whether sessions have transcript files: by default those of a store that one process has to itself."""
        wanted = self.session.transcripts.mirror
        return (self.store.url is None and self.bus.url is None) if wanted is None else wanted

    @property
    def default_agent_id(self) -> str:
        """The agent marked as default, else the first."""
        marked = (entry.id for entry in self.agents.list if entry.default)
        return next(marked, self.agent_ids[0])

    def agent(self, agent_id: str) -> AgentConfig:
        """The agent with its defaults filled in.

        Raises:
            NotFound: no agent has this id.
        """
        if found := self._merged.get(agent_id):
            return found
        entry = self._entries.get(agent_id)
        if entry is None:
            hint = suggestion(agent_id, self.agent_ids, noun="agent ids")
            raise NotFound(f"There is no agent {agent_id[:SHOWN]!r}.", hint, agent_id=agent_id[:SHOWN])
        self._merged[agent_id] = merge(entry, self.agents.defaults, self.tools)
        return self._merged[agent_id]

    def model_ref(self, agent_id: str) -> str:
        """The agent's model as `provider/model`: its own, the default one, or the first there is."""
        choice = self.agent(agent_id).model
        return choice.primary if choice else self.model_refs[0]

    @property
    def model_refs(self) -> tuple[str, ...]:
        """Every configured model in the order of the file, the built-in one, then what is only implied.

        A provider that was meant for one agent answers, and charges, for no other.
        """
        refs: dict[bool, list[str]] = {False: [], True: []}
        for name, provider in self.models.providers.items():
            refs[isinstance(provider, ImpliedProvider)] += (f"{name}/{model.id}" for model in provider.models)
        return (*refs[False], REHEARSAL_REF, *refs[True])

    def find_model(self, ref: str) -> FoundModel:
        """The provider and model that `provider/model` names.

        Raises:
            UnknownModel: no configured provider has such a model.
        """
        name, _, model_id = ref.partition("/")
        provider = _rehearsal() if name == REHEARSAL else self.models.providers.get(name)
        model = next((model for model in provider.models if model.id == model_id), None) if provider else None
        if provider and model:
            return FoundModel(name, provider, model)
        hint = suggestion(ref, self.model_refs, noun="models")
        raise UnknownModel(f"Model {ref[:SHOWN]!r} is not configured.", hint, model=ref[:SHOWN])

    @cached_property
    def _entries(self) -> dict[str, AgentEntry]:
        return {entry.id: entry for entry in self.agents.list} or {MAIN: AgentEntry(id=MAIN)}

    @cached_property
    def _merged(self) -> dict[str, AgentConfig]:
        """Those that were asked for: every run does."""
        return {}


def _rehearsal() -> ProviderConfig:
    return ProviderConfig(models=(ModelConfig(id=REHEARSAL),))


def json_schema() -> dict[str, Any]:
    """The published JSON Schema of the config file."""
    schema = Config.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Antiphon config"}
