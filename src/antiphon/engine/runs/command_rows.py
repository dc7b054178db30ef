"""The rows of commands that agents started, as transaction scripts.

    starting ──▶ running ──▶ ended | lost
        └──────▶ ended | failed | lost

A row is `starting` from the commit of its intent, and `running` once it continues in the background. It belongs to its
session: a commit that ends the session's work also requests its stop (`stop_reason`), and the host that runs it ends
its processes. The end of a background command is one commit with the run that wakes the session, unless Antiphon ended
it. `workspace.commands` talks to the keeper.
"""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

from antiphon.access import build_session_missing_error
from antiphon.bus import CommandStopRequested
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.effects import NO_EFFECTS, Effects
from antiphon.engine.runs.run_queue import WAKE_ORIGIN, Submission
from antiphon.errors import Conflict, InvalidInput
from antiphon.messages import Provenance, UserMessage
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("exec_commands")
SESSIONS_SQL = Queries("sessions")
RUNS_SQL = Queries("runs")

LIVE_STATES = frozenset({"starting", "running"})
MAX_LIVE_COMMANDS_PER_SESSION = 16
KEPT_COMMANDS_PER_SESSION = 500
MAX_LISTED_COMMANDS = 50
COMMAND_END_KIND = "command_end"
COMMAND_ID_BYTES = 4

EndState = Literal["ended", "failed", "lost"]


class NewCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command that is about to start."""

    key: str
    session_key: str
    agent_id: str
    sandboxed: bool
    run_id: str
    host: str = ""
    owner: str = ""
    backend: str
    command: str
    workdir: str
    timeout_seconds: int


class CommandEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended. `failed` means that it never started."""

    state: EndState
    exit_code: int | None = None
    signal: int | None = None
    error: str | None = None
    timed_out: bool = False
    output: str = ""
    output_bytes: int = 0
    output_file: str | None = None


async def begin_command(tx: Tx, new: NewCommand, now: int) -> tuple[Row, bool]:
    """Record the intent to start a command. Returns its row, and False if its key was used before."""
    if found := await tx.one(SQL.by_key, key=new.key):
        return found, False
    session = await tx.one(SESSIONS_SQL.all_columns_by_key, key=new.session_key)
    if session is None:
        raise build_session_missing_error(new.session_key)
    if await tx.one(RUNS_SQL.ended_or_stopping, id=new.run_id):
        raise InvalidInput("The command was not started: the run was stopped.", "Start it in another run.")
    await tx.lock(f"exec:{session['id']}")
    live = await tx.one(SQL.count_live, session=session["id"])
    if live is not None and live["number"] >= MAX_LIVE_COMMANDS_PER_SESSION:
        raise Conflict(
            f"The command was not started: {MAX_LIVE_COMMANDS_PER_SESSION} commands of this session are running.",
            "Wait for one of them, or end one with the tool process.",
            max=MAX_LIVE_COMMANDS_PER_SESSION,
        )
    await tx.do(
        SQL.insert,
        key=new.key,
        id=secrets.token_hex(COMMAND_ID_BYTES),
        session=session["id"],
        session_key=new.session_key,
        agent_id=new.agent_id,
        sandboxed=int(new.sandboxed),
        run_id=new.run_id,
        host=new.host,
        owner=new.owner,
        backend=new.backend,
        command=new.command,
        workdir=new.workdir,
        timeout_seconds=new.timeout_seconds,
        now=now,
    )
    await tx.do(SQL.delete_oldest, session=session["id"], kept=KEPT_COMMANDS_PER_SESSION)
    row = await tx.one(SQL.by_key, key=new.key)
    if row is None:
        raise Conflict("The id of the command is taken.", "Start the command again.")
    return row, True


async def find_command(tx: Tx, key: str) -> Row | None:
    return await tx.one(SQL.by_key, key=key)


async def find_session_command(tx: Tx, session_key: str, command_id: str) -> Row | None:
    return await tx.one(SQL.by_id, session_key=session_key, id=command_id)


async def list_session_commands(tx: Tx, session_key: str) -> list[Row]:
    """Return the newest commands of a session, without removed ones."""
    return await tx.all(SQL.of_session, session_key=session_key, limit=MAX_LISTED_COMMANDS)


async def continue_in_background(tx: Tx, key: str) -> Row | None:
    """Let a command go on in the background. Returns its row, or None if it has ended or is being stopped."""
    if not await tx.do(SQL.continue_in_background, key=key):
        return None
    return await tx.one(SQL.by_key, key=key)


async def record_end(
    tx: Tx, key: str, end: CommandEnd, notice: str | None, now: int
) -> tuple[Row | None, Effects]:
    """Record the end of a command once, and wake its session with `notice` if it ran in the background.

    Returns the row, or None if its session was deleted: then nothing of it is kept.
    """
    changed = await tx.do(
        SQL.end,
        key=key,
        state=end.state,
        exit_code=end.exit_code,
        signal=end.signal,
        error=end.error,
        timed_out=int(end.timed_out),
        output=end.output,
        output_bytes=end.output_bytes,
        output_file=end.output_file,
        now=now,
    )
    row = await tx.one(SQL.by_key, key=key)
    if row is None:
        return None, NO_EFFECTS
    session = await tx.one(SESSIONS_SQL.by_id, id=row["session"])
    if session is None:
        await tx.do(SQL.delete, key=key)
        return None, NO_EFFECTS
    if not changed or not row["background"] or row["stop_reason"] is not None or notice is None:
        return row, NO_EFFECTS
    wake = Submission(
        run_id=f"wake:exec:{row['id']}",
        session=row["session"],
        session_key=row["session_key"],
        origin=WAKE_ORIGIN,
        message=UserMessage(
            content=notice,
            timestamp=now,
            provenance=Provenance(kind=COMMAND_END_KIND, source_tool="exec"),
        ),
        agent_id=row["agent_id"] if row["agent_id"] != session["agent_id"] else None,
    )
    return row, Effects.queue(await run_queue.submit_follow_up(tx, wake, now))


async def advance_reading(tx: Tx, key: str, call: str, until: int) -> tuple[int, int]:
    """Return which output a call reads: what is new since the last one. The same call reads the same again."""
    row = await tx.one(SQL.by_key, key=key)
    if row is None or row["read_call"] == call:
        return (row["read_from"], row["read_to"]) if row else (0, 0)
    start = min(row["read_to"], until)
    await tx.do(SQL.record_read, key=key, call=call, start=start, until=until)
    return start, until


async def remove_command(tx: Tx, key: str) -> None:
    """Hide a command from lists. Its key stays taken."""
    await tx.do(SQL.remove, key=key)


# --- stops ---


async def stop_command(tx: Tx, key: str, reason: str) -> None:
    """Request the stop of one command. Its end will not wake the session."""
    await tx.do(SQL.stop, key=key, reason=reason)


async def stop_commands_of_session(tx: Tx, session: int, reason: str) -> Effects:
    """Request the stop of all commands of a session."""
    live = await tx.all(SQL.live_of_session, session=session)
    return await _request_stops(tx, live, reason) if live else NO_EFFECTS


async def stop_commands_of_run(tx: Tx, run_id: str, reason: str, *, background: bool) -> Effects:
    """Request the stop of the commands that a run waits for, with `background` of all that it started."""
    rows = await tx.all(SQL.live_of_run, run_id=run_id)
    return await _request_stops(tx, [row for row in rows if background or not row["background"]], reason)


async def _request_stops(tx: Tx, rows: list[Row], reason: str) -> Effects:
    for row in rows:
        await tx.do(SQL.stop, key=row["key"], reason=reason)
    return Effects(tuple(CommandStopRequested(key=row["key"], host=row["host"]) for row in rows))


async def list_commands_to_stop(tx: Tx, host: str) -> dict[str, str]:
    """Return the running commands of a host that are to be stopped, with the reasons."""
    return {row["key"]: row["stop_reason"] for row in await tx.all(SQL.to_stop_of_host, host=host)}


# --- hosts ---


async def adopt_commands(tx: Tx, host: str, owner: str) -> list[Row]:
    """Return the running commands of a host, which this process monitors from now on."""
    await tx.do(SQL.adopt, host=host, owner=owner)
    return await tx.all(SQL.live_of_host, host=host)


async def has_live_commands(tx: Tx, host: str) -> bool:
    return bool(await tx.all(SQL.live_of_host, host=host))


async def list_commands_without_owner(tx: Tx, host: str, now: int) -> list[str]:
    """Return the running commands of other hosts that no process monitors."""
    return [row["key"] for row in await tx.all(SQL.without_owner, host=host, now=now)]


async def list_live_sessions(tx: Tx) -> list[Row]:
    """Return the sessions with commands that are starting or running, and whether those are sandboxed."""
    return await tx.all(SQL.live_sessions)


async def list_commands_given_up(tx: Tx, host: str, since: int) -> list[str]:
    """Return the commands of a host that were lost since a time."""
    return [row["key"] for row in await tx.all(SQL.given_up_of_host, host=host, since=since)]
