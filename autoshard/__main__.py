"""The command line as `python -m autoshard`, of the interpreter at hand."""

import sys

from autoshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
