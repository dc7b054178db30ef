"""The commands beside a running gateway: they talk to it, and give what they give without one."""

from __future__ import annotations

import json
import re
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.gateways import token, up
from cli.terminal import BOUND, Program

pytestmark = pytest.mark.requirement("R")

MODELS = {"pydantic_ai", "openai", "anthropic", "stamina", "antiphon.runtimes.model"}
SERVING = {"uvicorn", "starlette", "cryptography", "prometheus_client", "antiphon.app"}
CONFIGURING = {"pydantic", "pyjson5", "antiphon.config"}
KEEPING = {
    "sqlite3",
    "antiphon.store.sqlite.store",
    "antiphon.operations.operations",
    "antiphon.state_access",
}


def imported(program: Program, *arguments: str) -> set[str]:
    """Every module that a command imports."""
    done = replace(program, extra={"PYTHONPROFILEIMPORTTIME": "1"}).run(*arguments)
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


# --- the same with and without ---

READING = [
    ["sessions", "list", "--json"],
    ["sessions", "list", "--limit", "1", "--json"],
    ["sessions", "list", "--kind", "cron", "--json"],
    ["sessions", "list", "--search", "other", "--json"],
    ["sessions", "history", "main"],
    ["sessions", "history", "main", "--json"],
    ["sessions", "history", "main", "--role", "user", "--since", "2h", "--json"],
    ["sessions", "history", "main", "--errors", "--since", "2026-01-01", "--json"],
    ["sessions", "history", "main", "--limit", "1", "--json"],
    ["sessions", "history", "main", "--limit", "2", "--before", "4", "--json"],
    ["sessions", "history", "main", "--limit", "2", "--after", "1", "--tools", "--json"],
    ["sessions", "past", "main", "--json"],
    ["cron", "list", "--json"],
]


def test_reading_gives_the_same(program: Program) -> None:
    program.say("say hello", "say again")
    assert program.run("chat", "--session", "cron:other", "--message", "say there").code == 0
    assert program.run("cron", "add", "--name", "n", "--message", "say x", "--every", "1h").code == 0
    assert program.run("chat", stdin="/new\nsay new\n").code == 0
    earlier = program.run("sessions", "past", "main", "--json").json["conversations"][-1]["sessionId"]
    questions = [*READING, ["sessions", "history", earlier, "--json"]]
    without = [program.run(*arguments) for arguments in questions]
    with up(program):
        beside = [program.run(*arguments) for arguments in questions]
    for arguments, one, other in zip(questions, without, beside, strict=True):
        assert (one.code, one.err) == (0, ""), arguments
        assert other == one, arguments


TALKING = [
    ["chat", "--message", "say hello", "--message", "say two"],
    ["send", "main", "say sent", "--wait", "30"],
    ["agent", "--message", "say done"],
    ["agent", "--message", "slow 30 too long for this", "--timeout", "0.3"],
    ["agent", "--message", " "],
    ["agent", "--agent", "nobody", "--message", "hi"],
]
FAILING = [
    ["chat", "--message", "fail out of order"],
    ["send", "main", "fail out of order", "--wait", "30"],
    ["agent", "--message", "fail out of order"],
]


def test_talking_gives_the_same(program: Program, tmp_path: Path) -> None:
    _check_same(program, tmp_path, TALKING)


def test_failing_gives_the_same(program: Program, tmp_path: Path) -> None:
    _check_same(program, tmp_path, FAILING)


def _check_same(program: Program, tmp_path: Path, commands: list[list[str]]) -> None:
    other = replace(program, home=tmp_path / "other")
    other.home.mkdir()
    with up(program):
        for arguments in commands:
            beside, without = program.run(*arguments), other.run(*arguments)
            assert (beside.code, beside.out) == (without.code, without.out), arguments
            errors = [re.sub(r"^Accepted: run \w+", "", done.err).split() for done in (beside, without)]
            assert errors[0] == errors[1], arguments


@pytest.mark.requirement("K3")
def test_the_one_main_session_of_all_agents_is_called_main(program: Program) -> None:
    agents = {"list": [{"id": "main", "default": True}, {"id": "helper"}]}
    program.configure({"session": {"scope": "global"}, "agents": agents})
    commands = [
        ["send", "main", "say hello", "--json"],
        ["send", "agent:helper:main", "say hello", "--wait", "30", "--json"],
        ["agent", "--agent", "helper", "--message", "say x", "--json"],
        ["chat", "--message", "say hello", "--json"],
        ["chat", "--message", "say hello"],
        ["sessions", "list"],
        ["sessions", "list", "--json"],
        ["sessions", "history", "main"],
        ["sessions", "history", "agent:helper:main", "--json"],
        ["sessions", "past", "main", "--json"],
        ["status"],
    ]
    with up(program) as gateway:
        beside = [program.run(*arguments) for arguments in commands]
        gateway.process.send_signal(signal.SIGTERM)
        told = "".join(gateway.process.communicate(timeout=BOUND))
    without = [program.run(*arguments) for arguments in commands]
    for arguments, result in zip(commands * 2, beside + without, strict=True):
        assert result.code == 0 or arguments == ["status"], (arguments, result)
        assert "global" not in f"{result.out}{result.err}".lower(), (arguments, result)
    assert "global" not in told.lower()


@pytest.mark.requirement("D2")
@pytest.mark.parametrize("beside", [True, False], ids=["gateway", "alone"])
def test_send_is_a_command_of_every_way_to_talk(program: Program, beside: bool) -> None:
    def policy() -> str | None:
        [row] = program.run("sessions", "list", "--json").json["sessions"]
        return row.get("sendPolicy")

    with up(program) if beside else nullcontext():
        assert program.say("say hello").strip() == "hello"
        for arguments, told, wanted in (
            (["chat", "--message", "/send off"], "Send policy set to off.", "deny"),
            (["send", "main", "/send on", "--wait", "30"], "Send policy set to on.", "allow"),
            (["agent", "--message", "/send off"], "Send policy set to off.", "deny"),
            (["send", "main", "/send on"], "Send policy set to on.", "allow"),
            (["chat"], "Send policy set to inherit.", None),
        ):
            done = program.run(*arguments, stdin="/send inherit\n" if arguments == ["chat"] else "")
            assert (done.code, done.out.strip()) == (0, told), (arguments, done)
            assert policy() == wanted
        history = program.run("sessions", "history", "main", "--json").json["messages"]
        assert [item["role"] for item in history] == ["user", "assistant"]


def test_a_sent_message_is_one_run_however_often_it_is_sent(program: Program) -> None:
    with up(program):
        first = program.run("send", "main", "say once", "--key", "k1", "--json")
        assert set(first.json) == {"runId", "sessionKey", "sessionId", "state"}
        assert first.json["runId"] == "k1"
        again = program.run("send", "main", "say once", "--key", "k1", "--wait", "30", "--json")
        assert (again.code, again.json["state"], again.json["reply"]) == (0, "ok", "once")
        other = program.run("send", "main", "say another", "--key", "k1", "--json")
        assert (other.code, other.error["code"]) == (2, "conflict")
        late = program.run("send", "main", "slow 30 so many words", "--wait", "0.1")
        assert (late.code, late.out) == (1, "")
        assert "the run continues" in late.err


# --- which gateway, and who asks ---


def test_a_wrong_token_and_a_token_file(program: Program, tmp_path: Path) -> None:
    with up(program) as gateway:
        stranger = replace(program, extra={"ANTIPHON_TOKEN": "wrong"}).run("status", "--json")
        assert (stranger.code, stranger.error["code"]) == (4, "unauthorized")
        assert "--token-file" in stranger.error["hint"] and "ANTIPHON_TOKEN" in stranger.error["hint"]
        issued = program.run("tokens", "issue", "reader", "--scope", "read")
        assert "not shown again" in issued.err
        card = tmp_path / "card"
        card.write_text(issued.out)
        elsewhere = replace(program, home=tmp_path / "elsewhere")
        elsewhere.home.mkdir()
        far = ["--url", gateway.url.replace("ws", "http"), "--token-file", str(card)]
        assert elsewhere.run("status", *far, "--json").json["running"]
        refused = elsewhere.run("send", "main", "hi", *far, "--json")
        assert (refused.code, refused.error["code"]) == (4, "forbidden")
        assert "--token-file" in refused.error["hint"] and "ANTIPHON_TOKEN" in refused.error["hint"]
        assert program.run("tokens", "revoke", "reader").code == 0
        assert elsewhere.run("status", *far).code == 4
        owner = ["--url", gateway.url, "--token-file", str(program.state / "tokens.json")]
        assert elsewhere.run("sessions", "list", *owner).code == 0
        nothing = elsewhere.run("status", "--url", gateway.url, "--json")
        assert (nothing.code, nothing.error["data"]["code"]) == (4, "AUTH_TOKEN_MISSING")


def test_a_configured_token_is_used(program: Program) -> None:
    program.state.mkdir(mode=0o700)
    (program.state / "config.json5").write_text("{ gateway: { auth: { token: 'a-secret-of-mine' } } }")
    with up(program):
        assert program.say("say hello") == "hello\n"
        assert "a-secret-of-mine" not in program.run("status", "--json").out


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1", "http://127.0.0.1:1"])
def test_nothing_answers_at_the_address(program: Program, url: str) -> None:
    for command in (["status"], ["sessions", "list"], ["send", "main", "hi"], ["chat", "--message", "hi"]):
        done = program.run(*command, "--url", url, "--json")
        assert (done.code, done.error["code"]) == (5, "unavailable"), command
        assert done.out == ""


def test_the_first_of_several_addresses_that_answers_is_used(program: Program) -> None:
    with up(program) as gateway:
        far = replace(program, extra={"ANTIPHON_TOKEN": token(program)})
        for urls in (f"ws://127.0.0.1:1,{gateway.url}", f"{gateway.url}, ws://127.0.0.1:1"):
            assert far.run("send", "main", "say hello", "--wait", "30", "--url", urls).out == "hello\n"
    assert program.run("status", "--url", "ws://127.0.0.1:1,ws://127.0.0.1:2").code == 5


def test_an_address_that_is_none(program: Program) -> None:
    done = program.run("status", "--url", "nonsense", "--json")
    assert (done.code, done.error["code"]) == (2, "invalid_input")
    secret = program.run("status", "--url", "ftp://user:s3cret@host/", "--json")
    assert "s3cret" not in secret.err


def test_a_note_of_a_killed_gateway_is_ignored(program: Program) -> None:
    with up(program) as gateway:
        program.say("say hello")
        gateway.stop(signal.SIGKILL)
    assert (program.state / "gateway.json").exists()
    assert not program.run("status", "--json").json["running"]
    found = {finding["check"]: finding for finding in program.run("doctor", "--json").json["findings"]}
    assert found["gateway"]["level"] == "warn"
    assert program.say("say alone") == "alone\n"


def test_what_owns_the_directory_says_who_does(program: Program) -> None:
    with up(program) as gateway:
        program.say("say hello")
        assert program.run("sessions", "export", "--all").code == 0
        refused = program.run("sessions", "import", str(program.state / "transcripts"), "--json")
        assert (refused.code, refused.error["code"]) == (7, "store_locked")
        assert refused.error["data"]["pid"] == str(gateway.process.pid)


def test_an_earlier_conversation_comes_back_beside_a_gateway(program: Program) -> None:
    with up(program):
        program.say("say hello")
        [first] = program.run("sessions", "past", "main", "--json").json["conversations"]
        assert program.run("chat", stdin="/new\n").code == 0
        assert len(program.run("sessions", "past", "main", "--json").json["conversations"]) == 2
        back = program.run("sessions", "restore", first["sessionId"], "--json").json
        assert (back["key"], back["sessionId"]) == ("agent:main:main", first["sessionId"])


# --- one by one ---


def test_what_a_chat_is_answering_is_not_called_interrupted(program: Program) -> None:
    with program.terminal("chat") as terminal:
        terminal.expect(r"you> ")
        terminal.type("slow 20 a b")
        terminal.expect(r"main> ")
        told = program.run("status").out
        assert f"by `chat`, process {terminal.process.pid}" in told
        assert "runs         1 running, 0 queued\n" in told


def test_the_status(program: Program) -> None:
    before = program.run("status", "--json").json
    assert (before["running"], before["sessions"]) == (False, 0)
    assert "antiphon up" in program.run("status").out
    with up(program) as gateway:
        program.say("say hello")
        facts: dict[str, Any] = program.run("status", "--json").json
        assert (facts["running"], facts["url"], facts["pid"]) == (True, gateway.url, gateway.process.pid)
        assert facts["runs"] == {"queued": 0, "running": 0}
        assert {"version", "uptimeMs", "sessions", "connections", "rssBytes", "cron"} <= set(facts)
        assert (facts["failing"], facts["degraded"], facts["shared"]) == ([], [], False)
        program.run("cron", "add", "--name", "n", "--message", "say tick", "--every", "6h")
        shown = program.run("status").out
        assert "cron         1 job\n" in shown
        assert "replica " not in shown
        assert token(program) not in shown


def test_tokens(program: Program) -> None:
    assert program.run("tokens", "list").code == 3
    with up(program):
        issued = program.run("tokens", "issue", "bot", "--scope", "write", "--json").json
        assert issued["scopes"] == ["operator.write"]
        listed = program.run("tokens", "list", "--json")
        assert [record["name"] for record in listed.json["tokens"]] == ["owner", "bot"]
        assert issued["token"] not in (program.state / "tokens.json").read_text()
        assert token(program) not in listed.out + program.run("tokens", "list").out
        assert program.run("tokens", "issue", "bot", "--scope", "read").code == 2
        assert program.run("tokens", "issue", "x", "--scope", "everything").code == 2
        assert program.run("tokens", "revoke", "nobody").code == 3
        assert program.run("tokens", "revoke", "owner").code == 2


@pytest.mark.parametrize("beside", [True, False])
def test_jobs(program: Program, beside: bool) -> None:
    if not beside:
        program.say("say hello")
        _check_jobs(program)
        return
    with up(program):
        _check_jobs(program)


def test_a_failed_run_of_a_job_is_an_exit_code_and_keeps_its_key_in_a_pipe(program: Program) -> None:
    reason = "a very long reason with much to read until its very last word"
    add = ("cron", "add", "--every", "6h", "--name")
    assert program.run(*add, "fails", "--message", f"fail {reason}").code == 0
    failed = program.run("cron", "run", "fails")
    assert (failed.code, failed.out.startswith("Accepted: run "), reason in failed.err) == (8, True, True)
    failed = program.run("cron", "run", "fails", "--json")
    assert (failed.code, failed.json["ran"], failed.err) == (8, True, "")
    heading, *rows, _ = program.run("cron", "runs", "fails").out.splitlines()
    runs = program.run("cron", "runs", "fails", "--json").json["runs"]
    assert [row[heading.index("RUN") :].split()[0] for row in rows] == [run["runId"] for run in runs]
    assert [row[heading.index("ERROR") :] for row in rows] == [run["error"] for run in runs]


def _check_jobs(program: Program) -> None:
    added = program.run("cron", "add", "--name", "n", "--message", "say tick", "--every", "6h", "--json").json
    assert (added["schedule"]["everyMs"], added["payload"]["message"]) == (6 * 3_600_000, "say tick")
    assert "every 6 h" in program.run("cron", "list").out
    fired = program.run("cron", "run", added["id"], "--json").json
    assert fired["ran"]
    again = program.run("send", fired["sessionKey"], "say done", "--wait", "30")
    assert again.out == "done\n"
    assert "tick" in program.run("sessions", "history", fired["sessionKey"]).out
    assert program.run("cron", "remove", added["id"]).code == 0
    assert program.run("cron", "remove", added["id"]).code == 3
    _check_named_job(program)
    wrong = program.run("cron", "add", "--name", "n", "--message", "x", "--cron", "61 * * * *", "--json")
    assert (wrong.code, wrong.error["code"]) == (2, "invalid_input")
    assert program.run("cron", "add", "--name", "n", "--message", "x").code == 2
    assert program.run("cron", "add", "--name", "n", "--message", "x", "--every", "often").code == 2


def _check_named_job(program: Program) -> None:
    add = ("cron", "add", "--message", "say tick", "--every", "6h", "--json", "--name")
    job = program.run(*add, "nightly").json
    assert not program.run("cron", "disable", "nightly", "--json").json["enabled"]
    assert "(off)" in program.run("cron", "list").out
    assert program.run("cron", "enable", job["id"][:8], "--json").json["enabled"]
    edited = program.run(
        "cron", "edit", "night", "--message", "say tock", "--cron", "0 9 * * *", "--json"
    ).json
    assert (edited["id"], edited["name"], edited["enabled"]) == (job["id"], "nightly", True)
    assert (edited["payload"]["message"], edited["schedule"]["expr"]) == ("say tock", "0 9 * * *")
    assert program.run("cron", "edit", "nightly").code == 2
    assert program.run("cron", "runs", "nightly").out == "Job 'nightly' has not run yet.\n"
    fired = program.run("cron", "run", "nightly", "--json").json
    assert program.run("send", fired["sessionKey"], "say done", "--wait", "30").out == "done\n"
    [run] = program.run("cron", "runs", "nightly", "--json").json["runs"]
    assert (run["runId"], run["state"], run["reply"]) == (fired["runId"], "ok", "tock")
    mistyped = program.run("cron", "run", "nigthly", "--json")
    assert (mistyped.code, mistyped.error["hint"][:24]) == (3, "Did you mean 'nightly'? ")
    twice = program.run(*add, "nightly")
    assert (twice.code, twice.error["code"], job["id"] in twice.error["message"]) == (2, "conflict", True)
    program.run(*add, "nightwatch")
    renamed = program.run("cron", "edit", "nightwatch", "--name", "nightly", "--json")
    assert (renamed.code, renamed.error["code"]) == (2, "conflict")
    begun = program.run("cron", "remove", "night", "--json")
    assert (begun.code, begun.error["code"]) == (2, "ambiguous")
    assert program.run("cron", "remove", job["id"]).code == 0
    assert program.run("cron", "remove", "nightwatch").code == 0


def test_the_doctor_looks_at_the_gateway(program: Program) -> None:
    with up(program) as gateway:
        findings = {finding["check"]: finding for finding in program.run("doctor", "--json").json["findings"]}
        assert gateway.url in findings["gateway"]["what"]
        assert findings["tokens"]["level"] == "ok"
        tokens = program.state / "tokens.json"
        for wrong in (lambda: tokens.chmod(0o644), lambda: (tokens.chmod(0o600), tokens.write_text("{}"))):
            wrong()
            done = program.run("doctor", "--json")
            assert done.code == 1
            assert [f["check"] for f in done.json["findings"] if f["level"] == "fail"] == ["tokens"]


def test_the_doctor_knows_a_port_that_is_taken(program: Program, tmp_path: Path) -> None:
    with up(program) as gateway:
        other = replace(program, home=tmp_path / "other")
        other.state.mkdir(parents=True, mode=0o700)
        (other.state / "config.json5").write_text(json.dumps({"gateway": {"port": gateway.port}}))
        found = {finding["check"]: finding for finding in other.run("doctor", "--json").json["findings"]}
        assert (found["gateway"]["what"], found["port"]["level"]) == ("not running", "warn")


# --- a conversation ---


def test_a_conversation_with_a_gateway(program: Program) -> None:
    with up(program) as gateway, program.terminal("chat") as terminal:
        terminal.expect(f"gateway {gateway.url}")
        terminal.expect("a new conversation")
        terminal.type("say hello")
        terminal.expect("main> hello")
        terminal.type("slow 30 a b c d e f g h i j k l m n o p q r s t u v w x y z")
        terminal.expect("main> a")
        terminal.interrupt()
        terminal.expect(r"\(The run was ")
        terminal.type("/new")
        terminal.expect("Started a new conversation")
        terminal.type("/quit")
        assert terminal.ended() == 0


@pytest.mark.requirement("G2")
def test_an_answer_cut_off_by_a_kill_is_shown_whole_and_once_afterwards(program: Program) -> None:
    answer = "This answer takes some seconds, which is long enough to kill the gateway."
    with up(program) as first, program.terminal("chat") as terminal:
        terminal.expect("you> ")
        terminal.type(f"slow 8 {answer}")
        terminal.expect("main> This answer")
        first.stop(signal.SIGKILL)
        terminal.expect("Lost the connection to the gateway; reconnecting")
        with up(program, first.port):
            terminal.expect(f"{re.escape(answer)}\nyou> ")
            terminal.type("/quit")
            assert terminal.ended() == 0
    _, _, shown = terminal.text.partition("Reconnected.\n")
    assert shown.splitlines()[:2] == [f"main> {answer}", "you> /quit"]
    before = terminal.text.partition("Lost the connection")[0].splitlines()[-1].removeprefix("main> ")
    assert answer.startswith(before.strip()), "only what had arrived"


@pytest.mark.requirement("G2")
def test_a_conversation_survives_its_gateway(program: Program) -> None:
    with up(program) as first, program.terminal("chat") as terminal:
        terminal.expect("a new conversation")
        terminal.type("slow 3 one two three four five six")
        terminal.expect("main> one")
        first.stop(signal.SIGKILL)
        terminal.expect("Lost the connection to the gateway; reconnecting")
        with up(program, first.port):
            terminal.expect("Reconnected")
            terminal.expect("five six")
            terminal.type("say still here")
            terminal.expect("main> still here")
            terminal.type("/quit")
            assert terminal.ended() == 0


def test_leaving_does_not_end_an_answer(program: Program) -> None:
    with up(program):
        with program.terminal("chat") as terminal:
            terminal.expect("a new conversation")
            terminal.type("slow 2 a long answer")
            terminal.expect("main> a")
            terminal.type("/quit")
            terminal.expect("continues at the gateway")
            assert terminal.ended() == 0
        done = program.run("send", "main", "say after", "--wait", str(int(BOUND)))
        assert done.out == "after\n"
        assert "a long answer" in program.run("sessions", "history", "main").out


# --- quickly ---


ASKING = [
    ["status"],
    ["sessions", "list"],
    ["sessions", "history", "main"],
    ["tokens", "list"],
    ["cron", "list"],
    ["agents"],
    ["deliveries"],
    ["exchanges"],
]
SPEAKING = [
    ["send", "main", "say hello"],
    ["agent", "--message", "say hello"],
    ["chat", "--message", "say hello"],
    ["send", "cron:other", "say hello"],
    ["send", "cron:other", "say hello", "--from", "main"],
    ["spawn", "say hello", "--wait"],
]


def test_client_commands_load_neither_server_nor_model_libraries(program: Program) -> None:
    with up(program):
        program.say("say hello")
        for command in ASKING:
            assert imported(program, *command).isdisjoint(MODELS | SERVING | CONFIGURING | KEEPING), command
        for command in SPEAKING:
            assert imported(program, *command).isdisjoint(MODELS | SERVING | CONFIGURING), command


@pytest.mark.parametrize("command", [["status"], ["sessions", "list"], ["deliveries"], ["cron", "list"]])
def test_without_a_gateway_only_the_store_is_loaded(program: Program, command: list[str]) -> None:
    program.say("say hello")
    unneeded = MODELS | SERVING | CONFIGURING | {"websockets", "antiphon.client"}
    assert imported(program, *command).isdisjoint(unneeded)
