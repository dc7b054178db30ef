"""Small things of the command line: sub-agents as a person sees them, announcing jobs, what is shown of a delivery."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import pytest

from cli.gateways import up
from cli.terminal import BOUND, Program, Result

pytestmark = pytest.mark.requirement("R")

MAIN = "agent:main:main"
CONFIG: dict[str, Any] = {"agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]}}


@pytest.fixture(params=["beside a gateway", "alone"])
def program_with_helper(request: pytest.FixtureRequest, program: Program) -> Generator[Program]:
    program.configure(CONFIG)
    with up(program) if request.param == "beside a gateway" else nullcontext():
        yield program


def states(program: Program) -> dict[str, tuple[str, str | None, str | None]]:
    found = program.run("subagents", "--json").json["subagents"]
    return {task["label"]: (task["phase"], task.get("status"), task.get("result")) for task in found}


def spawn(program: Program, label: str, *more: str) -> Result:
    """One that stays at work by itself; asked for again, it is the same one."""
    return program.run("spawn", "slow 600 a b c", "--label", label, "--key", label, *more)


def delivered(program: Program) -> dict[str, Any]:
    """The one delivery, when it is there."""
    until = time.monotonic() + BOUND
    while not (found := program.run("deliveries", "--state", "delivered", "--json").json["deliveries"]):
        assert time.monotonic() < until
    [delivery] = found
    return delivery


# --- sub-agents ---


@pytest.mark.requirement("A2")
def test_sub_agents_are_shown(program_with_helper: Program) -> None:
    assert program_with_helper.run("chat", "--message", "say hello").code == 0
    assert program_with_helper.run("subagents").out == "No sub-agents of main run or ended recently.\n"
    unknown = program_with_helper.run("subagents", "--for", "nope").err
    assert "Use a key that `antiphon sessions list` shows." in unknown and "sessions_list" not in unknown
    assert program_with_helper.run("spawn", "say forty two", "--label", "calc", "--wait").code == 0
    heading, row, hint = program_with_helper.run("subagents", "list").out.splitlines()
    assert heading.split() == ["LABEL", "STATE", "AGENT", "SINCE", "TOKENS", "ERROR", "RESULT"]
    assert row.split()[:4] == ["1", "calc", "ok", "main"]
    assert row.endswith("forty two")
    assert "show|kill TARGET" in hint
    [task] = program_with_helper.run("subagents", "--json").json["subagents"]
    for target in ("calc", "cal", "1", "last", task["runId"], task["runId"][:8], task["childSessionKey"]):
        shown = program_with_helper.run("subagents", "show", target, "--json").json
        assert (shown["runId"], "Result: forty two" in shown["report"]) == (task["runId"], True)
    told = program_with_helper.run("subagents", "show", "calc").out
    assert told.startswith("calc · ok\n") and "Result: forty two\n\nStats: " in told
    for what in (["kill", "calc"], ["steer", "1", "say no"], ["kill", "last"]):
        refused = program_with_helper.run("subagents", *what, "--json")
        assert (refused.code, refused.error["code"]) == (2, "conflict"), refused
        assert "already ended" in refused.error["message"]
    assert program_with_helper.run("subagents", "kill", "nobody").code == 3
    assert program_with_helper.run("subagents", "kill", "all").out == "No sub-agent was running.\n"
    assert program_with_helper.run("subagents", "--for", "agent:helper:main").code == 3


@pytest.mark.requirement("P1")
def test_a_label_names_one_sub_agent_at_a_time(program: Program) -> None:
    with up(program):
        assert spawn(program, "calc").code == 0
        taken = program.run("spawn", "say 2", "--label", "calc", "--json")
        assert (taken.code, taken.error["code"]) == (2, "conflict")
        assert program.run("subagents", "kill", "calc").code == 0
        assert spawn(program, "calc", "--wait").code == 1
        second = program.run("spawn", "say 2", "--label", "calc", "--wait", "--json").json
        history = program.run("sessions", "history", "calc", "--json").json
        assert history["sessionKey"] == second["childSessionKey"]
        shown = program.run("subagents", "show", "calc", "--json").json
        assert shown["childSessionKey"] == second["childSessionKey"], "the newest of those with the label"


@pytest.mark.requirement("A2", "G16")
def test_a_label_means_the_sub_agent_at_work(program: Program) -> None:
    program.configure(CONFIG)
    with up(program):
        working = program.run("spawn", "slow 600 a b c", "--label", "long", "--json").json
        assert program.run("spawn", "say 1", "--label", "long", "--agent", "helper", "--wait").code == 0
        steered = program.run("subagents", "steer", "long", "slow 600 d e f", "--json").json
        assert steered["childSessionKey"] == working["childSessionKey"]
        assert program.run("subagents", "kill", "long", "--json").json["killed"] == [
            working["childSessionKey"]
        ]


@pytest.mark.requirement("A2", "G16")
def test_sub_agents_are_stopped_and_redirected(program: Program) -> None:
    program.configure(CONFIG)
    with up(program):
        for label in ("one", "two", "three"):
            spawn(program, label)
        assert {phase for phase, *_ in states(program).values()} == {"running"}
        assert "at work" in program.run("subagents").out
        [killed] = program.run("subagents", "kill", "one", "--json").json["killed"]
        steered = program.run("subagents", "steer", "two", "say something else", "--json").json
        assert killed != steered["childSessionKey"]
        assert spawn(program, "one", "--wait").code == 1
        assert spawn(program, "two", "--wait").code == 0
        assert states(program)["two"] == ("settled", "ok", "something else")
        assert program.run("subagents", "show", "two", "--json").json["task"] == "say something else"
        assert states(program)["one"][:2] == ("settled", "cancelled")
        assert states(program)["three"][0] == "running"


@pytest.mark.requirement("A2", "G16")
def test_what_a_killed_gateway_left_at_work_can_be_stopped_without_one(program: Program) -> None:
    program.configure(CONFIG)
    with up(program) as gateway:
        for label in ("one", "two"):
            spawn(program, label)
        gateway.stop(signal.SIGKILL)
    steered = program.run("subagents", "steer", "two", "say something else")
    assert (steered.code, steered.out.startswith("Accepted: run ")) == (0, True), steered.err
    assert states(program)["two"] == ("settled", "ok", "something else")
    stopped = program.run("subagents", "kill", "all")
    assert (stopped.code, stopped.out[:12]) == (0, "Stopped: one"), stopped.err
    assert states(program)["one"][:2] == ("settled", "cancelled")


# --- jobs ---


def test_a_job_announces(program_with_helper: Program) -> None:
    assert program_with_helper.run("chat", "--message", "say hello").code == 0
    add = ("cron", "add", "--message", "say tick", "--json", "--name")
    job = program_with_helper.run(*add, "1", "--every", "1h", "--announce").json
    assert job["delivery"]["mode"] == "announce"
    where = program_with_helper.run(
        *add, "2", "--every", "1h", "--announce", "--channel", "webchat", "--to", "7"
    ).json
    assert where["delivery"] == {"mode": "announce", "channel": "webchat", "to": "7"}
    elsewhere = program_with_helper.run(*add, "3", "--every", "1h", "--announce", "--channel", "telegram")
    assert (elsewhere.code, "no channel 'telegram'" in elsewhere.error["message"]) == (2, True)
    assert "'webchat'" in elsewhere.error["hint"]
    assert program_with_helper.run(*add, "4", "--every", "1h").json["delivery"] == {"mode": "none"}
    for lost, missing in (
        (["--channel", "telegram"], "--announce"),
        (["--announce", "--to", "7"], "--channel"),
    ):
        refused = program_with_helper.run(*add, "5", "--every", "1h", *lost)
        assert (refused.code, missing in refused.error["message"]) == (2, True)
    assert program_with_helper.run("cron", "run", job["id"]).code == 0
    assert (
        program_with_helper.run("send", f"cron:{job['id']}", "say done", "--wait", str(BOUND)).out == "done\n"
    )
    [delivery] = program_with_helper.run("deliveries", "--json").json["deliveries"]
    assert (delivery["sessionKey"], delivery["text"]) == (MAIN, "tick")


def test_an_interval_that_is_too_short_says_which_option_and_what_would_do(program: Program) -> None:
    done = program.run("cron", "add", "--name", "n", "--message", "x", "--every", "0s")
    assert done.code == 2
    assert "'--every'" in done.err
    assert "the minimum is 1s" in done.err


# --- the rest ---


@pytest.mark.requirement("G7")
def test_a_delivery_is_shown_as_people_got_it(program_with_helper: Program) -> None:
    assert (
        program_with_helper.run(
            "spawn", "say told by agent:main:main with key sk-0123456789abcdefghijkl", "--wait"
        ).code
        == 0
    )
    text = delivered(program_with_helper)["text"]
    assert "sk-0123456789abcdefghijkl" not in text
    assert "\n\nStats: " in text
    heading, row, *_ = program_with_helper.run("deliveries").out.splitlines()
    assert row[heading.index("TRIES") :].split()[0] == "-"
    assert "told by agent:main:main" in row


def test_a_long_delivery_is_cut(program_with_helper: Program) -> None:
    assert program_with_helper.run("spawn", f"say {'word ' * 1000}", "--wait").code == 0
    text = delivered(program_with_helper)["text"]
    assert 1500 < len(text) < 2000
    assert text.endswith("…")


def test_a_start_names_every_agent(program: Program) -> None:
    program.configure(CONFIG)
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect(r"agents main by default \(rehearsal/rehearsal\), helper \(rehearsal/rehearsal\)\n")


def test_a_start_counts_agents_that_do_not_fit(program: Program) -> None:
    program.configure({"agents": {"list": [{"id": f"a{number}"} for number in range(7)]}})
    with program.terminal("up", "--port", "0") as terminal:
        terminal.expect(
            r"agents a0 by default [^`]* a3\s+\(rehearsal/rehearsal\)\s+and\s+3\s+more"
            r"\s+\(`(\./)?antiphon\s+agents`\)\n"
        )
