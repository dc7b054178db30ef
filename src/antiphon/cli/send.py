"""`antiphon send`: sends a message to a session and optionally waits for the answer."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._errors import get_run_exit_code
from antiphon.cli._options import Settings, common_options, gateway_options
from antiphon.cli._param_types import FiniteNumberParam, IntegerParam
from antiphon.send_policy import parse_send_command

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend
    from antiphon.operations.collaboration_types import SendResult
    from antiphon.operations.types import IncomingMessage, MessageReceipt, RunView, SendRequest

MAX_WAIT_SECONDS = 366 * 86_400
MAX_REPLY_WAIT_SECONDS = 3600  # how long one session may wait for another


@click.command(
    help="Send a message to a session, as yourself or from another session (--from). It is stored durably before it is "
    "reported as accepted."
)
@click.argument("session")
@click.argument("text", required=False)
@click.option("--channel", metavar="NAME", help="Post to a chat of this channel instead, as it is.")
@click.option("--to", metavar="ID", help="With --channel: the person or group.")
@click.option("--account", metavar="NAME", help="With --channel: the account that posts.")
@click.option("--thread", metavar="ID", help="With --channel: the thread or topic.")
@click.option(
    "--wait",
    "seconds",
    type=FiniteNumberParam("seconds", 0, MAX_WAIT_SECONDS),
    metavar="SECONDS",
    help="Wait for the answer and print it.",
)
@click.option(
    "--key", metavar="IDEMPOTENCY", help="Idempotency key: a repeated key does not send the message again."
)
@click.option(
    "--from",
    "sender",
    metavar="SESSION",
    help="Session that sends the message; the two can then reply to each other.",
)
@click.option(
    "--reply-back", type=IntegerParam(0, 5), metavar="N", help="With --from: maximum number of reply turns."
)
@click.option(
    "--no-announce",
    is_flag=True,
    help="With --from: do not announce the outcome in the other session's chat.",
)
@gateway_options
@common_options
@click.pass_obj
def command(
    settings: Settings,
    session: str,
    text: str | None,
    channel: str | None,
    to: str | None,
    account: str | None,
    thread: str | None,
    seconds: float | None,
    key: str | None,
    sender: str | None,
    reply_back: int | None,
    no_announce: bool,
) -> int:
    from antiphon.engine.validation import validate_idempotency_key
    from antiphon.operations.types import IncomingMessage, SendRequest

    validate_idempotency_key(key)
    if channel is not None or to is not None or account is not None or thread is not None:
        if channel is None or to is None or sender is not None or seconds is not None:
            raise click.UsageError("--channel and --to belong together, without --from and --wait.")
        chat = {"channel": channel, "to": to, "accountId": account, "threadId": thread}
        return _post_to_chat(settings, session, text, key, chat)
    if text is None:
        raise click.UsageError("Missing argument 'TEXT'.")
    if sender is None:
        if reply_back is not None or no_announce:
            raise click.UsageError("--reply-back and --no-announce need --from.")
        return _send_as_operator(
            settings, IncomingMessage(session=session, content=text, idempotency_key=key), seconds
        )
    if seconds is not None and seconds > MAX_REPLY_WAIT_SECONDS:
        raise click.UsageError(f"With --from, --wait is at most {MAX_REPLY_WAIT_SECONDS} seconds.")
    request = SendRequest(
        session=session,
        message=text,
        timeout_seconds=seconds or 0,
        idempotency_key=key or str(uuid.uuid4()),
        reply_back=reply_back,
        announce="none" if no_announce else "target",
    )
    sent, view = asyncio.run(_send_between_sessions(settings, request, sender))
    return _print_exchange_outcome(settings, sent, view, seconds or 0)


def _post_to_chat(
    settings: Settings, session: str, text: str | None, key: str | None, chat: dict[str, str | None]
) -> int:
    """Post a text to a chat. Of two arguments, the first is the session in whose name it is posted."""
    params: dict[str, str] = {name: value for name, value in chat.items() if value is not None}
    params |= {"message": session if text is None else text, "idempotencyKey": key or str(uuid.uuid4())}
    params |= {} if text is None else {"sessionKey": session}
    posted = asyncio.run(_call_gateway(settings, params))
    if settings.json:
        _output.print_json(posted)
    else:
        click.echo(f"Posted. What becomes of it: {_output.PROGRAM_NAME} deliveries")
    return 0


async def _call_gateway(settings: Settings, params: dict[str, str]) -> object:
    from antiphon.cli._backend import make_gateway_client
    from antiphon.errors import Unavailable

    client = make_gateway_client(settings)
    if client is None:
        raise Unavailable("No gateway runs, and only a gateway posts to chats.", "Start it: `antiphon up`.")
    async with client:
        return await client.call("send", params)


def _send_as_operator(settings: Settings, message: IncomingMessage, seconds: float | None) -> int:
    accepted, view = asyncio.run(_submit_message(settings, message, seconds))
    is_answered_command = view.has_ended and parse_send_command(str(message.content)) is not None
    if seconds is not None or (is_answered_command and not settings.json):
        return print_run_outcome(settings, view, seconds or 0)
    if settings.json:
        _output.print_json(accepted)
    else:
        _print_accepted_with_hint(accepted.run_id, accepted.session_key)
    return 0


async def _submit_message(
    settings: Settings, message: IncomingMessage, seconds: float | None
) -> tuple[MessageReceipt, RunView]:
    from antiphon.cli._backend import open_backend_for_messages, remember_replicas, wait_with_handover
    from antiphon.cli._wait import explain_early_exit, print_accepted_run, show_approvals, wait_for_run_end

    async def wait_for_answer(backend: Backend) -> RunView:
        async with show_approvals(backend, accepted, silent=settings.json or not seconds):
            # Only this process can answer, so it stays until the run has ended.
            if seconds is None:
                return await wait_for_run_end(backend, accepted.run_id)
            return await backend.wait(accepted.run_id, max(0, until - loop.time()))

    loop = asyncio.get_running_loop()
    async with open_backend_for_messages(settings) as (backend, gateway):
        hosted = gateway is None
        if seconds:
            await remember_replicas(settings, gateway)
        # The message may be accepted before the acknowledgement arrives.
        with explain_early_exit(message.session, hosted=hosted):
            accepted = await backend.submit(message)
        if seconds and not settings.json:
            print_accepted_run(accepted.run_id, accepted.session_key)
        with explain_early_exit(accepted.session_key, hosted=hosted, run_id=accepted.run_id):
            if seconds is None and not hosted:
                return accepted, await backend.wait(accepted.run_id, 0)
            until = loop.time() + (seconds or 0)
            return accepted, await wait_with_handover(backend, wait_for_answer)


async def _send_between_sessions(
    settings: Settings, request: SendRequest, sender: str
) -> tuple[SendResult, RunView]:
    import msgspec

    from antiphon.cli._backend import open_backend_for_messages, wait_with_handover
    from antiphon.cli._references import ensure_session_exists
    from antiphon.cli._wait import explain_early_exit, print_accepted_run, wait_until_idle

    async def wait_for_outcome(backend: Backend) -> tuple[SendResult, RunView]:
        # The same idempotency key is the same message, so this call only waits.
        result = sent
        if request.timeout_seconds:
            left = max(0, until - loop.time())
            result = await backend.send(msgspec.structs.replace(request, timeout_seconds=left), sender)
        # Only this process can answer, and the exchange may have further turns.
        if hosted and result.status != "timeout":
            await wait_until_idle(backend, sender, sent.session_key)
        return result, await backend.wait(sent.run_id, 0)

    loop = asyncio.get_running_loop()
    target = request.session or ""
    async with open_backend_for_messages(settings) as (backend, gateway):
        hosted = gateway is None
        for session in (sender, target):
            await ensure_session_exists(backend, session)
        with explain_early_exit(target, hosted=hosted):
            sent = await backend.send(msgspec.structs.replace(request, timeout_seconds=0), sender)
        if request.timeout_seconds and not settings.json:
            print_accepted_run(sent.run_id, sent.session_key)
        until = loop.time() + request.timeout_seconds
        with explain_early_exit(sent.session_key, hosted=hosted, run_id=sent.run_id):
            return await wait_with_handover(backend, wait_for_outcome)


def print_run_outcome(settings: Settings, view: RunView, seconds: float = 0) -> int:
    """Print how a run ended, and return the matching exit code."""
    if settings.json:
        _output.print_json(view)
    elif not view.has_ended:
        print_timeout_notice(view, seconds)
    else:
        if view.reply:
            _output.print_wrapped("", _output.clean_text(view.reply))
        if view.state != "ok":
            _output.print_wrapped(
                "", _output.clean_text(view.error or f"The run ended as {view.state!r}."), err=True
            )
    return get_run_exit_code(view)


def _print_exchange_outcome(settings: Settings, sent: SendResult, view: RunView, seconds: float) -> int:
    """Print the outcome of an exchange, of which only the first answer is awaited."""
    if settings.json:
        _output.print_json(sent)
    elif sent.status == "accepted":
        _print_accepted_with_hint(sent.run_id, sent.session_key)
    elif sent.status == "timeout":
        print_timeout_notice(view, seconds)
    else:
        click.echo(_output.clean_text(sent.reply or sent.error or ""), err=sent.status == "error")
    return 0 if sent.status in {"accepted", "ok"} else get_run_exit_code(view) or 1


def _print_accepted_with_hint(run_id: str, session_key: str) -> None:
    key = _output.clean_line(session_key)
    _output.print_wrapped("", f"Accepted: run {_output.clean_line(run_id)} in {key}.")
    click.echo(_output.dim(f"The answer: {_output.format_program()} sessions history {key}"), err=True)


def print_timeout_notice(view: RunView, seconds: float) -> None:
    """Print that no answer came in time. The message was delivered and must not be sent again."""
    key = _output.clean_line(view.session_key)
    if view.state == "queued":
        where = f"is number {view.position} in the queue"
    else:
        where = f"has been running for {_output.format_duration(view.running_ms or 0)}"
    _output.print_wrapped(
        "",
        f"No answer after {seconds:g} s. The message was delivered and {where}; the run continues. "
        f"Look later: {_output.format_program()} sessions history {key}",
        err=True,
    )
