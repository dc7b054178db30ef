"""Options common to all commands: where the configuration and the state are, and how to print.

They may stand before or after the command's name; otherwise environment variables are used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli._output import set_global_option
from antiphon.paths import Paths, locate_paths

if TYPE_CHECKING:
    from antiphon.config import Config, LoadedConfig
    from antiphon.config_file import ConfigDocument

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
        """Return the configuration; it is validated when a setting is needed that its document does not answer."""
        from antiphon.cli._deferred_config import DeferredConfig

        return DeferredConfig(self.read_config_document())

    def read_config_document(self) -> ConfigDocument | None:
        """Read the configuration without validating it; None if there is no file."""
        from antiphon.config_file import read_document

        paths = self.paths
        return read_document(paths.config, required=paths.config_explicit)

    def load(self) -> LoadedConfig:
        """Load the configuration. The default file need not exist; a file named by the user must."""
        from antiphon.config import load

        paths = self.paths
        return load(paths.config, required=paths.config_explicit)


def _store_option(ctx: click.Context, param: click.Parameter, value: object) -> None:
    settings = ctx.ensure_object(Settings)
    if value == "":  # an unset shell variable must not silently select the default
        raise click.UsageError(f"{param.opts[0]} is empty. Give a value, or leave the option out.")
    if value and param.name:
        setattr(settings, param.name, value)
        if param.name in {"config", "state_dir"}:
            set_global_option(param.opts[0], str(value))


def get_session_reference(agent: str | None, key: str | None) -> str:
    """Return the session that `--agent` and `--session` name; empty values are refused later, on opening."""
    if agent is not None and key is not None:
        raise click.UsageError("--agent and --session cannot be combined. Keep one of them.")
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
            help="State directory (ANTIPHON_STATE_DIR, else ~/.antiphon).",
            expose_value=False,
            callback=_store_option,
        ),
        click.option(
            "--config",
            metavar="FILE",
            help="Configuration file (ANTIPHON_CONFIG, else config.json5 in the state directory).",
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
            help="File with the gateway's token (else ANTIPHON_TOKEN).",
            expose_value=False,
            callback=_store_option,
        ),
        click.option(
            "--url",
            metavar="URL",
            help="Gateway to use instead of the local one (ANTIPHON_URL); separate replicas with commas.",
            expose_value=False,
            callback=_store_option,
        ),
    ):
        function = option(function)
    return function
