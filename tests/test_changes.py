"""Changing sessions: founded, named, begun anew, shortened, added to and deleted, all of it or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import READ_SCOPE, WRITE_SCOPE, Caller
from antiphon.bus import Event, Gap, MessageAppended, RunChanged, SessionChanged, session_topic
from antiphon.bus.local import LocalBus
from antiphon.clock import ManualClock
from antiphon.engine.runs import endings as runs
from antiphon.engine.runs import run_queue
from antiphon.engine.runs.effects import Effects
from antiphon.engine.runs.run_queue import Submission
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.engine.supervisor import EngineTimings
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import (
    AntiphonError,
    Conflict,
    Forbidden,
    InvalidInput,
    InvalidKey,
    NotFound,
    TooLarge,
    UnknownModel,
)
from antiphon.messages import (
    AssistantMessage,
    CompactionEntry,
    TextBlock,
    ToolCall,
    ToolResult,
    UserMessage,
    encode_message,
)
from antiphon.operations.operations import Operations
from antiphon.operations.transcript_types import PreviewItem, SessionPreview
from antiphon.operations.types import ListFilter, SendRequest, SessionPatch
from antiphon.runtimes import Prompt
from antiphon.store import Tx
from support.app_fixture import (
    BOUND,
    MAIN,
    OPERATOR,
    AppFixture,
    make_answer,
    make_config,
    make_tool,
    make_tool_calls,
    open_app_fixture,
    wait_for_event,
    wait_until,
)
from support.databases import dump_database

pytestmark = pytest.mark.anyio

MODEL = "rehearsal/rehearsal"
SIDE = "agent:main:dashboard:side"
TWO = make_config({"agents": {"list": [{"id": "main"}, {"id": "other"}]}})
GLOBAL = make_config({"session": {"scope": "global"}})
STUCK = EngineTimings(
    lease_seconds=3600, sweep_interval_seconds=3600, stop_grace_seconds=3600
)  # only its owner ends a run


async def echo(prompt: Prompt) -> str:
    return "ok"


class Busy:
    """An agent that answers when it is let go; if it is stubborn, not even being stopped hurries it."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.begun, self.release = asyncio.Event(), asyncio.Event()
        self._stubborn = stubborn

    async def __call__(self, prompt: Prompt) -> str:
        self.begun.set()
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                if not self._stubborn:
                    raise
        return "ok"


async def heard(
    app: AppFixture, change: Callable[[], Awaitable[object]], topic: str = "sessions"
) -> list[Event]:
    """What a topic tells of a change."""
    async with app.bus.listen(topic) as events:
        await change()
        told: list[Event] = []
        while event := await events.get(0):
            told.append(event)
    return told


def reasons(told: list[Event]) -> list[tuple[str, str]]:
    return [(event.session_key, event.reason) for event in told if isinstance(event, SessionChanged)]


async def found(app: AppFixture, search: str) -> list[str]:
    page = await app.operations.sessions.list(OPERATOR, ListFilter(search=search))
    return [row.key for row in page.sessions]


# --- who may ---

MANAGING: dict[str, Callable[[Operations, Caller], Awaitable[object]]] = {
    "patch": lambda o, c: o.sessions.patch(c, SIDE, SessionPatch(send_policy="deny")),
    "renew": lambda o, c: o.conversations.renew(c, SIDE),
    "restore": lambda o, c: o.conversations.restore(c, SIDE),
    "reset": lambda o, c: o.conversations.reset(c, SIDE),
    "delete": lambda o, c: o.sessions.delete(c, SIDE),
    "compact": lambda o, c: o.transcripts.compact(c, SIDE, keep=1),
    "inject": lambda o, c: o.transcripts.inject(c, SIDE, "hello"),
}
NAMING: dict[str, Callable[[Operations, Caller], Awaitable[object]]] = {
    "patch": lambda o, c: o.sessions.patch(c, SIDE, SessionPatch(label="mine")),
    "create": lambda o, c: o.sessions.create(c, session=SIDE, label="mine"),
}


@pytest.mark.requirement("V3", "G30")
@pytest.mark.parametrize("name", MANAGING)
@pytest.mark.parametrize("scope", [READ_SCOPE, WRITE_SCOPE])
async def test_only_an_administrator_changes_sessions(tmp_path: Path, name: str, scope: str) -> None:
    async with open_app_fixture(tmp_path, echo, clock=ManualClock()) as app:
        await app.ask("hello", SIDE)
        before = dump_database(app.path)
        with pytest.raises(Forbidden, match=r"lacks 'operator\."):
            await MANAGING[name](app.operations, Caller.operator([scope]))
        assert dump_database(app.path) == before
        await MANAGING[name](app.operations, OPERATOR)


@pytest.mark.requirement("V3", "G30")
@pytest.mark.parametrize("name", NAMING)
async def test_who_may_write_may_name(tmp_path: Path, name: str) -> None:
    async with open_app_fixture(tmp_path, echo, clock=ManualClock()) as app:
        await app.ask("hello", SIDE)
        before = dump_database(app.path)
        with pytest.raises(Forbidden, match=r"lacks 'operator\."):
            await NAMING[name](app.operations, Caller.operator([READ_SCOPE]))
        assert dump_database(app.path) == before
        await NAMING[name](app.operations, Caller.operator([WRITE_SCOPE]))
        assert (await app.operations.sessions.describe(OPERATOR, SIDE)).label == "mine"


@pytest.mark.requirement("V3", "G30")
@pytest.mark.parametrize("name", MANAGING)
async def test_an_agent_changes_only_its_own_tree(tmp_path: Path, name: str) -> None:
    async with open_app_fixture(tmp_path, echo, clock=ManualClock()) as app:
        await app.create(MAIN)
        await app.create("agent:main:direct:stranger")
        await app.create(SIDE, MAIN)
        before = dump_database(app.path)
        stranger = Caller.agent("main", "agent:main:direct:stranger")
        if name == "delete":
            assert not await app.operations.sessions.delete(stranger, SIDE), "it looks as if it did not exist"
        else:
            with pytest.raises(NotFound):
                await MANAGING[name](app.operations, stranger)
        assert dump_database(app.path) == before
        await MANAGING[name](app.operations, Caller.agent("main", MAIN))


async def test_stopping_needs_no_administrator(tmp_path: Path) -> None:
    agent = Busy()
    async with open_app_fixture(tmp_path, agent) as app:
        run_id = await app.say("go")
        await wait_for_event(agent.begun)
        with pytest.raises(Forbidden):
            await app.operations.runs.stop(Caller.operator([READ_SCOPE]), MAIN)
        told = await heard(app, lambda: app.operations.runs.stop(Caller.operator([WRITE_SCOPE]), MAIN))
        assert reasons(told)[:1] == [(MAIN, "abort")]
        assert (await app.wait_for_end(run_id)).state == "cancelled"
        assert await heard(app, lambda: app.operations.runs.stop(OPERATOR, MAIN)) == []


# --- founding ---


async def test_a_session_is_founded_under_a_key_of_its_own(tmp_path: Path) -> None:
    writer = Caller.operator([WRITE_SCOPE])
    async with open_app_fixture(tmp_path, echo, config=TWO) as app:
        plain = await app.operations.sessions.create(writer)
        named = await app.operations.sessions.create(
            writer, agent_id="Other", label=" plan ", display_name="The plan", model=MODEL, parent=plain.key
        )
    assert plain.key.startswith("agent:main:dashboard:")
    assert named.key.startswith("agent:other:dashboard:")
    async with open_app_fixture(tmp_path, echo, config=TWO) as app:
        view = await app.operations.sessions.describe(OPERATOR, named.key)
        assert (view.label, view.display_name, view.model_override) == ("plan", "The plan", MODEL)
        assert (view.parent_key, view.archived, view.chat_type) == (plain.key, False, None)
        assert (await app.operations.sessions.describe(OPERATOR, plain.key)).child_count == 1
        assert await found(app, "plan") == [named.key]
        below = await app.operations.sessions.list(OPERATOR, ListFilter(spawned_by=plain.key))
        assert [row.key for row in below.sessions] == [named.key]
        grown = app.rows("SELECT depth, root_key FROM sessions WHERE key = ?", named.key)
        assert grown == [{"depth": 1, "root_key": plain.key}]
        seen = await app.operations.sessions.list(Caller.agent("main", plain.key), ListFilter())
        assert {row.key for row in seen.sessions} == {plain.key, named.key}


async def test_creating_what_exists_changes_only_what_is_asked_for(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo, clock=ManualClock()) as app:
        first = await app.operations.sessions.create(OPERATOR, session=SIDE, label="plan")
        before = dump_database(app.path)
        writer = Caller.operator([WRITE_SCOPE])
        for wanted in ({}, {"label": "plan"}, {"agent_id": "main", "parent": SIDE}):
            assert await app.operations.sessions.create(writer, session=SIDE, **wanted) == first
        assert dump_database(app.path) == before
        told = await heard(app, lambda: app.operations.sessions.create(OPERATOR, session=SIDE, model=MODEL))
        assert reasons(told) == [(SIDE, "patch")]
        assert (await app.operations.sessions.describe(OPERATOR, SIDE)).model_override == MODEL


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        ({"parent": "agent:main:dashboard:nobody"}, NotFound, "was not found"),
        (
            {"session": "agent:main:dashboard:new", "parent": "agent:main:dashboard:new"},
            NotFound,
            "not found",
        ),
        (
            {"session": "agent:main:dashboard:new", "agent_id": "other"},
            InvalidInput,
            "belongs to agent 'main'",
        ),
        ({"label": "taken"}, Conflict, "label already in use: taken"),
        ({"label": ""}, InvalidInput, "invalid label"),
        ({"display_name": "a\nb"}, InvalidInput, "invalid displayName"),
        ({"model": "nobody/nothing"}, UnknownModel, "not configured"),
        ({"agent_id": "nobody"}, NotFound, "no agent"),
        ({"agent_id": "a b"}, InvalidKey, "agents_list"),
        ({"session": ""}, InvalidKey, "empty"),
        ({"session": "just words"}, NotFound, "was not found"),
    ],
)
async def test_what_cannot_be_founded_changes_nothing(
    tmp_path: Path, wanted: dict[str, Any], error: type[AntiphonError], words: str
) -> None:
    async with open_app_fixture(tmp_path, echo, config=TWO, clock=ManualClock()) as app:
        await app.operations.sessions.create(OPERATOR, session=SIDE, label="taken")
        before = dump_database(app.path)

        async def refused() -> None:
            with pytest.raises(error, match=words):
                await app.operations.sessions.create(OPERATOR, **wanted)

        assert await heard(app, refused) == []
        assert dump_database(app.path) == before


async def test_agents_found_nothing(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.create(MAIN)
        with pytest.raises(NotFound):
            await app.operations.sessions.create(Caller.agent("main", MAIN))
        assert len(app.rows("SELECT 1 FROM sessions")) == 1


@pytest.mark.requirement("W3")
async def test_founding_is_told_once_however_it_happens(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        asked = [
            lambda: app.ask("hello"),
            lambda: app.operations.sessions.open(OPERATOR, SIDE),
            lambda: app.operations.sessions.create(OPERATOR, session="agent:main:dashboard:2", label="a"),
            lambda: app.operations.sessions.patch(
                OPERATOR, "agent:main:dashboard:3", SessionPatch(label="b")
            ),
        ]
        keys = [MAIN, SIDE, "agent:main:dashboard:2", "agent:main:dashboard:3"]
        for key, ask in zip(keys, asked, strict=True):
            told = reasons(await heard(app, ask))
            assert told[0] == (key, "create")
            assert told.count((key, "create")) == 1
            assert (key, "create") not in reasons(await heard(app, ask))


# --- settings ---

SET = SessionPatch(
    label="plan",
    display_name="The plan",
    model=MODEL,
    thinking_level="high",
    verbose_level="full",
    send_policy="deny",
)
CLEARED = SessionPatch(
    label=None, display_name=None, model=None, thinking_level=None, verbose_level=None, send_policy=None
)


async def test_settings_are_kept_and_can_be_cleared(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.operations.sessions.open(OPERATOR, SIDE)
        told = await heard(app, lambda: app.operations.sessions.patch(OPERATOR, SIDE, SET))
        assert reasons(told) == [(SIDE, "patch")]
    async with open_app_fixture(tmp_path, echo) as app:
        view = await app.operations.sessions.describe(OPERATOR, "plan")
        assert (view.key, view.label, view.display_name) == (SIDE, "plan", "The plan")
        assert (view.model, view.thinking_level, view.verbose_level) == (MODEL, "high", "full")
        assert view.send_policy == "deny"
        with pytest.raises(Forbidden, match="send blocked by session policy"):
            await app.say("hello", SIDE)
        assert await found(app, "side") == await found(app, "plan") == [SIDE]
        after = await app.operations.sessions.patch(OPERATOR, SIDE, SessionPatch(label="goal"))
        assert (after.label, after.display_name, after.thinking_level) == ("goal", "The plan", "high")
        assert await found(app, "goal") == [SIDE]
        await app.operations.sessions.patch(OPERATOR, SIDE, CLEARED)
    async with open_app_fixture(tmp_path, echo) as app:
        view = await app.operations.sessions.describe(OPERATOR, SIDE)
        assert (view.label, view.display_name, view.model_override) == (None, None, None)
        assert (view.thinking_level, view.verbose_level, view.send_policy) == (None, None, None)
        assert await found(app, "plan") == await found(app, "goal") == []
        assert await found(app, "side") == [SIDE]
        assert (await app.ask("hello", SIDE)).state == "ok"


async def test_a_patch_of_nothing_changes_and_tells_nothing(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.operations.sessions.open(OPERATOR, SIDE)
        before = dump_database(app.path)
        assert await heard(app, lambda: app.operations.sessions.patch(OPERATOR, SIDE, SessionPatch())) == []
        assert dump_database(app.path) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (SessionPatch(label=""), "invalid label"),
        (SessionPatch(label="x" * 65), "1 to 64"),
        (SessionPatch(label="a\x1b[2J"), "invalid label"),
        (SessionPatch(label="taken"), "label already in use: taken"),
        (SessionPatch(display_name=" "), "invalid displayName"),
        (SessionPatch(model="nobody/nothing"), "not configured"),
        (SessionPatch(model=""), "not configured"),
        (SessionPatch(thinking_level="lots"), r"invalid thinkingLevel \(use "),
        (SessionPatch(verbose_level="loud"), r'invalid verboseLevel \(use "off"\|"on"\|"full"\)'),
        (SessionPatch(send_policy="maybe"), r'invalid sendPolicy \(use "allow"\|"deny"\)'),
        (SessionPatch(label="fine", send_policy="maybe"), "sendPolicy"),
        (SessionPatch(model=MODEL, label="taken"), "label already in use: taken"),
    ],
)
@pytest.mark.parametrize("key", [SIDE, "agent:main:dashboard:new"])
async def test_a_bad_patch_changes_nothing(
    tmp_path: Path, changes: SessionPatch, words: str, key: str
) -> None:
    async with open_app_fixture(tmp_path, echo, clock=ManualClock()) as app:
        await app.operations.sessions.create(OPERATOR, label="taken")
        await app.operations.sessions.create(OPERATOR, session=SIDE, label="mine")
        before = dump_database(app.path)

        async def refused() -> None:
            with pytest.raises(InvalidInput, match=words):
                await app.operations.sessions.patch(OPERATOR, key, changes)

        assert await heard(app, refused) == []
        assert dump_database(app.path) == before


async def test_a_label_is_one_session_of_an_agent_that_is_not_archived(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo, config=TWO) as app:
        keys = [f"agent:main:dashboard:{number}" for number in range(2)]
        await app.operations.sessions.create(OPERATOR, session=keys[0], label="plan")
        await app.operations.sessions.patch(OPERATOR, keys[0], SessionPatch(label="plan"))  # its own
        await app.operations.sessions.create(OPERATOR, agent_id="other", label="plan")
        await app.operations.sessions.patch(OPERATOR, keys[0], SessionPatch(archived=True))
        await app.operations.sessions.create(OPERATOR, session=keys[1], label="plan")
        with pytest.raises(Conflict, match="label already in use: plan"):
            await app.operations.sessions.patch(OPERATOR, keys[0], SessionPatch(archived=False))
        back = await app.operations.sessions.patch(
            OPERATOR, keys[0], SessionPatch(archived=False, label="old plan")
        )
        assert (back.archived, back.label) == (False, "old plan")


@pytest.mark.requirement("G27")
async def test_archiving_hides_until_something_is_said(tmp_path: Path) -> None:
    agent = Busy()
    async with open_app_fixture(tmp_path, agent) as app:
        run_id = await app.say("hello", SIDE)
        await wait_for_event(agent.begun)
        with pytest.raises(Conflict, match="or stop it"):
            await app.operations.sessions.patch(OPERATOR, SIDE, SessionPatch(archived=True))
        agent.release.set()
        await app.wait_for_end(run_id)
        assert (await app.operations.sessions.patch(OPERATOR, SIDE, SessionPatch(archived=True))).archived
        assert (await app.operations.sessions.list(OPERATOR, ListFilter())).count == 0
        (row,) = (await app.operations.sessions.list(OPERATOR, ListFilter(include_archived=True))).sessions
        assert (row.key, row.archived) == (SIDE, True)
        await app.ask("again", SIDE)
        assert (await app.operations.sessions.list(OPERATOR, ListFilter())).count == 1
        assert app.rows("SELECT archived_at FROM sessions") == [{"archived_at": None}]


async def test_only_a_description_names_the_run_that_plays(tmp_path: Path) -> None:
    agent = Busy()
    async with open_app_fixture(tmp_path, agent) as app:
        run_id = await app.say("hello")
        await wait_for_event(agent.begun)
        assert (await app.operations.sessions.describe(OPERATOR, MAIN)).active_run_id == run_id
        (row,) = (await app.operations.sessions.list(OPERATOR, ListFilter())).sessions
        assert (row.active_run_id, row.state) == (None, "running")
        agent.release.set()
        await app.wait_for_end(run_id)
        assert (await app.operations.sessions.describe(OPERATOR, MAIN)).active_run_id is None


# --- a new conversation ---


@pytest.mark.requirement("G25", "G16")
async def test_a_busy_session_is_reset_and_keeps_its_settings(tmp_path: Path) -> None:
    agent = Busy()
    async with open_app_fixture(tmp_path, agent) as app:
        await app.create(MAIN)
        child = await app.create("agent:main:subagent:11111111-1111-1111-1111-111111111111", MAIN)
        kept = SessionPatch(
            label="plan", model=MODEL, thinking_level="low", verbose_level="on", send_policy="allow"
        )
        await app.operations.sessions.patch(OPERATOR, MAIN, kept)
        app.rows("UPDATE sessions SET last_channel = 'telegram', last_to = '7' WHERE key = ?", MAIN)
        old = await app.operations.sessions.describe(OPERATOR, MAIN)
        runs = [await app.say("one"), await app.say("two"), await app.say("below", child["key"])]
        await wait_for_event(agent.begun)
        told = reasons(await heard(app, lambda: app.operations.conversations.reset(OPERATOR, MAIN)))
        assert [(key, reason) for key, reason in told if reason != "message"] == [(MAIN, "reset")]
        assert [(await app.wait_for_end(run_id)).state for run_id in runs] == ["cancelled"] * 3
        new = await app.operations.sessions.describe(OPERATOR, MAIN)
        assert new.session_id != old.session_id
        for name in ("label", "model", "thinking_level", "verbose_level", "send_policy", "delivery_context"):
            assert getattr(new, name) == getattr(old, name), name
    agent = Busy()
    agent.release.set()
    async with open_app_fixture(tmp_path, agent) as app:
        assert (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id == new.session_id
        assert await app.transcript() == []
        assert [entry["role"] for entry in await app.transcript(old.session_id)] == ["user", "assistant"]
        assert (await app.ask("three")).state == "ok"
        conversations = await app.operations.conversations.list(OPERATOR, MAIN)
        assert [conversation.reason for conversation in conversations] == ["reset", "created"]


def pick_change(operations: Operations, change: str) -> Callable[..., Awaitable[object]]:
    return operations.sessions.delete if change == "delete" else operations.conversations.reset


@pytest.mark.requirement("G25")
@pytest.mark.parametrize("change", ["reset", "delete"])
async def test_what_does_not_stop_is_not_changed(tmp_path: Path, change: str) -> None:
    agent = Busy(stubborn=True)
    async with open_app_fixture(tmp_path, agent, timings=STUCK) as app:
        run_id = await app.say("hello", SIDE)
        await wait_for_event(agent.begun)
        before = (await app.operations.sessions.describe(OPERATOR, SIDE)).session_id
        with pytest.raises(Conflict) as caught:
            await pick_change(app.operations, change)(OPERATOR, SIDE, timeout=0.01)
        assert str(caught.value) == f"Session {SIDE} is still active; try again in a moment."
        assert (await app.operations.sessions.describe(OPERATOR, SIDE)).session_id == before
        later = asyncio.ensure_future(pick_change(app.operations, change)(OPERATOR, SIDE, timeout=BOUND))
        agent.release.set()
        await asyncio.wait_for(later, BOUND)
        if change == "reset":
            assert (await app.wait_for_end(run_id)).has_ended
            assert (await app.operations.sessions.describe(OPERATOR, SIDE)).session_id != before
        else:
            with pytest.raises(NotFound):
                await app.operations.sessions.describe(OPERATOR, SIDE)


async def test_resets_tell_followers_and_lists_what_each_needs(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("hello")
        old = (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id
        topic = session_topic(app.rows("SELECT id FROM sessions")[0]["id"])
        changes: dict[str, Callable[[], Awaitable[object]]] = {
            "new": lambda: app.operations.conversations.reset(OPERATOR, MAIN, "new"),
            "reset": lambda: app.operations.conversations.renew(OPERATOR, MAIN, "reset"),
            "restore": lambda: app.operations.conversations.restore(OPERATOR, old),
        }
        for reason, change in changes.items():
            async with app.bus.listen(topic) as events:
                assert reasons(await heard(app, change)) == [(MAIN, reason)]
                assert await events.get(0) == SessionChanged(session_key=MAIN, reason="renewed")
        ended = (await app.operations.conversations.list(OPERATOR, MAIN))[0].session_id
        operations = app.operations
        for change in (
            operations.conversations.reset,
            operations.conversations.renew,
            operations.sessions.delete,
            operations.transcripts.compact,
        ):
            with pytest.raises(Conflict, match="has ended"):
                await change(OPERATOR, ended)


# --- deleting ---


@pytest.mark.requirement("G21")
async def test_a_deleted_session_is_gone_and_what_it_spawned_stays(tmp_path: Path) -> None:
    agent = Busy()
    child, grandchild = (f"agent:main:subagent:{digit * 8}-1111-1111-1111-111111111111" for digit in "12")
    async with open_app_fixture(tmp_path, agent) as app:
        await app.create(MAIN)
        await app.create(SIDE, MAIN)
        await app.create(child, SIDE)
        await app.create(grandchild, child)
        for words in ("one", "two"):
            await app.say(words, SIDE)
        await wait_for_event(agent.begun)
        told = reasons(await heard(app, lambda: app.operations.sessions.delete(OPERATOR, SIDE)))
        assert told[-1] == (SIDE, "delete")
        assert not await app.operations.sessions.delete(OPERATOR, SIDE)
    async with open_app_fixture(tmp_path, agent) as app:
        for reading in (app.operations.sessions.describe(OPERATOR, SIDE), app.transcript(SIDE)):
            with pytest.raises(NotFound):
                await reading
        assert app.rows("SELECT transcript FROM messages UNION ALL SELECT n FROM runs") == []
        assert await found(app, "side") == []
        assert (await app.operations.sessions.describe(OPERATOR, MAIN)).child_count == 0
        assert (await app.operations.sessions.describe(OPERATOR, child)).parent_key == SIDE
        tree = await app.operations.sessions.list(Caller.agent("main", MAIN), ListFilter())
        assert {row.key for row in tree.sessions} == {"main", child, grandchild}
        agent.release.set()
        assert (await app.ask("anew", SIDE)).state == "ok"
        assert len(await app.transcript(SIDE)) == 2
        assert (await app.operations.sessions.describe(OPERATOR, SIDE)).child_count == 0


@pytest.mark.parametrize("config", [TWO, GLOBAL])
async def test_the_main_session_is_not_deleted(tmp_path: Path, config: Any) -> None:
    agent = Busy()
    async with open_app_fixture(tmp_path, agent, config=config) as app:
        run_id = await app.say("hello", "main")
        await wait_for_event(agent.begun)
        (row,) = app.rows("SELECT key FROM sessions")
        with pytest.raises(Conflict) as caught:
            await app.operations.sessions.delete(OPERATOR, "main")
        assert str(caught.value).startswith(f"Cannot delete the main session ({row['key']}).")
        agent.release.set()
        assert (await app.wait_for_end(run_id)).state == "ok", "and it was not stopped either"
        assert not await app.operations.sessions.delete(OPERATOR, "agent:main:dashboard:nobody")


class Deaf(LocalBus):
    """Every hint is lost."""

    def publish(self, topic: str, event: Event) -> None:
        return


@pytest.mark.requirement("G38")
@pytest.mark.parametrize("bus", [LocalBus, Deaf])
async def test_a_feed_ends_with_its_session(
    tmp_path: Path, bus: type[LocalBus], monkeypatch: pytest.MonkeyPatch
) -> None:
    from antiphon.engine.sessions import feeds

    monkeypatch.setattr(feeds, "IDLE_REREAD_SECONDS", 3600 if bus is LocalBus else 0.01)
    async with open_app_fixture(
        tmp_path, echo, bus=bus(), timings=EngineTimings(sweep_interval_seconds=0.01)
    ) as app:
        await app.ask("hello", SIDE)
        seen: list[Event] = []
        ready = asyncio.Event()

        async def follow() -> None:
            async for event in app.operations.transcripts.follow(OPERATOR, SIDE, after=0):
                seen.append(event)
                if isinstance(event, MessageAppended) and event.seq == 2:
                    ready.set()

        following = asyncio.create_task(follow())
        await wait_for_event(ready)
        assert await app.operations.sessions.delete(OPERATOR, SIDE)
        await asyncio.wait_for(following, BOUND)
        assert [event for event in seen if not isinstance(event, Gap)][2:] == [
            SessionChanged(session_key=SIDE, reason="delete")
        ]


@pytest.mark.requirement("G13")
async def test_deleting_and_speaking_at_once_leaves_nothing_behind(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:

        async def talk() -> None:
            for _ in range(20):
                with suppress(NotFound):  # the run was deleted with its session while it was waited for
                    await app.ask("hello", SIDE)

        async def delete() -> None:
            for _ in range(20):
                await app.operations.sessions.delete(OPERATOR, SIDE)
                await app.operations.sessions.create(OPERATOR, session=SIDE)
                await app.operations.conversations.reset(OPERATOR, SIDE)

        async with asyncio.timeout(3 * BOUND):
            await asyncio.gather(talk(), talk(), delete())
        await app.operations.sessions.delete(OPERATOR, SIDE)
        left = dump_database(app.path)
        assert [left[name] for name in ("sessions", "runs", "messages", "transcripts", "lineage")] == [[]] * 5
        assert app.rows("SELECT * FROM session_names") == []


@pytest.mark.requirement("G1", "G13")
@pytest.mark.parametrize("change", ["delete", "reset"])
async def test_what_is_queued_because_something_was_stopped_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """A turn that is dropped can lead to another one in the same session and the same commit."""
    agent, ended = Busy(), [f"follows-{number}" for number in range(2)]
    dropped = runs.cancel_runs

    async def cancel(tx: Tx, session: int, run_id: str | None, now: int) -> Effects:
        stopped = await dropped(tx, session, run_id, now)
        if not await tx.all(runs.SQL.active_in_session, session=session):
            for id in ended:
                if await tx.one(runs.SQL.find_accepted, id=id) is None:
                    message = UserMessage(content="next", timestamp=now)
                    await run_queue.submit_follow_up(
                        tx,
                        Submission(
                            run_id=id, session=session, session_key=SIDE, origin="announce", message=message
                        ),
                        now,
                    )
                    break
        return stopped

    monkeypatch.setattr(runs, "cancel_runs", cancel)
    async with open_app_fixture(tmp_path, agent) as app:
        await app.say("one", SIDE)
        await wait_for_event(agent.begun)
        agent.begun.clear()
        changing = pick_change(app.operations, change)
        told = await heard(app, lambda: changing(OPERATOR, SIDE), session_topic(1))
        assert [e.run_id for e in told if isinstance(e, RunChanged) and e.state == "cancelled"][1:] == ended
        left = app.rows("SELECT id, state FROM runs WHERE origin = 'announce' ORDER BY n")
        assert left == ([] if change == "delete" else [{"id": id, "state": "cancelled"} for id in ended])
        assert not agent.begun.is_set(), "no agent was asked anything more"


@pytest.mark.requirement("G21")
async def test_the_words_of_a_deleted_session_are_nowhere(tmp_path: Path) -> None:
    """Nor what was said to it, in the records of what happened, which stay."""
    other = "agent:main:dashboard:other"

    async def agent(prompt: Prompt) -> str:
        return "the SECRET is 7" if prompt.session_key == SIDE else "nothing"

    async with open_app_fixture(tmp_path, agent) as app:
        for key in (MAIN, SIDE, other):
            await app.create(key)
        for requester, target in ((MAIN, SIDE), (SIDE, other), (MAIN, other)):
            sending = SendRequest(session=target, message="tell me the PIN", reply_back=0)
            await app.operations.exchanges.send(OPERATOR, sending, requester=requester)

        async def over() -> bool:
            states = app.rows("SELECT state FROM deliveries")
            return [row["state"] for row in states] == ["delivered"] * 3

        await wait_until(over)
        before = records(app)
        assert await app.operations.sessions.delete(OPERATOR, SIDE)
        after = records(app)
        assert "SECRET" not in str(after) and "SECRET" in str(before)
        assert [row["message"] for row in after["exchanges"]] == ["", "", "tell me the PIN"]
        assert [row["first_reply"] for row in after["exchanges"]] == [None, None, "nothing"]
        assert [row["latest_reply"] for row in after["exchanges"]] == [None, None, "nothing"]
        assert [row["body"] for row in after["deliveries"]] == ["", "nothing", "nothing"]
        for table, rows in before.items():
            for row, now in zip(rows, after[table], strict=True):
                assert {n: v for n, v in row.items() if n not in WORDS} == {
                    n: v for n, v in now.items() if n not in WORDS
                }


WORDS = {"message", "first_reply", "latest_reply", "body"}


def records(app: AppFixture) -> dict[str, list[dict[str, Any]]]:
    return {name: app.rows(f"SELECT * FROM {name} ORDER BY n") for name in ("exchanges", "deliveries")}  # noqa: S608


# --- leaving out ---


async def fill(app: AppFixture, key: str, *messages: Any) -> None:
    """A transcript with these entries, past everything."""
    row = await app.create(key)
    for seq, message in enumerate(messages, 1):
        app.rows(
            "INSERT INTO messages (transcript, seq, entry, role, body, created_at) VALUES (?, ?, ?, ?, ?, 1)",
            row["transcript"],
            seq,
            f"{seq:08x}",
            message.__struct_config__.tag,
            encode_message(message),
        )
    app.rows("UPDATE sessions SET last_seq = ?, context_tokens = 99 WHERE key = ?", len(messages), key)


class Listening:
    """An agent that remembers the last prompt."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    async def __call__(self, prompt: Prompt) -> str:
        self.shown = list(prompt.messages)
        return "ok"


@pytest.mark.requirement("G26", "G23")
async def test_compacting_leaves_out_of_prompts_and_not_out_of_the_transcript(tmp_path: Path) -> None:
    agent = Listening()
    async with open_app_fixture(tmp_path, agent) as app:
        await fill(app, SIDE, *(UserMessage(content=f"number {n}", timestamp=n) for n in range(1, 11)))
        before = await app.transcript(SIDE)
        view = await app.operations.transcripts.compact(OPERATOR, SIDE, keep=10)
        assert (view.compacted, view.kept, view.reason) == (False, 10, "short enough")
        assert await app.transcript(SIDE) == before
        told = await heard(app, lambda: app.operations.transcripts.compact(OPERATOR, SIDE, keep=4))
        assert reasons(told) == [(SIDE, "compact")]
        entries = await app.transcript(SIDE)
        assert entries[:-1] == before
        assert (entries[-1]["role"], entries[-1]["firstKeptSeq"], entries[-1]["seq"]) == ("compaction", 7, 11)
        assert "left out here: 6]" in entries[-1]["summary"]
        assert app.rows("SELECT context_tokens FROM sessions") == [{"context_tokens": None}]
        again = await app.operations.transcripts.compact(OPERATOR, SIDE, keep=4)
        assert (again.compacted, again.kept) == (False, 4)
    async with open_app_fixture(tmp_path, agent) as app:
        await app.ask("next", SIDE)
        assert isinstance(agent.shown[0], CompactionEntry)
        asked = [m.content for m in agent.shown if isinstance(m, UserMessage)]  # notes in between
        assert asked == [*(f"number {n}" for n in range(7, 11)), "next"]
        view = await app.operations.transcripts.compact(OPERATOR, SIDE, keep=2)
        assert (view.compacted, view.kept) == (True, 2)
        summary = (await app.transcript(SIDE))[-1]["summary"]
        assert summary == "[Earlier messages left out here: 10]"
        await app.operations.sessions.open(OPERATOR, "agent:main:dashboard:empty")
        view = await app.operations.transcripts.compact(OPERATOR, "agent:main:dashboard:empty")
        assert (view.compacted, view.kept, view.reason) == (False, 0, "no transcript")
        with pytest.raises(InvalidInput, match="'keep' is 0"):
            await app.operations.transcripts.compact(OPERATOR, SIDE, keep=0)


@pytest.mark.requirement("G26")
async def test_compacting_separates_no_call_from_its_result_and_keeps_an_earlier_summary(
    tmp_path: Path,
) -> None:
    turn = (
        UserMessage(content="go", timestamp=1),
        AssistantMessage(
            content=[ToolCall(id="a", name="x", arguments={}), ToolCall(id="b", name="x", arguments={})],
            timestamp=1,
        ),
        ToolResult(tool_call_id="a", tool_name="x", content=[TextBlock(text="1")], timestamp=1),
        ToolResult(tool_call_id="b", tool_name="x", content=[TextBlock(text="2")], timestamp=1),
        make_answer("done"),
    )
    summary = CompactionEntry(summary="They met.", first_kept_seq=6, tokens_before=9, timestamp=1)
    expected = {1: (16, 1), 2: (13, 4), 3: (13, 4), 4: (13, 4), 5: (12, 5), 6: (10, 6), 9: (7, 9)}
    async with open_app_fixture(tmp_path, echo) as app:
        for keep, (first, kept) in expected.items():
            key = f"agent:main:dashboard:{keep}"
            # 1–5 are summarized by 11, which does not count.
            await fill(app, key, *turn, *turn, summary, *turn)
            view = await app.operations.transcripts.compact(OPERATOR, key, keep=keep)
            entry = (await app.transcript(key))[-1]
            assert (view.compacted, view.kept, entry["firstKeptSeq"]) == (True, kept, first), keep
            assert entry["summary"] == f"They met.\n\n[Earlier messages left out here: {15 - kept}]"


@pytest.mark.requirement("G13")
async def test_a_session_that_is_answering_is_not_compacted(tmp_path: Path) -> None:
    agent = Busy()
    async with open_app_fixture(tmp_path, agent) as app:
        agent.release.set()
        await app.ask("one")
        agent.begun.clear()
        agent.release.clear()
        run_id = await app.say("two")
        await wait_for_event(agent.begun)
        with pytest.raises(Conflict, match="still answering"):
            await app.operations.transcripts.compact(OPERATOR, MAIN, keep=1)
        agent.release.set()
        await app.wait_for_end(run_id)
        assert (await app.operations.transcripts.compact(OPERATOR, MAIN, keep=1)).compacted


# --- adding ---


@pytest.mark.requirement("G26", "W3")
async def test_an_injected_entry_is_told_kept_and_shown_to_the_model(tmp_path: Path) -> None:
    agent = Listening()
    async with open_app_fixture(tmp_path, agent) as app:
        await app.ask("hello")
        topic = session_topic(app.rows("SELECT id FROM sessions")[0]["id"])
        async with app.bus.listen(topic) as events:
            told = await heard(
                app, lambda: app.operations.transcripts.inject(OPERATOR, MAIN, "By the way.", "cron")
            )
            appended = await events.get(0)
            assert await events.get(0) is None
        assert reasons(told) == [(MAIN, "inject")]
        assert isinstance(appended, MessageAppended)
        view = await app.operations.sessions.describe(OPERATOR, MAIN)
        assert (appended.seq, appended.session_id) == (3, view.session_id)
    async with open_app_fixture(tmp_path, agent) as app:
        (entry,) = (await app.transcript())[2:]
        assert (entry["id"], entry["role"], entry["stopReason"]) == (appended.entry, "assistant", "stop")
        assert (entry["provider"], entry["model"]) == ("antiphon", "gateway-injected")
        assert entry["content"] == [{"type": "text", "text": "[cron]\n\nBy the way."}]
        injected = await app.operations.transcripts.inject(OPERATOR, "main", "And again.")
        assert (injected.seq, injected.session_key, injected.session_id) == (4, MAIN, view.session_id)
        assert (await app.transcript())[-1]["id"] == injected.message_id
        await app.ask("what?")
        said = [m.text for m in agent.shown if isinstance(m, AssistantMessage)]
        assert said == ["ok", "[cron]\n\nBy the way.", "And again."]


@pytest.mark.parametrize(
    ("session", "words", "label", "error"),
    [
        (MAIN, " ", None, InvalidInput),
        (MAIN, "\ud800", None, InvalidInput),
        (MAIN, "x" * 10_000_000, None, TooLarge),
        (MAIN, "fine", "x" * 101, InvalidInput),
        (MAIN, "fine", "a\nb", InvalidInput),
        (MAIN, "fine", "", InvalidInput),
        (SIDE, "fine", None, NotFound),
    ],
)
async def test_what_cannot_be_injected_changes_nothing(
    tmp_path: Path, session: str, words: str, label: str | None, error: type[AntiphonError]
) -> None:
    async with open_app_fixture(tmp_path, echo, clock=ManualClock()) as app:
        await app.create(MAIN)
        before = dump_database(app.path)
        with pytest.raises(error):
            await app.operations.transcripts.inject(OPERATOR, session, words, label)
        assert dump_database(app.path) == before


@pytest.mark.requirement("G26", "G13")
async def test_nothing_is_injected_between_a_call_and_its_result(tmp_path: Path) -> None:
    """While the model thinks it is fine: the run's own entries come after it, numbered without a hole."""
    thinking, working = Busy(), Busy()

    async def work(call: ToolRequest) -> ToolOutput:
        await working(None)  # pyright: ignore[reportArgumentType]
        return ToolOutput(text="done")

    async def agent(prompt: Prompt) -> AssistantMessage:
        if not any(isinstance(message, ToolResult) for message in prompt.messages):
            await thinking(prompt)
            return make_tool_calls("work")
        return make_answer("finished")

    async with open_app_fixture(tmp_path, agent, tools=[make_tool("work", work)]) as app:
        run_id = await app.say("go")
        await wait_for_event(thinking.begun)
        assert (await app.operations.transcripts.inject(OPERATOR, MAIN, "meanwhile")).seq == 2
        thinking.release.set()
        await wait_for_event(working.begun)
        with pytest.raises(Conflict, match="waiting for a tool"):
            await app.operations.transcripts.inject(OPERATOR, MAIN, "no")
        working.release.set()
        assert (await app.wait_for_end(run_id)).reply == "finished"
        entries = await app.transcript()
        assert [(entry["seq"], entry["role"]) for entry in entries] == [
            (1, "user"),
            (2, "assistant"),
            (3, "assistant"),
            (4, "toolResult"),
            (5, "assistant"),
        ]
        assert (await app.operations.transcripts.inject(OPERATOR, MAIN, "after")).seq == 6


@pytest.mark.requirement("G26", "G2")
async def test_a_run_with_an_injected_entry_in_it_is_taken_up(tmp_path: Path) -> None:
    first = Busy()
    async with open_app_fixture(tmp_path, first) as app:
        run_id = await app.say("go")
        await wait_for_event(first.begun)
        await app.operations.transcripts.inject(OPERATOR, MAIN, "meanwhile")
    second = Listening()
    async with open_app_fixture(tmp_path, second) as app:
        assert (await app.wait_for_end(run_id)).state == "ok"
        assert [type(message) for message in second.shown] == [UserMessage, AssistantMessage]
        assert [entry["seq"] for entry in await app.transcript()] == [1, 2, 3]


# --- last words ---


@pytest.mark.requirement("V3")
async def test_previews_are_the_last_words_of_what_may_be_read(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await fill(
            app,
            SIDE,
            UserMessage(content="first", timestamp=1),
            make_answer("  many\n\n words "),
            make_tool_calls("look"),
            ToolResult(
                tool_call_id="look_0", tool_name="look", content=[TextBlock(text="secret")], timestamp=1
            ),
            UserMessage(content=[TextBlock(text="and"), TextBlock(text="so on")], timestamp=1),
            make_answer("x" * 100),
        )
        await app.create(MAIN)
        app.rows("UPDATE messages SET body = '{torn' WHERE seq = 1")
        gone = "agent:main:dashboard:nobody"
        previews = await app.operations.transcripts.preview(OPERATOR, [SIDE, "main", gone, ""], max_chars=20)
        assert previews == [
            SessionPreview(
                key=SIDE,
                status="ok",
                items=[
                    PreviewItem(role="assistant", text="many words"),
                    PreviewItem(role="user", text="and so on"),
                    PreviewItem(role="assistant", text="x" * 19 + "…"),
                ],
            ),
            SessionPreview(key="main", status="empty", items=[]),
            SessionPreview(key=gone, status="missing", items=[]),
            SessionPreview(key="", status="missing", items=[]),
        ]
        (short,) = await app.operations.transcripts.preview(OPERATOR, [SIDE], limit=1)
        assert [item.text for item in short.items] == ["x" * 100]
        assert len(await app.operations.transcripts.preview(OPERATOR, ["main"] * 100)) == 64
        (hidden,) = await app.operations.transcripts.preview(Caller.agent("main", MAIN), [SIDE])
        assert (hidden.status, hidden.items) == ("missing", [])
        with pytest.raises(Forbidden):
            await app.operations.transcripts.preview(Caller.operator([]), [SIDE])


@pytest.mark.requirement("V3")
async def test_a_preview_of_one_message_goes_back_to_the_last_text(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        busy, long, silent = (f"agent:main:dashboard:{name}" for name in ("busy", "long", "silent"))
        await fill(app, busy, make_answer("before the call"), make_tool_calls("look"))
        await fill(app, long, make_answer("words " * 20_000))
        await fill(app, silent, make_answer("before the silence"), make_answer("NO_REPLY"))
        previews = await app.operations.transcripts.preview(
            OPERATOR, [busy, long, busy, silent], limit=1, max_chars=20
        )
        texts = [[item.text for item in preview.items] for preview in previews]
        assert texts == [
            ["before the call"],
            ["words words words w…"],
            ["before the call"],
            ["before the silence"],
        ]


async def test_what_was_added_is_in_every_page_of_history(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        await app.ask("hello")
        await app.operations.transcripts.inject(OPERATOR, MAIN, "note")
        await app.operations.transcripts.compact(OPERATOR, MAIN, keep=1)
        page = await app.operations.transcripts.read(OPERATOR, MAIN, HistoryFilter())
        assert [item["role"] for item in page.messages] == ["user", "assistant", "assistant", "compaction"]
