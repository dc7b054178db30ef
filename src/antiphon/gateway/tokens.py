"""The tokens this gateway knows, in one private file of the state directory.

What a token may do stands in its record here and nowhere else. The owner's token is kept as it is, because the
commands on this machine read it from the file; every other one is kept as a digest and shown once, when issued.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Container, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

import msgspec

from antiphon.access import ADMIN, ALL_SCOPES
from antiphon.errors import Conflict, InvalidInput, NotFound, StoreError
from antiphon.store.statedir import explain

log = logging.getLogger(__name__)

NAME = "tokens.json"
LOCK = "tokens.lock"  # held by whoever changes the file, which is replaced and so cannot be locked itself
PATIENCE = 5.0  # seconds in which somebody else's change has to end
OWNER = "owner"
Mark = tuple[int, int, int]
NOTHING: Mark = (0, 0, 0)


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    scopes: list[str]
    digest: str
    token: str | None = None
    created_at: int | None = None
    last_used_at: int | None = None


class _File(msgspec.Struct, frozen=True):
    tokens: list[Record]


class Tokens:
    """The records of a file. Reading and writing it blocks: call from a thread, or before there is a loop."""

    def __init__(self, path: Path, records: Iterable[Record], seen: Mark = NOTHING) -> None:
        self._path = path
        self._seen = seen
        self._complained: Mark | None = None
        self.records = list(records)
        self.shared: list[Record] = []
        """Those of a database that replicas share; see `shared_tokens`."""
        self.used: set[str] = set()
        """Digests of the shared tokens used since the last update of the database."""

    def current(self) -> list[Record]:
        """The records as the file has them now: a token that was revoked is not let in any more.

        Never raises: while the file cannot be read, what was known before holds.
        """
        mark = _mark(self._path)
        if mark != self._seen:
            try:
                self._read_again()
            except StoreError as error:
                self._complain(mark, error)
        return [*self.records, *self.shared] if self.shared else self.records

    def _read_again(self) -> None:
        fresh = Tokens.read(self._path)
        self.records, self._seen, self._complained = fresh.records, fresh._seen, None

    def _complain(self, mark: Mark, error: StoreError) -> None:
        """Once for each state of the file: it is looked at with every request."""
        if mark != self._complained:
            log.warning("The tokens that were known before are still used. %s", error)
        self._complained = mark

    @classmethod
    def open(cls, state_dir: Path) -> Tokens:
        """The file of this directory, made with an owner's token if it is not there."""
        path = state_dir / NAME
        if not path.exists():
            tokens = cls(path, [])
            with tokens._alone():
                if not path.exists():
                    token = secrets.token_urlsafe(32)
                    tokens._write([_record(OWNER, [ADMIN], token, token)])
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Tokens:
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())  # before reading: a later change shows as another mark
                content = file.read()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise StoreError(
                f"The token file {str(path)!r} cannot be read ({reason}).",
                "Put it back, or let this user read it.",
            ) from error
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise StoreError(
                f"The token file {str(path)!r} can be read by others.",
                f"Make it private: chmod 600 {str(path)!r}; then replace its tokens if others may have seen them.",
            )
        try:
            return cls(path, msgspec.json.decode(content, type=_File).tokens, _marked(found))
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
        token, record = new_token(name, scopes)
        with self._alone():
            self._read_again()
            if any(record.name == name for record in self.records):
                raise Conflict(
                    f"There is a token named {name!r} already.", "Choose another name, or revoke that one."
                )
            self._write([*self.records, record])
        return token

    def revoke(self, name: str) -> None:
        with self._alone():
            self._read_again()
            left = [record for record in self.records if record.name != name]
            if len(left) == len(self.records):
                raise NotFound(f"There is no token named {name!r}.", "See `antiphon tokens list`.")
            self._write(left)

    def drop(self, digests: Container[str]) -> None:
        """Remove tokens that are stored elsewhere from now on; never the owner's."""
        with self._alone():
            self._read_again()
            self._write([it for it in self.records if it.token is not None or it.digest not in digests])

    @contextmanager
    def _alone(self) -> Generator[None]:
        """While the file is read and changed: of two that do so at once, one would undo the other's change."""
        lock = self._path.with_name(LOCK)
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise explain(error, lock.parent) from error
        try:
            _lock(file)
            yield
        finally:
            os.close(file)

    def _write(self, records: list[Record]) -> None:
        draft = self._path.with_name(f".{NAME}.{secrets.token_hex(4)}")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(_File(records))) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self._path)
        _sync(self._path.parent)
        self.records, self._seen = records, _mark(self._path)


def new_token(name: str, scopes: Iterable[str]) -> tuple[str, Record]:
    """A token, and what is stored of it."""
    wanted = list(dict.fromkeys(scopes))
    if unknown := set(wanted) - ALL_SCOPES:
        raise InvalidInput(
            f"{sorted(unknown)[0]!r} is not a scope.",
            f"Use {', '.join(sorted(ALL_SCOPES))}.",
            field="scope",
        )
    if not (0 < len(name) <= 64 and name.isprintable() and wanted):
        raise InvalidInput(
            "A token needs a name of 1 to 64 characters and a scope.", "Give both.", field="name"
        )
    token = secrets.token_urlsafe(32)
    return token, _record(name, wanted, token)


def _lock(file: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StoreError(
                    "Another command is changing the tokens and does not end.", "End it, then try again."
                ) from None
            time.sleep(0.01)


def _sync(directory: Path) -> None:
    """A name that was given is kept through a power cut only when its directory has been written."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _mark(path: Path) -> Mark:
    """By this it shows that the file was replaced. One look at an open directory, so it may be had in a loop."""
    try:
        return _marked(path.stat())
    except OSError:
        return NOTHING


def _marked(found: os.stat_result) -> Mark:
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _record(name: str, scopes: list[str], token: str, kept: str | None = None) -> Record:
    return Record(name=name, scopes=scopes, digest=_digest(token), token=kept)


def configured(token: str) -> Record:
    """The record of a token that the configuration sets: it is the owner's."""
    return _record(OWNER, [ADMIN], token)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
