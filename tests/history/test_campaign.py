"""A short version of `make chaos`: one job in each mode under a few faults, in which nothing is
lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.history.campaign import Campaign
from tests.history.modes import MODES
from tests.zygote.children import Zygote

FAULTS = 8
QUICK, SLOW = {"backups"}, {"moves"}


def _mode(mode: str) -> object:
    return (
        mode
        if mode in QUICK
        else pytest.param(mode, marks=pytest.mark.slow if mode in SLOW else pytest.mark.matrix)
    )


@pytest.mark.parametrize("mode", [_mode(mode) for mode in MODES])
def test_a_job_under_faults_keeps_every_promise(zygote: Zygote, tmp_path: Path, mode: str) -> None:
    verdict = Campaign(zygote, tmp_path, mode=mode, seed=7, faults=FAULTS).run()
    assert not verdict.broken, str(verdict)
    assert verdict.faults.total() >= FAULTS
    assert verdict.counts["applied"] > 100
    assert verdict.counts["lookups of rows"] > 100 or mode == "bsp"
