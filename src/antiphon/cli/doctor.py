"""`antiphon doctor`: prints one line per finding and sets an exit code for scripts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from antiphon.cli import _output
from antiphon.cli._options import Settings, common_options
from antiphon.errors import AntiphonError

if TYPE_CHECKING:
    from antiphon.config import Config
    from antiphon.doctor import Finding

LEVEL_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "fail"}


@click.command(help="Look for anything that is wrong. Exit code 1 if something has to be mended.")
@click.option("--online", is_flag=True, help="Also see whether model providers answer; no key is sent.")
@common_options
@click.pass_obj
def command(settings: Settings, online: bool) -> int:
    findings = asyncio.run(_collect_findings(settings, online=online))
    failed = any(finding.level == "fail" for finding in findings)
    if settings.json:
        _output.print_json({"ok": not failed, "findings": findings})
        return int(failed)
    for finding in findings:
        mark = _output.red(LEVEL_MARKS["fail"]) if finding.level == "fail" else LEVEL_MARKS[finding.level]
        hint = f" {finding.next_step}" if finding.next_step else ""
        click.echo(f"{mark}  {finding.check:<12} {_output.clean_text(finding.what + hint)}")
    return int(failed)


async def _collect_findings(settings: Settings, *, online: bool) -> list[Finding]:
    from antiphon.cli._doctor_checks import check_bus, check_gateways
    from antiphon.doctor import run_checks

    config = _load_config_or_none(settings)
    findings = await run_checks(settings.paths, online=online)
    findings += await check_bus(config) if config else []
    return [*findings, *check_gateways(settings.paths.state_dir, config)]


def _load_config_or_none(settings: Settings) -> Config | None:
    try:
        return settings.load().config
    except AntiphonError:
        return None  # already reported as a finding
