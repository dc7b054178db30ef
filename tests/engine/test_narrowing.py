"""Few entries among many: by role, time, tool and failure. Following the cursors gives them all and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from antiphon.engine.sessions import session_rows, transcripts
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.messages import is_failed_entry, is_tool_entry
from antiphon.runtimes import Prompt
from antiphon.store import Tx
from support.app_fixture import MAIN, OPERATOR, AppFixture, open_app_fixture

Said = tuple[int, dict[str, Any]]  # when, and what

CALL: dict[str, Any] = {"type": "toolCall", "id": "1", "name": "t", "arguments": {}}
BODIES: list[dict[str, Any]] = [
    {"role": "user", "content": 'an "error" and what isError says'},
    {"role": "assistant", "content": [], "stopReason": "stop"},
    {"role": "assistant", "content": [], "stopReason": "error"},
    {"role": "assistant", "content": [{"type": "text", "text": '"aborted"'}], "stopReason": "aborted"},
    {"role": "assistant", "content": [{"type": "text", "text": 'no "error"'}], "errorMessage": ""},
    {"role": "assistant", "content": [], "stopReason": "stop", "errorMessage": "é" * 300},
    {"role": "toolResult", "toolCallId": "1", "toolName": "t", "content": [], "isError": True},
    {"role": "toolResult", "toolCallId": "1", "toolName": "t", "content": [], "isError": False},
    {"role": "compaction", "summary": "s", "firstKeptSeq": 1, "tokensBefore": 1},
    {"role": "ofAnother", "isError": True, "stopReason": "error"},
    {"role": "assistant", "content": [{"type": "text", "text": "t"}, CALL], "stopReason": "toolUse"},
    {"role": "assistant", "content": [{**CALL, "name": "other"}, {"type": "text", "name": "t"}]},
    {"role": "toolResult", "toolCallId": "1", "toolName": "other", "content": [CALL]},
]
OF_T = [BODIES[6], BODIES[7], BODIES[10]]
FAILED = [BODIES[2], BODIES[3], BODIES[5], BODIES[6]]
ROLES = ("user", "assistant", "toolResult", "compaction")
RARE = HistoryFilter(roles=("user",))

entries = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(BODIES)), max_size=12)
filters = st.builds(
    HistoryFilter,
    limit=st.integers(1, 4),
    include_tools=st.booleans(),
    roles=st.none() | st.lists(st.sampled_from(ROLES), min_size=1, max_size=2).map(tuple),
    since=st.none() | st.integers(0, 6),
    errors=st.booleans(),
    tool=st.none() | st.just("t"),
)


async def silent(prompt: Prompt) -> str:
    return ""


async def add(tx: Tx, session: int, said: Sequence[Said]) -> None:
    place = await tx.one(session_rows.SQL.reserve_seq_unfenced, id=session, count=len(said), now=0)
    assert place is not None
    for seq, (at, body) in enumerate(said, place["last_seq"] - len(said) + 1):
        text = msgspec.json.encode({**body, "timestamp": at}).decode()
        await transcripts.append_raw(
            tx, place["transcript"], None, transcripts.new_entry(seq, body["role"], text, at)
        )


def is_wanted(wanted: HistoryFilter, said: Said) -> bool:
    at, body = said
    by_role = (
        body["role"] in wanted.roles
        if wanted.roles is not None
        else wanted.include_tools or wanted.errors or wanted.tool or body["role"] != "toolResult"
    )
    by_body = (not wanted.errors or body in FAILED) and (not wanted.tool or body in OF_T)
    return bool(by_role) and at >= (wanted.since or 0) and by_body


async def walk(
    app: AppFixture, wanted: HistoryFilter, between: Callable[[], Any], *, backwards: bool
) -> list[int]:
    """The numbers along the cursors, with something happening after each page."""
    found: list[int] = []
    at: int | None = None if backwards else 0
    while True:
        step = msgspec.structs.replace(wanted, **{"before" if backwards else "after": at})
        page = await app.operations.transcripts.read(OPERATOR, MAIN, step)
        seqs = [item["seq"] for item in page.messages]
        assert len(seqs) <= wanted.limit
        assert page.has_more == (page.next_cursor is not None)
        found = [*seqs, *found] if backwards else [*found, *seqs]
        if page.next_cursor is None:
            return found
        at = int(page.next_cursor)
        await between()


@pytest.mark.requirement("G23", "H1", "H4")
@pytest.mark.parametrize("backwards", [True, False])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(entries, entries, filters, st.sampled_from([1, 3, 5000]), st.sampled_from([1, 500, 2**22]))
@example([(0, BODIES[0]), *[(0, BODIES[1])] * 9], [(0, BODIES[0])], RARE, 3, 2**22)
@example(
    [(0, BODIES[2]), *[(0, BODIES[1])] * 9], [(0, BODIES[2])], HistoryFilter(errors=True, limit=1), 5000, 1
)
def test_following_the_cursors_gives_exactly_what_was_asked_for_while_more_is_said(
    tmp_path_factory: pytest.TempPathFactory,
    backwards: bool,
    before: list[Said],
    later: list[Said],
    wanted: HistoryFilter,
    scanned: int,
    room: int,
) -> None:
    async def check(path: Path) -> None:
        async with open_app_fixture(path, silent) as app:
            session = (await app.create(MAIN))["id"]
            await app.store.tx(add, session, before)
            said, waiting = [*before], [*later]

            async def grow() -> None:
                if waiting:
                    said.append(waiting.pop())
                    await app.store.tx(add, session, said[-1:])

            found = await walk(app, wanted, grow, backwards=backwards)
            there = before if backwards else said
            assert found == [seq for seq, one in enumerate(there, 1) if is_wanted(wanted, one)]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(transcripts, "MAX_ENTRIES_SCANNED", scanned)
        patches.setattr(transcripts, "MAX_PAGE_BYTES", room)
        patches.setattr(transcripts, "ROWS_PER_FETCH", 2)
        asyncio.run(check(tmp_path_factory.mktemp("narrow")))


@pytest.mark.requirement("G23")
@pytest.mark.anyio
@pytest.mark.parametrize("backwards", [True, False])
async def test_a_page_looks_through_so_many_entries_and_says_where_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    monkeypatch.setattr(transcripts, "MAX_ENTRIES_SCANNED", 10)
    async with open_app_fixture(tmp_path, silent) as app:
        session = (await app.create(MAIN))["id"]
        await app.store.tx(add, session, [(0, BODIES[1])] * 25)
        wanted = HistoryFilter(roles=("user",), after=None if backwards else 0)
        page = await app.operations.transcripts.read(OPERATOR, MAIN, wanted)
        assert (page.messages, page.has_more, page.total) == ([], True, 25)
        assert page.next_cursor == ("16" if backwards else "10")


@pytest.mark.requirement("G23")
@pytest.mark.sqlite_only
@pytest.mark.parametrize("name", ["café_lookup", 'odd"name', "a/b"])
def test_a_tool_is_found_however_its_name_is_written(name: str) -> None:
    for body in (json.dumps({"toolName": name}), json.dumps({"toolName": name}, ensure_ascii=False)):
        assert is_tool_entry(name, "toolResult", body)
        assert not is_tool_entry("lookup", "toolResult", body)


@pytest.mark.requirement("G23")
@pytest.mark.sqlite_only
@pytest.mark.parametrize("body", ["{", '"isError"', '{"isError":' + "[" * 100_000, '{"isError":1}'])
def test_what_cannot_be_read_has_not_failed_and_is_of_no_tool(body: str) -> None:
    assert not is_failed_entry("toolResult", body)
    assert not is_tool_entry("isError", "toolResult", body) and not is_tool_entry(
        "isError", "assistant", body
    )
