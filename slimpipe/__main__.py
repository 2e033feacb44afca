"""`python -m slimpipe` is the `slimpipe` command."""

import sys

from slimpipe.cli import main

sys.exit(main())
