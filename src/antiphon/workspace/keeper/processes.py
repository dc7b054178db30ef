"""Finds the processes of a job, even those that have left its process group or cleared their environment."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

JOB_VARIABLE = "ANTIPHON_JOB"  # in the environment of a command


def compute_mark(process_id: str) -> int:
    """Return the number that identifies processes of a job even after they have cleared their environment."""
    return 1 << 60 | int(process_id[:15], 16)


def make_process_id() -> str:
    """Return a unique id for the processes of a job. Its key is not: keepers of other directories may have the same."""
    return os.urandom(16).hex()


def set_mark(mark: int) -> None:
    """Mark the processes that are started from now on, by a resource limit that they inherit.

    It is RLIMIT_RTTIME, which only concerns real-time processes.
    """
    if sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_RTTIME)[1] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, resource.RLIM_INFINITY))


def read_mark(process: Path) -> bytes:
    """Return the mark of a process, from its directory in `/proc`."""
    return (process / "limits").read_bytes().partition(b"Max realtime timeout ")[2].split(None, 1)[0]


def has_children() -> bool:
    """Whether this process has a child. It adopts, where possible, the processes that an ended command left behind."""
    if sys.platform != "linux":
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def find_job_processes(process_id: str, root: int | None, known: dict[int, bytes]) -> dict[int, bytes]:
    """Return the processes of a job with their start times, in any process group.

    These are those that have its mark or whose environment names it, the descendants of `root`, and what is left of
    `known`.
    """
    marker = f"{JOB_VARIABLE}={process_id}".encode()
    mark = str(compute_mark(process_id)).encode()
    started: dict[int, bytes] = {}
    children: dict[int, list[int]] = {}
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(folder.name)
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] == b"Z":
                continue
            started[pid] = fields[19]
            children.setdefault(int(fields[1]), []).append(pid)
            if (
                known.get(pid) == fields[19]
                or read_mark(folder) == mark
                or marker in (folder / "environ").read_bytes().split(b"\0")
            ):
                found.add(pid)
    waiting = [*found, *([root] if root else [])]
    while waiting:
        below = set(children.get(waiting.pop(), [])) - found
        found |= below
        waiting += below
    return {pid: started[pid] for pid in found - {os.getpid()}}
