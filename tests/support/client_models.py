"""A model on HTTP for coding agents: Anthropic's messages and OpenAI's responses, as streams.

It plays a script: one tool call after the other, and a text after the last. Which one is next is told by the number of
results in the request, so it answers side questions of an agent (titles, summaries) with the text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

Json = dict[str, Any]


class ScriptedCall(NamedTuple):
    """A call of the first tool whose name ends like this."""

    tool: str
    arguments: Json


class ClientModel:
    def __init__(self, calls: Sequence[ScriptedCall], text: str) -> None:
        self._calls, self._text = calls, text
        self.results: list[str] = []
        """What the tools returned, as the last request has it."""
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[ClientModel]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (
                    int(line.split(":")[1])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length:")
                ),
                0,
            )
            body = json.loads(await reader.readexactly(length) or b"{}")
            path = head.split(" ")[1].partition("?")[0]
            if path.endswith("/messages"):
                kind, content = "text/event-stream", "".join(map(_format_event, self._answer_messages(body)))
            elif path.endswith("/responses"):
                kind, content = "text/event-stream", "".join(map(_format_event, self._answer_responses(body)))
            else:
                kind, content = "application/json", '{"data": [], "input_tokens": 1}'
            writer.write(
                f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(content.encode())}\r\n"
                f"Connection: close\r\n\r\n{content}".encode()
            )
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the agent has ended
        finally:
            writer.close()

    def _choose(self, names: Sequence[str], results: list[str]) -> tuple[str, ScriptedCall] | None:
        """Return the name of the tool to call next and the call, or None if the text is next."""
        if not any(name.endswith(self._calls[0].tool) for name in names):
            return None  # a side question
        self.results = results
        if len(results) >= len(self._calls):
            return None
        call = self._calls[len(results)]
        return next(name for name in names if name.endswith(call.tool)), call

    def _answer_messages(self, body: Json) -> Iterator[Json]:
        blocks = [
            block
            for message in body.get("messages", [])
            if isinstance(message["content"], list)
            for block in cast("list[Json]", message["content"])
        ]
        results = [json.dumps(block["content"]) for block in blocks if block.get("type") == "tool_result"]
        chosen = self._choose([tool["name"] for tool in body.get("tools", [])], results)
        usage = {"input_tokens": 1, "output_tokens": 1}
        message: Json = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
        yield {"type": "message_start", "message": {**message, "stop_reason": None, "usage": usage}}
        if chosen is None:
            block: Json = {"type": "text", "text": ""}
            delta: Json = {"type": "text_delta", "text": self._text}
        else:
            name, call = chosen
            block = {"type": "tool_use", "id": f"toolu_{len(results)}", "name": name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(call.arguments)}
        yield {"type": "content_block_start", "index": 0, "content_block": block}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
        yield {"type": "content_block_stop", "index": 0}
        reason = "end_turn" if chosen is None else "tool_use"
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": usage,
        }
        yield {"type": "message_stop"}

    def _answer_responses(self, body: Json) -> Iterator[Json]:
        results = [
            json.dumps(item["output"])
            for item in body.get("input", [])
            if item.get("type") == "function_call_output"
        ]
        names: list[str] = []
        namespaces: dict[str, str] = {}
        for tool in body.get("tools", []):
            for inner in tool.get("tools", [tool]):
                names.append(inner.get("name", ""))
                if inner is not tool:
                    namespaces[inner["name"]] = tool["name"]
        chosen = self._choose(names, results)
        response: Json = {"id": "resp_1", "object": "response", "status": "in_progress", "output": []}
        yield {"type": "response.created", "response": response}
        item: Json
        if chosen is None:
            part: Json = {"type": "output_text", "text": self._text, "annotations": []}
            item = {"type": "message", "id": "item_1", "role": "assistant", "content": [part]}
        else:
            name, call = chosen
            item = {"type": "function_call", "id": "item_1", "call_id": f"call_{len(results)}", "name": name}
            item["arguments"] = json.dumps(call.arguments)
            if name in namespaces:
                item["namespace"] = namespaces[name]
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        completed = {**response, "status": "completed", "output": [item], "usage": usage}
        yield {"type": "response.completed", "response": completed}


def _format_event(event: Json) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
