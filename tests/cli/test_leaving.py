"""A chat whose gateway goes away: it can be left at any time, and loses nothing that was said."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from antiphon import client
from antiphon.client import Client, GatewayUnreachable, Site
from antiphon.operations.types import IncomingMessage
from cli.gateways import Gateway, token, up
from cli.terminal import BOUND, Program, Terminal

pytestmark = pytest.mark.requirement("R")

SOON = 25.0  # seconds, where a lost gateway would be waited for much longer
AT_ONCE = 3.0  # seconds, so that one that hangs is not waited for
AGAIN = "Press Ctrl-C again or Ctrl-D to leave"
HEARD = "will be sent when the gateway is back"
WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
LONG = f"slow 26 {WORDS}"
ON = "The answer continues at the gateway once it is back."
HASTY = (
    "from antiphon import cli, client; client.RECONNECT_TIMEOUT_SECONDS = 0.5; raise SystemExit(cli.main())"
)

Leave = Callable[[Terminal], None]


def with_a_key(terminal: Terminal) -> None:
    terminal.press(b"\x04")


def with_a_command(terminal: Terminal) -> None:
    terminal.type("/quit")


def with_words(terminal: Terminal) -> None:
    terminal.type("/quit for today")


def with_interrupts(terminal: Terminal) -> None:
    terminal.interrupt()
    terminal.expect(AGAIN)
    terminal.interrupt()


WAYS = pytest.mark.parametrize("leave", [with_a_key, with_a_command, with_interrupts])


def lose(terminal: Terminal, gateway: Gateway) -> None:
    assert gateway.stop() == 0
    terminal.expect("Lost the connection to the gateway; reconnecting")


def begin(terminal: Terminal, question: str = LONG) -> None:
    """An answer that goes on for a while."""
    terminal.expect("you> ")
    terminal.type(question)
    terminal.expect("main> a")


def asked(program: Program) -> list[str]:
    """What a person has said in the session, read beside its owner."""
    found = program.run("sessions", "history", "main", "--json").json["messages"]
    return [item["content"] for item in found if item["role"] == "user"]


# --- leaving ---


@WAYS
def test_while_an_answer_is_due(program: Program, leave: Leave) -> None:
    with up(program) as gateway, program.terminal("chat") as terminal:
        begin(terminal)
        lose(terminal, gateway)
        leave(terminal)
        assert terminal.ended(SOON) == 0
        assert terminal.text.count(ON) == 1
        assert "Not sent" not in terminal.text


@WAYS
def test_while_an_answer_is_due_and_lines_wait(program: Program, leave: Leave) -> None:
    with up(program) as gateway, program.terminal("chat") as terminal:
        begin(terminal)
        lose(terminal, gateway)
        for line in ("say hello?", "say anybody there?"):
            terminal.type(line)
            terminal.expect(HEARD)
        leave(terminal)
        assert terminal.ended(SOON) == 0
        assert f"{ON} Not sent: say hello? (and 1 more)\n" in terminal.text
    assert asked(program) == [LONG]


@pytest.mark.parametrize("leave", [with_a_key, with_a_command, with_words, with_interrupts])
def test_while_only_a_line_waits(program: Program, leave: Leave) -> None:
    with up(program) as gateway, program.terminal("chat") as terminal:
        terminal.expect("you> ")
        lose(terminal, gateway)
        terminal.type("say hello?")
        terminal.expect(HEARD)
        leave(terminal)
        assert terminal.ended(SOON) == 0
        assert "\nNot sent: say hello?\n" in terminal.text
    assert asked(program) == []


@pytest.mark.parametrize("leave", [with_a_key, with_a_command, Terminal.interrupt])
def test_at_the_prompt(program: Program, leave: Leave) -> None:
    with up(program) as gateway, program.terminal("chat") as terminal:
        terminal.expect("you> ")
        lose(terminal, gateway)
        terminal.expect("you> ")
        leave(terminal)
        assert terminal.ended(SOON) == 0
        assert terminal.text.endswith("\n")
        assert "Not sent" not in terminal.text


@pytest.mark.requirement("G2")
def test_who_stops_an_answer_and_leaves_at_once_has_stopped_it(program: Program) -> None:
    with up(program), program.terminal("chat") as terminal:
        begin(terminal)
        terminal.interrupt()
        terminal.press(b"\x04")
        assert terminal.ended(SOON) == 0
        assert "continues" not in terminal.text
        until = time.monotonic() + BOUND
        while "The run was stopped." not in program.run("sessions", "history", "main").out:
            assert time.monotonic() < until


def test_what_was_typed_just_before_leaving_is_sent(program: Program) -> None:
    with up(program):
        with program.terminal("chat") as terminal:
            terminal.expect("you> ")
            terminal.press(b"slow 2 a long answer\nsay and this\n/quit\n")
            assert terminal.ended() == 0
            assert "Not sent" not in terminal.text
        assert program.run("send", "main", "say after", "--wait", str(int(BOUND))).out == "after\n"
        assert asked(program) == ["slow 2 a long answer", "say and this", "say after"]


def test_while_the_gateway_hangs(program: Program) -> None:
    """The outcome of the message is unknown; a command is none."""
    doubt = "`antiphon sessions history agent:main:main` shows whether this was sent: say unsure"
    with up(program) as gateway:
        for typed, told in (("say unsure", [doubt]), ("/status", [])):
            with program.terminal("chat") as terminal:
                terminal.expect("you> ")
                gateway.process.send_signal(signal.SIGSTOP)
                terminal.type(typed)
                terminal.type("/quit")
                try:
                    assert terminal.ended(AT_ONCE) == 0
                finally:
                    gateway.process.send_signal(signal.SIGCONT)
                assert re.findall(r"(?m)^(?:`antiphon|Not sent|Traceback).*$", terminal.text) == told


# --- staying ---


@pytest.mark.requirement("G2", "S9")
@pytest.mark.parametrize("end", ["\n", "\r"], ids=["of a file", "of a terminal"])
def test_a_long_paste_is_said_whole_and_in_order(program: Program, end: str) -> None:
    lines = [f"say {number}" for number in range(300)]
    with up(program), program.terminal("chat") as terminal:
        terminal.expect("you> ")
        # A terminal takes only as much as the chat has read, so that a thread has to paste.
        paste = threading.Thread(target=terminal.press, args=(end.join([*lines, ""]).encode(),), daemon=True)
        paste.start()
        terminal.expect(r"main> 299\n")
        paste.join(BOUND)
        found = program.run("sessions", "history", "main", "--json", "--limit", "1000").json["messages"]
        assert [item["content"] for item in found if item["role"] == "user"] == lines


def test_that_an_answer_was_stopped_is_said_before_the_next_one(program: Program) -> None:
    with up(program), program.terminal("chat") as terminal:
        terminal.expect("you> ")
        terminal.type(f"slow 60 {WORDS}")
        terminal.expect(r"main> a")
        terminal.type("say queued")
        terminal.expect(r"queued behind the current answer")
        terminal.type("/stop")
        terminal.expect(r"main> queued\nyou> ")
        assert terminal.text.index("(The run was stopped.)") < terminal.text.index("main> queued")


@pytest.mark.requirement("G2", "S9")
def test_what_is_typed_meanwhile_is_said_once_and_in_order(program: Program) -> None:
    with up(program) as first, program.terminal("chat") as terminal:
        begin(terminal, f"slow 3 {WORDS}")
        lose(terminal, first)
        for line in ("say more", "say two\\", "say lines"):
            terminal.type(line)
            terminal.expect(re.escape(line) if line.endswith("\\") else HEARD)
        with up(program, first.port):
            terminal.expect("Reconnected")
            terminal.expect("main> more\n")
            terminal.expect("main> two\nlines\nyou> ")
            assert asked(program) == [f"slow 3 {WORDS}", "say more", "say two\nsay lines"]
            terminal.type("/quit")
            assert terminal.ended() == 0
        assert terminal.text.count("reconnecting") == terminal.text.count("Reconnected") == 1


@pytest.mark.requirement("G16")
def test_one_interrupt_stops_the_answer_once_the_gateway_is_back(program: Program) -> None:
    with up(program) as first, program.terminal("chat") as terminal:
        begin(terminal)
        lose(terminal, first)
        terminal.interrupt()
        terminal.expect(f"The answer will be stopped when the gateway is back. {AGAIN}")
        with up(program, first.port):
            terminal.expect(r"\(The run was stopped\.\)\nyou> ")
            terminal.type("say still here")
            terminal.expect("main> still here\nyou> ")
            terminal.interrupt()
            assert terminal.ended() == 0


# --- giving up ---


@pytest.fixture
def hasty(program: Program) -> Program:
    """One that does not wait a minute."""
    return replace(program, command=(sys.executable, "-c", HASTY))


@pytest.fixture
def patient(program: Program) -> Program:
    """One that waits long enough for a line to be typed."""
    return replace(program, command=(sys.executable, "-c", HASTY.replace("0.5", "8")))


def check_given_up(terminal: Terminal) -> None:
    assert terminal.ended(SOON) == 5
    assert terminal.text.count("reconnecting") == 1
    assert terminal.text.count("cannot be reached") == 1
    assert re.search(r"\nError: The gateway at \S+ cannot be reached .*\n.*`antiphon up`\.\n$", terminal.text)


def test_a_gateway_that_stays_away_has_not_lost_what_it_accepted(program: Program, hasty: Program) -> None:
    with up(program) as gateway:
        asking = hasty.start("send", "main", "slow 600 a b c", "--wait", "900")
        assert asking.stderr is not None
        run_id = asking.stderr.readline().split()[2]
        gateway.stop(signal.SIGKILL)
        out, err = asking.communicate(timeout=BOUND)
    assert (asking.returncode, out) == (5, "")
    assert f"was accepted (run {run_id}) and is not lost" in err
    assert "Do not send it again. Look for the answer later: antiphon sessions history agent:main:main" in err


def test_a_gateway_that_stays_away_ends_an_idle_chat(program: Program, hasty: Program) -> None:
    with up(program) as gateway, hasty.terminal("chat") as terminal:
        terminal.expect("you> ")
        terminal.press(b"half a li")
        lose(terminal, gateway)
        check_given_up(terminal)


def test_a_gateway_that_stays_away_ends_a_chat_with_an_answer_due(program: Program, hasty: Program) -> None:
    with up(program) as gateway, hasty.terminal("chat") as terminal:
        begin(terminal)
        terminal.press(b"say hello?\nsay more\n")
        terminal.expect("queued behind")
        terminal.expect("queued behind")
        terminal.press(b"say never\n")
        terminal.expect("queued behind")
        lose(terminal, gateway)
        check_given_up(terminal)
        assert "\nThe answers continue at the gateway once it is back.\nError" in terminal.text
    assert len(asked(program)) == 1


def test_what_was_not_sent_when_the_gateway_is_given_up(program: Program, patient: Program) -> None:
    with up(program) as gateway, patient.terminal("chat") as terminal:
        begin(terminal)
        lose(terminal, gateway)
        terminal.type("say hello?")
        terminal.expect(HEARD)
        check_given_up(terminal)
        assert f"\n{ON} Not sent: say hello?\nError" in terminal.text


def test_a_script_is_told_once(program: Program, hasty: Program) -> None:
    with up(program) as gateway:
        process = hasty.start("chat", "--message", LONG, "--message", "say never")
        program.until_answering()
        gateway.stop()
        _, err = process.communicate(timeout=SOON)
        assert process.returncode == 5
        assert err.count("cannot be reached") == 1
        assert err.startswith(f"{ON} Not sent: say never\n")


def test_a_pipe_that_is_given_up_is_told_that_there_was_more(program: Program) -> None:
    for piped, told in (("say a\n/foo\nsay b\n", True), ("say a\n/foo\n", False)):
        done = program.run("chat", stdin=piped)
        assert (done.code, done.out) == (2, "a\n")
        assert ("The rest of the input was not sent.\n" in done.err) == told


def test_a_pipe_is_told_what_was_not_sent(program: Program, patient: Program) -> None:
    with up(program) as gateway:
        process = patient.start("chat")
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("/status\n")
        process.stdin.flush()
        assert any(line.startswith("pending answers") for line in process.stdout)
        gateway.stop()
        _, err = process.communicate("say never\n", timeout=SOON)
        assert process.returncode == 5
        assert "say never\nError" in err


@pytest.mark.anyio
async def test_all_who_ask_a_lost_gateway_wait_together(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RECONNECT_TIMEOUT_SECONDS", 0.5)
    told: list[str] = []
    with up(program) as gateway:
        site = Site(gateway.url, token(program))

        async def find() -> Site:
            return site

        async with asyncio.timeout(BOUND), Client(find, told.append) as program_with_helper:
            assert program_with_helper.reconnect_deadline is None
            await asyncio.to_thread(gateway.stop)
            since = asyncio.get_running_loop().time()
            questions = [
                program_with_helper.submit(IncomingMessage(session="main", content=f"say {n}"))
                for n in range(8)
            ]
            outcomes = await asyncio.gather(*questions, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {GatewayUnreachable}
            assert asyncio.get_running_loop().time() - since < 4 * client.RECONNECT_TIMEOUT_SECONDS
            assert program_with_helper.reconnect_deadline is not None
    assert told == ["Lost the connection to the gateway; reconnecting…"]
