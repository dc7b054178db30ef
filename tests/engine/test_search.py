"""The index of words: what is in it, that its cursor neither skips nor repeats, and what a query means to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from antiphon import keys
from antiphon.engine.sessions import search, session_rows
from antiphon.engine.sessions.search import SearchQuery
from antiphon.messages import (
    AssistantMessage,
    CompactionEntry,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolCall,
    ToolResult,
    UserMessage,
)
from antiphon.runtimes import Prompt
from antiphon.store import Row, Store, Tx
from support.app_fixture import DATABASE, MAIN, open_app_fixture, open_test_store, wait_until
from support.databases import open_test_database, query_database

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is looked at here, not how fast this machine is just now: that is test_search_time.py."""
    monkeypatch.setattr(search, "SEARCH_BUDGET_SECONDS", 60.0)


async def echo(prompt: Prompt) -> str:
    return "an echo"


def user(text: str) -> UserMessage:
    return UserMessage(content=text, timestamp=1)


async def found_session(tx: Tx, key: str = MAIN) -> Row:
    return await session_rows.create_session(tx, keys.parse(key), 1)


async def said(tx: Tx, session: int, messages: Sequence[Message]) -> None:
    for message in messages:
        await session_rows.append_note(tx, session, message, 1)


async def found(tx: Tx, query: str, limit: int = 50) -> list[str]:
    rows, in_time, match = await search.find_entries(tx, SearchQuery(query=query, limit=limit))
    assert in_time
    return [search.cut_snippet(row["words"], match.find_position(row["words"])) for row in rows]


async def with_texts(path: Path, *texts: str) -> Store:
    store = await open_test_database(path / DATABASE, synchronous="normal")
    session = await store.tx(found_session)
    await store.tx(said, session["id"], [user(text) for text in texts])
    while (await store.tx(search.index_entries, search.INDEX_BATCH_ENTRIES)) < len(texts):
        pass
    return store


# --- what is indexed ---


@pytest.mark.requirement("W2")
async def test_only_what_was_said_or_returned_is_indexed(tmp_path: Path) -> None:
    messages: list[Message] = [
        UserMessage(
            content=[
                TextBlock(text="pear"),
                ImageBlock(data="apple", mime_type="image/png"),
                TextBlock(text="plum"),
            ],
            timestamp=1,
        ),
        AssistantMessage(
            content=[
                ThinkingBlock(thinking="apple"),
                TextBlock(text="quince"),
                ToolCall(id="1", name="apple", arguments={"apple": "apple"}),
            ],
            timestamp=1,
        ),
        ToolResult(tool_call_id="1", tool_name="apple", content=[TextBlock(text="cherry")], timestamp=1),
        CompactionEntry(summary="apple", first_kept_seq=1, tokens_before=1, timestamp=1),
        user("last\tone\x02 with\x00 blanks \n\n in it"),
    ]
    async with open_test_store(tmp_path) as store:
        session = await store.tx(found_session)
        await store.tx(said, session["id"], messages)
        assert await store.tx(search.index_entries, search.INDEX_BATCH_ENTRIES) == len(messages)
        texts = await store.read(found, "apple")
        assert texts == []
        assert await store.read(found, "plum") == ["pear plum"]
        assert await store.read(found, "quince") == ["quince"]
        assert await store.read(found, "cherry") == ["cherry"]
        assert await store.read(found, "with") == ["last one with blanks in it"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '{"role": "user"}',
        '{"role": "user", "content": 7}',
        '{"role": "user", "content": [{"type": "text", "text": null}]}',
        '{"role": "user", "content": "\\ud800 half"}',
        '{"role": "user", "native": ' + "[" * 100_000 + "]" * 100_000 + ', "content": "deep"}',
    ],
)
async def test_a_damaged_entry_does_not_stop_the_index(tmp_path: Path, body: str) -> None:
    async with open_test_store(tmp_path) as store:
        session = await store.tx(found_session)
        await store.tx(said, session["id"], [user("before"), user("x"), user("after")])
        query_database(tmp_path / DATABASE, "UPDATE messages SET body = ? WHERE seq = 2", body)
        assert await store.tx(search.index_entries, search.INDEX_BATCH_ENTRIES) == 3
        assert await store.read(found, "before") == ["before"]
        assert await store.read(found, "after") == ["after"]


async def test_of_a_long_entry_the_beginning_is_indexed(tmp_path: Path) -> None:
    long = "ä" * 10 + " b" * search.MAX_INDEXED_BYTES_PER_ENTRY
    store = await with_texts(tmp_path, f"first {long} never")
    (kept,) = query_database(tmp_path / DATABASE, "SELECT words FROM message_words")
    assert len(kept["words"].encode()) <= search.MAX_INDEXED_BYTES_PER_ENTRY
    assert len(await store.read(found, "first")) == 1
    assert await store.read(found, "never") == []
    await store.close()


# --- the cursor ---

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("index"), st.integers(1, 5), st.just(0)),
        st.tuples(st.sampled_from(["crash", "restart"]), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("forget"), st.integers(0, 2), st.just(0)),
    ),
    max_size=25,
)


class Crash(Exception):
    """Instead of a commit."""


async def crash(tx: Tx, most: int) -> None:
    await search.index_entries(tx, most)
    raise Crash


@pytest.mark.requirement("W2")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_the_index_has_every_message_up_to_its_cursor_and_none_that_is_gone(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    asyncio.run(_cursor(tmp_path_factory.mktemp("cursor"), steps))


async def _cursor(path: Path, steps: list[tuple[str, int, int]]) -> None:
    store = await open_test_database(path / DATABASE, synchronous="normal")
    ids: dict[int, int] = {}

    async def place(number: int) -> int:
        if number not in ids:
            ids[number] = (await store.tx(found_session, f"agent:main:direct:{number}"))["id"]
        return ids[number]

    for step, number, count in steps:
        if step == "say":
            await store.tx(said, await place(number), [user(f"word {n}") for n in range(count)])
        elif step == "index":
            await store.tx(search.index_entries, number)
        elif step == "crash":
            with pytest.raises(Crash):
                await store.tx(crash, number)
        elif step == "restart":
            await store.close()
            store = await open_test_database(path / DATABASE, synchronous="normal")
        elif number in ids:
            await store.tx(session_rows.delete_session, ids.pop(number), f"agent:main:direct:{number}", 1)
        last, _ = await store.read(search.load_index_position)
        assert indexed(path) == query_database(
            path / DATABASE, "SELECT id FROM messages WHERE id <= ? ORDER BY 1", last
        )
    await search.catch_up_index(store)
    assert indexed(path) == query_database(path / DATABASE, "SELECT id FROM messages ORDER BY 1")
    if not store.shared:
        # Nothing of what is gone is left in the index of SQLite, which is beside its table.
        query_database(
            path / DATABASE, "INSERT INTO message_words (message_words) VALUES ('integrity-check')"
        )
    await store.close()


def indexed(path: Path) -> list[dict[str, Any]]:
    return query_database(path / DATABASE, "SELECT rowid AS id FROM message_words ORDER BY 1")


async def test_a_batch_ends_with_its_entries_or_its_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_test_store(tmp_path) as store:
        session = await store.tx(found_session)
        await store.tx(said, session["id"], [user(f"{n} {'x' * 100}") for n in range(80)])
        assert await store.tx(search.index_entries, 30) == 30
        monkeypatch.setattr(search, "MAX_INDEX_BATCH_CHARACTERS", 10)
        assert await store.tx(search.index_entries, 500) < 80  # a few at a time are looked at
        await search.catch_up_index(store)
        assert await store.read(search.load_index_position) == (80, 80)


@pytest.mark.requirement("W2")
async def test_the_engine_keeps_the_index_up_and_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "INDEX_INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(search, "INDEX_BATCH_ENTRIES", 3)
    for round_ in range(1, 3):
        async with open_app_fixture(tmp_path, echo) as app:
            for n in range(5):
                await app.ask(f"hello {n} in round {round_}")

            async def current() -> bool:
                last, head = await app.store.read(search.load_index_position)
                return last == head == 10 * round_  # noqa: B023 - awaited in this round

            await wait_until(current)
            assert len(await app.store.read(found, "hello")) == 5 * round_


# --- what a query means ---


async def test_words_phrases_and_beginnings(tmp_path: Path) -> None:
    cafe = "Das Café Zentral, foo_bar-baz e-mail"
    cedar = "cedar tree house"
    house = "house of cedars and a tree"
    store = await with_texts(tmp_path, cafe, cedar, house)
    expected = {
        "tree house": [house, cedar],
        "HOUSE tree": [house, cedar],
        '"tree house"': [cedar],
        '"house tree"': [],
        '"tree house': [house, cedar],  # a quote that is not closed is not there
        "ced": [house, cedar],
        "cedar": [house, cedar],  # whole words do not fill the page, so beginnings count too
        '"cedar"': [cedar],
        "ce": [],  # too short for a beginning
        "ced house": [],  # only the last word is one
        "cafe": [cafe],
        "cafe\u0301 zentral": [cafe],
        "foo_bar": [cafe],
        "bar foo": [cafe],
        '"bar foo"': [],
        "foo-bar_ba": [],
        "e-mail": [cafe],
        "— café !!": [cafe],
        "cedar OR cafe": [],
        "NOT cedar": [],
        "words : cedar": [],
        "scope : s1": [],
        "s1": [],
        "ced*": [],
        "—": [],
        '""': [],
    }
    for query, texts in expected.items():
        assert await store.read(found, query) == texts, query
    # Where whole words fill the page, that is it.
    assert await store.read(found, "cedar", 1) == [cedar]
    await store.close()


async def test_a_beginning_of_very_many_words(tmp_path: Path) -> None:
    texts = [f"pre{chr(97 + n // 26)}{chr(97 + n % 26)}x" for n in range(search.MAX_COMPLETIONS + 20)]
    longer = [f"word{text}" for text in texts]
    store = await with_texts(tmp_path, *texts, *longer, "МАЙОНЕЗ", "Ångström")
    # Few such words are looked for one by one, very many by the index itself.
    assert len(await store.read(found, "pre", 500)) == len(texts)
    rows, complete, _ = await store.read(search.find_entries, SearchQuery(query="pred", limit=500))
    assert (len(rows), complete) == (26, True)
    rows, complete, _ = await store.read(search.find_entries, SearchQuery(query="word", limit=500))
    assert (len(rows), complete) == (len(longer), True)
    assert await store.read(found, "майо") == ["МАЙОНЕЗ"]
    assert await store.read(found, "ångs") == await store.read(found, "angs") == ["Ångström"]
    await store.close()


@pytest.mark.requirement("W2")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(query=st.text(max_size=60) | st.text(alphabet="ab\"*():^+-{}' \x00_NEARORNT", max_size=60))
@example(query='"')
@example(query='a" b* NEAR(c d, 2) ^x {words} : y')
@example(query="\x00")
@example(query="\ud800 a")
@example(query="a " * 5000)
@example(query="_-" * 2000)
@example(query="a-" * 2000)
@example(query='"' + "a " * 2000 + '"')
@example(query="\ue000 " * 2000)
def test_no_query_is_an_error(tmp_path: Path, query: str) -> None:
    async def run() -> None:
        async with open_test_store(tmp_path) as store:  # the same for all of them, which is as well
            await store.read(found, query)

    asyncio.run(run())


WORDS = ("red", "green", "blue", "reddish")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join), max_size=12),
    asked=st.lists(st.sampled_from((*WORDS, "gre")), min_size=1, max_size=3),
    limit=st.integers(1, 12),
)
def test_finding_equals_the_reference(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], asked: list[str], limit: int
) -> None:
    async def run(path: Path) -> list[str]:
        store = await with_texts(path, *texts)
        rows = await store.read(found, " ".join(asked), limit)
        await store.close()
        return rows

    def matching(*, beginning: bool) -> list[str]:
        *others, last = asked

        def fits(text: str) -> bool:
            words = text.split()
            return set(others) <= set(words) and any(
                word.startswith(last) if beginning else word == last for word in words
            )

        return [text for text in reversed(texts) if fits(text)][:limit]

    whole = matching(beginning=False)
    expected = whole if len(whole) == limit else matching(beginning=True)
    assert asyncio.run(run(tmp_path_factory.mktemp("find"))) == expected


async def test_a_search_looks_through_everything_block_by_block_while_there_is_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "ENTRIES_PER_BLOCK", 5)
    store = await with_texts(tmp_path, *(f"{'rare ' if n % 100 == 0 else ''}common {n}" for n in range(400)))
    assert await store.read(found, "rare") == [f"rare common {n}" for n in (300, 200, 100, 0)]
    monkeypatch.setattr(search, "SEARCH_BUDGET_SECONDS", -1)
    rows, in_time, _ = await store.read(search.find_entries, SearchQuery(query="rare", limit=2))
    assert (rows, in_time) == ([], False)
    rows, in_time, _ = await store.read(search.find_entries, SearchQuery(query="common", limit=1))
    assert (len(rows), in_time) == (1, True)
    await store.close()


# --- snippets ---


@settings(max_examples=200, deadline=None)
@given(before=st.text(max_size=400), match=st.text(min_size=1, max_size=300), after=st.text(max_size=400))
def test_a_snippet_is_a_short_piece_of_the_text_around_the_first_match(
    before: str, match: str, after: str
) -> None:
    clean = [" ".join(part.split()) for part in (before, match, after)]
    text = f"{clean[0]}{clean[1]}{clean[2]} {clean[1]}"
    piece = search.cut_snippet(text, len(clean[0]))
    assert len(piece) <= 240
    assert piece.removeprefix("…").removesuffix("…") in text or piece in text
    assert clean[1][:100].strip() in piece


async def test_json_of_a_stranger_is_read_too(tmp_path: Path) -> None:
    """Blocks of kinds that we do not know stand in imported transcripts."""
    body = {"role": "user", "content": [{"type": "audio", "text": "no"}, {"type": "text", "text": "yes"}, {}]}
    async with open_test_store(tmp_path) as store:
        session = await store.tx(found_session)
        await store.tx(said, session["id"], [user("x")])
        query_database(tmp_path / DATABASE, "UPDATE messages SET body = ?", json.dumps(body))
        await search.catch_up_index(store)
        assert await store.read(found, "yes") == ["yes"]
        assert await store.read(found, "no") == []
