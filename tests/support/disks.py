"""A small disk that a test can fill; skips where mounting is not allowed."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

DISK_BYTES = 3 * 2**20


@dataclass(frozen=True)
class Disk:
    path: Path

    def fill(self) -> None:
        """Fill the disk completely."""
        with (self.path / "filling").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    def clear(self) -> None:
        (self.path / "filling").unlink()


@contextmanager
def mount_small_disk(path: Path, files: int = 0) -> Generator[Disk]:
    """Mount a small disk for at most `files` files and directories, itself included (0: any number)."""
    path.mkdir(mode=0o700)
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={DISK_BYTES},nr_inodes={files},mode=700",
        "tmpfs",
        str(path),
    ]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=10)
    except FileNotFoundError:
        pytest.skip("mount is not installed")
    if done.returncode:
        pytest.skip("this user cannot mount")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=10)
