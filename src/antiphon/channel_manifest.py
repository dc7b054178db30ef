"""Manifests of chat channels: what each is called, what its service can do, and where its parts are.

A channel is a folder in `channels/`. Reading its manifest imports nothing else of it, so that channels that are not
configured cost nothing.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec

_CHANNELS_DIR = Path(__file__).parent / "channels"


class ChannelCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a channel does; tests of what it does not declare are left out."""

    has_groups: bool = False
    has_threads: bool = False
    has_typing: bool = False
    takes_images: bool = False
    has_webhook: bool = False


class ChannelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the service."""

    text_length: int
    """Of one message, in `text_unit`."""
    text_unit: Literal["utf-16", "characters", "bytes"]
    download_bytes: int
    redelivery_seconds: int
    """How long the service may report the same event again."""


class ChannelManifest(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    label: str
    config_model: str
    """`module:class` of its section in the configuration."""
    adapter: str
    """`module:class` of what speaks to the service for one account."""
    docs_page: str
    capabilities: ChannelCapabilities
    limits: ChannelLimits
    id_prefixes: tuple[str, ...]
    """Beginnings that ids may have in the configuration and in addresses, such as `telegram:`."""
    thread_word: Literal["thread", "topic"] = "thread"
    webhook_alias: str | None = None
    """The path that the webhook has in related gateways."""

    def strip_prefix(self, entry: str) -> str:
        """Return an id as the service has it."""
        found = next((prefix for prefix in self.id_prefixes if entry.startswith(prefix)), "")
        return entry.removeprefix(found)

    def load_config_model(self) -> Any:
        return _load_attribute(self.config_model)

    def load_adapter(self) -> Any:
        return _load_attribute(self.adapter)


def _load_attribute(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


@cache
def list_channel_names() -> tuple[str, ...]:
    """Return the names of all channels that this release has."""
    return tuple(sorted(found.parent.name for found in _CHANNELS_DIR.glob("*/manifest.py")))


def load_manifest(name: str) -> ChannelManifest | None:
    """Return the manifest of a channel, or None if this release does not have it."""
    if name not in list_channel_names():
        return None
    return import_module(f"antiphon.channels.{name}.manifest").MANIFEST
