"""One rank of runs with local_sgd. RECIPES names the recipes, each of which runs in its own job on
the coordinator at SHOAL_COORDINATOR. Writes the results to OUTPUT."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import shoal
import torch
import torch.distributed as dist
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.session.worker_process import current_session, open_session, set_session
from shoal_worker.settings import WorkerSettings
from torch import nn

from tests.integration.worker_elastic.local_sgd_simulation import RECIPES, Recipe
from tests.integration.worker_elastic.pacing import pace

CHECKPOINT_AT = 11
"""Steps before the checkpoint, which is taken in the middle of a round."""
_sent: list[int] = []


def main() -> None:
    torch.set_num_threads(1)
    _count_bytes()
    names = os.environ["RECIPES"].split(",")
    if os.environ["SHOAL_LOCAL_INDEX"] == "0":
        with CoordinatorClient(ChannelSettings(address=os.environ["SHOAL_COORDINATOR"])) as client:
            for name in names if len(names) > 1 else ():
                world = int(os.environ["WORLD"])
                client.create_job(
                    pb.JobSpec(
                        job_id=name,
                        min_workers=1,
                        max_workers=world,
                        join_grace_ms=120_000,
                        lease_ms=15_000,
                    )
                )
    results = {}
    for name in names:
        open_session(WorkerSettings(job_id=name) if len(names) > 1 else None)
        results[name] = train(RECIPES[name])
        current_session().close()
        set_session(None)
    member = os.environ["SHOAL_MEMBER_ID"]
    Path(os.environ["OUTPUT"], f"{member}.json").write_text(json.dumps(results))


def _count_bytes() -> None:
    plain = Group.all_reduce_async

    def counted(self: Group, tensor: torch.Tensor) -> dist.Work | None:
        _sent.append(tensor.nbytes)
        return plain(self, tensor)

    # there is no public interface between a strategy and its backend
    Group.all_reduce_async = counted  # type: ignore[method-assign]


def error(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, float]:
    x, y = batch
    return {"error": float((model(x) - y).square().sum()), "samples": float(len(x))}


def train(recipe: Recipe) -> dict[str, Any]:
    hold = Path(os.environ["OUTPUT"], "hold")
    net = recipe.net()
    model, optimizer = shoal.as_distributed(
        net, recipe.optimizer(net), strategy="local_sgd", **recipe.options
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    shoal.register_state(schedule=schedule)
    dataset = torch.utils.data.TensorDataset(*recipe.data())
    loader = shoal.ElasticDataLoader(
        dataset, global_batch_size=recipe.batch, micro_batch_size=recipe.micro, shuffle=False
    )
    validation = shoal.ElasticDataLoader(dataset, global_batch_size=10, train=False)
    _sent.clear()
    lost, bytes_by_step, evaluations = 0, [], []
    for _ in loader.epochs(recipe.epochs):
        for step in loader.steps() if recipe.micro else loader:
            before = len(_sent)
            optimizer.zero_grad()
            for x, y in step if recipe.micro else [step]:
                nn.functional.mse_loss(model(x), y).backward()
            pace(hold, loader.global_step, recipe.epochs * len(loader))
            lost += not optimizer.step()
            schedule.step()
            bytes_by_step.append(sum(_sent[before:]))
            if os.environ.get("EVALUATE"):
                received = shoal.evaluate(model, validation, error)
                whole = model.full_state_dict()
                if loader.global_step == CHECKPOINT_AT:
                    shoal.save_checkpoint(Path(os.environ["OUTPUT"], "checkpoints"))
                    model.save_model(Path(os.environ["OUTPUT"], "model"))
                evaluations.append(
                    [
                        received["error"],
                        received["samples"],
                        model.steps_in_round,
                        float(whole["0.weight"].sum()),
                    ]
                )
    return {
        "state": {name: value.tolist() for name, value in model.full_state_dict().items()},
        "lost": lost,
        "steps": loader.global_step,
        "scheduled": schedule.last_epoch,
        "world": shoal.world_size(),
        "bytes": bytes_by_step,
        "evaluations": evaluations,
        "state_entries": len(optimizer.state),
    }


if __name__ == "__main__":
    main()
