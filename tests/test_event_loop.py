"""The event loop of a process: garbage is bounded by bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.app_fixture import BOUND

pytestmark = pytest.mark.sqlite_only

MIB = 2**20
MAKES_GARBAGE = """
import asyncio
import os
import resource
import sys
from antiphon import event_loop

event_loop.GROWTH_CHECK_SECONDS = 0.0

class Held:
    def __init__(self):
        self.me, self.buffer = self, b"." * 2**20

async def fail_to_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    for _ in range(64):
        await asyncio.sleep(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

def read_resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def main():
    await asyncio.sleep(0)
    if "without files" in sys.argv:
        await fail_to_open_files()
    highest = 0
    for _ in range(1024):
        Held()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        highest = max(highest, read_resident_bytes())
    print(highest)

event_loop.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the size of a process is not known here")
@pytest.mark.requirement("SEC14")
@pytest.mark.parametrize("before", ["as it is", "without files"])
def test_large_objects_in_cycles_do_not_wait_for_many_small_ones(before: str) -> None:
    """Also after a time in which the process could open no more files."""
    command = [sys.executable, "-c", MAKES_GARBAGE, before]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=BOUND, check=True)
    assert int(done.stdout) < 384 * MIB, "1 GiB was made, of which nothing was needed"
