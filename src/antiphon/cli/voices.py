"""Names for the speakers of transcript entries, as people see them.

A person is `you`, the session's agent is shown by its id, and another session by a double arrow and its name, with the
turn if the two are in an exchange: `↔ helper, turn 2/5`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from antiphon.cli.output import agent_or_key, line
from antiphon.errors import AntiphonError

if TYPE_CHECKING:
    from antiphon.cli.desk import Desk
    from antiphon.views import ExchangeView

REPORT = "subagent_result"
STEPS = {"announce_step": "announce step", "wake": "wake"}
"""What this house itself says to a session so that it goes on. Nobody is addressed by it."""
TURN_PREFIX = "turn:"  # of the ids of runs that answer a reply of another session

Item = Mapping[str, Any]


class Known(msgspec.Struct):
    """What has been looked up about the speakers in one session."""

    session_key: str = ""
    """The session whose entries are shown."""
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Labels of sub-agents by session key."""
    exchanges: dict[str, ExchangeView | None] = msgspec.field(
        default_factory=dict[str, "ExchangeView | None"]
    )

    @property
    def agent(self) -> str:
        """The id of the agent that answers in this session."""
        kind, _, rest = self.session_key.partition(":")
        return rest.partition(":")[0] if kind == "agent" else "agent"


def provenance(item: Item) -> Mapping[str, Any]:
    """Where an entry came from, if nobody typed it into this session."""
    given = item.get("provenance")
    return cast("Mapping[str, Any]", given) if isinstance(given, dict) else {}


def is_step(item: Item) -> bool:
    return str(provenance(item).get("kind")) in STEPS


def speaker(item: Item, known: Known) -> str | None:
    """The speaker of an entry that came from elsewhere; None if it was typed or answered in this session."""
    given = provenance(item)
    kind, source = given.get("kind"), str(given.get("sourceSessionKey") or "")
    if not kind:
        return None
    if kind == REPORT:
        return line(f"report from {known.labels.get(source) or source or 'a sub-agent'}")
    if str(kind) in STEPS:
        return STEPS[str(kind)]
    if not source:
        return line(str(kind))
    exchange_id, turn = _place(item)
    # A turn begins with what the other side said in the previous turn.
    return line(f"↔ {_short_name(source, known.labels)}{_turn_of(exchange_id, turn - 1, known)}")


def answerer(item: Item, known: Known, agent: str) -> str:
    """The speaker of an answer given in this session, and the other session if it was not for a person."""
    if provenance(item):
        return speaker(item, known) or line(agent)
    exchange_id, turn = _place(item)
    exchange = known.exchanges.get(exchange_id)
    if exchange is None:
        return line(agent)
    other = exchange.requester_session_key or "an operator"
    if other == known.session_key:
        other = exchange.target_session_key
    return line(f"{agent} ↔ {_short_name(other, known.labels)}{_turn_of(exchange_id, turn, known)}")


def heading(item: Item, known: Known, agent: str | None = None) -> str:
    """What an entry begins with in a list of them."""
    agent = agent or known.agent
    match item.get("role"):
        case "user":
            name = speaker(item, known) or "you"
        case "assistant":
            name = answerer(item, known, agent)
        case "toolResult":
            name = f"{item.get('toolName') or 'tool'} {'failed' if item.get('isError') else 'returned'}"
        case "compaction":
            name = "summary"
        case other:
            name = str(other)
    return f"{line(name)}>"


def _place(item: Item) -> tuple[str, int]:
    """The exchange that an entry belongs to, and its turn; 0 is the first answer."""
    run_id = str(item.get("runId") or "")
    if run_id.startswith(TURN_PREFIX):
        exchange_id, _, turn = run_id.removeprefix(TURN_PREFIX).rpartition(":")
        return exchange_id, int(turn) if turn.isdecimal() else 0
    return str(provenance(item).get("exchangeId") or run_id), 0


def _turn_of(exchange_id: str, turn: int, known: Known) -> str:
    if turn < 1:
        return ""
    exchange = known.exchanges.get(exchange_id)
    return f", turn {turn}/{exchange.turns}" if exchange else f", turn {turn}"


def _short_name(key: str, labels: Mapping[str, str]) -> str:
    return labels.get(key) or agent_or_key(key)


async def look_up_speakers(desk: Desk, items: Iterable[Item], known: Known) -> None:
    """Look up the speakers of these entries; a session that no longer exists is shown by its key."""
    for item in items:
        given = provenance(item)
        if given.get("kind") == REPORT:
            key = str(given.get("sourceSessionKey"))
            if key not in known.labels:
                known.labels[key] = await _label(desk, key)
        exchange_id, turn = _place(item)
        if (turn or given.get("exchangeId")) and exchange_id not in known.exchanges:
            known.exchanges[exchange_id] = await _exchange(desk, exchange_id)


async def _label(desk: Desk, key: str) -> str:
    try:
        return (await desk.describe(key)).label or key
    except AntiphonError:
        return key


async def _exchange(desk: Desk, exchange_id: str) -> ExchangeView | None:
    try:
        return (await desk.exchange(exchange_id)).exchange
    except AntiphonError:  # also for a token that may read only some sessions
        return None
