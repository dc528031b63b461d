"""The training script of these tests: a small model with BatchNorm and dropout. Writes its final
state as one JSON line to OUTPUT."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import shoal
import torch
from torch import nn

from tests.integration.worker_elastic.pacing import pace
from tests.zygote.children import eventually


def correct(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, float]:
    x, y = batch
    return {"correct": float((model(x).argmax(1) == y).sum()), "samples": float(len(y))}


def main(arguments: Sequence[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    epochs = int(os.environ["EPOCHS"])
    micro = os.environ.get("MICRO") == "1"
    hold = Path(os.environ["OUTPUT"], "hold")
    checkpoints = os.environ.get("CHECKPOINTS")
    save_every = int(os.environ.get("SAVE_EVERY", "0"))
    shoal.init()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2)
    )
    optimizer = getattr(torch.optim, os.environ.get("OPTIMIZER", "AdamW"))(net.parameters(), 1e-2)
    options = {"shard_size": 2} if os.environ.get("STRATEGY") == "hsdp" else {}
    model, optimizer = shoal.as_distributed(
        net, optimizer, strategy=os.environ.get("STRATEGY", "ddp"), deterministic=micro, **options
    )
    per_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    per_epoch = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0), lambda epoch: 1.0 * epoch
    )
    shoal.register_state(per_step=per_step, per_epoch=per_epoch)
    x = torch.randn(480, 10, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = shoal.ElasticDataLoader(
        dataset, global_batch_size=48, micro_batch_size=8 if micro else None
    )
    validation = shoal.ElasticDataLoader(dataset, global_batch_size=60, train=False)
    if checkpoints:
        shoal.resume(checkpoints)

    lost = 0
    evaluations = []
    max_steps = os.environ.get("MAX_STEPS")
    for _ in loader.epochs(epochs, max_steps=None if max_steps is None else int(max_steps)):
        if micro:
            for step in loader.steps():
                for inputs, labels in step:
                    nn.functional.cross_entropy(model(inputs), labels).backward()
                pace(hold, loader.global_step, epochs * len(loader))
                model.clip_grad_norm_(1.0)
                lost += not optimizer.step()
                per_step.step()
                optimizer.zero_grad()
                if save_every:
                    shoal.save_checkpoint(checkpoints, keep=2, every_steps=save_every)
        else:
            for inputs, labels in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), labels).backward()
                pace(hold, loader.global_step, epochs * len(loader))
                lost += not optimizer.step()
                per_step.step()
        evaluations.append(shoal.evaluate(model, validation, correct))
        per_epoch.optimizer.step()
        per_epoch.step()
        if checkpoints and os.environ.get("BEST"):
            quality = -abs(loader.epoch - int(os.environ["BEST"]))
            shoal.save_checkpoint(checkpoints, keep=1, best=quality, mode="max")
        elif checkpoints and not save_every:
            shoal.save_checkpoint(checkpoints, keep=2)

    eventually(
        lambda: not Path(os.environ["OUTPUT"], "linger").exists(),
        "the test, which holds the run between its last step and its end",
    )
    state = model.full_state_dict()
    result = {
        "member": os.environ["SHOAL_MEMBER_ID"],
        "rank": shoal.rank(),
        "world": shoal.world_size(),
        "generation": shoal.generation(),
        "steps": loader.global_step,
        "lost": lost,
        "digest": hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest(),
        "parameters": torch.cat([t.double().flatten() for t in state.values()]).tolist(),
        "lr": per_step.get_last_lr(),
        "epochs_scheduled": per_epoch.last_epoch,
        "evaluations": evaluations[-1:],
    }
    Path(os.environ["OUTPUT"], f"{result['member']}.json").write_text(json.dumps(result))
