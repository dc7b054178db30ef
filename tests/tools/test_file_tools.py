"""The tools for files and the web, as a model calls them."""

from __future__ import annotations

import base64
import random
import re
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.engine.toolbox import ToolOutput, ToolRequest
from antiphon.messages import ImageBlock, ToolResult
from antiphon.runtimes import Prompt
from antiphon.tools.web_fetch import web_fetch
from antiphon.workspace.web import FetchedPage, WebClient
from support.agents_fixture import AgentsFixture, ScriptedAgent, make_agents_config, open_agents_fixture
from support.app_fixture import MAIN, make_tool_calls

pytestmark = pytest.mark.anyio


def make_request(**arguments: Any) -> ToolRequest:
    return ToolRequest(caller=Caller.agent("main", MAIN), run_id="run", call_id="call", arguments=arguments)


PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def workspace(state: Path) -> Path:
    place = state / "workspaces" / "main"
    place.mkdir(parents=True, exist_ok=True)
    return place


async def use(agents: AgentsFixture, tool: str, **arguments: Any) -> ToolOutput:
    await agents.open_sessions(MAIN)
    return await agents.invoke_tool(tool, MAIN, **arguments)


@pytest.mark.requirement("T1", "T3")
async def test_a_file_is_written_read_and_edited(tmp_path: Path) -> None:
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        written = await use(agents, "write", file_path="notes/a.txt", content="one\ntwo\n")
        assert written.text == "Wrote 'notes/a.txt' (8 bytes)."
        assert written.details == {"files": [{"path": "notes/a.txt", "bytes": 8}]}
        assert (await use(agents, "read", path="notes/a.txt")).text == "one\ntwo"
        assert (await use(agents, "read", path="/workspace/notes/a.txt")).text == "one\ntwo"
        edited = await use(
            agents, "edit", file_path="notes/a.txt", old_string="o", new_string="0", replace_all="true"
        )
        assert edited.text == "Wrote 'notes/a.txt' (8 bytes)."
        patch = "*** Begin Patch\n*** Add File: b.txt\n+b\n*** Delete File: notes/a.txt\n*** End Patch"
        assert (await use(agents, "apply_patch", input=patch)).text == (
            "Wrote 'b.txt' (2 bytes).\nDeleted 'notes/a.txt'."
        )
        assert (workspace(tmp_path) / "b.txt").read_text() == "b\n"


@pytest.mark.requirement("T4", "AT15")
async def test_a_path_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    name = random.Random(1).randbytes(100).hex()  # cannot be compressed, so that no index holds 18 of them
    path = "/".join([name] * 3 + [random.Random(n).randbytes(100).hex() for n in range(15)])
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        await use(agents, "write", path=path, content="one")
        assert (await use(agents, "read", path=path)).text == "one"
        (workspace(tmp_path) / path).write_text("changed meanwhile")
        assert "changed since" in (await use(agents, "edit", path=path, oldText="changed", newText="x")).text
        assert (await use(agents, "read", path=path)).text == "changed meanwhile"
        assert not (await use(agents, "edit", path=path, oldText="changed", newText="x")).is_error


@pytest.mark.requirement("T1")
async def test_a_long_file_says_how_to_go_on(tmp_path: Path) -> None:
    (workspace(tmp_path) / "long.txt").write_text("".join(f"{n}\n" for n in range(1, 5001)))
    (workspace(tmp_path) / "empty.txt").touch()
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        first = await use(agents, "read", path="long.txt")
        assert first.text.startswith("1\n2\n")
        assert first.text.endswith("\n2000\n\n[Lines 1-2000 of 5000. Continue with offset 2001.]")
        assert first.details["nextOffset"] == 2001
        last = await use(agents, "read", path="long.txt", offset="4999", limit=10.0)
        assert last.text == "4999\n5000\n\n[Lines 4999-5000 of 5000.]"
        assert (await use(agents, "read", path="empty.txt")).text == "[The file is empty.]"


@pytest.mark.requirement("T1", "T4")
async def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (workspace(tmp_path) / "theirs.txt").write_text("theirs")
    (workspace(tmp_path) / "link").symlink_to(tmp_path / "secret")
    async with open_agents_fixture(make_agents_config(), tmp_path) as agents:
        stale = await use(agents, "write", path="theirs.txt", content="mine")
        assert stale.is_error and stale.details["code"] == "stale"
        assert "was not read by this session. Read it first." in stale.details["error"]
        for path in ("../../secret", "/etc/passwd", "link"):
            refused = await use(agents, "read", path=path)
            assert (refused.details["status"], refused.details["code"]) == ("forbidden", "forbidden"), path
        assert (await use(agents, "read", path="missing")).details["code"] == "not_found"
        assert (await use(agents, "edit", path="theirs.txt", oldText="x", newText="y")).is_error
    assert (workspace(tmp_path) / "theirs.txt").read_text() == "theirs"


@pytest.mark.requirement("T1")
async def test_an_image_is_shown_to_the_model(tmp_path: Path) -> None:
    def answer(prompt: Prompt) -> Any:
        return (
            "seen" if isinstance(prompt.messages[-1], ToolResult) else make_tool_calls("read", path="a.png")
        )

    (workspace(tmp_path) / "a.png").write_bytes(PNG)
    main = ScriptedAgent(answer)
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": main}) as agents:
        await agents.ask("look")
    shown = main.prompts[-1].messages[-1]
    assert isinstance(shown, ToolResult)
    assert shown.text == "[The image 'a.png': image/png, 28 bytes.]"
    assert shown.content[1:] == [ImageBlock(data=base64.b64encode(PNG).decode(), mime_type="image/png")]


@pytest.mark.requirement("T3", "P9")
async def test_a_child_reads_its_attachment_in_a_directory_of_its_own(tmp_path: Path) -> None:
    def answer(prompt: Prompt) -> Any:
        last = prompt.messages[-1]
        if isinstance(last, ToolResult):
            return last.text
        found = re.search(r"'(\.antiphon/attachments/[^']+)'", prompt.instructions)
        return make_tool_calls("read", path=f"{found[1]}/brief.txt") if found else "."

    main = ScriptedAgent(answer)
    (workspace(tmp_path) / "private.txt").write_text("of the parent")
    async with open_agents_fixture(make_agents_config(), tmp_path, functions={"main": main}) as agents:
        await agents.open_sessions(MAIN)
        given = [{"name": "brief.txt", "content": "Count the sheep."}]
        spawned = await agents.use("sessions_spawn", task="work", attachments=given)
        assert (await agents.wait_for_end(spawned["runId"])).reply == "Count the sheep."
        child = spawned["childSessionKey"]
        await agents.invoke_tool("write", child, path="result.txt", content="12")
        assert (await agents.invoke_tool("read", child, path="private.txt")).details["code"] == "not_found"
        below = f"subagents/{child.rpartition(':')[2]}/result.txt"
        assert (await use(agents, "read", path=below)).text == "12"


@pytest.mark.requirement("T3", "V2")
async def test_a_sandboxed_session_sees_nothing_of_its_agents_workspace(tmp_path: Path) -> None:
    (workspace(tmp_path) / "MEMORY.md").write_text("private")
    config = make_agents_config(agents={"defaults": {"sandbox": {"mode": "non-main"}}})
    group = "agent:main:discord:group:1"
    async with open_agents_fixture(config, tmp_path) as agents:
        await agents.open_sessions(MAIN)
        assert (await agents.ask('call read {"path": "MEMORY.md"}')).reply == "private"
        assert "There is no file" in str((await agents.ask('call read {"path": "MEMORY.md"}', group)).reply)
        await agents.ask('call write {"path": "a.txt", "content": "a"}', group)
    assert not (workspace(tmp_path) / "a.txt").exists()
    [own] = (tmp_path / "sandboxes" / "main").iterdir()
    assert (own / "workspace" / "a.txt").read_text() == "a"


class _Pages(WebClient):
    def __init__(self, page: FetchedPage) -> None:
        super().__init__()
        self._page = page

    async def fetch(self, url: str) -> FetchedPage:
        return self._page


def page(body: str, content_type: str = "text/html; charset=utf-8", **fields: Any) -> FetchedPage:
    return FetchedPage(
        url="https://example.org/", status=200, content_type=content_type, body=body.encode(), **fields
    )


@pytest.mark.requirement("T1")
@pytest.mark.parametrize(
    ("found", "arguments", "text"),
    [
        (page("<h1>Hi</h1><p>there"), {}, "# Hi\n\nthere"),
        (page("<h1>Hi</h1><p>there"), {"extractMode": "text"}, "Hi\n\nthere"),
        (page('{"a": 1}', "application/json"), {}, '{"a": 1}'),
        (
            page("x" * 300, "text/plain"),
            {"maxChars": 5},
            "x" * 100 + "\n\n[Cut after 100 of 300 characters.]",
        ),
        (page("x" * 300, "text/plain", is_truncated=True), {}, "x" * 300 + "\n\n[Cut after 300 characters.]"),
    ],
)
async def test_a_page_is_shown_as_text(found: FetchedPage, arguments: dict[str, Any], text: str) -> None:
    output = await web_fetch(_Pages(found)).invoke(make_request(url="https://example.org/", **arguments))
    assert output.text == f"[https://example.org/, HTTP 200]\n\n{text}"


async def test_what_is_no_text_is_refused() -> None:
    output = await web_fetch(_Pages(page("%PDF", "application/pdf"))).invoke(
        make_request(url="https://example.org/")
    )
    assert output.is_error and "'application/pdf', which cannot be shown as text" in output.details["error"]
    private = await web_fetch(WebClient()).invoke(make_request(url="http://127.0.0.1/"))
    assert private.details["code"] == "forbidden"
