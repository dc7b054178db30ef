"""`python -m antiphon` is the command line, too."""

import sys

from antiphon.cli import main

sys.exit(main())
