"""Combinations in which torch's own components silently compute wrong gradients: here each gives
the gradients of one process.

They are split backward passes with data parallelism, accumulation in a pipeline, and norms over
parameters of different kinds and meshes. The rows `tensor_data`, `pipeline_data` and `hybrid` of
the matrix are such combinations too; every schedule is tried here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import shoal
from shoal_worker.pipelining.schedule import schedule_names

from tests.parity.comparing import check_close
from tests.parity.training import Training, alone, train
from tests.parity.variations import Variation, adamw


@pytest.mark.matrix
@pytest.mark.parametrize("accumulates", [False, True], ids=["full batch", "accumulated"])
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule_combined_with_data_parallelism_trains_like_one_process(
    schedule: str, accumulates: bool
) -> None:
    how = Variation(model="gpt", optimizer=adamw, micro=accumulates, train_step=True)
    options = {
        "pipeline_parallel_size": 2,
        "schedule": schedule,
        "micro_batches": 4 if not accumulates else 2,
    }
    outcomes = shoal.launch(
        lambda: train(Training(variation=how, strategy="pipeline", options=options)), world_size=4
    )
    expected = alone(replace(how, train_step=False))
    for outcome in outcomes:
        check_close(expected, outcome.state, how.tolerance)
