"""What the checker of the crash suite reads: raw SQLite and JSON, nothing of Antiphon."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.scenario import NOTES
from chaos.talk import KEYED, UNKEYED

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    key: str
    name: str
    arguments: dict[str, Any]
    interrupted: bool
    failed: bool
    answer: str


class Book:
    """Everything in the store, read at once."""

    def __init__(self, state_dir: Path) -> None:
        # Read-only, so that looking neither recovers nor checkpoints what the next process must cope with.
        connection = sqlite3.connect(f"file:{state_dir / 'antiphon.db'}?mode=ro", uri=True)
        connection.row_factory = sqlite3.Row
        try:
            self.integrity: str = connection.execute("PRAGMA integrity_check").fetchone()[0]
            # A process killed before its migrations have committed leaves a file without some tables.
            self._tables = {
                row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
            }
            self.runs = self._rows(connection, "runs", "n")
            self.sessions = self._rows(connection, "sessions", "id")
            self.usage = self._rows(connection, "usage", "id")
            self.owners = self._rows(connection, "owners", "id")
            self.messages = self._rows(connection, "messages", "transcript, seq")
            self.exchanges = self._rows(connection, "exchanges", "n")
            self.tasks = self._rows(connection, "tasks", "n")
            self.deliveries = self._rows(connection, "deliveries", "n")
            self.chains = self._rows(connection, "chains", "id")
        finally:
            connection.close()
        for message in self.messages:
            message["json"] = json.loads(message["body"])
        self._by_run: dict[int, list[Row]] = {}
        for message in self.messages:
            self._by_run.setdefault(message["run"], []).append(message)
        self.notes = _lines(state_dir / NOTES)
        self.posts = {channel: _lines(state_dir / f"{channel}.txt") for channel in (KEYED, UNKEYED)}
        """What came of the words outside, by the keys of their deliveries."""

    def _rows(self, connection: sqlite3.Connection, table: str, order: str) -> list[Row]:
        if table not in self._tables:
            return []
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY {order}")]  # noqa: S608

    def entries(self, run: Row) -> list[Row]:
        return self._by_run.get(run["n"], [])

    def key_of(self, session: int) -> str:
        return next(row["key"] for row in self.sessions if row["id"] == session)

    def run(self, id: str) -> Row | None:
        return next((run for run in self.runs if run["id"] == id), None)

    def session(self, key: str) -> Row | None:
        return next((session for session in self.sessions if session["key"] == key), None)

    def delivery(self, key: str) -> Row | None:
        return next((delivery for delivery in self.deliveries if delivery["key"] == key), None)

    def calls(self, run: Row) -> list[Call]:
        """The calls of a run that have their results."""
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


def _lines(path: Path) -> Counter[str]:
    return Counter(path.read_text().split("\n")[:-1] if path.exists() else [])
