"""`save_checkpoint(best=)` keeps the run's best checkpoint in addition to the newest.
`load_full_state(best=True)` reads it."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.checkpoint.files import best, write_checkpoint
from shoal_worker.checkpoint.manifest import CheckpointInfo
from shoal_worker.state.tree import Snapshot
from torch import nn


def write(directory: Path, step: int, metric: float | None, mode: str = "max", **info: Any) -> None:
    """Writes one checkpoint with keep=2. Its model consists of its step number."""
    described = CheckpointInfo(
        **{"step": step, "strategy": "ddp", "world_size": 1, "generation": 1, "run": "own"} | info,
        metric=metric,
        mode=mode,
    )
    state = {"model": {"step": torch.tensor(step)}}
    write_checkpoint(directory, Snapshot.take(state), described, fence=lambda: None, keep=2)


def there(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


@pytest.mark.parametrize(
    ("mode", "metrics", "expected"),
    [
        ("max", [0.1, 0.9, 0.2, 0.3, 0.4], [2, 4, 5]),
        ("min", [0.1, 0.9, 0.2, 0.3, 0.4], [1, 4, 5]),
        ("max", [0.5, 0.5, 0.5, 0.5, 0.5], [1, 4, 5]),
        ("max", [0.1, 0.9, None, None, None], [2, 4, 5]),
        ("max", [0.1, 0.2, 0.3, 0.4, 0.5], [4, 5]),
        ("max", [None, None, None, None, None], [4, 5]),
    ],
)
def test_best_checkpoint_is_kept_beside_the_newest(
    tmp_path: Path, mode: str, metrics: list[float | None], expected: list[int]
) -> None:
    for step, metric in enumerate(metrics, start=1):
        write(tmp_path, step, metric, mode)
    assert there(tmp_path) == expected


def test_better_checkpoint_replaces_the_best_unless_it_was_never_written(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1, 0.5)
    write(tmp_path, 3, 0.4)  # step 2 had 0.9 and was given up with the rank that wrote it
    write(tmp_path, 4, 0.6)
    write(tmp_path, 5, 0.1)
    write(tmp_path, 6, 0.1)
    assert there(tmp_path) == [4, 5, 6]
    assert best(tmp_path) == tmp_path / "step-4"


def test_step_saved_again_without_a_metric_stays_the_best(tmp_path: Path) -> None:
    write(tmp_path, 1, 0.9)
    write(tmp_path, 1, None, "")
    for step in (2, 3, 4):
        write(tmp_path, step, 0.1)
    assert there(tmp_path) == [1, 3, 4]


def test_each_run_has_its_own_best_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1, 0.9, run="before")
    for step in (2, 3, 4, 5):
        write(tmp_path, step, 1 / step)
    assert there(tmp_path) == [1, 2, 4, 5]
    assert best(tmp_path) == tmp_path / "step-2"


def test_newest_checkpoint_decides_after_the_metric_changed(tmp_path: Path) -> None:
    write(tmp_path, 1, 0.01, "min")
    write(tmp_path, 2, 0.8, "max")
    write(tmp_path, 3, 0.7, "max")
    assert best(tmp_path) == tmp_path / "step-2"


def test_best_checkpoint_is_loaded(tmp_path: Path) -> None:
    for step, metric in ((1, 0.2), (2, 0.9), (3, 0.4)):
        write(tmp_path, step, metric)
    assert shoal.load_full_state(tmp_path, best=True)["step"] == 2
    assert shoal.load_full_state(tmp_path)["step"] == 3
    with pytest.raises(shoal.ConfigurationError, match="is a single checkpoint"):
        shoal.load_full_state(tmp_path / "step-3", best=True)
    write(tmp_path / "other", 1, None, "")
    with pytest.raises(shoal.ConfigurationError, match=r"best=\.\.\."):
        shoal.load_full_state(tmp_path / "other", best=True)
    with pytest.raises(shoal.ConfigurationError, match="no checkpoint"):
        shoal.load_full_state(tmp_path / "none", best=True)


# ------------------------------------------------------------------------------------------- a run


def train(
    strategy: str, directory: Path, metrics: list[Any], *, mode: str | None = "max", steps: int = 0
) -> tuple[bool, dict[str, torch.Tensor]]:
    """Trains one step per metric, after `steps` earlier ones, and saves each with its metric and
    keep=1. Returns whether it resumed, and the state after the third step."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 0.1), strategy=strategy
    )
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    loader = shoal.ElasticDataLoader(data, global_batch_size=8)
    resumed, third = shoal.resume(directory), {}
    for _ in loader.epochs(max_steps=steps + len(metrics)):
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            given = metrics[loader.global_step - steps - 1]
            value = given(shoal.rank()) if callable(given) else given
            shoal.save_checkpoint(directory, keep=1, best=value, mode=mode)
            if loader.global_step == 3:
                third = {name: each.clone() for name, each in model.full_state_dict().items()}
    return resumed, third


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_run_and_its_resumption_keep_one_best_checkpoint(tmp_path: Path, strategy: str) -> None:
    metrics = [0.1, torch.tensor(0.3), torch.tensor([0.8]), math.nan, 0.5]
    (_, third), *_ = shoal.launch(
        functools.partial(train, strategy, tmp_path, metrics), world_size=2
    )
    assert there(tmp_path) == [3, 5]
    (resumed, _), *_ = shoal.launch(
        functools.partial(train, strategy, tmp_path, [0.7, None], steps=5), world_size=2
    )
    assert resumed
    assert there(tmp_path) == [3, 7]
    loaded = shoal.load_full_state(tmp_path, best=True)
    assert {name: value.tolist() for name, value in loaded.items()} == {
        name: value.tolist() for name, value in third.items()
    }


@pytest.mark.parametrize(
    ("metric", "mode", "named"),
    [
        (0.5, None, 'mode="max" if larger'),
        (0.5, "best", "mode='best'"),
        (None, "best", "mode='best'"),
        (torch.ones(2), "max", "expected one number"),
        (math.inf, "max", "finite"),
        (
            lambda rank: rank / 2,
            "max",
            r"rank 0 passed best=0.0, mode='max', but rank 1 passed .*0.5",
        ),
    ],
)
def test_value_that_is_not_a_metric_of_all_ranks_is_refused(
    tmp_path: Path, metric: Any, mode: str | None, named: str
) -> None:
    with pytest.raises(shoal.ConfigurationError, match=named):
        shoal.launch(functools.partial(train, "ddp", tmp_path, [metric], mode=mode), world_size=2)
    assert not tmp_path.exists() or not list(tmp_path.glob("step-*"))


def test_the_example_of_the_page_keeps_the_best_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    (example,) = re.findall(
        r'^```python title="best.py"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE
    )
    monkeypatch.chdir(tmp_path)

    def script() -> None:
        exec(compile(example, "best.py", "exec"), {"__name__": "example"})

    shoal.launch(script, world_size=2)
    kept = there(tmp_path / "best-run")
    assert kept[-2:] == [56, 64]
    found = best(tmp_path / "best-run")
    assert found is not None
    assert {56, 64, int(found.name.removeprefix("step-"))} == set(kept)
    shoal.launch(script, world_size=2)
    assert there(tmp_path / "best-run") == kept
