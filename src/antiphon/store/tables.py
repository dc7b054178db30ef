"""Tables as values, for comparing a database with its copy in another: what a row amounts to, and what many do.

A row's digest is over its values, not over how a database keeps them. Their sum does not depend on the order of rows,
which two databases need not agree on, and a row that is missing or there twice changes it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

Value: TypeAlias = str | int | float | None
Key: TypeAlias = tuple[str | int, ...]
Kind: TypeAlias = Literal["integer", "real", "text", "words"]
"""`words` are kept as an index in one database and as a text in the other; they are not compared."""

NUL, INSTEAD = "\0", "\ufffd"  # PostgreSQL has no text with that character
_DIGEST = 16  # bytes of a row's digest that are used
_TAGS: dict[Kind, bytes] = {"integer": b"\1", "real": b"\2", "text": b"\3"}
_NOTHING = b"\0"


class Column(msgspec.Struct, frozen=True):
    name: str
    kind: Kind


class Table(msgspec.Struct, frozen=True):
    """`key` names the columns of its primary key, by which its rows are read."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def key_of(self, row: Sequence[Value]) -> Key:
        names = self.names
        return tuple(part for name in self.key if isinstance(part := row[names.index(name)], str | int))


class Sum(msgspec.Struct):
    """How many rows there are and what they amount to."""

    rows: int = 0
    digest: int = 0

    def add(self, digest: bytes) -> None:
        self.rows += 1
        self.digest = (self.digest + int.from_bytes(digest[:_DIGEST])) % (1 << 8 * _DIGEST)

    def plus(self, other: Sum) -> Sum:
        return Sum(self.rows + other.rows, (self.digest + other.digest) % (1 << 8 * _DIGEST))


def digest_of(table: Table, row: Sequence[Value]) -> bytes:
    pairs = zip(table.columns, row, strict=True)
    return hashlib.sha256(
        b"".join(_bytes(value) for column, value in pairs if column.kind != "words")
    ).digest()


def digest_in_postgres(table: Table) -> str:
    """The same as an expression there."""
    return f"sha256({' || '.join(_expression(column) for column in table.columns if column.kind != 'words')})"


def _bytes(value: Value) -> bytes:
    match value:
        case None:
            return _NOTHING
        case str():
            text = value.encode()
            return _TAGS["text"] + struct.pack(">i", len(text)) + text
        case float():
            return _TAGS["real"] + struct.pack(">d", value)
        case _:
            return _TAGS["integer"] + struct.pack(">q", value)


def _expression(column: Column) -> str:
    name = quoted(column.name)
    sent = {
        "integer": f"int8send(CAST({name} AS BIGINT))",
        "real": f"float8send({name})",
        "text": f"int4send(octet_length({name})) || convert_to({name}, 'UTF8')",
    }[column.kind]
    return rf"coalesce('\x{_TAGS[column.kind].hex()}'::bytea || {sent}, '\x{_NOTHING.hex()}'::bytea)"


def quoted(*names: str) -> str:
    """Names of tables or columns, as both databases take them."""
    return ", ".join(f'"{name}"' for name in names)
