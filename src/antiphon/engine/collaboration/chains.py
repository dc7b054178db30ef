"""Chains: all runs that one message has caused, and the waits between their sessions.

A run that was caused by another session carries its chain and its number of hops from the start. Whatever the topology,
a chain is limited in hops and in runs. A wait is an edge between two sessions that counts only while both runs are
active, so it becomes void without any cleanup.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from antiphon.errors import ChainTooLong, WaitCycle
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("chains")
SESSIONS_SQL = Queries("sessions")
MAX_SESSIONS_SEARCHED = 1000  # for a wait cycle; more cannot wait for each other within a chain's hops


HIDDEN_SESSION_TEXT = "(hidden session)"  # replaces the key of a session that the caller may not see


def _hide_session(session: Row) -> str:
    return HIDDEN_SESSION_TEXT


class ChainLimits(NamedTuple):
    hops: int = 12
    runs: int = 1000


class ChainLink(NamedTuple):
    """The position of a message in its chain."""

    chain: str
    hop: int


async def extend_chain(
    tx: Tx, run_id: str | None, session: int | None, new_chain: str, limits: ChainLimits
) -> ChainLink:
    """Return the link after a run of this session; the first link of the chain `new_chain` if no such run is active.

    Raises:
        ChainTooLong: the link would exceed the limit of hops or runs.
    """
    row = await load_active_run(tx, run_id, session)
    if row is None:
        return ChainLink(new_chain, 1)
    chain, hop = row["chain"] or new_chain, row["hop"] + 1
    if hop > limits.hops:
        raise ChainTooLong(
            f"This chain of messages between sessions is at its limit of {limits.hops} hops.",
            "Answer with what is known instead of passing it on.",
            chain_id=chain,
            hop=hop,
            max=limits.hops,
        )
    length = await tx.one(SQL.length, id=chain)
    if length is not None and length["runs"] >= limits.runs:
        raise ChainTooLong(
            f"This chain of messages between sessions is at its limit of {limits.runs} runs.",
            "Answer with what is known instead of asking more sessions.",
            chain_id=chain,
            runs=length["runs"],
            max=limits.runs,
        )
    return ChainLink(chain, hop)


async def load_active_run(tx: Tx, run_id: str | None, session: int | None) -> Row | None:
    """Return the run if it belongs to this session and has not ended."""
    if run_id is None or session is None:
        return None
    return await tx.one(SQL.position_of_run, run_id=run_id, session=session)


async def record_wait(
    tx: Tx,
    run: int,
    session: int,
    awaited: str,
    target: int,
    until: int,
    now: int,
    describe: Callable[[Row], str] = _hide_session,
) -> None:
    """Record that a run waits for a run of another session.

    `describe` returns the text for a session between the two ends of a cycle, which may be hidden from the caller. Its
    argument is a row as `session_rows.find_session` returns it, with `descendant` relative to the waiting session.

    Raises:
        WaitCycle: the other session waits, directly or indirectly, for this one.
    """
    await tx.lock(f"waits:{session}")
    path = await _find_wait_path(tx, target, session, now)
    if path is not None:
        path = await _describe_path(tx, path, describe)
        raise WaitCycle(
            f"Waiting would create a cycle: {' waits for '.join(map(repr, path))}.",
            "Send with timeoutSeconds 0, or answer first.",
            path=path,
        )
    await tx.do(SQL.record_wait, run=run, session=session, awaited=awaited, target=target, until=until)


async def delete_expired_waits(tx: Tx, now: int) -> None:
    """Delete waits that have timed out. They no longer counted as edges, so this only shrinks the table."""
    await tx.do(SQL.delete_expired_waits, now=now)


async def _describe_path(tx: Tx, path: list[str], describe: Callable[[Row], str]) -> list[str]:
    first, *between, own = path
    rows = [await tx.one(SESSIONS_SQL.by_key, key=key, viewer=own) for key in between]
    return [first, *(describe(row) if row else HIDDEN_SESSION_TEXT for row in rows), own]


async def _find_wait_path(tx: Tx, start: int, goal: int, now: int) -> list[str] | None:
    """Return the keys along a path of waits between two sessions, both included; None if no path exists."""
    first = await tx.one(SESSIONS_SQL.key_by_id, id=start)
    paths: dict[int, list[str]] = {start: [first["key"]] if first else []}
    queue = [start]
    for session in queue:
        await tx.lock(f"waits:{session}")  # two concurrent waits could otherwise close a cycle unseen
        for row in await tx.all(SQL.active_waits, session=session, now=now):
            path_here = [*paths[session], row["key"]]
            if row["target"] == goal:
                return path_here
            if row["target"] not in paths and len(paths) < MAX_SESSIONS_SEARCHED:
                paths[row["target"]] = path_here
                queue.append(row["target"])
    return None
