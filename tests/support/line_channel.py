"""What the channels of the crash and cluster tests have in common: texts are split, and posts are lines of a file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from antiphon.engine.outbox.delivery_channel import Pace, Part, Receipt, RenderedPart
from antiphon.engine.outbox.delivery_rows import Destination

PART_CHARACTERS = 10


def format_part(part: Part) -> str:
    return part.key if part.n == 1 else f"{part.key}#{part.n}"


@dataclass
class LineChannel:
    """A channel that splits long texts; a subclass sends."""

    posts: Path
    is_idempotent: bool
    can_find = False

    @property
    def idempotency_seconds(self) -> float:
        return float("inf") if self.is_idempotent else 0.0

    def is_ready(self, account_id: str | None) -> bool:
        return True

    def get_pace(self, destination: Destination) -> Pace:
        return Pace()

    def render(self, text: str, destination: Destination) -> list[RenderedPart]:
        return [RenderedPart(piece) for piece in re.findall(rf"(?s).{{1,{PART_CHARACTERS}}}", text)]

    async def find(self, part: Part, since: int) -> Receipt | None:
        return None
