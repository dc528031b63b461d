"""Draws docs/kill.svg, an animated terminal in which a worker of examples/train.py is killed, from
the lines recorded in docsite/kill.jsonl: `python -m docsite.recording`.

With `--record`, it first records these lines again: it runs the example on three workers and kills
one of them with `shoal kill`. Most epochs are left out, and long waits are shortened.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

ROOT: Final = Path(__file__).resolve().parents[1]
LINES: Final = Path(__file__).with_name("kill.jsonl")
PICTURE: Final = ROOT / "docs" / "kill.svg"
_RUN: Final = "shoal run --standalone --nproc-per-node 3 examples/train.py"
_KILL: Final = "shoal kill 1"
_KILL_AFTER: Final = "epoch 20:"
_DEADLINE_S: Final = 480.0
_LEFT_OUT: Final = "..."

_COLUMNS: Final = 88
_ROW: Final = 20
_CHARACTER: Final = 8.4
_LONGEST_WAIT_S: Final = 1.6
_SHORTEST_WAIT_S: Final = 0.35
_LAST_S: Final = 5.0
"""Time for which the end is shown."""
_TEXT: Final = (
    "A run of three workers in a terminal. One is killed from a second terminal: the two others "
    "lose one step, do it again and continue. A replacement joins, and the run completes."
)


class Line(NamedTuple):
    """One line of a terminal."""

    second: float
    """Time since the start of the run."""
    terminal: int
    """0: the terminal of the run; 1: the terminal in which `shoal kill` is run."""
    text: str


# ------------------------------------------------------------------------------------------- record


def record() -> list[Line]:
    """Runs the example, kills a worker, and returns the lines to show."""
    with tempfile.TemporaryDirectory() as directory:
        # a registry of clusters of its own, so that no other run's worker can be killed
        own = ("env", "OMP_NUM_THREADS=1", f"XDG_RUNTIME_DIR={directory}")
        start = time.monotonic()
        lines = [Line(0.0, 0, f"$ {_RUN}")]

        def kill() -> None:
            lines.append(Line(time.monotonic() - start, 1, f"$ {_KILL}"))
            said = subprocess.run(
                [*own, sys.executable, "-m", *_KILL.split()],
                stdout=subprocess.PIPE,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            lines.append(Line(time.monotonic() - start, 1, said.strip()))

        killer = threading.Thread(target=kill)
        with subprocess.Popen(
            [*own, f"XDG_STATE_HOME={directory}", sys.executable, "-m", *_RUN.split()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            deadline = threading.Timer(_DEADLINE_S, run.terminate)
            deadline.start()
            assert run.stdout is not None
            for text in run.stdout:
                lines.append(Line(time.monotonic() - start, 0, text.rstrip()))
                if _KILL_AFTER in text:
                    killer.start()
            deadline.cancel()
        if run.returncode:
            raise SystemExit(f"{_RUN} ended with status {run.returncode}: {lines[-1].text}")
        killer.join()
    return list(_shown(sorted(lines, key=lambda line: line.second)))


def _shown(lines: list[Line]) -> Iterator[Line]:
    """Yields the lines to show: the first epochs, each event with the epoch after it, and the end
    of the run."""
    epochs = 3
    left_out = False
    last = max(place for place, line in enumerate(lines) if "]: epoch" in line.text)
    for place, line in enumerate(lines):
        if "]: epoch" in line.text:
            if epochs == 0 and place != last:
                left_out = True
                continue
            epochs = max(epochs - 1, 0)
        elif line.text.startswith("shoal: step ") or not line.text:
            continue  # progress, for output that is not a terminal
        elif line.terminal == 0 and place > 0 and line.text.startswith("shoal:"):
            epochs = 1
        if left_out and line.terminal == 0:
            yield Line(round(line.second, 3), 0, _LEFT_OUT)
            left_out = False
        yield Line(round(line.second, 3), line.terminal, line.text)


# --------------------------------------------------------------------------------------------- draw


def read() -> list[Line]:
    """Returns the recorded lines."""
    return [Line(*json.loads(line)) for line in LINES.read_text().splitlines()]


def draw(lines: list[Line]) -> str:
    """Returns the lines as an animated SVG that repeats."""
    times = list(_times(lines))
    total = times[-1] + _LAST_S
    width = round(_COLUMNS * _CHARACTER + 32)
    texts, styles = [], []
    top = 0
    for terminal, title in enumerate(("first terminal", "second terminal")):
        rows = [
            (number, part)
            for number, line in enumerate(lines)
            if line.terminal == terminal
            for part in _wrapped(line.text)
        ]
        height = (len(rows) + 1) * _ROW + 24
        texts.append(
            f'<rect x=".5" y="{top}.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
            f'<text class="title" x="16" y="{top + 24}">{title}</text>'
        )
        for row, (number, part) in enumerate(rows, 1):
            texts.append(
                f'<text class="l l{number}{_color(lines[number].text)}" x="16" '
                f'y="{top + 24 + row * _ROW}" textLength="{len(part) * _CHARACTER:.1f}" '
                f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{escape(part)}</text>'
            )
        top += height + 8
    for number, moment in enumerate(times):
        if moment:
            percent = 100 * moment / total
            styles.append(
                f"@keyframes k{number}{{0%,{percent:.2f}%{{opacity:0}}"
                f"{percent + 0.01:.2f}%,100%{{opacity:1}}}}.l{number}{{animation-name:k{number}}}"
            )
    style = (
        "rect{fill:#14191f;stroke:#57606a}"
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "fill:#e6edf3}"
        ".title{fill:#9aa7b4}.typed{fill:#fff;font-weight:bold}.fault{fill:#ff9d8a}"
        ".event{fill:#8ddb8c}"
        f".l{{animation-duration:{total:.2f}s;animation-iteration-count:infinite;"
        "animation-timing-function:step-end}"
        + "".join(styles)
        + "@media (prefers-reduced-motion:reduce){.l{animation:none}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top - 8}" '
        f'width="{width}" height="{top - 8}" role="img" aria-labelledby="t d">\n'
        f'<title id="t">A killed worker</title>\n<desc id="d">{escape(_TEXT)}</desc>\n'
        f"<style>{style}</style>\n" + "\n".join(texts) + "\n</svg>\n"
    )


def _times(lines: list[Line]) -> Iterator[float]:
    """Yields the time at which each line appears. Waits between lines are adjusted, so that each
    line can be read and no wait is long."""
    moment = 0.0
    for before, line in zip([lines[0], *lines], lines, strict=False):
        if line is not before:
            moment += min(max(line.second - before.second, _SHORTEST_WAIT_S), _LONGEST_WAIT_S)
        yield moment


def _wrapped(text: str) -> list[str]:
    """Returns the rows of a line that is wrapped between words."""
    return textwrap.wrap(text, _COLUMNS, subsequent_indent="    ", break_on_hyphens=False)


def _color(text: str) -> str:
    if text.startswith("$"):
        return " typed"
    if "is lost" in text or "ended with SIGKILL; continuing" in text or "killed rank" in text:
        return " fault"
    return " event" if text.startswith("shoal:") else ""


def main() -> None:
    """Draws the picture; with `--record`, from a new run."""
    if "--record" in sys.argv[1:]:
        LINES.write_text("".join(json.dumps(line) + "\n" for line in record()))
    PICTURE.write_text(draw(read()))


if __name__ == "__main__":
    main()
