"""The Control UI in a headless browser, served from another origin, holds a conversation with this gateway."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from support.interop_processes import BOUND, CHROMIUM, Gateway, Openclaw

pytestmark = pytest.mark.requirement("W6")

# Not imported by name: types are checked also where only the everyday tools are installed.
playwright: Any = import_module("playwright.sync_api")
expect: Any = playwright.expect

# The page would load fonts and icons from elsewhere; here no other host has an address.
ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
FLAGS = ["--no-sandbox", "--disable-gpu", ALONE]
MILLISECONDS = BOUND * 1000
# What was said, without the times and counts that a bubble shows as well.
USERS = ".chat-group.user .chat-bubble p"
ANSWERS = ".chat-group.assistant .chat-bubble p"


@contextmanager
def browsing(origin: str, gateway: Gateway, picture: Path) -> Generator[Any]:
    """The page, connected to the gateway; a picture of it is left behind."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        expect.set_options(timeout=MILLISECONDS)
        try:
            visit(page, origin, gateway)
            yield page
        finally:
            page.screenshot(path=str(picture))
            browser.close()


def visit(page: Any, origin: str, gateway: Gateway) -> None:
    page.set_default_timeout(MILLISECONDS)
    page.goto(f"{origin}/?gatewayUrl={quote(gateway.url, safe='')}#token={gateway.token}")
    # The page asks before it follows a link to another gateway than the one it was loaded from.
    page.get_by_role("button", name="Switch to").click()


def say(page: Any, text: str) -> None:
    composer = page.get_by_label("Chat composer")
    composer.fill(text)
    composer.press("Enter")


def answered(page: Any, texts: list[str]) -> None:
    """The last answers are these, and the page waits for the next message."""
    bubbles = page.locator(ANSWERS)
    expect(bubbles).to_have_text(texts)
    expect(page.get_by_label("Stop generating")).to_have_count(0)
    expect(page.locator(".chat-working-indicator__status")).to_have_count(0)
    composer = page.get_by_label("Chat composer")
    expect(composer).to_be_editable()
    expect(composer).to_have_value("")


def test_the_control_ui_holds_a_conversation(gateway: Gateway, control_ui: str, tmp_path: Path) -> None:
    picture = tmp_path / "control-ui.png"
    with browsing(control_ui, gateway, picture) as page:
        users = page.locator(USERS)
        say(page, "say good evening")
        answered(page, ["good evening"])
        expect(users).to_have_text(["say good evening"])

        say(page, "slow 10 one two three")
        expect(page.get_by_label("Stop generating")).to_be_visible()
        answered(page, ["good evening", "one two three"])
        expect(users).to_have_text(["say good evening", "slow 10 one two three"])
    assert picture.stat().st_size > 0

    # Another browser knows only what the gateway keeps.
    with browsing(control_ui, gateway, tmp_path / "another.png") as page:
        answered(page, ["good evening", "one two three"])
        expect(page.locator(USERS)).to_have_text(["say good evening", "slow 10 one two three"])


def test_the_control_ui_stops_an_answer(gateway: Gateway, control_ui: str, tmp_path: Path) -> None:
    with browsing(control_ui, gateway, tmp_path / "stopped.png") as page:
        expect(page.get_by_label("Chat composer")).to_be_editable()
        say(page, "slow 50 this would take nearly a minute to say")
        page.get_by_label("Stop generating").click()
        expect(page.get_by_label("Stop generating")).to_have_count(0)
        expect(page.get_by_label("Chat composer")).to_be_editable()
        say(page, "say carrying on")
        expect(page.locator(ANSWERS).last).to_have_text("carrying on")
        expect(page.get_by_label("Stop generating")).to_have_count(0)


@pytest.mark.requirement("T7")
def test_the_control_ui_decides_on_calls_that_wait(
    payments: Gateway, openclaw: Openclaw, control_ui: str, tmp_path: Path
) -> None:
    with browsing(control_ui, payments, tmp_path / "decided.png") as page:
        question = page.locator(".exec-approval-card")
        say(page, 'call pay {"amount": 5}')
        expect(question.locator(".exec-approval-command")).to_have_text('pay {"amount":5}')
        # Another browser, opened while the call waits, reads the question from the list.
        other = page.context.browser.new_page()
        visit(other, control_ui, payments)
        expect(other.locator(".exec-approval-command")).to_have_text('pay {"amount":5}')
        question.get_by_role("button", name="Allow once").click()
        expect(other.locator(".exec-approval-card")).to_have_count(0)
        other.context.close()
        expect(page.locator(ANSWERS).last).to_contain_text("5 paid")
        expect(question).to_have_count(0)

        say(page, 'call pay {"amount": 6}')
        question.get_by_role("button", name="Deny").click()
        expect(page.locator(ANSWERS).last).to_contain_text("denied")

        say(page, 'call pay {"amount": 7}')
        question.get_by_role("button", name="Always allow here").click()
        expect(page.locator(ANSWERS).last).to_contain_text("7 paid")
        say(page, 'call pay {"amount": 7}')
        expect(page.locator(USERS)).to_have_count(4)
        expect(page.locator(ANSWERS).filter(has_text="7 paid")).to_have_count(2)

        # Decided elsewhere.
        say(page, 'call pay {"amount": 8}')
        expect(question.locator(".exec-approval-command")).to_have_text('pay {"amount":8}')
        [waiting] = openclaw.call(payments, "exec.approval.list").json
        decided = {"id": waiting["id"], "decision": "allow-once"}
        assert openclaw.call(payments, "exec.approval.resolve", decided).json["ok"] is True
        expect(page.locator(ANSWERS).last).to_contain_text("8 paid")
        expect(question).to_have_count(0)


def test_the_control_ui_follows_the_sessions_of_others(
    gateway: Gateway, openclaw: Openclaw, control_ui: str, tmp_path: Path
) -> None:
    key = "agent:main:dashboard:followed"
    with browsing(control_ui, gateway, tmp_path / "sessions.png") as page:
        expect(page.get_by_label("Chat composer")).to_be_editable()
        sessions = page.get_by_role("link")
        openclaw.call(gateway, "sessions.create", {"key": key, "label": "Made elsewhere"})
        expect(sessions.filter(has_text="Made elsewhere")).to_have_count(1)
        openclaw.call(gateway, "sessions.patch", {"key": key, "label": "Renamed elsewhere"})
        expect(sessions.filter(has_text="Renamed elsewhere")).to_have_count(1)
        expect(sessions.filter(has_text="Made elsewhere")).to_have_count(0)
        sessions.filter(has_text="Renamed elsewhere").click()
        asked = {"message": "say from afar", "sessionKey": key, "idempotencyKey": "followed-1"}
        openclaw.call(gateway, "agent", asked, "--expect-final")
        # The page keeps the conversation that it showed before.
        expect(page.locator(USERS).filter(has_text="say from afar")).to_have_count(1)
        expect(page.locator(ANSWERS).filter(has_text="from afar")).to_have_count(1)
        openclaw.call(gateway, "sessions.delete", {"key": key})
        expect(sessions.filter(has_text="Renamed elsewhere")).to_have_count(0)
