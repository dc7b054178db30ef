"""A chat in whose session more goes on than its person has said: reports, wakes, and what other sessions say."""

from __future__ import annotations

import re
import time
from typing import Any

import msgspec
import pytest

from antiphon.bus import Delivered, Delta, MessageAppended, RunChanged
from antiphon.cli.chat import speakers
from antiphon.cli.chat.renderer import ChatRenderer
from antiphon.client.feed import FeedPosition
from cli.gateways import up
from cli.terminal import BOUND, Program, Terminal
from cli.test_delegating import CONFIG, HELPER, program_with_helper  # pyright: ignore[reportUnusedImport]  # noqa: F401

pytestmark = pytest.mark.requirement("R")

HISTORY = ("sessions", "history", "main", "--tools")


def say(terminal: Terminal, *lines: str) -> None:
    for line in lines[:-1]:
        terminal.type(f"{line}\\")
        terminal.expect(r"\. \. \. ")
    terminal.type(lines[-1])


@pytest.mark.requirement("P4", "P6")
@pytest.mark.parametrize("announce", ["channel", "parent"])
def test_a_report_and_the_answer_to_it_are_shown_once(program_with_helper: Program, announce: str) -> None:  # noqa: F811
    spawn = f'{{"task": "slow 1 it is 42", "label": "kid", "announce": "{announce}"}}'
    with program_with_helper.terminal("chat") as terminal:
        terminal.expect("you> ")
        say(terminal, f"call sessions_spawn {spawn}", "call sessions_yield {}")
        terminal.expect("main> Turn yielded.\nyou> ")
        terminal.press(b"say li")
        terminal.expect("report from kid> Status: ok\nResult: it is 42\n")
        terminal.expect("main> Their reports are in.\nyou> say li")
        assert terminal.text.count("say li") == 1
        terminal.type("ke this")
        terminal.expect("main> like this\nyou> ")
        terminal.type("slow 2.5 so that what is late would be there")  # after the last look for missed ends
        terminal.expect("would be there\nyou> ")
        terminal.type("/quit")
        assert terminal.ended() == 0
        assert terminal.text.count("Result: it is 42") == 1
        assert terminal.text.count("Their reports are in.") == 1
        assert "The sub-agents you were waiting for" not in terminal.text
    told = program_with_helper.run(*HISTORY).out
    assert f'main> · sessions_spawn → kid: "slow 1 it is 42" {{"announce":"{announce}"}}' in told
    assert "report from kid> Status: ok" in told
    assert "wake> The sub-agents" in told


@pytest.mark.requirement("S5", "003-reply-back-limit")
def test_the_end_of_an_exchange_is_one_line(program_with_helper: Program) -> None:  # noqa: F811
    program_with_helper.run("send", HELPER, "say hello", "--wait", "30")
    with program_with_helper.terminal("chat") as terminal:
        terminal.expect("you> ")
        wanted = f'{{"sessionKey": "{HELPER}", "message": "say say say pong", "timeoutSeconds": 20}}'
        say(terminal, f"call sessions_send {wanted}", "say done")
        terminal.expect('  · sessions_send → helper: "say say say pong"\n')
        terminal.expect("main> done\n")
        terminal.expect("↔ helper> say say pong\n")
        terminal.expect("main ↔ helper, turn 1/5> say pong\n")
        terminal.expect("↔ helper, turn 2/5> pong\n")
        terminal.expect(r"\(main ended the conversation\)\nyou> ")
        terminal.type("fail badly")
        terminal.expect("badly.*\nyou> ")
        terminal.type("/history")
        terminal.expect("↔ helper, turn 2/5> pong\n")
        terminal.expect("Error: .*badly")
        terminal.expect("you> ")
        terminal.type("/quit")
        assert terminal.ended() == 0
        assert terminal.text.count("(main ended the conversation)") == 1


@pytest.mark.requirement("H1")
def test_a_history_names_speakers_and_times_and_indents_what_goes_on(program_with_helper: Program) -> None:  # noqa: F811
    assert program_with_helper.run("send", HELPER, "say hello", "--wait", "30").code == 0
    assert program_with_helper.run("send", "main", "say one\nsay two", "--wait", "30").code == 0
    sent = ("send", HELPER, "say say yes", "--from", "main", "--reply-back", "2", "--no-announce")
    assert program_with_helper.run(*sent, "--wait", "30", "--key", "k1").code == 0
    until = time.monotonic() + BOUND
    while program_with_helper.run("exchanges", "--unsettled", "--json").json["exchanges"]:
        assert time.monotonic() < until
    day, *lines = program_with_helper.run("sessions", "history", "main").out.splitlines()
    assert re.fullmatch(r" {6}\d{4}-\d\d-\d\d", day)
    told = "\n".join(re.sub(r"^( {3}[ \d]\d) \d\d:\d\d:\d\d ", r"\1 ", line) for line in lines)
    assert "    1 you> say one\n               say two\n    2 main> one\n               two\n" in told
    assert " ↔ helper> say yes\n" in told
    assert " main ↔ helper, turn 1/2> yes" in told
    other = program_with_helper.run("sessions", "history", HELPER).out
    assert " ↔ main> say say yes\n" in other
    assert " helper ↔ main> say yes\n" in other
    assert " ↔ main, turn 1/2> yes\n" in other
    number = next(line.split()[0] for line in other.splitlines() if "helper ↔ main> say yes" in line)
    alone = program_with_helper.run(
        "sessions", "history", HELPER, "--after", str(int(number) - 1), "--limit", "1"
    )
    assert " helper ↔ main> say yes\n" in alone.out, "the question is not on the page"


@pytest.mark.requirement("S6", "003-announce")
def test_what_an_agent_announces_is_shown_without_the_step(program: Program) -> None:
    program.configure(CONFIG)
    with up(program), program.terminal("chat", "--agent", "helper") as terminal:
        terminal.expect("you> ")
        program.run("send", HELPER, "say yes\nannounce told", "--from", "main", "--reply-back", "0")
        terminal.expect("↔ main> say yes")
        terminal.expect("helper ↔ main> yes\n")
        terminal.expect("helper> told\nyou> ")
        assert "announce step" not in terminal.text


@pytest.mark.requirement("H1")
def test_a_stopped_answer_is_no_error_in_the_history(program: Program) -> None:
    with up(program), program.terminal("chat") as terminal:
        terminal.expect("you> ")
        terminal.type("slow 60 a b c d e f g h i j k l m n o p q r s t u v w x y z")
        terminal.expect("main> a")
        terminal.type("/stop")
        terminal.expect(r"\(The run was stopped.\)\nyou> ")
        terminal.type("/history")
        terminal.expect(r"main> a.*\n.*\(The run was stopped.\)\nyou> ")
        terminal.type("/quit")
        assert terminal.ended() == 0
        told = program.run("sessions", "history", "main").out
    assert "(The run was stopped.)" in told
    assert "Error" not in terminal.text + told


@pytest.mark.requirement("H1")
def test_speakers_are_named_as_a_person_would(program: Program) -> None:
    with up(program), program.terminal("chat") as terminal:
        terminal.expect("you> ")
        added = program.run(
            *(
                "cron",
                "add",
                "--name",
                "tick",
                "--message",
                "say tock",
                "--every",
                "1h",
                "--announce",
                "--json",
            )
        )
        assert added.code == 0, added.err
        assert program.run("cron", "run", added.json["id"]).code == 0
        terminal.expect("cron tick> tock\n")
        terminal.type("/history")
        terminal.expect("cron tick> tock\n")
        terminal.type("/quit")
        assert terminal.ended() == 0
        assert "cron tick> tock" in program.run("sessions", "history", "main").out


@pytest.mark.parametrize(
    ("kind", "name"),
    [("inter_session", "operator"), ("command_end", "background command"), ("cron", "cron job")],
)
def test_a_speaker_that_is_no_session_is_named_by_what_it_is(kind: str, name: str) -> None:
    known = speakers.KnownSpeakers("agent:main:main")
    item = {"role": "user", "content": "x", "provenance": {"kind": kind, "sourceTool": "sessions_send"}}
    assert speakers.format_heading(item, known) == f"{name}>"


# --- events, one by one ---


def entry(run_id: str | None, role: str, text: str, **more: Any) -> MessageAppended:
    body = {"role": role, "content": [{"type": "text", "text": text}], **more}
    return MessageAppended(
        session_key="k",
        session_id="s",
        seq=1,
        entry="e",
        body=msgspec.json.encode(body).decode(),
        run_id=run_id,
    )


def ends(run_id: str, reply: str) -> RunChanged:
    return RunChanged(session_key="k", run_id=run_id, state="ok", reply=reply)


def test_only_what_was_asked_for_is_completed_from_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatRenderer("conversation", "main")
    screen.show_event(Delta(session_key="k", run_id="wake:1", number=1, text="[session] has"))
    screen.show_event(entry("wake:1", "assistant", "agent:x:main has it"))
    screen.show_event(ends("wake:1", "[session] has it"))
    screen.show_event(ends("turn:1", "REPLY_SKIP"))
    assert capsys.readouterr().out == "main> agent:x:main has it\n"
    screen.expect_answer("mine")
    screen.show_event(ends("mine", "an answer whose entry was missed"))
    assert capsys.readouterr().out == "main> an answer whose entry was missed\n"


def test_an_answer_that_is_shown_is_not_repeated_by_a_late_end(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatRenderer("conversation", "main")
    screen.expect_answer("mine")
    screen.show_event(entry("mine", "assistant", "once"))
    screen.show_event(RunChanged(session_key="k", run_id="other", state="running"))
    screen.show_event(ends("other", ""))
    screen.show_event(ends("mine", "once"))
    assert capsys.readouterr().out == "main> once\n"


def test_what_comes_late_of_an_answer_is_not_shown_again(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatRenderer("conversation", "main")
    screen.expect_answer("mine")
    screen.show_run_end("mine", "ok", "once", None)
    for late in (entry("mine", "user", "say once"), entry("mine", "assistant", "once")):
        screen.show_event(late)
    assert capsys.readouterr().out == "main> once\n"
    screen.show_event(entry("mine", "assistant", "an earlier step"))
    assert capsys.readouterr().out == "main> an earlier step\n"


def test_a_script_gets_no_words_that_were_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatRenderer("answers", "main")
    screen.expect_answer("mine")
    screen.show_event(Delta(session_key="k", run_id="mine", number=1, text="half an ans"))
    screen.show_event(Delta(session_key="k", run_id="mine", number=2, text="Hello", restart=True))
    screen.show_event(entry("mine", "assistant", "Hello there."))
    screen.show_event(ends("mine", "Hello there."))
    assert capsys.readouterr().out == "Hello there.\n"


def test_an_answer_that_a_restarted_gateway_gives_again_is_streamed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = ChatRenderer("conversation", "main")
    screen.expect_answer("mine")
    for number, piece in enumerate(("one ", "two ", "three "), 1):
        screen.show_event(Delta(session_key="k", run_id="mine", number=number, text=piece))
    capsys.readouterr()
    screen.show_event(Delta(session_key="k", run_id="mine", number=1, text="one "))
    screen.show_event(Delta(session_key="k", run_id="mine", number=2, text="two\n"))
    assert capsys.readouterr().out.endswith("one two\n")


@pytest.mark.parametrize("first", [2, 3, 7])
def test_an_answer_whose_new_beginning_was_missed_is_shown_once_it_is_whole(
    first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = ChatRenderer("conversation", "main")
    screen.expect_answer("mine")
    for number, piece in enumerate(("one ", "two "), 1):
        screen.show_event(Delta(session_key="k", run_id="mine", number=number, text=piece))
    screen.report_connection_change("Reconnected.")
    screen.show_event(Delta(session_key="k", run_id="mine", number=first, text="two "))
    screen.show_event(Delta(session_key="k", run_id="mine", number=first + 1, text="three "))
    screen.show_event(entry("mine", "assistant", "one two three four"))
    screen.show_event(ends("mine", "one two three four"))
    assert capsys.readouterr().out == "main> one two \nReconnected.\nmain> one two three four\n"


def test_an_answer_goes_on_from_the_whole_text_after_a_lost_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = ChatRenderer("conversation", "main")
    screen.expect_answer("mine")
    screen.show_event(Delta(session_key="k", run_id="mine", number=1, text="one "))
    screen.report_connection_change("Reconnected.")
    screen.show_event(Delta(session_key="k", run_id="mine", number=2, text="one two ", restart=True))
    screen.show_event(Delta(session_key="k", run_id="mine", number=3, text="three"))
    screen.show_event(ends("mine", "one two three"))
    assert capsys.readouterr().out == "main> one \nReconnected.\nmain> one two three\n"


@pytest.mark.parametrize("token", ["ANNOUNCE_SKIP", "NO_REPLY"])
def test_silence_is_silent(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatRenderer("conversation", "main")
    step = {"kind": "announce_step", "sourceTool": "sessions_send"}
    screen.show_event(entry("announce:1", "user", "Agent-to-agent announce step.", provenance=step))
    screen.show_event(entry("announce:1", "assistant", f"{token}\n"))
    assert capsys.readouterr().out == ""


@pytest.mark.requirement("H6")
def test_an_announcement_is_shown_when_it_is_posted(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatRenderer("conversation", "main")
    for run_id in ("announce:1", "announce:2"):
        screen.show_event(msgspec.structs.replace(entry(run_id, "assistant", "raw words"), internal=True))
    assert capsys.readouterr().out == ""
    posted = Delivered(session_key="k", key="exchange:1", run_id="announce:1", kind="announce", text="words")
    for _ in range(2):
        screen.show_event(posted)
    assert capsys.readouterr().out == "main> words\n"


@pytest.mark.requirement("H6")
def test_an_answer_that_is_a_token_is_not_shown_in_parts_either(capsys: pytest.CaptureFixture[str]) -> None:
    screen = ChatRenderer("conversation", "main")
    screen.expect_answer("mine")
    for number, piece in enumerate(("`NO_", "REPLY`"), 1):
        screen.show_event(Delta(session_key="k", run_id="mine", number=number, text=piece))
    screen.show_event(msgspec.structs.replace(entry("mine", "assistant", "`NO_REPLY`"), internal=True))
    screen.show_event(ends("mine", "`NO_REPLY`"))
    assert capsys.readouterr().out == ""
    screen.expect_answer("next")
    for number, piece in enumerate(("NO", "body"), 1):
        screen.show_event(Delta(session_key="k", run_id="next", number=number, text=piece))
    screen.show_event(entry("next", "assistant", "NObody"))
    screen.show_event(ends("next", "NObody"))
    assert capsys.readouterr().out == "main> NObody\n"


def test_what_was_posted_is_no_run() -> None:
    place = FeedPosition("k", 0)
    message = {"role": "assistant", "content": [{"type": "text", "text": "posted"}]}
    posted = {"sessionKey": "k", "runId": "note:1", "seq": 0, "state": "final", "message": message}
    event = place.handle_event("chat", posted)
    assert isinstance(event, Delivered)
    assert (event.run_id, event.text) == ("note:1", "posted")
    assert not place.is_waiting
    assert isinstance(place.handle_event("chat", {**posted, "seq": 1}), RunChanged)


def test_who_stops_an_answer_leaves_what_others_have_waiting(program: Program) -> None:
    with up(program), program.terminal("chat") as terminal:
        terminal.expect("you> ")
        for words in ("slow 60 it is being said", "say this was kept"):
            assert program.run("send", "main", words).code == 0
        terminal.expect(r"you \(elsewhere\)> slow 60 it is being said\n")
        terminal.type("/stop")
        terminal.expect(r"you \(elsewhere\)> say this was kept\n")
        terminal.expect("main> this was kept\n")
        terminal.type("/quit")
        assert terminal.ended() == 0
        assert "(The run was stopped.)" in terminal.text
