"""Validation of addresses: `store.url`, `bus.url` and the address that a gateway listens on.

URLs are checked when the config is read and again when a secret reference is resolved. Errors show only the scheme
of a rejected URL, since any other part may belong to a password.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from urllib.parse import urlsplit

from antiphon.errors import ConfigError

STORE_URL_SCHEMES = ("postgresql", "postgres")
BUS_URL_SCHEMES = ("nats", "tls")
_TOKEN_PATTERN = re.compile(
    r"(?=.*[A-Za-z])(?=.*[0-9]).{16,}|(?:sk|pk|rk|xox[a-z]|xapp|pplx)-.+|(?:sk|pk|gh[a-z]|github_pat|gsk|npm|hf)_.+|AIza.+"
)
"""Matches a path segment that may be a token: long, with letters and digits, or with a well-known prefix."""


def check_store_url(url: str) -> None:
    """Checks that the URL has the scheme of a supported database; the rest is checked on connecting.

    Raises:
        ConfigError: the scheme is not supported.
    """
    scheme = _get_scheme(url)
    if scheme not in STORE_URL_SCHEMES:
        fault = f"has the unsupported scheme {scheme + '://'!r}" if scheme else "has no scheme"
        raise ConfigError(
            f"'store.url' {fault}.",
            "Use postgresql://user@host/database or postgres://user@host/database, or remove it to use SQLite.",
            path="store.url",
        )


def parse_bus_addresses(url: str) -> list[str]:
    """Splits `bus.url` into its addresses, which are separated by commas.

    Raises:
        ConfigError: it is empty, or one of the addresses is not that of a NATS server.
    """
    addresses = [part.strip() for part in url.split(",") if part.strip()]
    for address in addresses or [""]:
        if not _is_nats_address(address):
            raise ConfigError(
                f"'bus.url' contains {_mask_address(address)}, which is not the address of a NATS server.",
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
    """Whether the host is a loopback IP address; host names are not resolved and do not count."""
    return is_ip(host) and ip_address(host).is_loopback


def _is_nats_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return (
            parts.scheme in BUS_URL_SCHEMES and bool(parts.hostname) and parts.port is not False
        )  # `port` raises for an invalid one
    except ValueError:
        return False


def _mask_address(address: str) -> str:
    scheme = _get_scheme(address)
    if not scheme:
        return "an address without nats:// or tls://"
    return f"{scheme + '://…'!r}{' without a usable host or port' if scheme in BUS_URL_SCHEMES else ''}"


def _get_scheme(url: str) -> str:
    """The scheme of a URL; empty if it could be part of a user name or password."""
    scheme, separator, _ = url.partition("://")
    return scheme if separator and scheme.isascii() and scheme.isalnum() else ""


def mask_url(url: str | None) -> str:
    """A provider's URL without user name, password, query and anything in its path that looks like a token."""
    if url is None:
        return "the provider's public address"
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an invalid address"
    # A password that contains / ? or # would be parsed as a host.
    if "@" in parts.path + parts.query + parts.fragment:
        return f"{parts.scheme}://…"
    host, path = parts.netloc.rpartition("@")[2], "/".join(map(_mask_segment, parts.path.split("/")))
    return parts._replace(netloc=host, path=path, query="", fragment="").geturl()


def _mask_segment(segment: str) -> str:
    segment = segment.partition(";")[0]
    return "…" if _TOKEN_PATTERN.fullmatch(segment) else segment
