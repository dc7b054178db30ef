"""A replica whose machine's clock is wrong, by so many seconds, from before anything of it is imported.

python tests/cluster/skewed.py <seconds> <what replica.py is given>
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    seconds = float(sys.argv.pop(1))
    true, true_ns = time.time, time.time_ns
    time.time = lambda: true() + seconds
    time.time_ns = lambda: true_ns() + round(seconds * 1e9)
    runpy.run_path(str(Path(__file__).with_name("replica.py")), run_name="__main__")


if __name__ == "__main__":
    main()
