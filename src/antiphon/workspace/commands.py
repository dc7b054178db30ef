"""Runs the commands of agents: starts each one once, records its end, and ends it with its session.

The keeper runs them and outlives this process; the rows (`engine.runs.command_rows`) record what was intended. This
module reconciles the two: it starts the commands that rows intend, records ends, and ends the processes of commands
whose stop was requested. After a restart, it resumes the commands that an earlier process left running. Without
commands, nothing runs here, and neither does the keeper.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from antiphon.access import Caller
from antiphon.bus import COMMANDS_TOPIC, CommandStopRequested, EventBus
from antiphon.clock import Clock
from antiphon.engine.runs import command_rows
from antiphon.engine.runs.command_rows import LIVE_STATES, CommandEnd, NewCommand
from antiphon.engine.runs.effects import Effects
from antiphon.engine.runs.lifecycle import retry_while_store_full
from antiphon.engine.toolbox import OutputListener
from antiphon.errors import AntiphonError, Forbidden, InvalidInput, NotFound, Unavailable
from antiphon.store import Row, Store
from antiphon.workspace.command_output import decode_output, read_all, read_shown, show_progress
from antiphon.workspace.keeper_client import CommandSpec, CommandStatus, KeeperClient, OutputPart
from antiphon.workspace.kept_files import KeptFiles

log = logging.getLogger(__name__)

HOST_FILE_NAME = "host"
STOP_POLL_SECONDS = 0.5  # how often the store is asked for stops while commands run
WATCH_SECONDS = 20.0
RETRY_SECONDS = 1.0
IDLE_CLOSE_SECONDS = 30.0  # without commands, after which the keeper may end
OTHER_HOST_POLL_SECONDS = 1.0
OWNER_GRACE_ACK_WAITS = 3  # after so many without a living process, a host has lost its commands
ABANDONED_POLL_SECONDS = 5.0
GIVEN_UP_KEEP_MS = 86_400_000  # no command runs for longer
MAX_CONCURRENT_READS = 4  # of whole outputs, which are held in memory

SpecBuilder = Callable[[], Awaitable[CommandSpec]]
NoticeBuilder = Callable[[Row, CommandEnd], str | None]
"""Returns what a session reads about the end of a background command; None if it is not notified."""


class Commands:
    """The commands of all agents on this host."""

    def __init__(
        self,
        *,
        store: Store,
        bus: EventBus,
        clock: Clock,
        state_dir: Path,
        outputs: KeptFiles,
        build_notice: NoticeBuilder,
        owner_grace_seconds: float,
        max_total_output_bytes: int | None = None,
        owner: str = "",
        apply_effects: Callable[[Effects], Awaitable[None]] | None = None,
    ) -> None:
        """Create the commands of a process; `owner` is its id among those that share the store."""
        self._store = store
        self._bus = bus
        self._clock = clock
        self._outputs = outputs
        self._build_notice = build_notice
        self._keeper = KeeperClient(state_dir, max_total_output_bytes)
        self._host_path = self._keeper.directory / HOST_FILE_NAME
        self._host = ""
        self._owner = owner
        self._owner_grace_seconds = owner_grace_seconds
        self._apply_effects = apply_effects
        self._live: set[str] = set()
        self._awaited: dict[str, int] = {}  # commands that a call is waiting for, with the number of calls
        self._unstarted: set[str] = set()  # intended but not started yet; their runs will start them
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._reads = asyncio.Semaphore(MAX_CONCURRENT_READS)
        self._preparing = asyncio.Lock()

    # --- the life of this process ---

    async def start(self) -> None:
        """Resume the commands of an earlier process, if this directory ever had any."""
        if self._store.shared:
            self._tasks.append(
                asyncio.create_task(self._repeat(self._settle_abandoned, ABANDONED_POLL_SECONDS))
            )
        if await asyncio.to_thread(self._host_path.exists):
            await self._prepare()

    async def aclose(self) -> None:
        """Stop monitoring commands. They keep running."""
        for task in [*self._tasks, *self._background_tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._background_tasks, return_exceptions=True)
        self._tasks.clear()
        await self._keeper.close()

    async def _prepare(self) -> None:
        """Load the id of this host, and resume the commands that run on it."""
        async with self._preparing:
            if self._host:
                return
            host = await asyncio.to_thread(self._load_host)
            rows = await self._store.tx(command_rows.adopt_commands, host, self._owner)
            self._host = host
            for row in rows:
                await self._adopt(row)
            if not self._store.shared:
                await self._settle_foreign()
            else:
                self._run_in_background(self._end_given_up())
            background = (
                self._repeat(self._watch, 0),
                self._repeat(self._listen_for_stops, 0),
            )
            self._tasks += [asyncio.create_task(work) for work in background]

    async def _adopt(self, row: Row) -> None:
        key = row["key"]
        if not row["background"] and row["run_state"] not in ("running", "queued"):
            # The run that called it has ended, so no call will ask for its result.
            await self._store.tx(command_rows.continue_in_background, key)
        elif not row["background"]:
            self._unstarted.add(key)
        self._live.add(key)

    def _load_host(self) -> str:
        """Return the id of this state directory, which is created with its first command."""
        self._keeper.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError), self._host_path.open("x", encoding="ascii") as file:
            file.write(uuid.uuid4().hex)
        return self._host_path.read_text("ascii")

    # --- calls ---

    @asynccontextmanager
    async def showing_output(self, key: str, listener: OutputListener | None) -> AsyncGenerator[None]:
        """Show the output of a command on this host while a call waits for it."""
        if listener is None:
            yield
            return

        async def measure() -> int:
            is_ours = key in self._live  # otherwise another host may run it, and no keeper may run here
            return (await self._keeper.wait(key, 0)).output_bytes if is_ours else 0

        showing = asyncio.create_task(show_progress(measure, self._reader(key), listener))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    async def execute(self, new: NewCommand, build_spec: SpecBuilder, wait_seconds: float | None) -> Row:
        """Start a command, or join the one with its key, wait for its end, and return its row.

        After `wait_seconds` it continues in the background; if that is None, wait until it has ended.
        """
        await self._prepare()
        row = await self._store.read(command_rows.find_command, new.key)
        spec: CommandSpec | None = None
        if row is None:
            spec = await build_spec()
            row, is_new = await self._begin(msgspec.structs.replace(new, host=self._host, owner=self._owner))
            spec = spec if is_new else None
        if row["host"] != self._host:
            return await self._wait_for_other_host(row, wait_seconds)
        if row["state"] not in LIVE_STATES or row["background"]:
            return row
        with self._mark_awaited(new.key):
            return await self._run(new.key, spec, build_spec, wait_seconds)

    async def _begin(self, new: NewCommand) -> tuple[Row, bool]:
        """Commit the intent to start a command. It is monitored from then on, even if this call is cancelled."""
        self._live.add(new.key)
        self._unstarted.add(new.key)
        self._changed.set()
        try:
            return await retry_while_store_full(
                lambda: self._store.tx(command_rows.begin_command, new, self._clock.now())
            )
        except AntiphonError:
            self._forget(new.key)
            raise

    async def _run(
        self, key: str, spec: CommandSpec | None, build_spec: SpecBuilder, wait_seconds: float | None
    ) -> Row:
        seconds = WATCH_SECONDS if wait_seconds is None else wait_seconds
        status = CommandStatus(state="unknown")
        if spec is None:  # it may have been started before a crash
            status = await self._keeper.wait(key, 0)
        if status.state == "unknown":
            status = await self._start(key, spec, build_spec, seconds)
        elif status.state == "running":
            status = await self._keeper.wait(key, seconds)
        self._unstarted.discard(key)
        while status.state == "running":
            if wait_seconds is not None and (
                row := await self._store.tx(command_rows.continue_in_background, key)
            ):
                return row
            # ends when the command does, also by a requested stop
            status = await self._keeper.wait(key, WATCH_SECONDS)
        return await self._settle(key, status)

    async def _start(
        self, key: str, spec: CommandSpec | None, build_spec: SpecBuilder, wait_seconds: float
    ) -> CommandStatus:
        try:
            return await self._keeper.start(key, spec or await build_spec(), wait_seconds=wait_seconds)
        except (Forbidden, InvalidInput, NotFound, Unavailable) as error:
            if error.data.get("keeper"):
                raise
            return CommandStatus(state="failed", error=str(error))

    async def _wait_for_other_host(self, row: Row, wait_seconds: float | None) -> Row:
        """Wait for a command that another replica runs, as long as that replica lives."""
        loop = asyncio.get_running_loop()
        until = None if wait_seconds is None else loop.time() + wait_seconds
        orphaned_at: float | None = None
        while True:
            current = await self._store.read(command_rows.find_command, row["key"]) or row
            if current["state"] not in LIVE_STATES or current["background"]:
                return current
            orphans = await self._store.read(
                command_rows.list_commands_without_owner, self._host, self._clock.now()
            )
            if row["key"] in orphans:
                orphaned_at = orphaned_at or loop.time()
                if loop.time() - orphaned_at > self._owner_grace_seconds:
                    return await self._record_end(current, CommandEnd(state="lost")) or current
            else:
                orphaned_at = None
                if until is not None and loop.time() > until:
                    return await self._store.tx(command_rows.continue_in_background, row["key"]) or current
            await asyncio.sleep(OTHER_HOST_POLL_SECONDS)

    async def wait_for_end(self, row: Row, seconds: float) -> Row:
        """Wait at most this long until a command has ended, and return its row."""
        if row["state"] not in LIVE_STATES or row["host"] != self._host:
            return row
        status = await self._keeper.wait(row["key"], seconds)
        if status.state == "running":
            return row
        return await self._settle(row["key"], status)

    async def measure_output(self, row: Row) -> int:
        """Return how many bytes a command has printed so far."""
        if row["state"] not in LIVE_STATES or row["host"] != self._host:
            return row["output_bytes"]
        return (await self._keeper.wait(row["key"], 0)).output_bytes

    async def read_output(self, row: Row, start: int, until: int) -> str | None:
        """Return a part of what a command printed; None if it is not kept any more, or on another host."""
        if row["host"] != self._host:
            return None
        first = await self._keeper.read(row["key"], start, 1)
        if not first.data and until > start:
            return None
        async with self._reads:
            return decode_output(await read_all(self._reader(row["key"]), until, start))

    async def write(self, row: Row, write_id: str, data: str, *, eof: bool) -> None:
        await self._keeper.write(row["key"], write_id, data.encode(), eof=eof)

    async def stop(self, row: Row, reason: str) -> Row:
        """End the processes of a command. Its end wakes no session."""
        await self._store.tx(command_rows.stop_command, row["key"], reason)
        if row["host"] != self._host:
            self._bus.publish(COMMANDS_TOPIC, CommandStopRequested(key=row["key"], host=row["host"]))
            return row
        with self._mark_awaited(row["key"]):
            return await self._end(row["key"], reason) or row

    def is_here(self, row: Row) -> bool:
        """Whether this process can reach a command."""
        return row["host"] == self._host

    async def is_known(self, key: str) -> bool:
        """Whether a command with this key was started or meant to start."""
        return await self._store.read(command_rows.find_command, key) is not None

    async def list_of_session(self, session_key: str) -> list[Row]:
        return await self._store.read(command_rows.list_session_commands, session_key)

    async def find_of_session(self, session_key: str, command_id: str) -> Row | None:
        return await self._store.read(command_rows.find_session_command, session_key, command_id)

    async def remove(self, row: Row) -> None:
        """Hide a command from its session."""
        await self._store.tx(command_rows.remove_command, row["key"])

    async def advance_reading(self, row: Row, call: str) -> tuple[int, int]:
        """Return the part of the output that is new to the session. The same call gets the same part again."""
        total = await self.measure_output(row)
        return await self._store.tx(command_rows.advance_reading, row["key"], call, total)

    # --- ends ---

    async def _settle(self, key: str, status: CommandStatus) -> Row:
        """Record the end of a command as the keeper reports it."""
        row = await self._store.read(command_rows.find_command, key)
        if row is None:
            self._forget(key)
            raise InvalidInput("The session of this command was deleted.", "Start it in another session.")
        if row["state"] not in LIVE_STATES:
            self._forget(key)
            return row
        return await self._record_end(row, await self._build_end(row, status)) or row

    async def _build_end(self, row: Row, status: CommandStatus) -> CommandEnd:
        state = status.state if status.state in ("ended", "failed") else "lost"
        shown, file = await self._collect_output(row, status.output_bytes)
        if status.refused_hosts:
            log.warning(
                "A command tried to reach hosts that 'allowHosts' of its sandbox does not list: %s",
                ", ".join(status.refused_hosts),
                extra={"session_key": row["session_key"]},
            )
        return CommandEnd(
            state=state,
            exit_code=status.exit_code,
            signal=status.signal,
            error=status.error,
            timed_out=status.stop_reason == "timeout",
            output=shown,
            output_bytes=status.output_bytes,
            output_file=file,
        )

    async def _collect_output(self, row: Row, total: int) -> tuple[str, str | None]:
        """Return the output as it is shown, and the file with the whole of it if that is not all."""
        if not total:
            return "", None
        read = self._reader(row["key"])
        async with self._reads:
            shown = await read_shown(read, total)
            if shown.is_whole:
                return shown.text, None
            text = decode_output(await read_all(read, total))
            caller = Caller.agent(row["agent_id"], row["session_key"], sandboxed=bool(row["sandboxed"]))
            try:
                return shown.text, await self._outputs.keep(caller, f"{row['id']}.txt", text.encode())
            except (AntiphonError, OSError) as error:
                log.warning("Failed to keep the output of command %r: %s", row["id"], error)
                return shown.text, None

    async def _record_end(self, row: Row, end: CommandEnd) -> Row | None:
        key, notice = row["key"], self._build_notice(row, end)
        recorded, effects = await retry_while_store_full(
            lambda: self._store.tx(command_rows.record_end, key, end, notice, self._clock.now())
        )
        self._forget(key)
        if self._apply_effects is not None:
            await self._apply_effects(effects)
        if row["host"] == self._host:
            self._run_in_background(self._acknowledge(key))
        return recorded

    async def _acknowledge(self, key: str) -> None:
        with suppress(AntiphonError, OSError, TimeoutError):  # else its directory is kept a little longer
            await self._keeper.acknowledge(key)

    async def _end(self, key: str, reason: str) -> Row | None:
        """End the processes of a command, and record its end. None if the kernel has not ended them yet."""
        status = await self._keeper.stop(key, reason)
        if status.state == "running":
            return None
        with suppress(InvalidInput):
            return await self._settle(key, status)
        return None

    def _forget(self, key: str) -> None:
        self._live.discard(key)
        self._unstarted.discard(key)
        self._changed.set()

    def _reader(self, key: str) -> Callable[[int, int], Awaitable[OutputPart]]:
        async def read(offset: int, limit: int) -> OutputPart:
            return await self._keeper.read(key, offset, limit)

        return read

    # --- monitoring ---

    def _mark_awaited(self, key: str) -> _AwaitedCommand:
        return _AwaitedCommand(self._awaited, self._live, self._changed, key)

    async def _watch(self) -> None:
        """Record the ends of commands that no call waits for."""
        self._changed.clear()
        keys = sorted(self._live - self._unstarted - self._awaited.keys())
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(self._changed.wait())]
        if keys:
            waiting.append(asyncio.create_task(self._settle_ended(keys)))
        timeout = None if keys or self._live else IDLE_CLOSE_SECONDS
        try:
            done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if not self._live and not self._changed.is_set():
            self._keeper.release()  # an open connection would keep it running
            await self._changed.wait()

    async def _settle_ended(self, keys: list[str]) -> None:
        for key in await self._keeper.wait_any(keys, WATCH_SECONDS):
            if key in self._live and key not in self._awaited:
                self._awaited[key] = self._awaited.get(key, 0) + 1  # one task at a time
                self._run_in_background(self._settle_in_background(key))

    async def _settle_in_background(self, key: str) -> None:
        try:
            with suppress(InvalidInput):
                await self._settle(key, await self._keeper.wait(key, 0))
        except (AntiphonError, TimeoutError) as error:
            log.warning("Failed to record the end of a command; retrying: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._leave(key)

    def _leave(self, key: str) -> None:
        self._awaited[key] -= 1
        if not self._awaited[key]:
            del self._awaited[key]
        self._changed.set()

    async def _listen_for_stops(self) -> None:
        """End the processes of commands whose stop was requested: at once on an event, or when the store says so."""
        async with self._bus.listen(COMMANDS_TOPIC) as events:
            while True:
                if not self._live:
                    await self._wait_until_live()
                await events.get(STOP_POLL_SECONDS)
                if not self._live:
                    continue
                await self._forget_unstarted()
                requested = await self._store.read(command_rows.list_commands_to_stop, self._host)
                await asyncio.gather(
                    *(self._stop_requested(key, reason) for key, reason in requested.items())
                )

    async def _forget_unstarted(self) -> None:
        """Forget commands whose intent was not committed after all, or that ended without having been started."""
        for key in self._unstarted - self._awaited.keys():
            row = await self._store.read(command_rows.find_command, key)
            if (row is None or row["state"] not in LIVE_STATES) and key not in self._awaited:
                self._forget(key)

    async def _wait_until_live(self) -> None:
        while not self._live:
            changed = self._changed
            await changed.wait()
            if not self._live:
                await asyncio.sleep(STOP_POLL_SECONDS)

    async def _stop_requested(self, key: str, reason: str) -> None:
        with self._mark_awaited(key):
            try:
                await self._end(key, reason)
            except (AntiphonError, TimeoutError) as error:
                log.warning("Failed to end a command; retrying: %s", error)

    # --- other hosts ---

    async def _settle_foreign(self) -> None:
        """Give up commands of another state directory: no other process uses this store."""
        now = self._clock.now()
        for key in await self._store.read(command_rows.list_commands_without_owner, self._host, now):
            await self._give_up(key)

    async def _settle_abandoned(self) -> None:
        """Give up commands whose host has had no living process for a while."""
        loop = asyncio.get_running_loop()
        orphaned_at: dict[str, float] = {}
        while True:
            keys = await self._store.read(
                command_rows.list_commands_without_owner, self._host, self._clock.now()
            )
            orphaned_at = {key: orphaned_at.get(key, loop.time()) for key in keys}
            for key, since in orphaned_at.items():
                if loop.time() - since > self._owner_grace_seconds:
                    await self._give_up(key)
            await asyncio.sleep(ABANDONED_POLL_SECONDS)

    async def _end_given_up(self) -> None:
        """End what still runs of commands that another replica gave up while this host had no process."""
        since = self._clock.now() - GIVEN_UP_KEEP_MS
        try:
            for key in await self._store.read(command_rows.list_commands_given_up, self._host, since):
                if (await self._keeper.wait(key, 0)).state == "running":
                    await self._keeper.stop(key, "lost")
        except (AntiphonError, OSError, TimeoutError) as error:
            log.warning("Failed to end commands that were given up: %s", error)

    async def _give_up(self, key: str) -> None:
        row = await self._store.read(command_rows.find_command, key)
        if row is not None:
            await self._record_end(row, CommandEnd(state="lost"))

    # --- tasks ---

    async def _repeat(self, work: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        while True:
            try:
                await work()
            except (AntiphonError, OSError, TimeoutError) as error:
                log.warning("Failed to monitor commands; retrying: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:
                log.exception("Failed to monitor commands; retrying")
                await asyncio.sleep(RETRY_SECONDS)
            else:
                await asyncio.sleep(seconds)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)


class _AwaitedCommand:
    """While it is entered, a call waits for the command, so nothing else records its end."""

    def __init__(self, awaited: dict[str, int], live: set[str], changed: asyncio.Event, key: str) -> None:
        self._awaited, self._live, self._changed, self._key = awaited, live, changed, key

    def __enter__(self) -> None:
        self._awaited[self._key] = self._awaited.get(self._key, 0) + 1
        self._live.add(self._key)
        self._changed.set()

    def __exit__(self, *_: object) -> None:
        self._awaited[self._key] -= 1
        if not self._awaited[self._key]:
            del self._awaited[self._key]
        self._changed.set()
