"""An ACP agent that breaks the protocol. The message names the fault, and a turn ends with an answer after it.

Messages are written by hand, because a library would not send these.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

SESSION_ID = "one"
UNSAFE_MODEL = "\x1b[31m<|im_start|>system"
Json = dict[str, Any]


def write(message: Json) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")


def update(update_kind: str, /, **fields: Any) -> None:
    params = {"sessionId": SESSION_ID, "update": {"sessionUpdate": update_kind, **fields}}
    write({"method": "session/update", "params": params})


def say(text: str, kind: str = "agent_message_chunk") -> None:
    update(kind, content={"type": "text", "text": text})


def send_invalid_id(_: str) -> None:
    write({"id": {"not": "an id"}, "result": {}})


def say_prompt(_: str) -> None:
    """Say everything that the message came with."""
    say(json.dumps([block["text"] for block in request["params"]["prompt"]]))


def send_unreadable_fields(_: str) -> None:
    update("tool_call", toolCallId="a", title=["x"], kind=["x"], status=["x"], content={}, rawInput=1)
    update("tool_call_update", toolCallId="a", status="completed", rawOutput="done")


def send_deep_input(levels: str) -> None:
    nested: Any = "core"
    for _level in range(int(levels)):
        nested = {"a": nested}
    update("tool_call", toolCallId="deep", status="in_progress", rawInput=nested)
    update("tool_call_update", toolCallId="deep", status="completed", rawOutput=nested)


def send_diff(lines: str) -> None:
    """Send the change of a file that is hard to compare: its lines repeat, in another order."""
    numbers = [index * 37 % 131 for index in range(int(lines))]
    old, new = ("\n".join(f"line {number}" for number in each) for each in (numbers, reversed(numbers)))
    change = {"type": "diff", "path": "file", "oldText": old, "newText": new}
    update("tool_call", toolCallId="diff", kind="edit", status="completed", content=[change])


def send_requests(count: str) -> None:
    """Ask for what is not offered, again and again, without reading an answer."""
    for number in range(int(count)):
        write({"id": f"r{number}", "method": "fs/read_text_file", "params": {"sessionId": SESSION_ID}})


def ask_again_and_again(count: str) -> None:
    options = [{"optionId": "yes", "name": "Yes", "kind": "allow_once"}]
    for number in range(int(count)):
        call = {"toolCallId": "same", "title": "one", "kind": "execute"}
        params = {"sessionId": SESSION_ID, "toolCall": call, "options": options}
        write({"id": f"p{number}", "method": "session/request_permission", "params": params})


def alternate(count: str) -> None:
    for _number in range(int(count)):
        say("a", "agent_thought_chunk")
        say("b")


def hold_calls(megabytes: str) -> None:
    """Begin calls with long arguments, and end none of them."""
    for number in range(int(megabytes)):
        update("tool_call", toolCallId=f"long{number}", status="pending", rawInput={"text": "x" * 2**20})


def close_input(_: str) -> None:
    """Read nothing more, but go on; an answer would never come."""
    os.close(0)
    write({"id": "r", "method": "fs/read_text_file", "params": {"sessionId": SESSION_ID}})
    sys.stdout.flush()
    threading.Event().wait()


def stop_reading(_: str) -> None:
    """Answer this message, and read no other."""
    say("end")
    write({"id": request["id"], "result": {"stopReason": "end_turn"}})
    sys.stdout.flush()
    threading.Event().wait()


def use_tool(_: str) -> None:
    update("tool_call", toolCallId="t", kind="read", status="completed", rawOutput="read")


FAULTS: dict[str, Callable[[str], None]] = {
    "id": send_invalid_id,
    "fields": send_unreadable_fields,
    "deep": send_deep_input,
    "diff": send_diff,
    "requests": send_requests,
    "permissions": ask_again_and_again,
    "alternate": alternate,
    "hold": hold_calls,
    "close": close_input,
    "deaf": stop_reading,
    "tool": use_tool,
    "prompt": say_prompt,
    "say": say,
}


def read_requests() -> Iterator[Json]:
    for line in sys.stdin:
        message = json.loads(line)
        if "method" in message and "id" in message:
            yield message


for request in read_requests():
    result: Json = {"protocolVersion": 1, "agentCapabilities": {}, "sessionId": SESSION_ID}
    if request["method"] == "session/new":
        result["models"] = {"currentModelId": UNSAFE_MODEL, "availableModels": []}
    if request["method"] == "session/prompt":
        word, _separator, rest = request["params"]["prompt"][-1]["text"].partition(":")
        if word == "error":
            write({"id": request["id"], "error": "a text instead of an object"})
            sys.stdout.flush()
            continue
        FAULTS[word](rest)
        say(" end")
        result = {"stopReason": "end_turn"}
    write({"id": request["id"], "result": result})
    sys.stdout.flush()
