"""Writes the dashboards' files, or checks them."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal_dashboards.boards import BOARDS
from shoal_dashboards.panels import rendered

GENERATED = Path(__file__).resolve().parents[1] / "generated"


def main() -> int:
    """Returns the exit status."""
    wanted = {GENERATED / f"{board.uid}.json": rendered(board) for board in BOARDS}
    if "--check" not in sys.argv[1:]:
        GENERATED.mkdir(exist_ok=True)
        for path in set(GENERATED.iterdir()) - wanted.keys():
            path.unlink()
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        return 0
    there = {path: path.read_text(encoding="utf-8") for path in GENERATED.glob("*")}
    wrong = sorted(
        path.name for path in wanted.keys() | there.keys() if wanted.get(path) != there.get(path)
    )
    if wrong:
        print(
            f"docker/grafana/generated: {', '.join(wrong)}: outdated; run make dashboards",
            file=sys.stderr,
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
