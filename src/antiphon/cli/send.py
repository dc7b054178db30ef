"""`antiphon send`: words for a session, and its answer if somebody waits for it."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.failures import outcome
from antiphon.cli.quantities import Finite
from antiphon.cli.settings import Settings, common, reaching

if TYPE_CHECKING:
    from antiphon.operations import Message, Send
    from antiphon.views import Accepted, RunView, Sent

LONGEST = 366 * 86_400  # seconds
LONGEST_REPLY = 3600  # seconds that one session waits for another


@click.command(
    help="Say something to a session, or let one session say it to another (--from). It is durable when this says so."
)
@click.argument("session")
@click.argument("text")
@click.option(
    "--wait",
    "seconds",
    type=Finite("seconds", 0, LONGEST),
    metavar="SECONDS",
    help="Wait so long for the answer, and print it.",
)
@click.option(
    "--key", metavar="IDEMPOTENCY", help="Said again with the same key, it is the same message; default: new."
)
@click.option(
    "--from",
    "sender",
    metavar="SESSION",
    help="The session that says it; the two may then answer each other.",
)
@click.option(
    "--reply-back", type=click.IntRange(0, 5), metavar="N", help="With --from: at most N turns of that."
)
@click.option("--no-announce", is_flag=True, help="With --from: nothing is told to the other one's chat.")
@reaching
@common
@click.pass_obj
def command(
    settings: Settings,
    session: str,
    text: str,
    seconds: float | None,
    key: str | None,
    sender: str | None,
    reply_back: int | None,
    no_announce: bool,
) -> int:
    from antiphon.engine.words import check_key
    from antiphon.operations import Message, Send

    check_key(key)
    if sender is None:
        if reply_back is not None or no_announce:
            raise click.UsageError("--reply-back and --no-announce are for what is said --from a session.")
        return _say(settings, Message(session=session, content=text, idempotency_key=key), seconds)
    if seconds is not None and seconds > LONGEST_REPLY:
        raise click.UsageError(f"With --from, --wait is at most {LONGEST_REPLY} seconds.")
    wanted = Send(
        session=session,
        message=text,
        timeout_seconds=seconds or 0,
        idempotency_key=key or str(uuid.uuid4()),
        reply_back=reply_back,
        announce="none" if no_announce else "target",
    )
    sent, view = asyncio.run(_exchange(settings, wanted, sender))
    return _told(settings, sent, view, seconds or 0)


def _say(settings: Settings, message: Message, seconds: float | None) -> int:
    accepted, view = asyncio.run(_send(settings, message, seconds))
    if seconds is not None:
        return tell(settings, view, seconds)
    if settings.json:
        output.emit(accepted)
    else:
        _accepted(accepted.run_id, accepted.session_key)
    return 0


async def _send(settings: Settings, message: Message, seconds: float | None) -> tuple[Accepted, RunView]:
    from antiphon.cli.desk import remember_replicas, talking
    from antiphon.cli.staying import leaving, tell_accepted, to_the_end

    async with talking(settings) as (desk, gateway):
        hosted = gateway is None
        if seconds:
            await remember_replicas(settings, gateway)
        with leaving(message.session, hosted=hosted):  # it may be accepted before the acknowledgement arrives
            accepted = await desk.submit(message)
        if seconds and not settings.json:
            tell_accepted(accepted.run_id, accepted.session_key)
        with leaving(accepted.session_key, hosted=hosted, run_id=accepted.run_id):
            if (
                seconds is None and hosted
            ):  # only this process can answer, so it stays until the run has ended
                return accepted, await to_the_end(desk, accepted.run_id)
            return accepted, await desk.wait(accepted.run_id, seconds or 0)


async def _exchange(settings: Settings, wanted: Send, sender: str) -> tuple[Sent, RunView]:
    import msgspec

    from antiphon.cli.desk import talking
    from antiphon.cli.parties import present
    from antiphon.cli.staying import leaving, quiet, tell_accepted

    target = wanted.session or ""
    async with talking(settings) as (desk, gateway):
        for session in (sender, target):
            await present(desk, session)
        with leaving(target, hosted=gateway is None):
            sent = await desk.send(msgspec.structs.replace(wanted, timeout_seconds=0), sender)
        if wanted.timeout_seconds and not settings.json:
            tell_accepted(sent.run_id, sent.session_key)
        with leaving(sent.session_key, hosted=gateway is None, run_id=sent.run_id):
            if wanted.timeout_seconds:  # the same key is the same message, so this only waits
                sent = await desk.send(wanted, sender)
            if gateway is None and sent.status != "timeout":  # as above, and the two may have more to say
                await quiet(desk, sender, sent.session_key)
            return sent, await desk.wait(sent.run_id, 0)


def tell(settings: Settings, view: RunView, seconds: float = 0) -> int:
    """Print how a run ended; the exit code that says the same."""
    if settings.json:
        output.emit(view)
    elif not view.ended:
        late(view, seconds)
    else:
        if view.reply:
            click.echo(output.clean(view.reply))
        if view.state != "ok":
            click.echo(output.clean(view.error or f"The run ended as {view.state!r}."), err=True)
    return outcome(view)


def _told(settings: Settings, sent: Sent, view: RunView, seconds: float) -> int:
    """The same of an exchange, of which only the first answer is waited for."""
    if settings.json:
        output.emit(sent)
    elif sent.status == "accepted":
        _accepted(sent.run_id, sent.session_key)
    elif sent.status == "timeout":
        late(view, seconds)
    else:
        click.echo(output.clean(sent.reply or sent.error or ""), err=sent.status == "error")
    return 0 if sent.status in {"accepted", "ok"} else outcome(view) or 1


def _accepted(run_id: str, session_key: str) -> None:
    key = output.line(session_key)
    click.echo(f"Accepted: run {output.line(run_id)} in {key}.")
    click.echo(output.dim(f"The answer: antiphon sessions history {key}"), err=True)


def late(view: RunView, seconds: float) -> None:
    """No answer in time is no failure: what was delivered is not to be sent again."""
    key = output.line(view.session_key)
    if view.state == "queued":
        where = f"is number {view.position} in its line"
    else:
        where = f"has been worked on for {output.lasting(view.running_ms or 0)}"
    click.echo(
        f"There is no answer after {seconds:g} s. The message was delivered and {where}; the run goes on. "
        f"Look later: antiphon sessions history {key}",
        err=True,
    )
