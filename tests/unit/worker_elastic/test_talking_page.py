"""The examples of docs/talking.md run, and torchmetrics works as the page describes."""

from __future__ import annotations

import pytest
import shoal
import torch
import torch.distributed as dist
from torch import nn

from tests.pages import examples


@pytest.mark.usefixtures("fresh_session")
def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(examples("talking.md")[0], "talking.md", "exec"), {})
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "epoch 0",
        "epoch 1",
    ]


def test_loss_over_the_whole_batch_from_the_page_trains_the_same_on_any_number_of_ranks() -> None:
    def rank() -> list[float]:
        known: dict[str, object] = {}
        exec(
            compile(examples("talking.md")[1], "talking.md, losses over the whole batch", "exec"),
            known,
        )
        net = known["net"]
        assert isinstance(net, nn.Module)
        return [float(parameter.detach().norm()) for parameter in net.parameters()]

    (alone,) = shoal.launch(rank, world_size=1)
    for found in shoal.launch(rank, world_size=3):
        assert found == pytest.approx(alone, rel=1e-4)


@pytest.mark.usefixtures("fresh_session")
def test_the_pages_example_of_torchs_own_functions_runs(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        exec(compile(examples("talking.md")[2], "talking.md, torch's own functions", "exec"), {})
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().out == "1 ranks\n"


def test_metric_of_torchmetrics_is_computed_over_all_ranks() -> None:
    # imported here because only this test needs it, and it takes more than a second
    import torchmetrics

    predictions = torch.arange(20) % 4
    targets = torch.arange(20) % 3

    def gathered(value: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        return shoal.gather(value)

    def rank() -> float:
        net = nn.Linear(2, 1)
        shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
        metric = torchmetrics.classification.MulticlassAccuracy(
            4, average="micro", dist_sync_fn=gathered, distributed_available_fn=lambda: True
        )
        mine = slice(0, 12) if shoal.rank() == 0 else slice(12, 20)
        metric.update(predictions[mine], targets[mine])
        return float(metric.compute())

    assert (
        shoal.launch(rank, world_size=2)
        == [pytest.approx(float((predictions == targets).float().mean()))] * 2
    )
