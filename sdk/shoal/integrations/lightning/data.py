"""Converts a Lightning Trainer's loaders to Shoal's loaders, which distribute the batches of each
step across the current ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from shoal_common.errors import ConfigurationError
from shoal_worker.data.loader import ElasticDataLoader, EvaluationBatches
from shoal_worker.data.torch_loaders import fetching_of, order_of
from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler, Subset

_INSTEAD = "pass a torch DataLoader over a dataset with a length, or a shoal.ElasticDataLoader"


def training_loader(
    given: Any,
    *,
    accumulated: int,
    seed: int,
    deterministic: bool,
    limit: float = 1.0,
    in_order: bool = False,
) -> ElasticDataLoader:
    """Returns the loader of the training steps. Each step consists of `accumulated` batches of the
    given DataLoader and is computed by all ranks together.

    Args:
        given: the Trainer's loader or loaders.
        accumulated: the Trainer's `accumulate_grad_batches`.
        seed: seed for the order of samples.
        deterministic: True if sums must be the same on any number of ranks.
        limit: number (int) or fraction (float) of the dataset's batches to use in each epoch: the
            Trainer's `limit_train_batches`.
        in_order: True to keep the dataset's order, as with `overfit_batches`.

    Raises:
        ConfigurationError: the loader's samples cannot be distributed in this way.
    """
    loader = _alone(given, "train_dataloader")
    if isinstance(loader, ElasticDataLoader):
        if accumulated != 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={accumulated} is not supported with a "
                "shoal.ElasticDataLoader, whose global_batch_size already is the number of "
                "samples per step; omit accumulate_grad_batches, or split the step with the "
                "loader's micro_batch_size="
            )
        _refuse_limit(limit, "limit_train_batches", "train_dataloader")
        return loader
    order = order_of(loader, "train_dataloader")
    if in_order:
        order = {"shuffle": False}
    batch_size = loader.batch_sampler.batch_size
    batches = _limited(loader, limit, "limit_train_batches")
    if batches is not None:
        order = {
            "sampler": FirstSamples(
                SequentialSampler(loader.dataset) if in_order else loader.batch_sampler.sampler,
                batches * batch_size,
            )
        }
    if deterministic and accumulated == 1:
        raise ConfigurationError(
            "ShoalStrategy(deterministic=True) is not supported with "
            "accumulate_grad_batches=1, because a batch is then split by the number of "
            "workers, on which the last digits of the result depend; use smaller batches and "
            "accumulate them, as in DataLoader(batch_size=8) with accumulate_grad_batches=4"
        )
    return ElasticDataLoader(
        loader.dataset,
        global_batch_size=batch_size * accumulated,
        micro_batch_size=batch_size if accumulated > 1 else None,
        seed=seed,
        # all further batches are complete, except possibly the last one
        drop_last=loader.batch_sampler.drop_last and batches is None,
        name="lightning",
        **order,
        **fetching_of(loader),
    )


class FirstSamples(Sampler[int]):
    """Sampler that yields the first `count` samples of another sampler in each epoch."""

    def __init__(self, sampler: Any, count: int) -> None:
        """`sampler`: sampler with a length. `count`: number of samples."""
        self.sampler = sampler
        self._count = count

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to a sampler that supports it."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.sampler, self._count)

    def __len__(self) -> int:
        length: int = len(self.sampler)
        return min(self._count, length)


def evaluation_loaders(
    given: Any, what: str, *, limit: float = 1.0, in_order: bool = False
) -> list[ElasticDataLoader]:
    """Returns the loaders of an evaluation. Each batch is computed on one rank.

    Args:
        given: one loader, or several loaders to be evaluated one after another.
        what: name of the loaders, used in errors.
        limit: number (int) or fraction (float) of each loader's batches to use: the Trainer's
            `limit_val_batches` and similar.
        in_order: True to make shuffling loaders use the dataset's order, as with `overfit_batches`.

    Raises:
        ConfigurationError: the loaders' samples cannot be distributed in this way.
    """
    if isinstance(given, CombinedLoader):
        if given._mode != "sequential":
            raise ConfigurationError(
                f"{what}: a CombinedLoader has mode {given._mode!r}; expected 'sequential', or a "
                "list of loaders"
            )
        given = given.iterables
    if isinstance(given, (list, tuple)):
        return [_evaluation_loader(one, what, limit, in_order=in_order) for one in given]
    return [_evaluation_loader(given, what, limit, in_order=in_order)]


def samples_in(loader: ElasticDataLoader) -> int:
    """Returns the number of samples in each batch of an evaluation loader. The last batch may be
    smaller."""
    batches = loader.evaluation_batches()
    return batches.samples(0) if isinstance(batches, EvaluationBatches) and len(batches) else 0


def _evaluation_loader(given: Any, what: str, limit: float, *, in_order: bool) -> ElasticDataLoader:
    loader, argument = _alone(given, what), f"limit_{what.removesuffix('_dataloaders')}_batches"
    if isinstance(loader, ElasticDataLoader):
        _refuse_limit(limit, argument, what)
        return loader
    order = order_of(loader, what)
    if (order != {"shuffle": False} and not in_order) or loader.batch_sampler.drop_last:
        raise ConfigurationError(
            f"{what}: the DataLoader shuffles, uses a sampler or drops its last batch, so an "
            "evaluation would not cover the whole dataset, or would differ each time; create it "
            "with shuffle=False, without a sampler and without drop_last"
        )
    dataset, batches = loader.dataset, _limited(loader, limit, argument)
    batch_size = loader.batch_sampler.batch_size
    if batches is not None:
        dataset = Subset(dataset, range(min(batches * batch_size, len(dataset))))
    return ElasticDataLoader(
        dataset, global_batch_size=batch_size, train=False, **fetching_of(loader)
    )


def _limited(loader: DataLoader[Any], limit: float, argument: str) -> int | None:
    """Returns the number of batches to use; None: all batches. Raises ConfigurationError if the
    limit does not allow any batch."""
    full = len(loader)
    batches = min(full, limit) if isinstance(limit, int) else int(full * limit)
    if batches == 0 and full > 0:
        raise ConfigurationError(
            f"{argument}={limit} of {full} batches is less than one batch; use at least "
            f"{1 / full:.3g}, or a number of batches (an int)"
        )
    return None if batches == full else batches


def _refuse_limit(limit: float, argument: str, what: str) -> None:
    if type(limit) is not float or limit != 1.0:
        raise ConfigurationError(
            f"{argument}={limit} is not supported with a shoal.ElasticDataLoader as {what}; pass a "
            "torch DataLoader, or give the loader a smaller dataset (torch.utils.data.Subset)"
        )


def _alone(given: Any, what: str) -> Any:
    """Returns the single loader in `given`. Raises ConfigurationError for several loaders and for
    other objects."""
    while isinstance(given, CombinedLoader) or (isinstance(given, Sequence) and len(given) == 1):
        given = given.iterables if isinstance(given, CombinedLoader) else given[0]
    if isinstance(given, (Sequence, dict)):
        raise ConfigurationError(
            f"{what}: found {len(given)} loaders, but only one is supported; {_INSTEAD}, and "
            "combine several datasets with torch.utils.data.StackDataset"
        )
    if not isinstance(given, (DataLoader, ElasticDataLoader)):
        raise ConfigurationError(
            f"{what}: found a {type(given).__name__} instead of a loader; {_INSTEAD}"
        )
    if isinstance(given.dataset, IterableDataset) or not hasattr(given.dataset, "__len__"):
        raise ConfigurationError(
            f"{what}: its dataset, a {type(given.dataset).__name__}, has no length, but "
            f"Lightning's epochs need one; {_INSTEAD}, or write your own loop "
            "(docs/migration/trainers.md)"
        )
    return given
