"""Which tools an agent has: profile, lists and groups, for all agents and for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config import parse
from antiphon.config.tool_lists import find_lists_without_tools
from antiphon.tool_selection import ToolAudience, ToolDecision, ToolFacts, decide_tool

pytestmark = pytest.mark.requirement("T2")

FILES = {"read", "write", "edit", "apply_patch"}
RUNTIME = {"exec", "process"}
SESSIONS = {
    "sessions_list", "sessions_history", "sessions_search", "session_status",
    "sessions_send", "sessions_spawn", "sessions_yield", "subagents",
}  # fmt: skip
MEMORY = {"memory_search", "memory_get"}
WEB = {"web_fetch", "web_search"}
CODING = FILES | RUNTIME | WEB | MEMORY | {"image", "cron"} | SESSIONS | {"agents_list"}
BUILT_IN = CODING | {"message"}
ADDED = {"own", "Weather"}
EVERY = BUILT_IN | ADDED
REACHING = SESSIONS | {"agents_list", "cron", "message"}


NOBODY = ToolAudience()


def decide(
    general: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    audience: ToolAudience = NOBODY,
) -> dict[str, ToolDecision]:
    config, _ = parse(
        {"tools": dict(general), "agents": {"list": [{"id": "main", "tools": dict(own or {})}]}}
    )
    selection = config.get_agent("main").tools.selection
    return {
        name: decide_tool(
            ToolFacts(name, reaches_sessions=name in REACHING, runs_in_gateway=name in ADDED),
            selection,
            audience,
        )
        for name in EVERY
    }


def select(
    general: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    audience: ToolAudience = NOBODY,
) -> set[str]:
    return {name for name, decided in decide(general, own, audience).items() if decided.is_offered}


@pytest.mark.parametrize(
    ("general", "own", "selected"),
    [
        ({}, {}, CODING | ADDED),
        ({"profile": "full"}, {}, EVERY),
        ({"profile": "coding"}, {}, CODING | ADDED),
        ({"profile": "minimal"}, {}, {"session_status"} | ADDED),
        (
            {"profile": "messaging"},
            {},
            {"sessions_list", "sessions_history", "sessions_send", "session_status", "message"} | ADDED,
        ),
        ({"profile": "minimal"}, {"profile": "full"}, EVERY),
        ({"profile": "minimal", "alsoAllow": ["group:fs"]}, {}, {"session_status"} | FILES | ADDED),
        ({"profile": "minimal"}, {"alsoAllow": ["web_*"]}, {"session_status"} | WEB | ADDED),
        ({"profile": "minimal", "alsoAllow": ["read"], "deny": ["read"]}, {}, {"session_status"} | ADDED),
        ({"profile": "minimal", "allow": ["read", "session_status"]}, {}, {"session_status"}),
        ({"allow": ["read"], "alsoAllow": ["write"]}, {}, {"read", "write"}),
        ({"allow": ["read"]}, {"alsoAllow": ["write"]}, {"read"}),
        ({"allow": ["group:fs", "group:web"]}, {"deny": ["group:web"]}, FILES),
        ({"allow": ["group:openclaw"]}, {}, CODING - FILES - RUNTIME),
        ({"profile": "full", "allow": ["group:openclaw"]}, {}, BUILT_IN - FILES - RUNTIME),
        ({"allow": ["group:memory", "group:automation", "group:media"]}, {}, MEMORY | {"cron", "image"}),
        ({"profile": "full", "deny": ["group:runtime"]}, {}, EVERY - RUNTIME),
        ({"profile": "full", "deny": ["bash", "group:messaging"]}, {}, EVERY - {"exec", "message"}),
        ({"allow": ["BASH", " Group:Agents "]}, {}, {"exec", "agents_list"}),
        ({"allow": ["READ", "Apply-Patch", "weather"]}, {}, {"read", "apply_patch", "Weather"}),
        ({"profile": "full", "deny": ["W*"]}, {}, EVERY - {"write", "Weather"} - WEB),
        ({"allow": ["group:ui", "group:nodes"]}, {}, set[str]()),
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
        assert selected <= select({"profile": "full", "allow": general["allow"]})


def test_python_tools_are_offered_unless_a_list_excludes_them() -> None:
    for profile in ("minimal", "messaging", "coding", "full"):
        assert select({"profile": profile}) >= ADDED
    assert not select({"allow": ["group:fs"]}) & ADDED


# --- models, sandboxes and sub-agents ---

ON_P = ToolAudience(model="p/m")


@pytest.mark.parametrize(
    ("general", "own", "selected"),
    [
        ({"byProvider": {"p": {"profile": "minimal"}}}, {}, {"session_status"} | ADDED),
        ({"byProvider": {" P/M ": {"profile": "minimal"}}}, {}, {"session_status"} | ADDED),
        ({"byProvider": {"q": {"profile": "minimal"}, "p/n": {"allow": []}}}, {}, CODING | ADDED),
        (
            {"byProvider": {"p": {"profile": "minimal", "alsoAllow": ["group:fs"]}}},
            {},
            {"session_status"} | FILES | ADDED,
        ),
        ({"profile": "minimal", "byProvider": {"p": {"profile": "full"}}}, {}, {"session_status"} | ADDED),
        ({"byProvider": {"p": {"allow": ["read", "write"]}}}, {}, {"read", "write"}),
        ({"byProvider": {"p": {"allow": ["read"]}, "p/m": {"allow": ["write"]}}}, {}, {"write"}),
        ({"byProvider": {"p": {"deny": ["read"]}, "p/m": {"allow": ["group:fs"]}}}, {}, FILES - {"read"}),
        ({"byProvider": {"p": {"allow": ["read"], "alsoAllow": ["write"]}}}, {}, {"read", "write"}),
        ({"byProvider": {"p": {"allow": ["group:fs"]}}}, {"allow": ["read", "cron"]}, {"read"}),
        ({}, {"byProvider": {"p": {"profile": "minimal"}}}, {"session_status"} | ADDED),
        (
            {"byProvider": {"p": {"profile": "minimal"}}},
            {"byProvider": {"p": {"profile": "coding"}}},
            CODING | ADDED,
        ),
        ({"byProvider": {"p": {"allow": ["no-such-tool"]}}}, {}, set[str]()),
    ],
)
def test_tools_are_selected_by_the_provider_of_the_model(
    general: dict[str, Any], own: dict[str, Any], selected: set[str]
) -> None:
    assert select(general, own, ON_P) == selected
    lists = {name: value for name, value in general.items() if name != "byProvider"}
    plain = {name: value for name, value in own.items() if name != "byProvider"}
    assert select(general, own, ToolAudience(model="other/m")) == select(lists, plain)


IN_SANDBOX = ToolAudience(is_sandboxed=True)
SANDBOX = FILES | RUNTIME | {"image", "agents_list"} | SESSIONS


@pytest.mark.parametrize(
    ("general", "own", "selected"),
    [
        ({}, {}, SANDBOX),
        ({"alsoAllow": ["own"]}, {}, SANDBOX),
        ({"sandbox": {"tools": {"alsoAllow": ["web_fetch"]}}}, {}, SANDBOX | {"web_fetch"}),
        ({"sandbox": {"tools": {"allow": ["read", "own"]}}}, {}, {"read", "own"}),
        ({"sandbox": {"tools": {"allow": ["*"]}}}, {}, CODING),
        ({"sandbox": {"tools": {"alsoAllow": ["ow*"]}}}, {}, SANDBOX),
        ({"sandbox": {"tools": {"deny": ["group:runtime"]}}}, {}, SANDBOX - RUNTIME),
        (
            {"sandbox": {"tools": {"allow": ["read"]}}},
            {"sandbox": {"tools": {"allow": ["write"]}}},
            {"write"},
        ),
        (
            {"sandbox": {"tools": {"deny": ["write"]}}},
            {"sandbox": {"tools": {"allow": ["read", "write"]}}},
            {"read"},
        ),
        ({"deny": ["read"], "sandbox": {"tools": {"allow": ["read", "write"]}}}, {}, {"write"}),
        ({"sandbox": {"tools": {"allow": ["no-such-tool"]}}}, {}, set[str]()),
        ({"sandbox": {"tools": {"allow": []}}}, {}, set[str]()),
    ],
)
def test_a_sandboxed_session_has_what_works_inside(
    general: dict[str, Any], own: dict[str, Any], selected: set[str]
) -> None:
    assert select(general, own, IN_SANDBOX) == selected


LEAF = ToolAudience(subagent_depth=0)
WORK = CODING - REACHING | ADDED


@pytest.mark.parametrize(
    ("lists", "audience", "selected"),
    [
        ({}, LEAF, WORK),
        (
            {},
            ToolAudience(subagent_depth=1),
            WORK | SESSIONS - {"sessions_search", "session_status", "sessions_send"} | {"agents_list"},
        ),
        ({"alsoAllow": ["cron", "sessions_spawn"]}, LEAF, WORK | {"cron"}),
        ({"allow": ["read", "cron"]}, LEAF, {"read", "cron"}),
        ({"allow": ["no-such-tool"]}, LEAF, set[str]()),
        ({"deny": ["group:fs"]}, LEAF, WORK - FILES),
        ({"deny": ["own"]}, ToolAudience(subagent_depth=0, is_sandboxed=True), WORK & SANDBOX),
    ],
)
def test_a_sub_agent_has_what_its_agent_has_without_session_tools(
    lists: dict[str, Any], audience: ToolAudience, selected: set[str]
) -> None:
    assert select({"subagents": {"tools": lists}}, {}, audience) == selected


@pytest.mark.parametrize(
    ("general", "own", "audience", "tool", "decision"),
    [
        ({}, {}, NOBODY, "read", (True, "tools.profile", "The profile 'coding' includes it.")),
        ({}, {}, NOBODY, "message", (False, "tools.profile", "The profile 'coding' does not include it.")),
        (
            {},
            {"profile": "full"},
            NOBODY,
            "message",
            (True, "agents.list[0].tools.profile", "The profile 'full' includes it."),
        ),
        ({"alsoAllow": ["message"]}, {}, NOBODY, "message", (True, "tools.alsoAllow", "The list names it.")),
        (
            {},
            {},
            NOBODY,
            "own",
            (True, "tools.profile", "The profile 'coding' includes every tool that is added."),
        ),
        ({"allow": ["re*"]}, {}, NOBODY, "read", (True, "tools.allow", "The list names it as 're*'.")),
        ({"allow": ["re*"]}, {}, NOBODY, "cron", (False, "tools.allow", "The list does not name it.")),
        (
            {},
            {"deny": ["group:fs"]},
            NOBODY,
            "edit",
            (False, "agents.list[0].tools.deny", "The list names it."),
        ),
        (
            {"byProvider": {"P": {"deny": ["cron"]}}},
            {},
            ON_P,
            "cron",
            (False, 'tools.byProvider["p"].deny', "The list names it."),
        ),
        (
            {},
            {},
            IN_SANDBOX,
            "cron",
            (False, "tools.sandbox.tools.allow", "It is not in the default list for sandboxed sessions."),
        ),
        (
            {"sandbox": {"tools": {"allow": ["*"]}}},
            {},
            IN_SANDBOX,
            "own",
            (
                False,
                "tools.sandbox.tools.allow",
                "It runs in the gateway's process, outside any sandbox, so its full name must be in the list.",
            ),
        ),
        (
            {},
            {},
            LEAF,
            "cron",
            (False, "tools.subagents.tools.allow", "Sub-agents do not have it by default."),
        ),
        (
            {"subagents": {"tools": {"alsoAllow": ["*"]}}},
            {},
            LEAF,
            "sessions_spawn",
            (False, "agents.defaults.subagents.maxSpawnDepth", "It may not spawn any further."),
        ),
    ],
)
def test_every_decision_names_the_key_that_made_it(
    general: dict[str, Any],
    own: dict[str, Any],
    audience: ToolAudience,
    tool: str,
    decision: tuple[bool, str, str],
) -> None:
    found = decide(general, own, audience)[tool]
    assert (found.is_offered, found.path, found.reason) == decision


AUDIENCES = st.builds(
    ToolAudience,
    model=st.sampled_from([None, "p/m", "q/m"]),
    is_sandboxed=st.booleans(),
    subagent_depth=st.sampled_from([None, 0, 1]),
)


@given(LEVELS, LEVELS, LEVELS, NAMES, AUDIENCES)
def test_a_list_for_a_provider_or_a_sandbox_never_adds_a_tool(
    general: dict[str, Any],
    own: dict[str, Any],
    more: dict[str, Any],
    denied: list[str],
    audience: ToolAudience,
) -> None:
    selected = select(general, own, audience)
    assert select({**general, "byProvider": {"p": more}}, own, audience) <= selected
    assert select(general, {**own, "byProvider": {"p/m": more}}, audience) <= selected
    assert select({**general, "sandbox": {"tools": {"deny": denied}}}, own, audience) <= selected
    assert selected <= select(general, own)
    for narrowed in ({**general, "deny": ["*"]}, {**general, "allow": ["no-such-tool"]}):
        if "alsoAllow" not in general:
            assert select(narrowed, own, audience) == set()


@pytest.mark.parametrize(
    ("tools", "warning"),
    [
        ({"byProvider": {"nobody": {"deny": ["cron"]}}}, 'tools.byProvider["nobody"]\' never applies'),
        (
            {"sandbox": {"tools": {"allow": ["brouser"]}}},
            "tools.sandbox.tools.allow' matches no existing tool",
        ),
        ({"byProvider": {"openai": {"allow": ["brouser"]}}}, ".allow' matches no existing tool"),
        (
            {"subagents": {"tools": {"allow": ["brouser"]}}},
            "tools.subagents.tools.allow' matches no existing",
        ),
        ({"deny": ["memory_serch"]}, "Did you mean 'memory_search'?"),
    ],
)
def test_a_list_without_effect_is_a_warning(tools: dict[str, Any], warning: str) -> None:
    [found] = parse({"tools": tools})[1]
    assert warning in found


def test_a_list_may_name_tools_that_a_program_adds() -> None:
    config, warnings = parse({"tools": {"allow": ["weather"], "python": ["tools:all"]}})
    assert warnings == ()
    assert list(find_lists_without_tools(config, ["read", "weather"])) == []
    [warning] = find_lists_without_tools(config, ["read"])
    assert "'tools.allow' matches no existing tool ('weather')" in warning
