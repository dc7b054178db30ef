"""Who speaks in an entry of a transcript, by a name that a person knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from antiphon.cli.output import line
from antiphon.errors import AntiphonError

if TYPE_CHECKING:
    from antiphon.cli.desk import Desk

REPORT = "subagent_result"
STEPS = {"announce_step": "announce step", "wake": "wake"}
"""What this house itself says to a session so that it goes on. Nobody is addressed by it."""

Item = Mapping[str, Any]
Labels = dict[str, str]
"""Sessions of sub-agents, and what they were called by whoever wanted them."""


def provenance(item: Item) -> Mapping[str, Any]:
    """Where an entry came from, if nobody typed it into this session."""
    given = item.get("provenance")
    return cast("Mapping[str, Any]", given) if isinstance(given, dict) else {}


def is_step(item: Item) -> bool:
    return str(provenance(item).get("kind")) in STEPS


def speaker(item: Item, labels: Labels) -> str | None:
    """Somebody other than the two who talk here, if it is somebody else."""
    given = provenance(item)
    kind, source = given.get("kind"), str(given.get("sourceSessionKey") or "")
    if not kind:
        return None
    if kind == REPORT:
        return line(f"report from {labels.get(source) or source or 'a sub-agent'}")
    return line(STEPS.get(str(kind)) or source or str(kind))


def heading(item: Item, labels: Labels) -> str:
    """What an entry begins with in a list of them."""
    name = speaker(item, labels)
    if name is not None:
        return f"{name}>"
    failed = " (failed)" if item.get("isError") else ""
    return f"{line(str(item.get('role')))}{failed}:"


async def learn(desk: Desk, items: Iterable[Item], labels: Labels) -> None:
    """Look up whoever reports in these entries; one that is gone goes by its key."""
    reports = [given for given in map(provenance, items) if given.get("kind") == REPORT]
    for key in {str(given.get("sourceSessionKey")) for given in reports} - labels.keys():
        try:
            labels[key] = (await desk.describe(key)).label or key
        except AntiphonError:
            labels[key] = key
