"""Digests of rows and tables, for comparing a database with its copy in another.

A row's digest covers its values, not how a database stores them. The sum over a table does not depend on the order
of rows, which may differ between databases; a missing or duplicate row changes it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

ColumnValue: TypeAlias = str | int | float | None
RowKey: TypeAlias = tuple[str | int, ...]
ColumnKind: TypeAlias = Literal["integer", "real", "text", "words"]
"""`words` are an index in one database and a text in the other; they are not compared."""

NUL_CHARACTER, NUL_REPLACEMENT = "\0", "\ufffd"  # PostgreSQL cannot store NUL in a text
_DIGEST_BYTES = 16  # bytes of a row's digest that are used
_TYPE_TAGS: dict[ColumnKind, bytes] = {"integer": b"\1", "real": b"\2", "text": b"\3"}
_NULL_TAG = b"\0"


class Column(msgspec.Struct, frozen=True):
    name: str
    kind: ColumnKind


class Table(msgspec.Struct, frozen=True):
    """A table. `key` names the columns of its primary key, which its rows are read by."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def get_key(self, row: Sequence[ColumnValue]) -> RowKey:
        names = self.names
        return tuple(part for name in self.key if isinstance(part := row[names.index(name)], str | int))


class DigestSum(msgspec.Struct):
    """The number of rows and the sum of their digests."""

    rows: int = 0
    digest: int = 0

    def add(self, digest: bytes) -> None:
        self.rows += 1
        self.digest = (self.digest + int.from_bytes(digest[:_DIGEST_BYTES])) % (1 << 8 * _DIGEST_BYTES)

    def combine(self, other: DigestSum) -> DigestSum:
        return DigestSum(self.rows + other.rows, (self.digest + other.digest) % (1 << 8 * _DIGEST_BYTES))


def compute_digest(table: Table, row: Sequence[ColumnValue]) -> bytes:
    pairs = zip(table.columns, row, strict=True)
    return hashlib.sha256(
        b"".join(_encode_value(value) for column, value in pairs if column.kind != "words")
    ).digest()


def build_digest_expression(table: Table) -> str:
    """The SQL expression with which PostgreSQL computes `compute_digest`."""
    columns = [_build_column_expression(column) for column in table.columns if column.kind != "words"]
    return f"sha256({' || '.join(columns)})"


def _encode_value(value: ColumnValue) -> bytes:
    match value:
        case None:
            return _NULL_TAG
        case str():
            text = value.encode()
            return _TYPE_TAGS["text"] + struct.pack(">i", len(text)) + text
        case float():
            return _TYPE_TAGS["real"] + struct.pack(">d", value)
        case _:
            return _TYPE_TAGS["integer"] + struct.pack(">q", value)


def _build_column_expression(column: Column) -> str:
    name = quote_names(column.name)
    sent = {
        "integer": f"int8send(CAST({name} AS BIGINT))",
        "real": f"float8send({name})",
        "text": f"int4send(octet_length({name})) || convert_to({name}, 'UTF8')",
    }[column.kind]
    return rf"coalesce('\x{_TYPE_TAGS[column.kind].hex()}'::bytea || {sent}, '\x{_NULL_TAG.hex()}'::bytea)"


def quote_names(*names: str) -> str:
    """Names of tables or columns, quoted for both databases."""
    return ", ".join(f'"{name}"' for name in names)
