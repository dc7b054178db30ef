"""The command line as its users meet it: the real process, its output, its exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from antiphon import __version__
from antiphon.cli import COMMAND_MODULES
from antiphon.cli._errors import report_error
from antiphon.cli._gateway_lookup import find_local_gateways
from antiphon.cli.doctor import check_gateways
from antiphon.config import Config, Paths, parse
from antiphon.doctor import run_checks
from antiphon.errors import AntiphonError, LaneFull, ProviderError, StoreError, StoreLocked
from antiphon.paths import DATABASE_FILE_NAME
from antiphon.preflight import find_problems
from antiphon.runtimes import registry
from antiphon.state_access import open_store_readonly
from antiphon.store.sqlite.store import SqliteStore
from antiphon.store.statedir import StateDir
from cli.gateways import up
from cli.terminal import BOUND, COMMAND, Program
from support.privileges import drop_privileges

MAIN = "agent:main:main"
COUNTING = " ".join(f"word{number}" for number in range(100))

pytestmark = pytest.mark.requirement("R")


def change(program: Program, sql: str, *params: object) -> None:
    """Past everything, in the file."""
    connection = sqlite3.connect(program.state / "antiphon.db")
    connection.execute(sql, params)
    connection.commit()
    connection.close()


def imported(program: Program, *arguments: str) -> set[str]:
    """The modules that a command has loaded by its end."""
    script = (
        "import sys; from antiphon.cli import main; main(sys.argv[1:]); print('\\0', *sys.modules, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        encoding="utf-8",
        env=program.environ,
        timeout=BOUND,
        check=True,
    )
    return set(done.stdout.split("\0", 1)[1].split())


# --- starting ---


def test_alone_it_explains_itself(program: Program) -> None:
    done = program.run()
    assert done.code == 0
    assert "antiphon chat" in done.out
    for name, (_, about) in COMMAND_MODULES.items():
        assert name in done.out
        assert about in done.out


def test_every_command_has_help(program: Program) -> None:
    for command in (
        *([name] for name in COMMAND_MODULES),
        ["sessions", "list"],
        ["sessions", "import"],
        ["config", "check"],
        ["deliveries", "retry"],
    ):
        done = program.run(*command, "--help")
        assert (done.code, done.err) == (0, "")
        assert "--state-dir" in done.out


def test_the_version_comes_at_once(program: Program) -> None:
    times: list[float] = []
    for _ in range(6):  # the first one may compile
        start = time.perf_counter()
        assert program.run("--version").out == f"antiphon {__version__}\n"
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3
    modules = imported(program, "--version")
    assert modules.isdisjoint({"pydantic", "pydantic_ai", "openai", "asyncio", "msgspec", "sqlite3", "rich"})


def test_a_list_loads_no_model_library_and_no_configuration(program: Program) -> None:
    program.say("say hello")
    modules = imported(program, "sessions", "list")
    assert modules.isdisjoint(
        {"pydantic", "pydantic_ai", "openai", "anthropic", "stamina", "antiphon.runtimes.model"}
    )


# --- speaking from a script ---


def test_a_message_and_its_answer(program: Program) -> None:
    done = program.run("chat", "--message", "say hello there\nsay and more")
    assert (done.code, done.out, done.err) == (0, "hello there\nand more\n", "")


def test_several_messages_are_one_conversation(program: Program) -> None:
    assert program.say("say one", "say two") == "one\ntwo\n"
    assert program.say("say three") == "three\n"
    said = program.run("sessions", "history", "main", "--json").json["messages"]
    assert [item["content"] for item in said if item["role"] == "user"] == ["say one", "say two", "say three"]


def test_an_answer_as_json(program: Program) -> None:
    view = program.run("chat", "--message", "say x", "--json").json
    assert (view["state"], view["reply"], view["sessionKey"]) == ("ok", "x", MAIN)
    lines = program.run("--json", "chat", stdin="say y\nfail z\n").out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["ok", "error"]


def test_lines_of_a_pipe_are_messages(program: Program) -> None:
    done = program.run(
        "chat", stdin="say one\n\n/status\nsay two \\\nsay lines\nsay last, without a line break"
    )
    assert done.code == 0
    first, *status, third, fourth, last = done.out.splitlines()
    assert (first, third, fourth, last) == ("one", "two", "lines", "last, without a line break")
    assert [line.split()[0] for line in status] == [
        "session",
        "session",
        "model",
        "entries",
        "tokens",
        "pending",
    ]
    assert "you>" not in done.out
    assert "\x1b" not in done.out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_line_of_a_pipe_that_is_no_command_and_no_message_is_an_error(
    program: Program, options: list[str]
) -> None:
    done = program.run("chat", *options, stdin="/usr is full\nsay never\n")
    assert (done.code, done.out) == (2, "")
    assert "There is no command '/usr'." in done.err
    assert program.run("chat", stdin="say /usr is full").out == "/usr is full\n"


def test_lines_may_end_as_on_another_system(program: Program) -> None:
    assert program.run("chat", stdin="say one\r\nsay two\r\n").out == "one\ntwo\n"
    said = program.run("sessions", "history", "main", "--json").json["messages"]
    assert said[0]["content"] == "say one"


def test_a_failed_run_is_an_exit_code(program: Program) -> None:
    done = program.run("chat", stdin="fail badly\nsay still here\n")
    assert (done.code, done.out) == (8, "still here\n")
    assert "badly" in done.err


def test_another_agent_and_another_session(program: Program) -> None:
    program.configure({"agents": {"list": [{"id": "main"}, {"id": "helper"}]}})
    assert program.run("chat", "--agent", "helper", "--message", "say hi").code == 0
    assert program.run("chat", "--session", "cron:nightly", "--message", "say hi").code == 0
    keys = {row["key"] for row in program.run("sessions", "list", "--json").json["sessions"]}
    assert keys == {"agent:helper:main", "agent:main:cron:nightly"}
    unknown = program.run("chat", "--agent", "nobody", "--message", "hi")
    assert unknown.code == 3
    assert "'nobody'" in unknown.err


def test_an_interrupted_script_stops_its_run(program: Program) -> None:
    program.say("say hello")
    process = program.start("chat", "--message", f"say {COUNTING}\nslow 60")
    program.until_answering()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=BOUND)
    assert process.returncode == 130
    last = program.run("sessions", "history", "main", "--json").json["messages"][-1]
    assert last["stopReason"] == "aborted"


# --- reading ---


def test_lists_and_histories_page(program: Program) -> None:
    program.say("say one", "say two")
    assert program.run("chat", "--session", "hook:h1", "--message", "say three").code == 0
    page = program.run("sessions", "list", "--limit", "1", "--json").json
    assert [row["key"] for row in page["sessions"]] == ["agent:main:hook:h1"]
    rest = program.run("sessions", "list", "--cursor", page["nextCursor"], "--json").json
    assert [row["key"] for row in rest["sessions"]] == [MAIN]
    assert [
        row["kind"] for row in program.run("sessions", "list", "--kind", "main", "--json").json["sessions"]
    ] == ["main"]
    table = program.run("sessions", "list").out
    assert table.splitlines()[0].split() == ["SESSION", "KIND", "ACTIVE", "TOKENS", "MODEL", "NAME"]
    newest = program.run("sessions", "history", "main", "--limit", "1")
    assert "two" in newest.out
    assert "--before 4" in newest.out
    assert "one" in program.run("sessions", "history", "main", "--before", "4").out


@pytest.mark.requirement("G23", "H1")
def test_a_history_of_a_role_of_a_time_or_of_what_failed(program: Program) -> None:
    program.run("chat", stdin="say one\nfail badly\nsay two\ncall agents_list {}\n")

    def seqs(*arguments: str) -> list[int]:
        page = program.run("sessions", "history", "main", "--json", *arguments).json
        return [item["seq"] for item in page["messages"]]

    assert seqs() == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert seqs("--tool", "agents_list") == [8, 9]
    assert seqs("--tool", "agents_list", "--role", "assistant") == [8]
    assert seqs("--role", "user") == [1, 3, 5, 7]
    assert seqs("--role", "user", "--role", "assistant", "--after", "4") == [5, 6, 7, 8, 10]
    assert seqs("--errors") == [4]
    assert seqs("--errors", "--role", "user") == []
    assert seqs("--since", "2h") == seqs("--since", "2024-01-31T09:00+02:00") == seqs()
    assert seqs("--since", "9990-01-01") == []
    more = program.run("sessions", "history", "main", "--role", "user", "--limit", "1").out
    assert "call agents_list" in more
    assert "There may be more: --before 7" in more


def test_reading_works_beside_an_owner_and_owning_does_not(program: Program) -> None:
    program.say("say hello")
    owner = program.start("chat")
    assert owner.stdin is not None
    assert owner.stdout is not None
    owner.stdin.write("say ready\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "ready\n"
    assert program.run("sessions", "list").code == 0
    assert "ready" in program.run("sessions", "history", "main").out
    assert program.run("sessions", "export", "--all").code == 0
    locks = [
        finding for finding in program.run("doctor", "--json").json["findings"] if finding["check"] == "lock"
    ]
    assert str(owner.pid) in locks[0]["what"]
    refused = program.run("chat", "--message", "hi", "--json")
    assert (refused.code, refused.error["code"], refused.error["data"]["pid"]) == (
        7,
        "store_locked",
        str(owner.pid),
    )
    owner.communicate(timeout=BOUND)
    assert owner.returncode == 0


def test_what_was_said_cannot_command_a_terminal(program: Program) -> None:
    program.say("say \x1b[31mred\x1b[0m")
    assert "\x1b" not in program.run("sessions", "history", "main").out
    with program.terminal("chat", "--message", "say \x1b[31mred\x07") as terminal:
        terminal.expect("red")
        assert terminal.ended() == 0
    assert "\x1b[31m" not in terminal.raw


def test_a_reader_that_leaves_is_no_error(program: Program) -> None:
    program.say("say hello")
    script = f"{sys.executable} -m antiphon sessions history main --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        encoding="utf-8",
        env=program.environ,
        timeout=BOUND,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.strip() in {"0", "1"}


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [
        (["sessions", "lst"], 2, "usage"),
        (["chat", "--agent", "a", "--session", "b"], 2, "usage"),
        (["sessions", "export"], 2, "usage"),
        (["chat", "--session", "", "--message", "say x"], 2, "invalid_key"),
        (["chat", "--agent", "", "--message", "say x"], 2, "invalid_key"),
        (["agent", "--session", "", "--message", "say x"], 2, "invalid_key"),
        (["agent", "--agent", "", "--message", "say x"], 2, "invalid_key"),
        (["status", "--state-dir", ""], 2, "usage"),
        (["sessions", "list", "--cursor", "nonsense"], 2, "invalid_input"),
        (["sessions", "history", "agent::"], 2, "invalid_key"),
        (["sessions", "history", "cron:never"], 3, "not_found"),
        (["config", "check", "--config", "/does/not/exist.json5"], 6, "config_invalid"),
        (["sessions", "list", "--state-dir", "/does/not/exist"], 7, "store_unavailable"),
    ],
)
def test_errors_say_what_and_what_next(program: Program, arguments: list[str], code: int, name: str) -> None:
    program.say("say hello")
    plain = program.run(*arguments)
    assert (plain.code, plain.out) == (code, "")
    assert plain.err.startswith("Error: ")
    assert "Traceback" not in plain.err
    machine = program.run(*arguments, "--json")
    assert (machine.code, machine.out, machine.error["code"]) == (code, "", name)
    assert machine.error["message"]
    assert machine.error["hint"]


@pytest.mark.parametrize("beside", [True, False], ids=["beside a gateway", "alone"])
def test_a_mistyped_name_is_answered_with_the_nearest_one(program: Program, beside: bool) -> None:
    program.configure({"agents": {"list": [{"id": "main", "default": True}, {"id": "helper"}]}})
    program.say("say hello")
    assert "Did you mean 'sessions'?" in program.run("sesions", "list").err
    assert "Did you mean 'list'?" in program.run("sessions", "lst").err
    with up(program) if beside else nullcontext():
        for arguments, meant in (
            (["sessions", "history", "mian"], "main"),
            (["sessions", "label", "agent:mian:main", "x"], "agent:main:main"),
            (["send", "helper", "hi"], "agent:helper:main"),
        ):
            refused = program.run(*arguments, "--json")
            assert (refused.code, refused.error["code"]) == (3, "not_found"), refused
            assert refused.error["hint"].startswith(f"Did you mean {meant!r}?"), refused
        assert "Did you mean" not in program.run("sessions", "history", "qwertyuiop").err


def test_exit_codes_are_those_of_the_documents() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for error in (AntiphonError, LaneFull, ProviderError, StoreLocked):
        assert f"| {error.exit_code} |" in documented


def test_an_unexpected_error_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(RuntimeError("gears"), []) == 1
    told = capsys.readouterr().err
    assert "RuntimeError: gears" in told
    assert "--debug" in told
    assert "Traceback" not in told
    report_error(RuntimeError("gears"), ["--debug"])
    assert "RuntimeError" in capsys.readouterr().err
    assert report_error(click.exceptions.Abort(), []) == 130


@pytest.mark.requirement("C")
def test_the_configuration_is_checked(program: Program) -> None:
    program.configure(
        {
            "models": {
                "providers": {"local": {"baseUrl": "http://127.0.0.1:9/v1", "models": [{"id": "m1"}]}}
            },
            "agents": {
                "defaults": {"model": "local/m1"},
                "list": [{"id": "main"}, {"id": "helper", "default": True}],
            },
            "session": {"store": "elsewhere"},
        },
    )
    facts = program.run("config", "check", "--json").json
    assert facts["path"] == str(program.state / "config.json5")
    assert facts["agents"][1] == {
        "id": "helper", "default": True, "model": "local/m1", "maySpawn": ["helper"], "mayMessage": []
    }  # fmt: skip
    assert "session.store" in facts["warnings"][0]
    assert "helper (default), answered by local/m1" in program.run("config", "check").out
    program.configure({"session": {"scoop": 1}, "gateway": {"port": "high"}})
    broken = program.run("config", "check")
    assert broken.code == 6
    assert "'session.scoop'" in broken.err
    assert "gateway.port" in broken.err


@pytest.mark.requirement("C")
@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"hooks": {"enabled": True}}, "hooks.token"),
        ({"store": {"url": "mysql://x"}}, "store.url"),
        ({"store": {"url": "postgres://x"}, "bus": {"url": "http://x"}}, "bus.url"),
    ],
)
def test_the_check_refuses_what_up_refuses(program: Program, config: dict[str, Any], path: str) -> None:
    program.configure(config)
    before = sorted(program.state.iterdir())
    checked, started = program.run("config", "check"), program.run("up")
    assert (checked.code, checked.err) == (started.code, started.err)
    assert checked.code == 6 and f"'{path}'" in checked.err and checked.out == ""
    assert sorted(program.state.iterdir()) == before


@pytest.mark.requirement("C")
def test_a_configuration_whose_runs_would_all_fail_is_refused(program: Program) -> None:
    program.configure(
        {"agents": {"list": [{"id": "a", "runtime": {"type": "function", "target": "json:no_such"}}]}}
    )
    checked = program.run("config", "check", "--json")
    assert (checked.code, checked.error["code"]) == (6, "config_invalid"), checked
    assert checked.error["data"]["path"] == "agents.list[0].runtime.target"
    examined = program.run("doctor", "--json")
    failed = [found["what"] for found in examined.json["findings"] if found["level"] == "fail"]
    assert examined.code == 1 and checked.error["message"] in failed


@pytest.mark.requirement("C")
def test_the_check_would_have_found_prices_that_no_run_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What went unnoticed once: an error in building the model's specification."""

    def broken(**_: object) -> None:
        raise TypeError("unexpected keyword argument 'cacheRead'")

    monkeypatch.setattr(registry, "ModelPrice", broken)
    provider = {"baseUrl": "http://x/v1", "models": [{"id": "m", "cost": {"input": 1, "cacheRead": 2}}]}
    config = parse({"models": {"providers": {"p": provider}}})[0]
    [problem] = asyncio.run(find_problems(config))
    assert problem.path == "models.providers.p" and "'m'" in problem.what


@pytest.mark.requirement("C")
@pytest.mark.parametrize(
    ("settings", "header"),
    [
        ({"apiKey": "two\nlines"}, "authorization"),
        ({"headers": {"X-Team": " blue"}}, "x-team"),
        ({"headers": {"X Team": "blue"}}, "x team"),
    ],
)
def test_the_check_refuses_headers_that_no_request_can_carry(settings: dict[str, Any], header: str) -> None:
    provider = {"baseUrl": "http://x/v1", "models": [{"id": "m"}]}
    assert asyncio.run(find_problems(parse({"models": {"providers": {"p": provider}}})[0])) == []
    config = parse({"models": {"providers": {"p": {**provider, **settings}}}})[0]
    [problem] = asyncio.run(find_problems(config))
    assert problem.path == "models.providers.p" and f"'{header}'" in problem.what.lower()
    assert "blue" not in problem.what and "lines" not in problem.what


@pytest.mark.requirement("C")
def test_the_schema_is_printed(program: Program) -> None:
    assert "agents" in program.run("config", "schema").json["properties"]


# --- files ---


@pytest.mark.requirement("L4", "G25")
def test_an_export_can_be_imported_elsewhere(program: Program, tmp_path: Path) -> None:
    program.say("say hello")
    written = program.run("sessions", "export", "main", "--json").json
    assert (written["files"], written["messages"]) == (1, 2)
    row = program.run("sessions", "list", "--json").json["sessions"][0]
    assert Path(row["transcriptPath"]).is_file()

    other = Program(tmp_path / "other", program.bytecode)
    directory = written["directory"]
    assert "Would import 1" in other.run("sessions", "import", directory, "--dry-run").out
    assert not other.state.exists()
    assert "Imported 1 session with 2 messages" in other.run("sessions", "import", directory).out
    assert other.run("sessions", "import", directory, "--json").json["skipped"] == 1
    assert other.run("sessions", "list", "--json").json["sessions"][0]["sessionId"] == row["sessionId"]
    assert other.say("say and on it goes") == "and on it goes\n"


@pytest.mark.requirement("L4")
def test_only_the_export_in_the_state_directory_forgets_what_is_not_here(
    program: Program, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    program.say("say hello")
    ours = Path(program.run("sessions", "export", "--all", "--json").json["directory"])
    for directory in (out, ours):
        directory.joinpath("sessions.json").write_text('{"agent:main:gone": {"sessionId": "x"}}')
    program.run("sessions", "export", "--all")
    program.run("sessions", "export", "--all", "--out", str(out))
    gone = ["agent:main:gone" in path.joinpath("sessions.json").read_text() for path in (ours, out)]
    assert gone == [False, True]


def test_an_import_that_loses_something_is_an_exit_code(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    folder.joinpath("sessions.json").write_text('{"torn": {"sessionId": "/"}, "main": {"sessionId": "y"}}')
    done = program.run("sessions", "import", str(folder))
    assert done.code == 1
    assert "failed torn" in done.out
    assert "Imported 1" in done.out


@pytest.mark.requirement("D1")
def test_an_import_beside_a_conversation_says_what_became_of_its_settings(
    program: Program, tmp_path: Path
) -> None:
    program.say("say hello")
    folder = tmp_path / "sessions"
    folder.mkdir()
    entry = {"sessionId": "theirs", "sendPolicy": "deny", "totalTokens": 5, "odd\x1b\n": "x"}
    folder.joinpath("sessions.json").write_text(json.dumps({"agent:main:main": entry}))
    done = program.run("sessions", "import", str(folder))
    assert done.code == 0
    [said] = [line for line in done.out.splitlines() if "agent:main:main" in line]
    assert "imported: odd\ufffd , sendPolicy; not imported: totalTokens" in said
    program.run("sessions", "restore", "theirs")
    program.run("sessions", "export", "--all", "--out", str(tmp_path / "out"))
    index = json.loads((tmp_path / "out" / "sessions.json").read_text())
    assert (index["agent:main:main"]["sessionId"], index["agent:main:main"]["sendPolicy"]) == (
        "theirs",
        "deny",
    )


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_an_import_that_is_refused_leaves_nothing_behind(
    program: Program, tmp_path: Path, arguments: list[str]
) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    nothing = program.run("sessions", "import", str(folder), *arguments, "--json")
    assert (nothing.code, nothing.error["code"]) == (2, "invalid_input")
    folder.joinpath("sessions.json").write_text("{main:")
    assert "could not be read" in program.run("sessions", "import", str(folder), *arguments).err
    theirs = tmp_path / "agents" / "helper" / "sessions"
    theirs.mkdir(parents=True)
    theirs.joinpath("sessions.json").write_text("{}")
    missing = program.run("sessions", "import", str(theirs), "--agent", "nosuch", *arguments, "--json")
    assert (missing.code, missing.error["code"]) == (3, "not_found")
    assert "'helper'" in missing.error["hint"]
    assert not program.state.exists()


def test_an_import_says_that_a_label_was_in_use(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    entries = {f"cron:{name}": {"sessionId": name, "label": "home"} for name in "ab"}
    folder.joinpath("sessions.json").write_text(json.dumps(entries))
    for arguments in (["--dry-run"], []):
        done = program.run("sessions", "import", str(folder), *arguments)
        assert "1 had a label that is in use: imported without it" in done.out


@pytest.mark.requirement("K3")
def test_what_is_no_session_does_not_make_an_import_fail(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    folder.mkdir()
    folder.joinpath("sessions.json").write_text('{"Unknown": {"sessionId": "x"}, "main": {"sessionId": "y"}}')
    done = program.run("sessions", "import", str(folder))
    assert done.code == 0
    assert "1 entries named 'unknown'" in done.out
    assert program.run("sessions", "list", "--json").json["count"] == 1


# --- the doctor ---


def findings(program: Program, *arguments: str) -> tuple[int, dict[str, str]]:
    """The exit code, and the worst level of each check."""
    done = program.run("doctor", "--json", *arguments)
    worst: dict[str, str] = {}
    for finding in done.json["findings"]:
        assert finding["level"] == "ok" or finding["nextStep"]
        if worst.get(finding["check"]) in {None, "ok"}:
            worst[finding["check"]] = finding["level"]
    worst.pop("port", None)  # something else on this machine may be using it
    return done.code, worst


def test_the_doctor_finds_nothing_in_good_health(program: Program) -> None:
    program.say("say hello")
    code, levels = findings(program)
    assert code == 0
    assert {check for check, level in levels.items() if level != "ok"} == {"models"}
    assert "the newest 2 entries can be read" in program.run("doctor").out


@pytest.mark.requirement("G21")
def test_the_doctor_names_what_is_wrong(program: Program) -> None:
    program.say("say hello")
    change(program, "UPDATE messages SET body = '{' WHERE seq = 2")
    change(program, "UPDATE runs SET state = 'interrupted', error = 'x'")
    program.state.chmod(0o755)
    program.configure(
        {"models": {"providers": {"gone": {"baseUrl": "http://127.0.0.1:9/v1", "models": [{"id": "m"}]}}}},
    )
    code, levels = findings(program)
    assert code == 0
    assert {check for check, level in levels.items() if level == "warn"} == {"state", "transcripts", "runs"}
    code, levels = findings(program, "--online")
    assert (code, levels["models"]) == (1, "fail")


@pytest.mark.parametrize("place", ["apiKey", "headers"])
def test_the_doctor_misses_a_secret_before_a_run_does(program: Program, place: str) -> None:
    program.say("say hello")
    secret = {"env": "ANTIPHON_TEST_UNSET"}
    provider = {"models": [{"id": "m"}], place: {"x-key": secret} if place == "headers" else secret}
    program.configure({"models": {"providers": {"openai": provider}}})
    assert findings(program) == (1, {**findings(program)[1], "models": "fail"})
    assert "ANTIPHON_TEST_UNSET" in program.run("doctor").out


def test_the_check_and_the_doctor_miss_the_key_of_a_provider_that_is_only_implied(program: Program) -> None:
    model = {"primary": "anthropic/claude-opus-4-5", "fallbacks": ["openai/gpt-5.2"]}
    program.configure({"agents": {"defaults": {"model": model}}})
    checked = program.run("config", "check")
    assert checked.code == 0
    assert "main (default), answered by anthropic/claude-opus-4-5" in checked.out
    for shown in (checked.out, program.run("doctor").out):
        assert "The environment variable 'ANTHROPIC_API_KEY'" in shown and "OPENAI_API_KEY" not in shown


def test_the_doctor_and_the_check_miss_what_up_would(program: Program) -> None:
    program.say("say hello")
    program.configure(
        {
            "gateway": {"auth": {"token": {"file": "~nobody here/no.token"}}},
            "hooks": {"enabled": True, "token": {"env": "ANTIPHON_TEST_UNSET"}},
        }
    )
    assert findings(program) == (1, {**findings(program)[1], "secrets": "fail"})
    checked = program.run("config", "check")
    assert checked.code == 0
    for shown in (program.run("doctor").out, checked.out):
        assert "'gateway.auth.token'" in shown and "no.token" in shown and "Fix the path" in shown
        assert "'hooks.token'" in shown and "ANTIPHON_TEST_UNSET" in shown and "Set it for this" in shown
    assert program.run("up", "--port", "0").code == 6


@pytest.mark.anyio
async def test_a_directory_that_may_not_be_entered_is_a_finding_among_others(open_path: Path) -> None:
    paths = Paths(open_path / "config.json5", False, open_path / "locked" / "state")
    paths.state_dir.mkdir(parents=True)
    paths.config.write_text("{}")
    # What is imported on the way is private.
    assert await run_checks(paths) and list(check_gateways(paths.state_dir, Config()))
    (open_path / "locked").chmod(0)
    with drop_privileges():
        found = {finding.check: finding for finding in await run_checks(paths)}
        beside = {finding.check: finding for finding in check_gateways(paths.state_dir, Config())}
        with pytest.raises(StoreError, match="could not be read"):
            list(find_local_gateways(paths.state_dir))
        with pytest.raises(StoreError, match="could not be read"):
            async with open_store_readonly(Config(), paths.state_dir):
                pass
    assert found["state"].level == "fail"
    assert "could not be read (Permission denied)" in found["state"].what
    assert (found["config"].level, found["disk"].check, found["models"].level) == ("ok", "disk", "warn")
    assert beside["gateway"].level == "warn"
    assert "port" in beside


@pytest.mark.anyio
async def test_the_doctor_knows_where_nothing_can_be_kept(open_path: Path) -> None:
    async def state(path: Path) -> tuple[str, str]:
        examined = await run_checks(Paths(open_path / "config.json5", False, path))
        worst = [found for found in examined if found.check == "state" and found.level != "ok"]
        return (worst[0].level, worst[0].what) if worst else ("ok", "")

    kept, closed, shared = (open_path / name for name in ("kept", "closed", "shared"))
    await (await SqliteStore.open(StateDir.open_locked(kept).database)).close()
    (kept / DATABASE_FILE_NAME).chmod(0o444)
    kept.chmod(0o777)
    closed.mkdir(mode=0o555)
    shared.mkdir(mode=0o755)
    (shared / "diary").touch()
    assert await state(open_path / "new") == ("ok", "")
    with drop_privileges():
        assert await state(kept) == ("fail", f"{str(kept / DATABASE_FILE_NAME)!r} cannot be written to.")
        level, what = await state(closed / "a" / "b")
        assert level == "fail" and what.endswith(f"cannot be created in {str(closed)!r}.")
    level, what = await state(shared)
    assert level == "fail" and "contains other files" in what
    shared.chmod(0o733)
    with drop_privileges():
        assert (await state(shared))[0] == "fail"


def test_the_doctor_knows_a_directory_that_is_none(program: Program, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, levels = findings(program, "--state-dir", str(tmp_path / "file"))
    assert (code, levels["state"]) == (1, "fail")


def test_a_number_that_is_no_number_is_refused_before_anything_is_said(program: Program) -> None:
    program.say("say hello")
    for arguments in (
        ("send", "main", "say x", "--wait", "nan"),
        ("agent", "--message", "say x", "--timeout", "nan"),
        ("agent", "--message", "say x", "--timeout", "inf"),
        ("spawn", "say x", "--wait=nan"),
        ("spawn", "say x", "--timeout", "nan"),
        ("sessions", "list", "--active", "nan"),
        ("sessions", "history", "main", "--after", str(10**30)),
        ("sessions", "history", "main", "--before", str(10**30)),
        ("sessions", "history", "main", "--since", "yesterday"),
        ("sessions", "history", "main", "--before", "3", "--after", "1"),
        ("sessions", "history", "main", "--since", "9999-99-99"),
    ):
        assert program.run(*arguments).code == 2, arguments
    assert len(program.run("sessions", "history", "main", "--json").json["messages"]) == 2


@pytest.mark.requirement("G21")
def test_the_doctor_survives_a_broken_database_and_configuration(program: Program) -> None:
    program.say("say hello")
    program.configure({"nonsense": 1})
    (program.state / "antiphon.db").write_bytes(b"not a database, but long enough to look like one" * 100)
    for name in ("antiphon.db-wal", "antiphon.db-shm"):
        (program.state / name).unlink(missing_ok=True)
    code, levels = findings(program)
    assert (code, levels["config"], levels["database"]) == (1, "fail", "fail")


# --- at a terminal ---


def test_a_conversation(program: Program) -> None:
    with program.terminal("chat") as terminal:
        terminal.expect(r"agent main · rehearsal/rehearsal")
        terminal.expect(r"No model provider is configured")
        terminal.expect(r"/help lists the commands")
        terminal.expect(r"you> ")
        terminal.type("/help")
        terminal.expect(r"/stop +stop the answer")
        terminal.expect(r"you> ")
        terminal.type("say good morning")
        terminal.expect(r"main> good morning\n")
        terminal.expect(r"you> ")
        terminal.type("/status")
        terminal.expect(r"entries +2\n")
        terminal.type("/new")
        old = terminal.expect(r"antiphon sessions history (\S+)")[1]
        terminal.expect(r"you> ")
        terminal.type("/history")
        terminal.expect(r"There are no messages yet")
        terminal.type("/nonsense")
        terminal.expect(r"There is no command '/nonsense'")
        terminal.expect(r"you> ")
        terminal.press(b"\x04")
        assert terminal.ended() == 0
    assert "good morning" in program.run("sessions", "history", old).out


def test_an_answer_streams_and_can_be_stopped(program: Program) -> None:
    with program.terminal("chat") as terminal:
        terminal.expect(r"you> ")
        terminal.type(f"say {COUNTING}\\")
        terminal.expect(r"\. \. \. ")
        terminal.type("slow 60")
        terminal.expect(r"main> word0 ")
        terminal.type("say later")
        terminal.expect(r"queued behind the current answer")
        terminal.type("/stop")
        terminal.expect(r"The run was stopped\.\)\n")
        terminal.expect(r"you> ")
        terminal.type(f"say {COUNTING}\\")
        terminal.expect(r"\. \. \. ")
        terminal.type("slow 60")
        terminal.expect(r"main> word0 ")
        terminal.interrupt()
        terminal.expect(r"The run was stopped\.\)\n")
        terminal.expect(r"you> ")
        terminal.interrupt()
        assert terminal.ended() == 0


@pytest.mark.requirement("G16")
def test_each_answer_is_stopped_by_an_interrupt_of_its_own(program: Program) -> None:
    with program.terminal("chat") as terminal:
        terminal.expect(r"you> ")
        terminal.type(f"slow 60 {COUNTING}")
        terminal.expect(r"main> word0")
        terminal.type(f"slow 60 {COUNTING}")
        terminal.expect(r"queued behind the current answer")
        terminal.interrupt()
        terminal.expect(r"The run was stopped\.\)\n")
        terminal.expect(r"main> word0")
        terminal.interrupt()
        terminal.expect(r"The run was stopped\.\)\nyou> ")
        terminal.press(b"\x04")
        assert terminal.ended() == 0


@pytest.mark.requirement("G2")
def test_a_turn_that_was_cut_off_is_carried_on(program: Program) -> None:
    with program.terminal("chat") as terminal:
        terminal.expect(r"you> ")
        terminal.type("say alpha beta gamma\\")
        terminal.expect(r"\. \. \. ")
        terminal.type("slow 3")
        terminal.expect(r"main> alpha ")
        terminal.process.kill()
        terminal.ended()
    assert findings(program)[1]["runs"] == "warn"
    with program.terminal("chat") as terminal:
        terminal.expect(r"Resuming an interrupted turn: say alpha")
        terminal.expect(r"main> alpha beta gamma\n")
        terminal.expect(r"you> ")
        terminal.type("/quit")
        assert terminal.ended() == 0
    replies = program.run("sessions", "history", "main", "--json").json["messages"]
    assert [item["role"] for item in replies] == ["user", "assistant"]


def test_no_colours_where_none_are_wanted(program: Program) -> None:
    plain = Program(program.home, program.bytecode, {"NO_COLOR": "1"})
    with plain.terminal("chat") as terminal:
        terminal.expect(r"you> ")
        terminal.type("/quit")
        assert terminal.ended() == 0
    assert "\x1b[1m" not in terminal.raw
    assert "\x1b[2m" not in terminal.raw


def test_json_is_not_for_a_person(program: Program) -> None:
    with program.terminal("chat", "--json") as terminal:
        assert terminal.ended() == 2


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["sessions", "list", "--limit", "few"], "'few' is not a whole number from 1 to 200."),
        (["sessions", "list", "--limit", "0"], "'0' is not a whole number from 1 to 200."),
        (["send", "main", "x", "--wait", "long"], "'long' is not a number of seconds from 0 to 31622400"),
        (["sessions", "list", "--active", "0"], "'0' is not a number of minutes above 0 to 1000000000"),
    ],
)
def test_a_number_out_of_range_is_answered_with_the_range(
    program: Program, arguments: list[str], allowed: str
) -> None:
    refused = program.run(*arguments)
    assert (refused.code, allowed in refused.err) == (2, True), refused.err


def test_a_function_is_not_shown_as_the_rehearsal_model(program: Program) -> None:
    module = program.home / "greeter.py"
    module.write_text("async def answer(prompt):\n    return 'hello'\n")
    runtime = {"type": "function", "target": "greeter:answer"}
    program.configure({"agents": {"list": [{"id": "main", "runtime": runtime}]}})
    program = replace(program, extra={"PYTHONPATH": str(program.home)})
    assert program.say("hi") == "hello\n"
    [row] = program.run("sessions", "list", "--json").json["sessions"]
    assert "rehearsal" not in str(row.get("model"))
    assert "rehearsal" not in program.run("sessions", "list").out


def test_the_module_is_the_program(program: Program) -> None:
    script = Path(sys.executable).with_name("antiphon")
    assert COMMAND[-1] == "antiphon"
    done = subprocess.run(
        [script, "--version"], capture_output=True, env=program.environ, timeout=BOUND, check=True
    )
    assert done.stdout.decode() == f"antiphon {__version__}\n"


@pytest.mark.requirement("L4")
def test_a_row_of_a_gateway_names_a_file_with_what_was_said(program: Program) -> None:
    with up(program):
        assert program.run("send", "main", "say hello", "--wait", "30").code == 0
        (row,) = program.run("sessions", "list", "--json").json["sessions"]
        assert Path(row["transcriptPath"]).is_file()
    first, *said = map(json.loads, Path(row["transcriptPath"]).read_text().splitlines())
    assert (first["type"], first["id"]) == ("session", row["sessionId"])
    assert [line["message"]["role"] for line in said] == ["user", "assistant"]

    program.configure({"session": {"transcripts": {"mirror": False}}})
    with up(program):
        (row,) = program.run("sessions", "list", "--json").json["sessions"]
    assert "transcriptPath" not in row
