"""Alerts and dashboard: what they ask for can be parsed, exists in `/metrics`, and leads to words that are there."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, get_args

import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.engine.runs.effects import RunOutcome
from deploy.manifests import DEPLOY, one, panels, rules
from support.gateway_http import open_http_gateway

pytestmark = pytest.mark.anyio
ROOT = DEPLOY.parent
PROMETHEUS_OWN = {"up"}
LABELS = {"job", "instance", "le"}
"""Given by Prometheus, not by us."""


def asked() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")


def selectors(expression: Any) -> Iterator[Any]:
    """Every selector in a parsed expression."""
    if isinstance(expression, promql.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "args", "param"):
        inner: Any = getattr(expression, name, None)
        parts: list[Any] = inner if name == "args" and inner else [inner]
        for part in parts:
            if part is not None and not isinstance(part, str):
                yield from selectors(part)


@pytest.fixture
async def known(tmp_path: Path) -> AsyncGenerator[dict[str, dict[str, set[str]]]]:
    """Every sample of a gateway that has done something, with the values of its labels."""
    async with open_http_gateway(tmp_path) as http_gateway:
        await http_gateway.ask("something")
        await http_gateway.http.get("/readyz")
        text = (await http_gateway.http.get("/metrics")).text
        found: dict[str, dict[str, set[str]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = found.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
        yield found


async def test_every_metric_and_label_that_is_asked_for_exists(
    known: dict[str, dict[str, set[str]]],
) -> None:
    seen = 0
    for where, text in asked():
        for selector in selectors(promql.parse(text)):
            seen += 1
            if selector.name in PROMETHEUS_OWN:
                continue
            assert selector.name in known, f"{where}: {selector.name}"
            for matcher in selector.matchers.matchers:
                assert matcher.name in {*known[selector.name], *LABELS}, f"{where}: {matcher.name}"
    assert seen > 40


async def test_every_word_that_is_matched_is_one_of_ours(known: dict[str, dict[str, set[str]]]) -> None:
    outcomes = {*get_args(RunOutcome)}
    for where, text in asked():
        for _, value in re.findall(r'\b(outcome)=~?"([^"]+)"', text):
            assert {*value.split("|")} <= outcomes, where
        for name, value in re.findall(r'(antiphon_store_\w+)\{state=~?"([^"]+)"', text):
            assert {*value.split("|")} <= known[name]["state"], where


async def test_labels_that_results_are_grouped_by_exist(known: dict[str, dict[str, set[str]]]) -> None:
    there = {label for labels in known.values() for label in labels} | LABELS
    for where, text in asked():
        for group in re.findall(r"\bby \(([^)]*)\)", text):
            assert {label.strip() for label in group.split(",")} <= there, where


def test_each_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len({*names})
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert rule["annotations"]["summary"].strip().endswith("."), rule["alert"]
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        text = (ROOT / page).read_text("utf-8")
        headings = [_anchor(line) for line in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
        assert not anchor or anchor in headings, f"{rule['alert']}: {page}#{anchor}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_figures_of_the_whole_are_not_added_up_over_replicas() -> None:
    whole = re.compile(r"\bsum\((?:rate\()?antiphon_(store|replicas|runs_queued|runs_running|messages)")
    assert [where for where, text in asked() if whole.search(text)] == []


def test_panels_have_their_place_and_a_source() -> None:
    taken: set[tuple[int, int]] = set()
    numbers = [panel["id"] for panel in panels()]
    assert len(numbers) == len({*numbers}) > 10
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]


def test_every_replica_is_scraped_with_a_token() -> None:
    given = one(DEPLOY / "prometheus" / "scrape.yaml")
    assert given["rule_files"] == ["alerts.yaml"]
    for job in given["scrape_configs"]:
        assert job["authorization"]["credentials_file"].endswith("prometheus-token"), job["job_name"]
        assert any(name.endswith("_sd_configs") for name in job), job["job_name"]
