"""`antiphon doctor`: one line per finding, and an exit code that a script can use."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import output
from antiphon.cli.settings import Settings, common
from antiphon.errors import AntiphonError

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.doctor import Finding

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "fail"}


@click.command(help="Look for anything that is wrong. Exit code 1 if something has to be mended.")
@click.option("--online", is_flag=True, help="Also see whether model providers answer; no key is sent.")
@common
@click.pass_obj
def command(settings: Settings, online: bool) -> int:
    findings = asyncio.run(_findings(settings, online=online))
    failed = any(finding.level == "fail" for finding in findings)
    if settings.json:
        output.emit({"ok": not failed, "findings": findings})
        return int(failed)
    for finding in findings:
        mark = output.red(MARKS["fail"]) if finding.level == "fail" else MARKS[finding.level]
        hint = f" {finding.next_step}" if finding.next_step else ""
        click.echo(f"{mark}  {finding.check:<12} {output.clean(finding.what + hint)}")
    return int(failed)


async def _findings(settings: Settings, *, online: bool) -> list[Finding]:
    from antiphon.cli.checkup import bus, look
    from antiphon.doctor import examine

    config = _config(settings)
    findings = await examine(settings.paths, online=online)
    findings += await bus(config) if config else []
    return [*findings, *look(settings.paths.state_dir, config)]


def _config(settings: Settings) -> Config | None:
    try:
        return settings.load().config
    except AntiphonError:
        return None  # which is a finding already
