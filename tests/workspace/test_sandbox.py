"""Which sandbox a session's commands run in, what it shows, and that none runs without one."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from antiphon import keys
from antiphon.access import Caller
from antiphon.clock import SystemClock
from antiphon.engine.collaboration import attachments
from antiphon.engine.sessions import session_rows
from antiphon.engine.sessions.session_rows import NewSession
from antiphon.errors import AntiphonError, Forbidden, NotFound, SandboxUnavailable
from antiphon.store import Tx
from antiphon.workspace import sandbox_backend
from antiphon.workspace.files import TextPage, WorkspaceFiles
from antiphon.workspace.locations import SessionWorkspaceLocator
from antiphon.workspace.sandbox import Sandboxes
from support.agents_fixture import AgentsFixture, ScriptedAgent, make_agents_config, open_agents_fixture
from support.app_fixture import OPERATOR, open_test_store
from support.sandboxes import (
    BOUND_SECONDS,
    CHILD,
    GROUP,
    MAIN,
    OTHER_GROUP,
    hide_every_bubblewrap,
    make_sandboxes,
    run,
    run_command,
)

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        sandbox_backend.find_program("bwrap", []) is None,
        reason="bwrap is not installed (apt-get install bubblewrap)",
    ),
]


async def test_a_session_outside_of_a_sandbox_works_in_its_agents_workspace(tmp_path: Path) -> None:
    work = tmp_path / "workspaces" / "main"
    work.mkdir(parents=True)
    (work / "theirs").write_text("of root")
    sandboxes = make_sandboxes(tmp_path)
    assert await run(sandboxes, MAIN, "pwd; cat theirs; echo more >> theirs; id -u") == (
        f"/workspace\nof root{59_321 if os.geteuid() == 0 else 1000}\n"
    )
    assert (work / "theirs").read_text() == "of rootmore\n"
    await sandboxes.probe()
    assert sandboxes.explain_unavailable("main") is None
    assert (await sandboxes.find_status("main")).backend == "bwrap"


@pytest.mark.requirement("AT9")
@pytest.mark.parametrize("scope", ["session", "agent", "shared"])
@pytest.mark.parametrize("access", ["none", "ro", "rw"])
async def test_commands_and_file_tools_see_the_same_files(tmp_path: Path, access: str, scope: str) -> None:
    state = tmp_path / "state"
    work = state / "workspaces" / "main"
    work.mkdir(parents=True)
    (work / "of-agent").write_text("a")
    config = make_agents_config(
        agents={"defaults": {"sandbox": {"scope": scope, "workspaceAccess": access, "mode": "all"}}}
    )
    sandboxes, callers = Sandboxes(config, state), (GROUP, OTHER_GROUP, CHILD)

    async def create(tx: Tx, key: str) -> None:
        await session_rows.create_session(tx, keys.parse(key), 1, NewSession())

    async with open_test_store(tmp_path) as store:
        for caller in callers:
            await store.tx(create, caller.session_key or "")
        files = WorkspaceFiles(store, SystemClock(), SessionWorkspaceLocator(config, state))

        async def read(caller: Caller, path: str) -> str:
            try:
                page = await files.read(caller, path)
            except AntiphonError:
                return "refused"
            assert isinstance(page, TextPage)
            return page.text

        async def read_by_command(caller: Caller, path: str) -> str:
            return await run(sandboxes, caller, f"cat {path} 2>/dev/null || printf refused")

        places = ["own.txt", "/workspace/inside/deep.txt", "/tmp/scratch.txt", "/agent/new.txt"]
        for number, path in enumerate(places):
            by_command = await run(
                sandboxes,
                GROUP,
                f"mkdir -p $(dirname {path}); echo c > {path} && printf ok || printf refused",
            )
            assert ("refused" in by_command) == (await read(GROUP, path) == "refused"), path
            assert ("refused" in by_command) == path.startswith("/agent"), by_command
            other = path.replace(".txt", "-by-tool.txt")
            try:
                await files.write(GROUP, f"call-{number}", other, "t")
                written = "t"
            except Forbidden:
                written = "refused"
            assert await read_by_command(GROUP, other) == written, other
        for caller in callers:
            for path in (*places, "of-agent", "/workspace/of-agent", "/agent/of-agent", "../of-agent"):
                assert (await read_by_command(caller, path)).strip() == await read(caller, path), path
        assert await read(GROUP, "/workspace/of-agent") == ("a" if access == "rw" else "refused")
        assert await read(GROUP, "/agent/of-agent") == ("a" if access == "ro" else "refused")
        shared = "c" if scope != "session" or access == "rw" else "refused"
        assert await read(OTHER_GROUP, "own.txt") == shared


@pytest.mark.requirement("AT9", "T3")
async def test_commands_of_an_agent_reach_the_attachments_of_its_sub_agents(tmp_path: Path) -> None:
    sandboxes = make_sandboxes(tmp_path)
    await run(sandboxes, MAIN, "true")  # its workspace belongs to the user of commands from now on
    root = tmp_path / "workspaces" / "main"
    receipt = attachments.write(root, "1", [("file", b"canary")], below="subagents/6f0c")
    assert await run(sandboxes, MAIN, f"cat subagents/6f0c/{receipt.rel_dir}/file") == "canary"


async def test_a_sub_agent_starts_in_its_own_directory_also_if_it_shares_the_workspace(
    tmp_path: Path,
) -> None:
    for access, directory in (("none", "/workspace"), ("rw", "/workspace/subagents/6f0c")):
        sandboxes = make_sandboxes(tmp_path, workspaceAccess=access)
        assert await run(sandboxes, CHILD, "pwd; echo x > made") == f"{directory}\n"
    assert (tmp_path / "workspaces" / "main" / "subagents" / "6f0c" / "made").read_text() == "x\n"


@pytest.mark.requirement("AT9")
@pytest.mark.parametrize("access", ["none", "ro", "rw"])
async def test_a_sub_agent_can_use_the_attachments_that_the_gateway_wrote(
    tmp_path: Path, access: str
) -> None:
    sandboxes = make_sandboxes(tmp_path, workspaceAccess=access)
    await run(sandboxes, GROUP, "true")  # the workspace belongs to the user of the commands from now on
    root = tmp_path / "workspaces" / "main"
    root.mkdir(parents=True, exist_ok=True)
    receipt = attachments.write(root, "1", [("file", b"canary")], below="subagents/6f0c")
    assert await run(sandboxes, CHILD, f"cat {receipt.rel_dir}/file; echo x > new && cat new") == "canaryx\n"


@pytest.mark.requirement("AT11")
@pytest.mark.parametrize("variables", [{}, {"PATH": "/tmp"}])
async def test_a_workspace_replaced_by_a_link_is_not_mounted(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    """Also if the command has its own idea of the program that checks it."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").write_text("canary-secret")
    sandboxes = make_sandboxes(tmp_path)
    own = tmp_path / "workspaces" / "main" / "subagents" / "6f0c"
    command = await sandboxes.wrap(CHILD, ["/bin/cat", "file"], workdir=None, env=variables)
    status = own.stat()
    number = f"{status.st_dev}:{status.st_ino}"
    await run(sandboxes, CHILD, f"printf '#!/bin/sh\necho {number}\n' > /tmp/stat; chmod +x /tmp/stat")
    own.rmdir()
    own.symlink_to(tmp_path / "secret")
    done = run_command(command)
    assert done.returncode == 126
    assert "canary-secret" not in done.stdout + done.stderr
    with pytest.raises(AntiphonError, match="may not be shown"):
        await sandboxes.wrap(CHILD, ["/bin/cat", "file"], workdir=None, env={})


async def test_a_working_directory_is_inside(tmp_path: Path) -> None:
    sandboxes = make_sandboxes(tmp_path)
    work = tmp_path / "workspaces" / "main"
    assert await run(sandboxes, MAIN, "mkdir -p a/b; pwd") == "/workspace\n"
    for workdir in ("a/b", "/workspace/a/b", str(work / "a" / "b"), "/tmp/../workspace/a/b"):
        assert await run(sandboxes, MAIN, "pwd", workdir) == "/workspace/a/b\n", workdir
    for workdir in ("..", "/etc", "/agent", "/usr/bin"):
        with pytest.raises(Forbidden, match="outside the workspace"):
            await sandboxes.wrap(MAIN, ["true"], workdir=workdir, env={})
    with pytest.raises(NotFound, match="There is no directory 'missing'"):
        await sandboxes.wrap(MAIN, ["true"], workdir="missing", env={})


async def test_a_workspace_that_holds_the_state_directory_is_refused(tmp_path: Path) -> None:
    config = make_agents_config(agents={"defaults": {"workspace": str(tmp_path)}})
    sandboxes = Sandboxes(config, tmp_path / "state")
    with pytest.raises(AntiphonError, match="may not be shown to a sandbox"):
        await sandboxes.wrap(MAIN, ["true"], workdir=None, env={})


@pytest.mark.requirement("AT6", "AT8")
async def test_without_a_working_backend_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bin" / "bwrap"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sandbox_backend, "PROGRAM_DIRECTORIES", (str(broken.parent),))
    sandboxes = make_sandboxes(tmp_path / "state")
    await sandboxes.probe()
    expected = (
        "No sandbox for commands works here (bwrap: AppArmor forbids user namespaces). To fix it, add an"
    )
    assert (sandboxes.explain_unavailable("main") or "").startswith(expected)
    with pytest.raises(SandboxUnavailable, match="add an AppArmor profile"):
        await sandboxes.wrap(MAIN, ["true"], workdir=None, env={})

    hide_every_bubblewrap(monkeypatch)
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        await make_sandboxes(tmp_path / "state").wrap(MAIN, ["true"], workdir=None, env={})


@pytest.mark.requirement("B1", "AT6", "AT7")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"binds": ["/run/docker.sock:/run/docker.sock"]}, "the directory '/run/docker.sock' of 'binds'"),
        ({"binds": ["{state}/..:/data"]}, "of 'binds' may not be shown to a sandbox"),
        ({"binds": ["/srv:/usr/srv"]}, "'/usr/srv' is not a place for a bind"),
        ({"workspaceRoot": "/etc/sandboxes"}, "the directory '/etc/sandboxes' of 'workspaceRoot'"),
        ({"workspace": "{state}"}, "of 'workspace' may not be shown"),
    ],
)
async def test_directories_that_no_sandbox_may_show_are_told_before_a_command_needs_them(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    written = json.loads(json.dumps(settings).replace("{state}", str(tmp_path / "state")))
    work = written.pop("workspace", None)
    config = make_agents_config(
        agents={"defaults": {"sandbox": written, **({"workspace": work} if work else {})}}
    )
    sandboxes = Sandboxes(config, tmp_path / "state")
    status = await sandboxes.find_status("main")
    assert status.backend is None
    assert reason in (sandboxes.explain_unavailable("main") or "")
    assert not sandboxes.is_attested("main")
    with pytest.raises(SandboxUnavailable):
        await sandboxes.wrap(MAIN, ["true"], workdir=None, env={})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the owner of a directory")
async def test_the_workspace_of_another_user_stays_theirs(tmp_path: Path) -> None:
    work = tmp_path / "project"
    work.mkdir(mode=0o750)
    os.chown(work, 4711, 4711)

    def make(**sandbox: Any) -> Sandboxes:
        return Sandboxes(
            make_agents_config(agents={"defaults": {"workspace": str(work), "sandbox": sandbox}}),
            tmp_path / "state",
        )

    refused = make()
    status = await refused.find_status("main")
    assert "belongs to user 4711, and commands run as user 59321" in status.describe_faults()[0]
    assert "set 'sandbox.user' to 4711" in status.describe_faults()[1]
    with pytest.raises(SandboxUnavailable, match="belongs to user 4711"):
        await refused.wrap(MAIN, ["true"], workdir=None, env={})
    assert await run(make(user=4711), MAIN, "echo x > made; id -u") == "4711\n"
    assert await run(make(mode="all", workspaceAccess="ro"), GROUP, "echo y") == "y\n"
    work.chmod(0o777)  # open to everyone
    assert await run(make(), MAIN, "echo z > of-commands; cat of-commands") == "z\n"
    assert {path.name: path.stat().st_uid for path in (work, *work.iterdir())} == {
        "project": 4711,
        "made": 4711,
        "of-commands": 59321,
    }


async def test_a_workspace_that_sandboxed_sessions_do_not_see_may_hold_the_state(tmp_path: Path) -> None:
    config = make_agents_config(
        agents={
            "defaults": {"workspace": str(tmp_path), "sandbox": {"mode": "all", "workspaceAccess": "none"}}
        }
    )
    sandboxes = Sandboxes(config, tmp_path / "state")
    assert await run(sandboxes, GROUP, "ls /workspace") == ""


async def test_a_bind_that_does_not_exist_is_created_by_no_tool(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    config = make_agents_config(agents={"defaults": {"sandbox": {"binds": [f"{missing}:/data:rw"]}}})
    sandboxes = Sandboxes(config, tmp_path / "state")
    with pytest.raises(NotFound, match="of a bind does not exist"):
        await sandboxes.wrap(MAIN, ["true"], workdir=None, env={})
    async with open_test_store(tmp_path) as store:
        files = WorkspaceFiles(store, SystemClock(), SessionWorkspaceLocator(config, tmp_path / "state"))
        with pytest.raises(NotFound, match="of a bind does not exist"):
            await files.read(MAIN, "/data/file")
    assert not missing.exists()


@pytest.mark.requirement("B1", "AT6")
@pytest.mark.parametrize("security", ["full", "deny"])
async def test_a_model_is_told_why_it_has_no_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, security: str
) -> None:
    hide_every_bubblewrap(monkeypatch)
    agent = ScriptedAgent()
    config = make_agents_config(tools={"exec": {"security": security}})
    async with open_agents_fixture(config, tmp_path, functions={"main": agent}) as agents:
        agents.app.examine_commands()
        await agents.ask("hello")
    (prompt,) = agent.prompts
    assert "exec" not in {tool.name for tool in prompt.tools}
    reason = "You cannot run commands. No sandbox for commands works here (bwrap: the program bwrap is not installed)."
    assert (reason in prompt.instructions) == (security == "full")
    assert ("apt-get install bubblewrap" in prompt.instructions) == (security == "full")


@pytest.mark.requirement("B2", "AT6")
@pytest.mark.parametrize(
    ("mode", "session", "is_offered"),
    [
        ("off", "agent:main:main", True),
        ("all", "agent:main:main", False),
        ("non-main", "agent:main:main", True),
        ("non-main", "agent:main:dm:another", False),
    ],
)
async def test_a_sandboxed_session_is_offered_no_commands_of_this_machine(
    mode: str, session: str, is_offered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_every_bubblewrap(monkeypatch)
    own = {"id": "main", "default": True, "sandbox": {"mode": mode}}
    config = make_agents_config(own, tools={"exec": {"host": "gateway", "security": "full"}})
    async with open_agents_fixture(config, tmp_path) as agents:
        agents.app.examine_commands()
        await agents.ask("say the examination has ended", session)
        offered = (await agents.operations.sessions.act_as(OPERATOR, session)).actor.tools
        assert ("exec" in offered) == is_offered


@pytest.mark.requirement("AT6")
async def test_a_backend_that_breaks_after_its_examination_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.symlink_to("/usr/bin/bwrap")
    monkeypatch.setattr(sandbox_backend, "PROGRAM_DIRECTORIES", (str(program.parent),))
    sandboxes = make_sandboxes(tmp_path / "state")
    assert await run(sandboxes, MAIN, "echo works") == "works\n"
    assert await sandboxes.explain_failed_start(MAIN, "bwrap: printed by the command itself") is None

    program.unlink()
    program.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed: EPERM' >&2; exit 1\n")
    program.chmod(0o755)
    output = await run(sandboxes, MAIN, "echo ran > file")
    assert list((tmp_path / "state" / "workspaces" / "main").iterdir()) == []
    reason = await sandboxes.explain_failed_start(MAIN, output)
    assert "the container forbids namespaces" in (reason or "")
    assert sandboxes.explain_unavailable("main") is not None
    with pytest.raises(SandboxUnavailable, match="seccomp=unconfined"):
        await sandboxes.wrap(MAIN, ["true"], workdir=None, env={})


async def test_a_cancelled_examination_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    sandboxes = make_sandboxes(tmp_path / "state")
    preparing, cancelled, prepared = threading.Event(), threading.Event(), threading.Event()
    prepare = sandboxes._prepare_directories  # pyright: ignore[reportPrivateUsage]

    def prepare_late(*arguments: Any) -> dict[str, str]:
        preparing.set()
        assert cancelled.wait(BOUND_SECONDS)
        try:
            return prepare(*arguments)
        finally:
            prepared.set()

    monkeypatch.setattr(sandboxes, "_prepare_directories", prepare_late)
    probe = asyncio.create_task(sandboxes.probe())
    assert await asyncio.to_thread(preparing.wait, BOUND_SECONDS)
    probe.cancel()
    asyncio.get_running_loop().call_later(0.05, cancelled.set)
    await asyncio.wait_for(asyncio.wait([probe]), BOUND_SECONDS)
    assert await asyncio.to_thread(prepared.wait, BOUND_SECONDS)
    assert probe.cancelled()
    assert list(temporary.iterdir()) == []


@pytest.mark.requirement("B2", "L3")
async def test_a_row_is_sandboxed_only_if_the_sandbox_was_examined_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxed = {"sandbox": {"mode": "non-main"}}
    group, main = GROUP.session_key or "", MAIN.session_key or ""

    async def find_sandboxed(agents: AgentsFixture) -> list[str]:
        listed = await agents.use("sessions_list", main)
        return [row["key"] for row in listed["sessions"] if row.get("sandboxed")]

    config = make_agents_config({"id": "main", "default": True, **boxed})
    async with open_agents_fixture(config, tmp_path / "state") as agents:
        await agents.open_sessions(main, group)
        assert await find_sandboxed(agents) == []  # not examined
        await agents.use("sessions_spawn", main, task="say .", sandbox="require")
        await agents.wait_until_idle()
        found = await find_sandboxed(agents)
        assert group in found
        assert main not in found
        assert len(found) == 2
        assert "sandboxed" in (await agents.use("session_status", group))["statusText"]

    hide_every_bubblewrap(monkeypatch)
    async with open_agents_fixture(config, tmp_path / "state") as agents:
        said = await agents.use("sessions_spawn", main, task="say .", sandbox="require")
        assert said["reason"] == "sandbox"
        assert await find_sandboxed(agents) == []


def list_tree(directory: Path) -> dict[str, str]:
    return {str(path): path.read_text() if path.is_file() else "" for path in directory.rglob("*")}


@pytest.mark.requirement("AT11")
async def test_a_command_that_swaps_links_leads_no_file_tool_and_no_command_outside(
    tmp_path: Path, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    """Of file tools, attachments of sub-agents and commands, some succeed, some are refused, and none leads outside."""
    seconds = int(pytestconfig.getoption("--link-swap-seconds") or 0)
    secret = tmp_path / "secret"
    (secret / "6f0c").mkdir(parents=True)
    for name in ("f", "6f0c/f"):
        (secret / name).write_text("canary-secret")
    before = list_tree(secret)
    config = make_agents_config()
    state = tmp_path / "state"
    root = state / "workspaces" / "main"
    sandboxes = Sandboxes(config, state)
    swaps = "\n".join(
        f"mv -T {place} aside && ln -sT {secret} {place}; rm -f {place}; mv -T aside {place} || rm -rf aside"
        for place in ("d", "subagents", "subagents/6f0c")
    )
    swap = f"mkdir -p d subagents/6f0c; echo mine > d/f\nwhile :; do\n{swaps}\ndone 2> /dev/null"
    async with open_test_store(tmp_path) as store:

        async def create(tx: Tx) -> None:
            await session_rows.create_session(tx, keys.parse(MAIN.session_key or ""), 1, NewSession())

        await store.tx(create)
        files = WorkspaceFiles(store, SystemClock(), SessionWorkspaceLocator(config, state))
        script = f"timeout {seconds} sh -c '{swap}'"
        adversary = asyncio.create_task(run(sandboxes, MAIN, script, seconds=seconds + BOUND_SECONDS))
        seen: dict[str, list[str]] = {}
        for number in itertools.count():
            if adversary.done():
                break
            patch = f"*** Begin Patch\n*** Add File: d/added-{number}\n+by a patch\n*** End Patch"
            attach = partial(attachments.write, root, f"{number}", [("file", b"x")], below="subagents/6f0c")
            works: dict[str, Callable[[], Awaitable[object]]] = {
                "read": partial(files.read, MAIN, "d/f"),
                "write": partial(files.write, MAIN, f"call-{number}", "d/f", f"by a tool {number}"),
                "create": partial(files.write, MAIN, f"new-{number}", f"d/new-{number}", "by a tool"),
                "edit": partial(files.edit, MAIN, f"edit-{number}", "d/f", "a tool", "one tool"),
                "patch": partial(files.apply_patch, MAIN, f"patch-{number}", patch),
                "attach": partial(asyncio.to_thread, attach),
            }
            if number % 20 == 0:  # it takes as long as hundreds of the others
                works["command"] = partial(run, sandboxes, MAIN, "cat d/f; echo command > d/f")
            for name, work in works.items():
                try:
                    seen.setdefault(name, []).append(f"done {await work()}")
                except AntiphonError as error:
                    seen.setdefault(name, []).append(str(error))
        await adversary
    for name, texts in seen.items():
        succeeded = sum(text.startswith("done ") for text in texts)
        record_property(name, f"{succeeded} of {len(texts)} succeeded")
        assert not any("canary-secret" in text for text in texts)
        assert succeeded, name
    assert any(not text.startswith("done ") for texts in seen.values() for text in texts)
    assert list_tree(secret) == before
