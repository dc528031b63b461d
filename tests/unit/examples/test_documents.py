"""The examples in the documents outside of docs/strategies run on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from torch.optim.swa_utils import AveragedModel

DOCS = Path(__file__).parents[3] / "docs"


_PAGES = [
    "checkpoints.md",
    "elastic.md",
    "fitting.md",
    "observability.md",
    "streams.md",
    "guides/accumulation.md",
    "guides/averages.md",
    "guides/metrics.md",
    "guides/side-effects.md",
]


@pytest.mark.parametrize("page", _PAGES)
def test_the_examples_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    assert examples
    monkeypatch.chdir(tmp_path)
    shoal.launch(
        lambda: exec(compile("\n".join(examples), page, "exec"), {"__name__": "example"}),
        world_size=2,
    )


def averages() -> list[str]:
    """Returns the code blocks of docs/guides/averages.md."""
    page = (DOCS / "guides/averages.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_a_saved_average_loads_into_the_plain_model(tmp_path: Path) -> None:
    def rank() -> None:
        found: dict[str, Any] = {"__name__": "example"}
        exec(compile("\n".join(averages()), "guides/averages.md", "exec"), found)
        found["save_average"](found["average"], tmp_path / "average.pt")

    shoal.launch(rank, world_size=2)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    plain.load_state_dict(torch.load(tmp_path / "average.pt"))


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "tensor"])
def test_average_of_a_sharded_model_matches_one_process(strategy: str) -> None:
    """The averaging code of docs/guides/averages.md for sharded parameters gives the same averages
    as its code for a single rank."""
    _, cut, *_ = averages()
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

    def rank(strategy: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        found: dict[str, Any] = {
            "shoal": shoal,
            "torch": torch,
            "nn": torch.nn,
            "AveragedModel": AveragedModel,
            "dataset": dataset,
        }
        exec(compile(cut, "guides/averages.md", "exec"), found)
        return [value.detach().clone() for value in found["train"](strategy).parameters()]

    (alone,) = shoal.launch(rank, "ddp", world_size=1)
    for average in shoal.launch(rank, strategy, world_size=2):
        torch.testing.assert_close(average, alone)
