"""The list of promises and the tests agree, both ways."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from requirements import DELIVERED, REQUIREMENTS

TESTS = Path(__file__).parent


def claims() -> Iterator[tuple[str, str]]:
    """Every id that a test of the suite carries, and where."""
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "requirement"
            ):
                for argument in node.args:
                    assert isinstance(argument, ast.Constant), f"{path.name}: name requirements literally"
                    yield str(argument.value), f"{path.name}:{node.lineno}"


def test_every_delivered_promise_has_a_test() -> None:
    claimed = {name for name, _ in claims()}
    promised = {name for name, requirement in REQUIREMENTS.items() if requirement.part in DELIVERED}
    assert promised - claimed == set()


def test_no_test_claims_an_unknown_promise() -> None:
    assert [(name, where) for name, where in claims() if name not in REQUIREMENTS] == []


def test_every_promise_is_stated_and_sourced() -> None:
    assert all(requirement.text and requirement.source for requirement in REQUIREMENTS.values())
