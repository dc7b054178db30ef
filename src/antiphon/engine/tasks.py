"""A task: what a session has had a sub-agent do, from the spawn to the report and the child's archiving.

    running ──▶ waiting (for what it spawned itself) ──▶ announcing ──▶ settled
       └──────────────────────────────────────────────────────▲

The session, its first run and the task are one commit, and so are the end of a run and what follows from it. The
status is what the runtime knows; a model may word the result but never decides whether there is one. Where the report
goes, in which language and what happens to the child afterwards was put into the row when the task began.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from antiphon import keys
from antiphon.engine import admissions, deliveries, gate, sessions, wording, yields
from antiphon.engine.admissions import NOTE, Accepted, Submission
from antiphon.engine.chains import Link
from antiphon.engine.deliveries import Destination, Parcel
from antiphon.engine.envelopes import SPAWN, Envelope
from antiphon.engine.sessions import Birth
from antiphon.engine.steps import ANNOUNCE, NOTHING, WAKE, Outcome, Sequel, Step, queued
from antiphon.engine.wording import Report, Stats
from antiphon.errors import InvalidInput
from antiphon.messages import INJECTED, Assistant, Provenance, Text, ToolResult, User, decode
from antiphon.store import Row, Tx
from antiphon.store.queries import Queries

SQL = Queries("tasks")
SESSIONS = Queries("sessions")
RUNS = Queries("runs")
KIND = "subagent_result"
MINUTE = 60_000  # milliseconds
ANCESTORS = 16  # levels up which a report looks for somebody who is still there
RESULT_MOST = 100_000  # characters of a result that a report carries

Announce = Literal["channel", "parent", "none"]


class Options(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """How a task ends, decided when it begins."""

    announce: Announce = "channel"
    cleanup: Literal["keep", "delete"] = "keep"
    mode: Literal["run", "session"] = "run"
    locale: Literal["en", "pt"] = "en"
    announce_ms: int = 90_000
    archive_minutes: int = 60
    transcripts: str = ""
    """The directory of transcript files; empty where none are written."""
    workspace: str | None = None
    attachments: str | None = None
    """The folder of its files below the workspace's attachments."""
    retain: bool = False
    """Whether its files stay when it is archived."""
    mount_path: str | None = None
    requester_agent: str | None = None
    """The agent that asked, if it is not the one that the requester's session belongs to."""


class Spawning(msgspec.Struct, frozen=True, kw_only=True):
    """A sub-agent that may be spawned: everything was checked. `id` is the id of its first run as well."""

    id: str
    digest: str
    requester: Row
    child_key: keys.SessionKey
    task: str
    label: str | None
    model: str | None
    thinking: str | None
    deadline_at: int | None
    instructions: str
    sandboxed: bool
    envelope: Envelope
    options: Options
    destination: Destination
    link: Link


def signature(agent_id: str, task: str) -> str:
    """What tasks have in common that are likely to fail for the same reason."""
    return hashlib.sha256(f"{agent_id}\n{' '.join(task.split())}".encode()).hexdigest()[:32]


async def known(tx: Tx, id: str, requester: int, digest: str) -> Row | None:
    """The task that this id already stands for.

    Raises:
        Conflict: it stands for another one, or for one of another requester.
    """
    before = await tx.one(SQL.by_id, id=id)
    if before is not None and (before["requester"], before["digest"]) != (requester, digest):
        raise admissions.used(id)
    return before


async def _free_label(tx: Tx, requester: int, agent_id: str, label: str, now: int) -> None:
    """Free a label for a new sub-agent, by taking it from a sub-agent of the same requester that has reported.

    Raises:
        Conflict: the label belongs to a sub-agent that is at work or another requester's, or to another session.
    """
    holder = await sessions.labelled_by(tx, agent_id, label)
    if holder is None:
        return
    task = await tx.one(SQL.by_child, key=holder["key"])
    if task is None or task["requester"] != requester or task["phase"] != "settled":
        raise sessions.label_in_use(label)
    await sessions.patch(tx, holder["id"], {"label": None}, now)


async def begin(tx: Tx, spawning: Spawning, now: int) -> tuple[Row, Accepted]:
    """The child, its task and its first run."""
    child = await _child(tx, spawning, now)
    await tx.one(
        SQL.insert,
        id=spawning.id,
        digest=spawning.digest,
        requester=spawning.requester["id"],
        requester_key=spawning.requester["key"],
        child=child["id"],
        child_key=child["key"],
        child_session_id=child["session_id"],
        agent_id=child["agent_id"],
        signature=signature(child["agent_id"], spawning.task),
        label=spawning.label,
        task=spawning.task,
        options=msgspec.json.encode(spawning.options).decode(),
        destination=spawning.destination.text,
        chain=spawning.link.chain,
        hop=spawning.link.hop,
        now=now,
    )
    task = await tx.one(SQL.by_id, id=spawning.id)
    assert task is not None
    return task, await admissions.submit(tx, _first_run(spawning, task, now), now)


async def _child(tx: Tx, spawning: Spawning, now: int) -> Row:
    if spawning.label is not None:
        await _free_label(tx, spawning.requester["id"], spawning.child_key.agent_id, spawning.label, now)
    birth = Birth(
        label=spawning.label,
        parent=spawning.requester["id"],
        role="orchestrator" if spawning.envelope.depth > 0 else "leaf",
        sandboxed=spawning.sandboxed,
        envelope=spawning.envelope.text,
        model=spawning.model,
        thinking=spawning.thinking,
        reason="spawned",
    )
    return await sessions.create(tx, spawning.child_key, now, birth)


def _first_run(spawning: Spawning, task: Row, now: int) -> Submission:
    provenance = Provenance(
        kind="spawn",
        source_session_key=keys.spoken(spawning.requester["key"]),
        source_tool=SPAWN,
        chain_id=spawning.link.chain,
        hop=spawning.link.hop,
    )
    return Submission(
        run_id=spawning.id,
        session=task["child"],
        session_key=task["child_key"],
        origin=SPAWN,
        message=User(content=spawning.task, timestamp=now, provenance=provenance),
        instructions=spawning.instructions,
        deadline_at=spawning.deadline_at,
        task=task["n"],
        chain=spawning.link.chain,
        hop=spawning.link.hop,
    )


# --- on its way ---


async def advance(tx: Tx, step: Step, now: int) -> Sequel:
    """After the run that a task is in has ended."""
    task = await tx.one(SQL.at, n=step.task, run_id=step.run_id)
    if task is None:
        return NOTHING
    if task["phase"] == "announcing":
        return await _announced(tx, task, step, now)
    await _record(tx, task, step, now)
    if step.state == "ok" and await _awaited(tx, task["child"]):
        # It has ended its turn before what it spawned has: its report is for after their results.
        await tx.do(SQL.step, n=task["n"], phase="waiting", current=task["current"])
        await tx.do(SQL.yield_unless_yielded, session=task["child"])
        return NOTHING
    return await _announce(tx, task, step, now)


async def abandon(
    tx: Tx, child_key: str, now: int, outcome: Outcome = "cancelled", error: str = "The run was stopped."
) -> Sequel:
    """A child that is stopped while it waits for its own has no run whose end could report it."""
    task = await tx.one(SQL.by_child, key=child_key)
    if task is None or task["phase"] != "waiting":
        return NOTHING
    kept = {name: task[name] for name in ("n", "result", "result_source", "model")}
    await tx.do(SQL.ended, outcome=outcome, error=error, now=now, **kept)
    if read_options(task).announce == "none":
        return await _settle(tx, task, None, "none", now)
    return await _report(tx, task, None, now)


async def mend(tx: Tx, now: int) -> Sequel:
    """Report what nothing else will."""
    sequel = NOTHING
    for task in await tx.all(SQL.astray):
        if task["outcome"] is None:
            kept = {name: task[name] for name in ("n", "result", "result_source", "model")}
            await tx.do(SQL.ended, outcome="interrupted", error="The run was lost.", now=now, **kept)
        if read_options(task).announce == "none":
            sequel += await _settle(tx, task, None, "none", now)
        else:
            sequel += await _report(tx, task, None, now)
    return sequel


async def _record(tx: Tx, task: Row, step: Step, now: int) -> None:
    result, source = step.reply, "reply"
    if not (result and result.strip()):
        result = await _latest_tool_result(tx, task)
        source = "tool" if result else "none"
    await tx.do(
        SQL.ended,
        n=task["n"],
        outcome=step.state,
        error=step.error,
        result=result,
        result_source=source,
        model=step.model,
        now=now,
    )


async def _latest_tool_result(tx: Tx, task: Row) -> str | None:
    row = await tx.one(SQL.latest_tool_result, child=task["child"])
    if row is None:
        return None
    try:
        message = decode(row["body"])
    except InvalidInput:
        return None
    return message.text.strip() or None if isinstance(message, ToolResult) else None


async def _announce(tx: Tx, task: Row, step: Step, now: int) -> Sequel:
    """Let the child word its result, if it came to one and anybody is to hear of it."""
    options = read_options(task)
    if options.announce == "none":
        return await _settle(tx, task, None, "none", now)
    if step.state != "ok":
        return await _report(tx, task, None, now)
    run_id = f"announce:{task['id']}"
    submission = Submission(
        run_id=run_id,
        session=task["child"],
        session_key=task["child_key"],
        origin=ANNOUNCE,
        message=User(
            content=wording.task_announce_message(task["task"], step.reply),
            timestamp=now,
            provenance=Provenance(kind="announce_step", source_tool=SPAWN, chain_id=task["chain"]),
        ),
        instructions=wording.task_announce_context(),
        deadline_at=now + options.announce_ms,
        task=task["n"],
        chain=task["chain"],
        hop=task["hop"],
    )
    accepted = await admissions.follow(tx, submission, now)
    if accepted is None or not accepted.new:  # steered in its announce step: there is no second one
        return await _report(tx, task, None, now)
    await tx.do(SQL.step, n=task["n"], phase="announcing", current=run_id)
    return queued(accepted)


async def _announced(tx: Tx, task: Row, step: Step, now: int) -> Sequel:
    said = step.said
    if said is not None and gate.is_silence(said):
        return await _settle(tx, task, None, "skipped", now)
    return await _report(tx, task, None if said is None else gate.cut_tokens(said) or None, now)


# --- the report ---


async def _report(tx: Tx, task: Row, announced: str | None, now: int) -> Sequel:
    task = await _again(tx, task)
    options = read_options(task)
    report = _reported(task, announced, await _stats(tx, task, options))
    body = gate.clear_for_agents(wording.report_text(report, options.locale))
    stats = wording.stats_line(report.stats, options.locale)
    told, entry_run = await _tell(tx, task, options, f"{body}\n\n{stats}", now)
    if options.announce != "channel":
        return told + await _settle(tx, task, report, "parent", now)
    parcel = Parcel(
        key=f"task:{task['id']}",
        kind="task",
        session=task["requester"],
        session_key=task["requester_key"],
        destination=deliveries.read(task["destination"]),
        body=body,
        stats=stats,
        entry_run=entry_run,
        task=task["n"],
    )
    await deliveries.post(tx, parcel, now)
    return told + await _settle(tx, task, report, "pending", now) + Sequel(posted=True)


def _reported(task: Row, announced: str | None, stats: Stats) -> Report:
    result, source, notes = task["result"], task["result_source"], None
    if announced is not None:
        worded, notes = wording.parse_announce(announced)
        if worded:
            result, source = worded, "announce"
    if task["outcome"] != "ok" and task["error"]:
        notes = "\n".join(filter(None, [notes, task["error"]]))
    if result and len(result) > RESULT_MOST:
        left = len(result) - RESULT_MOST
        notes = "\n".join(filter(None, [notes, f"{left} characters of the result were left out."]))
        result = result[:RESULT_MOST]
    return Report(status=task["outcome"], result=result, result_source=source, notes=notes, stats=stats)


async def _stats(tx: Tx, task: Row, options: Options) -> Stats:
    spent = await tx.one(SQL.spent, key=task["child_key"])
    assert spent is not None
    return Stats(
        runtime_ms=task["ended_at"] - task["started_at"] if task["started_at"] else None,
        tokens_in=spent["input"],
        tokens_out=spent["output"],
        cost=spent["cost"],
        session_key=task["child_key"],
        session_id=task["child_session_id"],
        transcript_path=_transcript_path(options, task["child_session_id"]),
        model=task["model"],
    )


def _transcript_path(options: Options, session_id: str) -> str | None:
    """Of a file that exists, and does not go with the child as soon as this is told."""
    if not options.transcripts or options.cleanup == "delete":
        return None
    path = f"{options.transcripts}/{session_id}.jsonl"
    return path if Path(path).is_file() else None


async def _tell(tx: Tx, task: Row, options: Options, text: str, now: int) -> tuple[Sequel, str | None]:
    """Put the report into the requester's transcript; and the run that does it, in the requester's own session.

    It waits its turn in the lane, so that it stands between two runs and never between a call and its result.
    """
    living = await _living(tx, task)
    if living is None:
        return NOTHING, None
    session, agent_id = living
    if session["id"] != task["requester"]:
        text = f"{text}\n\n{wording.passed_up(keys.spoken(task['requester_key']))}"
    direct = options.announce == "parent" and bool(task["wakes"]) and session["yielded"] is None
    run_id = f"note:{task['id']}"
    own, deadline_at = await _hand_on(tx, session["key"], run_id) if direct else (None, None)
    submission = Submission(
        run_id=run_id,
        session=session["id"],
        session_key=session["key"],
        origin=WAKE if direct else NOTE,
        message=_words(task, text, now, by_user=direct),
        deadline_at=deadline_at,
        task=own,
        chain=task["chain"] if direct else None,
        hop=task["hop"] - 1,
        agent_id=agent_id if direct else None,
    )
    accepted = await admissions.follow(tx, submission, now)
    return queued(accepted), run_id if session["id"] == task["requester"] else None


def _words(task: Row, text: str, now: int, *, by_user: bool) -> User | Assistant:
    provenance = Provenance(
        kind=KIND, source_session_key=task["child_key"], source_tool=SPAWN, chain_id=task["chain"]
    )
    if by_user:
        return User(content=text, timestamp=now, provenance=provenance)
    return Assistant(
        content=[Text(text=text)],
        timestamp=now,
        stop_reason="stop",
        provider="antiphon",
        model=INJECTED,
        provenance=provenance,
    )


async def _living(tx: Tx, task: Row) -> tuple[Row, str | None] | None:
    """The requester and its agent (`Options.requester_agent`); if it is gone, the one that had asked it, and so on."""
    for _ in range(ANCESTORS):
        session = await tx.one(SESSIONS.by_id, id=task["requester"])
        if session is not None:
            return session, read_options(task).requester_agent
        above = await tx.one(SQL.by_child, key=task["requester_key"])
        if above is None:
            return None
        task = above
    return None


async def _hand_on(tx: Tx, key: str, run_id: str) -> tuple[int | None, int | None]:
    """The task that a session finishes in this run, because it is woken, and until when.

    The run that waits may not have ended yet: what it says then is not the task's result.
    """
    task = await tx.one(SQL.by_child, key=key)
    if task is None or task["phase"] not in {"running", "waiting"}:
        return None, None
    await tx.do(SQL.step, n=task["n"], phase="running", current=run_id)
    return task["n"], await _deadline(tx, task)


async def _deadline(tx: Tx, task: Row) -> int | None:
    """That of its first run: whatever else is done for the task has no more time than that."""
    run = await tx.one(SQL.deadline, id=task["id"])
    return run["deadline_at"] if run else None


async def _settle(tx: Tx, task: Row, report: Report | None, announced: str, now: int) -> Sequel:
    await tx.alone(f"family:{task['requester']}")
    settled = announced != "pending"
    await tx.do(
        SQL.settle,
        n=task["n"],
        announced=announced,
        report=msgspec.json.encode(report).decode() if report else None,
        archive_at=_archive_at(read_options(task), now) if settled else None,
        now=now,
    )
    return await _wake(tx, task, now)


async def _wake(tx: Tx, task: Row, now: int) -> Sequel:
    """Wake who has ended its turn to wait for this, when it has nothing more to wait for."""
    living = await _living(tx, task)
    if living is None or living[0]["yielded"] is None or not task["wakes"]:
        return NOTHING
    session, agent_id = living
    if session["yielded"] == "all" and await _awaited(tx, session["id"]):
        return NOTHING
    sequel, wakes = NOTHING, dict[str | None, str]()
    for agent in await yields.waiting_agents(tx, session) or [agent_id]:
        accepted = await wake(tx, Waking(session["id"], session["key"], task["id"], agent), task, now)
        if accepted is not None:
            wakes[agent] = accepted.run_id
            sequel += queued(accepted)
    if wakes:
        await yields.hand_all(tx, session, wakes)
    return sequel


async def _awaited(tx: Tx, session: int) -> int:
    """How many sub-agents at work it can still be woken for; those that were stopped with it wake nobody.

    Whoever asks decides by it, and so does each of them when it ends: one after the other, or the last is not noticed.
    """
    await tx.alone(f"family:{session}")
    row = await tx.one(SQL.awaited, requester=session)
    return row["awaited"] if row else 0


class Waking(NamedTuple):
    """A session that is to be woken, what makes it this waking, and the agent that has yielded (`runs.agent_id`)."""

    session: int
    key: str
    id: str
    agent_id: str | None = None

    @property
    def run_id(self) -> str:
        return f"wake:{self.id}" if self.agent_id is None else f"wake:{self.id}:{self.agent_id}"


async def wake(tx: Tx, waking: Waking, reported: Row, now: int) -> Accepted | None:
    """Queue a turn for a session behind the reports it was waiting for, of which `reported` is the last.

    It finishes the session's task; what runs that have yielded were to answer is handed to it (`engine.yields`).
    """
    session, key, run_id = waking.session, waking.key, waking.run_id
    own, deadline_at = await _hand_on(tx, key, run_id)
    submission = Submission(
        run_id=run_id,
        session=session,
        session_key=key,
        origin=WAKE,
        message=User(
            content=wording.WOKEN,
            timestamp=now,
            provenance=Provenance(kind="wake", source_tool=SPAWN, chain_id=reported["chain"]),
        ),
        deadline_at=deadline_at,
        task=own,
        chain=reported["chain"],
        hop=reported["hop"] - 1,  # it goes on where it was when it spawned; a chain's runs bound how often
        agent_id=waking.agent_id,
    )
    return await admissions.follow(tx, submission, now)


async def standing(tx: Tx, session: int, run_id: str | None) -> tuple[int, Row | None]:
    """How many of a session's tasks are at work, and the last that has reported since that run of it began."""
    reported = await tx.one(SQL.reported_during, requester=session, run_id=run_id)
    return await _awaited(tx, session), reported


async def woken_anyway(tx: Tx, session: int, run_id: str | None, agent_id: str | None) -> bool:
    """Whether a session's sub-agents wake this agent in it anyway after this run; that turn then finishes its work."""
    waking = await tx.one(RUNS.waking, session=session, agent_id=agent_id)
    if waking is None:
        return False
    await yields.hand_one(tx, run_id, waking["id"])
    return True


async def redirect(tx: Tx, child_key: str, run_id: str) -> tuple[int | None, int | None]:
    """Another run is to finish the task that a session is at; the task and its deadline, if there is one."""
    task = await tx.one(SQL.by_child, key=child_key)
    if task is None or task["phase"] == "settled":
        return None, None
    await tx.do(SQL.step, n=task["n"], phase="running", current=run_id)
    return task["n"], await _deadline(tx, task)


async def announced(tx: Tx, task_n: int, state: str, now: int) -> None:
    """The delivery of the report has settled: the archive clock starts."""
    task = await tx.one(SQL.by_n, n=task_n)
    if task is not None:
        await tx.do(SQL.announced, n=task_n, announced=state, archive_at=_archive_at(read_options(task), now))


def _archive_at(options: Options, now: int) -> int | None:
    if options.cleanup == "delete":
        return now
    if options.mode == "session" or options.archive_minutes == 0:
        return None
    return now + options.archive_minutes * MINUTE


def read_options(task: Row) -> Options:
    return msgspec.json.decode(task["options"], type=Options)


async def _again(tx: Tx, task: Row) -> Row:
    row = await tx.one(SQL.by_n, n=task["n"])
    assert row is not None
    return row
