"""Results of MCP servers: files in the workspace, long texts, and what servers have besides tools."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.access import Caller
from antiphon.errors import ToolFailed
from antiphon.mcp.results import (
    FILE_HASH_CHARACTERS,
    MAX_FILE_BYTES,
    MAX_FILES_PER_RESULT,
    MAX_IMAGES_PER_RESULT,
    MAX_RESULT_CHARACTERS,
)
from antiphon.workspace.kept_files import MAX_RESULT_FILES, RESULT_FILES_DIRECTORY
from cli.gateways import connect, send_and_wait, up
from cli.terminal import Program
from support.app_fixture import OPERATOR
from support.mcp_server import PNG
from support.mcp_servers import describe_stdio_server, open_client, run_http_server
from support.model_provider import Answer, Call, Provider

pytestmark = [pytest.mark.anyio, pytest.mark.sqlite_only, pytest.mark.requirement("M1")]

SANDBOXED = Caller.agent("main", "agent:main:telegram:group:1", sandboxed=True)


def locate_kept_files(state_dir: Path) -> Path:
    return state_dir / "workspaces" / "main" / RESULT_FILES_DIRECTORY


def name_kept_file(server: str, data: bytes, suffix: str) -> str:
    return f"{server}-{hashlib.sha256(data).hexdigest()[:FILE_HASH_CHARACTERS]}{suffix}"


async def test_images_and_files_of_a_result_are_stored_in_the_workspace(tmp_path: Path) -> None:
    async with run_http_server() as http:
        servers = {"s": describe_stdio_server(), "h": {"url": http.url}}
        async with open_client(tmp_path, servers) as client:
            await client.prepare()
            for server in ("s", "h"):
                picture = await client.call(f"mcp__{server}__picture")
                name = name_kept_file(server, PNG, ".png")
                assert picture.text == (
                    f"[An image: image/png, {len(PNG)} bytes, in the file {RESULT_FILES_DIRECTORY}/{name}.]"
                )
                assert len(picture.images) == 1
                assert (locate_kept_files(tmp_path) / name).read_bytes() == PNG
                documents = (await client.call(f"mcp__{server}__documents")).text
                pdf = name_kept_file(server, b"%PDF-1.7", ".pdf")
                sound = name_kept_file(server, b"RIFF", ".bin")
                assert documents.split("\n\n") == [
                    f"[A file: application/pdf, 8 bytes, in the file {RESULT_FILES_DIRECTORY}/{pdf}.]",
                    f"[A sound: x/../../y, 4 bytes, in the file {RESULT_FILES_DIRECTORY}/{sound}.]",
                    "[An image: image/png, 7 bytes, which cannot be shown.]",
                    "[A resource: note://hello (hello, text/plain)]",
                ]
                read = await client.call(f"mcp__{server}__resources_read", uri="note://data.tgz")
                packed = name_kept_file(server, b"PK data", ".tgz")
                assert read.text.endswith(f"in the file {RESULT_FILES_DIRECTORY}/{packed}.]")
                assert (locate_kept_files(tmp_path) / packed).read_bytes() == b"PK data"


async def test_files_are_bounded_in_number_and_size(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_stdio_server()}) as client:
        await client.prepare()
        album = await client.call("mcp__s__album", pictures=MAX_FILES_PER_RESULT + 3)
        assert len(album.images) == MAX_IMAGES_PER_RESULT
        assert album.text.count(f"in the file {RESULT_FILES_DIRECTORY}/s-") == MAX_FILES_PER_RESULT
        assert album.text.count("which cannot be shown") == 3
        last = album
        for sizes in range(1, MAX_RESULT_FILES // MAX_FILES_PER_RESULT + 2):
            last = await client.call("mcp__s__album", pictures=MAX_FILES_PER_RESULT, sizes=sizes)
        kept = {path.name for path in locate_kept_files(tmp_path).iterdir()}
        assert len(kept) == MAX_RESULT_FILES
        assert all(name in kept for name in name_files(last.text))
        assert not any(name in kept for name in name_files(album.text)), "the oldest are not removed"
        large = await client.call("mcp__s__album", pictures=1, sizes=MAX_FILE_BYTES)
        assert large.images == () and large.text.endswith("which cannot be shown.]")


def name_files(text: str) -> list[str]:
    return [word.rpartition("/")[2].rstrip(".]") for word in text.split() if RESULT_FILES_DIRECTORY in word]


async def test_calls_side_by_side_keep_the_same_file(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_stdio_server()}) as client:
        await client.prepare()
        results = await asyncio.gather(*(client.call("mcp__s__picture") for _ in range(12)))
        assert all(RESULT_FILES_DIRECTORY in result.text for result in results)
        albums = await asyncio.gather(
            *(
                client.call("mcp__s__album", pictures=MAX_FILES_PER_RESULT, sizes=size % 12)
                for size in range(24)
            )
        )
        assert {album.text.count(RESULT_FILES_DIRECTORY) for album in albums} == {MAX_FILES_PER_RESULT}
        assert len(list(locate_kept_files(tmp_path).iterdir())) <= MAX_RESULT_FILES


async def test_a_long_text_is_cut_and_its_whole_is_a_file(tmp_path: Path) -> None:
    async with open_client(tmp_path, {"s": describe_stdio_server()}) as client:
        await client.prepare()
        cut = (await client.call("mcp__s__long_text", characters=200_000)).text
        assert len(cut) <= MAX_RESULT_CHARACTERS
        shown, _, note = cut.rpartition("\n\n")
        assert shown.startswith("<x") and shown.endswith("x>") and "characters left out" in shown
        (name,) = name_files(note)
        assert note == f"[The whole text is in the file {RESULT_FILES_DIRECTORY}/{name}.]"
        assert (locate_kept_files(tmp_path) / name).read_text() == "<" + "x" * 199_998 + ">"


async def test_a_sandboxed_session_has_the_files_in_its_own_directory(tmp_path: Path) -> None:
    agents = {"defaults": {"sandbox": {"mode": "non-main", "scope": "session"}}}
    async with (
        run_http_server() as http,
        open_client(tmp_path, {"h": {"url": http.url}}, agents=agents) as client,
    ):
        await client.prepare()
        picture = await client.call("mcp__h__picture", caller=SANDBOXED)
        (kept,) = (tmp_path / "sandboxes").rglob(f"{RESULT_FILES_DIRECTORY}/*")
        assert kept.name in picture.text and kept.read_bytes() == PNG
        assert not (tmp_path / "workspaces").exists()


async def test_a_result_is_whole_where_no_file_can_be_kept(tmp_path: Path) -> None:
    """Without a session, and where an agent has put a link in the place of the directory."""
    outside = tmp_path / "outside"
    outside.mkdir()
    async with open_client(tmp_path, {"s": describe_stdio_server()}) as client:
        await client.prepare()
        unnamed = await client.call("mcp__s__picture", caller=OPERATOR)
        assert unnamed.text == f"[An image: image/png, {len(PNG)} bytes.]"
        folder = locate_kept_files(tmp_path)
        folder.parent.mkdir(parents=True)
        folder.symlink_to(outside)
        assert await client.call("mcp__s__picture") == unnamed
        assert list(outside.iterdir()) == []
        folder.unlink()
        for number in range(MAX_RESULT_FILES + 5):  # which cannot be removed as files are
            (folder / f"{number}").mkdir(parents=True)
        assert name_kept_file("s", PNG, ".png") in (await client.call("mcp__s__picture")).text


async def test_templates_and_prompts_are_listed_and_read(tmp_path: Path) -> None:
    async with run_http_server() as http:
        servers = {"s": describe_stdio_server(), "h": {"url": http.url, "disabledTools": ["prompts_*"]}}
        async with open_client(tmp_path, servers) as client:
            await client.prepare()
            for server in ("s", "h"):
                listed = json.loads((await client.call(f"mcp__{server}__resources_list")).text)
                assert [each["uriTemplate"] for each in listed["templates"]] == ["note://{day}/diary"]
                read = await client.call(f"mcp__{server}__resources_read", uri="note://monday/diary")
                assert read.text == "On monday."
            assert "mcp__h__prompts_list" not in client.toolbox.names
            prompts = json.loads((await client.call("mcp__s__prompts_list")).text)["prompts"]
            assert prompts == [
                {
                    "name": "review",
                    "description": "How to review code.",
                    "arguments": [
                        {"name": "language", "required": True},
                        {"name": "tone", "required": False},
                    ],
                }
            ]
            arguments: dict[str, Any] = {"name": "review", "arguments": {"language": "C"}}
            read = await client.call("mcp__s__prompts_get", **arguments)
            assert read.text == "user:\n\nReview C, be kind."
            with pytest.raises(ToolFailed, match="refused the call"):
                await client.call("mcp__s__prompts_get", name="unknown")


async def test_an_agent_opens_the_file_of_a_result(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The whole way, with the path that the model has read; the same picture twice is the same result."""
    program = Program(tmp_path, tmp_path_factory.getbasetemp().parent / "antiphon-bytecode")
    path = f"{RESULT_FILES_DIRECTORY}/{name_kept_file('s', PNG, '.png')}"
    async with Provider().running() as provider:
        model = {"id": "m", "input": ["text", "image"]}
        program.configure(
            {
                "models": {"providers": {"local": {"baseUrl": f"{provider.url}/v1", "models": [model]}}},
                "mcpServers": {"s": describe_stdio_server()},
            }
        )
        provider.script(
            Answer(calls=(Call("mcp__s__picture", "{}", "call_1"), Call("mcp__s__picture", "{}", "call_2"))),
            Answer(calls=(Call("read", json.dumps({"path": path}), "call_3"),)),
            Answer(text=("A dot.",)),
        )
        with up(program) as gateway:
            async with connect(gateway, program) as client:
                ended = await send_and_wait(client, "Draw.")
            assert ended["reply"] == "A dot.", ended
            assert gateway.stop() == 0
    results = [message for message in provider.bodies[-1]["messages"] if message["role"] == "tool"]
    assert path in str(results[0]["content"]) and results[0]["content"] == results[1]["content"]
    assert "The image" in str(results[2]["content"]), results[2]
