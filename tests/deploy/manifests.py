"""The files of `deploy/`, read for tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def one(path: Path) -> Any:
    [document] = documents(path)
    return document


def compose() -> Any:
    return one(DEPLOY / "compose.yaml")


def resources() -> dict[tuple[str, str], Any]:
    """What the kustomization applies, by kind and name."""
    listed = one(KUBERNETES / "kustomization.yaml")["resources"]
    found = [document for name in listed for document in documents(KUBERNETES / name)]
    return {(item["kind"], item["metadata"]["name"]): item for item in found}


def rules() -> list[Any]:
    groups = one(DEPLOY / "prometheus" / "alerts.yaml")["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> Iterator[Any]:
    dashboard = json.loads((DEPLOY / "grafana" / "antiphon.json").read_text("utf-8"))
    yield from dashboard["panels"]
