"""What a model is shown: always a valid conversation, and never more than fits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.config.agents import CompactionConfig as Compacting
from antiphon.engine.collaboration import framing
from antiphon.engine.runs import compaction, context
from antiphon.engine.runs.context import ModelContext
from antiphon.engine.sessions import transcripts
from antiphon.engine.sessions.transcripts import Entry, HistoryFilter
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import ContextOverflow
from antiphon.messages import (
    INJECTED_MODEL,
    AssistantMessage,
    CompactionEntry,
    ImageBlock,
    Message,
    Provenance,
    TextBlock,
    ThinkingBlock,
    TokenUsage,
    ToolCall,
    ToolResult,
    UserMessage,
    encode_message,
)
from antiphon.operations.types import SendRequest
from antiphon.runtimes import Deltas, Prompt
from antiphon.runtimes.model import Api, ModelSpec
from antiphon.runtimes.pydantic_ai.reader import PydanticReader
from antiphon.runtimes.retry import RetryPolicy
from antiphon.store import Tx
from support.app_fixture import (
    BOUND,
    MAIN,
    OPERATOR,
    make_answer,
    make_tool,
    make_tool_calls,
    open_app_fixture,
    open_test_store,
)
from support.databases import query_database
from support.model_provider import Provider

OTHER = "agent:main:other"

# --- any transcript ---

# Few ids, so that they repeat within an answer and between answers, and results meet the wrong call.
IDS = st.sampled_from(["a", "b", "c"])
WORDS = st.sampled_from(["", " ", "yes", "no\n", "é" * 30])
CALLS = st.builds(ToolCall, id=IDS, name=st.just("add"), arguments=st.just({"a": 1}))
BLOCKS = st.one_of(st.builds(TextBlock, text=WORDS), st.builds(ThinkingBlock, thinking=WORDS), CALLS)
STOPS = st.sampled_from(["stop", "length", "toolUse", "error", "aborted", None])
ENTRIES: st.SearchStrategy[Message] = st.one_of(
    st.builds(UserMessage, content=WORDS.filter(str.strip), timestamp=st.just(1)),
    st.builds(
        AssistantMessage, content=st.lists(BLOCKS, max_size=4), timestamp=st.just(2), stop_reason=STOPS
    ),
    st.builds(
        ToolResult,
        tool_call_id=IDS,
        tool_name=st.just("add"),
        content=st.lists(st.builds(TextBlock, text=WORDS), max_size=2),
        timestamp=st.just(3),
        is_error=st.booleans(),
    ),
    st.builds(
        CompactionEntry,
        summary=WORDS.filter(str.strip),
        first_kept_seq=st.integers(1, 9),
        tokens_before=st.just(9),
        timestamp=st.just(4),
    ),
)
ANYTHING = st.lists(ENTRIES, max_size=14)


@st.composite
def played(draw: st.DrawFn) -> list[Message]:
    """What an engine writes that is killed anywhere, any number of times: turns, each cut off at some entry."""
    written: list[Message] = []
    named = draw(st.sampled_from(["{}", "functions.add:{}", "call_" + 24 * "a" + "|fc_" + 50 * "b" + "{}"]))
    for turn in range(draw(st.integers(1, 4))):
        entries: list[Message] = [UserMessage(content=f"question {turn}", timestamp=1)]
        for step in range(draw(st.integers(0, 3))):
            made = [
                ToolCall(id=named.format(f"{turn}_{step}_{i}"), name="add", arguments={})
                for i in range(draw(st.integers(1, 3)))
            ]
            entries.append(
                AssistantMessage(
                    content=[TextBlock(text="let me see"), *made], timestamp=2, stop_reason="toolUse"
                )
            )
            entries += [
                ToolResult(tool_call_id=call.id, tool_name="add", content=[TextBlock(text="3")], timestamp=3)
                for call in draw(st.permutations(made))
            ]
        entries.append(
            draw(
                st.sampled_from(
                    [
                        make_answer("done", stop_reason="stop"),
                        make_answer("par", stop_reason="aborted"),
                        AssistantMessage(content=[], timestamp=2, stop_reason="error", error_message="no"),
                    ]
                )
            )
        )
        written += entries[: draw(st.integers(1, len(entries)))]
    return written


def problem(messages: Sequence[Message]) -> str | None:
    """Why this is not a valid conversation: written from the providers' rules, not from `repair_messages`."""
    waiting: set[str] = set()
    if messages and not isinstance(messages[0], UserMessage | CompactionEntry):
        return "it does not begin with a question"
    for message in messages:
        if isinstance(message, ToolResult):
            if message.tool_call_id not in waiting:
                return f"a result for {message.tool_call_id} that no call waits for"
            waiting.remove(message.tool_call_id)
            continue
        if waiting:
            return f"no results for {waiting}"
        if isinstance(message, AssistantMessage):
            ids = [call.id for call in message.tool_calls]
            waiting = set(ids)
            if len(ids) != len(waiting):
                return "an id twice in one answer"
            if not message.content:
                return "an answer without content"
    return f"no results for {waiting}" if waiting else None


@pytest.mark.requirement("G26")
@settings(max_examples=400, deadline=None)
@given(ANYTHING | played())
def test_any_interrupted_conversation_is_repaired(messages: list[Message]) -> None:
    repaired = context.repair_messages(messages)
    assert problem(repaired) is None
    assert context.repair_messages(repaired) == repaired
    # Nothing a person said is lost, and what was valid before is left as it is.
    asked = [message for message in messages if isinstance(message, UserMessage | CompactionEntry)]
    assert [message for message in repaired if isinstance(message, UserMessage | CompactionEntry)] == asked
    broken = [
        m for m in messages if isinstance(m, AssistantMessage) and m.stop_reason in {"error", "aborted"}
    ]
    if problem(messages) is None and not broken:
        assert [message for message in repaired if message in messages] == [
            message for message in messages if not is_silent(message)
        ]


def is_silent(message: Message) -> bool:
    return isinstance(message, AssistantMessage) and not message.text.strip() and not message.tool_calls


@pytest.mark.requirement("W8")
@settings(max_examples=200, deadline=None)
@given(ANYTHING | played())
def test_every_answer_says_something(messages: list[Message]) -> None:
    for message in context.repair_messages(messages):
        assert not isinstance(message, AssistantMessage) or message.tool_calls or message.text.strip()


@pytest.mark.requirement("W8")
@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (AssistantMessage(content=[], timestamp=2, stop_reason="aborted"), context.STOPPED_TURN_TEXT),
        (
            AssistantMessage(content=[], timestamp=2, stop_reason="error", error_message="sk-no"),
            context.FAILED_TURN_TEXT,
        ),
        (
            AssistantMessage(content=[ThinkingBlock(thinking="hm")], timestamp=2, stop_reason="stop"),
            context.SILENT_TURN_TEXT,
        ),
        (make_answer("par", stop_reason="aborted"), f"par{context.CUT_SHORT_ANSWER_TEXT}"),
    ],
)
def test_a_turn_without_an_answer_says_so_to_the_model_and_to_its_summary(
    answer: AssistantMessage, note: str
) -> None:
    questions = UserMessage(content="LONG", timestamp=1), UserMessage(content="NEXT", timestamp=3)
    messages = [questions[0], answer, questions[1]]
    first, noted, second = context.repair_messages(messages)
    assert (first, second) == questions
    assert isinstance(noted, AssistantMessage)
    assert (noted.text, noted.stop_reason) == (note, "stop")
    assert note.removeprefix("par") in context.render_as_text(messages, 1000)


@pytest.mark.requirement("W8")
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("runs", "noted"),
    [((7, 8), True), ((7, None), True), ((None, 8), False), ((None, None), False), ((7, 7), False)],
)
async def test_only_a_run_that_left_no_answer_is_said_to_have_none(
    tmp_path: Path, runs: tuple[int | None, int | None], noted: bool
) -> None:
    """What a client or an import says twice in a row is not a turn that failed."""

    async def write(tx: Tx) -> None:
        for seq, (words, run) in enumerate(zip(("LONG", "NEXT"), runs, strict=True), 1):
            await transcripts.append(tx, 7, seq, run, [UserMessage(content=words, timestamp=seq)], 1)

    async with open_test_store(tmp_path) as store:
        await store.tx(write)
        loaded = await store.read(context.load_model_context, 7, 2, None)
    between = [context.SILENT_TURN_TEXT] if noted else []
    shown = [
        message.text if isinstance(message, AssistantMessage) else getattr(message, "content", None)
        for message in context.repair_messages(loaded.messages)
    ]
    assert shown == ["LONG", *between, "NEXT"]
    assert loaded.list_messages_since(2)[-1] == UserMessage(content="NEXT", timestamp=2)


@pytest.mark.requirement("S9")
@pytest.mark.anyio
async def test_a_session_that_begins_with_what_was_sent_in_its_name_is_shown_it(tmp_path: Path) -> None:
    prompts: list[Prompt] = []

    async def agent(prompt: Prompt) -> str:
        prompts.append(prompt)
        return "fine"

    async with open_app_fixture(tmp_path, agent) as app:
        for key in (MAIN, OTHER):
            await app.operations.sessions.open(OPERATOR, key)
        wanted = SendRequest(
            session=OTHER, message="What is new?", reply_back=0, announce="none", timeout_seconds=BOUND
        )
        await app.operations.exchanges.send(OPERATOR, wanted, requester=MAIN)
        await app.ask("Well?")
    first, second = next(prompt for prompt in prompts if prompt.session_key == MAIN).messages
    assert isinstance(first, UserMessage)
    assert isinstance(first.content, str)
    assert f"Message sent from this session to {OTHER}:\n\nWhat is new?" in first.content
    assert first.content.startswith("A record of what was sent or said in the name of this session follows.")
    assert isinstance(second, UserMessage)
    assert second.content == "Well?"


def test_notes_and_reports_may_come_first() -> None:
    """A report has a provenance, by which it is framed as data; what a model said in the middle of a turn may not."""
    note = AssistantMessage(
        content=[TextBlock(text="sent")], timestamp=1, provider="antiphon", model=INJECTED_MODEL
    )
    report = msgspec.structs.replace(note, provenance=Provenance(kind="subagent_result"))
    question = UserMessage(content="and?", timestamp=2)
    for message in (note, report):
        shown = framing.frame_messages(
            context.repair_messages([make_answer("rest"), message, question]), "0123456789ab"
        )
        assert [type(each) for each in shown] == [UserMessage, UserMessage]
        assert problem(shown) is None
        assert context.repair_messages(
            context.repair_messages([message, question])
        ) == context.repair_messages([message, question])


@lru_cache
def readers() -> dict[Api, tuple[Provider, PydanticReader]]:
    """The real client libraries, and a strict provider without a socket."""
    made: dict[Api, tuple[Provider, PydanticReader]] = {}
    for api in ("openai-completions", "openai-responses", "anthropic-messages"):
        anthropic = api == "anthropic-messages"
        spec = ModelSpec(
            provider="anthropic" if anthropic else "openai",
            model="claude-sonnet-5" if anthropic else "gpt-5",
            api=api,
            base_url="http://provider" if anthropic else "http://provider/v1",
            api_key="sk-test",
        )
        provider = Provider()
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=provider))
        made[api] = provider, PydanticReader(spec, RetryPolicy(first_wait=0.001, jitter=0.0), http=http)
    return made


class Quiet:
    def text(self, piece: str) -> None: ...

    def thinking(self, piece: str) -> None: ...

    def restart(self) -> None: ...


@pytest.mark.requirement("G26")
@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
@settings(max_examples=60, deadline=None)
@given(messages=ANYTHING | played(), words=st.sampled_from(["go on", None]))
def test_strict_providers_accept_what_is_left_behind(
    api: Api, messages: list[Message], words: str | None
) -> None:
    """With and without a new question after it: a resumed run has none."""
    question = [UserMessage(content=words, timestamp=5)] if words else []
    provider, reader = readers()[api]
    provider.received.clear()
    prompt = Prompt(
        run_id="run",
        session_key=MAIN,
        agent_id="main",
        instructions="Be brief.",
        messages=context.repair_messages([*messages, *question]),
    )
    # What a strict provider would refuse is refused, and would raise here.
    assert asyncio.run(reader.read(prompt, Quiet())).text == "Hello there."
    assert len(provider.received) == 1


# --- loading ---


async def _write(tx: Tx, bodies: list[tuple[str, str]]) -> None:
    for seq, (role, body) in enumerate(bodies, 1):
        await transcripts.append_raw(tx, 7, None, Entry(seq, f"{seq:08x}", role, body, 1))


DAMAGED = st.tuples(
    st.just("assistant"), st.sampled_from(["", "{", '{"role":"assistant"}', '{"role":"x"}', "[]"])
)


@pytest.mark.requirement("G21", "G26")
@settings(max_examples=25, deadline=None)
@given(
    bodies=st.lists(
        st.one_of(
            ENTRIES.map(lambda message: (str(message.__struct_config__.tag), encode_message(message))),
            DAMAGED,
        ),
        max_size=12,
    )
)
def test_damaged_entries_do_not_brick_a_session(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[tuple[str, str]]
) -> None:
    async def loaded(path: Path) -> ModelContext:
        async with open_test_store(path) as store:
            await store.tx(_write, bodies)
            return await store.read(context.load_model_context, 7, 1, None)

    found = asyncio.run(loaded(tmp_path_factory.mktemp("damaged")))
    assert problem(context.repair_messages(found.messages)) is None


@pytest.mark.requirement("G21")
@pytest.mark.anyio
async def test_a_session_with_a_damaged_entry_is_answered_and_shown(tmp_path: Path) -> None:
    async def agent(prompt: Prompt) -> str:
        return f"{sum(isinstance(message, UserMessage) for message in prompt.messages)} questions"

    async with open_app_fixture(tmp_path, agent) as app:
        await app.ask("one")
        query_database(app.path, "UPDATE messages SET body = '{torn' WHERE seq = 2")
        assert (await app.ask("two")).reply == "2 questions"
        entries = await app.transcript()
        assert [entry["seq"] for entry in entries] == [1, 2, 3, 4]
        assert "damaged" in entries[1]["errorMessage"]


# --- cutting ---


@pytest.mark.requirement("G26")
@settings(max_examples=300, deadline=None)
@given(messages=played(), keep=st.integers(0, 200))
def test_a_cut_separates_no_call_from_its_result(messages: list[Message], keep: int) -> None:
    whole = context.repair_messages(messages)
    index = context.find_cut_index(ModelContext(list(range(1, len(whole) + 1)), whole), keep)
    assert 0 <= index < len(whole)
    if index:
        assert problem(whole[:index]) is None
        summary = CompactionEntry(summary="s", first_kept_seq=index + 1, tokens_before=1, timestamp=1)
        assert problem([summary, *whole[index:]]) is None


def test_a_cut_keeps_about_what_it_is_told_to() -> None:
    messages: list[Message] = [UserMessage(content="x" * 400, timestamp=1) for _ in range(20)]
    whole = ModelContext(list(range(1, 21)), messages)
    each = context.estimate_tokens(messages[0])
    assert context.find_cut_index(whole, 5 * each) == 15
    assert context.find_cut_index(whole, 1000 * each) == 15, "a quarter of the whole at most"
    assert context.find_cut_index(ModelContext([1], messages[:1]), 0) == 0


LENGTHS = st.sampled_from([0, 10, 300, 4_000, 400_000])


@st.composite
def weighty(draw: st.DrawFn) -> list[Message]:
    """A conversation of short and of huge entries, after a summary or not."""
    earlier = CompactionEntry(summary="s" * draw(LENGTHS), first_kept_seq=1, tokens_before=1, timestamp=1)
    written: list[Message] = [earlier] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 12))):
        words = "w" * draw(LENGTHS)
        if draw(st.booleans()):
            written.append(UserMessage(content=words, timestamp=1))
        else:
            call = ToolCall(id=f"{number}", name="add", arguments={})
            written.append(AssistantMessage(content=[call], timestamp=2, stop_reason="toolUse"))
            result = ToolResult(
                tool_call_id=call.id, tool_name="add", content=[TextBlock(text=words)], timestamp=3
            )
            written.append(result)
    return written


@pytest.mark.requirement("G26")
@settings(max_examples=300, deadline=None)
@given(messages=weighty(), keep=st.sampled_from([0, 50, 20_000]), length=LENGTHS)
def test_compaction_makes_room_or_says_that_it_cannot(
    messages: list[Message], keep: int, length: int
) -> None:
    before = sum(map(context.estimate_tokens, messages))
    index = context.find_cut_index(ModelContext(list(range(1, len(messages) + 1)), messages), keep)
    newest = max(place for place, message in enumerate(messages) if not isinstance(message, ToolResult))
    last = sum(map(context.estimate_tokens, messages[newest:]))
    if index == 0:
        assert before - last < max(32, before // 8), "there was something to cut off"
        return
    kept = sum(map(context.estimate_tokens, messages[index:]))
    assert kept <= max(last, min(keep, before // 4))
    words = context.truncate_summary("s" * length, messages[:index])
    summary = CompactionEntry(summary=words, first_kept_seq=1, tokens_before=1, timestamp=1)
    assert bool(words) == bool(length)
    assert context.estimate_tokens(summary) + kept <= before - max(16, before // 16)


@pytest.mark.requirement("G26")
def test_what_an_earlier_summary_says_is_not_crowded_out() -> None:
    """However much was said after it: otherwise every summary would forget what the one before it kept."""
    earlier = CompactionEntry(summary=f"{'s' * 3000} summit", first_kept_seq=1, tokens_before=1, timestamp=1)
    later: list[Message] = [
        UserMessage(content=f"{number} {'w' * 500}", timestamp=1) for number in range(100)
    ]
    shown = context.render_as_text([earlier, *later], 8000)
    assert "summit\n" in shown and "\nuser: 99 w" in shown
    assert len(shown) <= 8100
    assert len(context.render_as_text([earlier], 1000)) <= 1100


def test_an_image_weighs_what_it_costs_and_is_summarized_in_a_word() -> None:
    picture = UserMessage(
        content=[TextBlock(text="look"), ImageBlock(data="aGk=", mime_type="image/png")], timestamp=1
    )
    assert 1200 < context.estimate_tokens(picture) < 1300
    assert context.render_as_text([picture], 8000) == "user: look [image]"


# --- how much is read ---


async def _load(path: Path, messages: Sequence[Message], window: int | None) -> ModelContext:
    bodies = [(str(message.__struct_config__.tag), encode_message(message)) for message in messages]
    async with open_test_store(path) as store:
        await store.tx(_write, bodies)
        return await store.read(context.load_model_context, 7, len(bodies), window)


@pytest.mark.requirement("G26")
@pytest.mark.anyio
async def test_what_is_read_goes_by_weight_not_by_bytes(tmp_path: Path) -> None:
    picture = ImageBlock(data="A" * 2**18, mime_type="image/png")
    said: list[Message] = [
        UserMessage(content=f"turn {n}", timestamp=1) for n in range(3 * context.ENTRIES_PER_PAGE)
    ]
    said[-1] = UserMessage(content=[picture], timestamp=1)
    assert (await _load(tmp_path, said, window=16_000)).messages == said


@pytest.mark.requirement("G26")
@pytest.mark.anyio
async def test_without_a_known_window_everything_is_shown_that_a_model_might_take(tmp_path: Path) -> None:
    said: list[Message] = [
        UserMessage(content="word " * 2000, timestamp=1) for _ in range(3 * context.ENTRIES_PER_PAGE)
    ]
    assert (await _load(tmp_path, said, window=None)).messages == said


@pytest.mark.requirement("G23", "G26")
@pytest.mark.anyio
@pytest.mark.parametrize("cause", ["tokens", "bytes"])
async def test_what_is_left_out_without_a_summary_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    said: list[Message] = [
        UserMessage(content=f"{n:<999}", timestamp=1) for n in range(1, 4 * context.ENTRIES_PER_PAGE)
    ]
    said.insert(3, CompactionEntry(summary="It began.", first_kept_seq=3, tokens_before=9, timestamp=1))
    if cause == "bytes":
        monkeypatch.setattr(context, "MAX_LOADED_BYTES", 100_000)
    found = await _load(tmp_path, said, window=10_000 if cause == "tokens" else None)
    notice, *kept = found.messages
    assert isinstance(notice, CompactionEntry) and kept == said[-2 * context.ENTRIES_PER_PAGE :]
    left = len(said) - len(kept) - 2
    assert notice.summary == f"It began.\n\n[Earlier messages left out here: {left}]"


@pytest.mark.requirement("G23", "G26")
@pytest.mark.anyio
async def test_what_was_left_out_before_is_counted_with_the_rest(tmp_path: Path) -> None:
    said: list[Message] = [UserMessage(content=f"{n:<999}", timestamp=1) for n in range(500)]
    async with open_test_store(tmp_path) as store:
        await store.tx(_write, [("user", encode_message(message)) for message in said])
        shortened, kept = await store.tx(compaction.compact_without_model, 7, 200, 1)
        assert shortened and kept == 200
        entry = Entry(501, "c", "compaction", encode_message(shortened), 1)
        await store.tx(transcripts.append_raw, 7, None, entry)
        found = await store.read(context.load_model_context, 7, 320, 10_000)
    notice, question, *tail = found.messages
    assert isinstance(notice, CompactionEntry) and question == said[319] and tail == said[-len(tail) :]
    assert notice.summary == f"[Earlier messages left out here: {500 - len(tail) - 1}]"


# --- making room ---


class Windowed:
    """A runtime with a small window that remembers what it was shown."""

    reads_history = True

    def __init__(self, window: int | None, overflow: Callable[[Prompt], bool] = lambda _: False) -> None:
        self.context_window = window
        self.prompts: list[Prompt] = []
        self.summaries: list[Prompt] = []
        self.summary = "They talked about summit {number}."
        self._overflow = overflow

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        if prompt.instructions == compaction.SUMMARY_INSTRUCTIONS:
            self.summaries.append(prompt)
            words = self.summary.format(number=len(self.summaries))
            return make_answer(
                words, usage=TokenUsage(input=1000, output=7, total_tokens=1007), provider="p", model="m"
            )
        if self._overflow(prompt):
            raise ContextOverflow("Too long.", "Shorten it.")
        self.prompts.append(prompt)
        return make_answer(
            "ok", usage=TokenUsage(input=10, output=1, total_tokens=11), provider="p", model="m"
        )

    async def close(self) -> None: ...


def shown(prompt: Prompt) -> list[str]:
    """What a prompt contains, in short."""
    return [
        f"# {m.summary}" if isinstance(m, CompactionEntry) else str(m.content)[:8]
        for m in prompt.messages
        if isinstance(m, CompactionEntry | UserMessage)
    ]


@pytest.mark.requirement("G23", "G26", "G28")
@pytest.mark.anyio
async def test_a_long_conversation_is_summarized_and_stays_whole(tmp_path: Path) -> None:
    runtime = Windowed(window=400)
    async with open_app_fixture(tmp_path, runtime) as app:
        bodies: dict[int, str] = {}
        for number in range(12):
            assert (await app.ask(f"{number:<4}{'x' * 200}")).state == "ok"
            now = {row["seq"]: row["body"] for row in app.rows("SELECT seq, body FROM messages")}
            assert {seq: now[seq] for seq in bodies} == bodies  # nothing already written ever changes
            bodies = now
        entries = await app.transcript()
        assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
        said = [entry["content"] for entry in entries if entry["role"] == "user"]
        assert said == [f"{number:<4}{'x' * 200}" for number in range(12)]
        assert 1 <= len(runtime.summaries) < 12
        assert sum(entry["role"] == "compaction" for entry in entries) == len(runtime.summaries)
        # Every prompt after a summary begins with the latest one, and fits.
        newest = f"# They talked about summit {len(runtime.summaries)}."
        final = shown(runtime.prompts[-1])
        assert final[0] == newest and final[-1].startswith("11")
        assert sum(context.estimate_tokens(message) for message in runtime.prompts[-1].messages) <= 400
        # The call that wrote a summary is paid for like every other.
        ledger = app.rows("SELECT input FROM usage ORDER BY id")
        assert sorted(line["input"] for line in ledger) == [10] * 12 + [1000] * len(runtime.summaries)
    # Another process shows the model the same: what came before the summary stays out of it.
    again = Windowed(window=4000)
    async with open_app_fixture(tmp_path, again) as app:
        await app.ask("12")
        assert shown(again.prompts[-1]) == [*final, "12"]


@pytest.mark.requirement("G26")
@pytest.mark.anyio
async def test_an_overflow_told_by_the_provider_makes_room_too(tmp_path: Path) -> None:
    runtime = Windowed(None, overflow=lambda prompt: len(prompt.messages) > 5)
    async with open_app_fixture(tmp_path, runtime) as app:
        for number in range(6):
            assert (await app.ask(f"{number}{'x' * 100}")).state == "ok"
        assert runtime.summaries
        assert shown(runtime.prompts[-1])[0].startswith("# They")


@pytest.mark.requirement("G26")
@pytest.mark.anyio
@pytest.mark.timeout(30)
async def test_what_cannot_be_made_to_fit_ends_with_an_error(tmp_path: Path) -> None:
    runtime = Windowed(None, overflow=lambda _: True)
    async with open_app_fixture(tmp_path, runtime) as app:
        alone = await app.ask("nothing to cut off")
        assert (alone.state, alone.error_code) == ("error", "context_overflow")
        assert len(runtime.summaries) == 0
        view = await app.ask("again")
        assert (view.state, view.error_code) == ("error", "context_overflow")
        assert len(runtime.summaries) <= 3


@pytest.mark.requirement("G26")
@pytest.mark.anyio
async def test_an_empty_summary_replaces_nothing(tmp_path: Path) -> None:
    """A conversation must not be exchanged for nothing because a model had nothing to say."""
    runtime = Windowed(window=200)
    runtime.summary = " "
    async with open_app_fixture(tmp_path, runtime) as app:
        for number in range(6):
            await app.ask(f"{number:<4}{'x' * 200}")
        page = await app.operations.transcripts.read(
            OPERATOR, MAIN, HistoryFilter(limit=100, include_tools=True)
        )
        blank = [
            entry for entry in page.messages if entry["role"] == "compaction" and not entry["summary"].strip()
        ]
        assert blank == []


class Small:
    """A model with a small window and long answers, and a server that refuses what does not fit, summaries too."""

    reads_history = True

    def __init__(self, limit: int, *, known: bool = True, summary: int = 400) -> None:
        self.context_window = limit if known else None
        self.summaries = self.steps = 0
        self._limit = limit
        self._summary = "s" * summary

    async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
        if sum(map(context.estimate_tokens, prompt.messages)) > self._limit:
            raise ContextOverflow("Too long.", "Shorten it.")
        if prompt.instructions == compaction.SUMMARY_INSTRUCTIONS:
            self.summaries += 1
            return make_answer(self._summary, stop_reason="stop")
        self.steps += 1
        return make_answer("a" * 4000, stop_reason="stop")

    async def close(self) -> None: ...


DEFAULTS: dict[str, Any] = {
    "keep_tokens": Compacting().keep_recent_tokens,
    "reserve_tokens": Compacting().reserve_tokens,
}


@pytest.mark.requirement("G26")
@pytest.mark.anyio
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("limit", [8_000, 32_000])
@pytest.mark.parametrize("summary", [400, 400_000])
async def test_a_small_window_is_enough_for_any_number_of_turns(
    tmp_path: Path, limit: int, summary: int, *, known: bool
) -> None:
    """With the default settings; the summary may be as long as it likes."""
    runtime = Small(limit, known=known, summary=summary)
    async with open_app_fixture(tmp_path, runtime, **DEFAULTS) as app:
        for _ in range(40):
            assert (await app.ask("q" * 4000)).state == "ok"
    said = 40 * 2 * 1008
    full = limit // 2 if known else limit
    # A summary is written when about half of that has been said anew.
    assert runtime.summaries <= said // (full // 2 if summary == 400 else full // 4)


@pytest.mark.requirement("G26")
@pytest.mark.anyio
@pytest.mark.parametrize("known", [True, False])
async def test_a_message_that_no_window_holds_is_refused_and_forgiven(tmp_path: Path, *, known: bool) -> None:
    runtime = Small(4_000, known=known)
    async with open_app_fixture(tmp_path, runtime, **DEFAULTS) as app:
        assert (await app.ask("q" * 4000)).state == "ok"
        view = await app.ask("huge " * 100_000)
        assert (view.state, view.error_code) == ("error", "context_overflow")
        for _ in range(3):
            assert (await app.ask("q" * 4000)).state == "ok"


@pytest.mark.requirement("G26")
@pytest.mark.anyio
async def test_a_long_run_may_be_summarized_as_often_as_it_takes(tmp_path: Path) -> None:
    """As long as that helps: what cannot be shortened is not tried at every step."""
    steps = 0

    async def work(call: ToolRequest) -> ToolOutput:
        return ToolOutput(text="r" * 1000)

    class Working(Windowed):
        async def step(self, prompt: Prompt, deltas: Deltas) -> AssistantMessage:
            nonlocal steps
            answer = await super().step(prompt, deltas)
            if prompt.instructions == compaction.SUMMARY_INSTRUCTIONS or steps == 20:
                return answer
            steps += 1
            return make_tool_calls("work")

    def full(prompt: Prompt) -> bool:
        return sum(map(context.estimate_tokens, prompt.messages)) > 1000

    async with open_app_fixture(
        tmp_path, Working(1000, full), tools=[make_tool("work", work)], max_steps=30
    ) as app:
        assert (await app.ask("go")).state == "ok"
        assert steps == 20
    mute = Working(600, lambda _: False)
    mute.summary, steps = " ", 0
    async with open_app_fixture(tmp_path, mute, tools=[make_tool("work", work)], max_steps=30) as app:
        assert (await app.ask("go", "agent:main:direct:other")).state == "ok"
        assert (steps, len(mute.summaries)) == (20, 3)
