"""Access: one decision, the same for listing and reading, and silent about what may not be known."""

from __future__ import annotations

from typing import TypedDict, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.access import (
    ADMIN_SCOPE,
    ALL_SCOPES,
    READ_SCOPE,
    WRITE_SCOPE,
    Action,
    Caller,
    Control,
    Grants,
    Reach,
    SessionToolsVisibility,
    TargetSession,
    Visibility,
    authorize,
    build_session_missing_error,
    compute_reach,
    require_scope,
    resolve_grants,
)
from antiphon.config import Config
from antiphon.engine.sessions.resolver import SessionResolver
from antiphon.errors import AntiphonError, Forbidden, NotFound

VISIBILITIES: tuple[Visibility, ...] = get_args(Visibility)
ACTIONS: tuple[Action, ...] = get_args(Action)
TOOLS_VISIBILITIES: tuple[SessionToolsVisibility, ...] = get_args(SessionToolsVisibility)
ON_TARGETS: tuple[Action, ...] = ("list", "read", "send", "control", "manage")

OWN = TargetSession("agent:a:main", "a")
CHILD = TargetSession("agent:a:subagent:1", "a", descendant=True)
FOREIGN_CHILD = TargetSession("agent:b:subagent:2", "b", descendant=True)
SIBLING = TargetSession("agent:a:irc:group:#x", "a")
STRANGER = TargetSession("agent:b:main", "b")
ANN = Caller.agent("a", OWN.key)

agent_ids = st.sampled_from(["a", "b", "ops-1", "ops-2"])
patterns = st.lists(st.sampled_from(["a", "B", "*", "ops-*", "*-2", "nobody", ""]), max_size=3).map(tuple)
visibilities = st.sampled_from(VISIBILITIES)
controls: st.SearchStrategy[Control] = st.sampled_from(("self", "tree"))
names = st.sampled_from(["main", "subagent:1", "irc:group:x"])
scopes = st.frozensets(st.sampled_from([READ_SCOPE, WRITE_SCOPE, ADMIN_SCOPE, "operator.approvals"]))
grants_of = st.builds(Grants, visibilities, visibilities, controls, st.booleans(), patterns, patterns)


class Settings(TypedDict):
    visibility: Visibility
    send_visibility: Visibility | None
    control: Control | None
    a2a_allow: tuple[str, ...]


settings_of = st.builds(
    Settings,
    visibility=visibilities,
    send_visibility=st.none() | visibilities,
    control=st.none() | controls,
    a2a_allow=patterns,
)


def target_of(agent: str, name: str, descendant: bool) -> TargetSession:
    return TargetSession(f"agent:{agent}:{name}", agent, descendant)


def agent_caller(agent: str, name: str) -> Caller:
    return Caller.agent(agent, f"agent:{agent}:{name}")


targets = st.builds(target_of, agent_ids, names, st.booleans())
callers = st.builds(Caller.operator, scopes) | st.builds(agent_caller, agent_ids, names)


def verdict(caller: Caller, action: Action, target: TargetSession, grants: Grants, **more: str) -> str:
    try:
        authorize(caller, action, target, grants, **more)
    except AntiphonError as error:
        return error.code
    return "ok"


def allowed(caller: Caller, action: Action, target: TargetSession, grants: Grants) -> bool:
    return verdict(caller, action, target, grants) == "ok"


@pytest.mark.requirement("V1")
@pytest.mark.parametrize(
    ("visibility", "seen"),
    [
        ("self", {OWN}),
        ("tree", {OWN, CHILD, FOREIGN_CHILD}),
        ("agent", {OWN, CHILD, FOREIGN_CHILD, SIBLING}),
        ("all", {OWN, CHILD, FOREIGN_CHILD, SIBLING, STRANGER}),
    ],
)
@pytest.mark.parametrize("action", ["list", "read", "send"])
def test_visibility(action: Action, visibility: Visibility, seen: set[TargetSession]) -> None:
    grants = resolve_grants(visibility=visibility, a2a_enabled=True)
    everyone = (OWN, CHILD, FOREIGN_CHILD, SIBLING, STRANGER)
    assert {target for target in everyone if allowed(ANN, action, target, grants)} == seen


@pytest.mark.requirement("V1")
def test_default_is_tree_without_agent_to_agent() -> None:
    assert resolve_grants() == Grants() == Grants("tree", "tree", "tree", False, (), ())


@pytest.mark.requirement("V1")
@pytest.mark.parametrize(
    ("enabled", "allow", "seen"),
    [
        (False, (), False),
        (False, ("*",), False),
        (True, (), True),
        (True, ("*",), True),
        (True, ("a", "b"), True),
        (True, ("A", "B"), True),
        (True, ("a",), False),
        (True, ("b",), False),
        (True, ("a", "c*"), False),
        (True, ("a", "*b"), True),
        (True, ("a", "."), False),
        (True, ("a", "[b]"), False),
        (True, ("a", "bb"), False),
    ],
)
def test_another_agent_needs_agent_to_agent_with_both_ids(
    enabled: bool, allow: tuple[str, ...], seen: bool
) -> None:
    grants = resolve_grants(visibility="all", a2a_enabled=enabled, a2a_allow=allow)
    assert allowed(ANN, "read", STRANGER, grants) is seen
    assert allowed(ANN, "send", STRANGER, grants) is seen
    assert allowed(ANN, "read", SIBLING, grants)
    assert allowed(ANN, "read", FOREIGN_CHILD, grants)


@pytest.mark.requirement("V1")
def test_patterns_match_whole_ids_without_regard_to_case() -> None:
    grants = resolve_grants(visibility="all", a2a_enabled=True, a2a_allow=("a", "OPS-*-eu"))
    assert allowed(ANN, "read", TargetSession("agent:ops-1-eu:main", "ops-1-eu"), grants)
    assert not allowed(ANN, "read", TargetSession("agent:ops-1-eu2:main", "ops-1-eu2"), grants)
    assert not allowed(ANN, "read", TargetSession("agent:xops-1-eu:main", "xops-1-eu"), grants)


@pytest.mark.requirement("V2")
@pytest.mark.parametrize(
    ("wanted", "clamped"), [("self", "self"), ("tree", "tree"), ("agent", "tree"), ("all", "tree")]
)
def test_sandbox_clamp(wanted: Visibility, clamped: Visibility) -> None:
    boxed = resolve_grants(visibility=wanted, sandboxed=True)
    assert (boxed.read, boxed.send) == (clamped, clamped)
    lifted = resolve_grants(visibility=wanted, sandboxed=True, session_tools_visibility="all")
    assert (lifted.read, lifted.send) == (wanted, wanted)
    sending = resolve_grants(visibility="self", send_visibility=wanted, sandboxed=True)
    assert (sending.read, sending.send) == ("self", clamped)


@pytest.mark.requirement("V2")
@settings(max_examples=200, deadline=None)
@given(settings_of, st.sampled_from(TOOLS_VISIBILITIES), targets)
def test_the_clamp_never_widens(
    given: Settings, tools: SessionToolsVisibility, target: TargetSession
) -> None:
    free = resolve_grants(**given, a2a_enabled=True)
    boxed = resolve_grants(**given, a2a_enabled=True, sandboxed=True, session_tools_visibility=tools)
    for action in ON_TARGETS:
        if allowed(ANN, action, target, boxed):
            assert allowed(ANN, action, target, free)
            assert tools == "all" or target.descendant or target.key == ANN.session_key


@pytest.mark.requirement("V3", "G30")
@settings(max_examples=300, deadline=None)
@given(callers, targets, grants_of)
def test_listed_if_and_only_if_readable(caller: Caller, target: TargetSession, grants: Grants) -> None:
    listed = allowed(caller, "list", target, grants)
    assert listed == allowed(caller, "read", target, grants) == compute_reach(caller, grants).covers(target)


@pytest.mark.requirement("V3", "G30")
@settings(max_examples=200, deadline=None)
@given(callers, targets, grants_of, st.sampled_from(ON_TARGETS))
def test_forbidden_only_where_the_caller_may_read(
    caller: Caller, target: TargetSession, grants: Grants, action: Action
) -> None:
    result = verdict(caller, action, target, grants)
    if result != "ok":
        readable = allowed(caller, "read", target, grants)
        assert result == ("forbidden" if readable else "not_found")


@pytest.mark.requirement("V3", "S5")
def test_hidden_looks_exactly_like_missing() -> None:
    with pytest.raises(NotFound) as caught:
        authorize(ANN, "read", STRANGER, Grants(), reference="0b1c")
    expected = build_session_missing_error("0b1c", ANN, Grants())
    assert (str(caught.value), caught.value.data) == (str(expected), expected.data)
    assert STRANGER.key not in str(caught.value)
    with pytest.raises(NotFound) as caught:
        authorize(ANN, "control", STRANGER, Grants())
    assert str(caught.value) == str(build_session_missing_error(STRANGER.key, ANN, Grants()))


@pytest.mark.requirement("V3", "G30")
def test_read_and_send_are_separate() -> None:
    reader = resolve_grants(visibility="agent", send_visibility="self")
    assert verdict(ANN, "read", SIBLING, reader) == "ok"
    assert verdict(ANN, "send", SIBLING, reader) == "forbidden"
    sender = resolve_grants(visibility="self", send_visibility="agent")
    assert verdict(ANN, "read", SIBLING, sender) == "not_found"
    assert verdict(ANN, "send", SIBLING, sender) == "ok"


@pytest.mark.requirement("V3", "S5")
@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_control_reaches_only_the_own_tree(visibility: Visibility) -> None:
    grants = resolve_grants(visibility=visibility, control="tree", a2a_enabled=True)
    assert allowed(ANN, "control", OWN, grants)
    assert allowed(ANN, "control", FOREIGN_CHILD, grants)
    assert not allowed(ANN, "control", SIBLING, grants)
    assert not allowed(ANN, "control", STRANGER, grants)
    assert not allowed(ANN, "control", CHILD, resolve_grants(visibility=visibility, control="self"))
    assert allowed(ANN, "control", CHILD, resolve_grants(visibility=visibility)) is (visibility != "self")
    for target in (OWN, CHILD, FOREIGN_CHILD, SIBLING, STRANGER):  # an agent has no scopes that could differ
        assert verdict(ANN, "manage", target, grants) == verdict(ANN, "control", target, grants)


@pytest.mark.requirement("V3", "G31")
@pytest.mark.parametrize(
    ("agent", "spawn_agents", "ok"),
    [
        ("a", (), True),
        ("b", (), False),
        ("b", ("b",), True),
        ("b", ("B",), True),
        ("b", ("c",), False),
        ("b", ("*",), True),
        ("ghost", ("*",), False),
        ("ghost", ("ghost",), False),
    ],
)
def test_spawn(agent: str, spawn_agents: tuple[str, ...], ok: bool) -> None:
    child = TargetSession(f"agent:{agent}:subagent:1", agent)
    grants = resolve_grants(visibility="all", a2a_enabled=True, spawn_agents=spawn_agents)
    if ok:
        authorize(ANN, "spawn", child, grants, configured=("a", "b", "c"))
    else:
        with pytest.raises(Forbidden, match=f"may not spawn agent '{agent}'.*agents_list"):
            authorize(ANN, "spawn", child, grants, configured=("a", "b", "c"))


@pytest.mark.requirement("V3", "S4")
@pytest.mark.parametrize(
    ("scopes", "may"),
    [
        ((), set[str]()),
        (("operator.approvals",), set[str]()),
        ((READ_SCOPE,), {"list", "read"}),
        ((WRITE_SCOPE,), set(ACTIONS) - {"manage"}),
        ((ADMIN_SCOPE,), set(ACTIONS)),
        (ALL_SCOPES, set(ACTIONS)),
    ],
)
def test_operator_scopes(scopes: tuple[str, ...], may: set[str]) -> None:
    operator = Caller.operator(scopes)
    for action in ACTIONS:
        assert allowed(operator, action, STRANGER, Grants("self", "self", "self")) is (action in may)
        if action in may:
            require_scope(operator, action)
        else:
            with pytest.raises(Forbidden, match=r"lacks 'operator\."):
                require_scope(operator, action)


@pytest.mark.requirement("V3", "S3")
def test_identity_is_explicit() -> None:
    assert Caller.operator().is_operator
    assert Caller.operator([ADMIN_SCOPE]).scopes == ALL_SCOPES
    assert Caller.operator([WRITE_SCOPE]).scopes == {READ_SCOPE, WRITE_SCOPE}
    assert not ANN.is_operator
    assert not ANN.scopes
    nobody = Caller()
    assert not any(allowed(nobody, action, OWN, Grants("all", "all")) for action in ACTIONS)


@pytest.mark.requirement("V3")
def test_agents_have_no_operator_scopes_to_lack() -> None:
    for action in ACTIONS:
        require_scope(ANN, action)


@pytest.mark.requirement("V3")
def test_reach_is_data_for_a_query() -> None:
    assert compute_reach(Caller.operator([READ_SCOPE]), Grants()) == Reach(everything=True)
    assert compute_reach(Caller.operator([]), Grants()) == Reach()
    assert compute_reach(ANN, Grants("self")) == Reach(own_key=OWN.key)
    assert compute_reach(ANN, Grants("tree")) == Reach(own_key=OWN.key, descendants=True)
    assert compute_reach(ANN, Grants("agent")) == Reach(own_key=OWN.key, descendants=True, own_agent="a")
    wide = Grants("all", a2a_enabled=True, a2a_allow=("a", "b*"))
    everyone = Reach(own_key=OWN.key, descendants=True, own_agent="a", other_agents=("a", "b*"))
    assert compute_reach(ANN, wide) == everyone
    assert [agent for agent in ("a", "b2", "c") if everyone.admits_agent(agent)] == ["a", "b2"]
    assert compute_reach(ANN, Grants("all", a2a_enabled=True)).other_agents == ("*",)
    assert compute_reach(ANN, Grants("all", a2a_enabled=True, a2a_allow=("b",))).other_agents == ()


@pytest.mark.requirement("V2")
@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ({}, ("all", "all")),
        ({"sessions": {"visibility": "agent"}}, ("agent", "agent")),
        ({"sessions": {"visibility": "tree"}}, ("tree", "tree")),
        ({"sessions": {"send": "self"}}, ("all", "self")),
    ],
)
def test_a_lifted_clamp_stands_for_all_unless_visibility_is_stated(
    tools: dict[str, object], expected: tuple[Visibility, Visibility]
) -> None:
    sandbox = {"mode": "all", "sessionToolsVisibility": "all"}
    config = Config.model_validate({"agents": {"defaults": {"sandbox": sandbox}}, "tools": tools})
    grants = SessionResolver(config).get_grants(Caller.agent("main", "agent:main:main", sandboxed=True))
    assert (grants.read, grants.send) == expected
    free = SessionResolver(config).get_grants(Caller.agent("main", "agent:main:main"))
    assert free.read == config.tools.sessions.visibility
