"""The file of tokens: no change is lost, and a gateway goes on while it cannot be read."""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from antiphon.errors import Conflict, NotFound, StoreError
from antiphon.gateway import shared_tokens
from antiphon.gateway import tokens as module
from antiphon.gateway.shared_tokens import SharedTokens, read_tokens, revoke_token
from antiphon.gateway.tokens import LOCK_FILE_NAME, TOKEN_FILE_NAME, TokenRegistry
from antiphon.store.sqlite.store import SqliteStore

pytestmark = pytest.mark.requirement("W7")
READ = ["operator.read"]


def names(tokens: TokenRegistry) -> list[str]:
    return [record.name for record in tokens.load_current_records()]


def test_two_that_change_the_file_do_not_undo_each_other(tmp_path: Path) -> None:
    one, other = TokenRegistry.open(tmp_path), TokenRegistry.open(tmp_path)
    one.issue_token("a", READ)
    other.issue_token("b", READ)
    with pytest.raises(Conflict):
        other.issue_token("a", READ)
    one.revoke_token("b")
    with pytest.raises(NotFound):
        other.revoke_token("b")
    assert names(one) == names(other) == ["owner", "a"]
    assert (tmp_path / LOCK_FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_many_at_once_are_all_kept(tmp_path: Path) -> None:
    TokenRegistry.open(tmp_path)

    def issue(number: int) -> str:
        return TokenRegistry.open(tmp_path).issue_token(f"t{number}", READ)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(issue, range(16)))
    assert len(names(TokenRegistry.open(tmp_path))) == 17


def test_a_process_that_holds_the_file_for_ever_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_SECONDS", 0.0)
    tokens = TokenRegistry.open(tmp_path)
    with tokens._hold_lock(), pytest.raises(StoreError, match="Another command"):  # pyright: ignore[reportPrivateUsage]
        TokenRegistry.open(tmp_path).issue_token("a", READ)


def test_a_change_while_the_file_is_read_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TokenRegistry.open(tmp_path)
    decode = module.msgspec.json.decode

    def changed(*args: object, **options: object) -> object:
        monkeypatch.undo()
        TokenRegistry.open(tmp_path).issue_token("a", READ)
        return decode(*args, **options)  # pyright: ignore

    monkeypatch.setattr(module.msgspec.json, "decode", changed)
    assert names(TokenRegistry.open(tmp_path)) == ["owner", "a"]


def test_a_file_that_was_written_over_within_the_same_moment_is_seen(tmp_path: Path) -> None:
    tokens = TokenRegistry.open(tmp_path)
    path = tmp_path / TOKEN_FILE_NAME
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"owner"', b'"other"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert names(tokens) == ["other"]


@pytest.mark.parametrize("harm", ["gone", "open", "broken"])
def test_what_was_known_holds_while_the_file_cannot_be_read(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = TokenRegistry.open(tmp_path)
    path, content = tmp_path / TOKEN_FILE_NAME, (tmp_path / TOKEN_FILE_NAME).read_bytes()
    match harm:
        case "gone":
            path.unlink()
        case "open":
            path.chmod(0o644)
        case _:
            path.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert names(tokens) == names(tokens) == ["owner"]
    assert len(caplog.records) == 1
    assert "stay valid" in caplog.text
    if harm != "gone":  # without a file there is a new one; with such a file there is no start
        with pytest.raises(StoreError):
            TokenRegistry.open(tmp_path)
    path.write_bytes(content)
    path.chmod(0o600)
    TokenRegistry.open(tmp_path).issue_token("a", READ)
    assert names(tokens) == ["owner", "a"]


def test_the_new_name_of_the_file_is_written_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TokenRegistry.open(tmp_path)
    synced: list[tuple[int, str]] = []

    def fsync(file: int) -> None:
        synced.append((os.fstat(file).st_ino, path.read_text()))

    path = tmp_path / TOKEN_FILE_NAME
    monkeypatch.setattr(module.os, "fsync", fsync)
    tokens.issue_token("a", READ)
    last, content = synced[-1]
    assert last == tmp_path.stat().st_ino
    assert '"a"' in content  # after the file has got its name


@pytest.mark.anyio
@pytest.mark.parametrize("error", [StoreError("It is full.", "Make room."), OSError("It is full.")])
async def test_a_revoked_token_is_refused_while_the_database_takes_no_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The failure is logged once, and the uses of the tokens are recorded when writes work again."""
    monkeypatch.setattr(shared_tokens, "REFRESH_SECONDS", 0.0)
    tokens = TokenRegistry.open(tmp_path)
    store = await SqliteStore.open(tmp_path / "antiphon.db")
    shared = SharedTokens(store, tokens)
    for name in ("kept", "revoked"):
        await shared_tokens.issue_shared_token(store, name, READ)
    await shared.start()
    tokens.used_digests = {record.digest for record in tokens.shared_records}
    await store.tx(revoke_token, "revoked")

    write, attempts, tried_thrice, recorded = store.tx, list[str](), asyncio.Event(), asyncio.Event()

    async def fail(*_: object) -> NoReturn:
        attempts.append("failed")
        if len(attempts) == 3:
            tried_thrice.set()
        raise error

    async def succeed(*given: Any) -> None:
        await write(*given)
        recorded.set()

    monkeypatch.setattr(store, "tx", fail)
    updating = asyncio.create_task(shared.run())
    try:
        async with asyncio.timeout(30):
            with caplog.at_level(logging.WARNING):
                await tried_thrice.wait()
            assert names(tokens) == ["owner", "kept"]
            assert len(caplog.records) == 1
            monkeypatch.setattr(store, "tx", succeed)
            await recorded.wait()
            [record] = await store.read(read_tokens)
            assert (record.name, record.last_used_at is not None) == ("kept", True)
            assert not tokens.used_digests
    finally:
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        await store.close()
