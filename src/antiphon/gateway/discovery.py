"""Discovery record: a file in the state directory that tells local commands where the gateway listens."""

from __future__ import annotations

from pathlib import Path

import msgspec

DISCOVERY_FILE_NAME = "gateway.json"


class DiscoveryRecord(msgspec.Struct, frozen=True):
    url: str
    pid: int


def write(state_dir: Path, record: DiscoveryRecord) -> None:
    (state_dir / DISCOVERY_FILE_NAME).write_bytes(msgspec.json.encode(record))


def read(state_dir: Path) -> DiscoveryRecord | None:
    """Return the last record, which may be outdated."""
    try:
        return msgspec.json.decode((state_dir / DISCOVERY_FILE_NAME).read_bytes(), type=DiscoveryRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def remove(state_dir: Path) -> None:
    (state_dir / DISCOVERY_FILE_NAME).unlink(missing_ok=True)
