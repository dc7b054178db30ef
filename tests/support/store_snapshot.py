"""Everything in a store as raw rows and JSON, read without Antiphon; the input of the crash suite's checkers."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.scenario import NOTES
from cluster.database import Postgres
from support.app_fixture import DATABASE
from support.databases import chosen
from support.planned_exchanges import KEYED, UNKEYED

Row = dict[str, Any]
SORT_COLUMNS = {
    "runs": "n", "sessions": "id", "usage": "id", "owners": "id", "messages": "transcript, seq", "exchanges": "n",
    "tasks": "n", "deliveries": "n", "delivery_parts": "delivery, n", "chains": "id",
    "exec_commands": "created_at, id",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    key: str
    name: str
    arguments: dict[str, Any]
    interrupted: bool
    failed: bool
    answer: str


class StoreSnapshot:
    """All rows of the store at one moment."""

    def __init__(self, state_dir: Path) -> None:
        path = state_dir / DATABASE
        self.integrity, tables = _postgres(chosen.postgres, path) if chosen.postgres else _sqlite(path)
        self.runs = tables["runs"]
        self.sessions = tables["sessions"]
        self.usage = tables["usage"]
        self.owners = [owner for owner in tables["owners"] if owner["lease_until"]]
        """Without dead owners, whose lease has ended (see `harness`); they are swept later."""
        self.messages = tables["messages"]
        self.exchanges = tables["exchanges"]
        self.tasks = tables["tasks"]
        self.deliveries = tables["deliveries"]
        self.parts = tables["delivery_parts"]
        self.chains = tables["chains"]
        self.commands = tables["exec_commands"]
        for message in self.messages:
            message["json"] = json.loads(message["body"])
        self._by_run: dict[int, list[Row]] = {}
        for message in self.messages:
            self._by_run.setdefault(message["run"], []).append(message)
        self.notes = _count_lines(state_dir / NOTES)
        self.posts = {channel: _count_lines(state_dir / f"{channel}.txt") for channel in (KEYED, UNKEYED)}
        """Posts on external channels, by the keys of their deliveries."""

    def entries(self, run: Row) -> list[Row]:
        return self._by_run.get(run["n"], [])

    def key_of(self, session: int) -> str:
        return next(row["key"] for row in self.sessions if row["id"] == session)

    def lane(self, session: Row) -> list[Row]:
        """The runs of a session, in order of arrival.

        On PostgreSQL, two connections that queue runs at the same moment get their numbers before either commit; then
        only the order of execution is known.
        """
        runs = [run for run in self.runs if run["session"] == session["id"]]
        return sorted(runs, key=lambda run: run["first_seq"]) if chosen.postgres else runs

    def run(self, id: str) -> Row | None:
        return next((run for run in self.runs if run["id"] == id), None)

    def session(self, key: str) -> Row | None:
        return next((session for session in self.sessions if session["key"] == key), None)

    def lines_of(self, delivery: Row) -> list[str]:
        """The lines that a channel of `LineChannel` writes for a delivery."""
        numbers = [part["n"] for part in self.parts if part["delivery"] == delivery["n"]]
        return [delivery["key"] if n == 1 else f"{delivery['key']}#{n}" for n in numbers]

    def delivery(self, key: str) -> Row | None:
        return next((delivery for delivery in self.deliveries if delivery["key"] == key), None)

    def calls(self, run: Row) -> list[Call]:
        """Return the calls of a run that have a result."""
        entries = self.entries(run)
        results = {e["json"]["toolCallId"]: e["json"] for e in entries if e["role"] == "toolResult"}
        return [
            Call(
                f"{run['id']}:{block['id']}",
                block["name"],
                block["arguments"],
                result.get("interrupted", False),
                result.get("isError", False),
                "".join(part["text"] for part in result["content"]),
            )
            for entry in entries
            if entry["role"] == "assistant"
            for block in entry["json"]["content"]
            if block["type"] == "toolCall" and (result := results.get(block["id"]))
        ]


def _sqlite(path: Path) -> tuple[str, dict[str, list[Row]]]:
    # Read-only, so that reading neither recovers nor checkpoints what the next process must handle.
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    try:
        integrity: str = connection.execute("PRAGMA integrity_check").fetchone()[0]
        # A process killed before its migrations have committed leaves a file without some tables.
        existing = {
            row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        }
        return integrity, {
            table: [dict(row) for row in connection.execute(_select_all(table))] if table in existing else []
            for table in SORT_COLUMNS
        }
    finally:
        connection.close()


def _postgres(server: Postgres, path: Path) -> tuple[str, dict[str, list[Row]]]:
    return "ok", dict(zip(SORT_COLUMNS, server.look(path, *map(_select_all, SORT_COLUMNS)), strict=True))


def _select_all(table: str) -> str:
    return f"SELECT * FROM {table} ORDER BY {SORT_COLUMNS[table]}"  # noqa: S608


def _count_lines(path: Path) -> Counter[str]:
    return Counter(path.read_text().split("\n")[:-1] if path.exists() else [])
