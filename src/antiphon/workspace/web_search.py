"""Searches the web through the service that the operator has configured: Brave Search or SearXNG.

The operator chooses the address of the service, so it may be local; it is reached without following redirects, which
would pass the key on. Answers are kept for a while, in memory and bounded.
"""

from __future__ import annotations

import asyncio
import html
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast
from urllib.parse import urlencode

import msgspec

from antiphon.clock import Clock
from antiphon.errors import InvalidInput, Unavailable
from antiphon.workspace.web import FetchedPage, FetchLimits, WebClient

if TYPE_CHECKING:
    from antiphon.config import WebSearchConfig

BRAVE_URL = "https://api.search.brave.com"
MAX_RESULTS = 10
MAX_QUERY_CHARACTERS = 400
MAX_TITLE_CHARACTERS, MAX_SNIPPET_CHARACTERS, MAX_URL_CHARACTERS = 200, 600, 1000
MAX_CACHED_SEARCHES = 100
MAX_ANSWER_BYTES = 2_000_000
_TAG_PATTERN = re.compile(r"<[^>]*>")


class WebSearchResult(msgspec.Struct, frozen=True):
    title: str
    url: str
    snippet: str


class WebSearch:
    """Searches with one service, and caches its answers for a while."""

    def __init__(self, settings: WebSearchConfig, clock: Clock, *, user_agent: str = "Antiphon") -> None:
        self._settings = settings
        self._clock = clock
        self._user_agent = user_agent
        self._client: WebClient | None = None
        self._answers: OrderedDict[tuple[str, int], tuple[int, Sequence[WebSearchResult]]] = OrderedDict()

    async def search(self, query: str, count: int | None = None) -> Sequence[WebSearchResult]:
        """Return up to `count` results.

        Raises:
            InvalidInput: the query is empty or too long.
            Unavailable: the service could not be reached, or refused.
        """
        wanted = " ".join(query.split())
        if not 0 < len(wanted) <= MAX_QUERY_CHARACTERS:
            raise InvalidInput(
                f"A query has 1 to {MAX_QUERY_CHARACTERS} characters.", "Use a few words.", field="query"
            )
        number = min(max(count or self._settings.max_results, 1), MAX_RESULTS)
        known = self._answers.get((wanted, number))
        if known is not None and known[0] > self._clock.now():
            return known[1]
        found = (await self._request(wanted, number))[:number]
        self._remember((wanted, number), found)
        return found

    def _remember(self, asked: tuple[str, int], found: Sequence[WebSearchResult]) -> None:
        kept_ms = self._settings.cache_ttl_minutes * 60_000
        if kept_ms:
            self._answers[asked] = (self._clock.now() + kept_ms, found)
            self._answers.move_to_end(asked)
            while len(self._answers) > MAX_CACHED_SEARCHES:
                self._answers.popitem(last=False)

    async def _request(self, query: str, count: int) -> list[WebSearchResult]:
        if self._client is None:
            self._client = await asyncio.to_thread(self._open_client)
        service = choose_search_service(self._settings)
        if service == "searxng":
            base, path = self._settings.searxng.base_url or "", "/search"
            parameters: dict[str, Any] = {"q": query, "format": "json"}
        else:
            base, path = self._settings.brave.base_url or BRAVE_URL, "/res/v1/web/search"
            parameters = {"q": query, "count": count}
        page = await self._client.fetch(f"{base.rstrip('/')}{path}?{urlencode(parameters)}")
        rows = _read_rows(page, _find_searxng_rows if service == "searxng" else _find_brave_rows)
        return [result for row in rows if (result := _read_result(row)) is not None]

    def _open_client(self) -> WebClient:
        headers = {"accept": "application/json"}
        if choose_search_service(self._settings) == "brave" and self._settings.api_key is not None:
            headers["x-subscription-token"] = self._settings.api_key.reveal()
        limits = FetchLimits(
            timeout_seconds=self._settings.timeout_seconds, max_bytes=MAX_ANSWER_BYTES, max_redirects=0
        )
        return WebClient(
            limits, user_agent=self._user_agent, headers=headers, is_allowed=lambda _address: True
        )


def choose_search_service(settings: WebSearchConfig) -> Literal["brave", "searxng"] | None:
    """Return the service that the settings allow to use, if any."""
    if settings.searxng.base_url is not None and settings.provider in (None, "searxng"):
        return "searxng"
    if settings.api_key is not None and settings.provider in (None, "brave"):
        return "brave"
    return None


def explain_missing_service(settings: WebSearchConfig) -> str | None:
    """Return why nothing can be searched, or None if a service is configured."""
    if not settings.enabled:
        return "'tools.web.search.enabled' is false."
    if choose_search_service(settings) is not None:
        return None
    match settings.provider:
        case "searxng":
            return "'tools.web.search.searxng.baseUrl' is not set. Set it to the address of your SearXNG."
        case None | "brave":
            return (
                "No search service is configured. Set 'tools.web.search.apiKey' for Brave Search, or"
                " 'tools.web.search.searxng.baseUrl' to the address of your SearXNG."
            )
        case other:
            return f"The search service {other!r} is not supported. Use 'brave' or 'searxng'."


def _read_rows(page: FetchedPage, find_rows: Callable[[dict[str, Any]], object]) -> list[Any]:
    if page.status == 403:  # what SearXNG answers unless its settings list the format
        raise Unavailable(
            "The search service refused the request (HTTP 403).",
            "The operator must check its key or, for SearXNG, add 'json' to 'search.formats' of its settings.",
        )
    if page.status != 200:
        raise Unavailable(f"The search service answered with HTTP {page.status}.", "Try again later.")
    try:
        answer = msgspec.json.decode(page.body, type=dict[str, Any])
        rows = find_rows(answer)
    except (msgspec.DecodeError, AttributeError):
        rows = None
    if not isinstance(rows, list):
        raise Unavailable(
            "The answer of the search service does not contain search results.", "Try again later."
        )
    return cast("list[Any]", rows)


def _find_searxng_rows(answer: dict[str, Any]) -> object:
    return answer.get("results")


def _find_brave_rows(answer: dict[str, Any]) -> object:
    return answer.get("web", {}).get("results", [])  # without `web` if nothing was found


def _read_result(row: object) -> WebSearchResult | None:
    if not isinstance(row, dict):
        return None
    fields = cast("dict[str, object]", row)
    url = fields.get("url")
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return None
    return WebSearchResult(
        _clean(fields.get("title"), MAX_TITLE_CHARACTERS),
        url[:MAX_URL_CHARACTERS],
        _clean(fields.get("description") or fields.get("content"), MAX_SNIPPET_CHARACTERS),
    )


def _clean(value: object, max_characters: int) -> str:
    text = value if isinstance(value, str) else ""
    return " ".join(html.unescape(_TAG_PATTERN.sub("", text)).split())[:max_characters]
