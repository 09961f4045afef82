"""`python -m evo`: the command where no script is installed, such as an offline machine with a PYTHONPATH."""

import sys

from evo.cli import main

if __name__ == "__main__":
    sys.exit(main())
