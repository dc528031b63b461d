"""The training script of these tests. It is deterministic, so runs of any size and with any faults
end with the same parameters, bit for bit. It writes its final state as JSON to OUTPUT. Steps are
slow while OUTPUT/hold exists."""

import hashlib
import json
import logging
import os
import time
from pathlib import Path

import shoal
import torch
from torch import nn

from tests.integration.worker_elastic.pacing import pace


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    output, epochs, width = (
        Path(os.environ["OUTPUT"]),
        int(os.environ["EPOCHS"]),
        int(os.environ["WIDTH"]),
    )
    shoal.init()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2)
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    model, optimizer = shoal.as_distributed(
        net, optimizer, strategy=os.environ["STRATEGY"], deterministic=True
    )
    between, samples = os.environ["BETWEEN"], 48 if os.environ["BETWEEN"] == "epoch" else 480
    x = torch.randn(samples, 10, generator=torch.Generator().manual_seed(1))
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()),
        global_batch_size=48,
        micro_batch_size=8,
    )
    evaluated = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(x), global_batch_size=48, train=False
    )
    for _ in loader.epochs(epochs):
        for step in loader.steps():
            for inputs, labels in step:
                nn.functional.cross_entropy(model(inputs), labels).backward()
            pace(output / "hold", loader.global_step, epochs * len(loader))
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if between == "evaluate":
                shoal.evaluate(
                    model, evaluated, lambda model, batch: evaluate(model, batch, output)
                )
            elif between == "save":
                shoal.save_checkpoint(output / "checkpoints", keep=2)
                arrive_late(output)
                shoal.save_checkpoint(output / "checkpoints", keep=2)
            elif between == "epoch":
                arrive_late(output)
    digest = hashlib.sha256(
        b"".join(tensor.numpy().tobytes() for tensor in model.full_state_dict().values())
    ).hexdigest()
    result = {
        "rank": shoal.rank(),
        "generation": shoal.generation(),
        "steps": loader.global_step,
        "digest": digest,
    }
    (output / f"{os.environ.get('SHOAL_MEMBER_ID', 'alone')}.json").write_text(json.dumps(result))


def evaluate(model: nn.Module, batch: tuple[torch.Tensor], output: Path) -> dict[str, float]:
    """Evaluates slowly while steps are slow, so that a fault is likely to find the ranks
    in here."""
    if (output / "hold").exists():
        time.sleep(0.1)
    return {"outputs": float(model(batch[0]).sum())}


def arrive_late(output: Path) -> None:
    """Delays rank 0 while steps are slow, so that a fault is likely to find the other ranks waiting
    in the next operation."""
    if (output / "hold").exists() and shoal.rank() == 0:
        time.sleep(0.3)


if __name__ == "__main__":
    main()
