"""Moments at which a process of the crash suite can be killed: every await of its runs, every step of its keeper.

An await has two moments, when a task is suspended in it and when it goes on. Their names are the place in the source
and how often it was reached, so that they mean the same in every play, whatever else happens in between.
"""

from __future__ import annotations

import asyncio
import os
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import antiphon
from antiphon.workspace import keeper

SOURCE = str(Path(antiphon.__file__).parent)
WATCHED = ("LocalLanes._run", "Commands.")
"""What the watched tasks begin with: those that execute runs, and those that look after commands."""
MAX_REPEATS = 12
"""How often a place is a moment of its own: some tasks wait in circles."""
Task = asyncio.Task[Any]


class AwaitWatcher:
    """A task factory that reports when watched tasks, and the tasks they start, are suspended and go on."""

    def __init__(self, reach: Callable[[str], None]) -> None:
        self.moments: list[str] = []
        self._reach = reach
        self._counts: Counter[str] = Counter()
        self._watched: set[Task] = set()

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Task:
        name = getattr(coroutine, "__qualname__", "")
        parent = asyncio.current_task() if loop.is_running() else None
        if not (name.startswith(WATCHED) or parent in self._watched):
            return asyncio.Task(coroutine, loop=loop, **options)
        task: Task = asyncio.Task(self._run(coroutine), loop=loop, **options)
        self._watched.add(task)
        task.add_done_callback(self._watched.discard)
        return task

    async def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await self._watch(coroutine)

    @types.coroutine
    def _watch(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            self._report("resumed", coroutine)
            try:
                awaited = coroutine.throw(error) if error else coroutine.send(value)
            except StopIteration as stop:
                return stop.value
            self._report("suspended", coroutine)
            value, error = None, None
            try:
                value = yield awaited
            except BaseException as thrown:  # noqa: BLE001 - it is for the coroutine
                error = thrown

    def _report(self, phase: str, coroutine: Any) -> None:
        place = find_place(coroutine)
        if place is None:
            return
        name = f"{phase}:{place}"
        self._counts[name] += 1
        if self._counts[name] <= MAX_REPEATS:
            moment = f"{name}:{self._counts[name]}"
            self.moments.append(moment)
            self._reach(moment)


def find_place(coroutine: Any) -> str | None:
    """Return the innermost place in Antiphon's source at which a coroutine waits, or None before its first one."""
    place: str | None = None
    while coroutine is not None:
        frame = next(
            (
                found
                for name in ("cr_frame", "gi_frame", "ag_frame")
                if (found := getattr(coroutine, name, None))
            ),
            None,
        )
        if frame is not None and frame.f_lasti >= 0 and frame.f_code.co_filename.startswith(SOURCE):
            place = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}"
        coroutine = next(
            (
                found
                for name in ("cr_await", "gi_yieldfrom", "ag_await")
                if (found := getattr(coroutine, name, None)) is not None
            ),
            None,
        )
    return place


_KILLED_KEEPER = """
import os, runpy, signal, subprocess, sys
from pathlib import Path
sys.path.append({root!r})
steps = 0


def take_step():
    global steps
    steps += 1
    if steps == {step} and os.path.exists({armed!r}):
        os.unlink({armed!r})
        os.write(os.open({killed!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), b"killed keeper\\n")
        os.kill(os.getpid(), signal.SIGKILL)


def stepping(function):
    def wrapped(*arguments, **options):
        take_step()
        try:
            return function(*arguments, **options)
        finally:
            take_step()

    return wrapped


Path.rename, Path.mkdir, Path.touch = stepping(Path.rename), stepping(Path.mkdir), stepping(Path.touch)
subprocess.Popen, os.fsync = stepping(subprocess.Popen), stepping(os.fsync)
runpy.run_path({program!r}, run_name="__main__")
"""


def arm_keeper(state_dir: Path, step: int) -> None:
    """Let the first keeper of this directory kill itself before or after its n-th write or start of a process."""
    armed, program = state_dir.with_suffix(".armed"), state_dir.with_suffix(".keeper.py")
    armed.touch()  # it is removed, so that the next keeper lives
    text = _KILLED_KEEPER.format(
        root=str(Path(SOURCE).parent),
        step=step,
        armed=str(armed),
        killed=f"{state_dir}.stdout",
        program=keeper.PROGRAM_PATH,
    )
    program.write_text(text, "utf-8")
    keeper.PROGRAM_PATH = str(program)


def find_keepers(state_dir: Path) -> list[int]:
    """Return the keepers of a directory: the leaders of sessions that work in it, and one that is starting."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == state_dir / "keeper":
                found[int(process.name)] = os.getsid(int(process.name))
        except OSError:  # it has ended meanwhile
            pass
    # A command works there, too, for the moment between its fork and its start; it is in the session of its keeper.
    return [pid for pid, session in found.items() if session == pid or session not in found]
