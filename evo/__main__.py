"""`python -m evo`: the command where no script is installed, such as an offline machine with a PYTHONPATH."""

from evo.cli import main

if __name__ == "__main__":
    main()
