"""A training script for tensor, pipeline and hybrid: STRATEGY with OPTIONS (JSON), and
micro-batches of MICRO samples if set. Writes its final state as one JSON line to OUTPUT."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import shoal
import torch

from tests.integration.worker_elastic.pacing import pace
from tests.unit.worker_strategies import mesh_models as models


def train(
    strategy: str,
    options: dict[str, Any],
    epochs: int,
    hold: Path | None = None,
    checkpoints: str | None = None,
    micro: int | None = None,
) -> dict[str, Any]:
    """Trains on one rank and returns its final state."""
    net = models.make()
    optimizer = models.OPTIMIZERS["adamw"](net.parameters())
    model, optimizer = shoal.as_distributed(
        net, optimizer, strategy=strategy, minimum_parameter_group_size=64, **options
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    shoal.register_state(scheduler=scheduler)
    loader = shoal.ElasticDataLoader(
        models.data(), global_batch_size=models.BATCH, micro_batch_size=micro
    )
    validation = shoal.ElasticDataLoader(models.data(), global_batch_size=5, train=False)
    if checkpoints is not None:
        shoal.resume(checkpoints)
    lost = 0
    evaluations = []
    for _ in loader.epochs(epochs):
        for step in loader.steps() if micro else ([batch] for batch in loader):
            for x, y in step:
                model.train_step(x, y, models.loss_of)
            if hold is not None:
                pace(hold, loader.global_step, epochs * len(loader))
            model.clip_grad_norm_(models.MAX_NORM)
            lost += not optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        evaluations.append(
            shoal.evaluate(
                model,
                validation,
                lambda m, batch: {"samples": len(batch[0]), "sum": m(batch[0]).sum()},
            )
        )
        if checkpoints is not None:
            shoal.save_checkpoint(checkpoints, keep=2)
    return {
        "world": shoal.world_size(),
        "replicas": model.data_parallel_size,
        "steps": loader.global_step,
        "lost": lost,
        "lr": scheduler.get_last_lr(),
        "evaluation": evaluations[-1],
        "parameters": torch.cat(
            [value.flatten() for value in model.full_state_dict().values()]
        ).tolist(),
        "moments": [
            float(own["exp_avg"].abs().sum()) for own in optimizer.state_dict()["state"].values()
        ],
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    output = Path(os.environ["OUTPUT"])
    shoal.init()
    options, epochs = json.loads(os.environ["OPTIONS"]), int(os.environ["EPOCHS"])
    micro = int(os.environ["MICRO"]) if "MICRO" in os.environ else None
    result = train(
        os.environ["STRATEGY"],
        options,
        epochs,
        output / "hold",
        os.environ.get("CHECKPOINTS"),
        micro,
    )
    (output / f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
