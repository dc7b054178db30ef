"""Transcript files that follow their sessions."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from antiphon.access import Caller
from antiphon.app import open_app_operations
from antiphon.bus import Event, EventBus, Gap, SessionChanged
from antiphon.bus.local import LocalBus
from antiphon.clock import Clock, ManualClock, SystemClock
from antiphon.config import Config, parse
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.keys import parse as parse_key
from antiphon.operations.operations import Operations
from antiphon.operations.types import IncomingMessage, ListFilter, SessionView
from antiphon.state_access import open_operations_readonly, open_store_exclusive, open_store_readonly
from antiphon.store import Store
from antiphon.transfers import mirror as mirrors
from antiphon.transfers.exports import export_all
from antiphon.transfers.mirror import TranscriptMirror

pytestmark = pytest.mark.anyio
OPERATOR = Caller.operator()
MAIN = "agent:main:main"
GROUP = "agent:main:telegram:group:1"
BOUND = 10.0
MIRRORED, _ = parse({"session": {"transcripts": {"mirror": True}}})
UNMIRRORED, _ = parse({"session": {"transcripts": {"mirror": False}}})


async def say(operations: Operations, text: str, session: str = "main") -> None:
    accepted = await operations.messages.submit(OPERATOR, IncomingMessage(session=session, content=text))
    assert (await operations.runs.wait(OPERATOR, accepted.run_id, 10)).state == "ok"


async def talked(state: Path, *keys: str, clock: Clock | None = None) -> list[Path]:
    """Sessions in which something was said; their files, which are not written yet."""
    async with open_app_operations(UNMIRRORED, state, clock=clock) as operations:
        for key in keys:
            await say(operations, "say hello", key)
        return [await file_of(operations, key, state) for key in keys]


async def file_of(operations: Operations, key: str, state: Path) -> Path:
    session_id = (await operations.sessions.describe(OPERATOR, key)).session_id
    return state / "transcripts" / f"{session_id}.jsonl"


def is_file(view: SessionView) -> bool:
    return view.transcript_path is not None and Path(view.transcript_path).is_file()


def changed(key: str) -> SessionChanged:
    return SessionChanged(session_key=key, reason="message")


async def mirrored(mirror: TranscriptMirror, bus: EventBus, *events: Event) -> None:
    """What a host does: listen, and bring everything up to date at the end."""
    task = asyncio.create_task(mirror.run())
    await asyncio.sleep(0)
    assert bus.has_listeners("sessions")
    for event in events:
        bus.publish("sessions", event)
    async with asyncio.timeout(BOUND):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await mirror.flush()


class Busy:
    """A bus on which there is always another change, until the file is there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._until = time.monotonic() + BOUND
        self.seen = asyncio.Event()

    def has_listeners(self, topic: str) -> bool:
        return True

    def publish(self, topic: str, event: Event) -> None: ...

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncGenerator[Busy]:
        yield self

    async def get(self, timeout: float | None = None) -> Event | None:
        await asyncio.sleep(0)
        if self.seen.is_set():
            return None
        if self._file.exists() or time.monotonic() > self._until:
            self.seen.set()
        return changed(MAIN)


@pytest.mark.requirement("L4")
async def test_the_file_a_row_names_is_what_an_export_would_write(tmp_path: Path) -> None:
    files: set[Path] = set()
    for number in range(2):  # the second time it goes on with a file that another process wrote
        async with open_app_operations(MIRRORED, tmp_path) as operations:
            await say(operations, f"say {number}")
            await say(operations, "say more")
            row = await operations.sessions.describe(OPERATOR, "main")
            files.add(Path(row.transcript_path or ""))
            if number:
                await operations.conversations.renew(OPERATOR, "main")
                await say(operations, "say anew")
                files.add(Path((await operations.sessions.describe(OPERATOR, "main")).transcript_path or ""))
    async with open_store_readonly(Config(), tmp_path) as store:
        await export_all(store, tmp_path / "out")
    assert len(files) == 2
    for file in files:
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600


async def test_steady_traffic_does_not_put_a_file_off(tmp_path: Path) -> None:
    (file,) = await talked(tmp_path, MAIN)
    bus = Busy(file)
    async with open_store_readonly(Config(), tmp_path) as store:
        task = asyncio.create_task(TranscriptMirror(store, bus, file.parent).run())
        async with asyncio.timeout(2 * BOUND):
            await bus.seen.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert file.exists()


async def test_after_a_gap_all_files_that_may_have_changed_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "MIRRORED_ROWS_PER_PAGE", 2)
    clock = ManualClock()
    (old,) = await talked(tmp_path, "cron:old", clock=clock)
    clock.advance(days=1)
    async with open_store_readonly(Config(), tmp_path) as store:
        bus = LocalBus()
        mirror = TranscriptMirror(store, bus, old.parent, clock)
        clock.advance(seconds=60)
        files = await talked(tmp_path, MAIN, *(f"cron:c{n}" for n in range(4)), clock=clock)
        await mirrored(mirror, bus, Gap())
        assert [file.exists() for file in files] == [True] * 5
        assert not old.exists()


async def forget(store: Store, key: str, clock: Clock | None = None) -> None:
    row = await store.read(session_rows.find_session, parse_key(key), None)
    assert row is not None
    await store.tx(session_rows.delete_session, row["id"], key, (clock or SystemClock()).now())


@pytest.mark.parametrize(
    "events",
    [
        [SessionChanged(session_key=GROUP, reason="delete")],
        [SessionChanged(session_key=GROUP, reason="retention")],
        [Gap()],
        [],  # it was deleted while there was no listener
    ],
)
async def test_all_files_of_a_deleted_session_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]
) -> None:
    monkeypatch.setattr(mirrors, "MIRRORED_ROWS_PER_PAGE", 2)
    files: list[Path] = []
    async with open_app_operations(UNMIRRORED, tmp_path) as operations:
        await operations.sessions.open(OPERATOR, GROUP)
        for _ in range(3):
            await say(operations, "say a secret", GROUP)
            files.append(await file_of(operations, GROUP, tmp_path))
            await operations.conversations.renew(OPERATOR, GROUP)
    (kept,) = await talked(tmp_path, MAIN)
    foreign = kept.with_name("11111111-1111-4111-8111-111111111111.jsonl")
    async with open_store_exclusive(Config(), tmp_path) as store:
        await export_all(store, kept.parent)
        foreign.write_bytes(kept.read_bytes())
        bus = LocalBus()
        await mirrored(TranscriptMirror(store, bus, kept.parent), bus)
        await forget(store, GROUP)
        await mirrored(TranscriptMirror(store, bus, kept.parent), bus, *events)
    assert [file.exists() for file in files] == [False] * 3
    assert kept.exists() and foreign.exists()


async def test_a_file_stays_whose_conversation_has_come_back(tmp_path: Path) -> None:
    (file,) = await talked(tmp_path, GROUP)
    async with open_store_exclusive(Config(), tmp_path) as store:
        await export_all(store, file.parent)
        bus = LocalBus()
        await mirrored(TranscriptMirror(store, bus, file.parent), bus)
        await forget(store, GROUP)
        await store.tx(session_rows.create_session, parse_key(GROUP), 1, NewSession(session_id=file.stem))
        await mirrored(
            TranscriptMirror(store, bus, file.parent), bus, SessionChanged(session_key=GROUP, reason="delete")
        )
        assert file.exists()
        await forget(store, GROUP)
        await mirrored(TranscriptMirror(store, bus, file.parent), bus)
        assert not file.exists()


async def test_what_was_deleted_without_a_mirror_keeps_its_exports(tmp_path: Path) -> None:
    keys = [f"{GROUP}{n}" for n in range(2)]
    exports: list[Path] = []
    clock = ManualClock()
    for key in keys:  # before there was one, and while it was switched off again
        (file,) = await talked(tmp_path, key, clock=clock)
        async with open_store_exclusive(Config(), tmp_path) as store:
            await export_all(store, file.parent)
            await forget(store, key, clock)
        exports.append(file)
        clock.advance(seconds=1)
        for _ in range(2):
            async with open_app_operations(MIRRORED, tmp_path, clock=clock):
                clock.advance(seconds=1)
            assert [file.exists() for file in exports] == [True] * len(exports)


async def test_a_deletion_is_followed_once_and_one_after_an_import_again(tmp_path: Path) -> None:
    clock = ManualClock()
    (file,) = await talked(tmp_path, GROUP, clock=clock)
    async with open_store_exclusive(Config(), tmp_path) as store:
        bus = LocalBus()
        mirror = TranscriptMirror(store, bus, file.parent, clock)
        await mirrored(mirror, bus, changed(GROUP))
        assert file.exists()
        await forget(store, GROUP, clock)
        for _ in range(3):
            clock.advance(seconds=60)
            await mirrored(mirror, bus, Gap())
        assert not file.exists()
        file.touch()  # put back, to be imported
        await mirrored(mirror, bus, Gap(), changed(GROUP))
        await mirrored(TranscriptMirror(store, bus, file.parent, clock), bus)
        assert file.exists()
        await store.tx(
            session_rows.create_session, parse_key(GROUP), clock.now(), NewSession(session_id=file.stem)
        )
        await forget(store, GROUP, clock)
        await mirrored(mirror, bus, Gap())
        assert not file.exists()


async def test_a_file_that_could_not_be_removed_is_removed_at_the_next_start(tmp_path: Path) -> None:
    clock = ManualClock()
    (file,) = await talked(tmp_path, GROUP, clock=clock)
    async with open_store_exclusive(Config(), tmp_path) as store:
        bus = LocalBus()
        await mirrored(TranscriptMirror(store, bus, file.parent, clock), bus)
        await forget(store, GROUP, clock)
        file.unlink(missing_ok=True)
        file.mkdir()
        for _ in range(3):
            clock.advance(seconds=60)
            await mirrored(TranscriptMirror(store, bus, file.parent, clock), bus)
        file.rmdir()
        file.touch()
        await mirrored(TranscriptMirror(store, bus, file.parent, clock), bus)
    assert not file.exists()


async def test_what_is_deleted_after_a_restart_leaves_no_file(tmp_path: Path) -> None:
    async with open_app_operations(MIRRORED, tmp_path) as operations:
        await operations.sessions.open(OPERATOR, GROUP)
        await say(operations, "say a secret", GROUP)
        file = await file_of(operations, GROUP, tmp_path)
    assert file.exists()
    async with open_app_operations(MIRRORED, tmp_path) as operations:
        assert await operations.sessions.delete(OPERATOR, GROUP)
    assert not file.exists()


async def test_a_file_that_could_not_be_written_is_written_anew(tmp_path: Path) -> None:
    (file,) = await talked(tmp_path, MAIN)
    async with open_store_readonly(Config(), tmp_path) as store:
        bus = LocalBus()
        mirror = TranscriptMirror(store, bus, file.parent)
        file.mkdir(parents=True)
        await mirrored(mirror, bus, changed(MAIN))
        file.rmdir()
        await mirrored(mirror, bus, changed(MAIN))
        await export_all(store, tmp_path / "out")
    assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


async def test_the_file_of_a_deleted_session_goes_though_its_key_is_used_again(tmp_path: Path) -> None:
    key = "agent:main:cron:job"
    (old,) = await talked(tmp_path, key)
    async with open_store_readonly(Config(), tmp_path) as store:
        bus = LocalBus()
        mirror = TranscriptMirror(store, bus, old.parent)
        await mirrored(mirror, bus, changed(key))
        assert old.exists()
        async with open_store_exclusive(Config(), tmp_path) as owner:
            await forget(owner, key)
        (new,) = await talked(tmp_path, key)
        await mirrored(mirror, bus, SessionChanged(session_key=key, reason="delete"), changed(key))
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.requirement("L4")
async def test_a_row_names_a_file_that_exists(tmp_path: Path) -> None:
    async with open_app_operations(Config(), tmp_path) as operations:
        await say(operations, "say hello")
        for view in (
            await operations.sessions.describe(OPERATOR, "main"),
            (await operations.sessions.get_status(OPERATOR, "main")).session,
            (await operations.sessions.list(OPERATOR, ListFilter())).sessions[0],
        ):
            assert is_file(view)
        before = await operations.sessions.describe(OPERATOR, "main")
        after = await operations.conversations.renew(OPERATOR, "main")
        assert after.transcript_path is None or is_file(after)
        after = await operations.sessions.describe(OPERATOR, "main")
        assert is_file(after)
        assert before.transcript_path != after.transcript_path
    async with open_operations_readonly(Config(), tmp_path) as operations:
        row = await operations.sessions.describe(OPERATOR, "main")
        assert row.transcript_path == after.transcript_path
        (await file_of(operations, "main", tmp_path)).unlink()
    async with open_operations_readonly(Config(), tmp_path) as operations:
        assert (await operations.sessions.describe(OPERATOR, "main")).transcript_path is None


@pytest.mark.requirement("L4")
async def test_without_files_no_row_names_one(tmp_path: Path) -> None:
    async with open_app_operations(UNMIRRORED, tmp_path) as operations:
        await say(operations, "say hello")
        row = await operations.sessions.describe(OPERATOR, "main")
        assert (row.transcript_path, (tmp_path / "transcripts").exists()) == (None, False)


@pytest.mark.requirement("L4")
async def test_files_are_kept_unless_replicas_share_the_store() -> None:
    shared = [{"store": {"url": "postgresql://h/d"}}, {"bus": {"url": "nats://h"}}]
    configs = [parse(given)[0] for given in [{}, *shared]]
    assert [config.mirrors_transcripts for config in configs] == [True, False, False]
    assert [config.mirrors_transcripts for config in (MIRRORED, UNMIRRORED)] == [True, False]


@pytest.mark.requirement("L4")
async def test_files_that_are_missing_or_behind_are_written_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was imported, and of what was said while nothing was mirrored or before a crash."""
    monkeypatch.setattr(mirrors, "MIRRORED_ROWS_PER_PAGE", 2)
    monkeypatch.setattr(mirrors, "CLOCK_MARGIN_MILLISECONDS", -(10**6))  # nothing was active just now
    monkeypatch.setattr(mirrors, "CATCH_UP_PAUSE_SECONDS", 0)
    files = await talked(tmp_path, MAIN, *(f"cron:c{n}" for n in range(4)))
    behind, current = files[0], files[1]
    async with open_store_readonly(Config(), tmp_path) as store:
        await export_all(store, tmp_path / "out")
        behind.parent.mkdir()
        behind.write_text("torn")
        os.utime(behind, (1, 1))
        current.write_text("as new as its session")
        task = asyncio.create_task(TranscriptMirror(store, LocalBus(), behind.parent).run())
        expected = [(tmp_path / "out" / file.name).read_bytes() for file in files]
        expected[1] = current.read_bytes()
        async with asyncio.timeout(BOUND):
            while [file.read_bytes() if file.exists() else None for file in files] != expected:  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_file_that_was_taken_away_is_begun_anew(tmp_path: Path) -> None:
    async with open_app_operations(UNMIRRORED, tmp_path) as operations:
        await say(operations, "say hello")
        file = await file_of(operations, "main", tmp_path)
    async with open_store_readonly(Config(), tmp_path) as store:
        bus = LocalBus()
        mirror = TranscriptMirror(store, bus, file.parent)
        await mirrored(mirror, bus, changed(MAIN))
        file.unlink()
        await talked(tmp_path, MAIN)
        await mirrored(mirror, bus, changed(MAIN))
        await export_all(store, tmp_path / "out")
    assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
