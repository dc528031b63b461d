"""The pause of training at a checkpoint, computed from the times of the steps."""

from __future__ import annotations

import pytest

from benchmarks.checkpoint_pause import pauses


def test_steps_count_until_the_checkpoint_is_complete() -> None:
    run = {
        "step_s": 1.0,
        "steps_s": [1.0, 1.2, 1.0, 1.5, 1.0, 9.0, 1.1, 1.0],
        "saved_at": [1, 6],
    }
    # The first checkpoint is complete in the fourth step; the ninefold step comes after it. The
    # second one is complete within its call.
    (first_pause, first_lost), (second_pause, second_lost) = pauses(run, [2.0, 0.05])
    assert first_pause == pytest.approx(0.5)
    assert first_lost == pytest.approx(0.2 + 0.0 + 0.5)
    assert second_pause == second_lost == pytest.approx(0.1)
