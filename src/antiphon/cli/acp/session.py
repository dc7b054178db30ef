"""One session that an editor has open: shows what happens in it, sends prompts, asks for permissions.

The entries of the transcript come exactly once, over restarts of the gateway too; they say what is shown. Live events
only show the same earlier. What the gateway marks as internal is not shown.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

import msgspec

from antiphon.bus import (
    ApprovalChanged,
    Delivered,
    Delta,
    Event,
    MessageAppended,
    RunChanged,
    SessionChanged,
    ToolPhase,
)
from antiphon.cli.acp import updates
from antiphon.cli.acp.connection import EditorConnection, QuestionRefused
from antiphon.cli.acp.prompts import EditorPrompt
from antiphon.cli.acp.tool_calls import ShownToolCalls
from antiphon.cli.acp.turn import EditorTurn
from antiphon.cli.chat import speakers
from antiphon.cli.chat.renderer import SILENT_REPLIES
from antiphon.client import Client, GatewayUnreachable
from antiphon.engine.sessions.transcripts import HistoryFilter
from antiphon.errors import AntiphonError, Conflict, Forbidden, NotFound, Unavailable
from antiphon.operations.types import ApprovalView, RunView, build_approval_view

log = logging.getLogger(__name__)

Json: TypeAlias = dict[str, Any]

RUN_WAIT_SECONDS = 60.0  # length of one wait; repeated until the run has ended
FEED_LAG_SECONDS = 5.0  # how far the feed may lag behind the end of a run
CALL_NOTICE_SECONDS = 1.0  # from an approval to the call that it is about
REPLAY_PAGE_ENTRIES = 50
MAX_REPLAYED_ENTRIES = 2000  # the newest ones
MAX_REMEMBERED_RUNS = 256
MAX_OPEN_APPROVALS = 100

OPTION_BY_DECISION = {
    "allow-once": {"optionId": "allow-once", "name": "Allow once", "kind": "allow_once"},
    "allow-always": {"optionId": "allow-always", "name": "Always allow this call", "kind": "allow_always"},
    "deny": {"optionId": "deny", "name": "Reject", "kind": "reject_once"},
}


class EditorSession:
    def __init__(
        self,
        session_id: str,
        key: str,
        *,
        client: Client,
        connection: EditorConnection,
        report: Callable[[AntiphonError], None],
    ) -> None:
        """`session_id` is what the editor calls it, `key` what the gateway does."""
        self.session_id, self.key = session_id, key
        self._client = client
        self._connection = connection
        self._report = report
        self._calls = ShownToolCalls()
        self._speakers = speakers.KnownSpeakers(session_key=key)
        self._turns: dict[str, EditorTurn] = {}
        self._prompted_runs: deque[str] = deque(maxlen=MAX_REMEMBERED_RUNS)
        """Runs of the editor's prompts, which it shows itself."""
        self._answered_runs: deque[str] = deque(maxlen=MAX_REMEMBERED_RUNS)
        """Those whose answers have been shown."""
        self._unposted_runs: OrderedDict[str, str | None] = OrderedDict()
        """Runs whose text is shown once it is posted, with the speaker."""
        self._approvals: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None
        self._seq = 0
        self._last_chunk: tuple[str, str] | None = None
        """The kind and the message id of the last update, if it was a chunk."""

    @property
    def is_busy(self) -> bool:
        return bool(self._turns)

    async def close(self) -> None:
        """Stop showing the session. Its runs continue, and calls that wait for a person keep waiting."""
        tasks = [*self._tasks, *self._approvals.values(), *([self._follower] if self._follower else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for turn in self._turns.values():
            turn.has_ended.set()

    # --- what is shown ---

    async def skip_to_end(self) -> None:
        """Show only what is added from now on."""
        page = await self._client.read_history(self.key, HistoryFilter(limit=1, include_tools=True))
        self._seq = page.total

    async def replay(self) -> None:
        """Show the conversation so far, the newest entries if it is long."""
        await self.skip_to_end()
        end, position = self._seq, max(0, self._seq - MAX_REPLAYED_ENTRIES)
        while position < end:
            filters = HistoryFilter(
                limit=REPLAY_PAGE_ENTRIES, include_tools=True, after=position, without_internal=True
            )
            page = await self._client.read_history(self.key, filters)
            await speakers.look_up_page_speakers(self._client, page.messages, self._speakers)
            shown = [entry for entry in page.messages if entry["seq"] <= end]
            for entry in shown:
                await self._show_entry(entry)
            if not page.has_more or page.next_cursor is None:
                break
            position = int(page.next_cursor)

    def follow(self) -> None:
        """Show what happens from now on, and ask about the calls that wait.

        After a long loss of the connection, it resumes where it stopped.
        """
        if self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._follow())
            self._start_task(self._ask_about_waiting_calls())  # after it listens, so that no call is missed

    def handle_lost_connection(self) -> None:
        for turn in self._turns.values():
            turn.record_gap()

    def handle_new_connection(self) -> None:
        """Look for waiting calls again, since events about them may have been missed."""
        self._start_task(self._ask_about_waiting_calls())

    async def _follow(self) -> None:
        try:
            async with aclosing(self._client.follow(self.key, self._seq)) as events:
                async for event in events:
                    await self._show_event(event)
        except AntiphonError as error:
            self._report(error)

    async def _show_event(self, event: Event) -> None:
        match event:
            case MessageAppended():
                await self._show_appended(event)
            case Delta() if turn := self._turns.get(event.run_id):
                await self._send_all(turn.take_delta(event))
            case ToolPhase() if update := self._calls.take_phase(event):
                await self._send(update)
            case ApprovalChanged():
                await self._handle_approval(build_approval_view(event))
            case RunChanged() if event.state not in ("queued", "running"):
                await self._handle_run_end(event)
            case Delivered() if event.run_id and event.run_id in self._unposted_runs:
                speaker = self._unposted_runs.pop(event.run_id)
                entry = {"content": event.text, "id": event.key}
                await self._send_all(updates.build_answer_chunks(entry, speaker))
            case SessionChanged(reason="renewed"):
                self._seq = event.seq
                await self._say("(A new conversation has begun.)")
            case _:
                pass

    async def _show_appended(self, event: MessageAppended) -> None:
        self._seq = event.seq
        entry: Json = {**msgspec.json.decode(event.body), "id": event.entry, "runId": event.run_id}
        turn = self._turns.get(event.run_id or "")
        if entry.get("role") == "user" and event.run_id in self._prompted_runs:
            return
        if turn is None and event.run_id not in self._answered_runs:
            await speakers.look_up_speakers(self._client, [entry], self._speakers)
            if event.internal:
                self._remember_unposted(entry)
            else:
                await self._show_entry(entry)
            return
        match entry.get("role"):
            case "assistant" if turn is not None:
                await self._send_all(turn.take_answer(entry, is_internal=event.internal))
                await self._show_calls(entry)
            case "toolResult":
                await self._show_result(entry)
            case _:  # an answer that arrives late
                pass

    async def _show_entry(self, entry: Json) -> None:
        """Show an entry as a whole."""
        match entry.get("role"):
            case "user" if not speakers.is_internal_step(entry):
                speaker = speakers.format_speaker(entry, self._speakers)
                await self._send_all(updates.build_user_chunks(entry, speaker))
            case "assistant":
                answerer = speakers.format_answerer(entry, self._speakers, self._speakers.agent)
                speaker = None if answerer == self._speakers.agent else answerer
                await self._send_all(updates.build_answer_chunks(entry, speaker))
                await self._show_calls(entry)
            case "toolResult":
                await self._show_result(entry)
            case _:
                pass

    async def _show_calls(self, entry: Json) -> None:
        for block in updates.get_tool_calls(entry):
            await self._send(self._calls.announce(block, entry.get("runId")))

    async def _show_result(self, entry: Json) -> None:
        await self._send(self._calls.take_result(entry, entry.get("runId")))

    def _remember_unposted(self, entry: Json) -> None:
        """Remember an answer that is for people only once it is posted."""
        run_id = entry.get("runId")
        text = updates.join_blocks(entry, "text").strip()
        if entry.get("role") != "assistant" or not isinstance(run_id, str) or text in SILENT_REPLIES:
            return
        answerer = speakers.format_answerer(entry, self._speakers, self._speakers.agent)
        self._unposted_runs[run_id] = None if answerer == self._speakers.agent else answerer
        if len(self._unposted_runs) > MAX_REMEMBERED_RUNS:
            self._unposted_runs.popitem(last=False)

    async def _handle_run_end(self, event: RunChanged) -> None:
        await self._send_all(self._calls.end_run(event.run_id))
        if turn := self._turns.get(event.run_id):
            turn.has_ended.set()

    async def _say(self, text: str) -> None:
        await self._send(updates.build_text_chunk("agent_message_chunk", text, uuid.uuid4().hex))

    async def _send_all(self, found: Sequence[Json]) -> None:
        for update in found:
            await self._send(update)

    async def _send(self, update: Json) -> None:
        """Send an update. Editors that know no message ids would show two messages as one paragraph."""
        chunk = (update["sessionUpdate"], update["messageId"]) if "messageId" in update else None
        last, self._last_chunk = self._last_chunk, chunk
        if chunk and last and chunk != last and chunk[0] == last[0] and update["content"]["type"] == "text":
            content = {**update["content"], "text": f"\n\n{update['content']['text']}"}
            update = {**update, "content": content}
        await self._connection.notify("session/update", {"sessionId": self.session_id, "update": update})

    # --- prompts ---

    async def prompt(self, prompt: EditorPrompt, *, may_be_command: bool, has_left: asyncio.Event) -> Json:
        """Send a message, and return how its turn ended once everything of it has been shown.

        Once it is accepted, it is not waited for when the editor has left: its run goes on.
        """
        self.follow()
        turn = EditorTurn(uuid.uuid4().hex)
        self._turns[turn.run_id] = turn
        self._prompted_runs.append(turn.run_id)
        self._last_chunk = None  # the editor shows the prompt between two answers
        try:
            params: Json = {
                "sessionKey": self.key,
                "message": prompt.text,
                "idempotencyKey": turn.run_id,
                "suppressCommandInterpretation": not may_be_command,
            }
            if prompt.attachments:
                params["attachments"] = prompt.attachments
            receipt: Json = await self._client.call("chat.send", params)
            if "state" not in receipt:  # a command, which started no run
                await self._say("Stopped." if receipt.get("aborted") else "Done.")
                return {"stopReason": "end_turn"}
            turn.is_accepted = True
            if turn.is_cancelled:
                await self._client.stop(self.key, turn.run_id)
            view = await _wait_unless_left(self._wait_for_end(turn), has_left)
            return await self._build_result(turn, view)
        finally:
            del self._turns[turn.run_id]

    async def _wait_for_end(self, turn: EditorTurn) -> RunView:
        try:
            while True:
                view = await self._client.wait(turn.run_id, RUN_WAIT_SECONDS)
                if view.has_ended:
                    break
        except GatewayUnreachable as error:
            raise Unavailable(
                error.what,
                "The prompt was accepted and is answered when the gateway is back. "
                "Start it with `antiphon up`, then load the session again.",
            ) from error
        self.follow()
        with suppress(TimeoutError):
            async with asyncio.timeout(FEED_LAG_SECONDS):
                await turn.has_ended.wait()
        self._answered_runs.append(turn.run_id)
        await self._send_all(turn.take_reply(view.reply or ""))
        return view

    async def _build_result(self, turn: EditorTurn, view: RunView) -> Json:
        if turn.is_cancelled or view.state == "cancelled":
            reason = "cancelled"
        elif view.state == "ok":
            reason = "end_turn"
        elif view.state == "incomplete" and view.error_code == "max_steps":
            reason = "max_turn_requests"
        elif view.state == "incomplete" and view.reply:
            reason = "max_tokens"
        else:
            raise Unavailable(
                view.error or f"The run ended as {view.state!r}.", "Send the prompt again to try once more."
            )
        result: Json = {"stopReason": reason}
        with suppress(AntiphonError):  # the answer does not depend on it
            if usage := await self._report_usage():
                result["usage"] = usage
        return result

    async def _report_usage(self) -> Json | None:
        """Show how full the context is, and return the tokens of the whole session, as the protocol counts them."""
        totals: Json = (await self._client.call("sessions.usage", {"key": self.key}))["totals"]
        view = await self._client.describe(self.key)
        if view.used_tokens is not None and view.context_tokens:
            update: Json = {
                "sessionUpdate": "usage_update",
                "used": view.used_tokens,
                "size": view.context_tokens,
            }
            if totals["cost"] is not None:
                update["cost"] = {"amount": totals["cost"], "currency": "USD"}
            await self._send(update)
        counts = [totals[name] for name in ("input", "output", "cacheRead", "cacheWrite")]
        if not any(counts):
            return None
        return {
            "totalTokens": sum(counts),
            "inputTokens": counts[0],
            "outputTokens": counts[1],
            "cachedReadTokens": counts[2],
            "cachedWriteTokens": counts[3],
        }

    def cancel(self) -> None:
        """Stop the answers to the editor's prompts, and no others, in the background."""
        self._start_task(self.stop_turns())

    async def stop_turns(self) -> None:
        """Stop the answers to the editor's prompts; one that is not accepted yet is stopped when it is."""
        turns = [turn for turn in self._turns.values() if not turn.is_cancelled]
        for turn in turns:
            turn.is_cancelled = True
        try:
            for turn in turns:
                if turn.is_accepted:
                    await self._client.stop(self.key, turn.run_id)
        except AntiphonError as error:
            self._report(error)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- permissions ---

    async def _ask_about_waiting_calls(self) -> None:
        """Ask about the calls that wait, and drop the questions about those that do not any more."""
        try:
            waiting = await self._client.list_approvals(self.key)
        except (Forbidden, NotFound):  # a token that may not decide
            return
        except AntiphonError as error:
            self._report(error)
            return
        for approval_id in self._approvals.keys() - {approval.id for approval in waiting}:
            self._approvals[approval_id].cancel()
        for approval in waiting:
            await self._handle_approval(approval)

    async def _handle_approval(self, approval: ApprovalView) -> None:
        question = self._approvals.get(approval.id)
        if approval.state != "pending":
            if question is not None:
                question.cancel()
        elif question is None and len(self._approvals) < MAX_OPEN_APPROVALS:
            task = asyncio.create_task(self._ask(approval))
            self._approvals[approval.id] = task
            task.add_done_callback(lambda _: self._approvals.pop(approval.id, None))

    async def _ask(self, approval: ApprovalView) -> None:
        """Ask the editor, and pass its choice on. Without a choice, the call keeps waiting."""
        call = updates.describe_waiting_call(approval, await self._find_call(approval))
        options = [OPTION_BY_DECISION[decision] for decision in approval.allowed_decisions]
        params: Json = {"sessionId": self.session_id, "toolCall": call, "options": options}
        try:
            answer = await self._connection.ask("session/request_permission", params)
            match answer.get("outcome"):
                case {"outcome": "selected", "optionId": str(option_id)} if option_id in OPTION_BY_DECISION:
                    await self._client.resolve_approval(approval.id, option_id)
                case _:
                    log.debug("The editor did not decide about %s", approval.id)
        except QuestionRefused as error:
            log.warning("The editor could not be asked about the call %s: %s", approval.id, error)
        except (Conflict, NotFound):
            log.debug("%s was decided elsewhere meanwhile", approval.id)
        except AntiphonError as error:
            self._report(error)

    async def _find_call(self, approval: ApprovalView) -> str | None:
        """Return the call that an approval is about; its entry may arrive a moment later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CALL_NOTICE_SECONDS):
                while (found := self._calls.find_waiting(approval.run_id, approval.tool)) is None:
                    self._calls.announced.clear()
                    await self._calls.announced.wait()
                return found
        return None


async def _wait_unless_left(waiting: Coroutine[Any, Any, RunView], has_left: asyncio.Event) -> RunView:
    ended, left = asyncio.create_task(waiting), asyncio.create_task(has_left.wait())
    try:
        await asyncio.wait((ended, left), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        raise Unavailable("The editor closed the connection.", "Load the session to see the answer.")
    finally:
        for task in (ended, left):
            task.cancel()
        await asyncio.gather(ended, left, return_exceptions=True)
