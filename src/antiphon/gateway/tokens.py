"""The tokens this gateway knows, in one private file of the state directory.

What a token may do stands in its record here and nowhere else. The owner's token is kept as it is, because the
commands on this machine read it from the file; every other one is kept as a digest and shown once, when issued.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

import msgspec

from antiphon.access import ADMIN, ALL_SCOPES
from antiphon.errors import Conflict, InvalidInput, NotFound, StoreError

NAME = "tokens.json"
OWNER = "owner"


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    scopes: list[str]
    digest: str
    token: str | None = None


class _File(msgspec.Struct, frozen=True):
    tokens: list[Record]


class Tokens:
    """The records of a file. Reading and writing it blocks: call from a thread, or before there is a loop."""

    def __init__(self, path: Path, records: Iterable[Record]) -> None:
        self._path = path
        self._seen = _mark(path)
        self.records = list(records)

    def current(self) -> list[Record]:
        """The records as the file has them now: a token that was revoked is not let in any more."""
        if _mark(self._path) != self._seen:
            fresh = Tokens.read(self._path)
            self.records, self._seen = fresh.records, fresh._seen
        return self.records

    @classmethod
    def open(cls, state_dir: Path) -> Tokens:
        """The file of this directory, made with an owner's token if it is not there."""
        path = state_dir / NAME
        if not path.exists():
            tokens = cls(path, [])
            tokens._keep(_record(OWNER, [ADMIN], token := secrets.token_urlsafe(32), token))
            return tokens
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise StoreError(
                f"The token file {str(path)!r} can be read by others.",
                f"Make it private: chmod 600 {str(path)!r}; then replace its tokens if others may have seen them.",
            )
        try:
            return cls(path, msgspec.json.decode(path.read_bytes(), type=_File).tokens)
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"The token file {str(path)!r} cannot be read.", "Move it away; a new one is made at start."
            ) from error

    @property
    def owner(self) -> str | None:
        """The owner's token itself."""
        return next((record.token for record in self.records if record.token), None)

    @staticmethod
    def match(records: Iterable[Record], token: str) -> Record | None:
        """The record of a token. Every record is compared, so that time tells nothing."""
        digest = _digest(token)
        found = [record for record in records if hmac.compare_digest(record.digest, digest)]
        return found[0] if found else None

    def issue(self, name: str, scopes: Iterable[str]) -> str:
        """A new token, which is not kept and cannot be shown again."""
        wanted = list(dict.fromkeys(scopes))
        if unknown := set(wanted) - ALL_SCOPES:
            raise InvalidInput(
                f"There is no scope {sorted(unknown)[0]!r}.",
                f"Use {', '.join(sorted(ALL_SCOPES))}.",
                field="scope",
            )
        if not (0 < len(name) <= 64 and name.isprintable() and wanted):
            raise InvalidInput(
                "A token needs a name of 1 to 64 characters and a scope.", "Give both.", field="name"
            )
        if any(record.name == name for record in self.records):
            raise Conflict(
                f"There is a token named {name!r} already.", "Choose another name, or revoke that one."
            )
        self._keep(_record(name, wanted, token := secrets.token_urlsafe(32)))
        return token

    def revoke(self, name: str) -> None:
        left = [record for record in self.records if record.name != name]
        if len(left) == len(self.records):
            raise NotFound(f"There is no token named {name!r}.", "See `antiphon tokens list`.")
        self.records = left
        self._write()

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._write()

    def _write(self) -> None:
        draft = self._path.with_name(f".{NAME}.{secrets.token_hex(4)}")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(_File(self.records))) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self._path)
        self._seen = _mark(self._path)


def _mark(path: Path) -> tuple[int, int]:
    """By this it shows that the file was replaced. One look at an open directory, so it may be had in a loop."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _record(name: str, scopes: list[str], token: str, kept: str | None = None) -> Record:
    return Record(name=name, scopes=scopes, digest=_digest(token), token=kept)


def configured(token: str) -> Record:
    """The record of a token that the configuration sets: it is the owner's."""
    return _record(OWNER, [ADMIN], token)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
