"""Runs the command line as `python -m antiphon`."""

import sys

from antiphon.cli import main

sys.exit(main())
