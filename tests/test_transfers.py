"""Export and import of conversations: what goes out comes back, and what others left can be brought in."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon import keys, messages
from antiphon.access import Caller
from antiphon.config import Config, parse
from antiphon.engine.sessions import session_rows, transcripts
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.engine.sessions.transcripts import Entry, HistoryFilter
from antiphon.errors import InvalidInput, NotFound
from antiphon.messages import (
    AssistantMessage,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolCall,
    ToolResult,
    UserMessage,
)
from antiphon.operations.transcript_types import ConversationView
from antiphon.operations.types import ListFilter
from antiphon.state_access import open_operations_readonly, open_store_exclusive
from antiphon.store import Row, Store, Tx
from antiphon.transfers import imports, jsonl
from antiphon.transfers import sessions_index as index
from antiphon.transfers.exports import export_all, export_named
from antiphon.transfers.import_source import ImportReport, scan_source
from antiphon.transfers.imports import import_source
from antiphon.transfers.jsonl import TranscriptReader, format_timestamp, parse_timestamp

NOW = 1_800_000_000_000
OPERATOR = Caller.operator()
MAIN = "agent:main:main"
FIRST, SECOND = "0b7a3b5e-0000-4000-8000-000000000001", "0b7a3b5e-0000-4000-8000-000000000002"


def entry_line(entry: str, parent: str | None, message: dict[str, Any], **more: Any) -> str:
    at = "2026-11-15T19:40:00.000Z"
    return json.dumps(
        {"type": "message", "id": entry, "parentId": parent, "timestamp": at, "message": message} | more
    )


def user(text: str, timestamp: int = NOW) -> dict[str, Any]:
    return {"role": "user", "content": text, "timestamp": timestamp}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}], "timestamp": NOW}


def folder(
    root: Path, index: dict[str, Any] | str, files: Mapping[str, Iterable[str]], agent: str = "main"
) -> Path:
    """A sessions directory below `agents/<agent>`, written as that family writes it."""
    path = root / "agents" / agent / "sessions"
    path.mkdir(parents=True, exist_ok=True)
    path.joinpath("sessions.json").write_text(index if isinstance(index, str) else json.dumps(index))
    for name, lines in files.items():
        path.joinpath(name).write_text("".join(f"{line}\n" for line in lines))
    return path


def header(session_id: str, **more: Any) -> str:
    return json.dumps(
        {
            "type": "session",
            "version": 3,
            "id": session_id,
            "timestamp": format_timestamp(NOW),
            "cwd": "/w",
            **more,
        }
    )


async def brought(
    state: Path,
    source: Path,
    config: Config | None = None,
    *,
    agent_id: str | None = None,
    dry_run: bool = False,
) -> ImportReport:
    config = config or Config()
    found = scan_source(source, config, agent_id)
    async with open_store_exclusive(config, state) as store:
        return await import_source(store, config, found, NOW, dry_run=dry_run)


async def transcript(state: Path, reference: str = MAIN) -> list[dict[str, Any]]:
    async with open_operations_readonly(Config(), state) as operations:
        wanted = HistoryFilter(limit=1000, include_tools=True, after=0)
        return (await operations.transcripts.read(OPERATOR, reference, wanted)).messages


async def described(state: Path, reference: str, config: Config | None = None) -> dict[str, Any]:
    async with open_operations_readonly(config or Config(), state) as operations:
        return msgspec.to_builtins(await operations.sessions.describe(OPERATOR, reference))


def exported_lines(out: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in sorted(out.iterdir())}


async def export_everything(state: Path, out: Path) -> dict[str, list[str]]:
    async with open_store_exclusive(Config(), state) as store:
        await export_all(store, out)
    return exported_lines(out)


# --- what a message can be ---

text = st.text(st.characters(codec="utf-8"), max_size=60)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(text, json_values, max_size=3)
native = st.none() | objects
times = st.integers(1, 4_000_000_000_000)
texts = st.builds(TextBlock, text=text, native=native)
images = st.builds(ImageBlock, data=text, mime_type=text)
said: st.SearchStrategy[Message] = st.one_of(
    st.builds(UserMessage, content=text | st.lists(texts | images, max_size=3), timestamp=times),
    st.builds(
        AssistantMessage,
        content=st.lists(
            texts
            | st.builds(ThinkingBlock, thinking=text, thinking_signature=st.none() | text, native=native)
            | st.builds(ToolCall, id=text, name=text, arguments=objects, native=native),
            max_size=4,
        ),
        timestamp=times,
        stop_reason=st.sampled_from([None, "stop", "toolUse", "error"]),
        model=st.none() | text,
        error_message=st.none() | text,
        native=native,
    ),
    st.builds(
        ToolResult,
        tool_call_id=text,
        tool_name=text,
        content=st.lists(texts, max_size=2),
        timestamp=times,
        is_error=st.booleans(),
        details=json_values,
    ),
)


async def _fill(tx: Tx, key: str, everything: list[tuple[int, Message]]) -> Row:
    row = await session_rows.create_session(tx, keys.parse(key), NOW)
    for seq, (at, message) in enumerate(everything, 1):
        role = str(message.__struct_config__.tag)
        entry = Entry(seq, f"{seq:08x}", role, messages.encode_message(message), at)
        await transcripts.append_raw(tx, row["transcript"], None, entry)
    await tx.one(session_rows.SQL.reserve_seq_unfenced, id=row["id"], count=len(everything), now=NOW)
    return row


@pytest.mark.requirement("L4", "R", "G45")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(times, said), max_size=8))
def test_what_is_exported_comes_back_and_goes_out_the_same(
    tmp_path_factory: pytest.TempPathFactory, everything: list[tuple[int, Message]]
) -> None:
    async def scenario(root: Path) -> None:
        async with open_store_exclusive(Config(), root / "one") as store:
            await store.tx(_fill, MAIN, everything)
            await export_all(store, root / "first")
        report = await brought(root / "two", root / "first")
        assert (report.imported, report.messages, report.damaged_lines) == (1, len(everything), 0)
        assert await export_everything(root / "two", root / "second") == exported_lines(root / "first")

    asyncio.run(scenario(tmp_path_factory.mktemp("there-and-back")))


@pytest.mark.anyio
@pytest.mark.requirement("L4")
async def test_a_compaction_keeps_pointing_at_the_same_entry(tmp_path: Path) -> None:
    compaction = messages.CompactionEntry(
        summary="so far", first_kept_seq=2, tokens_before=900, timestamp=NOW
    )
    everything: list[tuple[int, Message]] = [
        (NOW, UserMessage(content="one", timestamp=NOW)),
        (NOW, UserMessage(content="two", timestamp=NOW)),
        (NOW + 5, compaction),
    ]
    async with open_store_exclusive(Config(), tmp_path / "one") as store:
        await store.tx(_fill, MAIN, everything)
        await export_all(store, tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.jsonl")
    line = json.loads(file.read_text().splitlines()[3])
    assert line["type"] == "compaction"
    assert (line["firstKeptEntryId"], line["tokensBefore"], line["parentId"]) == ("00000002", 900, "00000002")
    await brought(tmp_path / "two", tmp_path / "out")
    assert (await transcript(tmp_path / "two"))[2]["firstKeptSeq"] == 2


@pytest.mark.anyio
@pytest.mark.requirement("L4")
async def test_an_export_is_private_and_at_the_path_that_a_list_names(tmp_path: Path) -> None:
    async with open_store_exclusive(Config(), tmp_path) as store:
        await store.tx(_fill, MAIN, [(NOW, UserMessage(content="hello", timestamp=NOW))])
        done = await export_named(store, SessionResolver(Config()), tmp_path / "transcripts", ["main"])
        assert (done.files, done.messages) == (1, 1)
    check_export(Path((await described(tmp_path, MAIN))["transcriptPath"]))


def check_export(path: Path) -> None:
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["type"], first["version"], first["id"]) == ("session", 3, path.stem)
    assert (second["type"], second["parentId"], second["message"]["content"]) == ("message", None, "hello")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.anyio
async def test_exporting_one_more_session_keeps_the_others_in_the_index(tmp_path: Path) -> None:
    async with open_store_exclusive(Config(), tmp_path) as store:
        for key in (MAIN, "agent:main:cron:nightly"):
            await store.tx(_fill, key, [])
        for key in ("main", "cron:nightly"):
            await export_named(store, SessionResolver(Config()), tmp_path / "out", [key])
        with pytest.raises(NotFound):
            await export_named(store, SessionResolver(Config()), tmp_path / "out", ["cron:other"])
    assert set(json.loads((tmp_path / "out" / "sessions.json").read_text())) == {
        MAIN,
        "agent:main:cron:nightly",
    }


@pytest.mark.anyio
@pytest.mark.requirement("L4")
async def test_exporting_everything_keeps_what_others_have_in_the_index(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    theirs = {"agent:main:telegram:direct:9": {"sessionId": SECOND, "updatedAt": 3, "odd": [1]}}
    out.joinpath("sessions.json").write_text(json.dumps({**theirs, MAIN: {"sessionId": FIRST}}))
    async with open_store_exclusive(Config(), tmp_path) as store:
        row = await store.tx(_fill, MAIN, [])
        await export_all(store, out)
        index = json.loads(out.joinpath("sessions.json").read_text())
        assert index.pop(MAIN)["sessionId"] == row["session_id"]
        assert index == theirs
        await export_all(store, out, is_ours=True)
        assert set(json.loads(out.joinpath("sessions.json").read_text())) == {MAIN}


@pytest.mark.anyio
async def test_an_index_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    out.joinpath("sessions.json").write_text("[torn")
    async with open_store_exclusive(Config(), tmp_path) as store:
        await store.tx(_fill, MAIN, [])
        with pytest.raises(InvalidInput, match="could not be read"):
            await export_all(store, out)
    assert exported_lines(out) == {"sessions.json": ["[torn"]}


@pytest.mark.anyio
async def test_a_key_that_leads_nowhere_is_told_before_anything_is_written(tmp_path: Path) -> None:
    async with open_store_exclusive(Config(), tmp_path) as store:
        await store.tx(_fill, MAIN, [])
        with pytest.raises(NotFound):
            await export_named(store, SessionResolver(Config()), tmp_path / "out", ["main", "cron:other"])
    assert not (tmp_path / "out").exists()


async def _renew(tx: Tx, now: int) -> None:
    row = await session_rows.find_session(tx, keys.parse(MAIN), None)
    assert row is not None
    await session_rows.start_new_transcript(tx, row, "new", now)


async def _say(tx: Tx, text: str, now: int) -> None:
    row = await session_rows.find_session(tx, keys.parse(MAIN), None)
    assert row is not None
    entry = Entry(
        1, "00000001", "user", messages.encode_message(UserMessage(content=text, timestamp=now)), now
    )
    await transcripts.append_raw(tx, row["transcript"], None, entry)
    await tx.one(session_rows.SQL.reserve_seq_unfenced, id=row["id"], count=1, now=now)


async def _go_back_to(tx: Tx, session_id: str, now: int) -> None:
    row = await session_rows.find_session(tx, keys.SessionIdRef(session_id), None)
    assert row is not None
    await session_rows.restore_transcript(tx, row, now)


async def conversations(state: Path) -> list[ConversationView]:
    async with open_operations_readonly(Config(), state) as operations:
        return await operations.conversations.list(OPERATOR, MAIN)


async def _three_conversations(state: Path) -> list[ConversationView]:
    """`one` and `three` have ended; `two` is current, because it was restored."""
    async with open_store_exclusive(Config(), state) as store:
        await store.tx(_fill, MAIN, [])
        await store.tx(_say, "one", NOW + 1)
        for at, text in ((NOW + 10, "two"), (NOW + 20, "three")):
            await store.tx(_renew, at)
            await store.tx(_say, text, at + 1)
    two = (await conversations(state))[1].session_id
    async with open_store_exclusive(Config(), state) as store:
        await store.tx(_go_back_to, two, NOW + 30)
    return await conversations(state)


@pytest.mark.anyio
@pytest.mark.requirement("L4", "G45")
async def test_conversations_that_ended_come_back_too(tmp_path: Path) -> None:
    told = await _three_conversations(tmp_path / "one")
    assert [item.ended_at for item in told] == [NOW + 30, None, NOW + 10]
    exported = await export_everything(tmp_path / "one", tmp_path / "out")
    report = await brought(tmp_path / "two", tmp_path / "out")
    assert (report.imported, report.past, report.messages, report.unlisted_files) == (1, 2, 3, 0)
    assert await conversations(tmp_path / "two") == told
    for item, text in zip(told, ("three", "two", "one"), strict=True):
        assert [said["content"] for said in await transcript(tmp_path / "two", item.session_id)] == [text]
    assert [said["content"] for said in await transcript(tmp_path / "two")] == ["two"]
    assert await export_everything(tmp_path / "two", tmp_path / "again") == exported
    again = await brought(tmp_path / "two", tmp_path / "out")
    assert (again.imported, again.past, again.skipped, again.messages) == (0, 0, 1, 0)


@pytest.mark.anyio
async def test_an_index_tells_only_of_conversations_whose_files_are_there(tmp_path: Path) -> None:
    told = await _three_conversations(tmp_path / "one")

    async def index_after(*references: str) -> list[str]:
        async with open_store_exclusive(Config(), tmp_path / "one") as store:
            await export_named(store, SessionResolver(Config()), tmp_path / "out", references)
        entry = json.loads((tmp_path / "out" / "sessions.json").read_text())[MAIN]
        return [item["sessionId"] for item in entry.get("conversations", [])]

    three, two, one = (item.session_id for item in told)
    assert await index_after("main") == []
    assert await index_after(one) == [one, two]
    assert await index_after(three) == [one, two, three]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "theirs", [7, [1], [{"sessionId": "../x"}], [{"sessionId": SECOND}], [{"sessionId": "s", "reason": ""}]]
)
async def test_what_others_call_conversations_does_no_harm(tmp_path: Path, theirs: object) -> None:
    entry = {"sessionId": FIRST, "updatedAt": NOW, "conversations": theirs}
    folder(tmp_path / "old", {"main": entry}, {f"{FIRST}.jsonl": [header(FIRST)]})
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert (report.imported, report.past, report.failed_count) == (1, 0, 0)
    assert [item.session_id for item in await conversations(tmp_path / "new")] == [FIRST]


@pytest.mark.anyio
async def test_an_export_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    async with open_store_exclusive(Config(), tmp_path) as store:
        await store.tx(_fill, MAIN, [])
        await export_all(store, tmp_path / "out")
        before = exported_lines(tmp_path / "out")
        broken = _Broken(store)
        with pytest.raises(RuntimeError):
            await export_all(broken, tmp_path / "out")
    assert exported_lines(tmp_path / "out") == before


class _Broken:
    """A store that dies while the first transcript is read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.clock = store.clock
        self.shared, self.identity, self.write_error = store.shared, store.identity, store.write_error
        self.tx, self.close = store.tx, store.close

    async def read(self, script: Any, /, *args: Any, **kwargs: Any) -> Any:
        if script is transcripts.read_entries_after:
            raise RuntimeError("gone")
        return await self._store.read(script, *args, **kwargs)


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_a_damaged_entry_does_not_stop_an_export(tmp_path: Path) -> None:
    async def damage(tx: Tx) -> None:
        row = await session_rows.create_session(tx, keys.parse(MAIN), NOW)
        for seq, body in enumerate(
            ['{"role":"user"', messages.encode_message(UserMessage(content="ok", timestamp=1))], 1
        ):
            await transcripts.append_raw(
                tx, row["transcript"], None, Entry(seq, f"e{seq}", "user", body, NOW)
            )

    async with open_store_exclusive(Config(), tmp_path) as store:
        await store.tx(damage)
        done = await export_all(store, tmp_path / "out")
    assert (done.messages, done.damaged) == (1, 1)


# --- other programs' directories ---


@pytest.mark.anyio
@pytest.mark.requirement("C", "G45", "K4")
async def test_a_first_generation_directory(tmp_path: Path) -> None:
    index = """{
      // written by hand at some point
      main: {sessionId: "s-main", updatedAt: 1700000000000, lastChannel: "whatsapp", lastTo: "+4912",
             thinkingLevel: "high", systemSent: true, abortedLastRun: false, totalTokens: 77, skillsSnapshot: {a: 1},},
      "discord:group:Room-7": {sessionId: "s-group", updatedAt: 1700000000001, chatType: "group", displayName: "Room"},
      "telegram:dm:Bob": {sessionId: "s-dm", updatedAt: 3},
      unknown: {sessionId: "s-unknown"},
      "agent:main:bad": {sessionId: "../../etc/passwd"},
    }"""
    files = {
        "s-main.jsonl": [
            json.dumps(
                {"type": "session", "id": "s-main", "timestamp": "2023-11-14T22:13:20.000Z", "cwd": "/old"}
            ),
            json.dumps(
                {
                    "type": "message",
                    "timestamp": format_timestamp(NOW),
                    "message": {"role": "user", "content": "hi"},
                }
            ),
            json.dumps(
                {
                    "type": "message",
                    "timestamp": format_timestamp(NOW),
                    "message": {"role": "assistant", "content": "yo"},
                }
            ),
        ],
        "s-group.jsonl": [],
        "s-old.jsonl.reset.2026-01-01T00-00-00.000Z": ["{}"],
        "s-stray.jsonl": ["{}"],
    }
    folder(tmp_path / "old", index, files)
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert (report.imported, report.messages, report.missing_transcripts) == (3, 2, 1)
    assert (report.archived_files, report.unlisted_files) == (1, 1)
    assert (report.failed_count, report.passed_over) == (1, 1)
    first, second = await transcript(tmp_path / "new")
    assert (first["role"], first["content"], first["timestamp"]) == ("user", "hi", NOW)
    assert second["content"] == [{"type": "text", "text": "yo"}], "what a model cannot read is repaired"
    main = await described(tmp_path / "new", "main")
    assert (main["sessionId"], main["updatedAt"], main["lastTo"]) == ("s-main", 1_700_000_000_000, "+4912")
    assert (main["thinkingLevel"], main["systemSent"], main["totalTokens"]) == ("high", True, 77)
    assert (await described(tmp_path / "new", "discord:group:Room-7"))["displayName"] == "Room"
    assert (await described(tmp_path / "new", "s-dm"))["key"] == "agent:main:telegram:direct:Bob"


@pytest.mark.anyio
@pytest.mark.requirement("K3")
@pytest.mark.parametrize("main", ["main", MAIN])
async def test_the_main_session_is_the_one_called_so_and_global_only_where_there_is_none(
    tmp_path: Path, main: str
) -> None:
    both = {
        "global": {"sessionId": SECOND, "updatedAt": NOW + 9},
        main: {"sessionId": FIRST, "updatedAt": NOW},
    }
    files = {f"{FIRST}.jsonl": [header(FIRST), entry_line("a", None, user("really"))]}
    folder(tmp_path / "both", both, files)
    report = await brought(tmp_path / "new", tmp_path / "both")
    assert (report.imported, report.beside, report.failed_count) == (2, 1, 0)
    assert [entry["content"] for entry in await transcript(tmp_path / "new")] == ["really"]
    folder(tmp_path / "one", {"global": both["global"]}, {f"{SECOND}.jsonl": [header(SECOND)]})
    assert (await brought(tmp_path / "other", tmp_path / "one")).imported == 1
    assert (await described(tmp_path / "other", MAIN))["sessionId"] == SECOND


@pytest.mark.anyio
@pytest.mark.requirement("K3")
@pytest.mark.parametrize(("has_transcript", "wins"), [(True, SECOND), (False, FIRST)])
async def test_where_all_mains_are_one_global_is_its_own_name(
    tmp_path: Path, has_transcript: bool, wins: str
) -> None:
    config, _ = parse({"session": {"scope": "global"}})
    index = {
        "global": {"sessionId": SECOND, "updatedAt": NOW + 9},
        MAIN: {"sessionId": FIRST, "updatedAt": NOW},
    }
    named = [FIRST, SECOND] if has_transcript else [FIRST]
    folder(tmp_path / "old", index, {f"{name}.jsonl": [header(name)] for name in named})
    assert (await brought(tmp_path / "new", tmp_path / "old", config)).beside == 1
    async with open_operations_readonly(config, tmp_path / "new") as operations:
        assert (await operations.sessions.describe(OPERATOR, "main")).session_id == wins


@pytest.mark.anyio
@pytest.mark.requirement("C", "G45")
async def test_a_third_generation_directory(tmp_path: Path) -> None:
    child = "agent:helper:subagent:1d9f7e0c-0000-4000-8000-000000000003"
    topic = "agent:main:telegram:group:-100:topic:42"
    index = {
        MAIN: {
            "sessionId": FIRST,
            "updatedAt": NOW,
            "sessionFile": f"/far/away/{FIRST}.jsonl",
            "origin": {"label": "x"},
        },
        topic: {
            "sessionId": SECOND,
            "updatedAt": NOW,
            "deliveryContext": {"channel": "telegram", "threadId": 42},
        },
    }
    files = {
        f"{FIRST}.jsonl": [
            header(FIRST),
            entry_line("a0000001", None, user("first")),
            entry_line("a0000002", "a0000001", answer("an answer that was edited away")),
            '{"type":"message","id":"torn","parentId":"a0000001","mess',
            entry_line("a0000003", "a0000001", answer("the answer")),
            json.dumps({"type": "model_change", "id": "a0000004", "parentId": "a0000003", "modelId": "m"}),
            entry_line("a0000005", "a0000004", user("half a \\ud83d pair")).replace("\\\\ud83d", "\\ud83d"),
            json.dumps(
                {
                    "type": "compaction", "id": "a0000006", "parentId": "a0000005", "timestamp": format_timestamp(NOW),
                    "summary": "sum", "firstKeptEntryId": "a0000004", "tokensBefore": 9, "details": {"by": "x"},
                }
            ),
            entry_line("a0000007", "a0000006", {"role": "hologram", "content": {"beam": 1}}),
            entry_line("a0000008", "a0000007", {**answer("x"), "content": [{"type": "audio", "data": "…"}]}),
        ],
        f"{SECOND}-topic-42.jsonl": [header(SECOND), entry_line("b0000001", None, user("in a topic"))],
    }  # fmt: skip
    folder(tmp_path / "old", index, files)
    folder(
        tmp_path / "old",
        {child: {"sessionId": "s-child", "updatedAt": NOW + 9, "spawnedBy": MAIN}},
        {},
        "helper",
    )
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert (report.imported, report.damaged_lines, report.left_out_entries) == (3, 1, 1)
    assert report.unknown_agents == ["helper"]

    entries = await transcript(tmp_path / "new")
    assert [entry["id"][-1] for entry in entries] == ["1", "3", "5", "6", "7", "8"], (
        "one branch, in its order"
    )
    assert entries[1]["content"][0]["text"] == "the answer"
    assert entries[2]["content"] == "half a \ufffd pair"
    assert (entries[3]["firstKeptSeq"], entries[3]["details"]) == (3, {"by": "x"})
    assert (entries[4]["role"], entries[4]["content"]) == ("hologram", {"beam": 1})
    assert entries[5]["content"] == [{"type": "audio", "data": "…"}]
    assert [entry["content"] for entry in await transcript(tmp_path / "new", topic)] == ["in a topic"]

    assert (await described(tmp_path / "new", "s-child"))["parentKey"] == MAIN
    route = (await described(tmp_path / "new", topic))["deliveryContext"]
    assert route == {"channel": "telegram", "threadId": "42"}
    again = await export_everything(tmp_path / "new", tmp_path / "out")
    assert json.loads("".join(again["sessions.json"]))[MAIN]["origin"] == {"label": "x"}
    assert json.loads(again[f"{FIRST}.jsonl"][0])["cwd"] == "/w"


@pytest.mark.anyio
@pytest.mark.requirement("G25")
async def test_importing_twice_changes_nothing(tmp_path: Path) -> None:
    files = {f"{FIRST}.jsonl": [header(FIRST), entry_line("a", None, user("once"))]}
    source = folder(tmp_path / "old", {"main": {"sessionId": FIRST, "updatedAt": NOW}}, files)
    first = await brought(tmp_path / "new", tmp_path / "old")
    assert (first.imported, first.skipped) == (1, 0)
    before = await export_everything(tmp_path / "new", tmp_path / "before")
    second = await brought(tmp_path / "new", source)
    assert (second.imported, second.skipped, second.messages) == (0, 1, 0)
    assert await export_everything(tmp_path / "new", tmp_path / "after") == before


@pytest.mark.anyio
@pytest.mark.requirement("G25")
async def test_a_key_in_use_keeps_its_conversation(tmp_path: Path) -> None:
    async with open_store_exclusive(Config(), tmp_path / "new") as store:
        await store.tx(_fill, MAIN, [(NOW, UserMessage(content="mine", timestamp=NOW))])
    files = {f"{FIRST}.jsonl": [header(FIRST), entry_line("a", None, user("theirs"))]}
    folder(tmp_path / "old", {"main": {"sessionId": FIRST, "updatedAt": NOW}}, files)
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert (report.imported, report.beside) == (1, 1)
    assert [entry["content"] for entry in await transcript(tmp_path / "new")] == ["mine"]
    assert [entry["content"] for entry in await transcript(tmp_path / "new", FIRST)] == ["theirs"]


THEIRS = {
    "sessionId": FIRST,
    "updatedAt": NOW,
    "sendPolicy": "deny",
    "label": "home",
    "displayName": "Home",
    "thinkingLevel": "high",
    "verboseLevel": "on",
    "lastChannel": "whatsapp",
    "lastTo": "+4912",
    "deliveryContext": {"channel": "whatsapp", "to": "+4912"},
    "groupActivation": "mention",
    "inputTokens": 70,
    "totalTokens": 77,
}
SAID = {f"{FIRST}.jsonl": [header(FIRST), entry_line("a", None, user("theirs"))]}


async def _set(tx: Tx, key: str, settings: dict[str, str], route: str | None = None) -> None:
    """As an operator has set it here."""
    row = await session_rows.find_session(tx, keys.parse(key), None) or await session_rows.create_session(
        tx, keys.parse(key), NOW
    )
    await session_rows.patch_session(tx, row["id"], settings, NOW)
    if route:
        whole = await tx.one(session_rows.SQL.by_id, id=row["id"])
        assert whole is not None
        columns = index.build_columns(
            {"lastChannel": "signal", "lastTo": route}, keys.parse(key), lambda _: True
        )
        await tx.do(
            session_rows.SQL.set_imported_columns,
            id=row["id"],
            updated_at=NOW,
            **index.merge_columns(whole, columns),
        )


async def in_use(state: Path, settings: dict[str, str] | None = None, route: str | None = None) -> None:
    async with open_store_exclusive(Config(), state) as store:
        await store.tx(_fill, MAIN, [(NOW, UserMessage(content="mine", timestamp=NOW))])
        await store.tx(_set, MAIN, settings or {}, route)


async def exported_entry(state: Path, out: Path) -> dict[str, Any]:
    return json.loads("".join((await export_everything(state, out))["sessions.json"]))[MAIN]


@pytest.mark.anyio
@pytest.mark.requirement("G25", "D1")
async def test_a_key_in_use_takes_over_what_it_has_nothing_of(tmp_path: Path) -> None:
    """As after trying it out before importing. In an export it comes back, whichever conversation is current."""
    await in_use(tmp_path / "new")
    folder(tmp_path / "old", {MAIN: THEIRS}, SAID)
    dry = await brought(tmp_path / "new", tmp_path / "old", dry_run=True)
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert report.merged == dry.merged
    [merged] = report.merged
    assert merged.key == MAIN
    counters = {"inputTokens", "totalTokens"}
    assert set(merged.left_behind) == counters
    assert set(merged.taken_over) == THEIRS.keys() - counters - {"sessionId", "updatedAt"} | {"cwd"}
    here = await described(tmp_path / "new", "home")
    assert (here["key"], here["sendPolicy"], here["lastTo"]) == (MAIN, "deny", "+4912")
    async with open_operations_readonly(Config(), tmp_path / "new") as operations:
        assert (await operations.sessions.list(OPERATOR, ListFilter(search="home"))).count == 1
    async with open_store_exclusive(Config(), tmp_path / "new") as store:
        await store.tx(_go_back_to, FIRST, NOW + 30)
    entry = await exported_entry(tmp_path / "new", tmp_path / "out")
    assert {name: entry[name] for name in THEIRS if name not in {*counters, "updatedAt"}} == {
        name: value for name, value in THEIRS.items() if name not in {*counters, "updatedAt"}
    }
    again = await brought(tmp_path / "new", tmp_path / "old")
    assert (again.skipped, again.merged) == (1, [])


@pytest.mark.anyio
@pytest.mark.requirement("G25")
async def test_what_was_decided_here_stays_and_the_report_says_so(tmp_path: Path) -> None:
    mine = {"label": "mine", "thinking": "low"}
    await in_use(tmp_path / "new", mine, "+1")
    folder(tmp_path / "old", {MAIN: THEIRS}, SAID)
    [merged] = (await brought(tmp_path / "new", tmp_path / "old")).merged
    assert {"sendPolicy", "displayName", "verboseLevel", "groupActivation"} <= set(merged.taken_over)
    route = {"lastChannel", "lastTo", "deliveryContext"}
    assert set(merged.left_behind) == {"label", "thinkingLevel", "inputTokens", "totalTokens", *route}
    entry = await exported_entry(tmp_path / "new", tmp_path / "out")
    assert (entry["label"], entry["thinkingLevel"], entry["lastTo"]) == ("mine", "low", "+1")
    assert entry["lastChannel"] == "signal" and "deliveryContext" not in entry


@pytest.mark.anyio
@pytest.mark.requirement("D1")
@pytest.mark.parametrize(
    ("mine", "theirs", "holds"),
    [
        (None, "deny", "deny"),
        ("allow", "deny", "deny"),
        ("deny", "allow", "deny"),
        (None, "allow", None),
        ("allow", None, "allow"),
    ],
)
async def test_of_two_send_policies_the_stricter_one_holds(
    tmp_path: Path, mine: str | None, theirs: str | None, holds: str | None
) -> None:
    await in_use(tmp_path / "new", {"send_policy": mine} if mine else None)
    entry = {"sessionId": FIRST, **({"sendPolicy": theirs} if theirs else {})}
    folder(tmp_path / "old", {MAIN: entry}, SAID)
    [merged] = (await brought(tmp_path / "new", tmp_path / "old")).merged
    assert (await described(tmp_path / "new", MAIN)).get("sendPolicy") == holds
    assert ("sendPolicy" in merged.taken_over) == (holds != mine)
    assert ("sendPolicy" in merged.left_behind) == (theirs not in {None, holds})


@pytest.mark.anyio
async def test_a_label_that_is_taken_is_left_behind(tmp_path: Path) -> None:
    await in_use(tmp_path / "new")
    async with open_store_exclusive(Config(), tmp_path / "new") as store:
        await store.tx(_set, "agent:main:direct:x", {"label": "home"})
    folder(tmp_path / "old", {MAIN: THEIRS}, SAID)
    [merged] = (await brought(tmp_path / "new", tmp_path / "old")).merged
    assert "label" in merged.left_behind
    assert "label" not in await described(tmp_path / "new", MAIN)


@pytest.mark.anyio
async def test_a_dry_run_says_the_same_and_does_nothing(tmp_path: Path) -> None:
    files = {f"{FIRST}.jsonl": [header(FIRST), entry_line("a", None, user("hello"))]}
    folder(tmp_path / "old", {"main": {"sessionId": FIRST, "updatedAt": NOW}}, files)
    rehearsed = await brought(tmp_path / "new", tmp_path / "old", dry_run=True)
    assert (rehearsed.dry_run, rehearsed.imported, rehearsed.messages) == (True, 1, 1)
    async with open_operations_readonly(Config(), tmp_path / "new") as operations:
        assert (await operations.sessions.list(OPERATOR, ListFilter())).count == 0


def entries(**sessions: Mapping[str, Any]) -> dict[str, Any]:
    """An index in which the first session is the newest, with a key in each name and `_` for `:`."""
    return {
        name.replace("_", ":"): {"sessionId": name, "updatedAt": NOW - number, **entry}
        for number, (name, entry) in enumerate(sessions.items())
    }


DENIED, HOME, HUT = {"sendPolicy": "deny"}, {"label": "home"}, {"label": "hut"}


@pytest.mark.anyio
@pytest.mark.requirement("G25")
@pytest.mark.parametrize(
    ("index", "told"),
    [
        (entries(telegram_direct_42={}, telegram_dm_42=DENIED), {"beside": 1}),
        (entries(main=DENIED, **{"global": HOME}), {"beside": 1}),
        (entries(main={}, cron_x={"sessionId": "main"}), {"skipped": 1}),
        (entries(cron_x=HOME, cron_y=HOME, cron_z=HOME), {"left_out_labels": 2}),
        (entries(subagent_a=HOME, subagent_b=HOME, cron_x=HOME), {"imported": 3, "left_out_labels": 1}),
        (entries(cron_x=HOME | {"archivedAt": NOW}, cron_y=HOME, cron_z=HOME), {"left_out_labels": 1}),
        (
            entries(cron_x=HOME, telegram_direct_4=HOME, telegram_dm_4=HUT, cron_y=HUT),
            {"beside": 1, "left_out_labels": 2},
        ),
    ],
)
async def test_a_dry_run_tells_of_sessions_that_want_the_same(
    tmp_path: Path, index: dict[str, Any], told: dict[str, int]
) -> None:
    folder(tmp_path / "old", index, {"cron_x.jsonl": [header("cron_x"), entry_line("a", None, user("hi"))]})
    dry = await brought(tmp_path / "new", tmp_path / "old", dry_run=True)
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert msgspec.structs.replace(dry, dry_run=False) == report
    assert {name: getattr(report, name) for name in told} == told


@pytest.mark.anyio
async def test_a_label_is_given_to_one_session_of_an_agent(tmp_path: Path) -> None:
    """To the newest, and what is archived keeps its own, as when an operator labels them here."""
    archived = HOME | {"archivedAt": NOW, "updatedAt": 5}
    folder(tmp_path / "old", entries(cron_x=HOME, cron_y=HOME | {"displayName": "Y"}, cron_z=archived), {})
    folder(tmp_path / "old", entries(cron_a=HOME), {}, "helper")
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert (report.imported, report.left_out_labels) == (4, 1)
    labels = [(await described(tmp_path / "new", f"cron_{name}")).get("label") for name in "xyza"]
    assert labels == ["home", None, "home", "home"]
    async with open_operations_readonly(Config(), tmp_path / "new") as operations:
        found = [
            (await operations.sessions.list(OPERATOR, ListFilter(search=word))).count
            for word in ("home", "Y")
        ]
    assert found == [2, 1]


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_a_session_is_there_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {
        "main": {"sessionId": FIRST, "updatedAt": NOW},
        "cron:x": {"sessionId": SECOND, "updatedAt": NOW - 1},
    }
    lines = [entry_line("a", None, user("one")), entry_line("b", "a", user("two"))]
    files = {f"{FIRST}.jsonl": [header(FIRST), *lines], f"{SECOND}.jsonl": [header(SECOND), *lines[:1]]}
    folder(tmp_path / "old", index, files)
    append = transcripts.append_raw

    async def torn(tx: Tx, transcript: int, run: int | None, entry: Entry) -> None:
        if entry.seq == 2:
            raise OSError("the disk that is read from is gone")
        await append(tx, transcript, run, entry)

    monkeypatch.setattr(transcripts, "append_raw", torn)
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert (report.imported, report.failed_count, report.failed[0].key) == (1, 1, MAIN)
    monkeypatch.undo()
    with pytest.raises(NotFound):
        await described(tmp_path / "new", MAIN)
    again = await brought(tmp_path / "new", tmp_path / "old")
    assert (again.imported, again.skipped, again.messages) == (1, 1, 2)


@pytest.mark.anyio
async def test_a_session_without_a_transcript_is_a_session(tmp_path: Path) -> None:
    source = folder(tmp_path / "old", {"main": {"sessionId": FIRST, "updatedAt": NOW}}, {})
    source.joinpath(f"{FIRST}.jsonl").mkdir()
    report = await brought(tmp_path / "new", tmp_path / "old")
    assert (report.imported, report.missing_transcripts, report.failed_count) == (1, 1, 0)
    assert (await described(tmp_path / "new", MAIN))["updatedAt"] == NOW


@pytest.mark.anyio
async def test_only_one_agent_and_its_model_override(tmp_path: Path) -> None:
    config, _ = parse({"models": {"providers": {"p": {"baseUrl": "http://h/v1", "models": [{"id": "m"}]}}}})
    override = {"providerOverride": "p", "modelOverride": "m"}
    folder(tmp_path, {"main": {"sessionId": FIRST, **override}}, {}, "a")
    folder(tmp_path, {"main": {"sessionId": SECOND, "modelOverride": "q/x"}}, {}, "b")
    assert (await brought(tmp_path / "new", tmp_path, config, agent_id="a")).imported == 1
    assert (await described(tmp_path / "new", FIRST, config))["model"] == "p/m"
    assert (await brought(tmp_path / "new", tmp_path, config)).imported == 1
    assert (await described(tmp_path / "new", SECOND, config)).get("model") != "q/x", (
        "an unavailable model would fail every turn"
    )
    again = await export_everything(tmp_path / "new", tmp_path / "out")
    index = json.loads("".join(again["sessions.json"]))
    assert index["agent:a:main"]["modelOverride"] == "m"
    assert index["agent:b:main"]["modelOverride"] == "q/x"


@pytest.mark.anyio
@pytest.mark.requirement("K5")
@pytest.mark.parametrize("place", [".", "agents/main", "agents/main/sessions"])
async def test_an_agent_that_is_chosen_is_one_that_is_there(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "old", {"main": {"sessionId": FIRST}}, {})
    monkeypatch.chdir(tmp_path / "old" / place)
    for source in (tmp_path / "old" / place, Path()):
        with pytest.raises(NotFound, match=r"no sessions of agent 'nosuch' in .*: 'main'"):
            await brought(tmp_path / "new", source, agent_id="NoSuch")
        for invalid in ("", "BAD!"):
            with pytest.raises(InvalidInput, match="is not valid"):
                await brought(tmp_path / "new", source, agent_id=invalid)
        assert (await brought(tmp_path / "new", source, agent_id="Main", dry_run=True)).imported == 1


@pytest.mark.anyio
@pytest.mark.requirement("K5")
async def test_short_keys_outside_of_a_state_directory_are_those_of_the_agent_that_is_named(
    tmp_path: Path,
) -> None:
    tmp_path.joinpath("sessions.json").write_text(json.dumps({"main": {"sessionId": FIRST}}))
    assert (await brought(tmp_path / "new", tmp_path, agent_id="Helper")).imported == 1
    assert (await described(tmp_path / "new", FIRST))["key"] == "agent:helper:main"


@pytest.mark.sqlite_only  # no store is asked
def test_a_directory_without_sessions_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"sessions\.json.*Pass a state directory"):
        scan_source(tmp_path / "old", Config())
    newer = tmp_path / "v9" / "agents" / "main" / "agent"
    newer.mkdir(parents=True)
    newer.joinpath("openclaw-agent.sqlite").touch()
    with pytest.raises(InvalidInput, match="SQLite"):
        scan_source(tmp_path / "v9", Config())
    folder(tmp_path / "torn", "{main: {sessionId:", {})
    with pytest.raises(InvalidInput, match="could not be read"):
        scan_source(tmp_path / "torn", Config())


@pytest.mark.anyio
@pytest.mark.requirement("G21")
async def test_half_a_character_in_the_index_costs_nothing_but_itself(tmp_path: Path) -> None:
    index = {
        MAIN: {"sessionId": "s1", "displayName": "cut \ud83d"},
        "agent:main:direct:x": {"sessionId": "s2"},
    }
    folder(tmp_path / "cut", index, {"s1.jsonl": [header("s1")], "s2.jsonl": [header("s2")]})
    done = await brought(tmp_path / "new", tmp_path / "cut")
    assert (done.imported, done.failed_count) == (2, 0)


# --- the format by itself ---


@given(st.integers(0, 253_402_300_799_999))
def test_a_timestamp_survives_a_round_trip(ms: int) -> None:
    assert parse_timestamp(format_timestamp(ms)) == ms


@pytest.mark.parametrize(
    "value", [None, True, -1, "yesterday", "1959-12-31T00:00:00Z", [], float("nan"), 253_402_300_800_000]
)
def test_invalid_timestamps_are_none(value: object) -> None:
    assert parse_timestamp(value) is None


@pytest.mark.requirement("G21")
@given(st.lists(st.binary(max_size=40) | st.just(entry_line("x", None, user("u"))[:-3].encode()), max_size=6))
def test_no_line_stops_the_reader(lines: list[bytes]) -> None:
    good = entry_line("ok", "lost", user("still here")).encode()
    reading = TranscriptReader(lambda: [*lines, good])
    assert list(reading.iterate_entries())[-1].id == "ok"


def test_a_parent_on_a_damaged_line_is_replaced_by_the_entry_before() -> None:
    lines = [entry_line("1", None, user("a")), "{", entry_line("3", "2", user("c"))]
    reading = TranscriptReader(lambda: [line.encode() for line in lines])
    assert [entry.id for entry in reading.iterate_entries()] == ["1", "3"]
    assert reading.damaged == 1


def test_a_stored_entry_of_several_lines_becomes_one() -> None:
    line = jsonl.encode_entry(Entry(1, "e", "user", '{"role":\n"user"}', 0), None)
    assert line is not None
    assert line.count(b"\n") == 1


@pytest.mark.anyio
async def test_a_dry_run_of_many_with_one_label_tries_few_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = imports._write_source_session  # pyright: ignore[reportPrivateUsage]

    async def counted(tx: Tx, found: imports.SourceSession, config: Config, now: int) -> object:
        written.append(str(found.key))
        return await write(tx, found, config, now)

    monkeypatch.setattr(imports, "_write_source_session", counted)
    folder(tmp_path / "old", entries(**{f"subagent_{n}": HOME for n in range(30)}), {})
    assert (await brought(tmp_path / "new", tmp_path / "old", dry_run=True)).imported == 30
    assert len(written) <= 2 * (30 + 29)  # SQLite runs a script that raised once more by itself


@pytest.mark.anyio
async def test_a_name_that_no_file_can_have_costs_no_session(tmp_path: Path) -> None:
    entry = {
        "sessionId": "s",
        "sessionFile": f"/old/{'x' * 300}.jsonl",
        "conversations": [{"sessionId": "y" * 128}],
    }
    old = folder(tmp_path / "old", {"main": entry, "cron:x": {"sessionId": "t", "sessionFile": "a\0b"}}, {})
    report = await brought(tmp_path / "state", old)
    assert (report.imported, report.failed_count, report.missing_transcripts) == (2, 0, 2)
