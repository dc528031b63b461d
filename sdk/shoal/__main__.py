"""Runs `python -m shoal`, which is equivalent to the command `shoal`."""

from shoal.cli import main

main()
