"""What a turn with commands and file tools must have come to, however often its processes were killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from antiphon.workspace.keeper.job_directory import load_process_id
from antiphon.workspace.keeper.processes import find_job_processes
from support.planned_work import BACK, BACK_EXIT_CODE, FILES, FRONT, FRONT_EXIT_CODE
from support.store_snapshot import Call, StoreSnapshot

ENDS = {FRONT: (FRONT_EXIT_CODE, "out"), BACK: (BACK_EXIT_CODE, "back out")}
Reading = Literal["ended", "running", "interrupted", "not started", "something else"]


def find_work_problems(state_dir: Path, kills: Sequence[int | str]) -> list[str]:
    """Return what is wrong, as sentences."""
    is_keeper_killed = any(str(kill).startswith(("keeper", "both")) for kill in kills)
    snapshot = StoreSnapshot(state_dir)
    run = snapshot.run("only")
    if run is None or (run["state"], run["reply"]) != ("ok", "done only"):
        return [f"the turn ended as {run and run['state']!r}, {run and run['reply']!r}"]
    workspace = state_dir / "workspaces" / "main"
    wrong = _find_survivors(state_dir)
    for call in snapshot.calls(run):
        if call.interrupted or "abort" in call.answer:
            wrong.append(f"{call.name} reads {call.answer!r}")
        if call.name == "exec":
            wrong += _check_command(snapshot, workspace, call, is_keeper_killed=is_keeper_killed)
        elif call.failed or not call.answer.startswith("Wrote "):
            wrong.append(f"{call.name} reads {call.answer!r}")
    wrong += _check_files(workspace)
    states = sorted(command["state"] for command in snapshot.commands)
    if len(states) != 2 or not set(states) <= {"ended", "failed", "lost"}:
        wrong.append(f"the commands are {states}")
    return wrong


def _check_command(
    snapshot: StoreSnapshot, workspace: Path, call: Call, *, is_keeper_killed: bool
) -> list[str]:
    """A command ran as often as its result says, and its end is told exactly once."""
    name = BACK if call.arguments.get("background") else FRONT
    effects = (workspace / name).read_text() if (workspace / name).exists() else ""
    told, reading = [call.answer], _read_result(name, call.answer)
    if name == BACK:
        wakes = [row for row in snapshot.runs if row["id"].startswith("wake:exec:")]
        told += [json.loads(row["input"])["content"] for row in wakes]
        if len(wakes) != (reading == "running"):
            return [f"{name} reads {call.answer!r}, and its end is told {len(wakes)} times"]
        if wakes:
            opening, _, rest = told[-1].partition(" has ended. ")
            reading = (
                _read_result(name, rest) if opening.startswith("The background command") else "something else"
            )
    possible: dict[Reading, list[str]] = {"ended": ["once\n"], "not started": [""]}
    if is_keeper_killed:
        possible["interrupted"] = ["", "once\n"]
    return (
        []
        if effects in possible.get(reading, [])
        else [f"{name} reads {told} and had the effects {effects!r}"]
    )


def _read_result(name: str, text: str) -> Reading:
    code, output = ENDS[name]
    if text.startswith("Interrupted: ") and "It may have had effects; check before repeating it." in text:
        return "interrupted"
    if text.startswith(f"Exit code {code} after ") and text.rstrip("\n").endswith(f"\n\n{output}"):
        return "ended"
    if text.startswith("Running for ") and "sessionId" in text:
        return "running"
    return "not started" if text.startswith("Not started: ") else "something else"


def _check_files(workspace: Path) -> list[str]:
    found = {
        path.relative_to(workspace).as_posix(): path.read_text()
        for path in workspace.rglob("*")
        if path.is_file() and path.name not in (FRONT, BACK)
    }
    return [] if found == FILES else [f"the workspace holds {found}"]


def _find_survivors(state_dir: Path) -> list[str]:
    """Processes of commands: those that work in the workspace, and those with the mark of a job."""
    jobs = (state_dir / "keeper" / "jobs").glob("*")
    found = {pid for job in jobs for pid in find_job_processes(load_process_id(job), None, {})}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(state_dir / "workspaces"):
                found.add(int(process.name))
        except OSError:
            pass
    return [f"the processes {sorted(found)} are left"] if found else []
