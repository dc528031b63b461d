"""`python -m shoal`: the same as the command `shoal`."""

from shoal.cli import main

main()
