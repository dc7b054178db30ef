"""Paths of the configuration and the state directory. Nothing is opened here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

CONFIG_FILE_NAME, DATABASE_FILE_NAME, LOG_FILE_NAME = (
    "config.json5",
    "antiphon.db",
    "antiphon.log",
)  # in the state directory
PROGRAM_SECRETS_DIRECTORY_NAME = "program-secrets"
REPLICAS_DIRECTORY_NAME = (
    "replicas"  # subdirectories of gateways that share a store with others on the same machine
)

BIND_PATTERN = re.compile(r"([/~][^:]*):(/[^:]*)(?::(ro|rw))?")
"""A directory of the host, its name in a sandbox, and its mode."""


class Paths(NamedTuple):
    """The paths that this process uses."""

    config: Path
    config_explicit: bool
    """The file was named explicitly, so its absence is an error."""
    state_dir: Path


def locate_paths(config: str | None, state_dir: str | None, environ: Mapping[str, str]) -> Paths:
    """Chooses the paths: a flag, else `ANTIPHON_CONFIG` and `ANTIPHON_STATE_DIR`, else `~/.antiphon`."""
    home = Path(environ.get("HOME") or Path.home())
    state = _resolve_path(state_dir or environ.get("ANTIPHON_STATE_DIR"), home) or home / ".antiphon"
    chosen = _resolve_path(config or environ.get("ANTIPHON_CONFIG"), home)
    return Paths(chosen or state / CONFIG_FILE_NAME, chosen is not None, state)


def expand_home(text: str) -> Path:
    """Expands `~` and `~user`. An unknown user is left as it is, so the path is not found later."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises there


def is_writable(path: Path) -> bool:
    """Whether this process may change a file, or the contents of a directory."""
    mode = os.W_OK | os.X_OK if path.is_dir() else os.W_OK
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _resolve_path(value: str | None, home: Path) -> Path | None:
    if not value:
        return None
    return home / value[2:] if value.startswith("~/") else Path(value).absolute()
