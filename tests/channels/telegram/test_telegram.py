from __future__ import annotations

from pathlib import Path

import pytest

from channels.telegram.fake import FakeTelegram
from channels.telegram.harness import OWNER, open_chats

pytestmark = pytest.mark.anyio


async def test_smoke(tmp_path: Path) -> None:
    async with FakeTelegram().running() as fake, open_chats(tmp_path / "s", fake) as chats:
        fake.write("hello **there** <b>")
        assert await fake.until_shown(1, OWNER) == ["heard: hello there <b>"]
