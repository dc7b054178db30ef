"""Reads and changes files for agents, durably; the file tools call this.

A session may only replace a version that it has read or written itself. Before files are replaced, their new versions
are recorded with the tool call that writes them: the same call, repeated after a crash, finds its work done or
completes it, and never does it twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from antiphon.access import Caller, build_session_missing_error
from antiphon.clock import Clock
from antiphon.errors import Forbidden, InvalidInput, StaleFile, TooLarge
from antiphon.store import Store, Tx
from antiphon.store.queries import Queries
from antiphon.workspace.directory import FileReplacement, WorkspaceDirectory
from antiphon.workspace.edits import FilePatch, parse_patch, replace_text, require_distinct_paths
from antiphon.workspace.locations import WORKSPACE_MOUNT, Mount, SessionWorkspace, create_root, mark_used

MAX_WRITE_BYTES = 1024 * 1024
MAX_READ_BYTES = 16 * 1024 * 1024
MAX_IMAGE_BYTES = 5 * 1024 * 1024
MAX_PAGE_LINES = 2000
MAX_PAGE_BYTES = 50 * 1024
MAX_STORED_PATH_BYTES = 1024
SCANNED_BYTES = 64 * 1024
MAX_VERSIONS_PER_SESSION = 2000
MAX_FILE_THREADS = 4
DELETED_VERSION = "deleted"  # in place of the hash of a file that does not exist

_SQL = Queries("file_versions")
_IMAGE_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)

T = TypeVar("T")

_file_threads = ThreadPoolExecutor(MAX_FILE_THREADS, "workspace")
"""Work on files may take long, on a slow disk or because a program holds a lock; name look-ups must not wait for it."""


class TextPage(msgspec.Struct, frozen=True):
    """Lines of a file, the first of which has the number `first_line`."""

    text: str
    first_line: int
    total_lines: int
    next_line: int | None
    """The first line that did not fit, or None at the end."""


class ImageFile(msgspec.Struct, frozen=True):
    data: bytes
    mime_type: str


class FileChange(msgspec.Struct, frozen=True):
    """A file that was written, or deleted if `bytes` is None."""

    path: str
    bytes: int | None


class _Step(msgspec.Struct, frozen=True):
    """The change of one file, or of two if it moves; computed from what is there."""

    paths: tuple[str, ...]
    plan: Callable[[WorkspaceDirectory], list[FileReplacement]]


class WorkspaceFiles:
    """The files of workspaces. Every method acts for the session of its caller."""

    def __init__(self, store: Store, clock: Clock, locate: Callable[[Caller], SessionWorkspace]) -> None:
        self._store = store
        self._clock = clock
        self._locate = locate

    async def read(
        self, caller: Caller, path: str, offset: int = 1, limit: int = MAX_PAGE_LINES
    ) -> TextPage | ImageFile:
        """Return a page of a text file, or an image.

        Raises:
            InvalidInput: it is neither.
        """
        mount, inner = self._locate(caller).locate(path)

        def load(directory: WorkspaceDirectory) -> tuple[str, str, TextPage | ImageFile]:
            content = directory.read_file(inner, MAX_READ_BYTES)
            shown = _build_image(path, content.data) or _cut_page(path, content.data, offset, limit)
            return directory.normalize(inner), content.sha256, shown

        name, sha256, shown = await work_in_directory(mount, load)
        location = _build_version_key(mount.path, name)
        await self._store.tx(_record_read, _get_session_key(caller), location, sha256, self._clock.now())
        return shown

    async def write(self, caller: Caller, call: str, path: str, content: str) -> FileChange:
        """Create a file, or replace one that the session has read."""
        data = _encode(content)
        mount, (inner,) = locate_writable(self._locate(caller), [path])
        step = _Step((inner,), lambda directory: [plan_replacement(directory, inner, data)])
        return (await self._change(caller, call, mount, [step]))[0]

    async def edit(
        self, caller: Caller, call: str, path: str, old: str, new: str, *, replace_all: bool = False
    ) -> FileChange:
        """Replace a text in a file that the session has read."""
        mount, (inner,) = locate_writable(self._locate(caller), [path])

        def plan(directory: WorkspaceDirectory) -> list[FileReplacement]:
            text = _decode(path, directory.read_file(inner, MAX_READ_BYTES).data)
            changed = replace_text(text, old, new, max_characters=MAX_WRITE_BYTES, replace_all=replace_all)
            return [plan_replacement(directory, inner, _encode(changed))]

        return (await self._change(caller, call, mount, [_Step((inner,), plan)]))[0]

    async def apply_patch(self, caller: Caller, call: str, patch: str) -> list[FileChange]:
        """Change several files, all or none."""
        patches = parse_patch(patch)
        paths = [path for each in patches for path in (each.move_to, each.path) if path]
        mount, located = locate_writable(self._locate(caller), paths)
        inner = dict(zip(paths, located, strict=True))
        steps = [
            _Step(
                tuple(inner[path] for path in (each.move_to, each.path) if path),
                partial(
                    _plan_patch,
                    patch=msgspec.structs.replace(
                        each, path=inner[each.path], move_to=each.move_to and inner[each.move_to]
                    ),
                ),
            )
            for each in patches
        ]
        return await self._change(caller, call, mount, steps)

    async def _change(
        self, caller: Caller, call: str, mount: Mount, steps: Sequence[_Step]
    ) -> list[FileChange]:
        root, key = mount.path, _get_session_key(caller)
        recorded = await self._store.read(_load_written, key, call)

        def plan(directory: WorkspaceDirectory) -> list[FileReplacement]:
            require_distinct_paths([directory.normalize(path) for step in steps for path in step.paths])
            left = [step for step in steps if not _is_done(directory, root, step, recorded)]
            return [replacement for step in left for replacement in step.plan(directory)]

        replacements = await work_in_directory(mount, plan)
        now = self._clock.now()
        await self._store.tx(_record_writes, key, root, replacements, call, now)
        # Deletions come last: a file that moves must be there until it is in its new place.
        ordered = sorted(replacements, key=lambda replacement: replacement.data is None)
        await work_in_directory(mount, lambda directory: directory.replace_files(ordered, MAX_READ_BYTES))
        names = [path for step in steps for path in step.paths]
        return await work_in_directory(
            mount, lambda directory: [_describe(directory, path) for path in names]
        )


def locate_writable(workspace: SessionWorkspace, paths: Sequence[str]) -> tuple[Mount, list[str]]:
    """Return the one directory that the paths are in, and the paths inside it."""
    located = [workspace.locate(path) for path in paths]
    mount = located[0][0]
    if not mount.writable:
        raise Forbidden(
            f"{paths[0]!r} cannot be changed: {mount.target} is read-only.",
            f"Write to {WORKSPACE_MOUNT}.",
            field="path",
        )
    if any(other != mount for other, _ in located):
        raise InvalidInput(
            "The patch changes files of several directories.", "Use a patch for each.", field="input"
        )
    return mount, [inner for _, inner in located]


async def work_in_directory(mount: Mount, work: Callable[[WorkspaceDirectory], T]) -> T:
    """Run blocking work on a directory in a thread."""

    def run() -> T:
        mark_used([mount])
        create_root(mount)
        with WorkspaceDirectory(mount.root, below=mount.below, aliases=(mount.target,)) as directory:
            return work(directory)

    return await asyncio.get_running_loop().run_in_executor(_file_threads, run)


def _get_session_key(caller: Caller) -> str:
    if caller.session_key is None:
        raise InvalidInput(
            "Only a session has a workspace.", "Name the session to act as.", field="sessionKey"
        )
    return caller.session_key


# --- planning ---


def plan_replacement(directory: WorkspaceDirectory, path: str, data: bytes | None) -> FileReplacement:
    return FileReplacement(directory.normalize(path), directory.find_sha256(path, MAX_READ_BYTES), data)


def _plan_patch(directory: WorkspaceDirectory, patch: FilePatch) -> list[FileReplacement]:
    match patch.action:
        case "add":
            return [FileReplacement(directory.normalize(patch.path), None, _encode(patch.content))]
        case "delete":
            directory.read_file(patch.path, MAX_READ_BYTES)  # raises if it does not exist
            return [plan_replacement(directory, patch.path, None)]
        case "update":
            text = _decode(patch.path, directory.read_file(patch.path, MAX_READ_BYTES).data)
            target = patch.move_to or patch.path
            replacements = [plan_replacement(directory, target, _encode(patch.apply(text)))]
            if patch.move_to:
                replacements.append(plan_replacement(directory, patch.path, None))
            return replacements


def _is_done(directory: WorkspaceDirectory, root: Path, step: _Step, recorded: Mapping[str, str]) -> bool:
    """Whether every file of the step has the content that this call recorded before it was interrupted."""
    return bool(recorded) and all(
        recorded.get(_build_version_key(root, directory.normalize(path)))
        == (directory.find_sha256(path, MAX_READ_BYTES) or DELETED_VERSION)
        for path in step.paths
    )


def _describe(directory: WorkspaceDirectory, path: str) -> FileChange:
    content = directory.find_content(path, MAX_READ_BYTES)
    return FileChange(directory.normalize(path), len(content.data) if content else None)


# --- versions, as transaction scripts ---


async def _record_read(tx: Tx, session_key: str, path: str, sha256: str, now: int) -> None:
    session = await _load_session(tx, session_key)
    await tx.do(_SQL.record_read, session=session, path=path, seen=sha256, now=now)
    await tx.do(_SQL.delete_oldest, session=session, kept=MAX_VERSIONS_PER_SESSION)


async def _load_written(tx: Tx, session_key: str, call: str) -> dict[str, str]:
    """Return the versions that a call has recorded, by absolute path."""
    session = await _load_session(tx, session_key)
    rows = await tx.all(_SQL.written_by, session=session, call=call)
    return {row["path"]: row["written"] for row in rows}


async def _record_writes(
    tx: Tx, session_key: str, root: Path, replacements: Sequence[FileReplacement], call: str, now: int
) -> None:
    """Record what is about to be written, if the session knows what it replaces."""
    session = await _load_session(tx, session_key)
    for replacement in replacements:
        path = _build_version_key(root, replacement.path)
        known = await tx.one(_SQL.find, session=session, path=path)
        versions = (known["seen"], known["written"]) if known else ()
        if replacement.expected_sha256 is not None and replacement.expected_sha256 not in versions:
            is_read = known is not None
            what = (
                "was changed since this session last read it" if is_read else "was not read by this session"
            )
            raise StaleFile(f"{replacement.path!r} {what}.", "Read it first.", field="path")
        data = replacement.data
        written = DELETED_VERSION if data is None else hashlib.sha256(data).hexdigest()
        await tx.do(
            _SQL.record_write,
            session=session,
            path=path,
            seen=replacement.expected_sha256,
            written=written,
            call=call,
            now=now,
        )
    await tx.do(_SQL.delete_oldest, session=session, kept=MAX_VERSIONS_PER_SESSION)


def _build_version_key(root: Path, name: str) -> str:
    """Return the path under which a file's version is recorded, or its hash if an index could not hold the path."""
    path = str(root / name)
    data = path.encode("utf-8", "surrogateescape")
    return path if len(data) <= MAX_STORED_PATH_BYTES else f"sha256:{hashlib.sha256(data).hexdigest()}"


async def _load_session(tx: Tx, session_key: str) -> int:
    row = await tx.one(_SQL.session_id, key=session_key)
    if row is None:
        raise build_session_missing_error(session_key)
    return row["id"]


# --- contents ---


def _encode(text: str) -> bytes:
    data = text.encode()
    if len(data) > MAX_WRITE_BYTES:
        raise TooLarge(
            f"The file would have {len(data)} bytes; at most {MAX_WRITE_BYTES} can be written.",
            "Write less, or several files.",
            field="content",
            bytes=len(data),
            max=MAX_WRITE_BYTES,
        )
    return data


def _decode(path: str, data: bytes) -> str:
    try:
        if b"\0" not in data:
            return data.decode()
    except UnicodeDecodeError:
        pass
    raise InvalidInput(f"{path!r} is not a text file in UTF-8.", "Use a text file.", field="path")


def find_image_type(data: bytes) -> str | None:
    """Return the type of an image that models take, or None for any other data."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for signature, kind in _IMAGE_SIGNATURES if data.startswith(signature)), None)


def _build_image(path: str, data: bytes) -> ImageFile | None:
    mime_type = find_image_type(data)
    if mime_type is None:
        return None
    if len(data) > MAX_IMAGE_BYTES:
        raise TooLarge(
            f"The image {path!r} has {len(data)} bytes; at most {MAX_IMAGE_BYTES} can be shown.",
            "Make it smaller first.",
            field="path",
            bytes=len(data),
            max=MAX_IMAGE_BYTES,
        )
    return ImageFile(data, mime_type)


def _cut_page(path: str, data: bytes, offset: int, limit: int) -> TextPage:
    """Return whole lines from `offset` on, within both limits; of a line that is too long alone, its beginning."""
    _decode(path, data)
    total = data.count(b"\n") + bool(data and not data.endswith(b"\n"))
    if offset > max(1, total):
        raise InvalidInput(
            f"{path!r} has {total} lines.", f"Use an offset from 1 to {total}.", field="offset"
        )
    start = _find_line(data, offset)
    window = data[start : start + MAX_PAGE_BYTES]
    *lines, rest = window.split(b"\n")
    if rest and start + len(window) == len(data) and len(window) < MAX_PAGE_BYTES:
        lines.append(rest)
    shown = b"\n".join(lines[: min(limit, MAX_PAGE_LINES)]).decode()
    if not lines and rest:
        lines, shown = [rest], f"{rest.decode(errors='ignore')} […]"
    following = offset + min(len(lines), limit, MAX_PAGE_LINES)
    return TextPage(shown, offset, total, following if following <= total else None)


def _find_line(data: bytes, number: int) -> int:
    """Return where a line begins, without a list of all lines, which would take long and much memory."""
    position, left = 0, number - 1
    while (count := data.count(b"\n", position, position + SCANNED_BYTES)) < left:
        position, left = position + SCANNED_BYTES, left - count
    for _ in range(left):
        position = data.index(b"\n", position) + 1
    return position
