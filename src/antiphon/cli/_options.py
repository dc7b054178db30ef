"""Options common to all commands: where the configuration and the state are, and how to print.

They may stand before or after the command's name; otherwise environment variables are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

from antiphon.paths import Paths, locate_paths

if TYPE_CHECKING:
    from antiphon.config import Config, LoadedConfig

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Settings:
    config: str | None = None
    state_dir: str | None = None
    json: bool = False
    debug: bool = False
    url: str | None = None
    token_file: str | None = None

    @property
    def paths(self) -> Paths:
        return locate_paths(self.config, self.state_dir, os.environ)

    @property
    def named_gateway(self) -> str | None:
        """The gateway address that the user named; None selects the gateway of the state directory."""
        return next(iter(self.named_gateways), None)

    @property
    def named_gateways(self) -> list[str]:
        """The gateway addresses that the user named; several replicas are separated by commas."""
        given = self.url or os.environ.get("ANTIPHON_URL") or ""
        return [url.strip() for url in given.split(",") if url.strip()]

    def load_config_lazily(self) -> Config:
        """Return the configuration, read only when an attribute is needed that is not known without it.

        Reading it takes longer than most commands do, and a file that does not contain a section's name does not set
        it.
        """
        from antiphon.keys import DEFAULT_AGENT_ID

        known: dict[str, object] = {}
        if (said := self._read_config_bytes()) is None:
            return self.load().config  # raises an error that explains what is wrong
        if b"store" not in said:
            known["store"] = _DefaultStoreSettings()
        if b"session" not in said and b"agents" not in said:
            known["default_agent_id"] = DEFAULT_AGENT_ID
            known["session"] = _LazyObject(lambda: self.load().config.session, DEFAULT_SESSION_SETTINGS)
        if b"agents" not in said and b"models" not in said:
            known["agent_ids"] = (DEFAULT_AGENT_ID,)
            known["get_model_ref"] = lambda agent_id: REHEARSAL_MODEL  # pyright: ignore[reportUnknownLambdaType]
            known["find_model"] = self._find_model
        if not any(name in said for name in (b"mirror", b"store", b"bus")):
            known["mirrors_transcripts"] = True
        return cast("Config", _LazyObject(lambda: self.load().config, known))

    def _find_model(self, ref: str) -> object:
        """Return a model as the configuration would; the built-in model is known without reading it."""
        return _FoundModel() if ref == REHEARSAL_MODEL else self.load().config.find_model(ref)

    def _read_config_bytes(self) -> bytes | None:
        """Return the content of the file: empty if an optional file is missing, None if it could not be read."""
        paths = self.paths
        try:
            return paths.config.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None if paths.config_explicit else b""
        except OSError:
            return None

    def load(self) -> LoadedConfig:
        """Load the configuration. The default file need not exist; a file named by the user must."""
        from antiphon.config import load

        paths = self.paths
        return load(paths.config, required=paths.config_explicit)


DEFAULT_SESSION_SETTINGS = {"main_key": "main", "scope": "per-sender"}
"""Settings that decide which session a name refers to, if the section `session` does not set them."""


REHEARSAL_MODEL = "rehearsal/rehearsal"
"""The model that answers if none is configured."""


class _RehearsalModel(NamedTuple):
    """The attributes of the built-in model that session rows show."""

    context_window: None = None


class _FoundModel(NamedTuple):
    """The built-in model, in the form in which the configuration returns models."""

    model: _RehearsalModel = _RehearsalModel()


class _DefaultStoreSettings(NamedTuple):
    """The values of the section `store` if it is not configured."""

    url: None = None
    synchronous: str = "full"


class _LazyObject:
    """Stands in for an object until an attribute is needed that is not known without it."""

    def __init__(self, make: Callable[[], object], known: Mapping[str, object]) -> None:
        self._make = make
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        self.__dict__["_made"] = made = self.__dict__.get("_made") or self._make()
        return getattr(made, name)


def _store_option(ctx: click.Context, param: click.Parameter, value: object) -> None:
    settings = ctx.ensure_object(Settings)
    if value == "":  # an unset shell variable must not silently select the default
        raise click.UsageError(f"{param.opts[0]} is empty; say what it is, or leave it out.")
    if value and param.name:
        setattr(settings, param.name, value)


def get_session_reference(agent: str | None, key: str | None) -> str:
    """Return the session that `--agent` and `--session` name; empty values are refused later, on opening."""
    if agent is not None and key is not None:
        raise click.UsageError("--agent and --session both say where; keep one of them.")
    if key is not None:
        return key
    return "main" if agent is None else f"agent:{agent}:main"


def common_options(function: F) -> F:
    """Add the options of every command; commands access them with `click.pass_obj`."""
    for option in (
        click.option(
            "--debug", is_flag=True, help="Show tracebacks.", expose_value=False, callback=_store_option
        ),
        click.option(
            "--json",
            is_flag=True,
            help="Print data and errors as JSON.",
            expose_value=False,
            callback=_store_option,
        ),
        click.option(
            "--state-dir",
            metavar="DIR",
            help="Where everything is kept (ANTIPHON_STATE_DIR, else ~/.antiphon).",
            expose_value=False,
            callback=_store_option,
        ),
        click.option(
            "--config",
            metavar="FILE",
            help="The configuration (ANTIPHON_CONFIG, else config.json5 there).",
            expose_value=False,
            callback=_store_option,
        ),
    ):
        function = option(function)
    return function


def gateway_options(function: F) -> F:
    """Add the options that select another gateway than that of the state directory."""
    for option in (
        click.option(
            "--token-file",
            metavar="FILE",
            help="Where its token stands (else ANTIPHON_TOKEN).",
            expose_value=False,
            callback=_store_option,
        ),
        click.option(
            "--url",
            metavar="URL",
            help="A gateway other than that of the state directory (ANTIPHON_URL); separate replicas with commas.",
            expose_value=False,
            callback=_store_option,
        ),
    ):
        function = option(function)
    return function
