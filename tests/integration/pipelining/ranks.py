"""Ranks as processes on Gloo. Run as a module: imports torch once, and forks the ranks of each case that a line on standard input names.

{"case": name, "pipeline": 2, "data": 2, "arguments": {...}} -> {rank: {"result": ...} or {"error": ...}}, without the ranks that died.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shoal_common.errors import MembershipChanged
from shoal_worker.backends.gloo import GlooBackend
from shoal_worker.pipelining.micro_batches import cut_batch
from shoal_worker.pipelining.pipeline import Pipeline, PipelineSettings

from tests.integration.pipelining.models import alone, batch, cross_entropy, made

_PATIENCE_S = 30.0


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


CASES: dict[str, Callable[..., dict[str, Any]]] = {"train": train, "break_down": break_down}


def main() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        ranks = command["pipeline"] * command["data"]
        with tempfile.TemporaryDirectory() as directory:
            children = [_fork(rank, Path(directory), command) for rank in range(ranks)]
            _await(children)
            said = {rank: json.loads(path.read_text()) for rank in range(ranks) if (path := Path(directory) / f"{rank}.json").exists()}
        print(json.dumps(said), flush=True)


def _fork(rank: int, directory: Path, command: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        said: dict[str, Any]
        try:
            said = {"result": _run(rank, directory, **command)}
        except BaseException as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        part = directory / f"{rank}.part"
        part.write_text(json.dumps(said))
        part.rename(directory / f"{rank}.json")
        os._exit(0)
    return pid


def _run(rank: int, directory: Path, case: str, pipeline: int, data: int, arguments: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    replica, stage = divmod(rank, pipeline)
    groups = []
    for name, own, size in ((f"line{replica}", stage, pipeline), (f"column{stage}", replica, data)):
        backend = GlooBackend()
        if size > 1:
            store = dist.FileStore(str(directory / name), size)
            backend.initialize(rank=own, world_size=size, store=store, timeout=timedelta(seconds=20), hostname="127.0.0.1")
        groups.append(backend)
    line, column = (one.process_group if one.is_initialized else None for one in groups)
    return CASES[case](stage, replica, line, column, **arguments)


def _await(children: list[int]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    waiting = set(children)
    while waiting:
        for pid in list(waiting):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                waiting.remove(pid)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
