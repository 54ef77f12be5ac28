"""`python -m piecework` is the command `piecework`."""

from piecework.cli import main

if __name__ == "__main__":
    main()
