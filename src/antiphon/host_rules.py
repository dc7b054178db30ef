"""Decides which hosts may be reached: patterns that an operator lists, and addresses of the public internet.

Imports nothing but the standard library, since the keeper uses it too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

DEFAULT_PORTS = (80, 443)
MAX_HOST_CHARACTERS = 253

_NAT64_NETWORK = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST_NETWORK = ipaddress.ip_network("2000::/3")
_REFUSED_NETWORKS = (
    ipaddress.ip_network("168.63.129.16/32"),  # the metadata service of Azure
    ipaddress.ip_network("192.88.99.0/24"),  # relays into other networks
    ipaddress.ip_network("3fff::/20"),  # documentation
)
_LABEL_PATTERN = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME_PATTERN = re.compile(rf"({_LABEL_PATTERN}\.)*{_LABEL_PATTERN}")
_PORT_PATTERN = re.compile(r"[0-9]{1,5}")
_LOCAL_NAME = "localhost"

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class HostRule(NamedTuple):
    """Hosts that may be reached: one name, one address, or all names below a domain (`*.example.org`)."""

    host: str
    ports: tuple[int, ...]


class HostRules:
    """The hosts that an operator lists.

    A name is reached at its public addresses only. Another address must be listed itself, and `localhost` stands for
    the addresses of the loopback: the owner of a listed name may point it anywhere.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._rules = [parse_host_rule(pattern) for pattern in patterns]

    def permits_host(self, host: str, port: int) -> bool:
        return any(port in rule.ports and _matches(rule.host, host) for rule in self._rules)

    def permits_address(self, host: str, address: str, port: int) -> bool:
        """Whether a permitted host may be reached at this address, to which its name was resolved."""
        address = address.split("%", 1)[0]
        if is_public_address(address):
            return True
        if host == _LOCAL_NAME and ipaddress.ip_address(address).is_loopback:
            return True
        return any(port in rule.ports and rule.host == normalize_host(address) for rule in self._rules)

    def names(self, host: str) -> bool:
        """Whether the host is listed itself, with any port."""
        return any(rule.host == host for rule in self._rules)


def _matches(pattern: str, host: str) -> bool:
    return host == pattern or (pattern.startswith("*.") and host.endswith(pattern[1:]))


def parse_host_rule(pattern: str) -> HostRule:
    """Return a rule: a host or `*.` and a domain, with a port or for the ports 80 and 443.

    Raises:
        ValueError: it is neither.
    """
    wildcard = "*." if pattern.startswith("*.") else ""
    host, port = split_authority(pattern.removeprefix(wildcard))
    if wildcard and ("." not in host or _is_address(host)):
        raise ValueError("a wildcard needs a domain of at least two parts")
    return HostRule(wildcard + host, DEFAULT_PORTS if port is None else (port,))


def split_authority(text: str) -> tuple[str, int | None]:
    """Return the host, in the form that rules have, and the port of `host`, `host:port` or `[address]:port`.

    Raises:
        ValueError: it is none of them.
    """
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        if not closing or not _is_address(host) or (rest and not rest.startswith(":")):
            raise ValueError("the address is not valid")
        port = rest[1:] if rest else None
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, None
    if port is not None and not (_PORT_PATTERN.fullmatch(port) and 0 < int(port) < 65536):
        raise ValueError("the port is not a number from 1 to 65535")
    return normalize_host(host), None if port is None else int(port)


def normalize_host(host: str) -> str:
    """Return a name in lower case and ASCII, or an address in its usual form.

    Raises:
        ValueError: it is neither.
    """
    if _is_address(host):
        return str(ipaddress.ip_address(host))
    name = host.removesuffix(".").lower()
    if not name.isascii():
        name = name.encode("idna").decode("ascii")
    # A last part of digits is another way to write an address.
    if (
        len(name) > MAX_HOST_CHARACTERS
        or not _NAME_PATTERN.fullmatch(name)
        or name.rpartition(".")[2].isdigit()
    ):
        raise ValueError("the host is neither a name nor an address")
    return name


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


def is_public_address(address: str) -> bool:
    """Whether an address belongs to the public internet, even if it is embedded in another one."""
    ip: IpAddress = ipaddress.ip_address(address.split("%", 1)[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64_NETWORK:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            ip = inner
        elif ip not in _GLOBAL_UNICAST_NETWORK:  # such as ways to write an IPv4 address
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _REFUSED_NETWORKS)
