"""The messages that a pipeline sends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.pipelining.models import VOCABULARY, batch, made, pipeline_of, train
from tests.integration.pipelining.threads import run_line


@pytest.mark.parametrize(
    ("schedule", "borders"), [("1f1b", 3), ("gpipe", 3), ("interleaved_1f1b", 7), ("zbv", 6)]
)
def test_step_sends_only_activations_and_gradients_between_ranks(
    schedule: str, borders: int
) -> None:
    """SPEC.md 2. The middle border of ZBV is within one rank. The gradients of the embedding and
    the scale go to the parameters' owner, and the sums return."""
    rows, length, width = 7, 5, 8
    module, (inputs, targets) = made("gpt"), batch("gpt", rows)

    def body(rank: int, group: Any) -> Any:
        pipeline = pipeline_of(module, group, schedule=schedule)
        train(pipeline, inputs, targets)
        headers = pipeline.links.traffic.headers
        train(pipeline, inputs, targets)
        assert pipeline.links.traffic.headers == headers  # shapes are known by then
        return pipeline.links.traffic

    results = run_line(4, body)
    activation = rows * length * width * 8
    assert sum(one.activations for one in results) == 2 * borders * activation
    assert sum(one.gradients for one in results) == 2 * borders * activation
    tied = 0 if schedule == "zbv" else 2 * VOCABULARY * width * 8
    assert sum(one.shared for one in results) == 2 * (tied + 3 * 2 * 8)
    # micro-batches of 2 samples and of 1
    assert sum(one.headers for one in results) == borders * 2 * 1024
