"""The config as one object, with its derived values. Nothing is read or resolved here."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import (
    Field,
    FieldSerializationInfo,
    Strict,
    ValidationInfo,
    field_serializer,
    field_validator,
)

from antiphon.channel_manifest import list_channel_names
from antiphon.config.acp import AcpConfig
from antiphon.config.agents import (
    IMPLICIT_AGENT_ID,
    AgentConfig,
    AgentEntry,
    AgentsConfig,
    ModelChoice,
    merge_agent,
)
from antiphon.config.base import Section
from antiphon.config.channels import (
    BindingConfig,
    ChannelConfig,
    MessagesConfig,
    load_channel_model,
    validate_blocks,
)
from antiphon.config.mcp import McpConfig, McpServerConfig, McpServers
from antiphon.config.secrets import Secret
from antiphon.config.sections import (
    PUBLIC_PROVIDER_KEY_VARIABLES,
    BusConfig,
    CronConfig,
    GatewayConfig,
    HooksConfig,
    ImpliedProvider,
    ModelConfig,
    ModelsConfig,
    ProviderConfig,
    SessionConfig,
    SessionScope,
    StoreConfig,
    StoreSynchronous,
    mask_values,
)
from antiphon.config.tools import ToolsConfig
from antiphon.errors import NotFound, UnknownModel
from antiphon.keys import REHEARSAL_MODEL_REF, REHEARSAL_PROVIDER
from antiphon.validation_errors import suggest_options

MAX_SHOWN_NAME_CHARACTERS = 100  # characters of an unknown name that an error shows


class FoundModel(NamedTuple):
    """A model reference, resolved. For the rehearsal model the provider has no address and no key."""

    provider_name: str
    provider: ProviderConfig
    model: ModelConfig


class Config(Section):
    """Configuration of an Antiphon gateway. Every key is optional."""

    schema_url: str | None = Field(default=None, alias="$schema", description="For editors; not read.")
    session: SessionConfig = Field(default_factory=SessionConfig.model_construct)
    agents: AgentsConfig = Field(default_factory=AgentsConfig.model_construct)
    tools: ToolsConfig = Field(default_factory=ToolsConfig.model_construct)
    models: ModelsConfig = Field(default_factory=ModelsConfig.model_construct)
    mcp: McpConfig = Field(default_factory=McpConfig.model_construct)
    mcp_servers: McpServers = Field(
        default_factory=dict[str, McpServerConfig],
        description="Same as `mcp.servers`, under the name that other programs use.",
    )
    acp: AcpConfig = Field(default_factory=AcpConfig.model_construct)
    channels: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        repr=False,
        description="Settings of each channel, by its name.",
    )
    bindings: Annotated[tuple[BindingConfig, ...], Strict(False)] = Field(
        default=(), description="Which agent answers in which chats; the most specific one, then the first."
    )
    messages: MessagesConfig = Field(default_factory=MessagesConfig.model_construct)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig.model_construct)
    hooks: HooksConfig = Field(default_factory=HooksConfig.model_construct)
    cron: CronConfig = Field(default_factory=CronConfig.model_construct)
    store: StoreConfig = Field(default_factory=StoreConfig.model_construct)
    bus: BusConfig = Field(default_factory=BusConfig.model_construct)

    @field_validator("channels", mode="before")
    @classmethod
    def _validate_channels(cls, blocks: object, info: ValidationInfo) -> object:
        return validate_blocks(blocks, info)

    @field_serializer("channels")
    def _mask_channels(self, channels: dict[str, Any], info: FieldSerializationInfo) -> object:
        return {
            name: block.model_dump(by_alias=True, exclude_unset=info.exclude_unset, mode="json")
            if isinstance(block, ChannelConfig)
            else mask_values(block)
            for name, block in channels.items()
        }

    @property
    def channel_sections(self) -> dict[str, ChannelConfig]:
        """The channels that are configured and that this release has, by their names."""
        return {name: block for name, block in self.channels.items() if isinstance(block, ChannelConfig)}

    @property
    def enabled_channels(self) -> dict[str, ChannelConfig]:
        """The channels that have at least one enabled account."""
        return {name: it for name, it in self.channel_sections.items() if it.list_enabled_accounts()}

    @property
    def agent_ids(self) -> tuple[str, ...]:
        """Ids of all agents, in the order of the file."""
        return tuple(self._entries)

    # A config of which only the document has been read has the next five as well: see `cli/_deferred_config.py`.

    @property
    def store_url(self) -> Secret | None:
        return self.store.url

    @property
    def store_synchronous(self) -> StoreSynchronous:
        return self.store.synchronous

    @property
    def main_key(self) -> str:
        return self.session.main_key

    @property
    def session_scope(self) -> SessionScope:
        return self.session.scope

    @property
    def mirrors_transcripts(self) -> bool:
        """Whether sessions have transcript files; by default only if the store belongs to a single process."""
        mirror = self.session.transcripts.mirror
        return (self.store.url is None and self.bus.url is None) if mirror is None else mirror

    @property
    def default_agent_id(self) -> str:
        """The agent marked as default, else the first."""
        marked = (entry.id for entry in self.agents.list if entry.default)
        return next(marked, self.agent_ids[0])

    def get_agent(self, agent_id: str) -> AgentConfig:
        """The agent with its defaults filled in.

        Raises:
            NotFound: no agent has this id.
        """
        if found := self._merged.get(agent_id):
            return found
        entry = self._entries.get(agent_id)
        if entry is None:
            hint = suggest_options(agent_id, self.agent_ids, noun="agent ids")
            raise NotFound(
                f"There is no agent {agent_id[:MAX_SHOWN_NAME_CHARACTERS]!r}.",
                hint,
                agent_id=agent_id[:MAX_SHOWN_NAME_CHARACTERS],
            )
        path = f"agents.list[{self.agent_ids.index(agent_id)}]"
        self._merged[agent_id] = merge_agent(entry, path, self.agents.defaults, self.tools)
        return self._merged[agent_id]

    def uses_model(self, agent_id: str) -> bool:
        """Whether a configured model answers for the agent, and not a Python callable or an ACP program."""
        return self.get_agent(agent_id).runtime.type == "model"

    @property
    def acp_agent_ids(self) -> tuple[str, ...]:
        """The agents that are ACP programs."""
        return tuple(entry.id for entry in self._entries.values() if entry.runtime.type == "acp")

    def get_model_ref(self, agent_id: str) -> str:
        """The agent's model as `provider/model`: its own, the default, or the first configured one."""
        choice = self.get_agent(agent_id).model
        return choice.primary if choice else self.model_refs[0]

    def find_image_model_ref(self, agent_id: str) -> str | None:
        """The model that looks at images for an agent: `imageModel`, else its own model if that accepts images."""
        if choice := self.get_agent(agent_id).image_model:
            return choice.primary
        own = self.get_model_ref(agent_id) if self.uses_model(agent_id) else None
        return own if own is not None and "image" in self.find_model(own).model.input else None

    @property
    def model_refs(self) -> tuple[str, ...]:
        """Every configured model in the order of the file, then the built-in one, then the implied ones.

        Implied ones come last, so that a provider chosen for one agent never answers, or charges, for another.
        """
        refs: dict[bool, list[str]] = {False: [], True: []}
        for name, provider in self.models.providers.items():
            refs[isinstance(provider, ImpliedProvider)] += (f"{name}/{model.id}" for model in provider.models)
        return (*refs[False], REHEARSAL_MODEL_REF, *refs[True])

    def get_context_window(self, ref: str) -> int | None:
        """The context window of a model in tokens, if it is configured.

        Raises:
            UnknownModel: as for `find_model`.
        """
        return self.find_model(ref).model.context_window

    def find_model(self, ref: str) -> FoundModel:
        """Resolves `provider/model` to its provider and model.

        Raises:
            UnknownModel: no configured provider has such a model.
        """
        name, _, model_id = ref.partition("/")
        provider = (
            _build_rehearsal_provider() if name == REHEARSAL_PROVIDER else self.models.providers.get(name)
        )
        model = next((model for model in provider.models if model.id == model_id), None) if provider else None
        if provider and model:
            return FoundModel(name, provider, model)
        hint = suggest_options(ref, self.model_refs, noun="models")
        raise UnknownModel(
            f"Model {ref[:MAX_SHOWN_NAME_CHARACTERS]!r} is not configured.",
            hint,
            model=ref[:MAX_SHOWN_NAME_CHARACTERS],
        )

    def list_mcp_servers(self) -> list[tuple[str, str, McpServerConfig]]:
        """Every MCP server with its path and its name, wherever it is written."""
        places = {
            "mcp.servers": self.mcp.servers,
            "mcpServers": self.mcp_servers,
            "tools.mcpServers": self.tools.mcp_servers,
        }
        return [
            (f"{place}.{name}", name, server)
            for place, servers in places.items()
            for name, server in servers.items()
        ]

    @cached_property
    def enabled_mcp_servers(self) -> McpServers:
        """The MCP servers to use, by their names."""
        return {name: server for _, name, server in self.list_mcp_servers() if server.is_enabled}

    def list_model_choices(self) -> Iterator[tuple[str, ModelChoice]]:
        """Yields every model choice in the config with its path."""
        entries = [(f"agents.list[{index}]", entry) for index, entry in enumerate(self.agents.list)]
        for path, section in (("agents.defaults", self.agents.defaults), *entries):
            if section.model:
                yield f"{path}.model", section.model
            if section.image_model:
                yield f"{path}.imageModel", section.image_model
            if section.subagents.model:
                yield f"{path}.subagents.model", section.subagents.model

    def add_implied_providers(self) -> "Config":
        """The config with the well-known providers that it uses without configuring them.

        Choosing one of their models is enough; each gets the models chosen from it.
        """
        configured = self.models.providers
        chosen: dict[str, list[str]] = {}
        for _, choice in self.list_model_choices():
            name, _, model_id = choice.primary.partition("/")
            if (
                name in PUBLIC_PROVIDER_KEY_VARIABLES
                and name not in configured
                and model_id not in ("", *chosen.get(name, ()))
            ):
                chosen.setdefault(name, []).append(model_id)
        if not chosen:
            return self
        implied = {name: _build_implied_provider(name, model_ids) for name, model_ids in chosen.items()}
        models = self.models.model_copy(update={"providers": {**configured, **implied}})
        return self.model_copy(update={"models": models})

    @cached_property
    def _entries(self) -> dict[str, AgentEntry]:
        return {entry.id: entry for entry in self.agents.list} or {
            IMPLICIT_AGENT_ID: AgentEntry(id=IMPLICIT_AGENT_ID)
        }

    @cached_property
    def _merged(self) -> dict[str, AgentConfig]:
        """Cache of merged agents, filled on demand, since every run needs one."""
        return {}


def _build_rehearsal_provider() -> ProviderConfig:
    return ProviderConfig(models=(ModelConfig(id=REHEARSAL_PROVIDER),))


def _build_implied_provider(name: str, model_ids: list[str]) -> ImpliedProvider:
    return ImpliedProvider.model_validate(
        {
            "apiKey": {"env": PUBLIC_PROVIDER_KEY_VARIABLES[name]},
            "models": [{"id": model_id} for model_id in model_ids],
        }
    )


def build_json_schema() -> dict[str, Any]:
    """The published JSON Schema of the config file."""
    schema = Config.model_json_schema(by_alias=True)
    for name in list_channel_names():
        section = load_channel_model(name)
        own = section.model_json_schema(by_alias=True) if section else {}
        schema["$defs"] |= own.pop("$defs", {})
        schema["properties"]["channels"].setdefault("properties", {})[name] = own
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Antiphon config"}
