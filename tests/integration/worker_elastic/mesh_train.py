"""A training script for tensor, pipeline and hybrid: STRATEGY with OPTIONS (JSON); says what it ends with as one JSON line in OUTPUT."""

import json
import logging
import os
import time
from pathlib import Path

import shoal
import torch

from tests.unit.worker_strategies import mesh_models as models


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    hold = Path(os.environ["OUTPUT"], "hold")
    shoal.init()
    net = models.make()
    optimizer = models.OPTIMIZERS["adamw"](net.parameters())
    options = json.loads(os.environ["OPTIONS"])
    model, optimizer = shoal.as_distributed(net, optimizer, strategy=os.environ["STRATEGY"], minimum_parameter_group_size=64, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    shoal.register_state(scheduler=scheduler)
    loader = shoal.ElasticDataLoader(models.data(), global_batch_size=models.BATCH)
    validation = shoal.ElasticDataLoader(models.data(), global_batch_size=5, train=False)
    if "CHECKPOINTS" in os.environ:
        shoal.resume(os.environ["CHECKPOINTS"])
    lost = 0
    evaluations = []
    for _ in loader.epochs(int(os.environ["EPOCHS"])):
        for x, y in loader:
            model.train_step(x, y, models.loss_of)
            time.sleep(0.3 if hold.exists() else 0.002)
            model.clip_grad_norm_(models.MAX_NORM)
            lost += not optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        evaluations.append(shoal.evaluate(model, validation, lambda m, batch: {"samples": len(batch[0]), "sum": m(batch[0]).sum()}))
        if "CHECKPOINTS" in os.environ:
            shoal.save_checkpoint(os.environ["CHECKPOINTS"], keep=2)
    result = {
        "world": shoal.world_size(),
        "replicas": model.data_parallel_size,
        "steps": loader.global_step,
        "lost": lost,
        "lr": scheduler.get_last_lr(),
        "evaluation": evaluations[-1],
        "parameters": torch.cat([value.flatten() for value in model.full_state_dict().values()]).tolist(),
        "moments": [float(own["exp_avg"].abs().sum()) for own in optimizer.state_dict()["state"].values()],
    }
    Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
