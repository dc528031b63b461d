"""Searches for hyperparameters with Optuna. Each trial is an elastic run: `python search.py`."""

import subprocess
import sys

import optuna
import shoal
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

STORAGE, STUDY = "sqlite:///search.db", "digits"
PRUNER = optuna.pruners.MedianPruner(n_startup_trials=1)
EPOCHS = 10


def objective(trial: optuna.Trial) -> float:
    """Runs a trial on two workers and returns its last loss. Called by Optuna."""
    rate = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    run = [sys.executable, "-m", "shoal", "run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*run, __file__, str(trial._trial_id), str(rate)], check=True)
    losses = trial.study.trials[trial.number].intermediate_values
    if len(losses) < EPOCHS:
        raise optuna.TrialPruned
    return losses[EPOCHS - 1]


def is_pruned(trial_id: int, epoch: int, loss: float) -> bool:
    """Reports the loss on one rank, and returns on all ranks whether to prune the trial."""
    decision = None
    for _ in range(shoal.world_size()):  # retries if the reporting rank dies
        if shoal.is_main_process():
            study = optuna.load_study(study_name=STUDY, storage=STORAGE, pruner=PRUNER)
            trial = optuna.Trial(study, trial_id)
            trial.report(loss, epoch)  # has no effect if the epoch was already reported
            decision = bool(trial.should_prune())
        decision = shoal.broadcast(decision)
        if decision is not None:
            break
    return decision is True


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, float]:
    """Returns sums over a batch, for `shoal.evaluate`."""
    images, labels = batch
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    return {"loss": float(loss), "samples": len(labels)}


def train(trial_id: int, rate: float) -> None:
    """Trains with one learning rate. Runs in each worker."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)
    training, validation = random_split(
        TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2]
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = shoal.as_distributed(net, torch.optim.AdamW(net.parameters(), rate))
    loader = shoal.ElasticDataLoader(training, global_batch_size=96)
    held_out = shoal.ElasticDataLoader(validation, global_batch_size=96, train=False)
    for epoch in loader.epochs(EPOCHS):
        for inputs, labels in loader:
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        sums = shoal.evaluate(model, held_out, loss_of)
        if is_pruned(trial_id, epoch, sums["loss"] / sums["samples"]):
            break


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), float(sys.argv[2]))
    else:
        study = optuna.create_study(
            study_name=STUDY,
            storage=STORAGE,
            sampler=optuna.samplers.TPESampler(seed=0),
            load_if_exists=True,
        )
        study.optimize(objective, n_trials=4)
        print(f"best: {study.best_params}, loss {study.best_value:.4f}")
