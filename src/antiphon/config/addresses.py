"""Which addresses may stand where: `store.url` and `bus.url`, asked when the config is read and when a reference is
opened, and those that a gateway listens on.

Of a URL that is refused only its beginning is shown, for any other part may be of a password.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from antiphon.errors import ConfigError

STORES = ("postgresql", "postgres")
BUSES = ("nats", "tls")
_TOKEN_SHAPE = re.compile(
    r"(?=.*[A-Za-z])(?=.*[0-9]).{16,}|(?:sk|pk|rk|xox[a-z]|xapp|pplx)-.+|(?:sk|pk|gh[a-z]|github_pat|gsk|npm|hf)_.+|AIza.+"
)
"""A segment of a path that may be a token: long, with letters and digits, or with a prefix of well-known ones."""


def check_store(url: str) -> None:
    """Whether it begins like a database that is known; the rest is for whoever connects to say.

    Raises:
        ConfigError: it does not.
    """
    scheme = _scheme(url)
    if scheme not in STORES:
        begins = f"begins with {scheme + '://'!r}, which" if scheme else "has no beginning, so that it"
        raise ConfigError(
            f"'store.url' {begins} is no database that is known here.",
            "Write postgresql://user@host/database or postgres://user@host/database, or leave it out to use a file.",
            path="store.url",
        )


def bus_addresses(url: str) -> list[str]:
    """One or, with commas between them, several.

    Raises:
        ConfigError: there is none, or one of them is not the address of a NATS server.
    """
    addresses = [part.strip() for part in url.split(",") if part.strip()]
    for address in addresses or [""]:
        if not _has_server(address):
            raise ConfigError(
                f"'bus.url' names {_shown(address)}, which is not the address of a NATS server.",
                "Write bus.url as nats://host:4222 or tls://host:4222, several separated by commas.",
                path="bus.url",
            )
    return addresses


def is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine is reached there; a name says nothing of it."""
    return is_ip(host) and ip_address(host).is_loopback


def _has_server(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return parts.scheme in BUSES and bool(parts.hostname) and parts.port is not False  # it may raise
    except ValueError:
        return False


def _shown(address: str) -> str:
    scheme = _scheme(address)
    if not scheme:
        return "something without nats:// or tls://"
    return f"{scheme + '://…'!r}{' without a usable host or port' if scheme in BUSES else ''}"


def _scheme(url: str) -> str:
    """How it begins; nothing where that cannot be told from what may be a user or a password."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator and scheme.isascii() and scheme.isalnum() else ""


def shown_url(url: str | None) -> str:
    """A provider's address without user name, password, parameters and what looks like a token in its path."""
    if url is None:
        return "the provider's public address"
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an invalid address"
    # A password that contains / ? or # would be parsed as a host.
    if "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://…"
    host, path = parts.netloc.rpartition("@")[2], "/".join(map(_shown_segment, parts.path.split("/")))
    return parts._replace(netloc=host, path=path, query="", fragment="").geturl()


def _shown_segment(segment: str) -> str:
    segment = segment.partition(";")[0]
    return "…" if _TOKEN_SHAPE.fullmatch(segment) else segment
