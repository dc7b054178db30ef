"""Reserves a state directory and a port for a gateway that joins others on the same machine."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.errors import ConfigError, StoreLocked, Unavailable
from antiphon.paths import REPLICAS_DIRECTORY_NAME

if TYPE_CHECKING:
    from antiphon.config import LoadedConfig
    from antiphon.store.statedir import StateDir

MAX_REPLICAS_PER_MACHINE = 100  # of one configuration
# How long a replica that started earlier may take to start, perhaps with a migration.
JOIN_TIMEOUT_SECONDS = 3600.0


class JoinSlot(msgspec.Struct, frozen=True):
    state_dir: Path
    port: int | None
    turn: StateDir | None = None
    """The lock that keeps other replicas from reserving the same directory; held until the gateway has started."""

    @classmethod
    def reserve(cls, loaded: LoadedConfig, state_dir: Path, port: int | None) -> JoinSlot:
        """Reserve the next directory that no other replica uses, and a free port if the configured one is taken.

        Raises:
            ConfigError: the store or the bus is not shared.
        """
        for name in ("store", "bus"):
            if getattr(loaded.config, name).url is None:
                raise ConfigError(
                    f"'{name}.url' is not set, so there is nothing to join.",
                    f"Set {name}.url in {str(loaded.path or 'the configuration')!r}, or leave out --join.",
                    path=f"{name}.url",
                )
        preferred_port = loaded.config.gateway.port if port is None else port
        parent = state_dir / REPLICAS_DIRECTORY_NAME
        turn = _acquire_join_lock(parent)
        return cls(_find_free_directory(parent), preferred_port if _is_port_free(preferred_port) else 0, turn)

    def release_join_lock(self) -> None:
        """Let the next replica reserve its directory, now that this gateway has started."""
        if self.turn is not None:
            self.turn.close()


def _acquire_join_lock(parent: Path) -> StateDir:
    from antiphon.store.statedir import StateDir

    parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    until = time.monotonic() + JOIN_TIMEOUT_SECONDS
    while True:
        try:
            return StateDir.open_locked(parent)
        except StoreLocked as error:
            if time.monotonic() > until:
                raise Unavailable(
                    f"Another replica on this machine (process {error.data['pid']}) has not finished starting.",
                    "Wait until it is up, then start this one.",
                ) from error
        time.sleep(0.05)


def _find_free_directory(parent: Path) -> Path:
    from antiphon.store.statedir import StateDir

    for number in range(1, MAX_REPLICAS_PER_MACHINE + 1):
        directory = parent / str(number)
        if StateDir.open_unlocked(directory).holder is None:
            return directory
    raise Unavailable(
        f"{MAX_REPLICAS_PER_MACHINE} replicas run on {str(parent)!r} already.",
        "Stop one, or choose another --state-dir.",
    )


def _is_port_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
