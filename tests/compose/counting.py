"""A training script that counts: at its end, each parameter is the negated number of times that its
sample was trained on.

It runs in the workers' containers. The test copies it to `ddp.py` and `async_sgd.py`, and the copy
uses the strategy that it is named after. Samples are the rows of a unit matrix, the loss is linear,
and the learning rate cancels the mean over the batch. Steps are slow until the file `go` exists, so
that the test's events happen during the training.
"""

import json
import os
import pathlib
import time

import shoal
import torch

STRATEGY = pathlib.Path(__file__).stem
FOLDER = pathlib.Path("/checkpoints") / os.environ["SHOAL_JOB_ID"]
BATCH = 8
SAMPLES = 64
EPOCHS = {"ddp": 100, "async_sgd": 80}[STRATEGY]

FOLDER.mkdir(exist_ok=True)
net = torch.nn.Linear(SAMPLES, 1, bias=False)
torch.nn.init.zeros_(net.weight)
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), BATCH), strategy=STRATEGY
)
dataset = torch.utils.data.TensorDataset(torch.eye(SAMPLES))
size = {"batch_size": BATCH} if STRATEGY == "async_sgd" else {"global_batch_size": BATCH}
loader = shoal.ElasticDataLoader(dataset, **size)
for epoch in loader.epochs(EPOCHS):
    for (sample,) in loader:
        loss = model(sample).mean()
        loss.backward()
        shoal.report(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if STRATEGY == "ddp":
            shoal.save_checkpoint(FOLDER / "saved", every_steps=10)
        if not (FOLDER / "go").exists():
            time.sleep(1.0)
    print(
        f"epoch {epoch}: world of {shoal.world_size()}, generation {shoal.generation()}", flush=True
    )
counts = (-model.full_state_dict()["weight"]).flatten().tolist()
(FOLDER / f"counted-{shoal.rank()}.json").write_text(
    json.dumps({"epochs": EPOCHS, "counts": counts})
)
