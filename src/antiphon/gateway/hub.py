"""What happens, told to everybody who is connected: `chat`, `agent`, `sessions.changed`, ticks and presence.

These are hints over durable rows. Their text is encoded once; what matters is never only here: a run's end can be
waited for (`agent.wait`), messages can be subscribed to exactly (`subscriptions`), lists can be read again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec

from antiphon import __version__
from antiphon.access import READ
from antiphon.bus import (
    EVERY_SESSION,
    Delivered,
    Delta,
    Event,
    Gap,
    MessageAppended,
    RunChanged,
    SessionChanged,
    ToolPhase,
)
from antiphon.engine import gate
from antiphon.errors import AntiphonError, NotFound
from antiphon.gateway import frames, rows
from antiphon.gateway.connection import Connection
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.subscriptions import READER, Subscriptions
from antiphon.gateway.survey import Survey
from antiphon.messages import INJECTED
from antiphon.views import end_of

log = logging.getLogger(__name__)

EVENTS = [
    "agent",
    "chat",
    "connect.challenge",
    "presence",
    "session.gap",
    "session.message",
    "sessions.changed",
    "shutdown",
    "tick",
]
CHANGE_GATHER_SECONDS = 0.1  # to collect changes of a session before its row is read
MAX_SESSIONS_PER_GATHERING = 500
MIN_DELTA_SECONDS, MAX_DELTA_SECONDS = 0.05, 0.5  # between two increments of an answer
DELTA_CHARACTERS_PER_SECOND = 25_000  # the longer the answer, the longer increments are collected
WHOLE_INTERVAL_SECONDS = 0.15  # between two whole texts of a growing answer
WHOLE_GROWTH = 1.2  # by which a text has grown when the whole of it is sent again
# All whole texts together are at most these characters and one and a half times as long as the answer.
FREE_WHOLE_CHARACTERS = 8_000
REVOCATION_CHECK_SECONDS = 0.5
TOOL_EVENTS = "tool-events"
PAUSE = 1.0  # seconds after which a telling that failed begins again
PRESENCE = 1.0  # seconds between two tellings of who is there
ENDED = 4096  # runs that are remembered to have ended
NO_HEARTBEAT = {
    "enabled": False,
    "every": "disabled",
    "everyMs": None,
    "prompt": "",
    "target": "none",
    "ackMaxChars": 0,
}
HOLD = 0.04  # seconds: see `Hub.acknowledged`


class _Run(msgspec.Struct, eq=False):
    """A run in progress and what clients have been sent of it. Only its current step is streamed."""

    session_key: str
    pieces: list[str] = msgspec.field(default_factory=list[str])
    """The text so far."""
    length: int = 0
    """Length of the text so far, in characters."""
    unsent: list[str] = msgspec.field(default_factory=list[str])
    """Text that readers of increments have not been sent yet."""
    unsent_thinking: list[str] = msgspec.field(default_factory=list[str])
    increments_due: float = 0.0
    whole_spent: int = 0
    """Length of all whole texts of this step that have been sent."""
    next_whole_length: int = 1
    """Length from which the whole text is sent again."""
    whole_due: float = 0.0
    timer: asyncio.TimerHandle | None = None
    followers: set[Connection] = msgspec.field(default_factory=set[Connection])
    """Readers of increments that have been sent all of the text so far."""
    left_out: set[Connection] = msgspec.field(default_factory=set[Connection])
    """Readers that get no more of this step's text: they lagged, or have the entry that completes it."""
    seq: int = 0
    """Sequence number of the last entry of the run that has completed a step."""
    chat_seq: int = 0
    """Sequence number of events for readers of increments, without gaps."""
    whole_seq: int = 0
    """Sequence number of events for readers of whole texts."""
    agent_seq: int = 0
    message: msgspec.Raw | dict[str, Any] | None = None

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def begin_step(self) -> None:
        self.pieces.clear()
        self.unsent.clear()
        self.unsent_thinking.clear()
        self.length = self.whole_spent = 0
        self.next_whole_length = 1
        self.followers.clear()
        self.left_out.clear()
        self.cancel_timer()

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Hub:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._clock = gateway.house.clock
        self._operations = gateway.house.operations
        self.subscriptions = Subscriptions(self._operations, self._complete_step)
        config = gateway.house.config
        self._agents, self._default_agent = config.agent_ids, config.default_agent_id
        self.survey = Survey(self._operations, self._clock, self._agents, gateway.database)
        self.connections: set[Connection] = set()
        self._runs: dict[str, _Run] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        """Runs whose end was told of; after a gap the event of it may still come."""
        self._changes: dict[str, dict[str, dict[str, Any]]] = {}
        """The latest facts by session, and by phase or reason."""
        self._changed = asyncio.Event()
        self._holds: dict[tuple[Connection, str], float] = {}
        self._presence = 1
        self._presence_changed = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(_kept(lambda: self._hear(EVERY_SESSION)))
            group.create_task(_kept(lambda: self._hear("sessions")))
            lasting = (
                self._tell_changes,
                self._tell_presence,
                self._tick,
                self._close_revoked,
                self.survey.run,
            )
            for work in lasting:
                group.create_task(_kept(work))

    # --- who is there ---

    def join(self, connection: Connection) -> None:
        self.connections.add(connection)
        self._presence_changed.set()

    def leave(self, connection: Connection) -> None:
        self.subscriptions.leave(connection)
        for run in self._runs.values():
            run.followers.discard(connection)
            run.left_out.discard(connection)
        if connection in self.connections:
            self.connections.discard(connection)
            self._presence_changed.set()

    @property
    def state_version(self) -> dict[str, int]:
        return {"presence": self._presence, "health": 1}

    def presence(self) -> list[dict[str, Any]]:
        """Who is connected, the first hundred of them."""
        found: list[dict[str, Any]] = []
        for connection in self.connections:
            if (client := connection.client) and len(found) < 100:
                entry = {
                    "host": client.name or client.id,
                    "ip": client.address,
                    "version": client.version,
                    "platform": client.platform,
                    "mode": client.mode,
                    "deviceId": client.device,
                    "instanceId": client.instance,
                    "roles": [client.role],
                    "scopes": list(client.scopes),
                    "ts": connection.opened_at,
                    "reason": "connect",
                }
                found.append({name: value for name, value in entry.items() if value})
        return found

    def health(self) -> dict[str, Any]:
        """That the gateway answers, and for whom. Nothing is looked up: this is asked thousands of times a second."""
        return {
            "ok": True,
            "ts": self._clock.now(),
            "durationMs": 0,
            "version": __version__,
            "channels": {},
            "channelOrder": [],
            "channelLabels": {},
            "heartbeatSeconds": 0,
            "defaultAgentId": self._default_agent,
            "agents": [
                {
                    "agentId": agent,
                    "isDefault": agent == self._default_agent,
                    "heartbeat": NO_HEARTBEAT,
                    "sessions": self.survey.of(agent),
                }
                for agent in self._agents
            ],
            "sessions": self.survey.of(None),
        }

    def acknowledged(self, connection: Connection, run_id: str, session_key: str) -> None:
        """A run was accepted. One known client loses track of an end that comes right after; it is told later."""
        if run_id not in self._ended:
            self._known(run_id, session_key)  # so that its end is told even if nothing else of it is heard
        if connection.client and connection.client.id == "openclaw-tui":
            self._holds[connection, run_id] = asyncio.get_running_loop().time() + HOLD

    # --- hearing ---

    async def _hear(self, topic: str) -> None:
        async with self._gateway.house.bus.listen(topic) as events:
            while True:
                event = await events.get()
                if event is None or not self.connections:
                    self._forget_runs()
                    continue
                try:
                    if isinstance(event, Gap):
                        await self._after_gap()
                    else:
                        self._on(event)
                except Exception:
                    log.exception("An event was not told")

    def _on(self, event: Event) -> None:
        match event:
            case MessageAppended():
                self._message(event)
            case Delta():
                self._delta(event)
            case ToolPhase():
                self._tool(event)
            case RunChanged():
                self._run_changed(event)
            case Delivered():
                self._delivered(event)
            case SessionChanged() if event.reason not in ("message", "renewed"):
                self._change(event.session_key, {"reason": event.reason})
            case _:
                pass

    async def _after_gap(self) -> None:
        """Events were lost: whoever waits for the end of a run must hear of it all the same."""
        for run_id, run in list(self._runs.items()):
            try:
                view = await self._operations.run(READER, run_id)
            except NotFound:
                self._runs.pop(run_id, None)
                continue
            if view.ended:
                self._run_changed(end_of(run.session_key, view))

    # --- messages, pieces, tools ---

    def _message(self, event: MessageAppended) -> None:
        run = self._known(event.run_id, event.session_key)
        message = rows.appended(event.body, event.entry, event.seq, event.run_id, internal=event.internal)
        if run and message.get("role") == "assistant":
            self._send_increments(event.run_id or "", run)
            run.message = msgspec.Raw(event.body.encode())
            run.seq = event.seq
            run.begin_step()
        key = rows.shown(event.session_key)
        injected = message.get("model") == INJECTED and "provenance" not in message
        if event.run_id is None and injected and not event.internal:
            said = {"runId": f"inject-{event.entry}", "sessionKey": key, "seq": 0, "state": "final"}
            chat = frames.event("chat", {**said, "message": message})
            for connection in self._readers():
                if not self.subscriptions.subscribed(connection, key):  # they get the message itself
                    connection.event(chat)
        text = None
        for connection in self.connections:
            if connection.every_session and not self.subscriptions.subscribed(connection, key):
                text = text or frames.event(
                    "session.message",
                    {
                        "sessionKey": key,
                        "sessionId": event.session_id,
                        "message": message,
                        "messageId": event.entry,
                        "messageSeq": event.seq,
                    },
                )
                connection.event(text)
        facts = {"phase": "message", "messageId": event.entry, "messageSeq": event.seq, "runId": event.run_id}
        self._change(event.session_key, facts)

    def _complete_step(self, message: dict[str, Any], readers: Iterable[Connection]) -> None:
        """Send readers the rest of a step before its entry, and nothing of it afterwards.

        Subscriptions learn of an entry by themselves, possibly before the hub does.
        """
        run_id = message.get("runId")
        if not isinstance(run_id, str) or message.get("role") != "assistant":  # an import may hold anything
            return
        run = self._runs.get(run_id)
        if run and message["seq"] > run.seq:
            self._send_increments(run_id, run)
            run.left_out.update(readers)

    # --- an answer that grows ---

    def _delta(self, event: Delta) -> None:
        run = self._known(event.run_id, event.session_key)
        assert run is not None
        if event.restart:
            run.begin_step()
            self._tell_restart(event.run_id, run)
        if event.text:
            run.pieces.append(event.text)
            run.unsent.append(event.text)
            run.length += len(event.text)
        if event.thinking:
            run.unsent_thinking.append(event.thinking)
        self._stream(event.run_id, run)

    def _stream(self, run_id: str, run: _Run) -> None:
        """Send what is due of a run, and schedule the rest."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if (run.unsent or run.unsent_thinking) and now >= run.increments_due:
            self._send_increments(run_id, run)
        if run.length >= run.next_whole_length and now >= run.whole_due:
            self._send_whole(run_id, run)
        due = [run.increments_due] if run.unsent or run.unsent_thinking else []
        due += [run.whole_due] if run.length >= run.next_whole_length else []
        if due and run.timer is None:
            run.timer = loop.call_at(min(due), self._stream_later, run_id)

    def _stream_later(self, run_id: str) -> None:
        if run := self._runs.get(run_id):
            run.timer = None
            self._stream(run_id, run)

    def _send_increments(self, run_id: str, run: _Run) -> None:
        """Send the new text to readers that have the rest, and the whole text so far to the others."""
        if run.unsent_thinking:
            self._agent(run_id, run, "thinking", {"delta": "".join(run.unsent_thinking)}, droppable=True)
            run.unsent_thinking.clear()
        if run.unsent:
            self._send_text(run_id, run, "".join(run.unsent))
            run.unsent.clear()
        pace = min(max(run.length / DELTA_CHARACTERS_PER_SECOND, MIN_DELTA_SECONDS), MAX_DELTA_SECONDS)
        run.increments_due = asyncio.get_running_loop().time() + pace

    def _send_text(self, run_id: str, run: _Run, increment: str) -> None:
        run.chat_seq += 1
        texts: dict[bool | None, str] = {}  # None: for followers; else by whether the reader knows increments
        for connection in self._readers():
            if not connection.reads_increments or connection in run.left_out:
                continue
            kind = None if connection in run.followers else connection.knows_increments
            if (text := texts.get(kind)) is None:
                text = texts[kind] = self._chat_delta(run_id, run, increment, kind)
            if connection.event(text, droppable=True):
                run.followers.add(connection)
            else:
                run.followers.discard(connection)
                run.left_out.add(connection)

    def _chat_delta(self, run_id: str, run: _Run, increment: str, kind: bool | None) -> str:
        payload: dict[str, Any] = {**self._of_run(run_id, run, run.chat_seq), "state": "delta"}
        payload["deltaText"] = increment if kind is None else run.text
        if kind is not None and run.length > len(increment):
            payload["replace"] = True
        if kind is False:
            payload["message"] = self._said(run.text)
        return frames.event("chat", payload)

    def _send_whole(self, run_id: str, run: _Run) -> None:
        """Send the whole text so far to clients that do not assemble increments; the longer it is, the less often."""
        readers = [
            connection
            for connection in self._readers()
            if not connection.reads_increments and connection not in run.left_out
        ]
        if readers:
            run.whole_seq += 1
            payload = {
                **self._of_run(run_id, run, run.whole_seq),
                "state": "delta",
                "message": self._said(run.text),
                "deltaText": "",  # without the field clients of protocol 4 drop the event
            }
            chat = frames.event("chat", payload)
            for connection in readers:
                if not connection.reads_agent_text:
                    connection.event(chat, droppable=True)
            apps = [connection for connection in readers if connection.reads_agent_text]
            if apps:
                self._agent(run_id, run, "assistant", {"text": run.text}, to=apps, droppable=True)
        run.whole_spent += run.length
        affordable = 2 * (run.whole_spent - FREE_WHOLE_CHARACTERS)
        run.next_whole_length = max(int(run.length * WHOLE_GROWTH), run.length + 1, affordable)
        run.whole_due = asyncio.get_running_loop().time() + WHOLE_INTERVAL_SECONDS

    def _tell_restart(self, run_id: str, run: _Run) -> None:
        """Tell clients to discard the text of the current step."""
        run.chat_seq += 1
        run.whole_seq += 1
        for connection in self._readers():
            seq = run.chat_seq if connection.reads_increments else run.whole_seq
            payload: dict[str, Any] = {**self._of_run(run_id, run, seq), "state": "delta"}
            if not connection.knows_increments:
                payload["message"] = self._said("")
            connection.event(frames.event("chat", {**payload, "deltaText": "", "replace": True}))

    def _forget_runs(self) -> None:
        for run in self._runs.values():
            run.cancel_timer()
        self._runs.clear()

    def _tool(self, event: ToolPhase) -> None:
        run = self._known(event.run_id, event.session_key)
        assert run is not None
        self._send_increments(event.run_id, run)
        data = {
            "phase": event.phase,
            "name": event.name,
            "toolCallId": event.call_id,
            "isError": event.is_error,
        }
        listeners = [c for c in self._readers() if c.client and TOOL_EVENTS in c.client.caps]
        self._agent(event.run_id, run, "tool", data, to=listeners)

    def _said(self, text: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text}]
        return {"role": "assistant", "content": content, "timestamp": self._clock.now()}

    # --- runs ---

    def _known(self, run_id: str | None, session_key: str) -> _Run | None:
        if run_id is None:
            return None
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _Run(session_key)
        return run

    def _run_changed(self, event: RunChanged) -> None:
        if event.run_id in self._ended:
            self._runs.pop(event.run_id, None)
            return
        run = self._known(event.run_id, event.session_key)
        assert run is not None
        if event.state == "queued":
            return
        if event.state == "running":
            started = {"phase": "start", "startedAt": self._clock.now()}
            self._agent(event.run_id, run, "lifecycle", started)
            self._change(event.session_key, {"phase": "start", "runId": event.run_id})
            return
        self._send_increments(event.run_id, run)
        del self._runs[event.run_id]
        run.cancel_timer()
        self._remember(event.run_id)
        if event.gated:
            run.message = self._said(gate.clear(event.reply)) if event.reply else None
        elif run.message is None and event.reply:
            run.message = self._said(event.reply)
        failed = event.state not in ("ok", "incomplete")
        ended: dict[str, Any] = {
            "phase": "error" if failed else "end",
            "endedAt": event.ended_at or self._clock.now(),
        }
        if failed:
            ended["error"] = event.error
        run.agent_seq += 1
        lifecycle = self._agent_text(event.run_id, run, "lifecycle", ended)
        closing = _closing(event, run)
        increments, whole = (
            frames.event("chat", {**self._of_run(event.run_id, run, seq + 1), **closing})
            for seq in (run.chat_seq, run.whole_seq)
        )
        for connection in self._readers():
            chat = increments if connection.reads_increments else whole
            self._last_words(connection, event.run_id, *([lifecycle] if event.quiet else [lifecycle, chat]))
        self._change(event.session_key, {"phase": "error" if failed else "end", "runId": event.run_id})

    def _delivered(self, event: Delivered) -> None:
        """Words were posted in a chat that nobody there had asked for: they are final as they come."""
        payload = {
            "runId": event.run_id or event.key,
            "sessionKey": rows.shown(event.session_key),
            "seq": 0,
            "state": "final",
            "stopReason": "stop",
            "message": self._said(event.text),
        }
        self._tell_all(frames.event("chat", payload))

    def _remember(self, run_id: str) -> None:
        self._ended[run_id] = None
        while len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    def _last_words(self, connection: Connection, run_id: str, *texts: str) -> None:
        loop = asyncio.get_running_loop()
        held = self._holds.pop((connection, run_id), 0.0) - loop.time()
        for text in texts:
            if held > 0:
                loop.call_later(held, connection.event, text)
            else:
                connection.event(text)

    def _of_run(self, run_id: str, run: _Run, seq: int) -> dict[str, Any]:
        return {"runId": run_id, "sessionKey": rows.shown(run.session_key), "seq": seq}

    def _agent(
        self,
        run_id: str,
        run: _Run,
        stream: str,
        data: dict[str, Any],
        *,
        to: Iterable[Connection] | None = None,
        droppable: bool = False,
    ) -> None:
        run.agent_seq += 1
        text = self._agent_text(run_id, run, stream, data)
        for connection in self._readers() if to is None else to:
            connection.event(text, droppable=droppable)

    def _agent_text(self, run_id: str, run: _Run, stream: str, data: dict[str, Any]) -> str:
        payload = {
            **self._of_run(run_id, run, run.agent_seq),
            "stream": stream,
            "ts": self._clock.now(),
            "data": data,
        }
        return frames.event("agent", payload)

    # --- changes of sessions ---

    def _change(self, session_key: str, facts: dict[str, Any]) -> None:
        self.survey.stale.set()
        if any(connection.every_session for connection in self.connections):
            changes = self._changes.setdefault(session_key, {})
            kind = facts.get("phase") or facts.get("reason") or ""
            changes.pop(kind, None)  # so that what happened last comes last
            if kind in {"end", "error"}:
                changes.pop("start", None)  # the row of a run that is over says so
            changes[kind] = {"ts": self._clock.now(), **facts}
            self._changed.set()

    async def _tell_changes(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(CHANGE_GATHER_SECONDS)
            self._changed.clear()
            changes, self._changes = self._changes, {}
            await self._tell_of(changes)
            del changes  # nothing of them is kept until the next ones come

    async def _tell_of(self, changes: dict[str, dict[str, dict[str, Any]]]) -> None:
        """Send each change once, and with the last one of a session its row as it is now."""
        keys = list(changes)[:MAX_SESSIONS_PER_GATHERING]
        found = dict(zip(keys, await asyncio.gather(*map(self._row, keys)), strict=True))
        listeners = [connection for connection in self.connections if connection.every_session]
        for key, facts_of in changes.items():
            *earlier, last = ({"sessionKey": rows.shown(key), **facts} for facts in facts_of.values())
            for payload in (*earlier, {**(found.get(key) or {}), **last}):
                text = frames.event("sessions.changed", payload)
                for connection in listeners:
                    connection.event(text)

    async def _row(self, key: str) -> dict[str, Any] | None:
        try:
            row = rows.session_row(await self._operations.describe(READER, rows.shown(key), with_file=False))
        except AntiphonError:
            return None
        row.pop(
            "transcriptPath", None
        )  # the longest field, and what happens does not change it: lists have it
        return row

    # --- by the clock ---

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(frames.TICK / 1000)
            now = self._clock.now()
            text = frames.event("tick", {"ts": now})
            for connection in self.connections:
                connection.event(text, droppable=True)
            late = asyncio.get_running_loop().time() - 60
            self._holds = {held: until for held, until in self._holds.items() if until > late}

    async def _close_revoked(self) -> None:
        """Close connections whose token was revoked."""
        while True:
            await asyncio.sleep(REVOCATION_CHECK_SECONDS)
            identities = {connection.identity for connection in self.connections if connection.identity}
            revoked = {each for each in identities if not self._gateway.guard.still_knows(each)}
            for connection in self.connections if revoked else ():
                if connection.identity in revoked:
                    connection.close(1008, "the token was revoked")

    async def _tell_presence(self) -> None:
        while True:
            await self._presence_changed.wait()
            await asyncio.sleep(PRESENCE)
            self._presence_changed.clear()
            self._presence += 1
            text = frames.event("presence", {"presence": self.presence()}, self.state_version)
            self._tell_all(text, droppable=True)

    def say_goodbye(self, reason: str) -> None:
        text = frames.event("shutdown", {"reason": reason, "restartExpectedMs": 1000})
        for connection in self.connections:
            connection.event(text)
            connection.close(1012, "service restart")

    def _readers(self) -> Iterable[Connection]:
        return (connection for connection in self.connections if READ in connection.caller.scopes)

    def _tell_all(self, text: str, *, droppable: bool = False) -> None:
        for connection in self._readers():
            connection.event(text, droppable=droppable)


async def _kept(work: Callable[[], Awaitable[None]]) -> None:
    """Begin again what has failed: the telling of events must not end before the gateway does."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("Telling clients what happens failed; it begins again")
        await asyncio.sleep(PAUSE)


def _closing(event: RunChanged, run: _Run) -> dict[str, Any]:
    """The last `chat` event of a run."""
    spent = event.usage
    usage = {"usage": {"input": spent.input, "output": spent.output, "cost": spent.cost}} if spent else {}
    message = {"message": run.message} if run.message else {}
    match event.state:
        case "ok":
            return {"state": "final", "stopReason": "stop", **message, **usage}
        case "incomplete":
            return {"state": "final", "stopReason": "length", "errorMessage": event.error, **message, **usage}
        case "cancelled":
            return {"state": "aborted", "stopReason": "rpc", **message}
        case state:
            kind = "timeout" if state == "timeout" else "unknown"
            return {"state": "error", "errorMessage": event.error, "errorKind": kind, **usage}
