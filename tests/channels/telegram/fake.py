"""A strict stand-in for Telegram's Bot API: real HTTP, people who write, and faults on request.

It refuses what Telegram refuses: texts that are empty or too long after parsing, tags that do not match, chats and
topics that do not exist, a second poll. It remembers updates until they are confirmed, and reports them again.
"""

from __future__ import annotations

import asyncio
import html.parser
import json
import re
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

import httpx2

from support.model_provider import serve_asgi

Json = dict[str, Any]
TOKEN = "123456:" + "A" * 35
BOT_ID, BOT_NAME = 123456, "HelperBot"
GENERAL = 1
MAX_UNITS = 4096
TAGS = {"b", "i", "s", "u", "a", "code", "pre", "strong", "em", "del", "blockquote"}
FaultKind = Literal["flood", "error", "taken_then_reset", "reset", "hold", "nonsense", "refuse"]


class Refusal(Exception):
    def __init__(self, code: int, description: str, **parameters: Any) -> None:
        super().__init__(description)
        self.body: Json = {"ok": False, "error_code": code, "description": description}
        if parameters:
            self.body["parameters"] = parameters


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one call of a method ends in, instead of its answer."""

    kind: FaultKind
    seconds: int = 1
    code: int = 400
    description: str = ""
    parameters: Json = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Shown:
    """A message that people see."""

    chat: int
    topic: int | None
    text: str
    body: Json


class _Visible(html.parser.HTMLParser):
    """The visible text of Telegram's HTML; refuses what Telegram refuses."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in TAGS:
            raise Refusal(400, f'Bad Request: can\'t parse entities: Unsupported start tag "{tag}"')
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise Refusal(400, f"Bad Request: can't parse entities: Unexpected end tag {tag}")

    def handle_data(self, data: str) -> None:
        self.text += data


def read_visible(text: str) -> str:
    parser = _Visible()
    parser.feed(text)
    parser.close()
    if parser.open or re.search(r"&(?!lt;|gt;|amp;|quot;|#)", text):
        raise Refusal(400, "Bad Request: can't parse entities: Can't find end tag")
    return parser.text


class FakeTelegram:
    """One bot at the service. `shown` is what people see in their apps."""

    def __init__(self, token: str = TOKEN) -> None:
        self.token = token
        self.url = ""
        self.shown: list[Shown] = []
        self.calls: list[tuple[str, Json]] = []
        self.typing: list[Json] = []
        self.chats: dict[int, Json] = {7: {"id": 7, "type": "private"}}
        self.topics: dict[int, set[int]] = defaultdict(set)
        self.files: dict[str, bytes] = {}
        self.webhook: Json = {"url": "", "secret_token": None}
        self.faults: dict[str, deque[Fault]] = defaultdict(deque)
        self.undelivered: list[Json] = []
        self._update_id = 1000
        self._message_id = 0
        self._polling: asyncio.Future[None] | None = None
        self._news = asyncio.Event()
        self.released = asyncio.Event()

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncGenerator[FakeTelegram]:
        async with serve_asgi(self, port) as self.url:
            try:
                yield self
            finally:
                self.close()

    def close(self) -> None:
        """End what waits."""
        self.released.set()
        if self._polling and not self._polling.done():
            self._polling.set_result(None)

    def fail(self, method: str, *faults: Fault) -> None:
        self.faults[method].extend(faults)

    # --- people ---

    def add_group(self, chat: int, title: str = "Team", *topics: int) -> None:
        self.chats[chat] = {"id": chat, "type": "supergroup", "title": title, "is_forum": bool(topics)}
        self.topics[chat] = {GENERAL, *topics} if topics else set()

    def build_update(self, text: str, *, user: int = 7, chat: int | None = None, **fields: Any) -> Json:
        """An update about a message of a person, who then has a chat with the bot."""
        self._update_id += 1
        self._message_id += 1
        sender: Json = {
            "id": user,
            "is_bot": False,
            "first_name": f"Person{user}",
            **fields.pop("sender", {}),
        }
        place = self.chats.setdefault(chat or user, {"id": chat or user, "type": "private"})
        message: Json = {
            "message_id": self._message_id,
            "date": 1_700_000_000 + self._message_id,
            "chat": place,
            "from": sender,
            **fields,
        }
        if text:
            message["text"] = text
            message.setdefault("entities", list(_find_entities(text)))
        return {"update_id": self._update_id, "message": message}

    def report(self, update: Json) -> None:
        """Report an update to whoever polls."""
        self.undelivered.append(update)
        self._wake()

    def write(self, text: str, *, user: int = 7, chat: int | None = None, **fields: Any) -> Json:
        update = self.build_update(text, user=user, chat=chat, **fields)
        self.report(update)
        return update

    async def post_webhook(self, update: Json, *, url: str, secret: str | None) -> int:
        """Post an update as Telegram does, and return the status of the answer."""
        headers = {} if secret is None else {"x-telegram-bot-api-secret-token": secret}
        async with httpx2.AsyncClient() as client:
            return (await client.post(url, json=update, headers=headers)).status_code

    def texts(self, chat: int) -> list[str]:
        return [message.text for message in self.shown if message.chat == chat]

    async def until_shown(self, number: int, chat: int | None = None, seconds: float = 15) -> list[str]:
        """Wait until so many messages are shown, and return their texts."""

        def list_texts() -> list[str]:
            return [it.text for it in self.shown if chat in (None, it.chat)]

        try:
            await self.until(lambda: len(list_texts()) >= number, seconds)
        except TimeoutError:
            raise AssertionError(f"{number} messages are expected; these are shown: {list_texts()}") from None
        return list_texts()

    async def until(self, condition: Any, seconds: float = 15) -> None:
        """Wait until something is true, which only a call of the bot can make so."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._news.clear()
                await self._news.wait()

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)

    def _wake(self) -> None:
        self._news.set()
        if self._polling and not self._polling.done():
            self._polling.set_result(None)

    # --- HTTP ---

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if (match := re.fullmatch(r"/file/bot([^/]+)/(.+)", scope["path"])) and match[1] == self.token:
            content = self.files.get(match[2])
            await _respond(send, 200 if content else 404, content or b"")
            return
        match = re.fullmatch(r"/bot([^/]+)/(\w+)", scope["path"])
        if match is None or match[1] != self.token:
            await _respond(send, 401, {"ok": False, "error_code": 401, "description": "Unauthorized"})
            return
        parameters = _read_parameters(body)
        await self._answer(match[2], parameters, send)

    async def _answer(self, method: str, parameters: Json, send: Any) -> None:
        self.calls.append((method, parameters))
        self._news.set()
        fault = self.faults[method].popleft() if self.faults[method] else None
        try:
            if fault is not None and fault.kind != "taken_then_reset":
                await self._apply(fault, send)
                return
            result = await getattr(self, f"_do_{method}")(parameters)
            if fault is not None:
                await _break_off(send)
                return
            await _respond(send, 200, {"ok": True, "result": result})
        except Refusal as refusal:
            await _respond(send, refusal.body["error_code"], refusal.body)
        finally:
            self._news.set()

    async def _apply(self, fault: Fault, send: Any) -> None:
        match fault.kind:
            case "flood":
                raise Refusal(
                    429, f"Too Many Requests: retry after {fault.seconds}", retry_after=fault.seconds
                )
            case "refuse":
                raise Refusal(fault.code, fault.description, **fault.parameters)
            case "error":
                await _respond(send, 502, b"<html>Bad Gateway</html>")
            case "nonsense":
                await _respond(send, 200, b"not JSON")
            case "hold":
                await self.released.wait()
                await _break_off(send)
            case _:
                await _break_off(send)

    # --- methods ---

    async def _do_getMe(self, parameters: Json) -> Json:
        assert not parameters
        return {"id": BOT_ID, "is_bot": True, "first_name": "Helper", "username": BOT_NAME}

    async def _do_getWebhookInfo(self, parameters: Json) -> Json:
        waiting = len(self.undelivered)
        return {"url": self.webhook["url"], "has_custom_certificate": False, "pending_update_count": waiting}

    async def _do_setWebhook(self, parameters: Json) -> bool:
        assert "drop_pending_updates" not in parameters
        self.webhook = parameters
        return True

    async def _do_deleteWebhook(self, parameters: Json) -> bool:
        assert parameters.get("drop_pending_updates") is not True, "what people wrote would be lost"
        self.webhook = {"url": "", "secret_token": None}
        return True

    async def _do_getUpdates(self, parameters: Json) -> list[Json]:
        if self.webhook["url"]:
            raise Refusal(409, "Conflict: can't use getUpdates method while webhook is active")
        offset = parameters.get("offset")
        if offset is not None:
            self.undelivered = [it for it in self.undelivered if it["update_id"] >= offset]
        if self._polling and not self._polling.done():
            self._polling.set_exception(
                Refusal(409, "Conflict: terminated by other getUpdates request; one bot instance only")
            )
        if not self.undelivered:
            self._polling = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(parameters["timeout"]):
                    await self._polling
            except TimeoutError:
                return []
        return self.undelivered[: parameters.get("limit", 100)]

    async def _do_sendMessage(self, parameters: Json) -> Json:
        unknown = parameters.keys() - {
            "chat_id",
            "text",
            "parse_mode",
            "message_thread_id",
            "link_preview_options",
        }
        assert not unknown, unknown
        chat = self._find_chat(parameters)
        topic = parameters.get("message_thread_id")
        if topic is not None and (topic == GENERAL or topic not in self.topics[chat]):
            raise Refusal(400, "Bad Request: message thread not found")
        text = parameters["text"]
        visible = read_visible(text) if parameters.get("parse_mode") == "HTML" else text
        if not visible.strip():
            raise Refusal(400, "Bad Request: message text is empty")
        if len(visible.encode("utf-16-le")) // 2 > MAX_UNITS:
            raise Refusal(400, "Bad Request: message is too long")
        self._message_id += 1
        self.shown.append(Shown(chat, topic, visible, parameters))
        return {"message_id": self._message_id, "date": 1, "chat": self.chats[chat], "text": visible}

    async def _do_sendChatAction(self, parameters: Json) -> bool:
        chat = self._find_chat(parameters)
        topic = parameters.get("message_thread_id")
        if topic is not None and topic not in self.topics[chat]:
            raise Refusal(400, "Bad Request: message thread not found")
        self.typing.append(parameters)
        return True

    async def _do_getFile(self, parameters: Json) -> Json:
        content = self.files.get(parameters["file_id"])
        if content is None:
            raise Refusal(400, "Bad Request: invalid file_id")
        name = parameters["file_id"]
        return {"file_id": name, "file_unique_id": name, "file_path": name, "file_size": len(content)}

    def _find_chat(self, parameters: Json) -> int:
        chat = parameters["chat_id"]
        assert isinstance(chat, int)
        if chat not in self.chats:
            raise Refusal(400, "Bad Request: chat not found")
        if moved := self.chats[chat].get("moved_to"):
            raise Refusal(400, "Bad Request: group chat was upgraded", migrate_to_chat_id=moved)
        if self.chats[chat].get("blocked"):
            raise Refusal(403, "Forbidden: bot was blocked by the user")
        return chat


def _read_parameters(body: bytes) -> Json:
    """The parameters of a call, which Telegram takes as JSON or as a form."""
    if not body or body.startswith(b"{"):
        return json.loads(body or b"{}")
    return {name: _read_value(value) for name, value in parse_qsl(body.decode())}


def _read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _find_entities(text: str) -> list[Json]:
    found: list[Json] = []
    for kind, pattern in (("bot_command", r"^/\w+(?:@\w+)?"), ("mention", r"(?<!\w)@\w+")):
        for match in re.finditer(pattern, text):
            offset = len(text[: match.start()].encode("utf-16-le")) // 2
            length = len(match[0].encode("utf-16-le")) // 2
            if not any(it["type"] == "bot_command" and it["length"] > offset for it in found):
                found.append({"type": kind, "offset": offset, "length": length})
    return found


async def _respond(send: Any, status: int, body: Json | bytes) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": content})


async def _break_off(send: Any) -> None:
    """Close the connection in the middle of an answer."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
    await send({"type": "http.response.body", "body": b"{", "more_body": True})
