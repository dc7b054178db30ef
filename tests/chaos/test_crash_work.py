"""The gateway, the keeper or both killed at any commit and any await of a turn with commands and changed files.

Each command runs at most once, each change is made once, the end of a background command is told once, what the model
reads agrees with what happened, and no process is left. A seeded sample of the moments is taken, and with
`--every-moment` all of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from antiphon.workspace import sandbox_backend
from chaos import verify
from chaos.harness import Case, Kill, Servers, run_with_kills, said
from chaos.moments import find_keepers
from chaos.scenario import WORKING, plan
from chaos.work_checks import find_work_problems
from chaos.worker import KEEPER_STEP
from support.databases import chosen
from support.planned_work import BACK, FRONT, WORK

SAMPLE = 18  # kills of a turn in one life
POSTGRES_SAMPLE = 7
EVERY_MOMENT_SECONDS = 3600  # of one test with all moments, on a busy machine
VICTIMS = ("", "keeper@", "both@")
KEEPER_STEPS = 48  # roughly; a step that is not reached is no kill
needs_bwrap = pytest.mark.skipif(
    sandbox_backend.find_program("bwrap", []) is None,
    reason="bwrap is not installed (apt-get install bubblewrap)",
)


@pytest.fixture(autouse=True)
def end_keepers(tmp_path: Path) -> Generator[None]:
    yield
    for state_dir in tmp_path.rglob("state"):
        end_keeper(state_dir)


def end_keeper(state_dir: Path) -> None:
    for keeper in find_keepers(state_dir):
        with suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGTERM)


def check_work(state_dir: Path, kills: Sequence[Kill]) -> list[str]:
    found = find_work_problems(state_dir, kills)
    end_keeper(state_dir)
    return found


def list_moments(servers: Servers, home: Path, name: str) -> list[Kill]:
    """Return every moment of an undisturbed play, which is checked as well."""
    home.mkdir(parents=True)
    state_dir = home / "state"
    assert servers.play(state_dir, name, None) == 0, Path(f"{state_dir}.stderr").read_text()
    assert verify.finally_(state_dir, plan(name)) + check_work(state_dir, []) == []
    commits = int(said(state_dir, "commits")[0])
    awaits: list[str] = json.loads(said(state_dir, "moments")[0])
    return [*awaits, *map(str, range(1, commits + 1)), FRONT, BACK]


@pytest.mark.timeout(EVERY_MOMENT_SECONDS)
@pytest.mark.requirement("T5", "AT1", "AT2", "AT4", "AT20")
@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=needs_bwrap) if not WORK[name] else name for name in WORK]
)
def test_work_survives_a_kill_of_the_gateway_the_keeper_or_both_at_any_moment(
    servers: Servers,
    tmp_path: Path,
    shape: str,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    name, rng = f"{WORKING}:{shape}", random.Random(shape)
    moments = list_moments(servers, tmp_path / "dry", name)
    assert len(moments) > 150
    kills: list[Kill] = [f"{victim}{moment}" for victim in VICTIMS for moment in moments]
    kills += [f"{KEEPER_STEP}{step}" for step in range(1, KEEPER_STEPS + 1)]
    if not pytestconfig.getoption("--every-moment"):
        started = [f"{victim}{moment}" for victim in VICTIMS for moment in (FRONT, BACK)]
        kills = [*rng.sample(kills, POSTGRES_SAMPLE if chosen.postgres else SAMPLE), rng.choice(started)]
    died = run_with_kills(servers, tmp_path / "once", [(name, [kill]) for kill in kills], check_work)
    record_property("kills", died)
    assert died > len(kills) // 2


@pytest.mark.timeout(EVERY_MOMENT_SECONDS)
@pytest.mark.requirement("T5", "AT20")
def test_work_survives_several_kills_in_a_row(
    servers: Servers,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    rng = random.Random(4)
    name = f"{WORKING}:in turn"
    moments = list_moments(servers, tmp_path / "dry", name)
    wanted = 200 if pytestconfig.getoption("--every-moment") else 3 if chosen.postgres else 8
    cases: list[Case] = []
    for _ in range(wanted):
        kills = [f"{rng.choice(VICTIMS)}{rng.choice(moments)}" for _ in range(rng.choice([2, 3]))]
        cases.append((name, kills))
    died = run_with_kills(servers, tmp_path / "more", cases, check_work)
    record_property("kills", died)
    assert died >= wanted
