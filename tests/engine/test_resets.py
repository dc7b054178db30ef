"""Sessions that begin anew by themselves: which rule holds, when it is due, and what a message then does."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon import keys
from antiphon.bus import SessionChanged, session_topic
from antiphon.clock import ManualClock
from antiphon.config import Config, parse
from antiphon.engine.sessions.resets import (
    MILLISECONDS_PER_MINUTE,
    ResetRule,
    build_reset_rules,
    find_last_hour_start,
)
from antiphon.gateway.http.run_stream import stream_run
from antiphon.messages import Provenance
from antiphon.operations.types import IncomingMessage, MessageReceipt, RunView
from antiphon.runtimes import Prompt
from support.app_fixture import BOUND, MAIN, OPERATOR, AppFixture, open_app_fixture

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("G25")]

HOUR = 60 * MILLISECONDS_PER_MINUTE
DIRECT = "agent:main:telegram:direct:7"
GROUP = "agent:main:discord:group:1"
ZONES = [UTC, *map(ZoneInfo, ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia"))]
MOMENTS = st.integers(1_000_000_000_000, 2_000_000_000_000)  # 2001 to 2033: Apia left out 30 December 2011


def configured(**session: Any) -> Config:
    return parse({"session": session})[0]


async def echo(prompt: Prompt) -> str:
    return f"said {len(prompt.messages)}"


def held(key: str, channel: str | None = None, **session: Any) -> ResetRule | None:
    found = build_reset_rules(configured(**session).session)
    return found and found.find_rule(keys.parse(key), channel)


# --- the last time it was that hour ---


@given(MOMENTS, st.integers(0, 23), st.sampled_from(ZONES))
def test_the_last_hour_is_past_and_the_clocks_showed_it(now: int, hour: int, zone: Any) -> None:
    at = find_last_hour_start(hour, now, zone)

    assert at <= now < at + 50 * HOUR
    assert find_last_hour_start(hour, at, zone) == at
    shown = datetime.fromtimestamp(at / 1000, zone)
    left_out = datetime.fromtimestamp(at / 1000 - 1, zone).utcoffset() != shown.utcoffset()
    assert (shown.hour == hour and shown.minute == 0) or left_out


@given(MOMENTS, st.integers(0, 48 * 60), st.integers(0, 23), st.sampled_from(ZONES))
def test_the_last_hour_never_goes_back(now: int, minutes: int, hour: int, zone: Any) -> None:
    later = now + minutes * MILLISECONDS_PER_MINUTE
    assert find_last_hour_start(hour, now, zone) <= find_last_hour_start(hour, later, zone)


@pytest.mark.parametrize(
    ("now", "hour", "at"),
    [
        ("2026-03-29T05:00+02:00", 4, "2026-03-29T04:00+02:00"),
        ("2026-03-29T03:59+02:00", 4, "2026-03-28T04:00+01:00"),
        ("2026-03-29T03:00+02:00", 2, "2026-03-29T03:00+02:00"),  # there is no 02:00 that day
        ("2026-10-25T02:30+01:00", 2, "2026-10-25T02:00+02:00"),  # and here there are two
        ("2026-10-25T04:00+01:00", 4, "2026-10-25T04:00+01:00"),
    ],
)
def test_days_on_which_the_clocks_are_changed(now: str, hour: int, at: str) -> None:
    def milliseconds(text: str) -> int:
        return round(datetime.fromisoformat(text).timestamp() * 1000)

    assert find_last_hour_start(hour, milliseconds(now), ZoneInfo("Europe/Berlin")) == milliseconds(at)


def test_without_a_zone_the_hour_is_the_machines() -> None:
    now = 1_700_000_000_000
    local = datetime.fromtimestamp(now / 1000, UTC).astimezone()
    today = local.replace(hour=4, minute=0, second=0, microsecond=0)
    expected = today if today <= local else today - timedelta(days=1)
    assert find_last_hour_start(4, now) == round(expected.timestamp() * 1000)


# --- whether it is due ---


@given(
    MOMENTS, st.integers(0, 100 * HOUR), st.integers(0, 23) | st.none(), st.integers(1, 10_000) | st.none()
)
def test_what_is_due_stays_due_and_has_a_reason(
    last_use: int, pause: int, hour: int | None, minutes: int | None
) -> None:
    rule, now = ResetRule(hour, minutes), last_use + pause
    reason = rule.find_due_reason(last_use, now, UTC)

    daily = hour is not None and last_use < find_last_hour_start(hour, now, UTC)
    idle = minutes is not None and pause > minutes * MILLISECONDS_PER_MINUTE
    assert reason == ("daily" if daily else "idle" if idle else None)
    assert reason is None or rule.find_due_reason(last_use, now + HOUR, UTC) is not None
    assert rule.find_due_reason(now, now, UTC) is None


# --- which rule holds ---


@pytest.mark.parametrize(
    ("key", "channel", "session", "rule"),
    [
        (MAIN, None, {}, None),
        (MAIN, None, {"reset": {}}, ResetRule(4)),
        ("main", None, {"reset": {}}, ResetRule(4)),
        (MAIN, None, {"reset": {"atHour": 5, "idleMinutes": 9}}, ResetRule(5, 9)),
        (MAIN, None, {"reset": {"mode": "idle", "atHour": 5, "idleMinutes": 9}}, ResetRule(None, 9)),
        (MAIN, None, {"idleMinutes": 9}, ResetRule(None, 9)),
        (MAIN, None, {"idleMinutes": 9, "reset": {}}, ResetRule(4, 9)),
        (MAIN, None, {"resetByType": {"group": {}}}, None),
        (GROUP, None, {"resetByType": {"group": {}}}, ResetRule(4)),
        ("agent:main:discord:channel:1", None, {"resetByType": {"group": {}}}, ResetRule(4)),
        (f"{GROUP}:thread:2", None, {"resetByType": {"group": {}}}, None),
        (f"{GROUP}:thread:2", None, {"resetByType": {"thread": {"atHour": 0}}}, ResetRule(0)),
        (DIRECT, None, {"resetByType": {"dm": {}}}, ResetRule(4)),
        (DIRECT, None, {"resetByType": {"dm": {}, "direct": {"atHour": 1}}}, ResetRule(1)),
        (
            DIRECT,
            None,
            {"reset": {"atHour": 2, "idleMinutes": 9}, "resetByType": {"direct": {"mode": "idle"}}},
            ResetRule(None, 9),
        ),
        (
            DIRECT,
            "telegram",
            {"reset": {"idleMinutes": 9}, "resetByChannel": {"Telegram": {"atHour": 1}}},
            ResetRule(1),
        ),
        (DIRECT, "discord", {"resetByChannel": {"telegram": {}}}, None),
    ],
)
def test_the_nearest_rule_holds(
    key: str, channel: str | None, session: dict[str, Any], rule: ResetRule | None
) -> None:
    assert held(key, channel, **session) == rule


@pytest.mark.parametrize(
    "rest",
    ["subagent:1", "cron:1", "hook:1", "node-1", "dashboard:1", "openai:1", "openai-user:1", "acp:1", "mine"],
)
def test_only_chats_begin_anew(rest: str) -> None:
    everything: dict[str, Any] = {"reset": {}, "resetByChannel": {"x": {}}, "idleMinutes": 1}
    assert held(f"agent:main:{rest}", "x", **everything) is None


# --- what a message does ---


async def reasons(app: AppFixture, session: str = MAIN) -> list[str]:
    return [
        conversation.reason for conversation in await app.operations.conversations.list(OPERATOR, session)
    ]


@pytest.mark.parametrize(
    ("session", "pause", "reason"),
    [
        ({"reset": {"mode": "daily"}}, timedelta(days=1, minutes=1), "daily"),
        ({"reset": {"mode": "idle", "idleMinutes": 30}}, timedelta(minutes=31), "idle"),
        ({"idleMinutes": 30}, timedelta(minutes=31), "idle"),
    ],
)
async def test_a_message_after_the_time_begins_another_conversation(
    tmp_path: Path, session: dict[str, Any], pause: timedelta, reason: str
) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, config=configured(**session), clock=clock) as app:
        await app.ask("first")
        await app.ask("second")
        old = (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id
        topic = session_topic(app.rows("SELECT id FROM sessions")[0]["id"])
        clock.advance(seconds=pause.total_seconds())
        async with app.bus.listen("sessions") as lists, app.bus.listen(topic) as follower:
            accepted = await app.operations.messages.submit(
                OPERATOR, IncomingMessage(session="main", content="third")
            )
            assert await lists.get(0) == SessionChanged(session_key=MAIN, reason=reason)
            assert await follower.get(0) == SessionChanged(session_key=MAIN, reason="renewed")
        assert (await app.wait_for_end(accepted.run_id)).state == "ok"
        await app.ask("fourth")
        assert await reasons(app) == [reason, "created"]
        assert (
            accepted.session_id == (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id != old
        )
        said = [entry["content"] for entry in await app.transcript() if entry["role"] == "user"]
        assert said == ["third", "fourth"]
        await app.operations.conversations.restore(OPERATOR, old)
        await app.ask("fifth")
        assert [entry["role"] for entry in await app.transcript()] == ["user", "assistant"] * 3


async def test_nothing_begins_anew_unless_it_is_configured(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, clock=clock) as app:
        await app.ask("first")
        clock.advance(days=400)
        await app.ask("second")
        assert await reasons(app) == ["created"]


async def test_only_a_persons_new_words_to_the_key_begin_another_conversation(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, config=configured(reset={}), clock=clock) as app:
        await app.ask("first", idempotency_key="known")
        session_id = (await app.operations.sessions.describe(OPERATOR, MAIN)).session_id
        clock.advance(days=2)
        again = await app.operations.messages.submit(
            OPERATOR, IncomingMessage(session=MAIN, content="first", idempotency_key="known")
        )
        assert (again.new, again.session_id) == (False, session_id)
        await app.ask("from a program", provenance=Provenance(kind="hook", source_tool="wake"))
        clock.advance(days=2)
        await app.ask("to this very conversation", session_id)
        clock.advance(days=2)
        steered, _ = await app.operations.messages.steer(
            OPERATOR, IncomingMessage(session=MAIN, content="steered")
        )
        await app.wait_for_end(steered.run_id)
        assert await reasons(app) == ["created"]


async def test_a_session_in_which_nothing_was_said_does_not_begin_anew(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, config=configured(reset={}), clock=clock) as app:
        await app.create(GROUP)
        clock.advance(days=2)
        await app.ask("first", GROUP)
        assert await reasons(app, GROUP) == ["created"]


async def test_a_session_at_work_does_not_begin_anew(tmp_path: Path) -> None:
    clock, begun, release = ManualClock(), asyncio.Event(), asyncio.Event()

    async def slow(prompt: Prompt) -> str:
        begun.set()
        await release.wait()
        return "done"

    async with open_app_fixture(tmp_path, slow, config=configured(idleMinutes=1), clock=clock) as app:
        first = await app.say("first")
        await asyncio.wait_for(begun.wait(), BOUND)
        clock.advance(seconds=120)
        second = await app.say("second")
        release.set()
        for run_id in (first, second):
            assert (await app.wait_for_end(run_id)).state == "ok"
        assert await reasons(app) == ["created"]
        clock.advance(seconds=120)
        await app.ask("third")
        assert await reasons(app) == ["idle", "created"]


async def test_of_two_at_once_one_begins_the_conversation_that_both_are_in(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, config=configured(reset={}), clock=clock) as app:
        await app.ask("first")
        clock.advance(days=2)
        for run_id in await asyncio.gather(app.say("second"), app.say("third")):
            await app.wait_for_end(run_id)
        assert await reasons(app) == ["daily", "created"]
        assert len(await app.transcript()) == 4


async def test_who_listens_for_an_answer_hears_it_in_the_conversation_that_it_begins(tmp_path: Path) -> None:
    clock = ManualClock()
    async with open_app_fixture(tmp_path, echo, config=configured(reset={}), clock=clock) as app:
        await app.ask("first")
        clock.advance(days=2)
        told = stream_run(app.operations, OPERATOR, IncomingMessage(session=MAIN, content="second"), BOUND)
        accepted, *words, view = [piece async for piece in told]
        assert isinstance(accepted, MessageReceipt) and isinstance(view, RunView)
        assert (words, view.reply) == (["said 1"], "said 1")
        assert await reasons(app) == ["daily", "created"]
