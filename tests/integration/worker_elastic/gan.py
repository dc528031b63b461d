"""A script with two models: a discriminator that takes a step for each batch, and a generator that
takes one step in every EVERY batches.

Everything is in float64, so that runs with different numbers of ranks agree up to rounding. Writes
its final state as one JSON line to OUTPUT.
"""

import json
import os
from pathlib import Path

import shoal
import torch
from torch import nn

from tests.integration.worker_elastic.pacing import pace

SAMPLES = 192
BATCH = 24


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    epochs, every = int(os.environ["EPOCHS"]), int(os.environ.get("EVERY", "1"))
    hold, checkpoints = Path(os.environ["OUTPUT"], "hold"), os.environ.get("CHECKPOINTS")
    shoal.init()
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6))
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers = (
        torch.optim.Adam(generator.parameters(), 3e-3),
        torch.optim.AdamW(discriminator.parameters(), 3e-3),
    )
    strategy = os.environ.get("STRATEGY", "ddp")
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    models, optimizers = shoal.as_distributed(
        (generator, discriminator), optimizers, strategy=strategy, **options
    )
    (generator, discriminator), (of_generator, of_discriminator) = models, optimizers
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=8.0, growth_interval=2, enabled=os.environ.get("SCALED") == "1"
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.99) for each in optimizers]
    random = torch.Generator().manual_seed(1)
    dataset = torch.utils.data.TensorDataset(
        torch.randn(SAMPLES, 6, generator=random), torch.randn(SAMPLES, 3, generator=random)
    )
    loader = shoal.ElasticDataLoader(dataset, global_batch_size=BATCH)
    loss = nn.functional.binary_cross_entropy_with_logits
    if checkpoints:
        shoal.resume(checkpoints)

    said: list[str] = []
    for _ in loader.epochs(epochs):
        for real, noise in loader:
            number = loader.global_step
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            of_discriminator.zero_grad()
            scaler.scale(
                loss(discriminator(real), ones)
                + loss(discriminator(generator(noise).detach()), zeros)
            ).backward()
            said.append(scaler.step(of_discriminator).value)
            schedulers[1].step()
            if number % every == 0:
                of_generator.zero_grad()
                scaler.scale(loss(discriminator(generator(noise)), ones)).backward()
                pace(hold, number, epochs * len(loader))
                said.append(scaler.step(of_generator).value)
                schedulers[0].step()
            scaler.update()
        if checkpoints:
            shoal.save_checkpoint(checkpoints)

    states = [model.full_state_dict() for model in models]
    result = {
        "world": shoal.world_size(),
        "steps": loader.global_step,
        "lost": said.count("lost"),
        "parameters": [
            torch.cat([t.flatten() for t in state.values()]).tolist() for state in states
        ],
        "lr": [scheduler.get_last_lr() for scheduler in schedulers],
        "updates": [
            max(int(s["step"]) for s in optimizer.state_dict()["state"].values())
            for optimizer in optimizers
        ],
    }
    Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(
        json.dumps(result)
    )


main()
