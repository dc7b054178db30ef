"""Permissions that an ACP program asks for: which it is given unasked, and what people are asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import pytest

from antiphon.config.acp import ToolKind
from antiphon.config.agents import ExecSettings, merge_exec_settings
from antiphon.config.tools import ExecConfig
from antiphon.operations.types import ApprovalView
from antiphon.runtimes.acp.permissions import PermissionRules, build_question, choose_option, decide
from antiphon.runtimes.acp.turn_recorder import RecordedCall
from support.acp_agents import BOUND, CODER, OPERATOR, AcpFixture, describe_agents, open_acp_app

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only]

KINDS: tuple[ToolKind, ...] = get_args(ToolKind)


def build_settings(**given: Any) -> ExecSettings:
    return merge_exec_settings(ExecConfig(**given), ExecConfig())


@pytest.mark.requirement("M3")
@pytest.mark.parametrize(
    ("given", "sandboxed", "expected"),
    [
        ({}, True, "allow"),  # as commands in the sandbox, which run unasked
        ({}, False, "ask"),  # that policy was not made for this machine
        ({"host": "gateway", "security": "full"}, False, "ask"),
        ({"host": "gateway", "security": "full", "ask": "off"}, False, "allow"),
        ({"host": "gateway", "security": "full", "ask": "off"}, True, "ask"),
        ({"host": "gateway", "security": "allowlist", "ask": "off"}, False, "refuse"),
        ({"host": "gateway", "security": "allowlist"}, False, "ask"),
        ({"host": "gateway"}, False, "refuse"),
        ({"security": "deny"}, True, "refuse"),
        ({"ask": "always"}, True, "ask"),
        ({"ask": "on-miss"}, True, "ask"),
    ],
)
def test_the_policy_for_commands_decides(given: dict[str, Any], sandboxed: bool, expected: str) -> None:
    rules = PermissionRules(settings=build_settings(**given), allowed_kinds=("read",), is_sandboxed=sandboxed)
    for kind in KINDS:
        if kind != "read":
            assert decide(kind, rules) == expected
    assert decide("read", rules) == ("ask" if given.get("ask") == "always" else "allow")


@pytest.mark.requirement("M3")
def test_options_are_chosen_by_their_kind() -> None:
    options = [
        {"optionId": "a", "kind": "allow_always"},
        {"optionId": "b", "kind": "reject_always"},
        {"optionId": "c", "kind": "allow_once"},
        {"optionId": "d", "kind": "reject_once"},
    ]
    assert choose_option(options, is_allowed=True)["outcome"]["optionId"] == "c"
    assert choose_option(options, is_allowed=False)["outcome"]["optionId"] == "d"
    assert choose_option(options[:2], is_allowed=True)["outcome"]["optionId"] == "a"
    assert choose_option(options[:1], is_allowed=False) == {"outcome": {"outcome": "cancelled"}}
    for broken in (None, [], [5], [{"kind": "allow_once"}], {"kind": "allow_once"}):
        assert choose_option(broken, is_allowed=True) == {"outcome": {"outcome": "cancelled"}}


@pytest.mark.requirement("M3", "AT14")
def test_a_question_shows_the_call_and_a_grant_covers_all_of_it() -> None:
    call = RecordedCall("x", "x")
    call.update({"title": "list files", "kind": "execute", "rawInput": {"command": "ls -l"}})
    asked = build_question(call, "codex", "/work", is_sandboxed=False)
    assert asked.text == "On this machine, in '/work', codex wants to run a command:\nlist files\nls -l"
    assert asked.grant == '["execute",{"command":"ls -l"}]'
    call.update(
        {"content": [{"type": "diff", "path": "a.txt", "oldText": "1\n2\n3\n", "newText": "1\n2\n4\n"}]}
    )
    assert "-3\n+4" in build_question(call, "codex", "/work", is_sandboxed=True).text
    bare = RecordedCall("y", "y")
    assert build_question(bare, "codex", "/work", is_sandboxed=True).grant is None


async def wait_for_question(app: AcpFixture) -> ApprovalView:
    async with asyncio.timeout(BOUND):
        while not (waiting := await app.app.operations.approvals.list(OPERATOR)):  # noqa: ASYNC110 - polled as a person does
            await asyncio.sleep(0.02)
    return waiting[0]


@pytest.mark.requirement("M3", "T7")
async def test_a_person_decides_and_always_is_remembered_here(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path) as app:
        resolve = app.app.operations.approvals.resolve
        run = await app.say("ask:execute say:done")
        asked = await wait_for_question(app)
        assert asked.tool.endswith(":execute") and "run-execute" in asked.text
        await resolve(OPERATOR, asked.id, "allow-always")
        assert (await app.wait_for_end(run)).reply == "done "
        # The program was told `once`, so that it asks again; the grant answers.
        results = [entry for entry in await app.transcript() if entry["role"] == "toolResult"]
        assert results[0]["content"] == [{"type": "text", "text": "once"}]
        assert await app.reply("ask:execute say:unasked") == "unasked"
        run = await app.say("ask:delete say:done")
        await resolve(OPERATOR, (await wait_for_question(app)).id, "deny")
        assert (await app.wait_for_end(run)).state == "ok"
        denied = [entry for entry in await app.transcript() if entry["role"] == "toolResult"][-1]
        assert denied["isError"] and denied["content"][0]["text"] == "no"


@pytest.mark.requirement("M3", "T7")
async def test_kinds_that_are_allowed_are_not_asked_about(tmp_path: Path) -> None:
    config = describe_agents({"allowKinds": ["fetch"]}, acp={"allowKinds": ["read", "execute"]})
    async with open_acp_app(tmp_path, config) as app:
        assert await app.reply("ask:fetch say:done") == "done"
        run = await app.say("ask:execute say:done")
        await app.app.operations.approvals.resolve(OPERATOR, (await wait_for_question(app)).id, "allow-once")
        assert (await app.wait_for_end(run)).reply == "done "


@pytest.mark.requirement("M3", "AT13")
async def test_a_stopped_turn_takes_its_question_back(tmp_path: Path) -> None:
    async with open_acp_app(tmp_path) as app:
        run = await app.say("ask:execute say:done")
        asked = await wait_for_question(app)
        await app.app.operations.runs.stop(OPERATOR, CODER, run)
        assert (await app.wait_for_end(run)).state == "cancelled"
        assert (await app.app.operations.approvals.get(OPERATOR, asked.id)).state == "expired"
        assert await app.reply("say:again") == "again"
