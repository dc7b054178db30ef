"""A real `antiphon up` beside the commands of a test. A gateway that still runs when its test ends is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from subprocess import Popen
from typing import Any

from cli.terminal import BOUND, Program


class Gateway:
    def __init__(self, process: Popen[str], facts: dict[str, Any]) -> None:
        self.process = process
        self.facts = facts

    @property
    def url(self) -> str:
        return self.facts["url"]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, and wait for its exit code."""
        self.process.send_signal(how)
        self.process.communicate(timeout=BOUND)
        return self.process.returncode


@contextmanager
def up(
    program: Program, port: int = 0, *, join: bool = False, options: Sequence[str] = ()
) -> Generator[Gateway]:
    """A gateway that takes connections."""
    process = program.start("up", "--port", str(port), "--json", *(["--join"] if join else []), *options)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=BOUND)[1]
        yield Gateway(process, json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=BOUND)


def token(program: Program) -> str:
    """The owner's, from its file."""
    return json.loads((program.state / "tokens.json").read_text())["tokens"][0]["token"]
