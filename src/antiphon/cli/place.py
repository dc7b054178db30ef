"""Where a gateway keeps what is its own, and where it listens, when several run on one machine."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.errors import ConfigError, StoreLocked, Unavailable
from antiphon.paths import JOINED

if TYPE_CHECKING:
    from antiphon.config import Loaded
    from antiphon.store.statedir import StateDir

MOST = 100  # replicas of one configuration on one machine
PATIENCE = 3600.0  # seconds for one that started before to take its place, perhaps after a migration


class Place(msgspec.Struct, frozen=True):
    state_dir: Path
    port: int | None
    turn: StateDir | None = None
    """Until the place is taken nobody else looks for one, who would find the same."""

    @classmethod
    def joining(cls, loaded: Loaded, state_dir: Path, port: int | None) -> Place:
        """The next directory that no other replica is in, and a free port if the one to listen on is taken.

        Raises:
            ConfigError: there is nothing that could be shared.
        """
        for name in ("store", "bus"):
            if getattr(loaded.config, name).url is None:
                raise ConfigError(
                    f"'{name}.url' is not set, so there is nothing to join.",
                    f"Set {name}.url in {str(loaded.path or 'the configuration')!r}, or leave out --join.",
                    path=f"{name}.url",
                )
        wanted = loaded.config.gateway.port if port is None else port
        parent = state_dir / JOINED
        turn = _turn(parent)
        return cls(_free_directory(parent), wanted if _is_free(wanted) else 0, turn)

    def taken(self) -> None:
        """The gateway is there."""
        if self.turn is not None:
            self.turn.close()


def _turn(parent: Path) -> StateDir:
    from antiphon.store.statedir import StateDir

    parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return StateDir.own(parent)
        except StoreLocked as error:
            if time.monotonic() > until:
                raise Unavailable(
                    f"Another replica on this machine (process {error.data['pid']}) has not finished starting.",
                    "Wait until it is up, then start this one.",
                ) from error
        time.sleep(0.05)


def _free_directory(parent: Path) -> Path:
    from antiphon.store.statedir import StateDir

    for number in range(1, MOST + 1):
        place = parent / str(number)
        if StateDir.look(place).holder is None:
            return place
    raise Unavailable(
        f"{MOST} replicas run on {str(parent)!r} already.", "Stop one, or choose another --state-dir."
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
