"""Attachments of a spawned sub-agent: validation, and writing them to its workspace.

`validate_attachments` checks them without touching a file. `write` puts them into a folder of their own below the
workspace, atomically, and `remove` deletes that folder. An agent works in the workspace at the same time and may have
created links there, so every step starts from an open directory and follows no links. All functions block: call them in
a thread. Permissions and sandbox paths are decided elsewhere. A folder has one writer at a time.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import logging
import os
import re
import stat
import unicodedata
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from antiphon.errors import AntiphonError, Conflict, InvalidInput, TooLarge, Unavailable

log = logging.getLogger(__name__)

MANIFEST_FILE_NAME = ".manifest.json"
MAX_FILE_NAME_BYTES = 255  # the limit of common file systems

_STATE_DIR_NAME, _ATTACHMENTS_DIR_NAME, _PARTIAL_SUFFIX = ".antiphon", "attachments", ".part"
_FOLDER_NAME_PATTERN = re.compile(r"[0-9a-z][0-9a-z-]{0,63}")
_SEPARATOR_PATTERN = re.compile(r"[/\\]")
_CONTROL_CHARACTER_PATTERN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# These characters could make a name look like another one.
_BIDI_CONTROL_PATTERN = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_WINDOWS_DEVICE_PATTERN = re.compile(
    r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])\s*(\..*)?", re.IGNORECASE
)
_MIME_TYPE_PATTERN = re.compile(r"[\x20-\x7e]{0,255}")
_BASE64_PATTERN = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_WHITESPACE_REMOVAL_TABLE = dict.fromkeys(map(ord, " \t\n\r\f\v"))
_MAX_QUOTED_NAME_CHARACTERS = 80  # in error messages

_OPEN_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_A_DIRECTORY_ERRNOS = {errno.ELOOP, errno.ENOTDIR, errno.EMLINK}


class SpawnAttachment(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A file as the caller sends it. Not checked yet."""

    name: str
    content: str
    encoding: Literal["utf8", "base64"] = "utf8"
    mime_type: str | None = None
    """As declared by the caller. It is recorded, but nothing depends on it."""


class AttachmentLimits(msgspec.Struct, frozen=True):
    """Limits for the attachments of one spawn."""

    files: int = 50
    file_bytes: int = 1024 * 1024
    total_bytes: int = 5 * 1024 * 1024


class FileReceipt(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One file as it is on disk."""

    name: str
    bytes: int
    sha256: str


class AttachmentReceipt(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The files that were written, and their folder relative to the workspace."""

    count: int
    total_bytes: int
    rel_dir: str
    files: list[FileReceipt]


class _ManifestFile(FileReceipt, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    mime_type: str | None = None


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The receipt with MIME types, for people who find the folder. Antiphon does not read it."""

    count: int
    total_bytes: int
    rel_dir: str
    files: list[_ManifestFile]


# --- validation ---


def validate_attachments(
    attachments: Sequence[SpawnAttachment], limits: AttachmentLimits
) -> list[tuple[str, bytes]]:
    """Return the trimmed names and contents of the files. Errors carry a machine-readable `reason`."""
    if len(attachments) > limits.files:
        raise TooLarge(
            f"There are {len(attachments)} attachments; at most {limits.files} are allowed.",
            "Attach fewer files.",
            field="attachments",
            reason="attachments_file_count_exceeded",
            files=len(attachments),
            max=limits.files,
        )
    names = _validate_names(attachment.name for attachment in attachments)
    _check_types(attachments)
    _check_sizes(attachments, names, limits)
    return [
        (name, _decode_content(number, name, attachment))
        for number, (name, attachment) in enumerate(zip(names, attachments, strict=True))
    ]


def collect_mime_types(attachments: Iterable[SpawnAttachment]) -> dict[str, str]:
    """Return the MIME types declared by the caller, by trimmed file name."""
    return {each.name.strip(): each.mime_type for each in attachments if each.mime_type}


def _validate_names(raw_names: Iterable[str]) -> list[str]:
    """Return the trimmed names, which are safe and distinct on all common file systems."""
    names: list[str] = []
    seen: set[str] = set()
    for number, raw in enumerate(raw_names):
        name = raw.strip()
        if fault := _find_name_fault(raw, name):
            raise _make_name_error(number, raw, fault)
        if (same := _fold_name(name)) in seen:
            raise InvalidInput(
                f"Two attachments are named {_quote_name(name)}, "
                "or differ only in case or in how letters are composed.",
                "Give every file a unique name.",
                field=f"attachments/{number}/name",
                reason="attachments_duplicate_name",
            )
        seen.add(same)
        names.append(name)
    return names


def _find_name_fault(raw: str, name: str) -> str | None:
    """Return why a file name is invalid, or None. `raw` is untrimmed, since trimming would hide a line break."""
    faults = (
        (not name, "is empty"),
        (_CONTROL_CHARACTER_PATTERN.search(raw), "has control characters or line breaks"),
        (_BIDI_CONTROL_PATTERN.search(raw), "has characters that change the direction of reading"),
        (_SEPARATOR_PATTERN.search(name), "has a slash or a backslash"),
        (name in (".", ".."), "stands for a directory"),
        (_fold_name(name) == MANIFEST_FILE_NAME, "is taken by the list of the files"),
        (name.endswith("."), "ends in a dot"),
        (_WINDOWS_DEVICE_PATTERN.fullmatch(name), "is the name of a device on Windows"),
        (
            len(name.encode("utf-8", "replace")) > MAX_FILE_NAME_BYTES,
            f"is longer than {MAX_FILE_NAME_BYTES} bytes",
        ),
    )
    return next((fault for is_faulty, fault in faults if is_faulty), None)


def _fold_name(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _check_types(attachments: Sequence[SpawnAttachment]) -> None:
    for number, attachment in enumerate(attachments):
        if not _MIME_TYPE_PATTERN.fullmatch(attachment.mime_type or ""):
            raise InvalidInput(
                f"The mimeType of attachment {_quote_name(attachment.name)} is not valid.",
                "Send one such as 'text/plain', or leave it out.",
                field=f"attachments/{number}/mimeType",
                reason="attachments_invalid_mime_type",
            )


def _check_sizes(
    attachments: Sequence[SpawnAttachment], names: Sequence[str], limits: AttachmentLimits
) -> None:
    total = 0
    for number, (name, attachment) in enumerate(zip(names, attachments, strict=True)):
        size = _measure_decoded_size(attachment, limits.file_bytes)
        if size > limits.file_bytes:
            raise TooLarge(
                f"Attachment {_quote_name(name)} has {size} bytes or more; at most {limits.file_bytes} are allowed.",
                "Shorten it, or split it.",
                field=f"attachments/{number}/content",
                reason="attachments_file_bytes_exceeded",
                bytes=size,
                max=limits.file_bytes,
            )
        total += size
    if total > limits.total_bytes:
        raise TooLarge(
            f"The attachments have {total} bytes together; at most {limits.total_bytes} are allowed.",
            "Attach less.",
            field="attachments",
            reason="attachments_total_bytes_exceeded",
            bytes=total,
            max=limits.total_bytes,
        )


def _measure_decoded_size(attachment: SpawnAttachment, maximum: int) -> int:
    """Return the decoded size without decoding; a lower bound for text that is too long anyway."""
    content = attachment.content
    if attachment.encoding == "base64":
        code = content.translate(_WHITESPACE_REMOVAL_TABLE)
        return len(code) * 3 // 4 - code[-2:].count("=")
    return len(content) if len(content) > maximum else len(content.encode("utf-8", "surrogatepass"))


def _decode_content(number: int, name: str, attachment: SpawnAttachment) -> bytes:
    try:
        if attachment.encoding == "utf8":
            return attachment.content.encode("utf-8")
        code = attachment.content.translate(_WHITESPACE_REMOVAL_TABLE)
        if len(code) % 4 or not _BASE64_PATTERN.fullmatch(code):
            raise binascii.Error
        return base64.b64decode(code, validate=True)
    except ValueError:
        raise _make_content_error(number, name, attachment.encoding) from None


def _make_content_error(number: int, name: str, encoding: str) -> InvalidInput:
    base = encoding == "base64"
    return InvalidInput(
        f"The content of attachment {_quote_name(name)} is not {'base64' if base else 'text'}.",
        "Encode it with the standard alphabet and padding." if base else "Send it as base64.",
        field=f"attachments/{number}/content",
        reason="attachments_invalid_base64_or_too_large" if base else "attachments_invalid_text",
    )


def _make_name_error(number: int, name: str, fault: str) -> InvalidInput:
    return InvalidInput(
        f"The attachment's name {_quote_name(name)} {fault}.",
        "Give the file a plain name such as 'notes.txt'.",
        field=f"attachments/{number}/name",
        reason="attachments_invalid_name",
    )


def _quote_name(name: str) -> str:
    return repr(
        name if len(name) <= _MAX_QUOTED_NAME_CHARACTERS else name[:_MAX_QUOTED_NAME_CHARACTERS] + "…"
    )


# --- the folder ---


def format_relative_dir(folder: str) -> str:
    """Return the path of a folder relative to the workspace."""
    return f"{_STATE_DIR_NAME}/{_ATTACHMENTS_DIR_NAME}/{folder}"


def write(
    workspace: Path,
    folder: str,
    files: Sequence[tuple[str, bytes]],
    *,
    mime_types: Mapping[str, str] | None = None,
    below: str = "",
) -> AttachmentReceipt:
    """Write the files that `validate_attachments` returned. Durable on return; may be repeated after a crash.

    `below` is the directory in the workspace that the child works in; empty if it is the workspace itself.

    Antiphon chooses `folder`, never a caller. If it already has exactly these files, the result is the same receipt;
    with other files it is a `Conflict`. The MIME types only go into the manifest.
    """
    _check_folder(folder)
    if _validate_names(name for name, _ in files) != [name for name, _ in files]:
        raise InvalidInput(
            "The attachments' names are not trimmed.", "Check them first.", field="attachments"
        )
    written = build_receipt(folder, files)
    with _translate_os_errors("written"), _open_attachments_dir(workspace, below, make=True) as place:
        _remove_entry(place, folder + _PARTIAL_SUFFIX)
        if not _exists(place, folder):
            _write_folder(
                place, folder, [*files, (MANIFEST_FILE_NAME, _encode_manifest(written, mime_types or {}))]
            )
        elif not _holds_exactly(place, folder, dict(files)):
            raise Conflict(
                f"The folder {folder!r} exists with other attachments.",
                "Spawn again, which uses a new folder.",
                field="attachments",
                reason="attachments_folder_exists",
            )
        os.fsync(place)
    return written


def remove(workspace: Path, folder: str, *, below: str = "") -> None:
    """Remove the folder with its current contents and any partial draft. Links are removed, not their targets.

    A missing folder is no error. It is an error if `.antiphon` or `attachments` is not a directory.
    """
    _check_folder(folder)
    part = folder + _PARTIAL_SUFFIX
    with (
        _translate_os_errors("removed"),
        suppress(FileNotFoundError),
        _open_attachments_dir(workspace, below, make=False) as place,
    ):
        _remove_entry(place, part)
        with suppress(FileNotFoundError):
            os.rename(folder, part, src_dir_fd=place, dst_dir_fd=place)
        _remove_entry(place, part)
        os.fsync(place)


def _check_folder(folder: str) -> None:
    if not _FOLDER_NAME_PATTERN.fullmatch(folder):
        raise InvalidInput(
            f"{_quote_name(folder)} cannot be a folder of attachments.",
            "Use a new UUID in lower case.",
            field="folder",
        )


def build_receipt(folder: str, files: Sequence[tuple[str, bytes]]) -> AttachmentReceipt:
    """Build the receipt that `write` returns for these files."""
    return AttachmentReceipt(
        count=len(files),
        total_bytes=sum(len(content) for _, content in files),
        rel_dir=format_relative_dir(folder),
        files=[
            FileReceipt(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            for name, content in files
        ],
    )


def _encode_manifest(receipt: AttachmentReceipt, types: Mapping[str, str]) -> bytes:
    listed = [
        _ManifestFile(name=file.name, bytes=file.bytes, sha256=file.sha256, mime_type=types.get(file.name))
        for file in receipt.files
    ]
    manifest = _Manifest(
        count=receipt.count, total_bytes=receipt.total_bytes, rel_dir=receipt.rel_dir, files=listed
    )
    return msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"


# --- files, relative to an open directory ---


@contextmanager
def _translate_os_errors(done: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(
            f"The attachments could not be {done}: {error.strerror or 'the system refused'}.",
            "Check that the workspace is a directory that this process can write to, with free space; then try again.",
            field="attachments",
            reason="attachments_io_failed",
        ) from error


@contextmanager
def _open_attachments_dir(workspace: Path, below: str, *, make: bool) -> Generator[int]:
    """Open the directory of all folders. Only the workspace itself may be a link: the operator chose it."""
    with ExitStack() as opened:
        place = opened.enter_context(_open_directory(_resolve_workspace(workspace)))
        for name in (*PurePosixPath(below).parts, _STATE_DIR_NAME, _ATTACHMENTS_DIR_NAME):
            place = opened.enter_context(_open_subdirectory(place, name, make=make))
        yield place


def _resolve_workspace(workspace: Path) -> Path:
    try:
        return workspace.resolve(strict=True)
    except RuntimeError as error:  # raised by Python before 3.13 for circular links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error


@contextmanager
def _open_subdirectory(parent: int, name: str, *, make: bool) -> Generator[int]:
    is_new = False
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
            is_new = True
        os.fsync(parent)
    with _open_directory(name, parent) as file:
        if is_new:
            _give_to_owner_of(parent, file)
        yield file


def _give_to_owner_of(parent: int, file: int) -> None:
    """Give what root creates to the owner of the directory, since commands run as that user."""
    if os.geteuid() == 0:
        owner = os.fstat(parent)
        os.fchown(file, owner.st_uid, owner.st_gid)


@contextmanager
def _open_directory(name: str | Path, parent: int | None = None) -> Generator[int]:
    try:
        file = os.open(name, _OPEN_DIRECTORY_FLAGS, dir_fd=parent)
    except OSError as error:
        if error.errno in _NOT_A_DIRECTORY_ERRNOS:
            raise _make_unsafe_directory_error(Path(name).name) from error
        raise
    try:
        yield file
    finally:
        os.close(file)


def _make_unsafe_directory_error(name: str) -> InvalidInput:
    return InvalidInput(
        f"{name!r} in the workspace is a link or a file where attachments need a directory, or was replaced.",
        "Remove it, then try again.",
        field="attachments",
        reason="attachments_unsafe_directory",
    )


def _write_folder(place: int, folder: str, files: Iterable[tuple[str, bytes]]) -> None:
    """Write the folder atomically: it has a temporary name until all files are on disk."""
    part = folder + _PARTIAL_SUFFIX
    os.mkdir(part, 0o700, dir_fd=place)
    try:
        with _open_directory(part, place) as draft:
            _give_to_owner_of(place, draft)
            for name, content in files:
                _create_file(draft, name, content)
            os.fsync(draft)
            _publish_draft(place, part, folder, draft)
    except BaseException:  # re-raised below; even an interruption must not leave a draft
        try:
            _remove_entry(place, part)
        except (OSError, AntiphonError) as error:  # only logged, so that the first error is raised
            log.warning("The draft %r of attachments stays until they are written again: %s", part, error)
        raise


def _create_file(directory: int, name: str, content: bytes) -> None:
    with os.fdopen(os.open(name, _CREATE_FILE_FLAGS, 0o600, dir_fd=directory), "wb") as stream:
        _give_to_owner_of(directory, stream.fileno())
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _publish_draft(place: int, part: str, folder: str, draft: int) -> None:
    """Rename the draft and check that it is still the directory that was written: an agent may have replaced it."""
    os.rename(part, folder, src_dir_fd=place, dst_dir_fd=place)
    named = os.stat(folder, dir_fd=place, follow_symlinks=False)
    if not os.path.samestat(named, os.fstat(draft)):
        _remove_entry(place, folder)
        raise _make_unsafe_directory_error(folder)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _holds_exactly(place: int, folder: str, files: Mapping[str, bytes]) -> bool:
    """Whether the folder has exactly these files. The manifest is not compared, as it is derived from them."""
    with _open_directory(folder, place) as found:
        return set(_list_directory(found)) == {*files, MANIFEST_FILE_NAME} and all(
            _has_content(found, name, content) for name, content in files.items()
        )


def _has_content(directory: int, name: str, content: bytes) -> bool:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) or status.st_size != len(content):
        return False
    with os.fdopen(os.open(name, _READ_FILE_FLAGS, dir_fd=directory), "rb") as stream:
        return stream.read() == content


def _list_directory(directory: int) -> list[str]:
    with os.scandir(directory) as found:
        return [entry.name for entry in found]


def _remove_entry(place: int, name: str) -> None:
    """Remove the file, link or directory with this name, if any."""
    try:
        status = os.stat(name, dir_fd=place, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=place)
        return
    with _open_directory(name, place) as directory:
        _empty_directory(directory)
    os.rmdir(name, dir_fd=place)


def _empty_directory(directory: int) -> None:
    """Empty a directory. Nested entries are moved up first, so that any depth needs only one open descriptor."""
    left = _list_directory(directory)
    while left:
        name = left.pop()
        if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=directory)
            continue
        with _open_directory(name, directory) as deeper:
            for entry in _list_directory(deeper):
                left.append(uuid.uuid4().hex)
                os.rename(entry, left[-1], src_dir_fd=deeper, dst_dir_fd=directory)
        os.rmdir(name, dir_fd=directory)
