"""Invariants between runs, exchanges, tasks and deliveries.

Like `verify`, it reads rows, returns violations, and does not use Antiphon.
"""

from __future__ import annotations

import json
from collections import Counter

from support.planned_exchanges import KEYED, UNKEYED
from support.store_snapshot import Row, StoreSnapshot

UNDER_WAY = {"queued", "running"}
# Origins of runs that are part of something.
STEPS = {"sessions_send", "reply-back", "announce", "sessions_spawn"}
POSTED = {"pending", "delivered", "blocked", "ambiguous", "expired", "dead"}  # outcomes with a delivery
# Ends of an exchange without an announce step.
UNANNOUNCED = {
    None, "no_reply", "run_failed", "run_stopped", "run_timed_out", "run_interrupted", "run_incomplete", "none",
    "target_gone",
}  # fmt: skip
SILENT = {None, "none", "skipped"}  # outcomes of a task without a report


def find_violations(snapshot: StoreSnapshot) -> list[str]:
    wrong: list[str] = []
    for exchange in snapshot.exchanges:
        wrong += _steps(snapshot, exchange)
        wrong += _conversation(snapshot, exchange)
        wrong += _announcement(snapshot, exchange)
    for task in snapshot.tasks:
        wrong += _child(snapshot, task)
        wrong += _work(snapshot, task)
        wrong += _report(snapshot, task)
    for delivery in snapshot.deliveries:
        wrong += _delivery(snapshot, delivery)
    return wrong + _orphans(snapshot) + _chains(snapshot) + _posts(snapshot)


def _moving(runs: list[Row]) -> list[str]:
    return [run["id"] for run in runs if run["state"] in UNDER_WAY]


def _steps(snapshot: StoreSnapshot, exchange: Row) -> list[str]:
    """An exchange has one run per step, and only the last one can be unfinished."""
    id, runs = exchange["id"], [run for run in snapshot.runs if run["exchange"] == exchange["n"]]
    expected_runs = [id, *(f"turn:{id}:{turn}" for turn in range(1, exchange["turn"] + 1))]
    announced = exchange["phase"] == "settled" and exchange["announced"] not in UNANNOUNCED
    if exchange["phase"] == "announce" or announced:
        expected_runs.append(f"announce:{id}")
    if [run["id"] for run in runs] != expected_runs:
        return [f"exchange {id} has the runs {[run['id'] for run in runs]}, not {expected_runs}"]
    settled = exchange["phase"] == "settled"
    if _moving(runs) != ([] if settled else [exchange["current"]]):
        return [f"exchange {id} is {exchange['phase']} and at {_moving(runs)}"]
    if settled != (exchange["settled_at"] is not None):
        return [f"exchange {id} is {exchange['phase']} since {exchange['settled_at']}"]
    return []


def _conversation(snapshot: StoreSnapshot, exchange: Row) -> list[str]:
    """Target, requester, target …: each receives the other's reply unchanged."""
    wrong: list[str] = []
    expected = exchange["message"]
    for turn in range(exchange["turn"] + 1):
        run = snapshot.run(f"turn:{exchange['id']}:{turn}" if turn else exchange["id"])
        if run is None:
            break  # reported by `_steps`
        given = json.loads(run["input"])
        listener, speaker = ("requester", "target") if turn % 2 else ("target", "requester")
        facts = (run["session"], given["content"], given["provenance"].get("sourceSessionKey"))
        if facts != (exchange[listener], expected, exchange[f"{speaker}_key"]):
            wrong.append(f"turn {turn} of exchange {exchange['id']} ended as {facts} after {expected!r}")
        if (run["chain"], run["hop"]) != (exchange["chain"], exchange["hop"] + turn):
            wrong.append(f"turn {turn} of exchange {exchange['id']} is hop {run['hop']} of {run['chain']}")
        expected = run["reply"]
    return wrong


def _announcement(snapshot: StoreSnapshot, exchange: Row) -> list[str]:
    posted = snapshot.delivery(f"exchange:{exchange['id']}") is not None
    if posted != (exchange["announced"] in POSTED):
        return [f"exchange {exchange['id']} is {exchange['announced']}, and its delivery is {posted}"]
    return []


def is_deleted_child(task: Row) -> bool:
    """Return whether a child was deleted as requested."""
    return task["archived_at"] is not None and _to_delete(task)


def _to_delete(task: Row) -> bool:
    """Return whether a child is due for deletion; it is deleted in one commit and recorded in a later one."""
    return task["archive_at"] is not None and json.loads(task["options"]).get("cleanup") == "delete"


def _deleted(snapshot: StoreSnapshot, task: Row) -> bool:
    return _to_delete(task) and snapshot.session(task["child_key"]) is None


def _child(snapshot: StoreSnapshot, task: Row) -> list[str]:
    """A task has its session and its run, or neither if it was deleted."""
    child = snapshot.session(task["child_key"])
    runs = [run for run in snapshot.runs if run["session"] == task["child"]]
    if is_deleted_child(task):
        left = child or runs
        return [f"something of the deleted child of {task['id']} is left"] if left else []
    if _deleted(snapshot, task):
        return [f"the runs of the deleted child of {task['id']} are left"] if runs else []
    if child is None or child["id"] != task["child"] or child["spawned_by"] != task["requester"]:
        return [f"task {task['id']} has no session"]
    return [] if snapshot.run(task["id"]) in runs else [f"task {task['id']} has no run in its session"]


def _work(snapshot: StoreSnapshot, task: Row) -> list[str]:
    """The runs of a task are those of its child, in order, with at most one announce step at the end."""
    if _deleted(snapshot, task):
        return []
    id, phase = task["id"], task["phase"]
    runs = [run for run in snapshot.runs if run["task"] == task["n"]]
    ids = [run["id"] for run in runs]
    announcing = phase == "announcing" or (
        phase == "settled" and task["outcome"] == "ok" and task["announced"] != "none"
    )
    woken = [run["id"] for run in runs if run["origin"] == "wake"]
    expected_runs = [id, *woken, *[f"announce:{id}"] * announcing]
    if ids != expected_runs:
        return [f"task {id} is {phase} and has the runs {ids}, not {expected_runs}"]
    if phase == "waiting":
        below = [t for t in snapshot.tasks if t["requester"] == task["child"] and t["phase"] != "settled"]
        child = snapshot.session(task["child_key"])
        if not below or child is None or child["yielded"] is None:
            return [f"task {id} waits for nothing"]
    # A run that yields may have a successor before it has ended.
    moving = _moving(runs)[-1:]
    if moving != ([] if phase in {"settled", "waiting"} else [task["current"]]):
        return [f"task {id} is {phase} and at {moving}"]
    return []


def _report(snapshot: StoreSnapshot, task: Row) -> list[str]:
    """A settled task has a note in the requester's lane, and a delivery if it is announced in a chat."""
    id = task["id"]
    settled = task["phase"] == "settled"
    wrong: list[str] = []
    note = snapshot.run(f"note:{id}")
    if (note is not None) != (settled and task["announced"] not in SILENT):
        wrong.append(f"task {id} is {task['phase']}, {task['announced']}, and its note is {note is not None}")
    if note is not None and note["session"] != task["requester"]:
        wrong.append(f"the note of {id} is in another session")
    if note is not None and note["state"] not in UNDER_WAY and len(list_notes(snapshot, task)) != 1:
        wrong.append(f"the note of {id} is {len(list_notes(snapshot, task))} times in the transcript")
    posted = snapshot.delivery(f"task:{id}") is not None
    if posted != (settled and task["announced"] not in SILENT | {"parent"}):
        wrong.append(f"task {id} is {task['phase']}, {task['announced']}, and its delivery is {posted}")
    return wrong


def list_notes(snapshot: StoreSnapshot, task: Row) -> list[Row]:
    """Return the entries that report this task to its requester."""
    return [
        message
        for message in snapshot.messages
        if (origin := message["json"].get("provenance"))
        and origin["kind"] == "subagent_result"
        and origin["sourceSessionKey"] == task["child_key"]
    ]


def _delivery(snapshot: StoreSnapshot, delivery: Row) -> list[str]:
    """A delivery belongs to an exchange or a task with the same outcome."""
    wrong: list[str] = []
    kind, _, id = delivery["key"].partition(":")
    owners = {"exchange": snapshot.exchanges, "task": snapshot.tasks}.get(kind, [])
    owner = next((owner for owner in owners if owner["id"] == id), None)
    if owner is None or owner["n"] != delivery[kind]:
        return [f"delivery {delivery['key']} has no owner"]
    state = "pending" if delivery["state"] == "sending" else delivery["state"]
    if owner["announced"] != state:
        wrong.append(f"delivery {delivery['key']} is {delivery['state']}, its {kind} {owner['announced']}")
    entry_run = snapshot.run(delivery["entry_run"])
    if entry_run is None or entry_run["session"] != delivery["session"]:
        wrong.append(f"the text of {delivery['key']} is in no transcript")
    elif state != "pending" and entry_run["state"] != "ok":
        wrong.append(f"{delivery['key']} is {state} before its text is in the transcript")
    return wrong


def _orphans(snapshot: StoreSnapshot) -> list[str]:
    children = {task["child_key"] for task in snapshot.tasks}
    known = {("exchange", row["n"]) for row in snapshot.exchanges} | {
        ("task", row["n"]) for row in snapshot.tasks
    }
    wrong = [
        f"{session['key']} has no task"
        for session in snapshot.sessions
        if ":subagent:" in session["key"] and session["key"] not in children
    ]
    for run in snapshot.runs:
        if run["origin"] in STEPS and run["exchange"] is None and run["task"] is None:
            wrong.append(f"{run['id']} is a step of nothing")
        for kind in "exchange", "task":
            if run[kind] is not None and (kind, run[kind]) not in known:
                wrong.append(f"{run['id']} is of no {kind}")
    reported = {f"note:{task['id']}" for task in snapshot.tasks}
    wrong += [
        f"{run['id']} reports no task"
        for run in snapshot.runs
        if run["origin"] == "note" and run["id"] not in reported
    ]
    return wrong


def _chains(snapshot: StoreSnapshot) -> list[str]:
    """A chain counts its runs, including those of deleted children."""
    counted = Counter(run["chain"] for run in snapshot.runs if run["chain"] is not None)
    for task in (task for task in snapshot.tasks if _deleted(snapshot, task)):
        counted[task["chain"]] += 2 if task["outcome"] == "ok" and task["announced"] != "none" else 1
    recorded = {chain["id"]: chain["runs"] for chain in snapshot.chains}
    return (
        [] if recorded == dict(counted) else [f"the chains record {recorded}, but there are {dict(counted)}"]
    )


def _posts(snapshot: StoreSnapshot) -> list[str]:
    """External posts of each part: once if delivered, at most once if ambiguous, never before an attempt."""
    wrong: list[str] = []
    for channel in KEYED, UNKEYED:
        for delivery in snapshot.deliveries:
            if json.loads(delivery["destination"]).get("channel") != channel:
                continue
            most = 0 if delivery["attempts"] == 0 else 1
            for line in snapshot.lines_of(delivery) or [delivery["key"]]:
                times = snapshot.posts[channel][line]
                if not (delivery["state"] == "delivered") <= times <= most:
                    wrong.append(f"{line} is {delivery['state']} and was posted {times} times")
            if delivery["state"] == "delivered":
                wrong += [
                    f"{delivery['key']} is delivered, but not its part {part['n']}"
                    for part in snapshot.parts
                    if part["delivery"] == delivery["n"] and part["sent_at"] is None
                ]
        known = {line for delivery in snapshot.deliveries for line in snapshot.lines_of(delivery)}
        wrong += [f"{key} was posted without a delivery" for key in snapshot.posts[channel].keys() - known]
    return wrong
