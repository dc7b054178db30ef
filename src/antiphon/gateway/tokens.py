"""The gateway's tokens, in one private file of the state directory.

The record of a token alone defines its scopes. The owner's token is stored in plain text, because commands on this
machine read it from the file; of every other token only a digest is stored, and it is shown once, when issued.
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

from antiphon.access import ADMIN_SCOPE, ALL_SCOPES
from antiphon.errors import Conflict, InvalidInput, NotFound, StoreError
from antiphon.store.statedir import translate_os_error

log = logging.getLogger(__name__)

TOKEN_FILE_NAME = "tokens.json"  # noqa: S105
# Held during changes; the token file itself is replaced, so it cannot be locked.
LOCK_FILE_NAME = "tokens.lock"
LOCK_TIMEOUT_SECONDS = 5.0  # for a concurrent change to finish
OWNER_TOKEN_NAME = "owner"  # noqa: S105
FileVersion = tuple[int, int, int]
NO_FILE_VERSION: FileVersion = (0, 0, 0)


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    scopes: list[str]
    digest: str
    token: str | None = None
    created_at: int | None = None
    last_used_at: int | None = None


class _TokenFile(msgspec.Struct, frozen=True):
    tokens: list[TokenRecord]


class TokenRegistry:
    """The records of a token file. Reading and writing block: call from a thread, or before the event loop runs."""

    def __init__(
        self, path: Path, records: Iterable[TokenRecord], seen: FileVersion = NO_FILE_VERSION
    ) -> None:
        self._path = path
        self._seen_version = seen
        self._warned_version: FileVersion | None = None
        self.records = list(records)
        self.shared_records: list[TokenRecord] = []
        """Records from the database that replicas share; see `shared_tokens`."""
        self.used_digests: set[str] = set()
        """Digests of the shared tokens used since the last update of the database."""

    def load_current_records(self) -> list[TokenRecord]:
        """Return the records that the file has now, without tokens revoked since.

        Never raises: while the file cannot be read, the last known records apply.
        """
        version = _read_file_version(self._path)
        if version != self._seen_version:
            try:
                self._reload()
            except StoreError as error:
                self._warn_once(version, error)
        return [*self.records, *self.shared_records] if self.shared_records else self.records

    def _reload(self) -> None:
        fresh = TokenRegistry.read(self._path)
        self.records, self._seen_version, self._warned_version = fresh.records, fresh._seen_version, None

    def _warn_once(self, version: FileVersion, error: StoreError) -> None:
        """Log an unreadable file once per version; it is checked with every request."""
        if version != self._warned_version:
            log.warning("Token file could not be read; the tokens known before stay valid. %s", error)
        self._warned_version = version

    @classmethod
    def open(cls, state_dir: Path) -> TokenRegistry:
        """Open the token file of this directory; create it with an owner's token if it does not exist."""
        path = state_dir / TOKEN_FILE_NAME
        if not path.exists():
            tokens = cls(path, [])
            with tokens._hold_lock():
                if not path.exists():
                    token = secrets.token_urlsafe(32)
                    tokens._write_records([_build_record(OWNER_TOKEN_NAME, [ADMIN_SCOPE], token, token)])
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> TokenRegistry:
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())  # before reading, so that a later change has another version
                content = file.read()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise StoreError(
                f"The token file {str(path)!r} could not be read ({reason}).",
                "Restore it, or give this user permission to read it.",
            ) from error
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise StoreError(
                f"The token file {str(path)!r} can be read by others.",
                f"Make it private: chmod 600 {str(path)!r}; then replace its tokens if others may have seen them.",
            )
        try:
            return cls(path, msgspec.json.decode(content, type=_TokenFile).tokens, _get_file_version(found))
        except msgspec.MsgspecError as error:
            raise StoreError(
                f"The token file {str(path)!r} is not valid JSON.",
                "Move it away; a new one is created at the next start.",
            ) from error

    @property
    def owner_token(self) -> str | None:
        """The owner's token in plain text."""
        return next((record.token for record in self.records if record.token), None)

    @staticmethod
    def find_record(records: Iterable[TokenRecord], token: str) -> TokenRecord | None:
        """Return the record of a token. All records are compared, so that timing reveals nothing."""
        digest = _hash_token(token)
        found = [record for record in records if hmac.compare_digest(record.digest, digest)]
        return found[0] if found else None

    def issue_token(self, name: str, scopes: Iterable[str]) -> str:
        """Issue and return a new token. Only its digest is stored, so it cannot be shown again."""
        token, record = create_token(name, scopes)
        with self._hold_lock():
            self._reload()
            if any(record.name == name for record in self.records):
                raise Conflict(
                    f"A token named {name!r} already exists.", "Choose another name, or revoke that one."
                )
            self._write_records([*self.records, record])
        return token

    def revoke_token(self, name: str) -> None:
        with self._hold_lock():
            self._reload()
            left = [record for record in self.records if record.name != name]
            if len(left) == len(self.records):
                raise NotFound(f"No token is named {name!r}.", "See `antiphon tokens list`.")
            self._write_records(left)

    def remove_tokens(self, digests: Container[str]) -> None:
        """Remove tokens that are stored elsewhere from now on; never the owner's."""
        with self._hold_lock():
            self._reload()
            self._write_records(
                [it for it in self.records if it.token is not None or it.digest not in digests]
            )

    @contextmanager
    def _hold_lock(self) -> Generator[None]:
        """Hold the lock file while the token file is read and changed, so that no concurrent change is lost."""
        lock = self._path.with_name(LOCK_FILE_NAME)
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translate_os_error(error, lock.parent) from error
        try:
            _acquire_lock(file)
            yield
        finally:
            os.close(file)

    def _write_records(self, records: list[TokenRecord]) -> None:
        draft = self._path.with_name(f".{TOKEN_FILE_NAME}.{secrets.token_hex(4)}")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(_TokenFile(records))) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self._path)
        _sync_directory(self._path.parent)
        self.records, self._seen_version = records, _read_file_version(self._path)


def create_token(name: str, scopes: Iterable[str]) -> tuple[str, TokenRecord]:
    """Return a new token and the record to store for it."""
    granted = list(dict.fromkeys(scopes))
    if unknown := set(granted) - ALL_SCOPES:
        raise InvalidInput(
            f"{sorted(unknown)[0]!r} is not a scope.",
            f"Use {', '.join(sorted(ALL_SCOPES))}.",
            field="scope",
        )
    if not (0 < len(name) <= 64 and name.isprintable() and granted):
        raise InvalidInput(
            "A token needs a name of 1 to 64 characters and at least one scope.", "Pass both.", field="name"
        )
    token = secrets.token_urlsafe(32)
    return token, _build_record(name, granted, token)


def _acquire_lock(file: int) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StoreError(
                    "Another command is changing the tokens and does not finish.", "Stop it, then try again."
                ) from None
            time.sleep(0.01)


def _sync_directory(directory: Path) -> None:
    """Sync a directory, so that a renamed file survives a power failure."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _read_file_version(path: Path) -> FileVersion:
    """Return a version that changes when the file is replaced. One `stat`, cheap enough for the event loop."""
    try:
        return _get_file_version(path.stat())
    except OSError:
        return NO_FILE_VERSION


def _get_file_version(found: os.stat_result) -> FileVersion:
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _build_record(name: str, scopes: list[str], token: str, kept: str | None = None) -> TokenRecord:
    return TokenRecord(name=name, scopes=scopes, digest=_hash_token(token), token=kept)


def build_owner_record(token: str) -> TokenRecord:
    """Return the record of the token set in the configuration, which is the owner's."""
    return _build_record(OWNER_TOKEN_NAME, [ADMIN_SCOPE], token)


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
