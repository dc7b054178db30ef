"""Idempotency keys of commands, with the recorded answers.

For a message, its run serves this purpose. A command may remove its own subject, so its key is stored separately, in
the commit that executes the command, and kept forever unless retention is set. Messages and commands share one key
space: a key used by one is refused for the other.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec

from antiphon.errors import Conflict
from antiphon.store import Tx
from antiphon.store.queries import Queries

SQL = Queries("idempotency")
T = TypeVar("T")


class IdempotentCommand(msgspec.Struct, frozen=True):
    """A request and its idempotency key. `request` identifies what is requested; without a key it is always new."""

    key: str | None
    request: tuple[Any, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self.request)).hexdigest()[:32]


async def load_recorded_answer(tx: Tx, command: IdempotentCommand, kind: type[T]) -> T | None:
    """Return the answer recorded for this command; None if the command is new.

    Raises:
        Conflict: the key was used for another request.
    """
    if command.key is None:
        return None
    recorded = await tx.one(SQL.find_by_id, id=command.key)
    if recorded is None:
        return None
    if recorded["digest"] != command.digest:
        raise Conflict(
            f"The idempotency key {command.key!r} was already used for another request.",
            "Use a new key for a new request.",
            field="idempotencyKey",
        )
    return msgspec.json.decode(recorded["answer"], type=kind)


async def record_answer(tx: Tx, command: IdempotentCommand, answer: Any, now: int) -> None:
    """Record the answer of a command that is executed in this commit."""
    if command.key is not None:
        text = msgspec.json.encode(answer).decode()
        await tx.do(SQL.record, id=command.key, digest=command.digest, answer=text, now=now)
