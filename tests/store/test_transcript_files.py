"""Transcript files that rows name: found once, written if missing, and not looked for with every list."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.store import transcript_files
from antiphon.store.transcript_files import TranscriptFiles

pytestmark = pytest.mark.anyio


async def test_a_file_that_cannot_be_written_is_neither_looked_for_nor_tried_with_every_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[str]] = []

    async def write(keys: list[str]) -> None:
        written.append(keys)

    files = TranscriptFiles(tmp_path, write)
    (tmp_path / "there.jsonl").touch()
    sessions = [("there", "agent:main:a"), ("missing", "agent:main:b")]
    await files.look_for(sessions)
    assert files.get_path("there") == f"{tmp_path}/there.jsonl"
    assert files.get_path("missing") is None
    assert written == [["agent:main:b"]]

    def look(folder: Path, session_ids: list[str]) -> list[str]:
        raise AssertionError(f"looked for {session_ids}")

    monkeypatch.setattr(transcript_files, "_find_existing", look)
    await files.look_for(sessions)
    assert written == [["agent:main:b"]]
    monkeypatch.undo()
    monkeypatch.setattr(transcript_files, "time", SimpleNamespace(monotonic=lambda: 10.0**9))
    (tmp_path / "missing.jsonl").touch()
    await files.look_for(sessions)
    assert files.get_path("missing") == f"{tmp_path}/missing.jsonl"


async def test_a_missing_file_is_not_looked_for_with_every_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[list[str]] = []

    def look(folder: Path, session_ids: list[str]) -> list[str]:
        looked_for.append(session_ids)
        return []

    monkeypatch.setattr(transcript_files, "_find_existing", look)
    files = TranscriptFiles(tmp_path)
    await files.look_for([("missing", "agent:main:b")])
    await files.look_for([("missing", "agent:main:b")])
    monkeypatch.setattr(transcript_files, "time", SimpleNamespace(monotonic=lambda: 10.0**9))
    await files.look_for([("missing", "agent:main:b")])
    assert looked_for == [["missing"], ["missing"]]
