"""Tasks for ranks that are processes (tests/ranks): pipelines over Gloo."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.pipelining.rank_pipeline import Pipeline, PipelineSettings

from tests.integration.pipelining.models import (
    alone,
    batch,
    gradients_here,
    made,
    pipeline_of,
    train,
)


def train_one(rank: int, group: Any, *, model: str, schedule: str) -> dict[str, Any]:
    """Takes a step and returns its largest differences from one process."""
    module, (inputs, targets) = made(model), batch(model, 5)
    loss, gradients, _ = alone(module, cut_batch(inputs, targets, count=4))
    pipeline = pipeline_of(made(model), group, schedule=schedule)
    own = train(pipeline, inputs, targets)
    difference = max(
        float((found - gradients[name]).abs().max())
        for name, found in gradients_here(pipeline).items()
    )
    output = float((pipeline.predict(inputs) - module.eval()(inputs).detach()).abs().max())
    return {"loss": own, "expected_loss": loss, "gradients": difference, "output": output}


def break_down(rank: int, group: Any, *, how: str, schedule: str) -> dict[str, Any]:
    """Lets the second rank raise or die at its third forward pass; returns the error of each
    remaining rank and the time until it was raised."""
    begun = time.monotonic()

    def fail(when: str, stage: int, index: int) -> None:
        if rank == 1 and index == 2 and when == "before":
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("out of order")

    pipeline = Pipeline(made("gpt"), PipelineSettings(schedule=schedule), group=group, observe=fail)
    try:
        train(pipeline, *batch("gpt", 8))
    except (MembershipChanged, ArithmeticError) as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - begun,
        }
    return {"error": None}


_CASES: dict[str, Callable[..., dict[str, Any]]] = {"train": train_one, "break_down": break_down}


def run_case(
    rank: int, directory: str, case: str, size: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A task: runs a case on one of `size` ranks, which meet in `directory`."""
    backend = GlooBackend()
    store = dist.FileStore(str(Path(directory) / "store"), size)
    backend.initialize(
        rank=rank,
        world_size=size,
        store=store,
        timeout=timedelta(seconds=120),
        hostname="127.0.0.1",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch")
        said = _CASES[case](rank, backend.process_group, **arguments)
    backend.shutdown()
    return said
