"""`python -m tests.parity PATH` writes the table of the matrix. `make parity` runs it when all
cells agree with the table."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.parity.table import page

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
