"""Fetching pages for agents: only public addresses, bounded, and readable."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import AntiphonError, Forbidden, InvalidInput, Unavailable
from antiphon.host_rules import is_public_address
from antiphon.workspace.web import FetchedPage, FetchLimits, WebClient, extract_text

pytestmark = pytest.mark.anyio

PAGES = {
    "/": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 9\r\n\r\n<p>hi</p>",
    "/away": b"HTTP/1.1 302 Found\r\nlocation: http://inside.test/\r\ncontent-length: 0\r\n\r\n",
    "/near": b"HTTP/1.1 307 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n",
    "/broken": b"HTTP/1.1 302 Found\r\nlocation: http://[\r\ncontent-length: 0\r\n\r\n",
    "/loop": b"HTTP/1.1 302 Found\r\nlocation: /loop\r\ncontent-length: 0\r\n\r\n",
    "/zip": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc",
    "/large": b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n" + b"x" * 100_000,
    "/silent": b"",
}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    seen: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        if path == "/host":
            host = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"host:"))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(host), host))
        elif page := PAGES[path]:
            writer.write(page)
        if path != "/silent":
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for writer in seen:
        writer.close()


async def resolve(host: str, port: int) -> Sequence[str]:
    return {
        **{name: ["127.0.0.1"] for name in ("public.test", "bücher.test", "2606:4700::1")},
        "mixed.test": ["127.0.0.1", "10.0.0.1"],
    }.get(host, ["10.0.0.1"])


def open_client(*, seconds: float = 20.0, max_bytes: int = 1000) -> WebClient:
    """A client for which the test's server is public."""
    limits = FetchLimits(timeout_seconds=seconds, max_bytes=max_bytes)
    return WebClient(limits, resolve=resolve, is_allowed="127.0.0.1".__eq__)


async def test_a_page_is_fetched_from_the_address_that_was_checked(port: int) -> None:
    page = await open_client().fetch(f"http://public.test:{port}/")
    assert (page.status, page.content_type, page.text) == (200, "text/html", "<p>hi</p>")
    page = await open_client().fetch(f"http://public.test:{port}/host")
    assert page.text == f"host: public.test:{port}"
    page = await open_client().fetch(f"http://public.test:{port}/near#part")
    assert page.url == f"http://public.test:{port}/"


@pytest.mark.parametrize(
    ("host", "header"), [("bücher.test", "xn--bcher-kva.test"), ("[2606:4700::1]", "[2606:4700::1]")]
)
async def test_the_host_is_named_as_servers_expect_it(port: int, host: str, header: str) -> None:
    page = await open_client().fetch(f"http://{host}:{port}/host")
    assert page.text == f"host: {header}:{port}"


@pytest.mark.parametrize("url", ["http://inside.test/", "http://mixed.test/", "http://public.test:PORT/away"])
async def test_addresses_that_are_not_public_are_refused(port: int, url: str) -> None:
    with pytest.raises(Forbidden, match="not on the public internet"):
        await open_client().fetch(url.replace("PORT", str(port)))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://169.254.169.254/latest/meta-data/",
    ],
)
async def test_the_default_client_reaches_nothing_on_this_machine(url: str) -> None:
    with pytest.raises((Forbidden, Unavailable)):
        await WebClient(FetchLimits(timeout_seconds=5)).fetch(url)


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "ftp://x/", "http://", "//x", "http://user:key@x/", "http://x:99999/"]
)
async def test_what_is_no_web_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        await open_client().fetch(url)


@pytest.mark.parametrize(
    "url",
    [
        f"http://{'a' * 64}.test/",
        "http://a..test/",
        "http://public.test:PORT/\0",
        "http://public.test:PORT/\r\nx: y",
        "http://pub\tlic.test/",
        "http://[v1.x]/",
        "http://public.test:PORT/broken",
    ],
)
async def test_an_address_that_no_client_can_request_is_refused(port: int, url: str) -> None:
    client = WebClient(resolve=lambda host, port: resolve("public.test", port), is_allowed="127.0.0.1".__eq__)
    with pytest.raises(InvalidInput):
        await client.fetch(url.replace("PORT", str(port)))
    with pytest.raises(AntiphonError):
        await WebClient(FetchLimits(timeout_seconds=5)).fetch(url.replace("PORT", "1"))


async def test_a_name_that_is_never_resolved_delays_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def never_answer(*_: object, **__: object) -> list[object]:
        is_over.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", never_answer)
    try:
        client = WebClient(FetchLimits(timeout_seconds=0.5))
        fetches = [asyncio.create_task(client.fetch("http://tarpit.test/")) for _ in range(64)]
        await asyncio.wait(fetches, timeout=30)
        assert all(isinstance(fetch.exception(), Unavailable) for fetch in fetches)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), 20) == "done"
    finally:
        is_over.set()


async def test_size_time_and_redirects_are_bounded(port: int) -> None:
    page = await open_client().fetch(f"http://public.test:{port}/large")
    assert (len(page.body), page.is_truncated) == (1000, True)
    with pytest.raises(Unavailable, match="did not answer within"):
        await open_client(seconds=0.2).fetch(f"http://public.test:{port}/silent")
    with pytest.raises(Unavailable, match="more than 3 times"):
        await open_client().fetch(f"http://public.test:{port}/loop")
    with pytest.raises(Unavailable, match="encoding"):
        await open_client().fetch(f"http://public.test:{port}/zip")


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_counts_as_itself(address: object) -> None:
    public = is_public_address(str(address))
    number = int(address)  # pyright: ignore[reportArgumentType]
    assert is_public_address(f"::ffff:{address}") == public
    assert is_public_address(f"64:ff9b::{number >> 16:x}:{number & 0xFFFF:x}") == public
    assert is_public_address(f"2002:{number >> 16:x}:{number & 0xFFFF:x}::1") == public


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("100.64.0.1", False),
        ("0.0.0.1", False),
        ("224.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fc00::1", False),
        ("::", False),
        ("::127.0.0.1", False),
        ("::ffff:0:7f00:1", False),
        ("64:ff9b:1::7f00:1", False),
        ("fec0::1", False),
        ("5f00::1", False),
        ("3fff::1", False),
        ("168.63.129.16", False),
        ("::ffff:168.63.129.16", False),
        ("192.88.99.1", False),
    ],
)
def test_only_the_public_internet_is_public(address: str, public: bool) -> None:
    assert is_public_address(address) is public


HTML = """<html><head><title>A page</title><style>p{}</style></head><body><nav>menu</nav>
<h1>Top</h1><p>One   <b>bold</b>
text, <a href="/more">more</a>.</p><ul><li>first</li><li>second</li></ul>
<pre>a
  b</pre><script>alert(1)</script><table><tr><td>1</td><td>2</td></tr></table></body></html>"""


def test_a_page_becomes_markdown_or_text() -> None:
    markdown = extract_text(HTML, "https://example.org/here")
    assert markdown.startswith(
        "A page\n\n# Top\n\nOne bold text, [more](https://example.org/more).\n\n- first\n- second"
    )
    assert "```\na\n  b\n```" in markdown
    assert "1 | 2" in markdown
    assert not {"alert", "menu", "p{}"} & set(markdown.split())
    text = extract_text(HTML, "https://example.org/", "text")
    assert text.startswith("A page\n\nTop\n\nOne bold text, more.")


def test_a_line_of_spaces_is_read_quickly() -> None:
    start = time.process_time()
    assert extract_text(f"<pre>a{' ' * 300_000}b</pre>", "https://example.org/").count(" ") == 300_000
    assert time.process_time() - start < 10  # it took minutes


def test_a_link_that_is_no_address_is_shown_as_it_is() -> None:
    assert extract_text('<a href="http://[">here</a>', "https://example.org/") == "[here](http://[)"


@pytest.mark.parametrize(
    "charset", ["punycode", "idna", "undefined", "unicode_escape", "zlib", "base64", "no-such", "x\0"]
)
def test_a_charset_that_is_none_counts_as_utf_8(charset: str) -> None:
    page = FetchedPage(
        url="", status=200, content_type=f"text/plain; charset={charset}", body="a-é\\n".encode()
    )
    assert page.text == "a-é\\n"
    assert msgspec.structs.replace(page, content_type="text/plain; charset=latin1").text == "a-Ã©\\n"


def test_a_page_nested_without_end_is_read() -> None:
    assert extract_text("<div>" * 50_000 + "deep", "https://example.org/").endswith("deep")


@given(st.text(alphabet="<>/ab=\"' &;#pdivlu", max_size=60))
def test_any_text_can_be_read_as_a_page(html: str) -> None:
    try:
        extract_text(html, "https://example.org/")
    except AntiphonError:
        pytest.fail("a page is never refused")
