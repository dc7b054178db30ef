"""`antiphon agent`: sends one message, prints the answer, and exits with a code for the outcome."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli._options import Settings, common_options, gateway_options, get_session_reference
from antiphon.cli._param_types import FiniteNumberParam
from antiphon.cli.send import MAX_WAIT_SECONDS, print_run_outcome

if TYPE_CHECKING:
    from antiphon.cli._backend import Backend
    from antiphon.operations.types import IncomingMessage, RunView


@click.command(help="Send one message to an agent and print the answer.")
@click.option("--message", "text", required=True, metavar="TEXT", help="Message to send.")
@click.option("--agent", metavar="ID", help="Agent to use; default: the default agent.")
@click.option("--session", "key", metavar="KEY", help="Session to use; default: the agent's main session.")
@click.option(
    "--timeout",
    type=FiniteNumberParam("seconds", 0, MAX_WAIT_SECONDS, min_open=True),
    metavar="SECONDS",
    help="Stop the run after this time; default: from the configuration.",
)
@gateway_options
@common_options
@click.pass_obj
def command(settings: Settings, text: str, agent: str | None, key: str | None, timeout: float | None) -> int:
    from antiphon.operations.types import IncomingMessage

    message = IncomingMessage(
        session=get_session_reference(agent, key), content=text, origin="agent", timeout_seconds=timeout
    )
    return print_run_outcome(settings, asyncio.run(_submit_and_wait(settings, message)))


async def _submit_and_wait(settings: Settings, message: IncomingMessage) -> RunView:
    from antiphon.cli._backend import open_backend_for_messages, remember_replicas, wait_with_handover
    from antiphon.cli._wait import explain_early_exit, print_accepted_run, show_approvals, wait_for_run_end

    async def wait_for_answer(backend: Backend) -> RunView:
        async with show_approvals(backend, accepted, silent=settings.json):
            return await wait_for_run_end(backend, accepted.run_id)

    async with open_backend_for_messages(settings) as (backend, gateway):
        hosted = gateway is None
        await remember_replicas(settings, gateway)
        with explain_early_exit(message.session, hosted=hosted):
            accepted = await backend.submit(message)
        if not settings.json:
            print_accepted_run(accepted.run_id, accepted.session_key)
        with explain_early_exit(accepted.session_key, hosted=hosted, run_id=accepted.run_id):
            return await wait_with_handover(backend, wait_for_answer)
