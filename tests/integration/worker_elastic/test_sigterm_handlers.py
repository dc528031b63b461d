"""SIGTERM asks a worker to leave, no matter which handler its script has set."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

SCRIPT = Path(__file__).parent / "handles_sigterm.py"


def test_previously_installed_handler_is_called_and_the_worker_leaves(
    zygote: Zygote, tmp_path: Path
) -> None:
    with cluster(zygote, tmp_path, max_workers=1, script=SCRIPT, WHEN="before") as running:
        running.start(0)
        (received,) = running.finish(0)  # otherwise it trains for a million epochs
    assert received["signals"] == [signal.SIGTERM]
    assert received["steps"] >= 4


def test_handler_installed_later_is_warned_of(zygote: Zygote, tmp_path: Path) -> None:
    with cluster(zygote, tmp_path, max_workers=1, script=SCRIPT, WHEN="after") as running:
        running.start(0)
        (received,) = running.finish(0)
        said = running.workers[0].said()
    assert received == {"signals": [signal.SIGTERM], "steps": 10}
    assert said.count("does not notice that it must leave") == 1


def test_script_that_ignores_the_signal_is_warned_and_continues(
    zygote: Zygote, tmp_path: Path
) -> None:
    with cluster(zygote, tmp_path, max_workers=1, script=SCRIPT, WHEN="ignored") as running:
        running.start(0)
        (received,) = running.finish(0)
        said = running.workers[0].said()
    assert received == {"signals": [], "steps": 10}
    assert said.count("does not notice that it must leave") == 1
    assert "the script ignores SIGTERM" in said
