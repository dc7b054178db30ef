"""Names for the speakers of transcript entries, as people see them.

A person is `you`, the session's agent is shown by its id, and another session by a double arrow and its name, with the
turn if the two are in an exchange: `↔ helper, turn 2/5`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from antiphon.cli._output import clean_line, shorten_session_key
from antiphon.errors import AntiphonError

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend
    from antiphon.operations.collaboration_types import ExchangeView

OTHER_CLIENT_SPEAKER = "you (elsewhere)"  # of a message that was typed into this session, in another client
REPORT_KIND = "subagent_result"
INTERNAL_STEP_NAMES = {"announce_step": "announce step", "wake": "wake"}
"""Messages by which Antiphon itself makes a session continue; they address no other session."""
_NAME_BY_KIND = {
    "inter_session": "operator",
    "message": "operator",
    "steer": "operator",
    "spawn": "operator",
    "command_end": "background command",
    "cron": "cron job",
    "hook": "web hook",
    "external": "another program",
}
"""Names of speakers that are no session, by kind of provenance."""
UNATTENDED_KINDS = ("cron", "hook")
"""Kinds of provenance, and of session keys, whose sessions are named by what started them."""
TURN_PREFIX = "turn:"  # prefix of the ids of runs that answer another session's reply

TranscriptItem = Mapping[str, Any]


class KnownSpeakers(msgspec.Struct):
    """Names of speakers looked up so far for one session."""

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


def get_provenance(item: TranscriptItem) -> Mapping[str, Any]:
    """Return the provenance of an entry; empty if it was typed into this session."""
    provenance = item.get("provenance")
    return cast("Mapping[str, Any]", provenance) if isinstance(provenance, dict) else {}


def is_internal_step(item: TranscriptItem) -> bool:
    return str(get_provenance(item).get("kind")) in INTERNAL_STEP_NAMES


def format_speaker(item: TranscriptItem, known: KnownSpeakers) -> str | None:
    """Return the speaker of an entry that came from elsewhere; None if it was typed or answered in this session."""
    provenance = get_provenance(item)
    kind, source = provenance.get("kind"), str(provenance.get("sourceSessionKey") or "")
    if not kind:
        return None
    if kind == REPORT_KIND:
        return clean_line(f"report from {known.labels.get(source) or source or 'a sub-agent'}")
    if str(kind) in INTERNAL_STEP_NAMES:
        return INTERNAL_STEP_NAMES[str(kind)]
    if not source:
        return _NAME_BY_KIND.get(str(kind)) or clean_line(str(kind))
    if kind in UNATTENDED_KINDS:
        return clean_line(known.labels.get(source) or _NAME_BY_KIND[str(kind)])
    exchange_id, turn = _get_exchange_turn(item)
    # A turn begins with the other side's message of the previous turn.
    return clean_line(f"↔ {_shorten_name(source, known.labels)}{_format_turn(exchange_id, turn - 1, known)}")


def format_answerer(item: TranscriptItem, known: KnownSpeakers, agent: str) -> str:
    """Return the speaker of an answer in this session, with the other session if it was not for a person."""
    if get_provenance(item):
        return format_speaker(item, known) or clean_line(agent)
    exchange_id, turn = _get_exchange_turn(item)
    exchange = known.exchanges.get(exchange_id)
    if exchange is None:
        return clean_line(agent)
    other = exchange.requester_session_key or "an operator"
    if other == known.session_key:
        other = exchange.target_session_key
    return clean_line(
        f"{agent} ↔ {_shorten_name(other, known.labels)}{_format_turn(exchange_id, turn, known)}"
    )


def format_heading(item: TranscriptItem, known: KnownSpeakers, agent: str | None = None) -> str:
    """Return the heading of an entry in a list."""
    agent = agent or known.agent
    match item.get("role"):
        case "user":
            name = format_speaker(item, known) or "you"
        case "assistant":
            name = format_answerer(item, known, agent)
        case "toolResult":
            name = f"{item.get('toolName') or 'tool'} {'failed' if item.get('isError') else 'returned'}"
        case "compaction":
            name = "summary"
        case other:
            name = str(other)
    return f"{clean_line(name)}>"


def _get_exchange_turn(item: TranscriptItem) -> tuple[str, int]:
    """Return the exchange that an entry belongs to, and its turn; 0 is the first answer."""
    run_id = str(item.get("runId") or "")
    if run_id.startswith(TURN_PREFIX):
        exchange_id, _, turn = run_id.removeprefix(TURN_PREFIX).rpartition(":")
        return exchange_id, int(turn) if turn.isdecimal() else 0
    return str(get_provenance(item).get("exchangeId") or run_id), 0


def _format_turn(exchange_id: str, turn: int, known: KnownSpeakers) -> str:
    if turn < 1:
        return ""
    exchange = known.exchanges.get(exchange_id)
    return f", turn {turn}/{exchange.turns}" if exchange else f", turn {turn}"


def _shorten_name(key: str, labels: Mapping[str, str]) -> str:
    return labels.get(key) or shorten_session_key(key)


def _get_starter(key: str) -> str | None:
    """Return `cron` or `hook` for the key of a session that one of them started."""
    parts = key.split(":")
    return parts[2] if len(parts) > 3 and parts[0] == "agent" and parts[2] in UNATTENDED_KINDS else None


async def look_up_speakers(backend: Backend, items: Iterable[TranscriptItem], known: KnownSpeakers) -> None:
    """Look up the speakers of these entries; a session that no longer exists is shown by its key or the end of it."""
    for item in items:
        provenance = get_provenance(item)
        source = str(provenance.get("sourceSessionKey") or "")
        starter = _get_starter(source)
        if source and source not in known.labels and (starter or provenance.get("kind") == REPORT_KIND):
            label = await _load_label(backend, source)
            known.labels[source] = f"{starter} {label.split(':', 3)[-1]}" if starter else label
        exchange_id, turn = _get_exchange_turn(item)
        if (turn or provenance.get("exchangeId")) and exchange_id not in known.exchanges:
            known.exchanges[exchange_id] = await _load_exchange(backend, exchange_id)


async def look_up_page_speakers(
    backend: Backend, items: Sequence[TranscriptItem], known: KnownSpeakers
) -> None:
    """Look up the speakers of a page, also of answers whose question is not on the page."""
    await look_up_speakers(backend, items, known)
    asked = {item.get("runId") for item in items if item.get("role") == "user"}
    for item in items:
        run_id = item.get("runId")
        if item.get("role") == "assistant" and run_id and run_id not in asked | known.exchanges.keys():
            exchange = await _load_exchange(backend, run_id)
            # The first run of an exchange has its id; a chosen id of another run may be the beginning of one.
            known.exchanges[run_id] = exchange if exchange and exchange.id == run_id else None


async def _load_label(backend: Backend, key: str) -> str:
    try:
        session = await backend.describe(key)
        return session.label or session.display_name or key
    except AntiphonError:
        return key


async def _load_exchange(backend: Backend, exchange_id: str) -> ExchangeView | None:
    try:
        return (await backend.get_exchange(exchange_id)).exchange
    except AntiphonError:  # also raised for a token that may read only some sessions
        return None
