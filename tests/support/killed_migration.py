"""The real `antiphon store migrate`, in processes that kill themselves around their commits.

    PYTHONPATH=tests python tests/support/killed_migration.py ARGUMENT…

It imports everything once and forks a process for each line it reads: the number of calls around a COMMIT after which
that process kills itself, or 0 to let it finish. It prints the exit code and the number of calls. Batches are small, so
that there are many.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from antiphon import cli
from antiphon.store.postgres.copy_target import CopyTarget
from antiphon.store.sqlite import copy_source

BATCH_ROWS = 3
PROCESS_TIMEOUT_SECONDS = 60  # for one process; then the alarm kills it and the test fails


class Killer:
    def __init__(self, at: int) -> None:
        self.count = 0
        self._at = at

    def reach(self) -> None:
        self.count += 1
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def run_migration(at: int) -> int:
    killer, commit = Killer(at), CopyTarget.commit

    async def killing(self: CopyTarget) -> None:
        killer.reach()
        await commit(self)
        killer.reach()

    CopyTarget.commit = killing
    copy_source.BATCH_ROWS = BATCH_ROWS
    code = cli.main(["store", "migrate", *sys.argv[1:]])
    os.write(2, f"calls {killer.count}\n".encode())
    return code


def fork(at: int) -> int:
    """Run a migration in a child process; return its exit code.

    The child leaves by `_exit`, because it must not read its parent's input.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(PROCESS_TIMEOUT_SECONDS)
    os.dup2(2, 1)
    code = 99
    try:
        code = run_migration(at)
    except BaseException:  # noqa: BLE001 - nothing may leave this frame
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        code = fork(int(line))
        os.write(1, f"{code}\n".encode())


if __name__ == "__main__":
    main()
