"""A script that logs every step to TensorBoard in TRACKED, to MLflow, to W&B or to OpenTelemetry.
The loss of step n is n."""

import os
import time
from pathlib import Path

import shoal
import torch
from torch import nn

from tests import events, wandbruns

AWAITED = [lambda: Path(os.environ["CHECKPOINTS"], "step-4").exists()]
if (store := os.environ.get("MLFLOW_STORE")) is not None:
    AWAITED.append(lambda: any(Path(store).glob("*/*/metrics/shoal/world_size")))
if (directory := os.environ.get("WANDB_DIR")) is not None:
    AWAITED.append(
        lambda: any(len(found) >= 4 for found in wandbruns.rows(Path(directory)).values())
    )
if (tracked := os.environ.get("TRACKED")) is not None:
    AWAITED.append(lambda: len(events.points(Path(tracked), "shoal/world_size")) >= 4)

torch.set_num_threads(1)
shoal.init()
torch.manual_seed(0)
net = nn.Linear(3, 1)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-3))
dataset = torch.utils.data.TensorDataset(torch.ones(60, 3))
loader = shoal.ElasticDataLoader(dataset, global_batch_size=6)
sinks = [shoal.TensorBoard(os.environ["TRACKED"])] if "TRACKED" in os.environ else []
sinks += [shoal.MLflow("digits")] if "MLFLOW_TRACKING_URI" in os.environ else []
sinks += [shoal.WandB("digits")] if "WANDB_DIR" in os.environ else []
sinks += [shoal.OpenTelemetry()] if "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ else []
shoal.track(*sinks, every_steps=1)
shoal.resume(os.environ["CHECKPOINTS"])
for _ in loader.epochs(2):
    for (x,) in loader:
        model(x).square().mean().backward()
        if optimizer.step():
            shoal.report(loss=float(loader.global_step))
            shoal.save_checkpoint(os.environ["CHECKPOINTS"], every_steps=4)
        optimizer.zero_grad()
        give_up_at = time.monotonic() + 60
        while loader.global_step == 5 and not all(written() for written in AWAITED):
            # A background thread writes the values and does not report when it is done, and some
            # tests kill the process soon afterwards.
            assert time.monotonic() < give_up_at, (
                "step-4 was not written within 60 s, or MLflow had no point"
            )
            time.sleep(0.01)
