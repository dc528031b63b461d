"""Writes the pages of docs/reference that are generated from the code: `python -m docsite`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from docsite import commands, environment

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES: Final = {"commands.md": commands.page, "environment.md": environment.page}


def main() -> None:
    """Writes all generated pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())


if __name__ == "__main__":
    main()
