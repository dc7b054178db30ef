"""From an `ask` function in a configuration, over a model on HTTP, to a person's decision and the answer."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.client import Client, Site
from cli.gateways import Gateway, token, up
from cli.terminal import BOUND, Program
from support.model_provider import Answer, Call, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("T7")]

MODULE = '''
import antiphon

CALLS = {calls!r}


@antiphon.tool(ask=True)
def pay(amount: int) -> str:
    """Pays."""
    with open(CALLS, "a") as file:
        file.write(f"{{amount}}\\n")
    return f"paid {{amount}}"
'''


class Shop:
    """A configured program, and what its tool did."""

    def __init__(self, program: Program, provider: Provider, calls: Path) -> None:
        self.program = program
        self.provider = provider
        self._calls = calls

    @property
    def calls(self) -> str:
        return self._calls.read_text() if self._calls.exists() else ""

    def list_approvals(self) -> list[dict[str, Any]]:
        listed = self.program.run("approvals", "--json")
        assert listed.code == 0, listed.err
        return listed.json["approvals"]

    async def wait_for_approval(self) -> dict[str, Any]:
        async with asyncio.timeout(BOUND):
            while not (found := await asyncio.to_thread(self.list_approvals)):
                pass
        [approval] = found
        return approval

    async def decide(self, *arguments: str) -> str:
        done = await asyncio.to_thread(self.program.run, "approvals", *arguments)
        assert done.code == 0, done.err
        return done.out


@pytest.fixture
async def shop(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Shop]:
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    async with Provider().running() as provider:
        models = {"providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [{"id": "m"}]}}}
        program.configure({"models": models, "tools": {"python": ["./my_tools.py:pay"]}})
        calls = tmp_path / "calls.txt"
        (program.state / "my_tools.py").write_text(MODULE.format(calls=str(calls)))
        provider.script(
            Answer(calls=(Call("pay", '{"amount": 5}', "call_1"),)),
            Answer(text=("All done.",)),
        )
        yield Shop(program, provider, calls)


@asynccontextmanager
async def connected(shop: Shop, gateway: Gateway) -> AsyncGenerator[Client]:
    site = Site(gateway.url, token(shop.program))

    async def find() -> Site:
        return site

    async with Client(find) as client:
        yield client


async def say(shop: Shop, gateway: Gateway) -> None:
    async with connected(shop, gateway) as client:
        await client.call("chat.send", {"sessionKey": "main", "message": "Pay.", "idempotencyKey": "r1"})


async def wait_for_reply(shop: Shop, gateway: Gateway) -> str:
    async with connected(shop, gateway) as client:
        ended = await client.call(
            "agent.wait", {"runId": "r1", "timeoutMs": int(BOUND * 1000)}, seconds=BOUND
        )
    return ended["reply"]


def last_result(shop: Shop) -> str:
    return shop.provider.bodies[-1]["messages"][-1]["content"]


@pytest.mark.requirement("AT13")
async def test_a_person_allows_a_call_from_the_command_line(shop: Shop) -> None:
    with up(shop.program) as gateway:
        await say(shop, gateway)
        approval = await shop.wait_for_approval()
        assert (approval["tool"], approval["text"]) == ("pay", '{"amount":5}')
        shown = await shop.decide("list")
        assert approval["id"] in shown and '{"amount":5}' in shown and "calls pay" in shown
        assert shop.calls == ""
        assert "  antiphon approvals deny " + approval["id"] in shown.splitlines()
        status = await asyncio.to_thread(shop.program.run, "status")
        assert "approvals    1 call waits for approval; see: antiphon approvals\n" in status.out
        assert "Allowed once" in await shop.decide("allow", approval["id"][:6])
        assert await wait_for_reply(shop, gateway) == "All done."
        status = await asyncio.to_thread(shop.program.run, "status", "--json")
        assert status.json["approvals"] == 0
        assert "No call waits" in await shop.decide()
        unknown = await asyncio.to_thread(shop.program.run, "approvals", "deny", "nope")
        assert unknown.code == 3 and "There is no approval 'nope'" in unknown.err
        assert gateway.stop() == 0
    assert shop.calls == "5\n" and last_result(shop) == "paid 5"


@pytest.mark.requirement("AT13", "AT20", "G41")
async def test_a_gateway_killed_before_and_after_the_decision_pays_once(shop: Shop) -> None:
    with up(shop.program) as gateway:
        await say(shop, gateway)
        approval = await shop.wait_for_approval()
        gateway.stop(signal.SIGKILL)
    with up(shop.program) as gateway:  # still the same question
        assert (await shop.wait_for_approval())["id"] == approval["id"]
        gateway.stop(signal.SIGKILL)
    assert "Allowed once" in await shop.decide("allow", approval["id"]), "no gateway is running"
    assert shop.calls == ""
    with up(shop.program) as gateway:
        assert await wait_for_reply(shop, gateway) == "All done."
        gateway.stop(signal.SIGKILL)
    assert shop.calls == "5\n" and last_result(shop) == "paid 5"
    with up(shop.program) as gateway:
        assert await wait_for_reply(shop, gateway) == "All done."
        assert gateway.stop() == 0
    assert shop.calls == "5\n" and len(shop.provider.bodies) == 2


async def test_a_chat_shows_the_question_and_takes_the_answer(shop: Shop) -> None:
    def chat() -> None:
        with up(shop.program) as gateway, shop.program.terminal("chat") as terminal:
            terminal.expect("you> ")
            terminal.type("Pay.")
            terminal.expect(r"asks to call pay:")
            terminal.expect(re.escape('{"amount":5}'))
            found = terminal.expect(r"/approve ([0-9a-f]+) allow-once\|allow-always\|deny")
            terminal.type(f"/approve {found[1]} maybe")
            terminal.expect("/approve needs the id of a waiting call and one of: allow-once")
            terminal.type("Thanks.")
            terminal.expect("queued behind the current answer, which waits for your approval")
            terminal.type(f"/approve {found[1][:6]} allow-always")
            terminal.expect("pay was allowed by owner")
            terminal.expect("All done.")
            terminal.type("/quit")
            assert terminal.ended() == 0
            assert gateway.stop() == 0

    await asyncio.to_thread(chat)
    assert shop.calls == "5\n"
    assert '{"amount":5}' in await shop.decide("grants")
    [grant] = (await asyncio.to_thread(shop.program.run, "approvals", "grants", "--json")).json["grants"]
    assert "Revoked" in await shop.decide("revoke", grant["id"])
    assert "No call is always allowed" in await shop.decide("grants")


async def test_a_script_is_told_the_command_that_decides(shop: Shop) -> None:
    with up(shop.program) as gateway:
        script = asyncio.create_task(
            asyncio.to_thread(shop.program.run, "chat", "--json", "--message", "Pay.")
        )
        approval = await shop.wait_for_approval()
        await shop.decide("deny", approval["id"])
        done = await script
        assert f"Answer with:\n    antiphon approvals allow {approval['id']} " in done.err
        assert "/approve" not in done.err
        usage = await asyncio.to_thread(shop.program.run, "chat", stdin="/approve\n")
        assert (usage.code, usage.out) == (2, "")
        assert "/approve needs the id of a waiting call" in usage.err
        assert gateway.stop() == 0


@pytest.mark.parametrize(
    "arguments", [("agent", "--message", "Pay."), ("send", "main", "Pay.", "--wait", "50")]
)
async def test_a_command_that_waits_prints_the_question(shop: Shop, arguments: tuple[str, ...]) -> None:
    with up(shop.program) as gateway:
        asking = shop.program.start(*arguments)
        approval = await shop.wait_for_approval()
        assert asking.stderr is not None
        lines = [await asyncio.to_thread(asking.stderr.readline) for _ in range(5)]
        assert lines[1] == "main asks to call pay:\n"
        assert f"    antiphon approvals allow {approval['id']} " in lines[4]
        later = shop.program.start("send", "main", "Hurry.", "--wait", "50")
        assert later.stderr is not None
        lines = [await asyncio.to_thread(later.stderr.readline) for _ in range(2)]
        assert lines[1].startswith(
            "An earlier run of this session waits for approval. main asks to call pay:"
        )
        await shop.decide("allow", approval["id"])
        out, err = await asyncio.to_thread(asking.communicate, timeout=BOUND)
        assert out == "All done.\n" and "asks to call" not in err
        later.kill()
        await asyncio.to_thread(later.communicate, timeout=BOUND)
        assert gateway.stop() == 0


async def test_invalid_arguments_are_refused_without_asking(shop: Shop) -> None:
    shop.provider._script.clear()  # pyright: ignore[reportPrivateUsage]
    shop.provider.script(
        Answer(calls=(Call("pay", '{"amount": "much"}', "call_1"),)), Answer(text=("I cannot.",))
    )
    with up(shop.program) as gateway:
        await say(shop, gateway)
        assert await wait_for_reply(shop, gateway) == "I cannot."
        assert shop.list_approvals() == []
        assert gateway.stop() == 0
    assert shop.calls == "" and "amount" in last_result(shop)
