"""Draws the Mermaid diagrams of all pages as docs/diagrams/DIGEST.svg, for the site:
`python -m docsite.diagrams MERMAID.JS`.

Run this by hand when a diagram has changed; the build of the site then reports that the drawing is
missing. It needs chromium, and the file mermaid.min.js from the npm package `mermaid` (`npm pack
mermaid@11.16.0`).
"""

from __future__ import annotations

import hashlib
import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
DIAGRAM: Final = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def digest(diagram: str) -> str:
    """Returns the file name, without suffix, of a diagram's drawing."""
    return hashlib.sha256(diagram.encode()).hexdigest()[:12]


def all_diagrams() -> dict[str, str]:
    """Returns the source text of the diagrams on all pages, by the names of their drawings."""
    return {
        digest(text): text
        for page in sorted(DOCS.rglob("*.md"))
        for text in DIAGRAM.findall(page.read_text())
    }


def draw(diagram: str, mermaid: Path) -> str:
    """Returns a diagram as SVG, with a white background. `mermaid`: path of mermaid.min.js."""
    settings = (
        "{startOnLoad: true, htmlLabels: false, flowchart: {htmlLabels: false}, fontFamily: "
        '"sans-serif"}'
    )
    scripts = (
        f"<script src='{mermaid.resolve()}'></script>"
        f"<script>mermaid.initialize({settings})</script>"
    )
    page = f"<pre class=mermaid>{html.escape(diagram)}</pre>{scripts}"
    with tempfile.NamedTemporaryFile("w", suffix=".html") as file:
        file.write(page)
        file.flush()
        browser = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--allow-file-access-from-files",
            "--virtual-time-budget=20000",
            "--dump-dom",
        ]
        shown = subprocess.run(
            [*browser, f"file://{file.name}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
    found = re.search(r"<svg\b.*?</svg>", shown, re.DOTALL)
    size = (
        re.search(r'viewBox="[-\d.]+ [-\d.]+ ([\d.]+) ([\d.]+)"', found[0])
        if found is not None
        else None
    )
    if found is None or size is None:
        raise SystemExit(f"chromium drew nothing of\n{diagram}")
    width, height = size.groups()
    opening = re.sub(r'\s(?:width|style)="[^"]*"', "", found[0].partition(">")[0])
    styled = f'{opening} width="{width}" height="{height}" style="background: white">'
    return styled + found[0].partition(">")[2].replace("<br>", "<br/>") + "\n"


def main() -> None:
    """Draws diagrams that have no drawing yet, and removes drawings that no page uses any more."""
    folder = DOCS / "diagrams"
    folder.mkdir(exist_ok=True)
    wanted = all_diagrams()
    for name, diagram in wanted.items():
        if not (folder / f"{name}.svg").exists():
            (folder / f"{name}.svg").write_text(draw(diagram, Path(sys.argv[1])))
    for drawing in folder.glob("*.svg"):
        if drawing.stem not in wanted:
            drawing.unlink()


if __name__ == "__main__":
    main()
