"""What the conversations and sub-agents of a plan must have come to: the checker's part for the end of a play."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from chaos.scenario import Planned
from support import invariants
from support.planned_exchanges import SKIP, UNKEYED, WOKEN, YIELDED, PlannedSend, PlannedSpawn
from support.store_snapshot import Call, Row, StoreSnapshot


def missed(snapshot: StoreSnapshot, plan: Sequence[Planned]) -> list[str]:
    wrong: list[str] = []
    for planned in plan:
        run = snapshot.run(planned.key)
        if run is None:
            continue  # which the checker of runs says
        wrong += _sends(snapshot, run, planned.sends)
        wrong += _spawns(snapshot, run, planned.spawns)
        if planned.wakes is not None:
            wrong += _wakes(snapshot, run["session"], planned.wakes)
    return wrong + _nothing_else(snapshot, plan)


def _every(spawns: Iterable[PlannedSpawn]) -> list[PlannedSpawn]:
    return [each for spawned in spawns for each in (spawned, *_every(spawned.spawns))]


def _nothing_else(snapshot: StoreSnapshot, plan: Sequence[Planned]) -> list[str]:
    """As many of everything as the plan leads to, and nothing in the middle of its way."""
    sends = {sent for planned in plan for sent in planned.sends}  # the same one under the same key is one
    spawns = _every(spawned for planned in plan for spawned in planned.spawns)
    parcels = sum(sent.body is not None for sent in sends)
    parcels += sum(spawned.announced == "delivered" for spawned in spawns)
    wanted = {
        "exchanges": len(sends),
        "tasks": len(spawns),
        "deliveries": parcels,
        "wakes": sum(planned.wakes or 0 for planned in plan) + sum(spawned.wakes for spawned in spawns),
    }
    found = {
        "exchanges": len(snapshot.exchanges),
        "tasks": len(snapshot.tasks),
        "deliveries": len(snapshot.deliveries),
        "wakes": sum(
            run["origin"] == "wake" and not run["id"].startswith("wake:exec:") for run in snapshot.runs
        ),
    }
    wrong = [] if found == wanted else [f"there are {found}, not {wanted}"]
    wrong += [
        f"{row['id']} is not settled"
        for row in snapshot.exchanges + snapshot.tasks
        if row["phase"] != "settled"
    ]
    wrong += [
        f"{session['key']} still waits" for session in snapshot.sessions if session["yielded"] is not None
    ]
    return wrong


def _results(snapshot: StoreSnapshot, run: Row, tool: str) -> list[Call]:
    return [call for call in snapshot.calls(run) if call.name == tool]


def _sends(snapshot: StoreSnapshot, run: Row, sends: Sequence[PlannedSend]) -> list[str]:
    calls = _results(snapshot, run, "sessions_send")
    if len(calls) != len(sends):
        return [f"{run['id']} has sent {len(calls)} messages, not {len(sends)}"]
    return [
        line for call, sent in zip(calls, sends, strict=True) for line in _sent(snapshot, run, call, sent)
    ]


def _sent(snapshot: StoreSnapshot, run: Row, call: Call, sent: PlannedSend) -> list[str]:
    answer = json.loads(call.answer)
    exchange = next((row for row in snapshot.exchanges if row["id"] == answer.get("runId")), None)
    if exchange is None:
        return [f"{call.key} was answered {answer}, and there is no exchange"]
    wrong = _answered(call, answer, sent)
    said = _replies(snapshot, exchange)
    if said != list(sent.replies):
        wrong.append(f"in {exchange['id']} was said {said}, not {sent.replies}")
    spoken = [reply for reply in sent.replies if reply != SKIP]
    ends = {sent.announced} | ({"ambiguous"} if f":{UNKEYED}:" in sent.to else set[str]())
    facts = _facts(exchange, "message", "requester", "target_key", "first_reply", "latest_reply")
    wanted = [sent.message, run["session"], sent.to, *([spoken[0], spoken[-1]] if spoken else [None, None])]
    if facts != wanted or exchange["announced"] not in ends:
        wrong.append(
            f"exchange {exchange['id']} ended as {facts}, {exchange['announced']}, not {wanted}, {ends}"
        )
    return wrong + _announced(snapshot, exchange, sent)


def _answered(call: Call, answer: dict[str, Any], sent: PlannedSend) -> list[str]:
    reply = sent.replies[0] if sent.status == "ok" else None
    if (answer["status"], answer.get("reply")) != (sent.status, reply) or call.interrupted:
        return [f"{call.key} was answered {answer}, not {sent.status} {reply!r}"]
    return []


def _replies(snapshot: StoreSnapshot, exchange: Row) -> list[str]:
    ids = [exchange["id"], *(f"turn:{exchange['id']}:{turn}" for turn in range(1, exchange["turn"] + 1))]
    return [run["reply"] for id in ids if (run := snapshot.run(id)) and run["state"] == "ok"]


def _announced(snapshot: StoreSnapshot, exchange: Row, sent: PlannedSend) -> list[str]:
    delivery = snapshot.delivery(f"exchange:{exchange['id']}")
    body, state = (delivery["body"], delivery["state"]) if delivery else (None, None)
    step = snapshot.run(f"announce:{exchange['id']}")
    if body != sent.body or (step is not None and sent.body is not None and step["reply"] != body):
        return [f"of {exchange['id']} was announced {body!r}, not {sent.body!r}"]
    if state is not None and state != exchange["announced"]:
        return [f"the announcement of {exchange['id']} is {state}"]
    return []


def _spawns(snapshot: StoreSnapshot, run: Row, spawns: Sequence[PlannedSpawn]) -> list[str]:
    calls = _results(snapshot, run, "sessions_spawn")
    if len(calls) != len(spawns):
        return [f"{run['id']} has spawned {len(calls)}, not {len(spawns)}"]
    return [
        line for call, one in zip(calls, spawns, strict=True) for line in _spawned(snapshot, run, call, one)
    ]


def _spawned(snapshot: StoreSnapshot, run: Row, call: Call, spawned: PlannedSpawn) -> list[str]:
    answer = json.loads(call.answer)
    task = next((task for task in snapshot.tasks if task["id"] == answer.get("runId")), None)
    if task is None or answer["status"] != "accepted":
        return [f"{call.key} was answered {answer}, and there is no task"]
    facts = _facts(task, "task", "requester", "agent_id", "outcome", "result", "announced")
    result = _last_word(snapshot, task["child"]) if spawned.wakes else spawned.result
    wanted = [spawned.task, run["session"], spawned.agent, spawned.outcome, result, spawned.announced]
    wrong = [] if facts == wanted else [f"task {task['id']} ended as {facts}, not {wanted}"]
    wrong += _reported(snapshot, task, spawned)
    if spawned.cleanup == "delete":
        return wrong + _deleted(snapshot, task)
    first = snapshot.run(task["id"])
    assert first is not None  # by the laws
    wrong += _spawns(snapshot, first, spawned.spawns)
    if spawned.wakes and first["reply"] != YIELDED:
        wrong.append(f"{task['id']} was to wait, and said {first['reply']!r}")
    return wrong + _wakes(snapshot, task["child"], spawned.wakes)


def _last_word(snapshot: StoreSnapshot, session: int) -> str | None:
    """Of who waited for others: what it said when it was woken."""
    woken = [run for run in snapshot.runs if run["session"] == session and run["origin"] == "wake"]
    return woken[-1]["reply"] if woken else None


def _reported(snapshot: StoreSnapshot, task: Row, spawned: PlannedSpawn) -> list[str]:
    """Once in the requester's transcript, and in its chat in the same words."""
    found = [_text(message["json"]["content"]) for message in invariants.list_notes(snapshot, task)]
    if spawned.body is None:
        return [f"of {task['id']} was told {found}"] if found else []
    if len(found) != 1 or not found[0].startswith(spawned.body):
        return [f"of {task['id']} was told {found}, not {spawned.body!r}"]
    delivery = snapshot.delivery(f"task:{task['id']}")
    if delivery is not None and f"{delivery['body']}\n\n{delivery['stats']}" != found[0]:
        return [f"of {task['id']} was told {found[0]!r} here and {delivery['body']!r} there"]
    if json.loads(task["report"])["status"] != spawned.outcome:
        return [f"{task['id']} has the report {task['report']}"]
    return []


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


def _deleted(snapshot: StoreSnapshot, task: Row) -> list[str]:
    """The child is gone; what it cost stays."""
    paid = any(line["session_key"] == task["child_key"] for line in snapshot.usage)
    return (
        []
        if invariants.is_deleted_child(task) and paid
        else [f"{task['id']} was not cleaned up as it was asked for"]
    )


def _wakes(snapshot: StoreSnapshot, session: int, wanted: int) -> list[str]:
    """Woken as often as it waited, and after everything it was woken for."""
    woken = [run for run in snapshot.runs if run["session"] == session and run["origin"] == "wake"]
    if len(woken) != wanted:
        return [f"{snapshot.key_of(session)} was woken by {[run['id'] for run in woken]}, not {wanted} times"]
    told = [run for run in snapshot.runs if run["session"] == session and run["id"].startswith("note:")]
    late = [run["id"] for run in woken if any(note["first_seq"] > run["first_seq"] for note in told)]
    mute = [run["id"] for run in woken if run["id"].startswith("wake:") and run["reply"] != WOKEN]
    return [f"{id} came before a report" for id in late] + [f"{id} did not answer" for id in mute]


def _facts(row: Row, *names: str) -> list[Any]:
    return [row[name] for name in names]
