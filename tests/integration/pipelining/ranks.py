"""What ranks that are processes (tests/ranks) do: cases of pipelines on Gloo."""

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
from shoal_worker.backends.gloo import GlooBackend
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.pipelining.pipeline import Pipeline, PipelineSettings

from tests.integration.pipelining.models import alone, batch, cross_entropy, made


def train(rank: int, replica: int, group: Any, data: Any, *, model: str, schedule: str) -> dict[str, Any]:
    """A step, compared to one process; the largest difference, and what was sent."""
    module = made(model)
    shares = [batch(model, 5, seed=1), batch(model, 3, seed=2)][: data.size() if data is not None else 1]
    loss, gradients, _ = alone(module, [one for share in shares for one in cut_batch(*share, count=4)])
    pipeline = Pipeline(made(model), PipelineSettings(schedule=schedule), group=group, data_group=data)
    pipeline.release()
    own = float(pipeline.train_step(*shares[replica], cross_entropy))
    pipeline.reduce_gradients()
    difference = max(float((p.grad - gradients[name]).abs().max()) for name, p in pipeline.named_parameters().items())
    output = pipeline.predict(shares[0][0])
    expected = module.eval()(shares[0][0]).detach() if model != "cnn" else output
    return {
        "loss": own,
        "expected_loss": loss,
        "gradients": difference,
        "output": float((output - expected).abs().max()),
        "norm": float(pipeline.clip_grad_norm_(1.0)),
        "activations": pipeline.traffic.activations,
    }


def break_down(rank: int, replica: int, group: Any, data: Any, *, how: str, schedule: str) -> dict[str, Any]:
    """The second rank fails, or dies, at its third forward pass; how long the others take to say so."""
    begun = time.monotonic()

    def fail(when: str, stage: int, index: int) -> None:
        if rank == 1 and index == 2 and when == "before":
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("out of order")

    pipeline = Pipeline(made("gpt"), PipelineSettings(schedule=schedule), group=group, observe=fail)
    try:
        pipeline.train_step(*batch("gpt", 8), cross_entropy)
    except (MembershipChanged, ArithmeticError) as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    return {"error": None}


_CASES: dict[str, Callable[..., dict[str, Any]]] = {"train": train, "break_down": break_down}


def run_case(rank: int, directory: str, case: str, pipeline: int, data: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A task: a case on one of the pipeline x data ranks; `directory` is where these meet."""
    replica, stage = divmod(rank, pipeline)
    groups = []
    for name, own, size in ((f"line{replica}", stage, pipeline), (f"column{stage}", replica, data)):
        backend = GlooBackend()
        if size > 1:
            store = dist.FileStore(str(Path(directory) / name), size)
            backend.initialize(rank=own, world_size=size, store=store, timeout=timedelta(seconds=120), hostname="127.0.0.1")
        groups.append(backend)
    line, column = (one.process_group if one.is_initialized else None for one in groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch")
        said = _CASES[case](stage, replica, line, column, **arguments)
    for backend in groups:
        backend.shutdown()
    return said
