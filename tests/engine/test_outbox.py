"""The outbox: what may leave, in which order, how often it is tried, and what happens if the outcome is unknown."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon import keys
from antiphon.access import READ_SCOPE, Caller
from antiphon.bus.local import LocalBus
from antiphon.clock import ManualClock
from antiphon.config import Config
from antiphon.engine import replicas
from antiphon.engine.outbox import delivery_rows, sender
from antiphon.engine.outbox.delivery_channel import DeliveryChannel, Part, Receipt
from antiphon.engine.outbox.delivery_rows import Destination, NewDelivery
from antiphon.engine.outbox.sender import Outbox
from antiphon.engine.replicas import Replica
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.errors import Conflict, Forbidden, InvalidInput, NotFound, NotSent, Refused
from antiphon.store import Row, Store
from support.agents_fixture import MAIN, OPERATOR, RecordingChannel, make_agents_config, open_agents_fixture
from support.app_fixture import DATABASE, make_config, open_test_store, wait_until
from support.commit_watcher import CommitWatcher
from support.databases import query_database

pytestmark = pytest.mark.anyio

GROUP = "agent:main:discord:group:g1"
LOST = RuntimeError("it was accepted, then the line went dead")


def unsent(final: bool = False) -> NotSent | Refused:
    if final:
        return Refused("The channel said no.", "Write elsewhere.", kind="forbidden")
    return NotSent("The channel said no.", "Try later.")


@dataclass(slots=True)
class Post:
    """An outbox at work, and the words that are put into it."""

    store: Store
    box: Outbox
    clock: ManualClock
    path: Path
    session: Row
    commits: CommitWatcher

    async def put(self, key: str, words: str = "hello", to: str = "g1", channel: str = "discord") -> None:
        parcel = NewDelivery(
            key=key,
            kind="announce",
            session=self.session["id"],
            session_key=self.session["key"],
            destination=Destination(channel=channel, to=to),
            body=words,
        )
        await self.store.tx(delivery_rows.enqueue_delivery, parcel, self.clock.now())
        self.box.wake()

    def row(self, key: str) -> dict[str, Any]:
        (row,) = query_database(self.path / DATABASE, "SELECT * FROM deliveries WHERE key = ?", key)
        return row

    async def state(self, key: str, state: str, attempts: int | None = None) -> dict[str, Any]:
        async def reached() -> bool:
            row = self.row(key)
            return row["state"] == state and attempts in {None, row["attempts"]}

        await self.commits.until(reached)
        return self.row(key)

    async def settled(self, key: str) -> bool:
        return self.row(key)["settled_at"] is not None

    def later(self, seconds: float) -> None:
        self.clock.advance(seconds=seconds)
        self.box.wake()


@asynccontextmanager
async def post_office(
    path: Path,
    channels: Mapping[str, DeliveryChannel] | None = None,
    *,
    config: Config | None = None,
    clock: ManualClock | None = None,
    owner: str = "me",
) -> AsyncGenerator[Post]:
    clock = clock or ManualClock()
    commits = CommitWatcher()
    async with open_test_store(path, commits) as store:
        key = keys.parse(GROUP)
        session = await store.tx(session_rows.find_session, key, None) or await store.tx(
            session_rows.create_session, key, clock.now()
        )
        await store.tx(
            replicas.renew_lease,
            Replica(id=owner),
            clock.now() + 10_000_000,
            clock.now(),
            is_only_replica=True,
        )
        box = Outbox(store, LocalBus(), clock, SessionResolver(config or Config()), channels or {})
        work = asyncio.create_task(box.run(owner))
        try:
            yield Post(store, box, clock, path, session, commits)
        finally:
            work.cancel()
            await asyncio.wait([work])


# --- may it leave ---


def rule(action: str, **match: str) -> dict[str, Any]:
    return {"action": action, "match": match}


@pytest.mark.requirement("D1", "D3", "G33", "003-policy-replies", "003-policy-override")
@pytest.mark.parametrize(
    ("rules", "default", "own", "state"),
    [
        ([], "allow", None, "delivered"),
        ([], "deny", None, "blocked"),
        ([], "deny", "allow", "delivered"),
        ([], "allow", "deny", "blocked"),
        ([rule("deny", channel="discord")], "allow", None, "blocked"),
        ([rule("deny", channel="telegram")], "allow", None, "delivered"),
        ([rule("allow", chatType="group"), rule("deny", channel="discord")], "allow", None, "blocked"),
        ([rule("allow", chatType="group")], "deny", None, "delivered"),
        ([rule("deny", channel="discord")], "allow", "allow", "delivered"),
    ],
)
async def test_the_policy_decides_when_it_goes_out(
    tmp_path: Path, rules: list[dict[str, Any]], default: str, own: str | None, state: str
) -> None:
    discord = RecordingChannel()
    config = make_config({"session": {"sendPolicy": {"rules": rules, "default": default}}})
    async with post_office(tmp_path, {"discord": discord}, config=config) as post:
        query_database(tmp_path / DATABASE, "UPDATE sessions SET send_policy = ?", own)
        await post.put("k")
        row = await post.state("k", state)
        assert len(discord.tries) == (state == "delivered")
        assert state == "delivered" or row["error"].startswith("send blocked by session policy")


@pytest.mark.requirement("G7", "S6")
async def test_what_is_not_for_people_is_taken_out_and_if_nothing_is_left_nothing_is_sent(
    tmp_path: Path,
) -> None:
    discord = RecordingChannel()
    async with post_office(tmp_path, {"discord": discord}) as post:
        await post.put(
            "mixed",
            f"done REPLY_SKIP for {MAIN} and agent:main:direct:bob with sk-abcdefghijklmnopqrstuvwxyz0123456789",
        )
        await post.state("mixed", "delivered")
        (text,) = discord.texts
        assert "SKIP" not in text and "bob" not in text and "abcdefghijkl" not in text
        assert text.startswith(f"done for {MAIN} and agent:main:direct:*** with")
        await post.put("nothing", "`ANNOUNCE_SKIP`")
        assert "nothing to deliver" in (await post.state("nothing", "blocked"))["error"]
        assert len(discord.tries) == 1


@pytest.mark.requirement("G18", "D3")
async def test_a_session_that_is_gone_has_no_page_but_a_channel_still_has_its_place(tmp_path: Path) -> None:
    discord = RecordingChannel()
    async with post_office(tmp_path, {"discord": discord}) as post:
        await post.store.tx(session_rows.delete_session, post.session["id"], GROUP, 1)
        await post.put("page", channel="webchat", to=GROUP)
        assert "deleted" in (await post.state("page", "dead"))["error"]
        await post.put("channel")
        await post.state("channel", "delivered")


# --- how often ---


@pytest.mark.requirement("G3")
async def test_a_logical_message_posted_again_is_one_row(tmp_path: Path) -> None:
    discord = RecordingChannel()
    async with post_office(tmp_path, {"discord": discord}) as post:
        for words in ("first", "second"):
            await post.put("k", words)
            await post.state("k", "delivered")
        assert discord.texts == ["first"]
        assert post.row("k")["message_id"] == "message-1"


@pytest.mark.requirement("G3", "G20")
async def test_what_was_surely_not_sent_is_tried_again_ever_later_until_it_is_out_of_date(
    tmp_path: Path,
) -> None:
    discord = RecordingChannel(fails=lambda key: unsent() if key == "k" else None)
    async with post_office(tmp_path, {"discord": discord}) as post:
        await post.put("k")
        attempts = 12  # far more than a delivery in doubt has
        for attempt in range(1, attempts):
            row = await post.state("k", "pending", attempt)
            wait = (row["next_at"] - post.clock.now()) / 1000
            longest = min(sender.MAX_RETRY_DELAY_SECONDS, 2**attempt)
            assert longest / 2 <= wait <= longest
            assert "said no" in row["error"] and row["settled_at"] is None
            post.later(wait - 0.001)
            await post.put(f"meanwhile {attempt}", to="elsewhere")
            await post.state(f"meanwhile {attempt}", "delivered")
            assert discord.tries.count("k") == attempt, "not before its time"
            post.later(0.001)
        await post.state("k", "pending", attempts)
        post.later(delivery_rows.DELIVERY_LIFETIME_MS / 1000)
        row = await post.state("k", "expired")
        assert discord.tries.count("k") == attempts and "in time" in row["error"]
        assert "k" not in (key for key, *_ in discord.posts)


@pytest.mark.requirement("G3")
async def test_a_final_no_is_not_tried_again(tmp_path: Path) -> None:
    discord = RecordingChannel(fails=lambda key: unsent(final=True))
    async with post_office(tmp_path, {"discord": discord}) as post:
        await post.put("k")
        row = await post.state("k", "dead")
        assert (row["attempts"], len(discord.tries)) == (1, 1)


@pytest.mark.requirement("G3")
async def test_a_doubtful_send_is_on_record_and_not_repeated(tmp_path: Path) -> None:
    discord = RecordingChannel(fails=lambda key: LOST)
    async with post_office(tmp_path, {"discord": discord}) as post:
        await post.put("k")
        row = await post.state("k", "ambiguous")
        assert "went dead" in row["error"]
        post.later(86_400)
        await post.put("next")
        await post.state("next", "ambiguous")
        assert discord.tries == ["k", "next"]


@pytest.mark.requirement("G3")
async def test_where_keys_are_honoured_a_doubtful_send_is_repeated_and_has_one_effect(tmp_path: Path) -> None:
    failures = iter([LOST, LOST, None])
    discord = RecordingChannel(is_idempotent=True, fails=lambda key: next(failures))
    async with post_office(tmp_path, {"discord": discord}) as post:
        await post.put("k")
        for attempt in (1, 2):
            await post.state("k", "pending", attempt)
            post.later(sender.MAX_RETRY_DELAY_SECONDS)
        await post.state("k", "delivered", 3)
        assert discord.tries == ["k"] * 3 and len(discord.posts) == 1


@pytest.mark.requirement("G3")
async def test_a_channel_that_does_not_answer_leaves_a_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute(RecordingChannel):
        async def send(self, part: Part) -> Receipt:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr(sender, "CHANNEL_SEND_TIMEOUT_SECONDS", 0.02)
    async with post_office(tmp_path, {"discord": Mute()}) as post:
        await post.put("k")
        assert "TimeoutError" in (await post.state("k", "ambiguous"))["error"]


@pytest.mark.requirement("G3", "G2")
@pytest.mark.parametrize(
    ("is_idempotent", "state", "effects"), [(True, "delivered", 1), (False, "ambiguous", 0)]
)
async def test_what_a_dead_process_had_in_hand_is_sent_again_or_doubted(
    tmp_path: Path, is_idempotent: bool, state: str, effects: int
) -> None:
    discord = RecordingChannel(is_idempotent=is_idempotent)
    async with post_office(tmp_path) as post:
        query_database(tmp_path / DATABASE, "INSERT INTO owners (id, lease_until) VALUES ('dead', 0)")
        await post.store.tx(_in_hand, post)
    async with post_office(tmp_path, {"discord": discord}, owner="next") as post:
        row = await post.state("k", state)
        assert len(discord.posts) == effects
        assert is_idempotent or "Check the channel" in row["error"]


async def _in_hand(tx: Any, post: Post) -> None:
    parcel = NewDelivery(
        key="k",
        kind="announce",
        session=post.session["id"],
        session_key=GROUP,
        destination=Destination(channel="discord", to="g1"),
        body="hello",
    )
    await delivery_rows.enqueue_delivery(tx, parcel, post.clock.now())
    (row,) = await tx.all(delivery_rows.SQL.due, now=post.clock.now(), after=0, limit=1)
    await tx.do(delivery_rows.SQL.claim, n=row["n"], owner="dead", attempts=0)


@pytest.mark.requirement("G3")
async def test_words_for_one_place_go_out_in_their_order_and_hold_up_no_other_place(tmp_path: Path) -> None:
    failures = {"a1": 2}

    def fails(key: str) -> Exception | None:
        failures[key] = failures.get(key, 0) - 1
        return unsent() if failures[key] >= 0 else None

    discord = RecordingChannel(fails=fails)
    async with post_office(tmp_path, {"discord": discord}) as post:
        for key, to in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("a3", "a"), ("b2", "b")):
            await post.put(key, to=to)
        await post.state("b2", "delivered")
        assert [key for key, *_ in discord.posts] == ["b1", "b2"]
        for attempt in (1, 2):
            await post.state("a1", "pending", attempt)
            post.later(sender.MAX_RETRY_DELAY_SECONDS)
        await post.state("a3", "delivered")
        assert [key for key, *_ in discord.posts] == ["b1", "b2", "a1", "a2", "a3"]


async def test_what_cannot_even_be_read_is_told_of_with_its_place_and_not_tried_again_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "Failed to record a delivery" in record.message]

    async def any_told() -> bool:
        return bool(told())

    async with post_office(tmp_path, {"discord": RecordingChannel()}) as post:
        query_database(
            tmp_path / DATABASE,
            "INSERT INTO deliveries (key, kind, session, session_key, destination, place, body, next_at, created_at)"
            " VALUES ('k', 'announce', 1, ?, '{', 'a place', 'hello', 0, ?)",
            GROUP,
            post.clock.now(),
        )
        post.box.wake()
        await wait_until(any_told)
        for _ in range(100):  # an outbox that went on at once would have looked many times meanwhile
            await post.store.read(session_rows.find_session, keys.parse(GROUP), None)
        assert 1 <= len(told()) <= 3
        assert "'a place'" in told()[0].message and told()[0].exc_info
        await post.put("other", to="elsewhere")
        await post.state("other", "delivered")


@pytest.mark.requirement("G3")
@pytest.mark.parametrize("is_idempotent", [True, False])
@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_sent_twice_after_any_failure_or_restart(
    tmp_path: Path, seed: int, is_idempotent: bool
) -> None:
    """Each message has one effect, or, where keys mean nothing, at most one and a doubt that can be seen."""
    chance = random.Random(seed)
    discord = RecordingChannel(
        is_idempotent=is_idempotent,
        fails=lambda key: chance.choice([None, None, unsent(), LOST, unsent(final=chance.random() < 0.1)]),
    )
    clock = ManualClock()
    names = [f"m{number}" for number in range(12)]
    for part in range(3):
        async with post_office(tmp_path, {"discord": discord}, clock=clock, owner=f"o{part}") as post:
            for name in names[part * 4 : part * 4 + 4]:
                await post.put(name, to=chance.choice("xyz"))
            for _ in range(chance.randint(0, 3)):
                post.later(sender.MAX_RETRY_DELAY_SECONDS)
                await asyncio.sleep(0)
    async with post_office(tmp_path, {"discord": discord}, clock=clock, owner="last") as post:

        async def settled() -> bool:
            post.later(sender.MAX_RETRY_DELAY_SECONDS)
            return not query_database(
                tmp_path / DATABASE, "SELECT 1 FROM deliveries WHERE state IN ('pending', 'sending')"
            )

        await post.commits.until(settled)
        effects = [key for key, *_ in discord.posts]
        assert len(effects) == len(set(effects))
        for name in names:
            state = post.row(name)["state"]
            assert state in {"delivered", "dead", "ambiguous"}
            assert state != "delivered" or name in effects
            assert name not in effects or state in {"delivered", "ambiguous"}


@pytest.mark.requirement("G3")
async def test_a_no_after_a_doubtful_attempt_leaves_the_doubt(tmp_path: Path) -> None:
    failures = iter([LOST, unsent(final=True)])
    discord = RecordingChannel(is_idempotent=True, fails=lambda key: next(failures))
    async with post_office(tmp_path, {"discord": discord}) as post:
        await post.put("k")
        await post.state("k", "pending", 1)
        post.later(sender.MAX_RETRY_DELAY_SECONDS)
        await post.commits.until(lambda: post.settled("k"))
        assert len(discord.posts) == 1, "people have seen it"
        assert post.row("k")["state"] == "ambiguous"


# --- people and the outbox ---


@pytest.mark.requirement("G3", "G43")
async def test_a_channel_that_is_not_there_is_said_and_set_up_later_it_can_be_delivered_again(
    tmp_path: Path,
) -> None:
    config = make_agents_config("helper")
    group = "agent:helper:discord:group:g1"
    async with open_agents_fixture(config, tmp_path) as agents:
        await agents.open_sessions(group)
        await agents.call_tool(
            "sessions_send", sessionKey=group, message="say yes\nannounce It is done.", replyBack=0
        )
        await agents.wait_until_idle()
        page = await agents.operations.deliveries.list(OPERATOR, "dead")
        (dead,) = page.deliveries
        assert "Channel 'discord' is not configured." in (dead.error or "")
        assert page.count_by_state == {"dead": 1}
    discord = RecordingChannel()
    async with open_agents_fixture(config, tmp_path, channels={"discord": discord}) as agents:
        again = await agents.operations.deliveries.retry(OPERATOR, dead.key)
        assert (again.state, again.attempts, again.error) == ("pending", 0, None)
        await agents.wait_until_idle()
        assert discord.texts == ["It is done."]
        (row,) = agents.rows("SELECT announced FROM exchanges")
        assert row["announced"] == "delivered"
        with pytest.raises(Conflict):
            await agents.operations.deliveries.retry(OPERATOR, dead.key)
        with pytest.raises(NotFound):
            await agents.operations.deliveries.retry(OPERATOR, "no such key")


@pytest.mark.requirement("SEC5", "V3")
async def test_only_operators_see_the_outbox_and_only_admins_send_again(tmp_path: Path) -> None:
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        await agents.open_sessions(MAIN)
        for number in range(3):
            await agents.use("sessions_spawn", task=f"say {number}")
            await agents.wait_until_idle()
        agent = Caller.agent("main", MAIN)
        with pytest.raises(Forbidden):
            await agents.operations.deliveries.list(agent)
        with pytest.raises(Forbidden):
            await agents.operations.deliveries.retry(agent, "x")
        with pytest.raises(Forbidden):
            await agents.operations.deliveries.retry(Caller.operator([READ_SCOPE]), "x")
        seen: list[str] = []
        cursor: str | None = None
        while True:
            page = await agents.operations.deliveries.list(
                Caller.operator([READ_SCOPE]), limit=2, cursor=cursor
            )
            seen += [delivery.text.partition("\n\n")[0] for delivery in page.deliveries]
            if (cursor := page.next_cursor) is None:
                break
        assert seen == [f"Status: ok\nResult: {number}" for number in (2, 1, 0)]
        with pytest.raises(InvalidInput):
            await agents.operations.deliveries.list(OPERATOR, "lost")
        with pytest.raises(InvalidInput):
            await agents.operations.deliveries.list(OPERATOR, cursor="x")
