"""Commands that are carried out once: what their idempotency keys stand for, and what was answered.

A message has its run for that. A command may remove what it is about, so that its key is kept apart from everything
else, and in the commit that carries it out: for ever, unless retention is set. Messages and commands share their keys:
whichever is second to use one is refused.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from antiphon.errors import Conflict
from antiphon.store import Tx
from antiphon.store.queries import Queries

SQL = Queries("commands")
T = TypeVar("T")


class IdempotentCommand(msgspec.Struct, frozen=True):
    """What is asked under a key: all that makes it this request and no other. Without a key it is always new."""

    key: str | None
    asked: tuple[Any, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.asked)).hexdigest()[:32]


async def load_recorded_answer(tx: Tx, command: IdempotentCommand, kind: type[T]) -> T | None:
    """What was answered when this was carried out before; None when it is new.

    Raises:
        Conflict: the key stands for something else.
    """
    if command.key is None:
        return None
    before = await tx.one(SQL.known, id=command.key)
    if before is None:
        return None
    if before["digest"] != command.digest:
        raise Conflict(
            f"The idempotency key {command.key!r} was already used for something else.",
            "Use a new key for a new request.",
            field="idempotencyKey",
        )
    return msgspec.json.decode(before["answer"], type=kind)


async def record_answer(tx: Tx, command: IdempotentCommand, answer: Any, now: int) -> None:
    """It is carried out in this commit."""
    if command.key is not None:
        text = msgspec.json.encode(answer).decode()
        await tx.do(SQL.record, id=command.key, digest=command.digest, answer=text, now=now)
