"""A user's script in which ddp trains a model with sparse tables. Writes its final state as one
JSON line to its directory.

Configuration: one JSON object in DDP_TABLES; see the keys below.
"""

import hashlib
import json
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import shoal
import torch
from shoal_worker.sparse_tables import step_tables
from torch import nn

from tests.zygote.children import eventually

IDS = 40
SAMPLES = 96


class Recommender(nn.Module):
    """A model with two sparse tables and a dense part."""

    def __init__(self, **users: Any) -> None:
        """`users`: settings of the table of users that differ from the default."""
        super().__init__()
        torch.manual_seed(0)
        if users.get("optimizer") == "sparse_adam":
            users = {**users, "optimizer": partial(torch.optim.SparseAdam, lr=0.01)}
        options = {
            "optimizer": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01),
            "scale": 0.5,
            "buckets": 3,
            **users,
        }
        self.users = shoal.SparseEmbedding(None, 4, name="users", **options)
        self.words = shoal.SparseEmbeddingBag(
            IDS,
            4,
            name="words",
            mode="sum",
            optimizer=partial(torch.optim.SparseAdam, lr=0.01),
            seed=1,
            buckets=2,
        )
        self.out = nn.Linear(8, 1)

    def forward(self, users: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.users(users), self.words(words)], dim=1)).squeeze(1)


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    users, words = (
        torch.randint(0, IDS, (SAMPLES,), generator=generator),
        torch.randint(0, IDS, (SAMPLES, 3), generator=generator),
    )
    return torch.utils.data.TensorDataset(users, words, ((users + words.sum(1)) % 2).float())


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    users, words, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(users, words), labels)


def evaluated(model: Any, batch: Any) -> dict[str, float]:
    return {"loss": float(loss_of(model, batch)) * len(batch[0]), "samples": float(len(batch[0]))}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    config: dict[str, Any] = json.loads(os.environ["DDP_TABLES"])
    directory = Path(config["directory"])
    if "machine" in config:  # a directory that stands for a machine's own disk
        os.chdir(config["machine"])
    if "patience_s" in config:
        # A long timeout: ranks take over the pushes of a rank that is gone, not those of a rank on
        # a busy machine.
        step_tables._PATIENCE_S = config["patience_s"]  # type: ignore[misc]
    micro = config.get("micro", True)
    shoal.init()
    net = Recommender(**config.get("users", {}))
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    model, optimizer = shoal.as_distributed(
        net, adam, strategy="ddp", deterministic=micro, backend=config.get("backend")
    )
    loader = shoal.ElasticDataLoader(
        samples(),
        global_batch_size=config.get("global_batch", 16),
        micro_batch_size=4 if micro else None,
    )
    validation = shoal.ElasticDataLoader(
        torch.utils.data.Subset(samples(), range(config.get("validated", SAMPLES))),
        global_batch_size=32,
        train=False,
    )
    if "resume" in config:
        shoal.resume(config["resume"])
    lost = 0
    for epoch in loader.epochs(config["epochs"]):
        for batches in loader.steps() if micro else ((batch,) for batch in loader):
            for batch in batches:
                loss = loss_of(model, batch)
                (
                    loss * float("nan") if loader.global_step in config.get("nan_at", ()) else loss
                ).backward()
            (directory / f"step-{loader.global_step}").touch()
            if loader.global_step in config.get("hold_at", ()):
                go = directory / f"go-{loader.global_step}"
                eventually(go.exists, "the test, which holds this worker")
            if "delay_s" in config:
                time.sleep(config["delay_s"])
            try:
                lost += not optimizer.step()
            except shoal.InvalidRequestError as error:
                logging.info("leaving the batch out: %s", error)
                optimizer.zero_grad()
                optimizer.step()
            optimizer.zero_grad()
            if "save_every" in config:
                shoal.save_checkpoint(config["save"], every_steps=config["save_every"])
        evaluation = (
            shoal.evaluate(model, validation, evaluated) if config.get("looks", True) else None
        )
        if (
            "save" in config
            and "save_every" not in config
            and epoch < config.get("save_until", 1000)
        ):
            shoal.save_checkpoint(config["save"])
    if not config.get("looks", True):
        (directory / "result.json").write_text(
            json.dumps({"steps": loader.global_step, "lost": lost})
        )
        return
    with torch.no_grad():
        rows = [net.users(torch.arange(IDS)), net.words(torch.arange(IDS).unsqueeze(1))]
    state = [*rows, *model.full_state_dict().values()]
    result = {
        "steps": loader.global_step,
        "lost": lost,
        "world": shoal.world_size(),
        "evaluation": evaluation,
        "digest": hashlib.sha256(b"".join(value.numpy().tobytes() for value in state)).hexdigest(),
        "values": torch.cat([value.double().flatten() for value in state]).tolist(),
    }
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
