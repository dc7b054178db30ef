"""Which hosts rules permit: by name and port, and by the address that a name is found to have."""

from __future__ import annotations

import pytest

from antiphon.host_rules import HostRules, parse_host_rule


@pytest.mark.parametrize(
    ("pattern", "host", "port", "is_permitted"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "example.org", 80, True),
        ("example.org", "example.org", 22, False),
        ("Example.ORG.", "example.org", 443, True),
        ("example.org:8443", "example.org", 8443, True),
        ("example.org:8443", "example.org", 443, False),
        ("example.org", "www.example.org", 443, False),
        ("*.example.org", "www.example.org", 443, True),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "badexample.org", 443, False),
        ("*.example.org:22", "www.example.org", 22, True),
        ("münchen.example", "xn--mnchen-3ya.example", 443, True),
        ("10.0.0.5:8080", "10.0.0.5", 8080, True),
        ("[fd00::5]:8080", "fd00::5", 8080, True),
        ("fd00:0::5", "fd00::5", 443, True),
    ],
)
def test_a_rule_permits_its_hosts_at_its_ports(
    pattern: str, host: str, port: int, is_permitted: bool
) -> None:
    assert HostRules([pattern]).permits_host(host, port) is is_permitted


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "*", "*.org", "*.", "a*.example.org", "https://example.org", "example.org/x", "example.org:"),
        *(
            "example.org:0",
            "example.org:65536",
            "example.org:x",
            "user@example.org",
            "*.10.0.0.5",
            "10.0.0.0/8",
        ),
        *("127.1", "0x7f.1", "[example.org]:80", "[::1", "fe80::1%eth0", "-a.example", f"{'a' * 64}.example"),
    ],
)
def test_a_bad_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_host_rule(pattern)


@pytest.mark.parametrize(
    ("patterns", "host", "address", "is_permitted"),
    [
        (["example.org"], "example.org", "93.184.216.34", True),
        (["example.org"], "example.org", "127.0.0.1", False),
        (["example.org"], "example.org", "169.254.169.254", False),
        (["example.org"], "example.org", "::ffff:10.0.0.5", False),
        (["git.corp.example", "10.0.0.5"], "git.corp.example", "10.0.0.5", True),
        (["git.corp.example", "10.0.0.5:22"], "git.corp.example", "10.0.0.5", False),
        (["10.0.0.5"], "10.0.0.5", "10.0.0.5", True),
        (["localhost"], "localhost", "127.0.0.1", True),
        (["localhost"], "localhost", "::1", True),
        (["localhost"], "localhost", "10.0.0.5", False),
        (["sub.localhost"], "sub.localhost", "127.0.0.1", False),
    ],
)
def test_an_address_that_is_not_public_must_be_listed_itself(
    patterns: list[str], host: str, address: str, is_permitted: bool
) -> None:
    assert HostRules(patterns).permits_address(host, address, 443) is is_permitted
