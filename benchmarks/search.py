"""What a search over a million messages costs, for who sees all of them and for who sees few.

    uv run python benchmarks/search.py            a million messages, some ten minutes to build and measure
    uv run python benchmarks/search.py --quick    fifty thousand

One store is built and indexed the way a gateway does it, then searched through `Operations.search` by an operator
and by agents of every visibility. Words are drawn by Zipf's law; `common` is in every message, `even` and `odd` in
half of them but never together, `needle` in ten.
"""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any

from antiphon.access import Caller
from antiphon.app import open_operations_readonly
from antiphon.config import Config
from antiphon.engine.sessions import search
from antiphon.operations.operations import Operations
from antiphon.store.sqlite.store import SqliteStore
from core import fill_sessions
from figures import Figure, at_least, at_most, main, p95, typical_p95

COUNTS = {"messages": 1_000_000, "sessions": 10_000}
QUICK = {"messages": 50_000, "sessions": 1_000}
QUERIES = {
    "rare word": "needle",
    "common word": "common",
    "rare and common word": "needle common",
    "two common words": "common even",
    "two that never meet": "even odd",
    "phrase": '"common even"',
    "beginning of a word": "commo",
    "no such word": "nowhere",
}
OPERATOR = Caller.operator()
AGENT = Caller.agent("a1", "agent:a1:dashboard:8")  # it has spawned five sessions


async def searches(counts: dict[str, int]) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "antiphon.db"
        await (await SqliteStore.open(path)).close()
        fill_sessions(path, counts["sessions"])
        fill_messages(path, counts["messages"], counts["sessions"])
        figures = await indexed(path)
        async with open_operations_readonly(Config(), Path(folder)) as operations:
            figures += await timed(operations, OPERATOR, "operator")
        for visibility in ("self", "tree", "agent", "all"):
            async with open_operations_readonly(config(visibility), Path(folder)) as operations:
                figures += await timed(operations, AGENT, f"agent ({visibility})")
    return figures


def config(visibility: str) -> Config:
    settings: dict[str, Any] = {
        "agents": {"list": [{"id": f"a{number}"} for number in range(7)]},
        # Not every other agent: who reaches all of them is not filtered at all.
        "tools": {
            "sessions": {"visibility": visibility},
            "agentToAgent": {"enabled": True, "allow": ["a1", "a3"]},
        },
    }
    return Config.model_validate(settings)


def fill_messages(path: Path, count: int, sessions: int) -> None:
    """Messages of forty words, turn by turn across all sessions, not yet indexed."""
    dice = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(dice.choices(letters, k=dice.randint(3, 10))) for _ in range(50_000)]
    weights = list(accumulate(1 / (place + 1) for place in range(len(vocabulary))))

    def rows() -> Iterator[tuple[object, ...]]:
        for number in range(count):
            session = number * 7919 % sessions + 1
            words = " ".join(dice.choices(vocabulary, cum_weights=weights, k=38))
            needle = " needle" if number % (count // 10) == 0 else ""
            text = f"{words} common {'odd' if number % 2 else 'even'}{needle}"
            role = ("user", "assistant", "toolResult")[number % 3]
            body = f'{{"role":"{role}","content":[{{"type":"text","text":"{text}"}}],"timestamp":1}}'
            yield session, number // sessions + 1, f"{number:08x}", role, body, number

    db = sqlite3.connect(path)
    db.execute("PRAGMA synchronous = OFF")
    db.execute(
        "INSERT INTO transcripts (id, session_id, key, reason, started_at) "
        "SELECT transcript, session_id, key, 'created', 1 FROM sessions"
    )
    db.execute(
        "INSERT INTO lineage (ancestor, descendant) SELECT spawned_by, id FROM sessions WHERE spawned_by IS NOT NULL"
    )
    db.executemany(
        "INSERT INTO messages (transcript, seq, entry, role, body, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        rows(),
    )
    db.commit()
    db.close()


async def indexed(path: Path) -> list[Figure]:
    """Everything, batch by batch."""
    store = await SqliteStore.open(path)
    times: list[float] = []
    last, head = await store.read(search.load_index_position)
    count = head - last
    while last < head:
        began = perf_counter()
        last = await store.tx(search.index_entries, search.INDEX_BATCH_ENTRIES)
        times.append((perf_counter() - began) * 1000)
    await store.close()
    return [
        at_least("entries indexed/s", 1000 * count / sum(times), "/s", 2000),
        at_most(f"a batch of {search.INDEX_BATCH_ENTRIES}, p95", p95(times), "ms", 100),
    ]


async def timed(operations: Operations, caller: Caller, who: str) -> list[Figure]:
    figures: list[Figure] = []
    for name, query in QUERIES.items():

        async def once(query: str = query) -> None:
            assert not (await operations.search.find(caller, query)).indexing

        figures.append(at_most(f"{who}: {name}, p95", await typical_p95(once, 5, 20), "ms", 100))
    return figures


PARTS = {"searches": searches}


if __name__ == "__main__":
    main(__doc__, PARTS, COUNTS, QUICK)
