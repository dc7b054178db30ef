"""Compares the list of promises with the tests, and with the documents they come from."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from requirements import CHANNELS, CONTRACT, DELIVERED, REQUIREMENTS, SENTENCES, WORK
from seeds import BEYOND_THE_SEEDS, DIVERGENCES, EXPLICIT, SEEDS, SYSTEMS

TESTS = Path(__file__).parent
SEEDED_SECTIONS = set("KLHSPAVD")
"""Sections of the contract whose lines come from the documents; the others describe transports and configuration."""


def list_explicit_ids() -> list[str]:
    return [name for names in EXPLICIT.values() for name in names]


def find_repeated(names: Iterable[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


def iterate_claims() -> Iterator[tuple[str, str]]:
    """Yield every id that a test names, and its location."""
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
    named_by_tests = [*REQUIREMENTS.items(), *((name, SENTENCES[name]) for name in list_explicit_ids())]
    promised = {name for name, requirement in named_by_tests if requirement.part in DELIVERED}
    assert promised - {name for name, _ in iterate_claims()} == set()


def test_no_test_claims_an_unknown_promise() -> None:
    known = REQUIREMENTS.keys() | SENTENCES.keys()
    assert [(name, where) for name, where in iterate_claims() if name not in known] == []


def test_every_promise_is_stated_and_sourced() -> None:
    promises = [*REQUIREMENTS.values(), *SENTENCES.values()]
    assert all(requirement.text and requirement.source for requirement in promises)


def test_ids_are_unique() -> None:
    assert find_repeated([*REQUIREMENTS, *(sentence.id for sentence in SEEDS)]) == []
    assert find_repeated(list_explicit_ids()) == []


def test_every_guarantee_is_listed() -> None:
    numbered = {f"G{number}" for number in range(1, 46)} | {f"SEC{number}" for number in range(1, 15)}
    assert REQUIREMENTS.keys() - CONTRACT.keys() - WORK.keys() - CHANNELS.keys() == numbered


def test_every_sentence_names_its_documents_and_the_contract() -> None:
    for sentence in SEEDS:
        assert sentence.seeds == tuple(sorted(set(sentence.seeds) & SYSTEMS.keys())), sentence.id
        base = "003" if "003" in sentence.seeds else sentence.seeds[0]
        assert sentence.id.startswith(f"{base}-"), sentence.id
        assert sentence.contract, sentence.id
        assert set(sentence.contract) <= CONTRACT.keys(), sentence.id


def test_every_document_is_read() -> None:
    assert {number for sentence in SEEDS for number in sentence.seeds} == SYSTEMS.keys()


def test_every_contract_line_comes_from_a_sentence_or_says_why_not() -> None:
    stated = {line for sentence in SEEDS for line in sentence.contract}
    lines = {line for line in CONTRACT if line[0] in SEEDED_SECTIONS}
    assert lines - stated == BEYOND_THE_SEEDS.keys()
    assert all(BEYOND_THE_SEEDS.values())


def test_every_divergence_has_a_reason_and_a_test_of_its_own() -> None:
    assert DIVERGENCES.keys() - set(list_explicit_ids()) == set()
    assert all(DIVERGENCES.values())


def test_every_explicit_sentence_exists() -> None:
    assert set(list_explicit_ids()) - SENTENCES.keys() == set()
