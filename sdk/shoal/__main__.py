"""`python -m shoal`: equivalent to the command `shoal`."""

from shoal.cli import main

main()
