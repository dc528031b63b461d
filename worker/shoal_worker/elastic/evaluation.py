"""Evaluates a model on all ranks together, each batch once, also when a rank dies on the way.

Every rank keeps the sums of the batches it computed. When the membership changes, the batches that died with a rank are dealt again; the
others are not computed twice. The totals are added up in the order of the batches, so they do not depend on the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.utils.data import DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from shoal_worker.elastic.apart import evaluations_apart
from shoal_worker.elastic.modes import evaluating
from shoal_worker.state.dataset_digest import SAMPLES, identity_of

if TYPE_CHECKING:
    from shoal_worker.elastic.group import Channel
    from shoal_worker.elastic.session import Session

Sums = dict[str, float]


class Batches(Protocol):
    """Batches by number."""

    @property
    def dealing(self) -> str:
        """What the batches follow from, as a JSON object: the same on all ranks."""
        ...

    def __len__(self) -> int: ...
    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """The batches of these numbers, ascending."""
        ...


class IteratedBatches:
    """The batches of any iterable with a length, such as a torch DataLoader: read past those that are not wanted."""

    def __init__(self, loader: Any) -> None:
        if not hasattr(loader, "__len__"):
            raise ConfigurationError(
                f"evaluate: {type(loader).__name__} has no length, so its batches cannot be dealt to ranks; "
                "use ElasticDataLoader(train=False)"
            )
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)):
            raise ConfigurationError(
                f"evaluate: the loader draws its samples with {type(sampler).__name__}, so each rank has other batches, and some samples "
                "would count twice, others never; make it with shuffle=False and without a sampler, or use ElasticDataLoader(train=False)"
            )
        self._loader = loader
        dataset = getattr(loader, "dataset", None)
        known = identity_of(dataset) if hasattr(dataset, "__len__") else None
        self.dealing = json.dumps({"number of batches": len(loader), SAMPLES: known})

    def __len__(self) -> int:
        return len(self._loader)

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """See `Batches`."""
        wanted = set(numbers)
        for number, batch in enumerate(self._loader):
            if number in wanted:
                yield number, batch
                wanted.discard(number)
                if not wanted:
                    return


def evaluate(session: Session, model: nn.Module, batches: Batches, fn: Callable[[nn.Module, Any], Mapping[str, Any]]) -> Sums:
    """Sums what `fn(model, batch)` gives over all `batches`. The model is in evaluation mode meanwhile, without gradients.

    In a joiner that still replays its script only the first batch is computed: nobody uses the answer.
    """
    results: dict[int, Sums] = {}

    def compute(numbers: Iterable[int]) -> None:
        for number, batch in batches.read(numbers):
            results[number] = _sums(fn(model, batch))
            session.progress.entered()

    def body(channel: Channel) -> Sums:
        everyones_own = [json.loads(told) for told in channel.exchange(json.dumps([batches.dealing, sorted(results)]).encode())]
        dealings = [dealing for dealing, _ in everyones_own]
        if len(set(dealings)) > 1:
            raise evaluations_apart(dealings)
        held = {n for _, numbers in everyones_own for n in numbers}
        missing = [n for n in range(len(batches)) if n not in held]
        with session.whole_for(channel):
            compute(missing[channel.rank :: channel.world_size])
        everyones: dict[int, Sums] = {}
        for told in channel.exchange(json.dumps(list(results.items())).encode()):
            everyones.update((number, sums) for number, sums in json.loads(told))
        return _total(everyones[n] for n in sorted(everyones))

    with evaluating(model), torch.no_grad():
        if session.is_joining:
            compute(range(min(1, len(batches))))
            return _total(results.values())
        total: Sums = session.operation("evaluate", body)
        return total


def _sums(told: Any) -> Sums:
    try:
        return {name: float(value) for name, value in told.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f'evaluate: fn returned {told!r}; expected a dict of sums over the batch, such as {{"correct": 12, "samples": 32}}'
        ) from error


def _total(all_sums: Iterable[Sums]) -> Sums:
    total: Sums = {}
    for sums in all_sums:
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value
    return total
