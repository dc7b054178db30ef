"""The connection to an editor: JSON-RPC messages, one per line, on standard input and output.

This knows the framing and what must be bounded, not the methods of the protocol. The library of the protocol is not
used: it takes half a second to import, and it bounds neither messages nor requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import msgspec

from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.runtimes.text import decode_foreign_json
from antiphon.standard_streams import LineWriter, read_lines

log = logging.getLogger(__name__)

Json: TypeAlias = dict[str, Any]
RequestId: TypeAlias = str | int

MAX_LINE_BYTES = 32 * 2**20  # of one message; a prompt with several images fits
MAX_OPEN_REQUESTS = 100  # of the editor
MAX_OPEN_QUESTIONS = 100  # to the editor
EOF_GRACE_SECONDS = 5.0  # for requests to be answered after the end of the input

PARSE_ERROR_CODE, INVALID_REQUEST_CODE, METHOD_NOT_FOUND_CODE = -32700, -32600, -32601
INVALID_PARAMS_CODE, INTERNAL_ERROR_CODE, NOT_FOUND_CODE = -32602, -32603, -32002


class MethodNotFound(Exception):
    """The editor asked for a method that is not offered."""


class QuestionRefused(Exception):
    """The editor answered a question with an error."""


class Answer(NamedTuple):
    """The result of a request, and what to do when it has been sent."""

    result: Json
    then: Callable[[], Awaitable[None]] | None = None


class RequestHandler(Protocol):
    """Handles an editor's messages."""

    async def handle_request(self, method: str, params: object) -> Answer:
        """Return the answer.

        Raises:
            AntiphonError: the request is refused. `MethodNotFound`: the method is unknown.
        """
        ...

    def handle_notification(self, method: str, params: object) -> None: ...

    def handle_end(self) -> None:
        """Note that the editor is gone, so that requests end early."""
        ...


class EditorConnection:
    """Serves one editor on file descriptors until the end of its input."""

    def __init__(
        self,
        handler: RequestHandler,
        report: Callable[[AntiphonError], None],
        *,
        input_fd: int = 0,
        output_fd: int = 1,
    ) -> None:
        """`report` is called with each error that a request is answered with, which editors often do not show."""
        self._handler = handler
        self._report = report
        self._input_fd, self._output = input_fd, LineWriter(output_fd)
        self._requests: dict[RequestId, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[Json]] = {}
        self._question_count = 0
        self._withdrawals: set[asyncio.Task[None]] = set()
        """Messages that withdraw a question."""

    async def run(self) -> None:
        try:
            async for line in read_lines(self._input_fd, MAX_LINE_BYTES):
                if line.strip():
                    await self._receive(line)
            self._handler.handle_end()
            if self._requests:
                await asyncio.wait(self._requests.values(), timeout=EOF_GRACE_SECONDS)
        finally:
            pending = list(self._requests.values())
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    # --- to the editor ---

    async def notify(self, method: str, params: Json) -> None:
        await self._write({"jsonrpc": "2.0", "method": method, "params": params})

    async def ask(self, method: str, params: Json) -> Json:
        """Ask the editor, and return its answer; that may take as long as a person takes.

        Raises:
            QuestionRefused: it answered with an error, or too many questions are open.
        """
        if len(self._questions) >= MAX_OPEN_QUESTIONS:
            raise QuestionRefused(f"{MAX_OPEN_QUESTIONS} questions are open")
        self._question_count += 1
        number = self._question_count
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            await self._write({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            return await answer
        except asyncio.CancelledError:  # not waited for: the editor may read nothing any more
            task = asyncio.create_task(self.notify("$/cancel_request", {"requestId": number}))
            self._withdrawals.add(task)
            task.add_done_callback(self._withdrawals.discard)
            raise
        finally:
            self._questions.pop(number, None)

    async def _write(self, message: Json) -> None:
        with suppress(BrokenPipeError):  # the editor is gone; the end of its input follows
            await self._output.write(msgspec.json.encode(message))

    # --- from the editor ---

    async def _receive(self, line: bytes) -> None:
        try:
            message = decode_foreign_json(line)
        except (ValueError, RecursionError):
            await self._write_error(None, PARSE_ERROR_CODE, "The line is not JSON.")
            return
        if not isinstance(message, dict):
            await self._write_error(None, INVALID_REQUEST_CODE, "The message is not a JSON object.")
            return
        message = cast("Json", message)
        method, id = message.get("method"), message.get("id")
        if method is None:
            self._settle_question(id, message)
        elif "id" not in message:
            self._handle_notification(str(method), message.get("params"))
        elif not isinstance(method, str) or not isinstance(id, str | int) or id in self._requests:
            await self._write_error(
                None, INVALID_REQUEST_CODE, "The request needs a method and an id that is not in use."
            )
        elif len(self._requests) >= MAX_OPEN_REQUESTS:
            await self._write_error(
                id, INTERNAL_ERROR_CODE, f"{MAX_OPEN_REQUESTS} requests are open. Try later."
            )
        else:
            task = asyncio.create_task(self._handle_request(id, method, message.get("params")))
            self._requests[id] = task
            task.add_done_callback(lambda _: self._requests.pop(id, None))

    def _settle_question(self, id: object, message: Json) -> None:
        question = self._questions.get(id) if isinstance(id, int) else None
        if question is None or question.done():
            return
        result: Any = message.get("result")
        if isinstance(result, dict):
            question.set_result(cast("Json", result))
        else:
            question.set_exception(QuestionRefused(str(message.get("error"))))

    def _handle_notification(self, method: str, params: object) -> None:
        try:
            self._handler.handle_notification(method, params)
        except AntiphonError as error:
            log.debug("The notification %r was ignored: %s", method, error)

    async def _handle_request(self, id: RequestId, method: str, params: object) -> None:
        try:
            answer = await self._handler.handle_request(method, params)
        except MethodNotFound:
            await self._write_error(id, METHOD_NOT_FOUND_CODE, f"The method {method!r} is not offered.")
            return
        except AntiphonError as error:
            self._report(error)
            await self._write_error(id, _choose_error_code(error), str(error))
            return
        except Exception as error:  # one faulty request must not end the others
            log.exception("The request %r failed", method)
            text = f"Unexpected error ({type(error).__name__}: {error})."
            await self._write_error(id, INTERNAL_ERROR_CODE, text)
            return
        await self._write({"jsonrpc": "2.0", "id": id, "result": answer.result})
        if answer.then is not None:
            await answer.then()

    async def _write_error(self, id: RequestId | None, code: int, text: str) -> None:
        await self._write({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": text}})


def _choose_error_code(error: AntiphonError) -> int:
    if isinstance(error, NotFound):
        return NOT_FOUND_CODE
    return INVALID_PARAMS_CODE if isinstance(error, InvalidInput) else INTERNAL_ERROR_CODE
