"""Public web pages for agents: a guarded client, and pages as text.

The address comes from a model, so it may point anywhere. Each name is resolved once, every address it has must be
public, and the connection is made to that very address; a redirect is checked like a new request. What is read is
bounded in bytes and time.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal
from urllib.parse import urljoin, urlsplit

import msgspec

from antiphon.errors import Forbidden, InvalidInput, TooLarge, Unavailable
from antiphon.host_rules import is_public_address

if TYPE_CHECKING:
    import httpx2
    from selectolax.lexbor import LexborNode as _HtmlNode

MAX_URL_CHARACTERS = 4096
MAX_RESOLVER_THREADS = 4
DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_UNUSUAL_CODECS = frozenset({"punycode", "raw_unicode_escape", "unicode_escape"})  # slow, or not for pages

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class FetchLimits(msgspec.Struct, frozen=True, kw_only=True):
    timeout_seconds: float = 30.0
    max_bytes: int = 2_000_000
    max_redirects: int = 3


class FetchedPage(msgspec.Struct, frozen=True, kw_only=True):
    """What a server answered. `url` is the last one after redirects."""

    url: str
    status: int
    content_type: str
    body: bytes
    is_truncated: bool = False

    @property
    def text(self) -> str:
        charset = re.search(r"charset=[\"']?([\w.:-]+)", self.content_type, re.IGNORECASE)
        return self.body.decode(_choose_codec(charset[1] if charset else "utf-8"), errors="replace")


def _choose_codec(charset: str) -> str:
    try:
        codec = codecs.lookup(charset).name
        b"-".decode(codec, errors="replace")  # some codecs are not for text
    except (LookupError, UnicodeError):
        return "utf-8"
    return "utf-8" if codec.replace("-", "_") in _UNUSUAL_CODECS else codec


_resolver_threads = ThreadPoolExecutor(MAX_RESOLVER_THREADS, "web-resolver")
"""A name server chosen by a model may never answer; other look-ups of the process must not wait for it."""


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host."""
    found = await asyncio.get_running_loop().run_in_executor(
        _resolver_threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class WebClient:
    """Fetches public pages.

    `is_allowed` admits other addresses too where an operator, and not a model, has chosen the host.
    """

    def __init__(
        self,
        limits: FetchLimits | None = None,
        *,
        user_agent: str = "Antiphon",
        headers: Mapping[str, str] | None = None,
        resolve: Resolver = resolve_host,
        is_allowed: Callable[[str], bool] = is_public_address,
    ) -> None:
        self._limits = limits or FetchLimits()
        self._headers = {"user-agent": user_agent, "accept": "text/html, text/*;q=0.9, */*;q=0.5"}
        self._headers |= headers or {}
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str) -> FetchedPage:
        """Return a page.

        Raises:
            InvalidInput: it is not a web URL.
            Forbidden: it, or a redirect from it, leads to an address that is not public.
            Unavailable: the server could not be reached, or did not answer in time.
        """
        if self._tls is None:
            self._tls = await asyncio.to_thread(_load_http_client)
        from httpx2 import HTTPError, InvalidURL  # noqa: PLC0415 - loaded by now

        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                return await self._follow(url)
        except TimeoutError:
            raise Unavailable(
                f"{url[:200]!r} did not answer within {self._limits.timeout_seconds:g} s.", "Try again later."
            ) from None
        except (InvalidURL, UnicodeError):
            raise _build_address_error(url) from None
        except (HTTPError, OSError) as error:
            raise Unavailable(
                f"{url[:200]!r} could not be fetched: {str(error) or type(error).__name__}.",
                "Check the address, or try again later.",
            ) from None

    async def _follow(self, url: str) -> FetchedPage:
        for _ in range(self._limits.max_redirects + 1):
            page, location = await self._request(url)
            if location is None:
                return page
            url = _join_url(url, location)
        raise Unavailable(
            f"{url[:200]!r} redirects more than {self._limits.max_redirects} times.", "Use the final address."
        )

    async def _request(self, url: str) -> tuple[FetchedPage, str | None]:
        """Return the answer, and where it redirects to."""
        import httpx2  # noqa: PLC0415 - imported by `fetch`

        host, port, scheme = _split_url(url)
        address = await self._choose_address(host, port)
        pinned = httpx2.URL(url).copy_with(host=address, port=port, fragment=None)
        shown_host = f"[{host}]" if ":" in host else host.encode("idna").decode()
        host_header = shown_host if port == DEFAULT_PORTS[scheme] else f"{shown_host}:{port}"
        async with (
            httpx2.AsyncClient(trust_env=False, follow_redirects=False, verify=self._tls or True) as http,
            http.stream(
                "GET",
                pinned,
                headers={**self._headers, "host": host_header, "accept-encoding": "identity"},
                extensions={"sni_hostname": host if ":" in host else shown_host},
                timeout=self._limits.timeout_seconds,
            ) as response,
        ):
            if response.status_code in _REDIRECT_STATUSES and (location := response.headers.get("location")):
                return FetchedPage(url=url, status=response.status_code, content_type="", body=b""), location
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise Unavailable(
                    f"{url[:200]!r} has an answer in an unsupported content encoding.", "Use another page."
                )
            body, is_truncated = await self._read_body(response)
            content_type = response.headers.get("content-type", "")
            return FetchedPage(
                url=url,
                status=response.status_code,
                content_type=content_type[:200],
                body=body,
                is_truncated=is_truncated,
            ), None

    async def _read_body(self, response: httpx2.Response) -> tuple[bytes, bool]:
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > self._limits.max_bytes:
                return bytes(body[: self._limits.max_bytes]), True
        return bytes(body), False

    async def _choose_address(self, host: str, port: int) -> str:
        """Return an address of the host. All must be public: a later lookup could return another one."""
        addresses = await self._resolve(host, port)
        if not addresses:
            raise Unavailable(f"The host {host!r} has no address.", "Check the address.")
        for address in addresses:
            if not self._is_allowed(address):
                raise Forbidden(
                    f"The host {host!r} is not on the public internet.", "Use a public address.", field="url"
                )
        return addresses[0]


def _split_url(url: str) -> tuple[str, int, str]:
    """Return host, port and scheme of a web address."""
    if len(url) > MAX_URL_CHARACTERS:
        raise TooLarge(
            f"The address has more than {MAX_URL_CHARACTERS} characters.", "Use a shorter one.", field="url"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme not in DEFAULT_PORTS or not host or parts.username is not None:
        raise _build_address_error(url)
    return host, port or DEFAULT_PORTS[parts.scheme], parts.scheme


def _build_address_error(url: str) -> InvalidInput:
    return InvalidInput(
        f"{url[:200]!r} is not a web URL.", "Use http:// or https:// and a host.", field="url"
    )


def _join_url(base: str, target: str) -> str:
    """Return a link's address, or the link as it is written if it is not one."""
    try:
        return urljoin(base, target)
    except ValueError:
        return target


def _load_http_client() -> ssl.SSLContext:
    """Import the client with the first page, and off the event loop: it would take a tenth of the gateway's start."""
    import httpx2  # noqa: PLC0415

    return httpx2.create_ssl_context(trust_env=False)


# --- pages as text ---

_SKIPPED_TAGS = frozenset(
    {
        "script",
        "style",
        "noscript",
        "template",
        "svg",
        "iframe",
        "head",
        "nav",
        "footer",
        "form",
        "button",
        "-comment",
    }
)
_BLOCK_TAGS = (
    *(
        "p",
        "div",
        "section",
        "article",
        "main",
        "header",
        "aside",
        "table",
        "blockquote",
        "figure",
        "dl",
        "dd",
        "dt",
    ),
    *("ul", "ol"),
)
_COMMON_SURROUNDINGS = dict.fromkeys(_BLOCK_TAGS, ("\n\n", "\n\n")) | {
    "li": ("\n- ", ""),
    "br": ("\n", ""),
    "tr": ("\n", ""),
}
_TEXT_SURROUNDINGS = _COMMON_SURROUNDINGS | dict.fromkeys(("td", "th"), ("", "\t"))
_MARKDOWN_SURROUNDINGS = (
    _COMMON_SURROUNDINGS | dict.fromkeys(("td", "th"), ("", " | ")) | {"code": ("`", "`")}
)
_HEADING_TAG_PATTERN = re.compile(r"h([1-6])")


def extract_text(html: str, base_url: str, mode: Literal["markdown", "text"] = "markdown") -> str:
    """Return the readable text of a page, with its title; as Markdown, with headings, lists and links."""
    from selectolax.lexbor import LexborHTMLParser  # noqa: PLC0415 - takes 45 ms, and most processes never fetch

    page = LexborHTMLParser(html)
    title = page.css_first("title")
    writer = _TextWriter(base_url, markdown=mode == "markdown")
    body = page.css_first("main") or page.css_first("article") or page.body
    if body is not None:
        writer.write_children(body)
    text = writer.finish()
    heading = title.text().strip() if title is not None else ""
    return f"{heading}\n\n{text}".strip() if heading and not text.startswith(f"# {heading}") else text


class _TextWriter:
    def __init__(self, base_url: str, *, markdown: bool) -> None:
        self._base_url = base_url
        self._markdown = markdown
        self._parts: list[str] = []

    def finish(self) -> str:
        # Line by line, since a regular expression would try every space of a long line as a beginning.
        text = "\n".join(line.rstrip(" \t") for line in "".join(self._parts).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", text).strip()

    def write_children(self, node: _HtmlNode) -> None:
        """Write the text below a node, without recursion: pages may be nested as deep as their author likes."""
        pending: list[_HtmlNode | str] = [node.child] if node.child else []
        while pending:
            current = pending.pop()
            if isinstance(current, str):
                self._parts.append(current)
                continue
            if current.next:
                pending.append(current.next)
            tag = current.tag or ""
            if tag in _SKIPPED_TAGS:
                continue
            if tag == "-text":
                self._parts.append(re.sub(r"\s+", " ", current.text(deep=False)))
            elif tag == "pre":
                fence = "```\n" if self._markdown else ""
                self._parts.append(f"\n\n{fence}{current.text().rstrip()}\n{fence}\n")
            else:
                before, after = self._surround(tag, current)
                self._parts.append(before)
                pending.append(after)
                if current.child:
                    pending.append(current.child)

    def _surround(self, tag: str, node: _HtmlNode) -> tuple[str, str]:
        """Return what stands before and after the text of a node."""
        if heading := _HEADING_TAG_PATTERN.fullmatch(tag):
            return "\n\n" + ("#" * int(heading[1]) + " " if self._markdown else ""), "\n\n"
        if tag == "a" and self._markdown and (target := node.attributes.get("href")):
            return "[", f"]({_join_url(self._base_url, target)})"
        return (_MARKDOWN_SURROUNDINGS if self._markdown else _TEXT_SURROUNDINGS).get(tag, ("", ""))
