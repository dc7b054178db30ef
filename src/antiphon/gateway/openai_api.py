"""What the OpenAI-compatible endpoints share: which agent, which session, what was said, and their errors.

A model of this API is an agent here, and it has a memory: with a session key or a `user` the session remembers, so
only the last message of a request is new. Without either every request is a conversation of its own, and what the
client says was said before is put in front of the last message, framed as that.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from antiphon import access, keys
from antiphon.access import Caller
from antiphon.config import Config
from antiphon.errors import AntiphonError, InvalidInput, NotFound
from antiphon.gateway import attachments
from antiphon.gateway.gateway import Gateway
from antiphon.gateway.replies import BODY, UNEXPECTED, error_headers, error_type, json_reply, waited
from antiphon.messages import Image, Text
from antiphon.operations import Message
from antiphon.views import RunView

NAME = "antiphon"
_MODEL = re.compile(r"(?:(?:antiphon|openclaw)(?:[/:](.+))?|agent:(.+)|(.+))", re.IGNORECASE | re.DOTALL)
_DATA = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,(.*)", re.IGNORECASE | re.DOTALL)
_NAMESPACE = uuid.UUID("5b0e6d43-6c8f-4f0a-9f0e-5f0d7c1f3a11")
_STATUS = {"timeout": 504, "cancelled": 409}  # of a run that gave no answer; any other is 502

Content = str | list[Text | Image]


class Said(msgspec.Struct, frozen=True):
    """One message of a request, whichever endpoint it came to."""

    role: str
    content: Content


class Place(msgspec.Struct, frozen=True):
    """Where a request is answered. A fresh session has nothing in it yet."""

    session: str
    fresh: bool


# --- agents ---


def agent_named(config: Config, model: str) -> str:
    """The agent that a model's name means; `antiphon` and `…/default` are the default one."""
    found = _MODEL.fullmatch(model.strip())
    name = next(filter(None, found.groups()), "default").lower() if found else ""
    if name == "default":
        return config.default_agent_id
    if name not in config.agent_ids:
        raise NotFound(
            f"There is no model {model[:80]!r}.",
            "GET /v1/models lists them.",
            code="model_not_found",
            param="model",
        )
    return name


async def get_models(gateway: Gateway, caller: Caller, request: Request) -> Response:
    access.require_scope(caller, "list")
    config = gateway.house.config
    names = [NAME, *(f"{NAME}/{agent_id}" for agent_id in config.agent_ids)]
    created = gateway.started_at // 1000
    models = [{"id": name, "object": "model", "created": created, "owned_by": NAME} for name in names]
    return json_reply({"object": "list", "data": models})


# --- sessions ---


def place_for(config: Config, request: Request, agent_id: str, user: str | None) -> Place:
    headers = request.headers
    named = headers.get("x-antiphon-session-key") or headers.get("x-openclaw-session-key")
    if named:
        return Place(_named(config, named, agent_id), fresh=False)
    if user:
        return Place(str(keys.owned_key(agent_id, "openai-user", user)), fresh=False)
    # Asked again with the same key, the same session is meant: a new one would be another request.
    again = headers.get("idempotency-key")
    unique = uuid.uuid5(_NAMESPACE, again) if again else uuid.uuid4()
    return Place(str(keys.owned_key(agent_id, "openai", str(unique))), fresh=True)


def _named(config: Config, reference: str, agent_id: str) -> str:
    session = config.session
    key = keys.canonicalise(reference, agent_id=agent_id, main_key=session.main_key, scope=session.scope)
    if isinstance(key, keys.SessionIdRef):
        return key.value
    if key.shape == "global":
        return f"agent:{agent_id}:main"
    if key.agent_id != agent_id:
        raise InvalidInput(
            f"Session {str(key)!r} does not belong to the agent {agent_id!r}, which 'model' names.",
            f"Use the model {NAME}/{key.agent_id}.",
            field="model",
        )
    return str(key)


# --- words ---


def message_of(request: Request, place: Place, said: Sequence[Said], instructions: str | None) -> Message:
    """The words for the session: the last thing a user said, and before it what is not remembered here."""
    asked = max((at for at, one in enumerate(said) if one.role == "user"), default=None)
    if asked is None:
        raise InvalidInput("There is no message of a user.", "Send one.", field="messages")
    rules = [_text(one.content) for one in said if one.role in {"system", "developer"}]
    earlier = [one for one in said[:asked] if one.role not in {"system", "developer"}]
    content = said[asked].content
    return Message(
        session=place.session,
        content=_framed(earlier, content) if place.fresh and earlier else content,
        idempotency_key=request.headers.get("idempotency-key"),
        origin="openai",
        instructions="\n\n".join(filter(None, [instructions, *rules])) or None,
    )


def _framed(earlier: Sequence[Said], content: Content) -> Content:
    lines = [f"[{one.role}]\n{_text(one.content)}" for one in earlier]
    frame = "\n\n".join(["[What was said before, as the client tells it]", *lines, "[The message to answer]"])
    if isinstance(content, str):
        return f"{frame}\n{content}"
    return [Text(text=frame), *content]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(b.text for b in content if isinstance(b, Text))


def image(url: str, where: str) -> Image:
    """An image that the request carries. None is fetched: an address may be anybody's."""
    found = _DATA.fullmatch(url)
    if not found:
        raise InvalidInput(
            f"The image at {where} is not a data: URL.",
            "Send the image itself, as data:<type>;base64,<data>.",
            field=where,
        )
    return attachments.image(found[2], found[1].lower(), where)


def body_limit(config: Config) -> int:
    """A message may be as long as the store takes it, and JSON may need twice as many bytes for it."""
    return max(BODY, 2 * config.store.message_max_bytes)


# --- endings ---


async def run_to_end(gateway: Gateway, caller: Caller, request: Request, message: Message) -> RunView:
    """Submit and wait. The run goes on whether or not somebody still waits for it."""
    operations, longest = gateway.house.operations, gateway.house.config.agents.defaults.timeout_seconds
    accepted = await operations.submit(caller, message)
    return await waited(request, gateway.closing, operations.wait(caller, accepted.run_id, longest))


def answered(view: RunView) -> bool:
    """Whether there is an answer, be it one that reached the model's limit."""
    return view.state == "ok" or (view.state == "incomplete" and bool(view.reply))


def run_error(view: RunView) -> dict[str, Any]:
    if not view.ended:
        message = (
            f"The run {view.run_id!r} has not ended yet; it goes on. Ask again with the same Idempotency-Key."
        )
        return error_body(message, "timeout", "timeout")
    return error_body(view.error or "The run gave no answer.", "server_error", view.error_code)


def run_error_reply(view: RunView) -> Response:
    # It did happen: a client that asks again by itself would make it happen again.
    status = _STATUS.get(view.state, 502) if view.ended else 504
    return json_reply(run_error(view), status, {"x-should-retry": "false"})


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_reply(error: AntiphonError) -> Response:
    data: Mapping[str, Any] = error.data
    param = data.get("param") or data.get("field")
    kind = "invalid_request_error" if error.http in {400, 404, 413} else error_type(error)
    code = data.get("code") or error.code
    return json_reply(error_body(str(error), kind, code, param), error.http, error_headers(error))


def unexpected_reply() -> Response:
    return json_reply(error_body(UNEXPECTED, "server_error", "internal"), 500)
