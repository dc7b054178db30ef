"""Which tools an agent has: profile, lists and groups, for all agents and for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config import parse
from antiphon.engine.toolbox import Toolbox, ToolOutput, ToolRequest
from support.app_fixture import make_tool

pytestmark = pytest.mark.requirement("T2")

FILES = {"read", "write", "edit", "apply_patch"}
RUNTIME = {"exec", "process"}
SESSIONS = {
    "sessions_list", "sessions_history", "sessions_search", "session_status",
    "sessions_send", "sessions_spawn", "sessions_yield", "subagents",
}  # fmt: skip
BUILT_IN = FILES | RUNTIME | {"web_fetch"} | SESSIONS | {"agents_list"}
ADDED = {"own", "Weather"}
EVERY = BUILT_IN | ADDED


async def refuse(call: ToolRequest) -> ToolOutput:
    raise AssertionError


TOOLBOX = Toolbox()
for tool_name in sorted(EVERY):
    TOOLBOX.add(make_tool(tool_name, refuse))


def select(general: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> set[str]:
    config, _ = parse(
        {"tools": dict(general), "agents": {"list": [{"id": "main", "tools": dict(own or {})}]}}
    )
    rules = config.get_agent("main").tools
    return set(TOOLBOX.select_allowed(rules.allow, rules.deny))


@pytest.mark.parametrize(
    ("general", "own", "selected"),
    [
        ({}, {}, EVERY),
        ({"profile": "full"}, {}, EVERY),
        ({"profile": "coding"}, {}, EVERY),
        ({"profile": "minimal"}, {}, {"session_status"} | ADDED),
        (
            {"profile": "messaging"},
            {},
            {"sessions_list", "sessions_history", "sessions_send", "session_status"} | ADDED,
        ),
        ({"profile": "minimal"}, {"profile": "full"}, EVERY),
        ({"profile": "minimal", "alsoAllow": ["group:fs"]}, {}, {"session_status"} | FILES | ADDED),
        ({"profile": "minimal"}, {"alsoAllow": ["web_*"]}, {"session_status", "web_fetch"} | ADDED),
        ({"profile": "minimal", "alsoAllow": ["read"], "deny": ["read"]}, {}, {"session_status"} | ADDED),
        ({"profile": "minimal", "allow": ["read", "session_status"]}, {}, {"session_status"}),
        ({"allow": ["read"], "alsoAllow": ["write"]}, {}, {"read", "write"}),
        ({"allow": ["read"]}, {"alsoAllow": ["write"]}, {"read"}),
        ({"allow": ["group:fs", "group:web"]}, {"deny": ["group:web"]}, FILES),
        ({"allow": ["group:openclaw"]}, {}, SESSIONS | {"agents_list", "web_fetch"}),
        ({"deny": ["group:runtime"]}, {}, EVERY - RUNTIME),
        ({"deny": ["bash"]}, {}, EVERY - {"exec"}),
        ({"allow": ["BASH", " Group:Agents "]}, {}, {"exec", "agents_list"}),
        ({"allow": ["READ", "Apply-Patch", "weather"]}, {}, {"read", "apply_patch", "Weather"}),
        ({"deny": ["W*"]}, {}, EVERY - {"write", "web_fetch", "Weather"}),
        ({"allow": ["browser", "group:nodes"]}, {}, set[str]()),
        ({"allow": []}, {}, set[str]()),
        ({"allow": ["read"]}, {"allow": ["write"]}, set[str]()),
    ],
)
def test_tools_are_selected_by_profile_and_lists(
    general: dict[str, Any], own: dict[str, Any], selected: set[str]
) -> None:
    assert select(general, own) == selected


NAMES = st.lists(
    st.sampled_from([*sorted(EVERY), "*", "sessions_*", "group:fs", "group:sessions", "nothing", "BASH"]),
    max_size=4,
)
LEVELS = st.fixed_dictionaries(
    {},
    optional={
        "profile": st.sampled_from(["minimal", "coding", "messaging", "full"]),
        "allow": NAMES,
        "alsoAllow": NAMES,
        "deny": NAMES,
    },
)


@given(LEVELS, LEVELS)
def test_a_further_restriction_never_adds_a_tool(general: dict[str, Any], own: dict[str, Any]) -> None:
    selected = select(general, own)
    assert select({**general, "deny": [*general.get("deny", ()), "read"]}, own) == selected - {"read"}
    assert select(general, {**own, "deny": ["*"]}) == set()
    narrowed = {name: value for name, value in own.items() if name not in ("profile", "alsoAllow")}
    if "profile" not in own and "alsoAllow" not in own:
        assert select(general, narrowed) <= select(general)
    if "allow" in general and "alsoAllow" not in general:
        assert selected <= select({"allow": general["allow"]})


def test_python_tools_are_offered_unless_a_list_excludes_them() -> None:
    for profile in ("minimal", "messaging", "coding", "full"):
        assert select({"profile": profile}) >= ADDED
    assert not select({"allow": ["group:fs"]}) & ADDED
