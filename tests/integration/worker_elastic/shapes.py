"""One rank of a run whose loop has one of the shapes that users write. Writes its final state as
one JSON line to OUTPUT.

SHAPE selects what the loop contains beside a step, STRATEGY the strategy. DIE="place:step" kills
this process when its script reaches that place of that step. Failpoints (SHOAL_FAILPOINTS) cover
the places that a script cannot observe.
"""

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shoal
import torch
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_worker.elastic.session.worker_process import current_session
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.integration.worker_elastic.pacing import pace
from tests.zygote.children import eventually

EPOCHS, STEPS = 3, 8
"""Number of epochs, and of steps in each."""
BATCH, MICRO = 24, 4


class Average:
    """An exponential moving average as users write it; it is not registered."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            self.values[name].mul_(0.9).add_(p.detach(), alpha=0.1)


def die(place: str, step: int) -> None:
    if os.environ.get("DIE") == f"{place}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


def correct(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, float]:
    x, y = batch
    return {"correct": float((model(x).argmax(1) == y).sum()), "samples": float(len(y))}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(t.detach().numpy().tobytes() for t in tensors.values())
    ).hexdigest()


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    shape, strategy = os.environ["SHAPE"], os.environ.get("STRATEGY", "ddp")
    shoal.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
    plain = torch.optim.AdamW(net.parameters(), 1e-2)
    options: dict[str, Any] = (
        {"sync_every": 2} if strategy == "local_sgd" else {"deterministic": True}
    )
    model, optimizer = shoal.as_distributed(net, plain, strategy=strategy, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # not registered
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)  # not registered
    average = Average(model) if shape == "ema" else None
    # not registered
    averaged = (
        AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if shape == "averaged" else None
    )
    x = torch.randn(BATCH * STEPS, 10, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = shoal.ElasticDataLoader(dataset, global_batch_size=BATCH, micro_batch_size=MICRO)
    validation = shoal.ElasticDataLoader(dataset, global_batch_size=60, train=False)
    checkpoints = Path(os.environ["OUTPUT"], "checkpoints")
    outcomes: list[bool] = []
    evaluations: list[Any] = []
    received: list[bool] = []
    count = 0
    if shape in ("save", "preempted"):
        shoal.resume(checkpoints)

    def train(step: Any) -> bool:
        nonlocal count
        for inputs, labels in step:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (scaler.scale(loss) if shape == "scaler" else loss).backward()
        number = loader.global_step
        pace(Path(os.environ["OUTPUT"], "hold"), number, EPOCHS * STEPS)
        if shape == "asks" and number == 5 and not received:  # before any rank closes the step
            received.append(True)
            if os.environ["SHOAL_LOCAL_INDEX"] == "0":
                with CoordinatorClient(
                    ChannelSettings(address=os.environ["SHOAL_COORDINATOR"])
                ) as client:
                    client.stop_job(os.environ["SHOAL_JOB_ID"], reason="a script asked")
            membership = current_session().membership
            eventually(lambda: membership is not None and membership.link.stopped, "the stop")
        if shape == "clip" or shape == "no_grad":
            model.clip_grad_norm_(1.0)
        die("clipped", number)
        if shape == "no_grad":
            with torch.no_grad():
                model(x[:4])
        if shape == "scaler":
            scaler.unscale_(optimizer)
            committed = scaler.step(optimizer)
            scaler.update()
        else:
            committed = optimizer.step()
        die("stepped", number)
        outcomes.append(bool(committed))
        count += bool(committed)
        scheduler.step()
        if average is not None and committed:
            average.update(model)
        if averaged is not None:
            averaged.update_parameters(net)
        if shape == "evaluate" and loader.global_step % 3 == 0:
            evaluations.append(shoal.evaluate(model, validation, correct))
        if shape == "save" and loader.global_step % 3 == 0:
            shoal.save_checkpoint(checkpoints, keep=2)
        optimizer.zero_grad()
        return bool(committed)

    try:
        for _ in loader.epochs(EPOCHS):
            for step in loader.steps():
                train(step)
                if shape == "break" and loader.global_step == EPOCHS * STEPS - 3:
                    break
            if shape == "break" and loader.global_step == EPOCHS * STEPS - 3:
                break
    finally:
        if shape == "finally":
            shoal.save_checkpoint(checkpoints, keep=2)

    die("left", 0)
    if shape == "left":
        group = current_session().group
        eventually(lambda: group is not None and group.broken is not None, "a peer's end")
    if shape == "break" and strategy == "ddp":
        # the script makes no further collective call
        state = {name: p.detach().clone() for name, p in model.named_parameters()}
    else:
        state = model.gather_full_parameters()
    if shape in ("stop", "left", "preempted"):
        shoal.save_checkpoint(checkpoints, keep=2)
    result = {
        "member": os.environ["SHOAL_MEMBER_ID"],
        "rank": shoal.rank(),
        "steps": loader.global_step,
        "outcomes": outcomes,
        "count": count,
        "digest": digest(state),
        "average": digest(average.values)
        if average is not None
        else digest(averaged.state_dict())
        if averaged is not None
        else "",
        "lr": optimizer.param_groups[0]["lr"],
        "scale": scaler.get_scale(),
        "evaluations": evaluations,
    }
    Path(os.environ["OUTPUT"], f"{result['member']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main([])
