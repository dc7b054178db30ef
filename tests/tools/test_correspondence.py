"""`Operations.exchanges`: who said what to whom, however much has been said."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.access import WRITE_SCOPE, Caller
from antiphon.engine.supervisor import EngineTimings
from antiphon.errors import Forbidden, InvalidInput, NotFound
from antiphon.operations.collaboration_types import ExchangePage, ExchangeView
from antiphon.operations.types import SendRequest
from antiphon.runtimes import Prompt
from antiphon.store.queries import Queries
from support.agents_fixture import (
    HELPER,
    ScriptedAgent,
    get_phase,
    make_agents_config,
    open_agents_fixture,
    wait_until,
)
from support.app_fixture import BOUND, MAIN, OPERATOR, AppFixture, open_app_fixture

pytestmark = pytest.mark.anyio

SQL = Queries("exchanges")
OTHER = "agent:main:direct:other"
QUIET = EngineTimings(
    lease_seconds=10**7, sweep_interval_seconds=3600, retention_interval_seconds=3600
)  # nothing repairs or deletes what is made up here


async def echo(prompt: Prompt) -> str:
    return "ok"


def fill(
    app: AppFixture,
    *sides: tuple[int | None, int],
    settled: bool = True,
    message: str = "words",
    reply: str = "so",
) -> None:
    """Exchanges between these sessions, past everything."""
    [last] = app.rows("SELECT coalesce(max(n), 0) AS n FROM exchanges")
    for number, (requester, target) in enumerate(sides, last["n"] + 1):
        app.rows(
            "INSERT INTO exchanges (id, requester, requester_key, target, target_key, message, phase, current, turns,"
            " latest_reply, announce, announced, destination, chain, hop, created_at, settled_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, 'r', 0, ?, 'none', ?, '{}', 'c', 1, ?, ?)",
            *(f"{number}", requester, f"agent:main:direct:{requester}" if requester else None),
            *(target, f"agent:main:direct:{target}", message, "settled" if settled else "primary", reply),
            *("none" if settled else None, number, number if settled else None),
        )


def ids(page: ExchangePage) -> list[str]:
    return [exchange.id for exchange in page.exchanges]


@pytest.mark.requirement("G43", "S6")
async def test_an_exchange_is_seen_while_it_goes_on_and_when_it_is_over(tmp_path: Path) -> None:
    free = asyncio.Event()

    async def answer(prompt: Prompt) -> str:
        if get_phase(prompt) == "announce":
            await free.wait()
            return "told everybody"
        return f"{get_phase(prompt)} answered"

    cast = {"main": ScriptedAgent(answer), "helper": ScriptedAgent(answer)}
    async with open_agents_fixture(make_agents_config("helper"), tmp_path, functions=cast) as agents:
        await agents.open_sessions(MAIN, HELPER)
        wanted = SendRequest(
            session=HELPER, message="A_KEY=hunter2 tell me", idempotency_key="k1", reply_back=1
        )
        await agents.operations.exchanges.send(OPERATOR, wanted, requester=MAIN)

        async def seen() -> ExchangeView:
            [exchange] = (await agents.operations.exchanges.list(OPERATOR)).exchanges
            return exchange

        async def announcing() -> bool:
            return (await seen()).phase == "announce"

        await wait_until(announcing)
        now = await seen()
        assert (now.id, now.requester_session_key, now.target_session_key) == ("k1", MAIN, HELPER)
        assert (now.turn, now.turns, now.current_run_id, now.announced) == (1, 1, "announce:k1", None)
        assert (now.message, now.latest_reply) == ("A_KEY=*** tell me", "turn answered")
        assert (now.chain_id, now.hop, now.settled_at) == ("k1", 1, None)
        assert ids(await agents.operations.exchanges.list(OPERATOR, unsettled=True)) == ["k1"]
        free.set()
        await agents.wait_until_idle()
        over = await seen()
        assert (over.phase, over.announced, over.current_run_id) == ("settled", "delivered", None)
        assert over.settled_at is not None and over.settled_at >= over.created_at == now.created_at
        assert ids(await agents.operations.exchanges.list(OPERATOR, unsettled=True)) == []


@pytest.mark.requirement("G43", "S6")
@pytest.mark.parametrize(
    ("said", "announced"),
    [("ANNOUNCE_SKIP", "skipped"), ("so ANNOUNCE_SKIP", "delivered"), ("so it is", "delivered")],
)
async def test_what_came_of_the_announcement_is_seen(tmp_path: Path, said: str, announced: str) -> None:
    async with open_agents_fixture(
        make_agents_config("helper"), tmp_path, functions={"helper": ScriptedAgent(said)}
    ) as agents:
        await agents.operations.exchanges.send(OPERATOR, SendRequest(agent_id="helper", message="?"))
        await agents.wait_until_idle()
        [exchange] = (await agents.operations.exchanges.list(OPERATOR)).exchanges
        assert (exchange.announced, exchange.requester_session_key, exchange.turns) == (announced, None, 0)


@pytest.mark.requirement("G43", "G22")
async def test_pages_go_on_where_they_ended(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo, timings=QUIET) as app:
        one, other = (await app.create(MAIN))["id"], (await app.create(OTHER))["id"]
        fill(app, (one, 7), (None, one), (7, 8), (8, one), (one, other))
        fill(app, (other, one), (7, 8), (one, 7), settled=False)
        asked = app.operations.exchanges.list
        assert ids(await asked(OPERATOR)) == list("87654321")
        first = await asked(OPERATOR, limit=3)
        rest = await asked(OPERATOR, limit=5, cursor=first.next_cursor)
        assert (ids(first), ids(rest), rest.next_cursor) == (list("876"), list("54321"), None)
        of_one = await asked(OPERATOR, MAIN, limit=4)
        assert (ids(of_one), of_one.next_cursor) == (list("8654"), "4")
        assert ids(await asked(OPERATOR, "main", limit=4, cursor="4")) == list("21")
        assert ids(await asked(OPERATOR, OTHER)) == list("65")
        under_way = await asked(OPERATOR, unsettled=True, limit=2)
        assert (ids(under_way), under_way.next_cursor) == (list("87"), "7")
        assert ids(await asked(OPERATOR, unsettled=True, cursor="7")) == list("6")
        assert ids(await asked(OPERATOR, MAIN, unsettled=True)) == list("86")
        assert ids(await asked(OPERATOR, OTHER, unsettled=True, cursor="6")) == []


@pytest.mark.requirement("G43")
async def test_a_page_has_a_bound(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo, timings=QUIET) as app:
        fill(app, *[(1, 2)] * 502)
        page = await app.operations.exchanges.list(OPERATOR, limit=10_000)
        assert (len(page.exchanges), page.next_cursor) == (500, "3")
        assert len((await app.operations.exchanges.list(OPERATOR)).exchanges) == 50


@pytest.mark.requirement("G43", "SEC4")
async def test_what_is_refused(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo, timings=QUIET) as app:
        await app.create(MAIN)
        asked = app.operations.exchanges.list
        for stranger in (Caller.operator([]), Caller.agent("main", MAIN)):
            with pytest.raises(Forbidden):
                await asked(stranger)
        assert ids(await asked(Caller.operator([WRITE_SCOPE]))) == []
        wrongs: list[dict[str, Any]] = [{"limit": 0}, {"cursor": "x"}, {"cursor": "-1"}, {"cursor": "9" * 19}]
        for wrong in wrongs:
            with pytest.raises(InvalidInput) as refused:
                await asked(OPERATOR, **wrong)
            assert refused.value.data["field"] in wrong
        with pytest.raises(NotFound):
            await asked(OPERATOR, "agent:main:direct:nobody")


@pytest.mark.requirement("G43")
async def test_of_what_was_said_there_is_the_beginning_without_secrets(tmp_path: Path) -> None:
    secret = "sk-" + "a1b2" * 12
    async with open_app_fixture(tmp_path, echo, timings=QUIET) as app:
        fill(app, (1, 2), message="m" * 10_000, reply=f"{'r' * 580} {secret}")
        fill(app, (1, 2), message=f"the key is {secret}, keep it", reply="short")
        fill(app, (1, 2), message="", reply="")  # forgotten
        forgotten, short, long = (await app.operations.exchanges.list(OPERATOR)).exchanges
        assert (forgotten.message, forgotten.latest_reply) == (None, None)
        assert short.message is not None and secret not in short.message
        assert (short.message.startswith("the key is "), short.latest_reply) == (True, "short")
        assert (long.message, long.latest_reply) == (f"{'m' * 300}…", f"{'r' * 300}…")


@pytest.mark.sqlite_only
@pytest.mark.requirement("G22", "G43")
@pytest.mark.parametrize(
    ("name", "indexes"),
    [
        ("page", ["INTEGER PRIMARY KEY"]),
        ("page_unsettled", ["exchanges_unsettled"]),
        ("page_of_session", ["exchanges_by_target", "exchanges_by_requester"]),
        ("page_of_session_unsettled", ["exchanges_unsettled"]),
    ],
)
async def test_no_page_walks_through_all_that_was_ever_said(
    tmp_path: Path, name: str, indexes: list[str]
) -> None:
    async with open_app_fixture(tmp_path, echo, timings=QUIET) as app:
        sql: Any = re.sub(r":\w+", "1", getattr(SQL, name).text)
        plan = [row["detail"] for row in app.rows(f"EXPLAIN QUERY PLAN {sql}")]
        for index in indexes:
            assert any(index in step for step in plan), plan
        walked = [step for step in plan if re.match(r"SCAN (e|exchanges)\b(?!.*exchanges_unsettled)", step)]
        assert walked == [], plan
        sorted_apart = [step for step in plan if "TEMP B-TREE FOR ORDER BY" in step]
        assert len(sorted_apart) <= (name == "page_of_session"), plan  # two pages are merged, never more


@pytest.mark.requirement("G43")
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.none() | st.integers(1, 3), st.integers(1, 3), st.booleans()), max_size=12),
    st.data(),
)
def test_every_exchange_is_on_exactly_one_page(
    tmp_path_factory: pytest.TempPathFactory, sides: list[tuple[int | None, int, bool]], data: st.DataObject
) -> None:
    session, unsettled = data.draw(st.none() | st.integers(1, 3)), data.draw(st.booleans())
    limit = data.draw(st.integers(1, 4))
    expected = [
        f"{number}"
        for number, (requester, target, settled) in enumerate(sides, 1)
        if session in (None, requester, target) and not (unsettled and settled)
    ][::-1]

    async def run(path: Path) -> list[str]:
        async with open_app_fixture(path, echo, timings=QUIET) as app:
            keys = [f"agent:main:direct:{number}" for number in (1, 2, 3)]
            assert [(await app.create(key))["id"] for key in keys] == [1, 2, 3]
            for requester, target, settled in sides:
                fill(app, (requester, target), settled=settled)
            found: list[str] = []
            cursor = None
            while True:
                page = await app.operations.exchanges.list(
                    OPERATOR,
                    keys[session - 1] if session else None,
                    unsettled=unsettled,
                    limit=limit,
                    cursor=cursor,
                )
                assert len(page.exchanges) <= limit
                found += ids(page)
                cursor = page.next_cursor
                if cursor is None:
                    return found

    assert asyncio.run(asyncio.wait_for(run(tmp_path_factory.mktemp("pages")), BOUND)) == expected
