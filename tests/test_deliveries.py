"""The outbox as people see it, however many deliveries there have been."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.outbox.delivery_rows import Destination
from antiphon.operations import deliveries
from antiphon.runtimes import Prompt
from antiphon.store.queries import Queries, Query
from support.app_fixture import MAIN, OPERATOR, AppFixture, open_app_fixture

pytestmark = pytest.mark.anyio

SQL = Queries("deliveries")


async def echo(prompt: Prompt) -> str:
    return "ok"


def fill(app: AppFixture, *states: str) -> None:
    """Deliveries in these states, numbered from 1, past everything."""
    for number, state in enumerate(states, 1):
        app.rows(
            "INSERT INTO deliveries (key, kind, session, session_key, destination, place, body, state, next_at,"
            " created_at, settled_at) VALUES (?, 'task', 1, ?, ?, 'p', 'words', ?, 0, 1, 1)",
            f"{number}",
            MAIN,
            Destination(to="u1").json_text,
            state,
        )


@pytest.mark.requirement("G22")
async def test_pages_of_a_state_go_on_where_they_ended(tmp_path: Path) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        fill(app, "dead", "delivered", "dead", "blocked", "dead", "delivered")
        first = await app.operations.deliveries.list(OPERATOR, "dead", limit=2)
        assert [row.key for row in first.deliveries] == ["5", "3"]
        rest = await app.operations.deliveries.list(OPERATOR, "dead", limit=2, cursor=first.next_cursor)
        assert ([row.key for row in rest.deliveries], rest.next_cursor) == (["1"], None)
        every = await app.operations.deliveries.list(OPERATOR, limit=10)
        assert [row.key for row in every.deliveries] == list("654321")
        assert every.count_by_state == {"dead": 3, "delivered": 2, "blocked": 1}
        assert not every.capped


@pytest.mark.requirement("G22")
async def test_of_those_that_were_delivered_only_so_many_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MAX_DELIVERED_COUNTED", 3)
    async with open_app_fixture(tmp_path, echo) as app:
        fill(app, *["delivered"] * 5, *["dead"] * 4)
        page = await app.operations.deliveries.list(OPERATOR)
        assert (page.count_by_state, page.capped) == ({"dead": 4, "delivered": 3}, True)


@pytest.mark.sqlite_only  # what its planner says
@pytest.mark.requirement("G22")
@pytest.mark.parametrize(
    ("query", "index"),
    [(SQL.page_by_state, "deliveries_by_state"), (SQL.count_by_state, "deliveries_elsewhere")],
    ids=["page", "standing"],
)
async def test_no_page_walks_through_all_that_was_ever_delivered(
    tmp_path: Path, query: Query, index: str
) -> None:
    async with open_app_fixture(tmp_path, echo) as app:
        plan = plan_of(app, query.text)
        assert any(index in step for step in plan), plan
        assert not [step for step in plan if re.match(r"SCAN deliveries(?!.*deliveries_elsewhere)", step)], (
            plan
        )
        assert not [step for step in plan if "TEMP B-TREE" in step], plan


def plan_of(app: AppFixture, sql: str) -> list[str]:
    given: Any = re.sub(r":\w+", "1", sql)
    return [row["detail"] for row in app.rows(f"EXPLAIN QUERY PLAN {given}")]
