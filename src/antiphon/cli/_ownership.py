"""Takes turns with other commands that own the state directory.

Without a gateway, a command that hosts sessions owns the directory while it waits for an answer. A gateway that starts
meanwhile asks for the directory, and the command releases it and waits through that gateway. Runs are resumed, so
nothing is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from antiphon.cli._gateway_lookup import find_running_gateway
from antiphon.errors import StoreLocked
from antiphon.store.statedir import LockOwner, StateDir

if TYPE_CHECKING:
    from antiphon.cli._options import Settings

T = TypeVar("T")

COMMANDS_THAT_HAND_OVER = frozenset({"agent", "send", "spawn"})
POLL_SECONDS = 0.2  # between two looks for a handover request, or for a gateway
SHORT_OWNER_WAIT_SECONDS = 10.0  # for a command to release the directory to another command


def get_command_name() -> str | None:
    """Return the command that this process was started as, such as `sessions label`."""
    context = click.get_current_context(silent=True)
    if context is None:
        return None
    program = context.find_root().info_name or ""
    return context.command_path.removeprefix(program).strip() or None


async def open_when_free(
    stack: AsyncExitStack,
    state_dir: Path,
    open_context: Callable[[], AbstractAsyncContextManager[T]],
    *,
    seconds: float,
    on_wait: Callable[[LockOwner], None] | None = None,
) -> T:
    """Enter a context that owns the directory; wait for a command that owns it now, but not for a gateway.

    Raises:
        StoreLocked: the directory is still in use, or a gateway uses it.
    """
    loop, notified = asyncio.get_running_loop(), False
    until = loop.time() + seconds
    while True:
        try:
            return await stack.enter_async_context(open_context())
        except StoreLocked as error:
            if find_running_gateway(state_dir):
                raise
            owner = StateDir.open_unlocked(state_dir).owner
            if loop.time() > until:
                raise _build_in_use_error(state_dir, owner) if owner else error from error
            if owner and on_wait and not notified:
                on_wait(owner)
                notified = True
        await asyncio.sleep(POLL_SECONDS)


def explain_owner(owner: LockOwner) -> str:
    """Return what can be done about a command that owns the directory."""
    if owner.command in COMMANDS_THAT_HAND_OVER:
        return "It ends when its run has ended; `antiphon up` takes over its run at once."
    if owner.command == "chat":
        return "Leave that chat with /quit."
    return "Wait until it has ended, or stop it."


def _build_in_use_error(state_dir: Path, owner: LockOwner) -> StoreLocked:
    return StoreLocked(
        f"The state directory {str(state_dir)!r} is in use by another Antiphon ({owner}).",
        f"{explain_owner(owner)} Or choose another directory with --state-dir.",
        pid=owner.pid,
    )


async def run_until_handover(settings: Settings, work: Coroutine[Any, Any, T]) -> asyncio.Task[T] | None:
    """Run work until it has ended or a gateway asks for the directory; return None in the second case."""
    doing = asyncio.create_task(work)
    asked = asyncio.create_task(_wait_for_request(StateDir.open_unlocked(settings.paths.state_dir)))
    try:
        await asyncio.wait({doing, asked}, return_when=asyncio.FIRST_COMPLETED)
        return doing if doing.done() else None
    finally:
        for task in (doing, asked):
            task.cancel()
        await asyncio.wait({doing, asked})


async def _wait_for_request(home: StateDir) -> None:
    while True:
        if await asyncio.to_thread(lambda: home.is_handover_requested):
            return
        await asyncio.sleep(POLL_SECONDS)
