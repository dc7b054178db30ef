"""The outbox and chat services: parts, waits that a service asks for, refusals, doubts, pace and age."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_outbox import LOST, Post, post_office

from antiphon.clock import ManualClock
from antiphon.engine.outbox import delivery_rows, sender
from antiphon.engine.outbox.delivery_channel import Pace, Part, Rate, Receipt, RenderedPart
from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.errors import NotSent, Refused, Unsure
from support.app_fixture import BOUND, DATABASE, wait_until
from support.databases import query_database

pytestmark = pytest.mark.anyio

Fault = Exception | None


def _never_fail(part: Part) -> Fault:
    return None


class StrictService:
    """A chat service that takes one part of three characters at a time and remembers every message it has shown.

    A part that is sent again within its idempotency window is not shown again. `faults` decides what a send ends in;
    `NotSent` and `Refused` show nothing, every other error has shown the message before.
    """

    def __init__(
        self,
        faults: Callable[[Part], Fault] | None = None,
        *,
        idempotency_seconds: float = 0,
        can_find: bool = False,
        pace: Pace = Pace(),  # noqa: B008 - immutable
    ) -> None:
        self.idempotency_seconds = idempotency_seconds
        self.can_find = can_find
        self.faults: Callable[[Part], Fault] = faults or _never_fail
        self.pace = pace
        self.down: set[str | None] = set()
        self.shown: list[tuple[str | None, str]] = []
        """Chat and text of every message that people see."""
        self.calls: list[Part] = []
        self._receipts: dict[tuple[str, int], Receipt] = {}

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.shown]

    def is_ready(self, account_id: str | None) -> bool:
        return account_id not in self.down

    def get_pace(self, destination: Destination) -> Pace:
        return self.pace

    def render(self, text: str, destination: Destination) -> list[RenderedPart]:
        pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
        return [RenderedPart(f"<{piece}>", piece) for piece in pieces]

    async def send(self, part: Part) -> Receipt:
        self.calls.append(part)
        fault = self.faults(part)
        if isinstance(fault, NotSent | Refused):
            raise fault
        identity = (part.key, part.n)
        if identity not in self._receipts or not self.idempotency_seconds:
            assert identity not in self._receipts, f"{identity} would be shown twice"
            self._receipts[identity] = Receipt(f"{part.key}/{part.n}")
            self.shown.append((part.destination.to, part.text))
        if fault:
            raise fault
        return self._receipts[identity]

    async def find(self, part: Part, since: int) -> Receipt | None:
        assert self.can_find
        return self._receipts.get((part.key, part.n))

    def forget(self) -> None:
        """Let the idempotency window pass at the service."""
        self.idempotency_seconds = 0


def fail_once(n: int, error: Exception) -> Callable[[Part], Fault]:
    faults = {n: error}
    return lambda part: faults.pop(part.n, None)


def flood(seconds: float, *, whole_account: bool = False) -> NotSent:
    return NotSent("Too many requests.", "Wait.", retry_after=seconds, whole_account=whole_account)


async def waiting(post: Post, key: str) -> dict[str, Any]:
    """Wait until a delivery waits for a later moment."""

    async def is_waiting() -> bool:
        row = post.row(key)
        return row["state"] == "pending" and row["next_at"] > post.clock.now()

    await post.commits.until(is_waiting)
    return post.row(key)


def parts_of(post: Post, key: str) -> list[dict[str, Any]]:
    return query_database(
        post.path / DATABASE,
        "SELECT p.n, p.message_id, p.sent_at FROM delivery_parts p JOIN deliveries d ON d.n = p.delivery"
        " WHERE d.key = ? ORDER BY p.n",
        key,
    )


@pytest.mark.requirement("N4")
async def test_a_long_text_is_parts_with_a_receipt_each(tmp_path: Path) -> None:
    service = StrictService()
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abcdefgh")
        row = await post.state("k", "delivered")
        assert service.texts == ["<abc>", "<def>", "<gh>"]
        assert [part["message_id"] for part in parts_of(post, "k")] == ["k/1", "k/2", "k/3"]
        assert (row["message_id"], row["attempts"]) == ("k/1", 1)


@pytest.mark.requirement("N4", "CH3")
@pytest.mark.parametrize("n", [1, 2, 3])
async def test_sending_goes_on_at_the_part_that_was_not_sent(tmp_path: Path, n: int) -> None:
    service = StrictService(fail_once(n, NotSent("No connection.", "Try later.")))
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abcdefgh")
        await post.put("next", "xyz")
        await post.state("k", "pending", 1)
        assert [part["sent_at"] is not None for part in parts_of(post, "k")] == [i < n for i in (1, 2, 3)]
        post.later(sender.MAX_RETRY_DELAY_SECONDS)
        await post.state("next", "delivered")
        assert service.texts == ["<abc>", "<def>", "<gh>", "<xyz>"]


@pytest.mark.requirement("CH23", "N4")
async def test_a_wait_that_the_service_names_is_kept_to_the_second_and_is_no_attempt(tmp_path: Path) -> None:
    service = StrictService(fail_once(2, flood(490)))
    async with post_office(tmp_path, {"discord": service}) as post:
        started = post.clock.now()
        await post.put("k", "abcdef")
        row = await waiting(post, "k")
        assert row["attempts"] == 0
        assert row["next_at"] - started == 490_000 and "Too many" in row["error"]
        await post.put("other", "xyz", to="g2")
        await post.state("other", "delivered")
        post.later(489.999)
        await post.put("third", "uvw", to="g3")
        await post.state("third", "delivered")
        assert len(service.calls) == 4, "not before its time"
        post.later(0.001)
        await post.state("k", "delivered")
        assert [part.key for part in service.calls] == ["k", "k", "other", "third", "k"]


@pytest.mark.requirement("G3", "N4")
async def test_a_process_that_was_paused_does_not_settle_what_another_one_sends(tmp_path: Path) -> None:
    """Its attempt may have the same number, since a wait that a service names is no attempt."""
    service = StrictService(fail_once(1, Refused("The chat is closed.", "Write elsewhere.", kind="gone")))
    begun, released = asyncio.Event(), asyncio.Event()

    class PausedService:
        idempotency_seconds, can_find = 0.0, False
        is_ready, get_pace, render, find = service.is_ready, service.get_pace, service.render, service.find

        async def send(self, part: Part) -> Receipt:
            begun.set()
            await asyncio.wait_for(released.wait(), BOUND)
            return await service.send(part)

    async with post_office(tmp_path, {"discord": PausedService()}) as post:
        database = tmp_path / DATABASE
        await post.put("k", "abc")
        await asyncio.wait_for(begun.wait(), BOUND)
        query_database(database, "INSERT INTO owners (id, lease_until) VALUES ('other', 1e15)")
        query_database(database, "UPDATE deliveries SET owner = 'other' WHERE key = 'k'")
        released.set()
        await post.put("next", "abc", to="g2")
        await post.state("next", "delivered")
        row = post.row("k")
        assert (row["state"], row["owner"]) == ("sending", "other")


@pytest.mark.requirement("CH23")
async def test_a_wait_for_an_account_holds_all_its_chats_also_after_a_restart(tmp_path: Path) -> None:
    service = StrictService(fail_once(1, flood(60, whole_account=True)))
    clock = ManualClock()
    async with post_office(tmp_path, {"discord": service, "slack": StrictService()}, clock=clock) as post:
        await post.put("a", "abc")
        assert (await waiting(post, "a"))["attempts"] == 0
        await post.put("b", "abc", to="g2")
        await post.put("elsewhere", "abc", channel="slack")
        await post.state("elsewhere", "delivered")
    async with post_office(tmp_path, {"discord": service}, clock=clock, owner="next") as post:
        await post.put("c", "abc", to="g3")
        post.later(59.999)
        await post.put("page", "hello", channel="webchat", to="agent:main:discord:group:g1")
        await post.state("page", "delivered")
        assert len(service.calls) == 1
        post.later(0.001)
        for key in "abc":
            await post.state(key, "delivered")
        assert len(service.calls) == 4


@pytest.mark.requirement("N4")
@pytest.mark.parametrize(
    ("kind", "state"),
    [("gone", "dead"), ("forbidden", "dead"), ("too_long", "dead"), ("window_closed", "dead")],
)
async def test_a_refusal_is_not_repeated(tmp_path: Path, kind: Any, state: str) -> None:
    service = StrictService(fail_once(1, Refused("The chat is closed.", "Write elsewhere.", kind=kind)))
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abc")
        row = await post.state("k", state)
        assert row["attempts"] == 1 and "Write elsewhere" in row["error"]
        await post.put("next", "abc")
        await post.state("next", "delivered")


@pytest.mark.requirement("N4")
async def test_markup_that_is_refused_is_sent_as_plain_text_once(tmp_path: Path) -> None:
    refusal = Refused("Unclosed tag.", "Report it.", kind="bad_format")
    service = StrictService(lambda part: refusal if part.has_markup and part.n == 2 else None)
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abcdef")
        assert (await post.state("k", "delivered"))["attempts"] == 1
        assert service.texts == ["<abc>", "def"]

        def refuse(part: Part) -> Fault:
            return refusal

        service.faults = refuse
        await post.put("never", "abc")
        await post.state("never", "dead")
        assert len(service.calls) == 5


@pytest.mark.requirement("N4")
async def test_a_chat_that_moved_gets_its_texts_at_the_new_address_in_order(tmp_path: Path) -> None:
    moved = Refused("The group has a new id.", "Use it.", kind="moved", to="-100")
    service = StrictService(lambda part: moved if part.destination.to == "g1" else None)
    async with post_office(tmp_path, {"discord": service}) as post:
        for key in ("a", "b"):
            await post.put(key, key)
        await post.state("b", "delivered")
        assert service.shown == [("-100", "<a>"), ("-100", "<b>")]


@pytest.mark.requirement("N4", "CH8")
async def test_refused_credentials_hold_the_account_and_cost_no_attempt(tmp_path: Path) -> None:
    service = StrictService(fail_once(1, Refused("The token is wrong.", "Set another one.", kind="auth")))
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abc")
        row = await waiting(post, "k")
        assert row["attempts"] == 0
        assert row["next_at"] - post.clock.now() == sender.REFUSED_CREDENTIALS_RETRY_SECONDS * 1000
        assert "Set another one" in row["error"]
        post.later(sender.REFUSED_CREDENTIALS_RETRY_SECONDS)
        await post.state("k", "delivered")


@pytest.mark.requirement("CH3", "N4")
async def test_a_part_in_doubt_is_ambiguous_and_a_late_receipt_settles_it(tmp_path: Path) -> None:
    service = StrictService(fail_once(2, Unsure("The connection was reset.", "Look into the chat.")))
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abcdefgh")
        await post.state("k", "ambiguous")
        assert service.texts == ["<abc>", "<def>"]
        assert not await post.box.record_late_receipt("k", 1, Receipt("x")), "it has its receipt"
        assert await post.box.record_late_receipt("k", 2, Receipt("k/2"))
        await post.state("k", "delivered")
        assert service.texts == ["<abc>", "<def>", "<gh>"], "the rest follows"
        assert not await post.box.record_late_receipt("k", 3, Receipt("x"))


@pytest.mark.requirement("CH3", "N4")
async def test_a_service_that_can_be_asked_is_asked_before_there_is_a_doubt(tmp_path: Path) -> None:
    service = StrictService(fail_once(2, LOST), can_find=True)
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abcdef")
        await post.state("k", "delivered")
        assert service.texts == ["<abc>", "<def>"] and len(service.calls) == 2


@pytest.mark.requirement("CH3", "N4")
@pytest.mark.parametrize(("seconds", "state", "calls"), [(119, "delivered", 2), (120, "ambiguous", 1)])
async def test_a_key_counts_from_the_first_attempt_for_as_long_as_the_service_says(
    tmp_path: Path, seconds: float, state: str, calls: int
) -> None:
    service = StrictService(fail_once(1, LOST), idempotency_seconds=120)
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abc")
        await post.state("k", "pending", 1)
        post.later(seconds)
        await post.state("k", state)
        assert (len(service.calls), service.texts) == (calls, ["<abc>"])


@pytest.mark.requirement("CH23")
async def test_a_wait_does_not_use_up_the_window_of_a_key(tmp_path: Path) -> None:
    faults = iter([flood(500), LOST, None])
    service = StrictService(lambda part: next(faults), idempotency_seconds=120)
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abc")
        assert (await waiting(post, "k"))["attempts"] == 0
        post.later(500)
        await post.state("k", "pending", 1)
        post.later(100)
        await post.state("k", "delivered")
        assert service.texts == ["<abc>"]


@pytest.mark.requirement("CH5")
async def test_what_is_too_old_is_expired_not_sent_and_can_be_sent_by_hand(tmp_path: Path) -> None:
    service = StrictService()
    service.down.add(None)
    async with post_office(tmp_path, {"discord": service}) as post:
        await post.put("k", "abc")
        post.later(delivery_rows.DELIVERY_LIFETIME_MS / 1000 - 1)
        await post.put("page", "hello", channel="webchat", to="x")
        await post.state("page", "delivered")
        assert post.row("k")["state"] == "pending"
        post.later(1)
        row = await post.state("k", "expired")
        assert row["settled_at"] and "in time" in row["error"]
        service.down.clear()
        await post.put("next", "abc")
        await post.state("next", "delivered")
        assert len(service.calls) == 1
        await post.store.tx(delivery_rows.requeue_delivery, "k", post.clock.now())
        post.box.wake()
        await post.state("k", "delivered")


@pytest.mark.requirement("CH8")
async def test_a_channel_that_is_not_ready_keeps_its_deliveries_and_delays_no_other(tmp_path: Path) -> None:
    service = StrictService()
    service.down.add(None)
    async with post_office(tmp_path, {"discord": service, "slack": StrictService()}) as post:
        chats = sender.MAX_CONCURRENT_DELIVERIES * 2 + 1
        for number in range(chats):
            await post.put(f"k{number}", "abc", to=f"g{number}")
        await post.put("elsewhere", "abc", channel="slack")
        await post.state("elsewhere", "delivered")
        assert service.calls == [] and post.row("k0")["attempts"] == 0
        service.down.clear()
        post.box.wake()
        for number in range(chats):
            await post.state(f"k{number}", "delivered", 1)


@pytest.mark.requirement("N4", "CH23")
async def test_an_account_and_a_chat_are_paced_without_costing_attempts(tmp_path: Path) -> None:
    pace = Pace(account=Rate(0.1, 2), place=Rate(1.0, 2))
    times: list[tuple[str | None, int]] = []
    service = StrictService(pace=pace)
    async with post_office(tmp_path, {"discord": service}) as post:

        def note(part: Part) -> Fault:
            times.append((part.destination.to, post.clock.now()))
            return None

        service.faults = note
        for key, to in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "c")):
            await post.put(key, "abcdef", to=to)

        async def all_sent() -> bool:
            post.later(0.05)
            return all(post.row(key)["state"] == "delivered" for key in ("a1", "a2", "b1", "c1"))

        await wait_until(all_sent)
        assert {post.row(key)["attempts"] for key in ("a1", "a2", "b1", "c1")} == {1}
    assert len(times) == 8
    for window, most, chosen in ((1000, 3, "a"), (1000, 12, None)):
        moments = [at for to, at in times if chosen in (None, to)]
        for start in moments:
            assert len([at for at in moments if start <= at < start + window]) <= most


@pytest.mark.requirement("G3", "CH3", "CH5", "N4")
@pytest.mark.parametrize("seed", range(6))
async def test_any_faults_and_restarts_show_each_part_once_in_order(tmp_path: Path, seed: int) -> None:
    """`StrictService` fails the test if a part is shown twice; here: nothing is lost, nothing is out of order."""
    chance = random.Random(seed)

    def faults(part: Part) -> Fault:
        return chance.choice(
            [None, None, None, flood(chance.choice([1, 490])), NotSent("No route.", "Wait."), LOST]
        )

    service = StrictService(
        faults, idempotency_seconds=chance.choice([0, 0, float("inf")]), can_find=chance.random() < 0.5
    )
    clock = ManualClock()
    names = [f"m{number}" for number in range(9)]
    places: dict[str, str] = {}
    for round_ in range(3):
        async with post_office(tmp_path, {"discord": service}, clock=clock, owner=f"o{round_}") as post:
            for name in names[round_ * 3 : round_ * 3 + 3]:
                places[name] = chance.choice("xy")
                await post.put(name, f"{name}-{'z' * chance.randint(0, 9)}", to=places[name])
            for _ in range(chance.randint(0, 4)):
                post.later(60)
                await asyncio.sleep(0)
    async with post_office(tmp_path, {"discord": service}, clock=clock, owner="last") as post:

        async def settled() -> bool:
            unsettled = query_database(
                tmp_path / DATABASE,
                "SELECT place, state, next_at FROM deliveries WHERE settled_at IS NULL ORDER BY n DESC",
            )
            heads = {row["place"]: row for row in unsettled}.values()
            if heads and all(row["state"] == "pending" for row in heads):
                wait = min(row["next_at"] for row in heads) - post.clock.now()
                post.later(max(0, wait) / 1000)
            return not unsettled

        await wait_until(settled)
        for place in "xy":
            texts = [text.strip("<>") for to, text in service.shown if to == place]
            _check_order(post, [name for name in names if places[name] == place], "".join(texts))


def _check_order(post: Post, names: Sequence[str], shown: str) -> None:
    """Each delivered text is complete; an ambiguous one is shown up to some part, which may be none."""
    for name in names:
        row = post.row(name)
        assert row["state"] in {"delivered", "ambiguous"}, row
        sent = [part for part in parts_of(post, name) if part["sent_at"]]
        body = row["body"]
        if row["state"] == "delivered":
            assert shown.startswith(body), (name, shown)
            shown = shown.removeprefix(body)
        else:
            for length in (3 * len(sent) + 3, 3 * len(sent)):
                if shown.startswith(body[:length]):
                    shown = shown.removeprefix(body[:length])
                    break
            else:
                pytest.fail(f"{name} is ambiguous, and {shown!r} follows")
    assert not shown
