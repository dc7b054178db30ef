"""`antiphon approvals`: lists tool calls that wait for a person, and allows or denies them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options, gateway_options

if TYPE_CHECKING:
    from antiphon.operations.types import ApprovalView, GrantView


@click.group(
    help="List tool calls that wait for a person, and allow or deny them. Without a subcommand: `list`.",
    invoke_without_command=True,
)
@gateway_options
@common_options
@click.pass_context
def command(ctx: click.Context) -> None:
    if ctx.invoked_subcommand is None:
        _show_approvals(ctx.ensure_object(Settings))


@command.command("list")
@gateway_options
@common_options
@click.pass_obj
def list_approvals(settings: Settings) -> None:
    """List the calls that wait for a decision, oldest first."""
    _show_approvals(settings)


def _show_approvals(settings: Settings) -> None:
    approvals = asyncio.run(_load_approvals(settings))
    if settings.json:
        _output.print_json({"approvals": approvals})
    elif not approvals:
        click.echo("No call waits for approval.")
    else:
        for approval in approvals:
            _print_approval(approval)


async def _load_approvals(settings: Settings) -> list[ApprovalView]:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        return await backend.list_approvals()


def _print_approval(approval: ApprovalView) -> None:
    """Print the whole call: a person must not decide on a part of it."""
    head = f"{approval.id}  {approval.agent_id} calls {approval.tool} in {approval.session_key}"
    since = f"asked {_output.format_age(approval.created_at)}"
    click.echo(f"{_output.bold(_output.clean_line(head))}  {_output.dim(since)}")
    for line in _output.clean_text(approval.text).split("\n"):
        click.echo(f"    {line}")
    for choice in format_choices(approval):
        click.echo(_output.dim(f"  {choice}"))


def format_choices(approval: ApprovalView) -> list[str]:
    """Return the commands that decide on a call."""
    program = _output.format_program()
    always = "   (or with --always: do not ask again)" if approval.can_allow_always else ""
    return [f"{program} approvals allow {approval.id}{always}", f"{program} approvals deny {approval.id}"]


def print_question(approval: ApprovalView, *, is_earlier_run: bool) -> None:
    """Print on standard error that a call waits for a decision, and the commands that decide."""
    lines = "".join(f"\n    {line}" for line in approval.text.split("\n"))
    choices = "".join(f"\n    {choice}" for choice in format_choices(approval))
    blocked = "An earlier run of this session waits for approval. " if is_earlier_run else ""
    click.echo(
        _output.clean_text(
            f"{blocked}{approval.agent_id} asks to call {approval.tool}:{lines}\n  Answer with:{choices}"
        ),
        err=True,
    )


@command.command()
@click.argument("approval_id", metavar="ID")
@click.option("--always", is_flag=True, help="Do not ask again about the same call of the same agent.")
@gateway_options
@common_options
@click.pass_obj
def allow(settings: Settings, approval_id: str, always: bool) -> None:
    """Allow a call. ID may be the beginning of an id."""
    _resolve(settings, approval_id, "allow-always" if always else "allow-once")


@command.command()
@click.argument("approval_id", metavar="ID")
@gateway_options
@common_options
@click.pass_obj
def deny(settings: Settings, approval_id: str) -> None:
    """Deny a call. ID may be the beginning of an id."""
    _resolve(settings, approval_id, "deny")


def _resolve(settings: Settings, approval_id: str, decision: str) -> None:
    approval = asyncio.run(_resolve_approval(settings, approval_id, decision))
    if settings.json:
        _output.print_json(approval)
        return
    done = {"allow-once": "Allowed once", "allow-always": "Always allowed", "deny": "Denied"}[decision]
    click.echo(_output.clean_line(f"{done}: {approval.tool} of {approval.agent_id}."))


async def _resolve_approval(settings: Settings, approval_id: str, decision: str) -> ApprovalView:
    from antiphon.cli._backend import open_backend_for_changes
    from antiphon.cli._references import find_approval_id

    async with open_backend_for_changes(settings) as backend:
        return await backend.resolve_approval(await find_approval_id(backend, approval_id), decision)


@command.command()
@gateway_options
@common_options
@click.pass_obj
def grants(settings: Settings) -> None:
    """List the calls that are always allowed."""
    found = asyncio.run(_load_grants(settings))
    if settings.json:
        _output.print_json({"grants": found})
    elif not found:
        click.echo("No call is always allowed.")
    else:
        rows = [
            [
                grant.id,
                grant.agent_id,
                grant.tool,
                _output.format_age(grant.created_at),
                grant.decided_by or "",
                grant.text,
            ]
            for grant in found
        ]
        _output.print_table(["ID", "AGENT", "TOOL", "SINCE", "BY", "CALL"], rows)


async def _load_grants(settings: Settings) -> list[GrantView]:
    from antiphon.cli._backend import open_backend_for_reading

    async with open_backend_for_reading(settings) as backend:
        return await backend.list_grants()


@command.command()
@click.argument("grant_id", metavar="ID")
@gateway_options
@common_options
@click.pass_obj
def revoke(settings: Settings, grant_id: str) -> None:
    """Ask again about a call that is always allowed."""
    asyncio.run(_revoke_grant(settings, grant_id))
    if settings.json:
        _output.print_json({"ok": True})
    else:
        click.echo("Revoked. The next such call is asked about.")


async def _revoke_grant(settings: Settings, grant_id: str) -> None:
    from antiphon.cli._backend import open_backend_for_changes

    async with open_backend_for_changes(settings) as backend:
        await backend.revoke_grant(grant_id)
