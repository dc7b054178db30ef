"""The Control UI in a headless browser, served from another origin, holds a conversation with this gateway."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from support.interop_processes import BOUND, CHROMIUM, Gateway

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
        page.set_default_timeout(MILLISECONDS)
        expect.set_options(timeout=MILLISECONDS)
        try:
            page.goto(f"{origin}/?gatewayUrl={quote(gateway.url, safe='')}#token={gateway.token}")
            # The page asks before it follows a link to another gateway than the one it was loaded from.
            page.get_by_role("button", name="Switch to").click()
            yield page
        finally:
            page.screenshot(path=str(picture))
            browser.close()


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
