"""The independent checker of the crash suite: raw rows and JSON, nothing of Antiphon.

`always` holds for the store at every moment, so also right after a kill; `finally_` holds when a process has
worked everything off. Both return what is wrong, as sentences; an empty list is a proof of nothing but good luck
until a broken engine has been shown to fail it (see `test_verify`). What holds between sessions is in `laws` and
`outcomes`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from chaos import outcomes
from chaos.scenario import NOTE, TELL, Planned
from support import invariants
from support.databases import chosen
from support.store_snapshot import Call, Row, StoreSnapshot

APART = 500  # milliseconds by which the clocks of replicas may differ, as they read that of the database
FOLLOWING = {"sessions_send", "reply-back", "announce", "sessions_spawn", "note", "wake"}


def always(state_dir: Path, accepted: Iterable[str]) -> list[str]:
    """What must hold at any time. `accepted` are the keys a caller was told of."""
    snapshot = StoreSnapshot(state_dir)
    present = {run["id"] for run in snapshot.runs}
    wrong = [f"{key} was accepted and is not in the store" for key in accepted if key not in present]
    if snapshot.integrity != "ok":
        wrong.append(f"the file is damaged: {snapshot.integrity}")
    active = Counter(run["session"] for run in snapshot.runs if run["state"] == "running")
    wrong += [f"session {session} has {count} active runs" for session, count in active.items() if count > 1]
    wrong += [f"{line} was noted {count} times" for line, count in snapshot.notes.items() if count > 1]
    wrong += _numbers(snapshot)
    for run in snapshot.runs:
        wrong += _beginning(snapshot, run)
        wrong += _known_results(snapshot, run)
        wrong += _whole(snapshot, run)
    return wrong + invariants.find_violations(snapshot)


def _whole(snapshot: StoreSnapshot, run: Row) -> list[str]:
    """A run's end, its final answer and what was paid for it are there together, or none of them is."""
    if run["origin"] == "note":
        return _put(snapshot, run)
    if run["state"] not in {"queued", "running"}:
        return [*_ending(snapshot, run), *_charged(snapshot, run)]
    answered = _finals(snapshot.entries(run))
    return [f"{run['id']} has its answer and is still {run['state']}"] if answered else []


def _put(snapshot: StoreSnapshot, run: Row) -> list[str]:
    """A run that is nothing but an entry: it is there when the run has ended, word for word."""
    bodies = [entry["body"] for entry in snapshot.entries(run)]
    wanted = [run["input"]] if run["state"] == "ok" else []
    return [] if bodies == wanted else [f"{run['id']} is {run['state']} and has put {bodies}"]


def _numbers(snapshot: StoreSnapshot) -> list[str]:
    """`seq` is 1..n in every transcript, and the session says how far it is."""
    wrong: list[str] = []
    for session in snapshot.sessions:
        seqs = [m["seq"] for m in snapshot.messages if m["transcript"] == session["transcript"]]
        if seqs != list(range(1, len(seqs) + 1)):
            wrong.append(f"{session['key']} is numbered {seqs}")
        if session["last_seq"] != len(seqs):
            wrong.append(f"{session['key']} has {len(seqs)} entries and says {session['last_seq']}")
    transcripts = {session["transcript"] for session in snapshot.sessions}
    wrong += [
        f"entry {m['entry']} is in no session"
        for m in snapshot.messages
        if m["transcript"] not in transcripts
    ]
    return wrong


def _beginning(snapshot: StoreSnapshot, run: Row) -> list[str]:
    """A run that has begun has its message in the transcript, once, first and word for word."""
    if run["origin"] == "note":
        return []
    entries = snapshot.entries(run)
    asked = [entry for entry in entries if entry["role"] == "user"]
    if run["first_seq"] is None:
        return [f"{run['id']} has not begun and has entries"] if entries else []
    if len(asked) != 1 or asked[0] is not entries[0] or asked[0]["seq"] != run["first_seq"]:
        return [f"{run['id']} has its message at {[entry['seq'] for entry in asked]}"]
    if asked[0]["body"] != run["input"]:
        return [f"the message of {run['id']} was changed"]
    return []


def _known_results(snapshot: StoreSnapshot, run: Row) -> list[str]:
    """Every result follows the call it belongs to; no call has two."""
    wrong: list[str] = []
    open_calls: set[str] = set()
    for entry in snapshot.entries(run):
        body = entry["json"]
        if entry["role"] == "assistant":
            if open_calls:
                wrong.append(f"{run['id']} went on at {entry['seq']} without the results of {open_calls}")
            open_calls = {block["id"] for block in body["content"] if block["type"] == "toolCall"}
        elif entry["role"] == "toolResult":
            if body["toolCallId"] not in open_calls:
                wrong.append(f"{run['id']} has a result for {body['toolCallId']} that no call waits for")
            open_calls.discard(body["toolCallId"])
    if open_calls and run["state"] not in {"queued", "running"}:
        wrong.append(f"{run['id']} ended without the results of {open_calls}")
    return wrong


def finally_(state_dir: Path, plan: Sequence[Planned]) -> list[str]:
    """What must hold when a process has ended in good order after working everything off."""
    snapshot = StoreSnapshot(state_dir)
    wrong = always(state_dir, [planned.key for planned in plan])
    wrong += [
        f"{run['id']} is still {run['state']}"
        for run in snapshot.runs
        if run["state"] in {"queued", "running"}
    ]
    wrong += [
        f"{session['key']} is {session['state']}"
        for session in snapshot.sessions
        if session["state"] != "idle"
    ]
    wrong += [f"owner {owner['id']} is still there" for owner in snapshot.owners]
    if wrong:
        return wrong
    told: dict[str, Call] = {}
    for planned in plan:
        wrong += _outcome(snapshot, planned)
    for run in snapshot.runs:
        calls = snapshot.calls(run)
        told |= {call.key: call for call in calls if call.name == TELL}
        wrong += _noted(snapshot, [call for call in calls if call.name == NOTE])
    wrong += _told(snapshot, told, plan)
    wrong += outcomes.missed(snapshot, plan)
    noted = {call.key for run in snapshot.runs for call in snapshot.calls(run) if call.name == NOTE}
    wrong += [
        f"{line} was noted, and no transcript knows of it" for line in snapshot.notes if line not in noted
    ]
    wrong += _order(snapshot)
    wrong += out_of_turn(snapshot, [planned.key for planned in plan])
    return wrong


def _outcome(snapshot: StoreSnapshot, planned: Planned) -> list[str]:
    found = [run for run in snapshot.runs if run["id"] == planned.key]
    if len(found) != 1:
        return [f"{planned.key} has {len(found)} runs"]
    run = found[0]
    steps = sum(1 for entry in snapshot.entries(run) if entry["role"] == "assistant")
    facts = (snapshot.key_of(run["session"]), json.loads(run["input"])["content"], run["state"], steps)
    wanted = (planned.session, planned.text, planned.state, planned.steps)
    # The notice of a failure is an entry as well, in the place of the last answer.
    return [] if facts == wanted else [f"{planned.key} ended as {facts}, not {wanted}"]


def _noted(snapshot: StoreSnapshot, calls: Iterable[Call]) -> list[str]:
    """A foreign tool: once if its result says so, at most once if the result says that it is unknown."""
    wrong: list[str] = []
    for call in calls:
        if not call.interrupted and snapshot.notes[call.key] != 1:
            wrong.append(
                f"{call.key} is said to have happened, and happened {snapshot.notes[call.key]} times"
            )
        if call.failed != call.interrupted:
            wrong.append(f"{call.key} failed={call.failed} interrupted={call.interrupted}")
    return wrong


def _told(snapshot: StoreSnapshot, told: dict[str, Call], plan: Sequence[Planned]) -> list[str]:
    """Our own tool: exactly one run for each call, with the words of the call, and no run from anywhere else."""
    wrong = [f"{call.key} was not settled" for call in told.values() if call.failed or call.interrupted]
    planned = {message.key for message in plan}
    for run in snapshot.runs:
        # Runs that follow from others are looked after by `laws` and `outcomes`.
        if run["id"] in planned or run["origin"] in FOLLOWING:
            continue
        call = told.pop(run["id"], None)
        if call is None:
            wrong.append(f"the run {run['id']} was never requested")
            continue
        heard = (snapshot.key_of(run["session"]), json.loads(run["input"])["content"], run["state"])
        if heard != (call.arguments["session"], call.arguments["text"], "ok"):
            wrong.append(f"{run['id']} ended as {heard}")
    return wrong + [f"the effect of {key} is missing" for key in told]


def _finals(entries: Iterable[Row]) -> list[Row]:
    return [
        entry
        for entry in entries
        if entry["role"] == "assistant"
        and all(block["type"] != "toolCall" for block in entry["json"]["content"])
    ]


def _ending(snapshot: StoreSnapshot, run: Row) -> list[str]:
    """One final answer, last in the run's entries, and it is what the run says it answered."""
    entries = snapshot.entries(run)
    finals = _finals(entries)
    if len(finals) != 1 or finals[0] is not entries[-1]:
        return [f"{run['id']} has its final answers at {[entry['seq'] for entry in finals]}"]
    text = "".join(block.get("text", "") for block in finals[0]["json"]["content"])
    if text != (run["reply"] or ""):
        return [f"{run['id']} replied {run['reply']!r}, its transcript says {text!r}"]
    if run["state"] == "error" and finals[0]["json"]["stopReason"] != "error":
        return [f"{run['id']} failed, and its transcript does not say so"]
    return []


def _charged(snapshot: StoreSnapshot, run: Row) -> list[str]:
    """Every answer that cost something is in the ledger once, and nothing else is."""
    usages = [entry["json"].get("usage") for entry in snapshot.entries(run) if entry["role"] == "assistant"]
    said = [(usage["input"], usage["output"]) for usage in usages if usage]
    ledger = [(line["input"], line["output"]) for line in snapshot.usage if line["run_id"] == run["id"]]
    return [] if said == ledger else [f"{run['id']} used {said} and was charged {ledger}"]


def out_of_turn(snapshot: StoreSnapshot, sent: Sequence[str]) -> list[str]:
    """What one sender sent after the other has been answered in that order, although others wrote in between."""
    places = {key: place for place, key in enumerate(sent)}
    wrong: list[str] = []
    for session in snapshot.sessions:
        played = [run["id"] for run in snapshot.lane(session) if run["id"] in places]
        if played != sorted(played, key=lambda id: places[id]):
            wrong.append(f"{session['key']} answered {played}")
    return wrong


def _order(snapshot: StoreSnapshot) -> list[str]:
    """First come, first served, one after the other: the entries of a lane's runs do not interleave."""
    wrong: list[str] = []
    for session in snapshot.sessions:
        lane = snapshot.lane(session)
        for run in lane:
            seqs = [entry["seq"] for entry in snapshot.entries(run)]
            if seqs != list(range(run["first_seq"], run["last_seq"] + 1)):
                wrong.append(f"{run['id']} is spread over {seqs}")
        for earlier, later in pairwise(lane):
            early = later["started_at"] + (APART if chosen.postgres else 0) < earlier["ended_at"]
            if later["first_seq"] != earlier["last_seq"] + 1 or early:
                wrong.append(f"{later['id']} did not wait for {earlier['id']}")
        charged = [line for line in snapshot.usage if line["session_key"] == session["key"]]
        totals = sum(line["input"] for line in charged), sum(line["output"] for line in charged)
        if totals != (session["input_tokens"], session["output_tokens"]):
            wrong.append(f"{session['key']} does not add up to {totals}")
    return wrong
