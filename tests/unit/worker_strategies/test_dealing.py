"""Ranks compare in every step what they deal samples from. If their loaders differed without an
error, some samples would count twice and others never."""

import itertools
import random
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import shoal
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, Sampler, Subset, TensorDataset, random_split

SAMPLES = 160
EVERY_NUMBER = torch.arange(SAMPLES)


class Numbers(Dataset[torch.Tensor]):
    """A dataset of the numbers below 160 that exposes only its length."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return EVERY_NUMBER[index]


class Drawn(Sampler[int]):
    """A sampler that draws from a generator of its own.

    held: True if the generator is an attribute, where the loader can find it; otherwise it is
    hidden in a closure.
    """

    def __init__(
        self, draw: Callable[[Any], list[int]], generator: Any = None, *, held: bool = True
    ) -> None:
        self._held = generator if held else None
        self._draw = (lambda: draw(self._held)) if held else (lambda: draw(generator))

    def __iter__(self) -> Iterator[int]:
        return iter(self._draw())


def permuted(generator: Any) -> list[int]:
    if isinstance(generator, torch.Generator):
        return torch.randperm(SAMPLES, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return generator.sample(range(SAMPLES), SAMPLES)
    return [int(index) for index in generator.permutation(SAMPLES)]


def train(
    make_loader: Callable[[], shoal.ElasticDataLoader], *, epochs: int = 2
) -> list[Counter[int]]:
    """Returns the samples that this rank received in each epoch."""
    net = nn.Linear(1, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    loader = make_loader()
    seen: list[Counter[int]] = []
    for _ in loader.epochs(epochs):
        seen.append(Counter())
        for batch in loader:
            numbers = batch
            if isinstance(batch, list | dict):
                numbers = batch[0] if isinstance(batch, list) else batch["x"]
            optimizer.zero_grad()
            loss = functional.mse_loss(
                model(numbers.float().view(-1, 1)), torch.zeros(len(numbers), 1)
            )
            loss.backward()
            optimizer.step()
            seen[-1].update(numbers.tolist())
    return seen


def unequal_generator(kind: str) -> Any:
    """Returns a generator with a different seed on each rank."""
    number = 1000 + shoal.rank()
    made = {
        "torch": lambda: torch.Generator().manual_seed(number),
        "numpy": lambda: np.random.default_rng(number),
        "numpy's older": lambda: np.random.RandomState(number),
        "python": lambda: random.Random(number),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["torch", "numpy", "numpy's older", "python"])
def test_sampler_with_its_own_generator_draws_identically_on_all_ranks_and_anew_each_epoch(
    kind: str,
) -> None:
    def rank() -> list[Counter[int]]:
        shoal.init()
        sampler = Drawn(permuted, unequal_generator(kind))
        return train(
            lambda: shoal.ElasticDataLoader(Numbers(), global_batch_size=16, sampler=sampler)
        )

    one, other = shoal.launch(rank, world_size=2)
    for epoch in range(2):
        assert one[epoch] + other[epoch] == Counter(range(SAMPLES))
    assert one[0] != one[1]


def rows(number: int, *, folder: str = "", error: float = 0.0, text: str = "") -> Any:
    """Returns a Hugging Face dataset."""
    from datasets import Dataset  # takes seconds to import

    return Dataset.from_dict(
        {
            "file": [f"{folder}/{each}.txt" for each in range(number)],
            "text": [text] * number,
            "tokens": [[each, each + 1] for each in range(number)],
            "x": [each / 7 + error for each in range(number)],
        }
    ).with_format("torch", columns=["x"])


def split_by_node(dataset: Any) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, shoal.rank(), 2)


def unequal(kind: str) -> shoal.ElasticDataLoader:
    """Returns a loader that differs between ranks in the way named by `kind`."""
    drawn = random.Random(shoal.rank())
    labels = torch.randint(10, (SAMPLES,), generator=torch.Generator().manual_seed(shoal.rank()))
    made: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
        "a generator out of sight": lambda: (
            Numbers(),
            {"sampler": Drawn(permuted, drawn, held=False)},
        ),
        "the rank": lambda: (Numbers(), {"sampler": range(shoal.rank(), SAMPLES, 2)}),
        "another split": lambda: (
            random_split(Numbers(), [100, 60], torch.Generator().manual_seed(shoal.rank()))[0],
            {},
        ),
        "other labels": lambda: (TensorDataset(EVERY_NUMBER.float(), labels), {}),
        "another length": lambda: (Subset(Numbers(), range(SAMPLES - shoal.rank())), {}),
        "another seed": lambda: (Numbers(), {"seed": shoal.rank()}),
        "rows split by node": lambda: (split_by_node(rows(2 * SAMPLES)), {}),
        "rows of other texts": lambda: (rows(SAMPLES, text=f"{shoal.rank()}</s>"), {}),
        "rows in another order": lambda: (rows(SAMPLES).shuffle(seed=shoal.rank()), {}),
    }
    dataset, options = made[kind]()
    return shoal.ElasticDataLoader(dataset, global_batch_size=16, **options)


DIFFERENCES = {
    "a generator out of sight": "the sampler's indices",
    "the rank": "the sampler's indices",
    "another split": "pass a generator with the same seed on every rank to random_split",
    "other labels": "the dataset's samples",
    "another length": "length of the dataset: rank 0 has 160, rank 1 has 159",
    "another seed": "seed: rank 0 has 0, rank 1 has 1",
    "rows split by node": "the dataset's samples",
    "rows of other texts": "the dataset's samples",
    "rows in another order": "the dataset's samples",
}


@pytest.mark.parametrize(("kind", "named"), DIFFERENCES.items())
def test_ranks_that_deal_differently_are_stopped_in_the_first_step_with_the_difference_named(
    kind: str, named: str
) -> None:
    steps: list[int] = []

    def rank() -> None:
        shoal.init()
        loader = unequal(kind)
        try:
            train(lambda: loader)
        finally:
            steps.append(loader.global_step)

    with pytest.raises(shoal.PreconditionError, match=re.escape(named)) as failure:
        shoal.launch(rank, world_size=2)
    assert failure.value.reason == "RANKS_DIVERGED"
    assert steps == [0, 0]


def test_sampler_that_draws_differently_in_a_later_epoch_is_found_in_its_first_step() -> None:
    steps: list[int] = []

    def rank() -> None:
        shoal.init()
        epochs = itertools.count()
        by_hand = Drawn(
            lambda _: (
                list(range(SAMPLES))
                if next(epochs) == 0 or shoal.rank() == 0
                else list(reversed(range(SAMPLES)))
            )
        )
        loader = shoal.ElasticDataLoader(Numbers(), global_batch_size=16, sampler=by_hand)
        try:
            train(lambda: loader)
        finally:
            steps.append(loader.global_step)

    with pytest.raises(shoal.PreconditionError, match="step 0 of epoch 1 of loader 'loader'"):
        shoal.launch(rank, world_size=2)
    assert steps == [10, 10]


def test_dataset_with_machine_dependent_rounding_counts_as_the_same() -> None:
    features = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(0))

    def rank() -> None:
        shoal.init()
        train(
            lambda: shoal.ElasticDataLoader(
                TensorDataset(features * (1 + 1e-7 * shoal.rank())), global_batch_size=16
            ),
            epochs=1,
        )

    shoal.launch(rank, world_size=2)


def test_rows_may_differ_in_folders_and_in_the_last_digits_of_floating_point_numbers() -> None:
    def rank() -> None:
        shoal.init()
        train(
            lambda: shoal.ElasticDataLoader(
                rows(SAMPLES, folder=f"/machine-{shoal.rank()}", error=1e-7 * shoal.rank()),
                global_batch_size=16,
            ),
            epochs=1,
        )

    shoal.launch(rank, world_size=2)


@pytest.mark.parametrize("content", [{}, {"Dataset": Dataset}])
def test_a_module_of_the_project_may_be_called_datasets(
    content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("datasets")
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.delitem(sys.modules, "datasets.arrow_dataset", raising=False)
    assert len(shoal.ElasticDataLoader(Numbers(), global_batch_size=16)) == SAMPLES // 16


def unequal_evaluation(kind: str) -> Any:
    """Returns an evaluation loader that differs between ranks in the way named by `kind`."""
    split = random_split(Numbers(), [100, 60], torch.Generator().manual_seed(shoal.rank()))[1]
    made: dict[str, Callable[[], Any]] = {
        "another split": lambda: shoal.ElasticDataLoader(split, global_batch_size=16, train=False),
        "another split in torch's loader": lambda: torch.utils.data.DataLoader(
            split, batch_size=16
        ),
        "other sizes": lambda: shoal.ElasticDataLoader(
            Numbers(), global_batch_size=16 + shoal.rank(), train=False
        ),
        "another number of batches": lambda: [torch.zeros(1)] * (3 + shoal.rank()),
        "another order in torch's loader": lambda: torch.utils.data.DataLoader(
            Numbers(), batch_size=16, sampler=range(SAMPLES)[:: 1 - 2 * shoal.rank()]
        ),
        "another draw": lambda: shoal.ElasticDataLoader(
            Numbers(),
            global_batch_size=16,
            train=False,
            sampler=Drawn(permuted, random.Random(shoal.rank()), held=False),
        ),
    }
    return made[kind]()


UNEQUAL_EVALUATIONS = {
    "another split": "pass a generator with the same seed on every rank to random_split",
    "another split in torch's loader": "the dataset's samples",
    "other sizes": "batch size: rank 0 has 16, rank 1 has 17",
    "another number of batches": "number of batches: rank 0 has 3, rank 1 has 4",
    "another order in torch's loader": "the sampler's indices",
    "another draw": "the sampler's indices",
}


@pytest.mark.parametrize(("kind", "named"), UNEQUAL_EVALUATIONS.items())
def test_ranks_that_would_evaluate_different_batches_are_reported_with_the_difference_named(
    kind: str, named: str
) -> None:
    """Ranks whose evaluation loaders differ raise an error that names the difference. Otherwise
    some samples would count twice and others never."""

    def rank() -> None:
        shoal.init()
        model = shoal.as_distributed(nn.Linear(1, 1))
        shoal.evaluate(model, unequal_evaluation(kind), lambda net, batch: {"samples": len(batch)})

    with pytest.raises(
        shoal.PreconditionError, match="they evaluate different batches .*" + re.escape(named)
    ) as failure:
        shoal.launch(rank, world_size=2)
    assert failure.value.reason == "RANKS_DIVERGED"


@pytest.mark.parametrize(
    "sampler",
    [
        torch.utils.data.SubsetRandomSampler(range(SAMPLES)),
        torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES),
    ],
)
def test_torch_loader_with_a_random_sampler_is_refused_for_an_evaluation(sampler: Any) -> None:
    def rank() -> None:
        model = shoal.as_distributed(nn.Linear(1, 1))
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=16, sampler=sampler)
        shoal.evaluate(model, loader, lambda net, batch: {"samples": len(batch)})

    with pytest.raises(
        shoal.ConfigurationError, match=f"draws its samples with {type(sampler).__name__}"
    ):
        shoal.launch(rank, world_size=1)


class Shuffled(torch.utils.data.Sampler[int]):
    """A user's sampler that draws from the global generator."""

    def __init__(self) -> None:
        super().__init__()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


@pytest.mark.parametrize("sampler", [torch.utils.data.RandomSampler(range(SAMPLES)), Shuffled()])
def test_torch_loader_with_a_random_batch_sampler_is_refused_for_an_evaluation(
    sampler: Any,
) -> None:
    def rank() -> None:
        model = shoal.as_distributed(nn.Linear(1, 1))
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_sampler=torch.utils.data.BatchSampler(sampler, 16, drop_last=False)
        )
        shoal.evaluate(model, loader, lambda net, batch: {"samples": len(batch)})

    with pytest.raises(
        shoal.ConfigurationError, match=f"draws its samples with {type(sampler).__name__}"
    ):
        shoal.launch(rank, world_size=1)


class MoreThanItSays:
    """A loader that yields a short last batch which its length does not include."""

    def __len__(self) -> int:
        return SAMPLES // 48

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(EVERY_NUMBER.split(48))


def test_loader_with_more_batches_than_its_length_is_refused_for_an_evaluation() -> None:
    def rank() -> None:
        model = shoal.as_distributed(nn.Linear(1, 1))
        shoal.evaluate(model, MoreThanItSays(), lambda net, batch: {"samples": len(batch)})

    with pytest.raises(
        shoal.ConfigurationError,
        match="MoreThanItSays reports a length of 3 batches but yields more",
    ):
        shoal.launch(rank, world_size=2)
