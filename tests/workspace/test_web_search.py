"""Searching the web: Brave Search and SearXNG over HTTP, what they answer, and what is kept of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from antiphon.clock import ManualClock
from antiphon.config import parse
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.errors import InvalidInput, Unavailable
from antiphon.tools.web_search import web_search
from antiphon.workspace.web_search import MAX_CACHED_SEARCHES, WebSearch
from support.app_fixture import OPERATOR
from support.search_service import SearchService

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("T1")]


@pytest.fixture
async def service() -> AsyncIterator[SearchService]:
    async with SearchService().running() as running:
        yield running


def open_search(clock: ManualClock, **settings: Any) -> WebSearch:
    config, _ = parse({"tools": {"web": {"search": settings}}})
    return WebSearch(config.tools.web.search, clock)


async def test_searxng_is_asked_at_the_address_of_the_operator(service: SearchService) -> None:
    search = open_search(ManualClock(), searxng={"baseUrl": f"{service.url}/"})
    service.results = [
        {"title": "A <b>fox</b> &amp; dog", "url": "https://fox.test/", "content": "It\njumps. " * 200},
        {"title": "no address"},
        {"title": "a script", "url": "javascript:alert(1)"},
        {"title": "Second", "url": "http://second.test/", "content": None},
    ]
    found = await search.search("  quick   fox ", 3)
    assert [(each.title, each.url) for each in found] == [
        ("A fox & dog", "https://fox.test/"),
        ("Second", "http://second.test/"),
    ]
    assert len(found[0].snippet) == 600 and "\n" not in found[0].snippet
    [asked] = service.requests
    assert (asked.path, asked.query) == ("/search", {"q": ["quick fox"], "format": ["json"]})


async def test_brave_gets_the_key_and_the_count(service: SearchService) -> None:
    search = open_search(ManualClock(), apiKey="secret-key", brave={"baseUrl": service.url}, maxResults=4)
    service.results = [{"title": str(n), "url": f"https://{n}.test", "description": "x"} for n in range(9)]
    assert len(await search.search("fox")) == 4
    assert len(await search.search("fox", 99)) == 9
    first, second = service.requests
    assert (first.path, first.query) == ("/res/v1/web/search", {"q": ["fox"], "count": ["4"]})
    assert first.headers["x-subscription-token"] == "secret-key"
    assert second.query["count"] == ["10"]
    service.body = b"{}"  # what Brave answers if it finds nothing
    assert await search.search("nothing at all") == []


async def test_an_answer_is_kept_for_a_while(service: SearchService) -> None:
    clock = ManualClock()
    search = open_search(clock, searxng={"baseUrl": service.url}, cacheTtlMinutes=2)
    for _ in range(2):
        await search.search("fox")
    assert len(service.requests) == 1
    clock.advance(seconds=121)
    await search.search("fox")
    assert len(service.requests) == 2
    for number in range(MAX_CACHED_SEARCHES):
        await search.search(f"other {number}")
    await search.search("fox")
    assert len(service.requests) == MAX_CACHED_SEARCHES + 3


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (403, b"", "add 'json' to 'search.formats'"),
        (429, b"", "HTTP 429"),
        (200, b"<html>", "does not contain search results"),
        (200, b'{"results": {}}', "does not contain search results"),
        (302, b"", "redirects"),
    ],
)
async def test_a_service_that_fails_is_reported_and_asked_again(
    service: SearchService, status: int, body: bytes, text: str
) -> None:
    search = open_search(ManualClock(), searxng={"baseUrl": service.url})
    service.status, service.body = status, body
    for _ in range(2):
        with pytest.raises(Unavailable, match=text):
            await search.search("fox")
    assert len(service.requests) == 2  # no failure is kept, and no redirect followed


async def test_the_model_reads_a_list_and_may_use_other_names(service: SearchService) -> None:
    settings = parse({"tools": {"web": {"search": {"searxng": {"baseUrl": service.url}}}}})[
        0
    ].tools.web.search
    tool = web_search(WebSearch(settings, ManualClock()), settings)
    service.results = [{"title": "Fox", "url": "https://fox.test/", "content": "jumps"}]

    async def call(**arguments: Any) -> ToolOutput:
        return await tool.invoke(ToolRequest(caller=OPERATOR, run_id="r", call_id="c", arguments=arguments))

    shown = await call(query="fox", max_results=1)
    assert shown.text == "1. Fox\n   https://fox.test/\n   jumps"
    service.results = []
    assert (await call(query="dog")).text == "No results."
    assert (await call(query=" ")).is_error
    assert tool.explain_absence("main", is_sandboxed=False) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "No search service is configured."),
        ({"enabled": False, "apiKey": "k"}, "'tools.web.search.enabled' is false."),
        ({"provider": "brave"}, "No search service is configured."),
        ({"provider": "searxng", "apiKey": "k"}, "'tools.web.search.searxng.baseUrl' is not set."),
        ({"provider": "perplexity", "apiKey": "k"}, "The search service 'perplexity' is not supported."),
    ],
)
def test_without_a_service_it_is_not_offered(settings: dict[str, Any], reason: str) -> None:
    config, warnings = parse({"tools": {"web": {"search": settings}}})
    tool = web_search(WebSearch(config.tools.web.search, ManualClock()), config.tools.web.search)
    assert (tool.explain_absence("main", is_sandboxed=False) or "").startswith(reason)
    assert any("not supported" in warning for warning in warnings) == ("perplexity" in reason)


async def test_a_query_has_words_and_an_end() -> None:
    search = open_search(ManualClock(), apiKey="k", brave={"baseUrl": "http://127.0.0.1:9"})
    for query in (" ", "x" * 401):
        with pytest.raises(InvalidInput):
            await search.search(query)
