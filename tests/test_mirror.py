"""Transcript files that follow their sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.access import Caller
from antiphon.config import parse
from antiphon.host import hosting
from antiphon.operations import Message, Operations
from antiphon.transfers.exports import export_all
from antiphon.visits import reading

pytestmark = pytest.mark.anyio
OPERATOR = Caller.operator()


async def say(operations: Operations, text: str) -> None:
    accepted = await operations.submit(OPERATOR, Message(session="main", content=text))
    assert (await operations.wait(OPERATOR, accepted.run_id, 10)).state == "ok"


@pytest.mark.requirement("L4")
async def test_the_file_a_row_names_is_what_an_export_would_write(tmp_path: Path) -> None:
    config, _ = parse({"session": {"transcripts": {"mirror": True}}})
    files: set[Path] = set()
    for number in range(2):  # the second time it goes on with a file that another process wrote
        async with hosting(config, tmp_path) as operations:
            await say(operations, f"say {number}")
            await say(operations, "say more")
            row = await operations.describe(OPERATOR, "main")
            files.add(Path(row.transcript_path or ""))
            if number:
                await operations.renew(OPERATOR, "main")
                await say(operations, "say anew")
                files.add(Path((await operations.describe(OPERATOR, "main")).transcript_path or ""))
    async with reading(tmp_path) as store:
        await export_all(store, tmp_path / "out")
    assert len(files) == 2
    for file in files:
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600
